//! Runs collectives with the other devices of a mesh, and lets them agree before States are written.
//!
//! All devices of a mesh are in this process, on one GPU or several, each driven by its own thread. They *meet* along an axis: each
//! records events in its streams, the host threads exchange addresses (`Peers::exchange`), and streams wait for the events of the
//! others. A stream waits only for events that are recorded already, so streams cannot wait for each other in a circle, although those
//! of one GPU may share a hardware queue.
//!
//! A collective runs on the *lane* of its axis, a stream beside that of other kernels. It takes one meeting before its launch (what
//! the launch reads is complete), one before a second phase, and one after the last (nothing reads or writes its memory any more). One
//! meeting serves all collectives of the lane: that which starts a collective continues those before it. So a sequence of collectives
//! takes about one meeting for each; a collective that is waited for takes those that are missing. The meetings follow from the program
//! alone, so all devices have the same.
//!
//! Failures. An error of the host, and a bad index that a host has seen, end the run on all devices before the first State write, where
//! all meet along every axis ([`Mesh::agree`]). There they also combine their `halt` words on the devices: a bad index that no host has
//! seen yet stops the State writes of all devices, and is reported on all. This relies on every run with a mesh to pass its peers. An
//! error after the first State write leaves States partly written, as on one device. A bad index that a download raises on one device is
//! still pending on the others: a mesh backend then downloads from each of them too, before the next run.
//!
//! `Started` is the seam for other transports: NCCL would be chosen there, once for the devices along an axis.

use super::errors::peer_fault;
use super::transfer::Transfers;
use crate::backend::DeviceContext;
use crate::driver::{Address, Device, Endpoint, Entry, Event, Lane, Recorded};
use crate::library::collective::{self, Collective, MOST, Phase, Task};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_plan::Peers;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a device keeps for its mesh from the first run with peers on.
pub(crate) struct Connection {
    device: Arc<Device>,
    /// Its lanes are closed before the endpoint.
    state: Mutex<State>,
    /// What it sends to other pipeline stages (`transfer.rs`); closed before the endpoint too.
    pub(super) transfers: Mutex<Transfers>,
    pub(super) endpoint: Endpoint,
    /// Spreads a bad index.
    agree: Entry,
}

#[derive(Default)]
struct State {
    lanes: [Axial; Axis::ALL.len()],
    /// The numbers of the devices whose memory this one may access.
    open: BTreeSet<u64>,
    /// Collectives that have finished, by step: the time of the start if it is measured, and the event of the end.
    ended: HashMap<usize, (Option<Event>, Event)>,
    /// Events without a time that are not used any more.
    free: Vec<Event>,
}

/// What a device keeps for an axis.
#[derive(Default)]
struct Axial {
    /// Which of two events is recorded next.
    turn: usize,
    lane: Option<Lane>,
    /// Collectives on the lane that have not ended, in order.
    started: VecDeque<Started>,
}

/// A collective on its lane.
struct Started {
    step: usize,
    calls: Vec<Call>,
    group: Group,
    /// The next phase.
    phase: usize,
    since: Option<Event>,
}

/// The launches of one tensor of a collective.
struct Call {
    phases: Vec<Phase>,
    entries: Vec<Entry>,
}

/// One tensor of a collective: where its piece and its result are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Piece {
    nbytes: u64,
    input: Address,
    output: Address,
}

/// What a device sends when it meets others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Offer {
    process: u64,
    /// The number of the device's endpoint, and which of its events are recorded.
    number: u64,
    turn: u64,
    /// Whether its host has seen a bad index.
    failed: u64,
    pieces: Vec<Piece>,
}

impl Offer {
    /// Words before the pieces, and of a piece.
    const HEAD: usize = 4;
    const PIECE: usize = 3;

    fn bytes(&self) -> Vec<u8> {
        let head = [self.process, self.number, self.turn, self.failed];
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
        whole.then_some(Offer { process: head[0], number: head[1], turn: head[2], failed: head[3], pieces })
    }
}

impl Connection {
    /// `agree`: the kernel of [`collective::agree`].
    pub fn new(device: &Arc<Device>, agree: Entry) -> Result<Connection> {
        let endpoint = Endpoint::new(device)?;
        Ok(Connection { device: device.clone(), state: Mutex::default(), transfers: Mutex::default(), endpoint, agree })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The other devices of the mesh during one run.
pub(super) struct Mesh<'a> {
    pub connection: &'a Connection,
    pub peers: &'a dyn Peers,
    pub is_timed: bool,
}

/// The start and the end of a collective on its lane.
pub(super) struct Timing {
    since: Event,
    until: Event,
}

impl Timing {
    pub fn seconds(&self) -> Result<f64> {
        self.until.since(&self.since)
    }
}

/// The devices along an axis that have met, in the order of their coordinates.
struct Group {
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

/// One tensor of a collective to start: its entries are those of its functions, its places its piece and its result.
pub(super) type ToStart<'a> = (&'a Collective, &'a [Entry], [Address; 2]);

impl Mesh<'_> {
    /// Forgets what a run before has left, which has failed.
    pub fn begin(&self) {
        let state = &mut *self.connection.state();
        state.lanes.iter_mut().for_each(|axial| axial.started.clear());
        state.ended.clear();
    }

    /// Waits for what the lanes of this device have queued.
    pub fn settle(&self) -> Result<()> {
        let state = self.connection.state();
        state.lanes.iter().filter_map(|axial| axial.lane.as_ref()).try_for_each(Lane::synchronize)?;
        self.settle_transfers()
    }

    /// Exchanges addresses with the devices along an axis, with the events that are recorded now.
    fn exchange(&self, state: &mut State, axis: Axis, what: &str, pieces: Vec<Piece>, failed: bool) -> Result<Group> {
        let endpoint = &self.connection.endpoint;
        let axial = &mut state.lanes[axis as usize];
        axial.turn ^= 1;
        endpoint.record(axis, axial.turn, axial.lane.as_ref())?;
        let own = Offer {
            process: u64::from(std::process::id()),
            number: endpoint.number,
            turn: axial.turn as u64,
            failed: u64::from(failed),
            pieces,
        };
        let sent = self.peers.exchange(axis, &own.bytes())?;
        let all: Option<Vec<Offer>> = sent.iter().map(|bytes| Offer::read(bytes)).collect();
        let bug = |what: String| Error::system("cuda", format!("this is a bug: {what}"));
        let all = all.ok_or_else(|| bug(format!("a device along {} sends something else for {what}", axis.name())))?;
        let coordinate = self.peers.coordinate(axis);
        if all.get(coordinate).is_none_or(|o| o.number != own.number) {
            return Err(bug(format!("the device at {coordinate} along {} is not itself", axis.name())));
        }
        if all.iter().any(|o| o.process != own.process) {
            return Err(Error::system("cuda", format!("the devices along {} are in several processes", axis.name()))
                .hint("run all GPUs of the mesh in one process"));
        }
        let sizes = |o: &Offer| o.pieces.iter().map(|p| p.nbytes).collect::<Vec<_>>();
        if all.iter().any(|o| sizes(o) != sizes(&own)) {
            return Err(bug(format!("the pieces of {what} differ in size")));
        }
        if all.len() > MOST {
            let message = format!("{} devices along {}; at most {MOST}", all.len(), axis.name());
            return Err(Error::system("cuda", message));
        }
        for other in all.iter().filter(|o| o.number != own.number) {
            if !state.open.contains(&other.number) {
                endpoint.open(other.number)?;
                state.open.insert(other.number);
            }
        }
        Ok(Group { axis, all, coordinate })
    }

    /// Meets the devices along an axis: what their streams have queued so far comes before what this one's queues from now on.
    fn meet(&self, axis: Axis, what: &str, piece: Piece, failed: bool) -> Result<Group> {
        let group = self.exchange(&mut self.connection.state(), axis, what, vec![piece], failed)?;
        for other in group.recorded().filter(|o| o.number != group.own()) {
            self.connection.endpoint.wait_for_stream(other, None)?;
        }
        Ok(group)
    }

    /// Continues the collectives on a lane, of which all devices have finished the last phase that they have queued.
    fn proceed(&self, state: &mut State, axis: Axis, met: &Group) -> Result<()> {
        let State { lanes, ended, free, .. } = state;
        let Axial { lane: Some(lane), started, .. } = &mut lanes[axis as usize] else { return Ok(()) };
        if started.is_empty() {
            return Ok(());
        }
        for other in met.recorded().filter(|o| o.number != met.own()) {
            self.connection.endpoint.wait_for_lane(other, lane)?;
        }
        for collective in started.iter_mut() {
            collective.launch(lane)?;
        }
        // The lane is in order: those that have ended come first.
        while let Some(collective) = started.pop_front_if(|collective| collective.is_over()) {
            let end = match free.pop().filter(|_| !self.is_timed) {
                Some(event) => event,
                None if self.is_timed => Event::timed(&self.connection.device)?,
                None => Event::untimed(&self.connection.device)?,
            };
            lane.record(&end)?;
            ended.insert(collective.step, (collective.since, end));
        }
        Ok(())
    }

    /// Starts the collective of a step on the lane of its axis, behind what the stream has queued so far.
    pub fn start(&self, step: usize, calls: &[ToStart]) -> Result<()> {
        let Some((first, ..)) = calls.first() else { return Ok(()) };
        let (axis, what) = (first.axis, first.name);
        let state = &mut *self.connection.state();
        if state.lanes[axis as usize].lane.is_none() {
            state.lanes[axis as usize].lane = Some(Lane::new(&self.connection.device)?);
        }
        let calls: Vec<&ToStart> = calls.iter().filter(|(c, ..)| !c.is_empty()).collect();
        let piece =
            |(c, _, [input, output]): &&ToStart| Piece { nbytes: c.nbytes as u64, input: *input, output: *output };
        let group = self.exchange(state, axis, what, calls.iter().map(piece).collect(), false)?;
        self.proceed(state, axis, &group)?;
        let ranks = group.all.len();
        let prepared = |(c, entries, _): &&ToStart| {
            Ok(Call { phases: c.phases(group.coordinate, ranks)?, entries: entries.to_vec() })
        };
        let calls = calls.iter().map(prepared).collect::<Result<_>>()?;
        let Axial { lane: Some(lane), started, .. } = &mut state.lanes[axis as usize] else { return Ok(()) };
        for device in group.recorded() {
            self.connection.endpoint.wait_for_stream(device, Some(lane))?;
        }
        let since = self.is_timed.then(|| Event::timed(&self.connection.device)).transpose()?;
        since.iter().try_for_each(|since| lane.record(since))?;
        let mut collective = Started { step, calls, group, phase: 0, since };
        collective.launch(lane)?;
        started.push_back(collective);
        Ok(())
    }

    /// Makes what the stream queues from now on wait for the collective of a step. Returns its times, if they are measured.
    pub fn wait(&self, step: usize, axis: Axis) -> Result<Option<Timing>> {
        let state = &mut *self.connection.state();
        loop {
            if let Some((since, until)) = state.ended.remove(&step) {
                self.connection.device.wait_for(&until)?;
                return Ok(match since {
                    Some(since) => Some(Timing { since, until }),
                    None => {
                        state.free.push(until);
                        None
                    }
                });
            }
            if !state.lanes[axis as usize].started.iter().any(|collective| collective.step == step) {
                return Err(Error::system("cuda", format!("this is a bug: step {step} has not started")));
            }
            let group = self.exchange(state, axis, "the end of a collective", Vec::new(), false)?;
            self.proceed(state, axis, &group)?;
        }
    }

    /// Lets all devices agree that none has failed: an error on all of them if the host of one has seen a bad index (`failed`). With a
    /// `cell`, in which the kernel of [`collective::agree`] reports, a bad index on one device also sets the `halt` word of all.
    pub fn agree(&self, mut failed: bool, halt: Address, cell: Option<Address>) -> Result<()> {
        let piece = Piece { nbytes: 4, input: halt, output: halt };
        for axis in Axis::ALL {
            let group = self.meet(axis, "the agreement of a step", piece, failed)?;
            failed |= group.all.iter().any(|o| o.failed != 0);
            if let (Some(mut cell), 2..) = (cell, group.all.len()) {
                let mut words = group.pieces(0, false, |_| 0);
                let mut numbers = [group.all.len() as i64, group.coordinate as i64, axis as i64];
                let mut args: Vec<*mut c_void> = vec![words.as_mut_ptr().cast(), (&raw mut cell).cast()];
                args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
                self.connection.agree.launch(&self.connection.device, [1; 3], [MOST as u32, 1, 1], 0, &mut args)?;
                // The words may be cleared only after all have read them.
                self.meet(axis, "the agreement of a step", piece, failed)?;
            }
        }
        if failed { Err(peer_fault(None)) } else { Ok(()) }
    }
}

impl Started {
    /// Queues the next phase of each tensor; after the last one it is over.
    fn launch(&mut self, lane: &Lane) -> Result<()> {
        let (ranks, own) = (self.group.all.len(), self.group.coordinate);
        for (k, call) in self.calls.iter().enumerate() {
            let Some(phase) = call.phases.get(self.phase).filter(|p| !p.grid.contains(&0)) else { continue };
            let mut pieces = self.group.pieces(k, phase.reads_results, |rank| phase.first + rank * phase.step);
            if let Task::Span { from, .. } = phase.task {
                pieces[0] = pieces[from];
            }
            let mut out = self.group.all[own].pieces[k].output + phase.out as u64;
            let mut numbers = phase.numbers(own, ranks);
            let mut args: Vec<*mut c_void> = vec![pieces.as_mut_ptr().cast(), (&raw mut out).cast()];
            args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
            let block = [collective::BLOCK as u32, 1, 1];
            call.entries[phase.function].launch_on(lane, phase.grid, block, &mut args)?;
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

impl DeviceContext {
    /// What this device keeps for its mesh; made when it is first asked for.
    pub(super) fn connection(&mut self) -> Result<Arc<Connection>> {
        if let Some(connection) = &self.connection {
            return Ok(connection.clone());
        }
        let function = collective::agree();
        let entry = super::entries(self, &[function])?.into_values().next();
        let entry = entry.ok_or_else(|| Error::system("cuda", "this is a bug: no entry"))?;
        let connection = Arc::new(Connection::new(&self.device, entry)?);
        self.connection = Some(connection.clone());
        Ok(connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_read_as_it_was_sent() {
        let piece = |k| Piece { nbytes: 1 << 40, input: 3 << 50, output: k };
        let offer = Offer { process: 1, number: 2, turn: 1, failed: 1, pieces: vec![piece(4), piece(5)] };
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
