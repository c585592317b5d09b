//! Tests the checks of recipes' kernels on PTX of NVRTC: what is rewritten, what is refused, and that the result is valid. Needs NVRTC, no
//! GPU; where `PERILUNE_PTXAS` names an assembler, it assembles each rewritten module for three architectures.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/src/skip.rs"]
mod skip;

use perilune_core::ops::source::{Body, intern};
use perilune_cuda::guard::{Guard, Layout, REVISION, rewrite};
use perilune_cuda::launch::Function;
use perilune_cuda::nvrtc::{Compiler, name};
use std::process::Command;

const BOTH: Guard = Guard { check: true, stop: true };
const LAYOUT: Layout = Layout { inputs: 1, outputs: 1, numbers: 1 };

/// A guarded kernel with one input, one output and a number, as `library::source` writes it.
fn function(text: &str, guard: Guard) -> Function {
    let body = Body { name: "mine".into(), text: text.into(), file: "a.lua".into(), line: 40, names: Vec::new() };
    let key = intern(body);
    let flags = format!("guard {} {} 1 1 1 {REVISION}", u8::from(guard.check), u8::from(guard.stop));
    let text = format!(
        "// source {:016x}{:016x} {flags}\n#undef __global__\n#define __global__ __device__ __forceinline__\n#line 1 \"mine\"\n{text}\n\
         #line 1 \"call mine\"\nextern \"C\" __attribute__((global)) void __attribute__((launch_bounds(256))) /*entry*/KERNEL(const float* x0, \
         float* y0, long long n0, long long bytes0, long long bytes1, unsigned long long guard_cell, unsigned long long guard_halt, \
         unsigned long long guard_stop, unsigned long long guard_launch) {{ mine(x0, y0, n0); }}\n",
        key[0] as u64, key[1] as u64
    );
    Function { label: "mine".into(), text }
}

fn compiler(arch: (u32, u32)) -> Option<Compiler> {
    let made = Compiler::new(arch, None).ok();
    if made.is_none() {
        skip::no_nvrtc();
    }
    made
}

/// Kernels by what they have; `mine(const float* x, float* y, int n)` each.
const KERNELS: &[(&str, &str)] = &[
    ("widths", "__global__ void mine(const float* x, float* y, int n) { int i = threadIdx.x; ((char*)y)[i] = ((const char*)x)[n];
      ((short*)y)[i] = ((const short*)x)[n]; ((double*)y)[i] = ((const double*)x)[n]; ((float4*)y)[i] = ((const float4*)x)[n];
      ((float2*)y)[i] = ((const float2*)x)[n]; ((double2*)y)[i] = ((const double2*)x)[n]; ((uchar4*)y)[i] = ((const uchar4*)x)[n]; }"),
    ("predicated", "__global__ void mine(const float* x, float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }"),
    ("ldg", "__global__ void mine(const float* x, float* y, int n) { y[0] = __ldg(x + n) + __ldcs(x); __stcg(y, 2.0f); }"),
    ("atomics", "__global__ void mine(const float* x, float* y, int n) { atomicAdd(y, x[0]); atomicMax((int*)y, n); atomicCAS((int*)y, 1, n);
      atomicExch((unsigned long long*)y, 7ull); atomicAdd((double*)y, 1.0); y[1] = atomicAdd((int*)y + n, 1); atomicXor((unsigned*)y, 3u); }"),
    ("shared", "__global__ void mine(const float* x, float* y, int n) { __shared__ float s[64]; extern __shared__ float d[]; s[threadIdx.x] = x[n];
      d[n] = s[n]; __syncthreads(); float l[9]; for (int k = 0; k < 9; k++) l[k] = s[k]; y[0] = l[n] + d[1]; }"),
    ("loops", "__global__ void mine(const float* x, float* y, int n) { float a = 0; for (int i = 0; i < n; i++) a += x[i] * a;
      while (a < 3) a += y[0]; do { a -= x[1]; } while (a > 4); y[0] = a; }"),
    ("functions", "__device__ float table[32]; __constant__ float c[4]; __noinline__ __device__ float f(const float* p, int i) { return p[i] * c[i]; }
      __global__ void mine(const float* x, float* y, int n) { __shared__ float s[8]; s[n] = 1; table[n] = 2; y[0] = f(x, n) + f(s, n) + f(table, n); }"),
    ("recursion", "__noinline__ __device__ float f(float x, int n) { return n < 1 ? x : f(x * 2, n - 1) + f(x, n - 2); }
      __global__ void mine(const float* x, float* y, int n) { y[0] = f(x[0], n); }"),
    ("template", "template <class T> __global__ void mine(const T* x, T* y, int n) { T a[8]; for (int i = 0; i < 8; i++) a[i] = x[i]; y[n] = a[n]; }"),
    ("asm", "__global__ void mine(const float* x, float* y, int n) { asm volatile(\"{ .reg .b32 t; ld.global.u32 t, [%0]; st.global.u32 [%1+4], t; }\" :: \"l\"(x), \"l\"(y)); }"),
    ("endless", "__global__ void mine(const float* x, float* y, int n) { volatile int s = 0; for (;;) { s += n; } }"),
    ("switch", "__global__ void mine(const float* x, float* y, int n) { switch (n) { case 0: y[0] = x[1]; break; case 1: y[1] = x[0]; break;
      case 2: y[2] *= 3; break; case 3: y[n] += 4; break; case 4: __trap(); case 5: y[3] = 2; break; default: y[9] = 1; } }"),
    ("copy", "__global__ void mine(const float* x, float* y, int n) { __shared__ float s[1024]; unsigned a = (unsigned)__cvta_generic_to_shared(s + 4 * threadIdx.x);
      asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \"r\"(a), \"l\"(x + 4 * n)); asm volatile(\"cp.async.commit_group; cp.async.wait_group 0;\");
      __syncthreads(); y[threadIdx.x] = s[n]; }"),
];

#[test]
fn rewritten_modules_are_valid() {
    let assembler = std::env::var_os("PERILUNE_PTXAS");
    if assembler.is_none() {
        skip::skipped("no assembler (set PERILUNE_PTXAS): modules are rewritten, not assembled");
    }
    let folder = tempfile::tempdir().unwrap();
    for arch in [(8, 0), (9, 0), (10, 0)] {
        let Some(c) = compiler(arch) else { return };
        for (what, text) in KERNELS {
            for guard in [BOTH, Guard { check: true, stop: false }, Guard { check: false, stop: true }] {
                let f = function(text, guard);
                let done = c.guarded_ptx(&f).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(done.contains("selp.b64 __plck_t"), guard.check && *what != "endless", "{what}\n{done}");
                let loops = ["loops", "endless", "recursion"].contains(what);
                assert!(!loops || done.contains("%globaltimer_lo") == guard.stop, "{what}\n{done}");
                let Some(assembler) = &assembler else { continue };
                let (from, to) = (folder.path().join("a.ptx"), folder.path().join("a.cubin"));
                std::fs::write(&from, &done).unwrap();
                let specific = if arch >= (9, 0) { "a" } else { "" };
                let flag = format!("-arch=sm_{}{}{specific}", arch.0, arch.1);
                let ran = Command::new(assembler).arg(flag).arg(&from).arg("-o").arg(&to).output().unwrap();
                assert!(ran.status.success(), "{what}: {}\n{done}", String::from_utf8_lossy(&ran.stderr));
            }
        }
    }
}

#[test]
fn what_cannot_be_checked_is_refused_with_its_line() {
    let Some(c) = compiler((9, 0)) else { return };
    for (act, why) in [
        ("printf(\"%s\", (const char*)x);", "printf"),
        ("asm volatile(\"prefetch.global.L2 [%0];\" :: \"l\"(x));", "prefetch.global.L2"),
        ("asm volatile(\"discard.global.L2 [%0], 128;\" :: \"l\"(y));", "discard.global.L2"),
        ("asm volatile(\"ld.global.b32 __plck_q, [%0];\" :: \"l\"(x));", "__plck"),
        ("asm volatile(\"{ .reg .b64 table; mov.u64 table, %0; }\" :: \"l\"(x));", "declares table twice"),
        ("asm volatile(\"{ .reg .b64 tab<9>; }\");", "declares tab twice"),
        ("asm volatile(\"ret; } .visible .entry evil() { ret;\");", "kernel evil"),
        ("asm volatile(\"st.async.weak.shared::cluster.b32 [%0], 1, [%0];\" :: \"l\"(x));", "st.async"),
        (
            "__shared__ float4 part; unsigned a = (unsigned)__cvta_generic_to_shared(&part); \
             asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, 0;\" :: \"r\"(a), \"l\"(x));",
            "reads a number of bytes that is not checked",
        ),
        ("void* p = malloc(8); *(int*)p = 1;", "calls malloc"),
    ] {
        let text = format!(
            "__device__ int table[4]; __device__ int tab3[4];\n__global__ void mine(const float* x, float* y, int n) {{ table[n] = tab3[n];\n{act}\ny[0] = table[1] + tab3[2]; }}"
        );
        let e = c.guarded_ptx(&function(&text, BOTH)).unwrap_err();
        assert!(e.op == "mine" && e.message.contains(why) && e.hint.is_some(), "{act}: {e}");
        if why.contains('.') {
            assert!(e.message.starts_with("a.lua:42: "), "{e}");
        }
    }
}

/// The kernel of a text that is guarded in another way is another one, in memory and on disk.
#[test]
fn guards_are_part_of_a_kernels_identity() {
    let names = [(false, false), (true, false), (false, true), (true, true)]
        .map(|(check, stop)| name(&function(KERNELS[0].1, Guard { check, stop })));
    for (k, one) in names.iter().enumerate() {
        assert!(names[k + 1..].iter().all(|other| other != one), "{names:?}");
    }
}

/// Text of any kind is rewritten or refused, and nothing else happens.
#[test]
fn arbitrary_text_is_refused_without_a_panic() {
    let mut texts: Vec<String> = vec![
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b) { .reg .b64 %r<4>; $L: @%p ld.global.v2.f32 {%f1,%f2}, [%r1+-8]; \
         brx.idx %r1, $T; bra $L; call (x), f, (y); .loc 1 2 3, function_name $L+4, inlined_at 1 2 3\n ret; }\n.file 1 \"mine\"\n.section .debug_str { .b8 1,2 }\n"
            .into(),
    ];
    if let Ok(c) = Compiler::new((9, 0), None) {
        texts.extend(KERNELS.iter().map(|(_, text)| c.ptx(&function(text, BOTH)).unwrap()));
    }
    let pieces = [
        "{", "}", "[", "]", "(", ")", ";", ",", ".loc", ".func", ".entry", ".file", ".global", ".section", "@", "+",
        "-", ":", "\"", "/*", "%r1", ".reg", "call", "ld", "\u{e9}", "", "brx.idx", ".target",
    ];
    let mut seed = 7u64;
    let mut next = |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % n.max(1)
    };
    for text in &texts {
        for _ in 0..400 {
            let mut words: Vec<&str> = text.split_inclusive([' ', '\n', '\t', ',']).collect();
            for _ in 0..=next(4) {
                let at = next(words.len());
                match next(3) {
                    0 => words.truncate(at),
                    1 => words.insert(at, pieces[next(pieces.len())]),
                    _ if at < words.len() => words[at] = pieces[next(pieces.len())],
                    _ => {}
                }
            }
            let _ = rewrite(&words.concat(), "k", "mine", LAYOUT, BOTH);
        }
    }
}
