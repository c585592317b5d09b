//! Converts to and from the two 8-bit floats of Micikevicius et al., FP8 Formats for Deep Learning (2022, arXiv:2209.05433), stored as bytes.
//!
//! E4M3: 4 bits of exponent, 3 of mantissa, to 448; no infinity, NaN is all ones. E5M2: 5 and 2, to 57344; infinities and NaN
//! as in IEEE. To bytes: nearest even; a finite number beyond the largest becomes the largest; infinity becomes NaN in E4M3;
//! NaN is 0x7f. GPUs from sm_89 on have an instruction that does the same except for infinities (kernels/device/ops.cuh).

/// A format: bits of mantissa, the largest number, and the f32 exponent field of the smallest normal one.
struct Format {
    mantissa: u32,
    largest: f32,
    least: u32,
}

const E4M3: Format = Format { mantissa: 3, largest: 448.0, least: 127 - 6 };
const E5M2: Format = Format { mantissa: 2, largest: 57344.0, least: 127 - 14 };

#[inline(always)]
fn encode(x: f32, f: Format) -> u8 {
    let shift = 23 - f.mantissa;
    let sign = x.to_bits() >> 24 & 0x80;
    let a = if x.abs() > f.largest { f.largest } else { x.abs() };
    let bits = a.to_bits();
    let up = (1 << (shift - 1)) - 1 + (bits >> shift & 1);
    let normal = (bits.wrapping_add(up) >> shift).wrapping_sub((f.least - 1) << f.mantissa);
    // Adding a number whose unit in the last place is the subnormal spacing rounds to that spacing.
    let step = f32::from_bits((f.least + shift) << 23);
    let small = (a + step).to_bits().wrapping_sub(step.to_bits());
    let code = if bits >> 23 < f.least { small } else { normal };
    let code = if x.is_nan() { 0x7f } else { code | sign };
    code as u8
}

#[inline(always)]
pub fn e4m3(x: f32) -> u8 {
    if x.abs() == f32::INFINITY { 0x7f } else { encode(x, E4M3) }
}

#[inline(always)]
pub fn e5m2(x: f32) -> u8 {
    let code = encode(x, E5M2);
    if x.abs() == f32::INFINITY { code & 0x80 | 0x7c } else { code }
}

/// The magnitude of a byte, infinities and NaN aside: its bits shifted to those of an f32, and the exponent rebiased.
#[inline(always)]
fn magnitude(code: u32, f: Format) -> f32 {
    // Exponent field 1 has the meaning of the f32 field `least`.
    let power = f32::from_bits((127 + f.least - 1) << 23);
    f32::from_bits((code & 0x7f) << (23 - f.mantissa)) * power
}

#[inline(always)]
pub fn e4m3_value(code: u32) -> f32 {
    let a = if code & 0x7f == 0x7f { f32::NAN } else { magnitude(code, E4M3) };
    f32::from_bits(a.to_bits() | (code & 0x80) << 24)
}

#[inline(always)]
pub fn e5m2_value(code: u32) -> f32 {
    let a = magnitude(code, E5M2);
    let a = if code & 0x7f == 0x7c { f32::INFINITY } else { a };
    let a = if code & 0x7f > 0x7c { f32::NAN } else { a };
    f32::from_bits(a.to_bits() | (code & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::host_tensor::to_odd;

    /// The nearest of all finite values, by search; on a tie, the one whose byte is even.
    fn nearest(x: f32, value: fn(u32) -> f32) -> u8 {
        let finite = (0..0x80u32).filter(|c| value(*c).is_finite());
        let distance = |c: &u32| (f64::from(value(*c)) - f64::from(x.abs())).abs();
        let best = finite.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
        best as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn bytes_come_back_and_numbers_go_to_the_nearest() {
        let formats: [(fn(f32) -> u8, fn(u32) -> f32); 2] = [(e4m3, e4m3_value), (e5m2, e5m2_value)];
        for (to, from) in formats {
            for code in 0..=255u32 {
                let x = from(code);
                let want = if x.is_nan() { 0x7f } else { code as u8 };
                assert_eq!(to(x), want, "{code:#x} is {x}");
            }
            let mut bits = 1u32;
            for _ in 0..20_000 {
                bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Exponents around those of the formats.
                let x = f32::from_bits(bits & 0x807f_ffff | (100 + (bits >> 7) % 50) << 23);
                assert_eq!(to(x), nearest(x, from), "{x}");
            }
            // The midpoints between adjacent values, and the floats next to each midpoint.
            for code in 0..0x7fu32 {
                let half = (from(code) + from(code + 1)) / 2.0;
                if half.is_finite() {
                    for x in [half, f32::from_bits(half.to_bits() + 1), f32::from_bits(half.to_bits() - 1), -half] {
                        assert_eq!(to(x), nearest(x, from), "{x}");
                    }
                }
            }
        }
        assert_eq!([e4m3(1e30), e4m3(-1e30), e4m3(f32::INFINITY)], [0x7e, 0xfe, 0x7f]);
        assert_eq!([e5m2(1e30), e5m2(-1e30), e5m2(f32::NEG_INFINITY), e5m2(f32::NAN)], [0x7b, 0xfb, 0xfc, 0x7f]);
    }

    #[test]
    fn f64_rounds_once() {
        // A tie in f32, above the tie in f64.
        let above = 17.0 + 1e-12;
        assert_eq!((e4m3(above as f32), e4m3(to_odd(above))), (e4m3(16.0), e4m3(18.0)));
        assert_eq!(to_odd(f64::MAX), f32::MAX);
        assert_eq!(to_odd(-0.1), -f32::from_bits(0x3dcc_cccd));
        assert!(to_odd(f64::NAN).is_nan() && to_odd(f64::INFINITY) == f32::INFINITY);
    }
}
