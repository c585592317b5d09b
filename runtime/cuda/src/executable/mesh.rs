//! Runs collectives with the other devices of a mesh, and lets them agree before States are written.
//!
//! All devices of a mesh are in this process, on one GPU or several, each driven by its own thread. They *meet* along an axis: each
//! records an event in its stream, the host threads exchange addresses and events (`Peers::exchange`), and each stream waits for the
//! events of the others. A stream waits only for events that are recorded already, so streams cannot wait for each other in a circle,
//! although those of one GPU may share a hardware queue. A collective meets before each of its launches (what the launch reads is
//! complete) and after the last one (nothing reads it any more), so memory is used again in the order of the own stream, as without a
//! mesh.
//!
//! Failures. An error of the host, and a bad index that a host has seen, end the run on all devices before the first State write, where
//! all meet along every axis ([`Mesh::agree`]). There they also combine their `halt` words on the devices: a bad index that no host has
//! seen yet stops the State writes of all devices, and is reported on all. This relies on every run with a mesh to pass its peers. An
//! error after the first State write leaves States partly written, as on one device. A bad index that a download raises on one device is
//! still pending on the others: a mesh backend then downloads from each of them too, before the next run.
//!
//! `Group` is the seam for other transports: NCCL would be chosen there, once for the devices along an axis.

use super::errors::peer_fault;
use crate::backend::DeviceContext;
use crate::driver::{Address, Device, Endpoint, Entry};
use crate::library::collective::{self, Collective, MOST, Task};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_plan::Peers;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// What a device keeps for its mesh from the first run with peers on.
pub(crate) struct Connection {
    device: Arc<Device>,
    endpoint: Endpoint,
    /// Spreads a bad index.
    agree: Entry,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    /// Which event is recorded next.
    event: usize,
    /// The numbers of the devices whose memory this one may access.
    open: BTreeSet<u64>,
}

/// What a device sends when it meets others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Offer {
    process: u64,
    /// The number of the device's endpoint, and which of its events is recorded.
    number: u64,
    event: u64,
    /// Bytes of the piece.
    nbytes: u64,
    /// Where its piece is, and its result.
    input: Address,
    output: Address,
    /// Whether its host has seen a bad index.
    failed: u64,
}

impl Offer {
    const WORDS: usize = 7;

    fn bytes(&self) -> Vec<u8> {
        let words = [self.process, self.number, self.event, self.nbytes, self.input, self.output, self.failed];
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> Option<Offer> {
        let mut words = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || words.next().unwrap_or(0);
        (bytes.len() == Offer::WORDS * 8).then(|| Offer {
            process: next(),
            number: next(),
            event: next(),
            nbytes: next(),
            input: next(),
            output: next(),
            failed: next(),
        })
    }
}

impl Connection {
    /// `agree`: the kernel of [`collective::agree`].
    pub fn new(device: &Arc<Device>, agree: Entry) -> Result<Connection> {
        let endpoint = Endpoint::new(device)?;
        Ok(Connection { device: device.clone(), endpoint, agree, turns: Mutex::default() })
    }
}

/// The other devices of the mesh during one run.
pub(super) struct Mesh<'a> {
    pub connection: &'a Connection,
    pub peers: &'a dyn Peers,
}

/// The devices along an axis that have met, in the order of their coordinates.
struct Group {
    all: Vec<Offer>,
    coordinate: usize,
}

impl Group {
    /// The address of each device's piece or result, plus an offset: the argument `collective::Pieces`.
    fn pieces(&self, results: bool, offset: impl Fn(usize) -> usize) -> [u64; MOST] {
        let mut out = [0; MOST];
        for (k, (to, offer)) in out.iter_mut().zip(&self.all).enumerate() {
            *to = if results { offer.output } else { offer.input } + offset(k) as u64;
        }
        out
    }
}

impl Mesh<'_> {
    /// Meets the devices along an axis: what they have queued so far comes before what this one queues from now on.
    fn meet(
        &self,
        axis: Axis,
        what: &str,
        nbytes: usize,
        [input, output]: [Address; 2],
        failed: bool,
    ) -> Result<Group> {
        let Connection { endpoint, turns, .. } = self.connection;
        let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.event ^= 1;
        endpoint.record(turns.event)?;
        let own = Offer {
            process: u64::from(std::process::id()),
            number: endpoint.number,
            event: turns.event as u64,
            nbytes: nbytes as u64,
            input,
            output,
            failed: u64::from(failed),
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
        if all.iter().any(|o| o.nbytes != own.nbytes) {
            return Err(bug(format!("the pieces of {what} differ in size")));
        }
        if all.len() > MOST {
            let message = format!("{} devices along {}; at most {MOST}", all.len(), axis.name());
            return Err(Error::system("cuda", message));
        }
        for other in all.iter().filter(|o| o.number != own.number) {
            if !turns.open.contains(&other.number) {
                endpoint.open(other.number)?;
                turns.open.insert(other.number);
            }
            endpoint.wait_for(other.number, other.event as usize)?;
        }
        Ok(Group { all, coordinate })
    }

    /// Runs a collective whose piece and result are at `places`. `entries`: those of its functions.
    pub fn run(&self, c: &Collective, entries: &[Entry], places: [Address; 2]) -> Result<()> {
        if c.is_empty() {
            return Ok(());
        }
        let mut group = self.meet(c.axis, c.name, c.nbytes, places, false)?;
        let ranks = group.all.len();
        for phase in c.phases(group.coordinate, ranks)? {
            if !phase.grid.contains(&0) {
                let mut pieces = group.pieces(phase.reads_results, |k| phase.first + k * phase.step);
                if let Task::Span { from, .. } = phase.task {
                    pieces[0] = pieces[from];
                }
                let mut out = places[1] + phase.out as u64;
                let mut numbers = phase.numbers(group.coordinate, ranks);
                let mut args: Vec<*mut c_void> = vec![pieces.as_mut_ptr().cast(), (&raw mut out).cast()];
                args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
                let block = [collective::BLOCK as u32, 1, 1];
                entries[phase.function].launch(&self.connection.device, phase.grid, block, 0, &mut args)?;
            }
            group = self.meet(c.axis, c.name, c.nbytes, places, false)?;
        }
        Ok(())
    }

    /// Lets all devices agree that none has failed: an error on all of them if the host of one has seen a bad index (`failed`). With a
    /// `cell`, in which the kernel of [`collective::agree`] reports, a bad index on one device also sets the `halt` word of all.
    pub fn agree(&self, mut failed: bool, halt: Address, cell: Option<Address>) -> Result<()> {
        for axis in Axis::ALL {
            let group = self.meet(axis, "the agreement of a step", 4, [halt; 2], failed)?;
            failed |= group.all.iter().any(|o| o.failed != 0);
            if let (Some(mut cell), 2..) = (cell, group.all.len()) {
                let mut words = group.pieces(false, |_| 0);
                let mut numbers = [group.all.len() as i64, group.coordinate as i64, axis as i64];
                let mut args: Vec<*mut c_void> = vec![words.as_mut_ptr().cast(), (&raw mut cell).cast()];
                args.extend(numbers.iter_mut().map(|n| std::ptr::from_mut(n).cast::<c_void>()));
                self.connection.agree.launch(&self.connection.device, [1; 3], [MOST as u32, 1, 1], 0, &mut args)?;
                // The words may be cleared only after all have read them.
                self.meet(axis, "the agreement of a step", 4, [halt; 2], failed)?;
            }
        }
        if failed { Err(peer_fault(None)) } else { Ok(()) }
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
        let offer = Offer { process: 1, number: 2, event: 1, nbytes: 1 << 40, input: 3 << 50, output: 4, failed: 1 };
        assert_eq!(Offer::read(&offer.bytes()), Some(offer));
        assert_eq!(Offer::read(&offer.bytes()[8..]), None, "sent by another version, or by a CPU");
    }

    #[test]
    fn pieces_are_in_the_order_of_coordinates() {
        let offer = |k: u64| Offer { input: 1000 * k, output: 1000 * k + 500, ..Offer::default() };
        let group = Group { all: vec![offer(1), offer(2), offer(3)], coordinate: 1 };
        assert_eq!(group.pieces(false, |k| 8 + k * 16)[..4], [1008, 2024, 3040, 0]);
        assert_eq!(group.pieces(true, |_| 0)[..3], [1500, 2500, 3500]);
    }
}
