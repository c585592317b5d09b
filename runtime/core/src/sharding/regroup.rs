//! Defines cuts of a dim into blocks of segments, and how nodes map them that merge, split, cut or join dims.

use super::Signature;
use crate::dtype::DType;
use crate::mesh::{ONE_SECTION, units};
use crate::shape::Shape;
use smallvec::{SmallVec, smallvec};

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
