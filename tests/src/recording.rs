//! Records the programs of a run on a device that plans like another one and runs nothing.

use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_core::{Layout, Mesh};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, BufferDesc, Executable, Null};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Plans like `planner`; all memory reads as zeros.
pub struct Recording {
    planner: Box<dyn Backend>,
    programs: Mutex<Vec<Arc<Program>>>,
    prepared: Mutex<Vec<Program>>,
}

impl Recording {
    pub fn new(planner: Box<dyn Backend>) -> Arc<Recording> {
        Arc::new(Recording { planner, programs: Mutex::default(), prepared: Mutex::default() })
    }

    /// The programs prepared since the last call, in order.
    pub fn take_prepared(&self) -> Vec<Program> {
        std::mem::take(&mut *self.prepared.lock().unwrap())
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

    fn defers_index_faults(&self) -> bool {
        self.planner.defers_index_faults()
    }

    fn mesh(&self) -> Mesh {
        self.planner.mesh()
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Null.alloc(desc)
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        Null.upload(desc, bytes)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Null.download(buffer)
    }

    fn prepare(&self, programs: &[Program]) -> Result<Option<JoinHandle<()>>> {
        self.prepared.lock().unwrap().extend_from_slice(programs);
        Ok(None)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.programs.lock().unwrap().push(program.clone());
        Null.compile(program)
    }
}
