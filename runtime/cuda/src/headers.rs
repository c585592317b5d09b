//! The text of `kernels/`, embedded: what generated and hand-written functions may include.

/// Path under `kernels/`, and text.
pub const HEADERS: &[(&str, &str)] = &[
    ("device/base.cuh", include_str!("../../../kernels/device/base.cuh")),
    ("device/fault.cuh", include_str!("../../../kernels/device/fault.cuh")),
    ("device/philox.cuh", include_str!("../../../kernels/device/philox.cuh")),
    ("device/ops.cuh", include_str!("../../../kernels/device/ops.cuh")),
    ("device/cast.cuh", include_str!("../../../kernels/device/cast.cuh")),
    ("device/pack.cuh", include_str!("../../../kernels/device/pack.cuh")),
    ("device/fold.cuh", include_str!("../../../kernels/device/fold.cuh")),
];
