//! Plans training steps of the recipes at realistic sizes without a GPU. Each is recorded and planned on a device that
//! runs nothing, its memory stays near the bound, and (with NVRTC) every kernel compiles for each kind of GPU without a
//! spilled register. Small plans do not cover this, because the kernel of a row depends on its width.
#![allow(clippy::unwrap_used)]

use perilune_core::Layout;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_cuda::launch::Props;
use perilune_cuda::library::pool;
use perilune_cuda::{OfflineTarget, STAGED_BYTES, attention, conv, offline_target};
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::memory::Offsets;
use perilune_plan::{Backend, Buffer, BufferDesc, DeviceBuffer, Executable, Failure, Null, RunContext};
use perilune_tests::machine;
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

/// A device that plans and allocates addresses like a GPU, stores its plans, and computes nothing: all reads return 0.
#[derive(Default)]
struct Plans {
    gpu: OfflineTarget,
    made: Mutex<Vec<Arc<Program>>>,
    heap: Arc<Mutex<Offsets>>,
    runs: Arc<Mutex<Runs>>,
}

/// By the address of each program, the addresses of the large operands that it ran over.
type Runs = HashMap<usize, Vec<Vec<usize>>>;

#[derive(Debug)]
struct Place {
    heap: Arc<Mutex<Offsets>>,
    at: usize,
    room: usize,
    desc: BufferDesc,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.heap.lock().unwrap().give(self.at, self.room);
    }
}

impl DeviceBuffer for Place {
    fn desc(&self) -> &BufferDesc {
        &self.desc
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Noted {
    program: Arc<Program>,
    runs: Arc<Mutex<Runs>>,
}

impl Executable for Noted {
    fn run(
        &self,
        inputs: &[Buffer],
        _: &[u64],
        outputs: &[Buffer],
        _: RunContext<'_>,
    ) -> std::result::Result<(), Failure> {
        let at = |b: &Buffer| b.as_any().downcast_ref::<Place>().unwrap().at;
        let large = |b: &&Buffer| b.nbytes() > STAGED_BYTES;
        let places = inputs.iter().chain(outputs).filter(large).map(at).collect();
        self.runs.lock().unwrap().entry(Arc::as_ptr(&self.program) as usize).or_default().push(places);
        Ok(())
    }
}

impl Backend for Plans {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn describe(&self) -> String {
        self.gpu.describe()
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.gpu.has_kernel(node) || conv::has_kernel(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        [attention::can_store_layout, conv::can_store_layout, pool::can_store_layout]
            .iter()
            .any(|writes| writes(node, output, layout))
    }

    fn row_bytes(&self) -> Option<usize> {
        self.gpu.row_bytes()
    }

    fn fills_rows(&self) -> bool {
        self.gpu.fills_rows()
    }

    fn defers_index_faults(&self) -> bool {
        self.gpu.defers_index_faults()
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        let room = desc.nbytes().max(1).next_multiple_of(512);
        let at = self.heap.lock().unwrap().take(room);
        Ok(Arc::new(Place { heap: self.heap.clone(), at, room, desc: *desc }))
    }

    fn upload(&self, desc: &BufferDesc, _: &[u8]) -> Result<Buffer> {
        self.alloc(desc)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Null.download(buffer)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.made.lock().unwrap().push(program.clone());
        Null.compile(program.clone())?;
        Ok(Box::new(Noted { program, runs: self.runs.clone() }))
    }
}

impl Plans {
    /// The programs made since the last call.
    fn take(&self) -> Vec<Arc<Program>> {
        std::mem::take(&mut *self.made.lock().unwrap())
    }
}

/// Steps of a recipe, the numbers of each read one step later.
fn train(backend: &Arc<Plans>, file: &str, precision: &str, params: &[(&str, &str)], steps: usize) {
    let options = RuntimeOptions {
        backend: backend.clone(),
        params: params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        policy: perilune_tests::scripts::policy(&[]),
        strict: true,
        print: Rc::new(|_| ()),
    };
    let runtime = Runtime::new(options).unwrap();
    let Ok(Loaded::Recipe(recipe)) = runtime.load(&Path::new("../recipes").join(file)) else { panic!("{file}") };
    let run = recipe.start(None, Some(precision), None).unwrap_or_else(|e| panic!("{e}"));
    let mut before = None;
    for _ in 0..steps {
        let now = run.step().unwrap_or_else(|e| panic!("{e}"));
        before.replace(now).map(|r| run.read(&r).unwrap());
    }
}

/// Returns the plans of three steps of a recipe in bf16.
fn plans(file: &str, params: &[(&str, &str)]) -> Vec<Arc<Program>> {
    let backend = Arc::new(Plans::default());
    train(&backend, file, "bf16", params, 3);
    backend.take()
}

/// A graph contains the addresses of its large operands, and 64 graphs of a program are kept: large batches and results must
/// reuse earlier addresses.
#[test]
fn addresses_come_back() {
    let small = [("size", "tiny"), ("vocab", "512"), ("context", "64"), ("batch", "4")];
    // Batches of 19 MB.
    let images = [("size", "tiny"), ("classes", "10"), ("pixels", "224"), ("batch", "32")];
    let large = [("size", "124M"), ("batch", "4")];
    // Handles that Lua has not collected yet keep addresses in use.
    for (file, params) in [
        ("digits.lua", &[][..]),
        ("gpt2.lua", &large[..]),
        ("gpt2.lua", &small),
        ("llama.lua", &small),
        ("resnet50.lua", &images),
    ] {
        let backend = Arc::new(Plans::default());
        train(&backend, file, "bf16", params, 300);
        let runs = backend.runs.lock().unwrap();
        let most = runs.values().max_by_key(|r| r.len()).unwrap();
        assert!(most.len() >= 50, "{file}");
        let kinds: BTreeSet<&Vec<usize>> = most[most.len() - 200..].iter().collect();
        println!("{file}: {} runs, {} sets of addresses in the last 200", most.len(), kinds.len());
        assert!(kinds.len() <= 64, "{file}: {} sets of addresses in 200 steps", kinds.len());
    }
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
        machine::compiles(name, &p);
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

/// The amax histories of fp8 add little compile time: their kernels are short, and as many for 12 layers as for
/// 48. Few kinds of products are searched in cuBLASLt.
#[test]
fn gpt2_in_fp8_compiles_short_texts_and_few_kinds_of_products() {
    let backend = Arc::new(Plans::default());
    train(&backend, "gpt2.lua", "fp8", &[("size", "124M"), ("batch", "4")], 3);
    let (mut texts, mut products) = (BTreeSet::new(), BTreeSet::new());
    for p in backend.take() {
        for k in 0..p.kernels.len() {
            let (product, works) = offline_target::work(&p, k, &Props::H200).unwrap();
            products.extend(product);
            texts.extend(works.iter().flat_map(|w| &w.launches).map(|l| l.function.text.clone()));
        }
    }
    let longest = texts.iter().map(String::len).max().unwrap();
    assert!(longest < 20_000, "a text of {longest} bytes");
    assert!(texts.len() < 130, "{} texts", texts.len());
    assert!((10..=16).contains(&products.len()), "{products:?}");
}

/// A vocabulary that is not a multiple of 8 costs only a copy of the weight.
#[test]
fn gpt2_of_an_odd_vocabulary() {
    let of = |vocab: &str| {
        let params = [("size", "124M"), ("batch", "32"), ("vocab", vocab)];
        plans("gpt2.lua", &params).into_iter().max_by_key(|p| p.kernels.len()).unwrap()
    };
    let (odd, even) = (of("50257"), of("50304"));
    let names = |p: &Program| p.kernels.iter().map(perilune_plan::show::name).collect::<Vec<_>>();
    let added: Vec<String> = names(&odd).into_iter().filter(|n| !names(&even).contains(n)).collect();
    assert_eq!(added, ["strided_pad"]);
    assert!(odd.arena_bytes < even.arena_bytes + (96 << 20), "{} bytes, {}", odd.arena_bytes, even.arena_bytes);
    machine::compiles("gpt2 of 50,257 tokens", &odd);
}

#[test]
fn llama() {
    check("llama 1B", "llama.lua", &[("batch", "4")]);
}

#[test]
fn resnet50() {
    check("resnet50", "resnet50.lua", &[("batch", "256")]);
}
