//! Reads the records of all splits in parallel, and runs the checks.

use crate::duplicates;
use crate::findings::Maker;
use crate::near::{self, Near};
use crate::overlap::Overlap;
use crate::profile::{Keys, Profile, Scratch, keys, texts};
use crate::report::{Report, SplitReport};
use crate::roles::Roles;
use crate::tokens;
use perilune_core::Interrupt;
use perilune_data::records::{Dataset, Record};
use perilune_data::{Error, Result};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Records of a split that are checked; more are sampled. A record takes about 110 bytes.
pub const MOST_ROWS: u64 = 8 << 20;
/// Records from which roles are guessed.
const SAMPLE: u64 = 1000;
/// Records that a task reads by default.
pub const CHUNK: u64 = 64;
/// Tasks between two looks at the clock.
const TASKS: u64 = 32;

/// A split of the data.
#[derive(Clone)]
pub struct Split {
    pub name: String,
    /// Whether training must not see its records.
    pub evaluation: bool,
    pub records: Arc<dyn Dataset>,
    /// The same records with token ids.
    pub encoded: Option<Arc<dyn Dataset>>,
    /// The number of ids of the tokenizer.
    pub vocabulary: Option<u64>,
    /// What its records are called in messages: "records", "rows".
    pub unit: &'static str,
    /// The numbers of the records in their source, if they are a view of it.
    pub numbers: Option<Arc<[u64]>>,
    /// Records that a task reads.
    pub chunk: u64,
}

impl Split {
    /// A split of records, for evaluation unless it is called "train".
    pub fn new(name: impl Into<String>, records: Arc<dyn Dataset>) -> Split {
        let name = name.into();
        let evaluation = name != "train";
        Split {
            name,
            evaluation,
            records,
            encoded: None,
            vocabulary: None,
            unit: "records",
            numbers: None,
            chunk: CHUNK,
        }
    }
}

/// What is checked.
#[derive(Clone)]
pub struct Options {
    /// The fields that have the text; guessed if there are none.
    pub text: Vec<String>,
    /// The fields that are labels; guessed if there are none.
    pub labels: Vec<String>,
    /// Labels are integers below it.
    pub classes: Option<u64>,
    /// The least Jaccard similarity of near duplicates.
    pub similarity: f64,
    /// Records of a split that are checked.
    pub rows: u64,
    /// Tokens of a corpus that are read.
    pub tokens: u64,
    /// The time after which no further records are read.
    pub seconds: Option<Duration>,
    pub interrupt: Interrupt,
}

impl Options {
    /// Checks all records.
    pub fn full(interrupt: Interrupt) -> Options {
        Options {
            text: Vec::new(),
            labels: Vec::new(),
            classes: None,
            similarity: 0.8,
            rows: MOST_ROWS,
            tokens: u64::MAX,
            seconds: None,
            interrupt,
        }
    }

    /// Checks a sample of the records before a run. Without a time limit its findings are the same each time.
    pub fn quick(interrupt: Interrupt, seconds: Option<Duration>) -> Options {
        Options { rows: 5_000, tokens: 64 << 20, seconds, ..Options::full(interrupt) }
    }
}

/// A split that has been read.
pub struct Scanned<'a> {
    pub split: &'a Split,
    pub dataset: Arc<dyn Dataset>,
    pub profile: Profile,
    pub keys: Vec<Keys>,
    wanted: u64,
}

impl Scanned<'_> {
    /// The index in the dataset of a record by its place among those that are checked.
    pub fn index(&self, place: u64) -> u64 {
        spread(place, self.wanted, self.dataset.len())
    }

    /// The number in the source of a record by its place among those that are checked.
    pub fn number(&self, place: u64) -> u64 {
        let index = self.index(place);
        self.split.numbers.as_ref().and_then(|n| n.get(index as usize).copied()).unwrap_or(index)
    }

    /// Whether all records of the split were checked.
    pub fn is_whole(&self) -> bool {
        self.keys.len() as u64 >= self.split.records.len()
    }

    pub fn read(&self, place: u64) -> Result<Record> {
        self.dataset.get(self.index(place))
    }

    /// The file and line of a record.
    pub fn place(&self, place: u64) -> String {
        let origin = self.dataset.origins(self.index(place)).ok().and_then(|o| o.into_iter().next());
        let unit = self.split.unit.strip_suffix('s').unwrap_or(self.split.unit);
        origin.map_or_else(|| format!("{} {unit} {}", self.split.name, self.number(place)), |o| o.to_string())
    }
}

/// The record at a place of an even sample.
pub fn spread(place: u64, wanted: u64, len: u64) -> u64 {
    (u128::from(place) * u128::from(len) / u128::from(wanted.max(1))) as u64
}

/// Checks splits.
///
/// # Errors
/// A disk fails, threads cannot be started, or an interrupt. A record that cannot be read is a finding.
pub fn check(splits: &[Split], options: &Options) -> Result<Report> {
    let pool = rayon::ThreadPoolBuilder::new().thread_name(|i| format!("check-{i}")).build();
    let pool = pool.map_err(|e| Error::argument("threads", format!("they cannot be started: {e}")))?;
    pool.install(|| all(splits, options))
}

fn all(splits: &[Split], options: &Options) -> Result<Report> {
    let started = Instant::now();
    let mut maker = Maker::new(options);
    let mut sample = Vec::new();
    for split in splits.iter().filter(|s| !s.evaluation).chain(splits.iter().filter(|s| s.evaluation)).take(1) {
        let (set, len) = (ordered(split), split.records.len());
        let wanted = len.min(SAMPLE).min(options.rows);
        for first in (0..wanted).step_by(split.chunk.clamp(1, CHUNK) as usize) {
            let places = first..wanted.min(first + split.chunk.clamp(1, CHUNK));
            let indices: Vec<u64> = places.map(|place| spread(place, wanted, len)).collect();
            match set.get_many(&indices) {
                Ok(records) => sample.extend(records),
                Err(e) if is_fatal(&e) => return Err(e),
                Err(_) => {
                    for index in indices {
                        match set.get(index) {
                            Ok(record) => sample.push(record),
                            Err(e) => fatal(e).map_or(Ok(()), Err)?,
                        }
                    }
                }
            }
            if options.seconds.is_some_and(|limit| started.elapsed() * 4 > limit) {
                break;
            }
        }
    }
    let roles = Roles::guess(&sample, options);
    drop(sample);
    // The first split that is read gets half of the time, or the evaluation splits together.
    let (mut scanned, mut overlap) = (Vec::new(), Overlap::default());
    let evaluations = splits.iter().filter(|s| s.evaluation);
    for split in evaluations {
        let limit = options.seconds.map(|s| started + s / 2);
        scanned.push(scan(split, options, limit, &roles, &Overlap::default())?);
    }
    if splits.iter().any(|s| !s.evaluation) {
        overlap = Overlap::of(&scanned, &roles)?;
    }
    let evaluations = scanned.len();
    for split in splits.iter().filter(|s| !s.evaluation) {
        scanned.push(scan(split, options, options.seconds.map(|s| started + s), &roles, &overlap)?);
    }
    // Training splits first: they are what others are compared with.
    scanned.rotate_left(evaluations);
    maker.roles(&roles);
    for split in &scanned {
        maker.profile(split, &roles);
    }
    maker.labels(&scanned, &roles);
    let exact = duplicates::find(&scanned);
    maker.exact(&scanned, &exact);
    let near: Near = near::find(&scanned, &exact, &roles, options)?;
    maker.near(&scanned, &near);
    let leaks = overlap.leaks(&scanned, &roles, |gid| exact.is_leak(gid) || near.is_leak(gid))?;
    maker.overlap(&scanned, &leaks);
    for split in splits {
        if let Some(encoded) = &split.encoded {
            let faults = tokens::check(encoded, split.vocabulary, options, started)?;
            maker.tokens(split, &faults);
        }
    }
    let mut report = maker.finish();
    report.splits.iter_mut().for_each(|s: &mut SplitReport| s.fields.truncate(256));
    Ok(report)
}

/// The dataset in an order that does not vary, if there is one.
fn ordered(split: &Split) -> Arc<dyn Dataset> {
    split.records.unshuffled().map_or_else(|| split.records.clone(), |(inner, _)| inner)
}

/// Whether an error is no property of a record.
pub(crate) fn is_fatal(e: &Error) -> bool {
    matches!(e, Error::Interrupted | Error::Io { .. } | Error::Denied(_))
}

/// Returns errors that are no property of a record.
fn fatal(e: Error) -> Option<Error> {
    is_fatal(&e).then_some(e)
}

type Part = (Profile, Vec<Keys>);

fn scan<'a>(
    split: &'a Split,
    options: &Options,
    limit: Option<Instant>,
    roles: &Roles,
    overlap: &Overlap,
) -> Result<Scanned<'a>> {
    let dataset = ordered(split);
    let len = dataset.len();
    let wanted = len.min(options.rows).min(MOST_ROWS);
    let mut out = Scanned { split, dataset, profile: Profile::default(), keys: Vec::new(), wanted };
    let size = split.chunk.max(1);
    let read = |chunk: u64| -> Result<Part> {
        if options.interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let places: Vec<u64> = (chunk * size..wanted.min((chunk + 1) * size)).collect();
        let indices: Vec<u64> = places.iter().map(|p| spread(*p, wanted, len)).collect();
        let (mut profile, mut found) = (Profile::default(), Vec::with_capacity(places.len()));
        let mut scratch = Scratch::default();
        let mut one = |place: u64, record: Result<Record>| -> Result<()> {
            match record {
                Ok(record) => {
                    profile.add(&record, roles, place);
                    found.push(keys(&record, roles, true, &mut scratch));
                    if !overlap.is_empty() {
                        // The keys have left the texts of the record there.
                        overlap.look(&scratch.text, place);
                    }
                }
                Err(e) => match fatal(e) {
                    Some(e) => return Err(e),
                    None => found.push(Keys::NONE),
                },
            }
            Ok(())
        };
        match out.dataset.get_many(&indices) {
            Ok(records) => {
                for (place, record) in places.iter().zip(records) {
                    one(*place, Ok(record))?;
                }
            }
            Err(e) if is_fatal(&e) => return Err(e),
            Err(_) => {
                let mut failed = Vec::new();
                for (place, index) in places.iter().zip(&indices) {
                    let record = out.dataset.get(*index);
                    if let Err(e) = &record {
                        failed.push((*place, e.to_string()));
                    }
                    one(*place, record)?;
                }
                failed.into_iter().for_each(|(place, text)| profile.fail(place, text));
            }
        }
        Ok((profile, found))
    };
    let chunks = wanted.div_ceil(size);
    let (mut at, started) = (0, Instant::now());
    let mut parts: Vec<Part> = Vec::new();
    while at < chunks && limit.is_none_or(|limit| Instant::now() < limit) {
        // A time limit needs short rounds at first, and none that takes more than a quarter of the time that is left.
        let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()).as_secs_f64());
        let tasks = match left {
            Some(_) if at < 2 => 2,
            Some(left) => ((left / 4.0 / (started.elapsed().as_secs_f64() / at as f64)) as u64).clamp(1, TASKS),
            None => TASKS,
        };
        let end = chunks.min(at + tasks);
        let made: Vec<Result<Part>> = (at..end).into_par_iter().map(read).collect();
        for part in made {
            parts.push(part?);
        }
        at = end;
        if parts.len() >= 1024 || at >= chunks {
            fold(&mut parts, &mut out.profile, &mut out.keys);
        }
    }
    fold(&mut parts, &mut out.profile, &mut out.keys);
    Ok(out)
}

/// Merges the parts in their order.
fn fold(parts: &mut Vec<Part>, profile: &mut Profile, keys: &mut Vec<Keys>) {
    for (part, found) in parts.drain(..) {
        profile.merge(part);
        keys.extend(found);
    }
}

/// Reads the normalized texts of a record; none if it cannot be read.
pub fn text_of(scanned: &Scanned<'_>, place: u64, roles: &Roles) -> Result<String> {
    let mut out = String::new();
    match scanned.read(place) {
        Ok(record) => texts(&record, roles, &mut out),
        Err(e) => fatal(e).map_or(Ok(()), Err)?,
    }
    Ok(out)
}
