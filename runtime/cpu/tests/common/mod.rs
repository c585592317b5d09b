//! Builds programs by hand and interprets `plan::ir` literally, as the reference for compiled programs.
//!
//! The reference evaluates one element at a time; an element is the bits of its compute type (f32 for 16-bit floats).
#![allow(dead_code)]

pub mod reference;

use half::{bf16, f16};
use perilune_core::mesh::Start;
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::{DType, HostTensor, Interrupt, Layout, Shape, philox};
use perilune_cpu::Cpu;
use perilune_plan::ir::*;
use perilune_plan::{Backend, BufferDesc, RunContext};
use reference::{column_of, eval, row};
use std::sync::Arc;

/// A small random number generator for test data.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51afd7ed558ccd) >> 16
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Values of mixed size and sign, whole numbers for integers.
    pub fn tensor(&mut self, dtype: DType, shape: Shape) -> HostTensor {
        let values: Vec<f64> = (0..shape.numel())
            .map(|_| match dtype {
                DType::Bool => self.below(2) as f64,
                DType::U8 => self.below(200) as f64,
                DType::I32 | DType::I64 => self.below(41) as f64 - 20.0,
                _ => (self.below(2_000_001) as f64 / 1e6 - 1.0) * [0.1, 1.0, 4.0][self.below(3)],
            })
            .collect();
        HostTensor::from_f64(dtype, shape, &values)
    }
}

/// A program of one kernel under construction.
#[derive(Default)]
pub struct Build {
    pub values: Vec<Value>,
    pub inputs: Vec<HostTensor>,
    pub outputs: Vec<(Shape, DType)>,
    pub body: Vec<Instr>,
    pub stores: Vec<(Reg, ValueId)>,
    pub slots: Vec<(DType, u64)>,
    pub starts: Vec<Start>,
    /// Inputs that the program overwrites.
    pub written: Vec<usize>,
}

pub fn instr(code: Code, dtype: DType, level: Level) -> Instr {
    Instr { code, dtype, level, origin: Origin::NONE }
}

impl Build {
    pub fn value(&mut self, shape: Shape, dtype: DType, storage: Storage) -> ValueId {
        self.values.push(Value { shape, dtype, storage, origin: Origin::NONE });
        ValueId(self.values.len() as u32 - 1)
    }

    pub fn input(&mut self, t: HostTensor) -> ValueId {
        let v = self.value(t.shape, t.dtype, Storage::Input(self.inputs.len() as u32));
        self.inputs.push(t);
        v
    }

    pub fn output(&mut self, shape: Shape, dtype: DType) -> ValueId {
        let v = self.value(shape, dtype, Storage::Output(self.outputs.len() as u32));
        self.outputs.push((shape, dtype));
        v
    }

    pub fn push(&mut self, code: Code, dtype: DType, level: Level) -> Reg {
        self.body.push(instr(code, dtype, level));
        self.body.len() as Reg - 1
    }

    pub fn load(&mut self, v: ValueId, layout: Layout, level: Level) -> Reg {
        let dtype = self.values[v.0 as usize].dtype;
        self.push(Code::Load { source: Source::Value(v), layout: Arc::new(layout.collapse()) }, dtype, level)
    }

    pub fn constant(&mut self, x: f64, dtype: DType, n: usize) -> Reg {
        let bits = if dtype.is_float() { x.to_bits() } else { x as i64 as u64 };
        let layout = Layout { strides: [0; 8], ..Layout::contiguous(Shape::of(&[n])) };
        self.push(Code::Load { source: Source::Constant(bits), layout: Arc::new(layout) }, dtype, Level::Full)
    }

    pub fn map(&mut self, f: MapFn, args: &[Reg]) -> Reg {
        let (level, from) = (self.body[args[0] as usize].level, self.body[args[args.len() - 1] as usize].dtype);
        let dtype = match f.domain() {
            perilune_core::ops::elementwise::Domain::Compare => DType::Bool,
            perilune_core::ops::elementwise::Domain::Code => DType::U8,
            _ => from,
        };
        self.push(Code::Map(f, args.iter().copied().collect()), dtype, level)
    }

    pub fn spread(&mut self, r: Reg) -> Reg {
        let dtype = self.body[r as usize].dtype;
        self.push(Code::Broadcast(r), dtype, Level::Full)
    }

    pub fn reduce_row(&mut self, f: ReduceFn, r: Reg) -> Reg {
        let dtype = self.body[r as usize].dtype;
        self.push(Code::ReduceRow(f, r), dtype, Level::Row)
    }

    pub fn reduce_col(&mut self, f: ReduceFn, r: Reg) -> Reg {
        let dtype = self.body[r as usize].dtype;
        self.push(Code::ReduceCol(f, r), dtype, Level::Col)
    }

    pub fn store(&mut self, r: Reg, shape: Shape) -> ValueId {
        let v = self.output(shape, self.body[r as usize].dtype);
        self.stores.push((r, v));
        v
    }

    pub fn region(&self, batch: usize, rows: usize, cols: usize) -> Kernel {
        let (body, stores) = (self.body.clone(), self.stores.clone());
        Kernel::Region(Region { batch, rows, cols, body, stores, origin: Origin::NONE })
    }

    pub fn library(&self, op: &str, attrs: &[i64], inputs: Vec<Operand>) -> Kernel {
        let op = perilune_core::ops::by_name(op).or_else(|| internal(op)).expect("op");
        let dtypes = inputs
            .iter()
            .map(|o| match o {
                Operand::View(v, _) => self.values[v.0 as usize].dtype,
                Operand::Constant(_, _, d) => *d,
            })
            .collect();
        let outputs = vec![ValueId(self.values.len() as u32 - 1)];
        let layouts = vec![Layout::contiguous(self.values[self.values.len() - 1].shape)];
        Kernel::Library(Library {
            op,
            attrs: attrs.into(),
            inputs,
            dtypes,
            outputs,
            layouts,
            epilogue: None,
            tf32: false,
            origin: Origin::NONE,
        })
    }

    pub fn program(&self, kernels: Vec<Kernel>) -> Arc<Program> {
        Arc::new(Program {
            values: self.values.clone(),
            kernels,
            in_flight: Vec::new(),
            inputs: self.inputs.iter().map(|t| (t.shape, t.dtype)).collect(),
            outputs: self.outputs.iter().map(|(s, d)| BufferDesc::new(*s, *d)).collect(),
            slots: self.slots.iter().map(|s| s.0).collect(),
            starts: self.starts.clone(),
            results: (0..self.outputs.len() as u32).map(Root::Output).collect(),
            arena_bytes: 0,
            live_bytes: 0,
            exchanges: Vec::new(),
            stages: Vec::new(),
            route: Default::default(),
        })
    }

    /// Runs the program on a device; returns outputs, then written inputs.
    pub fn run(&self, cpu: &Cpu, kernels: Vec<Kernel>) -> Result<Vec<HostTensor>, perilune_plan::Failure> {
        let program = cpu.compile(self.program(kernels)).expect("compiles");
        let upload = |t: &HostTensor| cpu.upload(&BufferDesc::new(t.shape, t.dtype), &t.bytes).expect("memory");
        let inputs: Vec<_> = self.inputs.iter().map(upload).collect();
        let outputs: Vec<_> =
            self.outputs.iter().map(|(s, d)| cpu.alloc(&BufferDesc::new(*s, *d)).expect("memory")).collect();
        let slots: Vec<u64> = self.slots.iter().map(|s| s.1).collect();
        program.run(&inputs, &slots, &outputs, RunContext::new(&Interrupt::default()))?;
        let mut out = Vec::new();
        for (b, (s, d)) in outputs.iter().zip(&self.outputs) {
            out.push(HostTensor::new(*d, *s, cpu.download(b).expect("bytes")));
        }
        for &k in &self.written {
            let t = &self.inputs[k];
            out.push(HostTensor::new(t.dtype, t.shape, cpu.download(&inputs[k]).expect("bytes")));
        }
        Ok(out)
    }

    /// The reference's results, in the order of `run`.
    pub fn reference(&self, batch: usize, rows: usize, cols: usize) -> Vec<HostTensor> {
        let mut regs: Vec<Vec<u64>> = Vec::new();
        for i in &self.body {
            let n = match i.level {
                Level::Full => batch * rows * cols,
                Level::Row => batch * rows,
                Level::Col => batch * cols,
            };
            let of = |r: Reg| (&regs[r as usize], self.body[r as usize].dtype);
            regs.push(match &i.code {
                Code::Load { source, layout } => {
                    (0..n).map(|p| self.element(*source, position(layout, p), i.dtype)).collect()
                }
                Code::Map(f, args) => {
                    let from = self.body[args[args.len() - 1] as usize].dtype;
                    (0..n)
                        .map(|p| {
                            let xs: Vec<u64> = args.iter().map(|a| regs[*a as usize][p]).collect();
                            round(i.dtype, eval(*f, from, &xs))
                        })
                        .collect()
                }
                Code::Cast(a) => {
                    let (x, from) = of(*a);
                    let t = to_host(from, Shape::of(&[n]), x).cast(i.dtype);
                    (0..n).map(|p| get(&t, p)).collect()
                }
                Code::Broadcast(a) => (0..n).map(|p| of(*a).0[p / cols]).collect(),
                Code::ReduceRow(f, a) => {
                    let x = of(*a).0;
                    (0..n).map(|r| round(i.dtype, row(*f, i.dtype, &x[r * cols..(r + 1) * cols]))).collect()
                }
                Code::ReduceCol(f, a) => {
                    let x = of(*a).0;
                    let at = |b: usize, r: usize, c: usize| x[(b * rows + r) * cols + c];
                    (0..n)
                        .map(|p| {
                            let column: Vec<u64> = (0..rows).map(|r| at(p / cols, r, p % cols)).collect();
                            round(i.dtype, column_of(*f, i.dtype, &column))
                        })
                        .collect()
                }
            });
        }
        let mut out = Vec::new();
        for o in 0..self.outputs.len() {
            let found = self.stores.iter().find(|s| self.values[s.1.0 as usize].storage == Storage::Output(o as u32));
            let (reg, v) = found.expect("every output is stored");
            out.push(to_host(self.values[v.0 as usize].dtype, self.outputs[o].0, &regs[*reg as usize]));
        }
        for &k in &self.written {
            let found = self.stores.iter().find(|s| self.values[s.1.0 as usize].storage == Storage::Input(k as u32));
            let (reg, _) = found.expect("a written input is stored");
            out.push(to_host(self.inputs[k].dtype, self.inputs[k].shape, &regs[*reg as usize]));
        }
        out
    }

    fn element(&self, source: Source, p: isize, dtype: DType) -> u64 {
        match source {
            Source::Value(v) => {
                let Storage::Input(k) = self.values[v.0 as usize].storage else { panic!("inputs only") };
                get(&self.inputs[k as usize], p as usize)
            }
            Source::Block { input, start } => {
                let Storage::Input(k) = self.values[input.0 as usize].storage else { panic!("inputs only") };
                get(&self.inputs[k as usize], p as usize + self.slots[start as usize].1 as usize)
            }
            Source::Constant(bits) => number(dtype, bits),
            Source::Slot(s) => number(dtype, self.slots[s as usize].1),
            Source::Iota { start } => p as u64 + start.map_or(0, |s| self.slots[s as usize].1),
            Source::Uniform { seed, counter, start } => {
                let (seed, counter) = (self.slots[seed as usize].1, self.slots[counter as usize].1);
                let start = start.map_or(0, |s| self.slots[s as usize].1);
                philox::uniform(seed, counter, p as u64 + start).to_bits() as u64
            }
        }
    }

    /// Runs on several thread counts and compares all with the reference, bit for bit.
    pub fn check(&self, batch: usize, rows: usize, cols: usize, what: &str) {
        let want = self.reference(batch, rows, cols);
        for threads in [1, 2, 3, 8] {
            let got = self.run(&device(threads), vec![self.region(batch, rows, cols)]).expect("runs");
            for (k, (g, w)) in got.iter().zip(&want).enumerate() {
                same(g, w, &format!("{what}, result {k}, {threads} threads"));
            }
        }
    }
}

/// Finds an op without a Lua function; such ops are in the registry only as statics.
fn internal(name: &str) -> Option<&'static perilune_core::ops::Op> {
    use perilune_core::ops::{reduce, slicing};
    [&slicing::STRIDED_PAD, &slicing::COL2IM, &reduce::ARGREDUCE].into_iter().find(|op| op.name == name)
}

/// Returns a device with that many threads, created once per test thread because pools are expensive.
pub fn device(threads: usize) -> Arc<Cpu> {
    thread_local! {
        static DEVICES: std::cell::RefCell<std::collections::HashMap<usize, Arc<Cpu>>> = Default::default();
    }
    DEVICES.with(|d| d.borrow_mut().entry(threads).or_insert_with(|| Arc::new(Cpu::new(Some(threads)))).clone())
}

pub fn same(got: &HostTensor, want: &HostTensor, what: &str) {
    assert_eq!(got.bytes.len(), want.bytes.len(), "{what}");
    let size = got.dtype.size();
    for i in 0..got.numel() {
        let (a, b) = (&got.bytes[i * size..(i + 1) * size], &want.bytes[i * size..(i + 1) * size]);
        if a != b && !(got.dtype.is_float() && got.get_f64(i).is_nan() && want.get_f64(i).is_nan()) {
            panic!("{what}: element {i} is {:?}, should be {:?} ({})", got.get_f64(i), want.get_f64(i), got.dtype);
        }
    }
}

pub fn position(layout: &Layout, p: usize) -> isize {
    let (mut rest, mut at) = (p, layout.offset);
    for d in (0..layout.shape.rank()).rev() {
        at += (rest % layout.shape.dims()[d]) as isize * layout.strides[d];
        rest /= layout.shape.dims()[d];
    }
    at
}

fn number(dtype: DType, bits: u64) -> u64 {
    if dtype.is_float() {
        get(&HostTensor::from_f64(dtype, Shape::of(&[1]), &[f64::from_bits(bits)]), 0)
    } else {
        get(&HostTensor::from_i64(Shape::of(&[1]), &[bits as i64]).cast(dtype), 0)
    }
}

/// Element `i` as the bits of its compute type.
fn get(t: &HostTensor, i: usize) -> u64 {
    let s = t.dtype.size();
    let b = &t.bytes[i * s..(i + 1) * s];
    let mut word = [0u8; 8];
    word[..s].copy_from_slice(b);
    let word = u64::from_le_bytes(word);
    match t.dtype {
        DType::BF16 => bf16::from_bits(word as u16).to_f32().to_bits() as u64,
        DType::F16 => f16::from_bits(word as u16).to_f32().to_bits() as u64,
        _ => word,
    }
}

fn to_host(dtype: DType, shape: Shape, regs: &[u64]) -> HostTensor {
    let mut bytes = Vec::new();
    for &r in regs {
        match dtype {
            DType::BF16 => bytes.extend(bf16::from_f32(f32::from_bits(r as u32)).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(f32::from_bits(r as u32)).to_le_bytes()),
            d => bytes.extend(&r.to_le_bytes()[..d.size()]),
        }
    }
    HostTensor::new(dtype, shape, bytes)
}

fn round(dtype: DType, r: u64) -> u64 {
    match dtype {
        DType::BF16 => bf16::from_f32(f32::from_bits(r as u32)).to_f32().to_bits() as u64,
        DType::F16 => f16::from_f32(f32::from_bits(r as u32)).to_f32().to_bits() as u64,
        _ => r,
    }
}
