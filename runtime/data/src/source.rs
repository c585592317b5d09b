//! Defines `Source`, the trait of everything that makes samples on the host, and prefetches its batches on worker threads.
//!
//! A sample is a pure function of its row and of its global index, its number in the stream of samples. So a batch depends on
//! neither threads nor prefetching, and a [`Samples::slice`] of it is what one device of a mesh needs.
//!
//! A batch is a job: a buffer for each column, and tasks of [`Source::grain`] samples in the queue of a thread pool, first in,
//! first out. A [`Prefetcher`] keeps a bounded ring of jobs for announced batches. `take` waits for the job of the same samples or
//! makes a new one. An error belongs to its batch: `take` returns it, the first sample's if there are several. The ring has no
//! state that a checkpoint needs: a cursor counts batches taken.
//!
//! Not included: the order of samples (`sample_order`) and the upload to a device.

use crate::error::{Error, Result};
use perilune_core::{DType, HostTensor, Interrupt, Shape, host_memory};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// The maximum number of announced batches.
const ANNOUNCED: usize = 2;
/// The maximum number of threads, which detects typing errors.
const MAX_THREADS: usize = 1024;
/// Bytes of a column that a thread keeps for the next task.
const KEPT: usize = 4 << 20;
/// The time between two checks of the interrupt during a wait.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// A sample of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Its number in the source.
    pub row: usize,
    /// Its number in the stream of samples, which determines random choices. Wraps around.
    pub index: u64,
}

/// The samples of a batch: consecutive in the stream, of any rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Samples {
    /// The global index of the first sample.
    pub first: u64,
    pub rows: Vec<usize>,
}

impl Samples {
    fn get(&self, place: usize) -> Sample {
        Sample { row: self.rows[place], index: self.first.wrapping_add(place as u64) }
    }

    /// The samples at these places of the batch, as one device of a mesh needs them.
    pub fn slice(&self, places: Range<usize>) -> Samples {
        let places = places.start.min(self.rows.len())..places.end.min(self.rows.len());
        Samples { first: self.first.wrapping_add(places.start as u64), rows: self.rows[places].to_vec() }
    }
}

/// The dtype and the shape of one sample in a column of a batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Column {
    pub dtype: DType,
    pub shape: Shape,
}

impl Column {
    fn nbytes(&self) -> Option<usize> {
        self.shape.numel().checked_mul(self.dtype.size())
    }
}

/// A batch in host memory, each column with the samples as its first dim.
#[derive(Clone, PartialEq, Debug)]
pub struct HostBatch {
    /// The global index of its first sample.
    pub first: u64,
    pub columns: Vec<HostTensor>,
}

/// Makes samples, as a pure function of row and global index.
pub trait Source: Send + Sync + 'static {
    /// The number of rows.
    fn rows(&self) -> usize;

    fn columns(&self) -> &[Column];

    /// The number of samples that one task makes; more where a sample takes microseconds.
    fn grain(&self) -> usize {
        1
    }

    /// The version of the samples. A batch that was announced under another one is made again.
    fn version(&self) -> u64 {
        0
    }

    /// Appends one sample to the bytes of each column.
    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()>;

    /// The error for a batch that does not fit into the host's memory.
    fn too_large(&self, count: usize) -> Error {
        let rule = format!("of {count} samples does not fit into the host's memory");
        Error::argument("a batch", rule).hint("a smaller batch, with `accumulate = n` for the same gradients")
    }

    /// The error for a panic of `write`.
    fn broke_down(&self, sample: Sample) -> Error {
        Error::argument(format!("sample {}", sample.row), "this is a bug: making it failed without a message")
    }
}

/// A batch in progress.
struct Job {
    samples: Samples,
    /// That of the source when the batch was announced.
    version: u64,
    state: Mutex<State>,
    done: Condvar,
    /// Whether the batch is no longer needed.
    cancelled: AtomicBool,
}

struct State {
    columns: Vec<Vec<u8>>,
    /// Tasks that have not ended.
    left: usize,
    /// The first sample that failed, by its place in the batch.
    failed: Option<(usize, Error)>,
}

/// No task panics while it holds the lock, so the state is complete.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// Makes the samples at `places` and stores them in the batch.
    fn make<S: Source>(&self, source: &S, places: Range<usize>) {
        // The bytes of the samples, in memory that the thread keeps: memory which every task allocates and frees goes back to the system,
        // and what one thread gives back holds up all others.
        thread_local!(static MADE: RefCell<Vec<Vec<u8>>> = RefCell::default());
        let mut made = MADE.take();
        made.resize_with(source.columns().len(), Vec::new);
        made.iter_mut().for_each(Vec::clear);
        let mut failed = None;
        for place in places.clone() {
            if self.cancelled.load(Ordering::Relaxed) {
                MADE.set(made);
                return;
            }
            let sample = self.samples.get(place);
            let one = catch_unwind(AssertUnwindSafe(|| source.write(sample, &mut made)));
            if let Err(error) = one.unwrap_or_else(|_| Err(source.broke_down(sample))) {
                failed = Some((place, error));
                break;
            }
        }
        let mut state = lock(&self.state);
        if failed.is_none() {
            for (k, column) in source.columns().iter().enumerate() {
                let at = column.nbytes().unwrap_or(0) * places.start;
                match state.columns[k].get_mut(at..at + made[k].len()) {
                    Some(out) if made[k].len() == column.nbytes().unwrap_or(0) * places.len() => {
                        out.copy_from_slice(&made[k]);
                    }
                    _ => failed = Some((places.start, source.broke_down(self.samples.get(places.start)))),
                }
            }
        }
        // A sample of unusual size is not kept.
        made.iter_mut().for_each(|column| column.shrink_to(KEPT));
        MADE.set(made);
        if let Some((place, error)) = failed
            && state.failed.as_ref().is_none_or(|(first, _)| place < *first)
        {
            state.failed = Some((place, error));
        }
        state.left -= 1;
        if state.left == 0 {
            self.done.notify_all();
        }
    }
}

/// Makes the batches of one loader ahead of their use.
pub struct Prefetcher<S> {
    source: Arc<S>,
    pool: Arc<ThreadPool>,
    announced: VecDeque<Arc<Job>>,
    interrupt: Interrupt,
}

impl<S: Source> Prefetcher<S> {
    /// Creates a prefetcher on `threads` threads, by default one per processor.
    pub fn new(source: S, threads: Option<usize>) -> Result<Prefetcher<S>> {
        Ok(Prefetcher {
            source: Arc::new(source),
            pool: pool(threads)?,
            announced: VecDeque::new(),
            interrupt: Interrupt::default(),
        })
    }

    /// Ends waits for a batch when `interrupt` is requested: a read may take as long as its file system does.
    #[must_use]
    pub fn interrupted_by(mut self, interrupt: Interrupt) -> Prefetcher<S> {
        self.interrupt = interrupt;
        self
    }

    /// Returns a batch. If it was not announced, the order has changed: the announced batches are cancelled.
    /// After an interrupt the batch stays announced.
    pub fn take(&mut self, samples: &Samples) -> Result<HostBatch> {
        let version = self.source.version();
        let wanted = |job: &Arc<Job>| job.samples == *samples && job.version == version;
        let skipped = self.announced.iter().position(wanted).unwrap_or(self.announced.len());
        self.announced.drain(..skipped).for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
        let job = match self.announced.pop_front() {
            Some(job) => job,
            None => self.start(samples)?,
        };
        let mut state = lock(&job.state);
        while state.left > 0 {
            let waited = job.done.wait_timeout(state, CHECK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.left > 0 && self.interrupt.check().is_err() {
                drop(state);
                self.announced.push_front(job);
                return Err(Error::Interrupted);
            }
        }
        if let Some((_, error)) = state.failed.take() {
            return Err(error);
        }
        let mut columns = Vec::with_capacity(state.columns.len());
        for (column, bytes) in self.source.columns().iter().zip(std::mem::take(&mut state.columns)) {
            let dims: Vec<usize> = [samples.rows.len()].iter().chain(column.shape.dims()).copied().collect();
            let shape = Shape::new(&dims).map_err(|e| Error::argument("batch", e.message))?;
            columns.push(HostTensor::new(column.dtype, shape, bytes));
        }
        Ok(HostBatch { first: samples.first, columns })
    }

    /// Starts to make a batch that will be taken soon. Its errors are returned by `take`.
    pub fn announce(&mut self, samples: &Samples) {
        let version = self.source.version();
        if self.announced.iter().any(|job| job.samples == *samples && job.version == version) {
            return;
        }
        let Ok(job) = self.start(samples) else { return };
        self.announced.push_back(job);
        if self.announced.len() > ANNOUNCED
            && let Some(job) = self.announced.pop_front()
        {
            job.cancelled.store(true, Ordering::Relaxed);
        }
    }

    fn start(&self, samples: &Samples) -> Result<Arc<Job>> {
        let (count, rows) = (samples.rows.len(), self.source.rows());
        if let Some(beyond) = samples.rows.iter().find(|row| **row >= rows) {
            return Err(Error::argument(
                format!("sample {beyond}"),
                format!("does not exist: there are {rows}, from 0"),
            ));
        }
        let columns = self
            .source
            .columns()
            .iter()
            .map(|column| host_memory::filled("batch", count.checked_mul(column.nbytes()?)?).ok());
        let columns = columns.collect::<Option<Vec<_>>>().ok_or_else(|| self.source.too_large(count))?;
        let grain = self.source.grain().max(1);
        let version = self.source.version();
        let state = Mutex::new(State { columns, left: count.div_ceil(grain), failed: None });
        let (samples, done, cancelled) = (samples.clone(), Condvar::new(), AtomicBool::new(false));
        let job = Arc::new(Job { samples, version, state, done, cancelled });
        for start in (0..count).step_by(grain) {
            let (job, source) = (job.clone(), self.source.clone());
            self.pool.spawn_fifo(move || job.make(&*source, start..count.min(start + grain)));
        }
        Ok(job)
    }
}

impl<S> Drop for Prefetcher<S> {
    fn drop(&mut self) {
        self.announced.iter().for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
    }
}

/// Returns a pool of that many threads; concurrent loaders share it.
pub(crate) fn pool(threads: Option<usize>) -> Result<Arc<ThreadPool>> {
    static POOLS: Mutex<Vec<(usize, Weak<ThreadPool>)>> = Mutex::new(Vec::new());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(Error::argument("threads", format!("are {threads}; they must be from 1 to {MAX_THREADS}")));
    }
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools.retain(|(_, pool)| pool.strong_count() > 0);
    if let Some(pool) = pools.iter().find(|(n, _)| *n == threads).and_then(|(_, pool)| pool.upgrade()) {
        return Ok(pool);
    }
    let named = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("source-{i}"));
    let failed = |e| Error::argument("threads", format!("{threads} cannot be started: {e}"));
    let pool = Arc::new(named.build().map_err(failed)?);
    pools.push((threads, Arc::downgrade(&pool)));
    Ok(pool)
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
