//! Sends values to pipeline stages of other processes by NCCL, and receives theirs.
//!
//! Two devices have a channel for each direction that they use: a communicator of the two, with a stream. NCCL matches messages by their
//! order alone, which is that of the sender. The mail of a message (`transfer.rs`) names the one before it on the channel, so a receiver that
//! needs another one first posts those before it. Both ends copy a message through memory of their own: the sender's stream goes on at once,
//! and the message is on its way while both GPUs compute.

use super::mesh::Group;
use crate::driver::{Address, Allocation, Device, Event, Heap, Lane};
use crate::nccl::{Communicator, Queued};
use perilune_core::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most times by which memory may be larger than its message.
const MOST_ROOM: usize = 2;
/// The least bytes of it.
const LEAST_ROOM: usize = 64 << 10;

/// The bytes of the message that connects both ends.
const FIRST: usize = 8;

/// The number of no message.
pub const NONE: u64 = u64::MAX;

/// What a receiver is told of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    pub nbytes: u64,
    /// The message before it on the channel in this run, or [`NONE`].
    pub before: u64,
}

/// Memory for one message at a time.
struct Slot {
    memory: Allocation,
    /// Behind the last use of the memory: in the lane of a sender, in the stream of a receiver.
    used: Event,
    /// Behind the arrival of a message, in the lane.
    arrived: Event,
}

/// One end of a channel.
pub struct Channel {
    /// The number of its communicator.
    pub number: u64,
    communicator: Arc<Communicator>,
    device: Arc<Device>,
    heap: Arc<Heap>,
    lane: Lane,
    /// Recorded in the stream behind the copy to a slot.
    ready: Event,
    slots: Vec<Slot>,
    /// Of this run: the last message that was sent, and the slot of each one that was posted and not taken.
    last: u64,
    posted: BTreeMap<u64, Option<usize>>,
}

impl Channel {
    /// The coordinates of sender and receiver, as a group of devices.
    pub fn group(from: usize, to: usize) -> Group {
        Group::Channel(from, to)
    }

    /// Opens an end; the device at the other one does so too. The first message of NCCL connects both, for which their hosts wait: it is
    /// exchanged here, so that later a sender does not wait for a receiver that waits for it.
    pub fn open(
        device: &Arc<Device>,
        heap: &Arc<Heap>,
        number: u64,
        communicator: Arc<Communicator>,
        is_sender: bool,
    ) -> Result<Channel> {
        let mut out = Channel {
            number,
            communicator,
            device: device.clone(),
            heap: heap.clone(),
            lane: Lane::new(device)?,
            ready: Event::untimed(device)?,
            slots: Vec::new(),
            last: NONE,
            posted: BTreeMap::new(),
        };
        let k = out.slot(FIRST)?;
        let (at, nbytes) = (out.slots[k].memory.address, FIRST);
        let first = match is_sender {
            true => Queued::Send { from: at, nbytes, peer: 1 },
            false => Queued::Receive { to: at, nbytes, peer: 0 },
        };
        out.communicator.queue(&[first], &out.lane)?;
        out.lane.synchronize()?;
        Ok(out)
    }

    /// Begins a run: all messages of the one before have been taken, or it has failed.
    pub fn begin(&mut self) {
        self.last = NONE;
        self.posted.clear();
    }

    /// A slot for a message whose last use is over, or a new one.
    fn slot(&mut self, nbytes: usize) -> Result<usize> {
        let rooms = nbytes..=(nbytes * MOST_ROOM).max(LEAST_ROOM);
        let busy: Vec<usize> = self.posted.values().flatten().copied().collect();
        let is_free = |k: &usize| {
            let slot = &self.slots[*k];
            rooms.contains(&slot.memory.nbytes()) && !busy.contains(k) && slot.used.is_over()
        };
        if let Some(k) = (0..self.slots.len()).find(is_free) {
            return Ok(k);
        }
        let (used, arrived) = (Event::untimed(&self.device)?, Event::untimed(&self.device)?);
        let memory = self.heap.alloc(nbytes.max(LEAST_ROOM))?;
        self.slots.push(Slot { memory, used, arrived });
        Ok(self.slots.len() - 1)
    }

    /// Queues a message behind what the stream has queued.
    pub fn send(&mut self, number: u64, from: Address, nbytes: usize) -> Result<Notice> {
        let k = self.slot(nbytes)?;
        let slot = &self.slots[k];
        self.device.copy(from, slot.memory.address, nbytes)?;
        self.ready.again()?;
        self.lane.wait_for(&self.ready)?;
        self.communicator.queue(&[Queued::Send { from: slot.memory.address, nbytes, peer: 1 }], &self.lane)?;
        self.lane.record(&slot.used)?;
        Ok(Notice { nbytes: nbytes as u64, before: std::mem::replace(&mut self.last, number) })
    }

    /// Copies a message to memory of the device in its stream, behind its arrival. `notice` waits for the mail of a message.
    pub fn receive(
        &mut self,
        number: u64,
        to: Address,
        nbytes: usize,
        notice: &dyn Fn(u64) -> Result<Notice>,
    ) -> Result<()> {
        // The messages that have to be posted, the last one first.
        let mut missing = Vec::new();
        let mut next = number;
        while next != NONE && !self.posted.contains_key(&next) {
            let found = notice(next)?;
            missing.push((next, found.nbytes as usize));
            next = found.before;
        }
        for (number, nbytes) in missing.into_iter().rev() {
            let k = self.slot(nbytes)?;
            let slot = &self.slots[k];
            self.lane.wait_for(&slot.used)?;
            self.communicator.queue(&[Queued::Receive { to: slot.memory.address, nbytes, peer: 0 }], &self.lane)?;
            self.lane.record(&slot.arrived)?;
            self.posted.insert(number, Some(k));
        }
        let bug = |what: &str| Error::system("cuda", format!("this is a bug: a message {what}"));
        let k = self.posted.insert(number, None).flatten().ok_or_else(|| bug("was taken twice"))?;
        let slot = &self.slots[k];
        if slot.memory.nbytes() < nbytes {
            return Err(bug("has another size"));
        }
        self.device.wait_for(&slot.arrived)?;
        self.device.copy(slot.memory.address, to, nbytes)?;
        slot.used.again()
    }

    /// Waits for what the lane has queued.
    pub fn settle(&self) -> Result<()> {
        self.lane.synchronize()
    }
}
