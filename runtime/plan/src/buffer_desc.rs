//! Describes the contents of a buffer: shape, dtype, and placement on a mesh.

use perilune_core::error::Result;
use perilune_core::mesh::{Axis, Mesh, Placement};
use perilune_core::{DType, Shape};

/// What a buffer stores: a tensor, and what each device of a mesh holds of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferDesc {
    /// Of the whole tensor.
    pub shape: Shape,
    pub dtype: DType,
    pub placement: Placement,
}

impl BufferDesc {
    /// A tensor that each device holds as a whole.
    pub fn new(shape: Shape, dtype: DType) -> BufferDesc {
        BufferDesc { shape, dtype, placement: Placement::REPLICATED }
    }

    /// Bytes of the whole tensor.
    pub fn nbytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }

    /// What one device of `mesh` stores, padding included: the same on all of them.
    pub fn local(&self, mesh: &Mesh) -> Result<BufferDesc> {
        let part = self.placement.local(mesh, &mesh.coordinates(0), &self.shape)?;
        Ok(BufferDesc::new(part.shape, self.dtype))
    }

    /// Bytes that a device of `mesh` with that coordinate along `pp` stores.
    pub fn bytes_along_pp(&self, mesh: &Mesh, device: usize) -> usize {
        match self.placement.stage_device() {
            Some(own) if own != device && mesh.size(Axis::Pp) > 1 => 0,
            _ => self.local(mesh).map_or(self.nbytes(), |part| part.nbytes()),
        }
    }

    /// Whether it stores the elements of a tensor of that shape and dtype, in the same order.
    pub fn holds(&self, shape: &Shape, dtype: DType) -> bool {
        self.dtype == dtype && self.shape.numel() == shape.numel()
    }
}
