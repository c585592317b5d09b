//! Makes the processes of a job run as one: they load the text of process 0, begin at its checkpoint, and decide together.
//!
//! Every process runs the whole training loop on its devices. What could differ between processes is taken from process 0: the
//! recipe and the files that it requires, params, options, the checkpoint, edits. What only one of them can know (a signal, an edit
//! that cannot be built somewhere) is voted on between two steps. Only process 0 has a run directory. A single process is a job of
//! its own, whose methods send nothing.

use crate::cancel::Control;
use crate::error::{Error, Result};
use perilune_core::error::Error as CoreError;
use perilune_dist::{Links, Place};
use perilune_lua::{Cause, Failed, Runtime};
use serde_json::{Value, json};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a broadcast that are sent at once.
const AT_ONCE: usize = 64 << 20;
/// The time between two votes that process 0 aims at, and the most steps between them.
const VOTE_EVERY: Duration = Duration::from_millis(100);
const MOST_STEPS: u64 = 64;

/// Bits of a vote: the steps until the next one, a new version, the code of a stop. A larger vote wins, so a stop goes before an
/// edit.
const EDIT_BIT: u64 = 1 << 32;
const STOP_SHIFT: u32 = 40;

/// The processes that train together.
#[derive(Clone)]
pub(crate) struct Job {
    links: Arc<Links>,
    /// The step before which the next vote takes place.
    next_vote: Rc<Cell<u64>>,
    /// A stop that all processes have decided.
    stop: Rc<Cell<Option<usize>>>,
}

/// What the processes do before the next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Decision {
    pub stop: Option<usize>,
    /// Process 0 has a new version of the recipe.
    pub edit: bool,
}

fn failed(error: CoreError) -> Error {
    Error::System(error.to_string())
}

impl Job {
    pub fn new(links: Arc<Links>) -> Job {
        Job { links, next_vote: Rc::default(), stop: Rc::default() }
    }

    /// A process without others.
    pub fn alone() -> Result<Job> {
        let links = Links::join(&Place::alone(), &[], perilune_dist::links::Options::default());
        Ok(Job::new(Arc::new(links.map_err(failed)?)))
    }

    /// Whether this process writes the run directory.
    pub fn is_first(&self) -> bool {
        self.links.rank() == 0
    }

    /// Whether there are other processes.
    pub fn has_several(&self) -> bool {
        self.links.processes() > 1
    }

    pub fn processes(&self) -> usize {
        self.links.processes()
    }

    /// `rank 3 (host b)`.
    pub fn name(&self, rank: usize) -> String {
        self.links.name(rank)
    }

    /// Whether the job has failed, so that nothing can be decided together any more.
    pub fn has_failed(&self) -> bool {
        self.links.cause().is_some()
    }

    /// Returns in all processes what `own` returns in process 0.
    pub fn share(&self, what: &str, own: impl FnOnce() -> Result<Value>) -> Result<Value> {
        if !self.has_several() {
            return own();
        }
        let text = if self.is_first() { own()?.to_string() } else { String::new() };
        let shared = self.links.broadcast(what, text.as_bytes()).map_err(failed)?;
        if self.is_first() {
            return Ok(serde_json::from_str(&text).unwrap_or_default());
        }
        let wrong = |e| Error::System(format!("rank 0 has sent {what} that cannot be read: {e}"));
        serde_json::from_slice(&shared).map_err(wrong)
    }

    /// Returns in all processes the bytes of process 0; the others know how many.
    pub fn share_bytes(&self, what: &str, own: Option<&[u8]>, length: usize) -> Result<Vec<u8>> {
        let mut all = Vec::with_capacity(length);
        for from in (0..length).step_by(AT_ONCE) {
            let piece = own.and_then(|bytes| bytes.get(from..(from + AT_ONCE).min(length))).unwrap_or_default();
            all.extend_from_slice(&self.links.broadcast(what, piece).map_err(failed)?);
        }
        if all.len() != length {
            return Err(Error::System(format!("rank 0 has sent {} bytes of {what} instead of {length}", all.len())));
        }
        Ok(all)
    }

    /// Compares lines among all processes; a difference is an error in all of them with the first lines that differ.
    pub fn agree(&self, what: &str, lines: impl FnOnce() -> String) -> Result<()> {
        if !self.has_several() {
            return Ok(());
        }
        let lines = lines();
        let digest = blake3::hash(lines.as_bytes());
        self.links.agree(what, digest.as_bytes(), || lines).map_err(failed)
    }

    /// Returns the texts of all processes in process 0, and none in the others.
    pub fn gather(&self, what: &str, own: &str) -> Result<Vec<String>> {
        let all = self.links.gather(what, own.as_bytes()).map_err(failed)?;
        let text = |bytes: &Arc<[u8]>| String::from_utf8_lossy(bytes).into_owned();
        Ok(all.map(|all| all.iter().map(text).collect()).unwrap_or_default())
    }

    /// Returns the first error of an edit in any process, in all of them. A process whose build has failed gets here earlier than
    /// the others, which may still compare plans or read files together: that call fails in all of them, and then their builds do.
    pub fn first_error(&self, own: Option<&str>) -> Result<Option<String>> {
        let what = "the outcome of the edit";
        let mut attempts = 0;
        let all = loop {
            // The process whose build failed first has made the most attempts.
            match self.gather(what, &json!([own, attempts]).to_string()) {
                Ok(all) => break all,
                Err(e) if self.has_failed() || attempts == MOST_STEPS => return Err(e),
                Err(_) => attempts += 1,
            }
        };
        let shared = self.share(what, || {
            let all = all.iter().map(|text| serde_json::from_str::<Value>(text).unwrap_or_default()).enumerate();
            let failed = all.filter(|(_, outcome)| outcome[0].is_string());
            let first = failed.max_by_key(|(rank, outcome)| (outcome[1].as_u64(), std::cmp::Reverse(*rank)));
            Ok(first.map_or(Value::Null, |(rank, outcome)| json!([rank, outcome[0]])))
        })?;
        let Some(text) = shared[1].as_str() else { return Ok(None) };
        let rank = shared[0].as_u64().unwrap_or_default() as usize;
        // All of them have raised the same error, in general.
        let says_whose = rank > 0 && own != Some(text);
        Ok(Some(if says_whose { format!("{}: {text}", self.name(rank)) } else { text.to_string() }))
    }

    /// Decides what happens before the step after `step`. `edit`: whether process 0 has a new version. `time`: the duration of the
    /// last step in process 0, by which it chooses when to vote again.
    pub fn decide(&self, step: u64, control: &Control, edit: bool, time: Option<Duration>) -> Result<Decision> {
        let stop = control.stop_requested();
        if !self.has_several() {
            return Ok(Decision { stop, edit });
        }
        if step < self.next_vote.get() {
            return Ok(Decision::default());
        }
        let mut vote = (stop.unwrap_or(0) as u64) << STOP_SHIFT;
        if self.is_first() {
            let steps = time.map_or(1, |t| (VOTE_EVERY.as_secs_f64() / t.as_secs_f64().max(1e-6)) as u64);
            vote |= steps.clamp(1, MOST_STEPS) | if edit { EDIT_BIT } else { 0 };
        }
        let vote = self.links.vote("what to do before the next step", vote).map_err(failed)?;
        let code = (vote >> STOP_SHIFT) as usize;
        // Without a stop the largest vote is that of process 0.
        let steps = if code == 0 { vote & (EDIT_BIT - 1) } else { 1 };
        self.next_vote.set(step + steps.max(1));
        let decision = Decision { stop: (code != 0).then_some(code), edit: code == 0 && vote & EDIT_BIT != 0 };
        self.stop.set(decision.stop.or(self.stop.get()));
        Ok(decision)
    }

    /// Whether process 0 may bring a new version before the step after `step`.
    pub fn votes_before(&self, step: u64) -> bool {
        !self.has_several() || step >= self.next_vote.get()
    }

    /// The code of a stop request of any process. All processes ask at the same time.
    pub fn stop_requested(&self, control: &Control) -> Result<Option<usize>> {
        if !self.has_several() {
            return Ok(control.stop_requested());
        }
        if let Some(code) = self.stop.get() {
            return Ok(Some(code));
        }
        let own = control.stop_requested().unwrap_or(0) as u64;
        let code = self.links.vote("whether to stop", own).map_err(failed)? as usize;
        self.stop.set((code != 0).then_some(code));
        Ok(self.stop.get())
    }

    /// Tells the other processes of an error of the recipe before this one computes anything that they do not. Where the run may return
    /// to an earlier version, all do if all have raised it. Returns whether this process may go on.
    fn fails(&self, error: &Failed, watches: bool) -> bool {
        let (text, status) = match error {
            Failed::Recipe(e) => {
                let status = match e.cause {
                    Cause::System | Cause::Internal => 1,
                    Cause::Refused => 4,
                    _ => 3,
                };
                (e.to_string(), status)
            }
            Failed::Usage(text) => (text.clone(), 2),
        };
        if self.has_failed() {
            return false;
        }
        let what = format!("what follows the error {}", text.lines().next().unwrap_or_default());
        let together = watches && self.agree(&what, || text.clone()).is_ok();
        if !together {
            self.links.abort(status, &text);
        }
        together
    }

    /// Lets `require` load the files of process 0, and lets other processes than it write no file.
    /// `watches`: the run may return to an earlier version after an error.
    pub fn connect(&self, runtime: &Runtime, watches: bool) -> Option<perilune_policy::WriteHold> {
        if !self.has_several() {
            return None;
        }
        let links = self.links.clone();
        let share = move |what: &str, own: &dyn Fn() -> String| {
            let text = if links.rank() == 0 { own() } else { String::new() };
            let shared = links.broadcast(what, text.as_bytes())?;
            Ok(String::from_utf8_lossy(&shared).into_owned())
        };
        *runtime.host().share.borrow_mut() = Some(Rc::new(share));
        let job = self.clone();
        *runtime.host().fails.borrow_mut() = Some(Rc::new(move |e| job.fails(e, watches)));
        (!self.is_first()).then(|| runtime.policy().hold_writes())
    }
}
