//! Times of the CPU backend's kernels: `cargo run --release -p perilune-cpu --example kernels [threads] [filter]`.
//!
//! Prints the median of many runs of one-kernel programs, with the rate that says how far from the machine's limits it
//! is: bytes of inputs and outputs a second, elements a second, or floating-point operations a second for products.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Build, Rng};
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_cpu::Cpu;
use perilune_plan::ir::*;
use perilune_plan::{Backend, Buffer};
use std::time::Instant;

struct Bench {
    cpu: Cpu,
    filter: String,
    rng: Rng,
}

fn plain(n: usize) -> Layout {
    Layout::contiguous(Shape::of(&[n]))
}

fn columns(rows: usize, cols: usize) -> Layout {
    let mut l = Layout::contiguous(Shape::of(&[rows, cols]));
    l.strides[0] = 0;
    l
}

fn row_constant(b: &mut Build, x: f64, rows: usize) -> Reg {
    let layout = Layout { strides: [0; MAX_RANK], ..plain(rows) };
    b.push(Code::Load { source: Source::Constant(x.to_bits()), layout }, DType::F32, Level::Row)
}

impl Bench {
    fn new_input(&mut self, b: &mut Build, n: usize) -> ValueId {
        // Repeated bytes: cases that the filter drops must not take long either.
        let some: Vec<u8> =
            (0..4099).flat_map(|_| (self.rng.below(2_000_001) as f32 / 1e6 - 1.0).to_le_bytes()).collect();
        let mut bytes = some.repeat(4 * n / some.len() + 1);
        bytes.truncate(4 * n);
        b.input(perilune_core::HostTensor::new(DType::F32, Shape::of(&[n]), bytes))
    }

    /// Median and shortest time of a run.
    fn time(&self, b: &Build, kernel: Kernel, name: &str, show: impl Fn(f64) -> String) {
        if !name.contains(&self.filter) {
            return;
        }
        let program = self.cpu.compile(b.program(vec![kernel])).expect("compiles");
        let inputs: Vec<Buffer> = b.inputs.iter().map(|t| self.cpu.upload(&t.bytes).expect("memory")).collect();
        let slots: Vec<u64> = b.slots.iter().map(|s| s.1).collect();
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < 9 || (start.elapsed().as_secs_f64() < 0.5 && times.len() < 5000) {
            let outputs: Vec<Buffer> =
                b.outputs.iter().map(|(s, d)| self.cpu.alloc(s.numel() * d.size()).expect("memory")).collect();
            let t = Instant::now();
            program.run(&inputs, &slots, &outputs, None).expect("runs");
            times.push(t.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        println!("{name:<34} {:>10.1} µs (best {:>9.1})   {}", median * 1e6, best * 1e6, show(median));
    }

    fn chain(&mut self, n: usize, name: &str) {
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let mut y = x;
        for k in 0..4 {
            let c = b.constant(1.0 + k as f64 * 0.01, DType::F32, n);
            y = b.map(MapFn::Mul, &[y, c]);
            y = b.map(MapFn::Add, &[y, x]);
        }
        b.store(y, Shape::of(&[n]));
        self.time(&b, b.region(1, 1, n), name, |s| rate(8 * n, n, s));
    }

    fn unary(&mut self, f: MapFn, n: usize) {
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let y = b.map(f, &[x]);
        b.store(y, Shape::of(&[n]));
        self.time(&b, b.region(1, 1, n), &format!("{f:?} {n}").to_lowercase(), |s| rate(8 * n, n, s));
    }

    fn gelu(&mut self, n: usize) {
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let c = |b: &mut Build, v: f64| b.constant(v, DType::F32, n);
        let q = b.map(MapFn::Mul, &[x, x]);
        let q = b.map(MapFn::Mul, &[q, x]);
        let k = c(&mut b, 0.044715);
        let q = b.map(MapFn::Mul, &[q, k]);
        let q = b.map(MapFn::Add, &[x, q]);
        let k = c(&mut b, 0.7978845608);
        let q = b.map(MapFn::Mul, &[q, k]);
        let t = b.map(MapFn::Tanh, &[q]);
        let k = c(&mut b, 1.0);
        let t = b.map(MapFn::Add, &[t, k]);
        let k = c(&mut b, 0.5);
        let h = b.map(MapFn::Mul, &[x, k]);
        let y = b.map(MapFn::Mul, &[h, t]);
        b.store(y, Shape::of(&[n]));
        self.time(&b, b.region(1, 1, n), &format!("gelu tanh {n}"), |s| rate(8 * n, n, s));
    }

    fn softmax(&mut self, rows: usize, cols: usize) {
        let n = rows * cols;
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let m = b.reduce_row(ReduceFn::Max, x);
        let m = b.spread(m);
        let d = b.map(MapFn::Sub, &[x, m]);
        let e = b.map(MapFn::Exp, &[d]);
        let s = b.reduce_row(ReduceFn::Sum, e);
        let s = b.spread(s);
        let y = b.map(MapFn::Div, &[e, s]);
        b.store(y, Shape::of(&[n]));
        self.time(&b, b.region(1, rows, cols), &format!("softmax {rows}x{cols}"), |s| rate(8 * n, n, s));
    }

    fn layer_norm(&mut self, rows: usize, cols: usize) {
        let n = rows * cols;
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let (g, h) = (self.new_input(&mut b, cols), self.new_input(&mut b, cols));
        let x = b.load(x, plain(n), Level::Full);
        let g = b.load(g, columns(rows, cols), Level::Full);
        let h = b.load(h, columns(rows, cols), Level::Full);
        let c = row_constant(&mut b, 1.0 / cols as f64, rows);
        let eps = row_constant(&mut b, 1e-5, rows);
        let s = b.reduce_row(ReduceFn::Sum, x);
        let m = b.map(MapFn::Mul, &[s, c]);
        let ms = b.spread(m);
        let d = b.map(MapFn::Sub, &[x, ms]);
        let q = b.map(MapFn::Mul, &[d, d]);
        let v = b.reduce_row(ReduceFn::Sum, q);
        let v = b.map(MapFn::Mul, &[v, c]);
        let v = b.map(MapFn::Add, &[v, eps]);
        let r = b.map(MapFn::Rsqrt, &[v]);
        let rs = b.spread(r);
        let y = b.map(MapFn::Mul, &[d, rs]);
        let y = b.map(MapFn::Mul, &[y, g]);
        let y = b.map(MapFn::Add, &[y, h]);
        b.store(y, Shape::of(&[n]));
        b.store(m, Shape::of(&[rows]));
        b.store(r, Shape::of(&[rows]));
        self.time(&b, b.region(1, rows, cols), &format!("layer norm {rows}x{cols}"), |s| rate(8 * n, n, s));
    }

    /// Weight, gradient and two moments in, weight and moments out, in place.
    fn adamw(&mut self, n: usize) {
        let mut b = Build::default();
        let v: Vec<ValueId> = (0..4).map(|_| self.new_input(&mut b, n)).collect();
        b.slots =
            vec![(DType::F32, 1e-3f64.to_bits()), (DType::F32, 0.9f64.to_bits()), (DType::F32, 0.99f64.to_bits())];
        let r: Vec<Reg> = v.iter().map(|v| b.load(*v, plain(n), Level::Full)).collect();
        let (w, g, m, s) = (r[0], r[1], r[2], r[3]);
        let slot = |b: &mut Build, k: u32| {
            let layout = Layout { strides: [0; MAX_RANK], ..plain(n) };
            b.push(Code::Load { source: Source::Slot(k), layout }, DType::F32, Level::Full)
        };
        let c = |b: &mut Build, v: f64| b.constant(v, DType::F32, n);
        let (b1, b2) = (c(&mut b, 0.9), c(&mut b, 0.95));
        let (o1, o2) = (c(&mut b, 0.1), c(&mut b, 0.05));
        let p = b.map(MapFn::Mul, &[m, b1]);
        let q = b.map(MapFn::Mul, &[g, o1]);
        let m = b.map(MapFn::Add, &[p, q]);
        let p = b.map(MapFn::Mul, &[s, b2]);
        let q = b.map(MapFn::Mul, &[g, g]);
        let q = b.map(MapFn::Mul, &[q, o2]);
        let s = b.map(MapFn::Add, &[p, q]);
        let k = slot(&mut b, 1);
        let mh = b.map(MapFn::Div, &[m, k]);
        let k = slot(&mut b, 2);
        let sh = b.map(MapFn::Div, &[s, k]);
        let d = b.map(MapFn::Sqrt, &[sh]);
        let k = c(&mut b, 1e-8);
        let d = b.map(MapFn::Add, &[d, k]);
        let u = b.map(MapFn::Div, &[mh, d]);
        let k = c(&mut b, 0.1);
        let e = b.map(MapFn::Mul, &[w, k]);
        let u = b.map(MapFn::Add, &[u, e]);
        let k = slot(&mut b, 0);
        let u = b.map(MapFn::Mul, &[u, k]);
        let w = b.map(MapFn::Sub, &[w, u]);
        b.stores = vec![(w, v[0]), (m, v[2]), (s, v[3])];
        self.time(&b, b.region(1, 1, n), &format!("adamw {n}"), |s| rate(28 * n, n, s));
    }

    fn dropout(&mut self, n: usize) {
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        b.slots = vec![(DType::I64, 1), (DType::I64, 2)];
        let x = b.load(x, plain(n), Level::Full);
        let u = b.push(
            Code::Load { source: Source::Uniform { seed: 0, counter: 1 }, layout: plain(n) },
            DType::F32,
            Level::Full,
        );
        let (p, k, z) =
            (b.constant(0.1, DType::F32, n), b.constant(1.0 / 0.9, DType::F32, n), b.constant(0.0, DType::F32, n));
        let on = b.map(MapFn::Ge, &[u, p]);
        let y = b.map(MapFn::Mul, &[x, k]);
        let y = b.map(MapFn::Where, &[on, y, z]);
        b.store(y, Shape::of(&[n]));
        self.time(&b, b.region(1, 1, n), &format!("dropout {n}"), |s| rate(8 * n, n, s));
    }

    fn column_sum(&mut self, rows: usize, cols: usize) {
        let n = rows * cols;
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let c = b.reduce_col(ReduceFn::Sum, x);
        b.store(c, Shape::of(&[cols]));
        self.time(&b, b.region(1, rows, cols), &format!("column sum {rows}x{cols}"), |s| rate(4 * n, n, s));
    }

    fn sum(&mut self, n: usize, f: ReduceFn) {
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let x = b.load(x, plain(n), Level::Full);
        let c = b.reduce_row(f, x);
        b.store(c, Shape::of(&[1]));
        self.time(&b, b.region(1, 1, n), &format!("{f:?} {n}").to_lowercase(), |s| rate(4 * n, n, s));
    }

    fn transpose(&mut self, rows: usize, cols: usize) {
        let n = rows * cols;
        let mut b = Build::default();
        let x = self.new_input(&mut b, n);
        let mut l = Layout::contiguous(Shape::of(&[rows, cols]));
        l.strides[..2].copy_from_slice(&[1, rows as isize]);
        let x = b.load(x, l, Level::Full);
        b.store(x, Shape::of(&[n]));
        self.time(&b, b.region(1, 1, n), &format!("transpose {rows}x{cols}"), |s| rate(8 * n, n, s));
    }

    fn matmul(&mut self, batch: &[usize], m: usize, n: usize, k: usize, transposed: bool, dtype: DType) {
        if !"matmul".contains(&self.filter) && !self.filter.starts_with("matmul") {
            return;
        }
        let mut b = Build::default();
        let dims = |p: usize, q: usize| Shape::of(&[batch, &[p, q]].concat());
        let x = b.input(self.rng.tensor(dtype, dims(m, k)));
        let y = b.input(self.rng.tensor(dtype, dims(k, n)));
        let (lx, mut ly) = (Layout::contiguous(dims(m, k)), Layout::contiguous(dims(k, n)));
        if transposed {
            let r = ly.shape.rank();
            (ly.strides[r - 2], ly.strides[r - 1]) = (1, k as isize);
        }
        b.output(dims(m, n), dtype);
        let kernel = b.library("matmul", &[], vec![Operand::View(x, lx), Operand::View(y, ly)]);
        let ops = 2 * batch.iter().product::<usize>() * m * n * k;
        let t = if transposed { " b^T" } else { "" };
        self.time(&b, kernel, &format!("matmul {dtype} {batch:?} {m}x{n}x{k}{t}"), |s| {
            format!("{:7.1} GFLOP/s", ops as f64 / s / 1e9)
        });
    }

    fn library(&mut self) {
        let mut b = Build::default();
        let w = self.new_input(&mut b, 50304 * 768);
        let ids: Vec<i64> = (0..4096).map(|_| self.rng.below(50304) as i64).collect();
        let ids = b.input(perilune_core::HostTensor::from_i64(Shape::of(&[4096]), &ids));
        let ids = Operand::View(ids, plain(4096));
        let v = b.output(Shape::of(&[4096, 768]), DType::F32);
        let table = Layout::contiguous(Shape::of(&[50304, 768]));
        let kernel = b.library("index_select", &[0], vec![Operand::View(w, table), ids]);
        self.time(&b, kernel, "index_select 4096 of 50304x768", |s| rate(8 * 4096 * 768, 4096 * 768, s));
        b.outputs.clear();
        b.values.truncate(v.0 as usize);
        let g = self.new_input(&mut b, 4096 * 768);
        b.output(Shape::of(&[50304, 768]), DType::F32);
        let zero = Operand::Constant(0, Shape::of(&[50304, 768]), DType::F32);
        let grad = Operand::View(g, Layout::contiguous(Shape::of(&[4096, 768])));
        let kernel = b.library("index_add", &[0], vec![zero, ids, grad]);
        self.time(&b, kernel, "index_add 4096 to 50304x768", |s| {
            rate(4 * 50304 * 768 + 12 * 4096 * 768, 50304 * 768, s)
        });
    }
}

fn rate(bytes: usize, n: usize, s: f64) -> String {
    format!("{:7.1} GB/s {:7.2} Gelem/s", bytes as f64 / s / 1e9, n as f64 / s / 1e9)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|t| t.parse().ok());
    let cpu = Cpu::new(threads);
    println!("{}", cpu.describe());
    let mut b = Bench { cpu, filter: args.next().unwrap_or_default(), rng: Rng(1) };
    b.chain(64, "chain of 8 64");
    b.chain(1 << 16, "chain of 8 64k");
    b.chain(1 << 24, "chain of 8 16M");
    for f in [
        MapFn::Add,
        MapFn::Exp,
        MapFn::Tanh,
        MapFn::Erf,
        MapFn::Log,
        MapFn::Sigmoid,
        MapFn::Sin,
        MapFn::Pow,
        MapFn::Neg,
    ] {
        if f.arity() == 1 {
            b.unary(f, 1 << 16);
        }
    }
    b.gelu(1 << 16);
    b.gelu(1 << 22);
    b.softmax(1024, 1024);
    b.softmax(32, 50304);
    b.softmax(4096, 64);
    b.layer_norm(256, 768);
    b.layer_norm(4096, 768);
    b.adamw(1 << 16);
    b.adamw(1 << 23);
    b.dropout(1 << 20);
    b.column_sum(4096, 3072);
    b.column_sum(4096, 768);
    b.sum(1 << 16, ReduceFn::Sum);
    b.sum(1 << 25, ReduceFn::Sum);
    b.sum(1 << 16, ReduceFn::Max);
    b.transpose(2048, 2048);
    for n in [64, 128, 256, 512, 1024, 2048] {
        b.matmul(&[], n, n, n, false, DType::F32);
    }
    b.matmul(&[], 768, 3072, 768, true, DType::F32);
    b.matmul(&[], 8, 4096, 4096, true, DType::F32);
    b.matmul(&[], 1, 4096, 4096, true, DType::F32);
    b.matmul(&[], 512, 512, 512, false, DType::BF16);
    for m in [1, 2, 4, 5, 8, 16] {
        b.matmul(&[], m, 1024, 1024, false, DType::F32);
    }
    b.matmul(&[], 5, 1024, 1024, false, DType::F64);
    b.matmul(&[], 1, 4096, 4096, false, DType::F32);
    b.matmul(&[], 5, 4096, 4096, false, DType::F32);
    b.matmul(&[48], 1, 64, 512, false, DType::F32);
    b.matmul(&[], 16, 16, 1024, false, DType::F32);
    b.matmul(&[], 5, 100, 1024, false, DType::F32);
    b.matmul(&[48], 64, 64, 32, false, DType::F32);
    b.matmul(&[48], 64, 64, 32, true, DType::F32);
    b.matmul(&[], 16, 16, 16, false, DType::F32);
    if b.filter.is_empty() || b.filter.starts_with("index") {
        b.library();
    }
}
