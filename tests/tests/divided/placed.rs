//! Collectives that a recipe calls: values against sums and slices by hand, gradients against one device.

use crate::step::Step;
use crate::step::{assert_near, collectives};
use perilune_core::graph::{NodeId, Number};
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::{call, int, t};
use perilune_tests::virtual_devices::Spread;
use std::collections::{BTreeMap, HashMap};

fn word(text: &str) -> Value {
    Value::Str(text.into())
}

/// A step that is recorded for a mesh.
fn on(mesh: &str) -> Step {
    let mut s = Step::new(DType::F64);
    s.e.recorder.graph.mesh = Mesh::parse(mesh).unwrap();
    s
}

/// Runs a step on a mesh, with inputs placed as listed, and on one device.
fn compare(
    s: &Step,
    mesh: &str,
    placements: &[(InputBuffer, Placement)],
) -> (Vec<HostTensor>, BTreeMap<&'static str, usize>) {
    let (want, _) = s.run("", &[]).unwrap();
    let spread = Spread {
        mesh: Mesh::parse(mesh).unwrap(),
        placements: placements.iter().copied().collect::<HashMap<_, _>>(),
        ..Spread::default()
    };
    let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert_near(mesh, &got, &want, 1e-12);
    (got.roots, collectives(&program))
}

/// The blocks of dim `dim` of a tensor of two dims, combined.
fn by_hand(x: &HostTensor, dim: usize, n: usize, how: &str) -> Vec<f64> {
    let (rows, columns) = (x.shape.dims()[0], x.shape.dims()[1]);
    let (own_rows, own_columns) = if dim == 0 { (rows / n, columns) } else { (rows, columns / n) };
    let all = x.to_f64();
    let element = |i: usize, j: usize| {
        let block = |r: usize| {
            if dim == 0 { all[(r * own_rows + i) * columns + j] } else { all[i * columns + r * own_columns + j] }
        };
        let blocks = (0..n).map(block);
        match how {
            "max" => blocks.fold(f64::NEG_INFINITY, f64::max),
            "min" => blocks.fold(f64::INFINITY, f64::min),
            "mean" => blocks.sum::<f64>() / n as f64,
            _ => blocks.sum(),
        }
    };
    (0..own_rows).flat_map(|i| (0..own_columns).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

fn close(got: &HostTensor, want: &[f64], what: &str) {
    let got = got.to_f64();
    assert_eq!(got.len(), want.len(), "{what}");
    assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12), "{what}: {got:?} and {want:?}");
}

/// Where an input may be when a collective is called: anywhere.
fn places(buffer: InputBuffer, axis: Axis) -> [Vec<(InputBuffer, Placement)>; 3] {
    let split = |dim| vec![(buffer, Placement::REPLICATED.with(axis, Along::Split(dim)))];
    [vec![], split(0), split(1)]
}

/// Weighs the elements of `y` differently, and returns the gradient of the sum of squares with respect to `x`, on every device: that of
/// a tensor that is placed stays in blocks.
fn gradient(s: &mut Step, y: NodeId, x: NodeId) -> NodeId {
    let weight = s.e.recorder.graph.shape(y).numel();
    let ramp = s.call("arange", &[Value::Number(Number::Int(weight as i64))]);
    let dims = s.e.recorder.graph.shape(y).dims().iter().map(|d| *d as i64).collect();
    let ramp = s.call("reshape", &[t(ramp), Value::Ints(dims)]);
    let square = s.call("mul", &[t(y), t(y)]);
    let weighed = s.call("mul", &[t(square), t(ramp)]);
    let total = s.call("sum", &[t(weighed)]);
    let g = &mut s.e.recorder.graph;
    let one = g.filled(1.0, Shape::SCALAR, DType::F64).unwrap();
    let gradient = perilune_core::grad::grad(g, total, one, &[x], false).unwrap()[0].unwrap();
    s.call("replicate", &[t(gradient)])
}

#[test]
fn reductions_of_blocks() {
    for (mesh, axis, n) in [("dp=2", "dp", 2), ("tp=4", "tp", 4), ("dp=3,tp=2", "dp", 3), ("dp=2,tp=4", "tp", 4)] {
        for (dim, how) in [(0, "sum"), (1, "mean"), (0, "max"), (1, "min")] {
            for op in ["all_reduce", "reduce_scatter"] {
                let mut s = on(mesh);
                let x = s.batch_randn(&[12, 24]);
                let buffer = s.batch[0];
                let options = [("dim", int(dim as i64)), ("op", word(how))];
                let y = s.with(op, &[t(x), word(axis)], &options);
                let full = s.call("replicate", &[t(y)]);
                let d = gradient(&mut s, y, x);
                s.request.roots = vec![full, d];
                let along = Axis::ALL.into_iter().find(|a| a.name() == axis).unwrap();
                let what = format!("{mesh} {op} {dim} {how}");
                for placements in places(buffer, along) {
                    let (roots, _) = compare(&s, mesh, &placements);
                    close(&roots[0], &by_hand(&s.values[&buffer], dim, n, how), &what);
                }
            }
        }
    }
}

#[test]
fn blocks_in_place_are_reduced_by_one_collective() {
    let sent = |op: &str| {
        let mut s = on("dp=4");
        let x = s.batch_randn(&[8, 6]);
        let y = s.call(op, &[t(x), word("dp")]);
        s.request.roots = vec![y];
        let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
        let spread = Spread {
            mesh: Mesh::parse("dp=4").unwrap(),
            placements: [(s.batch[0], split)].into(),
            ..Spread::default()
        };
        let (program, _) = perilune_tests::virtual_devices::plan(&s.e.recorder.graph, &s.request, &spread).unwrap();
        collectives(&program)
    };
    assert_eq!(sent("all_reduce"), BTreeMap::from([("all_reduce", 1)]));
    assert_eq!(sent("reduce_scatter"), BTreeMap::from([("reduce_scatter", 1)]));
    assert_eq!(sent("all_gather"), BTreeMap::from([("all_gather", 1)]));
    assert_eq!(sent("broadcast"), BTreeMap::from([("all_reduce", 1)]));
}

#[test]
fn an_exchange_splits_another_dim_and_changes_no_value() {
    // Dims that the axis divides, and others, whose last blocks are padded.
    for (dims, from, to) in
        [([8, 12, 4], 0, 1), ([8, 12, 4], 2, 0), ([5, 7, 9], 1, 2), ([5, 7, 9], 2, 0), ([3, 2, 2], 0, 2)]
    {
        for mesh in ["dp=2", "dp=4", "dp=2,tp=2"] {
            let mut s = on(mesh);
            let x = s.batch_randn(&dims);
            let y = s.call("all_to_all", &[t(x), word("dp"), int(from), int(to)]);
            // Work between two exchanges.
            let z = s.call("exp", &[t(y)]);
            let back = s.call("all_to_all", &[t(z), word("dp"), int(to), int(from)]);
            let full = s.call("replicate", &[t(back)]);
            let d = gradient(&mut s, full, x);
            s.request.roots = vec![full, d];
            let want: Vec<f64> = s.values[&s.batch[0]].to_f64().iter().map(|v| v.exp()).collect();
            let along = [vec![], vec![(s.batch[0], Placement::REPLICATED.with(Axis::Dp, Along::Split(from as u8)))]];
            for placements in along {
                let (roots, sent) = compare(&s, mesh, &placements);
                close(&roots[0], &want, mesh);
                assert!(sent["all_to_all"] >= 2, "{mesh} {dims:?}: {sent:?}");
            }
        }
    }
}

#[test]
fn a_broadcast_is_the_block_of_its_root() {
    for dtype in [DType::F64, DType::I64] {
        for (root, dim) in [(0i64, 0usize), (3, 0), (2, 1)] {
            let mut s = on("dp=4");
            let x = s.batch_randn(&[8, 4]);
            let x = s.call("to", &[t(x), Value::DType(dtype)]);
            let y = s.with("broadcast", &[t(x), word("dp")], &[("root", int(root)), ("dim", int(dim as i64))]);
            let want = s.call("narrow", &[t(x), int(dim as i64), int(root * [2, 1][dim]), int([2, 1][dim])]);
            s.request.roots = vec![y, want];
            for placements in places(s.batch[0], Axis::Dp) {
                let (roots, _) = compare(&s, "dp=4", &placements);
                assert_eq!(roots[0].to_f64(), roots[1].to_f64(), "{dtype} {root} {dim}");
            }
        }
    }
}

/// Blocks of dim `dim` in another order: `senders` says which one each block gets; `None` is zeros.
fn moved_by_hand(x: &HostTensor, dim: usize, senders: &[Option<usize>]) -> Vec<f64> {
    let (rows, columns) = (x.shape.dims()[0], x.shape.dims()[1]);
    let (all, block) = (x.to_f64(), x.shape.dims()[dim] / senders.len());
    let element = |i: usize, j: usize| {
        let at = [i, j][dim];
        let from = senders[at / block].map(|from| from * block + at % block);
        from.map_or(0.0, |from| if dim == 0 { all[from * columns + j] } else { all[i * columns + from] })
    };
    (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

#[test]
fn blocks_move_from_device_to_device() {
    let (some, none) = (Some::<usize>, None);
    let to = |list: &[i64]| vec![Value::Ints(list.iter().copied().collect())];
    let by = |by: i64, wrap: bool| vec![("by", int(by)), ("wrap", Value::Bool(wrap))];
    type Case = (&'static str, Vec<Value>, Vec<(&'static str, Value)>, [Option<usize>; 4]);
    let cases: [Case; 8] = [
        ("shift", vec![], vec![], [some(3), some(0), some(1), some(2)]),
        ("shift", vec![], by(-1, true), [some(1), some(2), some(3), some(0)]),
        ("shift", vec![], by(6, true), [some(2), some(3), some(0), some(1)]),
        ("shift", vec![], by(1, false), [none, some(0), some(1), some(2)]),
        ("shift", vec![], by(-3, false), [some(3), none, none, none]),
        ("send_recv", to(&[1, 0, 3, 2]), vec![], [some(1), some(0), some(3), some(2)]),
        ("send_recv", to(&[3, -1, -1, 0]), vec![], [some(3), none, none, some(0)]),
        ("send_recv", to(&[-1; 4]), vec![], [none; 4]),
    ];
    for (mesh, axis) in [("cp=4", "cp"), ("dp=2,cp=4", "cp"), ("dp=4,tp=2", "dp")] {
        for (op, args, options, senders) in &cases {
            for dim in [0, 1] {
                let mut s = on(mesh);
                let x = s.batch_randn(&[8, 12]);
                let buffer = s.batch[0];
                let args: Vec<Value> = [t(x), word(axis)].into_iter().chain(args.iter().cloned()).collect();
                let options: Vec<_> = options.iter().cloned().chain([("dim", int(dim as i64))]).collect();
                let y = s.with(op, &args, &options);
                // Work on blocks where they are.
                let z = s.call("exp", &[t(y)]);
                let full = s.call("replicate", &[t(y)]);
                let d = gradient(&mut s, z, x);
                s.request.roots = vec![full, d];
                let along = Axis::ALL.into_iter().find(|a| a.name() == axis).unwrap();
                for placements in places(buffer, along) {
                    let (roots, sent) = compare(&s, mesh, &placements);
                    let want = moved_by_hand(&s.values[&buffer], dim, senders);
                    close(&roots[0], &want, &format!("{mesh} {op} {senders:?} {dim}"));
                    // Forward and backward; a block without a receiver is not sent.
                    let moves = if senders.iter().all(Option::is_none) { 0 } else { 2 };
                    assert_eq!(sent.get("collective_permute").copied().unwrap_or(0), moves, "{mesh} {op}");
                }
            }
        }
    }
}

/// A NaN that is not sent does not reach the zeros of a device.
#[test]
fn a_device_that_receives_nothing_has_zeros() {
    let mut s = on("dp=2");
    let x = s.batch(HostTensor::from_f64(DType::F64, Shape::of(&[2]), &[1.0, f64::NAN]));
    let y = s.with("shift", &[t(x), word("dp")], &[("wrap", Value::Bool(false))]);
    let full = s.call("replicate", &[t(y)]);
    s.request.roots = vec![full];
    let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    let (roots, _) = compare(&s, "dp=2", &[(s.batch[0], split)]);
    assert_eq!(roots[0].to_f64(), [0.0, 1.0]);
}

/// A barrier changes no value and no gradient. Each axis has one flag.
#[test]
fn devices_meet_at_a_barrier() {
    for (mesh, axis, flags) in [("dp=4", Some("dp"), 1), ("dp=2,tp=2", None, 2), ("dp=2,tp=2", Some("cp"), 0)] {
        let mut s = on(mesh);
        let x = s.batch_randn(&[8, 6]);
        let buffer = s.batch[0];
        let y = s.call("exp", &[t(x)]);
        let args: Vec<Value> = std::iter::once(t(y)).chain(axis.map(word)).collect();
        let y = s.call("barrier", &args);
        let d = gradient(&mut s, y, x);
        let full = s.call("replicate", &[t(y)]);
        s.request.roots = vec![full, d];
        let want: Vec<f64> = s.values[&buffer].to_f64().iter().map(|v| v.exp()).collect();
        for placements in places(buffer, Axis::Dp) {
            let (roots, _) = compare(&s, mesh, &placements);
            close(&roots[0], &want, mesh);
        }
        // Of a value that all have, nothing else is sent.
        let (_, sent) = compare(&s, mesh, &[]);
        assert_eq!(sent.get("all_reduce").copied().unwrap_or(0), flags, "{mesh}: {sent:?}");
    }
}

#[test]
fn a_placement_says_what_a_device_computes() {
    let mut s = on("dp=4");
    let (x, w) = (s.batch_randn(&[8, 6]), s.weight(&[6, 6]));
    let x = s.with("shard", &[t(x)], &[("dp", int(0))]);
    let y = s.call("matmul", &[t(x), t(w)]);
    let y = s.call("gelu", &[t(y)]);
    let d = gradient(&mut s, y, w);
    s.request.roots = vec![d];
    // The gradient of a weight is a sum over the blocks: nothing else is sent.
    let (_, sent) = compare(&s, "dp=4", &[]);
    assert_eq!(sent, BTreeMap::from([("all_reduce", 1)]));
}

#[test]
fn mistakes_have_the_rule_and_the_cure() {
    let mut s = on("dp=4");
    let x = s.batch_randn(&[6, 5]);
    let mut fail = |op: &str, args: &[Value], options: &[(&str, Value)]| call(&mut s.e, op, args, options).unwrap_err();
    let e = fail("all_reduce", &[t(x), word("dp")], &[]);
    assert!(e.contains("dim 0 of shape {6, 5} has 6 elements, which are not 4 equal blocks (dp=4)"), "{e}");
    let e = fail("shard", &[t(x)], &[]);
    assert!(e.contains("no axis of the mesh is named"), "{e}");
    let e = fail("shard", &[t(x)], &[("dp", int(2))]);
    assert!(e.contains("dim 2 is out of range"), "{e}");
    let small = s.batch_randn(&[4, 5]);
    let mut send = |to: &[i64]| {
        call(&mut s.e, "send_recv", &[t(small), word("dp"), Value::Ints(to.iter().copied().collect())], &[])
            .unwrap_err()
    };
    let e = send(&[1, 0]);
    assert!(e.contains("`to` has 2 receivers, and dp has 4 devices") && e.contains("pl.mesh()"), "{e}");
    let e = send(&[1, 2, 3, 4]);
    assert!(e.contains("there is no device 4 along dp, which has 4") && e.contains("-1 is none"), "{e}");
    let e = send(&[1, 2, 1, -1]);
    assert!(e.contains("devices 0 and 2 both send to device 1"), "{e}");
    let e = call(&mut s.e, "broadcast", &[t(small), word("dp")], &[("root", int(4))]).unwrap_err();
    assert!(e.contains("there is no device 4 along dp, which has 4"), "{e}");
}
