//! Copies States at one moment for a checkpoint, which a thread reads while steps continue.

use crate::engine::{Engine, Fault};
use crate::memory::{Entry, Role};
use crate::state::StateId;
use perilune_core::error::{Error, Result};
use perilune_core::{DType, HostTensor, Shape};
use perilune_plan::Snapshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Copies of States, which may be sent to a thread. Their memory counts as [`Role::Checkpoint`] until the device
/// has freed it or, if the device's memory is the host's, until this is dropped.
pub struct Copies {
    metas: Vec<(DType, Shape)>,
    snapshot: Option<Snapshot>,
    held: Arc<AtomicUsize>,
    /// The reason why the loop had to wait for the bytes, on a device with asynchronous copies.
    pub waited: Option<String>,
}

impl Copies {
    /// Returns the values in the order of the States; may be called once.
    pub fn read(&mut self) -> Result<Vec<HostTensor>> {
        let Some(snapshot) = self.snapshot.take() else {
            return Err(Error::system("checkpoint", "this is a bug: a snapshot is read twice"));
        };
        let bytes = (snapshot.bytes)()?;
        Ok(self.metas.iter().zip(bytes).map(|((dtype, shape), b)| HostTensor::new(*dtype, *shape, b)).collect())
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.snapshot = None;
        self.held.store(0, Ordering::Release);
    }
}

/// The memory statistics of a snapshot.
pub(crate) struct SnapshotBytes {
    held: Arc<AtomicUsize>,
    entries: Vec<Entry>,
}

impl SnapshotBytes {
    /// One entry for each State while the copies exist.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let lives = self.held.load(Ordering::Acquire) > 0;
        self.entries.iter().copied().filter(move |_| lives)
    }
}

impl Engine {
    /// Copies the current values of States. Later assignments do not change the copies.
    pub fn snapshot(&mut self, ids: &[StateId]) -> std::result::Result<Copies, Fault> {
        let mut parts = Vec::with_capacity(ids.len());
        let mut metas = Vec::with_capacity(ids.len());
        let mut entries = Vec::with_capacity(ids.len());
        for &id in ids {
            let info = self.state_info(id)?;
            let buffer = match self.states.written_buffer(id) {
                Some(buffer) => buffer,
                None => {
                    let node = self.state_node(id)?;
                    self.value_of(node)?.on_device(&*self.executor.backend)?
                }
            };
            if !buffer.desc().holds(&info.shape, info.dtype) {
                let message =
                    format!("this is a bug: a State of shape {} is stored as {:?}", info.shape, buffer.desc());
                return Err(Error::system("checkpoint", message).into());
            }
            entries.push((Role::Checkpoint, self.states.loc(id), info.dtype, info.shape, buffer.nbytes()));
            parts.push(buffer);
            metas.push((info.dtype, info.shape));
        }
        let room = self.executor.memory_budget.map(|b| b.saturating_sub(self.executor.backend.memory().allocated));
        let snapshot = self.executor.backend.snapshot(&parts, room);
        let snapshot = snapshot.map_err(|error| Fault { error, loc: self.executor.line_of_earlier_fault() })?;
        let (held, waited) = (snapshot.held.clone(), snapshot.waited.clone());
        self.snapshot = Some(SnapshotBytes { held: held.clone(), entries });
        Ok(Copies { metas, snapshot: Some(snapshot), held, waited })
    }
}
