//! Opens the record of a run: the fields of `run.json`, the run directory, checkpoints, the data, MLflow.

use super::{Opened, Session};
use crate::checkpoints::Checkpoints;
use crate::claim::Claim;
use crate::data_record::{Compare, DATA, DataRecord, Entry};
use crate::error::{Error, Result};
use crate::events::Reporter;
use crate::history;
use crate::mlflow::{self, MLFLOW, Mlflow};
use crate::params::{self, Params};
use crate::restart::{PERTURB, Restart, SET_PRECISION};
use crate::run_files::hostname;
use crate::rundir::{LogTail, RunDir};
use crate::sample_file;
use crate::shared_run;
use crate::source::Source;
use crate::spec::RunSpec;
use perilune_core::mesh::Axis;
use perilune_data::sample_log::SampleLog;
use perilune_lua::Run;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Returns the present time as `run.json` has it.
pub(crate) fn started() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string()
}

/// Returns the fields of `run.json` of a new run: those of `about`, and where, how and from what it was started.
pub(crate) fn start_record(spec: &RunSpec, source: &Source, about: &Map<String, Value>) -> Map<String, Value> {
    let mut record = about.clone();
    record.insert("command".into(), spec.command.clone().into());
    let here = std::env::current_dir().map(|d| d.display().to_string()).ok();
    record.insert("directory".into(), here.into());
    record.insert("commit".into(), crate::git::commit(source.dir()).into());
    record.insert("host".into(), hostname().into());
    record.insert("pid".into(), std::process::id().into());
    record
}

/// Returns a recipe's file and those it required: path below `recipe/`, text.
pub(crate) fn own_files(source: &Source, required: Vec<(PathBuf, String)>) -> Vec<(PathBuf, String)> {
    let name = source.path.file_name().map_or_else(|| PathBuf::from("recipe.lua"), PathBuf::from);
    let mut out = vec![(name, source.text.clone())];
    let inside = |path: &Path| path.strip_prefix(source.dir()).unwrap_or(path).to_path_buf();
    out.extend(required.into_iter().map(|(path, text)| (inside(&path), text)));
    out
}

impl Session<'_> {
    /// Adds how the devices of a mesh divide the run.
    pub(super) fn describe_mesh(&self, about: &mut Map<String, Value>) {
        // The recipe may have chosen its mesh.
        let engine = self.runtime.host().engine.borrow();
        about.insert("device_description".into(), engine.backend().describe().into());
        if engine.mesh().devices() > 1 {
            about.insert("mesh".into(), engine.mesh().to_string().into());
            about.insert("zero".into(), engine.zero.into());
        }
        if engine.mesh().size(Axis::Cp) > 1 {
            about.insert("keys".into(), engine.key_exchange().name().into());
        }
        if let Some(shards) = engine.strict_shards() {
            about.insert("strict_shards".into(), shards.into());
        }
    }

    /// Warns if a resumed run adds in another order than before.
    pub(super) fn warn_of_other_sums(&self, reporter: &Reporter) {
        let Some(recorded) = self.resume.as_ref().map(|resume| &resume.record) else { return };
        let engine = self.runtime.host().engine.borrow();
        let (before, now) =
            (recorded.get("strict_shards").and_then(Value::as_u64), engine.strict_shards().map(|n| n as u64));
        if before != now {
            let cure = before.map_or("without --strict-shards".into(), |n| format!("with --strict-shards {n}"));
            reporter.warning(&format!("sums are added in another order than before; resume {cure} for the same bits"));
        }
        // On another mesh, bits are others anyway.
        let text = |key: &str| recorded.get(key).and_then(Value::as_str);
        if let Some(before) = text("keys").filter(|before| *before != engine.key_exchange().name())
            && text("mesh") == Some(&engine.mesh().to_string())
        {
            reporter.warning(&format!(
                "attention adds in another order than before; resume with keys={before} in the mesh for the same bits"
            ));
        }
    }

    /// Adds what the recipe has chosen. `values`: its params; `samples`: those of each split.
    pub(super) fn describe(
        &self,
        run: &Run,
        values: &Params,
        samples: &[(String, u64)],
        about: &mut Map<String, Value>,
    ) {
        about.insert("recipe".into(), self.recipe.name().into());
        about.insert("params".into(), params::to_json(values));
        about.insert("defaults".into(), json!(self.runtime.params().defaults));
        about.insert("seed".into(), run.seed().into());
        about.insert("precision".into(), run.precision().into());
        about.insert("steps".into(), run.steps().into());
        about.insert("parameters".into(), run.num_parameters().into());
        about.insert("frozen_parameters".into(), run.num_frozen().into());
        let sizes = samples.iter().map(|(s, n)| (s.clone(), Value::from(*n))).collect();
        about.insert("samples".into(), Value::Object(sizes));
    }

    /// Creates the run directory, or opens that of a resumed run, and adds it to the fields.
    pub(super) fn open_record(
        &mut self,
        run: &Run,
        about: &mut Map<String, Value>,
        restart: Option<Restart>,
        data: &mut DataRecord,
        reporter: &mut Reporter,
    ) -> Result<Opened> {
        if let Some(store) = self.spec.mlflow.as_ref().filter(|_| self.job.is_first()) {
            // Before anything is written.
            mlflow::open_store(store)?;
        }
        let origin = self.branch(run)?;
        let checkpoints = self.checkpoints((about, data.json()), restart, run, reporter)?;
        let mut tail = LogTail::default();
        if let Some(resume) = &self.resume {
            if self.job.is_first() {
                let (mut dir, found) = resume.open_dir()?;
                dir.update_soon([(DATA, data.json())])?;
                (reporter.dir, tail) = (Some(dir), found);
            }
            tail = shared_run::tail(self.job, tail)?;
            shared_run::sample_log(self.job, resume, run)?;
            about.insert("resumed".into(), resume.step().into());
        }
        if let Some(part) = self.part() {
            tail = part.recording.tail(part.start_step());
            if let Some(start) = &part.start {
                shared_run::sample_log(self.job, start, run)?;
            }
        }
        if self.resume.is_none()
            && self.part().is_none_or(|part| part.start.is_none())
            && let (Some(dir), Some(log)) = (&reporter.dir, run.sample_log())
        {
            *log.borrow_mut() = SampleLog::new(&sample_file::chain_name(dir.id()));
        }
        self.open_mlflow(run, reporter)?;
        let dir = reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let dir = self.share_dir(dir)?;
        about.insert("run_dir".into(), dir.display().to_string().into());
        Ok(Opened { checkpoints, tail, dir, origin })
    }

    /// Begins or continues the run in MLflow, if it is asked for.
    fn open_mlflow(&self, run: &Run, reporter: &mut Reporter) -> Result<()> {
        let Some(dir) = reporter.dir.as_mut() else { return Ok(()) };
        let known = dir.record().get(MLFLOW).and_then(|known| known["store"].as_str()).map(PathBuf::from);
        let Some(store) = self.spec.mlflow.clone().or(known) else { return Ok(()) };
        let mlflow = Mlflow::open(&store, dir.record(), &dir.path, (run.count(), self.spec.branch))?;
        dir.update_soon([(MLFLOW, mlflow.record(&store))])?;
        reporter.mlflow = Some(mlflow);
        Ok(())
    }

    /// Creates the record of the data that the run reads, with what it is compared with.
    pub(super) fn data(&self) -> DataRecord {
        let spec = self.spec;
        let (known, compare) = match (&spec.replay, &self.resume) {
            (Some(replay), _) => (replay.data.clone(), Compare::Replay),
            (_, Some(resume)) => {
                (Entry::all(&resume.record), if spec.changed_data { Compare::Accept } else { Compare::Resume })
            }
            _ => (Vec::new(), Compare::New),
        };
        DataRecord::new(self.runtime.policy().clone(), known, compare, spec.verify_data)
    }

    /// Creates the schedule of checkpoints, and the run directory unless the run is resumed.
    fn checkpoints(
        &self,
        (about, data): (&Map<String, Value>, Value),
        restart: Option<Restart>,
        run: &Run,
        reporter: &mut Reporter,
    ) -> Result<Checkpoints> {
        let fields: Map<String, Value> = ["recipe", "params", "seed", "precision", "versions"]
            .iter()
            .map(|k| (k.to_string(), about[*k].clone()))
            .collect();
        let create = |dir: Option<&Directory>, record| {
            let (every, retention) = (self.spec.checkpoint_every, self.spec.retention.clone());
            Checkpoints::new(dir, every, retention, fields, run, record)
        };
        if !self.job.is_first() {
            return create(None, self.resume.as_ref().map(|resume| &resume.record));
        }
        if let Some(resume) = &self.resume {
            self.grant(&resume.dir)?;
            let mut out = create(Some(&resume.open()?), Some(&resume.record))?;
            if self.spec.discard_later {
                out.forget_after(resume.step(), reporter)?;
            }
            return Ok(out);
        }
        // Wrong options are reported before a directory is made.
        self.spec.retention.choose(run)?;
        let dir = self.create_dir((about, data), restart)?;
        self.grant(&dir.path)?;
        let out = create(Some(dir.handle()), None)?;
        reporter.dir = Some(dir);
        Ok(out)
    }

    /// Returns the run directory in all processes. What the recipe writes there is written by process 0 only; the others make the
    /// same checks where they can see the directory.
    fn share_dir(&self, dir: PathBuf) -> Result<PathBuf> {
        let shared = self.job.share("the run directory", || Ok(dir.display().to_string().into()))?;
        let dir = if self.job.is_first() { dir } else { PathBuf::from(shared.as_str().unwrap_or_default()) };
        if !self.job.is_first() && dir.is_dir() {
            self.grant(&dir)?;
        }
        Ok(dir)
    }

    /// Lets the recipe write in the run directory.
    fn grant(&self, dir: &Path) -> Result<()> {
        self.runtime.policy().grant_directory(dir).map_err(|e| Error::System(e.to_string()))
    }

    fn create_dir(&self, (about, data): (&Map<String, Value>, Value), restart: Option<Restart>) -> Result<RunDir> {
        let files = own_files(self.source, self.runtime.required());
        let mut record = start_record(self.spec, self.source, about);
        record.insert("files".into(), history::hashes(&files, Path::new("")));
        record.insert(DATA.into(), data);
        if let Some(precision) = &self.start.precision {
            record.insert(SET_PRECISION.into(), precision.as_str().into());
        }
        if let Some(seed) = self.start.perturb {
            record.insert(PERTURB.into(), seed.into());
        }
        let claim = match restart {
            Some(restart) => restart.claim()?,
            None => Claim::take(self.spec.run_dir.as_deref(), &self.recipe.name(), self.spec.overwrite)?,
        };
        RunDir::create(claim, record, &files)
    }
}
