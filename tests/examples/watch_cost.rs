//! Measures the cost of NaN detection in a step on the CPU. Blocks of steps with and without it alternate in one process, timed by
//! the CPU time of the only thread. Linux only; from the folder `tests`:
//!
//! `cargo run --release --example watch_cost [RECIPE.lua [PAIRS]]`
#![allow(clippy::unwrap_used)]

use perilune_lua::Run;
use perilune_tests::scripts;
use std::path::Path;

const BLOCK: u64 = 10;

/// Returns the CPU time of this thread in nanoseconds.
fn cpu_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn block(run: &Run, on_nan: &str) -> f64 {
    run.set_policies(Some(on_nan), None).unwrap();
    // The plans of both kinds of step exist, and the caches are warm.
    run.read(&run.step().unwrap()).unwrap();
    let start = cpu_ns();
    for _ in 0..BLOCK {
        run.read(&run.step().unwrap()).unwrap();
    }
    (cpu_ns() - start) / BLOCK as f64
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or("digits.lua".into());
    let pairs: usize = args.next().map_or(100, |n| n.parse().unwrap());
    let s = scripts::script(1, &[("steps", "1000000")]).unwrap();
    let recipe = s.recipe(&Path::new("../recipes").join(&file)).unwrap();
    let run = recipe.start(None, None, None).unwrap();
    for _ in 0..3 {
        block(&run, "stop");
        block(&run, "warn");
    }
    let (mut with, mut without, mut equal) = (Vec::new(), Vec::new(), Vec::new());
    for k in 0..pairs {
        // The order within a pair alternates, so that neither kind always comes second.
        let (a, b) = if k % 2 == 0 {
            let a = block(&run, "stop");
            (a, block(&run, "warn"))
        } else {
            let b = block(&run, "warn");
            (block(&run, "stop"), b)
        };
        let c = block(&run, "warn");
        with.push(a / b - 1.0);
        equal.push(c / b - 1.0);
        without.push(b);
    }
    println!(
        "{file}: {:.3} ms a step without; the watch {:+.2} %; two equal blocks {:+.2} % ({pairs} pairs, medians)",
        median(without) * 1e-6,
        median(with) * 1e2,
        median(equal) * 1e2
    );
}
