//! Pins the compiled kernels of recipes and typical steps: the PTX for three GPUs, the opcodes of every CPU program.
//!
//! A refactoring commit changes none of these files. A commit that must change one says in its message which, and why.
//!
//! A line of `golden/programs/NAME.txt` is `targets kind count hash`. Equal kernels are counted, and targets for which a line
//! is the same share it, so a file stays small.
//!
//! - `sm_90 plan`: the planned program as it is: kernels in order, layouts, memory. Compared without NVRTC too.
//! - `sm_90 KIND`: the launches of a kernel: PTX with symbols numbered (`perilune_tests::ptx`), grid, block, shared memory
//!   and arguments. Products of cuBLASLt and convolutions of cuDNN are identified by their operands. Needs NVRTC of the version
//!   that the first line names.
//! - `avx512 KIND`: a compiled kernel of the CPU (`perilune_cpu::fingerprint`), for each instruction set on any x86-64.
//!
//! KIND is the op of a library call or the kind of kernel, for readers of a difference: renaming an internal op changes
//! this word and no hash. `PERILUNE_BLESS=1` rewrites the files; it needs NVRTC.
//!
//! `golden/compiled/programs.txt` has the hashes of the PTX (`perilune_tests::known`).
#![allow(clippy::unwrap_used)]

use perilune_core::{DType, ops};
use perilune_cpu::fingerprint::Words;
use perilune_cpu::{Cpu, Isa};
use perilune_cuda::headers::HEADERS;
use perilune_cuda::launch::{Function, Work};
use perilune_cuda::nvrtc::{self, Compiler};
use perilune_cuda::{OfflineTarget, offline_target};
use perilune_engine::Engine;
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_plan::Backend;
use perilune_plan::ir::{Kernel, Program};
use perilune_tests::harness::{self, Layout};
use perilune_tests::known::{Known, with_headers};
use perilune_tests::machine::{GPUS, options};
use perilune_tests::recording::Recording;
use perilune_tests::scripts::blessing;
use perilune_tests::skip::skipped;
use perilune_tests::{case, fingerprint, ptx};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

/// A recipe or a script, its parameters, its precision.
struct Source {
    name: &'static str,
    file: &'static str,
    precision: Option<&'static str>,
    params: &'static [(&'static str, &'static str)],
}

const fn source(
    name: &'static str,
    file: &'static str,
    precision: Option<&'static str>,
    params: &'static [(&'static str, &'static str)],
) -> Source {
    Source { name, file, precision, params }
}

const TINY: &[(&str, &str)] = &[("size", "tiny"), ("vocab", "512"), ("context", "32"), ("batch", "2")];
const TINY_LLAMA: &[(&str, &str)] =
    &[("size", "tiny"), ("vocab", "512"), ("context", "32"), ("batch", "2"), ("accumulate", "2")];
const TINY_RESNET: &[(&str, &str)] = &[("size", "tiny"), ("classes", "10"), ("pixels", "32"), ("batch", "8")];

/// The recipes with the short settings of `.ci/recipes`, in every precision that they are trained in, and scripts of typical steps.
const SOURCES: &[Source] = &[
    source("digits", "recipes/digits.lua", None, &[]),
    source("digits_cnn", "recipes/digits.lua", None, &[("net", "cnn")]),
    source("fashion", "recipes/fashion.lua", None, &[("width", "8")]),
    source("speech", "recipes/speech.lua", None, &[("width", "4"), ("sounds", "100"), ("batch", "16")]),
    source("autoencoder", "recipes/autoencoder.lua", None, &[]),
    source("gru", "recipes/gru.lua", None, &[]),
    source("chargpt", "recipes/chargpt.lua", None, &[("layers", "2"), ("width", "64")]),
    source("clean", "recipes/clean.lua", None, &[("channels", "4")]),
    source("sft", "recipes/sft.lua", None, &[("layers", "2"), ("width", "64")]),
    source("chargpt_bf16", "recipes/chargpt.lua", Some("bf16"), &[("layers", "2"), ("width", "64")]),
    source("regression", "recipes/regression.lua", None, &[]),
    source("tabular", "recipes/tabular.lua", None, &[("rows", "1000")]),
    source(
        "pseudo",
        "recipes/pseudo.lua",
        None,
        &[("channels", "4"), ("start", "1"), ("every", "1"), ("confidence", "0")],
    ),
    source("dpo", "recipes/dpo.lua", None, &[("layers", "1"), ("width", "32"), ("count", "40"), ("supervised", "1")]),
    source("gan", "recipes/gan.lua", None, &[("hidden", "32")]),
    source("vae", "recipes/vae.lua", None, &[("hidden", "32")]),
    source("montecarlo", "recipes/montecarlo.lua", None, &[("samples", "1e5")]),
    source("blur", "recipes/blur.lua", None, &[("size", "48")]),
    source("gpt2_f32", "recipes/gpt2.lua", Some("f32"), TINY),
    source("gpt2_bf16", "recipes/gpt2.lua", Some("bf16"), TINY),
    source("gpt2_fp16", "recipes/gpt2.lua", Some("fp16"), TINY),
    source("gpt2_fp8", "recipes/gpt2.lua", Some("fp8"), TINY),
    source("gpt2_tf32", "recipes/gpt2.lua", Some("tf32"), TINY),
    source("llama_f32", "recipes/llama.lua", Some("f32"), TINY_LLAMA),
    source("llama_bf16", "recipes/llama.lua", Some("bf16"), TINY_LLAMA),
    source("resnet50_f32", "recipes/resnet50.lua", None, TINY_RESNET),
    source("resnet50_bf16", "recipes/resnet50.lua", Some("bf16"), TINY_RESNET),
    source("norms", "tests/programs/norms.lua", None, &[]),
    source("reductions", "tests/programs/reductions.lua", None, &[]),
    source("maps", "tests/programs/maps.lua", None, &[]),
    source("products", "tests/programs/products.lua", None, &[]),
    source("attention", "tests/programs/attention.lua", None, &[]),
    source("indices", "tests/programs/indices.lua", None, &[]),
    source("optimizers", "tests/programs/optimizers.lua", None, &[]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Returns the programs of a recipe's first two steps and of the evaluation of each split, or those of a whole script.
fn programs(s: &Source, planner: Box<dyn Backend>) -> Vec<Arc<Program>> {
    let backend = Recording::new(planner);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("programs-{}.png", s.name));
    let mut params: Vec<(String, String)> = s.params.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    if s.name == "blur" {
        params.push(("out".into(), out.to_str().unwrap().into()));
    }
    let policy = perilune_tests::scripts::policy(&params);
    let options = RuntimeOptions { backend: backend.clone(), params, policy, strict: true, print: Rc::new(|_| ()) };
    let fail = |e: &dyn std::fmt::Display| -> ! { panic!("{} on {}: {e}", s.name, backend.name()) };
    let runtime = Runtime::new(options).unwrap_or_else(|e| fail(&e));
    match runtime.load(&root().join(s.file)).unwrap_or_else(|e| fail(&e)) {
        Loaded::Script => {}
        Loaded::Recipe(recipe) => {
            let run = recipe.start(None, s.precision, None).unwrap_or_else(|e| fail(&e));
            for _ in 0..2 {
                run.step().unwrap_or_else(|e| fail(&e));
            }
            for split in run.splits().iter().filter(|split| *split != "train") {
                run.evaluate_batches(split, Some(1)).unwrap_or_else(|e| fail(&e));
            }
        }
    }
    backend.take()
}

/// Returns the programs of one call of every op of the registry: its first sample, in f32.
fn op_programs(planner: Box<dyn Backend>) -> Vec<Arc<Program>> {
    let backend = Recording::new(planner);
    let mut e = Engine::new(backend.clone());
    e.switches.fusion = true;
    for op in ops::all().iter().filter(|op| !op.sig.is_empty()) {
        let Some(case) = case::cases(op).into_iter().next() else { continue };
        // Calls that raise are skipped.
        harness::run(&mut e, &case.floats_as(DType::F32), Layout::Contiguous);
    }
    backend.take()
}

/// Returns the kind of a kernel, for readers.
fn kind(k: &Kernel) -> String {
    match k {
        Kernel::Region(r) => format!("region_of_{}", r.body.len()),
        Kernel::Library(l) => format!("{}{}", l.op.name, if l.epilogue.is_some() { "+map" } else { "" }),
        Kernel::Multi(list) => format!("multi_of_{}", list.len()),
    }
}

/// The implementation of a kernel: a vendor library's product, if any, and launches.
type Launches = perilune_core::error::Result<(Option<String>, Vec<Work>)>;

/// Counts of lines.
type Lines = BTreeMap<(String, String, String), usize>;

fn count(lines: &mut Lines, target: &str, kind: &str, hash: String) {
    *lines.entry((target.into(), kind.into(), hash)).or_default() += 1;
}

fn text(lines: &Lines, version: &str) -> String {
    let mut targets: BTreeMap<(bool, &str, &str, usize), Vec<&str>> = BTreeMap::new();
    for ((target, kind, hash), n) in lines {
        targets.entry((target.starts_with("sm_"), kind, hash, *n)).or_default().push(target);
    }
    let line = |((_, kind, hash, n), targets): (_, Vec<&str>)| format!("{} {kind} {n} {hash}\n", targets.join(","));
    let body: String = targets.into_iter().map(line).collect();
    format!("# NVRTC {version}\n{body}")
}

/// PTX hashes of functions by architecture.
struct Hashes {
    golden: &'static Known,
    version: (i32, i32),
    known: Mutex<HashMap<((u32, u32), String), String>>,
    /// The number of kernels that may still be compiled again.
    retries: AtomicUsize,
}

/// NVRTC compiles a few kernels to one of several PTX texts for the same source, even within one process (seen with 13.0 in a
/// kernel of rows with column sums). A kernel whose hash is not pinned is compiled again up to so many times before it counts
/// as changed.
const RETRIES: usize = 12;
/// The total number of such compilations, so that a test of a real change ends soon.
const ALL_RETRIES: usize = 300;

impl Hashes {
    /// `None` where NVRTC is missing.
    fn new() -> Option<Hashes> {
        static GOLDEN: LazyLock<Known> =
            LazyLock::new(|| Known::open("programs", &format!("{}, normalization {}", options(), ptx::REVISION)));
        let Ok(compiler) = Compiler::new(GPUS[0].arch, None) else {
            let wanted = std::env::var_os("PERILUNE_TEST_NVRTC").is_some() || blessing();
            assert!(!wanted, "no libnvrtc, which PERILUNE_TEST_NVRTC and PERILUNE_BLESS require");
            return None;
        };
        let retries = AtomicUsize::new(ALL_RETRIES);
        Some(Hashes { golden: &GOLDEN, version: compiler.version, known: Mutex::default(), retries })
    }

    /// Compiles the kernels without a known hash, on all cores.
    fn prepare(&self, arch: (u32, u32), functions: &[Arc<Function>]) {
        let mut missing: Vec<&Arc<Function>> =
            functions.iter().filter(|f| !self.known.lock().unwrap().contains_key(&(arch, f.text.clone()))).collect();
        missing.sort_by(|a, b| a.text.cmp(&b.text));
        missing.dedup_by(|a, b| a.text == b.text);
        let next = AtomicUsize::new(0);
        let work = || {
            let compiler = Compiler::new(arch, None).unwrap();
            while let Some(f) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let text = with_headers(&f.text, HEADERS);
                let key = Known::key(&[format!("ptx {arch:?} {:?}", self.version).as_bytes(), text.as_bytes()]);
                let hash = self.golden.get(&key, || hash_of(&compiler, f));
                self.known.lock().unwrap().insert((arch, f.text.clone()), hash);
            }
        };
        std::thread::scope(|s| {
            for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
                s.spawn(work);
            }
        });
    }
}

/// Compiles a function and returns the hash of its PTX.
fn hash_of(compiler: &Compiler, f: &Function) -> String {
    let ptx = compiler.ptx(f).unwrap_or_else(|e| panic!("{e}"));
    fingerprint::text_hash(ptx::kernels(&ptx)[&nvrtc::name(f)].as_bytes())
}

/// Returns the hash of a kernel and of its launches with the PTX that `ptx` returns for each.
fn kernel_hash(kernel: &Kernel, work: &Launches, ptx: impl Fn(&Function) -> String) -> String {
    let mut words = Words::default();
    let mut texts = String::new();
    match work {
        Ok((product, works)) => {
            // A vendor library's product is described by the kernel only.
            words.put(usize::from(product.is_some()));
            fingerprint::kernel(kernel, &mut words);
            for l in works.iter().flat_map(|w| &w.launches) {
                fingerprint::launch(l, &mut words);
                texts.push_str(&ptx(&l.function));
            }
            works.iter().for_each(|w| words.put(w.scratch_bytes));
        }
        Err(_) => texts.push_str("refused"),
    }
    fingerprint::text_hash(format!("{} {texts}", fingerprint::hash(&words.list)).as_bytes())
}

/// Returns the lines of the programs that `make` returns for a device.
fn lines(name: &str, hashes: Option<&Hashes>, make: impl Fn(Box<dyn Backend>) -> Vec<Arc<Program>>) -> Lines {
    let mut out = Lines::new();
    for props in GPUS {
        let target = format!("sm_{}{}", props.arch.0, props.arch.1);
        let programs = make(Box::new(OfflineTarget::new(props)));
        assert!(!programs.is_empty(), "{name} compiles nothing");
        let mut works = Vec::new();
        for p in &programs {
            count(&mut out, &target, "plan", fingerprint::hash(&fingerprint::program(p)));
            for k in 0..p.kernels.len() {
                works.push((&p.kernels[k], offline_target::work(p, k, &props)));
            }
        }
        let Some(hashes) = hashes else { continue };
        let launches = works.iter().filter_map(|w| w.1.as_ref().ok()).flat_map(|(_, w)| w).flat_map(|w| &w.launches);
        hashes.prepare(props.arch, &launches.map(|l| l.function.clone()).collect::<Vec<_>>());
        let known = hashes.known.lock().unwrap();
        let pinned = std::fs::read_to_string(golden(name)).ok().filter(|_| !blessing());
        let is_pinned = |hash: &str| pinned.as_ref().is_none_or(|text| text.contains(hash));
        for (kernel, work) in &works {
            let mut hash = kernel_hash(kernel, work, |f| known[&(props.arch, f.text.clone())].clone());
            for _ in 0..RETRIES {
                if is_pinned(&hash) {
                    break;
                }
                let left = hashes.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                if left.is_err() {
                    break;
                }
                let compiler = Compiler::new(props.arch, None).unwrap();
                hash = kernel_hash(kernel, work, |f| hash_of(&compiler, f));
            }
            count(&mut out, &target, &kind(kernel), hash);
        }
    }
    let programs = make(Box::new(Cpu::new(Some(1))));
    for isa in Isa::ALL {
        for p in &programs {
            for k in 0..p.kernels.len() {
                let mut words = Words::default();
                fingerprint::kernel(&p.kernels[k], &mut words);
                perilune_cpu::fingerprint::kernel(p, k, *isa, &mut words).unwrap_or_else(|e| panic!("{name}: {e}"));
                count(&mut out, isa.key(), &kind(&p.kernels[k]), fingerprint::hash(&words.list));
            }
            if *isa == Isa::Baseline {
                count(&mut out, "cpu", "plan", fingerprint::hash(&fingerprint::program(p)));
            }
        }
    }
    out
}

fn golden(name: &str) -> PathBuf {
    root().join(format!("tests/golden/programs/{name}.txt"))
}

/// Compares the lines with the golden file and returns the differences.
fn compare(name: &str, hashes: Option<&Hashes>, lines: &Lines) -> Result<(), String> {
    let path = golden(name);
    if blessing() {
        let version = hashes.unwrap().version;
        std::fs::write(path, text(lines, &format!("{}.{}", version.0, version.1))).unwrap();
        return Ok(());
    }
    let want = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name}: {e}; PERILUNE_BLESS=1 writes it"));
    let (head, want) = want.split_once('\n').unwrap();
    let version = hashes.map(|h| format!("# NVRTC {}.{}", h.version.0, h.version.1));
    let with_ptx = version.as_deref() == Some(head);
    if !with_ptx {
        let reason = version.as_deref().map_or("NVRTC not found", |_| "another NVRTC than that of the hashes");
        skipped(&format!("PTX of {name}: {reason}"));
    }
    let now = text(lines, "");
    let now = now.split_once('\n').unwrap().1;
    let compared = |l: &&str| with_ptx || !l.starts_with("sm_") || l.split(' ').nth(1) == Some("plan");
    let (want, now): (Vec<&str>, Vec<&str>) =
        (want.lines().filter(compared).collect(), now.lines().filter(compared).collect());
    let gone: Vec<String> = want.iter().filter(|l| !now.contains(l)).map(|l| format!("-{l}")).collect();
    let new: Vec<String> = now.iter().filter(|l| !want.contains(l)).map(|l| format!("+{l}")).collect();
    if gone.is_empty() && new.is_empty() {
        return Ok(());
    }
    Err(format!("{name}:\n{}", [gone, new].concat().join("\n")))
}

#[test]
fn recipes_and_typical_steps_compile_to_the_pinned_programs() {
    let hashes = Hashes::new();
    let only = std::env::var("PERILUNE_ONLY").ok();
    let mut changed = Vec::new();
    for s in SOURCES.iter().filter(|s| only.as_ref().is_none_or(|o| o == s.name)) {
        let start = std::time::Instant::now();
        let now = lines(s.name, hashes.as_ref(), |planner| programs(s, planner));
        println!("{}: {} lines, {:.1} s", s.name, now.len(), start.elapsed().as_secs_f64());
        changed.extend(compare(s.name, hashes.as_ref(), &now).err());
    }
    assert!(changed.is_empty(), "PERILUNE_BLESS=1 accepts this:\n{}", changed.join("\n"));
}

#[test]
fn every_op_compiles_to_its_pinned_program() {
    let hashes = Hashes::new();
    let now = lines("ops", hashes.as_ref(), op_programs);
    let changed = compare("ops", hashes.as_ref(), &now).err();
    assert!(changed.is_none(), "PERILUNE_BLESS=1 accepts this:\n{}", changed.unwrap_or_default());
}
