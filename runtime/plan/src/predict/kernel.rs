//! Predicts the time of a kernel: its operations at the rate of its class and shape, or its bytes at the bandwidth, whatever takes
//! longer, and the gap to the next kernel (a roofline; Williams et al., Communications of the ACM 52, 2009).

use super::calibration::Calibration;
use crate::ir::{Code, Kernel, Library, Program, Region};
use crate::show;
use perilune_core::ops::collective;
use perilune_core::{DType, Shape};

/// What a kernel does, for sums over a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum KernelClass {
    Product,
    Attention,
    Convolution,
    /// Reductions of rows or columns.
    Rows,
    /// Elementwise kernels and copies.
    Maps,
    /// Other library routines: indexing, sorting, scans.
    Other,
    /// Sent between devices.
    Collective,
}

impl KernelClass {
    pub const ALL: [KernelClass; 7] = [
        KernelClass::Product,
        KernelClass::Attention,
        KernelClass::Convolution,
        KernelClass::Rows,
        KernelClass::Maps,
        KernelClass::Other,
        KernelClass::Collective,
    ];

    pub fn name(self) -> &'static str {
        ["products", "attention", "convolutions", "rows", "maps", "other", "collectives"][self as usize]
    }

    pub fn of(kernel: &Kernel) -> KernelClass {
        match kernel {
            Kernel::Library(l) if collective::is_collective(l.op) || collective::is_transfer(l.op) => {
                KernelClass::Collective
            }
            Kernel::Library(l) if l.op.flops.is_none() => KernelClass::Other,
            Kernel::Library(l) if l.op.name.contains("attention") => KernelClass::Attention,
            Kernel::Library(l) if l.op.name.starts_with("conv") => KernelClass::Convolution,
            Kernel::Library(_) => KernelClass::Product,
            Kernel::Region(r) if reduces(r) => KernelClass::Rows,
            Kernel::Multi(list) if list.iter().any(reduces) => KernelClass::Rows,
            _ => KernelClass::Maps,
        }
    }
}

fn reduces(r: &Region) -> bool {
    r.body.iter().any(|i| matches!(i.code, Code::ReduceRow(..) | Code::ReduceCol(..)))
}

/// The seconds of a kernel that computes; 0 for a collective.
pub fn seconds(rates: Calibration, p: &Program, kernel: &Kernel) -> f64 {
    let class = KernelClass::of(kernel);
    if class == KernelClass::Collective {
        return 0.0;
    }
    let cost = show::cost(p, kernel);
    let rate = |quantity: &str, at: f64| rates.at(quantity, at);
    let band = if class == KernelClass::Rows { "rows" } else { "copy" };
    let moved = (cost.read as f64 + cost.written as f64) / (rate(band, 1.0).unwrap_or(1.0) * 1e12);
    let computed = match (kernel, class) {
        (Kernel::Library(l), KernelClass::Product | KernelClass::Attention | KernelClass::Convolution) => {
            let out = p.values[l.outputs[0].0 as usize].shape;
            cost.flops as f64 / (of_library(rates, l, class, out, cost.flops as f64) * 1e12)
        }
        _ => cost.flops as f64 / (rate("product_f32", 2048.0).unwrap_or(1.0) * 1e12),
    };
    computed.max(moved) + rate("gap", 1.0).unwrap_or(0.0) * 1e-6
}

/// TFLOP/s of a routine.
fn of_library(rates: Calibration, l: &Library, class: KernelClass, out: Shape, flops: f64) -> f64 {
    let dtype = l.dtypes.first().copied().unwrap_or(DType::F32);
    let kind = match dtype {
        _ if l.op.name.ends_with("fp8") => "fp8",
        DType::BF16 | DType::F16 => "bf16",
        DType::F64 => "f64",
        _ if l.tf32 => "tf32",
        _ => "f32",
    };
    let found = match class {
        KernelClass::Attention => {
            let keys = l.inputs.get(1).map_or(Shape::SCALAR, |k| k.shape());
            let last = |n: usize| keys.dims().iter().rev().nth(n).copied().unwrap_or(1).max(1) as f64;
            let pass = if l.op.name.ends_with("backward") { "backward" } else { "forward" };
            let (head, size) = if last(0) <= 64.0 { (64, last(0) / 64.0) } else { (128, (last(0) / 128.0).min(1.0)) };
            let half = rates.at(&format!("attention_{pass}_{head}"), last(1)).map(|r| r * size);
            match kind {
                "bf16" | "fp8" => half,
                // Wider floats keep the ratio that their products have.
                _ => half
                    .zip(rates.at(&format!("product_{kind}"), 2048.0))
                    .zip(rates.at("product_bf16", 2048.0))
                    .map(|((h, own), bf16)| h * own / bf16),
            }
        }
        KernelClass::Convolution => rates.at(&format!("conv_{}", if kind == "fp8" { "bf16" } else { kind }), 1.0),
        _ => {
            let columns = out.dims().last().copied().unwrap_or(1).max(1) as f64;
            // A batch of products with one matrix is one product of more rows.
            let rows = match l.inputs.get(1).map(|w| w.shape().rank()) {
                Some(0..=2) => out.numel() as f64 / columns,
                _ => out.dims().iter().rev().nth(1).copied().unwrap_or(1) as f64,
            };
            let inner = flops / (2.0 * out.numel().max(1) as f64);
            rates.at(&format!("product_{kind}"), rows.min(columns).min(inner).max(1.0))
        }
    };
    found.or_else(|| rates.at("product_f32", 2048.0)).unwrap_or(1.0)
}
