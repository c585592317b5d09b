//! The text of `kernels/`, embedded: what generated and hand-written functions may include.

/// Path under `kernels/`, and text.
pub const HEADERS: &[(&str, &str)] = &[
    ("attention/backward_kv.cuh", include_str!("../../../kernels/attention/backward_kv.cuh")),
    ("attention/backward_q.cuh", include_str!("../../../kernels/attention/backward_q.cuh")),
    ("attention/forward.cuh", include_str!("../../../kernels/attention/forward.cuh")),
    ("attention/mma.cuh", include_str!("../../../kernels/attention/mma.cuh")),
    ("attention/rows.cuh", include_str!("../../../kernels/attention/rows.cuh")),
    ("attention/tile.cuh", include_str!("../../../kernels/attention/tile.cuh")),
    ("device/base.cuh", include_str!("../../../kernels/device/base.cuh")),
    ("device/fault.cuh", include_str!("../../../kernels/device/fault.cuh")),
    ("device/philox.cuh", include_str!("../../../kernels/device/philox.cuh")),
];
