//! Serializes plans and launches as numbers for hashing, as `perilune_cpu::fingerprint` does for the CPU's compiled kernels.
//!
//! Variants are written by the codes below, so that renaming one changes nothing.

use perilune_cpu::fingerprint::Words;
use perilune_cuda::launch::{Arg, Launch, TmaDesc, Word};
use perilune_plan::ir::{Code, Kernel, Level, Operand, Program, Region, Root, Storage};

/// Hashes numbers to 16 hexadecimal digits.
pub fn hash(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    text_hash(&bytes)
}

pub fn text_hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_string()
}

/// Serializes a program: values with their storage, kernels in order, results.
pub fn program(p: &Program) -> Vec<u64> {
    let mut w = Words::default();
    // Values are numbered in the order of the table, not of their first use.
    (0..p.values.len()).for_each(|v| w.value(v as u32));
    for v in &p.values {
        w.shape(&v.shape);
        w.dtype(v.dtype);
        match v.storage {
            Storage::Input(k) => w.list.extend([0, u64::from(k)]),
            Storage::Output(k) => w.list.extend([1, u64::from(k)]),
            Storage::Arena(at) => w.list.extend([2, at as u64]),
        }
    }
    w.put(p.kernels.len());
    p.kernels.iter().for_each(|k| kernel(k, &mut w));
    p.in_flight.iter().flat_map(|f| [f.start, f.wait]).for_each(|n| w.put(n));
    w.put(p.inputs.len());
    for (shape, dtype) in &p.inputs {
        w.shape(shape);
        w.dtype(*dtype);
    }
    w.put(p.outputs.len());
    p.outputs.iter().for_each(|desc| w.put(desc.nbytes()));
    w.put(p.slots.len());
    p.slots.iter().for_each(|d| w.dtype(*d));
    for r in &p.results {
        match r {
            Root::Output(k) => w.list.extend([0, u64::from(*k)]),
            Root::Input(k) => w.list.extend([1, u64::from(*k)]),
        }
    }
    w.put(p.arena_bytes);
    w.put(p.live_bytes);
    w.list
}

/// Serializes one kernel of a plan. The op of a library call is omitted, because its name is next to the hash.
pub fn kernel(k: &Kernel, w: &mut Words) {
    match k {
        Kernel::Region(r) => {
            w.put(0);
            region(r, w);
        }
        Kernel::Library(l) => {
            w.put(1);
            w.put(l.attrs.len());
            w.list.extend(l.attrs.iter().map(|a| *a as u64));
            w.put(l.inputs.len());
            for o in &l.inputs {
                match o {
                    Operand::View(v, layout) => {
                        w.put(0);
                        w.value(v.0);
                        w.layout(layout);
                    }
                    Operand::Constant(bits, shape, dtype) => {
                        w.list.extend([1, *bits]);
                        w.shape(shape);
                        w.dtype(*dtype);
                    }
                }
            }
            l.dtypes.iter().for_each(|d| w.dtype(*d));
            w.put(l.outputs.len());
            l.outputs.iter().for_each(|v| w.value(v.0));
            l.layouts.iter().for_each(|x| w.layout(x));
            w.put(usize::from(l.tf32));
            w.put(usize::from(l.epilogue.is_some()));
            l.epilogue.iter().for_each(|r| region(r, w));
        }
        Kernel::Multi(list) => {
            w.put(2);
            w.put(list.len());
            list.iter().for_each(|r| region(r, w));
        }
    }
}

fn region(r: &Region, w: &mut Words) {
    [r.batch, r.rows, r.cols, r.body.len(), r.stores.len()].into_iter().for_each(|n| w.put(n));
    for i in &r.body {
        match &i.code {
            Code::Load { source, layout } => {
                w.put(0);
                w.source(source);
                w.layout(layout);
            }
            Code::Map(f, args) => {
                w.list.extend([1, f.code() as u64, args.len() as u64]);
                w.list.extend(args.iter().map(|a| u64::from(*a)));
            }
            Code::Cast(a) => w.list.extend([2, u64::from(*a)]),
            Code::Broadcast(a) => w.list.extend([3, u64::from(*a)]),
            Code::ReduceRow(f, a) => w.list.extend([4, *f as u64, u64::from(*a)]),
            Code::ReduceCol(f, a) => w.list.extend([5, *f as u64, u64::from(*a)]),
        }
        w.dtype(i.dtype);
        w.put(match i.level {
            Level::Full => 0,
            Level::Row => 1,
            Level::Col => 2,
        });
    }
    for (reg, value) in &r.stores {
        w.put(*reg as usize);
        w.value(value.0);
    }
}

/// Serializes the launch of a function.
pub fn launch(l: &Launch, w: &mut Words) {
    w.list.extend(l.grid.iter().chain(&l.block).chain([&l.shared_bytes]).map(|n| u64::from(*n)));
    w.put(l.args.len());
    l.args.iter().for_each(|a| argument(a, w));
}

fn argument(a: &Arg, w: &mut Words) {
    match a {
        Arg::Value(v, at) => {
            w.put(0);
            w.value(v.0);
            w.list.push(*at as u64);
        }
        Arg::Slots => w.put(1),
        Arg::Scratch(at) => w.list.extend([2, *at as u64]),
        Arg::Fault => w.put(3),
        Arg::Halt => w.put(11),
        Arg::Stop => w.put(12),
        Arg::Number(_) => w.put(13),
        Arg::I32(n) => w.list.extend([4, *n as u64]),
        Arg::I64(n) => w.list.extend([5, *n as u64]),
        Arg::F32(x) => w.list.extend([6, u64::from(x.to_bits())]),
        Arg::F64(x) => w.list.extend([7, x.to_bits()]),
        Arg::Bytes(bytes) => {
            w.put(8);
            w.put(bytes.len());
            w.list.extend(bytes.iter().map(|b| u64::from(*b)));
        }
        Arg::Table(words) => {
            w.put(9);
            w.put(words.len());
            for word in words.iter() {
                match word {
                    Word::Number(n) => w.list.extend([0, *n]),
                    Word::Value(v, at) => {
                        w.put(1);
                        w.value(v.0);
                        w.list.push(*at as u64);
                    }
                }
            }
        }
        Arg::Map(of, TmaDesc { dtype, dims, strides, shape }) => {
            w.put(10);
            argument(of, w);
            w.dtype(*dtype);
            w.list.extend(dims.iter().chain(strides).copied());
            w.list.extend(shape.iter().map(|n| u64::from(*n)));
        }
    }
}
