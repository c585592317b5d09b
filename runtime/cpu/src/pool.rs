//! Threads: a rayon pool of our own whose workers park when idle, and shared counters that hand out tasks.
//!
//! A program enters the pool once (`enter`) if any kernel of it is worth sharing, since a change of threads costs some
//! microseconds; within it, kernels hand out tasks with one atomic addition each. Thread `t` of `n` begins with the `t`-th
//! part of the tasks and then helps others with theirs: what one kernel wrote is mostly read by the same thread of the
//! next one, from its own cache. Which thread takes which task never shows in results: tasks are cut by shape alone.

use smallvec::SmallVec;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub struct Pool {
    threads: usize,
    rayon: Option<rayon::ThreadPool>,
}

/// The tasks of one kernel, claimed one by one by the threads that work on it.
#[derive(Debug)]
pub struct Tasks {
    /// One for each thread that may come.
    parts: SmallVec<[Part; 2]>,
}

/// A run of tasks; alone in its cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Part {
    next: AtomicUsize,
    end: usize,
}

impl Part {
    fn claim(&self) -> Option<usize> {
        if self.next.load(Ordering::Relaxed) >= self.end {
            return None;
        }
        let t = self.next.fetch_add(1, Ordering::Relaxed);
        (t < self.end).then_some(t)
    }
}

impl Tasks {
    fn new(count: usize, parts: usize) -> Tasks {
        let part = |k| Part { next: AtomicUsize::new(count * k / parts), end: count * (k + 1) / parts };
        Tasks { parts: (0..parts).map(part).collect() }
    }

    /// A task nobody has taken yet, of this thread's part while there are any.
    pub fn claim(&self) -> Option<usize> {
        if let [all] = &self.parts[..] {
            return all.claim();
        }
        let own = rayon::current_thread_index().unwrap_or(0) % self.parts.len();
        let (before, after) = self.parts.split_at(own);
        after.iter().chain(before).find_map(Part::claim)
    }

    fn is_spent(&self) -> bool {
        self.parts.iter().all(|p| p.next.load(Ordering::Relaxed) >= p.end)
    }
}

impl Pool {
    /// `None`: as many threads as the machine offers.
    pub fn new(threads: Option<usize>) -> Pool {
        let machine = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = threads.unwrap_or_else(machine).max(1);
        let name = |k| format!("perilune-cpu-{k}");
        let build = || rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build().ok();
        let rayon = if threads > 1 { build() } else { None };
        Pool { threads: if rayon.is_some() { threads } else { 1 }, rayon }
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether this thread is one of the pool's.
    pub fn inside(&self) -> bool {
        self.rayon.as_ref().is_some_and(|p| p.current_thread_index().is_some())
    }

    /// Runs `f` on a thread of the pool, so that `run` and gemm can share work from there.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.rayon {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Calls `worker` on this thread and, if `share` and within `enter`, on others too; all claim from the same tasks.
    pub fn run(&self, share: bool, count: usize, worker: impl Fn(&Tasks) + Sync) {
        let helpers = if share && self.inside() { self.threads.min(count).saturating_sub(1) } else { 0 };
        if helpers == 0 {
            return worker(&Tasks::new(count, 1));
        }
        let tasks = Tasks::new(count, self.threads);
        rayon::in_place_scope(|s| {
            for _ in 0..helpers {
                s.spawn(|_| {
                    if !tasks.is_spent() {
                        worker(&tasks);
                    }
                });
            }
            worker(&tasks);
        });
    }

    /// Calls `f(k, piece)` for the pieces of `chunk` elements that `out` is cut into.
    pub fn pieces<T: Send>(&self, share: bool, out: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let chunk = chunk.max(1);
        let (base, len) = (Shared(out.as_mut_ptr()), out.len());
        self.run(share, len.div_ceil(chunk), |tasks| {
            let base = &base;
            while let Some(k) = tasks.claim() {
                let at = k * chunk;
                // SAFETY: each k is claimed once, so the pieces are disjoint parts of `out`, which is borrowed mutably.
                f(k, unsafe { std::slice::from_raw_parts_mut(base.0.add(at), chunk.min(len - at)) });
            }
        });
    }
}

/// A pointer that several threads may hold; whoever shares one says why their accesses do not meet.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(pub *mut T);

// SAFETY: see the type; a pointer alone touches nothing.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_visited_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(Some(threads));
            let mut out = vec![0u32; 1003];
            pool.enter(|| {
                pool.pieces(true, &mut out, 10, |k, piece| piece.iter_mut().for_each(|v| *v += 1 + k as u32));
            });
            assert!(out.iter().enumerate().all(|(i, &v)| v == 1 + i as u32 / 10));
        }
    }
}
