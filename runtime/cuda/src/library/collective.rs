//! Plans collectives between GPUs whose memory each of them can read: phases of one launch, between which the devices along the axis
//! wait for each other (`executable/mesh/mod.rs`).
//!
//! A device reads the pieces of the others by address and writes its own result. A large all-reduce takes two phases: each device
//! combines one slice of the pieces, then all copy the slices of the others. That moves 2 (p - 1) / p of a piece over the links of each
//! of p devices instead of p - 1 pieces. Both orders of work combine an element in the order of the coordinates, so they give the same
//! bits, which are those of `runtime/cpu/src/library/collective.rs`.
//!
//! Terms that a sum widens are read as they are, and only slices of the sum in f32 are copied: two devices exchange the terms alone.

use super::call::{Call, Input, sized, typed};
use super::strided::Strided;
use crate::launch::{Arg, Function, Launch, Props, Work};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_core::ops::Op;
use perilune_core::ops::collective::{
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, TREE, attrs_of, axis, code_of, is_collective, sender,
};
use perilune_core::{DType, Layout, Shape};
use perilune_plan::ir::{Library, Operand, Program, Storage};
use std::sync::Arc;

/// Most devices along an axis: `collective::MOST`.
pub const MOST: usize = 64;
/// Threads of a block: `collective::BLOCK`.
pub const BLOCK: usize = 256;
/// Bytes of a piece above which an all-reduce of more than two devices takes two phases. A phase more costs some 10 µs.
const ONE_PHASE: usize = 256 << 10;
/// Bytes to which the memory of a value is aligned (plan's `memory`).
const ALIGN: usize = 256;
/// Blocks of a launch for each multiprocessor.
const BLOCKS: usize = 8;
/// The most elements that a thread adds in a tree at once.
const MOST_IN_TREE: usize = 8;

/// Whether an op is a collective.
pub fn is(op: &Op) -> bool {
    is_collective(op)
}

/// A collective of a program: plain data, without a device.
#[derive(Clone, Debug)]
pub struct Collective {
    pub name: &'static str,
    pub axis: Axis,
    /// Where the piece of this device is, contiguous, and where its result is.
    pub input: Arg,
    pub output: Arg,
    /// Bytes of a piece.
    pub nbytes: usize,
    /// Whether the result overwrites the piece. Then an all-reduce takes two phases: a device writes only what no other one reads.
    pub in_place: bool,
    /// Distinct functions of its phases.
    pub functions: Vec<Arc<Function>>,
    pub(super) kind: Kind,
    /// The dtype of a result.
    pub(super) dtype: DType,
    /// The attribute that stands for the combination, if it combines terms.
    pub(super) code: i64,
    /// Bytes of an element of a piece and of one of a result.
    pub size: usize,
    pub result_size: usize,
    /// Bytes of a vector of `reduce` in a piece, and of a word of the copies.
    pub vector: usize,
    pub word: usize,
    most_blocks: usize,
}

/// Lengths are in elements.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    AllReduce {
        n: usize,
    },
    AllGather {
        rows: usize,
        block: usize,
        devices: usize,
    },
    ReduceScatter {
        rows: usize,
        block: usize,
        devices: usize,
    },
    AllToAll {
        block: usize,
        devices: usize,
    },
    /// For each device, the one that sends to it.
    Permute {
        n: usize,
        senders: Arc<[usize]>,
    },
}

/// What a launch of a phase does; the lengths are those of its kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// `n` elements of the result, in rows of `len` vectors that start `row` vectors apart in a piece. (`kernels/collective/reduce.cuh`)
    Reduce { n: usize, len: usize, row: usize },
    /// `total` bytes from all devices, or from all others, `step` bytes from each. (`kernels/collective/gather.cuh`)
    Spans { total: usize, step: usize, others: bool },
    /// `total` bytes from the device at `from`.
    Span { total: usize, from: usize },
    /// Rows of a block of `block` words from each device, `words` of them in a piece.
    Rows { words: usize, block: usize },
}

/// One launch of a collective.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phase {
    /// Index in `Collective::functions`.
    pub function: usize,
    pub task: Task,
    /// Whether it reads the results of the phase before rather than the pieces.
    pub reads_results: bool,
    /// Where it begins to read, in bytes: of device k at `first + k * step`.
    pub first: usize,
    pub step: usize,
    /// Where it begins to write, in bytes.
    pub out: usize,
    /// Blocks; no launch if one is 0.
    pub grid: [u32; 3],
}

/// Lowers a call that moves one or several tensors: copies that make its pieces contiguous, and the collectives, which run side by
/// side. Operands that lie one behind the other, as do their results, are one piece, and one collective.
pub fn parts(program: &Program, l: &Library, props: &Props) -> Result<(Work, Vec<Collective>)> {
    if let Some(nbytes) = flat_bytes(program, l) {
        return Ok((Work { launches: Vec::new(), scratch_bytes: 0 }, vec![flat(program, l, nbytes, props)?]));
    }
    let (mut work, mut all) = (Work { launches: Vec::new(), scratch_bytes: 0 }, Vec::new());
    for k in 0..l.inputs.len() {
        let (own, mut collective) = part(program, &member(l, k), props)?;
        let shift = |arg: &mut Arg| {
            if let Arg::Scratch(at) = arg {
                *at += work.scratch_bytes;
            }
        };
        shift(&mut collective.input);
        let mut launches = own.launches;
        launches.iter_mut().flat_map(|launch| &mut launch.args).for_each(shift);
        work.launches.extend(launches);
        work.scratch_bytes = (work.scratch_bytes + own.scratch_bytes).next_multiple_of(256);
        all.push(collective);
    }
    Ok((work, all))
}

/// The part of a call that moves its `k`-th tensor.
fn member(l: &Library, k: usize) -> Library {
    Library {
        attrs: attrs_of(l.op, &l.attrs, k).iter().copied().collect(),
        inputs: vec![l.inputs[k]],
        dtypes: vec![l.dtypes[k]],
        outputs: vec![l.outputs[k]],
        layouts: vec![l.layouts[k]],
        ..l.clone()
    }
}

/// The bytes from the first operand of an all-reduce to the end of the last, if these lie one behind the other, and the results where
/// the operands are or, of another dtype, as many elements from the first. What is between them is added too, and never read.
fn flat_bytes(program: &Program, l: &Library) -> Option<usize> {
    if l.op != &ALL_REDUCE {
        return None;
    }
    let (mut first, mut end) = (None, 0);
    for (x, y) in l.inputs.iter().zip(&l.outputs) {
        let Operand::View(x, layout) = x else { return None };
        let (x, y) = (&program.values[x.0 as usize], &program.values[y.0 as usize]);
        let (Storage::Arena(at), Storage::Arena(to)) = (x.storage, y.storage) else { return None };
        let follows = first.is_none() || at == usize::next_multiple_of(end, ALIGN);
        let whole = layout.is_contiguous() && layout.offset == 0 && layout.numel() == x.shape.numel();
        let (low, low_of_results) = *first.get_or_insert((at, to));
        let growth = y.dtype.size() / x.dtype.size();
        let is_beside = if growth == 1 { at == to } else { to == low_of_results + growth * (at - low) };
        if !follows || !whole || !is_beside || x.nbytes() == 0 {
            return None;
        }
        end = at + x.nbytes();
    }
    Some(end - first?.0)
}

/// The all-reduce of a flat buffer.
fn flat(program: &Program, l: &Library, nbytes: usize, props: &Props) -> Result<Collective> {
    let dtype = l.dtypes[0];
    let n = nbytes / dtype.size();
    // One tensor of as many elements, in the place of the first.
    let mut program = Program { kernels: Vec::new(), in_flight: Vec::new(), ..program.clone() };
    let mut one = member(l, 0);
    let shape = Shape::of(&[n]);
    one.inputs = match l.inputs[0] {
        Operand::View(x, _) => {
            program.values[x.0 as usize].shape = shape;
            vec![Operand::View(x, Layout::contiguous(shape))]
        }
        constant => vec![constant],
    };
    program.values[one.outputs[0].0 as usize].shape = shape;
    one.layouts = vec![Layout::contiguous(shape)];
    Ok(part(&program, &one, props)?.1)
}

/// Lowers the collective of one tensor.
fn part(program: &Program, l: &Library, props: &Props) -> Result<(Work, Collective)> {
    let mut c = Call::new(program, l)?;
    let (x, terms, dtype, to) = (c.input(0)?, l.dtypes[0], c.out_dtype(), c.out_aligned());
    let (size, result_size) = (terms.size(), dtype.size());
    let dims = x.shape();
    let split = |d: usize| {
        let dims = dims.dims();
        (dims[..d].iter().product::<usize>(), dims[d..].iter().product::<usize>())
    };
    let kind = if l.op == &ALL_REDUCE {
        Kind::AllReduce { n: dims.numel() }
    } else if l.op == &COLLECTIVE_PERMUTE {
        let senders = (0..c.attr(1) as usize).filter_map(|at| sender(&l.attrs, at)).collect();
        Kind::Permute { n: dims.numel(), senders }
    } else {
        let (rows, block) = split(c.attr(1) as usize);
        let devices = c.attr(2) as usize;
        if l.op == &ALL_GATHER {
            Kind::AllGather { rows, block, devices }
        } else if l.op == &ALL_TO_ALL {
            Kind::AllToAll { block: block / devices, devices }
        } else {
            Kind::ReduceScatter { rows, block: block / devices, devices }
        }
    };
    let nbytes = dims.numel() * size;
    let in_place = match (&l.inputs[0], l.op == &ALL_REDUCE) {
        (Operand::View(x, _), true) => {
            matches!(program.values[x.0 as usize].storage, Storage::Arena(_))
                && program.values[x.0 as usize].storage == program.values[l.outputs[0].0 as usize].storage
        }
        _ => false,
    };
    let (input, from) = match (&x.pointer, x.layout.is_contiguous()) {
        (Arg::Value(..), true) => (x.pointer.clone(), x.aligned),
        _ => (pack(&mut c, &x, terms)?, 16),
    };
    // Of a piece, the bytes of as many elements as a result has in words that its address is aligned to.
    let from = if to < 16 { from.min((to / result_size).max(1) * size) } else { from };
    // A power of two that divides the address of every vector, and the bytes of every block.
    let aligned = |block: usize| from.min(1 << (block * size).trailing_zeros().min(4)).max(size);
    let (vector, word) = match kind {
        Kind::AllReduce { .. } if size < result_size => (from, to),
        Kind::AllReduce { .. } => (from, from),
        Kind::ReduceScatter { block, .. } => (aligned(block), size),
        Kind::AllGather { block, .. } | Kind::AllToAll { block, .. } => (size, aligned(block)),
        Kind::Permute { n, .. } => (size, aligned(n)),
    };
    // A sum in a tree keeps a partial sum of each level in registers, which are too few for 16 elements.
    let code = code_of(l.op, &l.attrs).unwrap_or_default();
    let vector = if code == TREE { vector.min(MOST_IN_TREE * size) } else { vector };
    let index = if nbytes < 1 << 31 { "u32" } else { "u64" };
    // By the attribute of the combination.
    let reduce = |how: i64, in_rows: bool| {
        let (t, out) = (typed(terms), typed(dtype));
        let how = ["Sum", "Max", "Min", "Tree", "Widened"][how as usize];
        let v = vector / size;
        let body = format!("collective::reduce<{t}, collective::{how}<{t}>, {v}, {index}, {in_rows}>");
        function("reduce", &format!("{out}* out, i64 ranks, i64 n, i64 len, i64 row"), &body, "out, ranks, n, len, row")
    };
    let spans = |others: bool| {
        let body = format!("collective::spans<{}, {others}>", sized(word));
        let params = "u8* out, i64 ranks, i64 own, i64 total, i64 step";
        function("gather", params, &body, "out, ranks, own, total, step")
    };
    let functions = match kind {
        Kind::AllReduce { .. } if nbytes <= ONE_PHASE && !in_place => vec![reduce(code, false)],
        Kind::AllReduce { .. } => vec![reduce(code, false), spans(true)],
        Kind::ReduceScatter { rows, .. } => vec![reduce(code, rows > 1)],
        Kind::AllGather { rows: 0 | 1, .. } | Kind::AllToAll { .. } | Kind::Permute { .. } => vec![spans(false)],
        Kind::AllGather { .. } => {
            let w = sized(word);
            let params = format!("{w}* out, i64 ranks, i64 own, i64 words, i64 block");
            let body = format!("collective::rows<{w}, {index}>");
            vec![function("gather_rows", &params, &body, "out, ranks, own, words, block")]
        }
    };
    let most_blocks = BLOCKS * props.sms as usize;
    let (name, axis, output) = (l.op.name, axis(&l.attrs), c.output(0));
    let collective = Collective {
        name,
        axis,
        input,
        output,
        nbytes,
        in_place,
        functions,
        kind,
        dtype,
        code,
        size,
        result_size,
        vector,
        word,
        most_blocks,
    };
    Ok((c.finish(), collective))
}

/// Copies the input to contiguous scratch.
pub(super) fn pack(c: &mut Call, x: &Input, dtype: DType) -> Result<Arg> {
    let to = Arg::Scratch(c.scratch(x.shape().numel() * dtype.size()));
    let space = Strided::new(x.shape().dims(), &[x.strides(), Layout::contiguous(x.shape()).strides()]);
    let (t, n, narrow) = (sized(dtype.size()), space.numel(), space.narrow());
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("{t}* out"), to.clone()),
        (&*super::by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
    ];
    c.each("pack_piece", "movement/strided_pad.cuh", &params, "library::copy(x, out, strided, n);", n)?;
    Ok(to)
}

fn function(label: &str, params: &str, body: &str, args: &str) -> Arc<Function> {
    let header = if label == "reduce" { "reduce" } else { "gather" };
    let text = format!(
        "#include \"collective/{header}.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__({BLOCK}) KERNEL(const __grid_constant__ collective::Pieces pieces, {params}) {{\n    \
         {body}(pieces, {args});\n}}\n"
    );
    Arc::new(Function { label: format!("collective_{label}"), text })
}

/// The function that spreads a bad index along an axis: of the addresses of `halt` words, a fault cell, ranks, coordinate and axis.
pub fn agree() -> Arc<Function> {
    let text = format!(
        "#include \"collective/agree.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__({MOST}) KERNEL(const __grid_constant__ collective::Pieces words, Fault* fault, i64 ranks, i64 own, i64 axis) {{\n    \
         collective::agree(words, fault, ranks, own, axis);\n}}\n"
    );
    Arc::new(Function { label: "collective_agree".into(), text })
}

impl Collective {
    /// Whether its piece is copied to scratch, which other kernels use too: then no other kernel may run beside it.
    pub fn is_staged(&self) -> bool {
        matches!(self.input, Arg::Scratch(_))
    }

    /// For each device, the one that sends to it, if it is a permutation.
    pub fn senders(&self) -> Option<&[usize]> {
        match &self.kind {
            Kind::Permute { senders, .. } => Some(senders),
            _ => None,
        }
    }

    /// Whether there is nothing to exchange.
    pub fn is_empty(&self) -> bool {
        self.nbytes == 0
    }

    /// The launches of one device of several, as an example: without the arguments, which depend on the run.
    pub fn example(&self) -> Result<Work> {
        let ranks = match self.kind {
            Kind::AllReduce { .. } => 4,
            Kind::Permute { ref senders, .. } => senders.len(),
            Kind::AllGather { devices, .. } | Kind::ReduceScatter { devices, .. } | Kind::AllToAll { devices, .. } => {
                devices
            }
        };
        let launch = |phase: &Phase| Launch {
            function: self.functions[phase.function].clone(),
            grid: phase.grid,
            block: [BLOCK as u32, 1, 1],
            shared_bytes: 0,
            args: Vec::new(),
        };
        let launches = self.phases(0, ranks, false)?.iter().map(launch).collect();
        Ok(Work { launches, scratch_bytes: 0 })
    }

    /// The blocks of a launch of so many threads for each of some pieces.
    pub(super) fn blocks(&self, threads: usize, pieces: usize) -> [u32; 3] {
        let x = threads.div_ceil(BLOCK).min((self.most_blocks / pieces).max(1));
        [x as u32, pieces as u32, 1]
    }

    /// The launches of the device at `coordinate` of `ranks`. `copied`: the others read copies of its pieces, in one phase.
    pub fn phases(&self, coordinate: usize, ranks: usize, copied: bool) -> Result<Vec<Phase>> {
        let devices = match self.kind {
            Kind::AllReduce { .. } => ranks,
            Kind::Permute { ref senders, .. } => senders.len(),
            Kind::AllGather { devices, .. } | Kind::ReduceScatter { devices, .. } | Kind::AllToAll { devices, .. } => {
                devices
            }
        };
        if ranks > MOST {
            let message = format!("{} over {ranks} devices along {}; at most {MOST}", self.name, self.axis.name());
            return Err(Error::system("cuda", message));
        }
        if coordinate >= ranks || ranks != devices {
            let axis = self.axis.name();
            let message = format!("this is a bug: {} of {devices} devices along {axis}, which has {ranks}", self.name);
            return Err(Error::system("cuda", message));
        }
        let blocks = |threads: usize, pieces: usize| self.blocks(threads, pieces);
        let phase = |function, task, reads_results, [first, step, out]: [usize; 3], grid| Phase {
            function,
            task,
            reads_results,
            first,
            step,
            out,
            grid,
        };
        let v = self.vector / self.size;
        Ok(match self.kind {
            Kind::AllReduce { n } if copied || !self.in_place && (ranks <= 2 || self.functions.len() == 1) => {
                vec![phase(0, Task::Reduce { n, len: n, row: n }, false, [0; 3], blocks(n.div_ceil(v), 1))]
            }
            Kind::AllReduce { n } => {
                let step = n.div_ceil(ranks).next_multiple_of(16 / self.size);
                let low = (coordinate * step).min(n);
                let own = (low + step).min(n) - low;
                let (at, to) = (low * self.size, low * self.result_size);
                let (total, step) = (n * self.result_size, step * self.result_size);
                let reduce = Task::Reduce { n: own, len: own, row: own };
                let copy = Task::Spans { total, step, others: true };
                vec![
                    phase(0, reduce, false, [at, 0, to], blocks(own.div_ceil(v), 1)),
                    phase(1, copy, true, [0, step, 0], blocks(step.div_ceil(self.word), ranks)),
                ]
            }
            Kind::ReduceScatter { rows, block, .. } => {
                let (n, first) = (rows * block, coordinate * block * self.size);
                let task = Task::Reduce { n, len: block / v, row: ranks * block / v };
                vec![phase(0, task, false, [first, 0, 0], blocks(n / v, 1))]
            }
            Kind::AllGather { rows: 0 | 1, block, .. } => {
                let step = block * self.size;
                let task = Task::Spans { total: ranks * step, step, others: false };
                vec![phase(0, task, false, [0; 3], blocks(step / self.word, ranks))]
            }
            Kind::Permute { n, ref senders } => {
                let (from, total) = (senders[coordinate], n * self.size);
                vec![phase(0, Task::Span { total, from }, false, [0; 3], blocks(total / self.word, 1))]
            }
            Kind::AllToAll { block, .. } => {
                // The slice with this device's number of every piece.
                let step = block * self.size;
                let task = Task::Spans { total: ranks * step, step, others: false };
                vec![phase(0, task, false, [coordinate * step, 0, 0], blocks(step / self.word, ranks))]
            }
            Kind::AllGather { rows, block, .. } => {
                let (words, block) = (rows * block * self.size / self.word, block * self.size / self.word);
                vec![phase(0, Task::Rows { words, block }, false, [0; 3], blocks(words, ranks))]
            }
        })
    }
}

/// A range of bytes that a phase moves as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// The device that has it, and where: in bytes from the start of its piece or result.
    pub rank: usize,
    pub from: usize,
    /// Where it goes, in bytes from the start of this device's result.
    pub to: usize,
    pub nbytes: usize,
}

impl Phase {
    /// The ranges that the phase moves, those of the next device first, so that the links to different devices are used at the same time;
    /// `None` if it computes, or moves short rows.
    pub fn spans(&self, coordinate: usize, ranks: usize) -> Option<Vec<Span>> {
        let from = |rank: usize| self.first + rank * self.step;
        match self.task {
            Task::Spans { total, step, others } => {
                let turns =
                    (1..=ranks).map(|k| (coordinate + k) % ranks).filter(|rank| !(others && *rank == coordinate));
                let span = |rank: usize| {
                    let begin = rank * step;
                    let nbytes = step.min(total.saturating_sub(begin));
                    (nbytes > 0).then_some(Span { rank, from: from(rank), to: self.out + begin, nbytes })
                };
                Some(turns.filter_map(span).collect())
            }
            Task::Span { total, from: rank } => {
                Some(vec![Span { rank, from: from(rank), to: self.out, nbytes: total }])
            }
            Task::Reduce { .. } | Task::Rows { .. } => None,
        }
    }

    /// The elements of each piece that the phase combines, if they lie one behind the other.
    pub fn combined(&self) -> Option<usize> {
        match self.task {
            Task::Reduce { n, len, row } if len == row => Some(n),
            _ => None,
        }
    }

    /// The same for `n` elements only.
    pub fn of(&self, n: usize) -> Phase {
        Phase { task: Task::Reduce { n, len: n, row: n }, ..self.clone() }
    }

    /// The numbers behind the pieces and the output in the parameters of the phase's function.
    pub fn numbers(&self, coordinate: usize, ranks: usize) -> Vec<i64> {
        let (own, ranks) = (coordinate as i64, ranks as i64);
        match self.task {
            Task::Reduce { n, len, row } => vec![ranks, n as i64, len as i64, row as i64],
            Task::Spans { total, step, .. } => vec![ranks, own, total as i64, step as i64],
            // The pieces begin with the one that is read.
            Task::Span { total, .. } => vec![1, 0, total as i64, total as i64],
            Task::Rows { words, block } => vec![ranks, own, words as i64, block as i64],
        }
    }
}
