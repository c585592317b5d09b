//! Records the programs of a run on a device that plans like another one and runs nothing.

use perilune_core::Layout;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, Executable, Null};
use std::sync::{Arc, Mutex};

/// Plans like `planner`; all memory reads as zeros.
pub struct Recording {
    planner: Box<dyn Backend>,
    programs: Mutex<Vec<Arc<Program>>>,
}

impl Recording {
    pub fn new(planner: Box<dyn Backend>) -> Arc<Recording> {
        Arc::new(Recording { planner, programs: Mutex::default() })
    }

    /// The programs compiled since the last call, in order.
    pub fn take(&self) -> Vec<Arc<Program>> {
        std::mem::take(&mut *self.programs.lock().unwrap())
    }
}

impl Backend for Recording {
    fn name(&self) -> &str {
        self.planner.name()
    }

    fn describe(&self) -> String {
        self.planner.describe()
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.planner.has_kernel(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        self.planner.can_store_layout(node, output, layout)
    }

    fn row_bytes(&self) -> Option<usize> {
        self.planner.row_bytes()
    }

    fn fills_rows(&self) -> bool {
        self.planner.fills_rows()
    }

    fn alloc(&self, nbytes: usize) -> Result<Buffer> {
        Null.alloc(nbytes)
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        Null.upload(bytes)
    }

    fn download(&self, buffer: &Buffer, nbytes: usize) -> Result<Vec<u8>> {
        Null.download(buffer, nbytes)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        Null.write(buffer, bytes)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.programs.lock().unwrap().push(program.clone());
        Null.compile(program)
    }
}
