//! Packs documents into windows of one length by first-fit decreasing.
//!
//! The index of a packing is a pure function of lengths and capacity. Documents are taken in blocks of 4,096, so that a packing
//! of millions keeps about the order of the data; within a block the longest come first, equal ones by their place. A segment
//! tree over the free space of the open bins finds the first one that a document fits into.

use perilune_data::{Error, Result};
use std::ops::Range;

/// Documents that are packed together.
const BLOCK: usize = 4096;

/// What happens to a document that is longer than a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TooLong {
    #[default]
    Error,
    /// Its end is dropped.
    Truncate,
    /// It becomes several documents.
    Split,
}

/// A part of a document in a bin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    pub document: u64,
    /// Tokens of the document: all, or the part that a window holds.
    pub tokens: Range<usize>,
}

/// The free space of open bins, as a segment tree of maxima.
struct Free {
    leaves: usize,
    tree: Vec<usize>,
}

impl Free {
    fn new(bins: usize) -> Free {
        let leaves = bins.next_power_of_two().max(1);
        Free { leaves, tree: vec![0; 2 * leaves] }
    }

    fn set(&mut self, bin: usize, free: usize) {
        let mut at = self.leaves + bin;
        self.tree[at] = free;
        while at > 1 {
            at /= 2;
            self.tree[at] = self.tree[2 * at].max(self.tree[2 * at + 1]);
        }
    }

    /// The first bin with that much space.
    fn first(&self, wanted: usize) -> Option<usize> {
        if self.tree[1] < wanted {
            return None;
        }
        let mut at = 1;
        while at < self.leaves {
            at = 2 * at + usize::from(self.tree[2 * at] < wanted);
        }
        Some(at - self.leaves)
    }
}

/// Places documents of these lengths into bins of `capacity` tokens. Documents without tokens are left out.
///
/// # Errors
/// The capacity is 0, or a document is longer and `too_long` says that this is an error.
pub fn pack(lengths: &[usize], capacity: usize, too_long: TooLong) -> Result<Vec<Vec<Piece>>> {
    if capacity == 0 {
        return Err(Error::argument("the length of a window", "is 0"));
    }
    let mut bins = Vec::new();
    for (block, lengths) in lengths.chunks(BLOCK).enumerate() {
        pack_block(block * BLOCK, lengths, capacity, too_long, &mut bins)?;
    }
    Ok(bins)
}

fn pack_block(
    first: usize,
    lengths: &[usize],
    capacity: usize,
    too_long: TooLong,
    bins: &mut Vec<Vec<Piece>>,
) -> Result<()> {
    let mut pieces = Vec::with_capacity(lengths.len());
    for (k, &length) in lengths.iter().enumerate() {
        let document = (first + k) as u64;
        match too_long {
            TooLong::Error if length > capacity => {
                let rule = format!("has {length} tokens, and a window {capacity}");
                let error = Error::argument(format!("document {document}"), rule);
                return Err(error.hint("longer windows, or too_long = \"truncate\" or \"split\""));
            }
            TooLong::Split => {
                let starts = (0..length).step_by(capacity);
                pieces.extend(starts.map(|at| Piece { document, tokens: at..length.min(at + capacity) }));
            }
            _ if length > 0 => pieces.push(Piece { document, tokens: 0..length.min(capacity) }),
            _ => {}
        }
    }
    // Stable, so that equal lengths keep their order.
    pieces.sort_by_key(|p| std::cmp::Reverse(p.tokens.len()));
    let (mut free, before) = (Free::new(pieces.len()), bins.len());
    for piece in pieces {
        let wanted = piece.tokens.len();
        let bin = match free.first(wanted) {
            Some(bin) => bin,
            None => {
                bins.push(Vec::new());
                let bin = bins.len() - 1 - before;
                free.set(bin, capacity);
                bin
            }
        };
        let left = free.tree[free.leaves + bin] - wanted;
        free.set(bin, left);
        bins[before + bin].push(piece);
    }
    Ok(())
}

/// The arrays of one window.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Window {
    /// Token ids; padding has the id that was given for it.
    pub ids: Vec<u32>,
    /// Whether a token is a target of the loss: false for the first token of a document and for padding, by position.
    pub mask: Vec<bool>,
    /// The number of the document within the window; padding is the last one.
    pub documents: Vec<u32>,
    /// Positions within the document.
    pub positions: Vec<u32>,
}

impl Window {
    /// Lays the pieces of a bin out in a window of `capacity` tokens. `read` has the ids and the mask of a document; a mask that is
    /// empty trains every token.
    ///
    /// # Errors
    /// `read` fails, or a document has fewer tokens than the index says.
    pub fn lay_out<'a>(
        bin: &[Piece],
        capacity: usize,
        padding: u32,
        mut read: impl FnMut(u64) -> Result<(&'a [u32], &'a [bool])>,
    ) -> Result<Window> {
        let mut window = Window::default();
        for (number, piece) in bin.iter().enumerate() {
            let (ids, mask) = read(piece.document)?;
            let fits = ids.len() >= piece.tokens.end && (mask.is_empty() || mask.len() == ids.len());
            if !fits || window.ids.len() + piece.tokens.len() > capacity {
                let rule = "does not have the length that it was packed by";
                return Err(Error::argument(format!("document {}", piece.document), rule));
            }
            window.ids.extend_from_slice(&ids[piece.tokens.clone()]);
            // Nothing before the first token predicts it.
            let trained =
                piece.tokens.clone().enumerate().map(|(k, at)| k > 0 && mask.get(at).copied().unwrap_or(true));
            window.mask.extend(trained);
            window.documents.extend(std::iter::repeat_n(number as u32, piece.tokens.len()));
            window.positions.extend(0..piece.tokens.len() as u32);
        }
        let rest = capacity - window.ids.len();
        window.ids.extend(std::iter::repeat_n(padding, rest));
        window.mask.extend(std::iter::repeat_n(false, rest));
        window.documents.extend(std::iter::repeat_n(bin.len() as u32, rest));
        window.positions.extend(0..rest as u32);
        Ok(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(bins: &[Vec<Piece>]) -> Vec<Vec<usize>> {
        bins.iter().map(|bin| bin.iter().map(|p| p.tokens.len()).collect()).collect()
    }

    #[test]
    fn the_longest_come_first_and_go_into_the_first_bin_that_fits() -> Result<()> {
        let bins = pack(&[3, 5, 2, 5, 0, 4], 9, TooLong::Error)?;
        assert_eq!(sizes(&bins), [vec![5, 4], vec![5, 3], vec![2]]);
        let places: Vec<Vec<u64>> = bins.iter().map(|b| b.iter().map(|p| p.document).collect()).collect();
        assert_eq!(places, [vec![1, 5], vec![3, 0], vec![2]]);
        Ok(())
    }

    /// The segment tree finds what a search over all bins finds.
    #[test]
    fn packing_equals_a_naive_first_fit() -> Result<()> {
        let mut state = 1u64;
        for round in 0..20 {
            let lengths: Vec<usize> = (0..300 * (round + 1))
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as usize % 100
                })
                .collect();
            let bins = pack(&lengths, 128, TooLong::Error)?;
            let mut naive: Vec<Vec<usize>> = Vec::new();
            for block in lengths.chunks(BLOCK) {
                let mut block: Vec<usize> = block.iter().copied().filter(|l| *l > 0).collect();
                block.sort_by_key(|l| std::cmp::Reverse(*l));
                let before = naive.len();
                for length in block {
                    match naive[before..].iter_mut().find(|b| b.iter().sum::<usize>() + length <= 128) {
                        Some(bin) => bin.push(length),
                        None => naive.push(vec![length]),
                    }
                }
            }
            assert_eq!(sizes(&bins), naive);
            assert_eq!(bins.iter().flatten().map(|p| p.tokens.len()).sum::<usize>(), lengths.iter().sum::<usize>());
        }
        Ok(())
    }

    #[test]
    fn long_documents_are_refused_cut_or_split() {
        let error = pack(&[4, 11], 5, TooLong::Error).expect_err("too long").to_string();
        assert!(error.contains("document 1: has 11 tokens") && error.contains("truncate"), "{error}");
        assert_eq!(pack(&[4, 11], 5, TooLong::Truncate).map(|b| sizes(&b)).ok(), Some(vec![vec![5], vec![4]]));
        assert_eq!(pack(&[4, 11], 5, TooLong::Split).map(|b| sizes(&b)).ok(), Some(vec![vec![5], vec![5], vec![4, 1]]));
        assert!(pack(&[1], 0, TooLong::Split).is_err());
    }

    #[test]
    fn a_window_has_documents_positions_and_padding() -> Result<()> {
        let documents: [(&[u32], &[bool]); 2] = [(&[7, 8, 9], &[]), (&[5, 6, 4], &[true, false, true])];
        let bins = pack(&[3, 3], 8, TooLong::Error)?;
        let window = Window::lay_out(&bins[0], 8, 0, |k| Ok(documents[k as usize]))?;
        assert_eq!(window.ids, [7, 8, 9, 5, 6, 4, 0, 0]);
        assert_eq!(window.mask, [false, true, true, false, false, true, false, false]);
        assert_eq!(window.documents, [0, 0, 0, 1, 1, 1, 2, 2]);
        assert_eq!(window.positions, [0, 1, 2, 0, 1, 2, 0, 1]);
        Ok(())
    }
}
