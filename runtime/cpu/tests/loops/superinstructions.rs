//! Tests every superinstruction against the interpreter, bit for bit.

use super::block::Block;
use perilune_cpu::loops::Arg;
use perilune_cpu::loops::fused_interpreter::{self, FusedLoop, FusedOp, Opcode, Operand};
use perilune_cpu::loops::superinstructions::{ALL, MAX_OPERANDS, find, prefetch_len};

/// Fills a block with numbers of moderate size, with zeros, infinities and NaN among them.
fn fill(block: &mut Block, seed: u32) {
    let mut state = seed.wrapping_mul(747_796_405) | 1;
    for x in block.numbers_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = match state >> 24 {
            0 => 0.0,
            1 => f32::NAN,
            2 => f32::INFINITY,
            _ => (state >> 8) as f32 / 4e6 - 1.7,
        };
    }
}

/// Returns the operands after a run, each in separate memory, `shift` elements off cache-line alignment.
fn after(run: FusedLoop, ops: &[FusedOp], rows: usize, cols: usize, shift: usize) -> Vec<Vec<u32>> {
    let n = rows * cols;
    let mut blocks: Vec<Block> = (0..ops.len()).map(|_| Block::new(n + 32)).collect();
    blocks.iter_mut().enumerate().for_each(|(k, b)| fill(b, k as u32 + 1));
    let view = |(op, block): (&FusedOp, &mut Block)| {
        let step = if matches!(op.operand, Operand::RowBroadcast(_) | Operand::Sum(..)) { 1 } else { cols as isize };
        Arg { ptr: block.address().wrapping_add(4 * shift), step }
    };
    let views: Vec<Arg> = ops[prefetch_len(ops)..].iter().zip(&mut blocks).map(view).collect();
    // SAFETY: every view has its rows and columns.
    unsafe { run(ops, &views, rows, cols) };
    blocks.iter().map(Block::bits).collect()
}

#[test]
fn entries_give_the_bits_of_the_interpreter() {
    for (name, entry) in ALL {
        assert!(entry.len() <= MAX_OPERANDS, "{name} has too many ops");
        for (stream, ahead) in [(false, false), (true, true)] {
            let stored = |op: FusedOp| match op.opcode {
                Opcode::StoreNt if !stream => FusedOp { opcode: Opcode::Store, ..op },
                _ => op,
            };
            let ops = super::ops(entry).into_iter().map(stored);
            let prefetches = [
                FusedOp { opcode: Opcode::PrefetchNext, operand: Operand::View(0) },
                FusedOp { opcode: Opcode::PrefetchNear, operand: Operand::View(0) },
            ];
            let ops: Vec<FusedOp> = if ahead { prefetches.into_iter().chain(ops).collect() } else { ops.collect() };
            for isa in super::vector_classes() {
                let compiled = find(isa, &ops).expect("it is listed");
                for (rows, cols) in [(1, 5), (1, 64), (3, 128), (4, 100), (5, 16), (9, 131), (8, 7), (1, 1003)] {
                    for shift in [0, 1] {
                        let want = after(
                            fused_interpreter::interpreter(isa).expect("a vector class"),
                            &ops,
                            rows,
                            cols,
                            shift,
                        );
                        let got = after(compiled, &ops, rows, cols, shift);
                        assert!(got == want, "{name} on {isa:?}, {rows} x {cols}, stream {stream}, shift {shift}");
                    }
                }
            }
        }
    }
}
