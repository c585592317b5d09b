//! Chooses by which route the devices of a process exchange the tensors of a step.
//!
//! Links between GPUs are fast. They sleep if they have moved nothing for some time, 50 ms by default, and a GPU that runs at the limit of
//! its power is faster while they do. Host memory is reached over PCIe, which is awake anyway, in several times the time. So a step of
//! much work goes through host memory if all that is large is a sum of terms of two devices that no product follows, as of gradients, and
//! the work hides it. Each of more devices would read all that the others copy.
//!
//! The route does not change a bit of a result. It is a function of the program and of the kind of GPU, so all devices decide alike.

use crate::ir::{Kernel, Value, ValueId};
use crate::kernel_order::one_by_one;
use crate::lanes::{FIRST_BUCKET_BYTES, collective};
use crate::show::routine;
use perilune_core::mesh::Mesh;
use perilune_core::ops::collective::{self as collectives, ALL_REDUCE};

/// What the devices of a process exchange tensors by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Route {
    /// They access each other's memory.
    #[default]
    Links,
    /// Each copies its pieces to host memory, where the others read them.
    HostMemory,
}

/// Operations of a step from which its route may be through host memory: 14 ms of an H200 at 700 TFLOP/s. In shorter
/// steps latency counts, and GPUs rarely reach the limit of their power.
const LEAST_WORK: usize = 10_000_000_000_000;

/// How much longer a step is than what goes through host memory.
const HIDES: usize = 2;

impl Route {
    /// Operations that a GPU executes while it sends a byte: 700 TFLOP/s beside 280 GB/s on an H200 with NVLink, or 45 GB/s over
    /// PCIe 5, in both directions at once.
    pub(crate) fn flops_a_byte(self) -> usize {
        match self {
            Route::Links => 2500,
            Route::HostMemory => 15_500,
        }
    }
}

/// The operations of each kernel's products.
pub(crate) fn works(kernels: &[(u32, Kernel)], values: &[Value]) -> Vec<usize> {
    let work = |(_, kernel): &(u32, Kernel)| match kernel {
        Kernel::Library(l) => routine(l, values[l.outputs[0].0 as usize].shape),
        _ => 0,
    };
    kernels.iter().map(work).collect()
}

/// Chooses the route of a program on a mesh. `producers` and `users`: for each kernel, those that it follows and those that follow it.
/// `works`: see [`works`]. `exchanges`: which kernels exchange terms of sums ([`crate::lanes::term_exchanges`]).
pub(crate) fn choose(
    kernels: &[(u32, Kernel)],
    values: &[Value],
    producers: &[Vec<usize>],
    users: &[impl AsRef<[usize]>],
    works: &[usize],
    exchanges: &[bool],
    mesh: &Mesh,
) -> Route {
    let work = works.iter().copied().fold(0, usize::saturating_add);
    if work < LEAST_WORK {
        return Route::Links;
    }
    // Which kernels a product follows, that would wait for what they send.
    let mut leads = vec![false; kernels.len()];
    for k in one_by_one(kernels, producers, users).into_iter().rev() {
        leads[k] = users[k].as_ref().iter().any(|u| works[*u] > 0 || leads[*u]);
    }
    let nbytes = |ids: &[ValueId]| ids.iter().map(|v| values[v.0 as usize].nbytes()).sum::<usize>();
    let mut fetched = 0usize;
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        if let Kernel::Library(l) = kernel
            && collectives::is_transfer(l.op)
        {
            // Pipeline stages use the links.
            return Route::Links;
        }
        let Some(l) = collective(kernel) else { continue };
        let result = nbytes(&l.outputs);
        let sums = l.op == &ALL_REDUCE || exchanges[k];
        let is_large = result >= FIRST_BUCKET_BYTES;
        if is_large && (!sums || leads[k]) || mesh.size(collectives::axis(&l.attrs)) > 2 {
            return Route::Links;
        }
        fetched = fetched.saturating_add(result);
    }
    let hidden = work / HIDES / Route::HostMemory.flops_a_byte();
    if fetched > 0 && fetched <= hidden { Route::HostMemory } else { Route::Links }
}
