//! Writes digests of a run while it is recomputed, for finding the first step and tensor in which two runs differ.
//!
//! ```text
//! {"step":12,"states":"HEX"}                  all States as step 12 finds them
//! {"step":12,"numbers":"HEX"}                 the loss and the metrics of step 12
//! {"step":12,"state":{"path":…,"dtype":…,"shape":…,"file":…,"line":…,"hash":…}}       at chosen steps: each State, in path order
//! {"step":12,"tensor":{"op":…,"dtype":…,"shape":…,"state":…,"file":…,"line":…,"hash":…}}  and each tensor, in recorded order
//! {"step":12,"record":"step 12: loss: …"}     the first difference from the record, if the recomputation has other bits
//! ```
//!
//! Digests are BLAKE3; a number of the program stands for itself. The last line of `states` is one step after the last step. The tensors of a step
//! are computed aside, before the step is taken, one after another instead of fused: equal recordings on equal States have
//! equal digests, whatever the fused step rounds.

use crate::audit::Difference;
use crate::error::{Error, Result, disk};
use crate::weights::weights_hash;
use perilune_core::HostTensor;
use perilune_lua::{Run, StepNumbers};
use perilune_policy::Directory;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// The file in the run directory.
pub const DIGESTS: &str = "digests.jsonl";

/// The most bytes of a line, and of a file that another process has written.
const LONGEST_LINE: u64 = 64 << 10;
const LONGEST: u64 = 256 << 20;

/// Asks for digests.
#[derive(Clone, Debug, Default)]
pub struct DigestOptions {
    /// The steps of which every tensor is hashed.
    pub tensors: BTreeSet<u64>,
}

/// The open file.
pub(crate) struct DigestLog {
    options: DigestOptions,
    path: PathBuf,
    out: BufWriter<File>,
    /// The last step before which the States were hashed.
    before: Option<u64>,
}

impl DigestLog {
    /// Creates the file in a new run directory.
    pub fn create(dir: &Directory, options: DigestOptions) -> Result<DigestLog> {
        let path = dir.path().join(DIGESTS);
        let out = BufWriter::new(dir.append(DIGESTS)?);
        Ok(DigestLog { options, path, out, before: None })
    }

    fn line(&mut self, value: &Value) -> Result<()> {
        writeln!(self.out, "{value}").map_err(disk("write", &self.path))
    }

    /// Hashes the States, and the tensors of the next step if they are asked for, once.
    pub fn before_step(&mut self, run: &Run) -> Result<()> {
        let step = run.count() + 1;
        if self.before == Some(step) {
            return Ok(());
        }
        self.before = Some(step);
        self.line(&json!({ "step": step, "states": weights_hash(run)? }))?;
        if self.options.tensors.contains(&step) {
            self.tensors(run, step)?;
        }
        self.out.flush().map_err(disk("write", &self.path))
    }

    fn tensors(&mut self, run: &Run, step: u64) -> Result<()> {
        let places: BTreeMap<String, Option<(String, u32)>> = run.state_places()?.into_iter().collect();
        let mut states = Vec::new();
        run.each_state(|path, value: HostTensor| {
            let (file, line) = places.get(&path).cloned().flatten().unzip();
            let hash = blake3::hash(&value.bytes).to_hex().to_string();
            let (dtype, shape) = (value.dtype.name(), value.shape.to_string());
            states.push(
                json!({ "path": path, "dtype": dtype, "shape": shape, "file": file, "line": line, "hash": hash }),
            );
        })?;
        for state in states {
            self.line(&json!({ "step": step, "state": state }))?;
        }
        if run.host().engine.borrow().mesh().devices() > 1 || run.finished()? {
            return Ok(());
        }
        for t in run.step_tensors()? {
            let (file, line) = t.place.unzip();
            let (op, dtype, shape) = (t.op, t.dtype.name(), t.shape.to_string());
            self.line(&json!({ "step": step, "tensor": {
                "op": op, "dtype": dtype, "shape": shape, "state": t.state, "file": file, "line": line, "hash": t.hash,
            } }))?;
        }
        Ok(())
    }

    /// Ends the file, with the first difference from the record that the run repeats.
    pub fn finish(mut self, difference: Option<&Difference>) -> Result<()> {
        if let Some(found) = difference {
            self.line(&json!({ "step": found.step, "record": found.to_string() }))?;
        }
        self.out.flush().map_err(disk("write", &self.path))
    }

    /// Hashes the numbers of a step.
    pub fn numbers(&mut self, step: u64, numbers: &StepNumbers) -> Result<()> {
        let mut hash = blake3::Hasher::new();
        hash.update(&numbers.loss.to_bits().to_le_bytes());
        for (name, value) in &numbers.metrics {
            hash.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hash.update(&value.to_bits().to_le_bytes());
        }
        self.line(&json!({ "step": step, "numbers": hash.finalize().to_hex().to_string() }))
    }
}

/// A State or a tensor, as the file has it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Digest {
    /// The op; empty for a State.
    pub op: String,
    /// The State that this is, or that the op reads.
    pub state: String,
    pub dtype: String,
    pub shape: String,
    pub hash: String,
    /// The file and line of the recipe.
    pub place: Option<(String, u64)>,
}

impl Digest {
    fn of(v: &Value) -> Digest {
        let text = |key: &str| v[key].as_str().unwrap_or_default().to_string();
        let state = if v["path"].is_string() { text("path") } else { text("state") };
        let place = v["file"].as_str().map(String::from).zip(v["line"].as_u64());
        Digest { op: text("op"), state, dtype: text("dtype"), shape: text("shape"), hash: text("hash"), place }
    }

    /// Whether both are the same value of the same kind; where they stand does not count.
    fn same(&self, other: &Digest) -> bool {
        let key = |d: &Digest| (d.op.clone(), d.state.clone(), d.dtype.clone(), d.shape.clone(), d.hash.clone());
        key(self) == key(other)
    }
}

/// The digests of a run, read from its directory.
#[derive(Clone, Debug, Default)]
pub struct Digests {
    states: BTreeMap<u64, String>,
    numbers: BTreeMap<u64, String>,
    each_state: BTreeMap<u64, Vec<Digest>>,
    tensors: BTreeMap<u64, Vec<Digest>>,
    /// How the recomputation first differs from the record.
    pub record: Option<String>,
}

/// What differs first between two runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirstDifference {
    /// The States that this step finds.
    Before(u64),
    /// The loss or a metric of this step.
    Numbers(u64),
}

/// The first of two lists' entries that differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FirstTensor {
    pub a: Option<Digest>,
    pub b: Option<Digest>,
    /// The entries before it, all equal, and those of both lists.
    pub equal: usize,
    pub of: (usize, usize),
}

impl Digests {
    /// Reads the file of a run directory. It was written by a confined process, so lines that are no digests are passed over.
    ///
    /// # Errors
    /// The file cannot be read, or is too long.
    pub fn read(dir: &Path) -> Result<Digests> {
        let dir = Directory::open(dir)?;
        let path = dir.path().join(DIGESTS);
        let file = dir.open_unlinked(Path::new(DIGESTS))?.into_file();
        Digests::of(BufReader::new(file), &path)
    }

    fn of(mut from: impl BufRead, path: &Path) -> Result<Digests> {
        let (mut out, mut line, mut left) = (Digests::default(), Vec::new(), LONGEST);
        loop {
            line.clear();
            let read = from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(disk("read", path))?;
            if read == 0 {
                return Ok(out);
            }
            if line.last() != Some(&b'\n') {
                return Err(Error::Refused(format!("{}: a line has no end", path.display())));
            }
            left = left.checked_sub(line.len() as u64).ok_or_else(|| {
                Error::Refused(format!("{}: has more than {LONGEST} bytes of digests", path.display()))
            })?;
            let Ok(v) = serde_json::from_slice::<Value>(&line) else { continue };
            let Some(step) = v["step"].as_u64() else { continue };
            if let Some(hash) = v["states"].as_str() {
                out.states.insert(step, hash.into());
            } else if let Some(hash) = v["numbers"].as_str() {
                out.numbers.insert(step, hash.into());
            } else if let Some(text) = v["record"].as_str() {
                out.record = Some(text.into());
            } else if v["state"].is_object() {
                out.each_state.entry(step).or_default().push(Digest::of(&v["state"]));
            } else if v["tensor"].is_object() {
                out.tensors.entry(step).or_default().push(Digest::of(&v["tensor"]));
            }
        }
    }

    /// Returns the first step of the digests.
    pub fn start(&self) -> Option<u64> {
        self.states.keys().next().copied()
    }

    /// Returns the last step whose numbers both have.
    pub fn last_common(&self, other: &Digests) -> Option<u64> {
        self.numbers.keys().rev().find(|step| other.numbers.contains_key(step)).copied()
    }

    /// Returns what differs first from another run, among the steps that both have.
    pub fn first_difference(&self, other: &Digests) -> Option<FirstDifference> {
        let differs = |a: &BTreeMap<u64, String>, b: &BTreeMap<u64, String>| {
            a.iter().find(|(step, hash)| b.get(step).is_some_and(|other| other != *hash)).map(|(step, _)| *step)
        };
        let (before, numbers) = (differs(&self.states, &other.states), differs(&self.numbers, &other.numbers));
        match (before, numbers) {
            (Some(before), Some(numbers)) if numbers < before => Some(FirstDifference::Numbers(numbers)),
            (Some(before), _) => Some(FirstDifference::Before(before)),
            (None, numbers) => numbers.map(FirstDifference::Numbers),
        }
    }

    /// Returns the first State that a step finds with another value; none if all are equal, or the step was not chosen.
    pub fn first_state(&self, other: &Digests, step: u64) -> Option<FirstTensor> {
        first(self.each_state.get(&step)?, other.each_state.get(&step)?)
    }

    /// Returns the first tensor of a step that differs.
    pub fn first_tensor(&self, other: &Digests, step: u64) -> Option<FirstTensor> {
        first(self.tensors.get(&step)?, other.tensors.get(&step)?)
    }

    /// Returns the number of tensors of a step; none if they were not computed.
    pub fn num_tensors(&self, step: u64) -> Option<usize> {
        self.tensors.get(&step).map(Vec::len)
    }
}

fn first(a: &[Digest], b: &[Digest]) -> Option<FirstTensor> {
    let equal = a.iter().zip(b).take_while(|(a, b)| a.same(b)).count();
    let of = (a.len(), b.len());
    (equal < a.len().max(b.len())).then(|| FirstTensor {
        a: a.get(equal).cloned(),
        b: b.get(equal).cloned(),
        equal,
        of,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Digests {
        Digests::of(text.as_bytes(), Path::new("digests.jsonl")).expect("digests")
    }

    #[test]
    fn the_earliest_difference_counts() {
        let lines = |states: [&str; 3], numbers: [&str; 2]| {
            let mut out = String::new();
            for (k, hash) in states.iter().enumerate() {
                out += &format!("{{\"step\":{},\"states\":\"{hash}\"}}\n", k + 1);
            }
            for (k, hash) in numbers.iter().enumerate() {
                out += &format!("{{\"step\":{},\"numbers\":\"{hash}\"}}\n", k + 1);
            }
            read(&out)
        };
        let a = lines(["a", "b", "c"], ["x", "y"]);
        for (other, expected) in [
            (lines(["a", "b", "c"], ["x", "y"]), None),
            (lines(["z", "b", "c"], ["x", "z"]), Some(FirstDifference::Before(1))),
            (lines(["a", "z", "c"], ["z", "y"]), Some(FirstDifference::Numbers(1))),
            // A step finds its States before it has numbers.
            (lines(["a", "z", "c"], ["x", "z"]), Some(FirstDifference::Before(2))),
            (lines(["a", "b", "z"], ["x", "z"]), Some(FirstDifference::Numbers(2))),
            (lines(["a", "b", "z"], ["x", "y"]), Some(FirstDifference::Before(3))),
        ] {
            assert_eq!(a.first_difference(&other), expected);
        }
        assert_eq!((a.start(), a.last_common(&lines(["a", "b", "c"], ["x", "y"]))), (Some(1), Some(2)));
    }

    #[test]
    fn tensors_are_compared_in_order() {
        let lines = |tensors: &[(&str, &str, u64)]| {
            let line = |(op, hash, line): &(&str, &str, u64)| {
                format!(
                    "{}\n",
                    json!({ "step": 3, "tensor": { "op": op, "hash": hash, "file": "a.lua", "line": line } })
                )
            };
            read(&tensors.iter().map(line).collect::<String>())
        };
        let a = lines(&[("leaf", "1", 4), ("mul", "2", 5), ("sum", "3", 6)]);
        // Another line is no difference.
        assert_eq!(a.first_tensor(&lines(&[("leaf", "1", 9), ("mul", "2", 5), ("sum", "3", 6)]), 3), None);
        let found = a.first_tensor(&lines(&[("leaf", "1", 4), ("add", "2", 7), ("sum", "3", 6)]), 3).expect("differs");
        assert_eq!((found.equal, found.of), (1, (3, 3)));
        assert_eq!(found.a.map(|d| (d.op, d.place)), Some(("mul".into(), Some(("a.lua".into(), 5)))));
        assert_eq!(found.b.map(|d| (d.op, d.place)), Some(("add".into(), Some(("a.lua".into(), 7)))));
        let shorter = a.first_tensor(&lines(&[("leaf", "1", 4)]), 3).expect("differs");
        assert_eq!((shorter.equal, shorter.of, shorter.b), (1, (3, 1), None));
        assert_eq!((a.first_tensor(&a, 4), a.num_tensors(3)), (None, Some(3)));
    }

    #[test]
    fn lines_of_others_are_not_trusted() {
        assert!(Digests::of(&b"{\"step\":1"[..], Path::new("d")).is_err());
        let long = format!("{{\"step\":1,\"states\":\"{}\"}}\n", "a".repeat(1 << 17));
        assert!(Digests::of(long.as_bytes(), Path::new("d")).is_err());
        assert!(read("nonsense\n[1]\n{\"step\":-1,\"states\":\"a\"}\n{\"step\":1,\"states\":2}\n").start().is_none());
    }
}
