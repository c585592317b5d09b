//! Defines hash maps for keys that are numbers given in sequence: nodes, States, values.
//!
//! The hash of such a key is the key, so keys made one after another lie side by side in the table. A pass over the nodes
//! of a step then reads the table in order; with a scattering hash each look-up would be a cache miss once the table is
//! larger than the cache.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map from sequential numbers. Keys of other kinds work, but may collide.
pub type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;
/// A set of sequential numbers.
pub type IdSet<K> = HashSet<K, BuildHasherDefault<IdHasher>>;

/// Adds up the numbers of a key.
#[derive(Clone, Copy, Default, Debug)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    /// The lower bits select the place in the table. The upper 7, which the table keeps beside each place to compare first,
    /// are the lowest of the number, so that neighbours differ in them.
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 << 57)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = self.0.wrapping_add(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    /// The variant of an enum.
    fn write_isize(&mut self, n: isize) {
        self.write_u64((n as u64) << 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    #[test]
    fn sequential_keys_have_sequential_places_and_different_tags() {
        let map: IdMap<u32, u32> = (0..1000).map(|k| (k, k * 2)).collect();
        assert!((0..1000).all(|k| map[&k] == k * 2) && !map.contains_key(&1000));
        let hash = |k: u32| map.hasher().hash_one(k);
        for k in 0..999 {
            assert_eq!(hash(k + 1).wrapping_sub(hash(k)) << 7, 1 << 7, "the lower bits are the number");
            assert_ne!(hash(k + 1) >> 57, hash(k) >> 57, "the tags of neighbours differ");
        }
    }

    #[test]
    fn keys_that_differ_in_the_variant_are_different() {
        #[derive(PartialEq, Eq, Hash)]
        enum Key {
            A(u64),
            B(u64),
        }
        let mut map: IdMap<Key, u8> = IdMap::default();
        map.insert(Key::A(1), 1);
        map.insert(Key::B(1), 2);
        assert_eq!((map.get(&Key::A(1)), map.get(&Key::B(1)), map.get(&Key::B(2))), (Some(&1), Some(&2), None));
    }
}
