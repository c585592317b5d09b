//! Copies pieces of collectives to host memory, from which the other devices of the process fetch them.
//!
//! An NVLink sleeps when it has moved nothing for some time, 50 ms by default; links that are awake take power from the clocks of GPUs that
//! run at their limit. PCIe is slower, and is awake anyway. It also connects GPUs that cannot access each other's memory.
//!
//! The pieces of a collective lie one behind the other in a range of host memory. A stream of its own copies them, a part at a time, and
//! records a point behind each part: another device fetches a part while the next is copied, in both directions of both links.

use super::ring::{Ends, Ring};
use crate::driver::{Address, Device, Endpoint, Event, Heap, Lane, Pinned, Point};
use perilune_core::error::Result;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a part.
const PART: usize = 4 << 20;
/// The alignment of pieces.
const ALIGN: usize = 256;

/// What a device keeps in host memory for the others along an axis.
pub(super) struct HostCopies {
    stream: Lane,
    /// By the step of the collective.
    ranges: HashMap<usize, Range>,
    /// The start of a run, behind the last reads of the one before.
    begin: Event,
    has_begun: bool,
    /// The `halt` word of this device.
    halt: Pinned,
    /// What permutations pass through.
    ring: Ring,
}

/// The copies of a collective's pieces.
struct Range {
    memory: Pinned,
    /// One behind each part.
    points: Vec<Point>,
}

/// Where a device has copied the pieces of a collective to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Copied {
    /// The first address; 0 if the pieces are where they are.
    pub base: Address,
    /// The number of the first part's point; those of the other parts follow it.
    pub point: u64,
}

impl Copied {
    /// The ends of parts in a range of addresses and the end of the range, each with the number of the point that it is behind.
    pub fn parts(self, from: Address, nbytes: usize) -> impl Iterator<Item = (Address, u64)> {
        let (begin, end) = ((from - self.base) as usize, (from - self.base) as usize + nbytes);
        let last = end.div_ceil(PART).max(begin / PART + 1);
        (begin / PART..last).map(move |k| (self.base + ((k + 1) * PART).min(end) as u64, self.point + k as u64))
    }

    /// The number of the point behind which all before an address is copied.
    pub fn point_at(self, end: Address) -> u64 {
        self.point + ((end - self.base) as usize).div_ceil(PART).max(1) as u64 - 1
    }
}

/// Bytes a second to the host from which a program goes through it: less than what routes assume (`plan/src/route.rs`), as
/// the time is measured, and more than PCIe 4 has.
pub(super) const LEAST_SPEED: f64 = 35e9;

/// Measures how many bytes a second a device copies to the host; 0 if it or the host has no memory to spare.
pub(super) fn bytes_a_second(device: &Arc<Device>, heap: &Arc<Heap>) -> Result<f64> {
    const NBYTES: usize = 16 << 20;
    let (Ok(from), Ok(to)) = (heap.alloc(NBYTES), Pinned::new(device, NBYTES)) else { return Ok(0.0) };
    let lane = Lane::new(device)?;
    let mut least = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        lane.copy_across(from.address, to.address, NBYTES)?;
        lane.synchronize()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(NBYTES as f64 / least)
}

impl HostCopies {
    pub fn new(endpoint: &Endpoint) -> Result<HostCopies> {
        let device = endpoint.device();
        let (stream, begin, halt) = (Lane::new(device)?, Event::untimed(device)?, Pinned::new(device, ALIGN)?);
        let (ranges, ring) = (HashMap::new(), Ring::new(device, endpoint)?);
        Ok(HostCopies { stream, ranges, begin, has_begun: false, halt, ring })
    }

    /// Begins a run.
    pub fn begin(&mut self) {
        self.has_begun = false;
        self.ring.begin();
    }

    /// Makes the first copy of a run follow the one before. `lane`: that of the axis, on which the runs before have ended.
    fn follow(&mut self, lane: &Lane) -> Result<()> {
        if !self.has_begun {
            lane.record(&self.begin)?;
            self.stream.wait_for(&self.begin)?;
            self.has_begun = true;
        }
        Ok(())
    }

    /// The ring, and the stream that fills it.
    pub fn ring(&mut self, lane: &Lane) -> Result<(&mut Ring, &Lane)> {
        self.follow(lane)?;
        Ok((&mut self.ring, &self.stream))
    }

    /// Where the ring is.
    pub fn ends(&self, endpoint: &Endpoint) -> Ends {
        self.ring.ends(endpoint)
    }

    /// Waits for the copies that are queued.
    pub fn settle(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// The place of the copy of the `halt` word.
    pub fn halt(&self) -> Address {
        self.halt.address
    }

    /// Queues copies of the pieces of a step's collective behind a point of this device. Returns the places of the copies. `lane`: that of
    /// the axis, on which the runs before have ended.
    pub fn copy(
        &mut self,
        endpoint: &Endpoint,
        lane: &Lane,
        step: usize,
        ready: &Point,
        pieces: &[(Address, usize)],
    ) -> Result<(Copied, Vec<Address>)> {
        self.follow(lane)?;
        let mut nbytes = 0;
        let place = |(_, n): &(Address, usize)| {
            let at = nbytes;
            nbytes += n.next_multiple_of(ALIGN);
            at
        };
        let places: Vec<usize> = pieces.iter().map(place).collect();
        let range = match self.ranges.remove(&step) {
            Some(range) if range.memory.nbytes() >= nbytes => range,
            old => {
                if old.is_some() {
                    // Other devices have read it, as the lane knows.
                    self.stream.synchronize()?;
                    lane.synchronize()?;
                }
                drop(old);
                let points = endpoint.points(nbytes.div_ceil(PART).max(1))?;
                Range { memory: Pinned::between_devices(endpoint.device(), nbytes.max(ALIGN))?, points }
            }
        };
        let range = self.ranges.entry(step).or_insert(range);
        let copied = Copied { base: range.memory.address, point: range.points[0].number };
        ready.hold(&self.stream)?;
        let mut part = 0;
        for ((from, nbytes), place) in pieces.iter().zip(&places) {
            let at = copied.base + *place as u64;
            let mut done = 0;
            for (end, point) in copied.parts(at, *nbytes) {
                // What is before this part is complete.
                while part < (point - copied.point) as usize {
                    range.points[part].record_in(&self.stream)?;
                    part += 1;
                }
                let n = (end - at) as usize - done;
                self.stream.copy_across(from + done as u64, at + done as u64, n)?;
                done += n;
            }
        }
        range.points[part..].iter().try_for_each(|point| point.record_in(&self.stream))?;
        Ok((copied, places.into_iter().map(|at| copied.base + at as u64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_multiples_and_at_the_end() {
        let copied = Copied { base: 1 << 30, point: 7 };
        let part = PART as u64;
        let ends = |from: u64, n: usize| copied.parts((1 << 30) + from, n).collect::<Vec<_>>();
        assert_eq!(ends(0, 8), [((1 << 30) + 8, 7)]);
        assert_eq!(ends(part - 256, 256), [((1 << 30) + part, 7)]);
        assert_eq!(ends(part, 256), [((1 << 30) + part + 256, 8)]);
        let two = [((1 << 30) + part, 7), ((1 << 30) + part + 100, 8)];
        assert_eq!(ends(part - 256, 356), two);
        for (end, point) in two {
            assert_eq!(copied.point_at(end), point);
        }
    }
}
