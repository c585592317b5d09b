//! Declares the instruction set of the fused interpreter.

use crate::loops::Arg;
use perilune_core::ops::elementwise::MapFn;

/// What an op does to the accumulator `a`. An operand `b` is a row of elements, or one value per row for the opcodes
/// named `Broadcast`.
///
/// The table is closed: a `MapFn` without an opcode ends a group of fused ops and runs as a separate loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opcode {
    /// Prefetches the elements that this run reads [`PREFETCH_DISTANCE`] elements later; `a` is unchanged.
    PrefetchNear,
    /// Prefetches the elements that the next run reads, one tile ahead; `a` is unchanged.
    PrefetchNext,
    /// a = b
    Load,
    /// b = a
    Store,
    /// b = a with a non-temporal store where the operand is aligned to cache lines, else as `Store`.
    StoreNt,
    /// Adds `a` to the lanes of the row's sum, which is folded and stored at the row's end.
    Sum,
    /// a = a + b
    Add,
    AddBroadcast,
    /// a = a - b
    Sub,
    SubBroadcast,
    /// a = b - a
    Rsub,
    RsubBroadcast,
    /// a = a * b
    Mul,
    MulBroadcast,
    /// a = a / b
    Div,
    DivBroadcast,
    /// a = b / a
    Rdiv,
    RdivBroadcast,
    /// a = a * a
    Square,
    Neg,
    Abs,
    Relu,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Exp,
    Tanh,
    Sigmoid,
    Sigmoid2,
    Sigmoid2Rest,
    Erf,
}

impl Opcode {
    /// Approximate cycles per vector.
    pub fn cost(self) -> usize {
        match self {
            Opcode::Exp | Opcode::Tanh | Opcode::Sigmoid | Opcode::Sigmoid2 | Opcode::Sigmoid2Rest | Opcode::Erf => 20,
            Opcode::Div
            | Opcode::DivBroadcast
            | Opcode::Rdiv
            | Opcode::RdivBroadcast
            | Opcode::Sqrt
            | Opcode::Reciprocal => 16,
            Opcode::Rsqrt => 32,
            _ => 1,
        }
    }

    pub const fn is_prefetch(self) -> bool {
        matches!(self, Opcode::PrefetchNear | Opcode::PrefetchNext)
    }

    /// Whether the operand is one value per row.
    pub const fn is_broadcast(self) -> bool {
        use Opcode::*;
        matches!(self, AddBroadcast | SubBroadcast | RsubBroadcast | MulBroadcast | DivBroadcast | RdivBroadcast)
    }
}

/// The opcode of a unary function.
pub fn unary_opcode(f: MapFn) -> Option<Opcode> {
    Some(match f {
        MapFn::Neg => Opcode::Neg,
        MapFn::Abs => Opcode::Abs,
        MapFn::Relu => Opcode::Relu,
        MapFn::Sqrt => Opcode::Sqrt,
        MapFn::Rsqrt => Opcode::Rsqrt,
        MapFn::Reciprocal => Opcode::Reciprocal,
        MapFn::Exp => Opcode::Exp,
        MapFn::Tanh => Opcode::Tanh,
        MapFn::Sigmoid => Opcode::Sigmoid,
        MapFn::Sigmoid2 => Opcode::Sigmoid2,
        MapFn::Sigmoid2Rest => Opcode::Sigmoid2Rest,
        MapFn::Erf => Opcode::Erf,
        _ => return None,
    })
}

/// The opcodes of a binary function. The first entry has the accumulator as first operand, the second entry as second
/// operand; each has a variant for a row of elements and one for a row broadcast.
pub fn binary_opcode(f: MapFn) -> Option<[(Opcode, Opcode); 2]> {
    use Opcode::*;
    Some(match f {
        MapFn::Add => [(Add, AddBroadcast); 2],
        MapFn::Mul => [(Mul, MulBroadcast); 2],
        MapFn::Sub => [(Sub, SubBroadcast), (Rsub, RsubBroadcast)],
        MapFn::Div => [(Div, DivBroadcast), (Rdiv, RdivBroadcast)],
        _ => return None,
    })
}

/// The operand of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    None,
    /// A register of the region, element by element.
    View(u16),
    /// One value per row of a register of the region.
    RowBroadcast(u16),
    /// A local buffer, one block long.
    Local(u8),
    /// The sum with that number; the result is stored as one element per row of the register.
    Sum(u8, u16),
}

impl Operand {
    /// The register of the region that the operand reads, if it reads one.
    pub fn view(self) -> Option<u16> {
        match self {
            Operand::View(v) | Operand::RowBroadcast(v) | Operand::Sum(_, v) => Some(v),
            _ => None,
        }
    }
}

/// One instruction.
#[derive(Clone, Copy, Debug)]
pub struct FusedOp {
    pub opcode: Opcode,
    pub operand: Operand,
}

/// Limits of a group of ops: length, local buffers, sums.
pub const MAX_OPS: usize = 96;
pub const MAX_LOCALS: usize = 12;
pub const MAX_SUMS: usize = 4;
/// Maximum elements of a block.
pub const BLOCK: usize = 128;
/// How many elements ahead `Opcode::PrefetchNear` reads.
pub const PREFETCH_DISTANCE: usize = 2 * BLOCK;

/// Runs all ops on `rows` rows of `cols` elements.
pub type FusedLoop = unsafe fn(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize);
