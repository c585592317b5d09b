//! Passes keys around a ring so that the work of a causal mask is even: each device has an early and a late chunk of the sequence
//! (zhuzilin, ring-flash-attention, zigzag_ring_flash_attn).
//!
//! The sequence is cut into 2p chunks for p devices, of which device r takes chunks r ("lo") and 2p - 1 - r ("hi"). In step s it has the
//! chunks of device f = r - s mod p. Its hi queries see all of the lo keys. If f < r, its lo queries see all of the lo keys and nothing of
//! the hi keys; if f > r, its hi queries see all of the hi keys. So each step takes two products of whole chunks, of which the second
//! is a choice of operands, and all devices run one program. Step 0 takes three, two of them with the mask. Together these are
//! 2p + 1 products of chunks; contiguous blocks take 4p, and 2p are needed.
//!
//! Values outside of attention stay in contiguous blocks, so that positions, documents, losses and random numbers are those of every
//! other exchange. Halves of blocks are exchanged for chunks where attention begins, and back where it ends: an even chunk 2r comes
//! from the first half of the block of device r, an odd one from the second half, and both moves are permutations.

use super::attention::{Attention, CAUSAL, WINDOW};
use super::divider::Divider;
use super::visibility::{Hidden, Places, Visibility};
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::attention_block::merge;
use perilune_core::ops::{Class, elementwise, join};

/// The early and the late chunk of a device.
type Chunks = [NodeId; 2];

const LO: usize = 0;
const HI: usize = 1;
const CAUSAL_CHUNK: Hidden = Hidden { later: true, padding: false };
/// A chunk that is before all queries. It has no padding, for these are not padding either; rows of padding are read by nothing.
const WHOLE_CHUNK: Hidden = Hidden { later: false, padding: false };

/// The operands that all steps share.
struct Steps {
    rule: Visibility,
    chunk: usize,
    /// Positions of the queries of each chunk.
    positions: [Places; 2],
}

/// What is chosen in a step after the first.
struct Choice {
    /// Whether the keys are of a device before this one: a scalar bool.
    before: NodeId,
    /// Positions of the keys of each chunk.
    keys_at: [Places; 2],
}

/// The device that has a chunk.
fn owner(chunk: usize, devices: usize) -> usize {
    chunk.min(2 * devices - 1 - chunk)
}

impl Divider<'_> {
    /// Whether a ring takes chunks in zig-zag order: with a causal mask, and blocks that can be halved.
    pub(super) fn is_zigzag(&self, a: &Attention) -> bool {
        let attrs = &self.graph().node(a.id).attrs;
        let causal = attrs[CAUSAL] != 0 || attrs[WINDOW] != 0;
        causal && a.queries.block.is_multiple_of(2) && a.keys.is_some_and(|keys| keys.block == a.queries.block)
    }

    pub(super) fn attention_in_zigzag(&mut self, a: &Attention) -> Result<NodeId> {
        let (rule, chunk) = (self.visibility(a)?, a.queries.block / 2);
        let coordinate = self.coordinate()?;
        let positions = [self.places(coordinate, chunk)?, self.late_places(coordinate, chunk)?];
        let steps = Steps { rule, chunk, positions };
        if a.backward { self.zigzag_backward(a, &steps) } else { self.zigzag_forward(a, &steps) }
    }

    fn zigzag_forward(&mut self, a: &Attention, steps: &Steps) -> Result<NodeId> {
        let (node, dim, at) = (self.graph().node(a.id), a.queries.dim, steps.positions);
        let (queries, keys, values) =
            (self.block_of(a, 0)?, self.travelling(a, 1, None)?, self.travelling(a, 2, None)?);
        let q = self.chunks_of(queries, dim)?;
        let [mut k, mut v] = [self.chunks_of(keys, dim)?, self.chunks_of(values, dim)?];
        let mut lo = self.chunk(steps, q[LO], [k[LO], v[LO]], [at[LO], at[LO]], CAUSAL_CHUNK)?;
        let mut hi = self.chunk(steps, q[HI], [k[LO], v[LO]], [at[HI], at[LO]], WHOLE_CHUNK)?;
        let found = self.chunk(steps, q[HI], [k[HI], v[HI]], [at[HI], at[HI]], CAUSAL_CHUNK)?;
        hi = self.merged(hi, found)?;
        for step in 1..self.devices {
            [k[LO], k[HI], v[LO], v[HI]] = self.passed_on([k[LO], k[HI], v[LO], v[HI]])?;
            let choice = self.choice(steps, step)?;
            let found = self.chunk(steps, q[HI], [k[LO], v[LO]], [at[HI], choice.keys_at[LO]], WHOLE_CHUNK)?;
            hi = self.merged(hi, found)?;
            let [own, key, value] = [q, k, v].map(|chunks| self.chosen(&choice, chunks));
            let chosen_at = [self.chosen_places(&choice, at)?, self.chosen_places(&choice, choice.keys_at)?];
            let found = self.chunk(steps, own?, [key?, value?], chosen_at, WHOLE_CHUNK)?;
            let before = [self.chosen(&choice, [lo[0], hi[0]])?, self.chosen(&choice, [lo[1], hi[1]])?];
            let sum = self.merged(before, found)?;
            for k in 0..2 {
                (lo[k], hi[k]) = (self.chosen(&choice, [sum[k], lo[k]])?, self.chosen(&choice, [hi[k], sum[k]])?);
            }
        }
        let lse = self.rejoined([lo[1], hi[1]], dim)?;
        self.apart.insert((a.id, 1), lse);
        self.in_chunks.insert((a.id, 1), [lo[1], hi[1]]);
        let out = self.rejoined([lo[0], hi[0]], dim)?;
        self.to.out.graph.cast(out, node.dtype)
    }

    fn zigzag_backward(&mut self, a: &Attention, steps: &Steps) -> Result<NodeId> {
        let (node, dim, at) = (self.graph().node(a.id), a.queries.dim, steps.positions);
        let gradient = self.block_of(a, 3)?;
        let [keys, values] = [self.travelling(a, 1, Some(gradient))?, self.travelling(a, 2, Some(gradient))?];
        let (queries, out) = (self.block_of(a, 0)?, self.block_of(a, 4)?);
        let rows = self.row_products(gradient, out)?;
        let (q, d, rows) = (self.chunks_of(queries, dim)?, self.chunks_of(gradient, dim)?, self.chunks_of(rows, dim)?);
        let lse = self.logarithms(a)?;
        let [mut k, mut v] = [self.chunks_of(keys, dim)?, self.chunks_of(values, dim)?];
        // Operands that belong to queries.
        let own = [LO, HI].map(|c| [q[c], d[c], rows[c], lse[c]]);
        let lo = self.chunk_backward(steps, own[LO], [k[LO], v[LO]], [at[LO], at[LO]], CAUSAL_CHUNK)?;
        let early = self.chunk_backward(steps, own[HI], [k[LO], v[LO]], [at[HI], at[LO]], WHOLE_CHUNK)?;
        let late = self.chunk_backward(steps, own[HI], [k[HI], v[HI]], [at[HI], at[HI]], CAUSAL_CHUNK)?;
        let g = &mut self.to.out.graph;
        let mut of_queries = [lo[0], g.add_(early[0], late[0])?];
        let mut of_keys = [g.add_(lo[1], early[1])?, late[1], g.add_(lo[2], early[2])?, late[2]];
        of_keys = self.passed_on(of_keys)?;
        for step in 1..self.devices {
            [k[LO], k[HI], v[LO], v[HI]] = self.passed_on([k[LO], k[HI], v[LO], v[HI]])?;
            let choice = self.choice(steps, step)?;
            let early =
                self.chunk_backward(steps, own[HI], [k[LO], v[LO]], [at[HI], choice.keys_at[LO]], WHOLE_CHUNK)?;
            let mut rows = own[LO];
            for (k, row) in rows.iter_mut().enumerate() {
                *row = self.chosen(&choice, [own[LO][k], own[HI][k]])?;
            }
            let [key, value] = [k, v].map(|chunks| self.chosen(&choice, chunks));
            let chosen_at = [self.chosen_places(&choice, at)?, self.chosen_places(&choice, choice.keys_at)?];
            let found = self.chunk_backward(steps, rows, [key?, value?], chosen_at, WHOLE_CHUNK)?;
            let [of_q, of_k, of_v] =
                [self.either(&choice, found[0])?, self.either(&choice, found[1])?, self.either(&choice, found[2])?];
            let g = &mut self.to.out.graph;
            let hi = g.add_(of_queries[HI], early[0])?;
            of_queries = [g.add_(of_queries[LO], of_q[LO])?, g.add_(hi, of_q[HI])?];
            let [k_lo, v_lo] = [g.add_(of_keys[0], early[1])?, g.add_(of_keys[2], early[2])?];
            of_keys = [
                g.add_(k_lo, of_k[LO])?,
                g.add_(of_keys[1], of_k[HI])?,
                g.add_(v_lo, of_v[LO])?,
                g.add_(of_keys[3], of_v[HI])?,
            ];
            of_keys = self.passed_on(of_keys)?;
        }
        for k in [1, 2] {
            let own = self.rejoined([of_keys[2 * k - 2], of_keys[2 * k - 1]], dim)?;
            let own = self.to.out.graph.cast(own, self.graph().dtype(node.inputs[k]))?;
            self.apart.insert((a.id, k), own);
        }
        let out = self.rejoined(of_queries, dim)?;
        self.to.out.graph.cast(out, node.dtype)
    }

    /// Attends with a chunk of queries to one of keys: (out, lse). `at`: positions of both.
    fn chunk(
        &mut self,
        steps: &Steps,
        q: NodeId,
        kv: [NodeId; 2],
        at: [Places; 2],
        hidden: Hidden,
    ) -> Result<[NodeId; 2]> {
        let out = self.attend(&steps.rule, &[q], kv, at, hidden)?;
        let shape = self.graph_shape(out);
        let lse = self.result(out, 1, shape.remove(shape.rank() - 1), self.to.out.graph.dtype(out));
        Ok([out, lse])
    }

    /// The gradients of queries, keys and values of one product of chunks. `rows`: the queries, the gradient of their result, its
    /// products with the result, and lse.
    fn chunk_backward(
        &mut self,
        steps: &Steps,
        rows: [NodeId; 4],
        kv: [NodeId; 2],
        at: [Places; 2],
        hidden: Hidden,
    ) -> Result<[NodeId; 3]> {
        let main = self.attend(&steps.rule, &rows, kv, at, hidden)?;
        let wide = self.to.out.graph.dtype(main);
        let [k, v] = kv.map(|x| self.graph_shape(x));
        Ok([main, self.result(main, 1, k, wide), self.result(main, 2, v, wide)])
    }

    /// The logarithms of the sums of whole rows. Those of the forward pass are in chunks already; rows of padding may be NaN there.
    fn logarithms(&mut self, a: &Attention) -> Result<Chunks> {
        let lse = self.graph().node(a.id).inputs[5];
        let (node, whole) = (self.graph().node(lse), self.graph().shape(lse));
        if let Class::TupleGet = node.op.class
            && let Some(found) = self.in_chunks.get(&(node.inputs[0], node.attrs[0] as usize))
            && !a.queries.is_padded(&whole, self.devices)
        {
            return Ok(*found);
        }
        let own = self.block_of(a, 5)?;
        self.chunks_of(own, a.queries.dim)
    }

    fn merged(&mut self, a: [NodeId; 2], b: [NodeId; 2]) -> Result<[NodeId; 2]> {
        let both = merge(&mut self.to.out.graph, a, b)?;
        Ok([both[0], both[1]])
    }

    fn choice(&mut self, steps: &Steps, step: usize) -> Result<Choice> {
        let (from, coordinate) = (self.sender_of_step(step)?, self.coordinate()?);
        let g = &mut self.to.out.graph;
        let before = g.lt(from, coordinate)?;
        Ok(Choice { before, keys_at: [self.places(from, steps.chunk)?, self.late_places(from, steps.chunk)?] })
    }

    /// The lo chunk if the keys of a step are of a device before this one, else the hi chunk.
    fn chosen(&mut self, choice: &Choice, chunks: Chunks) -> Result<NodeId> {
        self.to.out.graph.where_(choice.before, chunks[LO], chunks[HI])
    }

    fn chosen_places(&mut self, choice: &Choice, places: [Places; 2]) -> Result<Places> {
        let first = self.chosen(choice, places.map(|x| x.first))?;
        Ok(Places { first, all: self.chosen(choice, places.map(|x| x.all))? })
    }

    /// What a gradient adds to that of the lo and of the hi chunk: all of it to the chosen one.
    fn either(&mut self, choice: &Choice, x: NodeId) -> Result<Chunks> {
        let after = self.to.out.graph.map(&elementwise::LOGICAL_NOT, &[choice.before])?;
        Ok([self.or_zero(choice.before, x)?, self.or_zero(after, x)?])
    }

    /// The positions of the late chunk of the device at a coordinate.
    fn late_places(&mut self, coordinate: NodeId, chunk: usize) -> Result<Places> {
        let last = 2 * self.devices as i64 - 1;
        let g = &mut self.to.out.graph;
        let last = g.int_constant(last);
        let number = g.sub(last, coordinate)?;
        self.places(number, chunk)
    }

    /// The chunks of this device of a tensor that it has a contiguous block of.
    fn chunks_of(&mut self, x: NodeId, dim: usize) -> Result<Chunks> {
        let (n, half) = (self.devices, self.graph_shape(x).dims()[dim] / 2);
        let mut halves = [x; 2];
        for (h, own) in halves.iter_mut().enumerate() {
            let sent = self.to.out.graph.slice(x, dim, h * half, (h + 1) * half, 1)?;
            let sender = |to: usize| (0..n).find(|from| owner(2 * from + h, n) == to).unwrap_or(to);
            *own = self.permuted(sent, &sender)?;
        }
        self.in_order(halves)
    }

    /// The contiguous block of this device: the inverse of `chunks_of`.
    fn rejoined(&mut self, chunks: Chunks, dim: usize) -> Result<NodeId> {
        let n = self.devices;
        let mut halves = self.in_order(chunks)?;
        for (h, own) in halves.iter_mut().enumerate() {
            *own = self.permuted(*own, &|to| owner(2 * to + h, n))?;
        }
        join::cat(&mut self.to.out.graph, &halves, dim)
    }

    /// Turns an even and an odd chunk into lo and hi, or back: the lo chunk of a device has its number.
    fn in_order(&mut self, x: [NodeId; 2]) -> Result<[NodeId; 2]> {
        let coordinate = self.coordinate()?;
        let g = &mut self.to.out.graph;
        let two = g.int_constant(2);
        let odd = g.map(&elementwise::REMAINDER, &[coordinate, two])?;
        let zero = g.int_constant(0);
        let even = g.eq(odd, zero)?;
        Ok([g.where_(even, x[0], x[1])?, g.where_(even, x[1], x[0])?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every half moves from one device to one, and a device gets an even and an odd chunk: its own two.
    #[test]
    fn halves_are_exchanged_by_permutations() {
        for n in 1..20 {
            for h in 0..2 {
                let mut to: Vec<usize> = (0..n).map(|from| owner(2 * from + h, n)).collect();
                to.sort_unstable();
                assert!(to.into_iter().eq(0..n), "{n} devices");
            }
            for device in 0..n {
                let own: Vec<usize> = (0..2 * n).filter(|chunk| owner(*chunk, n) == device).collect();
                assert_eq!(own, [device, 2 * n - 1 - device]);
                assert_ne!(own[0] % 2, own[1] % 2);
            }
        }
    }
}
