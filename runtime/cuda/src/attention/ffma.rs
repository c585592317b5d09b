//! Tiles of attention in f32: kernels of plain multiply-adds for every GPU since sm_80 (`kernels/attention/*_ffma.cuh`).

use super::{Mask, Pass};
use crate::launch::{Function, Props};

/// How one kernel is cut up: blocks of `rows`, steps of `bn` along the other side, `columns` of the block's `threads` side by
/// side; `both`: the two tensors that are stepped over have a place each; `blocks` as in [`Tile`](super::Tile).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ffma {
    pub rows: u32,
    pub bn: u32,
    pub columns: u32,
    pub threads: u32,
    pub both: bool,
    pub blocks: u32,
}

const fn ffma(rows: u32, bn: u32, columns: u32, threads: u32, both: bool, blocks: u32) -> Ffma {
    Ffma { rows, bn, columns, threads, both, blocks }
}

/// (pass, head size, tile); the first is taken of which `blocks` fit a multiprocessor. The last of each fits all.
#[rustfmt::skip]
pub const FFMA: &[(Pass, u32, Ffma)] = &[
    (Pass::Forward, 32, ffma(128, 64, 8, 128, true, 2)),
    (Pass::Forward, 32, ffma(64, 64, 8, 128, true, 1)),
    (Pass::Forward, 64, ffma(128, 64, 8, 128, true, 2)),
    (Pass::Forward, 64, ffma(64, 64, 8, 128, false, 3)),
    (Pass::Forward, 64, ffma(64, 64, 8, 128, false, 1)),
    (Pass::Forward, 96, ffma(128, 32, 8, 128, false, 2)),
    (Pass::Forward, 96, ffma(64, 32, 8, 128, false, 2)),
    (Pass::Forward, 128, ffma(64, 64, 16, 128, false, 2)),
    (Pass::Forward, 128, ffma(64, 32, 8, 128, false, 2)),
    (Pass::Forward, 128, ffma(64, 64, 16, 128, false, 1)),
    (Pass::Forward, 256, ffma(64, 64, 16, 256, false, 1)),
    (Pass::Forward, 256, ffma(32, 32, 16, 128, false, 1)),
    (Pass::BackwardQ, 32, ffma(64, 64, 8, 128, true, 2)),
    (Pass::BackwardQ, 32, ffma(64, 64, 8, 128, true, 1)),
    (Pass::BackwardQ, 64, ffma(64, 64, 16, 128, true, 2)),
    (Pass::BackwardQ, 64, ffma(64, 64, 16, 128, false, 2)),
    (Pass::BackwardQ, 64, ffma(64, 64, 16, 128, false, 1)),
    (Pass::BackwardQ, 96, ffma(64, 64, 8, 128, false, 2)),
    (Pass::BackwardQ, 96, ffma(64, 32, 8, 128, false, 2)),
    (Pass::BackwardQ, 96, ffma(64, 32, 8, 128, false, 1)),
    (Pass::BackwardQ, 128, ffma(64, 64, 16, 256, true, 1)),
    (Pass::BackwardQ, 128, ffma(64, 32, 8, 128, false, 1)),
    (Pass::BackwardQ, 256, ffma(64, 64, 16, 256, false, 1)),
    (Pass::BackwardQ, 256, ffma(32, 64, 16, 128, false, 1)),
    (Pass::BackwardQ, 256, ffma(32, 16, 16, 128, false, 1)),
    (Pass::BackwardKv, 32, ffma(64, 64, 8, 128, true, 2)),
    (Pass::BackwardKv, 32, ffma(64, 64, 8, 128, true, 1)),
    (Pass::BackwardKv, 64, ffma(64, 64, 16, 128, true, 2)),
    (Pass::BackwardKv, 64, ffma(64, 64, 16, 128, false, 2)),
    (Pass::BackwardKv, 64, ffma(64, 64, 16, 128, false, 1)),
    (Pass::BackwardKv, 96, ffma(64, 64, 8, 128, false, 2)),
    (Pass::BackwardKv, 96, ffma(64, 32, 8, 128, false, 2)),
    (Pass::BackwardKv, 96, ffma(64, 32, 8, 128, false, 1)),
    (Pass::BackwardKv, 128, ffma(128, 64, 16, 256, false, 1)),
    (Pass::BackwardKv, 128, ffma(64, 32, 8, 128, false, 1)),
    (Pass::BackwardKv, 256, ffma(64, 64, 16, 256, false, 1)),
    (Pass::BackwardKv, 256, ffma(32, 64, 16, 128, false, 1)),
    (Pass::BackwardKv, 256, ffma(32, 16, 16, 128, false, 1)),
];

impl Ffma {
    pub fn of(pass: Pass, size: u32, props: &Props) -> Option<Ffma> {
        FFMA.iter().find(|t| t.0 == pass && t.1 == size && t.2.fits(pass, size, props)).map(|t| t.2)
    }

    /// Whether a multiprocessor has room for `blocks` of them: it keeps 1 KiB for each beside its own.
    pub fn fits(&self, pass: Pass, size: u32, props: &Props) -> bool {
        self.blocks * (self.shared_bytes(pass, size) + 1024) <= props.shared_bytes + 1024
    }

    pub fn shared_bytes(&self, pass: Pass, size: u32) -> u32 {
        let kept = if pass == Pass::Forward { self.rows } else { 2 * self.rows };
        let stepped = if self.both { 2 * self.bn } else { self.bn };
        4 * ((kept + stepped) * (size + 4) + self.rows * (self.bn + self.columns))
    }

    /// The text of one kernel.
    pub fn function(&self, pass: Pass, size: u32, mask: Mask) -> Function {
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
        let Ffma { rows, bn, columns, threads, both, blocks } = *self;
        let Mask { causal, window, .. } = mask;
        let (more, documents) = mask.documents_text();
        let text = format!(
            "#include \"attention/{name}_ffma.cuh\"\n\
             extern \"C\" __global__ void __launch_bounds__({threads}, {blocks}) KERNEL({params}, {more}const attention::Problem p) {{\n    \
             attention::{name}_ffma<attention::FfmaPlan<{size}, {rows}, {bn}, {columns}, {threads}, {both}>, {causal}, {window}>({}, p{documents});\n}}\n",
            args.join(", ")
        );
        Function { label: format!("attention_{name}_d{size}_f32{}", mask.name()), text }
    }
}
