//! Plans transfers between pipeline stages: plain data, without a device. A value crosses in one message, contiguous and in row-major
//! order (`executable/transfer.rs`).

use super::call::Call;
use super::collective::pack;
use crate::launch::{Arg, Work};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_core::ops::Op;
use perilune_core::ops::collective::{SEND, axis, is_transfer};
use perilune_plan::ir::{Library, Program};

/// Whether an op moves a tensor from one device to one other.
pub fn is(op: &Op) -> bool {
    is_transfer(op)
}

/// One end of a transfer.
#[derive(Clone, PartialEq, Debug)]
pub struct Transfer {
    pub axis: Axis,
    pub is_send: bool,
    /// The coordinate of the device at the other end.
    pub other: usize,
    /// Names the message among those of the run between both devices.
    pub number: u64,
    /// Where the value is, or comes to be, contiguous.
    pub place: Arg,
    pub nbytes: usize,
}

impl Transfer {
    /// The transfer in words: "send to 1 along pp".
    pub fn describe(&self) -> String {
        let what = if self.is_send { "send to" } else { "receive from" };
        format!("{what} {} along {}", self.other, self.axis.name())
    }
}

/// Lowers a transfer: the launches that make a value contiguous before it is sent, and the transfer.
pub fn parts(program: &Program, l: &Library) -> Result<(Work, Transfer)> {
    let bug = |what: &str| Error::system("cuda", format!("this is a bug: {} {what}", l.op.name));
    let number = |k: usize| l.attrs.get(k).and_then(|n| u64::try_from(*n).ok()).ok_or_else(|| bug("without numbers"));
    let (axis, other, number) = (axis(&l.attrs), number(1)? as usize, number(2)?);
    let is_send = l.op == &SEND;
    let (work, place, nbytes) = if is_send {
        let mut c = Call::new(program, l)?;
        let x = c.input(0)?;
        let nbytes = x.shape().numel() * x.dtype.size();
        let place = match &x.pointer {
            Arg::Value(..) if x.layout.is_contiguous() => x.pointer.clone(),
            _ if nbytes == 0 => Arg::I64(0),
            _ => pack(&mut c, &x, x.dtype)?,
        };
        (c.finish(), place, nbytes)
    } else {
        let (Some(out), Some(layout)) = (l.outputs.first(), l.layouts.first()) else {
            return Err(bug("without a result"));
        };
        if !layout.is_contiguous() || layout.offset != 0 {
            return Err(bug("into a view"));
        }
        let nbytes = layout.numel() * program.values[out.0 as usize].dtype.size();
        (Work::default(), Arg::Value(*out, 0), nbytes)
    };
    Ok((work, Transfer { axis, is_send, other, number, place, nbytes }))
}
