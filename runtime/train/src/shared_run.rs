//! Gives all processes of a job the run of process 0: its options, the recipe's text, the checkpoint, the end of the log.

use crate::error::{Error, Result};
use crate::hot_reload::StartOptions;
use crate::job::Job;
use crate::resume::Resume;
use crate::run_log;
use crate::rundir::LogTail;
use crate::sample_file::{self, SAMPLES};
use crate::source::Source;
use crate::spec::RunSpec;
use perilune_checkpoint::Snapshot;
use perilune_core::{DType, HostTensor, Shape};
use perilune_lua::{Run, Runtime};
use perilune_policy::ReadKind;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

fn text(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_string()
}

fn texts(v: &Value) -> Option<String> {
    v.as_str().map(String::from)
}

fn pairs(v: &Value) -> Vec<(String, String)> {
    v.as_array().into_iter().flatten().map(|p| (text(&p[0]), text(&p[1]))).collect()
}

fn start_json(start: &StartOptions) -> Value {
    json!([start.seed, start.precision, start.steps, start.memory_budget, start.perturb])
}

fn start_of(v: &Value) -> StartOptions {
    StartOptions {
        seed: v[0].as_i64(),
        precision: texts(&v[1]),
        steps: v[2].as_u64().and_then(|n| u32::try_from(n).ok()),
        memory_budget: v[3].as_u64().and_then(|n| usize::try_from(n).ok()),
        perturb: v[4].as_u64(),
    }
}

/// Returns the description of the run of process 0. What only concerns the run directory stays this process's own.
pub(crate) fn spec(job: &Job, own: &RunSpec) -> Result<RunSpec> {
    if !job.has_several() {
        return Ok(own.clone());
    }
    if own.replay.is_some() {
        let message = "a replay runs in one process: leave the launcher out, and give the mesh with --mesh";
        return Err(Error::Usage(message.into()));
    }
    let shared = job.share("the options of the run", || {
        Ok(json!({
            "recipe": own.recipe.display().to_string(), "params": own.params, "start": start_json(&own.start),
            "every": own.checkpoint_every, "resume": own.resume, "edited": own.edited, "watch": own.watch,
            "on_nan": own.on_nan, "on_spike": own.on_spike, "until": own.until,
        }))
    })?;
    Ok(RunSpec {
        recipe: PathBuf::from(text(&shared["recipe"])),
        params: pairs(&shared["params"]),
        start: start_of(&shared["start"]),
        checkpoint_every: shared["every"].as_u64(),
        until: shared["until"].as_u64(),
        resume: shared["resume"] == true,
        edited: shared["edited"] == true,
        watch: shared["watch"] == true,
        on_nan: texts(&shared["on_nan"]),
        on_spike: texts(&shared["on_spike"]),
        ..own.clone()
    })
}

/// Returns the text of process 0, which all run. The others do not open the file.
pub(crate) fn source(job: &Job, spec: &RunSpec) -> Result<Source> {
    let own = || match (&spec.replay, spec.files.as_ref().and_then(|files| files.first())) {
        (Some(replay), _) => Ok(Source { path: spec.recipe.clone(), text: replay.text()?.to_string() }),
        (None, Some((_, text))) => Ok(Source { path: spec.recipe.clone(), text: text.clone() }),
        (None, None) => Source::read(&spec.recipe),
    };
    if !job.has_several() {
        return own();
    }
    let mut read = None;
    let shared = job.share("the text of the recipe", || {
        let source = own()?;
        let value = json!([source.path.display().to_string(), source.text]);
        read = Some(source);
        Ok(value)
    })?;
    match read {
        Some(source) => Ok(source),
        None => Ok(Source { path: PathBuf::from(text(&shared[0])), text: text(&shared[1]) }),
    }
}

/// Returns the params that process 0 offers the recipe, and what overrides it.
pub(crate) fn beginning(
    job: &Job,
    offered: Vec<(String, String)>,
    start: StartOptions,
) -> Result<(Vec<(String, String)>, StartOptions)> {
    if !job.has_several() {
        return Ok((offered, start));
    }
    let shared = job.share("how the run begins", || Ok(json!([offered, start_json(&start)])))?;
    Ok((pairs(&shared[0]), start_of(&shared[1])))
}

fn tensors_json(all: &[(String, HostTensor)]) -> Value {
    all.iter().map(|(path, t)| json!([path, t.dtype.name(), t.shape.dims()])).collect::<Vec<_>>().into()
}

/// Returns in all processes the checkpoint that process 0 has read.
pub(crate) fn checkpoint(job: &Job, own: Option<Resume>) -> Result<Option<Resume>> {
    if !job.has_several() {
        return Ok(own);
    }
    let what = "the checkpoint";
    let shared = job.share(what, || {
        let Some(resume) = &own else { return Ok(Value::Null) };
        let s = &resume.snapshot;
        Ok(json!({
            "dir": resume.dir.display().to_string(), "path": resume.path.display().to_string(),
            "run": resume.record, "step": s.step, "record": s.record,
            "model": tensors_json(&s.model), "optimizer": tensors_json(&s.optimizer),
        }))
    })?;
    if shared.is_null() {
        return Ok(None);
    }
    let sent = own.as_ref().map(|r| &r.snapshot);
    let receive = |key: &str, sent: Option<&Vec<(String, HostTensor)>>| {
        let list = shared[key].as_array().into_iter().flatten().enumerate();
        let tensors = list.map(|(k, t)| {
            let wrong = || Error::System(format!("rank 0 has sent a checkpoint with a State that cannot be read: {t}"));
            let dtype = t[1].as_str().and_then(DType::parse).ok_or_else(wrong)?;
            let dims = t[2].as_array().ok_or_else(wrong)?.iter().map(|d| d.as_u64().map(|d| d as usize));
            let shape = Shape::of(&dims.collect::<Option<Vec<_>>>().ok_or_else(wrong)?);
            let own = sent.and_then(|all| all.get(k)).map(|(_, t)| t.bytes.as_slice());
            let bytes = job.share_bytes(what, own, shape.numel() * dtype.size())?;
            Ok((text(&t[0]), HostTensor::new(dtype, shape, bytes)))
        });
        tensors.collect::<Result<Vec<_>>>()
    };
    let (model, optimizer) =
        (receive("model", sent.map(|s| &s.model))?, receive("optimizer", sent.map(|s| &s.optimizer))?);
    if own.is_some() {
        return Ok(own);
    }
    let object = |v: &Value| v.as_object().cloned().unwrap_or_default();
    let snapshot = Snapshot {
        step: shared["step"].as_u64().unwrap_or_default(),
        model,
        optimizer,
        record: object(&shared["record"]),
    };
    let path = |key: &str| PathBuf::from(text(&shared[key]));
    Ok(Some(Resume::elsewhere(path("dir"), path("path"), object(&shared["run"]), snapshot)))
}

/// Returns the end of the log that process 0 has read: the last losses, and evaluations that are not made again. Numbers travel as
/// bits, since a loss may be NaN.
pub(crate) fn tail(job: &Job, own: LogTail) -> Result<LogTail> {
    if !job.has_several() {
        return Ok(own);
    }
    let shared = job.share("the log of the run", || {
        let mut evaluated: Vec<_> = own.evaluated.iter().collect();
        evaluated.sort_by_key(|e| e.0);
        let bits =
            |values: &Vec<(String, f64)>| values.iter().map(|(n, v)| json!([n, v.to_bits()])).collect::<Vec<_>>();
        let evaluated: Vec<_> = evaluated.into_iter().map(|(split, values)| json!([split, bits(values)])).collect();
        let entry = |e: &Option<(u64, f64, Option<f64>)>| {
            e.map(|(step, loss, norm)| json!([step, loss.to_bits(), norm.map(f64::to_bits)]))
        };
        Ok(json!([evaluated, own.seconds, own.history.iter().map(entry).collect::<Vec<_>>()]))
    })?;
    if job.is_first() {
        return Ok(own);
    }
    let number = |v: &Value| v.as_u64().map(f64::from_bits);
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let values = |v: &Value| list(v).iter().filter_map(|p| Some((text(&p[0]), number(&p[1])?))).collect();
    let entry = |e: &Value| Some((e[0].as_u64()?, number(&e[1])?, number(&e[2])));
    Ok(LogTail {
        stopped: own.stopped,
        evaluated: list(&shared[0]).iter().map(|p| (text(&p[0]), values(&p[1]))).collect(),
        seconds: shared[1].as_f64().unwrap_or_default(),
        history: list(&shared[2]).iter().map(entry).collect(),
    })
}

/// Restores the sample log of a resumed run, in all processes from the file that process 0 has read.
pub(crate) fn sample_log(job: &Job, resume: &Resume, run: &Run) -> Result<()> {
    let Some(log) = run.sample_log() else { return Ok(()) };
    let what = "the sample log";
    let own = if job.is_first() { Some(sample_file::bytes(&resume.open()?)?) } else { None };
    let mut bytes = own.unwrap_or_default();
    if job.has_several() {
        let length = job.share(what, || Ok(bytes.len().into()))?.as_u64().unwrap_or_default() as usize;
        bytes = job.share_bytes(what, job.is_first().then_some(&bytes), length)?;
    }
    let id = resume.record.get("id").and_then(Value::as_str).unwrap_or_default();
    let head = run_log::stood(&resume.snapshot.record, SAMPLES);
    *log.borrow_mut() = sample_file::read(&bytes, id, resume.step(), head, &resume.dir.join(SAMPLES))?;
    Ok(())
}

/// Refuses a job whose processes have no work of their own.
pub(crate) fn check_mesh(job: &Job, runtime: &Runtime) -> Result<()> {
    let (engine, n) = (runtime.host().engine.borrow(), job.processes());
    if n == 1 || engine.backend().processes() == n {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "the job has {n} processes and one device: each of them would do the same work\n  \
         hint: give a mesh whose devices they share, such as --mesh dp={n}, or recipe.mesh"
    )))
}

/// Compares what has been built among all processes before the first step: params, data, States.
pub(crate) fn agree(job: &Job, about: &Map<String, Value>, run: &Run, runtime: &Runtime) -> Result<()> {
    if !job.has_several() {
        return Ok(());
    }
    let states = run.state_lines()?;
    job.agree("the run", || {
        let mut lines = String::new();
        let keys =
            ["recipe", "params", "seed", "precision", "steps", "mesh", "zero", "keys", "strict_shards", "samples"];
        for key in keys {
            lines.push_str(&format!("{key}: {}\n", about.get(key).unwrap_or(&Value::Null)));
        }
        for read in runtime.policy().data_reads(&mut 0).unwrap_or_default() {
            let size = match &read.kind {
                ReadKind::File { len, .. } => format!("{len} bytes"),
                ReadKind::Folder(list) => format!("{} files", list.count()),
            };
            lines.push_str(&format!("data {:?}: {size}\n", read.name));
        }
        lines + &states
    })
}
