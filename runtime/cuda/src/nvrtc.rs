//! Compiles CUDA C++ to machine code with NVRTC and caches it on disk.
//!
//! Functions that are not cached are compiled in batches, one batch per core: one program of many functions takes a
//! fraction of the time of many programs with one function each. A cache key is the BLAKE3 of everything that
//! determines the code: text, headers, options, architecture, compiler version. A cached file holds its own hash and is
//! renamed into place, so readers see either a complete file or none.

use crate::dylib;
use crate::headers::HEADERS;
use crate::launch::Function;
use crate::library::source::{self, ENTRY, OWN};
use cudarc::nvrtc::sys;
use perilune_core::error::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

/// Maximum functions per program.
const BATCH: usize = 16;
/// Minimum generated functions per program, if there are more functions than cores: the headers alone take as long as
/// several functions.
const LEAST: usize = 4;

/// The name of the folder of kernels in a cache.
const KERNELS: &str = "kernels";

/// The first line of texts that allow contraction of products and sums: hand-written kernels that state their own
/// arithmetic. Fused regions never allow it.
pub const CONTRACT: &str = "// contract\n";

/// Machine code of some functions: a CUBIN, or the PTX of a guarded kernel, which the driver assembles.
#[derive(Clone)]
pub struct Cubin {
    pub bytes: Arc<Vec<u8>>,
    pub hash: [u8; 32],
}

#[derive(Clone)]
pub struct Compiler {
    arch: (u32, u32),
    /// CUDA version of the compiler.
    pub version: (i32, i32),
    /// The cache folder; `None` disables the cache.
    folder: Option<PathBuf>,
    /// Another folder, which is only read.
    shared: Option<PathBuf>,
    /// The common prefix of all keys.
    base: blake3::Hash,
    /// Number of programs compiled so far, and the seconds they took.
    pub compiled: usize,
    pub seconds: f64,
}

impl Compiler {
    pub fn new(arch: (u32, u32), folder: Option<PathBuf>) -> Result<Compiler> {
        dylib::load("NVRTC")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is loaded; out-pointers point to locals.
        check(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }, "querying NVRTC's version")?;
        let mut base = blake3::Hasher::new();
        base.update(format!("{arch:?} {major}.{minor} {:?}", options(arch, Kind::Generated)).as_bytes());
        for (name, text) in HEADERS {
            base.update(name.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        let base = base.finalize();
        let shared = perilune_core::cache_folder::shared_cache().map(|dir| dir.join(KERNELS));
        Ok(Compiler { arch, version: (major, minor), folder, shared, base, compiled: 0, seconds: 0.0 })
    }

    /// Returns the machine code that holds each function, in order. Functions compiled together share a cubin.
    pub fn compile(&mut self, functions: &[Arc<Function>]) -> Result<Vec<Cubin>> {
        let mut found: HashMap<String, Cubin> = HashMap::new();
        let mut missing: Vec<(String, Arc<Function>)> = Vec::new();
        for f in functions {
            let key = self.key(f);
            if found.contains_key(&key) || missing.iter().any(|m| m.0 == key) {
                continue;
            }
            match self.cached(&key) {
                Some(c) => drop(found.insert(key, c)),
                None => missing.push((key, f.clone())),
            }
        }
        // Several devices of a process compile the same functions: the first generates the code, the others read it from the cache.
        static COMPILING: Mutex<()> = Mutex::new(());
        let _alone = (self.folder.is_some() && !missing.is_empty()).then(|| COMPILING.lock());
        missing.retain(|(key, _)| match self.cached(key) {
            Some(c) => found.insert(key.clone(), c).is_some(),
            None => true,
        });
        // The sort is stable and groups functions with the same options.
        missing.sort_by_key(|m| Kind::of(&m.1.text));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let kinds = missing.chunk_by(|a, b| Kind::of(&a.1.text) == Kind::of(&b.1.text));
        let batches = kinds.flat_map(|k| k.chunks(Kind::of(&k[0].1.text).batch(missing.len().div_ceil(cores))));
        let batches: Vec<&[(String, Arc<Function>)]> = batches.collect();
        for (batch, done) in batches.iter().zip(self.programs(&batches, cores)) {
            let (bytes, _) = done?;
            let hash = *blake3::hash(&bytes).as_bytes();
            let cubin = Cubin { bytes: Arc::new(bytes), hash };
            self.keep(&batch.iter().map(|b| b.0.as_str()).collect::<Vec<_>>(), &cubin);
            for (key, _) in *batch {
                found.insert(key.clone(), cubin.clone());
            }
        }
        Ok(functions.iter().map(|f| found[&self.key(f)].clone()).collect())
    }

    /// Starts a thread that compiles the functions missing from the cache, for a later `compile`. Returns `None` if
    /// none is missing or there is no cache.
    pub fn prepare(&self, functions: &[Arc<Function>]) -> Option<JoinHandle<()>> {
        let folder = self.folder.as_ref()?;
        let there = |folder: &Path, key: &str| folder.join(format!("{key}.ref")).exists();
        let lacks = |f: &&Arc<Function>| {
            let key = self.key(f);
            !there(folder, &key) && !self.shared.as_deref().is_some_and(|shared| there(shared, &key))
        };
        let missing: Vec<Arc<Function>> = functions.iter().filter(lacks).cloned().collect();
        if missing.is_empty() {
            return None;
        }
        let mut own = self.clone();
        // If NVRTC rejects a function, compiling the program reports the error again.
        let work = move || drop(own.compile(&missing));
        std::thread::Builder::new().name("nvrtc".into()).spawn(work).ok()
    }

    /// Compiles programs, one per core at a time.
    fn programs(&mut self, batches: &[&[(String, Arc<Function>)]], cores: usize) -> Vec<Result<(Vec<u8>, String)>> {
        let start = std::time::Instant::now();
        let arch = self.arch;
        let one = |batch: &[(String, Arc<Function>)]| program(arch, &batch.iter().map(|b| &*b.1).collect::<Vec<_>>());
        let (next, done) = (AtomicUsize::new(0), batches.iter().map(|_| OnceLock::new()).collect::<Vec<_>>());
        let work = || {
            while let Some((batch, cell)) = batches.iter().zip(&done).nth(next.fetch_add(1, Ordering::Relaxed)) {
                let _ = cell.set(one(batch));
            }
        };
        std::thread::scope(|s| {
            for k in 1..cores.min(batches.len()) {
                // If a thread cannot be started, the others take over its share.
                let _ = std::thread::Builder::new().name(format!("nvrtc-{k}")).spawn_scoped(s, work);
            }
            work();
        });
        self.compiled += batches.len();
        self.seconds += start.elapsed().as_secs_f64();
        let lost = || Err(Error::system("cuda", "this is a bug: a program was not compiled"));
        done.into_iter().map(|cell| cell.into_inner().unwrap_or_else(lost)).collect()
    }

    /// Compiles functions as one program, without the cache; returns machine code and the compiler's log.
    pub fn program(&mut self, functions: &[&Function]) -> Result<(Vec<u8>, String)> {
        let start = std::time::Instant::now();
        let done = program(self.arch, functions);
        self.compiled += 1;
        self.seconds += start.elapsed().as_secs_f64();
        done
    }

    /// Returns the PTX of one function compiled alone, so that no other function affects inlining; tests pin it.
    pub fn ptx(&self, f: &Function) -> Result<String> {
        let failed = |log| Error::system("cuda", format!("this is a bug: NVRTC rejects {}:\n{log}", f.label));
        ptx(self.arch, f, &[]).map_err(failed)
    }

    /// Returns the PTX of a guarded kernel with its checks.
    pub fn guarded_ptx(&self, f: &Function) -> Result<String> {
        guarded(self.arch, f)
    }

    fn key(&self, f: &Function) -> String {
        let mut h = blake3::Hasher::new();
        h.update(self.base.as_bytes()).update(f.label.as_bytes()).update(&[0]).update(f.text.as_bytes());
        if Kind::of(&f.text) == Kind::Own {
            h.update(format!("{:?}", options(self.arch, Kind::Own)).as_bytes());
        }
        // The text says that it is guarded and by which revision of the checks; PTX is no machine code all the same.
        if source::guard_of(&f.text).is_some() {
            h.update(b"ptx");
        }
        h.finalize().to_hex()[..32].to_string()
    }

    fn cached(&self, key: &str) -> Option<Cubin> {
        let folders = [self.folder.as_deref()?].into_iter().chain(self.shared.as_deref());
        folders.into_iter().find_map(|folder| Compiler::cached_in(folder, key))
    }

    fn cached_in(folder: &Path, key: &str) -> Option<Cubin> {
        let code = std::fs::read_to_string(folder.join(format!("{key}.ref"))).ok()?;
        let bytes = std::fs::read(folder.join(format!("{}.cubin", code.trim()))).ok()?;
        let hash = blake3::hash(&bytes);
        // A truncated or changed file is treated as missing.
        (hash.to_hex().as_str()[..32] == *code.trim()).then(|| Cubin { bytes: Arc::new(bytes), hash: *hash.as_bytes() })
    }

    /// If the cache cannot be written, later runs only compile again.
    fn keep(&self, keys: &[&str], cubin: &Cubin) {
        let Some(folder) = &self.folder else { return };
        let code = blake3::Hash::from(cubin.hash).to_hex()[..32].to_string();
        let write = |name: String, bytes: &[u8]| -> std::io::Result<()> {
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let part = folder.join(format!("{name}.{}.{number}.part", std::process::id()));
            std::fs::write(&part, bytes)?;
            std::fs::rename(&part, folder.join(name))
        };
        let all = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            write(format!("{code}.cubin"), &cubin.bytes)?;
            keys.iter().try_for_each(|key| write(format!("{key}.ref"), code.as_bytes()))
        };
        let _ = all();
    }
}

/// The text of a function with its name inserted.
fn named(f: &Function) -> String {
    let word = if Kind::of(&f.text) == Kind::Own { ENTRY } else { "KERNEL" };
    f.text.replace(word, &name(f))
}

/// Compiles one function to PTX. An error is the compiler's log.
fn ptx(arch: (u32, u32), f: &Function, more: &[&str]) -> std::result::Result<String, String> {
    let mut options = options(arch, Kind::of(&f.text));
    // A virtual architecture stops before the assembler.
    options[0] = options[0].replace("=sm_", "=compute_");
    options.retain(|o| !o.starts_with("--ptxas-options"));
    options.extend(more.iter().map(ToString::to_string));
    let (bytes, _) = compile(&named(f), &options, Output::Ptx)?;
    let text = CStr::from_bytes_until_nul(&bytes).map_err(|_| "PTX without an end".to_string())?;
    Ok(text.to_string_lossy().into_owned())
}

/// Compiles a guarded kernel and adds its checks.
fn guarded(arch: (u32, u32), f: &Function) -> Result<String> {
    let text = ptx(arch, f, &["--generate-line-info"]).map_err(|log| source::refused(&f.text, &log))?;
    source::rewrite(&f.text, &text, &name(f))
}

/// Compiles functions as one program; returns machine code and the compiler's log.
fn program(arch: (u32, u32), functions: &[&Function]) -> Result<(Vec<u8>, String)> {
    if let [f] = functions
        && let Some((guard, _)) = source::guard_of(&f.text)
    {
        match guarded(arch, f) {
            // The driver reads a text up to a 0.
            Ok(text) => return Ok(([text.as_bytes(), &[0]].concat(), String::new())),
            Err(e) if guard.check => return Err(e),
            // It cannot be told to end, so the process ends at its limit.
            Err(_) => {}
        }
    }
    let mut text = String::new();
    for f in functions {
        text.push_str(&named(f));
        text.push('\n');
    }
    let kind = functions.first().map_or(Kind::Generated, |f| Kind::of(&f.text));
    compile(&text, &options(arch, kind), Output::Cubin).map_err(|log| {
        if let (Kind::Own, [f]) = (kind, functions) {
            return source::refused(&f.text, &log);
        }
        let labels: Vec<&str> = functions.iter().map(|f| f.label.as_str()).collect();
        Error::system("cuda", format!("this is a bug: NVRTC rejects {}:\n{log}", labels.join(", ")))
    })
}

/// The folder of compiled kernels.
pub fn folder() -> Option<PathBuf> {
    perilune_core::cache_folder::cache_folder().map(|dir| dir.join(KERNELS))
}

/// Puts the compilation cache of the driver and of NVRTC beside the kernels, unless `CUDA_CACHE_PATH` names a folder.
/// Without this NVIDIA's libraries write to `~/.nv`, also in a `check`, which writes nothing outside the program's cache.
///
/// # Safety
///
/// No other thread may run: environment variables of a process are not synchronized.
pub unsafe fn place_vendor_cache() {
    const VARIABLE: &str = "CUDA_CACHE_PATH";
    if let (None, Some(kernels)) = (std::env::var_os(VARIABLE), folder()) {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(VARIABLE, kernels.with_file_name("nvidia")) };
    }
}

/// The name of a function in machine code.
pub fn name(f: &Function) -> String {
    let mut h = blake3::Hasher::new();
    h.update(f.text.as_bytes());
    format!("{}_{}", f.label, &h.finalize().to_hex()[..12])
}

/// The kind of a text, by its first line.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Generated,
    /// Hand-written, with contraction.
    Contract,
    /// From a recipe: compiled as a separate program, as nvcc would.
    Own,
}

impl Kind {
    fn of(text: &str) -> Kind {
        match text {
            t if t.starts_with(CONTRACT) => Kind::Contract,
            t if t.starts_with(OWN) => Kind::Own,
            _ => Kind::Generated,
        }
    }

    /// The number of functions per program, given a core's share.
    fn batch(self, share: usize) -> usize {
        match self {
            Kind::Generated if share > 1 => share.clamp(LEAST, BATCH),
            Kind::Generated | Kind::Contract => share.clamp(1, BATCH),
            Kind::Own => 1,
        }
    }
}

/// Returns the options for texts of the program itself: for generated ones, and for those that begin with [`CONTRACT`]. With the text,
/// its headers and the version of NVRTC they determine the code.
pub fn text_options(arch: (u32, u32)) -> [Vec<String>; 2] {
    [Kind::Generated, Kind::Contract].map(|kind| options(arch, kind))
}

fn options(arch: (u32, u32), kind: Kind) -> Vec<String> {
    // wgmma and TMA exist only in the architecture-specific feature set.
    let specific = if arch >= (9, 0) { "a" } else { "" };
    let mut out = vec![
        format!("--gpu-architecture=sm_{}{}{specific}", arch.0, arch.1),
        "--std=c++17".into(),
        format!("--fmad={}", kind != Kind::Generated),
        "--ptxas-options=-v".into(),
        "--device-as-default-execution-space".into(),
    ];
    if kind == Kind::Own {
        // cuda_fp16.h and similar headers, if a toolkit is installed.
        out.extend(dylib::include_dirs().iter().map(|d| format!("--include-path={}", d.display())));
    }
    out
}

fn check(status: sys::nvrtcResult, what: &str) -> Result<()> {
    if status as u32 == 0 {
        return Ok(());
    }
    Err(Error::system("cuda", format!("{what} failed (NVRTC error {})", status as u32)))
}

/// The output format requested from NVRTC.
#[derive(Clone, Copy, PartialEq)]
enum Output {
    Cubin,
    /// NUL-terminated text.
    Ptx,
}

/// Returns code and log, or only the log on failure.
fn compile(text: &str, options: &[String], output: Output) -> std::result::Result<(Vec<u8>, String), String> {
    let c = |s: &str| CString::new(s).map_err(|_| "a text holds a 0".to_string());
    let source = c(text)?;
    let names = HEADERS.iter().map(|h| c(h.0)).collect::<std::result::Result<Vec<_>, _>>()?;
    let texts = HEADERS.iter().map(|h| c(h.1)).collect::<std::result::Result<Vec<_>, _>>()?;
    let options = options.iter().map(|o| c(o)).collect::<std::result::Result<Vec<_>, _>>()?;
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
    let mut program = null_mut();
    // SAFETY: `Compiler::new` loaded the library. All strings are NUL-terminated and outlive the calls; buffers have
    // the sizes that NVRTC reported; the program is destroyed once.
    unsafe {
        let status = sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            c"perilune.cu".as_ptr(),
            names.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        );
        if status as u32 != 0 {
            return Err(format!("NVRTC error {}", status as u32));
        }
        let status = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr()) as u32;
        let mut size = 0;
        let mut log = String::new();
        if sys::nvrtcGetProgramLogSize(program, &mut size) as u32 == 0 && size > 1 {
            let mut bytes = vec![0u8; size];
            sys::nvrtcGetProgramLog(program, bytes.as_mut_ptr().cast());
            log = CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        }
        let mut code = Vec::new();
        let mut done = status == 0;
        if done {
            done = match output {
                Output::Cubin => sys::nvrtcGetCUBINSize(program, &mut size),
                Output::Ptx => sys::nvrtcGetPTXSize(program, &mut size),
            } as u32
                == 0;
            code = vec![0u8; size];
            let to = code.as_mut_ptr().cast();
            let got = match output {
                Output::Cubin => sys::nvrtcGetCUBIN(program, to),
                Output::Ptx => sys::nvrtcGetPTX(program, to),
            };
            done = done && got as u32 == 0;
        }
        sys::nvrtcDestroyProgram(&mut program);
        if done { Ok((code, log)) } else { Err(log) }
    }
}

/// Number of machine-code files in a cache folder, and their total bytes.
pub fn size(path: &Path) -> (usize, u64) {
    let files = std::fs::read_dir(path).map(|d| d.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let cubins = files.iter().filter(|f| f.path().extension().is_some_and(|e| e == "cubin"));
    cubins.fold((0, 0), |(n, bytes), f| (n + 1, bytes + f.metadata().map_or(0, |m| m.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(k: usize, body: &str) -> Arc<Function> {
        let text = format!("extern \"C\" __global__ void KERNEL(float* x) {{ {body} }}\n");
        Arc::new(Function { label: format!("test_{k}"), text })
    }

    /// More functions than a program holds, some of them twice: each must get the code that contains its name, also
    /// from disk.
    #[test]
    fn programs_made_side_by_side_go_to_their_functions() {
        let folder = tempfile::tempdir().unwrap();
        let Ok(mut c) = Compiler::new((9, 0), Some(folder.path().to_path_buf())) else {
            assert!(
                std::env::var_os("PERILUNE_TEST_NVRTC").is_none(),
                "no libnvrtc, which PERILUNE_TEST_NVRTC requires"
            );
            println!("skipped: no libnvrtc (set LD_LIBRARY_PATH)");
            return;
        };
        let list: Vec<_> = (0..40).map(|k| function(k % 37, &format!("x[{}] += 1.0f;", k % 37))).collect();
        let holds = |done: &[Cubin]| {
            assert_eq!(done.len(), list.len());
            for (f, cubin) in list.iter().zip(done) {
                let name = name(f).into_bytes();
                assert!(cubin.bytes.windows(name.len()).any(|w| w == name), "{}", f.label);
            }
        };
        if let Some(work) = c.prepare(&list[..5]) {
            work.join().unwrap();
        }
        assert!(c.prepare(&list[..5]).is_none(), "everything is on disk");
        c.compile(&list[..5]).unwrap();
        assert_eq!(c.compiled, 0);
        holds(&c.compile(&list).unwrap());
        let programs = c.compiled;
        // 32 functions were left: each core compiles its share as one program, or each function is a program.
        assert!((2..=32).contains(&programs), "{programs}");
        holds(&c.compile(&list).unwrap());
        assert_eq!(c.compiled, programs, "everything was on disk");
        let bad = function(99, "x[0] = missing;");
        let e = c.compile(&[list[0].clone(), bad]).err().unwrap();
        assert!(e.message.contains("test_99") && e.message.contains("missing"), "{e}");
    }
}
