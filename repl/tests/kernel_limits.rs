//! Tests `--check-kernels` and `--kernel-time`: kernels of a recipe that do not end, or that leave their buffers, are held back, and a
//! correct one keeps its bits.
//!
//! `PERILUNE_DEVICE=cuda` runs the kernels on a GPU. Without it, only what needs none is tested.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "../../tests/src/skip.rs"]
mod skip;
mod support;

use std::time::{Duration, Instant};
use support::{Place, Ran, place};

/// The start of a process with a GPU, and the compilation of a kernel.
const START: Duration = Duration::from_secs(60);
/// The time after its limit in which a kernel is contained.
const CONTAINED: Duration = Duration::from_secs(2);

/// Whether kernels can run here.
fn has_gpu() -> bool {
    let has = std::env::var("PERILUNE_DEVICE").is_ok_and(|device| device.starts_with("cuda"));
    if !has {
        skip::skipped("no GPU (set PERILUNE_DEVICE=cuda)");
    }
    has
}

/// Runs a script with options; the device is that of `PERILUNE_DEVICE`, else the CPU.
fn script(p: &Place, text: &str, more: &[&str]) -> Ran {
    p.file("s.lua", text);
    let device = std::env::var("PERILUNE_DEVICE").unwrap_or_else(|_| "cpu".into());
    let mut command = p.command(&["run", "s.lua", "--device", &device]);
    command.args(more).env("PERILUNE_CACHE", p.path("cache")).output().unwrap().into()
}

/// A script whose kernel has this body, with `x` and `y` of `{4, 8}`; line 4 is the first of the body. It prints sums of `y`, a
/// neighbour that the kernel must not touch, and what went wrong.
fn kernel(body: &str) -> String {
    format!(
        r#"local pl = require "perilune"
local k = pl.kernel {{ name = "bad", inputs = "x: f32", outputs = "y", grid = 1, block = 32, source = [[
  __global__ void bad(const float* x, float* y) {{ int i = threadIdx.x;
    {body}
  }}
]], cpu = function(x) return x * 2 end }}
local before, x, after = pl.full({{ 4096 }}, 7.0), pl.full({{ 4, 8 }}, 3.0), pl.full({{ 4096 }}, 7.0)
pl.eval(before, x, after)
local fine, message = pcall(function() local y = k(x); pl.eval(y); print("sum", y:sum():item()) end)
if not fine then print("failed", tostring(message)) end
print("beside", before:sum():item(), after:sum():item(), x:sum():item())
"#
    )
}

const BESIDE: &str = "beside\t28672";

#[test]
fn a_correct_kernel_keeps_its_bits() {
    let p = place();
    let text = r#"local pl = require "perilune"
pl.seed(4)
local k = pl.kernel { name = "norm", inputs = "x: f32, w: f32", outputs = "y, s", scalars = "eps", source = [[
  __device__ int calls[64];
  __noinline__ __device__ float weight(const float* w, int c) { return w[c] * 1.7f + w[0]; }
  __global__ void norm(const float* x, const float* w, float* y, float* s, int cols, float eps) {
    __shared__ float part[64];
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += 64) { float v = x[(long long)blockIdx.x * cols + c]; sum += v * v; }
    part[threadIdx.x] = sum;
    atomicAdd(calls + threadIdx.x, 1);
    __syncthreads();
    sum = 0;
    for (int k = 0; k < 64; k++) sum += part[k];
    float r = rsqrtf(sum / cols + eps);
    if (threadIdx.x == 0) s[blockIdx.x] = r;
    for (int c = threadIdx.x; c < cols; c += 64) {
      long long i = (long long)blockIdx.x * cols + c;
      y[i] = x[i] * r * weight(w, c) + 0.3f;
    }
  }
]], shape = function(x) return { x:size(0), x:size(1) }, { x:size(0) } end,
  grid = function(x) return x:size(0) end, block = 64, args = function(x) return x:size(1) end,
  cpu = function(x, w, eps)
    local r = ((x * x):mean(1) + eps):rsqrt()
    return x * r:unsqueeze(1) * (w * 1.7 + w:slice(0, 0, 1)) + 0.3, r
  end }
local x, w = pl.randn { 50, 333 }, pl.randn { 333 }
for i = 1, 6 do
  local y, s = k(x, w, 1e-5)
  pl.eval(y, s)
  print(("%.9g %.9g %.9g"):format(y:sum():item(), (y * y):sum():item(), s:sum():item()))
  x = y
end
"#;
    if !has_gpu() {
        return;
    }
    let plain = script(&p, text, &[]);
    assert_eq!(plain.status, Some(0), "{}{}", plain.out, plain.err);
    for flags in [&["--check-kernels"][..], &["--kernel-time=30s"], &["--check-kernels", "--kernel-time=30s"]] {
        let ran = script(&p, text, flags);
        assert_eq!((ran.status, &ran.out), (Some(0), &plain.out), "{flags:?}: {}", ran.err);
    }
    let ran = script(&p, text, &["--untrusted", "--allow-kernels", "--check-kernels", "--accept-missing-walls"]);
    assert_eq!((ran.status, &ran.out), (Some(0), &plain.out), "{}", ran.err);
}

#[test]
fn accesses_outside_of_the_buffers_have_no_effect_and_are_named() {
    if !has_gpu() {
        return;
    }
    for (body, what) in [
        ("y[i + 1] = x[i];", "write of 4 bytes, 0 bytes past the end of y (f32 {4, 8})"),
        ("y[i] = x[i + 1];", "read of 4 bytes, 0 bytes past the end of x (f32 {4, 8})"),
        ("y[i] = x[i - 1];", "read of 4 bytes, 4 bytes before the start of x"),
        ("y[i + 1000000000ll] = 1;", "write of 4 bytes, "),
        ("y[i] = x[i] + x[i - 1000000000ll];", "read of 4 bytes, "),
        ("((float*)x)[i] = 9; y[i] = x[i];", "which is an input"),
        ("y[i] = *(float*)((char*)x + 2);", "which is not aligned to 4"),
        ("y[i] = x[i]; *(float4*)(y + 30) = float4 { 1, 2, 3, 4 };", "write of 16 bytes at byte 120 of y"),
        ("y[i] = x[i]; atomicAdd(y + 4096 + i, 1.0f);", "atomic operation of 4 bytes, "),
        ("y[i] = x[i]; *(volatile int*)8 = 1;", "write of 4 bytes, "),
        ("y[i] = x[i]; asm volatile(\"st.global.u32 [%0], 1;\" :: \"l\"(y + 64));", "write of 4 bytes, "),
    ] {
        let p = place();
        let ran = script(&p, &kernel(body), &["--check-kernels"]);
        let text = format!("{body}: {:?}\n{}{}", ran.status, ran.out, ran.err);
        assert!(ran.status == Some(0) && ran.out.contains("failed"), "{text}");
        assert!(ran.out.contains(what) && ran.out.contains("s.lua:4: ") && ran.out.contains("bad"), "{text}");
        // Neither the tensors beside it nor its input have changed.
        assert!(ran.out.contains(BESIDE) && ran.out.trim_end().ends_with("\t96.0"), "{text}");
    }
}

#[test]
fn instructions_that_cannot_be_checked_are_refused() {
    if !has_gpu() {
        return;
    }
    for (body, what) in [
        ("y[i] = x[i]; printf(\"%s\", (const char*)x);", "printf"),
        ("y[i] = x[i]; asm volatile(\"discard.global.L2 [%0], 128;\" :: \"l\"(y));", "discard.global.L2"),
    ] {
        let ran = script(&place(), &kernel(body), &["--check-kernels"]);
        let text = format!("{body}: {:?}\n{}{}", ran.status, ran.out, ran.err);
        assert!(ran.out.contains("failed") && ran.out.contains(what) && ran.out.contains("s.lua:4: "), "{text}");
    }
}

#[test]
fn endless_kernels_are_contained() {
    if !has_gpu() {
        return;
    }
    let limit = Duration::from_secs(1);
    for (body, must_end_process) in [
        ("while (1) y[i] += x[i];", false),
        ("volatile float* v = y; v[i] = 1; while (v[i] == 1) { }", false),
        ("while (x[0] < 1e30f) __syncthreads(); y[i] = 1;", false),
        ("volatile int s = 0; for (;;) { s += i; }", false),
        ("if (i == 0) asm volatile(\"barrier.sync 1, 64;\"); y[i] = x[i];", true),
    ] {
        for flags in [
            &["--kernel-time=1s"][..],
            &["--kernel-time=1s", "--check-kernels"],
            &["--kernel-time=1s", "--untrusted", "--allow-kernels", "--accept-missing-walls"],
        ] {
            let p = place();
            let began = Instant::now();
            let ran = script(&p, &kernel(body), flags);
            let text = format!("{body} {flags:?}: {:?} {:?}\n{}{}", ran.status, began.elapsed(), ran.out, ran.err);
            assert!(began.elapsed() < START + limit + CONTAINED, "{text}");
            let said = if must_end_process { &ran.err } else { &ran.out };
            assert!(said.contains("longer than 1 s") && said.contains("bad") && said.contains("s.lua:"), "{text}");
            assert!(said.contains("--kernel-time"), "{text}");
            match must_end_process {
                true => assert_eq!(ran.status, Some(123), "{text}"),
                // The context goes on.
                false => assert!(ran.status == Some(0) && ran.out.contains(BESIDE), "{text}"),
            }
        }
    }
}

#[test]
fn a_neutral_run_beside_keeps_its_bits() {
    let p = place();
    p.file("tiny.lua", support::TINY);
    let device = std::env::var("PERILUNE_DEVICE").unwrap_or_else(|_| "cpu".into());
    let weights = |ran: &Ran| ran.events().iter().rev().find_map(|e| Some(e.get("weights")?.to_string()));
    let bad = place();
    // Longer runs, until both kernels have gone wrong while one trained.
    for steps in [1_000, 10_000, 100_000] {
        let set = format!("steps={steps}");
        let tiny = || p.command(&["run", "tiny.lua", "--device", &device, "--json", "--set", &set]);
        let mut beside =
            tiny().stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let out = std::thread::scope(|scope| {
            let pipe = beside.stdout.take().unwrap();
            let reader = scope.spawn(move || std::io::read_to_string(pipe).unwrap());
            let mut has_overlapped = true;
            for body in ["y[i + 100000] = 1;", "volatile int s = 0; for (;;) { s += i; }"] {
                script(&bad, &kernel(body), &["--kernel-time=500ms", "--check-kernels"]);
                has_overlapped &= beside.try_wait().unwrap().is_none();
            }
            let mut ran: Ran = beside.wait_with_output().unwrap().into();
            ran.out = reader.join().unwrap();
            has_overlapped.then_some(ran)
        });
        let Some(beside) = out else { continue };
        let alone: Ran = tiny().output().unwrap().into();
        assert_eq!((alone.status, beside.status), (Some(0), Some(0)), "{}{}", alone.err, beside.err);
        assert!(weights(&alone).is_some() && weights(&alone) == weights(&beside));
        return;
    }
    panic!("no run was long enough");
}

#[test]
fn the_options_are_read_on_any_device() {
    let p = place();
    let text = kernel("y[i] = x[i] * 2;");
    for flags in [&["--check-kernels"][..], &["--kernel-time", "500ms"], &["--check-kernels", "--kernel-time=1m"]] {
        let ran = script(&p, &text, flags);
        assert!(ran.status == Some(0) && ran.out.contains("sum\t192"), "{flags:?}: {}{}", ran.out, ran.err);
    }
    let ran = script(&p, &text, &["--untrusted", "--allow-kernels", "--check-kernels", "--accept-missing-walls"]);
    assert!(ran.status == Some(0) && ran.out.contains("sum\t192"), "{}{}", ran.out, ran.err);
    let ran = script(&p, &text, &["--kernel-time=soon"]);
    assert!(ran.status == Some(2) && ran.err.contains("write a time such as"), "{}", ran.err);
}
