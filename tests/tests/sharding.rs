//! Checks the factors of every op: what devices compute from their pieces of the operands, put together, is what one device
//! computes.
//!
//! The nodes that the samples of all ops record are divided in 2, 3 and 4 along each factor. Blocks are cut from the operands, and
//! operands that are terms are cut into numbers that sum to them. Each piece goes through the op itself, with its own shapes.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::mesh::Combine;
use perilune_core::ops::{self, Class, create};
use perilune_core::sharding::{self, Factor, Piece, Positions, Signature};
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::Engine;
use perilune_tests::case::{self, Case, Variant};
use perilune_tests::harness::{self, Layout, args, read_all};
use std::collections::BTreeMap;

/// Block `k` of `n` of dim `d`.
fn block(x: &HostTensor, d: usize, k: usize, n: usize) -> HostTensor {
    let dims = x.shape.dims();
    let size = dims[d] / n;
    let inner: usize = dims[d + 1..].iter().product::<usize>() * x.dtype.size();
    let (row, piece) = (dims[d] * inner, size * inner);
    let bytes = x.bytes.chunks(row.max(1)).flat_map(|row| row[k * piece..(k + 1) * piece].to_vec()).collect();
    HostTensor::new(x.dtype, x.shape.with(d, size), bytes)
}

/// Puts blocks of dim `d` together.
fn join(parts: &[HostTensor], d: usize) -> HostTensor {
    let first = &parts[0];
    let piece = first.shape.dims()[d..].iter().product::<usize>() * first.dtype.size();
    let outer: usize = first.shape.dims()[..d].iter().product();
    let mut bytes = Vec::new();
    for row in 0..outer {
        parts.iter().for_each(|p| bytes.extend(&p.bytes[row * piece..(row + 1) * piece]));
    }
    HostTensor::new(first.dtype, first.shape.with(d, first.shape.dims()[d] * parts.len()), bytes)
}

fn elementwise(xs: &[&HostTensor], float: fn(f64, f64) -> f64, int: fn(i64, i64) -> i64) -> HostTensor {
    let (dtype, shape) = (xs[0].dtype, xs[0].shape);
    if dtype.is_float() {
        let all = (0..xs[0].numel()).map(|i| xs[1..].iter().fold(xs[0].get_f64(i), |a, x| float(a, x.get_f64(i))));
        return HostTensor::from_f64(dtype, shape, &all.collect::<Vec<_>>());
    }
    let all = (0..xs[0].numel()).map(|i| xs[1..].iter().fold(xs[0].get_i64(i), |a, x| int(a, x.get_i64(i))));
    HostTensor::from_i64(shape, &all.collect::<Vec<_>>()).cast(dtype)
}

/// Combines the terms of all devices.
fn combine(parts: &[HostTensor], how: Combine) -> HostTensor {
    let parts: Vec<&HostTensor> = parts.iter().collect();
    let larger = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
    let smaller = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.min(b) };
    match how {
        Combine::Sum => elementwise(&parts, |a, b| a + b, i64::wrapping_add),
        Combine::Max => elementwise(&parts, larger, i64::max),
        Combine::Min => elementwise(&parts, smaller, i64::min),
    }
}

/// Term `k` of `n` that sum to `x`: constants, and on the first device the rest.
fn term(x: &HostTensor, k: usize, n: usize) -> HostTensor {
    let own = HostTensor::from_f64(x.dtype, x.shape, &vec![k as f64; x.numel()]);
    let rest = HostTensor::from_f64(x.dtype, x.shape, &vec![(n * (n - 1) / 2) as f64; x.numel()]);
    if k > 0 { own } else { elementwise(&[x, &rest], |a, b| a - b, i64::wrapping_sub) }
}

/// A recorded node with the values of its operands and results.
struct Call {
    node: NodeId,
    operands: Vec<HostTensor>,
    results: Vec<HostTensor>,
}

impl Call {
    /// The dim that the node is about.
    fn node_axis(&self, e: &Engine) -> usize {
        e.recorder.graph.node(self.node).attrs[0] as usize
    }
}

/// The results of a node: itself and what `tuple_get` takes from it.
fn results(e: &Engine, node: NodeId) -> Vec<NodeId> {
    let g = &e.recorder.graph;
    let mut parts: Vec<NodeId> =
        g.ids().filter(|id| *g.node(*id).op == create::TUPLE_GET && g.node(*id).inputs[0] == node).collect();
    parts.sort_by_key(|id| g.node(*id).attrs[0]);
    std::iter::once(node).chain(parts).collect()
}

/// Records a node on pieces and returns its results.
fn run_piece(e: &mut Engine, call: &Call, factor: &Factor, k: usize, n: usize) -> Result<Vec<HostTensor>, String> {
    let node = e.recorder.graph.node(call.node).clone();
    let mut inputs = Vec::new();
    for (x, piece) in call.operands.iter().zip(&factor.operands) {
        let own = match piece {
            Piece::Whole => x.clone(),
            Piece::Block(d) => block(x, *d as usize, k, n),
            Piece::Term(Combine::Sum) => term(x, k, n),
            Piece::Term(other) => return Err(format!("an operand is a term of {other:?}")),
        };
        inputs.push(e.from_host(own));
    }
    let mut attrs = node.attrs.clone();
    if let Some(a) = factor.size_attr {
        attrs[a as usize] /= n as i64;
    }
    let left_out = own_positions(e, call, factor, k, n, &mut inputs);
    let main = e.recorder.graph.push(node.op, &inputs, &attrs).map_err(|e| e.to_string())?;
    let parts: Vec<(Shape, DType)> = (call.results.iter().zip(&factor.results).skip(1))
        .map(|(whole, piece)| match piece {
            Piece::Block(d) => (whole.shape.with(*d as usize, whole.shape.dims()[*d as usize] / n), whole.dtype),
            _ => (whole.shape, whole.dtype),
        })
        .collect();
    let out = ops::out_of(&mut e.recorder.graph, main, &parts);
    let mut read = read_all(e, &out)?;
    if factor.positions == Some(Positions::Read) {
        read[0] = zeroed(&read[0], call.node_axis(e), &left_out);
    }
    Ok(read)
}

/// `x` with 0 where an index along `dim`, or of all of x, names a position of another device.
fn zeroed(x: &HostTensor, dim: usize, left_out: &[bool]) -> HostTensor {
    let inner: usize = x.shape.dims()[dim + 1..].iter().product();
    let size = x.dtype.size();
    let mut bytes = x.bytes.to_vec();
    for i in 0..x.numel() {
        let of_list = i / inner % x.shape.dims()[dim];
        if left_out[if left_out.len() == x.numel() { i } else { of_list }] {
            bytes[i * size..(i + 1) * size].fill(0);
        }
    }
    HostTensor::new(x.dtype, x.shape, bytes)
}

/// Makes positions count from the start of block `k`. Returns which of them are in other blocks.
fn own_positions(e: &mut Engine, call: &Call, factor: &Factor, k: usize, n: usize, inputs: &mut [NodeId]) -> Vec<bool> {
    let (Some(how), Piece::Block(d)) = (factor.positions, factor.operands[0]) else { return Vec::new() };
    let block = (call.operands[0].shape.dims()[d as usize] / n) as i64;
    let index = &call.operands[1];
    let own: Vec<i64> = (0..index.numel()).map(|i| index.get_i64(i) - k as i64 * block).collect();
    let left_out: Vec<bool> = own.iter().map(|i| !(0..block).contains(i)).collect();
    let own: Vec<i64> = own.iter().map(|i| if (0..block).contains(i) { *i } else { 0 }).collect();
    inputs[1] = e.from_host(HostTensor::from_i64(index.shape, &own));
    if how == Positions::Add {
        inputs[2] = e.from_host(zeroed(&call.operands[2], d as usize, &left_out));
    }
    left_out
}

/// Divides a node along one factor and compares.
fn check(e: &mut Engine, call: &Call, factor: &Factor, n: usize) -> Result<(), String> {
    let mut parts: Vec<Vec<HostTensor>> = vec![Vec::new(); call.results.len()];
    for k in 0..n {
        for (all, one) in parts.iter_mut().zip(run_piece(e, call, factor, k, n)?) {
            all.push(one);
        }
    }
    for ((piece, whole), parts) in factor.results.iter().zip(&call.results).zip(&parts) {
        let got = match piece {
            Piece::Whole => parts[0].clone(),
            Piece::Block(d) => join(parts, *d as usize),
            Piece::Term(how) => combine(parts, *how),
        };
        if got.shape != whole.shape || got.dtype != whole.dtype {
            return Err(format!("{} {} instead of {} {}", got.dtype, got.shape, whole.dtype, whole.shape));
        }
        let narrow = call.operands.iter().chain([whole]).any(|x| x.dtype != DType::F64);
        let precision = if narrow { 1e-5 } else { 1e-12 };
        let scale = (0..whole.numel()).map(|i| whole.get_f64(i).abs()).filter(|v| v.is_finite()).fold(1.0, f64::max);
        for i in 0..whole.numel() {
            let (a, b) = (got.get_f64(i), whole.get_f64(i));
            let near =
                a == b || a.is_nan() && b.is_nan() || whole.dtype.is_float() && (a - b).abs() <= precision * scale;
            if !near {
                return Err(format!("element {i} is {a} instead of {b}"));
            }
        }
    }
    Ok(())
}

/// Divides every node that a case records, in every way. Counts the checks by op.
fn divide(e: &mut Engine, case: &Case, checked: &mut BTreeMap<&'static str, [usize; 2]>, wrong: &mut Vec<String>) {
    e.recorder.seed(7);
    let (a, _) = args(e, case, Layout::Contiguous);
    if e.call(case.op, &a).is_err() {
        e.flush().unwrap();
        return;
    }
    let nodes: Vec<NodeId> = e.recorder.graph.ids().collect();
    for node in nodes {
        let n = e.recorder.graph.node(node).clone();
        let leaf = matches!(n.op.class, Class::Leaf | Class::Generator(_) | Class::TupleGet | Class::Host(_));
        if leaf || n.inputs.is_empty() {
            continue;
        }
        let all = results(e, node);
        let g = &e.recorder.graph;
        let signature: Vec<(Shape, DType)> = n.inputs.iter().map(|i| (g.shape(*i), g.dtype(*i))).collect();
        let whole: Vec<(Shape, DType)> = all.iter().map(|id| (g.shape(*id), g.dtype(*id))).collect();
        let factors = sharding::factors(n.op, &Signature { operands: &signature, results: &whole, attrs: &n.attrs });
        if factors.is_empty() {
            continue;
        }
        // The samples of optimizers and of random numbers have values too; a node that cannot be read alone is skipped.
        let Ok(operands) = read_all(e, &n.inputs) else { continue };
        let Ok(results) = read_all(e, &all) else { continue };
        let call = Call { node, operands, results };
        // Attention with split queries exchanges keys, experts exchange rows: `divided/context.rs` and `experts/` run them on meshes.
        for factor in factors.iter().filter(|factor| factor.meets.is_none()) {
            assert_eq!(factor.operands.len(), call.operands.len(), "{}: {factor:?}", n.op.name);
            assert_eq!(factor.results.len(), call.results.len(), "{}: {factor:?}", n.op.name);
            let terms = factor
                .operands
                .iter()
                .zip(&call.operands)
                .any(|(p, x)| matches!(p, Piece::Term(_)) && x.dtype == DType::Bool);
            let blocks = factor.operands.iter().chain(&factor.results).any(|p| matches!(p, Piece::Block(_)));
            for parts in 2..=4 {
                if terms || blocks && (factor.units == 0 || factor.units % parts != 0) {
                    continue;
                }
                if let Err(why) = check(e, &call, factor, parts) {
                    wrong.push(format!("{} of {} in {parts} along {factor:?}: {why}", n.op.name, case.op.name));
                }
                checked.entry(n.op.name).or_default()[usize::from(!blocks)] += 1;
            }
        }
    }
    e.flush().unwrap();
}

#[test]
fn the_pieces_of_devices_make_the_whole() {
    let ops: Vec<_> = ops::all().iter().copied().filter(|op| !op.sig.is_empty() && !case::is_random(op)).collect();
    let (mut e, mut checked, mut wrong) = (harness::engine(1), BTreeMap::new(), Vec::new());
    for op in ops {
        for case in case::cases(op) {
            if matches!(case.variant, Variant::Full | Variant::As(DType::I64)) {
                divide(&mut e, &case, &mut checked, &mut wrong);
            }
        }
    }
    wrong.truncate(40);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Every op that states factors is divided, and so is every elementwise function and reduction.
    for op in ops::all() {
        let expected = op.shard.is_some() || matches!(op.class, Class::Map(_) | Class::Reduce(_) | Class::Cast);
        let internal = op.sig.is_empty() || op.name == "custom";
        assert!(internal || !expected || checked.contains_key(op.name), "{} is never divided: {checked:?}", op.name);
    }
    let total: usize = checked.values().flatten().sum();
    println!("{total} divisions of {} ops", checked.len());
    assert!(total > 2_000, "only {total} divisions");
}
