//! Implements collectives between virtual devices: each sends its pieces and combines what all have sent, in the order of their
//! coordinates. Every device therefore computes the same bits. 16-bit floats are summed in f32 and rounded once, or not at all.
//!
//! Sending and receiving are separate, so that messages are under way while other kernels run.

use super::{Call, Element, by_size, by_type, index::dense, split_at_axis};
use crate::math::Number;
use crate::memory::Pod;
use perilune_core::error::{Error, Result};
use perilune_core::host_memory;
use perilune_core::mesh::Combine;
use perilune_core::ops::collective::{
    ALL_GATHER, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER, TREE, axis, code_of, combine, sender,
};
use perilune_plan::{Peers, Ticket};
use std::sync::Arc;

/// Runs a collective to its end.
pub fn run(c: &Call) -> Result<()> {
    receive(c, send(c)?)
}

fn peers<'a>(c: &'a Call) -> Result<&'a dyn Peers> {
    c.context.peers.ok_or_else(|| Error::system("cpu", format!("this is a bug: {} on a single device", c.name())))
}

/// Sends a tensor to one other device.
pub fn send_transfer(c: &Call) -> Result<()> {
    let (axis, to, number) = (axis(&c.routine.attrs), c.attr(1) as usize, c.attr(2) as u64);
    let mut send = |piece: &[u8]| peers(c)?.send_to(axis, to, number, piece);
    by_size!(c.input(0).dtype, with_piece(c, 0, &mut send))?;
    c.output::<i32>().fill(0);
    Ok(())
}

/// Waits for a tensor of one other device.
pub fn receive_transfer(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), receive_elements(c))
}

fn receive_elements<T: Pod>(c: &Call) -> Result<()> {
    let sent = peers(c)?.receive_from(axis(&c.routine.attrs), c.attr(1) as usize, c.attr(2) as u64)?;
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

/// Sends the pieces of this device, one behind the other.
pub fn send(c: &Call) -> Result<Ticket> {
    let (peers, axis, n) = (peers(c)?, axis(&c.routine.attrs), c.num_inputs());
    let mut ticket = None;
    if n == 1 {
        let mut send = |piece: &[u8]| {
            ticket = Some(peers.send(axis, piece)?);
            Ok(())
        };
        by_size!(c.input(0).dtype, with_piece(c, 0, &mut send))?;
    }
    if let Some(ticket) = ticket {
        return Ok(ticket);
    }
    let bytes = |k: usize| c.in_shape(k).numel() * c.input(k).dtype.size();
    let mut message = host_memory::reserve("cpu", (0..n).map(bytes).sum())?;
    for k in 0..n {
        let mut append = |piece: &[u8]| {
            message.extend_from_slice(piece);
            Ok(())
        };
        by_size!(c.input(k).dtype, with_piece(c, k, &mut append))?;
    }
    peers.send(axis, &message)
}

/// Calls `f` with the bytes of operand `k`, in row-major order.
fn with_piece<T: Pod>(c: &Call, k: usize, f: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let own = dense::<T>(&c.input(k))?;
    // SAFETY: plain numbers have no padding, and every byte of them is initialized.
    f(unsafe { std::slice::from_raw_parts(own.as_ptr().cast::<u8>(), size_of_val(&*own)) })
}

/// Computes the results from what each device along the axis has sent.
pub fn receive(c: &Call, ticket: Ticket) -> Result<()> {
    let all = peers(c)?.receive(ticket)?;
    let terms = c.input(0).dtype;
    let bytes = |k: usize| c.in_shape(k).numel() * terms.size();
    let total: usize = (0..c.num_inputs()).map(bytes).sum();
    if all.iter().any(|piece| piece.len() != total) {
        return Err(Error::system("cpu", format!("this is a bug: the pieces of {} differ in size", c.name())));
    }
    let mut first = 0;
    for k in 0..c.num_inputs() {
        let pieces: Vec<&[u8]> = all.iter().map(|piece: &Arc<[u8]>| &piece[first..first + bytes(k)]).collect();
        first += bytes(k);
        match c.routine.op {
            op if op == &ALL_GATHER => by_size!(c.out_dtype(), gather(c, k, &pieces)),
            op if op == &ALL_TO_ALL => by_size!(c.out_dtype(), transpose(c, k, &pieces)),
            op if op == &COLLECTIVE_PERMUTE => by_size!(c.out_dtype(), take(c, k, &pieces)),
            _ if terms != c.out_dtype() => by_type!(terms, widened(c, k, &pieces)),
            _ => by_type!(terms, reduce(c, k, &pieces)),
        }
    }
    Ok(())
}

/// Element `i` of a piece.
fn element<T: Pod>(piece: &[u8], i: usize) -> T {
    let at = &piece[i * size_of::<T>()..(i + 1) * size_of::<T>()];
    // SAFETY: `at` has the bytes of one plain number; no alignment is assumed.
    unsafe { at.as_ptr().cast::<T>().read_unaligned() }
}

/// Combines terms; of a reduce-scatter, only the elements of this device's block.
fn reduce<T: Element>(c: &Call, k: usize, pieces: &[&[u8]]) {
    let how = code_of(c.routine.op, c.attrs_of(k)).unwrap_or_default();
    let (out, _) = c.output_of::<T>(k);
    let place = place(c, k, out.len());
    for (i, out) in out.iter_mut().enumerate() {
        *out =
            if how == TREE { tree::<T>(pieces, place(i)) } else { T::from_acc(combined::<T>(how, pieces, place(i))) };
    }
}

/// Adds 16-bit floats in f32, as [`reduce`], and does not round the sum.
fn widened<T: Element>(c: &Call, k: usize, pieces: &[&[u8]]) {
    let how = code_of(c.routine.op, c.attrs_of(k)).unwrap_or_default();
    let (out, _) = c.output_of::<T::Acc>(k);
    let place = place(c, k, out.len());
    for (i, out) in out.iter_mut().enumerate() {
        *out = combined::<T>(how, pieces, place(i));
    }
}

/// Where element `i` of a result is in a piece; the result has `n` elements.
fn place(c: &Call, k: usize, n: usize) -> impl Fn(usize) -> usize + use<> {
    // The block of row `r` of the dims before the divided one begins there in the whole tensor.
    let (len, row, first) = if c.routine.op == &REDUCE_SCATTER {
        let dim = c.attrs_of(k)[1] as usize;
        let devices = c.attrs_of(k)[2] as usize;
        let (_, whole, inner) = split_at_axis(&c.in_shape(k), dim);
        let block = whole / devices * inner;
        (block, whole * inner, c.coordinate() * block)
    } else {
        (n, n, 0)
    };
    move |i| i / len * row + first + i % len
}

/// Combines element `at` of all pieces in their order.
fn combined<T: Element>(how: i64, pieces: &[&[u8]], at: usize) -> T::Acc {
    let join: fn(T::Acc, T::Acc) -> T::Acc = match combine(how) {
        Combine::Sum => T::Acc::add,
        Combine::Max => T::Acc::maximum,
        Combine::Min => T::Acc::minimum,
    };
    let mut terms = pieces.iter().map(|piece| element::<T>(piece, at).to_acc());
    let start = terms.next().unwrap_or(T::Acc::ZERO);
    terms.fold(start, join)
}

/// Adds element `at` of all pieces in a binary tree over the pieces. Each sum is rounded to the dtype.
fn tree<T: Element>(pieces: &[&[u8]], at: usize) -> T {
    match pieces {
        [one] => element(one, at),
        _ => {
            let (low, high) = pieces.split_at(pieces.len() / 2);
            T::from_acc(tree::<T>(low, at).to_acc().add(tree::<T>(high, at).to_acc()))
        }
    }
}

fn gather<T: Pod>(c: &Call, k: usize, pieces: &[&[u8]]) {
    let (dim, (out, _)) = (c.attrs_of(k)[1] as usize, c.output_of::<T>(k));
    let (_, n, inner) = split_at_axis(&c.in_shape(k), dim);
    for (i, out) in out.iter_mut().enumerate() {
        let (row, rest) = (i / (n * inner * pieces.len()), i % (n * inner * pieces.len()));
        let (piece, within) = (rest / (n * inner), rest % (n * inner));
        *out = element::<T>(pieces[piece], row * n * inner + within);
    }
}

/// Takes the slice with this device's number from each piece.
fn transpose<T: Pod>(c: &Call, k: usize, pieces: &[&[u8]]) {
    let (out, _) = c.output_of::<T>(k);
    let (len, own) = (out.len() / pieces.len().max(1), c.coordinate());
    for (piece, slice) in pieces.iter().zip(out.chunks_exact_mut(len.max(1))) {
        for (i, out) in slice.iter_mut().enumerate() {
            *out = element::<T>(piece, own * len + i);
        }
    }
}

/// Takes the piece of the one device that sends to this one.
fn take<T: Pod>(c: &Call, k: usize, pieces: &[&[u8]]) {
    let piece = sender(c.attrs_of(k), c.coordinate()).and_then(|from| pieces.get(from)).copied().unwrap_or_default();
    for (i, out) in c.output_of::<T>(k).0.iter_mut().enumerate() {
        *out = element::<T>(piece, i);
    }
}
