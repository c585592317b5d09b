//! Formats the plan of a request as text.

use crate::diagnostics::SourceLine;
use crate::engine::{Engine, Fault};
use crate::recorder::Recorder;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::source_loc::SourceLoc;
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Options, Request, Tracer, show};

/// The step that is shown, for a display of its own (`Diagnostics::source_display`).
pub struct RecordedStep<'a> {
    recorder: &'a Recorder,
    request: &'a Request,
    options: Options,
    budgeted: bool,
    written: SourceLine,
}

impl RecordedStep<'_> {
    /// The open recording.
    pub fn graph(&self) -> &Graph {
        &self.recorder.graph
    }

    /// The number of the open recording.
    pub fn generation(&self) -> u32 {
        self.recorder.generation()
    }

    /// The step as `backend` would run it, with the text of its kernels. `graph` is the recording, or one with the same nodes
    /// and other inputs.
    pub fn show_for(&self, graph: &Graph, backend: &dyn Backend) -> Result<String> {
        let mut tracer = Tracer::default();
        tracer.budgeted = self.budgeted;
        tracer.run(graph, self.request, self.recorder.known());
        let program = perilune_plan::pipeline::plan(graph, &tracer, self.request, self.options, backend)?;
        let places: Vec<SourceLoc> = tracer.trace.order.iter().map(|id| graph.loc_of(*id)).collect();
        let text = with_texts(self.recorder, self.written, &program, &places, backend);
        Ok(format!("as {} would run it: {text}", backend.describe()))
    }
}

/// A program with the text of its kernels and the recipe lines that they come from.
fn with_texts(
    recorder: &Recorder,
    written: SourceLine,
    program: &Program,
    places: &[SourceLoc],
    backend: &dyn Backend,
) -> String {
    let written = |file: &str, line: u32| written.and_then(|find| find(file, line));
    show::show_sources(program, places, &recorder.source_map, written, |k| backend.source(program, k))
}

impl Engine {
    /// Formats the plan of evaluating `ids`, with the text of its kernels if `source`. Nothing runs.
    pub fn show_plan(&mut self, ids: &[NodeId], source: bool) -> std::result::Result<String, Fault> {
        let request = self.open_step(ids)?.own;
        self.trace_run(&request);
        let program = self.plan_traced(&request)?;
        let places: Vec<SourceLoc> =
            self.executor.tracer.trace.order.iter().map(|id| self.recorder.graph.loc_of(*id)).collect();
        if source {
            return self.sources(&request, &program, &places);
        }
        Ok(show::show(&program, &places, &self.recorder.source_map))
    }

    /// Formats the plan of the last traced request with the text of its kernels: for this device or, if it has no
    /// texts, through the source display.
    pub(crate) fn sources(
        &self,
        request: &Request,
        program: &Program,
        places: &[SourceLoc],
    ) -> std::result::Result<String, Fault> {
        let backend = self.backend();
        let has_texts = (0..program.kernels.len()).any(|k| backend.source(program, k).is_some());
        match &self.diagnostics.source_display {
            Some(display) if !has_texts => {
                let budgeted = self.executor.tracer.budgeted;
                let (options, written) = (self.options(), self.diagnostics.source_line);
                Ok(display(&RecordedStep { recorder: &self.recorder, request, options, budgeted, written })?)
            }
            _ => Ok(with_texts(&self.recorder, self.diagnostics.source_line, program, places, backend)),
        }
    }
}
