//! Fills samples with numbers to make test cases: calls that run here, and in PyTorch for reference.

use crate::rng::Pcg;
use crate::sample::{self, Expr, Kind, Sample};
use perilune_core::graph::Number;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{self, Class, Op, Value};
use perilune_core::{DType, HostTensor, Shape};
use serde_json::{Map, Value as Json, json};

/// The numbers in the float tensors of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Variant {
    /// f64 of full precision.
    Full,
    /// f64 that are exact in every float dtype, so that one reference serves all dtypes.
    Grid,
    /// Small integers (or bools) of that dtype in place of floats.
    As(DType),
}

impl Variant {
    pub const ALL: [Variant; 6] = [
        Variant::Full,
        Variant::Grid,
        Variant::As(DType::I64),
        Variant::As(DType::I32),
        Variant::As(DType::U8),
        Variant::As(DType::Bool),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Variant::Full => "full",
            Variant::Grid => "grid",
            Variant::As(d) => d.name(),
        }
    }
}

/// A tensor argument: logical values in row-major order, all exact in `dtype`.
#[derive(Clone, Debug)]
pub struct Data {
    pub kind: Kind,
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub values: Vec<f64>,
}

impl Data {
    pub fn host(&self) -> HostTensor {
        HostTensor::from_f64(self.dtype, Shape::of(&self.dims), &self.values)
    }

    /// The same values in another dtype.
    #[must_use]
    pub fn cast(&self, dtype: DType) -> Data {
        Data { dtype, ..self.clone() }
    }

    /// Returns the first element, as a tensor of rank 0.
    #[must_use]
    fn first(&self) -> Data {
        Data { dims: Vec::new(), values: self.values[..1].to_vec(), ..self.clone() }
    }

    fn json(&self) -> Json {
        // JSON cannot represent these.
        let values: Vec<Json> =
            self.values.iter().map(|v| if v.is_finite() { json!(v) } else { json!(v.to_string()) }).collect();
        json!({"dtype": self.dtype.name(), "shape": self.dims, "values": values, "float": self.kind.is_float()})
    }
}

/// An argument of a case.
#[derive(Clone, Debug)]
pub enum Arg {
    Tensor(Data),
    Tensors(Vec<Data>),
    Value(Value),
}

/// A call to run.
#[derive(Clone, Debug)]
pub struct Case {
    pub op: &'static Op,
    /// Returns the name of the case in the reference.
    pub key: String,
    pub variant: Variant,
    pub names: Vec<&'static str>,
    pub args: Vec<Arg>,
}

impl Case {
    pub fn tensors(&self) -> impl Iterator<Item = &Data> {
        self.args.iter().flat_map(|a| match a {
            Arg::Tensor(d) => std::slice::from_ref(d),
            Arg::Tensors(ds) => ds.as_slice(),
            Arg::Value(_) => &[],
        })
    }

    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Data> {
        self.args.iter_mut().flat_map(|a| match a {
            Arg::Tensor(d) => std::slice::from_mut(d),
            Arg::Tensors(ds) => ds.as_mut_slice(),
            Arg::Value(_) => &mut [],
        })
    }

    pub fn has_floats(&self) -> bool {
        self.tensors().any(|t| t.kind.is_float())
    }

    pub fn has_ints(&self) -> bool {
        self.tensors().any(|t| matches!(t.kind, Kind::Int(_) | Kind::Ends(_) | Kind::Perm))
    }

    /// The case with its float tensors in `dtype`.
    #[must_use]
    pub fn floats_as(&self, dtype: DType) -> Case {
        let mut c = self.clone();
        c.tensors_mut().filter(|t| t.kind.is_float()).for_each(|t| t.dtype = dtype);
        c
    }

    /// The case with its integer tensors in `dtype`.
    #[must_use]
    pub fn ints_as(&self, dtype: DType) -> Case {
        let mut c = self.clone();
        c.tensors_mut()
            .filter(|t| matches!(t.kind, Kind::Int(_) | Kind::Ends(_) | Kind::Perm))
            .for_each(|t| t.dtype = dtype);
        c
    }

    /// Returns the JSON that the reference script reads.
    pub fn json(&self) -> Json {
        let mut args = Map::new();
        for (name, a) in self.names.iter().zip(&self.args) {
            let v = match a {
                Arg::Tensor(d) => d.json(),
                Arg::Tensors(ds) => Json::Array(ds.iter().map(Data::json).collect()),
                Arg::Value(Value::None) => Json::Null,
                Arg::Value(Value::Number(Number::Int(i))) => json!(i),
                Arg::Value(Value::Number(Number::Float(f))) if f.is_finite() => json!(f),
                Arg::Value(Value::Number(Number::Float(f))) => json!({ "number": f.to_string() }),
                Arg::Value(Value::Ints(v)) => json!(v.as_slice()),
                Arg::Value(Value::Bool(b)) => json!(b),
                Arg::Value(Value::Str(s)) => json!(s),
                Arg::Value(Value::DType(d)) => json!({ "dtype_name": d.name() }),
                Arg::Value(Value::Tensor(_) | Value::Tensors(_)) => Json::Null,
            };
            args.insert((*name).to_string(), v);
        }
        // Only ops that convert integers to floats; linear does not.
        let composite = matches!(self.op.class, Class::Fused(_)) && self.op.name != "linear";
        json!({"key": self.key, "op": self.op.name, "variant": self.variant.name(), "composite": composite, "args": args})
    }
}

/// Samples in addition to those of the registry: one element, no elements, options that no sample uses.
pub const EXTRA: &[(&str, &str)] = &[
    ("add", "f(1), f(1)"),
    ("add", "f(2,1,3), f(4,1)"),
    ("add", "f(1,0), f(3,1)"),
    ("mul", "f(0), f()"),
    ("sub", "1.5, f(2,3)"),
    ("div", "2, p(3)"),
    ("pow", "2.0, f(3)"),
    ("pow", "f(2,3), 1"),
    ("pow", "p(2,3), -0.5"),
    ("remainder", "f(2,3), -1.5"),
    ("floor_div", "f(2,3), -1.5"),
    ("where", "b(), f(2,3), f(2,3)"),
    ("sum", "f(1)"),
    ("sum", "f(1,1), 0"),
    ("sum", "f(0)"),
    ("sum", "f(3,4,5), [1,2]"),
    ("sum", "f(3,4,5), [0,1]"),
    ("sum", "f(3,1,5), 1"),
    ("sum", "b(3,4), 1"),
    ("prod", "f(1,1)"),
    ("prod", "p(4,0), 0"),
    ("amax", "f(1)"),
    ("amin", "f(1,1), 1"),
    ("max", "f(1), 0"),
    ("max", "f(0,3), 1"),
    ("mean", "f(1)"),
    ("mean", "f(0,3), 1"),
    ("mean", "i(9;2,3)"),
    ("var", "f(1), unbiased=false"),
    ("norm", "f(2,3), 1, p=inf"),
    ("norm", "f(1)"),
    ("logsumexp", "f(3,0), 0"),
    ("logsumexp", "f(1)"),
    ("argmax", "f(1)"),
    ("argmin", "f()"),
    ("cumsum", "f(1), 0"),
    ("cumsum", "f(0), 0"),
    ("cumsum", "b(5), 0"),
    ("reshape", "f(1,1,1), []"),
    ("permute", "f(), []"),
    ("permute", "f(2,3,4,5), [3,1,0,2]"),
    ("expand", "f(1,1), [3,4]"),
    ("narrow", "f(0,3), 1, 1, 1"),
    ("flip", "f(1), 0"),
    ("roll", "f(0), 2"),
    ("unfold", "f(3), 0, 3"),
    ("cat", "[f(0), f(0)]"),
    ("cat", "[f(1), f(1)]"),
    ("cat", "[i(4;2), f(3)]"),
    ("stack", "[f(0), f(0)]"),
    ("split", "f(1,1), 1"),
    ("pad", "f(1), [0,1]"),
    ("pad", "f(2,3,2), [1,1,0,1,2,0]"),
    ("tril", "f(0,3)"),
    ("triu", "f(1,1)"),
    ("gather", "f(1), 0, i(1;1)"),
    ("scatter", "f(3), 0, i(3;0), f(0)"),
    ("index_select", "f(1), 0, i(1;1)"),
    ("masked_select", "f(0), b(0)"),
    ("argsort", "f(1)"),
    ("argsort", "f(2,300)"),
    ("topk", "f(1), 1"),
    ("unique", "f(1)"),
    ("matmul", "f(1,1), f(1,1)"),
    ("matmul", "f(3,0,2), f(2,4)"),
    ("matmul", "f(2,3,0), f(0,2)"),
    ("matmul", "i(5;2,3), i(5;3,2)"),
    ("grouped_matmul", "f(1,1), f(1,1,1), ends(1;1)"),
    ("grouped_matmul", "f(1,1), f(1,1), ends(1;1)"),
    ("grouped_matmul", "f(6,3), f(4,3,1), ends(6;4)"),
    ("grouped_matmul", "i(5;6,3), i(5;2,3,2), ends(6;2)"),
    ("grouped_matmul", "i(5;2,6), i(5;6,3), ends(6;3)"),
    ("linear", "f(1,1), f(1,1), f(1)"),
    ("dot", "f(1), f(1)"),
    ("outer", "f(1), f(1)"),
    ("einsum", "'bij,kj->bik', [f(2,3,4), f(5,4)]"),
    ("einsum", "'i,i->', [f(0), f(0)]"),
    ("conv1d", "f(1,1,1), f(1,1,1), f(1)"),
    ("conv2d", "f(1,1,1,1), f(1,1,1,1)"),
    ("max_pool2d", "f(1,1,2,2), 2"),
    ("avg_pool2d", "f(1,1,2,2), 2"),
    ("softmax", "f(1), 0"),
    ("log_softmax", "f(1,1), 0"),
    ("layer_norm", "f(3,2), f(2), f(2), eps=0.01"),
    ("rms_norm", "f(1,2), f(2)"),
    ("scaled_dot_product_attention", "f(1,1,2), f(1,1,2), f(1,1,2)"),
    ("cross_entropy", "f(1,3), i(3;1)"),
    ("cross_entropy", "f(1,1), i(1;1)"),
    ("nll_loss", "f(1,2), i(2;1)"),
    ("mse_loss", "f(1), f(1)"),
    ("adamw_update", "f(1), f(1), f(1), p(1), lr=0.1, step=1"),
];

/// Returns the samples of an op: those of the registry and the additional ones.
pub fn samples(op: &'static Op) -> Vec<Sample> {
    let extra = EXTRA.iter().filter(|e| e.0 == op.name).map(|e| e.1);
    let texts = op.samples.iter().copied().chain(extra);
    texts.map(|t| sample::parse(op, t).unwrap_or_else(|e| panic!("{}({t}): {e}", op.name))).collect()
}

/// Returns whether the values of an op depend on the random counters.
pub fn is_random(op: &Op) -> bool {
    matches!(op.name, "rand" | "uniform" | "randn" | "randint" | "bernoulli" | "rand_like" | "randn_like" | "dropout")
}

/// Returns the cases of an op: its samples in every applicable variant.
pub fn cases(op: &'static Op) -> Vec<Case> {
    let mut out = Vec::new();
    for s in samples(op) {
        let kinds = kinds(&s);
        let floats = kinds.iter().any(|k| k.is_float());
        let ints = kinds.iter().any(|k| matches!(k, Kind::Int(_) | Kind::Ends(_) | Kind::Perm));
        for v in Variant::ALL {
            let fits = match v {
                Variant::Full | Variant::Grid => floats,
                Variant::As(DType::I64) => true,
                Variant::As(DType::Bool) => floats,
                Variant::As(_) => floats || ints,
            };
            if fits {
                out.push(fill(&s, v, floats));
            }
        }
    }
    out
}

fn kinds(s: &Sample) -> Vec<Kind> {
    let flat = |e: &Expr| match e {
        Expr::Tensor(k, _) => vec![*k],
        Expr::List(l) => l.iter().filter_map(|e| if let Expr::Tensor(k, _) = e { Some(*k) } else { None }).collect(),
        _ => Vec::new(),
    };
    s.args.iter().flatten().flat_map(flat).collect()
}

/// Fills a sample with numbers.
pub fn fill(s: &Sample, variant: Variant, has_floats: bool) -> Case {
    let mut args = Vec::new();
    // A permutation runs along `dim` of the first tensor.
    let dim = s.params.iter().zip(&s.args).find_map(|(p, e)| match e {
        Some(Expr::Number(Number::Int(d))) if p.name == "dim" => Some(*d as usize),
        _ => None,
    });
    let first = s.args.iter().flatten().find_map(|e| if let Expr::Tensor(_, d) = e { Some(d.clone()) } else { None });
    for (i, (p, e)) in s.params.iter().zip(&s.args).enumerate() {
        let make = |kind: Kind, dims: &[usize], k: usize| {
            let mut rng = Pcg::named(&[s.op.name, &s.text, &format!("{i}.{k}")]);
            tensor(&mut rng, kind, dims, variant, has_floats, dim.zip(first.clone()))
        };
        args.push(match e {
            None => Arg::Value(p.default.clone()),
            Some(Expr::Tensor(kind, dims)) => Arg::Tensor(make(*kind, dims, 0)),
            Some(Expr::List(l)) if l.iter().any(|e| matches!(e, Expr::Tensor(..))) => Arg::Tensors(
                l.iter()
                    .enumerate()
                    .filter_map(
                        |(k, e)| if let Expr::Tensor(kind, dims) = e { Some(make(*kind, dims, k)) } else { None },
                    )
                    .collect(),
            ),
            Some(e) => Arg::Value(sample::value(p, e).unwrap_or_else(|m| panic!("{}({}): {m}", s.op.name, s.text))),
        });
    }
    let key = format!("{}({}) {}", s.op.name, s.text, variant.name());
    Case { op: s.op, key, variant, names: s.params.iter().map(|p| p.name).collect(), args }
}

fn tensor(
    rng: &mut Pcg,
    kind: Kind,
    dims: &[usize],
    variant: Variant,
    has_floats: bool,
    along: Option<(usize, Vec<usize>)>,
) -> Data {
    let n: usize = dims.iter().product();
    let (mut dtype, mut values) = (DType::I64, Vec::with_capacity(n));
    match kind {
        Kind::Int(hi) => values.extend((0..n).map(|_| rng.below(hi as usize) as f64)),
        Kind::Ends(hi) => {
            values.extend((0..n).map(|_| rng.below(hi as usize + 1) as f64));
            values.sort_by(f64::total_cmp);
        }
        Kind::Byte(hi) => {
            dtype = DType::U8;
            values.extend((0..n).map(|_| rng.below(hi as usize) as f64));
        }
        Kind::Bool => {
            dtype = DType::Bool;
            values.extend((0..n).map(|_| f64::from(u8::from(rng.one_in(2)))));
        }
        Kind::Perm => {
            let (dim, of) = along.expect("a permutation needs a dim");
            values = permutations(rng, dims, dim, of[dim]);
        }
        _ => {
            dtype = if let Variant::As(d) = variant { d } else { DType::F64 };
            let mut seen = std::collections::HashSet::new();
            for _ in 0..n {
                let mut v = float(rng, kind, variant);
                // Distinct elements, so that sort orders and maxima are unique.
                for _ in 0..if dtype.is_float() { 20 } else { 0 } {
                    if seen.insert(v.to_bits()) {
                        break;
                    }
                    v = float(rng, kind, variant);
                }
                values.push(v);
            }
        }
    }
    if let (Variant::As(d), false) = (variant, has_floats)
        && dtype == DType::I64
    {
        dtype = d;
    }
    Data { kind, dtype, dims: dims.to_vec(), values }
}

fn float(rng: &mut Pcg, kind: Kind, variant: Variant) -> f64 {
    let v = loop {
        let v = match kind {
            Kind::Uniform(low, high) => rng.uniform(low, high),
            Kind::Positive => rng.uniform(0.5, 3.0),
            _ => rng.normal(),
        };
        // Stay away from kinks at 0, so that finite differences sample one side only.
        if v.abs() > 0.02 {
            break v;
        }
    };
    let whole = match kind {
        Kind::Positive => v.floor() + 1.0,
        Kind::Normal => (v * 3.0).round().clamp(-9.0, 9.0),
        _ => v.round(),
    };
    match variant {
        Variant::Full => v,
        Variant::Grid => grid(v),
        Variant::As(DType::Bool) => f64::from(u8::from(whole > 0.0)),
        Variant::As(DType::U8) => whole.abs() % 256.0,
        Variant::As(_) => whole,
    }
}

/// Rounds `v` to 8 significant bits, which every float dtype including bf16 represents exactly. Implemented here, so that test
/// data does not depend on the runtime's own rounding.
fn grid(v: f64) -> f64 {
    let step = 2f64.powi(v.abs().log2().floor() as i32 - 7);
    (v / step).round() * step
}

fn permutations(rng: &mut Pcg, dims: &[usize], dim: usize, of: usize) -> Vec<f64> {
    let shape = Shape::of(dims);
    let strides = shape.strides();
    let mut values = vec![0.0; shape.numel()];
    for i in 0..values.len() {
        if !(i / strides[dim] as usize).is_multiple_of(dims[dim]) {
            continue;
        }
        let mut all: Vec<usize> = (0..of).collect();
        for k in 0..dims[dim] {
            let j = k + rng.below(of - k);
            all.swap(k, j);
            values[i + k * strides[dim] as usize] = all[k] as f64;
        }
    }
    values
}

/// Cases of binary ops on every pair of dtypes, also with one operand of rank 0 or a number.
pub fn promotion_cases() -> Vec<Case> {
    let mut out = Vec::new();
    for name in ["add", "sub", "mul", "div", "maximum", "eq", "lt", "floor_div", "remainder", "pow", "where"] {
        let op = ops::by_name(name).unwrap();
        let params = ops::parse_signature(op.sig).unwrap();
        let names: Vec<&'static str> = params.iter().map(|p| p.name).collect();
        let mut push = |what: String, x: Arg, y: Arg| {
            let mut args = vec![x, y];
            if name == "where" {
                let values = vec![1.0, 0.0, 0.0, 1.0, 1.0];
                args.insert(0, Arg::Tensor(Data { kind: Kind::Bool, dtype: DType::Bool, dims: vec![5], values }));
            }
            out.push(Case { op, key: format!("{name}: {what}"), variant: Variant::Full, names: names.clone(), args });
        };
        for x in DType::ALL {
            for y in DType::ALL {
                push(format!("{x} {y}"), Arg::Tensor(few(x, false)), Arg::Tensor(few(y, true)));
                if matches!(name, "add" | "mul" | "div" | "maximum" | "pow" | "where") {
                    push(format!("scalar {x} {y}"), Arg::Tensor(few(x, false).first()), Arg::Tensor(few(y, true)));
                    push(format!("{x} scalar {y}"), Arg::Tensor(few(x, false)), Arg::Tensor(few(y, true).first()));
                }
            }
            for n in [Number::Int(2), Number::Float(1.5)] {
                let text = n.as_f64();
                push(format!("{x} {text}"), Arg::Tensor(few(x, false)), Arg::Value(Value::Number(n)));
                push(format!("{text} {x}"), Arg::Value(Value::Number(n)), Arg::Tensor(few(x, true)));
            }
        }
    }
    out
}

/// Cases of elementwise primitives at the limits of floats: zeros of both signs, infinities, NaN, the largest and smallest; and
/// where i32 wraps around.
pub fn special_cases() -> Vec<Case> {
    let mut out = Vec::new();
    for op in ops::all() {
        let Class::Map(f) = op.class else { continue };
        if op.sig.is_empty() || f == MapFn::Where {
            continue;
        }
        let params = ops::parse_signature(op.sig).unwrap();
        let names: Vec<&'static str> = params.iter().map(|p| p.name).collect();
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I32] {
            let divides = matches!(f, MapFn::FloorDiv | MapFn::Remainder | MapFn::Pow);
            if dtype == DType::I32 && f == MapFn::Pow {
                continue;
            }
            let (low, high) = match dtype {
                DType::F64 => (1e-300, 1e300),
                DType::F16 => (2f64.powi(-20), 60000.0),
                _ => (1e-37, 2f64.powi(100)),
            };
            let mut values = match dtype {
                DType::I32 => vec![0.0, 1.0, -1.0, 2147483647.0, -2147483648.0, 65536.0, -65537.0, 7.0],
                _ => vec![
                    0.0,
                    -0.0,
                    f64::INFINITY,
                    f64::NEG_INFINITY,
                    f64::NAN,
                    low,
                    -low,
                    high,
                    -high,
                    0.5,
                    -1.0,
                    2.5,
                    -3.0,
                ],
            };
            let host = HostTensor::from_f64(dtype, Shape::of(&[values.len()]), &values);
            values = host.to_f64();
            let n = values.len();
            let data = |v: Vec<f64>, dims: Vec<usize>| Arg::Tensor(Data { kind: Kind::Normal, dtype, dims, values: v });
            let args = match f.arity() {
                1 => vec![data(values, vec![n])],
                _ => {
                    let others: Vec<f64> = values
                        .iter()
                        .copied()
                        .filter(|v| !(divides && dtype == DType::I32 && (*v == 0.0 || *v == -1.0)))
                        .collect();
                    let m = others.len();
                    vec![data(values, vec![n, 1]), data(others, vec![m])]
                }
            };
            out.push(Case {
                op,
                key: format!("{} specials {dtype}", op.name),
                variant: Variant::Full,
                names: names.clone(),
                args,
            });
        }
    }
    out
}

fn few(dtype: DType, second: bool) -> Data {
    let values = match (dtype.category(), second) {
        (perilune_core::Category::Bool, false) => [1.0, 0.0, 1.0, 0.0, 1.0],
        (perilune_core::Category::Bool, true) => [1.0, 1.0, 1.0, 1.0, 1.0],
        (perilune_core::Category::Int, false) if dtype == DType::U8 => [3.0, 7.0, 0.0, 200.0, 5.0],
        (perilune_core::Category::Int, false) => [3.0, -7.0, 0.0, 200.0, 5.0],
        (perilune_core::Category::Int, true) => [2.0, 3.0, 1.0, 2.0, 4.0],
        (perilune_core::Category::Float, false) => [1.5, 0.375, 3.25, 2.0, 6.5],
        (perilune_core::Category::Float, true) => [2.0, 3.0, 1.25, 2.5, 0.75],
    };
    Data { kind: Kind::Normal, dtype, dims: vec![5], values: values.to_vec() }
}

/// Returns all cases that have a reference.
pub fn all() -> Vec<Case> {
    let mut out = Vec::new();
    for op in ops::all() {
        if !op.sig.is_empty() && !is_random(op) {
            out.extend(cases(op));
        }
    }
    out.extend(promotion_cases());
    out.extend(special_cases());
    out
}
