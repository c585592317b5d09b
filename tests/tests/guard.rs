//! Tests guards: a bool on the device decides whether the assignments of a step take effect. On the CPU, or on the device that
//! `PERILUNE_DEVICE` names.
#![allow(clippy::unwrap_used)]

use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::{Engine, StateId};
use perilune_tests::harness;

struct World {
    e: Engine,
    /// States that are added to, overwritten without a read, and swapped.
    sum: StateId,
    blind: StateId,
    left: StateId,
    right: StateId,
}

fn world(fusion: bool) -> World {
    let mut e = harness::engine(2);
    e.switches.fusion = fusion;
    let mut state = |k: usize| {
        let values: Vec<f32> = (0..1000).map(|i| (i * k) as f32 + 0.5).collect();
        let node = e.from_host(HostTensor::from_f32(Shape::of(&[10, 100]), &values));
        e.new_state(node, false).unwrap()
    };
    let [sum, blind, left, right] = [1, 2, 3, 5].map(&mut state);
    e.end_implicit_step().unwrap();
    World { e, sum, blind, left, right }
}

impl World {
    fn values(&mut self) -> Vec<HostTensor> {
        [self.sum, self.blind, self.left, self.right].map(|id| self.e.read_state(id).unwrap()).into()
    }

    /// A step that changes every State, and makes and changes a new one; guarded if `ok` is given.
    fn step(&mut self, ok: Option<bool>) -> StateId {
        let e = &mut self.e;
        e.begin_step().unwrap();
        let bit = ok.map(|ok| e.from_host(HostTensor::from_f64(DType::Bool, Shape::SCALAR, &[ok.into()])));
        let [sum, left, right] = [self.sum, self.left, self.right].map(|id| e.state_node(id).unwrap());
        let more = e.recorder.graph.mul_c(left, 0.25).unwrap();
        let more = e.recorder.graph.add_(sum, more).unwrap();
        e.assign(self.sum, more).unwrap();
        let seven = e.recorder.graph.constant(7.0, DType::F32);
        e.assign(self.blind, seven).unwrap();
        e.assign(self.left, right).unwrap();
        e.assign(self.right, left).unwrap();
        let born = e.new_state(more, false).unwrap();
        let twice = e.recorder.graph.add_(more, more).unwrap();
        e.assign(born, twice).unwrap();
        let recorded = e.recorder.graph.len();
        if let Some(bit) = bit {
            e.guard(bit);
        }
        assert_eq!(e.recorder.graph.len(), recorded, "a guard records nothing");
        e.end_step(&[]).unwrap();
        born
    }
}

#[test]
fn a_false_guard_changes_no_state() {
    for fusion in [true, false] {
        let (mut w, mut plain) = (world(fusion), world(fusion));
        for round in 0..3 {
            let before = w.values();
            let born = w.step(Some(false));
            assert!(w.values() == before, "round {round}, fusion {fusion}: a State changed");
            // A State made by the step has no old value.
            let twin = plain.step(None);
            assert!(w.e.read_state(born).unwrap() == plain.e.read_state(twin).unwrap());
            w.step(Some(true));
            assert!(w.values() == plain.values(), "round {round}, fusion {fusion}: not the bits of an unguarded step");
        }
        // A guard applies to its step only.
        w.step(None);
        plain.step(None);
        assert!(w.values() == plain.values());
    }
}

#[test]
fn guarded_and_unguarded_steps_have_plans_of_their_own() {
    let mut w = world(true);
    let misses = |w: &World| w.e.stats().misses;
    let first = misses(&w);
    w.step(None);
    w.step(Some(true));
    assert_eq!(misses(&w), first + 2);
    for ok in [None, Some(true), Some(false), None, Some(false)] {
        w.step(ok);
    }
    assert_eq!(misses(&w), first + 2, "the bool's value is not part of a plan");
}

/// A failed step discards its guard.
#[test]
fn a_failed_step_leaves_no_guard() {
    let mut w = world(true);
    let before = w.values();
    w.e.begin_step().unwrap();
    let bit = w.e.from_host(HostTensor::from_f64(DType::Bool, Shape::SCALAR, &[0.0]));
    w.e.guard(bit);
    w.e.abort_step().unwrap();
    w.step(None);
    assert!(w.values() != before);
}
