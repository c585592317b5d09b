//! Tests generated kernels of typical regions: that they compile without spills, and what their text depends on.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::elementwise::{Domain, MapFn};
use perilune_core::ops::{self, Class, create, random};
use perilune_core::{DType, Mesh, Placement, Shape};
use perilune_cuda::emit;
use perilune_cuda::launch::Props;
use perilune_plan::ir::{Code, Kernel, Program, Source, Storage};
use std::collections::BTreeSet;

/// The oldest supported architecture, and the one that kernels are tuned for. Large sets are compiled only for the
/// latter; the patterns of training steps also for the newest, as are those of all plan snapshots
/// (tests/tests/plan.rs).
const OLDEST: &str = "sm_80";
const NEWEST: &str = "sm_90a";
const COMING: &str = "sm_100a";

/// Compiles a call of each map's device function on every type it computes in. The overload is selected explicitly, so
/// that no conversion can hide a missing one.
#[test]
fn every_map_has_a_device_function() {
    let Some(nvrtc) = nvrtc::Nvrtc::open() else { return };
    let mut calls = String::new();
    let mut n = 0;
    for f in MapFn::ALL {
        let types: &[&str] = match f.domain() {
            Domain::Float | Domain::Code => &["f32", "f64"],
            Domain::Logic => &["u8"],
            Domain::Number | Domain::Any | Domain::Compare => &["f32", "f64", "i64", "i32", "u8"],
        };
        for t in types {
            let kinds: Vec<&str> =
                (0..f.arity()).map(|k| if (*f, k) == (MapFn::Where, 0) { "u8" } else { t }).collect();
            let args: String = kinds.iter().enumerate().map(|(k, t)| format!(", ((const {t}*)in)[{k}]")).collect();
            calls += &format!("    out[{n}] = (f64)exact<{}>({}{args});\n", kinds.join(", "), emit::function(*f));
            n += 1;
        }
    }
    // Selects the overload with exactly these types and any return type.
    let exact = "template <typename A, typename R> __device__ R exact(R (*f)(A), A x) { return f(x); }\n\
        template <typename A, typename B, typename R> __device__ R exact(R (*f)(A, B), A x, B y) { return f(x, y); }\n\
        template <typename A, typename B, typename C, typename R>\n\
        __device__ R exact(R (*f)(A, B, C), A x, B y, C z) { return f(x, y, z); }\n";
    let source = format!(
        "#include \"device/ops.cuh\"\n{exact}extern \"C\" __global__ void maps(const void* in, f64* out) {{\n{calls}}}\n"
    );
    assert!(n > MapFn::ALL.len());
    for arch in [OLDEST, NEWEST, COMING] {
        assert_eq!(nvrtc.verdict(&source, arch, &["--fmad=false"]).functions, 1);
    }
}

#[test]
fn maps_of_all_dtypes_compile() {
    let mut all = Functions::default();
    for f in MapFn::ALL {
        for d in DType::ALL {
            let fits = match f.domain() {
                Domain::Float | Domain::Code => d.is_float(),
                Domain::Number => d != DType::Bool,
                Domain::Logic => d == DType::Bool,
                Domain::Any | Domain::Compare => true,
            };
            if !fits {
                continue;
            }
            let mut s = Sketch::default();
            let args: Vec<_> = (0..f.arity())
                .map(|k| s.leaf(if *f == MapFn::Where && k == 0 { DType::Bool } else { d }, &[64, 33]))
                .collect();
            let op = ops::all().iter().find(|op| matches!(op.class, Class::Map(m) if m == *f)).unwrap();
            let y = s.g.map(op, &args).unwrap();
            all.add(&works(&s.program(&[y], true)));
        }
    }
    for from in DType::ALL {
        for to in DType::ALL {
            let mut s = Sketch::default();
            let x = s.leaf(from, &[512]);
            let y = s.g.cast(x, to).unwrap();
            if y != x {
                all.add(&works(&s.program(&[y], true)));
            }
        }
    }
    all.compile(NEWEST);
}

/// Compiles what programs need.
fn compile(programs: &[Program], arches: &[&str]) {
    let mut all = Functions::default();
    for p in programs {
        all.add(&works(p));
    }
    for arch in arches {
        all.compile(arch);
    }
}

/// Labels of the launches of a program's regions.
fn labels(p: &Program) -> Vec<String> {
    works(p).iter().flat_map(|w| &w.launches).map(|l| l.function.label.clone()).collect()
}

fn strategies(p: &Program) -> BTreeSet<String> {
    labels(p).iter().map(|l| l.split('_').next().unwrap_or("").to_string()).collect()
}

/// Kernels that read what a device has of an input that is whole on all.
#[test]
fn blocks_of_inputs_compile() {
    let mut s = Sketch::default();
    let (x, w) = (s.leaf(DType::F32, &[4096, 768]), s.leaf(DType::F32, &[768]));
    let y = s.call("layer_norm", &[t(x), t(w), t(w)]);
    let z = s.call("mul", &[t(x), t(w)]);
    let half = s.g.cast(x, DType::BF16).unwrap();
    let sums = s.call("sum", &[t(z)]);
    let mut p = s.program(&[y, z, half, sums], true);
    let start = p.slots.len() as u32;
    p.slots.push(DType::I64);
    let regions = p.kernels.iter_mut().filter_map(|k| if let Kernel::Region(r) = k { Some(r) } else { None });
    let mut blocks = 0;
    for i in regions.flat_map(|r| &mut r.body) {
        if let Code::Load { source, .. } = &mut i.code
            && let Source::Value(input) = *source
            && matches!(p.values[input.0 as usize].storage, Storage::Input(_))
        {
            (*source, blocks) = (Source::Block { input, start }, blocks + 1);
        }
    }
    assert!(blocks >= 2, "{blocks} loads");
    let texts: Vec<String> = works(&p).iter().flat_map(|w| &w.launches).map(|l| l.function.text.clone()).collect();
    assert!(texts.iter().any(|text| text.contains(" + slots[")), "{}", texts.join("\n"));
    compile(&[p], &[OLDEST, NEWEST]);
}

/// Functions with long code for rare arguments are not unrolled: an edit of a recipe's kernel must run within 300 ms.
#[test]
fn long_functions_are_written_once_a_pack() {
    let mut s = Sketch::default();
    let x = s.leaf(DType::F32, &[1024, 1024]);
    for (op, packs) in [("sin", "k < 1;"), ("cos", "k < 1;"), ("tan", "k < 1;"), ("erf", "k < 4;")] {
        let y = s.call(op, &[t(x)]);
        let y = s.call("exp", &[t(y)]);
        let all = works(&s.program(&[y], true));
        let text = &all[0].launches[0].function.text;
        assert!(text.contains(packs), "{op}: {text}");
    }
}

#[test]
fn softmax_norms_and_losses_compile() {
    let mut programs = Vec::new();
    for d in [DType::F32, DType::BF16] {
        for (rows, cols) in [
            (64, 10),
            (4096, 768),
            (1024, 1000),
            (512, 2048),
            (512, 4096),
            (512, 8191),
            (300, 20000),
            (300, 50257),
            (2, 100000),
        ] {
            let mut s = Sketch::default();
            let (x, w, b, c) =
                (s.leaf(d, &[rows, cols]), s.leaf(d, &[cols]), s.leaf(d, &[cols]), s.leaf(d, &[rows, cols]));
            let y = s.call("softmax", &[t(x), int(-1)]);
            programs.push(s.program(&[y], true));
            let m = s.call("mul", &[t(y), t(c)]);
            let l = s.call("sum", &[t(m)]);
            let g = s.grads(l, &[x]);
            programs.push(s.program(&g, true));
            let y = s.call("layer_norm", &[t(x), t(w), t(b)]);
            programs.push(s.program(&[y], true));
            let m = s.call("mul", &[t(y), t(c)]);
            let l = s.call("sum", &[t(m)]);
            let mut g = s.grads(l, &[x, w, b]);
            g.push(y);
            programs.push(s.program(&g, true));
            let target = s.leaf(DType::I64, &[rows]);
            let l = s.call("cross_entropy", &[t(x), t(target)]);
            let g = s.grads(l, &[x]);
            programs.push(s.program(&g, true));
        }
    }
    compile(&programs, &[NEWEST]);
}

#[test]
fn reductions_compile() {
    let mut programs = Vec::new();
    for d in [DType::F64, DType::F32, DType::BF16, DType::I64, DType::Bool] {
        for name in ["sum", "amax"] {
            for (dims, axes) in [
                (&[100, 60][..], &[0][..]),
                (&[100, 60], &[1]),
                (&[7, 500, 33], &[1]),
                (&[7, 500, 33], &[0, 2]),
                (&[50_000_000], &[0]),
                (&[3, 5_000], &[1]),
                (&[100_000, 8], &[0]),
                (&[40, 70_000], &[0]),
            ] {
                let mut s = Sketch::default();
                let x = s.leaf(d, dims);
                let y = s.call(name, &[t(x), ints(axes)]);
                programs.push(s.program(&[y], true));
            }
        }
    }
    compile(&programs, &[NEWEST]);
}

#[test]
fn views_compile_and_share_text_across_sizes() {
    let mut texts: Vec<BTreeSet<String>> = Vec::new();
    for (r, c) in [(64, 96), (128, 32)] {
        let mut found = BTreeSet::new();
        for d in [DType::F32, DType::BF16, DType::U8] {
            let mut s = Sketch::default();
            let x = s.leaf(d, &[r, c]);
            let y = s.leaf(d, &[c, r]);
            let (row, col) = (s.leaf(d, &[c]), s.leaf(d, &[r, 1]));
            let p = s.g.permute(y, &[1, 0]).unwrap();
            let f = s.g.flip(x, 1).unwrap();
            let wide = s.leaf(d, &[2 * r + 1, c + 3]);
            let cut = s.g.slice(wide, 0, 1, 1 + 2 * r, 2).unwrap();
            let cut = s.g.slice(cut, 1, 2, 2 + c, 1).unwrap();
            for other in [row, col, p, f, cut] {
                let z = s.call("add", &[t(x), t(other)]);
                let program = s.program(&[z], true);
                assert_eq!(program.kernels.len(), 1);
                found.extend(works(&program).iter().flat_map(|w| &w.launches).map(|l| l.function.text.clone()));
                if texts.is_empty() {
                    compile(&[program], &[OLDEST, NEWEST]);
                }
            }
        }
        texts.push(found);
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn an_optimizer_step_is_a_few_launches() {
    let mut s = Sketch::default();
    let shapes: [&[usize]; 5] = [&[768, 3072], &[3072], &[50257, 768], &[768], &[1, 3]];
    for dims in shapes {
        let (w, m, v) = (s.state(DType::F32, dims), s.state(DType::F32, dims), s.state(DType::F32, dims));
        let g = s.leaf(DType::BF16, dims);
        let g = s.g.cast(g, DType::F32).unwrap();
        let args = [t(w.1), t(g), t(m.1), t(v.1)];
        let options = [("lr", float(1e-3)), ("step", int(3)), ("weight_decay", float(0.1))];
        let out = s.call_all("adamw_update", &args, &options);
        for (state, x) in [w, m, v].into_iter().zip(out) {
            s.assign(state.0, x);
        }
    }
    let p = s.program(&[], true);
    assert!(p.kernels.iter().any(|k| matches!(k, Kernel::Multi(_))));
    assert_eq!(labels(&p).len(), 2, "{:?}", labels(&p));
    let mut s = Sketch::default();
    let mut norms = Vec::new();
    for dims in shapes {
        let x = s.leaf(DType::BF16, dims);
        let x = s.g.cast(x, DType::F32).unwrap();
        let square = s.call("mul", &[t(x), t(x)]);
        norms.push(s.call("sum", &[t(square)]));
    }
    let q = s.program(&norms, true);
    assert_eq!(strategies(&q).into_iter().collect::<Vec<_>>(), ["rows"]);
    println!("{:?}", labels(&q));
    compile(&[p, q], &[OLDEST, NEWEST]);
}

#[test]
fn norms_and_losses_read_their_inputs_once() {
    let mut s = Sketch::default();
    let d = DType::BF16;
    let (x, w, b, c) = (s.leaf(d, &[4096, 4096]), s.leaf(d, &[4096]), s.leaf(d, &[4096]), s.leaf(d, &[4096, 4096]));
    let y = s.call("layer_norm", &[t(x), t(w), t(b)]);
    // All labels except casts of weights.
    let large = |p: &Program| -> Vec<String> {
        labels(p).into_iter().filter(|l| !l.starts_with("map_cast") && !l.starts_with("map_copy")).collect()
    };
    let forward = large(&s.program(&[y], true));
    assert!(forward.len() == 1 && forward[0].starts_with("row_loop"), "{forward:?}");
    let m = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(m)]);
    let g = s.grads(l, &[x, w, b]);
    let backward = large(&s.program(&g, true));
    assert!(backward.len() == 2 && backward[0].starts_with("row_col"), "{backward:?}");
    assert!(backward[1].starts_with("col_combine"), "{backward:?}");
    let (x, target) = (s.leaf(d, &[4096, 50304]), s.leaf(DType::I64, &[4096]));
    let l = s.call("cross_entropy", &[t(x), t(target)]);
    let mut g = s.grads(l, &[x]);
    g.push(l);
    let loss = s.program(&g, true);
    let over_logits = loss.kernels.iter().flat_map(Kernel::regions).filter(|r| r.numel() == 4096 * 50304).count();
    let staged = labels(&loss).iter().filter(|l| l.starts_with("row_smem")).count();
    assert_eq!((over_logits, staged), (1, 1), "{:?}", labels(&loss));
    // The row is in registers. `exp` is computed once in each of a team's three chunks, and kept. No pass over the row
    // compares the target's column. The next row is prefetched.
    let works = works(&loss);
    let launches = works.iter().flat_map(|w| &w.launches);
    let text = &launches.map(|l| &l.function).find(|f| f.label.starts_with("row_smem")).unwrap().text;
    let count = |what: &str| text.matches(what).count();
    assert_eq!(
        (count("op_exp("), count("smem_store_f32"), count("op_eq("), count("prefetch_l2(")),
        (3, 3, 1, 1),
        "{text}"
    );
    assert_eq!((count("cp_async"), count("unpack_words")), (0, 3), "{text}");
}

/// All kinds of rows staged in shared memory: with and without kept `exp`, and with separate columns in sums that
/// depend on them.
#[test]
fn staged_rows_compile() {
    let mut programs = Vec::new();
    for (d, cols) in
        [(DType::BF16, 50304), (DType::F16, 50302), (DType::BF16, 28000), (DType::F32, 28000), (DType::F32, 50304)]
    {
        let mut s = Sketch::default();
        let (x, target) = (s.leaf(d, &[600, cols]), s.leaf(DType::I64, &[600]));
        let smooth = [("label_smoothing", float(0.1))];
        let l = s.call_all("cross_entropy", &[t(x), t(target)], &smooth)[0];
        let g = s.grads(l, &[x]);
        programs.push(s.program(&g, true));
        let y = s.call("log_softmax", &[t(x), int(-1)]);
        programs.push(s.program(&[y], true));
        let y = s.call("softmax", &[t(x), int(-1)]);
        let low = s.call("amin", &[t(x), ints(&[1])]);
        programs.push(s.program(&[y, low], true));
        assert!(programs.iter().all(|p| labels(p).iter().any(|l| l.starts_with("row_smem"))), "{d} {cols}");
    }
    compile(&programs, &[OLDEST, NEWEST]);
    let (mut all, coming) = (Functions::default(), Props { arch: (10, 0), ..Props::H200 });
    programs.iter().for_each(|p| all.add(&works_on(p, &coming)));
    all.compile(COMING);
}

/// The work of a block between two products: adds to the residual stream, normalises and, in the backward pass, also
/// computes a bias gradient.
fn between_products(d: DType, rows: usize, cols: usize) -> Program {
    let mut s = Sketch::default();
    let f = DType::F32;
    let (x, w, b) = (s.leaf(f, &[rows, cols]), s.leaf(f, &[cols]), s.leaf(f, &[cols]));
    let (u, first, bias) = (s.leaf(d, &[rows, cols]), s.leaf(d, &[cols, cols]), s.leaf(d, &[cols]));
    let (second, g, r) = (s.leaf(d, &[cols, cols]), s.leaf(d, &[rows, cols]), s.leaf(f, &[rows, cols]));
    let h = s.call("linear", &[t(u), t(first), t(bias)]);
    let h = s.g.cast(h, f).unwrap();
    let x = s.call("add", &[t(x), t(h)]);
    let y = s.call("layer_norm", &[t(x), t(w), t(b)]);
    let y = s.g.cast(y, d).unwrap();
    let z = s.call("linear", &[t(y), t(second)]);
    // Squared, so that the backward pass depends on the forward one.
    let m = s.call("mul", &[t(z), t(z)]);
    let m = s.call("mul", &[t(m), t(g)]);
    let (l, k) = (s.call("sum", &[t(m)]), s.call("mul", &[t(x), t(r)]));
    let k = s.call("sum", &[t(k)]);
    let l = s.call("add", &[t(l), t(k)]);
    let g = s.grads(l, &[x, u, bias, w, b]);
    s.program(&g, true)
}

/// One pass over the rows forward and one backward for every width; if registers are short, passes recompute values.
#[test]
fn norms_between_products_take_one_pass_over_rows() {
    let programs: Vec<Program> =
        [(32768, 768), (32768, 1024), (8192, 1600)].map(|(r, c)| between_products(DType::BF16, r, c)).into();
    for p in &programs {
        let rows: Vec<String> = labels(p).into_iter().filter(|l| l.starts_with("row")).collect();
        assert!(matches!(&rows[..], [a, b] if a.starts_with("row_loop") && b.starts_with("row_col")), "{rows:?}");
    }
    compile(&programs, &[NEWEST]);
}

/// Writes the texts of the main patterns to `PERILUNE_DUMP`, for inspecting their machine code.
#[test]
fn texts_of_the_main_patterns_are_written_on_request() {
    let mut all = Functions::default();
    for d in [DType::F32, DType::BF16] {
        let mut s = Sketch::default();
        let (x, y) = (s.leaf(d, &[4096, 4096]), s.leaf(d, &[4096, 4096]));
        let a = s.call("mul", &[t(x), float(2.0)]);
        let a = s.call("add", &[t(a), t(y)]);
        let a = s.call("relu", &[t(a)]);
        all.add(&works(&s.program(&[a], true)));
        let (p, q) = (s.leaf(d, &[64 << 20]), s.leaf(d, &[64 << 20]));
        let mut a = p;
        let steps = [("mul", float(1.5)), ("add", t(q)), ("mul", t(p)), ("sub", float(0.5))];
        for (op, b) in steps {
            a = s.call(op, &[t(a), b]);
        }
        a = s.call("relu", &[t(a)]);
        for (op, b) in [("mul", t(q)), ("add", t(p)), ("mul", float(0.25)), ("sub", t(q))] {
            a = s.call(op, &[t(a), b]);
        }
        all.add(&works(&s.program(&[a], true)));
        let (w, b, c) = (s.leaf(d, &[4096]), s.leaf(d, &[4096]), s.leaf(d, &[4096, 4096]));
        let a = s.call("softmax", &[t(x), int(-1)]);
        all.add(&works(&s.program(&[a], true)));
        let a = s.call("layer_norm", &[t(x), t(w), t(b)]);
        all.add(&works(&s.program(&[a], true)));
        let m = s.call("mul", &[t(a), t(c)]);
        let l = s.call("sum", &[t(m)]);
        let g = s.grads(l, &[x, w, b]);
        all.add(&works(&s.program(&g, true)));
        let a = s.call("sum", &[t(x), ints(&[0])]);
        all.add(&works(&s.program(&[a], true)));
        all.add(&works(&between_products(d, 32768, 768)));
        let mut s = Sketch::default();
        let (x, b, g) = (s.leaf(d, &[32768, 3072]), s.leaf(d, &[3072]), s.leaf(d, &[32768, 3072]));
        let y = s.call("add", &[t(x), t(b)]);
        let y = s.call_all("gelu", &[t(y)], &[("approximate", ops::Value::Str("tanh".into()))])[0];
        let m = s.call("mul", &[t(y), t(g)]);
        let l = s.call("sum", &[t(m)]);
        let g = s.grads(l, &[x, b]);
        all.add(&works(&s.program(&g, true)));
        let (x, target) = (s.leaf(d, &[32768, 50304]), s.leaf(DType::I64, &[32768]));
        let l = s.call("cross_entropy", &[t(x), t(target)]);
        let mut g = s.grads(l, &[x]);
        g.push(l);
        all.add(&works(&s.program(&g, true)));
    }
    if let Ok(dir) = std::env::var("PERILUNE_DUMP") {
        for (k, f) in all.by_text.values().enumerate() {
            std::fs::write(format!("{dir}/{k:02}_{}.pattern", f.label), &f.text).unwrap();
        }
    }
    for arch in [NEWEST, COMING] {
        assert_eq!(all.compile(arch), 0, "{arch}: functions with a stack");
    }
}

#[test]
fn like_reductions_of_equal_shape_share_launches() {
    let mut s = Sketch::default();
    let mut roots = Vec::new();
    for _ in 0..3 {
        let x = s.leaf(DType::F32, &[3000, 40]);
        roots.push(s.call("sum", &[t(x), ints(&[0])]));
        let m = s.call("amax", &[t(x), ints(&[1])]);
        roots.push(s.call("sum", &[t(m)]));
    }
    let p = s.program(&roots, true);
    assert!(p.kernels.iter().any(|k| matches!(k, Kernel::Multi(_))));
    compile(&[p], &[OLDEST, NEWEST]);
}

/// The gradient of GPT-2's position embeddings. With so many columns, splitting the few rows into chunks gains nothing,
/// since the partials would have to be combined.
#[test]
fn wide_columns_of_few_rows_are_summed_at_once() {
    for rows in [2, 4, 32] {
        let mut s = Sketch::default();
        let x = s.leaf(DType::BF16, &[rows, 1024, 768]);
        let y = s.call("sum", &[t(x), ints(&[0])]);
        let p = s.program(&[y], true);
        assert_eq!(works(&p).iter().map(|w| w.launches.len()).collect::<Vec<_>>(), [1], "{rows} rows");
    }
    // Few columns need chunks to fill a GPU.
    let mut s = Sketch::default();
    let x = s.leaf(DType::BF16, &[4096, 768]);
    let y = s.call("sum", &[t(x), ints(&[0])]);
    assert_eq!(works(&s.program(&[y], true))[0].launches.len(), 2);
}

#[test]
fn parts_of_generated_tensors_compile() {
    let mesh = Mesh::parse("dp=2,tp=3").unwrap();
    let placement = Placement::REPLICATED.with(Axis::Dp, Along::Split(0)).with(Axis::Tp, Along::Split(1));
    let mut programs = Vec::new();
    for shape in [[64, 96], [7, 1000], [3, 50_000]] {
        let mut s = Sketch::default();
        let u = random::draw(&mut s.g, Shape::of(&shape)).unwrap();
        let u = create::shard(&mut s.g, u, &mesh, &placement).unwrap();
        let i = create::iota(&mut s.g, shape[1]).unwrap();
        let i = create::shard(&mut s.g, i, &mesh, &Placement::REPLICATED.with(Axis::Tp, Along::Split(0))).unwrap();
        let i = s.g.cast(i, DType::F32).unwrap();
        let y = s.g.mul(u, i).unwrap();
        let sum = s.g.sum(y, &[1], true).unwrap();
        let z = s.g.sub(y, sum).unwrap();
        let p = s.program(&[i, z], true);
        assert_eq!(p.starts.len(), 2);
        let text: String = works(&p).iter().flat_map(|w| &w.launches).map(|l| l.function.text.clone()).collect();
        assert!(text.contains("const u64 start"), "{text}");
        programs.push(p);
    }
    compile(&programs, &[NEWEST]);
}
