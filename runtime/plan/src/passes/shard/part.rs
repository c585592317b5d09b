//! Defines what the devices along an axis have of a value.

use perilune_core::Shape;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::{Along, Axis, Combine, MOST_SEGMENTS, ONE_SECTION, units};
use perilune_core::sharding::Cut;

/// What each device has of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// A block of each segment of a dim. Padding has any values.
    Block(Cut),
    /// A term: the value is the combination of all devices' terms.
    Term(Combine),
    /// A value of its own, which only other such values and collectives read: what follows from its samples in a strict step.
    Own,
}

impl Part {
    /// What a device has of an input of that shape.
    pub fn placed(along: Along, shape: &Shape, axis: Axis, devices: usize) -> Result<Part> {
        let Some((dim, segments, sections)) = along.split() else {
            return Ok(if let Along::Partial(combine) = along { Part::Term(combine) } else { Part::Whole });
        };
        if dim < shape.rank() && shape.numel() == 0 {
            return Ok(Part::Whole);
        }
        if dim >= shape.rank() || segments == 0 || !shape.dims()[dim].is_multiple_of(segments) {
            let message = format!("{} splits dim {dim} in {segments} segments, but the shape is {shape}", axis.name());
            return Err(Error::shape("mesh", message));
        }
        let size = shape.dims()[dim];
        if units(sections) == 0 || sections != ONE_SECTION && !size.is_multiple_of(units(sections) * devices) {
            let axis = axis.name();
            let message =
                format!("{axis}={devices} does not divide each of the sections {sections:?} of a dim of size {size}");
            return Err(Error::shape("mesh", message));
        }
        let block = (size / segments / units(sections)).div_ceil(devices);
        Ok(Part::Block(Cut { dim, segments, sections, block }))
    }

    /// The placement along an axis that gives this part, if there is one: the inverse of [`Part::placed`].
    pub fn along(self, shape: &Shape, axis: Axis, devices: usize) -> Option<Along> {
        let Part::Block(cut) = self else { return (self == Part::Whole).then_some(Along::Replicated) };
        let dim = u8::try_from(cut.dim).ok()?;
        let along = match (cut.segments, cut.sections) {
            (1, ONE_SECTION) => Along::Split(dim),
            (1, sections) => Along::Sections(dim, sections),
            (segments, _) => Along::Segments(dim, u8::try_from(segments).ok().filter(|n| *n <= MOST_SEGMENTS as u8)?),
        };
        (Part::placed(along, shape, axis, devices).ok()? == self).then_some(along)
    }

    pub fn cut(self) -> Option<Cut> {
        if let Part::Block(cut) = self { Some(cut) } else { None }
    }

    /// The shape of the part of a value.
    pub fn local(self, whole: &Shape) -> Shape {
        self.cut().map_or(*whole, |cut| cut.local(whole))
    }
}
