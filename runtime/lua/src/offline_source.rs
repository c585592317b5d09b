//! Shows plans with the kernel source of a device that is not there: what a GPU would run, on a machine without one.
//!
//! The target plans the recorded step and writes its kernels; it computes nothing. A custom kernel of a recipe computes its
//! CPU reference here; [`record_kernel`] notes the kernel beside it, and the display puts it in the reference's place.

use crate::args::RefGuard;
use crate::functions::host;
use crate::kernels;
use crate::runtime::Runtime;
use crate::tensor::Tensor;
use mlua::{Lua, Table, Value};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::create;
use perilune_engine::RecordedStep;
use perilune_plan::Backend;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The target, and the kernels that stand beside references in the open recording.
pub struct OfflineSource {
    target: Arc<dyn Backend>,
    substitutes: RefCell<Substitutes>,
}

/// Kernels that the target would run, of one generation.
#[derive(Default)]
struct Substitutes {
    generation: u32,
    /// (what a reference computed, the kernel).
    pairs: Vec<(NodeId, NodeId)>,
}

impl Runtime {
    /// Shows plans with the source of `target`'s kernels, wherever the device of this runtime has no source.
    pub fn show_offline_source(&self, target: Arc<dyn Backend>) {
        let offline = Rc::new(OfflineSource { target, substitutes: RefCell::default() });
        *self.host().offline.borrow_mut() = Some(offline.clone());
        self.host().engine.borrow_mut().diagnostics.source_display = Some(Rc::new(move |step| offline.show(step)));
    }
}

impl OfflineSource {
    fn show(&self, step: &RecordedStep<'_>) -> perilune_core::Result<String> {
        let substitutes = self.substitutes.borrow();
        let current = substitutes.generation == step.generation() && !substitutes.pairs.is_empty();
        let with_kernels = current.then(|| substitute(step.graph(), &substitutes.pairs));
        step.show_for(with_kernels.as_ref().unwrap_or(step.graph()), &*self.target)
    }

    fn note(&self, generation: u32, reference: NodeId, kernel: NodeId) {
        let mut substitutes = self.substitutes.borrow_mut();
        if substitutes.generation != generation {
            *substitutes = Substitutes { generation, pairs: Vec::new() };
        }
        substitutes.pairs.push((reference, kernel));
    }
}

/// The same recording with kernels in the place of their references.
///
/// A kernel of a recipe is recorded behind a node that brings its backward and passes on its first input; only there is a
/// reference replaced, since other nodes may read it too.
fn substitute(graph: &Graph, pairs: &[(NodeId, NodeId)]) -> Graph {
    let mut out = graph.clone();
    for id in graph.ids().filter(|id| graph.node(*id).op == &create::CUSTOM) {
        let reference = graph.node(id).inputs.first();
        let kernel = reference.and_then(|x| pairs.iter().find(|pair| pair.0 == *x)).map(|pair| pair.1);
        if let Some(kernel) = kernel.filter(|kernel| *kernel < id) {
            out.set_input(id, 0, kernel);
        }
    }
    out
}

/// `native.record_offline_kernel({ … }, { results })`: records what the target would run instead of a reference that gave
/// these results. Nothing here reads it, so nothing computes it; without a target nothing is recorded.
pub fn record_kernel(lua: &Lua, (t, results): (Table, Table)) -> mlua::Result<()> {
    let host = host(lua)?;
    let Some(offline) = host.offline.borrow().clone() else { return Ok(()) };
    let kernels = kernels::call(lua, t)?;
    let mut refs = Vec::new();
    for v in results.sequence_values::<Value>() {
        let v = v?;
        refs.extend(v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what))));
    }
    host.record(lua, |engine| {
        for (r, kernel) in refs.iter().zip(&kernels) {
            let reference = r.node(engine)?;
            offline.note(engine.recorder.generation(), reference, *kernel);
        }
        Ok(())
    })
}
