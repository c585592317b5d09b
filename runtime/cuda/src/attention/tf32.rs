//! Lists the tile configurations of attention on f32 with TF32 tensor cores (sm_80 and later) and emits its kernels
//! (`kernels/attention/*_tf32.cuh`): three TF32 products per f32 product, or one for precision "tf32".

use super::{Mask, Pass};
use crate::launch::{Function, Props};

/// The tile configuration of one kernel. Each of `warps` warps has 16 `mt` rows and steps along the other side by `bn`,
/// with `stages` buffers. `side`: number of warps that share their rows; `blocks`: as in [`MmaTile`](super::MmaTile).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tf32 {
    pub warps: u32,
    pub mt: u32,
    pub bn: u32,
    pub stages: u32,
    pub side: u32,
    pub blocks: u32,
}

const fn tf32(warps: u32, mt: u32, bn: u32, stages: u32, side: u32, blocks: u32) -> Tf32 {
    Tf32 { warps, mt, bn, stages, side, blocks }
}

/// (pass, head size, products, tile); the first row whose `blocks` fit a multiprocessor is used. The last row of each
/// kind fits every GPU.
#[rustfmt::skip]
pub const TF32: &[(Pass, u32, u32, Tf32)] = &[
    (Pass::Forward, 32, 3, tf32(4, 2, 64, 2, 1, 2)),
    (Pass::Forward, 32, 3, tf32(4, 1, 64, 2, 1, 2)),
    (Pass::Forward, 64, 3, tf32(8, 1, 64, 2, 1, 1)),
    (Pass::Forward, 64, 3, tf32(4, 1, 64, 2, 1, 1)),
    (Pass::Forward, 96, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::Forward, 96, 3, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::Forward, 128, 3, tf32(8, 1, 32, 2, 1, 1)),
    (Pass::Forward, 128, 3, tf32(4, 2, 32, 1, 2, 1)),
    (Pass::Forward, 256, 3, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::Forward, 256, 3, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::Forward, 256, 3, tf32(4, 1, 16, 1, 2, 1)),
    (Pass::BackwardQ, 32, 3, tf32(4, 2, 32, 2, 1, 2)),
    (Pass::BackwardQ, 32, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardQ, 64, 3, tf32(4, 1, 64, 2, 1, 2)),
    (Pass::BackwardQ, 64, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardQ, 64, 3, tf32(4, 1, 32, 2, 1, 1)),
    (Pass::BackwardQ, 96, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardQ, 96, 3, tf32(4, 1, 32, 1, 1, 2)),
    (Pass::BackwardQ, 96, 3, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::BackwardQ, 128, 3, tf32(8, 1, 32, 2, 1, 1)),
    (Pass::BackwardQ, 128, 3, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::BackwardQ, 128, 3, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 3, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 3, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 3, tf32(2, 1, 16, 1, 2, 1)),
    (Pass::BackwardKv, 32, 3, tf32(4, 2, 32, 2, 1, 2)),
    (Pass::BackwardKv, 32, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardKv, 64, 3, tf32(4, 2, 64, 1, 2, 2)),
    (Pass::BackwardKv, 64, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardKv, 64, 3, tf32(4, 1, 32, 2, 1, 1)),
    (Pass::BackwardKv, 96, 3, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardKv, 96, 3, tf32(4, 1, 32, 1, 1, 2)),
    (Pass::BackwardKv, 96, 3, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::BackwardKv, 128, 3, tf32(8, 1, 64, 2, 2, 1)),
    (Pass::BackwardKv, 128, 3, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::BackwardKv, 128, 3, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 3, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 3, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 3, tf32(2, 1, 16, 1, 2, 1)),
    (Pass::Forward, 32, 1, tf32(4, 2, 64, 2, 1, 2)),
    (Pass::Forward, 32, 1, tf32(4, 1, 64, 2, 1, 2)),
    (Pass::Forward, 64, 1, tf32(4, 2, 32, 1, 1, 2)),
    (Pass::Forward, 64, 1, tf32(4, 1, 32, 2, 1, 1)),
    (Pass::Forward, 96, 1, tf32(4, 1, 64, 1, 1, 2)),
    (Pass::Forward, 96, 1, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::Forward, 128, 1, tf32(4, 1, 64, 1, 1, 2)),
    (Pass::Forward, 128, 1, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::Forward, 256, 1, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::Forward, 256, 1, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::Forward, 256, 1, tf32(4, 1, 16, 1, 2, 1)),
    (Pass::BackwardQ, 32, 1, tf32(4, 2, 32, 2, 1, 2)),
    (Pass::BackwardQ, 32, 1, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardQ, 64, 1, tf32(4, 2, 32, 2, 1, 2)),
    (Pass::BackwardQ, 64, 1, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardQ, 64, 1, tf32(4, 1, 32, 2, 1, 1)),
    (Pass::BackwardQ, 96, 1, tf32(4, 1, 64, 1, 1, 2)),
    (Pass::BackwardQ, 96, 1, tf32(4, 1, 32, 1, 1, 2)),
    (Pass::BackwardQ, 96, 1, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::BackwardQ, 128, 1, tf32(8, 1, 32, 2, 1, 1)),
    (Pass::BackwardQ, 128, 1, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::BackwardQ, 128, 1, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 1, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 1, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardQ, 256, 1, tf32(2, 1, 16, 1, 2, 1)),
    (Pass::BackwardKv, 32, 1, tf32(4, 2, 32, 2, 1, 2)),
    (Pass::BackwardKv, 32, 1, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardKv, 64, 1, tf32(4, 1, 64, 1, 1, 2)),
    (Pass::BackwardKv, 64, 1, tf32(4, 1, 32, 2, 1, 1)),
    (Pass::BackwardKv, 96, 1, tf32(4, 1, 32, 2, 1, 2)),
    (Pass::BackwardKv, 96, 1, tf32(4, 1, 32, 1, 1, 2)),
    (Pass::BackwardKv, 96, 1, tf32(4, 1, 32, 1, 1, 1)),
    (Pass::BackwardKv, 128, 1, tf32(8, 1, 64, 2, 2, 1)),
    (Pass::BackwardKv, 128, 1, tf32(8, 1, 64, 1, 2, 1)),
    (Pass::BackwardKv, 128, 1, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 1, tf32(8, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 1, tf32(4, 1, 32, 1, 2, 1)),
    (Pass::BackwardKv, 256, 1, tf32(2, 1, 16, 1, 2, 1)),
];

impl Tf32 {
    pub fn of(pass: Pass, size: u32, products: u32, props: &Props) -> Option<Tf32> {
        TF32.iter().find(|t| (t.0, t.1, t.2) == (pass, size, products) && t.3.fits(pass, size, props)).map(|t| t.3)
    }

    /// Rows per block.
    pub fn rows(&self) -> u32 {
        16 * self.mt * self.warps / self.side
    }

    /// Whether `blocks` blocks fit on a multiprocessor, which reserves 1 KiB of shared memory per block.
    pub fn fits(&self, pass: Pass, size: u32, props: &Props) -> bool {
        self.blocks * (self.shared_bytes(pass, size) + 1024) <= props.shared_bytes + 1024
    }

    pub fn shared_bytes(&self, pass: Pass, size: u32) -> u32 {
        let kept = if pass == Pass::Forward { self.rows() } else { 2 * self.rows() };
        let numbers = if pass == Pass::BackwardKv { 2 * self.bn } else { 0 };
        let peaks = if pass == Pass::Forward { 2 } else { 0 };
        let weights = if self.side == 2 { self.rows() * (self.bn + 8 + peaks) } else { 0 };
        4 * (kept * (size + 4) + self.stages * (2 * self.bn * (size + 4) + numbers) + weights)
    }

    /// Returns the text of one kernel.
    pub fn function(&self, pass: Pass, size: u32, products: u32, mask: Mask) -> Function {
        let (name, outputs) = match pass {
            Pass::Forward => ("forward", "f32* out, f32* lse"),
            Pass::BackwardQ => ("backward_q", "f32* dq"),
            Pass::BackwardKv => ("backward_kv", "f32* dk, f32* dv"),
        };
        let inputs = match pass {
            Pass::Forward => "const f32* q, const f32* k, const f32* v",
            _ => "const f32* q, const f32* k, const f32* v, const f32* grad, const f32* lse, const f32* delta",
        };
        let params = format!("{inputs}, {outputs}");
        let args: Vec<&str> = params.split(", ").filter_map(|p| p.split(' ').next_back()).collect();
        let Tf32 { warps, mt, bn, stages, side, blocks } = *self;
        let Mask { causal, window, .. } = mask;
        let (more, given) = mask.more_text(pass, false);
        let text = format!(
            "#include \"attention/{name}_tf32.cuh\"\n\
             extern \"C\" __global__ void __launch_bounds__({}, {blocks}) KERNEL({params}, {more}const attention::Problem p) {{\n    \
             attention::{name}_tf32<attention::Tf32Plan<{size}, {products}, {warps}, {mt}, {bn}, {stages}, {side}>, {causal}, {window}>({}, p{given});\n}}\n",
            32 * warps,
            args.join(", ")
        );
        let kind = if products == 1 { "tf32" } else { "f32" };
        Function { label: format!("attention_{name}_d{size}_{kind}{}", mask.name()), text }
    }
}
