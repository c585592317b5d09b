//! Tests attention without a GPU: which launches an operand layout gets, and that every kernel compiles without spilling registers.
//! `kernels/lab/attention_lab.py` checks results.

#![allow(clippy::unwrap_used)]

#[path = "common/nvrtc.rs"]
mod nvrtc;

use nvrtc::{Nvrtc, each};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::attention::{ATTENTION, ATTENTION_BACKWARD};
use perilune_core::ops::{bits, create};
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_cuda::attention::{
    self, MMA_TILES, Mask, MmaTile, Pass, TF32, Tf32, WARPGROUP_TILES, WarpgroupTile, When,
};
use perilune_cuda::launch::{Arg, Props, Work};
use perilune_plan::ir::{Library, Operand, Origin, Program, Storage, Value, ValueId};

// ---- supported nodes and their launches --------------------------------------------------------------------------

const CAUSAL: Mask = Mask { causal: true, window: false, documents: false, block: false };

/// What a block of keys takes most registers for, without and with documents.
const BLOCK: Mask = Mask { causal: true, window: true, documents: false, block: true };
const BLOCK_DOCUMENTS: Mask = Mask { documents: true, ..BLOCK };

fn node(dtype: DType, d: usize, scale: f64, mask: bool) -> bool {
    node_with(dtype, d, scale, mask, false)
}

fn node_with(dtype: DType, d: usize, scale: f64, mask: bool, documents: bool) -> bool {
    let g = &mut Graph::new();
    let q = g.leaf(&create::LEAF, Shape::of(&[2, 3, 5, d]), dtype, &[], 0);
    let mask = mask.then(|| g.leaf(&create::LEAF, Shape::of(&[5, 5]), DType::Bool, &[], 0));
    let given = documents.then(|| g.leaf(&create::LEAF, Shape::of(&[2, 5]), DType::I64, &[], 0));
    let inputs: Vec<NodeId> = [q, q, q].into_iter().chain(mask).chain(given).collect();
    let attrs = [1, bits(scale), 0, d as i64, d as i64, i64::from(documents)];
    let a = g.push(&ATTENTION, &inputs, &attrs).unwrap();
    attention::has_kernel(g.node(a))
}

#[test]
fn kernels_take_floats_without_a_mask() {
    assert!(
        node(DType::BF16, 64, 0.125, false) && node(DType::F16, 8, 0.125, false) && node(DType::F16, 256, 1.0, false)
    );
    assert!(node_with(DType::BF16, 64, 0.125, false, true) && !node_with(DType::BF16, 64, 0.125, true, true));
    assert!(
        node(DType::F32, 64, 0.125, false) && node(DType::F32, 60, 0.125, false) && node(DType::F32, 4, 1.0, false)
    );
    assert!(!node(DType::F32, 62, 0.125, false) && !node(DType::F32, 260, 0.125, false));
    assert!(!node(DType::F64, 64, 0.125, false));
    assert!(!node(DType::BF16, 64, 0.125, true));
    assert!(!node(DType::BF16, 60, 0.125, false) && !node(DType::BF16, 264, 0.125, false));
    assert!(!node(DType::BF16, 64, -0.125, false) && !node(DType::BF16, 64, 0.0, false));
}

#[test]
fn kernels_take_f32_whose_products_may_be_tf32() {
    let g = &mut Graph::new();
    let q = g.leaf(&create::LEAF, Shape::of(&[2, 5, 64]), DType::F32, &[], 0);
    for tf32 in [false, true] {
        g.modes.tf32 = tf32;
        let a = g.push(&ATTENTION, &[q, q, q], &[1, bits(0.125), 0, 64, 64, 0]).unwrap();
        assert_eq!((g.node(a).tf32, attention::has_kernel(g.node(a))), (tf32, true));
    }
}

fn view(v: u32, dims: &[usize], strides: &[isize], offset: isize) -> Operand {
    let mut s = [0; MAX_RANK];
    s[..strides.len()].copy_from_slice(strides);
    Operand::View(ValueId(v), Layout { shape: Shape::of(dims), strides: s, offset })
}

fn dense(v: u32, dims: &[usize]) -> Operand {
    Operand::View(ValueId(v), Layout::contiguous(Shape::of(dims)))
}

/// Document ids as an operand.
fn documents(dims: &[usize], strides: &[isize]) -> Operand {
    view(7, dims, strides, 3)
}

/// A GPU without warpgroup kernels.
const A100: Props = Props { arch: (8, 0), sms: 108, shared_bytes: 163 << 10, ..Props::H200 };

fn work(inputs: Vec<Operand>, outputs: usize, backward: bool) -> Work {
    work_on(&A100, inputs, outputs, backward)
}

fn work_on(props: &Props, inputs: Vec<Operand>, outputs: usize, backward: bool) -> Work {
    work_in(DType::BF16, props, inputs, outputs, backward)
}

fn work_in(dtype: DType, props: &Props, inputs: Vec<Operand>, outputs: usize, backward: bool) -> Work {
    work_of(dtype, false, props, inputs, outputs, backward)
}

fn work_of(dtype: DType, tf32: bool, props: &Props, inputs: Vec<Operand>, outputs: usize, backward: bool) -> Work {
    let value = Value { shape: Shape::of(&[1]), dtype, storage: Storage::Arena(0), origin: Origin::NONE };
    let program = Program {
        values: vec![value; 16],
        kernels: vec![],
        in_flight: Vec::new(),
        inputs: vec![],
        outputs: vec![],
        slots: vec![],
        starts: vec![],
        results: vec![],
        arena_bytes: 0,
        live_bytes: 0,
        exchanges: Vec::new(),
        stages: Vec::new(),
        route: Default::default(),
    };
    let always = if backward { 6 } else { 3 };
    let mut dtypes = vec![dtype; always];
    dtypes.resize(inputs.len(), DType::I64);
    let documents = i64::from(inputs.len() > always);
    let last = |o: &Operand| o.shape().dims()[o.shape().rank() - 1] as i64;
    let (q, k, v) = (inputs[0].shape(), inputs[1].shape(), inputs[2].shape());
    let out = q.with(q.rank() - 1, v.dims()[v.rank() - 1]);
    let shapes = if backward { [q, k, v] } else { [out, q.remove(q.rank() - 1), v] };
    let l = Library {
        op: if backward { &ATTENTION_BACKWARD } else { &ATTENTION },
        attrs: [1, bits(0.125), 0, last(&inputs[0]), last(&inputs[2]), documents].into_iter().collect(),
        dtypes,
        inputs,
        outputs: (8..8 + outputs as u32).map(ValueId).collect(),
        layouts: shapes[..outputs].iter().map(|s| Layout::contiguous(*s)).collect(),
        epilogue: None,
        tf32,
        origin: Origin::NONE,
    };
    if backward {
        attention::backward(&program, &l, props).unwrap()
    } else {
        attention::forward(&program, &l, props).unwrap()
    }
}

/// The `i`-th i64 of the last argument.
fn number(args: &[Arg], i: usize) -> i64 {
    let Some(Arg::Bytes(bytes)) = args.last() else { panic!("{args:?}") };
    i64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap())
}

#[test]
fn a_fused_projection_is_read_where_it_lies() {
    // (B, T, H + 2 G, D) = (2, 300, 8, 64): 4 query heads, 2 key heads, 2 value heads.
    let row = 8 * 64;
    let strides = [300 * row, 64, row, 1];
    let qkv = |heads: usize, from: isize| view(0, &[2, heads, 300, 64], &strides, from * 64);
    let w = work(vec![qkv(4, 0), qkv(2, 4), qkv(2, 6)], 2, false);
    assert_eq!((w.launches.len(), w.scratch_bytes), (1, 0));
    let l = &w.launches[0];
    assert_eq!(l.args[..3], [Arg::Value(ValueId(0), 0), Arg::Value(ValueId(0), 512), Arg::Value(ValueId(0), 768)]);
    assert_eq!(l.args[3..5], [Arg::Value(ValueId(8), 0), Arg::Value(ValueId(9), 0)]);
    assert_eq!([0, 1, 2].map(|i| number(&l.args, i)), [300 * 512, 64, 512]);
    // Contiguous (B, H, T, E).
    assert_eq!([9, 10, 11].map(|i| number(&l.args, i)), [4 * 300 * 64, 300 * 64, 64]);
    assert_eq!(l.grid, [2 * 4 * 3, 1, 1]);
    // t, s; d, e; heads, groups; group, window; pairs, section; scale.
    let pair = |i: usize| (number(&l.args, i) as i32, (number(&l.args, i) >> 32) as i32);
    assert_eq!([24, 25, 26, 27, 28].map(pair), [(300, 300), (64, 64), (4, 2), (2, 0), (8, 8)]);
    assert_eq!(pair(29), (0.125f32.to_bits() as i32, 384 + 128));

    let rest = [dense(1, &[2, 4, 300, 64]), dense(2, &[2, 4, 300, 64]), dense(3, &[2, 4, 300])];
    let inputs: Vec<Operand> = vec![qkv(4, 0), qkv(2, 4), qkv(2, 6)].into_iter().chain(rest).collect();
    let w = work(inputs.clone(), 3, true);
    assert_eq!(
        labels(&w),
        ["attention_delta_bf16", "attention_backward_q_d64_bf16_causal", "attention_backward_kv_d64_bf16_causal"]
    );
    assert_eq!(w.scratch_bytes, (2 * 4 * 300 * 4usize).next_multiple_of(256));
    assert_eq!(w.launches[2].grid, [2 * 2 * 3, 1, 1]);
    assert_eq!(work(inputs, 1, true).launches.len(), 2);
}

fn labels(w: &Work) -> Vec<&str> {
    w.launches.iter().map(|l| l.function.label.as_str()).collect()
}

#[test]
fn on_sm_90_the_copy_engine_reads_a_fused_projection() {
    let row = 8 * 64;
    let qkv = |heads: usize, from: isize| view(0, &[2, heads, 300, 64], &[300 * row, 64, row, 1], from * 64);
    let inputs = vec![qkv(4, 0), qkv(2, 4), qkv(2, 6)];
    let w = work_on(&Props::H200, inputs.clone(), 2, false);
    assert_eq!(labels(&w), ["attention_forward_sm90_d64_bf16_causal"]);
    let tile = WarpgroupTile::of(Pass::Forward, 64, &Props::H200, CAUSAL).unwrap().1;
    let map = |i: usize| match &w.launches[0].args[i] {
        Arg::Map(of, tma_desc) => (of.as_ref().clone(), tma_desc.clone()),
        other => panic!("{other:?}"),
    };
    let (of, tma_desc) = map(1);
    assert_eq!(of, Arg::Value(ValueId(0), 512));
    assert_eq!((tma_desc.dims, tma_desc.strides), ([64, 300, 2, 2], [1024, 128, 300 * 1024]));
    assert_eq!(tma_desc.shape, [64, tile.bn, 1, 1]);
    assert_eq!(map(0).1.shape, [64, tile.rows(), 1, 1]);
    assert_eq!(w.launches[0].grid, [2 * 4 * 300u32.div_ceil(tile.rows()), 1, 1]);

    let rest = [dense(1, &[2, 4, 300, 64]), dense(2, &[2, 4, 300, 64]), dense(3, &[2, 4, 300])];
    let inputs: Vec<Operand> = inputs.into_iter().chain(rest).collect();
    let w = work_on(&Props::H200, inputs, 3, true);
    let both = ["attention_backward_q_sm90_d64_bf16_causal", "attention_backward_kv_sm90_d64_bf16_causal"];
    assert_eq!(labels(&w), both);
    assert_eq!(w.scratch_bytes, 2 * 4 * (384 + 128) * 8);
    // The side that a block keeps is read in its rows, the other in steps.
    let tile = WarpgroupTile::of(Pass::BackwardKv, 64, &Props::H200, CAUSAL).unwrap().1;
    let rows: Vec<u32> = w.launches[1].args[..4]
        .iter()
        .map(|a| if let Arg::Map(_, tma_desc) = a { tma_desc.shape[1] } else { panic!("{a:?}") })
        .collect();
    assert_eq!(rows, [tile.bn, tile.rows(), tile.rows(), tile.bn]);
}

#[test]
fn documents_take_one_small_launch_more() {
    let x = || dense(0, &[3, 2, 4, 200, 64]);
    // One row of ids for each of 2 batches, the same for all 3.
    let ids = documents(&[3, 2, 200], &[0, 200, 1]);
    let padded = 256 + 128;
    for (props, wg) in [(&A100, ""), (&Props::H200, "_sm90")] {
        let w = work_on(props, vec![x(), x(), x(), ids], 2, false);
        assert_eq!(
            labels(&w),
            ["attention_segment_bounds", &format!("attention_forward{wg}_d64_bf16_causal_documents")]
        );
        let l = &w.launches[0];
        assert_eq!((l.grid, l.block), ([6 * 4, 1, 1], [256, 1, 1]));
        // Queries and keys have the same ids.
        let read = Arg::Value(ValueId(7), 24);
        assert_eq!(l.args[..4], [read.clone(), read, Arg::Scratch(0), Arg::Scratch(6 * padded * 4)]);
        assert_eq!(l.args[4], l.args[5]);
        let numbers: Vec<i64> = (0..16).map(|i| number(&l.args, i)).collect();
        assert_eq!(numbers[..7], [1, 1, 1, 1, 1, 3, 2]);
        assert_eq!(numbers[7..], [0, 0, 0, 0, 0, 0, 200, 1, 200 | (padded as i64) << 32]);
        // They precede the sizes and follow the arguments of the kernel without documents.
        let forward = &w.launches[1].args;
        assert_eq!(forward[forward.len() - 3..][..2], l.args[2..4]);

        let rest = [x(), x(), dense(3, &[3, 2, 4, 200])];
        let inputs: Vec<Operand> = vec![x(), x(), x()].into_iter().chain(rest).chain([ids]).collect();
        let w = work_on(props, inputs, 3, true);
        let of_rows = wg.is_empty().then(|| "attention_delta_bf16".to_string());
        let both = ["q", "kv"].map(|side| format!("attention_backward_{side}{wg}_d64_bf16_causal_documents"));
        let bounds = "attention_segment_bounds".to_string();
        assert_eq!(labels(&w), [bounds].into_iter().chain(of_rows).chain(both).collect::<Vec<_>>());
    }
    // One document for all positions masks nothing.
    let one = Operand::Constant(0, Shape::of(&[3, 2, 200]), DType::I64);
    assert_eq!(labels(&work(vec![x(), x(), x(), one], 2, false)), ["attention_forward_d64_bf16_causal"]);
}

#[test]
fn layouts_without_a_tensor_map_use_the_warp_kernels() {
    let q = dense(0, &[2, 5, 64]);
    // One key head for all, without a stride.
    let wide = view(1, &[2, 6, 64], &[0, 64, 1], 0);
    assert_eq!(labels(&work_on(&Props::H200, vec![q, wide, wide], 1, false)), ["attention_forward_d64_bf16_causal"]);
    // No keys; heads of 32 and of 256 columns.
    let none = dense(1, &[2, 0, 64]);
    assert_eq!(labels(&work_on(&Props::H200, vec![q, none, none], 1, false)), ["attention_forward_d64_bf16_causal"]);
    for (d, label) in [(32, "attention_forward_d32_bf16_causal"), (256, "attention_forward_d256_bf16_causal")] {
        let x = dense(0, &[2, 5, d]);
        assert_eq!(labels(&work_on(&Props::H200, vec![x, x, x], 1, false)), [label]);
    }
    // 80 columns use a kernel for 128.
    let x = dense(0, &[2, 5, 80]);
    assert_eq!(labels(&work_on(&Props::H200, vec![x, x, x], 1, false)), ["attention_forward_sm90_d128_bf16_causal"]);
}

#[test]
fn f32_is_read_where_it_lies_too() {
    // (B, T, H + 2 G, D) = (2, 300, 8, 60), 16 bytes at a time; two query heads per key head.
    let row = 8 * 60;
    let strides = [300 * row, 60, row, 1];
    let qkv = |heads: usize, from: isize| view(0, &[2, heads, 300, 60], &strides, from * 60);
    for (props, tf32) in [&A100, &Props::H200].into_iter().flat_map(|p| [(p, false), (p, true)]) {
        let (kind, products) = if tf32 { ("tf32", 1) } else { ("f32", 3) };
        let forward = work_of(DType::F32, tf32, props, vec![qkv(4, 0), qkv(2, 4), qkv(2, 6)], 2, false);
        assert_eq!(labels(&forward), [format!("attention_forward_d64_{kind}_causal")]);
        assert_eq!(forward.scratch_bytes, 0);
        let l = &forward.launches[0];
        assert_eq!(l.args[1..3], [Arg::Value(ValueId(0), 960), Arg::Value(ValueId(0), 1440)]);
        let tile = Tf32::of(Pass::Forward, 64, products, props).unwrap();
        assert_eq!((l.grid, l.block), ([2 * 4 * 300u32.div_ceil(tile.rows()), 1, 1], [32 * tile.warps, 1, 1]));

        let rest = [dense(1, &[2, 4, 300, 60]), dense(2, &[2, 4, 300, 60]), dense(3, &[2, 4, 300])];
        let inputs: Vec<Operand> = vec![qkv(4, 0), qkv(2, 4), qkv(2, 6)].into_iter().chain(rest).collect();
        let w = work_of(DType::F32, tf32, props, inputs, 3, true);
        let [q, kv] = ["q", "kv"].map(|x| format!("attention_backward_{x}_d64_{kind}_causal"));
        assert_eq!(labels(&w), ["attention_delta_f32", &q, &kv]);
        let tile = Tf32::of(Pass::BackwardKv, 64, products, props).unwrap();
        assert_eq!(w.launches[2].grid, [2 * 2 * 300u32.div_ceil(tile.rows()), 1, 1]);
    }
    // A constant, and rows that are not aligned to 16 bytes.
    let x = dense(0, &[2, 5, 60]);
    let one = Operand::Constant(1.0f64.to_bits(), Shape::of(&[2, 5, 60]), DType::F32);
    let odd = view(1, &[2, 5, 60], &[305, 61, 1], 0);
    let w = work_in(DType::F32, &A100, vec![x, one, odd], 1, false);
    assert_eq!(labels(&w), ["attention_copy", "attention_copy", "attention_forward_d64_f32_causal"]);
    assert_eq!(number(&w.launches[0].args, 17), i64::from(1.0f32.to_bits()));
    assert_eq!(w.launches[2].args[1..3], [Arg::Scratch(0), Arg::Scratch(2560)]);
}

#[test]
fn operands_that_cannot_be_read_in_place_are_copied() {
    let q = dense(0, &[2, 5, 64]);
    // A transposed head, a constant, an offset that is not aligned to 16 bytes.
    let k = view(1, &[2, 6, 64], &[384, 1, 6], 0);
    let v = Operand::Constant(1.0f64.to_bits(), Shape::of(&[2, 6, 64]), DType::BF16);
    let w = work(vec![q, k, v], 1, false);
    assert_eq!(labels(&w), ["attention_copy", "attention_copy", "attention_forward_d64_bf16_causal"]);
    assert_eq!(number(&w.launches[1].args, 17), 0x3f80);
    assert_eq!(w.launches[2].args[1..3], [Arg::Scratch(0), Arg::Scratch(1536)]);
    assert_eq!(w.launches[2].args[4], Arg::I64(0));
    let w = work(vec![view(0, &[2, 5, 64], &[320, 64, 1], 4), q, q], 1, false);
    assert_eq!(w.launches.len(), 2);
    // No rows, and no keys.
    assert!(work(vec![dense(0, &[2, 0, 64]), q, q], 1, false).launches.is_empty());
    assert_eq!(work(vec![q, dense(1, &[2, 0, 64]), dense(1, &[2, 0, 64])], 1, false).launches.len(), 1);
}

#[test]
fn every_tile_fits_a_multiprocessor() {
    for &(pass, size, when, tile) in MMA_TILES {
        let bytes = tile.shared_bytes(pass, size);
        assert!(bytes <= 99 << 10, "{pass:?} {size}: {bytes} bytes do not fit sm_86");
        // Each block reserves 1 KiB of the A100's 164 KiB or the H100's 228 KiB in addition to its own shared memory.
        if when == When::Large {
            assert!(tile.blocks * (bytes + 1024) <= 228 << 10, "{pass:?} {size}: {bytes} bytes");
        }
    }
    for &(pass, size, when, tile) in WARPGROUP_TILES {
        let bytes = tile.shared_bytes(pass, size);
        assert!(tile.blocks * (bytes + 1024) <= 228 << 10, "{pass:?} {size} {when:?}: {bytes} bytes");
        // Tiles start at multiples of 1,024 bytes, and a stage is refilled two steps later.
        assert!(tile.bn % 16 == 0 && tile.bn <= 128 && tile.stages >= 3 && tile.groups * 64 <= 256);
    }
    // Some GPU uses each f32 tile: none follows one that always fits before it.
    for (i, &(pass, size, products, tile)) in TF32.iter().enumerate() {
        let before = TF32[..i].iter().filter(|t| (t.0, t.1, t.2) == (pass, size, products));
        let kilobytes = [99 << 10, 163 << 10, 227 << 10];
        let has = |t: &Tf32| kilobytes.map(|shared_bytes| t.fits(pass, size, &Props { shared_bytes, ..A100 }));
        let taken = has(&tile).into_iter().enumerate().any(|(k, fits)| fits && before.clone().all(|t| !has(&t.3)[k]));
        assert!(taken, "{pass:?} {size}: {tile:?} is never taken");
    }
    for size in attention::SIZES {
        for pass in [Pass::Forward, Pass::BackwardQ, Pass::BackwardKv] {
            let props = Props { arch: (8, 6), sms: 82, shared_bytes: 99 << 10, ..Props::H200 };
            assert!(MmaTile::of(pass, size, &props, Mask::default()).is_some());
            assert!([1, 3].iter().all(|&n| Tf32::of(pass, size, n, &props).is_some()), "{pass:?} {size} in f32");
        }
    }
}

// ---- compilation -------------------------------------------------------------------------------------------------

/// The properties that the tables test, for a GPU of that kind.
fn props(arch: &str) -> Props {
    match arch {
        "sm_80" => A100,
        "sm_100a" => Props { arch: (10, 0), sms: 148, shared_bytes: 227 << 10, ..Props::H200 },
        _ => Props::H200,
    }
}

/// A causal mask, none, and a window, each without and with documents, and for a block of keys.
fn masks() -> impl Iterator<Item = Mask> {
    let near = [(true, false), (false, false), (true, true)];
    [(false, false), (true, false), (false, true), (true, true)].into_iter().flat_map(move |(documents, block)| {
        near.into_iter().map(move |(causal, window)| Mask { causal, window, documents, block })
    })
}

/// Compiles every tile for each `(arch, dtype, mask)`, or those of warpgroups only; prints the rows of a table.
fn compile(kinds: &[(&str, DType, Mask)], warps: bool) {
    let Some(nvrtc) = Nvrtc::open() else { return };
    each(kinds, |&(arch, dtype, mask)| {
        let mut text = String::new();
        let props = props(arch);
        // The tile that is used for each pass and size.
        let tiles = MMA_TILES
            .iter()
            .filter(|t| warps && MmaTile::of(t.0, t.1, &props, mask) == Some(t.3) && t.2.holds(&props, mask));
        let tiles = tiles.map(|&(pass, size, _, tile)| attention::function(pass, size, tile, dtype, mask));
        let groups = WARPGROUP_TILES
            .iter()
            .filter(|t| WarpgroupTile::of(t.0, t.1, &props, mask) == Some((t.1, t.3)) && t.2.holds(&props, mask));
        let groups = groups.map(|&(pass, size, _, tile)| tile.function(pass, size, dtype, mask));
        let functions: Vec<_> = tiles.chain(groups).collect();
        for (i, f) in functions.iter().enumerate() {
            text += &f.text.replace("KERNEL", &format!("{}_{i}", f.label));
        }
        let found = nvrtc.verdict(&text, arch, &[]);
        assert!(!found.is_serialized, "{arch}: products of a warpgroup wait for each other");
        assert_eq!(
            (found.functions, found.spilled),
            (functions.len(), 0),
            "{arch}: PERILUNE_COMPILE=1 prints the report"
        );
    });
}

#[test]
fn tiles_compile_without_spills() {
    compile(&["sm_80", "sm_90a", "sm_100a"].map(|arch| (arch, DType::BF16, CAUSAL)), true);
    // A shift takes a register more.
    compile(&[BLOCK, BLOCK_DOCUMENTS].map(|mask| ("sm_80", DType::F16, mask)), true);
    let rest: Vec<_> = masks().filter(|m| *m != CAUSAL).enumerate().collect();
    // Kinds of 16 bits do not differ in registers: some of each.
    let dtype = |i: usize| if i.is_multiple_of(2) { DType::BF16 } else { DType::F16 };
    compile(&rest.into_iter().map(|(i, mask)| ("sm_90a", dtype(i), mask)).collect::<Vec<_>>(), false);
}

/// Compiles the tiles of f32 that a GPU of that kind takes; for sm_80 all, since smaller ones of its kind take others.
fn compile_f32(kinds: &[(&str, u32, Mask)]) {
    let Some(nvrtc) = Nvrtc::open() else { return };
    each(kinds, |&(arch, products, mask)| {
        let props = props(arch);
        let taken = TF32
            .iter()
            .filter(|t| t.2 == products && (arch == "sm_80" || Tf32::of(t.0, t.1, products, &props) == Some(t.3)));
        let texts: Vec<_> =
            taken.map(|&(pass, size, _, tile)| tile.function(pass, size, products, mask).text).collect();
        assert!(texts.len() >= 3 * attention::SIZES.len());
        nvrtc.spill_free(&texts, arch);
    });
}

#[test]
fn tiles_of_f32_compile_without_spills() {
    let both = |arch, mask| [(arch, 3, mask), (arch, 1, mask)];
    compile_f32(&["sm_80", "sm_90a", "sm_100a"].map(|arch| both(arch, CAUSAL)).concat());
    let rest = masks().filter(|m| *m != CAUSAL && (!m.block || [BLOCK, BLOCK_DOCUMENTS].contains(m)));
    compile_f32(&rest.flat_map(|mask| both("sm_90a", mask)).collect::<Vec<_>>());
}

#[test]
#[ignore = "all kinds of all tiles: minutes"]
fn everything_compiles_without_spills() {
    let mut kinds = Vec::new();
    for arch in ["sm_80", "sm_90a", "sm_100a"] {
        for dtype in [DType::BF16, DType::F16] {
            kinds.extend(masks().map(|mask| (arch, dtype, mask)));
        }
    }
    compile(&kinds, true);
    let archs = ["sm_80", "sm_90a", "sm_100a"].into_iter();
    let kinds = archs.flat_map(|arch| masks().flat_map(move |mask| [(arch, 3, mask), (arch, 1, mask)]));
    compile_f32(&kinds.collect::<Vec<_>>());
}

#[test]
fn copies_and_row_sums_compile() {
    let Some(nvrtc) = Nvrtc::open() else { return };
    for (dtype, arch) in
        [DType::BF16, DType::F32].into_iter().flat_map(|d| ["sm_80", "sm_90a", "sm_100a"].map(|a| (d, a)))
    {
        let inputs = vec![
            Operand::Constant(0, Shape::of(&[2, 6, 64]), dtype),
            dense(1, &[2, 6, 64]),
            dense(1, &[2, 6, 64]),
            dense(1, &[2, 6, 64]),
            dense(1, &[2, 6, 64]),
            dense(1, &[2, 6]),
            documents(&[6], &[1]),
        ];
        let w = work_in(dtype, &props(arch), inputs, 1, true);
        assert_eq!(labels(&w)[..2], ["attention_segment_bounds", "attention_copy"]);
        for l in &w.launches[..3] {
            nvrtc.spill_free(std::slice::from_ref(&l.function.text), arch);
        }
    }
}
