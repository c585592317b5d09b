//! Stores the value of an evaluated node or of an input: in host memory until a run reads it, then on the device.
//!
//! A batch that the host has made is an input of the step that reads it. Its upload is a part of the run, so that a column
//! which no kernel reads is never copied, a value that only the host reads stays there, and memory that runs out is an error
//! of the step. On a mesh each device gets its part.

use crate::memory::Role;
use perilune_core::error::Result;
use perilune_core::mesh::{Along, Axis};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::{Backend, Buffer, BufferDesc};
use std::cell::{Ref, RefCell};
use std::rc::Rc;

/// A value that is no longer written.
#[derive(Debug)]
pub(crate) struct StoredValue {
    pub uid: u64,
    pub shape: Shape,
    pub dtype: DType,
    pub role: Role,
    /// The recipe line that made it.
    pub loc: SourceLoc,
    /// What each device of the engine's mesh has of it.
    pub placement: Placement,
    residence: RefCell<Residence>,
}

pub(crate) type Value = Rc<StoredValue>;

/// Where a value is.
#[derive(Debug)]
pub(crate) enum Residence {
    Host(HostTensor),
    Device(Buffer),
}

impl StoredValue {
    pub fn new(uid: u64, (shape, dtype): (Shape, DType), at: Residence, role: Role, loc: SourceLoc) -> StoredValue {
        let placement = match &at {
            Residence::Host(_) => Placement::REPLICATED,
            Residence::Device(buffer) => buffer.desc().placement,
        };
        StoredValue { uid, shape, dtype, role, loc, placement, residence: RefCell::new(at) }
    }

    /// What a device of `mesh` has of it. A value of a mesh with more devices along `pp` is whole on every device.
    pub fn placement_on(&self, mesh: &Mesh) -> Placement {
        match self.placement.stage_device() {
            Some(device) if device >= mesh.size(Axis::Pp) => self.placement.with(Axis::Pp, Along::Replicated),
            _ => self.placement,
        }
    }

    /// Sets what each device gets of a value that is on the host.
    pub fn placed(self, placement: Placement) -> StoredValue {
        StoredValue { placement, ..self }
    }

    /// Returns the value's buffer, uploading the value if the host has it. A failed upload leaves it on the host.
    pub fn on_device(&self, backend: &dyn Backend) -> Result<Buffer> {
        let mut at = self.residence.borrow_mut();
        let buffer = match &*at {
            Residence::Device(buffer) => return Ok(buffer.clone()),
            Residence::Host(t) => {
                let desc = BufferDesc { shape: t.shape, dtype: t.dtype, placement: self.placement_on(&backend.mesh()) };
                backend.upload(&desc, &t.bytes)?
            }
        };
        *at = Residence::Device(buffer.clone());
        Ok(buffer)
    }

    /// Moves the value to host memory.
    pub fn to_host(&self, backend: &dyn Backend) -> Result<()> {
        let mut at = self.residence.borrow_mut();
        if let Residence::Device(buffer) = &*at {
            *at = Residence::Host(HostTensor::new(self.dtype, self.shape, backend.download(buffer)?));
        }
        Ok(())
    }

    /// Returns the value if it is in host memory.
    pub fn on_host(&self) -> Option<Ref<'_, HostTensor>> {
        Ref::filter_map(self.residence.borrow(), |at| match at {
            Residence::Host(t) => Some(t),
            Residence::Device(_) => None,
        })
        .ok()
    }

    /// Bytes of its elements, wherever they are.
    pub fn nbytes(&self) -> usize {
        match &*self.residence.borrow() {
            Residence::Host(t) => t.bytes.len(),
            Residence::Device(buffer) => buffer.nbytes(),
        }
    }

    /// Bytes that it takes on the device.
    pub fn device_bytes(&self) -> usize {
        match &*self.residence.borrow() {
            Residence::Host(_) => 0,
            Residence::Device(buffer) => buffer.nbytes(),
        }
    }
}
