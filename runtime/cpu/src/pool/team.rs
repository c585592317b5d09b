//! The team of threads: how one piece of work at a time is offered, joined and ended.
//!
//! One word says it all: the number of the work, whether it is open, and how many threads have joined. Whoever offers
//! work opens the word, does its share, closes the word and waits for those who joined; a thread that comes late finds it
//! closed and is not waited for. So what the work borrows outlives every use of it.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread without work looks for some before it parks.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long whoever offers work looks for the end of it before it parks.
const LONG_WAIT: Duration = Duration::from_millis(2);
/// Looks between two readings of the clock.
const LOOKS: u32 = 64;

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
/// From one work's word to the next one's.
const NEXT: u64 = 1 << 32;

thread_local! {
    static INDEX: Cell<usize> = const { Cell::new(0) };
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// Which thread of a team this is; 0 for all that are none, thus for whoever offers work.
pub fn index() -> usize {
    INDEX.get()
}

/// Whether this thread is in the middle of some work.
pub fn is_working() -> bool {
    WORKING.get()
}

#[derive(Debug)]
pub struct Team {
    common: Arc<Common>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Common {
    word: Aligned<AtomicU64>,
    work: UnsafeCell<Option<Work>>,
    /// Held by whoever offers work.
    taken: AtomicBool,
    end: AtomicBool,
    sleeping: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug)]
#[repr(align(128))]
struct Aligned<T>(T);

#[derive(Clone)]
struct Work {
    run: *const (dyn Fn() + Sync),
    /// Threads with a higher number stay out.
    helpers: usize,
    owner: Thread,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "work for {} threads", self.helpers)
    }
}

// SAFETY: `work` is written only by the thread that holds `taken`, while the word is closed and nobody has joined; others
// read it after they joined, which the word puts in order.
unsafe impl Sync for Common {}
// SAFETY: as above; what `run` points at is `Sync` and outlives the work.
unsafe impl Send for Common {}

/// Looks for `found` until it is there or the time is over.
fn look<T>(patience: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if let Some(v) = found() {
                return Some(v);
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() >= patience {
            return None;
        }
        // Whoever has work to do on this core goes first.
        std::thread::yield_now();
    }
}

impl Common {
    /// Joins the open work if it is another one than `last`.
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

    /// The life of thread `index`.
    fn serve(&self, index: usize) {
        INDEX.set(index);
        WORKING.set(true);
        let mut last = 0;
        while !self.end.load(Ordering::SeqCst) {
            let mut joined = look(PATIENCE, || {
                let end = || self.end.load(Ordering::Relaxed).then_some(false);
                self.join(&mut last).map(|()| true).or_else(end)
            });
            while joined.is_none() {
                self.sleeping[index - 1].store(true, Ordering::SeqCst);
                // Whoever offered work before that wakes nobody.
                let word = self.word.0.load(Ordering::SeqCst);
                let fresh = word & OPEN != 0 && word / NEXT != last;
                if !fresh && !self.end.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.sleeping[index - 1].store(false, Ordering::SeqCst);
                joined = Some(self.join(&mut last).is_some());
            }
            if joined == Some(true) {
                self.work(index);
            }
        }
    }

    /// Does joined work, and leaves it.
    fn work(&self, index: usize) {
        // SAFETY: this thread has joined: the work stays until it leaves.
        let Some(work) = (unsafe { (*self.work.get()).clone() }) else { return };
        if index <= work.helpers {
            // SAFETY: as above, and what the work borrows too.
            if let Err(e) = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.run)() })) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
            }
        }
        let word = self.word.0.fetch_sub(1, Ordering::AcqRel);
        if word & (OPEN | JOINED) == 1 {
            work.owner.unpark();
        }
    }

    /// Closes the word and waits for those who joined.
    fn close(&self) {
        self.word.0.fetch_and(!OPEN, Ordering::AcqRel);
        let left = || (self.word.0.load(Ordering::Acquire) & JOINED == 0).then_some(());
        if look(LONG_WAIT, left).is_none() {
            while left().is_none() {
                std::thread::park();
            }
        }
    }

    /// Wakes the first `count` threads, those of them that sleep.
    fn wake(&self, threads: &[JoinHandle<()>], count: usize) {
        for (sleeping, thread) in self.sleeping.iter().zip(threads).take(count) {
            if sleeping.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

/// Ends the work of whoever offered it, on a panic too.
struct Offer<'a>(&'a Common);

impl Drop for Offer<'_> {
    fn drop(&mut self) {
        self.0.close();
        WORKING.set(false);
        // SAFETY: the word is closed and nobody has joined.
        unsafe { *self.0.work.get() = None };
        self.0.taken.store(false, Ordering::Release);
    }
}

impl Team {
    /// A team of that many threads besides the caller; `None` if the system gives none.
    pub fn new(count: usize) -> Option<Team> {
        let common = Arc::new(Common {
            word: Aligned(AtomicU64::new(0)),
            work: UnsafeCell::new(None),
            taken: AtomicBool::new(false),
            end: AtomicBool::new(false),
            sleeping: (0..count).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut team = Team { common, threads: Vec::with_capacity(count) };
        for index in 1..=count {
            let (common, builder) = (team.common.clone(), std::thread::Builder::new());
            let thread = builder.name(format!("perilune-cpu-{index}")).spawn(move || common.serve(index));
            team.threads.push(thread.ok()?);
        }
        Some(team)
    }

    /// Wakes all that sleep.
    pub fn call(&self) {
        self.common.wake(&self.threads, usize::MAX);
    }

    /// Calls `run` here and on up to `helpers` threads of the team.
    pub fn run(&self, helpers: usize, run: &(dyn Fn() + Sync)) {
        let common = &*self.common;
        if common.taken.swap(true, Ordering::Acquire) {
            // Another thread's work is under way.
            return run();
        }
        *common.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: only the lifetime changes; `Offer` ends every use of it before this function returns.
        let run_long = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync), *const (dyn Fn() + Sync)>(run) };
        // SAFETY: the word is closed, nobody has joined, and `taken` is held.
        unsafe { *common.work.get() = Some(Work { run: run_long, helpers, owner: std::thread::current() }) };
        WORKING.set(true);
        let offer = Offer(common);
        let word = common.word.0.load(Ordering::Relaxed);
        common.word.0.store((word & !(NEXT - 1)).wrapping_add(NEXT) | OPEN, Ordering::SeqCst);
        common.wake(&self.threads, helpers);
        run();
        drop(offer);
        let panic = common.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(e) = panic {
            resume_unwind(e);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.common.end.store(true, Ordering::SeqCst);
        for thread in &self.threads {
            thread.thread().unpark();
        }
        for thread in self.threads.drain(..) {
            // A thread catches the panics of its work, so it has none to hand on.
            let _ = thread.join();
        }
    }
}
