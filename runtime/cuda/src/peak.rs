//! Estimates a GPU's peak FLOP/s by precision, for model FLOPs utilization (MFU).
//!
//! Listed GPUs have the vendor's published dense figures at boost clock; others are estimated from the number of SMs, their clock and
//! the multiply-adds per SM and cycle of the architecture.

/// (substring of the name, bf16 and fp16, tf32, f32) in TFLOP/s. The first match counts.
const KNOWN: [(&str, f64, f64, f64); 14] = [
    ("B200", 2250.0, 1125.0, 75.0),
    ("H200", 989.4, 494.7, 66.9),
    ("H100 PCIe", 756.0, 378.0, 51.2),
    ("H100 NVL", 835.5, 417.5, 60.0),
    ("H100", 989.4, 494.7, 66.9),
    ("H800", 989.4, 494.7, 66.9),
    ("GH200", 989.4, 494.7, 66.9),
    ("A100", 312.0, 156.0, 19.5),
    ("A800", 312.0, 156.0, 19.5),
    ("L40S", 362.05, 183.0, 91.6),
    ("L40", 181.05, 90.5, 90.5),
    ("L4", 121.0, 60.0, 30.3),
    ("A40", 149.7, 74.8, 37.4),
    ("A10", 125.0, 62.5, 31.2),
];

/// Peak FLOP/s of products in a precision (`f32`, `tf32`, `bf16`, `fp16`); `None` for an unknown precision or
/// architecture.
pub fn flops(name: &str, arch: (u32, u32), sms: u32, clock_hz: f64, precision: &str) -> Option<f64> {
    let pick = |half: f64, tf32: f64, single: f64| match precision {
        "bf16" | "fp16" => Some(half),
        "tf32" => Some(tf32),
        "f32" => Some(single),
        _ => None,
    };
    let words: Vec<&str> = name.split([' ', '-']).collect();
    let fits = |known: &str| known.split(' ').all(|word| words.contains(&word));
    if let Some((_, half, tf32, single)) = KNOWN.iter().find(|k| fits(k.0)) {
        return pick(half * 1e12, tf32 * 1e12, single * 1e12);
    }
    // FLOP per cycle and SM.
    let (half, tf32, single) = match arch {
        (8, 0) => (2048.0, 1024.0, 128.0),
        (8, _) => (1024.0, 512.0, 256.0),
        (9, 0) => (4096.0, 2048.0, 256.0),
        (10, _) => (8192.0, 4096.0, 256.0),
        _ => return None,
    };
    let cycles = f64::from(sms) * clock_hz;
    pick(half * cycles, tf32 * cycles, single * cycles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_gpus_have_the_published_figures_and_others_an_estimate() {
        let bf16 = |name: &str| flops(name, (9, 0), 132, 1.83e9, "bf16").map(|f| f / 1e12);
        assert_eq!(bf16("NVIDIA H200"), Some(989.4));
        assert_eq!(bf16("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(bf16("NVIDIA H100 80GB HBM3"), Some(989.4));
        assert_eq!(flops("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9, "bf16"), Some(312e12));
        // The formula must reproduce published figures.
        let estimate = flops("unknown", (9, 0), 132, 1.83e9, "bf16").map(|f| (f / 1e12).round());
        assert_eq!(estimate, Some(989.0));
        assert_eq!(flops("unknown", (7, 5), 40, 1.5e9, "bf16"), None);
        assert_eq!(flops("NVIDIA H200", (9, 0), 132, 1.83e9, "fp8"), None);
    }
}
