//! Tests that a device's notices reach the listener of the run, once.
#![allow(clippy::unwrap_used)]

use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_cpu::Cpu;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, BufferDesc, Executable};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The CPU with a simulated library failure in the first plan.
struct Failing {
    cpu: Cpu,
    planned: AtomicU32,
}

impl Backend for Failing {
    fn name(&self) -> &str {
        self.cpu.name()
    }

    fn describe(&self) -> String {
        self.cpu.describe()
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.cpu.has_kernel(node)
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        self.cpu.alloc(desc)
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        self.cpu.upload(desc, bytes)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.cpu.download(buffer)
    }

    fn take_notices(&self) -> Vec<String> {
        let n = self.planned.fetch_add(1, Ordering::Relaxed);
        (n == 0).then(|| "cuDNN is left out: status 1001".to_string()).into_iter().collect()
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.cpu.compile(program)
    }
}

#[test]
fn device_reports_are_delivered_once() {
    let backend = Arc::new(Failing { cpu: Cpu::new(Some(1)), planned: AtomicU32::new(0) });
    let options = RuntimeOptions {
        backend,
        params: Vec::new(),
        policy: perilune_tests::scripts::policy(&[]),
        strict: true,
        print: Rc::new(|_| ()),
    };
    let runtime = Runtime::new(options).unwrap();
    let heard = Rc::new(RefCell::new(Vec::new()));
    let seen = heard.clone();
    let listen = Rc::new(move |text: &str| seen.borrow_mut().push(text.to_string()));
    runtime.host().engine.borrow_mut().diagnostics.notices.listen(Some(listen));
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("notices.lua");
    std::fs::write(&path, "local pl = require 'perilune'\nfor n = 1, 3 do print(pl.ones({ n }):sum():item()) end\n")
        .unwrap();
    runtime.load(&path).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(*heard.borrow(), ["cuDNN is left out: status 1001"]);
}
