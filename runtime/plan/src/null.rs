//! Implements the null device, which plans and checks programs but does not run them, for planner tests without
//! hardware.

use crate::backend::{Backend, Buffer, DeviceBuffer, Executable, Failure, RunContext};
use crate::buffer_desc::BufferDesc;
use crate::check::check;
use crate::ir::Program;
use perilune_core::Layout;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use std::any::Any;
use std::sync::Arc;

/// A device without kernels: every fused op is decomposed.
#[derive(Debug, Default)]
pub struct Null;

#[derive(Debug)]
struct NullBuffer(BufferDesc);

impl DeviceBuffer for NullBuffer {
    fn desc(&self) -> &BufferDesc {
        &self.0
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The null device with kernels for some fused ops, as a GPU has them.
#[derive(Clone, Copy, Debug)]
pub struct NullWith {
    pub has_kernel: fn(&Node) -> bool,
    pub can_store_layout: fn(&Node, usize, &Layout) -> bool,
}

struct NullProgram;

impl Executable for NullProgram {
    fn run(&self, _: &[Buffer], _: &[u64], _: &[Buffer], _: RunContext<'_>) -> std::result::Result<(), Failure> {
        Ok(())
    }
}

impl Backend for Null {
    fn name(&self) -> &str {
        "null"
    }

    fn describe(&self) -> String {
        "null (plans, runs nothing)".into()
    }

    fn has_kernel(&self, _: &Node) -> bool {
        false
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Ok(Arc::new(NullBuffer(*desc)))
    }

    fn upload(&self, desc: &BufferDesc, _: &[u8]) -> Result<Buffer> {
        self.alloc(desc)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(vec![0; buffer.nbytes()])
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        Ok(Box::new(NullProgram))
    }
}

impl Backend for NullWith {
    fn name(&self) -> &str {
        Null.name()
    }

    fn describe(&self) -> String {
        Null.describe()
    }

    fn has_kernel(&self, node: &Node) -> bool {
        (self.has_kernel)(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        (self.can_store_layout)(node, output, layout)
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

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        Null.compile(program)
    }
}
