//! Keeps decoded parts of columnar files in memory: an LRU that is bounded by bytes.
//!
//! Threads that ask for the same part wait for the one that decodes it, and others go on.

use crate::error::Result;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Which part: the file, the unit of that file (a row group, a record batch), and the column, or 0 where a unit is decoded whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub file: usize,
    pub unit: usize,
    pub column: usize,
}

/// A decoded part, which knows its size.
pub(crate) trait Weight {
    fn bytes(&self) -> usize;
}

type Slot<T> = Arc<Mutex<Option<Arc<T>>>>;

/// Decoded parts, the least recently used of which are dropped beyond a number of bytes. The parts of the unit that was decoded last
/// always stay, so that a unit larger than the bound is not decoded again for each record.
pub(crate) struct Cache<T> {
    most: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    entries: FxHashMap<Key, Entry<T>>,
    bytes: usize,
    clock: u64,
}

struct Entry<T> {
    slot: Slot<T>,
    used: u64,
    /// Zero until it is decoded.
    bytes: usize,
}

impl<T: Weight> Cache<T> {
    pub fn new(most: usize) -> Cache<T> {
        Cache { most, state: Mutex::new(State { entries: FxHashMap::default(), bytes: 0, clock: 0 }) }
    }

    /// Returns a part, which `make` decodes if it is not there.
    ///
    /// # Errors
    /// That of `make`, which is called again the next time.
    pub fn get(&self, key: Key, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let slot = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.clock += 1;
            let used = state.clock;
            let entry = state.entries.entry(key).or_insert_with(|| Entry { slot: Slot::default(), used, bytes: 0 });
            entry.used = used;
            entry.slot.clone()
        };
        let mut held = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = &*held {
            return Ok(part.clone());
        }
        let part = match make() {
            Ok(part) => Arc::new(part),
            Err(e) => {
                self.state.lock().unwrap_or_else(PoisonError::into_inner).entries.remove(&key);
                return Err(e);
            }
        };
        *held = Some(part.clone());
        drop(held);
        self.account(key, part.bytes());
        Ok(part)
    }

    /// Counts a part, and drops others beyond the bound.
    fn account(&self, key: Key, bytes: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { entries, bytes: total, .. } = &mut *state;
        // Another thread may have dropped the entry, or counted it.
        if let Some(entry) = entries.get_mut(&key)
            && entry.bytes == 0
        {
            entry.bytes = bytes.max(1);
            *total += entry.bytes;
        }
        while *total > self.most {
            let old = entries.iter().filter(|(k, e)| e.bytes > 0 && (k.file, k.unit) != (key.file, key.unit));
            let Some(old) = old.min_by_key(|(_, e)| e.used).map(|(k, _)| *k) else { break };
            *total -= entries.remove(&old).map_or(0, |e| e.bytes);
        }
    }

    #[cfg(test)]
    fn held(&self) -> (usize, usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.entries.len(), state.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::atomic::{AtomicUsize, Ordering};

    impl Weight for Vec<u8> {
        fn bytes(&self) -> usize {
            self.len()
        }
    }

    fn key(unit: usize, column: usize) -> Key {
        Key { file: 0, unit, column }
    }

    #[test]
    fn the_least_recently_used_parts_are_dropped() {
        let cache = Cache::new(10);
        let get = |k: Key| cache.get(k, || Ok(vec![k.unit as u8; 4])).expect("made")[0];
        assert_eq!([get(key(1, 0)), get(key(2, 0)), get(key(1, 0)), get(key(3, 0))], [1, 2, 1, 3]);
        assert_eq!(cache.held(), (2, 8));
        assert_eq!(*cache.get(key(1, 0), || Err(Error::Interrupted)).expect("kept"), vec![1; 4]);
        assert!(cache.get(key(2, 0), || Err(Error::Interrupted)).is_err(), "dropped, and a failure is not kept");
        assert_eq!(cache.held(), (2, 8));
    }

    #[test]
    fn the_columns_of_one_unit_stay_together() {
        let cache = Cache::new(10);
        for round in 0..2 {
            for column in 0..4 {
                let made = cache.get(key(7, column), || match round {
                    0 => Ok(vec![0; 8]),
                    _ => Err(Error::Interrupted),
                });
                assert!(made.is_ok());
            }
        }
        assert_eq!(cache.held(), (4, 32));
        cache.get(key(8, 0), || Ok(vec![0; 3])).expect("made");
        assert_eq!(cache.held(), (1, 3));
    }

    #[test]
    fn a_part_is_decoded_once_for_all_threads() {
        let (cache, made) = (Cache::new(1 << 20), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for unit in 0..50 {
                        let part = cache.get(key(unit, 0), || {
                            made.fetch_add(1, Ordering::Relaxed);
                            Ok(vec![unit as u8; 16])
                        });
                        assert_eq!(*part.expect("made"), vec![unit as u8; 16]);
                    }
                });
            }
        });
        assert_eq!((made.into_inner(), cache.held()), (50, (50, 800)));
    }
}
