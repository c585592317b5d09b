//! Stores where the rows of a file begin, in 4.1 bytes each.
//!
//! Of every 64 rows the first one is stored as 64 bits, and the others as 32-bit distances from it. Distances beyond 4 GiB, which rows of
//! many megabytes or gaps between rows cause, are in a list of their own.

use super::reserve;
use crate::error::Result;
use std::path::Path;

/// Rows that share a base.
const EVERY: usize = 64;
/// Marks a distance that is in the list.
const FAR: u32 = u32::MAX;

/// Ascending offsets.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Starts {
    bases: Vec<u64>,
    distances: Vec<u32>,
    /// Those that do not fit: the number and the offset.
    far: Vec<(u64, u64)>,
}

impl Starts {
    /// Makes room for more offsets.
    ///
    /// # Errors
    /// The machine lacks the memory.
    pub fn reserve(&mut self, path: &Path, more: usize) -> Result<()> {
        reserve(path, &mut self.distances, more)?;
        reserve(path, &mut self.bases, more.div_ceil(EVERY))
    }

    /// Appends an offset, which is not below the last one.
    pub fn push(&mut self, start: u64) {
        if self.distances.len().is_multiple_of(EVERY) {
            self.bases.push(start);
        }
        let base = self.bases.last().copied().unwrap_or(start);
        match u32::try_from(start.wrapping_sub(base)) {
            Ok(distance) if distance != FAR => self.distances.push(distance),
            _ => {
                self.far.push((self.distances.len() as u64, start));
                self.distances.push(FAR);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.distances.len()
    }

    /// The offset of a number, if there are so many.
    pub fn get(&self, number: u64) -> Option<u64> {
        let at = usize::try_from(number).ok()?;
        match *self.distances.get(at)? {
            FAR => {
                let at = self.far.binary_search_by_key(&number, |(n, _)| *n).ok()?;
                self.far.get(at).map(|(_, start)| *start)
            }
            distance => self.bases.get(at / EVERY)?.checked_add(u64::from(distance)),
        }
    }

    /// Gives back memory that was reserved in vain.
    pub fn shrink(&mut self) {
        self.bases.shrink_to_fit();
        self.distances.shrink_to_fit();
        self.far.shrink_to_fit();
    }

    /// The number of offsets and of far ones, then the lists, all little-endian.
    pub fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&(self.distances.len() as u64).to_le_bytes());
        to.extend_from_slice(&(self.far.len() as u64).to_le_bytes());
        to.extend(self.bases.iter().flat_map(|n| n.to_le_bytes()));
        to.extend(self.distances.iter().flat_map(|n| n.to_le_bytes()));
        to.extend(self.far.iter().flat_map(|(n, start)| [n.to_le_bytes(), start.to_le_bytes()]).flatten());
    }

    /// Reads what [`Starts::write`] wrote, and moves `from` behind it. Returns nothing where it ends early.
    pub fn read(from: &mut &[u8]) -> Option<Starts> {
        let (len, far) = (usize::try_from(word(from)?).ok()?, usize::try_from(word(from)?).ok()?);
        let mut words = |count: usize, size: usize| -> Option<&[u8]> {
            let (now, later) = from.split_at_checked(count.checked_mul(size)?)?;
            *from = later;
            Some(now)
        };
        let bases = words(len.div_ceil(EVERY), 8)?.as_chunks::<8>().0.iter().map(|n| u64::from_le_bytes(*n)).collect();
        let distances = words(len, 4)?.as_chunks::<4>().0.iter().map(|n| u32::from_le_bytes(*n)).collect();
        let pairs = words(far, 16)?.as_chunks::<8>().0.as_chunks::<2>().0;
        let far = pairs.iter().map(|[n, start]| (u64::from_le_bytes(*n), u64::from_le_bytes(*start))).collect();
        Some(Starts { bases, distances, far })
    }
}

/// Reads 64 bits, and moves `from` behind them.
pub(super) fn word(from: &mut &[u8]) -> Option<u64> {
    let (now, later) = from.split_first_chunk::<8>()?;
    *from = later;
    Some(u64::from_le_bytes(*now))
}

#[cfg(test)]
#[path = "starts_tests.rs"]
mod tests;
