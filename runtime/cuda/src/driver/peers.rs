//! Connects the devices of a process: a device finds another by its number, waits for its events and reads its memory.
//!
//! Memory that is mapped into an address range is accessible to its own GPU only. [`PeerAccess`] records the ranges of a device and the GPUs
//! that may access them; memory that is mapped later is opened to the same GPUs.

use super::{Address, Device, Event, Lane, Slot, check, sys};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The devices of this process that take part in collectives, by number.
static LINKS: Mutex<BTreeMap<u64, Arc<Link>>> = Mutex::new(BTreeMap::new());

/// The number of the next point.
static POINTS: AtomicU64 = AtomicU64::new(0);

/// What other devices may use of a device.
struct Link {
    device: Arc<Device>,
    /// By axis.
    events: Vec<Events>,
    /// Where this device's messages are, by a number of their own (`mailbox.rs`).
    slots: Mutex<BTreeMap<u64, Arc<Slot>>>,
    /// Its points, by their numbers.
    points: Mutex<BTreeMap<u64, Arc<Event>>>,
}

/// The events of a device for those along an axis. Each is recorded in turns: one may be recorded while others still begin to wait for
/// the other.
struct Events {
    stream: [Event; 2],
    lane: [Event; 2],
}

/// An event that a device has recorded for others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// The device.
    pub number: u64,
    pub axis: Axis,
    pub turn: usize,
}

/// A point in the work of a device that others wait for: an event that they find by a number. A program records it in each run, also
/// within a graph. It is recorded again only after all devices have queued their waits for the last record.
pub struct Point {
    pub number: u64,
    event: Arc<Event>,
    link: Weak<Link>,
}

impl Point {
    /// Records the point in the device's stream, or in the graph that is being captured there.
    pub fn record(&self) -> Result<()> {
        self.event.record_here()
    }

    /// Records the point in a lane of the device.
    pub fn record_in(&self, lane: &Lane) -> Result<()> {
        lane.record(&self.event)
    }

    /// Makes later work of a lane of the device wait for the last record.
    pub fn hold(&self, lane: &Lane) -> Result<()> {
        lane.wait_for(&self.event)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            lock(&link.points).remove(&self.number);
        }
    }
}

/// The end of a device's connections to others. While it exists, others find the device by its number.
pub struct Endpoint {
    pub number: u64,
    link: Arc<Link>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Endpoint {
    pub fn new(device: &Arc<Device>) -> Result<Endpoint> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
        let pair = || Ok([Event::untimed(device)?, Event::untimed(device)?]);
        let events = |_| Ok(Events { stream: pair()?, lane: pair()? });
        let events = Axis::ALL.iter().map(events).collect::<Result<_>>()?;
        let link = Arc::new(Link { device: device.clone(), events, slots: Mutex::default(), points: Mutex::default() });
        lock(&LINKS).insert(number, link.clone());
        Ok(Endpoint { number, link })
    }

    /// Records the event of the device's stream for the devices along an axis.
    pub fn record_stream(&self, axis: Axis, turn: usize) -> Result<()> {
        self.link.events[axis as usize].stream[turn].again()
    }

    /// Records the event of a lane for the devices along an axis.
    pub fn record_lane(&self, axis: Axis, turn: usize, lane: &Lane) -> Result<()> {
        lane.record(&self.link.events[axis as usize].lane[turn])
    }

    /// Makes this device's stream wait for the last record of the event in the stream of a device. A device that has been closed has no
    /// work left.
    pub fn wait_for_stream(&self, of: Recorded) -> Result<()> {
        let other = lock(&LINKS).get(&of.number).cloned();
        other.map_or(Ok(()), |other| self.link.device.wait_for(&other.events[of.axis as usize].stream[of.turn]))
    }

    /// Makes a point of this device.
    pub fn point(&self) -> Result<Point> {
        self.numbered(POINTS.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes points of this device whose numbers follow each other.
    pub fn points(&self, count: usize) -> Result<Vec<Point>> {
        let first = POINTS.fetch_add(count as u64, Ordering::Relaxed);
        (0..count as u64).map(|k| self.numbered(first + k)).collect()
    }

    fn numbered(&self, number: u64) -> Result<Point> {
        let event = Arc::new(Event::untimed(&self.link.device)?);
        lock(&self.link.points).insert(number, event.clone());
        Ok(Point { number, event, link: Arc::downgrade(&self.link) })
    }

    /// Makes a lane of this device wait for the last record of a point of a device. A device that has been closed has no work left.
    pub fn wait_for_point(&self, number: u64, point: u64, lane: &Lane) -> Result<()> {
        let other = lock(&LINKS).get(&number).cloned();
        let event = other.and_then(|other| lock(&other.points).get(&point).cloned());
        event.map_or(Ok(()), |event| lane.wait_for(&event))
    }

    /// Makes a lane of this device wait for the last record of the event in the lane of a device.
    pub fn wait_for_lane(&self, of: Recorded, lane: &Lane) -> Result<()> {
        let other = lock(&LINKS).get(&of.number).cloned();
        other.map_or(Ok(()), |other| lane.wait_for(&other.events[of.axis as usize].lane[of.turn]))
    }

    /// Whether each of these devices can access the memory of every other.
    pub fn can_access(&self, numbers: &[u64]) -> Result<bool> {
        let devices: Vec<Arc<Link>> = numbers.iter().map(|k| link(*k)).collect::<Result<_>>()?;
        let mut pairs = devices.iter().flat_map(|one| devices.iter().map(move |other| (one, other)));
        pairs.try_fold(true, |all, (one, other)| Ok(all && can_access(&one.device, &other.device)?))
    }

    /// Gives this device access to the memory of another one.
    pub fn open(&self, number: u64) -> Result<()> {
        let other = link(number)?;
        other.device.peer_access.open(&other.device, &self.link.device)
    }

    /// This device.
    pub fn device(&self) -> &Arc<Device> {
        &self.link.device
    }

    /// The device with a number.
    pub fn find(&self, number: u64) -> Result<Arc<Device>> {
        Ok(link(number)?.device.clone())
    }

    /// Lets other devices find a slot of this one by a number, which is returned.
    pub fn publish(&self, slot: &Arc<Slot>) -> u64 {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let id = COUNT.fetch_add(1, Ordering::Relaxed);
        lock(&self.link.slots).insert(id, slot.clone());
        id
    }

    /// Removes a slot of this device.
    pub fn withdraw(&self, id: u64) {
        let slot = lock(&self.link.slots).remove(&id);
        // Behind the lock: freeing it takes calls of the driver.
        drop(slot);
    }

    /// A slot of another device.
    pub fn slot(&self, number: u64, id: u64) -> Result<Arc<Slot>> {
        let slot = lock(&link(number)?.slots).get(&id).cloned();
        slot.ok_or_else(|| Error::system("cuda", format!("this is a bug: slot {id} of device {number} does not exist")))
    }
}

/// What other devices may use of the device with a number.
fn link(number: u64) -> Result<Arc<Link>> {
    let found = lock(&LINKS).get(&number).cloned();
    found.ok_or_else(|| Error::system("cuda", "a device of the mesh has been closed"))
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.link.device.bind().is_ok() {
            // Those that do not find this device any more must not have to wait for it.
            let _ = self.link.device.synchronize();
        }
        lock(&LINKS).remove(&self.number);
        let slots = std::mem::take(&mut *lock(&self.link.slots));
        drop(slots);
        // Freeing memory of other GPUs has made their contexts current.
        let _ = self.link.device.bind();
    }
}

/// The mapped memory of a device, and which GPUs may access it.
#[derive(Default)]
pub struct PeerAccess(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    parts: Vec<(Address, usize)>,
    /// GPUs other than the device's own.
    peers: Vec<sys::CUdevice>,
}

impl PeerAccess {
    /// Opens newly mapped memory to the device and its peers.
    pub fn add(&self, device: &Device, at: Address, nbytes: usize) -> Result<()> {
        let mut own = lock(&self.0);
        let gpus: Vec<sys::CUdevice> = [device.device].iter().chain(&own.peers).copied().collect();
        allow(at, nbytes, &gpus)?;
        own.parts.push((at, nbytes));
        Ok(())
    }

    /// Forgets the memory of a range of addresses, which will be unmapped.
    pub fn remove(&self, base: Address, nbytes: usize) {
        lock(&self.0).parts.retain(|(at, _)| !(base..base + nbytes as u64).contains(at));
    }

    /// Opens all memory of `device`, now and later, to the GPU of `peer`.
    fn open(&self, device: &Device, peer: &Device) -> Result<()> {
        let mut own = lock(&self.0);
        if peer.device == device.device || own.peers.contains(&peer.device) {
            return Ok(());
        }
        if !can_access(peer, device)? {
            let message = format!("cuda:{} cannot access the memory of cuda:{}", peer.ordinal, device.ordinal);
            return Err(Error::system("cuda", message)
                .hint("pipeline stages, and NCCL within a process, need peer access (NVLink or PCIe): see `nvidia-smi topo -p2p r`"));
        }
        for (at, nbytes) in &own.parts {
            allow(*at, *nbytes, &[peer.device])?;
        }
        own.peers.push(peer.device);
        Ok(())
    }
}

/// Whether the GPU of a device can access the memory of another.
fn can_access(device: &Device, other: &Device) -> Result<bool> {
    let mut can = 0;
    if device.device == other.device {
        return Ok(true);
    }
    // SAFETY: the out-pointer is to a local.
    let status = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device.device, other.device) };
    check(status, "asking whether a GPU can access another")?;
    Ok(can != 0)
}

/// Allows GPUs to read and write mapped memory.
fn allow(at: Address, nbytes: usize, gpus: &[sys::CUdevice]) -> Result<()> {
    let access = |gpu: &sys::CUdevice| {
        // SAFETY: a plain C structure for which zero means "default".
        let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = *gpu;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access
    };
    let list: Vec<sys::CUmemAccessDesc> = gpus.iter().map(access).collect();
    // SAFETY: the range is mapped; the list has the length that is passed.
    let status = unsafe { sys::cuMemSetAccess(at, nbytes, list.as_ptr(), list.len()) };
    check(status, "opening memory on the GPU")
}
