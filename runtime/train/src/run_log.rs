//! Writes and reads the logs of a run directory: `metrics.jsonl` and `ledger.jsonl`.
//!
//! A log has one JSON object per line, each with a seal that continues a hash chain (`perilune_checkpoint::seal`). The chain
//! starts at the run's `id` and the name of the log. A checkpoint records the heads of both chains at its time, and
//! `run.json` their final heads. Logs of releases without seals are read unchecked, and sealed when the run is resumed.

use crate::error::{Error, Result, disk};
use crate::run_files::text_in;
use perilune_checkpoint::seal::{Chain, unsealed};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

pub(crate) const METRICS: &str = "metrics.jsonl";
pub(crate) const LEDGER: &str = "ledger.jsonl";

/// The field of a record with the heads of the logs' chains.
pub(crate) const LOGS: &str = "logs";

/// The size limit of a log, enough for ten million steps.
const MAX_BYTES: u64 = 4 << 30;

/// Starts the chain of a log of the run with this record.
pub(crate) fn chain(record: &Map<String, Value>, log: &str) -> Chain {
    let id = record.get("id").and_then(Value::as_str).unwrap_or_default();
    Chain::new(&format!("{id} {log}"))
}

/// Returns the text of a log, empty if there is none.
pub(crate) fn text(dir: &Directory, log: &str) -> Result<String> {
    if dir.has(log)? { text_in(dir, Path::new(log), MAX_BYTES) } else { Ok(String::new()) }
}

/// Returns the complete lines of a log; the last line may be incomplete if its process was killed.
pub(crate) fn complete(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
}

/// Checks the seals of a log. `stood` is a head that the chain must have passed. Returns the chain at its end.
///
/// A run without an `id` was written by a release without seals; its logs are not checked.
pub(crate) fn verify(
    dir: &Path,
    log: &str,
    text: &str,
    record: &Map<String, Value>,
    stood: Option<&str>,
) -> Result<Chain> {
    let mut chain = chain(record, log);
    if !record.contains_key("id") {
        return Ok(chain);
    }
    let at = dir.join(log);
    let mut passed = stood.is_none_or(|head| head == chain.head());
    for (k, line) in complete(text).enumerate() {
        chain.follow(line).map_err(|rule| {
            let rule = format!("{}:{}: {rule}: the log was changed or damaged", at.display(), k + 1);
            Error::Refused(format!("{rule}\n  hint: restore the file, or start a new run"))
        })?;
        passed |= stood == Some(chain.head());
    }
    if passed {
        return Ok(chain);
    }
    let (at, head) = (at.display(), stood.unwrap_or_default());
    Err(Error::Refused(format!(
        "{at}: {}: the record of the run has a line with seal {head}, but the log has none: lines were removed",
        perilune_checkpoint::seal::LINE_SEAL
    )))
}

/// Returns the head of a log's chain according to a record.
pub(crate) fn stood<'a>(record: &'a Map<String, Value>, log: &str) -> Option<&'a str> {
    record.get(LOGS)?.get(log)?.as_str()
}

/// A log that is being written.
pub(crate) struct RunLog {
    dir: Directory,
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    chain: Chain,
}

impl RunLog {
    /// Replaces a log by these lines with new seals, and opens it for appending.
    pub fn replace<'a>(
        dir: &Directory,
        log: &str,
        record: &Map<String, Value>,
        lines: impl Iterator<Item = &'a str>,
    ) -> Result<RunLog> {
        let (path, new) = (dir.path().join(log), format!(".{log}.new"));
        let mut chain = chain(record, log);
        let text: String = lines.map(|line| chain.append(&unsealed(line)) + "\n").collect();
        let mut file = dir.create_over(&new)?;
        file.write_all(text.as_bytes()).map_err(disk("write", &path))?;
        dir.rename(&new, log)?;
        Ok(RunLog { dir: dir.clone(), name: log.into(), path, file: BufWriter::new(file), chain })
    }

    /// Appends a line, with its seal.
    pub fn append(&mut self, event: &Value) -> Result<()> {
        let line = self.chain.append(&event.to_string());
        writeln!(self.file, "{line}").map_err(disk("write to", &self.path))
    }

    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(disk("write to", &self.path))
    }

    /// Flushes to the disk. A file system that cannot sync gives no guarantee after a power failure in any case.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        let _ = self.file.get_ref().sync_all();
        Ok(())
    }

    /// Returns the seal of the last line.
    pub fn head(&self) -> &str {
        self.chain.head()
    }

    /// Returns whether the file still has its name; its directory may have been removed or renamed.
    pub fn is_in_place(&self) -> bool {
        self.dir.holds(&self.name, self.file.get_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn open(dir: &Path) -> Directory {
        Directory::open(dir).expect("a directory")
    }

    fn record(id: &str) -> Map<String, Value> {
        Map::from_iter([("id".to_string(), id.into())])
    }

    fn log(dir: &Path, steps: u64) -> RunLog {
        let mut log = RunLog::replace(&open(dir), METRICS, &record("a"), std::iter::empty()).expect("a log");
        for step in 1..=steps {
            log.append(&json!({ "step": step })).expect("written");
        }
        log.flush().expect("flushed");
        log
    }

    #[test]
    fn a_log_continues_after_it_was_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let head = log(dir.path(), 3).head().to_string();
        log(dir.path(), 5);
        let all = text(&open(dir.path()), METRICS).expect("text");
        let check = |text: &str, stood| verify(dir.path(), METRICS, text, &record("a"), stood);
        check(&all, Some(&head)).expect("the chain passed the third line");

        let kept: Vec<&str> = complete(&all).take(3).collect();
        let mut cut = RunLog::replace(&open(dir.path()), METRICS, &record("a"), kept.into_iter()).expect("cut");
        assert_eq!(cut.head(), head);
        cut.append(&json!({ "step": 9 })).and_then(|()| cut.flush()).expect("written");
        let cut = text(&open(dir.path()), METRICS).expect("text");
        assert_eq!(check(&cut, Some(&head)).expect("whole").head(), check(&cut, None).expect("whole").head());

        let lost: String = complete(&all).take(2).map(|l| format!("{l}\n")).collect();
        let error = check(&lost, Some(&head)).expect_err("the third line is missing").to_string();
        assert!(error.contains("lines were removed"), "{error}");
        let edited = all.replace("\"step\":2", "\"step\":7");
        let error = check(&edited, None).expect_err("edited").to_string();
        assert!(error.contains("metrics.jsonl:2: seal: is "), "{error}");
        assert!(verify(dir.path(), METRICS, &all, &record("b"), None).is_err(), "the log of another run");
    }

    #[test]
    fn links_and_pipes_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let target = dir.path().join("target");
        fs::write(&target, "mine").expect("written");
        std::os::unix::fs::symlink(&target, dir.path().join(LEDGER)).expect("a link");
        std::os::unix::fs::symlink(&target, dir.path().join(format!(".{METRICS}.new"))).expect("a link");
        let error = text(&open(dir.path()), LEDGER).expect_err("a link");
        assert!(error.to_string().contains("ledger.jsonl: file: is a link; a regular file is needed"), "{error}");
        log(dir.path(), 1);
        assert_eq!(fs::read_to_string(&target).expect("text"), "mine");
    }

    #[test]
    fn a_log_knows_whether_it_is_in_place() {
        let dir = tempfile::tempdir().expect("a directory");
        let inside = dir.path().join("run");
        fs::create_dir(&inside).expect("created");
        let log = log(&inside, 1);
        assert!(log.is_in_place());
        fs::rename(&inside, dir.path().join("moved")).expect("renamed");
        assert!(!log.is_in_place());
        fs::create_dir(&inside).expect("created");
        fs::write(inside.join(METRICS), "").expect("written");
        assert!(!log.is_in_place());
    }
}
