//! Decodes batches of images on several threads before they are requested.
//!
//! A batch is a job: a buffer for all its images, and one task per image in the queue of a thread pool, first in, first out. A
//! [`Reader`] keeps the jobs of expected batches; `batch` takes the job of the same items, or makes a new one, and waits. So
//! the result depends on the items alone, not on expectations or the number of threads. An error belongs to its batch: `batch`
//! returns it, the first image's if there are several.

use super::crop::Crop;
use super::folder::Folder;
use super::read::{self, Scratch};
use super::resize::{self, Picture};
use crate::error::{Error, Result};
use perilune_core::{DType, HostTensor, Shape};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// The maximum number of expected batches.
const EXPECTED: usize = 2;
/// The maximum number of threads, which detects typing errors.
const MAX_THREADS: usize = 1024;

/// An image of a batch: its index, and its number in the stream of samples, which determines its crop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    pub image: usize,
    pub sample: u64,
}

/// The processing of each image.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Form {
    pixels: usize,
    crop: Crop,
}

impl Form {
    fn nbytes(&self) -> usize {
        3 * self.pixels * self.pixels
    }

    /// Decodes one image to (3, P, P).
    fn make(&self, folder: &Folder, item: Item) -> Result<Vec<u8>> {
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
        let path = folder.path(item.image);
        let mut out = vec![0; self.nbytes()];
        // A decoder that panics on a hostile file must not end the run; the scratch is cleared before each use.
        let made = catch_unwind(AssertUnwindSafe(|| {
            SCRATCH.with_borrow_mut(|scratch| {
                let (width, height) = read::read(folder.open_image(item.image)?, scratch)?;
                let (across, down) = self.crop.sides(width, height, self.pixels, item.sample);
                let picture = Picture { width, height, rgb: &scratch.rgb };
                resize::resize(picture, &across, &down, &mut scratch.rows, &mut out);
                Ok(())
            })
        }));
        made.unwrap_or_else(|_| {
            Err(Error::malformed(&path, "image", "the decoder panicked").hint("copy or convert the file again"))
        })?;
        Ok(out)
    }
}

/// A batch in progress.
struct Job {
    items: Vec<Item>,
    state: Mutex<State>,
    done: Condvar,
    /// Whether the batch is no longer needed.
    dropped: AtomicBool,
}

struct State {
    pixels: Vec<u8>,
    left: usize,
    /// The first image that failed, by its position in the batch.
    failed: Option<(usize, Error)>,
}

/// A panic of a task that holds the lock has already been caught, and the state is complete.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the batches of one loader.
pub struct Reader {
    folder: Arc<Folder>,
    form: Form,
    pool: Arc<ThreadPool>,
    expected: VecDeque<Arc<Job>>,
}

impl Reader {
    /// Creates a reader of batches of `pixels` by `pixels` on `threads` threads, by default one per processor.
    pub fn new(folder: Arc<Folder>, pixels: usize, crop: Crop, threads: Option<usize>) -> Result<Reader> {
        crop.check(pixels)?;
        Ok(Reader { folder, form: Form { pixels, crop }, pool: pool(threads)?, expected: VecDeque::new() })
    }

    /// Returns x (N, 3, P, P) u8 and y (N) i64. Panics if an item is beyond the folder.
    pub fn batch(&mut self, items: &[Item]) -> Result<(HostTensor, HostTensor)> {
        if let Some(at) = self.expected.iter().position(|job| job.items == items) {
            // Drop the batches that were expected earlier and skipped.
            self.expected.drain(..at).for_each(|job| job.dropped.store(true, Ordering::Relaxed));
        }
        let job = match self.expected.pop_front_if(|job| job.items == items) {
            Some(job) => job,
            None => self.start(items)?,
        };
        let mut state = lock(&job.state);
        while state.left > 0 {
            state = job.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some((_, error)) = state.failed.take() {
            return Err(error);
        }
        let pixels = self.form.pixels;
        let shape = Shape::new(&[items.len(), 3, pixels, pixels]).map_err(|e| Error::argument("batch", e.message))?;
        let x = HostTensor::new(DType::U8, shape, std::mem::take(&mut state.pixels));
        let classes: Vec<i64> = items.iter().map(|item| i64::from(self.folder.class(item.image))).collect();
        Ok((x, HostTensor::from_i64(Shape::of(&[items.len()]), &classes)))
    }

    /// Starts to make an expected batch, if memory allows; otherwise `batch` reports the error.
    pub fn expect(&mut self, items: &[Item]) {
        if self.expected.iter().any(|job| job.items == items) {
            return;
        }
        let Ok(job) = self.start(items) else { return };
        self.expected.push_back(job);
        if self.expected.len() > EXPECTED
            && let Some(job) = self.expected.pop_front()
        {
            job.dropped.store(true, Ordering::Relaxed);
        }
    }

    fn start(&self, items: &[Item]) -> Result<Arc<Job>> {
        let beyond = items.iter().find(|item| item.image >= self.folder.len());
        assert!(beyond.is_none(), "this is a bug: {beyond:?} of {} images", self.folder.len());
        let form = self.form;
        let state = State { pixels: room(items.len(), form)?, left: items.len(), failed: None };
        let (state, dropped) = (Mutex::new(state), AtomicBool::new(false));
        let job = Arc::new(Job { items: items.to_vec(), state, done: Condvar::new(), dropped });
        for (place, &item) in items.iter().enumerate() {
            let (job, folder) = (job.clone(), self.folder.clone());
            self.pool.spawn_fifo(move || {
                if job.dropped.load(Ordering::Relaxed) {
                    return;
                }
                let made = form.make(&folder, item);
                let mut state = lock(&job.state);
                match made {
                    Ok(pixels) => state.pixels[place * form.nbytes()..][..form.nbytes()].copy_from_slice(&pixels),
                    Err(error) if state.failed.as_ref().is_none_or(|(first, _)| place < *first) => {
                        state.failed = Some((place, error));
                    }
                    Err(_) => {}
                }
                state.left -= 1;
                if state.left == 0 {
                    job.done.notify_all();
                }
            });
        }
        Ok(job)
    }
}

/// Allocates zeros for a batch.
fn room(count: usize, form: Form) -> Result<Vec<u8>> {
    let nbytes = count.checked_mul(form.nbytes());
    let mut out = Vec::new();
    match nbytes.filter(|n| out.try_reserve_exact(*n).is_ok()) {
        Some(n) => out.resize(n, 0),
        None => {
            let p = form.pixels;
            let rule = format!("of {count} images of {p} x {p} does not fit into the host's memory");
            return Err(Error::argument("a batch", rule)
                .hint("a smaller batch, with `accumulate = n` for the same gradients, or fewer pixels"));
        }
    }
    Ok(out)
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.expected.iter().for_each(|job| job.dropped.store(true, Ordering::Relaxed));
    }
}

/// Returns a pool of that many threads; concurrent loaders share it.
fn pool(threads: Option<usize>) -> Result<Arc<ThreadPool>> {
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
    let named = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("images-{i}"));
    let failed = |e| Error::argument("threads", format!("{threads} cannot be started: {e}"));
    let pool = Arc::new(named.build().map_err(failed)?);
    pools.push((threads, Arc::downgrade(&pool)));
    Ok(pool)
}
