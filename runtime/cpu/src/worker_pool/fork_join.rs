//! Runs one closure on several threads and joins them (fork-join): the threads behind the worker pool.
//!
//! One atomic word implements the protocol: it holds the number of the job, whether it is open, and how many threads
//! have joined. The caller opens the word, runs its share, closes the word and waits for the threads that joined. A
//! late thread finds the word closed and is not waited for, so the job's borrows outlive every use of them.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle thread spins before it parks.
const WORKER_SPIN: Duration = Duration::from_micros(200);
/// How long the caller spins for the end of a job before it parks.
const CALLER_SPIN: Duration = Duration::from_millis(2);
/// Polls between two readings of the clock.
const POLLS: u32 = 64;

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
/// The difference between the words of consecutive jobs.
const NEXT: u64 = 1 << 32;

thread_local! {
    static INDEX: Cell<usize> = const { Cell::new(0) };
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// The index of this worker thread; 0 for every other thread, including the caller of a job.
pub fn index() -> usize {
    INDEX.get()
}

/// Whether this thread is running a job.
pub fn in_job() -> bool {
    IN_JOB.get()
}

/// Worker threads that park when idle.
#[derive(Debug)]
pub struct ForkJoin {
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    word: CacheAligned<AtomicU64>,
    job: UnsafeCell<Option<Job>>,
    /// A lock held by the caller of the current job.
    busy: AtomicBool,
    shutdown: AtomicBool,
    parked: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug)]
#[repr(align(128))]
struct CacheAligned<T>(T);

#[derive(Clone)]
struct Job {
    run: *const (dyn Fn() + Sync),
    /// Threads with a higher index do not take part.
    helpers: usize,
    caller: Thread,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "a job for {} threads", self.helpers)
    }
}

// SAFETY: `job` is written only by the thread that holds `busy`, while the word is closed and no thread has joined;
// others read it after they joined, and the word orders these accesses.
unsafe impl Sync for State {}
// SAFETY: as above; what `run` points at is `Sync` and outlives the job.
unsafe impl Send for State {}

/// Polls `found` until it returns a value or `limit` has passed.
fn spin<T>(limit: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let mut start = None;
    loop {
        for _ in 0..POLLS {
            if let Some(v) = found() {
                return Some(v);
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() >= limit {
            return None;
        }
        // Lets other runnable threads on this core run first.
        std::thread::yield_now();
    }
}

impl State {
    /// Joins the open job unless it is job `last`.
    fn join(&self, last: &mut u64) -> Option<()> {
        let mut word = self.word.0.load(Ordering::Acquire);
        while word & OPEN != 0 && word / NEXT != *last {
            match self.word.0.compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    *last = word / NEXT;
                    return Some(());
                }
                Err(now) => word = now,
            }
        }
        None
    }

    /// Runs the main loop of worker `index`.
    fn worker_loop(&self, index: usize) {
        INDEX.set(index);
        IN_JOB.set(true);
        let mut last = 0;
        while !self.shutdown.load(Ordering::SeqCst) {
            let mut joined = spin(WORKER_SPIN, || {
                let shutdown = || self.shutdown.load(Ordering::Relaxed).then_some(false);
                self.join(&mut last).map(|()| true).or_else(shutdown)
            });
            while joined.is_none() {
                self.parked[index - 1].store(true, Ordering::SeqCst);
                // A job opened before that store does not wake this thread, so check again.
                let word = self.word.0.load(Ordering::SeqCst);
                let fresh = word & OPEN != 0 && word / NEXT != last;
                if !fresh && !self.shutdown.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.parked[index - 1].store(false, Ordering::SeqCst);
                joined = Some(self.join(&mut last).is_some());
            }
            if joined == Some(true) {
                self.run_joined(index);
            }
        }
    }

    /// Runs the job that this thread has joined, then leaves it.
    fn run_joined(&self, index: usize) {
        // SAFETY: this thread has joined, so the job lives until it leaves.
        let Some(job) = (unsafe { (*self.job.get()).clone() }) else { return };
        if index <= job.helpers {
            // SAFETY: as above; the job's borrows live as long.
            if let Err(e) = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.run)() })) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
            }
        }
        let word = self.word.0.fetch_sub(1, Ordering::AcqRel);
        if word & (OPEN | JOINED) == 1 {
            job.caller.unpark();
        }
    }

    /// Closes the word and waits for the threads that joined.
    fn close(&self) {
        self.word.0.fetch_and(!OPEN, Ordering::AcqRel);
        let left = || (self.word.0.load(Ordering::Acquire) & JOINED == 0).then_some(());
        if spin(CALLER_SPIN, left).is_none() {
            while left().is_none() {
                std::thread::park();
            }
        }
    }

    /// Wakes those of the first `count` threads that are parked.
    fn wake(&self, threads: &[JoinHandle<()>], count: usize) {
        for (parked, thread) in self.parked.iter().zip(threads).take(count) {
            if parked.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

/// Ends the caller's job on drop, also during a panic.
struct JobGuard<'a>(&'a State);

impl Drop for JobGuard<'_> {
    fn drop(&mut self) {
        self.0.close();
        IN_JOB.set(false);
        // SAFETY: the word is closed and no thread has joined.
        unsafe { *self.0.job.get() = None };
        self.0.busy.store(false, Ordering::Release);
    }
}

impl ForkJoin {
    /// Starts `count` threads besides the caller; `None` if the system cannot create one.
    pub fn new(count: usize) -> Option<ForkJoin> {
        let state = Arc::new(State {
            word: CacheAligned(AtomicU64::new(0)),
            job: UnsafeCell::new(None),
            busy: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            parked: (0..count).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut all = ForkJoin { state, threads: Vec::with_capacity(count) };
        for index in 1..=count {
            let (state, builder) = (all.state.clone(), std::thread::Builder::new());
            let thread = builder.name(format!("perilune-cpu-{index}")).spawn(move || state.worker_loop(index));
            all.threads.push(thread.ok()?);
        }
        Some(all)
    }

    /// Wakes all parked threads.
    pub fn wake_all(&self) {
        self.state.wake(&self.threads, usize::MAX);
    }

    /// Calls `run` on this thread and on up to `helpers` workers.
    pub fn run(&self, helpers: usize, run: &(dyn Fn() + Sync)) {
        let state = &*self.state;
        if state.busy.swap(true, Ordering::Acquire) {
            // Another thread's job is running.
            return run();
        }
        *state.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: only the lifetime changes; `JobGuard` ends every use of it before this function returns.
        let run_long = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync), *const (dyn Fn() + Sync)>(run) };
        // SAFETY: the word is closed, no thread has joined, and `busy` is held.
        unsafe { *state.job.get() = Some(Job { run: run_long, helpers, caller: std::thread::current() }) };
        IN_JOB.set(true);
        let guard = JobGuard(state);
        let word = state.word.0.load(Ordering::Relaxed);
        state.word.0.store((word & !(NEXT - 1)).wrapping_add(NEXT) | OPEN, Ordering::SeqCst);
        state.wake(&self.threads, helpers);
        run();
        drop(guard);
        let panic = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(e) = panic {
            resume_unwind(e);
        }
    }
}

impl Drop for ForkJoin {
    fn drop(&mut self) {
        self.state.shutdown.store(true, Ordering::SeqCst);
        for thread in &self.threads {
            thread.thread().unpark();
        }
        for thread in self.threads.drain(..) {
            // A worker catches the panics of its jobs, so it has none to propagate.
            let _ = thread.join();
        }
    }
}
