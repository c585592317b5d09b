//! Tests snapshots of States: another thread reads the values at the time of the snapshot, even if the loop has changed the
//! States. On the CPU, or on the device that `PERILUNE_DEVICE` names.
#![allow(clippy::unwrap_used)]

use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::memory::Role;
use perilune_engine::{Engine, StateId};
use perilune_tests::{harness, scripts};
use std::path::Path;
use std::sync::mpsc;

/// Makes bytes that differ between elements, States and steps; none of the numbers is NaN.
fn values(dtype: DType, dims: &[usize], salt: usize) -> HostTensor {
    let most = if dtype == DType::Bool { 1 } else { 0x3f };
    let n = dims.iter().product::<usize>() * dtype.size();
    HostTensor::new(dtype, Shape::of(dims), (0..n).map(|i| (i * 31 + i / 997 + salt) as u8 & most).collect())
}

/// Shapes of scalars, empty tensors, odd sizes, and one tensor larger than several pieces of pinned memory.
const SHAPES: [(DType, &[usize]); 9] = [
    (DType::F32, &[]),
    (DType::I64, &[]),
    (DType::F32, &[0, 3]),
    (DType::Bool, &[13]),
    (DType::BF16, &[7, 31]),
    (DType::F64, &[5]),
    (DType::F32, &[7 << 20]),
    (DType::U8, &[3, (4 << 20) + 1]),
    (DType::I32, &[129]),
];

fn states(e: &mut Engine) -> Vec<StateId> {
    let mut ids = Vec::new();
    for (k, (dtype, dims)) in SHAPES.iter().cycle().take(40).enumerate() {
        // The large tensors once.
        if k >= SHAPES.len() && dims.iter().product::<usize>() > 1000 {
            continue;
        }
        let node = e.from_host(values(*dtype, dims, k));
        ids.push(e.new_state(node, false).unwrap());
    }
    e.end_implicit_step().unwrap();
    ids
}

fn overwrite(e: &mut Engine, ids: &[StateId], salt: usize) {
    for (k, id) in ids.iter().enumerate() {
        let info = e.state_info(*id).unwrap();
        e.write_state(*id, &values(info.dtype, info.shape.dims(), salt + k)).unwrap();
    }
}

fn read(e: &mut Engine, ids: &[StateId]) -> Vec<HostTensor> {
    ids.iter().map(|id| e.read_state(*id).unwrap()).collect()
}

/// Snapshots are taken, overwritten immediately, and read on another thread in the meantime.
#[test]
fn a_snapshot_keeps_overwritten_values() {
    let mut e = harness::engine(2);
    let ids = states(&mut e);
    for round in 0..3 {
        let want = read(&mut e, &ids);
        let mut copies = e.snapshot(&ids).unwrap();
        assert_eq!(copies.waited, None);
        let held: usize = want.iter().map(|t| t.bytes.len()).sum();
        assert_eq!(e.memory().of(Role::Checkpoint), held);
        let reader = std::thread::spawn(move || {
            let got = copies.read();
            (got, copies)
        });
        for salt in 0..3 {
            overwrite(&mut e, &ids, 100 * round + 7 * salt + 1);
            e.end_implicit_step().unwrap();
        }
        let (got, copies) = reader.join().unwrap();
        assert!(got.unwrap() == want, "round {round}: the snapshot is not what the States were");
        assert!(read(&mut e, &ids) != want);
        // A GPU's copies are freed once they are on the host; the CPU's copies are on the host.
        assert_eq!(e.memory().of(Role::Checkpoint), if harness::on_gpu() { 0 } else { held });
        drop(copies);
        assert_eq!(e.memory().of(Role::Checkpoint), 0);
    }
}

/// A snapshot includes pending assignments, frees its memory if dropped unread, and may coexist with another.
#[test]
fn a_snapshot_is_of_what_reading_means_now() {
    let mut e = harness::engine(1);
    let ids = states(&mut e);
    let device = e.memory().device.allocated;
    drop(e.snapshot(&ids).unwrap());
    assert_eq!(e.memory().device.allocated, device);
    let mut first = e.snapshot(&ids).unwrap();
    let want = read(&mut e, &ids);
    overwrite(&mut e, &ids, 5);
    let mut second = e.snapshot(&ids).unwrap();
    e.end_implicit_step().unwrap();
    assert!(first.read().unwrap() == want);
    assert!(second.read().unwrap() == read(&mut e, &ids));
    assert!(second.read().is_err());
}

/// Without room for copies on the device the loop waits and reports it, and the bytes are the same.
#[test]
fn without_room_the_loop_waits() {
    let mut e = harness::engine(2);
    let ids = states(&mut e);
    let want = read(&mut e, &ids);
    e.executor.memory_budget = Some(1 << 20);
    let mut copies = e.snapshot(&ids).unwrap();
    e.executor.memory_budget = None;
    assert_eq!(copies.waited.is_some(), harness::on_gpu(), "{:?}", copies.waited);
    if let Some(note) = &copies.waited {
        assert!(note.starts_with("the loop waited for the bytes: a copy on the device takes "), "{note}");
        println!("{note}");
    }
    overwrite(&mut e, &ids, 77);
    e.end_implicit_step().unwrap();
    assert!(copies.read().unwrap() == want);
}

/// Takes several snapshots of a training run and reads each after two more steps have been queued.
#[test]
fn a_run_goes_on_while_its_snapshot_is_read() {
    let s = scripts::script(2, &[("steps", "100")]).unwrap();
    let recipe = s.recipe(Path::new("../recipes/digits.lua")).unwrap();
    let run = recipe.start(None, None, None).unwrap();
    for _ in 0..3 {
        run.step().unwrap();
        run.step().unwrap();
        let mut want = Vec::new();
        run.each_state(|path, t| want.push((path, t))).unwrap();
        let (paths, mut copies) = run.snapshot().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let reader = std::thread::spawn(move || {
            wait.recv().unwrap();
            copies.read()
        });
        run.step().unwrap();
        run.step().unwrap();
        go.send(()).unwrap();
        let got: Vec<_> = paths.into_iter().zip(reader.join().unwrap().unwrap()).collect();
        assert!(got.len() > 10 && got == want);
        let mut now = Vec::new();
        run.each_state(|path, t| now.push((path, t))).unwrap();
        assert!(now != want);
    }
}
