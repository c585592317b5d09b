//! Defines the placement of tensors on the devices of a mesh.
//!
//! A [`Placement`] says for each axis whether the devices along it hold the whole tensor, a block of one dim, or partial results
//! that a reduction combines. Uneven dims are cut into blocks of equal size: the last ones are padded, and [`Local::valid`] counts
//! the elements that belong to the tensor. [`Placement::runs`] lists where they are.

use crate::error::{Error, Result};
use crate::mesh::{Axis, Coordinates, Mesh};
use crate::shape::{MAX_RANK, Shape};
use smallvec::SmallVec;
use std::fmt::{self, Display};

/// How partial results are combined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Combine {
    Sum,
    Max,
    Min,
}

/// What the devices along one axis hold of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Along {
    /// Each holds all of it.
    #[default]
    Replicated,
    /// Each holds a block of that dim.
    Split(u8),
    /// The dim is so many segments of equal size, and each device holds a block of every segment, in their order: queries, keys and
    /// values that one weight projects.
    Segments(u8, u8),
    /// The dim is up to three sections whose sizes are to each other as these numbers, of which 0 is none, and each device holds a
    /// block of every section: queries beside fewer keys and values.
    Sections(u8, [u8; 3]),
    /// Each holds a term; the tensor is their combination.
    Partial(Combine),
    /// Only the device with that coordinate holds it: the one that has this pipeline stage.
    Stage { device: u8, stage: u8 },
}

impl Along {
    /// The dim that is split, its number of segments, and the sizes of the sections of each.
    pub fn split(self) -> Option<(usize, usize, [u8; 3])> {
        match self {
            Along::Split(dim) => Some((dim.into(), 1, ONE_SECTION)),
            Along::Segments(dim, segments) => Some((dim.into(), segments.into(), ONE_SECTION)),
            Along::Sections(dim, sizes) => Some((dim.into(), 1, sizes)),
            Along::Replicated | Along::Partial(_) | Along::Stage { .. } => None,
        }
    }
}

/// A dim that is not cut into sections.
pub const ONE_SECTION: [u8; 3] = [1, 0, 0];

/// The sum of the sizes of sections.
pub fn units(sections: [u8; 3]) -> usize {
    sections.iter().map(|n| usize::from(*n)).sum()
}

/// The most segments of a dim: a plan key has 10 bits for what an axis does.
pub const MOST_SEGMENTS: usize = 63;

/// What each device of a mesh holds of a tensor, axis by axis.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Placement {
    axes: [Along; Axis::ALL.len()],
}

/// The part of a tensor that one device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Local {
    /// The shape in the device's memory: the same on every device.
    pub shape: Shape,
    /// The first element's position in the tensor; of a dim in segments, its position in each segment.
    pub start: [usize; MAX_RANK],
    /// How far the tensor's elements reach in each dim; the rest is padding. Of a dim in segments, how far in each.
    pub valid: Shape,
}

/// Elements that are adjacent both in the memory of a device and in the tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Index of the first element in the device's memory.
    pub local: usize,
    /// Linear index of the first element in the tensor.
    pub global: usize,
    pub len: usize,
}

impl Placement {
    /// All of the tensor on every device.
    pub const REPLICATED: Placement = Placement { axes: [Along::Replicated; Axis::ALL.len()] };

    /// This placement, with another one along `axis`.
    #[must_use]
    pub fn with(mut self, axis: Axis, along: Along) -> Placement {
        self.axes[axis as usize] = along;
        self
    }

    /// Words that differ for different placements, for plan keys.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let code = |along: &Along| match along {
            Along::Replicated => 0,
            Along::Split(dim) => 1 + u64::from(*dim),
            Along::Partial(combine) => 1 + MAX_RANK as u64 + *combine as u64,
            Along::Segments(dim, segments) => (2 + u64::from(*segments)) * MAX_RANK as u64 + u64::from(*dim),
            // Another word has the sizes.
            Along::Sections(dim, _) => (3 + MOST_SEGMENTS + usize::from(*dim)) as u64 * MAX_RANK as u64,
            // Another word has the coordinate and the stage.
            Along::Stage { .. } => (1 << 10) - 1,
        };
        let first = self.axes.iter().fold(0, |word, along| word << 10 | code(along));
        let sizes = self.axes.iter().filter_map(|along| match along {
            Along::Sections(_, [a, b, c]) => Some(u64::from(*a) | u64::from(*b) << 8 | u64::from(*c) << 16),
            Along::Stage { device, stage } => Some(u64::from(*device) | u64::from(*stage) << 8),
            _ => None,
        });
        std::iter::once(first).chain(sizes)
    }

    pub fn along(&self, axis: Axis) -> Along {
        self.axes[axis as usize]
    }

    /// Whether every device of `mesh` holds the whole tensor.
    pub fn is_replicated(&self, mesh: &Mesh) -> bool {
        Axis::ALL.into_iter().all(|axis| mesh.size(axis) == 1 || self.along(axis) == Along::Replicated)
    }

    /// The pipeline stage that alone holds the tensor, if one does.
    pub fn stage(&self) -> Option<usize> {
        match self.along(Axis::Pp) {
            Along::Stage { stage, .. } => Some(stage.into()),
            _ => None,
        }
    }

    /// The coordinate along `pp` of the devices that alone hold the tensor, if some do.
    pub fn stage_device(&self) -> Option<usize> {
        match self.along(Axis::Pp) {
            Along::Stage { device, .. } => Some(device.into()),
            _ => None,
        }
    }

    /// Whether the device at `at` holds something of the tensor.
    pub fn is_held(&self, at: &Coordinates) -> bool {
        let held = |axis: Axis| !matches!(self.along(axis), Along::Stage { device, .. } if usize::from(device) != at[axis as usize]);
        Axis::ALL.into_iter().all(held)
    }

    /// The part of a tensor of shape `global` on the device at `at`. Where two axes split one dim, the inner one splits the blocks of
    /// the outer one.
    pub fn local(&self, mesh: &Mesh, at: &Coordinates, global: &Shape) -> Result<Local> {
        let (mut shape, mut valid, mut start) = (*global, *global, [0; MAX_RANK]);
        for axis in Axis::ALL {
            let Some((dim, segments, sections)) = self.along(axis).split() else { continue };
            let (devices, units) = (mesh.size(axis), units(sections));
            let error =
                |what: String| Err(Error::shape("placement", format!("{} splits dim {dim}{what}", axis.name())));
            if dim >= global.rank() {
                return error(format!(", which shape {global} does not have"));
            }
            let size = shape.dims()[dim];
            if !(1..=MOST_SEGMENTS).contains(&segments) || !size.is_multiple_of(segments) {
                return error(format!(
                    " of size {size} in {segments} segments; they must be equal, and at most {MOST_SEGMENTS}"
                ));
            }
            if units == 0 || sections != ONE_SECTION && !size.is_multiple_of(units * devices) {
                return error(format!(" of size {size} in sections of sizes {sections:?}; {devices} must divide each"));
            }
            let block = (size / segments / units).div_ceil(devices);
            let skipped = block * at[axis as usize];
            start[dim] += skipped;
            shape = shape.with(dim, block * segments * units);
            valid = valid.with(dim, (valid.dims()[dim] / segments / units).saturating_sub(skipped).min(block));
        }
        Ok(Local { shape, start, valid })
    }

    /// For each dim, the position in the tensor of each position on the device at `at`; `None` for padding.
    fn positions(&self, mesh: &Mesh, at: &Coordinates, global: &Shape) -> Vec<Vec<Option<usize>>> {
        let mut from: Vec<Vec<Option<usize>>> = global.dims().iter().map(|n| (0..*n).map(Some).collect()).collect();
        for axis in Axis::ALL {
            let Some((dim, segments, sections)) = self.along(axis).split() else { continue };
            let mut own = Vec::new();
            for segment in from[dim].chunks((from[dim].len() / segments).max(1)) {
                let unit = segment.len() / units(sections);
                let mut first = 0;
                for size in sections.map(usize::from) {
                    let block = (unit * size).div_ceil(mesh.size(axis));
                    let places = (at[axis as usize] * block..).take(block);
                    own.extend(places.map(|k| if k < unit * size { segment[first + k] } else { None }));
                    first += unit * size;
                }
            }
            from[dim] = own;
        }
        from
    }

    /// Where the elements on the device at `at` are in a tensor of shape `global`. Padding is in no run.
    pub fn runs(&self, mesh: &Mesh, at: &Coordinates, global: &Shape) -> Result<Vec<Run>> {
        let local = self.local(mesh, at, global)?.shape;
        let from = self.positions(mesh, at, global);
        let strides = global.strides();
        let is_whole =
            |d: usize| from[d].len() == global.dims()[d] && from[d].iter().enumerate().all(|(k, p)| *p == Some(k));
        // A run has all of the dims after the last that the device has a part of.
        let Some(last) = (0..local.rank()).rev().find(|d| !is_whole(*d)) else {
            let all = Run { local: 0, global: 0, len: local.numel() };
            return Ok(if all.len > 0 { vec![all] } else { Vec::new() });
        };
        let inner: usize = local.dims()[last + 1..].iter().product();
        // Where each row of that dim begins: its number on the device, and its first element in the tensor.
        let mut rows = vec![(0, 0)];
        for (places, stride) in from[..last].iter().zip(strides) {
            let mut next = Vec::with_capacity(rows.len() * places.len());
            for (local, global) in rows {
                for (k, position) in places.iter().enumerate() {
                    let Some(position) = position else { continue };
                    next.push((local * places.len() + k, global + position * stride as usize));
                }
            }
            rows = next;
        }
        let mut runs: Vec<Run> = Vec::new();
        for (row, start) in rows {
            for (k, position) in from[last].iter().enumerate() {
                let Some(position) = position else { continue };
                let (local, global) = ((row * from[last].len() + k) * inner, start + position * strides[last] as usize);
                match runs.last_mut() {
                    Some(run) if run.local + run.len == local && run.global + run.len == global => run.len += inner,
                    _ if inner > 0 => runs.push(Run { local, global, len: inner }),
                    _ => {}
                }
            }
        }
        Ok(runs)
    }
}

impl Display for Placement {
    /// `replicated`, or what differs: `dp: split 0, tp: partial sum`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let differing = Axis::ALL.into_iter().filter(|axis| self.along(*axis) != Along::Replicated);
        let mut comma = "";
        for axis in differing {
            write!(f, "{comma}{}: ", axis.name())?;
            match self.along(axis) {
                Along::Replicated => f.write_str("replicated")?,
                Along::Split(dim) => write!(f, "split {dim}")?,
                Along::Segments(dim, segments) => write!(f, "split {dim} in {segments} segments")?,
                Along::Sections(dim, [a, b, c]) => write!(f, "split {dim} in sections {a}:{b}:{c}")?,
                Along::Partial(combine) => write!(f, "partial {}", format!("{combine:?}").to_lowercase())?,
                Along::Stage { device, stage } if device == stage => write!(f, "stage {stage}")?,
                Along::Stage { device, stage } => write!(f, "stage {stage} on device {device}")?,
            }
            comma = ", ";
        }
        if comma.is_empty() { f.write_str("replicated") } else { Ok(()) }
    }
}

/// Where the part of a device begins in a tensor, as the linear index of its first element: for each axis that splits the tensor,
/// the coordinate times a step, plus an offset that is the same on all devices.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Start {
    steps: SmallVec<[(Axis, usize); 2]>,
    offset: usize,
}

impl Start {
    /// The start of the parts of a tensor of shape `global`; empty if every device begins with the first element.
    pub fn new(mesh: &Mesh, placement: &Placement, global: &Shape) -> Result<Start> {
        let mut steps = SmallVec::new();
        for axis in Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1) {
            let Some((dim, segments, sections)) = placement.along(axis).split() else { continue };
            if segments > 1 || sections != ONE_SECTION {
                let message = format!("{placement}: a part of several segments has more than one start");
                return Err(Error::argument("placement", message));
            }
            let mut next = Coordinates::default();
            next[axis as usize] = 1;
            let part = placement.local(mesh, &next, global)?;
            steps.push((axis, part.start[dim] * global.strides()[dim] as usize));
        }
        Ok(Start { steps, offset: 0 })
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.offset == 0
    }

    /// Whether the index is a multiple of `n` on every device.
    pub fn is_multiple_of(&self, n: usize) -> bool {
        self.offset.is_multiple_of(n) && self.steps.iter().all(|(_, step)| step.is_multiple_of(n))
    }

    /// The index on the device at `at`.
    pub fn at(&self, at: &Coordinates) -> u64 {
        self.offset as u64 + self.steps.iter().map(|(axis, step)| (at[*axis as usize] * step) as u64).sum::<u64>()
    }

    /// As attributes of a node: pairs of axis and step, then the offset if there is one.
    pub fn attrs(&self) -> impl Iterator<Item = i64> + '_ {
        let offset = (self.offset > 0).then_some(self.offset as i64);
        self.steps.iter().flat_map(|(axis, step)| [*axis as i64, *step as i64]).chain(offset)
    }

    /// Reads what [`Start::attrs`] gives.
    pub fn from_attrs(attrs: &[i64]) -> Start {
        let pairs = attrs.chunks_exact(2);
        let offset = pairs.remainder().first().map_or(0, |n| *n as usize);
        Start { steps: pairs.map(|pair| (Axis::ALL[pair[0] as usize], pair[1] as usize)).collect(), offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::tests::meshes;

    /// Every element of the tensor is in the valid part of as many devices as hold it, and of each once.
    fn reassembles(mesh: &Mesh, placement: &Placement, global: &Shape) {
        let mut copies = vec![0usize; global.numel()];
        for rank in 0..mesh.devices() {
            let local = placement.local(mesh, &mesh.coordinates(rank), global).unwrap();
            let same = placement.local(mesh, &mesh.coordinates(0), global).unwrap().shape;
            assert_eq!(local.shape, same, "{mesh}, {placement}, {global}: shapes differ among devices");
            for (v, s) in local.valid.dims().iter().zip(local.shape.dims()) {
                assert!(v <= s);
            }
            let strides = global.strides();
            let first: usize = (0..global.rank()).map(|d| local.start[d] * strides[d] as usize).sum();
            let start = Start::new(mesh, placement, global).unwrap();
            assert_eq!(start.at(&mesh.coordinates(rank)), first as u64, "{mesh}, {placement}, {global}");
            assert_eq!(Start::from_attrs(&start.attrs().collect::<Vec<_>>()), start);
            for k in 0..local.valid.numel() {
                let (mut rest, mut at) = (k, 0);
                for d in (0..global.rank()).rev() {
                    let i = local.start[d] + rest % local.valid.dims()[d];
                    assert!(i < global.dims()[d], "{mesh}, {placement}, {global}: padding counted as valid");
                    at += i * strides[d] as usize;
                    rest /= local.valid.dims()[d];
                }
                copies[at] += 1;
            }
        }
        let holders: usize = Axis::ALL
            .into_iter()
            .filter(|axis| !matches!(placement.along(*axis), Along::Split(_)))
            .map(|axis| mesh.size(axis))
            .product();
        assert!(copies.iter().all(|n| *n == holders), "{mesh}, {placement}, {global}: {copies:?}");
    }

    #[test]
    fn local_parts_reassemble_to_the_tensor() {
        let shapes: [&[usize]; 7] = [&[1], &[7], &[12], &[6, 4], &[5, 3], &[1, 1, 9], &[8, 0]];
        let along = [Along::Replicated, Along::Split(0), Along::Split(1), Along::Partial(Combine::Sum)];
        let mut cases = 0;
        for mesh in meshes() {
            for global in shapes.map(Shape::of) {
                for outer in along {
                    for inner in along {
                        let mut placement = Placement::REPLICATED;
                        let used = Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1);
                        for (axis, along) in used.zip([outer, inner]) {
                            placement = placement.with(axis, along);
                        }
                        let known = |a: &Axis| !matches!(placement.along(*a), Along::Split(d) if usize::from(d) >= global.rank());
                        if Axis::ALL.iter().all(known) {
                            reassembles(&mesh, &placement, &global);
                            cases += 1;
                        } else {
                            assert!(placement.local(&mesh, &mesh.coordinates(0), &global).is_err());
                        }
                    }
                }
            }
        }
        assert!(cases > 5000, "{cases}");
    }

    #[test]
    fn segments_are_cut_one_by_one() {
        let mesh = Mesh::parse("dp=2,tp=4").unwrap();
        let placement = Placement::REPLICATED.with(Axis::Tp, Along::Segments(0, 3));
        let global = Shape::of(&[15, 2]);
        let at = |rank| mesh.coordinates(rank);
        assert_eq!(placement.local(&mesh, &at(1), &global).unwrap().shape, Shape::of(&[6, 2]));
        let run = |local, global, len| Run { local, global, len };
        assert_eq!(placement.runs(&mesh, &at(1), &global).unwrap(), [run(0, 4, 4), run(4, 14, 4), run(8, 24, 4)]);
        assert_eq!(placement.runs(&mesh, &at(2), &global).unwrap(), [run(0, 8, 2), run(4, 18, 2), run(8, 28, 2)]);
        assert_eq!(placement.runs(&mesh, &at(3), &global).unwrap(), []);
        // The inner axis splits the blocks of the outer one.
        let both = Placement::REPLICATED.with(Axis::Dp, Along::Segments(0, 3)).with(Axis::Tp, Along::Split(1));
        assert_eq!(
            both.runs(&mesh, &at(5), &Shape::of(&[6, 4])).unwrap(),
            [run(0, 5, 1), run(1, 13, 1), run(2, 21, 1)]
        );
        let e = placement.local(&mesh, &at(0), &Shape::of(&[16])).unwrap_err();
        assert_eq!(e.message, "tp splits dim 0 of size 16 in 3 segments; they must be equal, and at most 63");
        assert!(Start::new(&mesh, &placement, &global).is_err());
        assert_eq!(placement.to_string(), "tp: split 0 in 3 segments");
        // Sections of other sizes.
        let sections = Along::Sections(0, [4, 1, 1]);
        let placement = Placement::REPLICATED.with(Axis::Tp, sections);
        let two = Mesh::parse("tp=2").unwrap();
        let runs = |rank| placement.runs(&two, &two.coordinates(rank), &Shape::of(&[12])).unwrap();
        assert_eq!(runs(0), [run(0, 0, 4), run(4, 8, 1), run(5, 10, 1)]);
        assert_eq!(runs(1), [run(0, 4, 4), run(4, 9, 1), run(5, 11, 1)]);
        assert!(placement.local(&two, &[0; 6], &Shape::of(&[6])).is_err());
        let along =
            [Along::Split(0), Along::Split(1), Along::Segments(0, 1), Along::Segments(0, 3), Along::Segments(1, 3)];
        let more = [sections, Along::Sections(1, [4, 1, 1]), Along::Sections(0, [2, 1, 1]), Along::Segments(7, 63)];
        let words: Vec<Vec<u64>> = (along.into_iter().chain(more))
            .map(|along| Placement::REPLICATED.with(Axis::Pp, along).words().collect())
            .collect();
        assert!((1..words.len()).all(|k| !words[..k].contains(&words[k])), "{words:?}");
    }

    #[test]
    fn uneven_dims_are_cut_by_rounding_up() {
        let mesh = Mesh::parse("dp=4").unwrap();
        let placement = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
        let part = |rank| placement.local(&mesh, &mesh.coordinates(rank), &Shape::of(&[7, 3])).unwrap();
        assert_eq!(part(0).shape, Shape::of(&[2, 3]));
        assert_eq!([0, 1, 2, 3].map(|r| (part(r).start[0], part(r).valid.dims()[0])), [(0, 2), (2, 2), (4, 2), (6, 1)]);
        let e = placement.with(Axis::Tp, Along::Split(2)).local(&mesh, &[0; 6], &Shape::of(&[7, 3])).unwrap_err();
        assert_eq!(e.message, "tp splits dim 2, which shape {7, 3} does not have");
        assert_eq!(placement.with(Axis::Tp, Along::Partial(Combine::Max)).to_string(), "dp: split 0, tp: partial max");
        assert_eq!(Placement::REPLICATED.to_string(), "replicated");
        let staged = placement.with(Axis::Pp, Along::Stage { device: 1, stage: 1 });
        assert_eq!((staged.to_string().as_str(), staged.stage()), ("pp: stage 1, dp: split 0", Some(1)));
        assert_eq!([0, 1].map(|pp| staged.is_held(&[pp, 3, 0, 0, 0, 0])), [false, true]);
        for (device, stage) in [(2, 1), (1, 2)] {
            let other = placement.with(Axis::Pp, Along::Stage { device, stage });
            assert_ne!(staged.words().collect::<Vec<_>>(), other.words().collect::<Vec<_>>());
        }
        let later = placement.with(Axis::Pp, Along::Stage { device: 0, stage: 3 });
        assert_eq!(later.to_string(), "pp: stage 3 on device 0, dp: split 0");
        assert_eq!((later.stage(), later.stage_device()), (Some(3), Some(0)));
        assert_eq!([0, 1].map(|pp| later.is_held(&[pp, 3, 0, 0, 0, 0])), [true, false]);
        assert!(placement.is_replicated(&Mesh::ONE) && !placement.is_replicated(&mesh));
    }
}
