//! Training steps of the recipes at the sizes that people train, without a GPU: each is recorded and planned on a device that
//! runs nothing, its memory stays near the bound, and (with NVRTC) every kernel compiles for each kind of GPU without a
//! spilled register. Small plans and single patterns say nothing of that: which kernel a row gets depends on its width.
#![allow(clippy::unwrap_used)]

use perilune_core::Layout;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_cuda::library::pool;
use perilune_cuda::{Paper, attention, conv};
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, Executable, Null};
use perilune_tests::machine;
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Plans as a GPU does, keeps what it plans, and computes nothing: whatever is read is 0.
#[derive(Default)]
struct Plans {
    gpu: Paper,
    made: RefCell<Vec<Arc<Program>>>,
}

impl Backend for Plans {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn describe(&self) -> String {
        self.gpu.describe()
    }

    fn keeps(&self, node: &Node) -> bool {
        self.gpu.keeps(node) || conv::keeps(node)
    }

    fn writes(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        [attention::writes, conv::writes, pool::writes].iter().any(|writes| writes(node, output, layout))
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
        self.made.borrow_mut().push(program.clone());
        Null.compile(program)
    }
}

/// What three steps of a recipe in bf16 plan.
fn plans(file: &str, params: &[(&str, &str)]) -> Vec<Arc<Program>> {
    let backend = Rc::new(Plans::default());
    let options = RuntimeOptions {
        backend: backend.clone(),
        params: params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        strict: true,
        print: Rc::new(|_| ()),
    };
    let runtime = Runtime::new(options).unwrap();
    let Ok(Loaded::Recipe(recipe)) = runtime.load(&Path::new("../recipes").join(file)) else { panic!("{file}") };
    let run = recipe.start(None, Some("bf16"), None).unwrap_or_else(|e| panic!("{e}"));
    for _ in 0..3 {
        run.step().unwrap_or_else(|e| panic!("{e}"));
    }
    backend.made.take()
}

fn check(name: &str, file: &str, params: &[(&str, &str)]) {
    let plans = plans(file, params);
    let largest = plans.iter().map(|p| p.kernels.len()).max().unwrap();
    assert!(largest > 100, "{name}: {largest} kernels");
    for p in plans {
        let (arena, live) = (p.arena_bytes, p.live_bytes);
        println!(
            "{name}: {} kernels, arena {:.3} GiB, {:.2} % above what lives",
            p.kernels.len(),
            arena as f64 / f64::from(1 << 30),
            (arena as f64 / live.max(1) as f64 - 1.0) * 100.0
        );
        assert!(arena <= live + live / 20, "{name}: an arena of {arena} bytes for {live}");
        let start = std::time::Instant::now();
        if std::env::var("DRY").is_err() {
            machine::compiles(name, &p)
        };
        println!("  compiled in {:.1} s", start.elapsed().as_secs_f64());
    }
}

#[test]
fn gpt2() {
    for (size, batch) in [("124M", "4"), ("124M", "32"), ("350M", "32"), ("774M", "16"), ("1558M", "8")] {
        check(&format!("gpt2 {size} x {batch}"), "gpt2.lua", &[("size", size), ("batch", batch)]);
    }
    check("gpt2 in documents", "gpt2.lua", &[("size", "124M"), ("batch", "32"), ("ends", "50256")]);
}

#[test]
fn llama() {
    check("llama 1B", "llama.lua", &[("batch", "4")]);
}

#[test]
fn resnet50() {
    check("resnet50", "resnet50.lua", &[("batch", "256")]);
}
