//! Runs collectives on GPUs of one process, which read each other's memory.
//!
//! A collective takes one meeting before its launch (what the launch reads is complete), one before a second phase, and one after the
//! last (nothing reads or writes its memory any more). One meeting serves all collectives of the lane: that which starts a collective
//! continues those before it. So a sequence of collectives takes about one meeting for each; a collective that is waited for takes those
//! that are missing. The meetings follow from the program alone, so all devices have the same.
//!
//! A stream waits only for events that are recorded already, or by a graph that is launched already, so streams cannot wait for each other
//! in a circle, although those of one GPU may share a hardware queue.

use super::copies::{self, Combiners, Engines};
use super::{Axial, Mesh, State, ToStart};
use crate::driver::{Address, Entry, Event, Lane, Point, Recorded};
use crate::library::collective::{self, MOST, Phase, Task};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::ffi::c_void;

/// A collective on its lane.
pub(super) struct Started {
    pub(super) step: usize,
    calls: Vec<Call>,
    group: Group,
    /// The next phase.
    phase: usize,
    /// What copy engines use, if other kernels run meanwhile.
    engines: Option<Engines>,
    since: Option<Event>,
}

/// The launches of one tensor of a collective.
pub(super) struct Call {
    pub phases: Vec<Phase>,
    pub entries: Vec<Entry>,
    /// Bytes of an element of a piece, and of a result.
    pub sizes: [usize; 2],
}

/// One tensor of a collective: where its piece and its result are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Piece {
    nbytes: u64,
    input: Address,
    output: Address,
}

/// What a device sends when it meets others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Offer {
    /// The number of the device's endpoint, and which of its events are recorded.
    number: u64,
    turn: u64,
    /// Whether its host has seen a bad index.
    failed: u64,
    /// The number of the point behind which its pieces are complete.
    point: u64,
    pieces: Vec<Piece>,
}

impl Offer {
    /// Words before the pieces, and of a piece.
    const HEAD: usize = 4;
    const PIECE: usize = 3;

    fn bytes(&self) -> Vec<u8> {
        let head = [self.number, self.turn, self.failed, self.point];
        let pieces = self.pieces.iter().flat_map(|p| [p.nbytes, p.input, p.output]);
        head.into_iter().chain(pieces).flat_map(u64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> Option<Offer> {
        let words: Vec<u64> = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect();
        if !bytes.len().is_multiple_of(8) || words.len() < Offer::HEAD {
            return None;
        }
        let (head, rest) = words.split_at(Offer::HEAD);
        let pieces = rest.chunks_exact(Offer::PIECE);
        let whole = pieces.remainder().is_empty();
        let pieces = pieces.map(|p| Piece { nbytes: p[0], input: p[1], output: p[2] }).collect();
        whole.then_some(Offer { number: head[0], turn: head[1], failed: head[2], point: head[3], pieces })
    }
}

/// What a device brings to a meeting.
#[derive(Default)]
pub(super) struct Meeting {
    pieces: Vec<Piece>,
    /// The number of the point behind which the pieces are complete; those of an agreement have none.
    point: u64,
    /// Whether its host has seen a bad index.
    failed: bool,
    /// Whether the streams of the others wait for its own.
    with_stream: bool,
}

/// The devices along an axis that have met, in the order of their coordinates.
pub(super) struct Group {
    axis: Axis,
    all: Vec<Offer>,
    coordinate: usize,
}

impl Group {
    /// The address of each device's `k`-th piece or result, plus an offset: the argument `collective::Pieces`.
    fn pieces(&self, k: usize, results: bool, offset: impl Fn(usize) -> usize) -> [u64; MOST] {
        let mut out = [0; MOST];
        for (rank, (to, offer)) in out.iter_mut().zip(&self.all).enumerate() {
            let piece = offer.pieces.get(k).copied().unwrap_or_default();
            *to = if results { piece.output } else { piece.input } + offset(rank) as u64;
        }
        out
    }

    /// The events that the devices have recorded.
    fn recorded(&self) -> impl Iterator<Item = Recorded> + '_ {
        self.all.iter().map(|o| Recorded { number: o.number, axis: self.axis, turn: o.turn as usize })
    }

    /// The number of this device.
    fn own(&self) -> u64 {
        self.all[self.coordinate].number
    }
}

impl Mesh<'_> {
    /// Exchanges addresses with the devices along an axis, with the events that are recorded now: that of the lane if there is one, and that
    /// of the stream if the others wait for it.
    pub(super) fn exchange(&self, state: &mut State, axis: Axis, what: &str, meeting: Meeting) -> Result<Group> {
        let Meeting { pieces, point, failed, with_stream } = meeting;
        let endpoint = &self.connection.endpoint;
        let axial = &mut state.lanes[axis as usize];
        axial.turn ^= 1;
        if with_stream {
            endpoint.record_stream(axis, axial.turn)?;
        }
        axial.lane.iter().try_for_each(|lane| endpoint.record_lane(axis, axial.turn, lane))?;
        let (number, turn) = (endpoint.number, axial.turn as u64);
        let own = Offer { number, turn, failed: u64::from(failed), point, pieces };
        let sent = self.peers.exchange(axis, &own.bytes())?;
        let all: Option<Vec<Offer>> = sent.iter().map(|bytes| Offer::read(bytes)).collect();
        let bug = |what: String| Error::system("cuda", format!("this is a bug: {what}"));
        let all = all.ok_or_else(|| bug(format!("a device along {} sends something else for {what}", axis.name())))?;
        let coordinate = self.peers.coordinate(axis);
        if all.get(coordinate).is_none_or(|o| o.number != own.number) {
            return Err(bug(format!("the device at {coordinate} along {} is not itself", axis.name())));
        }
        let sizes = |o: &Offer| o.pieces.iter().map(|p| p.nbytes).collect::<Vec<_>>();
        if all.iter().any(|o| sizes(o) != sizes(&own)) {
            return Err(bug(format!("the pieces of {what} differ in size")));
        }
        if all.len() > MOST {
            let message = format!("{} devices along {}; at most {MOST}", all.len(), axis.name());
            return Err(Error::system("cuda", message));
        }
        all.iter().try_for_each(|other| self.open(state, other.number))?;
        Ok(Group { axis, all, coordinate })
    }

    /// Meets the devices along an axis: what their streams have queued so far comes before what this one's queues from now on.
    fn meet(&self, axis: Axis, what: &str, piece: Piece, failed: bool) -> Result<Group> {
        let meeting = Meeting { pieces: vec![piece], failed, with_stream: true, ..Meeting::default() };
        let group = self.exchange(&mut self.connection.state(), axis, what, meeting)?;
        for other in group.recorded().filter(|o| o.number != group.own()) {
            self.connection.endpoint.wait_for_stream(other)?;
        }
        Ok(group)
    }

    /// Continues the collectives on a lane, of which all devices have finished the last phase that they have queued.
    pub(super) fn proceed(&self, state: &mut State, axis: Axis, met: &Group) -> Result<()> {
        let Axial { lane: Some(lane), combiners, started, .. } = &mut state.lanes[axis as usize] else { return Ok(()) };
        if started.is_empty() {
            return Ok(());
        }
        for other in met.recorded().filter(|o| o.number != met.own()) {
            self.connection.endpoint.wait_for_lane(other, lane)?;
        }
        for collective in started.iter_mut() {
            collective.launch(lane, combiners)?;
        }
        // The lane is in order: those that have ended come first.
        let mut over = Vec::new();
        while let Some(collective) = started.pop_front_if(|collective| collective.is_over()) {
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
    ) -> Result<bool> {
        let piece = Piece { nbytes: 4, input: halt, output: halt };
        let group = self.meet(axis, "the agreement of a step", piece, failed)?;
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
            self.meet(axis, "the agreement of a step", piece, failed)?;
        }
        Ok(failed)
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
    ) -> Result<()> {
        let piece =
            |(c, _, [input, output]): &&ToStart| Piece { nbytes: c.nbytes as u64, input: *input, output: *output };
        let pieces = calls.iter().map(piece).collect();
        let meeting = Meeting { pieces, point: ready.number, ..Meeting::default() };
        let group = self.exchange(state, axis, what, meeting)?;
        self.proceed(state, axis, &group)?;
        let ranks = group.all.len();
        let prepared = |(c, entries, _): &&ToStart| {
            let sizes = [c.size, c.result_size];
            Ok(Call { phases: c.phases(group.coordinate, ranks)?, entries: entries.to_vec(), sizes })
        };
        let calls: Vec<Call> = calls.iter().map(prepared).collect::<Result<_>>()?;
        let fetched = if is_beside { copies::fetched(&calls, ranks) } else { 0 };
        let scratch = self.scratch(&mut state.lanes[axis as usize], fetched)?;
        let engines = is_beside.then_some(Engines { scratch, nbytes: fetched });
        let Axial { lane: Some(lane), combiners, started, .. } = &mut state.lanes[axis as usize] else { return Ok(()) };
        if fetched > 0 && combiners.is_none() {
            *combiners = Some(Combiners::new(&self.connection.device)?);
        }
        for device in &group.all {
            self.connection.endpoint.wait_for_point(device.number, device.point, lane)?;
        }
        let since = self.is_timed.then(|| Event::timed(&self.connection.device)).transpose()?;
        since.iter().try_for_each(|since| lane.record(since))?;
        let mut collective = Started { step, calls, group, phase: 0, engines, since };
        collective.launch(lane, combiners)?;
        started.push_back(collective);
        Ok(())
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

impl Started {
    /// Queues the next phase of each tensor; after the last one it is over.
    fn launch(&mut self, lane: &Lane, combiners: &mut Option<Combiners>) -> Result<()> {
        let (ranks, own) = (self.group.all.len(), self.group.coordinate);
        let mut parts = Vec::new();
        for (k, call) in self.calls.iter().enumerate() {
            let Some(phase) = call.phases.get(self.phase).filter(|p| !p.grid.contains(&0)) else { continue };
            let mut pieces = self.group.pieces(k, phase.reads_results, |rank| phase.first + rank * phase.step);
            let result = self.group.all[own].pieces[k].output;
            if let Some(engines) = &self.engines {
                let bases = self.group.pieces(k, phase.reads_results, |_| 0);
                if engines.moves(lane, phase, [own, ranks], &bases, result)? {
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
            call.launch(lane, phase, [own, ranks], pieces, result + phase.out as u64)?;
        }
        if let (Some(combiners), Some(engines)) = (combiners, &self.engines) {
            combiners.run(lane, engines, [own, ranks], &parts)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_read_as_it_was_sent() {
        let piece = |k| Piece { nbytes: 1 << 40, input: 3 << 50, output: k };
        let offer = Offer { number: 2, turn: 1, failed: 1, point: 9, pieces: vec![piece(4), piece(5)] };
        assert_eq!(Offer::read(&offer.bytes()), Some(offer.clone()));
        let none = Offer { pieces: Vec::new(), ..offer.clone() };
        assert_eq!(Offer::read(&none.bytes()), Some(none));
        assert_eq!(Offer::read(&offer.bytes()[8..]), None, "sent by another version, or by a CPU");
        assert_eq!(Offer::read(&offer.bytes()[4..]), None);
    }

    #[test]
    fn pieces_are_in_the_order_of_coordinates() {
        let piece = |k: u64| Piece { nbytes: 8, input: 1000 * k, output: 1000 * k + 500 };
        let offer = |k: u64| Offer { pieces: vec![piece(k), piece(k + 10)], ..Offer::default() };
        let group = Group { axis: Axis::Dp, all: vec![offer(1), offer(2), offer(3)], coordinate: 1 };
        assert_eq!(group.pieces(0, false, |k| 8 + k * 16)[..4], [1008, 2024, 3040, 0]);
        assert_eq!(group.pieces(1, true, |_| 0)[..3], [11500, 12500, 13500]);
    }
}
