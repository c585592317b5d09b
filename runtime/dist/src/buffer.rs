//! Stores a tensor on the devices of a mesh: a part on each.
//!
//! The parts are made when a device first needs its own, by that device's thread: the thread of the engine makes none, so its
//! work does not grow with the number of devices. Until then, the elements of an uploaded tensor are kept in host memory.

use crate::parts;
use perilune_core::error::{Error, Result};
use perilune_core::{Mesh, host_memory};
use perilune_plan::{Backend, Buffer, BufferDesc, DeviceBuffer};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub struct MeshBuffer {
    desc: BufferDesc,
    mesh: Mesh,
    /// By rank; only those of the devices that this process drives are made.
    parts: Box<[Mutex<Option<Buffer>>]>,
    /// The elements of the whole tensor, as long as a part has to be made from them.
    source: Mutex<Source>,
}

#[derive(Debug, Default)]
struct Source {
    bytes: Option<Arc<[u8]>>,
    /// Parts that have yet to be made.
    open: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MeshBuffer {
    /// A buffer whose parts have no memory yet. `bytes`: the elements of the tensor, if it is uploaded. `local`: how many devices
    /// of this process have a part.
    pub fn new(desc: &BufferDesc, mesh: Mesh, bytes: Option<Arc<[u8]>>, local: usize) -> MeshBuffer {
        let parts = (0..mesh.devices()).map(|_| Mutex::new(None)).collect();
        MeshBuffer { desc: *desc, mesh, parts, source: Mutex::new(Source { bytes, open: local }) }
    }

    /// Downcasts a buffer to one of this mesh.
    pub fn of<'a>(buffer: &'a Buffer, mesh: &Mesh) -> Result<&'a MeshBuffer> {
        let found = buffer.as_any().downcast_ref::<MeshBuffer>().filter(|b| b.mesh == *mesh);
        found.ok_or_else(|| Error::system("mesh", "this is a bug: a buffer of another device was passed"))
    }

    /// The part on a device; allocated, and uploaded if the tensor came from the host, at the first call.
    pub fn part(&self, rank: usize, backend: &dyn Backend) -> Result<Buffer> {
        let mut own = lock(&self.parts[rank]);
        if let Some(part) = &*own {
            return Ok(part.clone());
        }
        let source = lock(&self.source).bytes.clone();
        let local = self.desc.local(&self.mesh)?;
        let part = match source {
            None => backend.alloc(&local)?,
            Some(bytes) if self.desc.placement.is_replicated(&self.mesh) => backend.upload(&local, &bytes)?,
            Some(bytes) => {
                backend.upload(&local, &parts::cut(&self.desc, &self.mesh, &self.mesh.coordinates(rank), &bytes)?)?
            }
        };
        *own = Some(part.clone());
        drop(own);
        let mut source = lock(&self.source);
        source.open = source.open.saturating_sub(1);
        if source.open == 0 {
            source.bytes = None;
        }
        Ok(part)
    }

    /// The elements of the whole tensor. `read` returns those of the part of each of `holders`.
    pub fn whole(&self, holders: &[usize], read: &mut dyn FnMut(usize) -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        if let [only] = holders
            && self.desc.placement.is_replicated(&self.mesh)
        {
            return read(*only);
        }
        let mut whole = host_memory::filled("mesh", self.desc.nbytes())?;
        for rank in holders {
            let part = read(*rank)?;
            parts::join(&self.desc, &self.mesh, &self.mesh.coordinates(*rank), &part, &mut whole)?;
        }
        Ok(whole)
    }

    /// Bytes of the part of a device, the same on all.
    pub fn local_bytes(&self) -> Result<usize> {
        Ok(self.desc.local(&self.mesh)?.nbytes())
    }

    /// The devices among `ranks` whose parts together are the tensor, each part once; `None` if they lack a part.
    pub fn holders(&self, ranks: &[usize]) -> Option<Vec<usize>> {
        parts::holders(&self.desc, &self.mesh, ranks)
    }
}

impl DeviceBuffer for MeshBuffer {
    fn desc(&self) -> &BufferDesc {
        &self.desc
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
