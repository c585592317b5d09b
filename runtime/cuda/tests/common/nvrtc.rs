//! Wraps NVRTC for tests on machines without a GPU: compiles text for any architecture and parses ptxas's report.
#![allow(unsafe_code, dead_code, clippy::unwrap_used)] // NVRTC is C; each test uses some of this

#[path = "../../../../tests/src/known.rs"]
mod known;
#[path = "../../../../tests/src/skip.rs"]
pub mod skip;

use known::{Known, with_headers};
use libloading::{Library, Symbol};
use perilune_cuda::headers::HEADERS;
use perilune_cuda::launch::Function;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

type Program = *mut c_void;

/// The options of every compilation.
const ALWAYS: [&str; 2] = ["--std=c++17", "--ptxas-options=-v"];

pub struct Nvrtc(Library);

/// What ptxas reports about the functions of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    pub functions: usize,
    /// How many of them spill registers, and how many have local memory of any kind.
    pub spilled: usize,
    pub stack: usize,
    /// Products of a warpgroup wait for each other.
    pub is_serialized: bool,
}

impl Verdict {
    fn of(log: &str) -> Verdict {
        let all = read_log(log);
        let count = |is: fn(&FunctionReport) -> bool| all.iter().filter(|f| is(f)).count();
        Verdict {
            functions: all.len(),
            spilled: count(|f| f.spilled > 0),
            stack: count(|f| f.stack > 0),
            is_serialized: log.contains("serialized"),
        }
    }

    fn text(&self) -> String {
        format!("{} {} {} {}", self.functions, self.spilled, self.stack, usize::from(self.is_serialized))
    }

    fn parse(text: &str) -> Verdict {
        let numbers: Vec<usize> = text.split(' ').map(|n| n.parse().unwrap()).collect();
        let [functions, spilled, stack, serialized] = numbers[..] else { panic!("{text}") };
        Verdict { functions, spilled, stack, is_serialized: serialized == 1 }
    }
}

/// ptxas's report about a function.
#[derive(Clone, Debug)]
pub struct FunctionReport {
    pub name: String,
    pub registers: usize,
    /// Bytes of registers spilled to memory.
    pub spilled: usize,
    /// Bytes of local memory of any kind.
    pub stack: usize,
}

impl Nvrtc {
    /// Loads `PERILUNE_NVRTC` (a file), or the library on the loader's path. Otherwise prints that a test is skipped,
    /// which is an error if `PERILUNE_TEST_NVRTC` is set, as in CI.
    pub fn open() -> Option<Nvrtc> {
        let named = std::env::var("PERILUNE_NVRTC").ok();
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(String::from);
        // SAFETY: loading NVRTC runs its initialisers, which have no preconditions.
        let found = named.into_iter().chain(names).find_map(|n| unsafe { Library::new(n) }.ok()).map(Nvrtc);
        if found.is_none() {
            skip::no_nvrtc();
        }
        found
    }

    /// Compiles functions as one program, as the backend compiles fused regions.
    pub fn functions(&self, functions: &[&Function], arch: &str) -> Verdict {
        let texts = functions.iter().enumerate();
        let source: String = texts.map(|(k, f)| f.text.replace("KERNEL", &format!("{}__{k}", f.label))).collect();
        self.verdict(&source, arch, &["--fmad=false"])
    }

    /// Compiles texts of one function each as one program; panics if that fails, or if a function spills or has a
    /// stack.
    pub fn spill_free(&self, texts: &[String], arch: &str) {
        let source: String = texts.iter().enumerate().map(|(k, t)| t.replace("KERNEL", &format!("f__{k}"))).collect();
        let found = self.verdict(&source, arch, &[]);
        let clean = Verdict { functions: texts.len(), spilled: 0, stack: 0, is_serialized: false };
        assert_eq!(found, clean, "{arch}: PERILUNE_COMPILE=1 prints the report");
    }

    /// Compiles a text, unless its verdict is known (`tests/src/known.rs`). Prints the report about functions that spill or have a
    /// stack. `PERILUNE_DUMP` names a folder for the code and the text.
    pub fn verdict(&self, source: &str, arch: &str, options: &[&str]) -> Verdict {
        static KNOWN: LazyLock<Known> = LazyLock::new(|| Known::open("cuda", &ALWAYS.join(" ")));
        let text = with_headers(source, HEADERS);
        let how = format!("verdict {arch} {options:?} {:?}", self.version());
        let verdict = KNOWN.get(&Known::key(&[how.as_bytes(), text.as_bytes()]), || {
            let done = self.compile(source, arch, options);
            let (log, cubin) = done.unwrap_or_else(|log| panic!("{arch}: {log}\n--- {source}"));
            for f in read_log(&log).iter().filter(|f| f.spilled > 0 || f.stack > 0) {
                println!("{arch}: {f:?}");
            }
            if let Ok(dir) = std::env::var("PERILUNE_DUMP") {
                let path = format!("{dir}/{}_{arch}", Known::key(&[source.as_bytes()]));
                std::fs::write(format!("{path}.cubin"), cubin).unwrap();
                std::fs::write(format!("{path}.cu"), source).unwrap();
            }
            Verdict::of(&log).text()
        });
        Verdict::parse(&verdict)
    }

    /// Returns the version of the compiler.
    fn version(&self) -> (c_int, c_int) {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is that of nvrtc.h.
        unsafe {
            let version: Symbol<Version> = self.0.get(b"nvrtcVersion").unwrap();
            assert_eq!(version(&mut major, &mut minor), 0);
        }
        (major, minor)
    }

    /// Compiles to machine code; returns the log of NVRTC and ptxas and the code, or the log as an error.
    pub fn compile(&self, source: &str, arch: &str, options: &[&str]) -> Result<(String, Vec<u8>), String> {
        let text = |s: &str| CString::new(s).unwrap();
        let source = text(source);
        let names: Vec<CString> = HEADERS.iter().map(|h| text(h.0)).collect();
        let bodies: Vec<CString> = HEADERS.iter().map(|h| text(h.1)).collect();
        let arch = format!("--gpu-architecture={arch}");
        // Code from the driver's cache, which machines with a GPU have, comes without the log.
        let first = [arch.as_str(), "--no-cache"];
        let options: Vec<CString> = first.iter().chain(&ALWAYS).chain(options).map(|o| text(o)).collect();
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
        let (names, bodies, options) = (pointers(&names), pointers(&bodies), pointers(&options));
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Read = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        // SAFETY: the signatures are those of nvrtc.h; strings end in NUL and outlive the calls; buffers have the sizes
        // that NVRTC reported.
        unsafe {
            let create: Symbol<Create> = self.0.get(b"nvrtcCreateProgram").unwrap();
            let compile: Symbol<Compile> = self.0.get(b"nvrtcCompileProgram").unwrap();
            let destroy: Symbol<Destroy> = self.0.get(b"nvrtcDestroyProgram").unwrap();
            let mut program: Program = std::ptr::null_mut();
            let name = c"test.cu".as_ptr();
            let made =
                create(&mut program, source.as_ptr(), name, names.len() as c_int, bodies.as_ptr(), names.as_ptr());
            assert_eq!(made, 0, "nvrtcCreateProgram");
            let rc = compile(program, options.len() as c_int, options.as_ptr());
            let read = |size: &[u8], get: &[u8]| {
                let (size, get): (Symbol<Size>, Symbol<Read>) = (self.0.get(size).unwrap(), self.0.get(get).unwrap());
                let mut n = 0;
                assert_eq!(size(program, &mut n), 0);
                let mut out = vec![0u8; n];
                assert_eq!(get(program, out.as_mut_ptr().cast()), 0);
                out
            };
            let log = read(b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog");
            let log = CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
            let done = if rc == 0 { Ok((log, read(b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN"))) } else { Err(log) };
            destroy(&mut program);
            done
        }
    }
}

/// Parses the report of `ptxas -v` about each function.
pub fn read_log(log: &str) -> Vec<FunctionReport> {
    let mut out: Vec<FunctionReport> = Vec::new();
    let number = |line: &str, before: &str| -> usize {
        let head = line.split(before).next().unwrap_or("").trim_end();
        head.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok()).unwrap_or(0)
    };
    for line in log.lines() {
        if let Some(name) = line.split("entry function '").nth(1).and_then(|s| s.split('\'').next()) {
            out.push(FunctionReport { name: name.into(), registers: 0, spilled: 0, stack: 0 });
        }
        let Some(last) = out.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack = number(line, " bytes stack frame");
            last.spilled = number(line, " bytes spill stores") + number(line, " bytes spill loads");
        }
        if line.contains("registers") && line.contains("Used") {
            last.registers = number(line, " registers");
        }
    }
    out
}

/// Runs `work` on all items, one per core at a time.
pub fn each<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|s| {
        for _ in 0..cores.min(items.len()) {
            s.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(item);
                }
            });
        }
    });
}
