//! Runs collectives on GPUs of several processes, by messages of NCCL.
//!
//! A collective is queued on its lane as a whole: NCCL's kernels wait for the other devices, so hosts need not meet. The communicator of an
//! axis is made when a run first needs it, and again after it was cut off.
//!
//! Failures. A device whose run has failed ends its communicators, and its process tells the others, whose communicators are *cut off* by
//! the thread that learns of it ([`Communicators::cut_off`]): no stream waits for a device that will not come. Runs before may be in flight, so
//! what is queued gets two seconds to finish. What a stream computes
//! behind a collective that was cut off is undefined, so the next run or copy to the host is an error, unless the run has been reported
//! as failed.

use super::{Axial, Mesh, State, ToStart};
use crate::driver::{Address, Device, Event, Lane, Point};
use crate::library::collective::{BLOCK, MOST, Phase};
use crate::library::messages::{Message, Messages, Place, Step};
use crate::nccl::{self, Communicator, ID_BYTES, Queued};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How often NCCL is asked for errors of the network.
const WATCHED: Duration = Duration::from_millis(500);
/// The alignment of the memory of each tensor of a call.
const ALIGN: usize = 256;

/// The communicators of a device.
#[derive(Default)]
pub(crate) struct Communicators {
    state: Mutex<Joined>,
}

/// The devices of a communicator, as each of them knows them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Group {
    Along(Axis),
    /// Two pipeline stages: the coordinates of sender and receiver.
    Channel(usize, usize),
}

#[derive(Default)]
struct Joined {
    /// With the number that all devices of a communicator know it by.
    all: BTreeMap<Group, (u64, Arc<Communicator>)>,
    is_joining: bool,
    is_watched: bool,
    /// Why they were cut off, until it is raised.
    cause: Option<Error>,
}

impl Communicators {
    fn lock(&self) -> MutexGuard<'_, Joined> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the communicator of a group; 0 without one.
    pub fn number(&self, group: Group) -> u64 {
        self.lock().all.get(&group).map_or(0, |(number, _)| *number)
    }

    pub fn of(&self, group: Group) -> Result<Arc<Communicator>> {
        let state = self.lock();
        match (state.all.get(&group), &state.cause) {
            (Some((_, communicator)), _) => Ok(communicator.clone()),
            (None, Some(cause)) => Err(cause.clone()),
            (None, None) => Err(Error::system("cuda", "this is a bug: no communicator")),
        }
    }

    /// Joins a new communicator as device `rank` of `ranks`; all of them do. `share` gives all the name that the first one makes.
    pub fn join(
        self: &Arc<Self>,
        device: &Arc<Device>,
        group: Group,
        rank: usize,
        ranks: usize,
        share: &dyn Fn(Option<&[u8]>) -> Result<Arc<[u8]>>,
    ) -> Result<()> {
        let old = {
            let mut state = self.lock();
            state.is_joining = true;
            state.all.remove(&group)
        };
        old.into_iter().for_each(|(_, communicator)| communicator.retire());
        let joined = self.joined(device, rank, ranks, share);
        let mut state = self.lock();
        state.is_joining = false;
        let (number, communicator) = joined?;
        if let Some(cause) = &state.cause {
            let cause = cause.clone();
            drop(state);
            communicator.retire();
            return Err(cause);
        }
        state.all.insert(group, (number, Arc::new(communicator)));
        if !std::mem::replace(&mut state.is_watched, true) {
            let watched = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("nccl-errors".into()).spawn(move || watch(&watched));
            thread.map_err(|e| Error::system("cuda", format!("no thread to watch NCCL: {e}")))?;
        }
        Ok(())
    }

    fn joined(
        &self,
        device: &Arc<Device>,
        rank: usize,
        ranks: usize,
        share: &dyn Fn(Option<&[u8]>) -> Result<Arc<[u8]>>,
    ) -> Result<(u64, Communicator)> {
        let own = if rank == 0 { Some(nccl::unique_id()?) } else { None };
        let name = share(own.as_ref().map(<[u8; ID_BYTES]>::as_slice))?;
        let is_cut_off = || self.lock().cause.is_some();
        let communicator = Communicator::join(device, &name, rank, ranks, &is_cut_off)?;
        // A hash of the name that every process computes alike.
        let number =
            name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        Ok((number.max(1), communicator))
    }

    /// Ends what is in flight with other devices, one of which has failed. Any thread may call it.
    pub fn cut_off(&self, why: &Error) {
        let mut state = self.lock();
        let all = std::mem::take(&mut state.all);
        if all.is_empty() && !state.is_joining {
            return;
        }
        state.cause.get_or_insert_with(|| why.clone());
        drop(state);
        all.into_values().for_each(|(_, communicator)| nccl::retire(communicator));
    }

    /// Ends what is in flight, because the run of this device has failed, which is reported by itself.
    pub(super) fn end(&self) {
        self.cut_off(&Error::system("cuda", "a run has failed"));
        self.forget();
    }

    /// Forgets why communicators were cut off: it has been reported.
    pub fn forget(&self) {
        self.lock().cause = None;
    }

    /// Returns why communicators were cut off, once.
    pub fn raise(&self) -> Result<()> {
        self.lock().cause.take().map_or(Ok(()), Err)
    }
}

/// Cuts communicators off when NCCL reports an error, until their device is closed.
fn watch(communicators: &Weak<Communicators>) {
    loop {
        std::thread::sleep(WATCHED);
        let Some(all) = communicators.upgrade() else { return };
        let alive: Vec<Arc<Communicator>> = all.lock().all.values().map(|(_, c)| c.clone()).collect();
        if let Some(error) = alive.iter().find_map(|communicator| communicator.error()) {
            all.cut_off(&error);
        }
    }
}

/// One tensor of a collective that is being queued.
struct Tensor<'a> {
    to_start: &'a ToStart<'a>,
    plan: Messages,
    /// Where its scratch memory begins.
    scratch: Address,
}

impl Tensor<'_> {
    fn at(&self, place: Place) -> Address {
        let [piece, result] = self.to_start.2;
        match place {
            Place::Piece(at) => piece + at as u64,
            Place::Result(at) => result + at as u64,
            Place::Scratch(at) => self.scratch + at as u64,
        }
    }

    fn queued(&self, message: &Message) -> Queued {
        match *message {
            Message::Sum { from, to, n, dtype } => Queued::Sum { from: self.at(from), to: self.at(to), n, dtype },
            Message::SumSlices { from, to, n, dtype } => {
                Queued::SumSlices { from: self.at(from), to: self.at(to), n, dtype }
            }
            Message::Gather { from, to, nbytes } => Queued::Gather { from: self.at(from), to: self.at(to), nbytes },
            Message::Send { from, nbytes, peer } => Queued::Send { from: self.at(from), nbytes, peer },
            Message::Receive { to, nbytes, peer } => Queued::Receive { to: self.at(to), nbytes, peer },
        }
    }

    /// Queues a step that exchanges nothing.
    fn queue(&self, lane: &Lane, step: &Step, coordinate: usize, ranks: usize) -> Result<()> {
        match step {
            Step::Messages(_) => Ok(()),
            Step::Rows { from, to, nbytes, apart, rows } => {
                lane.copy_rows(self.at(*from), self.at(*to), *nbytes, *apart, *rows)
            }
            Step::Launch { phase, first, apart } => self.launch(lane, phase, *first, *apart, coordinate, ranks),
        }
    }

    fn launch(
        &self,
        lane: &Lane,
        phase: &Phase,
        first: usize,
        apart: usize,
        coordinate: usize,
        ranks: usize,
    ) -> Result<()> {
        if phase.grid.contains(&0) {
            return Ok(());
        }
        let (_, entries, [_, result]) = self.to_start;
        let mut pieces = [0u64; MOST];
        for (k, piece) in pieces.iter_mut().take(ranks).enumerate() {
            *piece = self.scratch + (first + k * apart) as u64;
        }
        let mut out = result + phase.out as u64;
        let mut numbers = phase.numbers(coordinate, ranks);
        let mut args: Vec<*mut c_void> = vec![pieces.as_mut_ptr().cast(), (&raw mut out).cast()];
        args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
        entries[phase.function].launch_on(lane, phase.grid, [BLOCK as u32, 1, 1], &mut args)
    }
}

impl Mesh<'_> {
    /// Queues the collective of a step on the lane of its axis, behind the point `ready`.
    pub(super) fn start_messages(
        &self,
        state: &mut State,
        axis: Axis,
        step: usize,
        calls: &[&ToStart],
        ready: &Point,
        communicator: &Communicator,
        ranks: usize,
    ) -> Result<()> {
        let device = &self.connection.device;
        let coordinate = self.peers.coordinate(axis);
        let mut bytes = 0;
        let mut tensors = Vec::with_capacity(calls.len());
        for to_start in calls.iter().copied() {
            let plan = to_start.0.messages(coordinate, ranks)?;
            let scratch = bytes as u64;
            bytes += plan.scratch.next_multiple_of(ALIGN);
            tensors.push(Tensor { to_start, plan, scratch });
        }
        let axial = &mut state.lanes[axis as usize];
        let base = self.scratch(axial, bytes)?;
        tensors.iter_mut().for_each(|tensor| tensor.scratch += base);
        let Some(lane) = &axial.lane else { return Err(Error::system("cuda", "this is a bug: an axis has no lane")) };
        ready.hold(lane)?;
        let since = self.is_timed.then(|| Event::timed(device)).transpose()?;
        since.iter().try_for_each(|since| lane.record(since))?;
        let steps = tensors.iter().map(|tensor| tensor.plan.steps.len()).max().unwrap_or(0);
        for k in 0..steps {
            let now = || tensors.iter().filter_map(|tensor| Some((tensor, tensor.plan.steps.get(k)?)));
            let mut messages = Vec::new();
            for (tensor, step) in now() {
                if let Step::Messages(all) = step {
                    messages.extend(all.iter().map(|message| tensor.queued(message)));
                }
            }
            communicator.queue(&without_own(messages, lane, coordinate)?, lane)?;
            now().try_for_each(|(tensor, step)| tensor.queue(lane, step, coordinate, ranks))?;
        }
        state.end(device, axis, step, since)
    }

    /// Sets the `halt` word of this device, and reports in `cell`, if another one along the axis has set its own.
    pub(super) fn spread_by_messages(
        &self,
        axis: Axis,
        halt: Address,
        cell: Address,
        communicator: &Communicator,
        ranks: usize,
    ) -> Result<()> {
        let connection = self.connection;
        let state = &mut *connection.state();
        let axial = &mut state.lanes[axis as usize];
        if axial.lane.is_none() {
            axial.lane = Some(Lane::new(&connection.device)?);
        }
        let words = match &axial.words {
            Some(words) => words.address,
            None => axial.words.insert(connection.heap.alloc(4 * MOST)?).address,
        };
        let lane = self.lane_behind_stream(axial)?;
        communicator.queue(&[Queued::Gather { from: halt, to: words, nbytes: 4 }], lane)?;
        let mut all = [0; MOST];
        all.iter_mut().take(ranks).enumerate().for_each(|(k, word)| *word = words + 4 * k as u64);
        connection.spread(all, cell, ranks, self.peers.coordinate(axis), axis, Some(lane))?;
        let end = Event::untimed(&connection.device)?;
        lane.record(&end)?;
        connection.device.wait_for(&end)
    }

    /// The lane of an axis, which waits for what the stream has queued so far.
    fn lane_behind_stream<'a>(&self, axial: &'a mut Axial) -> Result<&'a Lane> {
        let Axial { lane, ready, .. } = axial;
        let lane = lane.as_ref().ok_or_else(|| Error::system("cuda", "this is a bug: an axis has no lane"))?;
        let ready = match ready {
            Some(ready) => ready,
            None => ready.insert(Event::untimed(&self.connection.device)?),
        };
        ready.again()?;
        lane.wait_for(ready)?;
        Ok(lane)
    }

    /// Scratch memory of the lane of an axis, of at least so many bytes. Collectives of a lane run one after the other.
    pub(super) fn scratch(&self, axial: &mut Axial, bytes: usize) -> Result<Address> {
        match &axial.scratch {
            Some(scratch) if scratch.nbytes() >= bytes => Ok(scratch.address),
            _ if bytes == 0 => Ok(0),
            _ => {
                axial.lane.iter().try_for_each(Lane::synchronize)?;
                axial.scratch = None;
                Ok(axial.scratch.insert(self.connection.heap.alloc(bytes)?).address)
            }
        }
    }
}

/// Queues the messages of a device to itself as copies. Returns the others.
fn without_own(messages: Vec<Queued>, lane: &Lane, coordinate: usize) -> Result<Vec<Queued>> {
    let (mut from, mut to, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for message in messages {
        match message {
            Queued::Send { from: at, nbytes, peer } if peer == coordinate => from.push((at, nbytes)),
            Queued::Receive { to: at, peer, .. } if peer == coordinate => to.push(at),
            other => others.push(other),
        }
    }
    // Both are in the order of the tensors.
    from.iter().zip(to).try_for_each(|((from, nbytes), to)| lane.copy(*from, to, *nbytes))?;
    Ok(others)
}
