//! Tests attention to blocks of keys without a GPU: which nodes have kernels, and which launches their operands get. `attention.rs`
//! compiles the kernels; `tests/tests/attention_block.rs` checks results.

#![allow(clippy::unwrap_used)]

use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, block_attrs};
use perilune_core::ops::{bits, create};
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_cuda::attention;
use perilune_cuda::launch::{Arg, Launch, Props, Work};
use perilune_plan::ir::{Library, Operand, Origin, Program, Storage, Value, ValueId};

/// A GPU without warpgroup kernels.
const A100: Props = Props { arch: (8, 0), sms: 108, shared_bytes: 163 << 10, ..Props::H200 };

/// Causal, window, and whether positions are shifted.
type Seen = (bool, i64, bool);

fn attrs(d: i64, (causal, window, shifted): Seen, documents: bool) -> [i64; 7] {
    block_attrs(&[0, bits(0.125), 0, d, d, i64::from(documents)], causal, window, shifted)
}

fn has_kernel(dtype: DType, d: usize, seen: Seen, mask: bool) -> bool {
    let [without, with] = [false, true].map(|documents| has_kernel_with(dtype, d, seen, mask, documents));
    assert_eq!(without, with, "documents change nothing");
    with
}

fn has_kernel_with(dtype: DType, d: usize, seen: Seen, mask: bool, documents: bool) -> bool {
    let g = &mut Graph::new();
    let mut leaf = |dims: &[usize], dtype| g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], 0);
    let (q, rows) = (leaf(&[2, 3, 5, d], dtype), leaf(&[2, 3, 5], dtype.compute()));
    let mask = mask.then(|| leaf(&[5, 5], DType::Bool));
    let both = if documents { vec![leaf(&[2, 5], DType::I64), leaf(&[2, 5], DType::I64)] } else { vec![] };
    let shift = seen.2.then(|| leaf(&[], DType::I64));
    let with = |x: &[NodeId]| -> Vec<NodeId> {
        x.iter().copied().chain(mask).chain(both.iter().copied()).chain(shift).collect()
    };
    let found = [(&ATTENTION_BLOCK, with(&[q, q, q])), (&ATTENTION_BLOCK_BACKWARD, with(&[q, q, q, q, rows, rows]))];
    let [a, b] = found.map(|(op, x)| {
        let node = g.push(op, &x, &attrs(d as i64, seen, documents)).unwrap();
        attention::has_kernel(g.node(node))
    });
    assert_eq!(a, b, "forward and backward go together");
    a
}

#[test]
fn kernels_take_blocks_without_a_mask_tensor() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for seen in [(false, 0, false), (true, 0, false), (true, 0, true), (true, 7, true)] {
            assert!(has_kernel(dtype, 64, seen, false) && has_kernel(dtype, 8, seen, false), "{dtype} {seen:?}");
            assert!(!has_kernel(dtype, 64, seen, true), "{dtype} {seen:?} with a mask");
        }
        // The node does not say whether operands have 16 bits, whose rows need 8 elements.
        assert!(!has_kernel(dtype, 60, (true, 0, false), false) && !has_kernel(dtype, 264, (true, 0, false), false));
    }
    assert!(!has_kernel(DType::F64, 64, (true, 0, false), false));
}

fn view(v: u32, dims: &[usize], strides: &[isize]) -> Operand {
    let mut s = [0; MAX_RANK];
    s[..strides.len()].copy_from_slice(strides);
    Operand::View(ValueId(v), Layout { shape: Shape::of(dims), strides: s, offset: 0 })
}

fn dense(v: u32, dims: &[usize]) -> Operand {
    Operand::View(ValueId(v), Layout::contiguous(Shape::of(dims)))
}

fn work(dtype: DType, props: &Props, seen: Seen, inputs: Vec<Operand>, outputs: usize) -> Work {
    let value = Value { shape: Shape::of(&[1]), dtype: DType::F32, storage: Storage::Arena(0), origin: Origin::NONE };
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
    // Documents have two dims.
    let documents = inputs.iter().any(|x| x.shape().rank() == 2);
    let backward = inputs.len() - usize::from(seen.2) - 2 * usize::from(documents) == 6;
    let (q, k, v) = (inputs[0].shape(), inputs[1].shape(), inputs[2].shape());
    let shapes = if backward { [q, k, v] } else { [q, q.remove(q.rank() - 1), v] };
    let l = Library {
        op: if backward { &ATTENTION_BLOCK_BACKWARD } else { &ATTENTION_BLOCK },
        attrs: attrs(64, seen, documents).into_iter().collect(),
        dtypes: vec![dtype; inputs.len()],
        inputs,
        outputs: (8..8 + outputs as u32).map(ValueId).collect(),
        layouts: shapes[..outputs].iter().map(|s| Layout::contiguous(*s)).collect(),
        epilogue: None,
        tf32: false,
        origin: Origin::NONE,
    };
    if backward {
        attention::block_backward(&program, &l, props).unwrap()
    } else {
        attention::forward(&program, &l, props).unwrap()
    }
}

fn labels(w: &Work) -> Vec<&str> {
    w.launches.iter().map(|l| l.function.label.as_str()).collect()
}

/// The `i`-th i64 of the last argument.
fn number(args: &[Arg], i: usize) -> i64 {
    let Some(Arg::Bytes(bytes)) = args.last() else { panic!("{args:?}") };
    i64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap())
}

/// q, k, v: (2, 4 or 2, 300 or 500, 64).
fn operands() -> Vec<Operand> {
    vec![dense(0, &[2, 4, 300, 64]), dense(1, &[2, 2, 500, 64]), dense(2, &[2, 2, 500, 64])]
}

#[test]
fn the_forward_pass_is_one_launch() {
    let shift = view(7, &[], &[]);
    for (seen, name) in [((false, 0, false), ""), ((true, 0, false), "_causal"), ((true, 900, true), "_window")] {
        let with = || operands().into_iter().chain(seen.2.then_some(shift)).collect();
        for (dtype, props, label) in [
            (DType::BF16, &Props::H200, format!("attention_forward_sm90_d64_bf16{name}_block")),
            (DType::F16, &A100, format!("attention_forward_d64_f16{name}_block")),
            (DType::F32, &Props::H200, format!("attention_forward_d64_f32{name}_block")),
        ] {
            let w = work(dtype, props, seen, with(), 2);
            assert_eq!((labels(&w), w.scratch_bytes), (vec![label.as_str()], 0));
            let args = &w.launches[0].args;
            // The result, lse, the shift or nothing; a window as it is, even if it is longer than the queries.
            let at = if seen.2 { Arg::Value(ValueId(7), 0) } else { Arg::I64(0) };
            assert_eq!(args[3..6], [Arg::Value(ValueId(8), 0), Arg::Value(ValueId(9), 0), at]);
            assert_eq!(number(args, 27) >> 32, seen.1);
            let (text, f32s) = (&w.launches[0].function.text, "f32* out, f32* lse, const i64* shift");
            assert!(text.contains(f32s) && text.contains("attention::KeyBlock(shift)"), "{text}");
        }
    }
}

#[test]
fn the_backward_pass_is_two_launches() {
    let grad = dense(3, &[2, 4, 300, 64]);
    let rows = [dense(4, &[2, 4, 300]), dense(5, &[2, 4, 300])];
    let seen = (true, 0, false);
    let all: Vec<Operand> = operands().into_iter().chain([grad]).chain(rows).collect();
    let w = work(DType::BF16, &Props::H200, seen, all.clone(), 3);
    let both = |wg: &str| ["q", "kv"].map(|x| format!("attention_backward_{x}{wg}_d64_bf16_causal_block"));
    assert_eq!(labels(&w), both("_sm90"));
    // The products of rows, then lse.
    let stats = Arg::Scratch(0);
    let value = |v| Arg::Value(ValueId(v), 0);
    assert_eq!(w.launches[0].args[4..9], [value(4), value(5), stats.clone(), value(8), Arg::I64(0)]);
    assert_eq!(w.launches[1].args[4..8], [stats, value(9), value(10), Arg::I64(0)]);
    assert_eq!(w.scratch_bytes, 2 * 4 * (384 + 128) * 8);

    let w = work(DType::BF16, &A100, seen, all.clone(), 3);
    assert_eq!((labels(&w), w.scratch_bytes), (both("").iter().map(String::as_str).collect(), 0));
    // lse before the products of rows.
    assert_eq!(w.launches[0].args[4..7], [value(5), value(4), value(8)]);
    assert_eq!(w.launches[1].args[4..8], [value(5), value(4), value(9), value(10)]);
    assert_eq!(work(DType::BF16, &A100, seen, all, 1).launches.len(), 1);
}

/// Labels of queries and of keys, and the bounds of both: kernels read those of their rows, and the labels of the other side.
#[test]
fn documents_take_two_small_launches_more() {
    let ids = [view(6, &[2, 300], &[0, 2]), dense(7, &[2, 500])];
    let (seen, shift) = ((true, 0, true), view(7, &[], &[]));
    let name = |pass: &str| format!("attention_{pass}_sm90_d64_bf16_causal_documents_block");
    let w = work(DType::BF16, &Props::H200, seen, operands().into_iter().chain(ids).chain([shift]).collect(), 2);
    assert_eq!(labels(&w), ["attention_segment_bounds", "attention_segment_bounds", &name("forward")]);
    let value = |v| Arg::Value(ValueId(v), 0);
    let (of_queries, of_keys) = (&w.launches[0], &w.launches[1]);
    assert_eq!([of_queries, of_keys].map(|l| l.grid), [[2 * 5, 1, 1], [2 * 8, 1, 1]]);
    assert_eq!((&of_queries.args[..2], &of_keys.args[..2]), (&[value(6), value(7)][..], &[value(7), value(6)][..]));
    assert!(
        of_queries.function.text.contains("segment_bounds<false>")
            && of_keys.function.text.contains("segment_bounds<true>")
    );
    // Positions, and labels per batch.
    assert_eq!(number(&of_queries.args, 15), 500 | 640 << 32);
    assert_eq!(number(&of_keys.args, 15), 300 | 512 << 32);
    let arguments =
        |rows: &Launch, others: &Launch| [&rows.args[2], &others.args[2], &rows.args[3], &value(7)].map(Arg::clone);
    assert_eq!(w.launches[2].args[5..9], arguments(of_queries, of_keys));

    let rest = [dense(3, &[2, 4, 300, 64]), dense(4, &[2, 4, 300]), dense(5, &[2, 4, 300])];
    let all = operands().into_iter().chain(rest).chain(ids).chain([shift]).collect();
    let w = work(DType::BF16, &Props::H200, seen, all, 3);
    assert_eq!(labels(&w)[2..], [name("backward_q"), name("backward_kv")]);
    let (of_queries, of_keys) = (&w.launches[0], &w.launches[1]);
    let last = |l: &Launch| l.args[l.args.len() - 5..][..4].to_vec();
    assert_eq!(last(&w.launches[2]), arguments(of_queries, of_keys));
    assert_eq!(last(&w.launches[3]), arguments(of_keys, of_queries));
    assert!(w.launches[3].function.text.contains("SegmentIds::block<true>(labels, others, bounds, p)"));

    // One document for all positions masks nothing.
    let one = |t| Operand::Constant(0, Shape::of(&[2, t]), DType::I64);
    let w =
        work(DType::BF16, &A100, (false, 0, false), operands().into_iter().chain([one(300), one(500)]).collect(), 1);
    assert_eq!(labels(&w), ["attention_forward_d64_bf16_block"]);
}

/// Products of rows and lse may have any strides, or be one number; a shift may be a constant.
#[test]
fn numbers_of_rows_are_copied_if_they_are_not_contiguous() {
    let grad = dense(3, &[2, 4, 300, 64]);
    let rows = [
        view(4, &[2, 4, 300], &[1200, 1, 4]),
        Operand::Constant(2.0f64.to_bits(), Shape::of(&[2, 4, 300]), DType::F32),
    ];
    let shift = Operand::Constant(-3i64 as u64, Shape::SCALAR, DType::I64);
    let all: Vec<Operand> = operands().into_iter().chain([grad]).chain(rows).chain([shift]).collect();
    let w = work(DType::BF16, &Props::H200, (true, 0, true), all, 3);
    assert_eq!(labels(&w)[..4], ["attention_copy"; 4]);
    // The two words of the shift, then the rows.
    let fills: Vec<i64> = [0, 1, 3].map(|i| number(&w.launches[i].args, 17)).to_vec();
    assert_eq!(fills, [0xffff_fffd, 0xffff_ffff, i64::from(2.0f32.to_bits())]);
    assert_eq!([0, 1, 2, 3].map(|i| w.launches[i].args[1].clone()), [0, 4, 256, 256 + 9728].map(Arg::Scratch));
    assert_eq!(w.launches[4].args[8], Arg::Scratch(0));
    assert_eq!(w.launches[4].args[4..6], [Arg::Scratch(256), Arg::Scratch(256 + 9728)]);
    // No shift is the shift 0.
    let zero = Operand::Constant(0, Shape::SCALAR, DType::I64);
    let w = work(DType::BF16, &A100, (true, 0, true), operands().into_iter().chain([zero]).collect(), 1);
    assert_eq!((w.launches.len(), &w.launches[0].args[5]), (1, &Arg::I64(0)));
}

/// A block without keys has the results 0 and -inf, one without queries nothing.
#[test]
fn empty_blocks() {
    let (q, none) = (dense(0, &[2, 4, 300, 64]), dense(1, &[2, 4, 0, 64]));
    let w = work(DType::BF16, &Props::H200, (false, 0, false), vec![q, none, none], 2);
    assert_eq!(labels(&w), ["attention_forward_d64_bf16_block"]);
    let w = work(DType::BF16, &Props::H200, (false, 0, false), vec![none, q, q], 2);
    assert!(w.launches.is_empty());
}
