//! Merges the bytes of a pre-token by byte-pair encoding: always the pair of lowest rank, the leftmost of equal ones.
//!
//! Short words search the lowest rank anew for each merge, which is fastest for them; long ones keep a heap, so that a word of a
//! million bytes takes n log n. Both give the same tokens.

use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Words longer than this use the heap.
const SHORT: usize = 100;
/// The rank of a pair that does not merge.
const NONE: u32 = u32::MAX;

/// The merges of a vocabulary: a pair of token ids to its rank and the id of both together.
#[derive(Debug, Default)]
pub struct Merges {
    pairs: FxHashMap<u64, (u32, u32)>,
    /// The id of each byte.
    bytes: Vec<u32>,
    /// The pairs of two bytes, by both bytes: most look-ups are of these.
    first: Vec<(u32, u32)>,
}

fn key(a: u32, b: u32) -> u64 {
    u64::from(a) << 32 | u64::from(b)
}

/// A token of a word that is being merged: its id, and rank and id of the merge with the next one.
#[derive(Clone, Copy, Debug)]
struct Part {
    id: u32,
    rank: u32,
    merged: u32,
}

/// Memory of the merges of one thread.
#[derive(Debug, Default)]
pub struct Scratch {
    parts: Vec<Part>,
}

impl Merges {
    /// `bytes` has the id of each of the 256 bytes; `pairs` has (left, right) to (rank, id).
    pub fn new(bytes: Vec<u32>, pairs: FxHashMap<u64, (u32, u32)>) -> Merges {
        let both = bytes.iter().flat_map(|a| bytes.iter().map(move |b| key(*a, *b)));
        let first = both.map(|pair| pairs.get(&pair).copied().unwrap_or((NONE, 0))).collect();
        Merges { pairs, bytes, first }
    }

    pub fn pair(a: u32, b: u32) -> u64 {
        key(a, b)
    }

    fn find(&self, a: u32, b: u32) -> (u32, u32) {
        self.pairs.get(&key(a, b)).copied().unwrap_or((NONE, 0))
    }

    /// Appends the tokens of a word to `to`.
    pub fn merge(&self, word: &[u8], scratch: &mut Scratch, to: &mut Vec<u32>) {
        match word {
            [] => {}
            [byte] => to.push(self.bytes[usize::from(*byte)]),
            _ if word.len() > SHORT => self.merge_long(word, to),
            _ => self.merge_short(word, &mut scratch.parts, to),
        }
    }

    fn merge_short(&self, word: &[u8], parts: &mut Vec<Part>, to: &mut Vec<u32>) {
        parts.clear();
        for (k, byte) in word.iter().enumerate() {
            let (rank, merged) = match word.get(k + 1) {
                Some(next) => self.first[usize::from(*byte) << 8 | usize::from(*next)],
                None => (NONE, 0),
            };
            parts.push(Part { id: self.bytes[usize::from(*byte)], rank, merged });
        }
        loop {
            let (mut lowest, mut at) = (NONE, 0);
            for (k, part) in parts.iter().enumerate() {
                if part.rank < lowest {
                    (lowest, at) = (part.rank, k);
                }
            }
            if lowest == NONE {
                break;
            }
            parts[at].id = parts[at].merged;
            parts.remove(at + 1);
            (parts[at].rank, parts[at].merged) = match parts.get(at + 1) {
                Some(next) => self.find(parts[at].id, next.id),
                None => (NONE, 0),
            };
            if let Some(left) = at.checked_sub(1) {
                (parts[left].rank, parts[left].merged) = self.find(parts[left].id, parts[at].id);
            }
        }
        to.extend(parts.iter().map(|p| p.id));
    }

    fn merge_long(&self, word: &[u8], to: &mut Vec<u32>) {
        const END: usize = usize::MAX;
        let count = word.len();
        let mut ids: Vec<u32> = word.iter().map(|b| self.bytes[usize::from(*b)]).collect();
        // Neighbours of live tokens; a token that was merged into its left neighbour has no next one but itself.
        let mut next: Vec<usize> = (1..count).chain([END]).collect();
        let mut previous: Vec<usize> = [END].into_iter().chain(0..count - 1).collect();
        let mut live = vec![true; count];
        let mut heap = BinaryHeap::new();
        let push = |heap: &mut BinaryHeap<_>, ids: &[u32], left: usize, right: usize| {
            let (rank, merged) = self.find(ids[left], ids[right]);
            if rank != NONE {
                heap.push(Reverse((rank, left, ids[left], ids[right], merged)));
            }
        };
        for left in 0..count - 1 {
            push(&mut heap, &ids, left, left + 1);
        }
        while let Some(Reverse((_, left, a, b, merged))) = heap.pop() {
            let right = next[left];
            // An entry is stale if one of its tokens has been merged since.
            if !live[left] || right == END || ids[left] != a || ids[right] != b {
                continue;
            }
            ids[left] = merged;
            live[right] = false;
            next[left] = next[right];
            if next[right] != END {
                previous[next[right]] = left;
                push(&mut heap, &ids, left, next[left]);
            }
            if previous[left] != END {
                push(&mut heap, &ids, previous[left], left);
            }
        }
        to.extend((0..count).filter(|k| live[*k]).map(|k| ids[k]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids 0 to 255 are the bytes; a merge makes the next id.
    fn merges(pairs: &[(u32, u32)]) -> Merges {
        let pairs = pairs.iter().enumerate().map(|(k, (a, b))| (key(*a, *b), (k as u32, 256 + k as u32)));
        Merges::new((0..256).collect(), pairs.collect())
    }

    #[test]
    fn the_lowest_rank_merges_first_and_the_leftmost_of_equal_ones() {
        let m = merges(&[(98, 99), (97, 97), (257, 97)]);
        let mut to = Vec::new();
        m.merge(b"abcaaa", &mut Scratch::default(), &mut to);
        assert_eq!(to, [97, 256, 258]);
    }

    #[test]
    fn the_heap_gives_the_tokens_of_the_search() {
        // Merges of merges over an alphabet of three, so that many entries of the heap become stale.
        let mut state = 7u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let mut pairs: Vec<(u32, u32)> = Vec::new();
            for k in 0..40u64 {
                let mut token = || match random(3 + k) {
                    n @ 0..3 => 97 + n as u32,
                    n => 256 + n as u32 - 3,
                };
                let pair = (token(), token());
                if !pairs.contains(&pair) && pair.0.max(pair.1) < 256 + pairs.len() as u32 {
                    pairs.push(pair);
                }
            }
            let m = merges(&pairs);
            let word: Vec<u8> = (0..2 + random(90)).map(|_| 97 + random(3) as u8).collect();
            let (mut short, mut long) = (Vec::new(), Vec::new());
            m.merge_short(&word, &mut Vec::new(), &mut short);
            m.merge_long(&word, &mut long);
            assert_eq!(short, long, "{pairs:?} {word:?}");
        }
    }
}
