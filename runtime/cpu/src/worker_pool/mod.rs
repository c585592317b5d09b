//! Distributes the tasks of a kernel over threads: a fork-join pool with a work-stealing task queue.
//!
//! The thread that runs a program takes part, so a kernel starts at once. Idle workers spin briefly before they park
//! (`fork_join`), since waking a thread takes longer than most kernels of a small model. A queue hands out tasks with
//! one atomic addition each: thread `t` of `n` begins with the `t`-th part of the tasks and then steals from the other
//! parts. Data that one kernel wrote is therefore mostly read by the same thread in the next one, from its own cache.
//! The schedule never affects results, since the shape alone determines the tasks.

mod fork_join;

use fork_join::ForkJoin;
use smallvec::SmallVec;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The threads of a device.
#[derive(Debug)]
pub struct WorkerPool {
    threads: usize,
    /// `None` if the pool has one thread.
    workers: Option<ForkJoin>,
    /// Threads for the `gemm` crates, which parallelise only through rayon; started by the first product that needs
    /// them.
    rayon: OnceLock<Option<rayon::ThreadPool>>,
}

/// The tasks of one kernel, claimed one by one by the threads that run it.
#[derive(Debug)]
pub struct TaskQueue {
    /// One for each thread that may take part.
    parts: SmallVec<[TaskRange; 2]>,
}

/// A range of tasks, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct TaskRange {
    next: AtomicUsize,
    end: usize,
}

impl TaskRange {
    fn claim(&self) -> Option<usize> {
        if self.next.load(Ordering::Relaxed) >= self.end {
            return None;
        }
        let t = self.next.fetch_add(1, Ordering::Relaxed);
        (t < self.end).then_some(t)
    }
}

impl TaskQueue {
    fn new(count: usize, parts: usize) -> TaskQueue {
        let part = |k| TaskRange { next: AtomicUsize::new(count * k / parts), end: count * (k + 1) / parts };
        TaskQueue { parts: (0..parts).map(part).collect() }
    }

    /// Claims a task: one of this thread's part first, then one of another part.
    pub fn claim(&self) -> Option<usize> {
        if let [all] = &self.parts[..] {
            return all.claim();
        }
        let own = fork_join::index() % self.parts.len();
        let (before, after) = self.parts.split_at(own);
        after.iter().chain(before).find_map(TaskRange::claim)
    }

    fn is_empty(&self) -> bool {
        self.parts.iter().all(|p| p.next.load(Ordering::Relaxed) >= p.end)
    }
}

impl WorkerPool {
    /// Starts a pool; `None` selects as many threads as the machine offers.
    pub fn new(threads: Option<usize>) -> WorkerPool {
        let machine = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = threads.unwrap_or_else(machine).max(1);
        let workers = if threads > 1 { ForkJoin::new(threads - 1) } else { None };
        WorkerPool { threads: if workers.is_some() { threads } else { 1 }, workers, rayon: OnceLock::new() }
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether `run` would use other threads here; false within a task.
    pub fn can_fork(&self) -> bool {
        self.workers.is_some() && !fork_join::in_job()
    }

    /// Runs `f` inside the rayon pool of the `gemm` crates.
    pub fn with_rayon<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let name = |k| format!("perilune-gemm-{k}");
        let build = || {
            let named = |n| rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(name);
            // Where the system refuses threads: a pool of this one. Without any, rayon would start its global pool.
            named(self.threads).build().or_else(|_| named(1).use_current_thread().build()).ok()
        };
        match self.rayon.get_or_init(build) {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Wakes the other threads ahead of kernels that will need them.
    pub fn wake_all(&self) {
        if let Some(workers) = &self.workers {
            workers.wake_all();
        }
    }

    /// Calls `worker` on this thread and, if `parallel` and outside a task, on other threads too; all claim from one
    /// queue of `count` tasks.
    pub fn run(&self, parallel: bool, count: usize, worker: impl Fn(&TaskQueue) + Sync) {
        self.fork(parallel, count, &worker);
    }

    /// Compiled once, not for each kernel.
    fn fork(&self, parallel: bool, count: usize, worker: &(dyn Fn(&TaskQueue) + Sync)) {
        let helpers = if parallel && self.can_fork() { self.threads.min(count).saturating_sub(1) } else { 0 };
        let Some(workers) = self.workers.as_ref().filter(|_| helpers > 0) else {
            return worker(&TaskQueue::new(count, 1));
        };
        let tasks = TaskQueue::new(count, self.threads);
        workers.run(helpers, &|| {
            if !tasks.is_empty() {
                worker(&tasks);
            }
        });
    }

    /// Cuts `out` into chunks of `chunk` elements and calls `f(k, chunk)` for each.
    pub fn for_each_chunk<T: Send>(
        &self,
        parallel: bool,
        out: &mut [T],
        chunk: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let chunk = chunk.max(1);
        let (base, len) = (SendPtr(out.as_mut_ptr()), out.len());
        self.run(parallel, len.div_ceil(chunk), |tasks| {
            let base = &base;
            while let Some(k) = tasks.claim() {
                let at = k * chunk;
                // SAFETY: each k is claimed once, so the chunks are disjoint parts of `out`, which is borrowed mutably.
                f(k, unsafe { std::slice::from_raw_parts_mut(base.0.add(at), chunk.min(len - at)) });
            }
        });
    }
}

/// A pointer that several threads may use; each use states why their accesses are disjoint.
#[derive(Clone, Copy, Debug)]
pub struct SendPtr<T>(pub *mut T);

// SAFETY: see the type; a pointer alone accesses nothing.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPtr<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_visited_once() {
        for threads in [1, 2, 5] {
            let pool = WorkerPool::new(Some(threads));
            for round in 0..200 {
                let mut out = vec![0u32; 1003 + round];
                pool.for_each_chunk(true, &mut out, 10, |k, piece| piece.iter_mut().for_each(|v| *v += 1 + k as u32));
                assert!(out.iter().enumerate().all(|(i, &v)| v == 1 + i as u32 / 10));
            }
        }
    }

    #[test]
    fn a_task_may_share_work_of_its_own() {
        let pool = WorkerPool::new(Some(3));
        let sum = AtomicUsize::new(0);
        pool.run(true, 7, |tasks| {
            while tasks.claim().is_some() {
                pool.run(true, 5, |inner| {
                    while let Some(k) = inner.claim() {
                        sum.fetch_add(k, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 7 * 10);
    }

    #[test]
    fn parked_threads_wake_up() {
        let pool = WorkerPool::new(Some(2));
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let seen = std::sync::Mutex::new(std::collections::HashSet::new());
            // Each thread keeps its task until the other thread arrives, if it arrives at all.
            pool.run(true, 2, |tasks| {
                while tasks.claim().is_some() {
                    seen.lock().expect("lock").insert(std::thread::current().id());
                    let start = std::time::Instant::now();
                    while seen.lock().expect("lock").len() < 2 && start.elapsed().as_secs() < 20 {
                        std::thread::yield_now();
                    }
                }
            });
            assert_eq!(seen.into_inner().expect("lock").len(), 2);
        }
    }

    #[test]
    fn a_panic_of_any_thread_reaches_the_caller_and_the_pool_goes_on() {
        let pool = WorkerPool::new(Some(3));
        for bad in 0..30 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(true, 30, |tasks| {
                    while let Some(k) = tasks.claim() {
                        assert_ne!(k, bad, "as meant");
                    }
                });
            }));
            assert!(caught.is_err());
        }
        let mut out = vec![0u32; 100];
        pool.for_each_chunk(true, &mut out, 1, |k, piece| piece[0] = k as u32);
        assert!(out.iter().enumerate().all(|(i, &v)| v == i as u32));
    }
}
