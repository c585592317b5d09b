//! Sends values to other pipeline stages of the process, and receives theirs.
//!
//! Devices along `pp` run programs of their own, which agree in what they send. A message is in memory of the receiver's GPU, where a lane
//! of the sender puts it (`driver/mailbox.rs`); the hosts exchange its place by mail (`Peers::send_to`). Sending waits for nothing. Receiving
//! waits on the host for the mail, and on the device for the message.
//!
//! Where a run begins, the devices along `pp` exchange their numbers. All messages of a run have been taken when it ends on any of its
//! devices without an error, since they agree behind their last transfer. What a failed run has left is forgotten where the next one begins.

use super::mesh::Mesh;
use crate::driver::{Address, Endpoint, Heap, Outbox};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

/// What a device keeps for transfers.
#[derive(Default)]
pub(super) struct Transfers {
    /// The numbers of the devices along `pp`, by coordinate, in this run.
    numbers: Vec<u64>,
    /// By the number of the receiver.
    outboxes: BTreeMap<u64, Outbox>,
}

/// Writes words as a message.
fn bytes<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Reads the words of a message; `None` if it is of another length.
fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let words: Vec<u64> = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect();
    words.try_into().ok().filter(|_| bytes.len() == N * 8)
}

fn bug(what: &str) -> Error {
    Error::system("cuda", format!("this is a bug: {what}"))
}

impl Mesh<'_> {
    fn transfers(&self) -> MutexGuard<'_, Transfers> {
        self.connection.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a run of pipeline stages: finds the devices along `pp`.
    pub fn begin_stages(&self) -> Result<()> {
        let endpoint = &self.connection.endpoint;
        let own = [u64::from(std::process::id()), endpoint.number];
        let all = self.peers.exchange(Axis::Pp, &bytes(own))?;
        let all: Option<Vec<[u64; 2]>> = all.iter().map(|sent| words(sent)).collect();
        let all = all.ok_or_else(|| bug("a device along pp sends something else where stages begin"))?;
        if all.get(self.peers.coordinate(Axis::Pp)) != Some(&own) {
            return Err(bug("a device along pp is not itself"));
        }
        if all.iter().any(|[process, _]| *process != own[0]) {
            let message = format!("pp={}: the GPUs of pipeline stages are in several processes", all.len());
            return Err(Error::system("cuda", message).hint("let one process drive all GPUs along pp"));
        }
        let transfers = &mut *self.transfers();
        transfers.numbers = all.iter().map(|[_, number]| *number).collect();
        let gone = |number: &u64| !transfers.numbers.contains(number);
        for number in transfers.outboxes.keys().copied().filter(gone).collect::<Vec<_>>() {
            if let Some(outbox) = transfers.outboxes.remove(&number) {
                outbox.close(endpoint)?;
            }
        }
        transfers.outboxes.values_mut().for_each(Outbox::begin);
        Ok(())
    }

    /// Sends memory to the device at a coordinate along `pp`, behind what the stream has queued. `heap`: the device's own memory.
    pub fn send(&self, heap: &Arc<Heap>, to: usize, number: u64, from: Address, nbytes: usize) -> Result<()> {
        let endpoint: &Endpoint = &self.connection.endpoint;
        let transfers = &mut *self.transfers();
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
        let mail = self.peers.receive_from(Axis::Pp, from, number)?;
        let [sender, slot, number_of_use, sent] = words(&mail).ok_or_else(|| bug("a transfer by other means"))?;
        if self.transfers().numbers.get(from) != Some(&sender) || sent != nbytes as u64 {
            return Err(bug(&format!("{sent} bytes of device {sender} came for {nbytes} of the one at {from}")));
        }
        self.connection.endpoint.slot(sender, slot)?.take(number_of_use, to, nbytes)
    }

    /// Waits for the messages that this device has queued.
    pub fn settle_transfers(&self) -> Result<()> {
        self.transfers().outboxes.values().try_for_each(Outbox::settle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let sent = [u64::from(u32::MAX), 0, 1 << 60, 7];
        assert_eq!(words(&bytes(sent)), Some(sent));
        assert_eq!(words::<3>(&bytes(sent)), None, "longer");
        assert_eq!(words::<4>(&bytes(sent)[1..]), None, "shorter");
        assert_eq!(words::<4>(&[&bytes(sent)[..], &[0]].concat()), None, "bytes behind the words");
    }
}
