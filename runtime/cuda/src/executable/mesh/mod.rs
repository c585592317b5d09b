//! Runs collectives with the other devices of a mesh, and lets them agree before States are written.
//!
//! Each device is driven by its own thread. A collective runs on the *lane* of its axis, a stream beside that of other kernels. How the
//! devices along an axis exchange tensors is their [`Transport`], which they find out when a run first needs it: GPUs of one process read
//! each other's memory, and host threads exchange addresses and events (`memory.rs`); GPUs of several processes send each other messages
//! by NCCL (`messages.rs`).
//!
//! Failures. An error of the host, and a bad index that a host has seen, end the run on all devices before the first State write, where
//! all meet along every axis ([`Mesh::agree`]). There they also combine their `halt` words on the devices: a bad index that no host has
//! seen yet stops the State writes of all devices, and is reported on all. This relies on every run with a mesh to pass its peers. An
//! error after the first State write leaves States partly written, as on one device. A bad index that a download raises on one device is
//! still pending on the others: a mesh backend then downloads from each of them too, before the next run.

mod copies;
mod host;
mod meeting;
mod memory;
mod messages;
mod ring;

pub(crate) use messages::{Communicators, Group};

use super::errors::peer_fault;
use super::transfer::Transfers;
use crate::backend::DeviceContext;
use crate::driver::{Address, Allocation, Device, Endpoint, Entry, Event, Heap, Lane, Point};
use crate::library::collective::{self, Collective, MOST};
use crate::nccl::Communicator;
use copies::Combiners;
use host::HostCopies;
use memory::Started;
use perilune_core::env_flags::{self, Setting};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_plan::Peers;
use perilune_plan::route::Route;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::c_void;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// What a device keeps for its mesh from the first run with peers on.
pub(crate) struct Connection {
    pub(super) device: Arc<Device>,
    /// Its lanes are closed before the endpoint.
    state: Mutex<State>,
    /// What it sends to other pipeline stages (`transfer.rs`); closed before the endpoint too.
    pub(super) transfers: Mutex<Transfers>,
    pub(super) endpoint: Endpoint,
    pub(super) communicators: Arc<Communicators>,
    pub(super) heap: Arc<Heap>,
    /// Identifies the GPU among those of all hosts.
    pub(super) gpu: u64,
    /// Spreads a bad index.
    agree: Entry,
    /// Whether host memory is as fast as routes through it assume; measured when a program first has one.
    host_is_fast: OnceLock<bool>,
}

#[derive(Default)]
struct State {
    lanes: [Axial; Axis::ALL.len()],
    /// The numbers of the devices whose memory this one may access.
    open: BTreeSet<u64>,
    /// Whether devices with these numbers can access each other's memory.
    accessible: HashMap<Vec<u64>, bool>,
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
    /// What combines pieces beside the lane.
    combiners: Option<Combiners>,
    /// Its pieces in host memory.
    host: Option<HostCopies>,
    /// Collectives on the lane that have not ended, in order; of devices of one process.
    started: VecDeque<Started>,
    /// That of this run, once it is known.
    transport: Option<Transport>,
    /// Device memory for what messages take, and for pieces that copy engines fetch.
    scratch: Option<Allocation>,
    /// For messages: the words of an agreement, and an event for the lane.
    words: Option<Allocation>,
    ready: Option<Event>,
}

/// How the devices along an axis exchange tensors.
#[derive(Clone)]
enum Transport {
    /// There is no other device.
    Alone,
    /// They read each other's memory, or copies in host memory.
    Memory {
        ranks: usize,
        on_host: bool,
    },
    Messages(Arc<Communicator>, usize),
}

/// What a device may want within a process.
const MEMORY: u64 = 0;
const HOST_MEMORY: u64 = 1;
const MESSAGES: u64 = 2;

/// What a device tells the others along an axis when a run first needs their transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Hello {
    /// Identifies the process, and the GPU.
    process: u64,
    gpu: u64,
    /// The number of its endpoint.
    number: u64,
    /// Identifies the communicator that it has; 0 without one.
    communicator: u64,
    /// What it wants within a process: [`MEMORY`], [`HOST_MEMORY`] or [`MESSAGES`].
    wants: u64,
}

impl Hello {
    fn bytes(self) -> Vec<u8> {
        let words = [self.process, self.gpu, self.number, self.communicator, self.wants];
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> Option<Hello> {
        let words: Vec<u64> = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect();
        match (&words[..], bytes.len()) {
            (&[process, gpu, number, communicator, wants], 40) => {
                Some(Hello { process, gpu, number, communicator, wants })
            }
            _ => None,
        }
    }
}

/// A number of this process that others of a job do not have; process ids are equal on different hosts.
pub(super) static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());

/// A number for a GPU of this host.
fn identity(device: &Device) -> u64 {
    let host = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hash = std::hash::DefaultHasher::new();
    (host, device.pci_address(), device.ordinal.to_string()).hash(&mut hash);
    hash.finish()
}

impl Connection {
    /// `agree`: the kernel of [`collective::agree`].
    fn new(context: &DeviceContext, agree: Entry) -> Result<Connection> {
        Ok(Connection {
            endpoint: Endpoint::new(&context.device)?,
            gpu: identity(&context.device),
            device: context.device.clone(),
            heap: context.heap.clone(),
            communicators: context.communicators.clone(),
            state: Mutex::default(),
            transfers: Mutex::default(),
            agree,
            host_is_fast: OnceLock::new(),
        })
    }

    /// Queues the kernel that reads the `halt` words of the devices along an axis and reports a bad index of another one in `cell`.
    fn spread(
        &self,
        mut words: [u64; MOST],
        mut cell: Address,
        ranks: usize,
        coordinate: usize,
        axis: Axis,
        lane: Option<&Lane>,
    ) -> Result<()> {
        let mut numbers = [ranks as i64, coordinate as i64, axis as i64];
        let mut args: Vec<*mut c_void> = vec![words.as_mut_ptr().cast(), (&raw mut cell).cast()];
        args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
        let block = [MOST as u32, 1, 1];
        match lane {
            Some(lane) => self.agree.launch_on(lane, [1; 3], block, &mut args),
            None => self.agree.launch(&self.device, [1; 3], block, 0, &mut args),
        }
    }

    /// Whether a program whose route is host memory takes it on this device.
    fn host_is_fast(&self) -> Result<bool> {
        if let Some(known) = self.host_is_fast.get() {
            return Ok(*known);
        }
        let known = host::bytes_a_second(&self.device, &self.heap)? >= host::LEAST_SPEED;
        Ok(*self.host_is_fast.get_or_init(|| known))
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
    /// The route of the program.
    pub route: Route,
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

/// One tensor of a collective to start: its entries are those of its functions, its places its piece and its result.
pub(super) type ToStart<'a> = (&'a Collective, &'a [Entry], [Address; 2]);

impl Mesh<'_> {
    /// Begins a run: forgets what one before has left, which has failed. Returns an error if a device of another process has failed
    /// since then.
    pub fn begin(&self) -> Result<()> {
        let state = &mut *self.connection.state();
        for axial in &mut state.lanes {
            axial.started.clear();
            axial.host.iter_mut().for_each(HostCopies::begin);
            axial.transport = None;
        }
        state.ended.clear();
        self.connection.communicators.raise()
    }

    /// Ends this device's part of collectives that others may not join, because its run has failed.
    pub fn fail(&self) {
        self.connection.communicators.end();
    }

    /// The transport along an axis. The devices along it find it out together.
    fn transport(&self, state: &mut State, axis: Axis) -> Result<Transport> {
        if let Some(known) = &state.lanes[axis as usize].transport {
            return Ok(known.clone());
        }
        let Connection { endpoint, communicators, device, gpu, .. } = self.connection;
        let own = Hello {
            process: *PROCESS,
            gpu: *gpu,
            number: endpoint.number,
            communicator: communicators.number(Group::Along(axis)),
            wants: match env_flags::COLLECTIVES.setting() {
                Some(Setting::Word("nccl")) => MESSAGES,
                Some(Setting::Word("host")) => HOST_MEMORY,
                None if self.route == Route::HostMemory && self.connection.host_is_fast()? => HOST_MEMORY,
                _ => MEMORY,
            },
        };
        let sent = self.peers.exchange(axis, &own.bytes())?;
        let all: Option<Vec<Hello>> = sent.iter().map(|bytes| Hello::read(bytes)).collect();
        let differ = || {
            let message = format!("this is a bug: a device along {} is of another version or kind", axis.name());
            Error::system("cuda", message)
        };
        let all = all.ok_or_else(differ)?;
        let coordinate = self.peers.coordinate(axis);
        if all.get(coordinate).is_none_or(|hello| *hello != own) {
            let message = format!("this is a bug: the device at {coordinate} along {} is not itself", axis.name());
            return Err(Error::system("cuda", message));
        }
        let is_one_process = all.iter().all(|hello| hello.process == own.process);
        let transport = if all.len() == 1 {
            Transport::Alone
        } else if is_one_process && all.iter().all(|hello| hello.wants != MESSAGES) {
            let numbers: Vec<u64> = all.iter().map(|hello| hello.number).collect();
            let on_host = all.iter().all(|hello| hello.wants == HOST_MEMORY)
                || match state.accessible.get(&numbers) {
                    Some(known) => !known,
                    None => {
                        let known = endpoint.can_access(&numbers)?;
                        state.accessible.insert(numbers, known);
                        !known
                    }
                };
            Transport::Memory { ranks: all.len(), on_host }
        } else {
            separate_gpus(axis, &all)?;
            // Within a process NCCL uses the memory of operands itself.
            for other in all.iter().filter(|o| o.process == own.process && o.number != own.number) {
                self.open(state, other.number)?;
            }
            let is_joined = own.communicator != 0 && all.iter().all(|hello| hello.communicator == own.communicator);
            if !is_joined {
                let share = |own: Option<&[u8]>| {
                    let sent = self.peers.exchange(axis, own.unwrap_or_default())?;
                    sent.first().cloned().ok_or_else(|| Error::system("cuda", "this is a bug: no device along an axis"))
                };
                communicators.join(device, Group::Along(axis), coordinate, all.len(), &share)?;
            }
            Transport::Messages(communicators.of(Group::Along(axis))?, all.len())
        };
        state.lanes[axis as usize].transport = Some(transport.clone());
        Ok(transport)
    }

    /// Gives this device access to the memory of another one of the process.
    fn open(&self, state: &mut State, number: u64) -> Result<()> {
        if number != self.connection.endpoint.number && !state.open.contains(&number) {
            self.connection.endpoint.open(number)?;
            state.open.insert(number);
        }
        Ok(())
    }

    /// Starts the collective of a step on the lane of its axis, behind the point `ready` of this device and those of the others.
    /// `is_beside`: other kernels run meanwhile.
    pub fn start(&self, step: usize, calls: &[ToStart], ready: &Point, is_beside: bool) -> Result<()> {
        let Some((first, ..)) = calls.first() else { return Ok(()) };
        let (axis, what) = (first.axis, first.name);
        let state = &mut *self.connection.state();
        let transport = self.transport(state, axis)?;
        if state.lanes[axis as usize].lane.is_none() {
            state.lanes[axis as usize].lane = Some(Lane::new(&self.connection.device)?);
        }
        let calls: Vec<&ToStart> = calls.iter().filter(|(c, ..)| !c.is_empty()).collect();
        match transport {
            Transport::Alone => self.start_in_memory(state, axis, what, step, &calls, ready, is_beside, (1, false)),
            Transport::Memory { ranks, on_host } => {
                self.start_in_memory(state, axis, what, step, &calls, ready, is_beside, (ranks, on_host))
            }
            Transport::Messages(communicator, ranks) => {
                self.start_messages(state, axis, step, &calls, ready, &communicator, ranks)
            }
        }
    }

    /// Waits for what the lanes of this device have queued.
    pub fn settle(&self) -> Result<()> {
        let state = self.connection.state();
        state.lanes.iter().filter_map(|axial| axial.lane.as_ref()).try_for_each(Lane::synchronize)?;
        state.lanes.iter().filter_map(|axial| axial.host.as_ref()).try_for_each(HostCopies::settle)?;
        self.settle_transfers()
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
            let group = self.exchange(state, axis, "the end of a collective", meeting::Meeting::default())?;
            self.proceed(state, axis, &group)?;
        }
    }

    /// Lets all devices agree that none has failed: an error on all of them if the host of one has seen a bad index (`failed`). With a
    /// `cell`, in which the kernel of [`collective::agree`] reports, a bad index on one device also sets the `halt` word of all.
    pub fn agree(&self, mut failed: bool, halt: Address, cell: Option<Address>) -> Result<()> {
        for axis in Axis::ALL {
            let transport = self.transport(&mut self.connection.state(), axis)?;
            match transport {
                Transport::Alone => {}
                Transport::Memory { on_host, .. } => {
                    failed |= self.agree_in_memory(axis, failed, halt, cell, on_host)?
                }
                Transport::Messages(communicator, ranks) => {
                    let sent = self.peers.exchange(axis, &[u8::from(failed)])?;
                    failed |= sent.iter().any(|other| other[..] != [0]);
                    if let Some(cell) = cell {
                        self.spread_by_messages(axis, halt, cell, &communicator, ranks)?;
                    }
                }
            }
        }
        if failed { Err(peer_fault(None)) } else { Ok(()) }
    }
}

/// Checks that no two devices share a GPU.
fn separate_gpus(axis: Axis, all: &[Hello]) -> Result<()> {
    let shares = |k: &usize| all[..*k].iter().position(|other| other.gpu == all[*k].gpu).map(|other| (other, *k));
    match (1..all.len()).find_map(|k| shares(&k)) {
        None => Ok(()),
        Some((one, other)) => {
            let message =
                format!("devices {one} and {other} along {} are one GPU; NCCL needs one for each", axis.name());
            Err(Error::system("cuda", message)
                .hint("start as many devices in all processes of a host as it has GPUs, or run them in one process"))
        }
    }
}

impl State {
    /// Records the end of the collective of a step in a lane.
    fn end(&mut self, device: &Arc<Device>, axis: Axis, step: usize, since: Option<Event>) -> Result<()> {
        let Some(lane) = &self.lanes[axis as usize].lane else { return Ok(()) };
        let end = match since {
            Some(_) => Event::timed(device)?,
            None => self.free.pop().map_or_else(|| Event::untimed(device), Ok)?,
        };
        lane.record(&end)?;
        self.ended.insert(step, (since, end));
        Ok(())
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
        let connection = Arc::new(Connection::new(self, entry)?);
        self.connection = Some(connection.clone());
        Ok(connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(k: u64) -> Hello {
        Hello { process: 1 << 60, gpu: k, number: k + 7, communicator: 0, wants: MESSAGES }
    }

    #[test]
    fn a_hello_is_read_as_it_was_sent() {
        assert_eq!(Hello::read(&hello(3).bytes()), Some(hello(3)));
        assert_eq!(Hello::read(&hello(3).bytes()[8..]), None);
        assert_eq!(Hello::read(&[]), None);
    }

    #[test]
    fn devices_of_messages_have_a_gpu_each() {
        assert!(separate_gpus(Axis::Dp, &[hello(0), hello(1), hello(2)]).is_ok());
        let error = separate_gpus(Axis::Dp, &[hello(0), hello(1), hello(0)]).unwrap_err();
        assert!(error.message.contains("devices 0 and 2 along dp are one GPU"), "{}", error.message);
    }
}
