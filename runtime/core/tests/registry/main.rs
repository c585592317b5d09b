//! Every op of the registry, on every sample, without a backend: what is recorded has the shapes and dtypes that were
//! promised, gradients have those of their inputs, and derivatives agree with finite differences in f64.
#![allow(clippy::unwrap_used)]

mod eval;
mod sample;
mod values;

use eval::{eval, lower};
use perilune_core::ops::{self, Class, Grad, Op, Results};
use perilune_core::{DType, Graph, Kind, NodeId, grad};
use sample::Leaves;
use std::collections::HashMap;

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
fn results_are_as_many_as_the_op_says() {
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
        // `detach` is there to be wrong.
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
