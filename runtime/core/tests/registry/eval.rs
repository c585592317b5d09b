//! Evaluates primitive nodes naively in f64: slow, short, and independent of the backends.

use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::reduce::identity;
use perilune_core::ops::{Class, Generator};
use perilune_core::philox::uniform;
use perilune_core::{DType, Graph, Layout, NodeId, Shape};
use std::collections::HashMap;
use std::ops::Deref;

/// Decomposes all fused nodes that `roots` need; returns the replacement of each root.
pub fn lower(g: &mut Graph, roots: &[NodeId], map: &mut HashMap<NodeId, NodeId>) -> Vec<NodeId> {
    let mut stack: Vec<NodeId> = roots.to_vec();
    while let Some(&id) = stack.last() {
        if map.contains_key(&id) {
            stack.pop();
            continue;
        }
        let node = g.node(id).clone();
        let waiting: Vec<NodeId> = node.inputs.iter().filter(|x| !map.contains_key(x)).copied().collect();
        if !waiting.is_empty() {
            stack.extend(waiting);
            continue;
        }
        let inputs: Vec<NodeId> = node.inputs.iter().map(|x| map[x]).collect();
        let to = match node.op.class {
            Class::Fused(expand) => {
                let outs = expand(g, &inputs, &node.attrs).unwrap_or_else(|e| panic!("{}: {e}", node.op.name));
                assert_eq!(
                    (g.shape(outs[0]), g.dtype(outs[0])),
                    (node.shape, node.dtype),
                    "{}: main output",
                    node.op.name
                );
                lower(g, &outs, map)[0]
            }
            Class::TupleGet => {
                let main = g.node(node.inputs[0]).clone();
                let Class::Fused(expand) = main.op.class else { panic!("part of {}", main.op.name) };
                let inputs: Vec<NodeId> = main.inputs.iter().map(|x| map[x]).collect();
                let outs = expand(g, &inputs, &main.attrs).unwrap();
                let out = outs[node.attrs[0] as usize];
                assert_eq!(
                    (g.shape(out), g.dtype(out)),
                    (node.shape, node.dtype),
                    "{}: part {}",
                    main.op.name,
                    node.attrs[0]
                );
                lower(g, &[out], map)[0]
            }
            Class::Leaf | Class::Generator(_) => id,
            _ => {
                let mut copy = node.clone();
                copy.inputs = inputs.into_iter().collect();
                if copy.inputs == node.inputs { id } else { g.add(copy) }
            }
        };
        map.insert(id, to);
        map.insert(to, to);
        stack.pop();
    }
    roots.iter().map(|r| map[r]).collect()
}

fn positions(l: &Layout) -> Vec<usize> {
    let mut out = Vec::with_capacity(l.numel());
    each(l.shape, |i| {
        let p: isize = l.offset + i.iter().zip(l.strides()).map(|(a, b)| *a as isize * b).sum::<isize>();
        out.push(p as usize);
    });
    out
}

fn each(shape: Shape, mut f: impl FnMut(&[usize])) {
    let mut i = vec![0; shape.rank()];
    for _ in 0..shape.numel() {
        f(&i);
        for d in (0..shape.rank()).rev() {
            i[d] += 1;
            if i[d] < shape.dims()[d] {
                break;
            }
            i[d] = 0;
        }
    }
}

fn at(shape: Shape, i: &[usize]) -> usize {
    i.iter().zip(shape.strides()).map(|(a, b)| a * b as usize).sum()
}

/// The value of an 8-bit float whose last exponent encodes infinities and NaN, as in IEEE 754.
fn fp8_ieee(code: u32, exponent_bits: i32, mantissa_bits: i32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let (exponent, mantissa) = ((code & 0x7f) as i32 >> mantissa_bits, (code as i32) & ((1 << mantissa_bits) - 1));
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        e => (1.0 + fraction) * 2f64.powi(e - bias),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// E4M3 has no infinity, and one NaN of each sign.
fn fp8_e4m3(code: u32) -> f64 {
    if code & 0x7f == 0x7f { f64::NAN } else { fp8_ieee(code, 4, 3) }
}

fn fp8_e5m2(code: u32) -> f64 {
    match code & 0x7f {
        0x7c => fp8_ieee(code, 5, 2).signum() * f64::INFINITY,
        0x7d.. => f64::NAN,
        _ => fp8_ieee(code, 5, 2),
    }
}

/// The byte of the nearest finite value, by search; ties go to the even byte. Infinity becomes NaN if the format has
/// none.
fn fp8_encode(x: f64, value: fn(u32) -> f64) -> f64 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let infinity = (0..0x80).find(|c| value(*c).is_infinite());
    let code = match infinity {
        _ if x.is_nan() => return 127.0,
        None if x.is_infinite() => return 127.0,
        Some(code) if x.is_infinite() => code,
        _ => {
            let finite = (0..0x80u32).filter(|c| value(*c).is_finite());
            let distance = |c: &u32| (value(*c) - x.abs()).abs();
            finite.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap_or(0)
        }
    };
    f64::from(code | sign)
}

/// A number with the functions of `map_fns!`: those below, and the others that `f64` has under their names.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct Scalar(f64);

impl Deref for Scalar {
    type Target = f64;

    fn deref(&self) -> &f64 {
        &self.0
    }
}

impl From<Scalar> for f64 {
    fn from(x: Scalar) -> f64 {
        x.0
    }
}

macro_rules! functions {
    ($($name:ident |$x:ident $(, $y:ident)?| $body:expr;)*) => {
        impl Scalar { $(
            fn $name(self $(, $y: Scalar)?) -> Scalar {
                let $x = self.0;
                $(let $y = $y.0;)?
                Scalar($body)
            }
        )* }
    };
}

functions! {
    neg |x| -x;
    sign |x| if x == 0.0 || x.is_nan() { x } else { x.signum() };
    relu |x| if x > 0.0 || x.is_nan() { x } else { 0.0 };
    log |x| x.ln();
    log1p |x| x.ln_1p();
    expm1 |x| x.exp_m1();
    rsqrt |x| 1.0 / x.sqrt();
    sigmoid |x| 1.0 / (1.0 + (-x).exp());
    sigmoid2 |x| 1.0 / (1.0 + (-x).exp2());
    erf |x| libm::erf(x);
    round |x| x.round_ties_even();
    fp8_e4m3 |x| fp8_encode(x, fp8_e4m3);
    fp8_e5m2 |x| fp8_encode(x, fp8_e5m2);
    fp8_e4m3_value |x| fp8_e4m3(x as u32 & 0xff);
    fp8_e5m2_value |x| fp8_e5m2(x as u32 & 0xff);
    add |x, y| x + y;
    sub |x, y| x - y;
    mul |x, y| x * y;
    div |x, y| x / y;
    div_floor |x, y| (x / y).floor();
    rem_floor |x, y| x - (x / y).floor() * y;
    pow |x, y| x.powf(y);
    maximum |x, y| if x.is_nan() || x > y { x } else { y };
    minimum |x, y| if x.is_nan() || x < y { x } else { y };
}

impl Scalar {
    fn is_inf(self) -> bool {
        self.0.is_infinite()
    }
}

macro_rules! operand {
    (Logic $x:expr) => {
        $x != 0.0
    };
    ($domain:ident $x:expr) => {
        Scalar($x)
    };
}

macro_rules! values {
    ($($v:ident $d:ident $n:literal |$($a:ident),*| $body:expr;)*) => {
        fn map_fn(f: MapFn, operands: &[f64]) -> f64 {
            let mut operands = operands.iter().copied();
            let mut next = || operands.next().unwrap();
            match f {
                $(MapFn::$v => {
                    $(let $a = operand!($d next());)*
                    f64::from($body)
                })*
                MapFn::Where => {
                    let (cond, x, y) = (next(), next(), next());
                    if cond != 0.0 { x } else { y }
                }
            }
        }
    };
}
perilune_core::map_fns!(values);

/// Evaluates every lowered node that `roots` need; returns the values of the roots.
pub fn eval(g: &Graph, leaves: &HashMap<NodeId, Vec<f64>>, roots: &[NodeId]) -> Vec<Vec<f64>> {
    let mut needs = vec![false; g.len()];
    roots.iter().for_each(|r| needs[r.index()] = true);
    for i in (0..g.len()).rev() {
        if needs[i] {
            g.nodes()[i].inputs.iter().for_each(|x| needs[x.index()] = true);
        }
    }
    // Lowering appends, so ids are still in topological order.
    let mut v: Vec<Vec<f64>> = vec![Vec::new(); g.len()];
    for id in g.ids().filter(|i| needs[i.index()]) {
        v[id.index()] = node(g, leaves, &v, id);
    }
    roots.iter().map(|r| v[r.index()].clone()).collect()
}

fn node(g: &Graph, leaves: &HashMap<NodeId, Vec<f64>>, v: &[Vec<f64>], id: NodeId) -> Vec<f64> {
    let n = g.node(id);
    let x = |k: usize| &v[n.inputs[k].index()];
    let shape = |k: usize| g.shape(n.inputs[k]);
    let attr = |k: usize| n.attrs[k] as usize;
    match n.op.class {
        Class::Leaf => leaves[&id].clone(),
        Class::Generator(Generator::Scalar) => vec![number(n.payload, n.dtype)],
        Class::Generator(Generator::Constant) => vec![number(n.attrs[0] as u64, n.dtype)],
        Class::Generator(Generator::Iota) => (0..n.shape.numel()).map(|i| i as f64).collect(),
        Class::Generator(Generator::Uniform) => {
            let (seed, counter) = (g.node(n.inputs[0]).payload, g.node(n.inputs[1]).payload);
            (0..n.shape.numel()).map(|p| f64::from(uniform(seed, counter, p as u64))).collect()
        }
        // Recorded for several devices only: `tests/mesh.rs`.
        Class::Generator(Generator::Shard) => panic!("a part of a tensor"),
        Class::View(f) => match f(&Layout::contiguous(shape(0)), &n.attrs, &n.shape) {
            Some(l) => positions(&l).into_iter().map(|p| x(0)[p]).collect(),
            None => x(0).clone(),
        },
        Class::Map(f) => {
            let wide: Vec<Vec<usize>> =
                (0..n.inputs.len()).map(|k| positions(&Layout::contiguous(shape(k)).expand(n.shape))).collect();
            (0..n.shape.numel())
                .map(|i| map_fn(f, &wide.iter().enumerate().map(|(k, p)| x(k)[p[i]]).collect::<Vec<_>>()))
                .collect()
        }
        Class::Cast => x(0)
            .iter()
            .map(|&a| match n.dtype {
                DType::Bool => f64::from(a != 0.0),
                d if d.is_float() => a,
                _ => a.trunc(),
            })
            .collect(),
        Class::Reduce(f) => {
            let s = shape(0);
            let (lo, hi) = (attr(0), attr(1));
            let mid: usize = s.dims()[lo..hi].iter().product();
            let inner: usize = s.dims()[hi..].iter().product();
            (0..n.shape.numel())
                .map(|o| {
                    let (a, b) = (o / inner, o % inner);
                    let all = (0..mid).map(|m| x(0)[(a * mid + m) * inner + b]);
                    all.fold(identity(f, n.dtype), |p, q| map_fn(f.combine(), &[p, q]))
                })
                .collect()
        }
        Class::Library => {
            library(n.op.name, n.shape, &n.attrs, &(0..n.inputs.len()).map(|k| (shape(k), x(k))).collect::<Vec<_>>())
        }
        _ => panic!("{} is not primitive", n.op.name),
    }
}

fn number(bits: u64, dtype: DType) -> f64 {
    if dtype.is_float() { f64::from_bits(bits) } else { bits as i64 as f64 }
}

fn library(name: &str, shape: Shape, attrs: &[i64], xs: &[(Shape, &Vec<f64>)]) -> Vec<f64> {
    let axis = attrs.first().map_or(0, |&a| a as usize);
    let mut out = vec![0.0; shape.numel()];
    let (s0, x0) = xs[0];
    match name {
        "matmul" => {
            let r = shape.rank();
            let (m, n, k) = (shape.dims()[r - 2], shape.dims()[r - 1], s0.dims()[r - 1]);
            for b in 0..shape.dims()[..r - 2].iter().product::<usize>() {
                for i in 0..m {
                    for j in 0..n {
                        out[(b * m + i) * n + j] =
                            (0..k).map(|q| x0[(b * m + i) * k + q] * xs[1].1[(b * k + q) * n + j]).sum();
                    }
                }
            }
        }
        "grouped_matmul" | "grouped_sums" => {
            let (s1, x1, ends) = (xs[1].0, xs[1].1, xs[2].1);
            let (rows, k, n) = (s0.dims()[0], s0.dims()[1], shape.dims()[shape.rank() - 1]);
            for t in 0..rows {
                // The first group that ends after the row.
                let Some(e) = ends.iter().position(|end| *end > t as f64) else { break };
                for (i, j) in (0..k).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    match name {
                        "grouped_sums" => out[(e * k + i) * n + j] += x0[t * k + i] * x1[t * n + j],
                        _ => out[t * n + j] += x0[t * k + i] * x1[at(s1, &[e, i, j])],
                    }
                }
            }
        }
        "strided_pad" => {
            out.fill(f64::from_bits(attrs[4] as u64));
            each(s0, |i| {
                let mut j = i.to_vec();
                j[axis] = attrs[1] as usize + i[axis] * attrs[2] as usize;
                out[at(shape, &j)] = x0[at(s0, i)];
            });
        }
        "col2im" => each(s0, |i| {
            let (last, mut j) = (i[i.len() - 1], i[..i.len() - 1].to_vec());
            j[axis] = i[axis] * attrs[2] as usize + last * attrs[3] as usize;
            out[at(shape, &j)] += x0[at(s0, i)];
        }),
        "cat" => {
            let mut lo = 0;
            for (s, x) in xs {
                each(*s, |i| {
                    let mut j = i.to_vec();
                    j[axis] += lo;
                    out[at(shape, &j)] = x[at(*s, i)];
                });
                lo += s.dims()[axis];
            }
        }
        "gather" => each(shape, |i| {
            let mut j = i.to_vec();
            j[axis] = xs[1].1[at(shape, i)] as usize;
            out[at(shape, i)] = x0[at(s0, &j)];
        }),
        "scatter" | "scatter_add" => {
            out.copy_from_slice(x0);
            each(xs[1].0, |i| {
                let mut j = i.to_vec();
                j[axis] = xs[1].1[at(xs[1].0, i)] as usize;
                let src = xs[2].1[at(xs[1].0, i)];
                let to = &mut out[at(shape, &j)];
                *to = if name == "scatter" { src } else { *to + src };
            });
        }
        "index_select" => each(shape, |i| {
            let mut j = i.to_vec();
            j[axis] = xs[1].1[i[axis]] as usize;
            out[at(shape, i)] = x0[at(s0, &j)];
        }),
        "class_ids" => out.copy_from_slice(x0),
        "index_add" => {
            out.copy_from_slice(x0);
            each(xs[2].0, |i| {
                let mut j = i.to_vec();
                j[axis] = xs[1].1[i[axis]] as usize;
                out[at(shape, &j)] += xs[2].1[at(xs[2].0, i)];
            });
        }
        "cumsum" | "cumprod" => each(shape, |i| {
            let here = at(shape, i);
            let mut j = i.to_vec();
            out[here] = x0[here];
            if i[axis] > 0 {
                j[axis] -= 1;
                let before = out[at(shape, &j)];
                out[here] = if name == "cumsum" { before + x0[here] } else { before * x0[here] };
            }
        }),
        "argsort" | "argreduce" => each(s0.with(axis, 1), |i| {
            let n = s0.dims()[axis];
            let mut j = i.to_vec();
            let row: Vec<f64> = (0..n)
                .map(|k| {
                    j[axis] = k;
                    x0[at(s0, &j)]
                })
                .collect();
            let mut order: Vec<usize> = (0..n).collect();
            let down = attrs[1] != 0;
            order.sort_by(|&a, &b| if down { row[b].total_cmp(&row[a]) } else { row[a].total_cmp(&row[b]) });
            let keep = if name == "argsort" { n } else { 1 };
            for (k, &o) in order.iter().take(keep).enumerate() {
                j[axis] = k;
                out[at(shape, &j)] = o as f64;
            }
        }),
        _ => panic!("no reference for {name}"),
    }
    out
}
