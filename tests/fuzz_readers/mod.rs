//! Feeds mutated files to readers: each is read or refused by name, nothing panics, and memory stays within a bound.
//!
//! Test crates of readers include this folder by its path and list their formats. `PERILUNE_FUZZ_COUNT` sets the number of files of all
//! formats together, `PERILUNE_FUZZ_SEED` the seed, `PERILUNE_FUZZ_FORMAT` the only format. Compiled as `.ci/fuzz-readers` does it, a
//! file that reaches new code joins the corpus that later ones are made of (as AFL does, Zalewski 2013). Without that the corpus is the
//! seeds alone. A file that fails or that a reader does not end with is kept, and its path printed; one that ends the process is the
//! last of the directory `perilune-fuzz*` of the temporary files.

mod coverage;
mod memory;
mod mutate;

use coverage::Coverage;
use mutate::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Reading a file of a few kilobytes takes milliseconds: a reader that takes this long does not end.
const HANGS: Duration = Duration::from_secs(120);
/// The slowest file of a format is kept if it takes longer.
const SLOW: f64 = 1.0;

/// The file that is being read, and since when.
static READING: Mutex<Option<(PathBuf, Instant)>> = Mutex::new(None);

/// The largest file of a corpus in bytes: mutations of small ones reach more code in the same time.
const LARGEST: usize = 8 << 10;

/// Reads the file of a path, in a folder of its own. The error is the message that a person gets.
pub type Read = Box<dyn Fn(&Path, &Path) -> Result<(), String>>;

/// A format of files.
pub struct Format {
    /// The name of its files.
    pub name: &'static str,
    pub seeds: Vec<Vec<u8>>,
    /// Words of its texts.
    pub words: &'static [&'static [u8]],
    pub read: Read,
}

/// Bounds of a test.
pub struct Bounds {
    /// Files without `PERILUNE_FUZZ_COUNT`.
    pub files: u64,
    /// The bound on memory: a constant, for buffers, caches and the stacks of decoders, and so many times the size of the file.
    pub memory: (usize, usize),
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|n| n.parse().ok())
}

/// What is known of a format.
struct Target<'a> {
    format: Format,
    bounds: &'a Bounds,
    corpus: Vec<Vec<u8>>,
    coverage: Coverage,
    read: u64,
    refused: u64,
    peak: usize,
    slowest: f64,
    /// The slowest file, if it is slow.
    slow: Vec<u8>,
}

/// Copies a file to where it is not deleted.
fn keep(format: &str, bytes: &[u8]) -> PathBuf {
    let name = format!("{format}-{}", &blake3::hash(bytes).to_hex()[..16]);
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&kept, bytes).unwrap();
    kept
}

/// Ends the process if a reader does not end, with the file's path.
fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let Ok(reading) = READING.lock() else { return };
        if let Some((path, _)) = reading.as_ref().filter(|(_, since)| since.elapsed() > HANGS) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let kept = keep(&name, &std::fs::read(path).unwrap_or_default());
            eprintln!("{name}: its reader does not end; the file is kept as {}", kept.display());
            std::process::exit(101);
        }
    }
}

impl Target<'_> {
    fn new(format: Format, bounds: &Bounds) -> Target<'_> {
        let corpus = format.seeds.clone();
        let coverage = Coverage::default();
        Target { format, bounds, corpus, coverage, read: 0, refused: 0, peak: 0, slowest: 0.0, slow: Vec::new() }
    }

    /// Reads one file and checks what is promised.
    fn try_one(&mut self, dir: &Path, bytes: &[u8]) -> Result<(), String> {
        let path = dir.join(self.format.name);
        // Truncating a file in place would wait for the disk.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        coverage::clear();
        let start = Instant::now();
        *READING.lock().unwrap() = Some((path.clone(), start));
        let before = memory::begin();
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.format.read)(dir, &path)));
        let peak = memory::peak().saturating_sub(before);
        self.peak = self.peak.max(peak);
        *READING.lock().unwrap() = None;
        let seconds = start.elapsed().as_secs_f64();
        if seconds > self.slowest.max(SLOW) {
            self.slow = bytes.to_vec();
        }
        self.slowest = self.slowest.max(seconds);
        if bytes.len() <= LARGEST && self.coverage.is_new() {
            self.corpus.push(bytes.to_vec());
        }
        let outcome = outcome.map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("it panics: {}", text.unwrap_or("no message"))
        })?;
        let most = self.bounds.memory.0 + self.bounds.memory.1 * bytes.len();
        if peak > most {
            return Err(format!("it takes {peak} bytes of memory; {most} are the bound for {} bytes", bytes.len()));
        }
        match outcome {
            Ok(()) => self.read += 1,
            Err(e) if e.contains(self.format.name) => self.refused += 1,
            Err(e) => return Err(format!("the error names no file: {e}")),
        }
        Ok(())
    }

    fn check(&mut self, dir: &Path, bytes: &[u8]) {
        if let Err(what) = self.try_one(dir, bytes) {
            let kept = keep(self.format.name, bytes);
            panic!("{}: {what}; the file is kept as {}", self.format.name, kept.display());
        }
    }
}

/// Feeds mutated files to the readers of all formats, and prints what they did.
pub fn run(formats: Vec<Format>, bounds: &Bounds) {
    let (count, seed) =
        (number("PERILUNE_FUZZ_COUNT").unwrap_or(bounds.files), number("PERILUNE_FUZZ_SEED").unwrap_or(1));
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let dir = tempfile::Builder::new().prefix("perilune-fuzz").tempdir_in(place).unwrap();
    // Decoders of other authors panic on some files, which the readers turn into errors.
    std::panic::set_hook(Box::new(|_| ()));
    let only = std::env::var("PERILUNE_FUZZ_FORMAT").ok();
    let formats = formats.into_iter().filter(|format| only.as_ref().is_none_or(|only| only == format.name));
    let mut targets: Vec<Target> = formats.map(|format| Target::new(format, bounds)).collect();
    assert!(!targets.is_empty(), "there is no format {only:?}");
    std::thread::spawn(watch);
    let mut failure = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        for target in &mut targets {
            for seed in target.format.seeds.clone() {
                target.check(dir.path(), &seed);
                assert_eq!(target.refused, 0, "{}: a seed is refused", target.format.name);
            }
        }
        let (mut random, all) = (Random::new(seed), targets.len() as u64);
        for k in 0..count {
            let target = &mut targets[(k % all) as usize];
            let bytes = mutate::made(&target.corpus, target.format.words, &mut random);
            target.check(dir.path(), &bytes);
        }
    }));
    let _ = std::panic::take_hook();
    if let Err(panic) = outcome {
        failure = Some(panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "the test failed".into()));
    }
    eprintln!(
        "{:22} {:>9} {:>9} {:>7} {:>7} {:>9} {:>9}",
        "", "read", "refused", "corpus", "edges", "peak MiB", "slowest s"
    );
    for t in &targets {
        let (name, corpus, edges) = (t.format.name, t.corpus.len(), t.coverage.edges());
        let peak = t.peak as f64 / f64::from(1 << 20);
        eprintln!("{name:22} {:9} {:9} {corpus:7} {edges:7} {peak:9.1} {:9.3}", t.read, t.refused, t.slowest);
        if !t.slow.is_empty() {
            eprintln!("{:22} the slowest is kept as {}", "", keep(name, &t.slow).display());
        }
    }
    if let Some(text) = failure {
        panic!("{text}");
    }
    for t in targets.iter().filter(|_| count >= bounds.files) {
        assert!(t.read > 0 && t.refused > 0, "{}: {} read, {} refused", t.format.name, t.read, t.refused);
    }
}
