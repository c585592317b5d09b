//! Tests the switches of the guide in scripts, recipes, the prompt and `check`.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, Ran, place, tiny};

const SCRIPT: &str = r#"
local pl = require "perilune"
local x = pl.randn { 64, 32 }
print(x:exp():sum():item() > 0)
"#;

fn with(p: &Place, args: &[&str], env: &[(&str, &str)]) -> Ran {
    p.command(args).envs(env.iter().copied()).output().unwrap().into()
}

#[test]
fn plans_are_printed_wherever_they_are_compiled() {
    let p = tiny();
    p.file("script.lua", SCRIPT);
    for (args, line) in [
        (["run", "script.lua", "--device", "cpu"], "script.lua:4"),
        (["run", "tiny.lua", "--device", "cpu"], "tiny.lua:"),
        (["check", "tiny.lua", "--device", "cpu"], "tiny.lua:"),
    ] {
        let r = with(&p, &args, &[("PERILUNE_PRINT_PLAN", "1")]);
        assert_eq!(r.status, Some(0), "{args:?}: {}", r.err);
        assert!(r.err.contains(" kernels · ") && r.err.contains(line), "{args:?}: {}", r.err);
        assert!(!r.err.contains("__global__"), "{args:?}: {}", r.err);
        let r = with(&p, &args, &[("PERILUNE_PRINT_PLAN", "source")]);
        assert!(r.err.contains("as a GPU (") && r.err.contains("__global__"), "{args:?}: {}", r.err);
        let r = with(&p, &args, &[("PERILUNE_PRINT_PLAN", "off")]);
        assert!(!r.err.contains(" kernels · "), "{args:?}: {}", r.err);
    }
}

#[test]
fn plans_of_a_script_are_printed_though_it_fails_later() {
    let p = place();
    p.file("script.lua", format!("{SCRIPT}\nerror 'no more'"));
    let r = with(&p, &["run", "script.lua", "--device", "cpu"], &[("PERILUNE_PRINT_PLAN", "1")]);
    assert_eq!(r.status, Some(3));
    assert!(r.err.contains(" kernels · ") && r.err.contains("no more"), "{}", r.err);
}

#[test]
fn lua_sets_what_is_printed() {
    let p = place();
    p.file("script.lua", SCRIPT.replace("print(", "pl.switches { print_plan = true }\nprint("));
    let r = p.run(&["run", "script.lua", "--device", "cpu"]);
    assert!(r.err.contains(" kernels · ") && !r.err.contains("__global__"), "{}", r.err);
    p.file("script.lua", SCRIPT.replace("print(", "pl.switches { print_plan = \"source\" }\nprint("));
    let r = p.run(&["run", "script.lua", "--device", "cpu"]);
    assert!(r.err.contains("as a GPU ("), "{}", r.err);
    p.file("script.lua", SCRIPT.replace("print(", "pl.switches { print_plan = \"bogus\" }\nprint("));
    let r = p.run(&["run", "script.lua", "--device", "cpu"]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    let want = "option 'print_plan' is \"bogus\"; it must be true, false or \"source\"";
    assert!(r.err.contains(want), "{}", r.err);
}

#[test]
fn the_prompt_prints_plans_with_their_texts() {
    let p = place();
    let mut child = p
        .command(&["repl", "--device", "cpu"])
        .env("PERILUNE_PRINT_PLAN", "source")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"pl.ones({3}):exp():sum():item()\n").unwrap();
    let r: Ran = child.wait_with_output().unwrap().into();
    assert!(r.out.contains("as a GPU (") && r.out.contains("__global__"), "{}", r.out);
}

/// A loop whose shape changes after its warm-up.
const SHIFTS: &str = r#"
local pl = require "perilune"
local w = pl.state(pl.ones { 3 })
for i = 1, 12 do
  local n = i == 12 and 7 or 5
  pl.step(function() w:assign(w * pl.ones({ n, 3 }):sum(0)) end)
end
"#;

#[test]
fn a_new_plan_in_a_warm_loop_is_explained() {
    let p = place();
    p.file("shifts.lua", SHIFTS);
    let r = p.run(&["run", "shifts.lua", "--device", "cpu"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.err.contains("warning: new plan: first difference is ") && r.err.contains("shifts.lua:6"), "{}", r.err);
    let r = p.run(&["run", "shifts.lua", "--device", "cpu", "--json"]);
    let first = &r.events()[0];
    assert!(first["event"] == "warning" && first["message"].as_str().unwrap().contains("new plan: "), "{}", r.out);
    let r = with(&p, &["run", "shifts.lua", "--device", "cpu"], &[("PERILUNE_REPORT_MISSES", "0")]);
    assert_eq!(r.err, "");
}

#[test]
fn a_word_that_a_switch_does_not_take_is_refused() {
    let p = tiny();
    for (name, value) in
        [("PERILUNE_TUNE", "fast"), ("PERILUNE_REPLAY", "never"), ("PERILUNE_CUDNN", "2"), ("PERILUNE_FUSION", "of")]
    {
        let r = with(&p, &["run", "tiny.lua", "--device", "cpu"], &[(name, value)]);
        assert_eq!(r.status, Some(2), "{name}: {}", r.err);
        let want = format!("{name}={value}: it takes 1 on true yes for on, 0 off false no for off");
        assert!(r.err.contains(&want), "{}", r.err);
    }
    let r = with(
        &p,
        &["run", "tiny.lua", "--device", "cpu", "--quiet"],
        &[("PERILUNE_TUNE", "off"), ("PERILUNE_CUDNN", "")],
    );
    assert_eq!(r.status, Some(0), "{}", r.err);
}

#[test]
fn the_instruction_set_is_one_of_three_that_the_processor_has() {
    let p = tiny();
    let r = with(&p, &["run", "tiny.lua", "--device", "cpu"], &[("PERILUNE_CPU_ISA", "avx3")]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    assert!(r.err.contains("PERILUNE_CPU_ISA=avx3: it takes sse2 or avx2 or avx512"), "{}", r.err);
    let r = with(&p, &["run", "tiny.lua", "--device", "cpu", "--quiet"], &[("PERILUNE_CPU_ISA", "sse2")]);
    assert_eq!(r.status, if cfg!(target_arch = "x86_64") { Some(0) } else { Some(2) }, "{}", r.err);
    let r = with(&p, &["run", "tiny.lua", "--device", "cpu", "--quiet"], &[("PERILUNE_CPU_ISA", "avx512")]);
    let refused = r.err.contains("PERILUNE_CPU_ISA=avx512: this processor lacks it");
    assert_eq!(r.status, if refused { Some(2) } else { Some(0) }, "{}", r.err);
}

#[test]
fn a_plan_of_a_non_tensor_is_an_error() {
    let p = place();
    for (given, is) in [("3", "3"), ("nil", "nil"), ("{ 1, 2 }", "a table")] {
        p.file("plan.lua", format!("local pl = require 'perilune'\nprint(pl.plan({given}))"));
        let r = p.run(&["run", "plan.lua", "--device", "cpu"]);
        assert_eq!(r.status, Some(3), "{given}: {}", r.out);
        let want = format!("plan.lua:2: plan: argument 1 is {is}; it must be a tensor or a table of tensors");
        assert!(r.err.contains(&want), "{}", r.err);
    }
}

#[test]
fn a_device_that_is_not_there_is_named_once() {
    let r = tiny().run(&["run", "tiny.lua", "--device", "cuda:99"]);
    assert_eq!(r.status, Some(1));
    assert!(r.err.contains("--device cuda:99: ") && !r.err.contains(": cuda: "), "{}", r.err);
}

/// A CUDA kernel with a reference for the CPU.
const KERNEL: &str = r#"
local pl = require "perilune"
local twice = pl.kernel {
  name = "twice", inputs = "x: f32",
  source = "__global__ void twice(const float* x, float* y, long long n) { long long i = blockIdx.x * 256ll + threadIdx.x; if (i < n) y[i] = 2 * x[i]; }",
  args = function(x) return x:numel() end,
  cpu = function(x) return x * 2 end,
  backward = function(g) return g * 2 end,
}
local w = pl.state(pl.ones { 700 })
"#;

#[test]
fn a_plan_on_the_cpu_shows_the_recipes_kernel_where_a_gpu_would_run_it() {
    let p = place();
    p.file(
        "k.lua",
        format!("{KERNEL}print(pl.plan(twice(w + 1):sum(), {{ source = true }}))\nprint(pl.plan(twice(w)))"),
    );
    let r = p.run(&["run", "k.lua", "--device", "cpu"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let (texts, plain) = r.out.rsplit_once("kernels · ").unwrap();
    assert!(texts.contains("as a GPU (") && texts.contains("__global__ void twice("), "{texts}");
    // The launch, with the grid from `grid`.
    assert!(texts.contains("twice") && texts.contains("k.lua:11"), "{texts}");
    assert!(!plain.contains("twice"), "what the CPU runs is the reference: {plain}");
    // A compiled plan and that of a gradient show it too; the values are those of the reference.
    p.file(
        "k.lua",
        format!(
            "{KERNEL}local g = pl.step(function() twice(w):sum():backward() return w.grad end)\nprint(g:sum():item())"
        ),
    );
    let r = with(&p, &["run", "k.lua", "--device", "cpu"], &[("PERILUNE_PRINT_PLAN", "source")]);
    assert_eq!((r.status, r.out.as_str()), (Some(0), "1400.0\n"), "{}", r.err);
    p.file("k.lua", format!("{KERNEL}print(twice(w * 3):sum():item())"));
    let r = with(&p, &["run", "k.lua", "--device", "cpu"], &[("PERILUNE_PRINT_PLAN", "source")]);
    assert_eq!((r.status, r.out.as_str()), (Some(0), "4200.0\n"), "{}", r.err);
    assert!(r.err.contains("__global__ void twice("), "{}", r.err);
}

#[test]
fn a_gpus_plan_counts_what_attention_computes() {
    let p = place();
    p.file(
        "attention.lua",
        r#"
local pl = require "perilune"
local q = pl.eval(pl.randn({ 2, 64, 32 }):to "bf16")
for _, causal in ipairs { true, false } do
  print(pl.plan(pl.scaled_dot_product_attention(q, q, q, { is_causal = causal }), { source = true }))
end
"#,
    );
    let r = with(&p, &["run", "attention.lua", "--device", "cpu"], &[]);
    // 4 x 2 heads x 64 queries x 32 x 64 keys; half as many where half of the scores are masked.
    let flops: Vec<&str> = r.out.lines().filter(|l| l.contains(" scaled_dot_product_attention ")).collect();
    assert!(flops.len() == 2 && flops[0].contains("524.3 kFLOP") && flops[1].contains("1.0 MFLOP"), "{}", r.out);
}

/// An fp8 product on a GPU counts as many FLOP as the same product of 16-bit floats.
#[test]
fn a_gpus_plan_counts_products_of_bytes() {
    let p = place();
    p.file(
        "bytes.lua",
        r#"
local pl = require "perilune"
local x = pl.eval(pl.randn { 64, 128 })
local q = pl.eval(pl.quantize_fp8(x))
print(pl.plan(pl.matmul_fp8(q, q), { source = true }))
local h = pl.eval(x:to "bf16")
print(pl.plan(h:matmul(h:t()), { source = true }))
"#,
    );
    let r = with(&p, &["run", "bytes.lua", "--device", "cpu"], &[]);
    let products = r.out.lines().filter(|l| l.contains(" matmul_fp8 ") || l.contains(" matmul "));
    let flops: Vec<bool> = products.map(|l| l.contains("1.0 MFLOP")).collect(); // 2 x 64 x 64 x 128
    assert_eq!(flops, [true, true], "{}{}", r.out, r.err);
}
