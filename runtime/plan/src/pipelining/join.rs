//! Joins the programs of the devices along `pp` to one that lists their kernels and has the inputs and results of the whole step.
//!
//! The joined program is what the engine and reports see. It is not run: each device runs the program of its stages.

use super::split::DeviceStep;
use crate::buffer_desc::BufferDesc;
use crate::ir::*;
use crate::route::Route;
use perilune_core::Shape;
use perilune_core::mesh::{Along, Axis};
use std::sync::Arc;

impl Kernel {
    /// Adds `by` to the number of every value.
    fn renumber(&mut self, by: u32) {
        let shift = |v: &mut ValueId| {
            if *v != ValueId::NONE {
                v.0 += by;
            }
        };
        let region = |r: &mut Region| {
            for i in &mut r.body {
                if let Code::Load { source: Source::Value(v) | Source::Block { input: v, .. }, .. } = &mut i.code {
                    shift(v);
                }
            }
            r.stores.iter_mut().for_each(|s| shift(&mut s.1));
        };
        match self {
            Kernel::Region(r) => region(r),
            Kernel::Multi(list) => list.iter_mut().for_each(region),
            Kernel::Library(l) => {
                for o in &mut l.inputs {
                    if let Operand::View(v, _) = o {
                        shift(v);
                    }
                }
                l.outputs.iter_mut().for_each(shift);
                l.epilogue.iter_mut().for_each(region);
            }
        }
    }
}

/// Joins the programs of the devices, in order. `roots`: the number of results of the step.
pub fn join(programs: Vec<Program>, steps: &[DeviceStep], roots: usize) -> Program {
    let first = &programs[0];
    let mut out = Program {
        values: Vec::new(),
        kernels: Vec::new(),
        inputs: first.inputs.clone(),
        outputs: Vec::new(),
        slots: first.slots.clone(),
        starts: first.starts.clone(),
        results: Vec::new(),
        arena_bytes: 0,
        live_bytes: 0,
        // Devices have collectives in flight in programs of their own.
        in_flight: Vec::new(),
        // The exchanges of the whole step are known to every stage.
        exchanges: first.exchanges.clone(),
        stages: Vec::new(),
        route: Route::Links,
    };
    let mut results: Vec<Option<Root>> = vec![None; roots];
    for (k, (mut program, step)) in programs.into_iter().zip(steps).enumerate() {
        let values = out.values.len() as u32;
        // The number among all outputs of each of the device's.
        let mut outputs: Vec<Option<u32>> = vec![None; program.outputs.len()];
        for ((root, stage), found) in step.roots.iter().zip(&program.results) {
            let Root::Output(o) = *found else {
                results[*root] = Some(*found);
                continue;
            };
            let number = match (results[*root], outputs[o as usize]) {
                (Some(Root::Output(known)), _) => {
                    // Every device computes it.
                    let desc = &mut out.outputs[known as usize];
                    desc.placement = desc.placement.with(Axis::Pp, Along::Replicated);
                    known
                }
                (_, Some(known)) => known,
                _ => {
                    let desc = program.outputs[o as usize];
                    let along = Along::Stage { device: k as u8, stage: *stage as u8 };
                    let placement = desc.placement.with(Axis::Pp, along);
                    out.outputs.push(BufferDesc { placement, ..desc });
                    out.outputs.len() as u32 - 1
                }
            };
            (results[*root], outputs[o as usize]) = (Some(Root::Output(number)), Some(number));
        }
        let outputs: Vec<u32> = outputs.into_iter().map(|o| o.unwrap_or(0)).collect();
        let moved = |storage| match storage {
            Storage::Output(o) => Storage::Output(outputs[o as usize]),
            other => other,
        };
        out.values.extend(program.values.iter().map(|v| Value { storage: moved(v.storage), ..v.clone() }));
        for kernel in &program.kernels {
            let mut kernel = kernel.clone();
            kernel.renumber(values);
            out.kernels.push(kernel);
        }
        // A shape may differ between devices only where one of them does not touch the input.
        let mut uses = vec![false; program.inputs.len()];
        for v in program.kernels.iter().flat_map(|kernel| kernel.reads().into_iter().chain(kernel.writes())) {
            if let Storage::Input(i) = program.values[v.0 as usize].storage {
                uses[i as usize] = true;
                out.inputs[i as usize] = program.inputs[i as usize];
            }
        }
        // A device has no memory of what its stages do not use.
        for v in &mut program.values {
            if let Storage::Input(i) = v.storage
                && !uses[i as usize]
            {
                v.shape = Shape::of(&[0]);
                program.inputs[i as usize].0 = v.shape;
            }
        }
        out.arena_bytes = out.arena_bytes.max(program.arena_bytes);
        out.live_bytes = out.live_bytes.max(program.live_bytes);
        out.stages.push(Stage { program: Arc::new(program), uses, outputs });
    }
    out.results = results.into_iter().map(|r| r.unwrap_or(Root::Output(0))).collect();
    out
}
