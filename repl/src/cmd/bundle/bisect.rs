//! `perilune bundle diff A B --bisect`: recomputes both runs here, and finds the first step, State and tensor in which they differ.
//!
//! Both start from the last checkpoint that they share before the first step whose records differ; from an earlier one, or from the
//! beginning, if their States differ there already. A first pass hashes the States before each step, and its numbers. A second one computes
//! every tensor of the step in which the first difference arises (`perilune_train::digests`). Each pass is a confined process, as for
//! `perilune replay` of a bundle, and what it has written is not trusted.

use super::repeat::{Prepared, temporary_folder};
use crate::failure::Failure;
use crate::format::grouped;
use crate::terminal::one_line;
use perilune_train::digests::{Digest, Digests, FirstDifference, FirstTensor};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ffi::OsString;

/// The result.
#[derive(Debug)]
pub struct Bisection {
    /// The window that was recomputed: the steps `from + 1` to `to`.
    from: u64,
    to: u64,
    /// How each recomputation first differs from its record.
    records: [Option<String>; 2],
    first: Option<First>,
}

/// The first step that differs, and what in it.
#[derive(Debug)]
struct First {
    step: u64,
    what: What,
}

/// What differs first within a step.
#[derive(Debug)]
enum What {
    /// A State as the step finds it. The step before ended with equal ones, so an edit, a resume or the beginning has changed it.
    State(Box<FirstTensor>),
    Tensor(Box<FirstTensor>),
    /// All tensors are equal; a metric that the recipe computes on the host is not.
    Numbers,
    /// Tensors are not computed on a mesh of several devices.
    Mesh,
}

/// Recomputes two runs. `upto`: the first step whose records differ, or the last one of the shorter run.
///
/// # Errors
/// A run cannot be recomputed.
pub fn bisect(sides: &[Prepared; 2], upto: u64) -> Result<Bisection, Failure> {
    let checkpoints = sides.each_ref().map(|side| {
        let run = side.bundle.manifest().run.as_ref();
        run.map(|run| run.checkpoints.iter().copied().collect::<BTreeSet<u64>>()).unwrap_or_default()
    });
    let mut starts: Vec<u64> = checkpoints[0].intersection(&checkpoints[1]).copied().filter(|s| *s < upto).collect();
    starts.insert(0, 0);
    while let Some(from) = starts.pop() {
        let [a, b] = both(sides, (from, upto), &[])?;
        let first = a.first_difference(&b);
        if first == Some(FirstDifference::Before(from + 1)) && from > 0 {
            continue;
        }
        let first = first.map(|first| locate(sides, (from, upto), first)).transpose()?;
        return Ok(Bisection { from, to: upto, records: [a.record, b.record], first });
    }
    Err(Failure::System("this is a bug: two runs have no start".into()))
}

/// Finds what differs first in the step that makes the difference.
fn locate(sides: &[Prepared; 2], (from, to): (u64, u64), first: FirstDifference) -> Result<First, Failure> {
    // A step that finds other States: the step before has computed them, or something between the two has changed them.
    let steps: Vec<u64> = match first {
        FirstDifference::Numbers(step) => vec![step],
        FirstDifference::Before(step) if step == from + 1 => vec![step],
        FirstDifference::Before(step) => vec![step - 1, step],
    };
    let last = steps.last().copied().unwrap_or(to).min(to);
    let [a, b] = both(sides, (from, last), &steps)?;
    for step in &steps {
        if let Some(found) = a.first_state(&b, *step) {
            return Ok(First { step: *step, what: What::State(Box::new(found)) });
        }
        if let Some(found) = a.first_tensor(&b, *step) {
            return Ok(First { step: *step, what: What::Tensor(Box::new(found)) });
        }
    }
    let step = steps.first().copied().unwrap_or(to);
    let what = if a.num_tensors(step).is_none() { What::Mesh } else { What::Numbers };
    Ok(First { step, what })
}

/// Recomputes a window of both runs.
fn both(sides: &[Prepared; 2], window: (u64, u64), tensors: &[u64]) -> Result<[Digests; 2], Failure> {
    let [a, b] = sides;
    Ok([recompute(a, window, tensors)?, recompute(b, window, tensors)?])
}

fn recompute(side: &Prepared, (from, to): (u64, u64), tensors: &[u64]) -> Result<Digests, Failure> {
    let folder = temporary_folder()?;
    let run_dir = folder.path().join("run");
    let mut words: Vec<OsString> = ["perilune", "replay"].map(OsString::from).into();
    words.push(side.bundle.path().into());
    words.extend(["--steps".into(), format!("{from}..{to}").into(), "--digests".into(), "--quiet".into()]);
    for step in tensors {
        words.extend(["--digest-tensors".into(), step.to_string().into()]);
    }
    words.extend(["--run-dir".into(), run_dir.clone().into_os_string()]);
    side.supervise_as(words, &run_dir)?;
    Ok(Digests::read(&run_dir)?)
}

impl Bisection {
    /// Formats the result for a person.
    pub fn text(&self) -> String {
        let mut out = format!("\nrecomputed here: steps {} to {} of both\n", grouped(self.from + 1), grouped(self.to));
        for (name, record) in ["A", "B"].iter().zip(&self.records) {
            if let Some(text) = record {
                out += &format!("  {name} differs from its own record, {}\n", one_line(text));
            }
        }
        let Some(First { step, what }) = &self.first else {
            let cause = match self.records.iter().any(Option::is_some) {
                true => "what the records differ in comes from the devices or versions that made them",
                false => "both have the same bits, in every State and every number",
            };
            return out + &format!("  no step differs: {cause}\n");
        };
        let step = grouped(*step);
        match what {
            What::State(first) => {
                out += &format!("  step {step} finds other States; no step has computed the difference\n");
                out += &sides(first, "State");
            }
            What::Tensor(first) => {
                let (k, of) = (grouped(first.equal as u64 + 1), grouped(first.of.0.max(first.of.1) as u64));
                out += &format!("  step {step} is the first that differs, in tensor {k} of {of}\n");
                out += &sides(first, "tensor");
            }
            What::Numbers => {
                out += &format!(
                    "  step {step} has other numbers, and equal tensors: the recipe computes them outside of the graph\n"
                );
            }
            What::Mesh => {
                out += &format!(
                    "  step {step} is the first that differs; on a mesh of several devices its tensors are not compared\n"
                );
            }
        }
        out
    }

    /// Returns the result as the event `bisected`.
    pub fn json(&self) -> Value {
        let (what, first) = match self.first.as_ref().map(|first| &first.what) {
            None => (None, None),
            Some(What::State(first)) => (Some("state"), Some(first)),
            Some(What::Tensor(first)) => (Some("tensor"), Some(first)),
            Some(What::Numbers) => (Some("numbers"), None),
            Some(What::Mesh) => (Some("mesh"), None),
        };
        let side = |d: Option<&Digest>| d.map(digest_json);
        json!({
            "event": "bisected", "from": self.from, "to": self.to, "records": self.records,
            "step": self.first.as_ref().map(|first| first.step), "what": what,
            "equal": first.map(|first| first.equal), "of": first.map(|first| [first.of.0, first.of.1]),
            "a": side(first.and_then(|first| first.a.as_ref())), "b": side(first.and_then(|first| first.b.as_ref())),
        })
    }
}

fn digest_json(d: &Digest) -> Value {
    let (file, line) = d.place.clone().unzip();
    json!({ "op": d.op, "state": d.state, "dtype": d.dtype, "shape": d.shape, "hash": d.hash, "file": file, "line": line })
}

/// Formats both values of the first difference, a line each.
fn sides(first: &FirstTensor, kind: &str) -> String {
    let line = |name: &str, d: Option<&Digest>| match d {
        Some(d) => format!("    {name}: {}\n", described(d)),
        None => format!("    {name}: has no such {kind}\n"),
    };
    line("A", first.a.as_ref()) + &line("B", first.b.as_ref())
}

/// Formats `mul f32 {64, 10} · 1f3a… · digits.lua:33`; a number has its value instead of a hash.
fn described(d: &Digest) -> String {
    const SHOWN: usize = 12;
    let what = match (d.op.as_str(), d.state.as_str()) {
        ("leaf", _) => "input".to_string(),
        ("scalar" | "constant", _) => "number".into(),
        ("" | "state", path) => format!("State {path}"),
        (op, _) => op.into(),
    };
    let place = d.place.as_ref().map(|(file, line)| format!(" · {file}:{line}")).unwrap_or_default();
    let shown = if what == "number" { usize::MAX } else { SHOWN };
    let hash: String = d.hash.chars().take(shown).collect();
    let dots = if d.hash.len() > hash.len() { "…" } else { "" };
    one_line(&format!("{what} {} {} · {hash}{dots}{place}", d.dtype, d.shape))
}
