//! Records the data files that a run reads, in `run.json`, and compares them on a resume and a replay.
//!
//! An entry has the path as the recipe wrote it, size, time of modification and BLAKE3 hash. Size and time are recorded when a
//! file is opened; a thread hashes its content while the run trains, and the end of the run waits for it. A folder of images is
//! one entry: the number of its files, their bytes, and a hash over their names and sizes. What the recipe itself wrote, and
//! modules, are no data.
//!
//! A comparison is made before the first step. Equal size and time count as unchanged, unless the caller asks for whole hashes;
//! otherwise the hashes decide.

use crate::data_hash::{Digest, Hasher, digest};
use crate::error::{Error, Result};
use perilune_policy::{DataRead, Policy, ReadKind};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The field of `run.json`.
pub(crate) const DATA: &str = "data";

/// A file or folder in the record of a run.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Entry {
    /// As the recipe wrote it.
    path: String,
    /// Of a folder, the sum; known with its hash.
    bytes: Option<u64>,
    /// Nanoseconds since 1970; of a file.
    modified: Option<u64>,
    /// Files of a folder.
    files: Option<u64>,
    hash: Option<String>,
    /// The step by which it was first read; 0 for data that the recipe loads as it is built.
    since: u64,
    /// Another content was read under this name earlier in the run.
    changed: bool,
    /// While a file that was read again is hashed: its hash before, and whether it had changed already.
    before: Option<(String, bool)>,
    /// Whether a warning has said that it changed.
    told: bool,
}

fn nanoseconds(time: Option<SystemTime>) -> Option<u64> {
    let since = time?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(since.as_nanos()).ok()
}

impl Entry {
    fn of(read: &DataRead, since: u64) -> Entry {
        let (bytes, modified, files) = match &read.kind {
            ReadKind::File { len, modified } => (Some(*len), nanoseconds(*modified), None),
            ReadKind::Folder(list) => (None, None, Some(list.count() as u64)),
        };
        Entry {
            path: read.name.clone(),
            bytes,
            modified,
            files,
            hash: None,
            since,
            changed: false,
            before: None,
            told: false,
        }
    }

    fn json(&self) -> Value {
        let mut out = Map::new();
        out.insert("path".into(), self.path.as_str().into());
        for (key, value) in [("files", self.files), ("bytes", self.bytes), ("mtime_ns", self.modified)] {
            if let Some(value) = value {
                out.insert(key.into(), value.into());
            }
        }
        if let Some(hash) = &self.hash {
            out.insert("blake3".into(), hash.as_str().into());
        }
        if self.since > 0 {
            out.insert("since".into(), self.since.into());
        }
        if self.changed {
            out.insert("changed".into(), true.into());
        }
        Value::Object(out)
    }

    fn parse(v: &Value) -> Option<Entry> {
        Some(Entry {
            path: v["path"].as_str()?.to_string(),
            bytes: v["bytes"].as_u64(),
            modified: v["mtime_ns"].as_u64(),
            files: v["files"].as_u64(),
            hash: v["blake3"].as_str().map(String::from),
            since: v["since"].as_u64().unwrap_or(0),
            changed: v["changed"] == true,
            before: None,
            told: false,
        })
    }

    /// Returns the path as the recipe wrote it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether it is a folder of files.
    pub fn is_folder(&self) -> bool {
        self.files.is_some()
    }

    /// Returns the hash of a file's whole content, if the run has it.
    pub fn content_hash(&self) -> Option<&str> {
        self.hash.as_deref().filter(|hash| !self.is_folder() && !hash.contains('-'))
    }

    /// Whether the run read two contents under this name.
    pub fn has_changed(&self) -> bool {
        self.changed
    }

    /// Reads the entries of a `run.json`. That of an older release has none.
    pub fn all(record: &Map<String, Value>) -> Vec<Entry> {
        record.get(DATA).and_then(Value::as_array).into_iter().flatten().filter_map(Entry::parse).collect()
    }

    /// Returns how the file that was read now differs from this entry. `whole`: equal size and time are not enough.
    fn difference(&self, read: &DataRead, policy: &Policy, whole: bool, notice: Notice<'_>) -> Result<Option<String>> {
        let now = Entry::of(read, 0);
        if self.files.is_some() != now.files.is_some() {
            let kind = |e: &Entry| if e.files.is_some() { "a folder of images" } else { "a file" };
            return Ok(Some(format!("it was {}, and is {}", kind(self), kind(&now))));
        }
        let counts =
            [("files", self.files, now.files), ("bytes", self.bytes.filter(|_| self.files.is_none()), now.bytes)];
        for (what, was, is) in counts {
            if let (Some(was), Some(is)) = (was, is)
                && was != is
            {
                return Ok(Some(format!("it had {was} {what}, and has {is}")));
            }
        }
        if now.files.is_none() && !whole && self.modified.is_some() && self.modified == now.modified {
            return Ok(None);
        }
        let Some(hash) = &self.hash else {
            let differs = now.files.is_none() && self.modified != now.modified;
            return Ok(differs.then(|| "its time of modification differs, and the run has no hash of it".into()));
        };
        let what = if now.files.is_some() { "the names or sizes of its files differ" } else { "its content differs" };
        if let Some(bytes) = now.bytes.filter(|bytes| *bytes >= LARGE) {
            notice(&read.name, bytes);
        }
        let digest = digest(read, policy, &AtomicBool::new(false)).map_err(|rule| {
            Error::System(format!("cannot compare {:?} with the data of the run: {rule}", read.name))
        })?;
        Ok((digest.hash != *hash).then(|| what.to_string()))
    }
}

/// What a difference from the recorded data means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compare {
    /// A new run has nothing to compare with.
    New,
    /// An error before the first step, and a warning later.
    Resume,
    /// Differences are accepted, and recorded.
    Accept,
    /// Always an error.
    Replay,
}

/// The data of the run that is being trained.
pub(crate) struct DataRecord {
    policy: Arc<Policy>,
    seen: u64,
    entries: Vec<Entry>,
    /// The places in `entries` by path.
    index: HashMap<String, usize>,
    compare: Compare,
    /// The entries of the run that is repeated.
    expected: HashMap<String, Entry>,
    whole: bool,
    hasher: Hasher,
    /// Whether `run.json` lacks something.
    stale: bool,
}

/// Is called with the path and the bytes of a file that is hashed now.
type Notice<'a> = &'a dyn Fn(&str, u64);

/// A file of this size takes a noticeable time.
const LARGE: u64 = 256 << 20;
/// The cure of a replay.
const RESTORE: &str = "restore it: a replay needs the data of the run";
/// The shortest time between two looks at a hash that is awaited.
const LOOK: Duration = Duration::from_millis(20);
/// The time after which the wait at the end of a run is explained.
const PATIENCE: Duration = Duration::from_secs(1);

impl DataRecord {
    /// Creates the record of a run that continues, or repeats, one with these entries.
    pub fn new(policy: Arc<Policy>, known: Vec<Entry>, compare: Compare, whole: bool) -> DataRecord {
        let keeps = compare != Compare::Replay;
        let expected = known.iter().filter(|_| !keeps).map(|e| (e.path.clone(), e.clone())).collect();
        let entries = if keeps { known } else { Vec::new() };
        let index = entries.iter().enumerate().map(|(at, e)| (e.path.clone(), at)).collect();
        let hasher = Hasher::new(policy.clone());
        DataRecord { policy, seen: 0, entries, index, compare, expected, whole, hasher, stale: false }
    }

    /// Compares what the recipe has read as it was built with the record, and adds it. Returns warnings. A file that has
    /// changed is an error. `notice` is called before a comparison that takes long.
    pub fn begin(&mut self, step: u64, notice: Notice<'_>) -> Result<Vec<String>> {
        let reads = self.policy.data_reads(&mut self.seen).unwrap_or_default();
        let (mut wrong, mut told) = (Vec::new(), Vec::new());
        for read in &reads {
            if let Some(rule) = self.compare(read, notice)? {
                wrong.push(format!("{:?} is not the data that the run read: {rule}", read.name));
                told.push(read.name.clone());
            }
        }
        let mut warnings = Vec::new();
        if self.compare == Compare::Accept {
            warnings.append(&mut wrong);
        }
        if let Some(first) = wrong.first() {
            let more = if wrong.len() > 1 { format!("; and {} more", wrong.len() - 1) } else { String::new() };
            let cure = match self.compare {
                Compare::Replay => RESTORE,
                _ => "restore it; --resume --changed-data continues with the data as they are",
            };
            return Err(Error::Refused(format!("{first}{more}\n  hint: {cure}")));
        }
        warnings.extend(self.others(&reads));
        for read in reads {
            let (accepted, path) = (told.contains(&read.name), read.name.clone());
            match self.index.get(&path).map(|at| &mut self.entries[*at]) {
                // It has been compared, so its hash stands.
                Some(entry) if entry.hash.is_some() && !accepted => entry.modified = Entry::of(&read, 0).modified,
                _ => self.add(read, step),
            }
            if let Some(at) = self.index.get(&path) {
                self.entries[*at].told |= accepted;
            }
        }
        Ok(warnings)
    }

    /// Names files that the run read from its start and this recipe does not, with those that it reads in their place.
    fn others(&self, reads: &[DataRead]) -> Option<String> {
        let known = |name: &str| self.recorded(name).is_some();
        let before = self.entries.iter().chain(self.expected.values()).filter(|e| e.since == 0);
        let mut missing: Vec<_> = before.filter(|e| !reads.iter().any(|r| r.name == e.path)).map(|e| &e.path).collect();
        missing.sort();
        let new: Vec<_> = reads.iter().map(|r| &r.name).filter(|name| !known(name)).collect();
        if missing.is_empty() {
            return None;
        }
        let list = |names: &[&String]| {
            let shown: Vec<String> = names.iter().take(3).map(|n| format!("{n:?}")).collect();
            let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
            format!("{}{more}", shown.join(", "))
        };
        let instead = if new.is_empty() { String::new() } else { format!("; it reads {} instead", list(&new)) };
        Some(format!("the run read {}, and the recipe does not now{instead}", list(&missing)))
    }

    fn recorded(&self, name: &str) -> Option<&Entry> {
        match self.compare {
            Compare::Replay => self.expected.get(name),
            _ => self.index.get(name).map(|at| &self.entries[*at]),
        }
    }

    fn compare(&self, read: &DataRead, notice: Notice<'_>) -> Result<Option<String>> {
        match self.recorded(&read.name) {
            Some(entry) if entry.changed && self.compare == Compare::Replay => {
                Ok(Some("it was changed during the run, which read both".into()))
            }
            Some(entry) if self.compare != Compare::New => entry.difference(read, &self.policy, self.whole, notice),
            _ => Ok(None),
        }
    }

    /// Adds what was read, and has it hashed.
    fn add(&mut self, read: DataRead, step: u64) {
        let mut entry = Entry::of(&read, step);
        match self.index.get(&entry.path) {
            Some(at) => {
                let old = &mut self.entries[*at];
                if old.hash.is_some() && (old.bytes, old.modified) == (entry.bytes, entry.modified) {
                    return;
                }
                // Its hash tells whether it has changed. Without an earlier one, size and time do.
                let differs = (old.bytes, old.modified) != (entry.bytes, entry.modified);
                entry.before = old.before.take().or_else(|| Some((old.hash.take()?, old.changed)));
                entry.changed = old.changed || (entry.files.is_none() && differs);
                entry.since = old.since;
                *old = entry;
            }
            None => {
                self.index.insert(entry.path.clone(), self.entries.len());
                self.entries.push(entry);
            }
        }
        self.stale = true;
        self.hasher.start(read);
    }

    /// Adds what was read since the last call, and hashes that are complete. Returns warnings, and whether `run.json` should be
    /// updated. In a replay a file that has changed is an error.
    pub fn poll(&mut self, step: u64) -> Result<(Vec<String>, bool)> {
        for read in self.policy.data_reads(&mut self.seen).unwrap_or_default() {
            if self.compare == Compare::Replay
                && let Some(rule) = self.compare(&read, &|_, _| ())?
            {
                return Err(Error::Refused(format!(
                    "{:?} is not the data that the run read: {rule}\n  hint: {RESTORE}",
                    read.name
                )));
            }
            self.add(read, step);
        }
        let changed = self.take();
        let warnings = changed.into_iter().map(|name| {
            format!(
                "{name:?} has changed since the run read it; the new content was read now, and a replay would need both"
            )
        });
        Ok((warnings.collect(), self.stale && self.hasher.is_idle()))
    }

    /// Takes the hashes that are complete. Returns the files that have changed.
    fn take(&mut self) -> Vec<String> {
        let mut out = Vec::new();
        while let Some((path, digest)) = self.hasher.take() {
            let Some(entry) = self.index.get(&path).map(|at| &mut self.entries[*at]) else { continue };
            // Otherwise the content that was read is gone.
            if let Ok(Digest { hash, bytes }) = digest {
                if let Some((old, changed)) = entry.before.take() {
                    entry.changed = changed || old != hash;
                    if old != hash && !std::mem::replace(&mut entry.told, true) {
                        out.push(path);
                    }
                }
                (entry.hash, entry.bytes) = (Some(hash), Some(bytes));
                self.stale = true;
            }
        }
        out
    }

    /// Waits for the hashes, until `stopped` says that there is no time for them. `notice` is called if that takes long.
    pub fn finish(&mut self, stopped: impl Fn() -> bool, notice: impl FnOnce()) {
        let (begun, mut notice) = (Instant::now(), Some(notice));
        self.take();
        while !self.hasher.is_idle() && !stopped() {
            if begun.elapsed() > PATIENCE
                && let Some(notice) = notice.take()
            {
                notice();
            }
            self.hasher.wait(LOOK);
            self.take();
        }
    }

    /// Returns the field of `run.json`.
    pub fn json(&mut self) -> Value {
        self.stale = false;
        let omitted = self.policy.unrecorded_reads();
        let mut out: Vec<Value> = self.entries.iter().map(Entry::json).collect();
        if omitted > 0 {
            out.push(json!({ "omitted": omitted }));
        }
        out.into()
    }
}
