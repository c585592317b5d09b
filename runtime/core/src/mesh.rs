//! Defines meshes of devices, which are numbered by their coordinates along named axes.
//!
//! The last axis varies fastest, so that its neighbours have neighbouring ranks. [`crate::placement`] says what a device of a mesh
//! has of a tensor.

pub use crate::placement::{Along, Combine, Local, MOST_SEGMENTS, ONE_SECTION, Placement, Run, Start, units};

use crate::error::{Error, Result, did_you_mean};
use std::fmt::{self, Display};

/// An axis of a mesh.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Axis {
    /// Pipeline stages.
    Pp,
    /// Copies of the model, each with a part of the batch.
    Dp,
    /// Parts of the batch over which States are split too.
    Shard,
    /// Parts of a sequence.
    Cp,
    /// Experts.
    Ep,
    /// Parts of a layer's matrices.
    Tp,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Axis; 6] = [Axis::Pp, Axis::Dp, Axis::Shard, Axis::Cp, Axis::Ep, Axis::Tp];

    pub fn name(self) -> &'static str {
        ["pp", "dp", "shard", "cp", "ep", "tp"][self as usize]
    }
}

/// Coordinates of a device, in the order of [`Axis::ALL`].
pub type Coordinates = [usize; Axis::ALL.len()];

/// Devices along named axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mesh {
    sizes: Coordinates,
}

impl Default for Mesh {
    fn default() -> Self {
        Mesh::ONE
    }
}

/// The most devices of a mesh.
const MOST_DEVICES: usize = 1 << 16;

impl Mesh {
    /// One device.
    pub const ONE: Mesh = Mesh { sizes: [1; Axis::ALL.len()] };

    /// The mesh with those sizes; an axis that is not named has size 1.
    pub fn new(sizes: &[(Axis, usize)]) -> Result<Mesh> {
        let mut mesh = Mesh::ONE;
        let mut devices = 1usize;
        for (k, &(axis, n)) in sizes.iter().enumerate() {
            let name = axis.name();
            if sizes[..k].iter().any(|(other, _)| *other == axis) {
                return Err(Error::argument("mesh", format!("{name} is given twice")));
            }
            if n == 0 {
                return Err(Error::argument("mesh", format!("{name}=0: an axis has at least 1 device"))
                    .hint("leave the axis out if it is not wanted"));
            }
            devices = devices.saturating_mul(n);
            if devices > MOST_DEVICES {
                let message = format!("{name}={n} makes more than {MOST_DEVICES} devices in all");
                return Err(Error::argument("mesh", message).hint("the sizes of all axes are multiplied"));
            }
            mesh.sizes[axis as usize] = n;
        }
        Ok(mesh)
    }

    /// Parses `dp=2,tp=4`. Axes may come in any order; empty text is one device.
    pub fn parse(text: &str) -> Result<Mesh> {
        let axes = || Axis::ALL.map(Axis::name).join(", ");
        let part = |part: &str| {
            let Some((name, size)) = part.split_once('=').map(|(name, size)| (name.trim(), size.trim())) else {
                let message = format!("{part:?} is no axis with a size");
                return Err(Error::argument("mesh", message).hint("write a mesh as dp=2,tp=4"));
            };
            let Some(axis) = Axis::ALL.into_iter().find(|axis| axis.name() == name) else {
                let hint = match did_you_mean(name, Axis::ALL.map(Axis::name)) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("the axes are {}", axes()),
                };
                return Err(Error::argument("mesh", format!("there is no axis {name:?}")).hint(hint));
            };
            match size.parse::<usize>() {
                Ok(n) => Ok((axis, n)),
                Err(_) => Err(Error::argument("mesh", format!("{name}={size}: the size is not a whole number"))
                    .hint(format!("write how many devices are along {name}, as in {name}=2"))),
            }
        };
        if text.trim().is_empty() {
            return Ok(Mesh::ONE);
        }
        Mesh::new(&text.split(',').map(|p| part(p.trim())).collect::<Result<Vec<_>>>()?)
    }

    /// The number of devices along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// The number of all devices.
    pub fn devices(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The coordinates of a device; `rank` is below [`Mesh::devices`].
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let (mut rest, mut at) = (rank, [0; Axis::ALL.len()]);
        for k in (0..at.len()).rev() {
            at[k] = rest % self.sizes[k];
            rest /= self.sizes[k];
        }
        at
    }

    /// The linear rank of a device.
    pub fn rank(&self, at: &Coordinates) -> usize {
        at.iter().zip(&self.sizes).fold(0, |rank, (at, size)| rank * size + at)
    }
}

impl Display for Mesh {
    /// As [`Mesh::parse`] reads it; nothing for one device.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Axis::ALL.into_iter().filter(|axis| self.size(*axis) > 1);
        for (k, axis) in named.enumerate() {
            let comma = if k > 0 { "," } else { "" };
            write!(f, "{comma}{}={}", axis.name(), self.size(axis))?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn a_mesh_round_trips_through_text() {
        for text in ["dp=2,tp=4", "pp=2,dp=3,shard=4,cp=2,ep=2,tp=8", "shard=7", ""] {
            assert_eq!(Mesh::parse(text).unwrap().to_string(), text);
        }
        let mesh = Mesh::parse(" tp = 4 , dp=2").unwrap();
        assert_eq!((mesh.to_string().as_str(), mesh.devices(), mesh.size(Axis::Cp)), ("dp=2,tp=4", 8, 1));
        assert_eq!(Mesh::parse("dp=1").unwrap(), Mesh::ONE);
    }

    #[test]
    fn errors_name_the_part_and_the_cure() {
        for (text, message) in [
            ("dq=2", "mesh: there is no axis \"dq\" (did you mean dp?)"),
            ("replicas=2", "mesh: there is no axis \"replicas\" (the axes are pp, dp, shard, cp, ep, tp)"),
            ("dp", "mesh: \"dp\" is no axis with a size (write a mesh as dp=2,tp=4)"),
            ("dp=2,,tp=2", "mesh: \"\" is no axis with a size (write a mesh as dp=2,tp=4)"),
            (
                "dp=two",
                "mesh: dp=two: the size is not a whole number (write how many devices are along dp, as in dp=2)",
            ),
            ("dp=-1", "mesh: dp=-1: the size is not a whole number (write how many devices are along dp, as in dp=2)"),
            ("dp=0", "mesh: dp=0: an axis has at least 1 device (leave the axis out if it is not wanted)"),
            ("dp=2,tp=2,dp=4", "mesh: dp is given twice"),
            (
                "dp=1024,tp=1024",
                "mesh: tp=1024 makes more than 65536 devices in all (the sizes of all axes are multiplied)",
            ),
        ] {
            let e = Mesh::parse(text).unwrap_err();
            let hint = e.hint.as_ref().map(|h| format!(" ({h})")).unwrap_or_default();
            assert_eq!(format!("{}: {}{hint}", e.op, e.message), message, "{text}");
        }
    }

    pub(crate) fn meshes() -> impl Iterator<Item = Mesh> {
        let sizes = [[1, 1], [2, 1], [1, 3], [2, 3], [3, 2], [4, 8], [5, 7]];
        let pairs = Axis::ALL.into_iter().flat_map(|a| Axis::ALL.into_iter().map(move |b| (a, b)));
        pairs.filter(|(a, b)| a < b).flat_map(move |(a, b)| sizes.map(|[m, n]| Mesh::new(&[(a, m), (b, n)]).unwrap()))
    }

    #[test]
    fn ranks_and_coordinates_are_inverse_and_the_last_axis_is_innermost() {
        for mesh in meshes() {
            for rank in 0..mesh.devices() {
                let at = mesh.coordinates(rank);
                assert_eq!(mesh.rank(&at), rank, "{mesh}");
                assert!(Axis::ALL.into_iter().all(|axis| at[axis as usize] < mesh.size(axis)));
            }
        }
        let mesh = Mesh::parse("dp=2,tp=4").unwrap();
        assert_eq!(mesh.coordinates(5), [0, 1, 0, 0, 0, 1]);
    }
}
