//! Tests every op of the registry on every sample, without a backend: recorded nodes have the shapes and dtypes that
//! the op declares, gradients have those of their inputs, and derivatives agree with finite differences in f64.
#![allow(clippy::unwrap_used)]

mod eval;
mod sample;
mod values;

use eval::{eval, lower};
use perilune_core::graph::Node;
use perilune_core::ops::attention::{ATTENTION, ATTENTION_BACKWARD};
use perilune_core::ops::fp8::MATMUL_FP8;
use perilune_core::ops::matmul::MATMUL;
use perilune_core::ops::{self, Class, Count, Grad, Op, Results, Work};
use perilune_core::{DType, Graph, Kind, NodeId, Shape, grad};
use sample::Leaves;
use std::collections::{BTreeSet, HashMap, HashSet};

fn each_sample(mut f: impl FnMut(&'static Op, &'static str)) {
    for op in ops::all() {
        if !matches!(op.class, Class::Host(_)) {
            op.samples.iter().for_each(|s| f(op, s));
        }
    }
}

fn record(op: &'static Op, text: &str, float: DType) -> (Graph, Leaves, Vec<NodeId>) {
    let (mut g, mut leaves) = (Graph::new(), Leaves::default());
    let args = leaves.args(&mut g, op, text, float);
    let outs = ops::call(&mut g, op, &args).unwrap_or_else(|e| panic!("{}({text}): {e}", op.name));
    (g, leaves, outs.to_vec())
}

/// Gradients of sum(out * weight) over all float outputs, with respect to the float inputs.
fn gradients(
    g: &mut Graph,
    leaves: &mut Leaves,
    outs: &[NodeId],
    wrt: &[NodeId],
) -> Result<Vec<Option<NodeId>>, perilune_core::Error> {
    let mut total: Vec<Option<NodeId>> = vec![None; wrt.len()];
    for &o in outs {
        if !g.dtype(o).is_float() {
            continue;
        }
        let (shape, dtype) = (g.shape(o), g.dtype(o));
        let weights = (0..shape.numel()).map(|_| leaves.uniform() + 0.5).collect();
        let seed = leaves.leaf(g, shape, dtype, weights);
        for (t, d) in total.iter_mut().zip(grad::grad(g, o, seed, wrt, true)?) {
            *t = match (*t, d) {
                (Some(a), Some(b)) => Some(g.add_(a, b)?),
                (a, b) => a.or(b),
            };
        }
    }
    Ok(total)
}

#[test]
fn the_number_of_results_matches_the_declaration() {
    let mut wrong = Vec::new();
    each_sample(|op, text| {
        let n = record(op, text, DType::F64).2.len();
        let right = match op.results {
            Results::One => n == 1,
            Results::OneOrTwo => n == 1 || n == 2,
            Results::Named(names) => n == names.len(),
            Results::Several => n >= 1,
        };
        if !right {
            wrong.push(format!("{}({text}) gives {n} results, but says {:?}", op.name, op.results));
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Operations of the products that `roots` depend on, among the nodes from `from` on.
fn products_below(g: &Graph, roots: &[NodeId], from: usize) -> u64 {
    let (mut seen, mut stack, mut sum) = (HashSet::new(), roots.to_vec(), 0);
    while let Some(id) = stack.pop() {
        if id.index() >= from && seen.insert(id) {
            let node = g.node(id);
            sum += flops(g, node, &node.attrs);
            stack.extend(node.inputs.iter().copied());
        }
    }
    sum
}

fn flops(g: &Graph, node: &Node, attrs: &[i64]) -> u64 {
    let inputs: Vec<Shape> = node.inputs.iter().map(|x| g.shape(*x)).collect();
    let work = Work { inputs: &inputs, out: node.shape, attrs, count: Count::Executed };
    node.op.flops.map_or(0, |flops| flops(&work))
}

/// Each fused op, forward and backward, counts the operations of the products that it decomposes into.
#[test]
fn flops_are_those_of_the_decomposition() {
    let (mut wrong, mut counted) = (Vec::new(), BTreeSet::new());
    each_sample(|op, text| {
        let (mut g, mut leaves, outs) = record(op, text, DType::F32);
        let wrt = leaves.floats.clone();
        // Without gradients there are no backward nodes to count.
        let _ = gradients(&mut g, &mut leaves, &outs, &wrt);
        for k in 0..g.len() {
            let node = g.node(NodeId(k as u32)).clone();
            let Class::Fused(expand) = node.op.class else { continue };
            let from = g.len();
            let made = expand(&mut g, &node.inputs, &node.attrs).unwrap_or_else(|e| panic!("{}: {e}", node.op.name));
            let mut attrs = node.attrs.to_vec();
            if [&ATTENTION, &ATTENTION_BACKWARD].contains(&node.op) {
                attrs[0] = 0; // The decomposition makes all scores, under a causal mask too.
            }
            let (own, below) = (flops(&g, &node, &attrs), products_below(&g, &made, from));
            // A mean over windows of many sizes is computed with products, but counts none.
            if own != below && node.op.name != "adaptive_avg_pool2d" {
                wrong.push(format!("{} in {}({text}): {own}, decomposed {below}", node.op.name, op.name));
            }
            if own > 0 {
                counted.insert(node.op.name);
            }
        }
    });
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    for name in ["matmul_fp8", "conv_transpose2d", "conv2d_backward_input", ATTENTION_BACKWARD.name] {
        assert!(counted.contains(name), "{name} is not among {counted:?}");
    }
}

#[test]
fn a_product_of_bytes_counts_as_one_of_floats() {
    let [m, n, k] = [24, 32, 48];
    let of = |op: &Op, b: [usize; 2]| {
        let inputs = [Shape::of(&[m, k]), Shape::of(&b)];
        let work = Work { inputs: &inputs, out: Shape::of(&[m, n]), attrs: &[], count: Count::Meant };
        op.flops.map(|flops| flops(&work))
    };
    assert_eq!(of(&MATMUL_FP8, [n, k]), Some(2 * 24 * 32 * 48));
    assert_eq!(of(&MATMUL_FP8, [n, k]), of(&MATMUL, [k, n]));
}

#[test]
fn every_sample_records_lowers_and_differentiates() {
    each_sample(|op, text| {
        for float in [DType::F64, DType::F32, DType::BF16] {
            let (mut g, mut leaves, outs) = record(op, text, float);
            lower(&mut g, &outs, &mut HashMap::new());
            let wrt = leaves.floats.clone();
            let grads = match gradients(&mut g, &mut leaves, &outs, &wrt) {
                Ok(grads) => grads,
                Err(e) if matches!(op.grad, Grad::Missing(_)) && e.kind == Kind::Gradient => continue,
                Err(e) => panic!("{}({text}): {e}", op.name),
            };
            for (&x, d) in wrt.iter().zip(&grads) {
                let Some(d) = *d else { continue };
                let promised = (g.shape(x), g.dtype(x));
                assert_eq!((g.shape(d), g.dtype(d)), promised, "{}({text}): gradient for {float}", op.name);
            }
            let roots: Vec<NodeId> = grads.into_iter().flatten().collect();
            lower(&mut g, &roots, &mut HashMap::new());
        }
    });
}

/// Library ops of which `eval` has a naive version. `tests/tests/grad.rs` compares the gradients of all ops on a backend.
const LIBRARY: [&str; 16] = [
    "matmul",
    "grouped_matmul",
    "grouped_sums",
    "strided_pad",
    "col2im",
    "cat",
    "gather",
    "scatter",
    "scatter_add",
    "index_select",
    "class_ids",
    "index_add",
    "cumsum",
    "cumprod",
    "argsort",
    "argreduce",
];

/// Whether `eval` knows every lowered node of the graph.
fn has_references(g: &Graph) -> bool {
    let known = |n: &Node| !matches!(n.op.class, Class::Library) || LIBRARY.contains(&n.op.name);
    g.nodes().iter().all(known)
}

/// Compares the gradients of `outs` with finite differences at some elements of each input; returns the gradients.
fn check(
    what: &str,
    g: &mut Graph,
    leaves: &mut Leaves,
    outs: &[NodeId],
    wrt: &[NodeId],
    wrong: &mut Vec<String>,
) -> Vec<NodeId> {
    let before = leaves.values.len();
    let grads = match gradients(g, leaves, outs, wrt) {
        Ok(grads) => grads,
        Err(e) => {
            wrong.push(format!("{what}: {e}"));
            return Vec::new();
        }
    };
    let floats: Vec<NodeId> = outs.iter().filter(|o| g.dtype(**o).is_float()).copied().collect();
    let mut seeds: Vec<(NodeId, Vec<f64>)> = leaves.values.iter().map(|(k, v)| (*k, v.clone())).collect();
    seeds.sort_by_key(|(k, _)| *k);
    let seeds: Vec<Vec<f64>> = seeds.into_iter().skip(before).map(|(_, v)| v).collect();
    let mut map = HashMap::new();
    let low = lower(g, &floats, &mut map);
    let roots: Vec<NodeId> = grads.iter().flatten().copied().collect();
    let low_grads = lower(g, &roots, &mut map);
    if !has_references(g) {
        return roots;
    }
    let values = eval(g, &leaves.values, &low_grads);
    let mut values = values.into_iter();
    let loss = |g: &Graph, leaves: &Leaves| -> f64 {
        let outs = eval(g, &leaves.values, &low);
        outs.iter().zip(&seeds).map(|(o, s)| o.iter().zip(s).map(|(a, b)| a * b).sum::<f64>()).sum()
    };
    for (&x, d) in wrt.iter().zip(&grads) {
        let n = g.shape(x).numel();
        let analytic = d.map_or_else(|| vec![0.0; n], |_| values.next().unwrap());
        for e in (0..n).step_by(n.div_ceil(12).max(1)) {
            let old = leaves.values[&x][e];
            let h = 1e-5;
            let mut side = |v: f64| {
                leaves.values.get_mut(&x).unwrap()[e] = v;
                loss(g, leaves)
            };
            let numeric = (side(old + h) - side(old - h)) / (2.0 * h);
            side(old);
            let tolerance = 2e-6 * (1.0 + numeric.abs().max(analytic[e].abs()));
            if (numeric - analytic[e]).abs() > tolerance || numeric.is_nan() != analytic[e].is_nan() {
                wrong.push(format!(
                    "{what}: input {} element {e}: {} by rule, {numeric} by differences",
                    x.0, analytic[e]
                ));
                break;
            }
        }
    }
    roots
}

#[test]
fn derivatives_agree_with_finite_differences() {
    let mut wrong = Vec::new();
    each_sample(|op, text| {
        let (mut g, mut leaves, outs) = record(op, text, DType::F64);
        // `detach` has a wrong gradient by design.
        if op.name == "detach" || matches!(op.grad, Grad::Missing(_)) || outs.iter().all(|o| !g.dtype(*o).is_float()) {
            return;
        }
        let wrt = leaves.floats.clone();
        let what = format!("{}({text})", op.name);
        let first = check(&what, &mut g, &mut leaves, &outs, &wrt, &mut wrong);
        if op.smooth {
            check(&format!("{what}, twice"), &mut g, &mut leaves, &first, &wrt, &mut wrong);
        }
    });
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
