//! Lists the tile configurations of attention with mma.sync (sm_80 and later) and emits its kernels
//! (`kernels/attention/{forward,backward_q,backward_kv}.cuh`).

use super::{Mask, Pass, element};
use crate::launch::{Function, Props};
use perilune_core::DType;
use std::fmt::Write;

/// The tile configuration of one kernel. Each of `warps` warps has 16 `mt` rows and steps along the other side by `bn`,
/// with `stages` buffers. `held`: the left operands (k for dk and dv) stay in registers; `split`: number of blocks that
/// share a tile's columns; `blocks`: blocks per multiprocessor, which limits the registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmaTile {
    pub warps: u32,
    pub mt: u32,
    pub bn: u32,
    pub stages: u32,
    pub held: bool,
    pub split: u32,
    pub blocks: u32,
}

/// When a row of [`MMA_TILES`] applies. Certain masks leave too few registers for some of the fastest tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    Always,
    /// With the 228 KiB of shared memory of sm_90, without a window or documents.
    Large,
    /// On sm_100 and later, without any mask.
    Bare100,
    /// With a causal mask or a window.
    Masked,
    /// With documents.
    Documents,
    /// With documents, except for a causal mask over all keys without a window.
    Mixed,
    /// With a window over a block of keys, whose positions are shifted.
    Shifted,
}

impl When {
    pub fn holds(self, props: &Props, mask: Mask) -> bool {
        let Mask { causal, window, documents, block } = mask;
        match self {
            When::Always => true,
            When::Large => props.arch.0 == 9 && props.shared_bytes >= 200 << 10 && !window && !documents,
            When::Bare100 => props.arch.0 >= 10 && !causal && !window && !documents,
            When::Masked => causal || window,
            When::Documents => documents,
            When::Mixed => documents && (window || !causal || block),
            When::Shifted => block && window,
        }
    }
}

const fn tile(warps: u32, mt: u32, bn: u32, stages: u32, held: bool, split: u32, blocks: u32) -> MmaTile {
    MmaTile { warps, mt, bn, stages, held, split, blocks }
}

/// Head sizes that kernels are compiled for.
pub const SIZES: [u32; 5] = [32, 64, 96, 128, 256];

/// (pass, head size, when, tile); the first row that applies is used.
#[rustfmt::skip]
pub const MMA_TILES: &[(Pass, u32, When, MmaTile)] = &[
    (Pass::Forward, 32, When::Always, tile(4, 2, 64, 2, true, 1, 2)),
    (Pass::Forward, 64, When::Always, tile(4, 2, 64, 2, true, 1, 2)),
    (Pass::Forward, 96, When::Always, tile(4, 2, 64, 2, false, 1, 2)),
    (Pass::Forward, 128, When::Documents, tile(4, 2, 64, 1, false, 1, 2)),
    (Pass::Forward, 128, When::Large, tile(4, 2, 64, 1, false, 1, 2)),
    (Pass::Forward, 128, When::Always, tile(4, 2, 32, 2, false, 1, 2)),
    (Pass::Forward, 256, When::Always, tile(4, 1, 64, 1, false, 1, 2)),
    (Pass::BackwardQ, 32, When::Always, tile(4, 2, 32, 2, true, 1, 2)),
    (Pass::BackwardQ, 64, When::Always, tile(4, 2, 32, 2, true, 1, 2)),
    (Pass::BackwardQ, 96, When::Always, tile(4, 2, 32, 2, false, 1, 2)),
    (Pass::BackwardQ, 128, When::Documents, tile(4, 1, 32, 2, true, 1, 2)),
    (Pass::BackwardQ, 128, When::Shifted, tile(4, 1, 32, 2, true, 1, 2)),
    (Pass::BackwardQ, 128, When::Large, tile(4, 2, 32, 2, false, 1, 2)),
    (Pass::BackwardQ, 128, When::Always, tile(4, 2, 32, 1, false, 1, 2)),
    (Pass::BackwardQ, 256, When::Always, tile(4, 1, 32, 1, false, 1, 2)),
    (Pass::BackwardKv, 32, When::Always, tile(4, 2, 32, 2, false, 1, 2)),
    (Pass::BackwardKv, 64, When::Bare100, tile(4, 2, 32, 1, false, 1, 2)),
    (Pass::BackwardKv, 64, When::Mixed, tile(4, 1, 64, 2, false, 1, 2)),
    (Pass::BackwardKv, 64, When::Always, tile(4, 2, 32, 2, false, 1, 2)),
    (Pass::BackwardKv, 96, When::Always, tile(4, 1, 32, 2, true, 1, 2)),
    (Pass::BackwardKv, 128, When::Masked, tile(4, 1, 32, 2, true, 1, 2)),
    (Pass::BackwardKv, 128, When::Always, tile(4, 1, 32, 2, false, 1, 2)),
    (Pass::BackwardKv, 256, When::Always, tile(4, 1, 32, 1, false, 2, 2)),
];

impl MmaTile {
    pub fn of(pass: Pass, size: u32, props: &Props, mask: Mask) -> Option<MmaTile> {
        MMA_TILES.iter().find(|t| t.0 == pass && t.1 == size && t.2.holds(props, mask)).map(|t| t.3)
    }

    /// Rows per block.
    pub fn rows(&self) -> u32 {
        16 * self.mt * self.warps
    }

    pub fn shared_bytes(&self, pass: Pass, size: u32) -> u32 {
        let (rows, step) = (self.rows() * size * 2, self.bn * size * 2);
        match pass {
            Pass::Forward => rows + 2 * self.stages * step,
            Pass::BackwardQ => 2 * rows + 2 * self.stages * step,
            Pass::BackwardKv => 2 * rows + self.stages * (2 * step + 1024),
        }
    }
}

/// Returns the text of one kernel.
pub fn function(pass: Pass, size: u32, tile: MmaTile, dtype: DType, mask: Mask) -> Function {
    let t = element(dtype);
    let to = mask.result(t);
    let (name, file, plan, params, args) = match pass {
        Pass::Forward => (
            "forward",
            "forward",
            "ForwardPlan",
            format!("const {t}* q, const {t}* k, const {t}* v, {to}* out, f32* lse"),
            "q, k, v, out, lse",
        ),
        Pass::BackwardQ => (
            "backward_q",
            "backward_q",
            "BackwardQPlan",
            format!(
                "const {t}* q, const {t}* k, const {t}* v, const {t}* grad, const f32* lse, const f32* delta, {to}* dq"
            ),
            "q, k, v, grad, lse, delta, dq",
        ),
        Pass::BackwardKv => (
            "backward_kv",
            "backward_kv",
            "BackwardKVPlan",
            format!(
                "const {t}* q, const {t}* k, const {t}* v, const {t}* grad, const f32* lse, const f32* delta, {to}* dk, {to}* dv"
            ),
            "q, k, v, grad, lse, delta, dk, dv",
        ),
    };
    let MmaTile { warps, mt, bn, stages, held, split, blocks } = tile;
    let mut plan = format!("attention::{plan}<{size}, {warps}, {mt}, {bn}, {stages}, {held}");
    if pass == Pass::BackwardKv {
        let _ = write!(plan, ", {split}");
    }
    let Mask { causal, window, .. } = mask;
    let (more, given) = mask.more_text(pass, false);
    let text = format!(
        "#include \"attention/{file}.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__({}, {blocks}) KERNEL({params}, {more}const attention::Problem p) {{\n    \
         attention::{name}<{t}, {plan}>, {causal}, {window}>({args}, p{given});\n}}\n",
        32 * warps
    );
    Function { label: format!("attention_{name}_d{size}_{t}{}", mask.name()), text }
}
