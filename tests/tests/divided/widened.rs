//! Checks that terms of 16 bits are sent as they are where a sum of them is taken in f32, and that the sum has the bits of one whose
//! terms were widened before.

use crate::step::Step;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Value;
use perilune_core::ops::collective::{COLLECTIVE_PERMUTE, WIDENED};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::ir::{Kernel, Library, Operand, Program, Storage, ValueId};
use perilune_plan::lanes;
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::{call, randn, t};
use perilune_tests::virtual_devices::Spread;
use std::ops::Range;

const BATCH: usize = 8;

/// The gradients of layers that compute in 16 bits, with these rows of the batch. They are written to States.
fn step(dtype: DType, width: usize, rows: Range<usize>) -> Step {
    let mut s = Step::new(DType::F32);
    let all = randn(&mut s.rng, DType::F32, &[BATCH, width]);
    let own = &all.bytes[rows.start * width * 4..rows.end * width * 4];
    let mut x = s.batch(HostTensor::new(DType::F32, Shape::of(&[rows.len(), width]), own.to_vec()));
    let half = Value::DType(dtype);
    x = s.call("to", &[t(x), half.clone()]);
    for _ in 0..3 {
        let (w, b) = (s.weight(&[width, width]), s.weight(&[width]));
        let (w, b) = (s.call("to", &[t(w), half.clone()]), s.call("to", &[t(b), half.clone()]));
        x = s.call("linear", &[t(x), t(w), t(b)]);
        x = s.call("gelu", &[t(x)]);
    }
    let x = s.call("to", &[t(x), Value::DType(DType::F32)]);
    let squares = s.call("mul", &[t(x), t(x)]);
    let loss = s.call("sum", &[t(squares)]);
    s.request.roots = vec![loss];
    for gradient in s.gradients(loss) {
        let shape = s.e.recorder.graph.shape(gradient);
        let state = s.state(HostTensor::new(DType::F32, shape, vec![0; 4 * shape.numel()]));
        s.request.state_writes.push((state.0, gradient));
    }
    s
}

/// The batch split along dp, and dim 0 of the States if they are too.
fn spread(s: &Step, mesh: &str, states: bool) -> Spread {
    let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    let written = s.request.state_writes.iter().filter(|_| states).map(|w| InputBuffer::State(w.0));
    let placements = written.chain(s.batch.iter().copied()).map(|b| (b, split)).collect();
    Spread { mesh: Mesh::parse(mesh).unwrap(), placements, ..Spread::default() }
}

fn calls(p: &Program) -> Vec<&Library> {
    p.kernels.iter().filter_map(lanes::collective).collect()
}

/// The sums of the gradients over devices, of terms that are widened: from steps with the devices' parts of the batch.
fn sums(dtype: DType, width: usize, devices: usize) -> Vec<HostTensor> {
    let rows = BATCH / devices;
    let terms = (0..devices).map(|k| step(dtype, width, k * rows..(k + 1) * rows).run("", &[]).unwrap().0.states);
    let sum = |sums: Vec<HostTensor>, terms: Vec<HostTensor>| {
        let add = |(a, b): (HostTensor, HostTensor)| {
            let sums = a.to_f64().into_iter().zip(b.to_f64()).map(|(a, b)| f64::from(a as f32 + b as f32));
            HostTensor::from_f64(DType::F32, a.shape, &sums.collect::<Vec<_>>())
        };
        sums.into_iter().zip(terms).map(add).collect()
    };
    terms.reduce(sum).unwrap()
}

#[test]
fn a_sum_has_the_bits_of_terms_that_were_widened_before() {
    for dtype in [DType::BF16, DType::F16] {
        for (width, mesh, devices) in [(16, "dp=2", 2), (37, "dp=2", 2), (16, "dp=4", 4), (37, "dp=4", 4)] {
            let what = format!("{dtype} of {width} on {mesh}");
            let want = sums(dtype, width, devices);
            let s = step(dtype, width, 0..BATCH);
            for (split, op) in [(false, "all_reduce"), (true, "reduce_scatter")] {
                let (got, program) = s.run_on(&spread(&s, mesh, split)).unwrap_or_else(|e| panic!("{what}: {e}"));
                for (k, (got, want)) in got.states.iter().zip(&want).enumerate() {
                    assert!(want.to_f64().iter().any(|v| *v != 0.0), "{what}: gradient {k}");
                    assert_eq!(got.bytes, want.bytes, "{what}: {op} of gradient {k}");
                }
                let calls = calls(&program).into_iter().filter(|l| l.op.name == op && l.dtypes[0] == dtype);
                let calls = calls.inspect(|l| assert_eq!(l.attrs.last(), Some(&WIDENED), "{what}"));
                assert_eq!(calls.map(|l| l.inputs.len()).sum::<usize>(), 6, "{what}: {op}");
            }
        }
    }
}

/// The operands of a bucket lie one behind the other, and each result as many elements from the first as its operand.
#[test]
fn a_bucket_of_widened_terms_is_flat() {
    let mut s = step(DType::BF16, 64, 0..BATCH);
    // What is stored in a buffer of its own is not flat: something computed from the sums is.
    for write in &mut s.request.state_writes {
        write.1 = call(&mut s.e, "exp", &[t(write.1)], &[]).unwrap();
    }
    let (_, program) = s.run_on(&spread(&s, "dp=2", false)).unwrap();
    let calls = calls(&program);
    let bucket = calls.iter().find(|l| l.dtypes[0] == DType::BF16 && l.inputs.len() == 6).expect("a bucket");
    let at = |v: ValueId| match program.values[v.0 as usize].storage {
        Storage::Arena(at) => at,
        other => panic!("{other:?}"),
    };
    let operand = |k: usize| if let Operand::View(v, _) = bucket.inputs[k] { v } else { panic!("a constant") };
    let mut next = at(operand(0));
    for k in 0..6 {
        assert_eq!(at(operand(k)), next);
        assert_eq!(at(bucket.outputs[k]) - at(bucket.outputs[0]), 2 * (next - at(operand(0))));
        next += program.values[operand(k).0 as usize].nbytes().next_multiple_of(256);
    }
}

/// Each device gets the other's terms, and what reads a sum adds them: no kernel stores it for others.
#[test]
fn two_devices_exchange_large_terms() {
    let width = 512;
    let half = [(DType::BF16, "dp=2", 3), (DType::F16, "dp=2", 3), (DType::BF16, "dp=4", 0)];
    for (dtype, mesh, exchanged) in half.into_iter().chain([(DType::F32, "dp=2", 3), (DType::F32, "dp=4", 0)]) {
        let what = format!("{dtype} on {mesh}");
        let devices = Mesh::parse(mesh).unwrap().devices();
        let mut s = step(dtype, width, 0..BATCH);
        let (got, _) = s.run_on(&spread(&s, mesh, false)).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (k, (got, want)) in got.states.iter().zip(sums(dtype, width, devices)).enumerate() {
            assert!(want.to_f64().iter().any(|v| *v != 0.0), "{what}: gradient {k}");
            assert_eq!(got.bytes, want.bytes, "{what}: gradient {k}");
        }
        // What an optimizer computes reads a sum, and the norm of all gradients before it.
        for k in 0..s.request.state_writes.len() {
            let gradient = s.request.state_writes[k].1;
            let squares = s.call("mul", &[t(gradient), t(gradient)]);
            let norm = s.call("sum", &[t(squares)]);
            s.request.state_writes[k].1 = s.call("mul", &[t(gradient), t(norm)]);
        }
        let (_, program) = s.run_on(&spread(&s, mesh, false)).unwrap_or_else(|e| panic!("{what}: {e}"));
        let moved = calls(&program).into_iter().filter(|l| l.op == &COLLECTIVE_PERMUTE && l.dtypes[0] == dtype);
        let received: Vec<ValueId> = moved.flat_map(|l| l.outputs.iter().copied()).collect();
        assert_eq!(received.len(), exchanged, "{what}");
        if dtype == DType::F32 {
            // A sum of two terms in f32 is stored: it has half of their bytes.
            continue;
        }
        let adds = |k: &&Kernel| k.reads().iter().any(|v| received.contains(v));
        let written = program.kernels.iter().filter(adds).flat_map(|k| k.writes());
        let written: Vec<Storage> = written.map(|v| program.values[v.0 as usize].storage).collect();
        assert!(written.iter().all(|at| matches!(at, Storage::Input(_))), "{what}: {written:?}, not States alone");
    }
}
