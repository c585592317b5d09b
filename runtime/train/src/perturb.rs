//! Changes the initial weights of a run by one ulp, to measure how far rounding moves its metrics (`envelope.rs`).
//!
//! Each float element of a trainable State becomes the next number of its dtype above or below it. The direction is a bit of a BLAKE3
//! stream over the seed and the State's path, so it depends on neither device nor mesh.

use crate::error::Result;
use perilune_core::{DType, HostTensor};
use perilune_lua::Run;

/// Bits drawn at one time.
const BLOCK: usize = 64;

/// Changes every float element of the trainable States by one ulp.
pub(crate) fn perturb(run: &Run, seed: u64) -> Result<()> {
    Ok(run.edit_trainable(|path, value| nudge(value, seed, path))?)
}

/// Moves every float element of a tensor to its neighbour above or below. Values that are not finite stay, and the largest number
/// of a dtype moves towards zero.
fn nudge(value: &mut HostTensor, seed: u64, path: &str) {
    let mut hash = blake3::Hasher::new();
    hash.update(&seed.to_le_bytes()).update(path.as_bytes());
    let mut stream = hash.finalize_xof();
    let mut block = [0u8; BLOCK];
    let mut directions = (0..).map(move |k: usize| {
        let at = k % (8 * BLOCK);
        if at == 0 {
            stream.fill(&mut block);
        }
        block[at / 8] >> (at % 8) & 1 == 1
    });
    // Sign, exponent and mantissa as one number: neighbours differ by 1.
    let (infinity, size) = match value.dtype {
        DType::F64 => (f64::INFINITY.to_bits(), 8),
        DType::F32 => (u64::from(f32::INFINITY.to_bits()), 4),
        DType::BF16 => (0x7f80, 2),
        DType::F16 => (0x7c00, 2),
        _ => return,
    };
    for element in value.bytes.chunks_exact_mut(size) {
        let Some(up) = directions.next() else { return };
        let mut bytes = [0u8; 8];
        bytes[..size].copy_from_slice(element);
        let bits = neighbour(u64::from_le_bytes(bytes), up, infinity, 1 << (8 * size - 1));
        element.copy_from_slice(&bits.to_le_bytes()[..size]);
    }
}

/// Returns the bits of the number next to one, above or below. `sign` is the sign bit, `infinity` has the bits of +infinity.
fn neighbour(bits: u64, up: bool, infinity: u64, sign: u64) -> u64 {
    let (magnitude, negative) = (bits & !sign, bits & sign);
    match magnitude {
        m if m >= infinity => bits,
        0 => 1 | if up { 0 } else { sign },
        // Away from zero, unless that is infinity.
        m if up == (negative == 0) && m + 1 < infinity => negative | (m + 1),
        m => negative | (m - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::Shape;

    /// The oracle is the standard library's `next_up` and `next_down`.
    #[test]
    fn elements_move_to_a_neighbour() {
        let values = [0.0f32, -0.0, 1.0, -1.0, 1.5e-45, -3.5, f32::MIN_POSITIVE, 2.0f32.powi(-126), 1e30];
        let mut all: Vec<f32> = (0..2000).map(|k| values[k % values.len()]).collect();
        all.extend([f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN]);
        let shape = Shape::of(&[all.len()]);
        let mut moved = HostTensor::from_f32(shape, &all);
        nudge(&mut moved, 7, "model.w");
        let mut up = 0;
        for (k, x) in all.iter().enumerate() {
            let y = moved.get_f64(k) as f32;
            match x {
                x if x.is_infinite() => assert_eq!(y, *x),
                x if x.abs() == f32::MAX => assert_eq!(y, f32::MAX.next_down() * x.signum()),
                x => {
                    assert!(y == x.next_up() || y == x.next_down(), "{x:e} {y:e}");
                    up += u32::from(y > *x);
                }
            }
        }
        assert!((800..1200).contains(&up), "{up} of 2000 went up");
    }

    #[test]
    fn narrow_and_wide_dtypes() {
        for (dtype, one, ulp) in
            [(DType::F16, 1.0, 2f64.powi(-10)), (DType::BF16, 1.0, 2f64.powi(-7)), (DType::F64, 1.0, 2f64.powi(-52))]
        {
            let mut t = HostTensor::from_f64(dtype, Shape::of(&[64]), &[one; 64]);
            nudge(&mut t, 1, "w");
            let moved = t.to_f64();
            // Below 1 numbers are twice as dense.
            assert!(moved.iter().all(|v| *v == one + ulp || *v == one - ulp / 2.0), "{dtype}: {moved:?}");
            assert!(moved.iter().any(|v| *v > one) && moved.iter().any(|v| *v < one), "{dtype}");
        }
        let mut whole = HostTensor::from_i64(Shape::of(&[3]), &[1, 2, 3]);
        nudge(&mut whole, 1, "w");
        assert_eq!(whole.to_i64(), [1, 2, 3]);
    }

    #[test]
    fn directions_follow_from_seed_and_path() {
        let moved = |seed, path: &str| {
            let mut t = HostTensor::from_f32(Shape::of(&[1000]), &[1.0; 1000]);
            nudge(&mut t, seed, path);
            t
        };
        assert_eq!(moved(1, "a"), moved(1, "a"));
        assert_ne!(moved(1, "a"), moved(2, "a"));
        assert_ne!(moved(1, "a"), moved(1, "b"));
    }
}
