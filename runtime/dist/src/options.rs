//! Parses `--mesh`: the axes of a mesh, and how States are divided on it.

use perilune_core::Mesh;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use std::fmt::{self, Display};

/// The most that `zero` divides: optimizer States (1), gradients (2), weights (3).
const MOST_ZERO: u8 = 3;

/// Axes that a mesh may have and that nothing is divided along yet: their devices would all do the same work.
const UNSUPPORTED: [Axis; 2] = [Axis::Cp, Axis::Ep];

/// A mesh as the command line and recipes write it: `dp=8,zero=1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MeshOptions {
    pub mesh: Mesh,
    /// The stage of ZeRO (Rajbhandari et al., arXiv:1910.02054), if it is given.
    pub zero: Option<u8>,
}

impl MeshOptions {
    /// Parses axes with their sizes, and `zero`, in any order. Empty text is one device.
    pub fn parse(text: &str) -> Result<MeshOptions> {
        let (mut zero, mut axes) = (None, Vec::new());
        for part in text.split(',').filter(|_| !text.trim().is_empty()) {
            let Some(("zero", stage)) = part.split_once('=').map(|(name, value)| (name.trim(), value.trim())) else {
                axes.push(part);
                continue;
            };
            let known = stage.parse::<u8>().ok().filter(|n| *n <= MOST_ZERO);
            let Some(known) = known else {
                return Err(Error::argument("mesh", format!("zero={stage}: there is no such stage"))
                    .hint("0 divides nothing, 1 optimizer States, 2 gradients too, 3 weights too"));
            };
            if zero.replace(known).is_some() {
                return Err(Error::argument("mesh", "zero is given twice"));
            }
        }
        let mesh = Mesh::parse(&axes.join(","))?;
        if let Some(axis) = UNSUPPORTED.into_iter().find(|axis| mesh.size(*axis) > 1) {
            let message = format!("{}={}: this version divides nothing along {0}", axis.name(), mesh.size(axis));
            return Err(Error::argument("mesh", message).hint("the axes pp, dp, shard and tp are supported"));
        }
        let options = MeshOptions { mesh, zero };
        if zero.is_some_and(|n| n > 0) && mesh.size(Axis::Dp) * mesh.size(Axis::Shard) == 1 {
            let message =
                format!("zero={} divides States over dp or shard, but the mesh has neither", zero.unwrap_or(0));
            return Err(
                Error::argument("mesh", message).hint("write how many devices share the States, as in dp=8,zero=1")
            );
        }
        Ok(options)
    }
}

impl Display for MeshOptions {
    /// As [`MeshOptions::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.mesh.to_string();
        match self.zero {
            Some(zero) if text.is_empty() => write!(f, "zero={zero}"),
            Some(zero) => write!(f, "{text},zero={zero}"),
            None => f.write_str(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_with_a_stage_round_trips() {
        for text in ["dp=8,zero=1", "dp=2,shard=4,zero=3", "dp=2", "", "dp=2,tp=4,zero=0", "pp=4,dp=2,zero=1"] {
            assert_eq!(MeshOptions::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(MeshOptions::parse(" zero = 2 , dp=4 ").unwrap().to_string(), "dp=4,zero=2");
    }

    #[test]
    fn errors_name_the_stage_and_the_cure() {
        for (text, message) in [
            ("dp=2,zero=4", "zero=4: there is no such stage"),
            ("dp=2,zero=x", "zero=x: there is no such stage"),
            ("zero=1,dp=2,zero=1", "zero is given twice"),
            ("tp=2,zero=1", "zero=1 divides States over dp or shard, but the mesh has neither"),
            ("dp=2,zer=1", "there is no axis \"zer\""),
            ("cp=2", "cp=2: this version divides nothing along cp"),
            ("ep=2,dp=2", "ep=2: this version divides nothing along ep"),
        ] {
            assert_eq!(MeshOptions::parse(text).unwrap_err().message, message, "{text}");
        }
    }
}
