//! Copies a run up to a checkpoint into a new run directory, where it continues as a run of its own.
//!
//! The copy has everything that a resume and a replay need: the checkpoint, the recipe with its versions, both logs and the sample
//! log. It keeps the `id` of its origin, to which the hash chains of the logs belong, so they are copied as they are; the resume in
//! the new directory then cuts the metrics at the step. The field `branch` of `run.json` names the origin. Nothing is written to
//! the directory of the origin, which may be that of a running process.

use crate::claim::Claim;
use crate::error::{Result, disk};
use crate::history;
use crate::resume::Resume;
use crate::run_files::hostname;
use crate::run_log::{self, LEDGER, LOGS, METRICS};
use crate::rundir::{RECORD, write_version};
use crate::sample_file::SAMPLES;
use perilune_checkpoint::{CHECKPOINTS, SHARD_LIMIT, seal};
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// The field of `run.json` that names the run from which this one branched.
pub(crate) const BRANCH: &str = "branch";

/// Fields of the origin that describe its end, its later resumes, or checkpoints that the branch does not have.
const LEFT: [&str; 7] = [LOGS, "best", "steps_done", "seconds", "metrics", "weights", "error"];

/// Copies the run of `resume` up to its checkpoint into the directory that `claim` takes. Returns the run to be resumed there. The logs
/// are checked first, so that a damaged origin leaves no directory behind.
pub(crate) fn branch(resume: Resume, claim: impl FnOnce() -> Result<Claim>) -> Result<Resume> {
    let (from, step) = (resume.open()?, resume.step());
    let metrics = run_log::text(&from, METRICS)?;
    for record in [&resume.record, &resume.snapshot.record] {
        run_log::verify(from.path(), METRICS, &metrics, &resume.record, run_log::stood(record, METRICS))?;
    }
    let head = run_log::stood(&resume.snapshot.record, LEDGER);
    let (lines, versions) = history::until(&from, &resume.record, head, step)?;
    let claim = claim()?;
    let to = claim.dir;
    // The checkpoint first: a directory that has one and no record is never taken for a run that can start anew.
    let path = perilune_checkpoint::write(&to.make_directory(CHECKPOINTS)?, &resume.snapshot, SHARD_LIMIT)?;
    for (folder, files) in &versions {
        write_version(&to, folder, files)?;
    }
    write(&to, METRICS, run_log::complete(&metrics))?;
    copy(&from, &to, SAMPLES)?;
    if !lines.is_empty() {
        write(&to, LEDGER, lines.iter().map(String::as_str))?;
    }
    let record = record_of_branch(&resume, &from, step);
    to.replace(RECORD, seal::seal(record.clone()).as_bytes())?;
    Ok(resume.moved(record, path, to, claim.lock))
}

fn record_of_branch(resume: &Resume, from: &Directory, step: u64) -> Map<String, Value> {
    let mut record = resume.record.clone();
    LEFT.iter().for_each(|key| drop(record.shift_remove(*key)));
    let origin = from.path().canonicalize().unwrap_or_else(|_| from.path().to_path_buf());
    // The end of a branch of a branch names the whole line.
    let before = record.shift_remove(BRANCH);
    let mut branch = json!({ "run": origin.display().to_string(), "step": step, "started": record.get("started") });
    if let Some(before) = before {
        branch["of"] = before;
    }
    if let Some(resumed) = record.get_mut("resumed").and_then(Value::as_array_mut) {
        resumed.retain(|at| at.as_u64().is_some_and(|at| at <= step));
    }
    record.insert(BRANCH.into(), branch);
    record.insert("started".into(), crate::session::started().into());
    record.insert("host".into(), hostname().into());
    record.insert("pid".into(), std::process::id().into());
    record.insert("status".into(), "interrupted".into());
    record
}

/// Copies a file of the run, if it has it; of one that is still written, the part that is there.
fn copy(from: &Directory, to: &Directory, name: &str) -> Result<()> {
    if !from.has(name)? {
        return Ok(());
    }
    let mut source = from.open_unlinked(Path::new(name))?;
    let mut target = to.create_over(name)?;
    std::io::copy(&mut source, &mut target).map_err(disk("copy", source.path()))?;
    Ok(())
}

fn write<'a>(to: &Directory, name: &str, lines: impl Iterator<Item = &'a str>) -> Result<()> {
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let written = to.create_over(name)?.write_all(text.as_bytes());
    written.map_err(disk("write", &to.path().join(name)))
}
