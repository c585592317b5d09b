//! Sends memory from one device of the process to another, of the same GPU or another one, while both compute.
//!
//! A message passes through a [`Slot`]. The stream of the sender copies the value to staging memory of its own; a lane copies that to
//! landing memory on the GPU of the receiver and records `arrived`; the stream of the receiver waits for it, copies the value out and
//! records `taken`. Before the lane overwrites the landing memory it waits for `taken`. No host waits for a device, and a stream or lane
//! waits only for events that have been recorded.
//!
//! The sender owns the memory of both sides, and uses a slot again once the host of the receiver has recorded `taken`. It has as many
//! slots as messages that its host has sent and the other one has not taken, and a few more, so that the lane seldom waits for a receiver
//! whose host is ahead of its GPU. Each use of a slot has a number. A message whose run has failed may never be taken:
//! its slot is used again, and a receiver that still takes the old message does not free the new one.

use super::{Address, Allocation, Device, Endpoint, Event, Heap, Lane};
use perilune_core::error::{Error, Result};
use perilune_plan::MessageSlots;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// How many slots there are of which size.
pub const SLOTS: MessageSlots =
    MessageSlots { most_room: 2, least_room: 64 << 10, spare: 4, spare_of_large: 2, large: 32 << 20 };

/// Landing memory for one message at a time.
pub struct Slot {
    receiver: Arc<Device>,
    room: usize,
    /// Recorded in the sender's lane behind the copy to the landing memory.
    arrived: Event,
    /// Recorded in the receiver's stream behind the copy out of it. The receiver creates it, since it is of its context.
    taken: OnceLock<Event>,
    /// The last use that the receiver has taken.
    last_taken: AtomicU64,
    landing: Allocation,
}

impl Slot {
    /// Queues the copy of the message of use `number` to memory of the receiver, which calls it.
    pub fn take(&self, number: u64, to: Address, nbytes: usize) -> Result<()> {
        if nbytes > self.room {
            return Err(Error::system("cuda", format!("this is a bug: {nbytes} bytes in a slot of {}", self.room)));
        }
        let taken = match self.taken.get() {
            Some(event) => event,
            None => {
                let event = Event::untimed(&self.receiver)?;
                self.taken.get_or_init(|| event)
            }
        };
        self.receiver.wait_for(&self.arrived)?;
        self.receiver.copy(self.landing.address, to, nbytes)?;
        taken.again()?;
        // Publishes the record: the sender waits for the event only when it has seen the number.
        self.last_taken.store(number, Ordering::Release);
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.receiver.landing_bytes.fetch_sub(self.room as u64, Ordering::Relaxed);
    }
}

/// A slot as its sender uses it.
struct Sending {
    slot: Arc<Slot>,
    /// Under which the receiver finds it.
    id: u64,
    staging: Allocation,
    /// The number of its last use.
    uses: u64,
    /// Whether that use is of this run, so that the receiver will take it.
    is_awaited: bool,
    /// The messages of the outbox up to that use.
    sent: u64,
}

impl Sending {
    fn is_free(&self) -> bool {
        !self.is_awaited || self.slot.last_taken.load(Ordering::Acquire) == self.uses
    }

    /// Whether the receiver's GPU has emptied it too.
    fn is_empty(&self) -> bool {
        self.is_free() && self.slot.taken.get().is_none_or(Event::is_over)
    }
}

/// What a device keeps to send messages to one other.
pub struct Outbox {
    device: Arc<Device>,
    receiver: Arc<Device>,
    /// Recorded in the device's stream behind the copy to staging memory.
    ready: Event,
    lane: Lane,
    slots: Vec<Sending>,
    /// Messages so far.
    sent: u64,
    /// Landing memory, of the receiver's GPU.
    heap: Arc<Heap>,
}

impl Outbox {
    /// `receiver`: the number of its endpoint.
    pub fn new(endpoint: &Endpoint, receiver: u64) -> Result<Outbox> {
        // Landing memory is accessible to the GPUs that may access the receiver's other memory.
        endpoint.open(receiver)?;
        let (device, receiver) = (endpoint.device().clone(), endpoint.find(receiver)?);
        let heap = Heap::new(&receiver)?;
        let (ready, lane) = (Event::untimed(&device)?, Lane::new(&device)?);
        Ok(Outbox { device, receiver, ready, lane, slots: Vec::new(), sent: 0, heap })
    }

    /// Queues a message behind what the device's stream has queued. Returns its slot and the number of the use, for [`Slot::take`].
    /// `own`: the device's own memory.
    pub fn send(&mut self, endpoint: &Endpoint, own: &Arc<Heap>, from: Address, nbytes: usize) -> Result<[u64; 2]> {
        let k = match self.free_slot(nbytes) {
            Some(k) => k,
            None => self.new_slot(endpoint, own, SLOTS.new_room(nbytes))?,
        };
        self.sent += 1;
        let sending = &mut self.slots[k];
        sending.uses += 1;
        (sending.is_awaited, sending.sent) = (true, self.sent);
        let (slot, staging) = (&sending.slot, sending.staging.address);
        // The lane may still read what the use before has staged.
        self.device.wait_for(&slot.arrived)?;
        self.device.copy(from, staging, nbytes)?;
        self.ready.again()?;
        let lane = &self.lane;
        lane.wait_for(&self.ready)?;
        if let Some(taken) = slot.taken.get() {
            lane.wait_for(taken)?;
        }
        lane.copy(staging, slot.landing.address, nbytes)?;
        lane.record(&slot.arrived)?;
        Ok([sending.id, sending.uses])
    }

    /// A slot for a message; none if another one is to be made.
    fn free_slot(&self, nbytes: usize) -> Option<usize> {
        let rooms = SLOTS.rooms(nbytes);
        let fitting = || (0..self.slots.len()).filter(|k| rooms.contains(&self.slots[*k].slot.room));
        let empty = fitting().filter(|k| self.slots[*k].is_empty()).min_by_key(|k| self.slots[*k].slot.room);
        let oldest = || fitting().filter(|k| self.slots[*k].is_free()).min_by_key(|k| self.slots[*k].sent);
        empty.or_else(|| if fitting().count() < SLOTS.spare(nbytes) { None } else { oldest() })
    }

    /// Makes a slot of `room` bytes.
    fn new_slot(&mut self, endpoint: &Endpoint, own: &Arc<Heap>, room: usize) -> Result<usize> {
        let staging = own.alloc(room)?;
        // Mapping memory of the receiver makes its context current.
        let landing = self.heap.alloc(room);
        self.device.bind()?;
        let (landing, arrived) = (landing?, Event::untimed(&self.device)?);
        self.receiver.landing_bytes.fetch_add(room as u64, Ordering::Relaxed);
        let slot = Arc::new(Slot {
            receiver: self.receiver.clone(),
            room,
            arrived,
            taken: OnceLock::new(),
            last_taken: AtomicU64::new(0),
            landing,
        });
        let id = endpoint.publish(&slot);
        self.slots.push(Sending { slot, id, staging, uses: 0, is_awaited: false, sent: 0 });
        Ok(self.slots.len() - 1)
    }

    /// Forgets the messages of the run before. Those that have not been taken are of a run that has failed.
    pub fn begin(&mut self) {
        self.slots.iter_mut().for_each(|sending| sending.is_awaited = false);
    }

    /// Waits for what the lane has queued.
    pub fn settle(&self) -> Result<()> {
        self.lane.synchronize()
    }

    /// Frees the memory of the outbox, whose receiver takes no more messages.
    pub fn close(self, endpoint: &Endpoint) -> Result<()> {
        let device = self.device.clone();
        self.slots.iter().for_each(|sending| endpoint.withdraw(sending.id));
        drop(self);
        // Unmapping memory of the receiver has made its context current.
        device.bind()
    }
}
