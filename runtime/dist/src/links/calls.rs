//! Calls that all processes make in the same order: agree, broadcast, gather, vote and barrier. A process makes them while none of
//! its devices runs a step.
//!
//! Process 0 collects what each process brings, decides, and sends everyone the same verdict, so a call fails in all processes
//! with the same text or in none. A call compares its kind and purpose too: processes that have taken different branches find that
//! out here and not in a collective.

use super::frame::{Decoder, Encoder, Frame, Kind};
use super::{Inner, Links, lock};
use crate::exchange::Rank;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_plan::Peers;
use rustc_hash::FxHashMap;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Bytes of the description of one side of a difference, and of the lines of it that a message shows.
const MOST_DESCRIPTION: usize = 16 << 20;
const MOST_SHOWN: usize = 4 << 10;
/// Bytes of the purpose of a call.
const MOST_WHAT: usize = 500;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Agree = 1,
    Broadcast,
    Gather,
    Vote,
    Barrier,
    AllGather,
}

impl Call {
    fn verb(self) -> &'static str {
        match self {
            Call::Agree => "agree on",
            Call::Broadcast => "receive",
            Call::Gather => "send",
            Call::Vote => "vote on",
            Call::Barrier => "reach",
            Call::AllGather => "exchange",
        }
    }
}

/// The parts of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Step {
    /// What a process brings, to process 0.
    Enter = 1,
    /// Process 0 needs a description.
    Ask,
    Describe,
    /// The result, to all.
    Verdict,
    /// The call has failed, to all.
    Failed,
}

const STEPS: [Step; 5] = [Step::Enter, Step::Ask, Step::Describe, Step::Verdict, Step::Failed];

/// A part of a call as it arrives: number, step, what the process does, bytes.
pub struct Part {
    number: u64,
    step: Step,
    what: String,
    body: Arc<[u8]>,
}

pub fn decode(bytes: &[u8]) -> Option<Part> {
    let mut d = Decoder(bytes);
    let (number, step, what) = (d.u64()?, d.u8()?, d.text()?);
    let step = STEPS.into_iter().find(|s| *s as u8 == step)?;
    Some(Part { number, step, what, body: d.0.into() })
}

fn encode(number: u64, step: Step, what: &str, body: Arc<[u8]>) -> Frame {
    let head = Encoder::default().u64(number).u8(step as u8).text(what, MOST_WHAT).0;
    Frame { kind: Kind::Call, head, body }
}

/// Parts that have arrived and were not read yet.
#[derive(Default, Debug)]
pub struct Inbox(FxHashMap<(u64, usize, Step), (String, Arc<[u8]>)>);

impl Inbox {
    pub fn insert(&mut self, from: usize, part: Part) {
        self.0.insert((part.number, from, part.step), (part.what, part.body));
    }
}

impl Inner {
    /// Waits for one of the given parts from a process.
    fn part(&self, number: u64, from: usize, steps: &[Step]) -> Result<(Step, String, Arc<[u8]>)> {
        let (mut state, mut since) = (lock(&self.state), None);
        loop {
            let found = steps.iter().find_map(|s| Some((*s, state.inbox.0.remove(&(number, from, *s))?)));
            if let Some((step, (what, body))) = found {
                return Ok((step, what, body));
            }
            if let Some(cause) = &state.cause {
                // The failure of a third process can be news of a verdict that is still on its way.
                let standing = &state.standing[from];
                let left = self.options.grace.checked_sub(since.get_or_insert_with(Instant::now).elapsed());
                match left.filter(|_| cause.raised && !standing.gone && !state.closing) {
                    None => return Err(self.error(cause)),
                    Some(left) => {
                        state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                        continue;
                    }
                }
            }
            if state.closing {
                return Err(Error::system("mesh", "the connections to the other processes are closed"));
            }
            if state.standing[from].ended {
                let message = format!("{} has finished, but the other processes still wait for it", self.name(from));
                return Err(Error::system("mesh", message));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn tell(&self, rank: usize, frame: Frame) {
        if let Some(peer) = self.peers[rank].get() {
            peer.send(frame);
        }
    }
}

/// What a call brings to process 0, by rank, or its error.
type Brought = Result<Vec<Arc<[u8]>>>;

/// The first lines in which two descriptions differ, or what stands for a line that is missing.
fn first_difference(own: &str, theirs: &str) -> (String, String) {
    let (mut a, mut b) = (own.trim_end().lines(), theirs.trim_end().lines());
    loop {
        let (a, b) = (a.next(), b.next());
        if a == b && a.is_some() {
            continue;
        }
        let cut = |line: Option<&str>, none: &str| {
            let line = line.unwrap_or(none);
            line[..line.floor_char_boundary(MOST_SHOWN)].to_string()
        };
        let none = if a.is_none() && b.is_none() { "the description is the same" } else { "nothing more" };
        return (cut(a, none), cut(b, none));
    }
}

impl Links {
    /// Makes a call. `decide` runs on process 0 with what each process brought; its result goes to all.
    fn call(
        &self,
        call: Call,
        what: &str,
        own: Arc<[u8]>,
        describe: impl FnOnce() -> String,
        decide: impl FnOnce(&[Arc<[u8]>]) -> Arc<[u8]>,
    ) -> Result<Arc<[u8]>> {
        let mut calls = lock(&self.calls);
        if self.processes() == 1 {
            return Ok(decide(&[own]));
        }
        *calls += 1;
        let (inner, number) = (&self.inner, *calls);
        let what = format!("{} {what}", call.verb());
        let what = &what[..what.floor_char_boundary(MOST_WHAT)];
        {
            let mut calling = lock(&inner.calling);
            (calling.now, calling.entered) = (number, number);
            let place = lock(&inner.place).clone();
            calling.what = if place.is_empty() { what.to_string() } else { format!("{what} ({place})") };
        }
        let result = match self.rank() {
            0 => self.lead(call, number, what, own, describe, decide),
            _ => self.follow(number, what, own, describe),
        };
        lock(&inner.calling).now = 0;
        result
    }

    /// The part of process 0.
    fn lead(
        &self,
        call: Call,
        number: u64,
        what: &str,
        own: Arc<[u8]>,
        describe: impl FnOnce() -> String,
        decide: impl FnOnce(&[Arc<[u8]>]) -> Arc<[u8]>,
    ) -> Result<Arc<[u8]>> {
        let mut brought = self.collect(number, what, own);
        if call == Call::Agree {
            brought = brought.and_then(|all| self.compare(number, what, all, describe));
        }
        let (step, body) = match &brought {
            Ok(all) => (Step::Verdict, decide(all)),
            Err(e) => {
                let text = Encoder::default().text(&e.op, 100).text(&e.message, usize::MAX);
                (Step::Failed, text.text(e.hint.as_deref().unwrap_or_default(), 1000).0.into())
            }
        };
        (1..self.processes()).for_each(|rank| self.inner.tell(rank, encode(number, step, what, body.clone())));
        brought.map(|_| body)
    }

    fn collect(&self, number: u64, what: &str, own: Arc<[u8]>) -> Brought {
        let mut all = vec![own];
        let mut other = None;
        for rank in 1..self.processes() {
            let (_, theirs, body) = self.inner.part(number, rank, &[Step::Enter])?;
            if theirs != what && other.is_none() {
                other = Some((rank, theirs));
            }
            all.push(body);
        }
        let Some((rank, theirs)) = other else { return Ok(all) };
        let message = format!(
            "{} is about to {theirs}, and {} to {what}: they have taken different branches, or have different data",
            self.name(rank),
            self.name(0)
        );
        Err(Error::system("", message).hint("a recipe has to make the same steps, in the same order, in all processes"))
    }

    /// Compares digests, and asks for descriptions if they differ.
    fn compare(&self, number: u64, what: &str, all: Vec<Arc<[u8]>>, describe: impl FnOnce() -> String) -> Brought {
        let differing: Vec<usize> = (1..all.len()).filter(|rank| all[*rank] != all[0]).collect();
        let Some(&rank) = differing.first() else { return Ok(all) };
        self.inner.tell(rank, encode(number, Step::Ask, what, Arc::from([])));
        let (_, _, theirs) = self.inner.part(number, rank, &[Step::Describe])?;
        let theirs = Decoder(&theirs).text().unwrap_or_default();
        let own = describe();
        let own = &own[..own.floor_char_boundary(MOST_DESCRIPTION)];
        let (own, theirs) = first_difference(own, &theirs);
        let mut message = format!(
            "{} and {} do not {what}\n  {}: {own}\n  {}: {theirs}",
            self.name(0),
            self.name(rank),
            self.name(0),
            self.name(rank),
        );
        if differing.len() > 1 {
            let others: Vec<String> = differing[1..].iter().take(20).map(|rank| rank.to_string()).collect();
            message.push_str(&format!("\n  different too: rank {}", others.join(", ")));
        }
        Err(Error::system("", message))
    }

    /// The part of the other processes.
    fn follow(&self, number: u64, what: &str, own: Arc<[u8]>, describe: impl FnOnce() -> String) -> Result<Arc<[u8]>> {
        let inner = &self.inner;
        inner.tell(0, encode(number, Step::Enter, what, own));
        let ends = [Step::Verdict, Step::Failed];
        let (mut step, _, mut body) = inner.part(number, 0, &[Step::Ask, ends[0], ends[1]])?;
        if step == Step::Ask {
            let text = Encoder::default().text(&describe(), MOST_DESCRIPTION).0;
            inner.tell(0, encode(number, Step::Describe, what, text.into()));
            (step, _, body) = inner.part(number, 0, &ends)?;
        }
        if step == Step::Verdict {
            return Ok(body);
        }
        let mut d = Decoder(&body);
        let (op, message, hint) = (d.text(), d.text(), d.text().filter(|h| !h.is_empty()));
        let error = Error::system(&op.unwrap_or_default(), message.unwrap_or_default());
        Err(Error { hint, ..error })
    }

    /// Compares a digest among all processes. If one differs, all get the same error with the first lines that differ in the
    /// descriptions of both sides, before anything else happens. `what` completes "agree on", as in `the plan of the step at recipe.lua:12`.
    pub fn agree(&self, what: &str, digest: &[u8], describe: impl FnOnce() -> String) -> Result<()> {
        self.call(Call::Agree, what, digest.into(), describe, |_| Arc::from([])).map(drop)
    }

    /// Returns the bytes of process 0 in all processes. The others pass anything.
    pub fn broadcast(&self, what: &str, bytes: &[u8]) -> Result<Arc<[u8]>> {
        let own: Arc<[u8]> = if self.rank() == 0 { bytes.into() } else { Arc::from([]) };
        self.call(Call::Broadcast, what, own, String::new, |all| all[0].clone())
    }

    /// Returns the bytes of all processes, by rank, in process 0, and `None` in the others.
    pub fn gather(&self, what: &str, bytes: &[u8]) -> Result<Option<Vec<Arc<[u8]>>>> {
        let mut gathered = None;
        self.call(Call::Gather, what, bytes.into(), String::new, |all| {
            gathered = Some(all.to_vec());
            Arc::from([])
        })?;
        Ok(gathered)
    }

    /// Returns the largest of the numbers of all processes, as for "has any of them been asked to stop".
    pub fn vote(&self, what: &str, number: u64) -> Result<u64> {
        let read = |bytes: &[u8]| Decoder(bytes).u64().unwrap_or_default();
        let most = |all: &[Arc<[u8]>]| all.iter().map(|bytes| read(bytes)).max().unwrap_or_default();
        let result =
            self.call(Call::Vote, what, number.to_le_bytes().into(), String::new, |all| most(all).to_le_bytes().into());
        Ok(read(&result?))
    }

    /// Waits until all processes are here.
    pub fn barrier(&self, what: &str) -> Result<()> {
        self.call(Call::Barrier, what, Arc::from([]), String::new, |_| Arc::from([])).map(drop)
    }

    /// Returns the bytes of all processes, by rank, in all processes. The bytes go directly from each to each.
    pub fn all_gather(&self, what: &str, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.call(Call::AllGather, what, Arc::from([]), String::new, |_| Arc::from([]))?;
        let Some(exchange) = &self.all else { return Ok(vec![bytes.into()]) };
        let number = *lock(&self.calls);
        let all = Rank::new(exchange.clone(), number, self.rank()).exchange(Axis::Dp, bytes);
        exchange.end(number);
        all
    }
}
