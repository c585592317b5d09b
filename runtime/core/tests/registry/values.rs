//! Compares values of composite ops with plain loops, identities and numbers computed by hand.

use crate::eval::{eval, lower};
use crate::record;
use crate::sample::Leaves;
use perilune_core::ops::{self, by_name};
use perilune_core::{DType, Graph, NodeId, grad};
use std::collections::HashMap;

fn values(g: &mut Graph, leaves: &Leaves, roots: &[NodeId]) -> Vec<Vec<f64>> {
    let low = lower(g, roots, &mut HashMap::new());
    eval(g, &leaves.values, &low)
}

/// The outputs of a call, and the values and dims of its float inputs.
fn run(name: &str, text: &str) -> (Vec<Vec<f64>>, Vec<(Vec<usize>, Vec<f64>)>) {
    let (mut g, leaves, outs) = record(by_name(name).unwrap(), text, DType::F64);
    let inputs = leaves.floats.iter().map(|x| (g.shape(*x).dims().to_vec(), leaves.values[x].clone())).collect();
    (values(&mut g, &leaves, &outs), inputs)
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= 1e-9 * (1.0 + y.abs()), "element {i}: {x}, expected {y}");
    }
}

#[test]
fn conv2d_equals_its_definition() {
    let (out, inputs) =
        run("conv2d", "f(2,4,7,6), f(6,2,3,2), f(6), groups=2, dilation=[2,1], stride=[1,2], padding=[1,2]");
    let [(_, x), (_, w), (_, b)] = &inputs[..] else { panic!() };
    let mut want = Vec::new();
    for n in 0..2 {
        for o in 0..6 {
            for i in 0..5 {
                for j in 0..5 {
                    let mut sum = b[o];
                    for c in 0..2 {
                        for p in 0..3 {
                            for q in 0..2 {
                                let (r, s) = ((i + p * 2) as isize - 1, (j * 2 + q) as isize - 2);
                                if (0..7).contains(&r) && (0..6).contains(&s) {
                                    let at = ((n * 4 + o / 3 * 2 + c) * 7 + r as usize) * 6 + s as usize;
                                    sum += x[at] * w[((o * 2 + c) * 3 + p) * 2 + q];
                                }
                            }
                        }
                    }
                    want.push(sum);
                }
            }
        }
    }
    close(&out[0], &want);
}

#[test]
fn transposed_convolution_is_the_gradient_of_convolution() {
    let options = "nil, stride=[2,3], padding=1, dilation=[1,2], groups=2";
    let (mut g, leaves, y) =
        record(by_name("conv2d").unwrap(), &format!("f(2,4,8,9), f(6,2,3,2), {options}"), DType::F64);
    let (x, w) = (leaves.floats[0], leaves.floats[1]);
    let d = grad::grad(&mut g, y[0], y[0], &[x], false).unwrap()[0].unwrap();
    let op = by_name("conv_transpose2d").unwrap();
    let mut other = Leaves::default();
    let text = format!("f(2,6,4,3), f(6,2,3,2), {options}, output_padding=[1,2]");
    let mut args = other.args(&mut g, op, &text, DType::F64);
    args.values[0] = ops::Value::Tensor(y[0]);
    args.values[1] = ops::Value::Tensor(w);
    let back = ops::call(&mut g, op, &args).unwrap()[0];
    let out = values(&mut g, &leaves, &[back, d]);
    close(&out[0], &out[1]);
}

#[test]
fn grouped_queries_are_repeated_keys() {
    let (mut g, leaves, out) = record(
        by_name("scaled_dot_product_attention").unwrap(),
        "f(2,6,5,3), f(2,2,5,3), f(2,2,5,4), enable_gqa=true, window=2",
        DType::F64,
    );
    let [q, k, v] = [0, 1, 2].map(|i| leaves.values[&leaves.floats[i]].clone());
    let got = values(&mut g, &leaves, &out);
    let mut want = Vec::new();
    for (b, h, t) in (0..2).flat_map(|b| (0..6).flat_map(move |h| (0..5).map(move |t| (b, h, t)))) {
        let row = |x: &[f64], heads: usize, h: usize, t: usize, n: usize| {
            let at = ((b * heads + h) * 5 + t) * n;
            x[at..at + n].to_vec()
        };
        let keys: Vec<usize> = (0..5).filter(|&s| s <= t && s + 2 > t).collect();
        let query = row(&q, 6, h, t, 3);
        let e: Vec<f64> = keys
            .iter()
            .map(|&s| (query.iter().zip(row(&k, 2, h / 3, s, 3)).map(|(a, b)| a * b).sum::<f64>() / 3f64.sqrt()).exp())
            .collect();
        let total: f64 = e.iter().sum();
        for c in 0..4 {
            want.push(keys.iter().zip(&e).map(|(&s, e)| e / total * row(&v, 2, h / 3, s, 4)[c]).sum());
        }
    }
    close(&got[0], &want);
}

#[test]
fn a_query_without_keys_gives_zero() {
    let op = by_name("scaled_dot_product_attention").unwrap();
    let (mut g, mut leaves, out) = record(op, "f(2,3), f(4,3), f(4,3), mask=b(2,4)", DType::F64);
    let mask = *leaves.values.keys().max().unwrap();
    leaves.values.insert(mask, vec![0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    let d = grad::grad(&mut g, out[0], out[0], &leaves.floats.clone(), false).unwrap();
    let v = leaves.values[&leaves.floats[2]].clone();
    let roots: Vec<NodeId> = out.iter().copied().chain(d.into_iter().flatten()).collect();
    let got = values(&mut g, &leaves, &roots);
    close(&got[0], &[&[0.0; 3], &v[3..6]].concat());
    assert!(got.iter().flatten().all(|x| x.is_finite()));
}

#[test]
fn rope_rotates_pairs_by_position() {
    for (options, pair) in [("", [0usize, 2]), (", nil, interleaved=true", [0, 1])] {
        let (out, inputs) = run("rope", &format!("f(3,4){options}"));
        let x = &inputs[0].1;
        let other = if pair[1] == 2 { [1, 3] } else { [2, 3] };
        let mut want = vec![0.0; 12];
        for t in 0..3 {
            for (i, [p, q]) in [(0, pair), (1, other)] {
                let angle = t as f64 * 1e4f64.powf(-2.0 * i as f64 / 4.0);
                let (a, b) = (x[t * 4 + p], x[t * 4 + q]);
                want[t * 4 + p] = a * angle.cos() - b * angle.sin();
                want[t * 4 + q] = b * angle.cos() + a * angle.sin();
            }
        }
        close(&out[0], &want);
    }
}

#[test]
fn cross_entropy_of_ids_is_that_of_one_hot_rows() {
    let (mut g, mut leaves, ids) =
        record(by_name("cross_entropy").unwrap(), "f(4,3), i(3;4), ignore_index=1, label_smoothing=0.1", DType::F64);
    let x = leaves.values[&leaves.floats[0]].clone();
    let target = *leaves.values.keys().max().unwrap();
    leaves.values.insert(target, vec![2.0, 1.0, 0.0, 1.0]);
    let mut want = 0.0;
    for (r, t) in [(0, 2), (2, 0)] {
        let row = &x[r * 3..r * 3 + 3];
        let lse = row.iter().map(|v| v.exp()).sum::<f64>().ln();
        let p = |c: usize| if c == t { 0.9 + 0.1 / 3.0 } else { 0.1 / 3.0 };
        want += (0..3).map(|c| p(c) * (lse - row[c])).sum::<f64>() / 2.0;
    }
    close(&values(&mut g, &leaves, &ids)[0], &[want]);
}

#[test]
fn group_norm_takes_neighbouring_channels() {
    let (out, inputs) = run("group_norm", "f(2,4,3), 2, f(4), f(4), eps=0.01");
    let [(_, x), (_, w), (_, b)] = &inputs[..] else { panic!() };
    let mut want = Vec::new();
    for (k, rows) in x.chunks(6).enumerate() {
        let mean = rows.iter().sum::<f64>() / 6.0;
        let var = rows.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 6.0;
        for (i, v) in rows.iter().enumerate() {
            let c = k % 2 * 2 + i / 3;
            want.push((v - mean) / (var + 0.01).sqrt() * w[c] + b[c]);
        }
    }
    close(&out[0], &want);
}

#[test]
fn interpolation_of_a_ramp() {
    let line = |text: &str| {
        let (mut g, mut leaves, out) = record(by_name("interpolate").unwrap(), text, DType::F64);
        let x = leaves.floats[0];
        let n = leaves.values[&x].len();
        leaves.values.insert(x, (0..n).map(|i| i as f64).collect());
        values(&mut g, &leaves, &out).remove(0)
    };
    // From the coordinate rules of torch.nn.functional.interpolate, by hand.
    close(&line("f(1,1,4), size=6"), &[0.0, 0.0, 1.0, 2.0, 2.0, 3.0]);
    close(&line("f(1,1,4), size=8, mode='linear'"), &[0.0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]);
    close(&line("f(1,1,4), size=7, mode='linear', align_corners=true"), &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
    close(&line("f(1,1,4), scale=0.5, mode='linear'"), &[0.5, 2.5]);
    close(
        &line("f(1,1,2,2), scale=2"),
        &[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 2.0, 2.0, 3.0, 3.0],
    );
}

#[test]
fn adaptive_pooling_covers_unevenly() {
    let (out, inputs) = run("adaptive_avg_pool2d", "f(1,1,1,5), [1,3]");
    let x = &inputs[0].1;
    close(&out[0], &[(x[0] + x[1]) / 2.0, (x[1] + x[2] + x[3]) / 3.0, (x[3] + x[4]) / 2.0]);
}

#[test]
fn padding_is_left_out_of_averages_when_asked() {
    let (out, inputs) = run("avg_pool1d", "f(1,1,3), 3, stride=2, padding=1, count_include_pad=false");
    let x = &inputs[0].1;
    close(&out[0], &[(x[0] + x[1]) / 2.0, (x[1] + x[2]) / 2.0]);
}

#[test]
fn adamw_takes_the_step_of_the_paper() {
    let (out, inputs) = run("adamw_update", "f(4), f(4), f(4), p(4), lr=0.1, weight_decay=0.1, step=7");
    let [(_, w), (_, d), (_, m), (_, v)] = &inputs[..] else { panic!() };
    for i in 0..4 {
        let (m, v) = (0.9 * m[i] + 0.1 * d[i], 0.999 * v[i] + 0.001 * d[i] * d[i]);
        let (mhat, vhat) = (m / (1.0 - 0.9f64.powi(7)), v / (1.0 - 0.999f64.powi(7)));
        close(&[out[0][i], out[1][i], out[2][i]], &[w[i] * 0.99 - 0.1 * mhat / (vhat.sqrt() + 1e-8), m, v]);
    }
}

#[test]
fn activations_at_known_points() {
    let at = |name: &str, options: &str, x: f64| {
        let (mut g, mut leaves, out) = record(by_name(name).unwrap(), &format!("f(){options}"), DType::F64);
        let leaf = leaves.floats[0];
        leaves.values.insert(leaf, vec![x]);
        values(&mut g, &leaves, &out)[0][0]
    };
    // The closed forms, to 16 digits.
    close(&[at("gelu", "", 1.0)], &[0.841_344_746_068_542_9]);
    close(&[at("gelu", ", approximate='tanh'", 1.0)], &[0.841_191_990_608_276_7]);
    close(&[at("mish", "", 1.0), at("mish", "", 40.0)], &[0.865_098_388_267_310_3, 40.0]);
    close(&[at("softplus", "", 1.0), at("softplus", "", 900.0)], &[1.313_261_687_518_222_8, 900.0]);
    close(&[at("hardswish", "", 1.0), at("hardswish", "", -4.0), at("hardswish", "", 5.0)], &[2.0 / 3.0, 0.0, 5.0]);
    close(&[at("elu", "", -1.0), at("selu", "", -1.0)], &[-0.632_120_558_828_557_7, -1.111_330_737_812_562_3]);
    close(&[at("logsigmoid", "", -800.0), at("silu", "", 1.0)], &[-800.0, 0.731_058_578_630_004_9]);
}
