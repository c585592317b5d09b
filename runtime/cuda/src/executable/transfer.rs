//! Sends values to other pipeline stages, and receives theirs.
//!
//! Devices along `pp` run programs of their own, which agree in what they send. A message is in memory of the receiver's GPU, where a lane
//! of the sender puts it (`driver/mailbox.rs`); the hosts exchange its place by mail (`Peers::send_to`). Sending waits for nothing. Receiving
//! waits on the host for the mail, and on the device for the message. To stages of other processes a message goes by NCCL (`channel.rs`).
//!
//! Where a run begins, the devices along `pp` exchange their numbers. All messages of a run have been taken when it ends on any of its
//! devices without an error, since they agree behind their last transfer. What a failed run has left is forgotten where the next one begins.

use super::channel::{Channel, Notice};
use super::mesh::{Mesh, PROCESS};
use crate::driver::{Address, Endpoint, Heap, Outbox};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

/// What a device keeps for transfers.
#[derive(Default)]
pub(super) struct Transfers {
    /// The numbers of the devices along `pp`, by coordinate, in this run.
    numbers: Vec<u64>,
    /// By the number of the receiver.
    outboxes: BTreeMap<u64, Outbox>,
    /// With devices of other processes, by the coordinates of sender and receiver.
    channels: BTreeMap<(usize, usize), Channel>,
}

/// The number of the mail with the name of a new communicator; transfers have smaller ones.
const NAME: u64 = u64::MAX;

/// Words of a device before those of its channels, and of a channel: sender, receiver, communicator.
const HEAD: usize = 3;
const CHANNEL: usize = 3;

/// Writes words as a message.
fn bytes<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Reads the words of a message; `None` if it is of another length.
fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let words: Vec<u64> = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect();
    words.try_into().ok().filter(|_| bytes.len() == N * 8)
}

/// The number of the communicator that a device has for a channel, from its words; 0 without one.
fn number_of(device: &[u64], from: usize, to: usize) -> u64 {
    let channels = device[HEAD..].chunks_exact(CHANNEL);
    let mut known = channels.filter(|c| (c[0], c[1]) == (from as u64, to as u64)).map(|c| c[2]);
    known.next().unwrap_or(0)
}

fn bug(what: &str) -> Error {
    Error::system("cuda", format!("this is a bug: {what}"))
}

impl Mesh<'_> {
    fn transfers(&self) -> MutexGuard<'_, Transfers> {
        self.connection.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a run of pipeline stages: finds the devices along `pp`, and joins those of other processes with which this one exchanges
    /// values. `pairs`: the coordinates of sender and receiver of its transfers.
    pub fn begin_stages(&self, pairs: &BTreeSet<(usize, usize)>) -> Result<()> {
        let connection = self.connection;
        let endpoint = &connection.endpoint;
        let coordinate = self.peers.coordinate(Axis::Pp);
        let joined = pairs.iter().flat_map(|(from, to)| {
            let number = connection.communicators.number(Channel::group(*from, *to));
            [*from as u64, *to as u64, number]
        });
        let own: Vec<u64> = [*PROCESS, endpoint.number, connection.gpu].into_iter().chain(joined).collect();
        let sent = self.peers.exchange(Axis::Pp, &own.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
        let read = |bytes: &Arc<[u8]>| -> Vec<u64> {
            bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect()
        };
        let all: Vec<Vec<u64>> = sent.iter().map(read).collect();
        if all.iter().any(|words| words.len() < HEAD || !(words.len() - HEAD).is_multiple_of(CHANNEL)) {
            return Err(bug("a device along pp sends something else where stages begin"));
        }
        if all.get(coordinate) != Some(&own) {
            return Err(bug("a device along pp is not itself"));
        }
        if pairs.iter().any(|(from, to)| (*from).max(*to) >= all.len()) {
            return Err(bug("a transfer with no device"));
        }
        // In the order of all pairs: each device waits for the next one only after those before.
        for (from, to) in pairs.iter().filter(|(from, to)| all[*from][0] != all[*to][0]) {
            if all[*from][2] == all[*to][2] {
                let message = format!("devices {from} and {to} along pp are one GPU; NCCL needs one for each");
                return Err(Error::system("cuda", message).hint("run them in one process, or give each a GPU"));
            }
            self.join_channel(*from, *to, |k| number_of(&all[k], *from, *to))?;
        }
        let transfers = &mut *self.transfers();
        transfers.numbers = all.iter().map(|words| words[1]).collect();
        let gone = |number: &u64| !transfers.numbers.contains(number);
        for number in transfers.outboxes.keys().copied().filter(gone).collect::<Vec<_>>() {
            if let Some(outbox) = transfers.outboxes.remove(&number) {
                outbox.close(endpoint)?;
            }
        }
        transfers.outboxes.values_mut().for_each(Outbox::begin);
        transfers.channels.values_mut().for_each(Channel::begin);
        Ok(())
    }

    /// Opens the channel from one device to another one of another process, unless both have it. `known`: the number of the communicator
    /// that a device has for it.
    fn join_channel(&self, from: usize, to: usize, known: impl Fn(usize) -> u64) -> Result<()> {
        let connection = self.connection;
        let (communicators, group) = (&connection.communicators, Channel::group(from, to));
        let is_sender = self.peers.coordinate(Axis::Pp) == from;
        if known(from) == 0 || known(from) != known(to) {
            let share = |own: Option<&[u8]>| match own {
                Some(name) => self.peers.send_to(Axis::Pp, to, NAME, name).map(|()| Arc::from(name)),
                None => self.peers.receive_from(Axis::Pp, from, NAME),
            };
            communicators.join(&connection.device, group, usize::from(!is_sender), 2, &share)?;
        }
        let (number, communicator) = (communicators.number(group), communicators.of(group)?);
        let channels = &mut self.transfers().channels;
        if channels.get(&(from, to)).is_none_or(|channel| channel.number != number) {
            let channel = Channel::open(&connection.device, &connection.heap, number, communicator, is_sender)?;
            channels.insert((from, to), channel);
        }
        Ok(())
    }

    /// Sends memory to the device at a coordinate along `pp`, behind what the stream has queued. `heap`: the device's own memory.
    pub fn send(&self, heap: &Arc<Heap>, to: usize, number: u64, from: Address, nbytes: usize) -> Result<()> {
        let endpoint: &Endpoint = &self.connection.endpoint;
        let transfers = &mut *self.transfers();
        if let Some(channel) = transfers.channels.get_mut(&(self.peers.coordinate(Axis::Pp), to)) {
            let Notice { nbytes, before } = channel.send(number, from, nbytes)?;
            return self.peers.send_to(Axis::Pp, to, number, &bytes([nbytes, before]));
        }
        let receiver = *transfers.numbers.get(to).ok_or_else(|| bug("a message to no device"))?;
        let outbox = match transfers.outboxes.entry(receiver) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(new) => new.insert(Outbox::new(endpoint, receiver)?),
        };
        let [slot, number_of_use] = outbox.send(endpoint, heap, from, nbytes)?;
        self.peers.send_to(Axis::Pp, to, number, &bytes([endpoint.number, slot, number_of_use, nbytes as u64]))
    }

    /// Waits for a message of the device at a coordinate along `pp`, and queues its copy to memory of this device.
    pub fn receive(&self, from: usize, number: u64, to: Address, nbytes: usize) -> Result<()> {
        if let Some(channel) = self.transfers().channels.get_mut(&(from, self.peers.coordinate(Axis::Pp))) {
            let notice = |number: u64| {
                let mail = self.peers.receive_from(Axis::Pp, from, number)?;
                let [nbytes, before] = words(&mail).ok_or_else(|| bug("a transfer by other means"))?;
                Ok(Notice { nbytes, before })
            };
            return channel.receive(number, to, nbytes, &notice);
        }
        let mail = self.peers.receive_from(Axis::Pp, from, number)?;
        let [sender, slot, number_of_use, sent] = words(&mail).ok_or_else(|| bug("a transfer by other means"))?;
        if self.transfers().numbers.get(from) != Some(&sender) || sent != nbytes as u64 {
            return Err(bug(&format!("{sent} bytes of device {sender} came for {nbytes} of the one at {from}")));
        }
        self.connection.endpoint.slot(sender, slot)?.take(number_of_use, to, nbytes)
    }

    /// Waits for the messages that this device has queued.
    pub fn settle_transfers(&self) -> Result<()> {
        let transfers = self.transfers();
        transfers.outboxes.values().try_for_each(Outbox::settle)?;
        transfers.channels.values().try_for_each(Channel::settle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_names_the_communicators_of_its_channels() {
        let device = [1, 2, 3, 0, 1, 77, 1, 0, 0];
        assert_eq!((number_of(&device, 0, 1), number_of(&device, 1, 0), number_of(&device, 1, 2)), (77, 0, 0));
    }

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let sent = [u64::from(u32::MAX), 0, 1 << 60, 7];
        assert_eq!(words(&bytes(sent)), Some(sent));
        assert_eq!(words::<3>(&bytes(sent)), None, "longer");
        assert_eq!(words::<4>(&bytes(sent)[1..]), None, "shorter");
        assert_eq!(words::<4>(&[&bytes(sent)[..], &[0]].concat()), None, "bytes behind the words");
    }
}
