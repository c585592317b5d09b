//! NVRTC, loaded by hand: enough of it to compile generated text and read what ptxas says.
#![allow(unsafe_code)]

use libloading::{Library, Symbol};
use perilune_cuda::headers::HEADERS;
use perilune_cuda::launch::Function;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

type Program = *mut c_void;

pub struct Nvrtc(Library);

#[derive(Clone, Debug)]
pub struct Compiled {
    pub name: String,
    pub registers: usize,
    /// Bytes of registers stored to memory for want of room.
    pub spilled: usize,
    /// Bytes of local memory of any kind.
    pub stack: usize,
}

impl Nvrtc {
    pub fn find() -> Option<Nvrtc> {
        let named = std::env::var("PERILUNE_NVRTC").ok();
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(String::from);
        // SAFETY: loading NVRTC runs its initialisers, which have no demands on the caller.
        named.into_iter().chain(names).find_map(|n| unsafe { Library::new(n) }.ok()).map(Nvrtc)
    }

    /// Compiles functions as one program to machine code.
    pub fn compile(&self, functions: &[&Function], arch: &str) -> Vec<Compiled> {
        let mut source = String::new();
        for (k, f) in functions.iter().enumerate() {
            source.push_str(&f.text.replace("KERNEL", &format!("{}__{k}", f.label)));
        }
        let options = [
            format!("--gpu-architecture={arch}"),
            "--fmad=false".into(),
            "--std=c++17".into(),
            "--ptxas-options=-v".into(),
        ];
        let (log, cubin) = self.run(&source, &options).unwrap_or_else(|log| panic!("{log}\n--- {source}"));
        if let Ok(dir) = std::env::var("PERILUNE_DUMP") {
            let path = format!("{dir}/{}_{arch}", functions[0].label);
            std::fs::write(format!("{path}.cubin"), cubin).unwrap();
            std::fs::write(format!("{path}.cu"), &source).unwrap();
        }
        read_log(&log)
    }

    fn run(&self, source: &str, options: &[String]) -> Result<(String, Vec<u8>), String> {
        let text = |s: &str| CString::new(s).unwrap();
        let source = text(source);
        let names: Vec<CString> = HEADERS.iter().map(|h| text(h.0)).collect();
        let bodies: Vec<CString> = HEADERS.iter().map(|h| text(h.1)).collect();
        let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
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
        // SAFETY: the signatures are those of nvrtc.h; strings end in NUL and outlive the calls; buffers have the size
        // that NVRTC asked for.
        unsafe {
            let create: Symbol<Create> = self.0.get(b"nvrtcCreateProgram").unwrap();
            let compile: Symbol<Compile> = self.0.get(b"nvrtcCompileProgram").unwrap();
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
            if rc != 0 {
                return Err(log);
            }
            Ok((log, read(b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN")))
        }
    }
}

/// What `ptxas -v` says of each function.
fn read_log(log: &str) -> Vec<Compiled> {
    let mut out: Vec<Compiled> = Vec::new();
    let number = |line: &str, before: &str| -> usize {
        let head = line.split(before).next().unwrap_or("").trim_end();
        head.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok()).unwrap_or(0)
    };
    for line in log.lines() {
        if let Some(name) = line.split("entry function '").nth(1).and_then(|s| s.split('\'').next()) {
            out.push(Compiled { name: name.into(), registers: 0, spilled: 0, stack: 0 });
        }
        let Some(last) = out.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack = number(line, " bytes stack frame");
            last.spilled = number(line, " bytes spill stores");
        }
        if line.contains("registers") && line.contains("Used") {
            last.registers = number(line, " registers");
        }
    }
    out
}
