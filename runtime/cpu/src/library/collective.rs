//! Implements collectives between virtual devices: each sends its piece and combines what all have sent, in the order of their
//! coordinates. Every device therefore computes the same bits. 16-bit floats are summed in f32 and rounded once.

use super::{Call, Element, by_size, by_type, index::dense, split_at_axis};
use crate::math::Number;
use crate::memory::Pod;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Combine;
use perilune_core::ops::collective::{TREE, axis, combine};
use perilune_plan::Peers;
use std::sync::Arc;

pub fn all_reduce(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), reduce(c, c.attr(1), None))
}

pub fn reduce_scatter(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), reduce(c, c.attr(3), Some(c.attr(1) as usize)))
}

pub fn all_gather(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), gather(c))
}

pub fn all_to_all(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), transpose(c))
}

pub fn shift(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), pass_on(c))
}

pub fn send(c: &Call) -> Result<()> {
    by_size!(c.input(0).dtype, send_elements(c))
}

pub fn receive(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), receive_elements(c))
}

fn peers<'a>(c: &'a Call) -> Result<&'a dyn Peers> {
    let bug = || Error::system("cpu", format!("this is a bug: {} on a single device", c.name()));
    c.context.peers.ok_or_else(bug)
}

/// The bytes of plain numbers.
fn bytes_of<T: Pod>(own: &[T]) -> &[u8] {
    // SAFETY: plain numbers have no padding, and every byte of them is initialized.
    unsafe { std::slice::from_raw_parts(own.as_ptr().cast::<u8>(), size_of_val(own)) }
}

fn send_elements<T: Pod>(c: &Call) -> Result<()> {
    let own = dense::<T>(&c.input(0))?;
    peers(c)?.send(axis(&c.routine.attrs), c.attr(1) as usize, c.attr(2) as u64, bytes_of(&own))?;
    c.output::<i32>().fill(0);
    Ok(())
}

fn receive_elements<T: Pod>(c: &Call) -> Result<()> {
    let sent = peers(c)?.receive(axis(&c.routine.attrs), c.attr(1) as usize, c.attr(2) as u64)?;
    let out = c.output::<T>();
    if sent.len() != size_of_val(&*out) {
        return Err(Error::system(
            "cpu",
            format!("this is a bug: {} bytes came for {}", sent.len(), size_of_val(&*out)),
        ));
    }
    out.iter_mut().enumerate().for_each(|(i, out)| *out = element::<T>(&sent, i));
    Ok(())
}

/// What each device along the axis of the call has sent.
fn exchange<T: Pod>(c: &Call) -> Result<Vec<Arc<[u8]>>> {
    let own = dense::<T>(&c.input(0))?;
    let bytes = bytes_of(&own);
    let all = peers(c)?.exchange(axis(&c.routine.attrs), bytes)?;
    match all.iter().all(|piece| piece.len() == bytes.len()) {
        true => Ok(all),
        false => Err(Error::system("cpu", format!("this is a bug: the pieces of {} differ in size", c.name()))),
    }
}

/// Element `i` of a piece.
fn element<T: Pod>(piece: &[u8], i: usize) -> T {
    let at = &piece[i * size_of::<T>()..(i + 1) * size_of::<T>()];
    // SAFETY: `at` has the bytes of one plain number; no alignment is assumed.
    unsafe { at.as_ptr().cast::<T>().read_unaligned() }
}

/// Combines terms; with a `dim`, only the elements of this device's block of it.
fn reduce<T: Element>(c: &Call, how: i64, dim: Option<usize>) -> Result<()> {
    let all = exchange::<T>(c)?;
    let out = c.output::<T>();
    let join: fn(T::Acc, T::Acc) -> T::Acc = match combine(how) {
        Combine::Sum => T::Acc::add,
        Combine::Max => T::Acc::maximum,
        Combine::Min => T::Acc::minimum,
    };
    // The block of row `r` of the dims before `dim` begins there in the whole tensor.
    let (len, row, first) = match dim {
        None => (out.len(), out.len(), 0),
        Some(dim) => {
            let (_, n, inner) = split_at_axis(&c.out_shape(), dim);
            (n * inner, c.input(0).shape().dims()[dim] * inner, c.coordinate() * n * inner)
        }
    };
    for (i, out) in out.iter_mut().enumerate() {
        let at = i / len * row + first + i % len;
        if how == TREE {
            *out = tree::<T>(&all, at);
            continue;
        }
        let mut pieces = all.iter().map(|piece| element::<T>(piece, at).to_acc());
        let start = pieces.next().unwrap_or(T::Acc::ZERO);
        *out = T::from_acc(pieces.fold(start, join));
    }
    Ok(())
}

/// Adds element `at` of all pieces in a binary tree over the pieces. Each sum is rounded to the dtype.
fn tree<T: Element>(pieces: &[Arc<[u8]>], at: usize) -> T {
    match pieces {
        [one] => element(one, at),
        _ => {
            let (low, high) = pieces.split_at(pieces.len() / 2);
            T::from_acc(tree::<T>(low, at).to_acc().add(tree::<T>(high, at).to_acc()))
        }
    }
}

fn gather<T: Pod>(c: &Call) -> Result<()> {
    let all = exchange::<T>(c)?;
    let (dim, out) = (c.attr(1) as usize, c.output::<T>());
    let (_, n, inner) = split_at_axis(&c.input(0).shape(), dim);
    for (i, out) in out.iter_mut().enumerate() {
        let (row, rest) = (i / (n * inner * all.len()), i % (n * inner * all.len()));
        let (piece, within) = (rest / (n * inner), rest % (n * inner));
        *out = element::<T>(&all[piece], row * n * inner + within);
    }
    Ok(())
}

/// Takes the slice with this device's number from each piece.
fn transpose<T: Pod>(c: &Call) -> Result<()> {
    let all = exchange::<T>(c)?;
    let out = c.output::<T>();
    let (len, own) = (out.len() / all.len().max(1), c.coordinate());
    for (k, slice) in out.chunks_exact_mut(len.max(1)).enumerate() {
        for (i, out) in slice.iter_mut().enumerate() {
            *out = element::<T>(&all[k], own * len + i);
        }
    }
    Ok(())
}

/// Takes the piece of the device before this one.
fn pass_on<T: Pod>(c: &Call) -> Result<()> {
    let all = exchange::<T>(c)?;
    let before = &all[(c.coordinate() + all.len() - 1) % all.len()];
    for (i, out) in c.output::<T>().iter_mut().enumerate() {
        *out = element::<T>(before, i);
    }
    Ok(())
}
