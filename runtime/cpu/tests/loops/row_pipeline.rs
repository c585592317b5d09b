//! Tests the pipelines of three loops against the loops one by one, bit for bit.

use super::block::Block;
use perilune_core::DType;
use perilune_core::ops::ReduceFn;
use perilune_cpu::loops::Arg;
use perilune_cpu::loops::fused_interpreter;
use perilune_cpu::loops::reduce::reduction;
use perilune_cpu::loops::row_pipeline::{FirstStage, Stage, find};
use perilune_cpu::loops::superinstructions::ALL;

/// Creates views of blocks with numbers of moderate size, and some rows with infinities and NaN.
fn views(blocks: &mut [Block], cols: usize) -> Vec<Arg> {
    for (k, block) in blocks.iter_mut().enumerate() {
        let mut state = (k as u32 + 1).wrapping_mul(747_796_405) | 1;
        for x in block.numbers_mut() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *x = match state >> 20 {
                0 => f32::NAN,
                1 => f32::NEG_INFINITY,
                2 => -0.0,
                _ => (state >> 8) as f32 / 4e6 - 1.7,
            };
        }
    }
    blocks.iter_mut().map(|b| Arg { ptr: b.address(), step: cols as isize }).collect()
}

fn bits(blocks: &[Block]) -> Vec<u32> {
    blocks.iter().flat_map(Block::bits).collect()
}

/// Compares a pipeline with its three loops run one by one, on separate memory.
#[test]
fn a_pipeline_has_the_bits_of_its_loops() {
    let ops = |name: &str| {
        let (_, entry) = ALL.iter().find(|(listed, _)| *listed == name).expect("it is listed");
        super::ops(entry)
    };
    let cases = [
        (FirstStage::Fused, "CenteredSquares", "LayerNorm"),
        (FirstStage::Fused, "CenteredSquares", "LayerNormNoBias"),
        (FirstStage::Max, "SoftmaxExp", "SoftmaxScale"),
    ];
    for isa in super::vector_classes() {
        for (what, second, third) in cases {
            let ops = [ops("RowSum"), ops(second), ops(third)];
            let pipeline = find(isa, what, [&ops[0], &ops[1], &ops[2]]).expect("it is listed");
            for (rows, cols) in [(1, 16), (2, 768), (3, 1024), (5, 48)] {
                let n = rows * cols;
                let blocks = || ops.each_ref().map(|l| (0..l.len()).map(|_| Block::new(n)).collect());
                let (mut one, mut all): ([Vec<Block>; 3], [Vec<Block>; 3]) = (blocks(), blocks());
                let view = |b: &mut [Vec<Block>; 3]| b.each_mut().map(|b| views(b, cols));
                let (v, w) = (view(&mut one), view(&mut all));
                let stage = |k: usize| Stage { ops: &ops[k], views: &w[k] };
                // SAFETY: every view has its rows and columns.
                unsafe {
                    match what {
                        FirstStage::Max => {
                            let largest = reduction(ReduceFn::Max, DType::F32, isa).rows;
                            largest(v[0][1].ptr.cast_mut(), &v[0][0], rows, cols);
                        }
                        FirstStage::Fused => {
                            fused_interpreter::interpreter(isa).expect("vectors")(&ops[0], &v[0], rows, cols)
                        }
                    }
                    for k in 1..3 {
                        fused_interpreter::interpreter(isa).expect("vectors")(&ops[k], &v[k], rows, cols);
                    }
                    pipeline([stage(0), stage(1), stage(2)], &[0], rows, cols);
                }
                fused_interpreter::store_fence();
                for k in 0..3 {
                    assert!(bits(&one[k]) == bits(&all[k]), "loop {k} of {what:?} on {isa:?}, {rows} x {cols}");
                }
            }
        }
    }
}
