//! Feeds mutated files to every reader: each is read or refused by name, nothing panics, and memory stays within a bound.
//!
//! `PERILUNE_FUZZ_COUNT` sets the number of files of all formats together, `PERILUNE_FUZZ_SEED` the seed. Compiled as
//! `.ci/fuzz-readers` does it, a file that reaches new code joins the corpus that later ones are made of (as AFL does, Zalewski 2013).
//! Without that the corpus is the seeds alone. A file that fails is kept, and its path printed; one that ends the process is the last
//! of the directory `perilune-fuzz*` of the temporary files.
#![allow(clippy::unwrap_used)]

mod coverage;
mod formats;
mod memory;
mod mutate;

use coverage::Coverage;
use formats::{Case, Format};
use mutate::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

/// Files without `PERILUNE_FUZZ_COUNT`.
const FILES: u64 = 24_000;
/// The largest file of a corpus in bytes: mutations of small ones reach more code in the same time.
const LARGEST: usize = 8 << 10;
/// The bound on memory: a constant, for buffers, caches and the stacks of decoders, and so many times the size of the file. Deflate
/// expands 1,032 times, and an image takes 1,536 bytes for a byte of JPEG at most.
const MOST: (usize, usize) = (96 << 20, 1_600);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|n| n.parse().ok())
}

/// What is known of a format.
struct Target {
    format: Format,
    corpus: Vec<Vec<u8>>,
    coverage: Coverage,
    read: u64,
    refused: u64,
    peak: usize,
    slowest: f64,
}

impl Target {
    fn new(format: Format) -> Target {
        let corpus = format.seeds.clone();
        Target { format, corpus, coverage: Coverage::default(), read: 0, refused: 0, peak: 0, slowest: 0.0 }
    }

    /// Reads one file and checks what is promised.
    fn try_one(&mut self, dir: &Path, bytes: &[u8]) -> Result<(), String> {
        let path = dir.join(self.format.name);
        // Truncating a file in place would wait for the disk.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        let case = Case::new(dir, &path);
        coverage::clear();
        let (before, start) = (memory::begin(), Instant::now());
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.format.read)(&case)));
        self.slowest = self.slowest.max(start.elapsed().as_secs_f64());
        let peak = memory::peak().saturating_sub(before);
        self.peak = self.peak.max(peak);
        if bytes.len() <= LARGEST && self.coverage.is_new() {
            self.corpus.push(bytes.to_vec());
        }
        let outcome = outcome.map_err(|_| "it panics".to_string())?;
        let most = MOST.0 + MOST.1 * bytes.len();
        if peak > most {
            return Err(format!("it takes {peak} bytes of memory; {most} are the bound for {} bytes", bytes.len()));
        }
        match outcome {
            Ok(()) => self.read += 1,
            Err(e) if e.to_string().contains(self.format.name) => self.refused += 1,
            Err(e) => return Err(format!("the error names no file: {e}")),
        }
        Ok(())
    }

    fn check(&mut self, dir: &Path, bytes: &[u8]) {
        if let Err(what) = self.try_one(dir, bytes) {
            let name = format!("{}-{}", self.format.name, &blake3::hash(bytes).to_hex()[..16]);
            let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            std::fs::write(&kept, bytes).unwrap();
            panic!("{}: {what}; the file is kept as {}", self.format.name, kept.display());
        }
    }
}

#[test]
fn every_file_is_read_or_refused() {
    let (count, seed) = (number("PERILUNE_FUZZ_COUNT").unwrap_or(FILES), number("PERILUNE_FUZZ_SEED").unwrap_or(1));
    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let dir = tempfile::Builder::new().prefix("perilune-fuzz").tempdir_in(place).unwrap();
    // Decoders of other authors panic on some files, which the readers turn into errors.
    std::panic::set_hook(Box::new(|_| ()));
    let mut targets: Vec<Target> = formats::all().into_iter().map(Target::new).collect();
    let mut failure = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        for target in &mut targets {
            for seed in target.format.seeds.clone() {
                target.check(dir.path(), &seed);
                assert_eq!(target.refused, 0, "{}: a seed is refused", target.format.name);
            }
        }
        let mut random = Random::new(seed);
        for k in 0..count {
            let target = &mut targets[(k % formats::COUNT as u64) as usize];
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
    }
    if let Some(text) = failure {
        panic!("{text}");
    }
    for t in targets.iter().filter(|_| count >= FILES) {
        assert!(t.read > 0 && t.refused > 0, "{}: {} read, {} refused", t.format.name, t.read, t.refused);
    }
}
