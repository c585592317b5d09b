//! Divides a step so that its bits do not depend on the number of devices.
//!
//! A sum over the batch depends on where its terms are rounded, so the batch is cut into L logical shards, whatever the devices are.
//! The step is first divided among L devices that all have whole States; what each of them computes has the same shapes, and so the
//! same kernels and bits, everywhere. [`fold`](super::fold) then gives each of the p devices the work of L / p neighbouring shards, and
//! adds the shards' terms in a binary tree over shard numbers. A device owns a subtree, so the tree is the same for any p.
//!
//! What follows from complete sums is equal on all devices. Where States are divided among them (ZeRO), a third pass divides this part
//! along the axis of the States, by factors that change no bit: elementwise ops, views, and reductions of whole rows. A term that
//! only blocks are read of is then reduced and scattered, in the same tree.
//!
//! Pipeline stages come afterwards and divide no sum: every stage computes its nodes of all copies, in the recorded order of terms, and
//! each micro-batch has L shards of its own.

use super::divider::{Divider, Strict};
use super::{fold, gather};
use crate::key::Trace;
use crate::lowered::Lowered;
use crate::request::Division;
use crate::unplanned::Unplanned;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::distribute;
use perilune_core::{Graph, Mesh, Placement};

/// The axes along which devices have different samples, outermost first.
const SAMPLES: [Axis; 2] = [Axis::Dp, Axis::Shard];

/// The axis of the logical shards.
const LOGICAL: Axis = Axis::Dp;

/// The devices that share the shards of a batch. Stages along `pp` have the same shards.
pub fn shard_devices(mesh: &Mesh) -> usize {
    SAMPLES.iter().map(|axis| mesh.size(*axis)).product()
}

/// Refuses numbers of shards that no tree fits, and axes that split sums in other ways.
pub fn check(mesh: &Mesh, shards: usize) -> Result<()> {
    let wrong = |message: String, hint: String| Err(Error::argument("strict_shards", message).hint(hint));
    if !shards.is_power_of_two() {
        let near = shards.next_power_of_two();
        return wrong(
            format!("{shards} is no power of two; the sums of shards are added in pairs"),
            if shards == 0 {
                "use 8, or leave strict shards out".into()
            } else {
                format!("use {near}, or {}", near / 2)
            },
        );
    }
    let divides_no_sum = |axis: &Axis| SAMPLES.contains(axis) || *axis == Axis::Pp;
    if let Some(axis) = Axis::ALL.into_iter().find(|axis| !divides_no_sum(axis) && mesh.size(*axis) > 1) {
        return wrong(
            format!("{}={} splits sums in a way that depends on the mesh", axis.name(), mesh.size(axis)),
            "use dp, shard, zero and pp with strict shards".into(),
        );
    }
    let devices = shard_devices(mesh);
    if !shards.is_multiple_of(devices) {
        return wrong(
            format!("{devices} devices along dp and shard do not divide {shards} shards"),
            format!("use as many shards as devices or a multiple, such as {}", devices.next_power_of_two().max(shards)),
        );
    }
    Ok(())
}

/// Turns a step into that of each device. `g` and `trace`: the recording that it comes from.
pub(super) fn apply(
    step: Lowered,
    division: &Division,
    shards: usize,
    g: &Graph,
    trace: &Trace,
) -> std::result::Result<Lowered, Unplanned> {
    let mesh = &division.mesh;
    check(mesh, shards)?;
    if !step.starts.is_empty() {
        return Err(Error::argument("strict_shards", "the recording has parts of its own mesh")
            .hint("record random numbers whole")
            .into());
    }
    let places = |n: &Node| distribute::names_axis(n.op);
    if step.graph.nodes().iter().any(places) {
        return Err(Error::argument(
            "strict_shards",
            "the recipe places tensors on its own mesh, whose size changes bits",
        )
        .hint("leave strict shards out, or the recipe's calls of shard, full and collectives")
        .into());
    }
    let split = |p: &Placement| SAMPLES.iter().any(|axis| matches!(p.along(*axis), Along::Split(0)));
    // The value of a State that moves to another stage is split like the State, and is no batch.
    let is_batch = |p: &Placement| split(p) && p.stage().is_none();
    let samples: Vec<bool> =
        division.inputs.iter().zip(&step.states).map(|(p, is_state)| !is_state && is_batch(p)).collect();
    let placed =
        |own: &bool| if *own { Placement::REPLICATED.with(LOGICAL, Along::Split(0)) } else { Placement::REPLICATED };
    let inputs = samples.iter().map(placed).collect();
    let mesh_of_shards = Mesh::new(&[(LOGICAL, shards)])?;
    let logical = Division { mesh: mesh_of_shards, inputs, keys: division.keys, ..Division::default() };
    let (written, order) = (&trace.state_write_inputs, &trace.order);
    let step = if shards > 1 {
        let phases = gather::phases(&step, g, order);
        Divider::new(&step, &logical, written, phases, LOGICAL, None)?.run()?
    } else {
        step
    };
    let axes: Vec<(Axis, usize)> =
        SAMPLES.map(|axis| (axis, mesh.size(axis))).into_iter().filter(|a| a.1 > 1).collect();
    let copies = shards / shard_devices(mesh);
    let step = fold::apply(&step, &samples, LOGICAL, copies, &axes)?;
    let states = division.inputs.iter().zip(&samples).filter(|(_, own)| !**own).map(|(p, _)| p);
    let is_split = |p: &Placement| axes.iter().any(|(axis, _)| p.along(*axis).split().is_some());
    let Some(&(axis, _)) = axes.last().filter(|_| states.clone().any(is_split)) else {
        return Ok(step);
    };
    if let Some((outer, _)) =
        axes.iter().find(|a| a.0 != axis && states.clone().any(|p| p.along(a.0).split().is_some()))
    {
        let message = format!("States are divided along {}, outside of {}", outer.name(), axis.name());
        return Err(Error::argument("strict_shards", message).hint("divide them along the innermost of both").into());
    }
    let phases = gather::phases(&step, g, order);
    Divider::new(&step, division, written, phases, axis, Some(Strict { samples, copies }))?.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meshes_that_no_tree_fits_are_refused_with_the_cure() {
        for (mesh, shards, message) in [
            ("", 6, "6 is no power of two; the sums of shards are added in pairs (use 8, or 4)"),
            ("", 0, "0 is no power of two; the sums of shards are added in pairs (use 8, or leave strict shards out)"),
            (
                "dp=16",
                8,
                "16 devices along dp and shard do not divide 8 shards (use as many shards as devices or a multiple, such as 16)",
            ),
            (
                "dp=3",
                8,
                "3 devices along dp and shard do not divide 8 shards (use as many shards as devices or a multiple, such as 8)",
            ),
            (
                "dp=2,tp=2",
                8,
                "tp=2 splits sums in a way that depends on the mesh (use dp, shard, zero and pp with strict shards)",
            ),
            (
                "cp=2",
                8,
                "cp=2 splits sums in a way that depends on the mesh (use dp, shard, zero and pp with strict shards)",
            ),
        ] {
            let e = check(&Mesh::parse(mesh).unwrap(), shards).unwrap_err();
            assert_eq!(format!("{} ({})", e.message, e.hint.unwrap_or_default()), message, "{mesh}");
        }
        for (mesh, shards) in
            [("", 1), ("", 8), ("dp=8", 8), ("dp=2,shard=4", 8), ("dp=2", 64), ("pp=3,dp=2", 2), ("pp=2", 1)]
        {
            check(&Mesh::parse(mesh).unwrap(), shards).unwrap();
        }
    }
}
