//! Reads all records of one epoch in parallel, for stages that depend on them.

use crate::error::{Error, Result};
use crate::records::{Dataset, Record, RecordFn, Value};
use crate::source;
use perilune_core::Interrupt;
use rayon::ThreadPool;
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Records that a task reads together.
const CHUNK: u64 = 256;
/// The most records of an epoch that is scanned, whose results stay in memory.
const MAX_SCANNED: u64 = 1 << 32;

/// Where scans run, and what ends them.
#[derive(Clone)]
pub struct Scan {
    pool: Arc<ThreadPool>,
    interrupt: Interrupt,
}

impl Scan {
    /// Scans on `threads` threads, by default one per processor.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(threads: Option<usize>, interrupt: Interrupt) -> Result<Scan> {
        Ok(Scan { pool: source::pool(threads)?, interrupt })
    }

    /// Computes something of each record of an epoch, in their order.
    ///
    /// # Errors
    /// That of the first record that cannot be read or computed, or an interrupt.
    pub(crate) fn each<T: Send>(
        &self,
        dataset: &dyn Dataset,
        f: impl Fn(u64, Record) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let located = |i, e| super::located(dataset, i, e);
        self.chunks(dataset, |indices, records| {
            indices.iter().zip(records).map(|(i, r)| f(*i, r).map_err(|e| located(*i, e))).collect()
        })
    }

    /// Computes something of the result of `f` for each record of an epoch, in their order.
    ///
    /// # Errors
    /// That of the first record that cannot be read or computed, or an interrupt.
    pub(crate) fn results<T: Send>(
        &self,
        dataset: &dyn Dataset,
        f: &dyn RecordFn,
        then: impl Fn(Value) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let located = |i, e| super::located(dataset, i, e);
        self.chunks(dataset, |indices, records| {
            let (values, failed) = f.call_many(records, indices);
            let count = values.len();
            let out = values.into_iter().zip(indices).map(|(value, i)| then(value).map_err(|e| located(*i, e)));
            let out = out.collect::<Result<_>>()?;
            failed.map_or(Ok(out), |e| Err(located(indices[count], e)))
        })
    }

    /// Computes something of the records of each chunk of an epoch, in their order.
    fn chunks<T: Send>(
        &self,
        dataset: &dyn Dataset,
        f: impl Fn(&[u64], Vec<Record>) -> Result<Vec<T>> + Sync,
    ) -> Result<Vec<T>> {
        let len = dataset.len();
        if len > MAX_SCANNED {
            let rule = format!("has {len} records, and a stage that reads all of them takes at most {MAX_SCANNED}");
            return Err(Error::argument("an epoch", rule).hint("take fewer: :take(1000000)"));
        }
        // The first chunk that has failed: those behind it need not be read.
        let failed = AtomicU64::new(u64::MAX);
        let read = |chunk: u64| -> Result<Vec<T>> {
            if chunk > failed.load(Ordering::Relaxed) {
                return Ok(Vec::new());
            }
            let one = || {
                if self.interrupt.is_requested() {
                    return Err(Error::Interrupted);
                }
                let indices: Vec<u64> = (chunk * CHUNK..len.min((chunk + 1) * CHUNK)).collect();
                f(&indices, dataset.get_many(&indices)?)
            };
            one().inspect_err(|_| {
                failed.fetch_min(chunk, Ordering::Relaxed);
            })
        };
        let chunks: Vec<Result<Vec<T>>> =
            self.pool.install(|| (0..len.div_ceil(CHUNK)).into_par_iter().map(read).collect());
        let mut out = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
        for chunk in chunks {
            out.extend(chunk?);
        }
        Ok(out)
    }
}
