//! Compares the interpreter with the loops and reductions that it replaces, bit for bit.

use perilune_core::DType;
use perilune_core::ops::elementwise::MapFn;
use perilune_cpu::loops::fused_interpreter::*;
use perilune_cpu::loops::map::{RowBroadcast, map};
use perilune_cpu::loops::{Arg, Isa};

/// Every kind of bit pattern, then numbers of moderate size.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        state ^ (state >> 15)
    };
    let specials = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -1.0, 1e-40, 88.8, -103.9, 0.6, 0.92];
    let any = |i: usize, bits: u32| match i % 3 {
        0 => f32::from_bits(bits),
        1 => (bits as i32 as f32) / 4e8,
        _ => specials[bits as usize % specials.len()],
    };
    (0..n).map(|i| any(i, next())).collect()
}

fn same(got: &[f32], want: &[f32], what: &str) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()), "{what}: {i} is {g:e}, not {w:e}");
    }
}

fn view(x: &[f32], step: isize) -> Arg {
    Arg { ptr: x.as_ptr().cast(), step }
}

/// Compares each function with its baseline loop, over rows that end in the middle of a vector.
#[test]
fn ops_give_the_bits_of_loops() {
    let (rows, cols) = (3, 1003);
    let n = rows * cols;
    let (x, y) = (numbers(n, 1), numbers(n, 2));
    for isa in super::vector_classes() {
        let run = interpreter(isa).expect("a vector class has one");
        let check = |f: MapFn, ops: &[FusedOp], loops: &[Arg], broadcast: RowBroadcast| {
            let (mut got, mut want) = (vec![7f32; n], vec![7f32; n]);
            let views = [
                view(&x, cols as isize),
                view(&y, cols as isize),
                Arg { ptr: got.as_mut_ptr().cast(), step: cols as isize },
                view(&y, 1),
            ];
            let kernel = map(f, DType::F32, Isa::Baseline, broadcast).expect("defined");
            // SAFETY: all views have the elements that the ops and the loop touch.
            unsafe {
                run(ops, &views, rows, cols);
                kernel(want.as_mut_ptr().cast(), loops.as_ptr(), rows, cols);
            }
            same(&got, &want, &format!("{f:?} {broadcast:?} {isa:?}"));
        };
        let op = |opcode, operand| FusedOp { opcode, operand };
        let store = op(Opcode::Store, Operand::View(2));
        for &f in MapFn::ALL {
            let (vx, vy, one) = (view(&x, cols as isize), view(&y, cols as isize), view(&y, 1));
            if let Some(opcode) = unary_opcode(f) {
                let ops = [op(Opcode::Load, Operand::View(0)), op(opcode, Operand::None), store];
                check(f, &ops, &[vx], RowBroadcast::NONE);
            }
            if let Some([first, second]) = binary_opcode(f) {
                let load = |v| op(Opcode::Load, Operand::View(v));
                let y_broadcast = RowBroadcast { x: false, y: true };
                let x_broadcast = RowBroadcast { x: true, y: false };
                check(f, &[load(0), op(first.0, Operand::View(1)), store], &[vx, vy], RowBroadcast::NONE);
                check(f, &[load(1), op(second.0, Operand::View(0)), store], &[vx, vy], RowBroadcast::NONE);
                check(f, &[load(0), op(first.1, Operand::RowBroadcast(3)), store], &[vx, one], y_broadcast);
                check(f, &[load(0), op(second.1, Operand::RowBroadcast(3)), store], &[one, vx], x_broadcast);
            }
        }
    }
}

/// Compares a sum among other ops with the loop of the reduction.
#[test]
fn sums_have_the_order_of_reductions() {
    for cols in [1, 7, 16, 64, 100, 127, 128, 300, 1003] {
        let x: Vec<f32> = (0..5 * cols).map(|i| ((i * 7919) % 1000) as f32 * 1.7e-3 - 0.4).collect();
        let loops =
            perilune_cpu::loops::reduce::reduction(perilune_core::ops::ReduceFn::Sum, DType::F32, Isa::Baseline);
        let squares: Vec<f32> = x.iter().map(|v| v * v).collect();
        let mut want = [0f32; 5];
        // SAFETY: five rows of `cols` elements.
        unsafe { (loops.rows)(want.as_mut_ptr().cast(), &view(&squares, cols as isize), 5, cols) };
        for isa in super::vector_classes() {
            let mut got = [0f32; 5];
            let views = [view(&x, cols as isize), Arg { ptr: got.as_mut_ptr().cast(), step: 1 }];
            let ops = [
                FusedOp { opcode: Opcode::Load, operand: Operand::View(0) },
                FusedOp { opcode: Opcode::Square, operand: Operand::None },
                FusedOp { opcode: Opcode::Sum, operand: Operand::Sum(0, 1) },
            ];
            // SAFETY: as above.
            unsafe { interpreter(isa).expect("a vector class has one")(&ops, &views, 5, cols) };
            same(&got, &want, &format!("{cols} columns, {isa:?}"));
        }
    }
}
