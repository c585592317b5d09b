//! Defines conversions to and from 8-bit floats, and their matrix products. They are not a dtype: they are stored in a
//! u8 tensor with a separate f32 scale.
//!
//! The CPU's `math/fp8.rs` defines formats and rounding. `stdlib/nn/fp8.lua` uses them in training.

use super::elementwise::{self, MapFn};
use super::matmul::MATMUL;
use super::{Args, Class, Grad, Op, Out, Results, movement, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] =
    &[&FP8_E4M3, &FP8_E5M2, &FP8_E4M3_VALUE, &FP8_E5M2_VALUE, &QUANTIZE_FP8, &DEQUANTIZE_FP8, &MATMUL_FP8];

/// The error for gradients through a conversion.
const NO_GRADIENT: &str = "rounding to 8 bits has no derivative; nn.Linear { fp8 = true } defines its own gradients";

/// A format, by its code in attributes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Format {
    E4M3 = 0,
    E5M2 = 1,
}

impl Format {
    fn parse(name: &str) -> Format {
        if name == "e5m2" { Format::E5M2 } else { Format::E4M3 }
    }

    pub fn of(attr: i64) -> Format {
        if attr == Format::E5M2 as i64 { Format::E5M2 } else { Format::E4M3 }
    }

    pub fn name(self) -> &'static str {
        match self {
            Format::E4M3 => "e4m3",
            Format::E5M2 => "e5m2",
        }
    }

    fn to_byte(self) -> &'static Op {
        if self == Format::E5M2 { &FP8_E5M2 } else { &FP8_E4M3 }
    }

    fn value(self) -> &'static Op {
        if self == Format::E5M2 { &FP8_E5M2_VALUE } else { &FP8_E4M3_VALUE }
    }
}

fn to_u8(i: &Infer) -> Result<Meta> {
    Ok(Meta { shape: elementwise::infer(i)?.shape, dtype: DType::U8 })
}

const BYTE: Op = Op { infer: to_u8, grad: Grad::Missing(NO_GRADIENT), ..Op::BASE };
const VALUE: Op = Op { infer: elementwise::infer, grad: Grad::Missing(NO_GRADIENT), ..Op::BASE };

pub static FP8_E4M3: Op = Op { name: "fp8_e4m3", class: Class::Map(MapFn::Fp8E4m3), ..BYTE };
pub static FP8_E5M2: Op = Op { name: "fp8_e5m2", class: Class::Map(MapFn::Fp8E5m2), ..BYTE };
pub static FP8_E4M3_VALUE: Op = Op { name: "fp8_e4m3_value", class: Class::Map(MapFn::Fp8E4m3Value), ..VALUE };
pub static FP8_E5M2_VALUE: Op = Op { name: "fp8_e5m2_value", class: Class::Map(MapFn::Fp8E5m2Value), ..VALUE };

/// Argument `i`, a number or a tensor, as f32.
fn scale(g: &mut Graph, a: &Args, i: usize) -> Result<NodeId> {
    let s = a.operand(g, i, DType::F32)?;
    g.cast(s, DType::F32)
}

/// As `scale`, for exactly one element.
fn single(g: &mut Graph, a: &Args, i: usize, name: &str) -> Result<NodeId> {
    let s = scale(g, a, i)?;
    let shape = g.shape(s);
    if shape.numel() != 1 {
        let message = format!("{name} has shape {shape}; it must be one number");
        return Err(Error::shape(a.op.name, message).hint("a product takes one scale for each operand"));
    }
    movement::reshape(g, s, Shape::SCALAR)
}

fn bytes(g: &Graph, op: &str, name: &str, x: NodeId) -> Result<()> {
    let dtype = g.dtype(x);
    if dtype == DType::U8 {
        return Ok(());
    }
    Err(Error::dtype(op, format!("{name} is {dtype}; 8-bit floats are stored in u8 tensors"))
        .hint("pl.quantize_fp8(x, scale) creates them"))
}

/// Decodes the bytes of `x` (u8) to f32.
fn values(g: &mut Graph, x: NodeId, format: Format) -> Result<NodeId> {
    let code = g.cast(x, DType::F32)?;
    g.map(format.value(), &[code])
}

pub static QUANTIZE_FP8: Op = Op {
    name: "quantize_fp8",
    sig: "x: tensor, scale: operand = 1, *, format: 'e4m3'|'e5m2' = 'e4m3'",
    doc: "x (...), scale (broadcasts to x) -> (...) u8: the bytes of the 8-bit floats nearest to x times 1 / scale, ties to\n\
          even. Larger magnitudes become the largest (448, or 57344 for e5m2); NaN stays NaN; infinity stays infinity in\n\
          e5m2 and becomes NaN in e4m3. Computed in f32. Has no gradient. Micikevicius et al., arXiv:2209.05433.",
    call: Some(|g, a| {
        let (x, s, format) = (a.tensor(0)?, scale(g, a, 1)?, Format::parse(a.str(2)));
        g.without_autocast(|g| {
            let (x, s) = (g.widen(x)?, g.recip(s)?);
            let shape = g.shape(x);
            let y = g.mul(x, s)?;
            if g.shape(y) != shape {
                return Err(Error::shape(
                    "quantize_fp8",
                    format!("scale {} does not broadcast to x {shape}", g.shape(s)),
                ));
            }
            g.map(format.to_byte(), &[y]).map(one)
        })
    }),
    grad: Grad::Missing(NO_GRADIENT),
    samples: &[
        "f(2,3)",
        "f(2,3), 0.01",
        "f(4,5), p(4,1), format='e5m2'",
        "f(64;-600,600)",
        "f(64;-60000,60000), format='e5m2'",
        "f(64;-0.05,0.05)",
        "f(0,3)",
    ],
    ..Op::BASE
};

pub static DEQUANTIZE_FP8: Op = Op {
    name: "dequantize_fp8",
    sig: "x: tensor, scale: operand = 1, *, format: 'e4m3'|'e5m2' = 'e4m3', dtype: dtype = 'f32'",
    doc: "x (...) u8, scale (broadcasts to x) -> (...) of `dtype`: the values of the bytes, times scale. A constant to\n\
          autograd.",
    call: Some(|g, a| {
        let (x, s, format) = (a.tensor(0)?, scale(g, a, 1)?, Format::parse(a.str(2)));
        bytes(g, "dequantize_fp8", "x", x)?;
        let dtype = a.dtype(3).unwrap_or(DType::F32);
        // It is a constant of the scale, too.
        let mut g = g.scope();
        (g.modes.no_grad, g.modes.autocast) = (true, None);
        let v = values(&mut g, x, format)?;
        let y = g.mul(v, s)?;
        if g.shape(y) != g.shape(x) {
            let message = format!("scale {} does not broadcast to x {}", g.shape(s), g.shape(x));
            return Err(Error::shape("dequantize_fp8", message));
        }
        g.cast(y, dtype).map(one)
    }),
    grad: Grad::Missing(NO_GRADIENT),
    samples: &[
        "u8(126;4,8)",
        "u8(126;4,8), 0.5",
        "u8(124;4,8), p(8), format='e5m2'",
        "u8(126;0,8)",
        "u8(100;3), 2, dtype='bf16'",
    ],
    ..Op::BASE
};

/// The decoded attributes of a [`MATMUL_FP8`] node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Product {
    pub formats: [Format; 2],
    /// Whether a device may accumulate with fewer bits than f32.
    pub fast: bool,
}

impl Product {
    pub fn read(attrs: &[i64]) -> Product {
        Product { formats: [Format::of(attrs[0]), Format::of(attrs[1])], fast: attrs[3] != 0 }
    }
}

/// a (M, K) u8, b (N, K) u8, two f32 scalars, and optionally a bias (N) of the result's dtype, f16 or bf16. `attrs`:
/// [format of a, format of b, dtype code, fast, K].
pub static MATMUL_FP8: Op = Op {
    name: "matmul_fp8",
    sig: "a: tensor, b: tensor, scale_a: operand = 1, scale_b: operand = 1, bias: tensor?, *, \
          format_a: 'e4m3'|'e5m2' = 'e4m3', format_b: 'e4m3'|'e5m2' = 'e4m3', dtype: dtype = 'bf16', fast: bool = false",
    doc: "a (M, K) u8, b (N, K) u8, bias (N) -> (M, N) of `dtype`: a times b transposed, times scale_a * scale_b, plus bias,\n\
          where bytes are 8-bit floats and each scale is one number. Sums are in f32 and rounded once at the end; `fast`\n\
          lets a GPU add with fewer bits. GPUs from sm_89 on multiply 8-bit floats if K and N are multiples of 16 and not\n\
          both formats are e5m2; otherwise, and on a CPU, the product is computed in f32. Has no gradient.",
    flops: Some(super::product_flops),
    results: Results::One,
    class: Class::Fused(|g, x, attrs| {
        let p = Product::read(attrs);
        let dtype = DType::from_code(attrs[2] as u8).unwrap_or(DType::F32);
        let (a, b) = (values(g, x[0], p.formats[0])?, values(g, x[1], p.formats[1])?);
        let bt = g.t(b)?;
        let y = g.push(&MATMUL, &[a, bt], &[])?;
        let s = g.mul(x[2], x[3])?;
        let mut y = g.mul(y, s)?;
        if let Some(&bias) = x.get(4) {
            let bias = g.widen(bias)?;
            y = g.add_(y, bias)?;
        }
        g.cast(y, dtype).map(one)
    }),
    infer: |i| {
        let (a, b) = (i.shape(0), i.shape(1));
        Ok(Meta { shape: a.with(1, b.dims()[0]), dtype: DType::from_code(i.attrs[2] as u8).unwrap_or(DType::F32) })
    },
    call: Some(matmul_fp8),
    grad: Grad::Missing(NO_GRADIENT),
    samples: &[
        "u8(126;2,3), u8(126;4,3)",
        "u8(126;32,48), u8(126;16,48), 0.01, 0.02, dtype='f32'",
        "u8(100;32,32), u8(126;16,32), 0.5, 0.25, f(16), format_a='e5m2'",
        "u8(126;5,16), u8(100;16,16), 1, 0.5, f(16), format_b='e5m2', fast=true",
        "u8(126;0,16), u8(126;16,16)",
    ],
    ..Op::BASE
};

fn matmul_fp8(g: &mut Graph, a: &Args) -> Result<Out> {
    let op = a.op.name;
    let (x, y) = (a.tensor(0)?, a.tensor(1)?);
    bytes(g, op, "a", x)?;
    bytes(g, op, "b", y)?;
    let (sx, sy) = (g.shape(x), g.shape(y));
    if sx.rank() != 2 || sy.rank() != 2 || sx.dims()[1] != sy.dims()[1] {
        let message = format!("a {sx} and b {sy} do not chain: they must be (M, K) and (N, K), K last in both");
        return Err(
            Error::shape(op, message).hint("b is transposed in the product, as the weight of a linear layer is")
        );
    }
    let dtype = a.dtype(7).unwrap_or(DType::BF16);
    if !dtype.is_float() || dtype == DType::F64 {
        return Err(Error::dtype(op, format!("the result cannot be {dtype}; it must be f32, bf16 or f16")));
    }
    let (s, t) = (single(g, a, 2, "scale_a")?, single(g, a, 3, "scale_b")?);
    let mut inputs: SmallVec<[NodeId; 5]> = smallvec![x, y, s, t];
    let mut after = None;
    if let Some(b) = a.opt_tensor(4) {
        if g.shape(b) != Shape::of(&sy.dims()[..1]) {
            return Err(Error::shape(op, format!("bias {} must be {{{}}}", g.shape(b), sy.dims()[0])));
        }
        let b = g.cast(b, dtype)?;
        // A sum in f32 is the same within the product or after it.
        if dtype == DType::F32 { after = Some(b) } else { inputs.push(b) }
    }
    let format = |i: usize| Format::parse(a.str(i)) as i64;
    let y =
        g.push(&MATMUL_FP8, &inputs, &[format(5), format(6), dtype as i64, i64::from(a.bool(8)), sx.dims()[1] as i64])?;
    match after {
        Some(b) => g.without_autocast(|g| g.add_(y, b)).map(one),
        None => Ok(one(y)),
    }
}
