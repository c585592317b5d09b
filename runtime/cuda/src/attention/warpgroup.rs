//! Lists the tile configurations of attention with wgmma and TMA (sm_90a) and emits its kernels
//! (`kernels/attention/*_sm90.cuh`).

use super::strides::Strides;
use super::{Mask, Pass, When, element};
use crate::launch::{Function, Props, TmaDesc};
use perilune_core::DType;

/// The tile configuration of one wgmma kernel. Each of `groups` warpgroups has 64 rows and steps along the other side
/// by `bn`, with `stages` buffers. `lean`: fewer registers in exchange for less overlap; `blocks`: as in
/// [`MmaTile`](super::MmaTile).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WarpgroupTile {
    pub groups: u32,
    pub bn: u32,
    pub stages: u32,
    pub lean: bool,
    pub blocks: u32,
}

const fn groups(groups: u32, bn: u32, stages: u32, lean: bool, blocks: u32) -> WarpgroupTile {
    WarpgroupTile { groups, bn, stages, lean, blocks }
}

/// (pass, head size, when, tile) of the warpgroup kernels; the first row that applies is used. Windows and documents
/// need registers that some tiles lack (`When::Large`, which applies to every sm_90 without these masks).
#[rustfmt::skip]
pub const WARPGROUP_TILES: &[(Pass, u32, When, WarpgroupTile)] = &[
    (Pass::Forward, 64, When::Always, groups(2, 64, 4, false, 2)),
    (Pass::Forward, 128, When::Mixed, groups(3, 64, 4, false, 1)),
    (Pass::Forward, 128, When::Always, groups(3, 96, 3, false, 1)),
    (Pass::BackwardQ, 64, When::Large, groups(2, 64, 4, true, 2)),
    (Pass::BackwardQ, 64, When::Always, groups(2, 48, 4, true, 2)),
    (Pass::BackwardQ, 128, When::Large, groups(3, 64, 3, true, 1)),
    (Pass::BackwardQ, 128, When::Always, groups(2, 64, 3, false, 1)),
    (Pass::BackwardKv, 64, When::Always, groups(1, 64, 3, true, 3)),
    (Pass::BackwardKv, 128, When::Always, groups(2, 64, 3, false, 1)),
];

impl WarpgroupTile {
    /// Selects the tile for heads of `size` columns (see `mma::SIZES`), with the head size that the kernel is compiled
    /// for.
    pub fn of(pass: Pass, size: u32, props: &Props, mask: Mask) -> Option<(u32, WarpgroupTile)> {
        // A kernel for 32 would waste half of each product, and one for 256 does not fit. 96 uses three quarters of
        // 128; it was not timed against the `mma` tiles.
        let made_for = match size {
            64 => 64,
            96 | 128 => 128,
            _ => return None,
        };
        if props.arch != (9, 0) {
            return None;
        }
        let fits = |t: &&(Pass, u32, When, WarpgroupTile)| t.0 == pass && t.1 == made_for && t.2.holds(props, mask);
        WARPGROUP_TILES.iter().find(fits).map(|t| (t.1, t.3))
    }

    /// Rows per block.
    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    pub fn shared_bytes(&self, pass: Pass, size: u32) -> u32 {
        let (rows, step) = (self.rows() * size * 2, self.bn * size * 2);
        match pass {
            Pass::Forward => rows + self.stages * (2 * step + 32) + 8,
            Pass::BackwardQ => 2 * rows + self.stages * (2 * step + 16) + 8,
            Pass::BackwardKv => 2 * rows + self.stages * (2 * step + self.bn * 8 + 16) + 8,
        }
    }

    /// Returns the text of one kernel.
    pub fn function(&self, pass: Pass, size: u32, dtype: DType, mask: Mask) -> Function {
        let t = element(dtype);
        let to = format!("{}*", mask.result(t));
        let (name, plan, pointers) = match pass {
            Pass::Forward => ("forward", "ForwardSm90Plan", vec![(to, "out"), ("f32*".into(), "lse")]),
            Pass::BackwardQ => {
                let row = format!("const {t}*");
                let made = [("float2*".into(), "stats"), (to, "dq")];
                let rows = match mask.block {
                    true => vec![("const f32*".into(), "rows")],
                    false => vec![(row.clone(), "grads"), (row, "out")],
                };
                let rows = rows.into_iter().chain([("const f32*".into(), "lse")]);
                ("backward_q", "BackwardQSm90Plan", rows.chain(made).collect())
            }
            Pass::BackwardKv => (
                "backward_kv",
                "BackwardKVSm90Plan",
                vec![("const float2*".into(), "stats"), (to.clone(), "dk"), (to, "dv")],
            ),
        };
        let maps: &[&str] = if pass == Pass::Forward { &["q", "k", "v"] } else { &["q", "k", "v", "grad"] };
        let params: Vec<String> = maps
            .iter()
            .map(|m| format!("const __grid_constant__ attention::TensorMap {m}"))
            .chain(pointers.iter().map(|(kind, name)| format!("{kind} {name}")))
            .collect();
        // A block's rows have no gradient and result to compute delta of.
        let pointers = pointers.iter().map(|p| if p.1 == "rows" { "nullptr, nullptr" } else { p.1 });
        let args: Vec<&str> = maps.iter().copied().chain(pointers).collect();
        let WarpgroupTile { groups, bn, stages, lean, blocks } = *self;
        let lean = if pass == Pass::Forward { String::new() } else { format!(", {lean}") };
        let Mask { causal, window, .. } = mask;
        let (more, given) = mask.more_text(pass, pass == Pass::BackwardQ);
        let text = format!(
            "#include \"attention/{name}_sm90.cuh\"\n\
             extern \"C\" __global__ void __launch_bounds__({}, {blocks}) KERNEL({}, {more}\
             const __grid_constant__ attention::Problem p) {{\n    \
             attention::{name}_sm90<{t}, attention::{plan}<{size}, {groups}, {bn}, {stages}{lean}>, {causal}, {window}>({}, p{given});\n}}\n",
            128 * groups,
            params.join(", "),
            args.join(", ")
        );
        Function { label: format!("attention_{name}_sm90_d{size}_{t}{}", mask.name()), text }
    }
}

/// The tensor map of boxes of `rows` rows and 64 columns over (batch, heads, length, width) through `strides`. `None`
/// if TMA does not support it: a dim of 0, or a stride (of a dim above 1) that is not a positive multiple of 16 bytes.
pub(super) fn tma_desc(strides: Strides, dims: [usize; 4], rows: u32, dtype: DType) -> Option<TmaDesc> {
    let [batch, heads, length, width] = dims;
    let mut bytes = [0; 3];
    for (to, (stride, n)) in
        bytes.iter_mut().zip([(strides.0[2], length), (strides.0[1], heads), (strides.0[0], batch)])
    {
        *to = match (n, stride) {
            (0, _) => return None,
            (1, _) => 16,
            (_, s) if s > 0 && s % 8 == 0 && s < 1 << 38 => s as u64 * 2,
            _ => return None,
        };
    }
    let sizes = [width, length, heads, batch];
    let fits = width > 0 && sizes.iter().all(|n| *n <= u32::MAX as usize);
    fits.then(|| TmaDesc { dtype, dims: sizes.map(|n| n as u64), strides: bytes, shape: [64, rows, 1, 1] })
}
