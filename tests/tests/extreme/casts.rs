//! Casts special values between all pairs of dtypes, in every way in which a recipe can reach a cast.

use perilune_core::graph::{NodeId, Number};
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::Engine;
use perilune_tests::harness;

/// Numbers at the limits of the dtypes, and between them.
const FLOATS: &[f64] = &[
    0.0,
    -0.0,
    0.4,
    -0.4,
    0.9,
    -0.9,
    1.0,
    -1.0,
    1.5,
    -1.5,
    2.5,
    127.0,
    128.0,
    254.9,
    255.0,
    255.9,
    256.0,
    300.0,
    -300.0,
    65504.0,
    2147483520.0,
    2147483646.5,
    2147483647.0,
    2147483647.5,
    2147483648.0,
    3e9,
    -2147483648.0,
    -2147483648.9,
    -2147483649.0,
    -3e9,
    4294967295.0,
    4294967296.0,
    4294967551.0,
    9.007199254740993e15,
    9.223372036854774e18,
    9.223372036854776e18,
    9.3e18,
    -9.223372036854776e18,
    -9.3e18,
    1.8446744073709552e19,
    1e20,
    -1e20,
    1e38,
    -1e38,
    1e300,
    -1e300,
    1e-300,
    -1e-300,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
];
const INTS: &[i64] = &[
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    257,
    300,
    -128,
    -129,
    -255,
    -256,
    65535,
    65536,
    2147483647,
    2147483648,
    2147483649,
    -2147483648,
    -2147483649,
    4294967295,
    4294967296,
    4294967297,
    4294967551,
    9007199254740993,
    i64::MAX,
    i64::MAX - 1,
    i64::MIN,
    i64::MIN + 1,
];

/// The values of `dtype`: what the lists above become when they are stored in it.
fn values(dtype: DType) -> HostTensor {
    let mut bytes = Vec::new();
    match dtype {
        _ if dtype.is_float() => {
            FLOATS.iter().for_each(|v| perilune_core::host_tensor::push_f64(dtype, *v, &mut bytes))
        }
        DType::I64 => INTS.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        DType::I32 => INTS.iter().for_each(|v| bytes.extend((*v as i32).to_le_bytes())),
        DType::U8 => bytes.extend(0..=255u8),
        _ => bytes.extend([0, 1]),
    }
    let n = bytes.len() / dtype.size();
    HostTensor::new(dtype, Shape::of(&[n]), bytes)
}

fn range(to: DType) -> (i128, i128) {
    match to {
        DType::U8 => (0, 255),
        DType::I32 => (i128::from(i32::MIN), i128::from(i32::MAX)),
        _ => (i128::from(i64::MIN), i128::from(i64::MAX)),
    }
}

/// What element `i` of `x` is as an integer or bool of `to`, by the rule as the docs state it, in 128 bits.
fn wanted(x: &HostTensor, i: usize, to: DType) -> i64 {
    let (low, high) = range(to);
    if x.dtype.is_float() {
        let v = x.get_f64(i);
        return match v {
            _ if to == DType::Bool => i64::from(v != 0.0),
            v if v.is_nan() => 0,
            v if v.abs() > 1e30 => (if v < 0.0 { low } else { high }) as i64,
            v => (v.trunc() as i128).clamp(low, high) as i64,
        };
    }
    let v = i128::from(x.get_i64(i));
    match to {
        DType::Bool => i64::from(v != 0),
        _ => ((v - low).rem_euclid(high - low + 1) + low) as i64,
    }
}

/// Numbers of `x` as `to`, by each way; with its name.
fn ways(e: &mut Engine, x: &HostTensor, to: DType) -> Vec<(&'static str, HostTensor)> {
    let mut out = vec![("on the host", x.cast(to))];
    let read = |e: &mut Engine, id: NodeId| e.read_node(id).unwrap_or_else(|f| panic!("{}", f.error));
    // Alone; within a region, behind and before other maps; of single elements, seen through a broadcast.
    let id = e.from_host(x.clone());
    let y = e.recorder.graph.cast(id, to).unwrap();
    out.push(("alone", read(e, y)));
    let id = e.from_host(x.clone());
    let g = &mut e.recorder.graph;
    let copy = g.copy(id).unwrap();
    let (y, zero) = (g.cast(copy, to).unwrap(), g.filled(0.0, x.shape, to).unwrap());
    let y = if to == DType::Bool { g.logical_or(y, zero) } else { g.maximum(y, y) }.unwrap();
    out.push(("among maps", read(e, y)));
    let rows: Vec<NodeId> = (0..x.numel())
        .map(|i| {
            let size = x.dtype.size();
            let one = HostTensor::new(x.dtype, Shape::SCALAR, x.bytes[i * size..(i + 1) * size].to_vec());
            let id = e.from_host(one);
            let y = e.recorder.graph.cast(id, to).unwrap();
            e.recorder.graph.reshape(y, &[1]).unwrap()
        })
        .collect();
    let y = e.call(perilune_core::ops::by_name("cat").unwrap(), &cat(rows)).unwrap()[0];
    out.push(("of scalars", read(e, y)));
    // A Lua number on its way into a tensor of that dtype; a number of the program that is cast.
    if matches!(x.dtype, DType::F64 | DType::I64) {
        let number = |i: usize| match x.dtype {
            DType::F64 => Number::Float(x.get_f64(i)),
            _ => Number::Int(x.get_i64(i)),
        };
        for constant in [false, true] {
            let g = &mut e.recorder.graph;
            let ids: Vec<NodeId> = (0..x.numel())
                .map(|i| {
                    let y = match (constant, number(i)) {
                        (false, n) => g.scalar(n, to),
                        (true, Number::Int(n)) => {
                            let c = g.int_constant(n);
                            g.cast(c, to).unwrap()
                        }
                        (true, Number::Float(v)) => {
                            let c = g.constant(v, DType::F64);
                            g.cast(c, to).unwrap()
                        }
                    };
                    g.reshape(y, &[1]).unwrap()
                })
                .collect();
            let y = e.call(perilune_core::ops::by_name("cat").unwrap(), &cat(ids)).unwrap()[0];
            out.push((if constant { "of constants" } else { "of numbers" }, read(e, y)));
        }
    }
    out
}

fn cat(ids: Vec<NodeId>) -> perilune_core::ops::Args {
    use perilune_core::ops::{Args, Value, by_name};
    Args::new(by_name("cat").unwrap(), [Value::Tensors(ids), harness::int(0)])
}

#[test]
fn integers_are_made_by_the_documented_rule() {
    let mut wrong = Vec::new();
    for fusion in [true, false] {
        let mut e = harness::engine(1);
        e.switches.fusion = fusion;
        for from in DType::ALL {
            let x = values(from);
            for to in DType::ALL.into_iter().filter(|d| !d.is_float()) {
                for (way, got) in ways(&mut e, &x, to) {
                    for i in 0..x.numel() {
                        let (g, w) = (got.get_i64(i), wanted(&x, i, to));
                        if g != w {
                            wrong.push(format!("{from} {} as {to}, {way}: {g} instead of {w}", x.get_f64(i)));
                        }
                    }
                }
                e.flush().unwrap_or_else(|f| panic!("{}", f.error));
            }
        }
    }
    assert!(wrong.is_empty(), "{} casts are wrong:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
}

/// Floats that integers and wider floats become are the nearest, by every way alike.
#[test]
fn floats_are_the_same_by_every_way() {
    let mut e = harness::engine(1);
    for from in DType::ALL {
        let x = values(from);
        for to in DType::ALL.into_iter().filter(|d| d.is_float()) {
            let all = ways(&mut e, &x, to);
            for (way, got) in &all[1..] {
                let same = harness::same_bits(std::slice::from_ref(&all[0].1), std::slice::from_ref(got));
                assert!(
                    same,
                    "{from} as {to}, {way}: {}",
                    harness::difference(std::slice::from_ref(&all[0].1), std::slice::from_ref(got))
                );
            }
            e.flush().unwrap_or_else(|f| panic!("{}", f.error));
        }
    }
}
