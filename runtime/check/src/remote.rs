//! Reads records that another thread holds, such as the rows of tensors of a Lua runtime, as datasets.
//!
//! Checks read records on several threads. The thread that holds them answers their requests one after the other while the checks run, so only
//! the records of the requests are in the host's memory.

use perilune_data::records::{Dataset, Fingerprint, Origin, Record};
use perilune_data::{Error, Result};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};

/// Reads the records of numbered sets, on the thread that holds them.
pub trait Holder {
    /// Reads records of a set, in this order.
    ///
    /// # Errors
    /// They cannot be read, or an interrupt. An error ends the check.
    fn read(&self, set: usize, rows: &[u64]) -> Result<Vec<Record>>;
}

enum Request {
    Read { set: usize, rows: Vec<u64>, answer: SyncSender<Result<Vec<Record>>> },
    Done,
}

/// A set of records of a [`Holder`].
struct Remote {
    set: usize,
    len: u64,
    requests: Mutex<Sender<Request>>,
}

/// Sends `Done` when the work has ended, by a panic too.
struct Ends(Sender<Request>);

impl Drop for Ends {
    fn drop(&mut self) {
        // A receiver that is gone needs no end.
        let _ = self.0.send(Request::Done);
    }
}

/// Runs `work` on another thread with a dataset of each of the sets, whose lengths are given, and answers their requests.
pub fn serve<T: Send>(holder: &dyn Holder, sets: &[u64], work: impl FnOnce(Vec<Arc<dyn Dataset>>) -> T + Send) -> T {
    let (requests, received): (Sender<Request>, Receiver<Request>) = channel();
    let remote = |(set, len): (usize, &u64)| -> Arc<dyn Dataset> {
        Arc::new(Remote { set, len: *len, requests: Mutex::new(requests.clone()) })
    };
    let datasets = sets.iter().enumerate().map(remote).collect();
    let done = std::thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let _ends = Ends(requests);
            work(datasets)
        });
        for request in received {
            match request {
                // A requester that is gone needs no answer.
                Request::Read { set, rows, answer } => drop(answer.send(holder.read(set, &rows))),
                Request::Done => break,
            }
        }
        worker.join()
    });
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Dataset for Remote {
    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.get_many(&[index])?.pop().ok_or_else(gone)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let (answer, answered) = sync_channel(1);
        let rows = indices.iter().map(|i| i % self.len.max(1)).collect();
        let request = Request::Read { set: self.set, rows, answer };
        self.requests.lock().map_err(|_| gone())?.send(request).map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }

    fn origins(&self, _: u64) -> Result<Vec<Origin>> {
        Ok(Vec::new())
    }

    fn fingerprint(&self) -> Fingerprint {
        [0; 32]
    }
}

fn gone() -> Error {
    Error::argument("a check", "this is a bug: the thread that holds its records has ended")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Split, check};
    use perilune_core::Interrupt;
    use perilune_data::records::Value;
    use std::cell::Cell;
    use std::rc::Rc;

    /// Rows that only one thread may read.
    struct Local {
        reads: Rc<Cell<u64>>,
        fails_at: u64,
    }

    impl Holder for Local {
        fn read(&self, set: usize, rows: &[u64]) -> Result<Vec<Record>> {
            self.reads.set(self.reads.get() + rows.len() as u64);
            if rows.contains(&self.fails_at) {
                return Err(Error::Interrupted);
            }
            Ok(rows
                .iter()
                .map(|r| Record { fields: vec![("x".into(), Value::Int((set as i64) << 32 | *r as i64))] })
                .collect())
        }
    }

    fn split(records: Arc<dyn Dataset>) -> Split {
        Split::new("train", records)
    }

    #[test]
    fn another_thread_reads_what_this_one_holds() {
        let local = Local { reads: Rc::new(Cell::new(0)), fails_at: u64::MAX };
        let report = serve(&local, &[1000, 7], |sets| {
            assert!(sets[1].get(3).is_ok_and(|r| r.get("x") == Some(&Value::Int(1 << 32 | 3))));
            check(&[split(sets[0].clone())], &Options::full(Interrupt::default()))
        });
        assert_eq!(report.map(|r| (r.splits[0].checked, r.findings.len())).expect("a report"), (1000, 0));
        assert!(local.reads.get() >= 1001);
        let stops = Local { fails_at: 900, ..local };
        let report =
            serve(&stops, &[1000], |sets| check(&[split(sets[0].clone())], &Options::full(Interrupt::default())));
        assert!(matches!(report, Err(Error::Interrupted)));
        // A dataset that outlives the check fails, and does not wait.
        let kept = serve(&stops, &[1000], |mut sets| sets.pop());
        assert!(kept.expect("a set").get(0).is_err_and(|e| e.to_string().contains("has ended")));
        let panics =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve(&stops, &[1], |_| panic!("on purpose"))));
        assert!(panics.is_err());
    }
}
