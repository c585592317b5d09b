//! Threads: a team that waits by spinning for a moment and then parks, and shared counters that hand out tasks.
//!
//! The thread that runs a program is one of the team, so a kernel starts at once; the others look for work for
//! [`PATIENCE`] after the last kernel before they park, since waking one takes longer than most kernels of a small model.
//! Kernels hand out tasks with one atomic addition each. Thread `t` of `n` begins with the `t`-th part of the tasks and
//! then helps others with theirs: what one kernel wrote is mostly read by the same thread of the next one, from its own
//! cache. Which thread takes which task never shows in results: tasks are cut by shape alone.

mod team;

use smallvec::SmallVec;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use team::Team;

#[derive(Debug)]
pub struct Pool {
    threads: usize,
    team: Option<Team>,
    /// Threads for `gemm`, which shares work by rayon only; started by the first product that needs them.
    rayon: OnceLock<Option<rayon::ThreadPool>>,
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
        let own = team::index() % self.parts.len();
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
        let team = if threads > 1 { Team::new(threads - 1) } else { None };
        Pool { threads: if team.is_some() { threads } else { 1 }, team, rayon: OnceLock::new() }
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Whether `run` would share work from here: not from within a task.
    pub fn is_free(&self) -> bool {
        self.team.is_some() && !team::is_working()
    }

    /// Runs `f` on a thread from where `gemm` may share its work.
    pub fn with_rayon<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        let name = |k| format!("perilune-gemm-{k}");
        let build = || rayon::ThreadPoolBuilder::new().num_threads(self.threads).thread_name(name).build().ok();
        match self.rayon.get_or_init(build) {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Has the other threads look for work: some is about to come.
    pub fn call(&self) {
        if let Some(team) = &self.team {
            team.call();
        }
    }

    /// Calls `worker` on this thread and, if `share` and not within a task already, on others too; all claim from the
    /// same tasks.
    pub fn run(&self, share: bool, count: usize, worker: impl Fn(&Tasks) + Sync) {
        let helpers = if share && self.is_free() { self.threads.min(count).saturating_sub(1) } else { 0 };
        let Some(team) = self.team.as_ref().filter(|_| helpers > 0) else {
            return worker(&Tasks::new(count, 1));
        };
        let tasks = Tasks::new(count, self.threads);
        team.run(helpers, &|| {
            if !tasks.is_spent() {
                worker(&tasks);
            }
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
            for round in 0..200 {
                let mut out = vec![0u32; 1003 + round];
                pool.pieces(true, &mut out, 10, |k, piece| piece.iter_mut().for_each(|v| *v += 1 + k as u32));
                assert!(out.iter().enumerate().all(|(i, &v)| v == 1 + i as u32 / 10));
            }
        }
    }

    #[test]
    fn a_task_may_share_work_of_its_own() {
        let pool = Pool::new(Some(3));
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
    fn a_parked_team_wakes_up() {
        let pool = Pool::new(Some(2));
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let seen = std::sync::Mutex::new(std::collections::HashSet::new());
            // Each thread holds its task until the other one has come, if it comes at all.
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
        let pool = Pool::new(Some(3));
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
        pool.pieces(true, &mut out, 1, |k, piece| piece[0] = k as u32);
        assert!(out.iter().enumerate().all(|(i, &v)| v == i as u32));
    }
}
