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
    ("index/add.cuh", include_str!("../../../kernels/index/add.cuh")),
    ("index/gather.cuh", include_str!("../../../kernels/index/gather.cuh")),
    ("index/scatter.cuh", include_str!("../../../kernels/index/scatter.cuh")),
    ("library/number.cuh", include_str!("../../../kernels/library/number.cuh")),
    ("library/walk.cuh", include_str!("../../../kernels/library/walk.cuh")),
    ("matmul/plain.cuh", include_str!("../../../kernels/matmul/plain.cuh")),
    ("movement/place.cuh", include_str!("../../../kernels/movement/place.cuh")),
    ("movement/unwindow.cuh", include_str!("../../../kernels/movement/unwindow.cuh")),
    ("scan/scan.cuh", include_str!("../../../kernels/scan/scan.cuh")),
    ("sort/argreduce.cuh", include_str!("../../../kernels/sort/argreduce.cuh")),
    ("sort/block.cuh", include_str!("../../../kernels/sort/block.cuh")),
    ("sort/radix.cuh", include_str!("../../../kernels/sort/radix.cuh")),
];
