//! Tests recomputation: gradients keep their bits, memory falls, plans match the requested spans.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::{DType, HostTensor, grad};
use perilune_engine::Engine;
use perilune_tests::harness::{self, call, float, t};
use perilune_tests::random::{self, Mode, Recipe};
use perilune_tests::rng::Pcg;

/// The recomputation of the blocks of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    Saved,
    /// One span per block.
    Blocks,
    /// Spans of three blocks, with one span per block inside.
    Nested,
}

struct Chain {
    grads: Vec<HostTensor>,
    arena: usize,
    live: usize,
    kernels: usize,
}

/// Records `n` residual blocks with dropout over `rows x width`, a loss, and gradients of all weights.
fn chain(e: &mut Engine, n: usize, rows: usize, width: usize, how: How, low: Option<DType>) -> Chain {
    e.recorder.seed(3);
    let mut rng = Pcg::named(&["chain"]);
    let mut leaf = |e: &mut Engine, dims: &[usize]| {
        let x = harness::randn(&mut rng, DType::F32, dims);
        e.from_host(x)
    };
    let mut x = leaf(e, &[rows, width]);
    let mut weights = Vec::new();
    e.recorder.graph.modes.autocast = low;
    let mut outer = NodeId(0);
    for k in 0..n {
        let (up, down) = (leaf(e, &[width, 4 * width]), leaf(e, &[4 * width, width]));
        let from = NodeId(e.recorder.graph.len() as u32);
        if k % 3 == 0 {
            outer = from;
        }
        let h = call(e, "layer_norm", &[t(x)], &[]).unwrap();
        let h = call(e, "matmul", &[t(h), t(up)], &[]).unwrap();
        let h = call(e, "mul", &[t(h), float(1.0 / (width as f64).sqrt())], &[]).unwrap();
        let h = call(e, "gelu", &[t(h)], &[]).unwrap();
        let h = call(e, "dropout", &[t(h), float(0.1)], &[]).unwrap();
        let h = call(e, "matmul", &[t(h), t(down)], &[]).unwrap();
        x = call(e, "add", &[t(x), t(h)], &[]).unwrap();
        let to = NodeId(e.recorder.graph.len() as u32);
        if how != How::Saved {
            e.recorder.graph.remat.spans.push((from, to));
        }
        if how == How::Nested && k % 3 == 2 {
            e.recorder.graph.remat.spans.push((outer, to));
        }
        weights.extend([up, down]);
    }
    let y = call(e, "mul", &[t(x), t(x)], &[]).unwrap();
    let loss = call(e, "mean", &[t(y)], &[]).unwrap();
    e.recorder.graph.modes.autocast = None;
    let one = e.recorder.graph.constant(1.0, DType::F32);
    let grads = grad::grad(&mut e.recorder.graph, loss, one, &weights, false).unwrap();
    let mut ids: Vec<NodeId> = grads.into_iter().map(Option::unwrap).collect();
    ids.push(loss);
    let grads = harness::read_all(e, &ids).unwrap();
    let s = e.stats();
    e.flush().unwrap();
    Chain { grads, arena: s.arena_bytes, live: s.live_bytes, kernels: s.kernels }
}

#[test]
fn gradients_keep_their_bits_and_memory_falls() {
    for low in [None, Some(DType::BF16)] {
        let mut e = harness::engine(2);
        let saved = chain(&mut e, 12, 64, 32, How::Saved, low);
        for (how, factor) in [(How::Blocks, 3.0), (How::Nested, 3.0)] {
            let again = chain(&mut e, 12, 64, 32, how, low);
            assert!(
                harness::same_bits(&saved.grads, &again.grads),
                "{how:?}: {}",
                harness::difference(&saved.grads, &again.grads)
            );
            let text = format!(
                "{low:?} {how:?}: arena {} -> {}, live {} -> {}, kernels {} -> {}",
                saved.arena, again.arena, saved.live, again.live, saved.kernels, again.kernels
            );
            println!("{text}");
            assert!(again.live as f64 * factor < saved.live as f64, "{text}");
            assert!(again.arena as f64 * factor < saved.arena as f64, "{text}");
        }
        e.switches.fusion = false;
        let apart = chain(&mut e, 12, 64, 32, How::Blocks, low);
        assert!(harness::same_bits(&saved.grads, &apart.grads), "unfused");
    }
}

/// The spans of the fuzzer have an effect: many of its graphs get another plan.
#[test]
fn random_spans_recompute() {
    let mut e = harness::engine(1);
    let mut other = 0;
    for seed in 1..400 {
        let recipe = Recipe { seed, ops: 3 + (seed % 23) as usize, root: None, big: false };
        let mut kernels = [0, 0];
        for (k, mode) in [Mode::Together, Mode::Recomputed].into_iter().enumerate() {
            random::run(&mut e, recipe, mode);
            kernels[k] = e.stats().kernels;
        }
        other += usize::from(kernels[0] != kernels[1]);
    }
    assert!(other > 20, "{other} of 400 plans differ");
}

/// `memory_budget` recomputes until the step fits, always in the same way, and reports the minimum if no choice fits.
#[test]
fn a_budget_is_kept() {
    use perilune_core::Kind;
    let mut e = harness::engine(2);
    let plain = chain(&mut e, 12, 64, 32, How::Saved, None);
    let fixed: usize = 24 * 32 * 128 * 4 * 2 + 64 * 32 * 4 + 4;
    let mut last = plain.arena;
    for share in [90, 70, 50, 35] {
        let budget = fixed + plain.arena * share / 100;
        e.executor.memory_budget = Some(budget);
        let fits = chain(&mut e, 12, 64, 32, How::Saved, None);
        println!("{share} %: arena {} of {}, kernels {}", fits.arena, plain.arena, fits.kernels);
        assert!(fits.arena + fixed <= budget, "{share} %: {} of {budget}", fits.arena + fixed);
        assert!(fits.kernels > plain.kernels && fits.arena <= last);
        assert!(harness::same_bits(&plain.grads, &fits.grads), "{share} %");
        let mut other = harness::engine(1);
        other.executor.memory_budget = Some(budget);
        let again = chain(&mut other, 12, 64, 32, How::Saved, None);
        assert_eq!(
            (again.arena, again.kernels),
            (fits.arena, fits.kernels),
            "{share} %: another engine plans otherwise"
        );
        last = fits.arena;
    }
    // In addition to existing marks.
    e.executor.memory_budget = Some(fixed + plain.arena / 5);
    let both = chain(&mut e, 12, 64, 32, How::Nested, None);
    assert!(harness::same_bits(&plain.grads, &both.grads));

    e.executor.memory_budget = Some(fixed / 2);
    let mut e = std::panic::AssertUnwindSafe(e);
    let x = e.from_host(HostTensor::from_f64(DType::F32, perilune_core::Shape::of(&[1 << 20]), &vec![1.0; 1 << 20]));
    let y = e.recorder.graph.exp(x).unwrap();
    let fault = e.evaluate(&[y]).unwrap_err();
    assert_eq!(fault.error.kind, Kind::Memory);
    assert!(fault.error.message.starts_with("the step needs 8.0 MiB, and 8.0 MiB with all"), "{}", fault.error.message);
}
