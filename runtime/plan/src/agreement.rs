//! Describes a planned step so that processes can compare it: a digest of what has to be equal, and lines that show a difference.
//!
//! Equal keys can be planned differently: what a device has kernels for may depend on its libraries. The digest therefore covers
//! the kernels too, and with them the collectives in their order.

use crate::cache::Plan;
use crate::key::{Tracer, digest};
use crate::show;
use crate::transfers::transfers;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::id_map::IdMap;
use perilune_core::ops::{Class, Generator};
use perilune_core::source_loc::SourceMap;

/// The bytes that two processes compare before they launch a plan with the run-time numbers of the last trace. `version` is that of
/// the program.
pub fn identity(tracer: &Tracer, plan: &Plan, version: &str) -> Vec<u8> {
    let mut out = digest(plan.key()).to_le_bytes().to_vec();
    out.extend(plan.signature().to_le_bytes());
    for transfer in transfers(&plan.step) {
        out.extend(transfer.op.as_bytes());
        out.push(transfer.axis as u8);
        out.extend((transfer.bytes as u64).to_le_bytes());
    }
    out.extend(tracer.trace.slots.iter().flat_map(|bits| bits.to_le_bytes()));
    out.extend(version.as_bytes());
    out
}

/// The recorded operations of the last trace, a line each: `recipe.lua:12: matmul f32 {8, 4} of 3, 5`, the placements of its inputs,
/// and the collectives of the plan. Values are numbered in the order of the lines, from 0.
pub fn lines(g: &Graph, tracer: &Tracer, plan: &Plan, source_map: &SourceMap) -> String {
    let trace = &tracer.trace;
    let mut numbers: IdMap<NodeId, usize> = IdMap::default();
    let mut out = String::new();
    for (k, id) in trace.order.iter().enumerate() {
        numbers.insert(*id, k);
        let node = g.node(*id);
        let leaf = trace.leaves.get(k).copied().flatten();
        let of: Vec<String> = match leaf {
            Some(_) => Vec::new(),
            None => node.inputs.iter().filter_map(|i| Some(numbers.get(i)?.to_string())).collect(),
        };
        let place = source_map.get(g.loc_of(*id)).map(|(file, line)| format!("{file}:{line}: ")).unwrap_or_default();
        let what = if leaf.is_some() { "input" } else { node.op.name };
        out.push_str(&format!("{place}{what} {} {}", node.dtype, node.shape));
        if !of.is_empty() {
            out.push_str(&format!(" of {}", of.join(", ")));
        }
        if leaf.is_none() && matches!(node.op.class, Class::Generator(Generator::Scalar)) {
            let number =
                if node.dtype.is_float() { f64::from_bits(node.payload).to_string() } else { node.payload.to_string() };
            out.push_str(&format!(" {number}"));
        }
        if leaf.is_none() && !node.attrs.is_empty() {
            out.push_str(&format!(" with {:?}", node.attrs));
        }
        if let (Some(n), Some(division)) = (leaf, &trace.division)
            && let Some(placement) = division.inputs.get(n as usize).filter(|p| !p.is_replicated(&division.mesh))
        {
            out.push_str(&format!(", {placement}"));
        }
        out.push('\n');
    }
    out.push_str("the end of the recording\n");
    for transfer in transfers(&plan.step) {
        let place = source_map.show(transfer.loc);
        out.push_str(&format!("{place}: {} over {}, {} bytes\n", transfer.op, transfer.axis.name(), transfer.bytes));
    }
    out + &show::show(&plan.step.program, &plan.step.source_map, source_map)
}
