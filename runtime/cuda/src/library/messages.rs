//! Plans collectives as messages between GPUs of which one cannot read the memory of another, as those of several processes.
//!
//! NCCL adds terms where its sum is as exact as the order of the coordinates: f32, f64 and integers, in an order that depends on the
//! devices. Other combinations (16-bit floats, which are added in f32; maxima and minima, which keep NaN; trees) get the
//! terms of one slice from all devices in scratch memory and combine them with the kernel of `collective.rs`: the bytes over the links are
//! those of a reduce-scatter. NCCL moves contiguous blocks only, so blocks of rows are copied to scratch memory or from it.

use super::collective::{Collective, Kind, Phase, Task};
use perilune_core::DType;
use perilune_core::mesh::Combine;
use perilune_core::ops::collective::{TREE, WIDENED, combine};

/// A place in the memory of this device, in bytes from the start of a piece, of its result or of the scratch memory of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Piece(usize),
    Result(usize),
    Scratch(usize),
}

/// One function of NCCL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// Adds `n` elements of all devices.
    Sum {
        from: Place,
        to: Place,
        n: usize,
        dtype: DType,
    },
    /// Adds the slices with this device's number; each has `n` elements.
    SumSlices {
        from: Place,
        to: Place,
        n: usize,
        dtype: DType,
    },
    /// Joins pieces of `nbytes`.
    Gather {
        from: Place,
        to: Place,
        nbytes: usize,
    },
    Send {
        from: Place,
        nbytes: usize,
        peer: usize,
    },
    Receive {
        to: Place,
        nbytes: usize,
        peer: usize,
    },
}

/// What a device queues on the lane, one step after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// They are in flight together.
    Messages(Vec<Message>),
    /// Copies `rows` rows of `nbytes`, which start `apart` bytes from each other: where they are read, and where they are written.
    Rows { from: Place, to: Place, nbytes: usize, apart: [usize; 2], rows: usize },
    /// Launches a phase on the pieces of all devices, `apart` bytes from each other in scratch memory.
    Launch { phase: Phase, first: usize, apart: usize },
}

/// The steps of a collective of one tensor, and the scratch bytes that they take.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Messages {
    pub steps: Vec<Step>,
    pub scratch: usize,
}

/// Whether NCCL adds the terms.
fn is_native(code: i64, dtype: DType) -> bool {
    let exact = matches!(dtype, DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U8);
    code != TREE && code != WIDENED && combine(code) == Combine::Sum && exact
}

/// A message from each device to each other one and to itself: `slice` says where the bytes for a device are, and how many; `place`
/// where those of a device go.
fn exchange(ranks: usize, slice: impl Fn(usize) -> (Place, usize), own: impl Fn(usize) -> (Place, usize)) -> Step {
    let sends = (0..ranks).map(|peer| (peer, slice(peer)));
    let sends = sends.map(|(peer, (from, nbytes))| Message::Send { from, nbytes, peer });
    let receives = (0..ranks).map(|peer| (peer, own(peer)));
    let receives = receives.map(|(peer, (to, nbytes))| Message::Receive { to, nbytes, peer });
    let some = |m: &Message| !matches!(m, Message::Send { nbytes: 0, .. } | Message::Receive { nbytes: 0, .. });
    Step::Messages(sends.chain(receives).filter(some).collect())
}

impl Collective {
    /// The steps of the device at `coordinate` of `ranks`; both are checked as in [`Collective::phases`].
    pub fn messages(&self, coordinate: usize, ranks: usize) -> perilune_core::error::Result<Messages> {
        let mut phases = self.phases(coordinate, ranks, false)?.into_iter();
        let (size, dtype) = (self.size, self.dtype);
        let piece = self.nbytes;
        let phase = |phase: Option<Phase>, out: usize| phase.map(|p| Phase { first: 0, step: 0, out, ..p });
        let (steps, scratch) = match self.kind {
            Kind::AllReduce { n } if is_native(self.code, dtype) => {
                (vec![Step::Messages(vec![Message::Sum { from: Place::Piece(0), to: Place::Result(0), n, dtype }])], 0)
            }
            Kind::AllReduce { n } => {
                // Each device combines one slice, and sends it to all.
                let step = n.div_ceil(ranks).next_multiple_of(16 / size);
                let first = |k: usize| (k * step).min(n);
                let count = |k: usize| first(k + 1) - first(k);
                let (own, of_result) = (count(coordinate), self.result_size);
                let terms = exchange(
                    ranks,
                    |to| (Place::Piece(first(to) * size), count(to) * size),
                    |from| (Place::Scratch(from * step * size), own * size),
                );
                let others = |k: usize, count: usize| if k == coordinate { 0 } else { count * of_result };
                let results = exchange(
                    ranks,
                    |to| (Place::Result(first(coordinate) * of_result), others(to, own)),
                    |from| (Place::Result(first(from) * of_result), others(from, count(from))),
                );
                let combined = phases.next().map(|p| {
                    let grid = self.blocks(own.div_ceil(self.vector / size), 1);
                    Phase { task: Task::Reduce { n: own, len: own, row: own }, grid, ..p }
                });
                let launch = phase(combined, first(coordinate) * of_result);
                let launch = launch.into_iter().map(|phase| Step::Launch { phase, first: 0, apart: step * size });
                (std::iter::once(terms).chain(launch).chain([results]).collect(), ranks * step * size)
            }
            Kind::ReduceScatter { rows, block, .. } => {
                let (nbytes, n) = (rows * block * size, rows * block);
                // The blocks of each device, one behind the other.
                let pack = |k: usize| Step::Rows {
                    from: Place::Piece(k * block * size),
                    to: Place::Scratch(k * nbytes),
                    nbytes: block * size,
                    apart: [ranks * block * size, block * size],
                    rows,
                };
                let is_packed = rows > 1;
                let packed = if is_packed { (0..ranks).map(pack).collect() } else { Vec::new() };
                let at = |k: usize| if is_packed { Place::Scratch(k * nbytes) } else { Place::Piece(k * nbytes) };
                let first = if is_packed { ranks * nbytes } else { 0 };
                if is_native(self.code, dtype) {
                    let sum = Message::SumSlices { from: at(0), to: Place::Result(0), n, dtype };
                    (packed.into_iter().chain([Step::Messages(vec![sum])]).collect(), first)
                } else {
                    let terms =
                        exchange(ranks, |to| (at(to), nbytes), |from| (Place::Scratch(first + from * nbytes), nbytes));
                    let combined = phases.next().map(|p| {
                        let len = block / (self.vector / size);
                        Phase { task: Task::Reduce { n, len, row: len }, ..p }
                    });
                    let launch = phase(combined, 0);
                    let launch = launch.into_iter().map(|phase| Step::Launch { phase, first, apart: nbytes });
                    (packed.into_iter().chain([terms]).chain(launch).collect(), first + ranks * nbytes)
                }
            }
            Kind::AllGather { rows: 0 | 1, .. } => {
                let all = Message::Gather { from: Place::Piece(0), to: Place::Result(0), nbytes: piece };
                (vec![Step::Messages(vec![all])], 0)
            }
            Kind::AllGather { rows, block, .. } => {
                let all = Message::Gather { from: Place::Piece(0), to: Place::Scratch(0), nbytes: piece };
                let spread = |k: usize| Step::Rows {
                    from: Place::Scratch(k * piece),
                    to: Place::Result(k * block * size),
                    nbytes: block * size,
                    apart: [block * size, ranks * block * size],
                    rows,
                };
                (std::iter::once(Step::Messages(vec![all])).chain((0..ranks).map(spread)).collect(), ranks * piece)
            }
            Kind::AllToAll { block, .. } => {
                let nbytes = block * size;
                let slices = exchange(
                    ranks,
                    |to| (Place::Piece(to * nbytes), nbytes),
                    |at| (Place::Result(at * nbytes), nbytes),
                );
                (vec![slices], 0)
            }
            Kind::Permute { ref senders, .. } => {
                let is_to = |to: usize| senders.get(to) == Some(&coordinate);
                let from = senders.get(coordinate).copied();
                let moved = exchange(
                    ranks,
                    |to| (Place::Piece(0), if is_to(to) { piece } else { 0 }),
                    |at| (Place::Result(0), if from == Some(at) { piece } else { 0 }),
                );
                (vec![moved], 0)
            }
        };
        Ok(Messages { steps, scratch })
    }
}
