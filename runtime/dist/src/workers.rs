//! Drives each device of a mesh by a thread of its own.

use perilune_core::error::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Task = Box<dyn FnOnce() + Send>;

/// The threads, one for each device that this process drives.
#[derive(Debug)]
pub struct Workers {
    tasks: Vec<Sender<Task>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub fn new(ranks: usize) -> Result<Workers> {
        let mut workers = Workers { tasks: Vec::with_capacity(ranks), threads: Vec::with_capacity(ranks) };
        for rank in 0..ranks {
            let (tasks, own): (Sender<Task>, Receiver<Task>) = channel();
            let thread = std::thread::Builder::new().name(format!("device-{rank}"));
            let thread = thread.spawn(move || own.into_iter().for_each(|task| task()));
            workers
                .threads
                .push(thread.map_err(|e| Error::system("mesh", format!("no thread for device {rank}: {e}")))?);
            workers.tasks.push(tasks);
        }
        Ok(workers)
    }

    /// Calls `f(rank)` on the thread of each device, and returns the results in the order of ranks. A panic is returned as an
    /// error; `panicked` is called with the rank at once, because other devices may wait for it.
    pub fn on_all<T, F>(&self, panicked: impl Fn(usize) + Send + Sync + Clone + 'static, f: F) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Fn(usize) -> T + Send + Sync + Clone + 'static,
    {
        let (results, all) = channel();
        for (rank, tasks) in self.tasks.iter().enumerate() {
            let (results, f, panicked) = (results.clone(), f.clone(), panicked.clone());
            let task = move || {
                let result = catch_unwind(AssertUnwindSafe(|| f(rank)));
                if result.is_err() {
                    panicked(rank);
                }
                // Nobody receives it if the thread of the engine has panicked.
                let _ = results.send((rank, result));
            };
            let sent = tasks.send(Box::new(task));
            sent.map_err(|_| Error::system("mesh", format!("this is a bug: the thread of device {rank} has ended")))?;
        }
        drop(results);
        let mut sorted: Vec<Option<T>> = self.tasks.iter().map(|_| None).collect();
        for (rank, result) in all {
            sorted[rank] = result.ok();
        }
        let bug = |rank| Error::system("mesh", format!("this is a bug: the thread of device {rank} panicked"));
        sorted.into_iter().enumerate().map(|(rank, found)| found.ok_or_else(|| bug(rank))).collect()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.tasks.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn results_come_in_the_order_of_ranks_from_threads_that_stay() {
        let workers = Workers::new(5).unwrap();
        let thread = |rank: usize| (rank, std::thread::current().id());
        let first = workers.on_all(|_| (), thread).unwrap();
        assert_eq!(first.iter().map(|r| r.0).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_eq!(workers.on_all(|_| (), thread).unwrap(), first);
    }

    #[test]
    fn a_panic_is_an_error_and_the_thread_goes_on() {
        let workers = Workers::new(3).unwrap();
        let seen = Arc::new(AtomicUsize::new(9));
        let note = seen.clone();
        let e = workers.on_all(move |rank| note.store(rank, Ordering::Relaxed), |rank| assert!(rank != 1)).unwrap_err();
        assert_eq!(
            (e.message.as_str(), seen.load(Ordering::Relaxed)),
            ("this is a bug: the thread of device 1 panicked", 1)
        );
        assert_eq!(workers.on_all(|_| (), |rank| rank).unwrap(), [0, 1, 2]);
    }
}
