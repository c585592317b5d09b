//! Compares plans with those of the other processes of a job.
//!
//! Every process records and plans by itself. A plan that differs from that of another process would mix up their collectives, so
//! all compare a digest before they launch another plan than the last. Launches of the same plan again send nothing: their
//! collectives name the program and its numbers (see `perilune_dist`).

use crate::engine::Engine;
use perilune_core::error::Result;
use perilune_plan::{Plan, agreement};
use std::rc::Rc;

impl Engine {
    /// Brings all processes to the same state after an error may have left them at different runs; all call it.
    pub fn realign(&mut self) -> Result<()> {
        self.executor.agreed = None;
        self.executor.backend.realign()
    }

    /// Compares the plan of the last trace with those of the other processes, unless it ran last. A difference is an error in all.
    pub(crate) fn agree_on(&mut self, plan: &Rc<Plan>) -> Result<()> {
        let executor = &mut self.executor;
        if executor.backend.processes() == 1 {
            return Ok(());
        }
        let last = executor.tracer.trace.order.iter().rev().map(|id| self.recorder.graph.loc_of(*id));
        let place = last.filter_map(|loc| self.recorder.source_map.get(loc)).next();
        executor.backend.set_place(place.map(|(file, line)| format!("{file}:{line}")).unwrap_or_default());
        if executor.agreed.as_ref().is_some_and(|last| Rc::ptr_eq(last, plan)) {
            return Ok(());
        }
        // An earlier plan is compared again: a process that launches it may not have launched the one between.
        executor.agreed = None;
        let (recorder, tracer) = (&self.recorder, &executor.tracer);
        let identity = agreement::identity(tracer, plan, env!("CARGO_PKG_VERSION"));
        let mut describe = || agreement::lines(&recorder.graph, tracer, plan, &recorder.source_map);
        executor.backend.agree("what they compute next", &identity, &mut describe)?;
        executor.agreed = Some(plan.clone());
        Ok(())
    }
}
