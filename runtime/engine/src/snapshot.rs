//! Copies States at one moment for a checkpoint, which a thread reads while steps go on.

use crate::engine::{Engine, Fault};
use crate::memory::{Entry, Role};
use crate::state::StateId;
use perilune_core::error::{Error, Result};
use perilune_core::{DType, HostTensor, Shape};
use perilune_plan::Snapshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Copies of States. They may be sent to a thread; what they hold counts as memory of [`Role::Checkpoint`] until the device
/// has let go of it, or, where the device's memory is the host's, until this is dropped.
pub struct Copies {
    metas: Vec<(DType, Shape)>,
    snapshot: Option<Snapshot>,
    held: Arc<AtomicUsize>,
    /// Why the loop had to wait for the bytes, on a device that can do without.
    pub waited: Option<String>,
}

impl Copies {
    /// The values, in the order in which the States were given; once.
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

/// What statistics know of a snapshot.
pub(crate) struct SnapshotBytes {
    held: Arc<AtomicUsize>,
    entries: Vec<Entry>,
}

impl SnapshotBytes {
    /// One for each State, while the copies live.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let lives = self.held.load(Ordering::Acquire) > 0;
        self.entries.iter().copied().filter(move |_| lives)
    }
}

impl Engine {
    /// The values that States have now. What is assigned later does not show in them.
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
                    self.value_of(node)?.buffer.clone()
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
        let snapshot = self.executor.backend.snapshot(&parts, room)?;
        let (held, waited) = (snapshot.held.clone(), snapshot.waited.clone());
        self.snapshot = Some(SnapshotBytes { held: held.clone(), entries });
        Ok(Copies { metas, snapshot: Some(snapshot), held, waited })
    }
}
