//! States the factors of views, library ops, fused ops and collectives: see [`Op::shard`](crate::ops::Op::shard).

use super::{Factor, Factors, Meeting, Piece, Positions, Signature, elementwise};
use crate::dtype::DType;
use crate::mesh::Combine;
use crate::shape::Shape;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// A view without attributes: the result has the dims of the first operand.
pub fn same_dims(s: &Signature) -> Factors {
    let mut out = elementwise(s);
    out.push(Factor::linear(s.operands.len(), &[0]));
    out
}

/// The result's dim `i` is the operand's dim `attrs[i]`.
pub fn permute(s: &Signature) -> Factors {
    let factor = |(i, &a): (usize, &i64)| Factor::block(&[Piece::Block(a as u8)], i, s.out().dims()[i]);
    let mut out: Factors = s.attrs.iter().enumerate().map(factor).collect();
    out.push(Factor::linear(1, &[0]));
    out
}

/// Dims of size 1 and new leading dims repeat: a repeated dim divides with a whole operand. The attributes are the result's dims.
pub fn expand(s: &Signature) -> Factors {
    let (x, y) = (s.shape(0), s.out());
    let lead = y.rank() - x.rank();
    let mut out = Factors::new();
    for (d, &size) in y.dims().iter().enumerate() {
        let own = d.checked_sub(lead).filter(|k| x.dims()[*k] == size);
        let operand = own.map_or(Piece::Whole, |k| Piece::Block(k as u8));
        out.push(Factor { size_attr: Some(d as u8), ..Factor::block(&[operand], d, size) });
    }
    out.push(Factor::linear(1, &[0]));
    out
}

/// Dims are merged and split in groups of equal size. Of each group the outermost dims are cut together, in blocks that are a whole
/// number of rows of both. The attributes are the result's dims.
pub fn reshape(s: &Signature) -> Factors {
    let (x, y) = (s.shape(0), s.out());
    let mut out = Factors::new();
    if x.numel() > 0 {
        let (a, b) = (x.dims(), y.dims());
        let (mut i, mut j) = (0, 0);
        while i < a.len() && j < b.len() {
            let (first_a, first_b) = (i, j);
            let (mut size_a, mut size_b) = (a[i], b[j]);
            (i, j) = (i + 1, j + 1);
            while size_a != size_b {
                if size_a < size_b {
                    size_a *= a[i];
                    i += 1;
                } else {
                    size_b *= b[j];
                    j += 1;
                }
            }
            // Dims of size 1 in front of a group cut nothing.
            let wide = |dims: &[usize], from: usize, to: usize| (from..to).find(|d| dims[*d] > 1);
            if let (Some(p), Some(q)) = (wide(a, first_a, i), wide(b, first_b, j)) {
                let units = gcd(a[p], b[q]);
                out.push(Factor { size_attr: Some(q as u8), ..Factor::block(&[Piece::Block(p as u8)], q, units) });
            }
        }
    }
    out.push(Factor::linear(1, &[0]));
    out
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// An op along the dim `attrs[0]`: every other dim in which all operands of the result's rank agree divides. Operands of another
/// rank (a list of indices) are whole.
pub fn along_other_dims(s: &Signature) -> Factors {
    let (out, axis) = (s.out(), s.axis());
    let mut all = Factors::new();
    for (d, &size) in out.dims().iter().enumerate().filter(|(d, _)| *d != axis) {
        let same_rank = |shape: &Shape| shape.rank() == out.rank();
        if s.operands.iter().any(|(shape, _)| same_rank(shape) && shape.dims()[d] != size) {
            continue;
        }
        let piece = |(shape, _): &(Shape, DType)| if same_rank(shape) { Piece::Block(d as u8) } else { Piece::Whole };
        let results = s.results.iter().map(|_| Piece::Block(d as u8)).collect();
        all.push(Factor::new(s.operands.iter().map(piece).collect(), results, size));
    }
    all
}

/// As [`along_other_dims`], for an op that is linear in its first operand.
pub fn linear_along_other_dims(s: &Signature) -> Factors {
    let mut all = along_other_dims(s);
    all.push(Factor::linear(s.operands.len(), &[0]));
    all
}

/// Padding along `attrs[0]` with the number in `attrs[4]`: linear if that is 0.
pub fn pad(s: &Signature) -> Factors {
    if s.attrs[4] == 0 { linear_along_other_dims(s) } else { along_other_dims(s) }
}

/// Windows of the dim `attrs[0]` become a last dim, or are summed into it: the other dims divide.
pub fn windows(s: &Signature) -> Factors {
    let rank = s.shape(0).rank().min(s.out().rank());
    let block = |d: usize| Factor::block(&[Piece::Block(d as u8)], d, s.out().dims()[d]);
    let mut all: Factors = (0..rank).filter(|d| *d != s.axis()).map(block).collect();
    all.push(Factor::linear(1, &[0]));
    all
}

/// x, index: what x has along `attrs[0]` at positions that the index holds. That dim divides, too.
pub fn gather(s: &Signature) -> Factors {
    let mut all = along_other_dims(s);
    all.push(reads_positions(s));
    all
}

/// The device reads the positions of its block; the sum over devices has all.
fn reads_positions(s: &Signature) -> Factor {
    let operands = [Piece::Block(s.attrs[0] as u8), Piece::Whole];
    let terms = Factor::terms(&operands, Combine::Sum, s.shape(0).dims()[s.axis()]);
    Factor { positions: Some(Positions::Read), ..terms }
}

/// As [`linear_along_other_dims`] for x, index, src: src is added to x along `attrs[0]`. That dim divides, too.
pub fn scatter_add(s: &Signature) -> Factors {
    let mut all = along_other_dims(s);
    all.push(adds_positions(s));
    all
}

/// The device adds to its block what belongs there.
fn adds_positions(s: &Signature) -> Factor {
    let operands = [Piece::Block(s.attrs[0] as u8), Piece::Whole, Piece::Whole];
    let block = Factor::block(&operands, s.axis(), s.out().dims()[s.axis()]);
    Factor { positions: Some(Positions::Add), ..block }
}

/// x, index (K): the slices along `attrs[0]` that the index names. The index divides, too.
pub fn select(s: &Signature) -> Factors {
    let mut all = if s.shape(0).rank() == 1 { Factors::new() } else { along_other_dims(s) };
    all.push(Factor::block(&[Piece::Whole, Piece::Block(0)], s.axis(), s.shape(1).numel()));
    all.push(Factor::linear(2, &[0]));
    all.push(reads_positions(s));
    all
}

/// x, index (K), src (.., K, ..): slices of src are added to x. Each device may add a part of the slices to its term of x.
pub fn select_add(s: &Signature) -> Factors {
    let mut all = if s.shape(0).rank() == 1 { Factors::new() } else { along_other_dims(s) };
    let parts = [Piece::Term(Combine::Sum), Piece::Block(0), Piece::Block(s.attrs[0] as u8)];
    all.push(Factor::terms(&parts, Combine::Sum, s.shape(1).numel()));
    all.push(Factor::linear(3, &[0, 2]));
    all.push(adds_positions(s));
    all
}

/// Operands that are joined along `attrs[0]`.
pub fn join(s: &Signature) -> Factors {
    let mut all = along_other_dims(s);
    let each: SmallVec<[usize; 4]> = (0..s.operands.len()).collect();
    all.push(Factor::linear(s.operands.len(), &each));
    all
}

/// A product (.., M, K) x (.., K, N).
pub fn product(s: &Signature) -> Factors {
    let r = s.shape(0).rank() as u8;
    let size = |k: usize, d: u8| s.shape(k).dims()[d as usize];
    let mut all = Factors::new();
    for d in 0..r - 2 {
        all.push(Factor::block(&[Piece::Block(d); 2], d as usize, size(0, d)));
    }
    all.push(Factor::block(&[Piece::Block(r - 2), Piece::Whole], r as usize - 2, size(0, r - 2)));
    all.push(Factor::block(&[Piece::Whole, Piece::Block(r - 1)], r as usize - 1, size(1, r - 1)));
    all.push(Factor::terms(&[Piece::Block(r - 1), Piece::Block(r - 2)], Combine::Sum, size(0, r - 1)));
    all.push(Factor::linear(2, &[0]));
    all.push(Factor::linear(2, &[1]));
    all
}

/// x (M, I), weight (O, I), bias (O): x times weight transposed, plus bias. The bias is a term where the product is one.
pub fn linear(s: &Signature) -> Factors {
    let (x, w) = (s.shape(0), s.shape(1));
    smallvec![
        Factor::block(&[Piece::Block(0), Piece::Whole, Piece::Whole], 0, x.dims()[0]),
        Factor::block(&[Piece::Whole, Piece::Block(0), Piece::Block(0)], 1, w.dims()[0]),
        Factor::terms(&[Piece::Block(1), Piece::Block(1), Piece::Term(Combine::Sum)], Combine::Sum, x.dims()[1]),
    ]
}

/// q, k, v of attention, then a mask and documents if there are any.
pub fn attention(s: &Signature) -> Factors {
    let mut all = batch_and_heads(s, 3, documents(s));
    all.extend(queries(s, 3));
    all
}

/// As [`attention`]; the gradient, the result and the logarithms of sums stand before the mask.
pub fn attention_backward(s: &Signature) -> Factors {
    let mut all = batch_and_heads(s, 6, documents(s));
    all.extend(queries(s, 6));
    all
}

/// The operand of attention that tells documents, as a range; empty if there is none.
fn documents(s: &Signature) -> Range<usize> {
    let n = s.operands.len();
    n - usize::from(s.attrs[5] != 0)..n
}

/// As [`attention`] to a block of keys; an optional operand says which a query sees.
pub fn attention_block(s: &Signature) -> Factors {
    batch_and_heads(s, 3, documents_of_block(s))
}

/// As [`attention_block`]; the gradient, its sums by row and the logarithms of sums stand before the optional operands.
pub fn attention_block_backward(s: &Signature) -> Factors {
    batch_and_heads(s, 6, documents_of_block(s))
}

fn documents_of_block(s: &Signature) -> Range<usize> {
    crate::ops::attention_block::documents(s.attrs, s.operands.len()).map_or(0..0, |[own, theirs]| own..theirs + 1)
}

/// Queries divide: where there are as many keys as queries, with keys that are divided alike, or with all keys on every device.
/// Documents are whole, for they belong to queries and keys.
fn queries(s: &Signature, required: usize) -> Factors {
    let n = s.shape(0).rank();
    let (at, size) = (n - 2, s.shape(0).dims()[n - 2]);
    let block = Piece::Block(at as u8);
    let mask = (s.operands.len() > required + usize::from(s.attrs[5] != 0)).then_some(required);
    let of_mask = mask.map(|k| match s.shape(k).dims() {
        [.., t, _] if *t == size => Piece::Block(s.shape(k).rank() as u8 - 2),
        _ => Piece::Whole,
    });
    let factor = |keys: Piece| {
        let piece = |k: usize| match k {
            1 | 2 => keys,
            _ if k < required => block,
            _ if Some(k) == mask => of_mask.unwrap_or(Piece::Whole),
            _ => Piece::Whole,
        };
        let term = |piece: Piece| if piece == Piece::Whole { Piece::Term(Combine::Sum) } else { piece };
        let result = |k: usize| match k {
            // The gradients of keys and values, and of the mask.
            1 | 2 if required > 3 => term(keys),
            3 => of_mask.map_or(block, term),
            _ => block,
        };
        let operands = (0..s.operands.len()).map(piece).collect();
        let results = (0..s.results.len()).map(result).collect();
        Factor { meets: Some(Meeting::Keys), ..Factor::new(operands, results, size) }
    };
    let alike = s.shape(1).dims()[n - 2] == size;
    // The first of equal cost is taken: keys that the forward pass has gathered are not kept for the backward pass.
    alike.then_some(block).into_iter().chain([Piece::Whole]).map(factor).collect()
}

/// Batch dims and heads divide. A query head stays with its key head, so the units of the heads are the key heads. The first
/// `required` operands have these dims; documents have no heads.
fn batch_and_heads(s: &Signature, required: usize, documents: Range<usize>) -> Factors {
    let n = s.shape(0).rank();
    let divide = |d: usize| {
        let size = s.shape(0).dims()[d];
        let piece = |k: usize| match d + s.shape(k).rank() {
            _ if k < required => Piece::Block(d as u8),
            _ if documents.contains(&k) => {
                if d + 3 < n {
                    Piece::Block(d as u8)
                } else {
                    Piece::Whole
                }
            }
            own if own >= n && s.shape(k).dims()[own - n] == size => Piece::Block((own - n) as u8),
            _ => Piece::Whole,
        };
        let operands: SmallVec<[Piece; 4]> = (0..s.operands.len()).map(piece).collect();
        // Result 3 is the gradient of the mask.
        let of_mask = |piece| if piece == Piece::Whole { Piece::Term(Combine::Sum) } else { piece };
        let result = |k| if k == 3 { of_mask(operands[required]) } else { Piece::Block(d as u8) };
        let results = (0..s.results.len()).map(result).collect();
        Factor::new(operands, results, s.shape(1).dims()[d])
    };
    (0..n - 2).map(divide).collect()
}

/// x (N, C, ..), weight (O, C, ..), bias (O) of a convolution: images divide, and the channels of the result if there is one group.
pub fn convolution(s: &Signature) -> Factors {
    let more = |piece: Piece, bias: Piece| -> SmallVec<[Piece; 4]> {
        let given = if piece == Piece::Whole { [Piece::Block(0), Piece::Whole] } else { [Piece::Whole, piece] };
        given.into_iter().chain([bias]).take(s.operands.len()).collect()
    };
    let mut all: Factors = smallvec![Factor::block(&more(Piece::Whole, Piece::Whole), 0, s.shape(0).dims()[0])];
    if s.attrs[8] == 1 {
        all.push(Factor::block(&more(Piece::Block(0), Piece::Block(0)), 1, s.out().dims()[1]));
    }
    all
}

/// weight, gradient, bias: images divide. Their number is attribute 9.
pub fn convolution_backward_input(s: &Signature) -> Factors {
    let operands: SmallVec<[Piece; 4]> =
        [Piece::Whole, Piece::Block(0), Piece::Whole].into_iter().take(s.operands.len()).collect();
    smallvec![Factor { size_attr: Some(9), ..Factor::block(&operands, 0, s.out().dims()[0]) }]
}

/// x, gradient: the images of a device make a term; channels of the gradient are those of the result, whose number is attribute 9.
pub fn convolution_backward_weight(s: &Signature) -> Factors {
    let mut all: Factors = smallvec![Factor::terms(&[Piece::Block(0); 2], Combine::Sum, s.shape(0).dims()[0])];
    if s.attrs[8] == 1 {
        let channels = Factor::block(&[Piece::Whole, Piece::Block(1)], 0, s.out().dims()[0]);
        all.push(Factor { size_attr: Some(9), ..channels });
    }
    all
}

/// Images and channels of a pool divide, for all operands alike.
pub fn images_and_channels(s: &Signature) -> Factors {
    let all = |d: usize| SmallVec::<[Piece; 4]>::from_elem(Piece::Block(d as u8), s.operands.len());
    (0..2).map(|d| Factor::block(&all(d), d, s.out().dims()[d])).collect()
}

/// x (N, C, H, W), matrix (N, 2, 3): images divide with their matrices, channels with whole ones.
pub fn affine_sample(s: &Signature) -> Factors {
    let dims = s.out();
    let images = Factor::block(&[Piece::Block(0), Piece::Block(0)], 0, dims.dims()[0]);
    let channels = Factor::block(&[Piece::Block(1), Piece::Whole], 1, dims.dims()[1]);
    [images, channels].into_iter().collect()
}

/// A sum over devices along another axis: linear, and no element depends on another one. `attrs`: [axis, combination].
pub fn all_reduce(s: &Signature) -> Factors {
    let mut all = elementwise(s);
    if s.attrs[1] == Combine::Sum as i64 {
        all.push(Factor::linear(1, &[0]));
    }
    all
}

/// A collective that joins or cuts the dim `attrs[1]` along another axis: the other dims divide.
pub fn other_dims_of_collective(s: &Signature) -> Factors {
    let dims = (0..s.out().rank()).filter(|d| *d as i64 != s.attrs[1]);
    let mut all: Factors = dims.map(|d| Factor::block(&[Piece::Block(d as u8)], d, s.out().dims()[d])).collect();
    if s.attrs.get(3).is_none_or(|combine| *combine == Combine::Sum as i64) {
        all.push(Factor::linear(1, &[0]));
    }
    all
}
