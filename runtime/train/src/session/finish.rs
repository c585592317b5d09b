//! Ends a run: evaluates it, completes `run.json`, and compares a replay with its original.

use super::Session;
use crate::audit::Audit;
use crate::data_record::{DATA, DataRecord};
use crate::error::{Error, Result};
use crate::events::{Event, Reporter};
use crate::numbers::{self, object};
use crate::performance::PERFORMANCE;
use crate::trainer::Outcome;
use crate::training_loop::{End, TrainingLoop};
use crate::weights::weights_hash;
use perilune_lua::Run;
use serde_json::Value;

/// Returns the status of a run that has ended without an error.
pub(super) fn status(end: End) -> &'static str {
    if end == End::Finished { "done" } else { "interrupted" }
}

impl Session<'_> {
    /// Evaluates a run that stops before its last step. Its checkpoint has been written, so the evaluation changes nothing for the
    /// run that continues. The test split waits for the end.
    pub(super) fn pause(&self, training: &mut TrainingLoop<'_>) -> Result<()> {
        let splits = training.run.evaluated_splits();
        let mut evaluations = Vec::new();
        for split in splits.iter().filter(|name| *name != "test") {
            evaluations.push((split.as_str(), training.evaluate(split)?));
        }
        let run_dir = training.reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let (step, steps) = (training.run.count(), training.run.steps());
        training.reporter.tell(&Event::Paused { step, steps, evaluations: &evaluations, run_dir: &run_dir });
        Ok(())
    }

    /// Runs the last evaluations and `recipe.finish`.
    pub(super) fn conclude(&self, training: &mut TrainingLoop<'_>) -> Result<End> {
        if let Some(reason) = training.run.stop_reason()? {
            training.reporter.stopped_early(training.run.count(), &reason)?;
        }
        let mut evaluations = Vec::new();
        let splits = training.run.evaluated_splits();
        for split in &splits {
            if let Some(code) = self.job.stop_requested(self.control)? {
                return Ok(End::Stopped { code });
            }
            evaluations.push((split.as_str(), training.evaluate(split)?));
        }
        let dir = training.reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let steps = training.run.count();
        training.reporter.tell(&Event::Finished { steps, evaluations: &evaluations, run_dir: &dir });
        training.rng = training.run.rng();
        training.aside(|run| run.finish())?;
        training.pass_on()?;
        Ok(self.job.stop_requested(self.control)?.map_or(End::Finished, |code| End::Stopped { code }))
    }

    /// Passes the events of the end to the sinks.
    pub(super) fn sink_last(&self, run: &Run, reporter: &Reporter) -> Result<()> {
        if self.spec.replay.is_some() {
            return Ok(());
        }
        for (step, event) in reporter.take_events(false) {
            run.sink(step, &event)?;
        }
        self.runtime.host().observed.end();
        Ok(())
    }

    /// Hashes the weights, waits for the hashes of the data, completes `run.json`, and compares a replay with its original.
    pub(super) fn close(
        &self,
        run: &Run,
        (end, measured): (End, Value),
        mut audit: Option<Audit>,
        data: &mut DataRecord,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let seconds = self.begun.elapsed().as_secs_f64();
        let weights = weights_hash(run)?;
        self.job.agree("the States after the last step", || format!("BLAKE3 of all States: {weights}"))?;
        let (step, steps) = (run.count(), run.steps());
        let status = status(end);
        if let End::Stopped { code } = end {
            let run_dir = reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
            let checkpoint = reporter.checkpointed.as_deref();
            reporter.tell(&Event::Stopped { code, step, steps, run_dir: &run_dir, checkpoint });
        }
        if end == End::Finished && self.job.is_first() {
            data.finish(|| self.control.stop_requested().is_some(), || reporter.tell(&Event::HashesData));
        }
        let metrics = object(&reporter.latest);
        if let Some(dir) = reporter.dir.as_mut() {
            if let Some(log) = run.sample_log().filter(|_| audit.is_none()) {
                run.settle_sample_log()?;
                dir.write_samples(&mut log.borrow_mut(), true)?;
            }
            dir.finish([
                ("status", status.into()),
                ("steps_done", step.into()),
                ("seconds", numbers::json(seconds)),
                ("metrics", metrics),
                (PERFORMANCE, measured),
                ("weights", weights.as_str().into()),
                (DATA, data.json()),
            ])?;
        }
        reporter.finish_mlflow(status)?;
        let (metrics, hash) = (&reporter.latest, Some(weights.as_str()));
        reporter.tell(&Event::Done { status, steps: step, seconds, metrics, weights: hash });
        if let Some(audit) = audit.as_mut().filter(|_| !matches!(end, End::Stopped { .. })) {
            audit.end(run, &weights)?;
        }
        if let Some(was) = self.spec.replay.as_ref().and_then(|r| r.weights.as_ref())
            && end == End::Finished
        {
            if *was != weights {
                let text = format!(
                    "the weights differ from those of the run: {weights}, then {was}\n  hint: --steps .. finds the first step that differs"
                );
                return Err(Error::Refused(text));
            }
            reporter.tell(&Event::Reproduced);
        }
        let run_dir = reporter.dir.as_ref().map(|d| d.path.clone());
        let audit = audit.map(|audit| audit.result);
        Ok(Outcome { end, steps: step, run_dir, weights: Some(weights), audit })
    }
}
