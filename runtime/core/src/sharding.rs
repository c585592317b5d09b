//! Describes how the work of an op divides among devices: which dims of its operands and results are cut together.
//!
//! A [`Factor`] is one way to divide a node. Along it each device gets a piece of some operands and computes, by the same op, its
//! piece of every result: a block of one dim, or a term of a combination (a partial sum). The other operands are needed whole. What
//! no factor mentions cannot be divided. The planner chooses a factor for each axis of a mesh and propagates placements through a
//! recorded graph with them; no factor names an axis or a way of training. Shardy (openxla/shardy, docs/propagation.md) has the
//! same notion for the dims of an op.
//!
//! The classes `Map`, `Cast` and `Reduce` have factors by rule. Other ops state theirs in [`Op::shard`]; without a statement only
//! whole operands will do, and a fused op is decomposed first.

use crate::dtype::DType;
use crate::mesh::{Combine, ONE_SECTION, units};
use crate::ops::elementwise::MapFn;
use crate::ops::{Class, Op, ReduceFn};
use crate::shape::Shape;
use smallvec::{SmallVec, smallvec};

/// What each device has of one operand or result along a factor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Piece {
    /// All of it.
    Whole,
    /// A block of that dim.
    Block(u8),
    /// A term: the tensor is the combination of all devices' terms.
    Term(Combine),
}

/// One way to divide a node among devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Factor {
    pub operands: SmallVec<[Piece; 4]>,
    pub results: SmallVec<[Piece; 2]>,
    /// The number of equal parts into which the blocks may be cut at most: a block has a whole number of them. 0 without blocks.
    pub units: usize,
    /// The attribute of the node, if there is one, that states the size of the dim of the result.
    pub size_attr: Option<u8>,
    /// How the op uses positions along the divided dim, if it does.
    pub positions: Option<Positions>,
}

/// An op whose operand 1 holds positions along the dim of operand 0 that is divided. Each device counts from the start of its
/// block, and leaves out positions in other blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Positions {
    /// It reads operand 0 there: 0 for what is left out.
    Read,
    /// It adds operand 2 to operand 0 there.
    Add,
}

/// The ways to divide one node.
pub type Factors = SmallVec<[Factor; 4]>;

/// What factors depend on: never on values, nor on a device.
#[derive(Clone, Copy, Debug)]
pub struct Signature<'a> {
    pub operands: &'a [(Shape, DType)],
    pub results: &'a [(Shape, DType)],
    pub attrs: &'a [i64],
}

impl Signature<'_> {
    /// Shape of operand `k`.
    pub fn shape(&self, k: usize) -> Shape {
        self.operands[k].0
    }

    /// Shape of the first result.
    pub fn out(&self) -> Shape {
        self.results[0].0
    }

    fn axis(&self) -> usize {
        self.attrs[0] as usize
    }
}

/// Computes the factors of a node.
pub type Rule = fn(&Signature) -> Factors;

impl Factor {
    fn new(operands: SmallVec<[Piece; 4]>, results: SmallVec<[Piece; 2]>, units: usize) -> Factor {
        Factor { operands, results, units, size_attr: None, positions: None }
    }

    /// A factor of one result: a block of dim `out` of it, and those pieces of the operands.
    pub fn block(operands: &[Piece], out: usize, units: usize) -> Factor {
        Factor::new(operands.into(), smallvec![Piece::Block(out as u8)], units)
    }

    /// A factor along which each device computes a term of the one result.
    pub fn terms(operands: &[Piece], combine: Combine, units: usize) -> Factor {
        Factor::new(operands.into(), smallvec![Piece::Term(combine)], units)
    }

    /// A linear op of terms of a sum: the operands in `terms` are such terms, the others whole.
    fn linear(operands: usize, terms: &[usize]) -> Factor {
        let piece = |k| if terms.contains(&k) { Piece::Term(Combine::Sum) } else { Piece::Whole };
        Factor::terms(&(0..operands).map(piece).collect::<SmallVec<[Piece; 4]>>(), Combine::Sum, 0)
    }
}

/// Returns the ways to divide a node of `op`.
pub fn factors(op: &Op, s: &Signature) -> Factors {
    if let Some(rule) = op.shard {
        return rule(s);
    }
    match op.class {
        Class::Map(f) => map(f, s),
        Class::Cast => cast(s),
        Class::Reduce(f) => reduce(f, s),
        _ => Factors::new(),
    }
}

/// Every dim is a factor: no element depends on another one. Operands that broadcast along a dim are whole.
pub fn elementwise(s: &Signature) -> Factors {
    let out = s.out();
    let all_dims = (0..out.rank()).map(|d| {
        let piece = |(shape, _): &(Shape, DType)| match (d + shape.rank()).checked_sub(out.rank()) {
            Some(own) if shape.dims()[own] == out.dims()[d] => Piece::Block(own as u8),
            _ => Piece::Whole,
        };
        let results = s.results.iter().map(|_| Piece::Block(d as u8)).collect();
        Factor::new(s.operands.iter().map(piece).collect(), results, out.dims()[d])
    });
    all_dims.collect()
}

fn map(f: MapFn, s: &Signature) -> Factors {
    let mut out = elementwise(s);
    let floats = s.operands.iter().all(|(_, d)| d.is_float() || *d == DType::Bool);
    let linear: &[&[usize]] = match f {
        MapFn::Copy | MapFn::Neg => &[&[0]],
        MapFn::Add | MapFn::Sub => &[&[0, 1]],
        MapFn::Mul => &[&[0], &[1]],
        MapFn::Div if floats => &[&[0]],
        MapFn::Where => &[&[1, 2]],
        _ => &[],
    };
    out.extend(linear.iter().map(|terms| Factor::linear(s.operands.len(), terms)));
    out
}

/// A term of a sum may be widened. Rounding it to fewer bits would round every term.
fn cast(s: &Signature) -> Factors {
    let mut out = elementwise(s);
    let (from, to) = (s.operands[0].1, s.results[0].1);
    if from.is_float() && to.is_float() && to.size() >= from.size() {
        out.push(Factor::linear(1, &[0]));
    }
    out
}

fn reduce(f: ReduceFn, s: &Signature) -> Factors {
    let (from, to) = (s.attrs[0] as usize, s.attrs[1] as usize);
    let combine = match f {
        ReduceFn::Sum => Some(Combine::Sum),
        ReduceFn::Max => Some(Combine::Max),
        ReduceFn::Min => Some(Combine::Min),
        ReduceFn::Prod => None,
    };
    let mut out = Factors::new();
    for (d, &size) in s.shape(0).dims().iter().enumerate() {
        let operand = [Piece::Block(d as u8)];
        if !(from..to).contains(&d) {
            out.push(Factor::block(&operand, if d < from { d } else { d - (to - from) }, size));
        } else if let Some(combine) = combine {
            out.push(Factor::terms(&operand, combine, size));
        }
    }
    if f == ReduceFn::Sum {
        out.push(Factor::linear(1, &[0]));
    }
    out
}

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
    batch_and_heads(s, 3)
}

/// As [`attention`]; the gradient, the result and the logarithms of sums stand before the mask.
pub fn attention_backward(s: &Signature) -> Factors {
    batch_and_heads(s, 6)
}

/// Batch dims and heads divide. A query head stays with its key head, so the units of the heads are the key heads. The first
/// `required` operands have these dims; documents have no heads.
fn batch_and_heads(s: &Signature, required: usize) -> Factors {
    let n = s.shape(0).rank();
    let documents = (s.attrs[5] != 0).then_some(s.operands.len() - 1);
    let divide = |d: usize| {
        let size = s.shape(0).dims()[d];
        let piece = |k: usize| match d + s.shape(k).rank() {
            _ if k < required => Piece::Block(d as u8),
            _ if Some(k) == documents => {
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

/// A block of every segment of a dim: the dim is `segments` parts of equal size, and a device has up to `block` adjacent elements of
/// each, in their order. Devices cut each segment from its start on; the last blocks may be shorter, or empty. A single segment may
/// be cut into sections of different sizes: then a device has so many blocks of each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Cut {
    pub dim: usize,
    pub segments: usize,
    pub sections: [u8; 3],
    pub block: usize,
}

impl Cut {
    pub fn has_sections(&self) -> bool {
        self.sections != ONE_SECTION
    }

    /// The size of a segment, or of a section for each of its blocks.
    pub fn segment(&self, whole: &Shape) -> usize {
        whole.dims()[self.dim] / self.parts()
    }

    /// The number of blocks of a device.
    pub fn parts(&self) -> usize {
        self.segments * units(self.sections)
    }

    /// The elements of the dim on a device.
    pub fn size(&self) -> usize {
        self.parts() * self.block
    }

    /// The shape of a device's part of a tensor.
    pub fn local(&self, whole: &Shape) -> Shape {
        whole.with(self.dim, self.size())
    }

    /// Whether some of `devices` have padding.
    pub fn is_padded(&self, whole: &Shape, devices: usize) -> bool {
        self.block * devices != self.segment(whole)
    }

    /// The part of a dim that is some of its sections.
    fn of_sections(self, sections: &[u8]) -> Option<Cut> {
        let first = *sections.first().filter(|n| **n > 0)?;
        if sections.iter().all(|n| *n == first) {
            let (segments, block) = (sections.len(), self.block * usize::from(first));
            return Some(Cut { segments, sections: ONE_SECTION, block, ..self });
        }
        let mut own = [0; 3];
        own[..sections.len()].copy_from_slice(sections);
        Some(Cut { sections: own, ..self })
    }
}

/// How a node divides that merges, splits, cuts or joins dims: cuts of its operands go with one of its result.
#[derive(Debug)]
pub struct Regrouping {
    /// The cut of the result, given those of the operands.
    pub forward: fn(&Signature, &[Cut]) -> Option<Cut>,
    /// The cuts of the operands, given that of the result.
    pub back: fn(&Signature, Cut) -> Option<SmallVec<[Cut; 2]>>,
    /// Attributes of the node that computes the part of a device, given the cuts of operand 0 and of the result.
    pub attrs: fn(&Signature, Cut, Cut) -> SmallVec<[i64; 6]>,
}

/// Dims are merged and split: a segment, and what repeats within a block, are whole rows of both.
pub static RESHAPING: Regrouping = Regrouping {
    forward: |s, cuts| reshaped(&s.shape(0), &s.out(), cuts[0]),
    back: |s, cut| reshaped(&s.out(), &s.shape(0), cut).map(|cut| smallvec![cut]),
    attrs: |s, _, to| to.local(&s.out()).dims().iter().map(|d| *d as i64).collect(),
};

/// Seen as (segments, rest, inner) elements, the cut divides `rest`; both shapes have such a view.
fn reshaped(x: &Shape, y: &Shape, cut: Cut) -> Option<Cut> {
    let product = |dims: &[usize]| dims.iter().product::<usize>();
    let (a, b) = (x.dims(), y.dims());
    if x.numel() == 0 {
        return None;
    }
    let outer = product(&a[..cut.dim]) * cut.segments;
    let (mut before, block) = (1, cut.block * product(&a[cut.dim + 1..]));
    for (dim, &size) in b.iter().enumerate() {
        let inner = product(&b[dim + 1..]);
        // The segments end within this dim, or with the dim before it.
        let segments = outer / before;
        if outer.is_multiple_of(before) && size.is_multiple_of(segments) && size > segments {
            // Sections are those of one segment.
            let sections = !cut.has_sections() || segments == 1 && size.is_multiple_of(units(cut.sections));
            let fits = block.is_multiple_of(inner) && sections;
            return fits.then_some(Cut { dim, segments, block: block / inner, ..cut });
        }
        before *= size;
    }
    None
}

/// `attrs`: [dim, start, step, length]: whole segments are taken.
pub static SLICING: Regrouping = Regrouping {
    forward: |s, cuts| as_segments(s, &s.shape(0), cuts[0], &s.out()),
    back: |s, cut| as_segments(s, &s.out(), cut, &s.shape(0)).map(|cut| smallvec![cut]),
    attrs: |s, from, to| {
        let start = s.attrs[1] as usize / from.segment(&s.shape(0)) * from.block;
        smallvec![s.attrs[0], start as i64, s.attrs[2], to.size() as i64]
    },
};

/// `attrs`: [dim, start, step, total, fill bits]: whole segments are added.
pub static PADDING: Regrouping = Regrouping {
    forward: |s, cuts| as_segments(s, &s.shape(0), cuts[0], &s.out()),
    back: |s, cut| as_segments(s, &s.out(), cut, &s.shape(0)).map(|cut| smallvec![cut]),
    attrs: |s, from, to| {
        let start = s.attrs[1] as usize / from.segment(&s.shape(0)) * from.block;
        smallvec![s.attrs[0], start as i64, s.attrs[2], to.size() as i64, s.attrs[4]]
    },
};

/// The cut of `y` in segments as large as those of `x`, of which one is a slice of the other from `attrs[1]` on.
fn as_segments(s: &Signature, x: &Shape, cut: Cut, y: &Shape) -> Option<Cut> {
    let segment = cut.segment(x);
    let size = y.dims()[s.axis()];
    if cut.has_sections() {
        // Whole sections of them are taken.
        let end = |k: usize| cut.sections[..k].iter().map(|n| usize::from(*n)).sum::<usize>() * segment;
        let at = |place: usize| (0..=cut.sections.len()).find(|k| end(*k) == place);
        let taken =
            s.attrs[2] == 1 && cut.dim == s.axis() && size > 0 && s.attrs.len() == 4 && size < x.dims()[s.axis()];
        let start = s.attrs[1] as usize;
        let (from, to) = (at(start).filter(|_| taken)?, at(start + size)?);
        return cut.of_sections(&cut.sections[from..to]);
    }
    let fits = cut.dim == s.axis() && s.attrs[2] == 1 && segment > 0 && size > 0;
    (fits && size.is_multiple_of(segment) && (s.attrs[1] as usize).is_multiple_of(segment))
        .then(|| Cut { segments: size / segment, ..cut })
}

/// `attrs`: [dim]: operands of equal segments are joined, or some whose blocks are in the same proportion as they are.
pub static JOINING: Regrouping = Regrouping {
    forward: |s, cuts| {
        let segment = |k: usize| cuts[k].segment(&s.shape(k));
        let alike = |k: usize| cuts[k].dim == s.axis() && cuts[k].block == cuts[0].block && segment(k) == segment(0);
        let segments = cuts.iter().map(|cut| cut.segments).sum();
        let plain = cuts.iter().all(|cut| !cut.has_sections());
        if plain && (0..cuts.len()).all(alike) { Some(Cut { segments, ..cuts[0] }) } else { in_sections(s, cuts) }
    },
    back: |s, cut| {
        if cut.has_sections() {
            let own = |k: usize| cut.of_sections(&[*cut.sections.get(k)?]);
            let own: SmallVec<[Cut; 2]> = (0..s.operands.len()).map(own).collect::<Option<_>>()?;
            return in_sections(s, &own).filter(|found| *found == cut).map(|_| own);
        }
        let segment = cut.segment(&s.out());
        let own = |(shape, _): &(Shape, DType)| {
            let size = shape.dims()[s.axis()];
            (size > 0 && size.is_multiple_of(segment)).then(|| Cut { segments: size / segment, ..cut })
        };
        if cut.dim == s.axis() && segment > 0 { s.operands.iter().map(own).collect() } else { None }
    },
    attrs: |s, _, _| s.attrs.into(),
};

/// `attrs`: [axis, dim, devices]: the blocks of the other axis become segments.
pub static GATHERING: Regrouping = Regrouping {
    forward: |s, cuts| gathered(cuts[0], s.attrs),
    back: |s, cut| scattered(cut, s.attrs).map(|cut| smallvec![cut]),
    attrs: |s, _, _| s.attrs.into(),
};

/// `attrs`: [axis, dim, devices, combination]: segments are the blocks of the other axis.
pub static SCATTERING: Regrouping = Regrouping {
    forward: |s, cuts| scattered(cuts[0], s.attrs),
    back: |s, cut| gathered(cut, s.attrs).map(|cut| smallvec![cut]),
    attrs: |s, _, _| s.attrs.into(),
};

/// Joined operands as sections.
fn in_sections(s: &Signature, cuts: &[Cut]) -> Option<Cut> {
    let block = cuts.iter().map(|cut| cut.block).min().filter(|n| *n > 0 && cuts.len() <= 3)?;
    let unit = cuts.iter().zip(s.operands).find(|(cut, _)| cut.block == block).map(|(cut, x)| cut.segment(&x.0))?;
    let mut sections = [0; 3];
    for (k, cut) in cuts.iter().enumerate() {
        let size = s.shape(k).dims()[s.axis()];
        let plain = cut.dim == s.axis() && cut.segments == 1 && !cut.has_sections();
        if !plain || cut.block % block != 0 || size != cut.block / block * unit {
            return None;
        }
        sections[k] = u8::try_from(cut.block / block).ok()?;
    }
    Some(Cut { sections, block, ..cuts[0] })
}

fn gathered(cut: Cut, attrs: &[i64]) -> Option<Cut> {
    (cut.dim as i64 == attrs[1] && !cut.has_sections())
        .then(|| Cut { segments: cut.segments * attrs[2] as usize, ..cut })
}

fn scattered(cut: Cut, attrs: &[i64]) -> Option<Cut> {
    let devices = attrs[2] as usize;
    (cut.dim as i64 == attrs[1] && cut.segments.is_multiple_of(devices) && !cut.has_sections())
        .then(|| Cut { segments: cut.segments / devices, ..cut })
}
