//! Splits weights along an axis of their own: tensor parallelism.

use crate::step::{Step, collectives};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::{DType, Mesh, Placement, Shape, grad};
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::t;
use perilune_tests::virtual_devices::Spread;

/// The first layer is split by columns, the second by rows: one reduction of its result, none of the hidden layer.
#[test]
fn weights_split_along_another_axis() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 7));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let logits = s.layer(h, 24, 7);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    let wrt: Vec<NodeId> = s.weights.iter().map(|w| w.1).collect();
    let g = &mut s.e.recorder.graph;
    let seed = g.filled(1.0, Shape::SCALAR, DType::F64).unwrap();
    s.request.roots = grad::grad(g, loss, seed, &wrt, false).unwrap().into_iter().map(Option::unwrap).collect();
    s.request.roots.push(loss);
    let (want, _) = s.run("", &[]).unwrap();
    let split = |dim| Placement::REPLICATED.with(Axis::Tp, Along::Split(dim));
    let states: Vec<InputBuffer> = s.weights.iter().map(|w| InputBuffer::State(w.0)).collect();
    let batch = |b: &InputBuffer| (*b, Placement::REPLICATED.with(Axis::Dp, Along::Split(0)));
    for mesh in ["tp=2", "tp=4", "dp=2,tp=4"] {
        let weights = [(states[0], split(0)), (states[1], split(0)), (states[2], split(1))];
        let placements = s.batch.iter().map(batch).chain(weights).collect();
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        for (k, (a, b)) in got.roots.iter().zip(&want.roots).enumerate() {
            let (a, b) = (a.to_f64(), b.to_f64());
            assert!(a.iter().zip(&b).all(|(x, y)| (x - y).abs() < 1e-12), "{mesh}: root {k}: {a:?} and {b:?}");
        }
        // What is gathered are the gradients that the request returns.
        let found = collectives(&program);
        assert_eq!(found.get("all_gather"), Some(&3), "{mesh}: {found:?}");
        if mesh.starts_with("tp") {
            assert_eq!(found.get("all_reduce"), Some(&1), "{mesh}: {found:?}");
        }
    }
}
