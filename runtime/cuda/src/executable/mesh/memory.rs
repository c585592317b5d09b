//! Runs collectives on GPUs of one process, which read each other's memory, or copies in host memory (`host.rs`, `ring.rs`).
//!
//! A collective takes one meeting before its launch (what the launch reads is complete), one before a second phase, and one after the
//! last (nothing reads or writes its memory any more). One meeting serves all collectives of the lane: that which starts a collective
//! continues those before it. So a sequence of collectives takes about one meeting for each; a collective that is waited for takes those
//! that are missing. The meetings follow from the program alone, so all devices have the same.
//!
//! A stream waits only for events that are recorded already, or by a graph that is launched already, so streams cannot wait for each other
//! in a circle, although those of one GPU may share a hardware queue.

use super::copies::{self, Combiners, Engines};
use super::host::HostCopies;
use super::meeting::{Group, Meeting, Piece};
use super::ring::{Passed, Passing};
use super::{Axial, Mesh, State, ToStart};
use crate::driver::{Address, Endpoint, Entry, Event, Lane, Point};
use crate::library::collective::{self, MOST, Phase, Task};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::collections::VecDeque;
use std::ffi::c_void;

/// A collective on its lane.
pub(super) struct Started {
    pub(super) step: usize,
    work: Work,
    since: Option<Event>,
}

/// What a device still has to queue for a collective.
enum Work {
    Phases(Phases),
    /// A permutation through host memory.
    Passing(Passing),
}

/// A collective whose pieces the devices read where they are, or where each has copied its own.
struct Phases {
    calls: Vec<Call>,
    group: Group,
    /// The next phase.
    phase: usize,
    /// What copy engines use, if other kernels run meanwhile.
    engines: Option<Engines>,
}

/// The launches of one tensor of a collective.
pub(super) struct Call {
    pub phases: Vec<Phase>,
    pub entries: Vec<Entry>,
    /// Bytes of an element of a piece, and of a result.
    pub sizes: [usize; 2],
    /// Whether the result overwrites the piece.
    pub in_place: bool,
}

impl Mesh<'_> {
    /// Continues the collectives on a lane, of which all devices have finished the last phase that they have queued.
    pub(super) fn proceed(&self, state: &mut State, axis: Axis, met: &Group) -> Result<()> {
        let Axial { lane: Some(lane), combiners, started, host, .. } = &mut state.lanes[axis as usize] else {
            return Ok(());
        };
        if started.is_empty() {
            return Ok(());
        }
        for other in met.recorded().filter(|o| o.number != met.own()) {
            self.connection.endpoint.wait_for_lane(other, lane)?;
        }
        let endpoint = &self.connection.endpoint;
        if let Some(host) = host {
            host.ring(lane)?.0.meet(met.all.iter().map(|offer| offer.ring));
        }
        for collective in started.iter_mut() {
            match (&mut collective.work, host.as_mut()) {
                (Work::Phases(phases), _) => phases.launch(endpoint, lane, combiners)?,
                (Work::Passing(passing), Some(host)) => host.ring(lane)?.0.fetch(endpoint, lane, passing)?,
                (Work::Passing(_), None) => {}
            }
        }
        send(endpoint, lane, host, started)?;
        // The lane is in order: those that have ended come first.
        let mut over = Vec::new();
        while let Some(collective) = started.pop_front_if(|collective| collective.work.is_over()) {
            over.push((collective.step, collective.since));
        }
        over.into_iter().try_for_each(|(step, since)| state.end(&self.connection.device, axis, step, since))
    }

    /// Lets the devices along an axis agree. Returns whether the host of one has seen a bad index (`failed`), and spreads `halt` words as
    /// [`Mesh::agree`] says.
    pub(super) fn agree_in_memory(
        &self,
        axis: Axis,
        failed: bool,
        halt: Address,
        cell: Option<Address>,
        on_host: bool,
    ) -> Result<bool> {
        let piece = Piece { nbytes: 4, input: halt, output: halt };
        let copy = match (on_host, cell) {
            (true, Some(_)) => {
                let axial = &mut self.connection.state().lanes[axis as usize];
                let to = self.host(axial)?.halt();
                self.connection.device.copy_across(halt, to, 4)?;
                Some(to)
            }
            _ => None,
        };
        let group = self.meet(axis, "the agreement of a step", piece, copy, failed)?;
        let failed = group.all.iter().any(|o| o.failed != 0);
        if let Some(cell) = cell {
            self.connection.spread(
                group.pieces(0, false, |_| 0),
                cell,
                group.all.len(),
                group.coordinate,
                axis,
                None,
            )?;
            // The words may be cleared only after all have read them.
            self.meet(axis, "the agreement of a step", piece, copy, failed)?;
        }
        Ok(failed)
    }

    /// What the device keeps in host memory for an axis.
    fn host<'a>(&self, axial: &'a mut Axial) -> Result<&'a mut HostCopies> {
        if axial.host.is_none() {
            axial.host = Some(HostCopies::new(&self.connection.endpoint)?);
        }
        axial.host.as_mut().ok_or_else(|| Error::system("cuda", "this is a bug: no copies in host memory"))
    }

    /// Starts the collective of a step on the lane of its axis, behind the points `ready` of all devices.
    pub(super) fn start_in_memory(
        &self,
        state: &mut State,
        axis: Axis,
        what: &str,
        step: usize,
        calls: &[&ToStart],
        ready: &Point,
        is_beside: bool,
        (ranks, on_host): (usize, bool),
    ) -> Result<()> {
        let piece =
            |(c, _, [input, output]): &&ToStart| Piece { nbytes: c.nbytes as u64, input: *input, output: *output };
        let pieces: Vec<Piece> = calls.iter().map(piece).collect();
        let mut meeting = Meeting { point: ready.number, ..Meeting::default() };
        let coordinate = self.peers.coordinate(axis);
        // That of all tensors, if they are permuted alike.
        let first = calls.first().and_then(|(c, ..)| c.senders());
        let sender =
            first.filter(|first| calls.iter().all(|(c, ..)| c.senders() == Some(first))).map(|all| all[coordinate]);
        let prepared = |(c, entries, _): &&ToStart| {
            let (sizes, in_place) = ([c.size, c.result_size], c.in_place);
            Ok(Call { phases: c.phases(coordinate, ranks, on_host)?, entries: entries.to_vec(), sizes, in_place })
        };
        let calls: Vec<Call> = calls.iter().map(prepared).collect::<Result<_>>()?;
        if on_host {
            let (endpoint, axial) = (&self.connection.endpoint, &mut state.lanes[axis as usize]);
            self.host(axial)?;
            let Axial { lane: Some(lane), host, started, .. } = axial else { return Ok(()) };
            if let Some(sender) = sender {
                let since = self.since(lane)?;
                let pass = |p: &Piece| Passed { from: p.input, to: p.output, nbytes: p.nbytes as usize };
                let passing = Passing::new(pieces.iter().map(pass).collect(), sender, ready.number);
                started.push_back(Started { step, work: Work::Passing(passing), since });
                send(endpoint, lane, host, started)?;
                let group = self.exchange(state, axis, what, Meeting { pieces, ..Meeting::default() })?;
                return self.proceed(state, axis, &group);
            }
            let pieces: Vec<_> = pieces.iter().map(|p| (p.input, p.nbytes as usize)).collect();
            let copied = host.as_mut().map(|host| host.copy(endpoint, lane, step, ready, &pieces)).transpose()?;
            (meeting.copied, meeting.copies) = copied.unwrap_or_default();
        }
        meeting.pieces = pieces;
        let group = self.exchange(state, axis, what, meeting)?;
        self.proceed(state, axis, &group)?;
        let fetched = if is_beside { copies::fetched(&calls, ranks) } else { 0 };
        let scratch = self.scratch(&mut state.lanes[axis as usize], fetched)?;
        let engines = is_beside.then_some(Engines { scratch, nbytes: fetched });
        let Axial { lane: Some(lane), combiners, started, .. } = &mut state.lanes[axis as usize] else { return Ok(()) };
        if fetched > 0 && combiners.is_none() {
            *combiners = Some(Combiners::new(&self.connection.device)?);
        }
        // Copies on the host have points of their own.
        for device in group.all.iter().filter(|o| !on_host || o.number == group.own()) {
            self.connection.endpoint.wait_for_point(device.number, device.point, lane)?;
        }
        let since = self.since(lane)?;
        let mut phases = Phases { calls, group, phase: 0, engines };
        phases.launch(&self.connection.endpoint, lane, combiners)?;
        started.push_back(Started { step, work: Work::Phases(phases), since });
        Ok(())
    }

    /// Records the start of a collective, if it is measured.
    fn since(&self, lane: &Lane) -> Result<Option<Event>> {
        let since = self.is_timed.then(|| Event::timed(&self.connection.device)).transpose()?;
        since.iter().try_for_each(|since| lane.record(since))?;
        Ok(since)
    }
}

impl Call {
    /// Queues the kernel of a phase. `at`: this device's coordinate, and how many there are.
    pub(super) fn launch(
        &self,
        lane: &Lane,
        phase: &Phase,
        at: [usize; 2],
        mut pieces: [u64; MOST],
        mut out: Address,
    ) -> Result<()> {
        let mut numbers = phase.numbers(at[0], at[1]);
        let mut args: Vec<*mut c_void> = vec![pieces.as_mut_ptr().cast(), (&raw mut out).cast()];
        args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
        let block = [collective::BLOCK as u32, 1, 1];
        self.entries[phase.function].launch_on(lane, phase.grid, block, &mut args)
    }
}

/// Sends the next window of the permutations on a lane through host memory.
fn send(
    endpoint: &Endpoint,
    lane: &Lane,
    host: &mut Option<HostCopies>,
    started: &mut VecDeque<Started>,
) -> Result<()> {
    let Some(host) = host else { return Ok(()) };
    let (ring, stream) = host.ring(lane)?;
    let passing = started.iter_mut().filter_map(|collective| match &mut collective.work {
        Work::Passing(passing) => Some(passing),
        Work::Phases(_) => None,
    });
    ring.send(endpoint, stream, passing)
}

impl Work {
    /// Whether all devices have finished it, once the lane has waited for what they had queued at the last meeting.
    fn is_over(&self) -> bool {
        match self {
            Work::Phases(phases) => phases.is_over(),
            Work::Passing(passing) => passing.is_over(),
        }
    }
}

impl Phases {
    /// Queues the next phase of each tensor; after the last one it is over.
    fn launch(&mut self, endpoint: &Endpoint, lane: &Lane, combiners: &mut Option<Combiners>) -> Result<()> {
        let fetch = |rank: usize, from, to, nbytes| self.group.fetch(endpoint, lane, rank, from, to, nbytes);
        let (ranks, own) = (self.group.all.len(), self.group.coordinate);
        if self.phase == 0 && self.calls.iter().any(|call| call.in_place) {
            self.group.leave(endpoint, lane)?;
        }
        let mut parts = Vec::new();
        for (k, call) in self.calls.iter().enumerate() {
            let Some(phase) = call.phases.get(self.phase).filter(|p| !p.grid.contains(&0)) else { continue };
            let mut pieces = self.group.pieces(k, phase.reads_results, |rank| phase.first + rank * phase.step);
            let result = self.group.all[own].pieces[k].output;
            if let Some(engines) = &self.engines {
                let bases = self.group.pieces(k, phase.reads_results, |_| 0);
                if engines.moves(phase, [own, ranks], &bases, result, &fetch)? {
                    continue;
                }
                let own = engines.parts(call, phase, ranks, bases, result);
                if !own.is_empty() {
                    parts.extend(own);
                    continue;
                }
            }
            if let Task::Span { from, .. } = phase.task {
                pieces[0] = pieces[from];
            }
            self.group.arrive(endpoint, lane, k)?;
            call.launch(lane, phase, [own, ranks], pieces, result + phase.out as u64)?;
        }
        if let (Some(combiners), Some(engines)) = (combiners, &self.engines) {
            combiners.run(lane, engines, [own, ranks], &parts, &fetch)?;
        }
        if self.phase == 0 {
            self.group.leave(endpoint, lane)?;
        }
        self.phase += 1;
        Ok(())
    }

    /// Whether all devices have finished the last phase, once the lane has waited for what they had queued at the last meeting.
    fn is_over(&self) -> bool {
        let phases = self.calls.iter().map(|call| call.phases.len()).max().unwrap_or(0);
        self.phase > phases
    }
}
