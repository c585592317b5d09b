//! A small door to NVRTC, for tests on machines without a GPU.
#![allow(unsafe_code)]

use libloading::Library;
use perilune_cuda::headers::HEADERS;
use std::ffi::{CString, c_char, c_int, c_void};

pub struct Nvrtc(Library);

type Program = *mut c_void;

impl Nvrtc {
    /// From `PERILUNE_NVRTC` (a file), or wherever the system's loader finds it.
    pub fn open() -> Option<Nvrtc> {
        let named = std::env::var("PERILUNE_NVRTC").ok();
        let names = named.into_iter().chain(["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(String::from));
        // SAFETY: NVRTC's initialisers have no conditions.
        names.into_iter().find_map(|n| unsafe { Library::new(n) }.ok()).map(Nvrtc)
    }

    /// Calls a function of four words at most; NVRTC ignores none of them and reads no more than its own.
    fn call(&self, name: &str, args: [*mut c_void; 4]) -> c_int {
        type Words = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void) -> c_int;
        // SAFETY: all functions called this way take up to four integers or pointers and give back a status.
        unsafe { self.0.get::<Words>(name.as_bytes()).map_or(-1, |f| f(args[0], args[1], args[2], args[3])) }
    }

    /// Compiles to machine code: whether that worked, and everything that NVRTC and ptxas say.
    pub fn compile(&self, text: &str, arch: &str) -> (bool, String) {
        let text = CString::new(text).expect("text");
        let list = |f: fn(&(&str, &str)) -> String| -> Vec<CString> {
            HEADERS.iter().map(|h| CString::new(f(h)).expect("header")).collect()
        };
        let (names, bodies) = (list(|h| h.0.to_string()), list(|h| h.1.to_string()));
        let point = |l: &[CString]| l.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
        let (names_at, bodies_at) = (point(&names), point(&bodies));
        let mut program: Program = std::ptr::null_mut();
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        // SAFETY: the signature is that of nvrtc.h; all strings outlive the call, which copies them.
        let made = unsafe {
            let create = self.0.get::<Create>(b"nvrtcCreateProgram").expect("nvrtcCreateProgram");
            let n = HEADERS.len() as c_int;
            create(&mut program, text.as_ptr(), c"test.cu".as_ptr(), n, bodies_at.as_ptr(), names_at.as_ptr())
        };
        assert_eq!(made, 0, "nvrtcCreateProgram");
        let options = [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into()];
        let options: Vec<CString> = options.into_iter().map(|o| CString::new(o).expect("option")).collect();
        let options_at = point(&options);
        let null = std::ptr::null_mut();
        let count = std::ptr::without_provenance_mut(options.len());
        let status = self.call("nvrtcCompileProgram", [program, count, options_at.as_ptr().cast_mut().cast(), null]);
        let mut size = 0usize;
        self.call("nvrtcGetProgramLogSize", [program, (&raw mut size).cast(), null, null]);
        let mut log = vec![0u8; size.max(1)];
        self.call("nvrtcGetProgramLog", [program, log.as_mut_ptr().cast(), null, null]);
        self.call("nvrtcDestroyProgram", [(&raw mut program).cast(), null, null, null]);
        log.pop();
        (status == 0, String::from_utf8_lossy(&log).into_owned())
    }
}
