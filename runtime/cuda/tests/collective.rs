//! Tests collectives without a GPU: their phases, executed on the host as their kernels define them, give the bits of the CPU's
//! collectives, and their kernels compile without spills.
#![allow(clippy::unwrap_used)]

#[path = "common/collectives.rs"]
mod collectives;
#[allow(dead_code)]
mod common;
#[path = "common/virtual_mesh.rs"]
mod virtual_mesh;

use collectives::{Case, Kind, cases, same};
use common::nvrtc::{self, Nvrtc};
use common::{Sketch, t};
use half::{bf16, f16};
use perilune_core::mesh::{Axis, Combine};
use perilune_core::ops::collective::{ALL_REDUCE, WIDENED, code};
use perilune_core::{DType, HostTensor};
use perilune_cuda::launch::{Arg, Props};
use perilune_cuda::library::collective::{self, Collective, Task};
use perilune_cuda::library::messages::{Message, Messages, Place, Step};
use perilune_plan::ir::{Kernel, Operand, Program, Storage, ValueId};
use perilune_plan::{Null, lanes};
use std::collections::BTreeSet;
use virtual_mesh::Planned;

/// The collective of a program, which has no other library call.
fn lowered(program: &Program, props: &Props) -> (Vec<String>, Collective) {
    let mut calls = program.kernels.iter().filter_map(|k| if let Kernel::Library(l) = k { Some(l) } else { None });
    let (before, mut all) = collective::parts(program, calls.next_back().unwrap(), props).unwrap();
    assert_eq!(all.len(), 1);
    let collective = all.remove(0);
    (before.launches.iter().map(|l| l.function.text.clone()).collect(), collective)
}

/// Combines the first `n` elements of all pieces, as `collective::combine` does; `widened`: to f32.
fn combined((dtype, widened): (DType, bool), how: Combine, pieces: &[&[u8]], n: usize) -> Vec<u8> {
    macro_rules! fold {
        ($t:ty, $widen:expr, $add:expr, $narrow:expr, $out:ty) => {{
            const SIZE: usize = size_of::<$t>();
            let read = |piece: &'_ [u8]| -> Vec<$t> {
                let elements = piece[..n * SIZE].chunks_exact(SIZE);
                elements.map(|bytes| <$t>::from_le_bytes(bytes.try_into().unwrap())).collect()
            };
            let pick = |keep: fn($t, $t) -> bool| {
                let mut all = read(pieces[0]);
                for piece in &pieces[1..] {
                    for (a, b) in all.iter_mut().zip(read(piece)) {
                        if !keep(*a, b) && *a == *a {
                            *a = b;
                        }
                    }
                }
                all.into_iter().flat_map(<$t>::to_le_bytes).collect()
            };
            match how {
                Combine::Sum => {
                    let mut sums: Vec<_> = read(pieces[0]).into_iter().map($widen).collect();
                    for piece in &pieces[1..] {
                        sums.iter_mut().zip(read(piece)).for_each(|(a, b)| *a = $add(*a, $widen(b)));
                    }
                    sums.into_iter().map($narrow).flat_map(<$out>::to_le_bytes).collect()
                }
                Combine::Max => pick(|a, b| a > b),
                Combine::Min => pick(|a, b| a < b),
            }
        }};
    }
    match dtype {
        DType::F64 => fold!(f64, |x| x, |a, b| a + b, |x| x, f64),
        DType::F32 => fold!(f32, |x| x, |a, b| a + b, |x| x, f32),
        DType::BF16 if widened => fold!(bf16, bf16::to_f32, |a, b| a + b, |x| x, f32),
        DType::F16 if widened => fold!(f16, f16::to_f32, |a, b| a + b, |x| x, f32),
        DType::BF16 => fold!(bf16, bf16::to_f32, |a, b| a + b, bf16::from_f32, bf16),
        DType::F16 => fold!(f16, f16::to_f32, |a, b| a + b, f16::from_f32, f16),
        DType::I64 => fold!(i64, |x| x, i64::wrapping_add, |x| x, i64),
        DType::I32 => fold!(i32, |x| x, i32::wrapping_add, |x| x, i32),
        DType::U8 | DType::Bool => fold!(u8, |x| x, u8::wrapping_add, |x| x, u8),
    }
}

/// Combines `n` elements, in rows of `row[0]` that begin `row[1]` elements apart, into the bytes of `out` from `at` on.
fn reduce(case: &Case, how: Combine, pieces: &[&[u8]], (n, row): (usize, [usize; 2]), out: &mut [u8], at: usize) {
    let (size, kind) = (case.dtype.size(), (case.dtype, case.widened));
    let of_result = if case.widened { 4 } else { size };
    for (k, first) in (0..n).step_by(row[0].max(1)).enumerate() {
        let count = row[0].min(n - first);
        let pieces: Vec<&[u8]> = pieces.iter().map(|piece| &piece[k * row[1] * size..]).collect();
        out[at + first * of_result..][..count * of_result].copy_from_slice(&combined(kind, how, &pieces, count));
    }
}

/// Whether the words of a vector of a result are aligned there.
fn aligned(c: &Collective, at: usize) -> bool {
    at.is_multiple_of((c.vector / c.size * c.result_size).min(16))
}

/// Whether a case has the phases and steps of one with fewer elements: more than `most` of all devices in another dtype than bf16, or more
/// than two phases need.
fn is_repeated(case: &Case, most: usize) -> bool {
    let n: usize = case.dims.iter().product();
    n > 400_000 || case.ranks * n > most && (case.dtype != DType::BF16 || case.kind == Kind::AllReduce(Combine::Min))
}

/// Executes the phases of all devices, whose contiguous pieces are given. Returns their results.
fn execute(case: &Case, c: &Collective, pieces: &[Vec<u8>], nbytes: usize) -> Vec<Vec<u8>> {
    let ranks = pieces.len();
    let mut results = vec![vec![0xA5u8; nbytes]; ranks];
    let all: Vec<_> = (0..ranks).map(|k| c.phases(k, ranks, false).unwrap()).collect();
    let how = match case.kind {
        Kind::AllReduce(how) | Kind::ReduceScatter(_, how) => how,
        Kind::AllGather(_) | Kind::AllToAll | Kind::Shift(_) | Kind::Reverse => Combine::Sum,
    };
    for at in 0..all[0].len() {
        let before = results.clone();
        for (own, out) in results.iter_mut().enumerate() {
            let phase = &all[own][at];
            if phase.grid.contains(&0) {
                continue;
            }
            let sources = if phase.reads_results { &before[..] } else { pieces };
            let first = |k: usize| phase.first + k * phase.step;
            let text = &c.functions[phase.function].text;
            assert_eq!(phase.numbers(own, ranks).len() + 2, text.matches("i64 ").count() + 2, "{text}");
            match phase.task {
                Task::Reduce { n, len, row } => {
                    let v = c.vector / c.size;
                    assert!((0..ranks).all(|k| first(k) % c.vector == 0) && aligned(c, phase.out), "{case:?}");
                    let in_rows = text.contains("true>");
                    assert!(!in_rows || n % v == 0, "{case:?}");
                    let sources: Vec<&[u8]> = sources.iter().enumerate().map(|(k, p)| &p[first(k)..]).collect();
                    reduce(case, how, &sources, (n, if in_rows { [len * v, row * v] } else { [n, n] }), out, phase.out);
                }
                Task::Spans { total, step, others } => {
                    for (k, source) in sources.iter().enumerate().filter(|(k, _)| !(others && *k == own)) {
                        let n = total.saturating_sub(k * step).min(step);
                        if n > 0 {
                            assert!(first(k) % c.word == 0 && (k * step) % c.word == 0, "{case:?}");
                            out[phase.out + k * step..][..n].copy_from_slice(&source[first(k)..][..n]);
                        }
                    }
                }
                Task::Span { total, from } => out[..total].copy_from_slice(&sources[from][..total]),
                Task::Rows { words, block } => {
                    for (k, source) in sources.iter().enumerate() {
                        for i in 0..words {
                            let to = ((i / block * ranks + k) * block + i % block) * c.word;
                            out[to..][..c.word].copy_from_slice(&source[i * c.word..][..c.word]);
                        }
                    }
                }
            }
        }
    }
    results
}

/// The piece that a leaf has: what the operand of the collective reads.
fn piece(leaf: &HostTensor, program: &Program, c: &Collective) -> Vec<u8> {
    let library = program.kernels.iter().find_map(|k| if let Kernel::Library(l) = k { Some(l) } else { None }).unwrap();
    let Operand::View(_, layout) = &library.inputs[0] else { panic!("a constant") };
    let size = c.size;
    let dims = layout.shape.dims();
    let mut out = Vec::with_capacity(c.nbytes);
    let numel = layout.shape.numel();
    if layout.is_dense() {
        out.extend(&leaf.bytes[layout.offset as usize * size..][..numel * size]);
    } else {
        for i in 0..numel {
            let (mut rest, mut at) = (i, layout.offset);
            for d in (0..dims.len()).rev() {
                at += (rest % dims[d]) as isize * layout.strides()[d];
                rest /= dims[d];
            }
            out.extend(&leaf.bytes[at as usize * size..][..size]);
        }
    }
    if let Arg::Value(_, bytes) = c.input {
        assert_eq!(out, leaf.bytes[bytes as usize..][..c.nbytes], "the piece is read in place");
    }
    out
}

#[test]
fn phases_have_the_bits_of_the_cpu() {
    let mut phases = BTreeSet::new();
    for ranks in [1, 2, 3, 8] {
        for case in cases(ranks, Axis::Dp) {
            if is_repeated(&case, 400_000) {
                continue;
            }
            let planned = case.plan(&Null);
            let (_, c) = lowered(&planned.program, &Props::H200);
            let want = case.on_cpu();
            let pieces: Vec<_> = (0..ranks).map(|k| piece(&case.data(k), &planned.program, &c)).collect();
            let got =
                if c.is_empty() { vec![Vec::new(); ranks] } else { execute(&case, &c, &pieces, want[0].bytes.len()) };
            for (k, (got, want)) in got.into_iter().zip(&want).enumerate() {
                same(&case, k, &HostTensor::new(want.dtype, want.shape, got), want);
            }
            phases.insert(c.phases(0, ranks, false).unwrap().len());
        }
    }
    assert_eq!(phases.into_iter().collect::<Vec<_>>(), [1, 2]);
}

/// The memory of a device: piece, result and scratch.
struct Memory([Vec<u8>; 3]);

impl Memory {
    fn at(&self, place: Place, nbytes: usize) -> Vec<u8> {
        let (k, at) = Memory::place(place);
        self.0[k][at..at + nbytes].to_vec()
    }

    fn write(&mut self, place: Place, bytes: &[u8]) {
        let (k, at) = Memory::place(place);
        self.0[k][at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn place(place: Place) -> (usize, usize) {
        match place {
            Place::Piece(at) => (0, at),
            Place::Result(at) => (1, at),
            Place::Scratch(at) => (2, at),
        }
    }
}

/// Executes the messages of all devices, as NCCL and the GPU do; sums in the order of the devices. Returns their results.
fn exchanged(case: &Case, c: &Collective, pieces: &[Vec<u8>], nbytes: usize) -> Vec<Vec<u8>> {
    let ranks = pieces.len();
    let all: Vec<Messages> = (0..ranks).map(|k| c.messages(k, ranks).unwrap()).collect();
    let memory = |k: usize| Memory([pieces[k].clone(), vec![0xA5; nbytes], vec![0x5A; all[k].scratch]]);
    let mut memory: Vec<Memory> = (0..ranks).map(memory).collect();
    let how = match case.kind {
        Kind::AllReduce(how) | Kind::ReduceScatter(_, how) => how,
        Kind::AllGather(_) | Kind::AllToAll | Kind::Shift(_) | Kind::Reverse => Combine::Sum,
    };
    let sum = |pieces: &[Vec<u8>], n: usize| {
        let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        combined((case.dtype, case.widened), how, &pieces, n)
    };
    for at in 0..all[0].steps.len() {
        // What the devices write when the messages of this step have arrived.
        let mut writes: Vec<(usize, Place, Vec<u8>)> = Vec::new();
        for own in 0..ranks {
            let Step::Messages(messages) = &all[own].steps[at] else { continue };
            let same = |k: usize, m: usize| {
                let Step::Messages(all) = &all[k].steps[at] else { panic!("{case:?}: another step on {k}") };
                all[m]
            };
            for (m, message) in messages.iter().enumerate() {
                match *message {
                    Message::Sum { to, n, dtype, .. } => {
                        assert_eq!((dtype, how), (case.dtype, Combine::Sum));
                        let from = |k: usize| match same(k, m) {
                            Message::Sum { from, n: other, .. } if other == n => memory[k].at(from, n * c.size),
                            other => panic!("{case:?}: {other:?}"),
                        };
                        writes.push((own, to, sum(&(0..ranks).map(from).collect::<Vec<_>>(), n)));
                    }
                    Message::SumSlices { to, n, dtype, .. } => {
                        assert_eq!((dtype, how), (case.dtype, Combine::Sum));
                        let from = |k: usize| match same(k, m) {
                            Message::SumSlices { from, n: other, .. } if other == n => {
                                memory[k].at(from, ranks * n * c.size)[own * n * c.size..].to_vec()
                            }
                            other => panic!("{case:?}: {other:?}"),
                        };
                        writes.push((own, to, sum(&(0..ranks).map(from).collect::<Vec<_>>(), n)));
                    }
                    Message::Gather { to, nbytes, .. } => {
                        let from = |k: usize| match same(k, m) {
                            Message::Gather { from, nbytes: other, .. } if other == nbytes => {
                                memory[k].at(from, nbytes)
                            }
                            other => panic!("{case:?}: {other:?}"),
                        };
                        writes.push((own, to, (0..ranks).flat_map(from).collect()));
                    }
                    Message::Receive { to, nbytes, peer } => {
                        let Step::Messages(sent) = &all[peer].steps[at] else { panic!("{case:?}") };
                        let sends = sent.iter().filter_map(|message| match *message {
                            Message::Send { from, nbytes, peer } if peer == own => Some((from, nbytes)),
                            _ => None,
                        });
                        let sends: Vec<(Place, usize)> = sends.collect();
                        assert!(sends.len() == 1 && sends[0].1 == nbytes, "{case:?}: {sends:?} for {nbytes}");
                        writes.push((own, to, memory[peer].at(sends[0].0, nbytes)));
                    }
                    Message::Send { peer, .. } => {
                        let Step::Messages(received) = &all[peer].steps[at] else { panic!("{case:?}") };
                        let is_from = |m: &&Message| matches!(m, Message::Receive { peer, .. } if *peer == own);
                        assert_eq!(received.iter().filter(is_from).count(), 1, "{case:?}");
                    }
                }
            }
        }
        writes.into_iter().for_each(|(k, place, bytes)| memory[k].write(place, &bytes));
        for (own, memory) in memory.iter_mut().enumerate() {
            match &all[own].steps[at] {
                Step::Messages(_) => {}
                Step::Rows { from, to, nbytes, apart, rows } => {
                    let (from_at, to_at) = (Memory::place(*from), Memory::place(*to));
                    for row in 0..*rows {
                        let bytes = memory.0[from_at.0][from_at.1 + row * apart[0]..][..*nbytes].to_vec();
                        memory.0[to_at.0][to_at.1 + row * apart[1]..][..*nbytes].copy_from_slice(&bytes);
                    }
                }
                Step::Launch { phase, .. } if phase.grid.contains(&0) => {}
                Step::Launch { phase, first, apart } => {
                    let Task::Reduce { n, len, row } = phase.task else { panic!("{case:?}: {phase:?}") };
                    assert!(!phase.reads_results && (phase.first, phase.step) == (0, 0));
                    assert!(first % c.vector == 0 && apart % c.vector == 0 && aligned(c, phase.out), "{case:?}");
                    let text = &c.functions[phase.function].text;
                    let (v, in_rows) = (c.vector / c.size, text.contains("true>"));
                    let terms: Vec<Vec<u8>> = (0..ranks).map(|k| memory.0[2][first + k * apart..].to_vec()).collect();
                    let terms: Vec<&[u8]> = terms.iter().map(Vec::as_slice).collect();
                    let rows = if in_rows { [len * v, row * v] } else { [n, n] };
                    reduce(case, how, &terms, (n, rows), &mut memory.0[1], phase.out);
                }
            }
        }
    }
    memory.into_iter().map(|memory| memory.0[1].clone()).collect()
}

#[test]
fn messages_have_the_bits_of_the_cpu() {
    let mut steps = BTreeSet::new();
    for ranks in [1, 2, 3, 8] {
        for case in cases(ranks, Axis::Dp) {
            if is_repeated(&case, 100_000) {
                continue;
            }
            let planned = case.plan(&Null);
            let (_, c) = lowered(&planned.program, &Props::H200);
            if c.is_empty() {
                continue;
            }
            let want = case.on_cpu();
            let pieces: Vec<_> = (0..ranks).map(|k| piece(&case.data(k), &planned.program, &c)).collect();
            let got = exchanged(&case, &c, &pieces, want[0].bytes.len());
            for (k, (got, want)) in got.into_iter().zip(&want).enumerate() {
                same(&case, k, &HostTensor::new(want.dtype, want.shape, got), want);
            }
            steps.insert(c.messages(0, ranks).unwrap().steps.len());
        }
    }
    assert!(steps.is_superset(&BTreeSet::from([1, 2, 3])), "{steps:?}");
}

/// A program that combines two computed tensors in one bucket; `widened`: 16-bit ones, to f32.
fn bucket(sizes: [usize; 2], widened: bool) -> Program {
    let mut s = Sketch::default();
    let sums: Vec<_> = sizes
        .into_iter()
        .map(|n| {
            let x = s.leaf(if widened { DType::BF16 } else { DType::F32 }, &[n]);
            let y = s.call("add", &[t(x), t(x)]);
            let code = if widened { WIDENED } else { code(Combine::Sum) };
            s.g.push(&ALL_REDUCE, &[y], &[Axis::Dp as i64, code]).unwrap()
        })
        .collect();
    let roots: Vec<_> = sums.into_iter().map(|y| s.call("exp", &[t(y)])).collect();
    (*Planned::new(&s.g, &s.request(&roots), &Null).program).clone()
}

/// The results of a bucket overwrite its pieces: in each phase a device writes only what no other one reads in it.
#[test]
fn a_bucket_is_one_collective_in_place() {
    let program = bucket([4099, 3000], false);
    let l = program.kernels.iter().find_map(lanes::collective).unwrap();
    let (before, mut all) = collective::parts(&program, l, &Props::H200).unwrap();
    assert!(before.launches.is_empty() && all.len() == 1 && l.inputs.len() == 2, "{all:?}");
    let c = all.remove(0);
    let n = (4099usize * 4).next_multiple_of(256) + 3000 * 4;
    assert!(c.in_place && c.nbytes == n, "{c:?}");
    for ranks in [1, 2, 3, 8] {
        let value = |k: usize, i: usize| ((i * 7 + k * 13) % 1001) as f32 * 0.37;
        let piece = |k: usize| (0..n / 4).flat_map(|i| value(k, i).to_le_bytes()).collect::<Vec<u8>>();
        let want: Vec<u8> =
            (0..n / 4).flat_map(|i| (1..ranks).fold(value(0, i), |sum, k| sum + value(k, i)).to_le_bytes()).collect();
        for order in [(0..ranks).collect::<Vec<_>>(), (0..ranks).rev().collect()] {
            let mut memory: Vec<Vec<u8>> = (0..ranks).map(piece).collect();
            let phases: Vec<_> = (0..ranks).map(|k| c.phases(k, ranks, false).unwrap()).collect();
            for at in 0..2 {
                for &own in &order {
                    let phase = &phases[own][at];
                    match phase.task {
                        Task::Reduce { n, len, row } => {
                            assert_eq!((len, row), (n, n));
                            let from: Vec<&[u8]> = memory.iter().map(|m| &m[phase.first..]).collect();
                            let sums = combined((DType::F32, false), Combine::Sum, &from, n);
                            memory[own][phase.out..][..n * 4].copy_from_slice(&sums);
                        }
                        Task::Spans { total, step, others } => {
                            assert!(others && phase.reads_results);
                            for k in (0..ranks).filter(|k| *k != own) {
                                let n = total.saturating_sub(k * step).min(step);
                                let from = memory[k][phase.first + k * phase.step..][..n].to_vec();
                                memory[own][phase.out + k * step..][..n].copy_from_slice(&from);
                            }
                        }
                        Task::Rows { .. } | Task::Span { .. } => panic!("{phase:?}"),
                    }
                }
            }
            assert!(memory.iter().all(|m| *m == want), "{ranks} devices");
        }
    }
}

/// A bucket of 16-bit terms is one collective too. Each result is as many elements from the first as its operand.
#[test]
fn a_widened_bucket_has_a_flat_result() {
    // Large enough for two phases.
    let program = bucket([200_003, 3000], true);
    let l = program.kernels.iter().find_map(lanes::collective).unwrap();
    let (before, all) = collective::parts(&program, l, &Props::H200).unwrap();
    assert!(before.launches.is_empty() && all.len() == 1 && l.inputs.len() == 2, "{all:?}");
    let c = &all[0];
    let second = (200_003usize * 2).next_multiple_of(256);
    assert!(!c.in_place && c.nbytes == second + 3000 * 2, "{c:?}");
    let place = |v: ValueId| match program.values[v.0 as usize].storage {
        Storage::Arena(at) => at,
        other => panic!("{other:?}"),
    };
    let operand = |k: usize| if let Operand::View(v, _) = l.inputs[k] { place(v) } else { panic!("a constant") };
    assert_eq!(operand(1) - operand(0), second);
    assert_eq!(place(l.outputs[1]) - place(l.outputs[0]), 2 * second);
    // Two devices exchange the terms alone; more of them slices of the terms and of the sum.
    let task = |ranks: usize| c.phases(1, ranks, false).unwrap().iter().map(|p| p.task).collect::<Vec<_>>();
    let n = c.nbytes / 2;
    assert_eq!(task(2), [Task::Reduce { n, len: n, row: n }]);
    let phases = c.phases(1, 4, false).unwrap();
    let step = n.div_ceil(4).next_multiple_of(8);
    assert_eq!((phases[0].first, phases[0].out), (2 * step, 4 * step));
    assert_eq!(phases[1].task, Task::Spans { total: 4 * n, step: 4 * step, others: true });
}

#[test]
fn too_many_devices_are_refused() {
    let case = &cases(2, Axis::Tp)[0];
    let (_, c) = lowered(&case.plan(&Null).program, &Props::H200);
    let error = c.phases(0, collective::MOST + 1, false).unwrap_err();
    assert!(error.message.contains("all_reduce over 65 devices along tp; at most 64"), "{}", error.message);
    let gather = cases(2, Axis::Tp).into_iter().find(|c| matches!(c.kind, Kind::AllGather(_))).unwrap();
    let (_, c) = lowered(&gather.plan(&Null).program, &Props::H200);
    assert!(c.phases(0, 3, false).is_err(), "the attributes say 2 devices");
}

#[test]
fn functions_compile_without_spills() {
    let Some(nvrtc) = Nvrtc::open() else { return };
    for (name, arch) in [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0))] {
        let mut texts = BTreeSet::from([collective::agree().text.clone()]);
        for case in cases(3, Axis::Dp).into_iter().chain(cases(8, Axis::Dp)) {
            let (before, c) = lowered(&case.plan(&Null).program, &Props { arch, ..Props::H200 });
            texts.extend(before);
            texts.extend(c.functions.iter().map(|f| f.text.clone()));
        }
        // Sums in a tree, by the text; a thread adds at most 8 elements in one.
        let tree = |text: &String| text.replace("collective::Sum<", "collective::Tree<").replace(">, 16, ", ">, 8, ");
        texts.extend(texts.iter().map(tree).collect::<Vec<_>>());
        // Of pieces of 2 GiB and more, by the text.
        let wide = |text: &String| {
            let ends = ["u32, true>", "u32, false>", ", u32>"];
            ends.iter().fold(text.clone(), |text, end| text.replace(end, &end.replace("u32", "u64")))
        };
        texts.extend(texts.iter().map(wide).collect::<Vec<_>>());
        let texts: Vec<String> = texts.into_iter().collect();
        println!("{} functions for {name}", texts.len());
        let programs: Vec<_> = texts.chunks(60).collect();
        nvrtc::each(&programs, |texts| nvrtc.spill_free(texts, name));
    }
}
