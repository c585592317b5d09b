//! Launches the hand-written kernels of `kernels/` for library ops other than float matrix products.
//!
//! Device code is C++ templates. A kernel's text names its header, types and ranks only; sizes and strides are arguments, so that
//! shapes share machine code. `perilune_core::ops` defines what an op computes and in which order it adds; `runtime/cpu/src/library`
//! is the reference.

mod add;
mod call;
pub mod fp8;
mod grouped;
mod index;
mod matmul;
mod movement;
pub mod pool;
mod reduce;
mod scan;
mod sort;
pub mod source;
mod strided;

pub use matmul::is_small;

use crate::launch::{Props, Work};
use call::Call;
use perilune_core::error::{Error, Result};
use perilune_core::ops::source::KERNEL as KERNEL_FROM_SOURCE;
use perilune_plan::ir::{Library, Program};

/// The launches of a library call, without its epilogue.
pub fn routine(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    if l.op == &KERNEL_FROM_SOURCE {
        return source::work(program, l, props);
    }
    let mut c = Call::new(program, l)?;
    match l.op.name {
        "matmul" => matmul::product(&mut c)?,
        "linear" => matmul::linear(&mut c)?,
        "grouped_matmul" => grouped::rows(&mut c, props)?,
        "grouped_sums" => grouped::sums(&mut c, props)?,
        "class_ids" => index::class_ids(&mut c)?,
        "gather" => index::gather(&mut c)?,
        "scatter" => index::scatter(&mut c)?,
        "index_select" => index::index_select(&mut c)?,
        "scatter_add" => add::scatter_add(&mut c)?,
        "index_add" => add::index_add(&mut c)?,
        "argreduce" => reduce::argreduce(&mut c)?,
        "argsort" => sort::argsort(&mut c)?,
        "place" => movement::place(&mut c)?,
        "unwindow" => movement::unwindow(&mut c)?,
        "cat" => movement::cat(&mut c)?,
        "max_pool2d" => pool::max_pool2d(&mut c)?,
        "max_pool2d_backward" => pool::backward(&mut c)?,
        "cumsum" | "cumprod" => scan::scan(&mut c)?,
        other => return Err(Error::system("cuda", format!("this is a bug: no kernel for {other}"))),
    }
    Ok(c.finish())
}
