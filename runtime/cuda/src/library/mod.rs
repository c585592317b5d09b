//! Launches the hand-written kernels of `kernels/` for library ops other than float matrix products.
//!
//! Device code is C++ templates. A kernel's text contains only its header, types and ranks; sizes and strides are
//! arguments, so that different shapes share machine code. `perilune_core::ops` defines what an op computes and in
//! which order it adds; `runtime/cpu/src/library` is the reference.

mod add;
mod affine;
mod call;
pub mod collective;
pub mod fp8;
mod grouped;
mod index;
mod matmul;
pub mod messages;
mod movement;
pub mod pool;
mod reduce;
mod scan;
mod sort;
pub mod source;
mod strided;
pub mod transfer;
mod transpose;

pub(crate) use call::{by_value, sized};
pub use matmul::is_small;
pub(crate) use strided::Strided;
pub(crate) use transpose::{aligned, transpose_planes};

use crate::attention;
use crate::launch::{Function, Launch, Props, Work};
use crate::nvrtc;
use call::Call;
use perilune_core::error::{Error, Result};
use perilune_core::ops::{self, Op};
use perilune_plan::ir::{Library, Program};
use std::sync::Arc;

/// How a routine builds its launches.
enum Routine {
    /// Adds launches to a call.
    Call(fn(&mut Call, &Props) -> Result<()>),
    /// Builds all of the work; `contract` allows floating-point contraction, for kernels that define their own
    /// arithmetic.
    Whole { make: fn(&Program, &Library, &Props) -> Result<Work>, contract: bool },
}

use Routine::{Call as By, Whole};

/// Every op that a kernel of `kernels/` computes, with the routine that launches it. cuBLASLt and cuDNN take precedence
/// for what they support.
static ROUTINES: &[(&Op, Routine)] = &[
    (&ops::matmul::MATMUL, By(|c, _| matmul::product(c))),
    (&ops::matmul::LINEAR, By(|c, _| matmul::linear(c))),
    (&ops::grouped::GROUPED_MATMUL, By(grouped::rows)),
    (&ops::grouped::GROUPED_SUMS, By(grouped::sums)),
    (&ops::loss::CLASS_IDS, By(|c, _| index::class_ids(c))),
    (&ops::index::GATHER, By(|c, _| index::gather(c))),
    (&ops::index::SCATTER, By(|c, _| index::scatter(c))),
    (&ops::index::INDEX_SELECT, By(|c, _| index::index_select(c))),
    (&ops::index::SCATTER_ADD, By(|c, _| add::scatter_add(c))),
    (&ops::index::INDEX_ADD, By(|c, _| add::index_add(c))),
    (&ops::reduce::ARGREDUCE, By(|c, _| reduce::argreduce(c))),
    (&ops::sort::ARGSORT, By(|c, _| sort::argsort(c))),
    (&ops::slicing::STRIDED_PAD, By(|c, _| movement::strided_pad(c))),
    (&ops::slicing::COL2IM, By(|c, _| movement::col2im(c))),
    (&ops::join::CAT, By(|c, _| movement::cat(c))),
    (&ops::affine::AFFINE_SAMPLE, By(|c, _| affine::affine_sample(c))),
    (&ops::pool::MAX_POOL2D, By(|c, _| pool::max_pool2d(c))),
    (&ops::pool::MAX_POOL2D_BACKWARD, By(|c, _| pool::backward(c))),
    (&ops::scan::CUMSUM, By(|c, _| scan::scan(c))),
    (&ops::scan::CUMPROD, By(|c, _| scan::scan(c))),
    (&ops::source::KERNEL, Whole { make: source::work, contract: false }),
    (&ops::attention::ATTENTION, Whole { make: attention::forward, contract: true }),
    (&ops::attention::ATTENTION_BACKWARD, Whole { make: attention::backward, contract: true }),
    (&ops::attention_block::ATTENTION_BLOCK, Whole { make: attention::forward, contract: true }),
    (&ops::attention_block::ATTENTION_BLOCK_BACKWARD, Whole { make: attention::block_backward, contract: true }),
];

/// Returns the launches of a library call, without its epilogue.
pub fn routine(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    match ROUTINES.iter().find(|r| r.0 == l.op).map(|r| &r.1) {
        Some(By(launch)) => {
            let mut c = Call::new(program, l)?;
            launch(&mut c, props)?;
            Ok(c.finish())
        }
        Some(Whole { make, contract }) => {
            make(program, l, props).map(|work| if *contract { contracted(work) } else { work })
        }
        None => Err(Error::system("cuda", format!("this is a bug: no kernel for {}", l.op.name))),
    }
}

/// Marks the kernels of the work for compilation with contraction.
fn contracted(work: Work) -> Work {
    let contract = |f: &Function| Function { label: f.label.clone(), text: format!("{}{}", nvrtc::CONTRACT, f.text) };
    let launches = work.launches.into_iter();
    let launches = launches.map(|l| Launch { function: Arc::new(contract(&l.function)), ..l }).collect();
    Work { launches, ..work }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::ops::Class;

    #[test]
    fn every_library_op_has_a_routine() {
        for op in ops::all().iter().filter(|op| matches!(op.class, Class::Library)) {
            assert!(ROUTINES.iter().any(|r| r.0 == *op), "no kernel launches {}", op.name);
        }
    }
}
