//! Compares attention to blocks of keys with sums in f64: forward and backward, masked by position and not, in all dtypes.
//!
//! On a GPU (`PERILUNE_DEVICE=cuda:0`) these are its kernels for blocks, elsewhere the decomposition.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, block_attrs, merge};
use perilune_core::ops::{bits, out_of};
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::Engine;
use perilune_tests::harness::{self, Outcome};
use perilune_tests::rng::Pcg;

/// Sizes of a block: batch, query heads, key heads, queries, keys, head sizes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    b: usize,
    h: usize,
    g: usize,
    t: usize,
    s: usize,
    d: usize,
    e: usize,
}

/// What a query sees: with a causal mask or a window, positions count from the first key.
#[derive(Clone, Copy, Debug)]
struct Seen {
    causal: bool,
    window: i64,
    shift: Shift,
    documents: Option<Documents>,
}

/// The document of a position of the whole sequence, of which key 0 has position 1000.
#[derive(Clone, Copy, Debug)]
enum Documents {
    /// So many positions of each.
    Packed(i64),
    /// Some of a few documents, in any order.
    Scattered,
    /// Packed, with ids beyond 32 bits that agree in the lower 32.
    Wide(i64),
    /// Queries and keys have none in common.
    Apart,
}

impl Documents {
    fn of(self, batch: usize, position: i64, is_key: bool) -> i64 {
        let p = position + 7 * batch as i64;
        match self {
            Documents::Packed(n) => p / n,
            Documents::Scattered => p * p % 7 % 3,
            Documents::Wide(n) => (p / n - 5) << 32,
            Documents::Apart => i64::from(is_key),
        }
    }

    /// Ids of `n` adjacent positions of each batch.
    fn ids(self, batches: usize, first: i64, n: usize, is_key: bool) -> HostTensor {
        let of = |b| (0..n as i64).map(move |i| self.of(b, first + i, is_key));
        let ids: Vec<i64> = (0..batches).flat_map(of).collect();
        HostTensor::from_i64(Shape::of(&[batches, n]), &ids)
    }
}

/// The position of the first key.
const FIRST: i64 = 1000;

#[derive(Clone, Copy, Debug)]
enum Shift {
    None,
    /// A tensor on the device, and a constant of the program.
    Stored(i64),
    Constant(i64),
}

impl Shift {
    fn value(self) -> i64 {
        match self {
            Shift::None => 0,
            Shift::Stored(x) | Shift::Constant(x) => x,
        }
    }

    fn node(self, e: &mut Engine) -> Option<NodeId> {
        match self {
            Shift::None => None,
            Shift::Stored(x) => Some(e.from_host(HostTensor::from_i64(Shape::SCALAR, &[x]))),
            Shift::Constant(x) => Some(e.recorder.graph.int_constant(x)),
        }
    }
}

impl Seen {
    fn sees(&self, batch: usize, i: usize, j: usize) -> bool {
        let (i, j) = (i as i64 + self.shift.value(), j as i64);
        let masked = self.causal || self.window > 0;
        let document = |d: Documents| d.of(batch, FIRST + i, false) == d.of(batch, FIRST + j, true);
        (!masked || j <= i) && (self.window == 0 || j > i - self.window) && self.documents.is_none_or(document)
    }

    /// The documents of queries and of keys.
    fn document_nodes(&self, e: &mut Engine, sizes: Sizes) -> Vec<NodeId> {
        let Some(d) = self.documents else { return Vec::new() };
        let own = d.ids(sizes.b, FIRST + self.shift.value(), sizes.t, false);
        [own, d.ids(sizes.b, FIRST, sizes.s, true)].map(|ids| e.from_host(ids)).to_vec()
    }
}

const WHOLE: Seen = Seen { causal: false, window: 0, shift: Shift::None, documents: None };
const CAUSAL: Seen = Seen { causal: true, ..WHOLE };

/// Operands as they are after rounding to the dtype, and what follows from them in f64.
struct Case {
    sizes: Sizes,
    operands: [HostTensor; 4],
    /// Products of rows, and lse of whole rows.
    rows: [HostTensor; 2],
    out: Vec<f64>,
    lse: Vec<f64>,
    grads: [Vec<f64>; 3],
}

fn case(dtype: DType, sizes: Sizes, seen: Seen) -> Case {
    let Sizes { b, h, g, t, s, d, e } = sizes;
    let mut rng = Pcg::new(7);
    let dims = [[b, h, t, d], [b, g, s, d], [b, g, s, e], [b, h, t, e]];
    let operands = dims.map(|dims| harness::randn(&mut rng, dtype, &dims));
    let [q, k, v, grad] = [0, 1, 2, 3].map(|i| operands[i].to_f64());
    let scale = scale(sizes);
    let (mut out, mut lse) = (vec![0.0; b * h * t * e], vec![f64::NEG_INFINITY; b * h * t]);
    let [mut dq, mut dk, mut dv] = [0, 1, 2].map(|i| vec![0.0; operands[i].numel()]);
    // The whole row has other keys, too.
    let wide = dtype.compute();
    let delta = harness::randn(&mut rng, wide, &[b, h, t]);
    let more: Vec<f64> = (0..b * h * t).map(|i| 0.1 + (i % 7) as f64 / 5.0).collect();
    let mut whole = vec![f64::NEG_INFINITY; b * h * t];
    for pair in 0..b * h {
        let key = pair / h * g + pair % h / (h / g);
        for i in 0..t {
            let row = pair * t + i;
            let (own, d_out) = (&q[row * d..][..d], &grad[row * e..][..e]);
            let scores: Vec<f64> = (0..s)
                .map(|j| {
                    if seen.sees(pair / h, i, j) {
                        dot(own, &k[(key * s + j) * d..][..d]) * scale
                    } else {
                        f64::NEG_INFINITY
                    }
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if top == f64::NEG_INFINITY {
                continue;
            }
            lse[row] = top + scores.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
            // As it is stored.
            whole[row] = HostTensor::from_f64(wide, Shape::SCALAR, &[lse[row] + more[row]]).to_f64()[0];
            for (j, x) in scores.iter().enumerate().filter(|x| x.1.is_finite()) {
                let (of_k, of_v) = ((key * s + j) * d, (key * s + j) * e);
                let value = &v[of_v..][..e];
                add_scaled(&mut out[row * e..][..e], (x - lse[row]).exp(), value);
                let p = (x - whole[row]).exp();
                let ds = p * (dot(d_out, value) - delta.get_f64(row)) * scale;
                add_scaled(&mut dv[of_v..][..e], p, d_out);
                add_scaled(&mut dq[row * d..][..d], ds, &k[of_k..][..d]);
                add_scaled(&mut dk[of_k..][..d], ds, own);
            }
        }
    }
    let whole = HostTensor::from_f64(wide, Shape::of(&[b, h, t]), &whole);
    Case { sizes, operands, rows: [delta, whole], out, lse, grads: [dq, dk, dv] }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `by * x` to `to`.
fn add_scaled(to: &mut [f64], by: f64, x: &[f64]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += by * x;
    }
}

fn scale(sizes: Sizes) -> f64 {
    1.0 / (sizes.d as f64).sqrt()
}

fn attrs(sizes: Sizes, seen: Seen) -> [i64; 7] {
    let documents = i64::from(seen.documents.is_some());
    let of_attention = [0, bits(scale(sizes)), 0, sizes.d as i64, sizes.e as i64, documents];
    let masked = seen.causal || seen.window > 0;
    block_attrs(&of_attention, masked, seen.window, !matches!(seen.shift, Shift::None))
}

/// Asserts that the sum of squared errors is at most `limit` of the sum of squares.
fn near(what: &str, got: &[f64], want: &[f64], limit: f64) {
    let far: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let long: f64 = want.iter().map(|x| x * x).sum();
    assert!(got.len() == want.len() && far <= limit * long.max(1e-300), "{what}: {far:e} of {long:e}");
}

/// Runs a block forward and backward and compares it.
fn check(dtype: DType, tf32: bool, sizes: Sizes, seen: Seen) {
    let c = case(dtype, sizes, seen);
    let mut e = harness::engine(1);
    let got = harness::run_with(&mut e, |e| {
        e.recorder.graph.modes.tf32 = tf32;
        let [q, k, v, grad] = c.operands.each_ref().map(|x| e.from_host(x.clone()));
        let [delta, whole] = c.rows.each_ref().map(|x| e.from_host(x.clone()));
        let (documents, shift) = (seen.document_nodes(e, c.sizes), seen.shift.node(e));
        let attrs = attrs(c.sizes, seen);
        let with = |x: &[NodeId]| -> Vec<NodeId> { [x, &documents].concat().into_iter().chain(shift).collect() };
        let g = &mut e.recorder.graph;
        let push = |g: &mut Graph, op, x: &[NodeId]| g.push(op, x, &attrs).map_err(|e| e.to_string());
        let out = push(g, &ATTENTION_BLOCK, &with(&[q, k, v]))?;
        let lse = out_of(g, out, &[(g.shape(delta), dtype.compute())])[1];
        let dq = push(g, &ATTENTION_BLOCK_BACKWARD, &with(&[q, k, v, grad, delta, whole]))?;
        let parts = [(g.shape(k), dtype.compute()), (g.shape(v), dtype.compute())];
        Ok([out, lse].into_iter().chain(out_of(g, dq, &parts)).collect())
    });
    let what = format!("{dtype} tf32 {tf32} {sizes:?} {seen:?}");
    let Outcome::Values(got) = got else { panic!("{what}: {got:?}") };
    assert!(got.iter().all(|x| x.dtype == dtype.compute()), "{what}");
    let (limit, of_lse) = match dtype {
        DType::BF16 => (1e-4, 1e-3),
        DType::F16 => (1e-5, 1e-3),
        DType::F32 if tf32 => (1e-5, 1e-2),
        DType::F32 => (1e-10, 2e-5),
        _ => (1e-25, 1e-12),
    };
    near(&format!("{what}: out"), &got[0].to_f64(), &c.out, limit);
    for (i, (a, b)) in got[1].to_f64().iter().zip(&c.lse).enumerate() {
        assert!(a == b || (a - b).abs() <= of_lse, "{what}: lse {i} is {a}, not {b}");
    }
    for (k, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        near(&format!("{what}: {name}"), &got[2 + k].to_f64(), &c.grads[k], limit);
    }
}

/// Blocks that are seen whole, and with a causal mask or a window at equal positions.
#[test]
fn a_block_is_a_part_of_attention() {
    let sizes = Sizes { b: 2, h: 4, g: 2, t: 150, s: 150, d: 64, e: 64 };
    for (dtype, tf32) in kinds() {
        for seen in [WHOLE, CAUSAL, Seen { window: 37, ..CAUSAL }] {
            check(dtype, tf32, sizes, seen);
        }
        check(dtype, tf32, Sizes { s: 90, ..sizes }, WHOLE);
        check(dtype, tf32, Sizes { s: 90, ..sizes }, CAUSAL);
    }
}

/// Blocks behind and before their queries, wholly or in part; rows without keys.
#[test]
fn positions_of_queries_are_shifted() {
    let sizes = Sizes { b: 1, h: 2, g: 1, t: 200, s: 330, d: 64, e: 64 };
    for (dtype, tf32) in kinds() {
        for shift in [-500, -199, -70, -1, 1, 64, 130, 329, 700] {
            for window in [0, 1, 50, 1000] {
                check(dtype, tf32, sizes, Seen { window, shift: Shift::Stored(shift), ..CAUSAL });
            }
        }
    }
    for shift in [0, -3, 130, 1 << 40] {
        check(DType::BF16, false, sizes, Seen { window: 0, shift: Shift::Constant(shift), ..CAUSAL });
    }
}

/// Queries see the keys of their document: packed, in any order, with ids of 64 bits, and none.
#[test]
fn queries_see_keys_of_their_document() {
    let sizes = Sizes { b: 2, h: 4, g: 2, t: 200, s: 330, d: 64, e: 64 };
    let all =
        [Documents::Packed(64), Documents::Packed(23), Documents::Scattered, Documents::Wide(90), Documents::Apart];
    for (dtype, tf32) in kinds() {
        for documents in all.map(Some) {
            check(dtype, tf32, sizes, Seen { documents, ..WHOLE });
            // Elsewhere one decomposition serves all.
            let shifts: &[i64] = if harness::on_gpu() { &[-70, 0, 64, 130, 329] } else { &[64] };
            for shift in shifts {
                for window in [0, 50] {
                    let seen = Seen { window, shift: Shift::Stored(*shift), documents, ..CAUSAL };
                    check(dtype, tf32, sizes, seen);
                }
            }
        }
        let documents = Some(Documents::Packed(40));
        for (d, e) in [(32, 32), (96, 96), (128, 128), (256, 256), (72, 40), (20, 12)] {
            let sizes = Sizes { b: 1, h: 2, g: 2, t: 140, s: 210, d, e };
            check(dtype, tf32, sizes, Seen { documents, ..WHOLE });
            check(dtype, tf32, Sizes { s: 140, ..sizes }, Seen { documents, ..CAUSAL });
            check(dtype, tf32, sizes, Seen { window: 90, shift: Shift::Stored(75), documents, ..CAUSAL });
        }
    }
}

/// Every head size that kernels are compiled for, and sizes that they pad; sizes without a kernel.
#[test]
fn blocks_of_all_head_sizes() {
    for (dtype, tf32) in kinds() {
        for (d, e) in [(32, 32), (96, 96), (128, 128), (256, 256), (72, 40), (8, 8), (20, 12)] {
            let sizes = Sizes { b: 1, h: 2, g: 2, t: 140, s: 210, d, e };
            check(dtype, tf32, sizes, WHOLE);
            check(dtype, tf32, Sizes { s: 140, ..sizes }, CAUSAL);
            check(dtype, tf32, sizes, Seen { window: 90, shift: Shift::Stored(75), ..CAUSAL });
        }
    }
}

/// A ring of two blocks is attention to all keys, on the same device, to the precision of the dtype.
#[test]
fn merged_blocks_are_the_whole() {
    let sizes = Sizes { b: 2, h: 4, g: 4, t: 128, s: 256, d: 64, e: 64 };
    for (dtype, tf32) in kinds() {
        for seen in [WHOLE, Seen { shift: Shift::Stored(128), ..CAUSAL }, Seen { shift: Shift::Stored(90), ..CAUSAL }] {
            let c = case(dtype, sizes, seen);
            let mut e = harness::engine(1);
            let got = harness::run_with(&mut e, |e| {
                e.recorder.graph.modes.tf32 = tf32;
                let [q, k, v, _] = c.operands.each_ref().map(|x| e.from_host(x.clone()));
                let mut blocks = Vec::new();
                for first in [0, 96] {
                    let end = if first == 0 { 96 } else { 256 };
                    let shift = match seen.shift {
                        Shift::Stored(x) => Shift::Stored(x - first as i64).node(e),
                        _ => None,
                    };
                    let g = &mut e.recorder.graph;
                    let [k, v] = [k, v].map(|x| g.slice(x, 2, first, end, 1).unwrap());
                    let inputs: Vec<NodeId> = [q, k, v].into_iter().chain(shift).collect();
                    let out = g.push(&ATTENTION_BLOCK, &inputs, &attrs(sizes, seen)).unwrap();
                    let rows = g.shape(out).remove(3);
                    blocks.push([out, out_of(g, out, &[(rows, dtype.compute())])[1]]);
                }
                merge(&mut e.recorder.graph, blocks[0], blocks[1]).map(|x| x.to_vec()).map_err(|e| e.to_string())
            });
            let Outcome::Values(got) = got else { panic!("{got:?}") };
            let limit = if dtype == DType::F64 {
                1e-25
            } else if dtype == DType::F32 && !tf32 {
                1e-10
            } else {
                1e-4
            };
            near(&format!("{dtype} {tf32} {seen:?}"), &got[0].to_f64(), &c.out, limit);
        }
    }
}

/// The dtypes, in f32 also with products in tf32, which only a GPU has.
fn kinds() -> impl Iterator<Item = (DType, bool)> {
    let plain = [DType::BF16, DType::F16, DType::F32, DType::F64].map(|dtype| (dtype, false));
    plain.into_iter().chain(harness::on_gpu().then_some((DType::F32, true)))
}
