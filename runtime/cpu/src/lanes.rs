//! Drives collectives in flight: sends where one starts, receives where it is waited for. In between the messages are under way while
//! the device computes.
//!
//! Chaos, for tests, uses all the freedom that a program leaves (`plan::ir::InFlight`): messages are sent and results computed at random
//! moments, threads sleep, and memory that holds no value, or not yet, is poisoned. A program that relies on more computes something
//! else. Messages of an axis are sent in the order of their starts, and all that have started before the thread waits for another
//! device; so two devices never wait for each other.

use crate::backend::CompiledKernel;
use crate::library::Routine;
use crate::region::Context;
use perilune_plan::ir::{InFlight, Program, Storage, ValueId};
use perilune_plan::{Failure, Ticket, lanes};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One in so many chances is taken.
const ODDS: u64 = 3;
/// The longest sleep, in microseconds.
const MOST_SLEEP: u64 = 200;

/// Random delays of a device's collectives.
pub(crate) struct Chaos {
    seed: AtomicU64,
}

impl Chaos {
    pub fn new(seed: u64) -> Chaos {
        Chaos { seed: AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)) }
    }

    fn next(&self) -> u64 {
        let x = self.seed.load(Ordering::Relaxed);
        let x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.seed.store(x, Ordering::Relaxed);
        x >> 33
    }

    /// Whether a chance is taken.
    fn takes(&self) -> bool {
        self.next().is_multiple_of(ODDS)
    }

    fn sleep(&self) {
        if self.takes() {
            std::thread::sleep(Duration::from_micros(self.next() % MOST_SLEEP));
        }
    }
}

/// The bytes of the arena that hold no value any more behind each kernel.
pub(crate) fn freed(p: &Program) -> Vec<Vec<Range<usize>>> {
    let lives = lanes::lifetimes(p);
    let place = |v: &ValueId| match p.values[v.0 as usize] {
        ref value if matches!(value.storage, Storage::Arena(at) if at != usize::MAX) => {
            let Storage::Arena(at) = value.storage else { return None };
            Some(at..at + value.nbytes())
        }
        _ => None,
    };
    let mut all: Vec<(Range<usize>, usize, usize)> =
        lives.iter().filter_map(|(v, life)| Some((place(v)?, life.0, life.1))).collect();
    all.sort_unstable_by_key(|(range, first, last)| (range.start, range.end, *first, *last));
    let mut out = vec![Vec::new(); p.kernels.len()];
    for (range, _, last) in &all {
        let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
        if !all.iter().any(|(other, first, until)| overlaps(other) && first <= last && until > last) {
            out[*last].push(range.clone());
        }
    }
    out
}

enum State {
    Started,
    Sent(Ticket),
}

/// The collectives in flight of one run.
pub(crate) struct Lanes<'a> {
    pub kernels: &'a [CompiledKernel],
    pub program: &'a Program,
    pub context: &'a Context<'a>,
    pub chaos: Option<&'a Chaos>,
    /// Those that have not started, and those that have.
    pub ahead: &'a [InFlight],
    /// With the moment of the start.
    open: VecDeque<(InFlight, State, Instant)>,
}

type Outcome = std::result::Result<(), Failure>;

impl<'a> Lanes<'a> {
    pub fn new(
        program: &'a Program,
        kernels: &'a [CompiledKernel],
        context: &'a Context<'a>,
        chaos: Option<&'a Chaos>,
    ) -> Lanes<'a> {
        Lanes { kernels, program, context, chaos, ahead: &program.in_flight, open: VecDeque::new() }
    }

    fn routine(&self, at: usize) -> Option<&'a Routine> {
        match &self.kernels[at] {
            CompiledKernel::Library(routine, _) if routine.is_collective() => Some(routine),
            _ => None,
        }
    }

    /// Starts kernel `at`, if it is in flight.
    pub fn start(&mut self, at: usize) -> std::result::Result<bool, Failure> {
        let Some((flight, rest)) = self.ahead.split_first().filter(|(f, _)| f.start == at) else { return Ok(false) };
        self.ahead = rest;
        self.open.push_back((*flight, State::Started, Instant::now()));
        match self.chaos {
            None => self.send_all()?,
            Some(_) => self.poison_results(at, false),
        }
        Ok(true)
    }

    /// Sends the messages of all that have started. It comes before the thread waits for other devices.
    pub fn send_all(&mut self) -> Outcome {
        for k in 0..self.open.len() {
            self.send(k)?;
        }
        Ok(())
    }

    fn send(&mut self, k: usize) -> Outcome {
        if let (flight, State::Started, _) = self.open[k] {
            if let Some(routine) = self.routine(flight.start) {
                self.open[k].1 = State::Sent(routine.send(self.context)?);
            }
            if self.chaos.is_some() {
                self.poison_results(flight.start, true);
            }
        }
        Ok(())
    }

    /// Computes the results of an open collective.
    fn receive(&mut self, k: usize) -> Outcome {
        self.send_all()?;
        if let Some((flight, State::Sent(ticket), _)) = self.open.remove(k)
            && let Some(routine) = self.routine(flight.start)
        {
            routine.receive(self.context, ticket)?;
        }
        Ok(())
    }

    /// Waits for the collectives whose results may be read by kernel `at`, or are those of the program. Returns each with the seconds
    /// for which it was in flight and those of the wait.
    pub fn wait(&mut self, at: usize) -> std::result::Result<Vec<(usize, [f64; 2])>, Failure> {
        let mut waited = Vec::new();
        while let Some(k) = self.open.iter().position(|(flight, ..)| flight.wait <= at) {
            let (now, (flight, _, since)) = (Instant::now(), &self.open[k]);
            let (start, in_flight) = (flight.start, (now - *since).as_secs_f64());
            self.receive(k)?;
            waited.push((start, [in_flight, now.elapsed().as_secs_f64()]));
        }
        Ok(waited)
    }

    /// Sends and receives at random.
    pub fn disturb(&mut self) -> Outcome {
        let Some(chaos) = self.chaos else { return Ok(()) };
        chaos.sleep();
        let mut sends = true;
        for k in 0..self.open.len() {
            // In the order of their starts.
            sends = sends && chaos.takes();
            if sends {
                self.send(k)?;
            }
        }
        if !self.open.is_empty() && chaos.takes() {
            self.receive(chaos.next() as usize % self.open.len())?;
        }
        Ok(())
    }

    /// Poisons what the kernel before `at` has `freed`, once those that end there have been waited for.
    pub fn poison(&self, at: usize, freed: &[Vec<Range<usize>>], arena: *mut u8) {
        for range in at.checked_sub(1).and_then(|before| freed.get(before)).into_iter().flatten() {
            // SAFETY: the arena has the range, and no value is there (`freed`).
            unsafe { arena.add(range.start).write_bytes(0xff, range.len()) };
        }
    }

    /// Poisons the results of kernel `at` that share memory with its operands, or the others.
    fn poison_results(&self, at: usize, shared: bool) {
        let kernel = &self.program.kernels[at];
        let place = |v: ValueId| self.context.values[v.0 as usize].0;
        let operands: Vec<*mut u8> = kernel.reads().into_iter().map(place).collect();
        for v in kernel.writes() {
            if operands.contains(&place(v)) == shared {
                // SAFETY: the value has its bytes there (`plan::check`), and only this collective uses them.
                unsafe { place(v).write_bytes(0xff, self.program.values[v.0 as usize].nbytes()) };
            }
        }
    }
}
