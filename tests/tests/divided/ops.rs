//! Divides the samples of every op among devices, with random placements of their tensors, forward and backward.

use crate::random::{compare, spread};
use perilune_core::graph::NodeId;
use perilune_core::ops::{self, create};
use perilune_core::{HostTensor, grad};
use perilune_engine::Engine;
use perilune_plan::Request;
use perilune_plan::request::InputBuffer;
use perilune_tests::case::{self, Case, Variant};
use perilune_tests::harness::{self, Layout, args, call, t};
use perilune_tests::rng::Pcg;
use std::collections::HashMap;

/// Records a call and the gradients of the sum of its results. Returns what is computed.
fn record(e: &mut Engine, case: &Case) -> Option<Vec<NodeId>> {
    e.recorder.seed(7);
    let (a, leaves) = args(e, case, Layout::Contiguous);
    let mut roots = e.call(case.op, &a).ok()?.to_vec();
    let float = |e: &Engine, x: NodeId| e.recorder.graph.dtype(x).is_float();
    let outputs: Vec<NodeId> = roots.iter().copied().filter(|x| float(e, *x)).collect();
    let wrt: Vec<NodeId> = leaves.into_iter().filter(|x| float(e, *x)).collect();
    for y in outputs {
        // Weights the elements differently, so that no gradient vanishes.
        let square = call(e, "mul", &[t(y), t(y)], &[]).ok()?;
        let total = call(e, "sum", &[t(square)], &[]).ok()?;
        let dtype = e.recorder.graph.dtype(total);
        let one = e.recorder.graph.constant(1.0, dtype);
        if let Ok(found) = grad::grad(&mut e.recorder.graph, total, one, &wrt, false) {
            roots.extend(found.into_iter().flatten());
        }
    }
    Some(roots)
}

#[test]
fn samples_of_every_op_with_random_placements() {
    let (mut count, mut wrong) = (0, Vec::new());
    for op in ops::all().iter().filter(|op| !op.sig.is_empty()) {
        for (k, case) in case::cases(op).iter().filter(|c| matches!(c.variant, Variant::Full)).enumerate() {
            let mut e = harness::engine(1);
            let Some(roots) = record(&mut e, case) else { continue };
            let leaf = |e: &Engine, id: NodeId| *e.recorder.graph.node(id).op == create::LEAF;
            let leaves: Vec<NodeId> = e.recorder.graph.ids().filter(|id| leaf(&e, *id)).collect();
            // Evaluation keeps the graph, whose leaves have the same numbers.
            let g = e.recorder.graph.clone();
            let read = |e: &mut Engine, id: NodeId| e.read_node(id).ok();
            let values: Option<HashMap<InputBuffer, HostTensor>> =
                leaves.iter().map(|id| Some((InputBuffer::Leaf(g.node(*id).payload), read(&mut e, *id)?))).collect();
            let Some(values) = values else { continue };
            let request = Request { roots, ..Request::default() };
            let mut rng = Pcg::new(1000 + k as u64);
            for mesh in ["dp=2", "dp=3", "tp=4", "dp=2,tp=2"] {
                let spread = spread(mesh, &mut rng, &values);
                if let Some(text) = compare(&g, &request, &values, &spread) {
                    wrong.push(format!("{} sample {k} {mesh}: {text}", op.name));
                }
                count += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {count}\n{}", wrong.len(), wrong[..wrong.len().min(12)].join("\n"));
    assert!(count > 1000, "only {count} samples");
}
