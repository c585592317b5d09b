//! Passes tensors to other devices of the process through a ring of host memory that stays in the cache of the CPU.
//!
//! Copies to host memory and from it that go past the cache take a third longer, as GPUs do both at once. So a permutation passes through
//! a few slots, a *window* of them at a time: each device copies its next window to its ring, all meet, and each fetches the window of its
//! sender, while the copies of the next window fill the other half of the ring. A slot is filled again behind the fetches of all devices.
//!
//! The windows of all permutations along an axis are in one order, that of their starts, which is the same on all devices. Between two
//! meetings each device sends one window, so the events that a window waits for have been recorded before a meeting that is over:
//! no stream waits for what is not queued yet.

use crate::driver::{Address, Device, Endpoint, Lane, Pinned, Point};
use perilune_core::error::Result;
use std::sync::Arc;

/// Bytes of a slot, slots of a ring and of a window.
const SLOT: usize = 2 << 20;
const SLOTS: usize = 4;
const WINDOW: usize = 2;

/// The ring of a device for an axis.
pub(super) struct Ring {
    memory: Pinned,
    /// For each slot, the point behind the copy to it; then, for each slot, the point behind this device's fetch from that of its sender.
    points: Vec<Point>,
    /// Slots that this run has filled, and fetched.
    sent: usize,
    fetched: usize,
    /// Those of all devices in the order of their coordinates, once they have met.
    ends: Vec<Ends>,
}

/// Where a device's ring is, for the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Ends {
    /// The number of the device's endpoint, its first address, and the number of its first point.
    pub number: u64,
    pub base: Address,
    pub point: u64,
}

/// One tensor of a permutation: where this device's bytes are, and where those that it receives go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Passed {
    pub from: Address,
    pub to: Address,
    pub nbytes: usize,
}

/// A permutation that passes through the rings of an axis.
pub(super) struct Passing {
    tensors: Vec<Passed>,
    nbytes: usize,
    /// The coordinate of the device that sends to this one.
    sender: usize,
    /// The number of the point behind which this device's tensors are complete, and those that it receives may be written.
    ready: u64,
    /// Bytes that are sent, and that are fetched.
    sent: usize,
    fetched: usize,
    /// Whether the devices have met since the last fetch.
    is_over: bool,
}

impl Passing {
    pub fn new(tensors: Vec<Passed>, sender: usize, ready: u64) -> Passing {
        let nbytes = tensors.iter().map(|t| t.nbytes).sum();
        Passing { tensors, nbytes, sender, ready, sent: 0, fetched: 0, is_over: false }
    }

    /// Whether a window is sent and not fetched.
    fn is_pending(&self) -> bool {
        self.sent > self.fetched
    }

    /// Whether the devices have met since it was fetched.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The next slots of a window from `begin` on, as ranges of bytes of all tensors.
    fn slots(&self, begin: usize) -> impl Iterator<Item = [usize; 2]> + use<> {
        let nbytes = self.nbytes;
        (0..WINDOW).map(move |k| [begin + k * SLOT, (begin + (k + 1) * SLOT).min(nbytes)]).take_while(|[a, b]| a < b)
    }

    /// The parts of tensors in a range of bytes: offsets in the range, addresses of this device's bytes and of those that it receives, and
    /// lengths.
    fn parts(&self, [begin, end]: [usize; 2]) -> impl Iterator<Item = (usize, Passed)> {
        let mut at = 0;
        self.tensors.iter().filter_map(move |t| {
            let (first, last) = (at, at + t.nbytes);
            at = last;
            let (low, high) = (begin.max(first), end.min(last));
            let shift = low.saturating_sub(first) as u64;
            let part = Passed { from: t.from + shift, to: t.to + shift, nbytes: high.saturating_sub(low) };
            (low < high).then_some((low - begin, part))
        })
    }
}

impl Ring {
    pub fn new(device: &Arc<Device>, endpoint: &Endpoint) -> Result<Ring> {
        let (memory, points) = (Pinned::between_devices(device, SLOTS * SLOT)?, endpoint.points(2 * SLOTS)?);
        Ok(Ring { memory, points, sent: 0, fetched: 0, ends: Vec::new() })
    }

    /// Begins a run, behind the fetches of the one before.
    pub fn begin(&mut self) {
        (self.sent, self.fetched) = (0, 0);
        self.ends.clear();
    }

    pub fn ends(&self, endpoint: &Endpoint) -> Ends {
        Ends { number: endpoint.number, base: self.memory.address, point: self.points[0].number }
    }

    /// Learns where the rings of all devices are.
    pub fn meet(&mut self, ends: impl Iterator<Item = Ends>) {
        if self.ends.is_empty() {
            self.ends.extend(ends);
        }
    }

    /// Sends the next window of the first permutation that has one, unless a window is pending. `stream`: that of copies to the host.
    pub fn send<'a>(
        &mut self,
        endpoint: &Endpoint,
        stream: &Lane,
        all: impl Iterator<Item = &'a mut Passing>,
    ) -> Result<()> {
        for passing in all {
            if passing.is_pending() {
                return Ok(());
            }
            if passing.sent == passing.nbytes {
                continue;
            }
            if passing.sent == 0 {
                endpoint.wait_for_point(endpoint.number, passing.ready, stream)?;
            }
            for slot in passing.slots(passing.sent) {
                let k = self.sent % SLOTS;
                if self.sent >= SLOTS {
                    for other in &self.ends {
                        endpoint.wait_for_point(other.number, other.point + (SLOTS + k) as u64, stream)?;
                    }
                }
                let base = self.memory.address + (k * SLOT) as u64;
                for (at, part) in passing.parts(slot) {
                    stream.copy_across(part.from, base + at as u64, part.nbytes)?;
                }
                self.points[k].record_in(stream)?;
                self.sent += 1;
                passing.sent = slot[1];
            }
            return Ok(());
        }
        Ok(())
    }

    /// Fetches a pending window from its sender, on the lane; the devices have met since it was sent. Behind the last one the lane waits
    /// until this device's tensors are copied.
    pub fn fetch(&mut self, endpoint: &Endpoint, lane: &Lane, passing: &mut Passing) -> Result<()> {
        if passing.fetched == passing.nbytes {
            passing.is_over = true;
            return Ok(());
        }
        let sender = self.ends.get(passing.sender).filter(|_| passing.is_pending());
        let Some(sender) = sender.copied() else { return Ok(()) };
        if passing.fetched == 0 {
            endpoint.wait_for_point(endpoint.number, passing.ready, lane)?;
        }
        for slot in passing.slots(passing.fetched) {
            let k = self.fetched % SLOTS;
            let base = sender.base + (k * SLOT) as u64;
            endpoint.wait_for_point(sender.number, sender.point + k as u64, lane)?;
            for (at, part) in passing.parts(slot) {
                lane.copy_across(base + at as u64, part.to, part.nbytes)?;
            }
            self.points[SLOTS + k].record_in(lane)?;
            self.fetched += 1;
            passing.fetched = slot[1];
            if passing.fetched == passing.nbytes {
                self.points[k].hold(lane)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_all_tensors_in_order() {
        let tensor = |from, nbytes| Passed { from, to: from + (1 << 40), nbytes };
        let tensors = vec![tensor(1 << 20, SLOT - 8), tensor(1 << 30, 3 * SLOT), tensor(1 << 35, 16)];
        let mut passing = Passing::new(tensors.clone(), 1, 0);
        let (mut seen, mut slots) = (Vec::new(), 0);
        while passing.sent < passing.nbytes {
            for slot in passing.slots(passing.sent).collect::<Vec<_>>() {
                let (mut end, parts) = (0, passing.parts(slot).collect::<Vec<_>>());
                for (at, part) in parts {
                    assert_eq!(at, end, "without a gap");
                    end = at + part.nbytes;
                    seen.push(part);
                }
                assert_eq!(end, slot[1] - slot[0]);
                (passing.sent, slots) = (slot[1], slots + 1);
            }
        }
        assert_eq!(slots, 5);
        // Parts that lie one behind the other are one tensor.
        let mut joined: Vec<Passed> = Vec::new();
        for part in seen {
            match joined.last_mut().filter(|last| last.from + last.nbytes as u64 == part.from) {
                Some(last) => last.nbytes += part.nbytes,
                None => joined.push(part),
            }
        }
        assert_eq!(joined, tensors);
        assert_eq!(Passing::new(Vec::new(), 1, 0).slots(0).count(), 0);
    }
}
