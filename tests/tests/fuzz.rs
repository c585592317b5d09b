//! Fuzzes the planner with random graphs: fused and unfused, joint and separate evaluation, one thread and several give equal bits.
//!
//! `PERILUNE_FUZZ_SEED=123` runs one graph, `PERILUNE_FUZZ_COUNT=100000` that many
//! small and a twentieth as many large ones.
#![allow(clippy::unwrap_used)]

use perilune_core::HostTensor;
use perilune_engine::Engine;
use perilune_tests::harness;
use perilune_tests::random::{self, Mode, Recipe};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The engines on which a graph runs.
struct Bench {
    one: Engine,
    more: Vec<Engine>,
}

impl Bench {
    fn new() -> Bench {
        Bench { one: harness::engine(1), more: vec![harness::engine(2), harness::engine(3)] }
    }

    /// Returns the first difference between the engines, if any.
    fn fault(&mut self, recipe: Recipe) -> Option<String> {
        let done = catch_unwind(AssertUnwindSafe(|| {
            self.one.switches.fusion = true;
            let want = random::run(&mut self.one, recipe, Mode::Together);
            let differs = |got: &[HostTensor], what: &str| {
                (!harness::same_bits(&want, got)).then(|| format!("{what}: {}", harness::difference(&want, got)))
            };
            self.one.switches.fusion = false;
            let apart = random::run(&mut self.one, recipe, Mode::Together);
            self.one.switches.fusion = true;
            if let Some(m) = differs(&apart, "fused and unfused") {
                return Some(m);
            }
            let again = random::run(&mut self.one, recipe, Mode::Together);
            if let Some(m) = differs(&again, "first run and second") {
                return Some(m);
            }
            let split = random::run(&mut self.one, recipe, Mode::Apart);
            if let Some(m) = differs(&split, "together and apart") {
                return Some(m);
            }
            let spans = random::run(&mut self.one, recipe, Mode::Recomputed);
            if let Some(m) = differs(&spans, "saved and recomputed") {
                return Some(m);
            }
            for e in &mut self.more {
                let got = random::run(e, recipe, Mode::Together);
                if let Some(m) = differs(&got, "one thread and several") {
                    return Some(m);
                }
            }
            None
        }));
        match done {
            Ok(found) => found,
            Err(panic) => {
                *self = Bench::new();
                let text = panic.downcast_ref::<String>().cloned();
                Some(format!(
                    "panics: {}",
                    text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default()
                ))
            }
        }
    }

    /// Finds the smallest graph of that seed that still fails, with one root if possible.
    fn shrink(&mut self, mut recipe: Recipe) -> (Recipe, String) {
        let mut fault = self.fault(recipe).unwrap_or_else(|| "only sometimes".into());
        for ops in 0..recipe.ops {
            if let Some(m) = self.fault(Recipe { ops, ..recipe }) {
                (recipe.ops, fault) = (ops, m);
                break;
            }
        }
        for root in 0..40 {
            if let Some(m) = self.fault(Recipe { root: Some(root), ..recipe }) {
                (recipe.root, fault) = (Some(root), m);
                break;
            }
        }
        (recipe, fault)
    }
}

fn fuzz(first: u64, count: u64, big: bool) {
    let one = std::env::var("PERILUNE_FUZZ_SEED").ok().and_then(|s| s.parse().ok());
    // Large graphs take twenty times as long.
    let share = if big { 20 } else { 1 };
    let asked = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|s| s.parse::<u64>().ok());
    let count = asked.map_or(count, |n| n.div_ceil(share));
    check(one.map_or_else(|| (first..first + count).collect(), |s| vec![s]), big);
}

fn check(seeds: Vec<u64>, big: bool) {
    let mut bench = Bench::new();
    let mut faults = Vec::new();
    for seed in seeds {
        let recipe = Recipe { seed, ops: 3 + (seed % 23) as usize, root: None, big };
        if bench.fault(recipe).is_none() {
            continue;
        }
        let (small, fault) = bench.shrink(recipe);
        let plan = random::show(small);
        faults.push(format!("{small:?}\n{fault}\n{plan}"));
        if faults.len() >= 5 {
            break;
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The compared values must not be all NaN or zeros, nor the plans single kernels.
#[test]
fn random_graphs_give_varied_numbers() {
    let mut e = harness::engine(1);
    let (mut all, mut dull, mut outputs) = (0, 0, 0);
    for seed in 1..400 {
        let recipe = Recipe { seed, ops: 3 + (seed % 23) as usize, root: None, big: false };
        for t in random::run(&mut e, recipe, Mode::Together) {
            outputs += 1;
            all += t.numel();
            dull += t.to_f64().iter().filter(|v| !v.is_finite() || **v == 0.0).count();
        }
    }
    assert!(dull * 3 < all, "{dull} of {all} numbers are 0 or not finite");
    assert!(outputs > 1200, "{outputs} outputs");
}

/// Recomputation in these put a node and the value it waits for into one kernel, through a producer that no kernel had read.
#[test]
fn graphs_with_a_producer_to_wait_for() {
    check(vec![7324, 1_006_817], false);
}

#[test]
fn small_graphs_one() {
    fuzz(1, 1000, false);
}

#[test]
fn small_graphs_two() {
    fuzz(1_000_000, 1000, false);
}

#[test]
fn graphs_worth_several_threads() {
    fuzz(2_000_000, 40, true);
}
