//! Compares chains of views and copies with extreme numbers to a reference with 128-bit index arithmetic.
//!
//! The reference stores for each element the input element that it shows, or that it is a constant. Its rules are those of
//! the ops' docs, implemented independently: whether a call is valid, and the shape and elements of its result.

use crate::{caught, engine, extreme, report, seeds};
use perilune_core::graph::NodeId;
use perilune_core::ops::Value;
use perilune_core::shape::MAX_NUMEL;
use perilune_core::{HostTensor, MAX_RANK, Shape};
use perilune_engine::Engine;
use perilune_tests::harness::{self, int, ints, t};
use perilune_tests::rng::Pcg;

/// The number of elements up to which a chain continues.
const SMALL: i128 = 4096;

/// A tensor: its dims, and for each element the input element that it shows.
#[derive(Clone, Debug)]
struct Tensor {
    dims: Vec<i128>,
    values: Vec<i64>,
}

/// The expected outcome of a call: an error, a tensor that is too large to compare, or this one.
enum Want {
    Refused,
    Large(Vec<i128>),
    Small(Tensor),
}

impl Tensor {
    fn rank(&self) -> i64 {
        self.dims.len() as i64
    }

    /// Returns the tensor of dims `dims` whose element at `i` is that of this one at `from(i)`, or 0.
    fn gather(&self, dims: Vec<i128>, from: impl Fn(&[i128]) -> Option<Vec<i128>>) -> Want {
        if dims.len() > MAX_RANK || dims.iter().any(|d| *d < 0) {
            return Want::Refused;
        }
        let bound = dims.iter().try_fold(1i128, |n, d| n.checked_mul((*d).max(1)));
        if bound.is_none_or(|n| n > MAX_NUMEL as i128) {
            return Want::Refused;
        }
        let numel: i128 = dims.iter().product();
        if numel > SMALL {
            return Want::Large(dims);
        }
        let mut values = Vec::new();
        let mut i = vec![0i128; dims.len()];
        for _ in 0..numel {
            values.push(from(&i).map_or(0, |at| {
                let flat = at.iter().zip(&self.dims).fold(0i128, |o, (k, d)| {
                    assert!((0..*d).contains(k), "the reference reads {at:?} of {:?}", self.dims);
                    o * d + k
                });
                self.values[flat as usize]
            }));
            for k in (0..dims.len()).rev() {
                i[k] += 1;
                if i[k] < dims[k] {
                    break;
                }
                i[k] = 0;
            }
        }
        Want::Small(Tensor { dims, values })
    }

    /// Returns the same elements in order with other dims.
    fn reshaped(&self, dims: Vec<i128>) -> Want {
        let flat = Tensor { dims: vec![self.values.len() as i128], values: self.values.clone() };
        let of = dims.clone();
        if dims.iter().any(|d| *d < 0) || dims.iter().try_fold(1i128, |n, d| n.checked_mul(*d)) != Some(flat.dims[0]) {
            return Want::Refused;
        }
        flat.gather(dims, move |i| Some(vec![i.iter().zip(&of).fold(0, |o, (k, d)| o * d + k)]))
    }

    /// Returns this tensor with dim `at` of size `n`, whose element `i` is element `from(i)`.
    fn along(&self, at: usize, n: i128, from: impl Fn(i128) -> Option<i128>) -> Want {
        let mut dims = self.dims.clone();
        dims[at] = n;
        self.gather(dims, move |i| {
            let mut j = i.to_vec();
            j[at] = from(i[at])?;
            Some(j)
        })
    }

    fn axis(&self, dim: i64) -> Option<usize> {
        let at = if dim < 0 { i128::from(dim) + i128::from(self.rank()) } else { i128::from(dim) };
        (0..i128::from(self.rank())).contains(&at).then_some(at as usize)
    }
}

/// Makes a random call: its name, its arguments after the tensor, and the expected outcome.
fn step(rng: &mut Pcg, x: &Tensor) -> (&'static str, Vec<Value>, Want) {
    let wide = i128::from;
    let rank = x.rank();
    // Mostly a valid dim.
    let dim = if rank > 0 && !rng.one_in(8) { rng.range(-rank, rank) } else { extreme(rng, rank) };
    let at = x.axis(dim);
    let n = at.map_or(1, |at| x.dims[at]);
    let near = |rng: &mut Pcg| match rng.below(5) {
        0 => extreme(rng, n as i64),
        1 => -rng.range(0, n as i64 + 2),
        _ => rng.range(0, n as i64 + 2),
    };
    let (a, b, c) = (near(rng), near(rng), near(rng));
    let (wa, wb, wc) = (wide(a), wide(b), wide(c));
    let refuse = |at: Option<usize>, f: &dyn Fn(usize) -> Want| at.map_or(Want::Refused, f);
    // Clamp the ends of a range as NumPy does.
    let cut = |v: i128| if v < 0 { v + n } else { v }.clamp(0, n);
    match rng.below(12) {
        0 => {
            let lo = if wa < 0 { wa + n } else { wa };
            let fits = lo >= 0 && wb >= 0 && lo + wb <= n;
            let want = refuse(at, &|at| if fits { x.along(at, wb, |i| Some(lo + i)) } else { Want::Refused });
            ("narrow", vec![int(dim), int(a), int(b)], want)
        }
        1 => {
            let (lo, hi) = (cut(wa), cut(wb).max(cut(wa)));
            let count = if wc >= 1 { (hi - lo + wc - 1) / wc } else { -1 };
            let want =
                refuse(at, &|at| if wc >= 1 { x.along(at, count, |i| Some(lo + i * wc)) } else { Want::Refused });
            ("slice", vec![int(dim), int(a), int(b), int(c)], want)
        }
        2 => {
            let i = if wa < 0 { wa + n } else { wa };
            let want = refuse(at, &|at| {
                if !(0..n).contains(&i) {
                    return Want::Refused;
                }
                let mut dims = x.dims.clone();
                dims.remove(at);
                x.gather(dims, |j| Some([&j[..at], &[i], &j[at..]].concat()))
            });
            ("select", vec![int(dim), int(a)], want)
        }
        3 => ("flip", vec![ints(&[dim])], refuse(at, &|at| x.along(at, n, |i| Some(n - 1 - i)))),
        4 => {
            // Pads of the last dim, and sometimes of the one before.
            let mut pads = vec![a, b];
            if rng.one_in(3) {
                pads.extend([near(rng), 0]);
            }
            let mut want = if pads.len() > 2 * x.dims.len() { Want::Refused } else { Want::Small(x.clone()) };
            for (k, p) in pads.chunks(2).enumerate() {
                let Want::Small(y) = &want else { break };
                let (lo, hi, at) = (wide(p[0]), wide(p[1]), y.dims.len() - 1 - k);
                let n = y.dims[at];
                let inside = n + lo.min(0) + hi.min(0) >= 0;
                let place = move |i: i128| Some(i - lo).filter(|j| (0..n).contains(j));
                want = if inside { y.along(at, n + lo + hi, place) } else { Want::Refused };
            }
            // The result of further padding is unknown here.
            let open = matches!(want, Want::Large(_)) && pads.len() > 2;
            if open {
                want = Want::Large(Vec::new());
            }
            ("pad", vec![ints(&pads)], want)
        }
        5 => {
            let mut axes: Vec<i64> = (0..rank).collect();
            for i in (1..axes.len()).rev() {
                axes.swap(i, rng.below(i + 1));
            }
            if rng.one_in(6) && !axes.is_empty() {
                let k = rng.below(axes.len());
                axes[k] = a;
            }
            let found: Option<Vec<usize>> = axes.iter().map(|d| x.axis(*d)).collect();
            let want = match found {
                Some(f) if (0..x.dims.len()).all(|k| f.contains(&k)) && f.len() == x.dims.len() => {
                    let dims = f.iter().map(|k| x.dims[*k]).collect();
                    x.gather(dims, |i| {
                        let mut j = vec![0; i.len()];
                        f.iter().zip(i).for_each(|(k, v)| j[*k] = *v);
                        Some(j)
                    })
                }
                _ => Want::Refused,
            };
            ("permute", vec![ints(&axes)], want)
        }
        6 => {
            // New leading dims, expanded dims of 1, -1 for unchanged dims.
            let lead = rng.below(2);
            let mut shape: Vec<i64> = (0..lead).map(|_| near(rng)).collect();
            for d in &x.dims {
                shape.push(match (*d, rng.below(3)) {
                    (_, 0) => -1,
                    (1, _) => near(rng),
                    (d, _) if !rng.one_in(8) => d as i64,
                    _ => near(rng),
                });
            }
            let mut dims: Vec<i128> = shape.iter().map(|d| wide(*d)).collect();
            for (d, own) in dims[lead..].iter_mut().zip(&x.dims) {
                *d = if *d == -1 { *own } else { *d };
            }
            let fits = dims[lead..].iter().zip(&x.dims).all(|(d, own)| d == own || *own == 1);
            let want = if fits {
                x.gather(dims, |i| {
                    Some(i[lead..].iter().zip(&x.dims).map(|(k, d)| if *d == 1 { 0 } else { *k }).collect())
                })
            } else {
                Want::Refused
            };
            ("expand", vec![ints(&shape)], want)
        }
        7 => {
            let numel = x.values.len() as i128;
            let k = rng.range(1, 5);
            let mut shape = match rng.below(4) {
                0 => vec![-1, k],
                1 => vec![k, -1, 1],
                2 if numel % wide(k) == 0 => vec![k, (numel / wide(k)) as i64],
                _ => vec![a, b],
            };
            if rng.one_in(6) {
                shape.push(c);
            }
            let free: Vec<usize> = (0..shape.len()).filter(|k| shape[*k] == -1).collect();
            let mut dims: Vec<i128> = shape.iter().map(|d| wide(*d)).collect();
            let rest = dims.iter().filter(|d| **d != -1).try_fold(1i128, |n, d| n.checked_mul(*d));
            let want = match (&free[..], rest) {
                ([], _) => x.reshaped(dims),
                ([f], Some(rest)) if rest > 0 && numel % rest == 0 => {
                    dims[*f] = numel / rest;
                    x.reshaped(dims)
                }
                _ => Want::Refused,
            };
            ("view", vec![ints(&shape)], want)
        }
        8 => {
            let count = if wa >= 1 && wb >= 1 && wa <= n { (n - wa) / wb + 1 } else { -1 };
            let want = refuse(at, &|at| {
                if count < 0 {
                    return Want::Refused;
                }
                let mut dims = x.dims.clone();
                dims[at] = count;
                dims.push(wa);
                x.gather(dims, |i| {
                    let (last, mut j) = (i[i.len() - 1], i[..i.len() - 1].to_vec());
                    j[at] = i[at] * wb + last;
                    Some(j)
                })
            });
            ("unfold", vec![int(dim), int(a), int(b)], want)
        }
        9 => {
            let want = refuse(at, &|at| x.along(at, n, |i| Some((i - wa).rem_euclid(n.max(1)))));
            ("roll", vec![ints(&[a]), ints(&[dim])], want)
        }
        10 => {
            let want = refuse(at, &|at| if wa < 0 { Want::Refused } else { x.along(at, n * wa, |i| Some(i / wa)) });
            ("repeat_interleave", vec![ints(&[a]), int(dim)], want)
        }
        _ => {
            // One number repeats the last dim; it makes a dim of a scalar.
            let want = match x.dims.len() {
                _ if wa < 0 => Want::Refused,
                0 => x.gather(vec![wa], |_| Some(vec![])),
                r => x.along(r - 1, x.dims[r - 1] * wa, |i| Some(i % x.dims[r - 1])),
            };
            ("tile", vec![ints(&[a])], want)
        }
    }
}

/// Runs a chain. Returns its fault, if any, and the number of accepted calls.
fn chain(e: &mut Engine, seed: u64) -> Result<usize, String> {
    let rng = &mut Pcg::new(seed ^ 0x71e3);
    let dims: Vec<usize> = (0..rng.below(5)).map(|_| *rng.pick(&[1, 2, 3, 4, 1, 5, 0])).collect();
    let numel: usize = dims.iter().product();
    let values: Vec<i64> = (1..=numel as i64).collect();
    let mut x = Tensor { dims: dims.iter().map(|d| *d as i128).collect(), values: values.clone() };
    let mut id: NodeId = e.from_host(HostTensor::from_i64(Shape::of(&dims), &values));
    let (mut text, mut accepted) = (format!("{dims:?}"), 0);
    for _ in 0..6 {
        let (name, rest, want) = step(rng, &x);
        let args: Vec<Value> = [vec![t(id)], rest.clone()].concat();
        let got = harness::call(e, name, &args, &[]);
        text.push_str(&format!(" {name}{:?}", rest));
        let shape =
            |id: NodeId, e: &Engine| e.recorder.graph.shape(id).dims().iter().map(|d| *d as i128).collect::<Vec<_>>();
        match (got, want) {
            (Err(m), Want::Refused) if m.len() < 600 => {}
            (Err(_), Want::Large(dims)) if dims.is_empty() => {}
            (Err(m), _) => return Err(format!("{text}: is refused: {m}")),
            (Ok(y), Want::Refused) => return Err(format!("{text}: gives {:?}", shape(y, e))),
            (Ok(y), Want::Large(dims)) => {
                if !dims.is_empty() && shape(y, e) != dims {
                    return Err(format!("{text}: shape {:?} instead of {dims:?}", shape(y, e)));
                }
                accepted += 1;
            }
            (Ok(y), Want::Small(next)) => {
                if shape(y, e) != next.dims {
                    return Err(format!("{text}: shape {:?} instead of {:?}", shape(y, e), next.dims));
                }
                (id, x) = (y, next);
                accepted += 1;
            }
        }
    }
    let got = e.read_node(id).map_err(|f| format!("{text}: {}", f.error))?;
    if got.to_i64() != x.values {
        return Err(format!("{text}: {:?} instead of {:?}", got.to_i64(), x.values));
    }
    Ok(accepted)
}

#[test]
fn views_of_views_are_as_computed_in_128_bits() {
    let mut e = engine();
    let (mut found, mut accepted, mut chains) = (Vec::new(), 0, 0);
    for seed in seeds(20_000) {
        match caught(|| chain(&mut e, seed)) {
            Ok(n) => accepted += n,
            Err(m) => {
                if m.contains("PANIC") {
                    e = engine();
                }
                found.push(format!("[seed {seed}] {m}"));
            }
        }
        chains += 1;
        e.flush().unwrap_or_else(|f| panic!("{}", f.error));
    }
    report(found);
    assert!(chains < 1000 || accepted > chains * 2, "{accepted} calls of {chains} chains were accepted");
}
