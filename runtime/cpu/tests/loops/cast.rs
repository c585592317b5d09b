//! Tests the loops that cast to integers against the rule of `HostTensor`.

use perilune_core::DType;
use perilune_core::host_tensor::{to_integer, wrap_integer};
use perilune_cpu::loops::cast::cast;
use perilune_cpu::loops::{Arg, Isa};

/// Every integer that a float (in f32 or f64) or an integer can become, on all vector classes of this processor: long enough
/// rows that vectors and what is left over are both used.
#[test]
fn integers_follow_one_rule_on_every_instruction_set() {
    let exponents = || (0..70).map(|e| 2f64.powi(e));
    let near = exponents().flat_map(|p| [p - 1.0, p - 0.5, p, p + 0.5, p + 1.0, p * 1.5]);
    let specials = [0.0, 0.3, 255.9, 300.0, 3e9, 9.3e18, 1e38, 1e300, f64::INFINITY, f64::NAN];
    let wide: Vec<f64> = near.chain(specials).flat_map(|x| [x, -x]).collect();
    let single: Vec<f32> = wide.iter().map(|x| *x as f32).collect();
    let whole: Vec<i64> = wide.iter().map(|x| *x as i64).collect();
    let narrow: Vec<i32> = whole.iter().map(|x| *x as i32).collect();
    let n = wide.len();
    let best = Isa::ALL.iter().position(|i| *i == Isa::detect()).unwrap_or(0);
    for isa in &Isa::ALL[..=best] {
        for to in [DType::U8, DType::I32, DType::I64, DType::Bool] {
            let run = |from: DType, x: *const u8| -> Vec<i64> {
                let mut out = vec![0u8; n * to.size()];
                let arg = Arg { ptr: x, step: 0 };
                // SAFETY: both hold a row of n elements.
                unsafe { cast(from, to, *isa)(out.as_mut_ptr(), &raw const arg, 1, n) };
                let t = perilune_core::HostTensor::new(to, perilune_core::Shape::of(&[n]), out);
                t.to_i64()
            };
            let of_wide = run(DType::F64, wide.as_ptr().cast());
            let of_single = run(DType::F32, single.as_ptr().cast());
            let of_whole = run(DType::I64, whole.as_ptr().cast());
            let of_narrow = run(DType::I32, narrow.as_ptr().cast());
            for k in 0..n {
                let what = format!("{} as {to} on {isa:?}", wide[k]);
                assert_eq!(of_wide[k], to_integer(to, wide[k]), "f64 {what}");
                assert_eq!(of_single[k], to_integer(to, f64::from(single[k])), "f32 {what}");
                assert_eq!(of_whole[k], wrap_integer(to, whole[k]), "i64 {what}");
                assert_eq!(of_narrow[k], wrap_integer(to, i64::from(narrow[k])), "i32 {what}");
            }
        }
    }
}
