//! Reads PyTorch's results and defines the tolerances for comparisons.

use crate::case::Case;
use perilune_core::ops::{Class, Op};
use perilune_core::{DType, HostTensor, Shape};
use safetensors::{Dtype, SafeTensors};
use std::collections::{HashMap, HashSet};

/// The contents of `golden/ops/reference.safetensors`.
pub struct Reference {
    tensors: HashMap<String, HostTensor>,
    dtypes: HashMap<String, HashMap<String, Vec<String>>>,
    fallback: HashSet<String>,
    missing: HashSet<String>,
}

/// The reference of a case.
pub enum Known<'a> {
    /// Values and dtypes.
    Exact(Vec<&'a HostTensor>),
    /// PyTorch does not support these dtypes; the values are those of wider ones.
    Values(Vec<&'a HostTensor>),
    /// PyTorch does not support the call in any dtype.
    Refused,
    /// The reference is older than this sample.
    Nothing,
}

impl Reference {
    /// Reads the committed file.
    pub fn read() -> Reference {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/ops/reference.safetensors");
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}; make it with golden/ops/make.py"));
        let (_, meta) = SafeTensors::read_metadata(&bytes).unwrap();
        let words = meta.metadata().clone().unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, t)| {
            let dtype = match t.dtype() {
                Dtype::F64 => DType::F64,
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::BF16,
                Dtype::F16 => DType::F16,
                Dtype::I64 => DType::I64,
                Dtype::I32 => DType::I32,
                Dtype::U8 => DType::U8,
                Dtype::BOOL => DType::Bool,
                other => panic!("{name}: {other:?}"),
            };
            (name.to_string(), HostTensor::new(dtype, Shape::of(t.shape()), t.data().to_vec()))
        });
        Reference {
            tensors: tensors.collect(),
            dtypes: serde_json::from_str(&words["dtypes"]).unwrap(),
            fallback: serde_json::from_str(&words["fallback"]).unwrap(),
            missing: serde_json::from_str(&words["missing"]).unwrap(),
        }
    }

    pub fn get(&self, case: &Case) -> Known<'_> {
        if self.missing.contains(&case.key) {
            return Known::Refused;
        }
        let outs: Vec<_> = (0..).map_while(|k| self.tensors.get(&format!("{} #{k}", case.key))).collect();
        match outs.is_empty() {
            true => Known::Nothing,
            false if self.fallback.contains(&case.key) => Known::Values(outs),
            false => Known::Exact(outs),
        }
    }

    /// Returns PyTorch's result dtypes of a `grid` case whose floats are `dtype`, if PyTorch supports it.
    pub fn dtypes(&self, case: &Case, dtype: DType) -> Option<Vec<DType>> {
        let names = self.dtypes.get(&case.key)?.get(dtype.name())?;
        names.iter().map(|n| DType::parse(n)).collect()
    }
}

/// The tolerance of a result: `ulps` units in the last place of the result's dtype at the reference, plus `scaled` of them at
/// the largest reference of the tensor (for cancellation inside a sum).
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub ulps: f64,
    pub scaled: f64,
}

/// Returns the unit in the last place, the relative spacing of a dtype.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 0.0,
    }
}

/// Returns the tolerance for `op` computed in `dtype`: its own, or that of its class.
pub fn tolerance(op: &Op, dtype: DType) -> Tolerance {
    let half = dtype.is_half();
    if let Some(t) = op.tolerance {
        let wide = if matches!(op.class, Class::Map(_)) { 0.0 } else { 32.0 };
        return if half {
            Tolerance { ulps: t.half, scaled: t.half_scaled }
        } else {
            Tolerance { ulps: t.wide, scaled: wide }
        };
    }
    match op.class {
        // One operation, rounded once; the scalar functions are accurate to 2 units in f64 and 1 in f32.
        Class::Map(_) | Class::Cast | Class::View(_) => Tolerance { ulps: if half { 1.0 } else { 4.0 }, scaled: 0.0 },
        // Sums in f32 (or f64), rounded once.
        Class::Reduce(_) | Class::Library if half => Tolerance { ulps: 1.0, scaled: 0.25 },
        Class::Fused(_) if half => Tolerance { ulps: 1.0, scaled: 1.0 },
        _ if half => Tolerance { ulps: 2.0, scaled: 2.0 },
        _ => Tolerance { ulps: 8.0, scaled: 32.0 },
    }
}

/// Compares a result with its reference, and returns the first difference as text.
pub fn compare(got: &HostTensor, want: &HostTensor, t: Tolerance) -> Result<(), String> {
    if got.shape != want.shape {
        return Err(format!("shape {} instead of {}", got.shape, want.shape));
    }
    let eps = epsilon(got.dtype);
    let largest = (0..want.numel()).map(|i| want.get_f64(i).abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
    for i in 0..want.numel() {
        let (x, y) = (got.get_f64(i), want.get_f64(i));
        let exact = !got.dtype.is_float() && !want.dtype.is_float();
        if exact {
            if got.get_i64(i) != want.get_i64(i) {
                return Err(format!("element {i} is {} instead of {}", got.get_i64(i), want.get_i64(i)));
            }
            continue;
        }
        if x == y || x.is_nan() && y.is_nan() {
            continue;
        }
        // Values that overflow the dtype become infinite.
        if x.is_infinite() && got.dtype == DType::F16 && y.abs() > 65504.0 && x.signum() == y.signum() {
            continue;
        }
        let tiny = if got.dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 };
        let room = eps * (t.ulps * y.abs() + t.scaled * largest) + tiny;
        if (x - y).abs() > room || x.is_nan() || y.is_nan() {
            let ulps = (x - y).abs() / (eps * y.abs());
            return Err(format!(
                "element {i} of {} {} is {x:e} instead of {y:e} ({ulps:.1} ulp)",
                got.dtype, got.shape
            ));
        }
    }
    Ok(())
}

/// Returns whether results of sums in different orders agree.
pub fn near(a: &[HostTensor], b: &[HostTensor]) -> bool {
    // Different orders of f64 sums in cuBLASLt differed by more than 8 units where the summands cancel.
    let scaled = |x: &HostTensor| if x.dtype == DType::F64 { 64.0 } else { 8.0 };
    let alike = |x: &HostTensor, y: &HostTensor| compare(x, y, Tolerance { ulps: 4.0, scaled: scaled(x) }).is_ok();
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.dtype == y.dtype && alike(x, y))
}
