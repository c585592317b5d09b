//! Tests the semantics of a step: assignments, handles across steps, gradients, randomness, memory, and behaviours that could
//! surprise users of PyTorch.
//!
//! Each test has a grade: `good` for behaviour that needs no explanation, `documented` for a choice that users need to know.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::{Engine, Handle, StateId};
use perilune_tests::harness::{self, call, call_all, float, int, ints, t};

struct Bench {
    e: Engine,
}

impl Bench {
    fn new() -> Bench {
        Bench { e: harness::engine(1) }
    }

    fn host(&mut self, values: &[f32]) -> NodeId {
        self.e.from_host(HostTensor::from_f32(Shape::of(&[values.len()]), values))
    }

    /// Makes a trainable State in memory, outside any step.
    fn state(&mut self, values: &[f32]) -> StateId {
        let x = self.host(values);
        let s = self.e.new_state(x, true).unwrap();
        self.e.flush().unwrap();
        s
    }

    fn get(&mut self, s: StateId) -> NodeId {
        self.e.state_node(s).unwrap()
    }

    fn call(&mut self, name: &str, args: &[Value]) -> NodeId {
        call(&mut self.e, name, args, &[]).unwrap()
    }

    fn add(&mut self, x: NodeId, n: f64) -> NodeId {
        self.call("add", &[t(x), float(n)])
    }

    fn mul(&mut self, x: NodeId, n: f64) -> NodeId {
        self.call("mul", &[t(x), float(n)])
    }

    fn end(&mut self, roots: &[NodeId]) -> Vec<Handle> {
        let handles: Vec<Handle> = roots.iter().map(|r| self.e.recorder.handle(*r)).collect();
        self.e.end_step(roots).unwrap_or_else(|f| panic!("{}", f.error));
        handles
    }

    fn read(&mut self, h: Handle) -> Vec<f64> {
        self.e.read(h).unwrap_or_else(|f| panic!("{}", f.error)).to_f64()
    }

    fn value(&mut self, s: StateId) -> Vec<f64> {
        self.e.read_state(s).unwrap_or_else(|f| panic!("{}", f.error)).to_f64()
    }
}

// ---- assignments -----------------------------------------------------------------------------------------------------

/// good: a read has the value of the State at that line, whenever it is evaluated.
#[test]
fn reads_mean_the_value_at_their_line() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0]);
    b.e.begin_step().unwrap();
    let old = b.get(w);
    let before = b.mul(old, 10.0);
    let five = b.host(&[5.0, 6.0]);
    b.e.assign(w, five).unwrap();
    let new = b.get(w);
    let after = b.mul(new, 10.0);
    // Recorded after the assignment, from a read before it.
    let late = b.add(old, 0.5);
    let h = b.end(&[before, after, late, old, new]);
    assert_eq!(b.read(h[0]), [10.0, 20.0]);
    assert_eq!(b.read(h[1]), [50.0, 60.0]);
    assert_eq!(b.read(h[2]), [1.5, 2.5]);
    assert_eq!(b.read(h[3]), [1.0, 2.0]);
    assert_eq!(b.read(h[4]), [5.0, 6.0]);
    assert_eq!(b.value(w), [5.0, 6.0]);
}

/// good: `a, b = b, a` swaps, in any order and number.
#[test]
fn states_swap_and_rotate() {
    let mut b = Bench::new();
    let s: Vec<StateId> = (1..=3).map(|k| b.state(&[k as f32, 10.0 * k as f32])).collect();
    b.e.begin_step().unwrap();
    let (x, y) = (b.get(s[0]), b.get(s[1]));
    b.e.assign(s[0], y).unwrap();
    b.e.assign(s[1], x).unwrap();
    b.end(&[]);
    assert_eq!((b.value(s[0]), b.value(s[1])), (vec![2.0, 20.0], vec![1.0, 10.0]));
    b.e.begin_step().unwrap();
    let old: Vec<NodeId> = s.iter().map(|s| b.get(*s)).collect();
    for k in 0..3 {
        b.e.assign(s[k], old[(k + 1) % 3]).unwrap();
    }
    b.end(&[]);
    assert_eq!(b.value(s[0]), [1.0, 10.0]);
    assert_eq!(b.value(s[1]), [3.0, 30.0]);
    assert_eq!(b.value(s[2]), [2.0, 20.0]);
}

/// good: a swap with arithmetic, where each new value depends on the other's old one.
#[test]
fn states_exchange_through_arithmetic() {
    let mut b = Bench::new();
    let (p, q) = (b.state(&[1.0, 2.0, 3.0]), b.state(&[10.0, 20.0, 30.0]));
    b.e.begin_step().unwrap();
    let (x, y) = (b.get(p), b.get(q));
    let sum = b.call("add", &[t(x), t(y)]);
    let difference = b.call("sub", &[t(x), t(y)]);
    let flipped = b.call("flip", &[t(difference), ints(&[0])]);
    b.e.assign(p, sum).unwrap();
    b.e.assign(q, flipped).unwrap();
    b.end(&[]);
    assert_eq!(b.value(p), [11.0, 22.0, 33.0]);
    assert_eq!(b.value(q), [-27.0, -18.0, -9.0]);
}

/// good: assigning another State copies its value; the two stay independent.
#[test]
fn assigning_a_state_copies_it() {
    let mut b = Bench::new();
    let (p, q) = (b.state(&[1.0]), b.state(&[2.0]));
    b.e.begin_step().unwrap();
    let y = b.get(q);
    b.e.assign(p, y).unwrap();
    let y = b.add(y, 1.0);
    b.e.assign(q, y).unwrap();
    b.end(&[]);
    assert_eq!((b.value(p), b.value(q)), (vec![2.0], vec![3.0]));
    b.e.begin_step().unwrap();
    let x = b.host(&[7.0]);
    b.e.assign(p, x).unwrap();
    b.e.assign(q, x).unwrap();
    b.end(&[]);
    b.e.begin_step().unwrap();
    let x = b.get(p);
    let x = b.mul(x, 2.0);
    b.e.assign(p, x).unwrap();
    b.end(&[]);
    assert_eq!((b.value(p), b.value(q)), (vec![14.0], vec![7.0]));
}

/// good: several assignments to one State in a step take effect in order.
#[test]
fn assignments_add_up_and_the_last_stands() {
    let mut b = Bench::new();
    let w = b.state(&[1.0]);
    b.e.begin_step().unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let x = b.get(w);
        let x = b.mul(x, 3.0);
        b.e.assign(w, x).unwrap();
        seen.push(b.get(w));
    }
    let h = b.end(&seen);
    let values: Vec<f64> = h.iter().map(|h| b.read(*h)[0]).collect();
    assert_eq!(values, [3.0, 9.0, 27.0]);
    assert_eq!(b.value(w), [27.0]);
}

/// good: kernels of every kind that run after the update is computed read the old value.
#[test]
fn old_values_survive_in_place_updates() {
    let mut b = Bench::new();
    let n = 300;
    let start: Vec<f32> = (0..n * n).map(|i| (i % 17) as f32 - 8.0).collect();
    let x = b.e.from_host(HostTensor::from_f32(Shape::of(&[n, n]), &start));
    let w = b.e.new_state(x, true).unwrap();
    b.e.flush().unwrap();
    b.e.begin_step().unwrap();
    let old = b.get(w);
    let new = b.mul(old, 2.0);
    b.e.assign(w, new).unwrap();
    let turned = b.call("t", &[t(old)]);
    let total = b.call("sum", &[t(turned), ints(&[0])]);
    let product = b.call("matmul", &[t(old), t(turned)]);
    let sorted = call_all(&mut b.e, "sort", &[t(old), int(-1)], &[]).unwrap()[0];
    let mixed = b.call("add", &[t(turned), t(new)]);
    let h = b.end(&[total, product, sorted, mixed]);
    let at = |i: usize, j: usize| f64::from(start[i * n + j]);
    let want: f64 = (0..n).map(|j| at(5, j)).sum();
    assert_eq!(b.read(h[0])[5], want);
    let want: f64 = (0..n).map(|k| at(3, k) * at(7, k)).sum();
    assert_eq!(b.read(h[1])[3 * n + 7], want);
    let least = (0..n).map(|j| at(4, j)).fold(f64::INFINITY, f64::min);
    assert_eq!(b.read(h[2])[4 * n], least);
    assert_eq!(b.read(h[3])[2 * n + 9], at(9, 2) + 2.0 * at(2, 9));
    assert_eq!(b.value(w)[2 * n + 9], 2.0 * at(2, 9));
}

/// good: later steps do not overwrite the results of a step, even if a result is the State itself.
#[test]
fn returned_values_are_kept_apart_from_states() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0]);
    let mut kept = Vec::new();
    for k in 0..4 {
        b.e.begin_step().unwrap();
        let x = b.get(w);
        let d = b.call("detach", &[t(x)]);
        let y = b.add(x, 1.0);
        b.e.assign(w, y).unwrap();
        let now = b.get(w);
        kept.push((k, b.end(&[x, d, now])));
    }
    for (k, h) in kept {
        let old = f64::from(k) + 1.0;
        assert_eq!(b.read(h[0]), [old, old + 1.0]);
        assert_eq!(b.read(h[1]), [old, old + 1.0]);
        assert_eq!(b.read(h[2]), [old + 1.0, old + 2.0]);
    }
}

/// good: a step that fails leaves every State as it was.
#[test]
fn an_aborted_step_changes_nothing() {
    let mut b = Bench::new();
    let w = b.state(&[1.0]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let y = b.add(x, 41.0);
    b.e.assign(w, y).unwrap();
    let now = b.get(w);
    // Even if the new value was read in between.
    assert_eq!(b.e.read_node(now).unwrap().to_f64(), [42.0]);
    let init = b.host(&[9.0]);
    let fresh = b.e.new_state(init, true).unwrap();
    let z = b.host(&[10.0]);
    b.e.assign(fresh, z).unwrap();
    b.e.abort_step().unwrap();
    assert_eq!(b.value(w), [1.0]);
    assert_eq!(b.value(fresh), [9.0], "a State made in a failed step has its initial value");
    assert!(!b.e.in_step());
    b.e.begin_step().unwrap();
    let x = b.get(w);
    assert_eq!(b.e.read_node(x).unwrap().to_f64(), [1.0]);
    b.end(&[]);
}

/// good: an error in a cached plan names the line of the current call, not of the call that compiled it.
#[test]
fn a_cached_plan_names_the_line_of_now() {
    let mut b = Bench::new();
    let file = b.e.recorder.source_map.file("recipe.lua");
    let mut pick = |line, index| {
        let x = b.e.from_host(HostTensor::from_f32(Shape::of(&[2]), &[1.0, 2.0]));
        let index = b.e.from_host(HostTensor::from_i64(Shape::of(&[1]), &[index]));
        b.e.recorder.graph.modes.loc = b.e.recorder.source_map.intern(file, line);
        let y = b.call("index_select", &[t(x), int(0), t(index)]);
        let result = b.e.evaluate(&[y]);
        (result.map_err(|f| f.loc.map(|s| b.e.recorder.source_map.show(s))), b.e.stats().misses)
    };
    assert_eq!(pick(12, 1), (Ok(()), 1));
    assert_eq!(pick(34, 7), (Err(Some("recipe.lua:34".to_string())), 1));
}

/// good: the same for errors in kernels.
#[test]
fn an_index_out_of_range_fails_the_step_and_names_itself() {
    let mut b = Bench::new();
    let (w, v) = (b.state(&[1.0, 2.0]), b.state(&[5.0, 6.0]));
    b.e.begin_step().unwrap();
    let (x, y) = (b.get(w), b.get(v));
    let file = b.e.recorder.source_map.file("recipe.lua");
    b.e.recorder.graph.modes.loc = b.e.recorder.source_map.intern(file, 12);
    let index = b.e.from_host(HostTensor::from_i64(Shape::of(&[2]), &[0, 7]));
    let picked = b.call("index_select", &[t(x), int(0), t(index)]);
    b.e.recorder.graph.modes.loc = perilune_core::source_loc::SourceLoc::NONE;
    b.e.assign(w, picked).unwrap();
    let y = b.add(y, 1.0);
    b.e.assign(v, y).unwrap();
    let fault = b.e.end_step(&[]).unwrap_err();
    let text = fault.error.to_string();
    assert!(text.contains("index_select") && text.contains('7') && text.contains('2'), "{text}");
    assert_eq!(fault.loc.map(|s| b.e.recorder.source_map.show(s)).as_deref(), Some("recipe.lua:12"));
    assert_eq!(b.value(w), [1.0, 2.0]);
    assert_eq!(b.value(v), [5.0, 6.0]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let x = b.add(x, 1.0);
    b.e.assign(w, x).unwrap();
    b.end(&[]);
    assert_eq!(b.value(w), [2.0, 3.0]);
}

/// documented: assigned values are converted to the State's dtype and must have its shape; a State never changes either.
#[test]
fn assigning_converts_and_broadcasts() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0, 3.0]);
    b.e.begin_step().unwrap();
    let x = b.e.from_host(HostTensor::from_i64(Shape::of(&[1]), &[4]));
    b.e.assign(w, x).unwrap();
    let wrong = b.host(&[1.0, 2.0]);
    let error = b.e.assign(w, wrong).unwrap_err().to_string();
    assert!(error.contains("{2}") && error.contains("{3}"), "{error}");
    b.end(&[]);
    let now = b.e.read_state(w).unwrap();
    assert_eq!((now.dtype, now.to_f64()), (DType::F32, vec![4.0; 3]));
}

/// good: reading a value in the middle of a step does not write States, and does not write them twice.
#[test]
fn reading_in_mid_step_commits_nothing() {
    let mut b = Bench::new();
    let w = b.state(&[1.0]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let y = b.mul(x, 2.0);
    b.e.assign(w, y).unwrap();
    let splits = b.e.stats().splits;
    assert_eq!(b.e.read_node(y).unwrap().to_f64(), [2.0]);
    assert_eq!(b.e.stats().splits, splits + 1);
    let now = b.get(w);
    let z = b.mul(now, 5.0);
    b.e.assign(w, z).unwrap();
    assert_eq!(b.e.read_node(x).unwrap().to_f64(), [1.0], "the old value is still what it was");
    b.end(&[]);
    assert_eq!(b.value(w), [10.0]);
}

// ---- handles ---------------------------------------------------------------------------------------------------------

/// good: a tensor that was never evaluated cannot be used later, and the error has its line and a cure.
#[test]
fn stale_handles_name_their_line_and_the_cure() {
    let mut b = Bench::new();
    b.e.begin_step().unwrap();
    let file = b.e.recorder.source_map.file("recipe.lua");
    b.e.recorder.graph.modes.loc = b.e.recorder.source_map.intern(file, 88);
    let x = b.host(&[1.0]);
    let y = b.mul(x, 2.0);
    let (h, kept) = (b.e.recorder.handle(y), b.e.recorder.handle(x));
    b.e.end_step(&[]).unwrap();
    let error = b.e.read(h).unwrap_err().error.to_string();
    for part in ["recipe.lua:88", "a step that has ended", "return it from the step", "pl.keep(x)"] {
        assert!(error.contains(part), "no '{part}' in: {error}");
    }
    // A leaf has a value, so it stays valid.
    assert_eq!(b.read(kept), [1.0]);
}

/// good: evaluated tensors can be used in later steps and are freed with their last handle.
#[test]
fn handles_carry_values_over_and_free_them() {
    let mut b = Bench::new();
    b.e.begin_step().unwrap();
    let x = b.host(&[3.0; 1000]);
    let y = b.mul(x, 2.0);
    let h = b.end(&[y]);
    let held = b.e.stats().held_bytes;
    assert!(held >= 4000, "{held}");
    for k in 0..5 {
        b.e.begin_step().unwrap();
        let y = b.e.recorder.node(h[0]).unwrap();
        assert_eq!(b.e.recorder.node(h[0]).unwrap(), y, "one leaf stands for it in a step");
        let z = b.add(y, f64::from(k));
        let r = b.end(&[z]);
        assert_eq!(b.read(r[0])[999], 6.0 + f64::from(k));
        b.e.recorder.release(r[0]);
    }
    b.e.flush().unwrap();
    assert_eq!(b.e.stats().held_bytes, held);
    b.e.recorder.release(h[0]);
    b.e.flush().unwrap();
    assert_eq!(b.e.stats().held_bytes, 0);
}

/// good: an op may return its input itself; dropping one of the two handles keeps the other.
#[test]
fn two_handles_of_one_carried_value_are_counted_apart() {
    let mut b = Bench::new();
    b.e.begin_step().unwrap();
    let x = b.host(&[3.0]);
    let y = b.mul(x, 2.0);
    let h = b.end(&[y]);
    b.e.begin_step().unwrap();
    let again = b.e.recorder.node(h[0]).unwrap();
    let same = b.call("reshape", &[t(again), ints(&[1])]);
    let second = b.e.recorder.handle(same);
    b.e.recorder.release(h[0]);
    b.e.end_step(&[]).unwrap();
    assert_eq!(b.read(second), [6.0]);
}

/// good: a plain script needs no steps; values with handles survive a flush.
#[test]
fn flushing_keeps_what_is_held() {
    let mut b = Bench::new();
    let x = b.host(&[2.0]);
    let y = b.mul(x, 4.0);
    let dropped = b.mul(x, 5.0);
    let (h, gone) = (b.e.recorder.handle(y), b.e.recorder.handle(dropped));
    b.e.recorder.release(gone);
    b.e.flush().unwrap();
    assert_eq!(b.read(h), [8.0]);
}

/// documented: steps do not nest.
#[test]
fn a_step_inside_a_step_is_refused() {
    let mut b = Bench::new();
    b.e.begin_step().unwrap();
    let text = b.e.begin_step().unwrap_err().error.to_string();
    assert!(text.contains("inside a step"), "{text}");
    b.e.end_step(&[]).unwrap();
}

// ---- gradients -------------------------------------------------------------------------------------------------------

/// good: gradients of several passes add up within a step and are cleared after it.
#[test]
fn gradients_accumulate_within_a_step() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0]);
    b.e.begin_step().unwrap();
    for k in 1..=3 {
        let x = b.get(w);
        let y = b.mul(x, f64::from(k));
        let y = b.call("sum", &[t(y)]);
        assert_eq!(b.e.backward(y, None, false).unwrap(), 1);
    }
    let g = b.e.state_grad(w).unwrap().unwrap();
    let h = b.end(&[g]);
    assert_eq!(b.read(h[0]), [6.0, 6.0]);
    assert!(b.e.state_grad(w).unwrap().is_none());
}

/// good: in a plain loop, gradients last from `backward` to the optimizer, across flushes.
#[test]
fn gradients_survive_a_flush_outside_steps() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0]);
    for _ in 0..2 {
        let x = b.get(w);
        let y = b.call("mul", &[t(x), t(x)]);
        let y = b.call("sum", &[t(y)]);
        b.e.backward(y, None, false).unwrap();
        b.e.flush().unwrap();
    }
    let g = b.e.state_grad(w).unwrap().unwrap();
    assert_eq!(b.e.read_node(g).unwrap().to_f64(), [4.0, 8.0]);
    b.e.end_implicit_step().unwrap();
    assert!(b.e.state_grad(w).unwrap().is_none());
}

/// good: the history of an assigned value is not part of later gradients.
#[test]
fn assignments_cut_gradients() {
    let mut b = Bench::new();
    let (w, v) = (b.state(&[3.0]), b.state(&[5.0]));
    b.e.begin_step().unwrap();
    let x = b.get(v);
    let x = b.mul(x, 2.0);
    b.e.assign(w, x).unwrap();
    let y = b.get(w);
    let y = b.call("mul", &[t(y), t(y)]);
    let y = b.call("sum", &[t(y)]);
    assert_eq!(b.e.backward(y, None, false).unwrap(), 1);
    assert!(b.e.state_grad(v).unwrap().is_none());
    let g = b.e.state_grad(w).unwrap().unwrap();
    let h = b.end(&[g]);
    assert_eq!(b.read(h[0]), [20.0]);
}

/// good: `backward` treats reads before and after an assignment as the same weight.
#[test]
fn reads_on_both_sides_of_an_assignment_reach_the_state() {
    let mut b = Bench::new();
    let w = b.state(&[3.0]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let new = b.add(x, 1.0);
    b.e.assign(w, new).unwrap();
    let y = b.get(w);
    let z = b.call("mul", &[t(x), t(y)]);
    let z = b.call("sum", &[t(z)]);
    b.e.backward(z, None, false).unwrap();
    let g = b.e.state_grad(w).unwrap().unwrap();
    let h = b.end(&[g]);
    assert_eq!(b.read(h[0]), [7.0]);
}

/// good: a loss that depends on no weight is an error.
#[test]
fn backward_without_a_trainable_state_is_an_error() {
    let mut b = Bench::new();
    let w = b.state(&[3.0]);
    b.e.set_trainable(w, false).unwrap();
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let y = b.call("sum", &[t(x)]);
    let text = b.e.backward(y, None, false).unwrap_err().to_string();
    assert!(text.contains("no trainable State") && text.contains("detach"), "{text}");
    let wide = b.add(x, 1.0);
    let wide = b.call("expand", &[t(wide), ints(&[4])]);
    let text = b.e.backward(wide, None, false).unwrap_err().to_string();
    assert!(text.contains("needs a scalar") && text.contains("{4}"), "{text}");
    b.e.abort_step().unwrap();
}

/// documented: where several elements are largest, they share the gradient (PyTorch's `max()` does the same, its
/// `max(dim)` and pooling give it to one).
#[test]
fn equal_maxima_share_their_gradient() {
    let mut b = Bench::new();
    let w = b.state(&[2.0, 1.0, 2.0]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let y = b.call("amax", &[t(x)]);
    b.e.backward(y, None, false).unwrap();
    let g = b.e.state_grad(w).unwrap().unwrap();
    let h = b.end(&[g]);
    assert_eq!(b.read(h[0]), [0.5, 0.0, 0.5]);
}

// ---- random numbers --------------------------------------------------------------------------------------------------

fn draws(e: &mut Engine, together: bool) -> Vec<HostTensor> {
    e.recorder.seed(42);
    let mut out = Vec::new();
    for _ in 0..2 {
        e.begin_step().unwrap();
        let a = call(e, "rand", &[ints(&[3, 50])], &[]).unwrap();
        let x = call(e, "mul", &[t(a), float(2.0)], &[]).unwrap();
        let d = call(e, "dropout", &[t(x), float(0.5)], &[]).unwrap();
        let s = call(e, "sum", &[t(d), ints(&[1])], &[]).unwrap();
        let n = call(e, "randn", &[ints(&[7])], &[]).unwrap();
        let roots = [a, x, d, s, n];
        let handles: Vec<Handle> = roots.iter().map(|r| e.recorder.handle(*r)).collect();
        if !together {
            for r in roots.iter().rev() {
                e.evaluate(&[*r]).unwrap();
            }
        }
        e.end_step(&roots).unwrap();
        for h in handles {
            out.push(e.read(h).unwrap());
            e.recorder.release(h);
        }
    }
    out
}

/// good: random numbers depend only on the seed, the step and the position in the recording.
#[test]
fn random_numbers_do_not_depend_on_how_they_are_run() {
    let mut e = harness::engine(1);
    let first = draws(&mut e, true);
    assert_ne!(first[0], first[5], "another step, other numbers");
    assert!(harness::same_bits(&first, &draws(&mut e, true)), "a second time");
    assert!(harness::same_bits(&first, &draws(&mut e, false)), "evaluated separately");
    e.switches.fusion = false;
    assert!(harness::same_bits(&first, &draws(&mut e, true)), "unfused");
    assert!(harness::same_bits(&first, &draws(&mut harness::engine(2), true)), "on two threads");
}

/// good: the mask of dropout is the same in both directions, recomputed rather than stored.
#[test]
fn dropout_drops_the_same_elements_backward() {
    let mut b = Bench::new();
    let w = b.state(&[1.0; 400]);
    b.e.begin_step().unwrap();
    let x = b.get(w);
    let y = b.call("dropout", &[t(x), float(0.25)]);
    let l = b.call("sum", &[t(y)]);
    b.e.backward(l, None, false).unwrap();
    let g = b.e.state_grad(w).unwrap().unwrap();
    let h = b.end(&[y, g]);
    let (y, g) = (b.read(h[0]), b.read(h[1]));
    assert_eq!(y, g);
    let dropped = y.iter().filter(|v| **v == 0.0).count();
    assert!((60..140).contains(&dropped), "{dropped} of 400");
    assert!(y.iter().all(|v| *v == 0.0 || (*v - 4.0 / 3.0).abs() < 1e-6));
}

// ---- memory ----------------------------------------------------------------------------------------------------------

/// good: memory stays constant with losses returned and dropped, one tensor kept throughout, and gradients in each step.
#[test]
fn memory_is_flat_over_ten_thousand_steps() {
    let mut b = Bench::new();
    let w = b.state(&[0.5; 16]);
    b.e.begin_step().unwrap();
    let x = b.host(&[0.25; 16]);
    let carried = b.end(&[x])[0];
    let (mut held, mut plans) = (0, 0);
    let mut last: Option<Handle> = None;
    for k in 0..10_000 {
        b.e.begin_step().unwrap();
        let (x, c) = (b.get(w), b.e.recorder.node(carried).unwrap());
        let y = b.call("mul", &[t(x), t(c)]);
        let y = match last {
            Some(h) => {
                let old = b.e.recorder.node(h).unwrap();
                b.call("add", &[t(y), t(old)])
            }
            None => y,
        };
        let l = b.call("mean", &[t(y)]);
        b.e.backward(l, None, false).unwrap();
        let g = b.e.state_grad(w).unwrap().unwrap();
        let step = b.mul(g, 1.0 / f64::from(k + 1));
        let new = b.call("sub", &[t(x), t(step)]);
        b.e.assign(w, new).unwrap();
        let h = b.end(&[l])[0];
        if let Some(old) = last.replace(h) {
            b.e.recorder.release(old);
        }
        if k == 20 {
            held = b.e.stats().held_bytes;
            plans = b.e.stats().plans;
        }
    }
    let s = b.e.stats();
    assert_eq!(s.held_bytes, held);
    assert_eq!(s.plans, plans);
    assert!(s.nodes < 10, "{} nodes", s.nodes);
    assert!(s.misses < 8 && s.evictions == 0, "{s:?}");
    assert_eq!(b.read(carried), [0.25; 16]);
}

/// good: States without handles are freed.
#[test]
fn dropped_states_are_freed() {
    let mut b = Bench::new();
    for _ in 0..100 {
        let s = b.state(&[1.0; 1000]);
        b.e.release_state(s);
        b.e.flush().unwrap();
    }
    assert_eq!(b.e.stats().held_bytes, 0);
}

// ---- numbers and dtypes ----------------------------------------------------------------------------------------------

fn result(name: &str, args: &[(DType, &[usize], &[f64])]) -> HostTensor {
    let mut e = harness::engine(1);
    let args: Vec<Value> =
        args.iter().map(|(d, dims, v)| t(e.from_host(HostTensor::from_f64(*d, Shape::of(dims), v)))).collect();
    let y = call(&mut e, name, &args, &[]).unwrap();
    e.read_node(y).unwrap()
}

/// good: a tensor of rank 0 takes the dtype of one with dims, unless its category is higher: a loss in f32 does not widen bf16.
#[test]
fn rank_zero_tensors_give_way() {
    let both = |scalar, wide| {
        let (s, w): ((DType, &[usize], &[f64]), _) = ((scalar, &[], &[1.0]), (wide, &[2][..], &[1.0, 2.0][..]));
        let (y, z) = (result("add", &[s, w]), result("add", &[w, s]));
        assert_eq!(y, z);
        y.dtype
    };
    assert_eq!(both(DType::F64, DType::F32), DType::F32);
    assert_eq!(both(DType::F32, DType::BF16), DType::BF16);
    assert_eq!(both(DType::I64, DType::U8), DType::U8);
    assert_eq!(both(DType::F16, DType::I64), DType::F16);
    assert_eq!(both(DType::I32, DType::Bool), DType::I32);
    let y = result("add", &[(DType::F64, &[], &[1.0]), (DType::F32, &[], &[1.0])]);
    assert_eq!(y.dtype, DType::F64, "among themselves they promote as others do");
}

/// good: `a + b` of bools is `or`, `a * b` is `and`, as in PyTorch; documented: other arithmetic on them is that of i64
/// (PyTorch raises).
#[test]
fn sums_and_products_of_bools_are_bools() {
    let (a, b): ((DType, &[usize], &[f64]), _) =
        ((DType::Bool, &[4], &[1.0, 1.0, 0.0, 0.0]), (DType::Bool, &[4][..], &[1.0, 0.0, 1.0, 0.0][..]));
    for (name, want) in
        [("add", [1, 1, 1, 0]), ("maximum", [1, 1, 1, 0]), ("mul", [1, 0, 0, 0]), ("minimum", [1, 0, 0, 0])]
    {
        let y = result(name, &[a, b]);
        assert_eq!((y.dtype, y.to_i64()), (DType::Bool, want.to_vec()), "{name}");
    }
    let y = result("sub", &[a, b]);
    assert_eq!((y.dtype, y.to_i64()), (DType::I64, vec![0, 1, -1, 0]));
}

/// documented: integers divided by 0 give 0, and an integer to a negative power is 0 (PyTorch raises).
#[test]
fn integers_never_trap() {
    let y = result("floor_div", &[(DType::I64, &[3], &[7.0, -7.0, 0.0]), (DType::I64, &[1], &[0.0])]);
    assert_eq!(y.to_i64(), [0, 0, 0]);
    let y = result("remainder", &[(DType::I32, &[2], &[7.0, -7.0]), (DType::I32, &[1], &[0.0])]);
    assert_eq!(y.to_i64(), [0, 0]);
    let y = result("pow", &[(DType::I64, &[4], &[2.0, 1.0, -1.0, 0.0]), (DType::I64, &[1], &[-3.0])]);
    assert_eq!(y.to_i64(), [0, 1, -1, 0]);
    let y = result("floor_div", &[(DType::I32, &[1], &[-2147483648.0]), (DType::I32, &[1], &[-1.0])]);
    assert_eq!(y.to_i64(), [-2147483648], "wraps around");
}

/// documented: integers wrap around.
#[test]
fn integers_wrap() {
    let y = result("add", &[(DType::U8, &[1], &[250.0]), (DType::U8, &[1], &[10.0])]);
    assert_eq!((y.dtype, y.to_i64()), (DType::U8, vec![4]));
    let y = result("abs", &[(DType::I32, &[1], &[-2147483648.0])]);
    assert_eq!(y.to_i64(), [-2147483648]);
}

/// documented: sums of 16-bit floats accumulate in f32 and round once, so many small addends are not lost.
#[test]
fn sums_of_halves_accumulate_wide() {
    let ones = vec![1.0; 5000];
    for dtype in [DType::BF16, DType::F16] {
        let y = result("sum", &[(dtype, &[5000], &ones)]);
        let want = HostTensor::from_f64(dtype, Shape::SCALAR, &[5000.0]).get_f64(0);
        assert_eq!((y.dtype, y.get_f64(0)), (dtype, want));
    }
}

/// documented: every op rounds to its dtype, fused or not, so bf16 chains lose what PyTorch's eager ones lose.
#[test]
fn chains_of_halves_round_at_every_step() {
    let mut e = harness::engine(1);
    let x = e.from_host(HostTensor::from_f64(DType::BF16, Shape::of(&[1]), &[256.0]));
    let y = call(&mut e, "add", &[t(x), float(1.0)], &[]).unwrap();
    let y = call(&mut e, "sub", &[t(y), t(x)], &[]).unwrap();
    assert_eq!(e.read_node(y).unwrap().to_f64(), [0.0]);
}

/// good: restoring a State accepts only its dtype and shape.
#[test]
fn states_are_restored_from_memory() {
    let mut b = Bench::new();
    let w = b.state(&[1.0, 2.0]);
    b.e.write_state(w, &HostTensor::from_f32(Shape::of(&[2]), &[8.0, 9.0])).unwrap();
    b.e.flush().unwrap();
    assert_eq!(b.value(w), [8.0, 9.0]);
    let text = b.e.write_state(w, &HostTensor::from_i64(Shape::of(&[2]), &[8, 9])).unwrap_err().to_string();
    assert!(text.contains("i64") && text.contains("f32"), "{text}");
}
