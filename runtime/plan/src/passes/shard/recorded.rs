//! Divides the exchanges that a recipe records, along the axis that it names: blocks that move from device to device, and barriers.
//!
//! Where a device does not have its block of an operand, that is made first, as a placement would. A device that no other sends to has
//! zeros: its block of the exchange, which has to be a permutation, is replaced.

use super::divider::Divider;
use super::part::Part;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Combine};
use perilune_core::ops::{collective, distribute};

/// Completes a list of senders, of which no two are equal, to a permutation.
fn completed(senders: &[Option<usize>]) -> Vec<usize> {
    let mut free = (0..senders.len()).filter(|from| !senders.contains(&Some(*from)));
    senders.iter().enumerate().map(|(to, from)| from.or_else(|| free.next()).unwrap_or(to)).collect()
}

impl Divider<'_> {
    /// The part that a node has, and takes of its input, if it moves the blocks of the devices along this axis.
    pub(super) fn blocks_moved_by(&self, id: NodeId) -> Option<Result<Part>> {
        let node = self.graph().node(id);
        let (_, dim, _) = distribute::moved(node.op, &node.attrs).filter(|(axis, ..)| *axis == self.axis)?;
        Some(Part::placed(Along::Split(dim as u8), &node.shape, self.axis, self.devices))
    }

    /// Whether devices along this axis wait for each other at a node.
    pub(super) fn is_meeting(&self, id: NodeId) -> bool {
        let node = self.graph().node(id);
        distribute::meets(node.op, &node.attrs) == Some(self.axis)
    }

    /// The block that this device gets in a move of blocks.
    pub(super) fn moved_block(&mut self, id: NodeId, part: Part) -> Result<NodeId> {
        let node = self.graph().node(id);
        let own = self.part(node.inputs[0], part)?;
        let Some((_, _, senders)) = distribute::moved(node.op, &node.attrs).filter(|_| part != Part::Whole) else {
            return Ok(own);
        };
        let all = completed(&senders);
        let moved = self.permuted(own, &|to| all[to])?;
        if senders.iter().all(Option::is_some) {
            return Ok(moved);
        }
        let coordinate = self.coordinate()?;
        let g = &mut self.to.out.graph;
        let shape = g.shape(moved);
        let mut gets: Option<NodeId> = None;
        for to in (0..senders.len()).filter(|to| senders[*to].is_some()) {
            let to = g.int_constant(to as i64);
            let same = g.eq(coordinate, to)?;
            gets = Some(gets.map_or(Ok(same), |before| g.logical_or(before, same))?);
        }
        let nothing = g.constant_like(0.0, moved);
        let nothing = g.expand(nothing, shape)?;
        // Where no device gets a block, none has a coordinate below 0: the operand is read all the same, as the recording says.
        let gets = match gets {
            Some(gets) => gets,
            None => {
                let zero = g.int_constant(0);
                g.lt(coordinate, zero)?
            }
        };
        let gets = g.expand(gets, shape)?;
        g.where_(gets, moved, nothing)
    }

    /// A value that is read once all devices have it. A flag that each sends when it has its part is combined, and the readers wait
    /// for the result.
    pub(super) fn met(&mut self, id: NodeId) -> Result<(NodeId, Part)> {
        let x = self.graph().node(id).inputs[0];
        // A term is the whole to a recipe.
        let part = match self.first[x.index()] {
            Part::Term(_) => Part::Whole,
            part => part,
        };
        let own = self.part(x, part)?;
        let g = &mut self.to.out.graph;
        let shape = g.shape(own);
        if shape.numel() == 0 {
            return Ok((own, part));
        }
        // One element, so that the flag follows from the value; and behind all of it.
        let mut flag = own;
        for dim in 0..shape.rank() {
            flag = g.slice(flag, dim, 0, 1, 1)?;
        }
        let flag = g.reshape(flag, &[])?;
        let flag = g.cast(flag, DType::F32)?;
        let flag = self.barrier(flag, own);
        let how = [self.axis as i64, collective::code(Combine::Max)];
        let all = self.to.out.graph.push(&collective::ALL_REDUCE, &[flag], &how)?;
        Ok((self.barrier(own, all), part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_moves_become_permutations() {
        assert_eq!(completed(&[Some(2), None, Some(0), None]), [2, 1, 0, 3]);
        assert_eq!(completed(&[None, Some(0), Some(1)]), [2, 0, 1]);
        assert_eq!(completed(&[None, None]), [0, 1]);
    }
}
