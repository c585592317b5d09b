//! Formats the plan of a request as text.

use crate::engine::{Engine, Fault};
use perilune_core::error::Result;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::source_loc::SourceLoc;
use perilune_plan::ir::Program;
use perilune_plan::{Request, Tracer, show};
use std::collections::HashMap;

impl Engine {
    /// Formats the plan of evaluating `ids`, with the text of its kernels if `source`. Nothing runs.
    pub fn show_plan(&mut self, ids: &[NodeId], source: bool) -> std::result::Result<String, Fault> {
        let request = self.trace_step(ids)?;
        let program = self.plan_traced(&request)?;
        let places: Vec<SourceLoc> =
            self.executor.tracer.trace.order.iter().map(|id| self.recorder.graph.loc_of(*id)).collect();
        if source {
            return self.sources(&request, &program, &places);
        }
        Ok(show::show(&program, &places, &self.recorder.source_map))
    }

    /// Formats the plan of the last traced request with the text of its kernels: for this device or, if it has no
    /// texts, for a GPU.
    pub(crate) fn sources(
        &self,
        request: &Request,
        program: &Program,
        places: &[SourceLoc],
    ) -> std::result::Result<String, Fault> {
        let mut files: HashMap<String, Vec<String>> = HashMap::new();
        let written = |file: &str, line: u32| {
            let lines = files.entry(file.to_string()).or_insert_with(|| {
                std::fs::read_to_string(file).map(|t| t.lines().map(str::to_string).collect()).unwrap_or_default()
            });
            lines.get(line.checked_sub(1)? as usize).cloned()
        };
        let has_texts = (0..program.kernels.len()).any(|k| self.executor.backend.source(program, k).is_some());
        let Some(paper) = self.diagnostics.paper.as_ref().filter(|_| !has_texts) else {
            let source = |k| self.executor.backend.source(program, k);
            return Ok(show::show_sources(program, places, &self.recorder.source_map, written, source));
        };
        let shown = |graph: &Graph, tracer: &Tracer, places: &[SourceLoc]| -> Result<String> {
            let program = perilune_plan::pipeline::plan(graph, tracer, request, self.options(), &**paper)?;
            let text =
                show::show_sources(&program, places, &self.recorder.source_map, written, |k| paper.source(&program, k));
            Ok(format!("as {} would run it: {text}", paper.describe()))
        };
        let Some(graph) = self.recorder.graph.with_kernels() else {
            return Ok(shown(&self.recorder.graph, &self.executor.tracer, places)?);
        };
        let mut tracer = Tracer::default();
        tracer.budgeted = self.executor.tracer.budgeted;
        tracer.run(&graph, request, |id| self.recorder.value(id).map(|v| v.uid));
        let places: Vec<SourceLoc> = tracer.trace.order.iter().map(|id| graph.loc_of(*id)).collect();
        Ok(shown(&graph, &tracer, &places)?)
    }
}
