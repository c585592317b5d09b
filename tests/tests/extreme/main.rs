//! Tests integers at their limits: arguments of every op, chains of views, casts between all dtypes, sizes beyond any memory.
//!
//! A call is an error that names the number, or its result is correct. Nothing panics or aborts, and memory stays within the
//! limit of the device. `PERILUNE_FUZZ_COUNT=100000` runs that many calls in each sweep, `PERILUNE_FUZZ_SEED=7` only the
//! seventh.
#![allow(clippy::unwrap_used)]

mod casts;
#[path = "../../../runtime/core/tests/registry/eval.rs"]
mod eval;
mod indices;
mod long;
mod memory;
mod ops;
mod views;

use perilune_cpu::Cpu;
use perilune_engine::Engine;
use perilune_lua::{Failed, Runtime, RuntimeOptions};
use perilune_tests::harness;
use perilune_tests::rng::Pcg;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

/// The limit of buffers and the arena together in bytes.
const LIMIT: usize = 64 << 20;

/// Integers at which 32-bit and 64-bit arithmetic changes behaviour.
const EXTREMES: &[i64] = &[
    0,
    1,
    -1,
    2,
    -2,
    i32::MAX as i64,
    i32::MIN as i64,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 32) + 1,
    1 << 47,
    1 << 48,
    (1 << 48) + 1,
    (1 << 53) + 1,
    1 << 61,
    1 << 62,
    (1 << 62) + 1,
    -(1 << 62),
    i64::MAX,
    i64::MAX - 1,
    i64::MIN,
    i64::MIN + 1,
];

/// Picks an extreme integer, or one near `n`.
fn extreme(rng: &mut Pcg, n: i64) -> i64 {
    match rng.below(4) {
        0 => n.wrapping_add(rng.range(-1, 2)),
        _ => *rng.pick(EXTREMES),
    }
}

/// Creates an engine with limited memory, or one on the device named by `PERILUNE_DEVICE`.
fn engine() -> Engine {
    if harness::on_gpu() {
        return harness::engine(1);
    }
    let mut e = Engine::new(Arc::new(Cpu::limited(Some(1), Some(LIMIT))));
    e.switches.fusion = true;
    e
}

/// Runs a recipe text on a device without a limit of its own; what it printed.
fn script(text: &str) -> Result<String, Failed> {
    let printed: Rc<RefCell<String>> = Rc::default();
    let sink = printed.clone();
    let runtime = Runtime::new(RuntimeOptions {
        backend: harness::device(2),
        params: Vec::new(),
        strict: true,
        policy: perilune_policy::Policy::closed(),
        print: Rc::new(move |line| sink.borrow_mut().push_str(&format!("{line}\n"))),
    })?;
    runtime.load_text(text, "@extreme.lua")?;
    let out = printed.borrow().clone();
    Ok(out)
}

/// The seeds of a sweep: `count`, those of `PERILUNE_FUZZ_COUNT`, or one seed or a range (`100..200`) in `PERILUNE_FUZZ_SEED`.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let text = |name: &str| std::env::var(name).ok();
    if let Some(seed) = text("PERILUNE_FUZZ_SEED") {
        let number = |s: &str| s.parse().unwrap_or_else(|e| panic!("PERILUNE_FUZZ_SEED={seed}: {e}"));
        return match seed.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => number(&seed)..number(&seed) + 1,
        };
    }
    0..text("PERILUNE_FUZZ_COUNT").and_then(|s| s.parse().ok()).unwrap_or(count)
}

/// Runs `f` and converts a panic to an error.
fn caught<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default();
        Err(format!("PANIC {text}"))
    })
}

/// Fails with the first findings, without duplicates.
fn report(mut found: Vec<String>) {
    let all = found.len();
    found.sort();
    found.dedup();
    found.truncate(40);
    assert!(found.is_empty(), "{all} findings:\n{}", found.join("\n"));
}
