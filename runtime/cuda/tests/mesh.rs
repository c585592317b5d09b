//! Tests meshes of virtual devices on a GPU: several devices of one process, each in a thread, run programs with collectives. Without a
//! GPU the tests are skipped.
//!
//!     cargo test --release -p perilune-cuda --test mesh
//!
//! `PERILUNE_MESH_GPUS=N` spreads the virtual devices over N GPUs. With `PERILUNE_COLLECTIVES=nccl` they exchange messages of NCCL, as
//! those of several processes do, and there are at most as many devices as GPUs. `PERILUNE_DEVICE=cpu` takes CPU devices, to check the
//! tests.
#![allow(clippy::unwrap_used)]

#[path = "common/collectives.rs"]
mod collectives;
#[allow(dead_code)]
mod common;
#[path = "common/virtual_mesh.rs"]
mod virtual_mesh;

use collectives::{Case, Kind, Lie, cases, same};
use common::nvrtc::skip;
use common::{Sketch, float, int, t};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Axis, Combine};
use perilune_core::ops::collective::{ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, code};
use perilune_core::{DType, HostTensor, Mesh, Shape};
use perilune_cpu::Cpu;
use perilune_cuda::Cuda;
use perilune_plan::{Backend, Null, lanes};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use virtual_mesh::{Device, Exchanges, Planned, Rank, each};

/// The tests run one after the other: each opens many devices.
static ALONE: Mutex<()> = Mutex::new(());

fn is_on_cpu() -> bool {
    std::env::var("PERILUNE_DEVICE").is_ok_and(|name| name == "cpu")
}

fn gpus() -> usize {
    std::env::var("PERILUNE_MESH_GPUS").map_or(1, |n| n.parse().unwrap())
}

/// Whether a mesh of so many devices can be tested: NCCL needs a GPU for each.
fn has_room(devices: usize) -> bool {
    devices <= gpus() || is_on_cpu() || std::env::var("PERILUNE_COLLECTIVES").map_or(true, |how| how != "nccl")
}

/// Opens the device of a rank.
fn open(rank: usize) -> Box<dyn Backend> {
    if is_on_cpu() {
        return Box::new(Cpu::new(Some(1)));
    }
    Box::new(Cuda::new(rank % gpus()).unwrap_or_else(|e| panic!("{e}")))
}

/// A device to plan for, or `None` without a GPU.
fn target() -> Option<Box<dyn Backend>> {
    if is_on_cpu() {
        return Some(Box::new(Null));
    }
    match Cuda::new(0) {
        Ok(cuda) => Some(Box::new(cuda)),
        Err(e) => {
            skip::skipped(&format!("no GPU: {}", e.message));
            None
        }
    }
}

/// A test that runs. The harness may end the process behind it.
struct Alone {
    _guard: MutexGuard<'static, ()>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        perilune_cuda::nccl::settle();
    }
}

fn alone() -> Alone {
    Alone { _guard: ALONE.lock().unwrap_or_else(PoisonError::into_inner) }
}

/// Runs cases on virtual devices, each `runs` times, and compares with CPU devices.
fn compare(target: &dyn Backend, ranks: usize, axis: Axis, keep: impl Fn(&Case) -> bool, runs: usize) {
    let all: Vec<Case> = cases(ranks, axis).into_iter().filter(keep).collect();
    let planned: Vec<Planned> = all.iter().map(|c| c.plan(target)).collect();
    let start = Instant::now();
    let got = each(Mesh::new(&[(axis, ranks)]).unwrap(), 0, open, |mut rank| {
        let one = |(case, planned): (&Case, &Planned)| {
            rank.upload(1, &case.data(rank.device.at[axis as usize]));
            let loaded = rank.load(planned);
            let results = (0..runs).map(|_| rank.run(&loaded).unwrap_or_else(|f| panic!("{case:?}: {}", f.error)));
            let results: Vec<_> = results.collect();
            let read: Vec<HostTensor> = results.iter().map(|roots| rank.read(&roots[0]).unwrap()).collect();
            assert!(read.iter().all(|r| r.bytes == read[0].bytes), "{case:?}: a run differs from the first");
            read[0].clone()
        };
        all.iter().zip(&planned).map(one).collect::<Vec<_>>()
    });
    println!("{ranks} devices: {} collectives in {:.1} s", all.len(), start.elapsed().as_secs_f64());
    for (k, case) in all.iter().enumerate() {
        let want = case.on_cpu();
        (0..ranks).for_each(|rank| same(case, rank, &got[rank][k], &want[rank]));
        // A reduction has equal bits on all devices, also where the CPU's NaN are others.
        if matches!(case.kind, Kind::AllReduce(_)) {
            (1..ranks).for_each(|rank| assert_eq!(got[rank][k].bytes, got[0][k].bytes, "{case:?} on {rank}"));
        }
    }
}

#[test]
fn collectives_have_the_bits_of_the_cpu() {
    let Some(target) = target() else { return };
    let _alone = alone();
    for ranks in [1, 2, 3, 4, 8].into_iter().filter(|ranks| has_room(*ranks)) {
        compare(&*target, ranks, Axis::Dp, |_| true, 2);
    }
}

/// More devices than a GPU has hardware queues by default (8), and than loads that a thread has in flight.
#[test]
fn many_devices_share_a_gpu() {
    let Some(target) = target().filter(|_| has_room(19)) else { return };
    let _alone = alone();
    let keep = |c: &Case| c.dtype == DType::BF16 || (c.dtype == DType::I64 && c.lie == Lie::Whole);
    compare(&*target, 19, Axis::Tp, keep, 3);
}

fn ones(dtype: DType, dims: &[usize], value: impl FnMut(usize) -> f64) -> HostTensor {
    let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
    HostTensor::from_f64(dtype, Shape::of(dims), &values)
}

/// A training step in exact arithmetic: products, collectives of all kinds along dp and tp, and State writes.
struct Step {
    planned: Planned,
    x: u64,
    weight: u64,
    blocks: u64,
    count: u64,
}

const ROWS: usize = 32;
const WIDE: usize = 96;

impl Step {
    /// `dp`, `tp`: devices along the axes.
    fn new(backend: &dyn Backend, dp: usize, tp: usize, tall: usize) -> Step {
        let mut s = Sketch::default();
        let x = s.leaf(DType::F32, &[ROWS, tall]);
        let (weight, w) = s.state(DType::F32, &[tall, WIDE * tp]);
        let (blocks, b) = s.state(DType::F32, &[tall / dp, WIDE * tp]);
        let (count, n) = s.state(DType::I64, &[1]);
        let push = |s: &mut Sketch, op, x: NodeId, attrs: &[i64]| s.g.push(op, &[x], attrs).unwrap();
        let axes = [Axis::Dp as i64, Axis::Tp as i64];
        let sum = code(Combine::Sum);
        let bounded = |s: &mut Sketch, x: NodeId, by: f64| s.call("remainder", &[t(x), float(by)]);
        // Products of small integers are exact in any order.
        let y = s.call("matmul", &[t(x), t(w)]);
        let y = bounded(&mut s, y, 5.0);
        let y = push(&mut s, &ALL_REDUCE, y, &[axes[1], sum]);
        let y = bounded(&mut s, y, 7.0);
        let xt = s.call("transpose", &[t(x), int(0), int(1)]);
        let g = s.call("matmul", &[t(xt), t(y)]);
        let g = bounded(&mut s, g, 64.0);
        // Gradients: whole, and as blocks that are joined again.
        let whole = push(&mut s, &ALL_REDUCE, g, &[axes[0], sum]);
        let own = push(&mut s, &REDUCE_SCATTER, g, &[axes[0], 0, dp as i64, sum]);
        let own = s.call("add", &[t(own), t(b)]);
        let own = bounded(&mut s, own, 11.0);
        let joined = push(&mut s, &ALL_GATHER, own, &[axes[0], 0, dp as i64]);
        let w2 = s.call("add", &[t(whole), t(joined)]);
        let w2 = s.call("add", &[t(w2), t(w)]);
        let w2 = bounded(&mut s, w2, 3.0);
        let most = s.call("amax", &[t(w2)]);
        let most = push(&mut s, &ALL_REDUCE, most, &[axes[0], code(Combine::Max)]);
        let one = s.call("add", &[t(n), int(1)]);
        let total = push(&mut s, &ALL_REDUCE, one, &[axes[0], sum]);
        s.assign(weight, w2);
        s.assign(blocks, own);
        s.assign(count, one);
        // The payload of a leaf is its number, as for States.
        let request = s.request(&[most, total]);
        Step { planned: Planned::new(&s.g, &request, backend), x: 1, weight, blocks, count }
    }

    /// Runs the step `runs` times; returns the States and results of each fourth run and of the last.
    fn train(&self, rank: &mut Rank, runs: usize, mut before: impl FnMut(&Rank, usize)) -> Vec<Vec<HostTensor>> {
        let k = rank.device.rank;
        let dims = |payload| {
            let at = self.planned.inputs.iter().position(|b| {
                use perilune_plan::request::InputBuffer::*;
                matches!(b, Leaf(p) | State(p) if *p == payload)
            });
            self.planned.program.inputs[at.unwrap()].0.dims().to_vec()
        };
        rank.upload(self.weight, &ones(DType::F32, &dims(self.weight), |i| (i % 3) as f64));
        rank.upload(self.blocks, &ones(DType::F32, &dims(self.blocks), |i| (i % 2) as f64));
        rank.upload(self.count, &ones(DType::I64, &[1], |_| 0.0));
        let step = rank.load(&self.planned);
        let x = dims(self.x);
        let mut out = Vec::new();
        let mut last = Vec::new();
        for run in 0..runs {
            rank.upload(self.x, &ones(DType::F32, &x, |i| ((i * 7 + k * 3 + run) % 4) as f64 - 1.0));
            before(rank, run);
            last = rank.run(&step).unwrap_or_else(|f| panic!("{}", f.error));
            if run % 4 == 3 {
                out.push(self.values(rank, &last));
            }
        }
        out.push(self.values(rank, &last));
        out
    }

    fn values(&self, rank: &Rank, roots: &[perilune_plan::Buffer]) -> Vec<HostTensor> {
        let states = [self.weight, self.blocks, self.count].into_iter().map(|p| rank.value(p));
        states.chain(roots.iter().map(|r| rank.read(r).unwrap())).collect()
    }
}

/// Twenty steps on a mesh, with delays on the hosts and on the GPU that differ between devices.
fn train(target: &dyn Backend, dp: usize, tp: usize, tall: usize) {
    let mesh = Mesh::new(&[(Axis::Dp, dp), (Axis::Tp, tp)]).unwrap();
    let runs = 20;
    let on_cpu = Step::new(&Null, dp, tp, tall);
    let want = each(mesh, 0, |_| Box::new(Cpu::new(Some(1))), |mut rank| on_cpu.train(&mut rank, runs, |_, _| ()));
    let on_gpu = Step::new(target, dp, tp, tall);
    // A product without a mesh keeps one device's stream busy while the others go ahead.
    let mut s = Sketch::default();
    let n = if is_on_cpu() { 64 } else { 2048 };
    let a = s.leaf(DType::F32, &[n, n]);
    let b = s.call("matmul", &[t(a), t(a)]);
    let busy = Planned::new(&s.g, &s.request(&[b]), target);
    let start = Instant::now();
    let got = each(mesh, 500, open, |mut rank| {
        let ballast = rank.load(&busy);
        let payload = 1 << 40;
        rank.upload(payload, &ones(DType::F32, &[n, n], |i| (i % 5) as f64 - 2.0));
        on_gpu.train(&mut rank, runs, |rank, run| {
            if (run + rank.device.rank) % 3 == 0 {
                for _ in 0..4 {
                    rank.run_alone(&ballast, payload);
                }
            }
        })
    });
    println!("{mesh}, {tall} rows: {runs} steps in {:.2} s", start.elapsed().as_secs_f64());
    for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
        for (at, (got, want)) in got.iter().zip(want).enumerate() {
            for (k, (got, want)) in got.iter().zip(want).enumerate() {
                assert!(got == want, "{mesh}: value {k} at reading {at} on device {rank}");
            }
        }
    }
}

#[test]
fn training_steps_on_a_mesh_equal_those_of_the_cpu() {
    let Some(target) = target() else { return };
    let _alone = alone();
    let small = [(2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (2, 3), (4, 2)];
    for (dp, tp) in small.into_iter().filter(|(dp, tp)| has_room(dp * tp)) {
        train(&*target, dp, tp, 96);
    }
    // Pieces of several MiB: two phases, and kernels that run for long.
    for (dp, tp) in [(2, 1), (2, 2), (4, 1), (8, 1)].into_iter().filter(|(dp, tp)| has_room(dp * tp)) {
        train(&*target, dp, tp, 3072);
    }
}

/// Gradients of several layers in exact arithmetic, which are sent in buckets while products run.
fn layers(target: &dyn Backend, sizes: &[usize]) -> (Planned, Vec<(u64, usize)>) {
    let mut s = Sketch::default();
    let axis = Axis::Dp as i64;
    let mut x = s.leaf(DType::F32, &[ROWS, sizes[0]]);
    let (mut states, mut gradients) = (Vec::new(), Vec::new());
    for pair in sizes.windows(2) {
        let (state, w) = s.state(DType::F32, &[pair[0], pair[1]]);
        let y = s.call("matmul", &[t(x), t(w)]);
        let y = s.call("remainder", &[t(y), float(5.0)]);
        let xt = s.call("transpose", &[t(x), int(0), int(1)]);
        let g = s.call("matmul", &[t(xt), t(y)]);
        let g = s.call("remainder", &[t(g), float(64.0)]);
        gradients.push((state, w, s.g.push(&ALL_REDUCE, &[g], &[axis, code(Combine::Sum)]).unwrap()));
        states.push((state, pair[0] * pair[1]));
        x = y;
    }
    for (state, w, g) in gradients {
        let new = s.call("add", &[t(w), t(g)]);
        let new = s.call("remainder", &[t(new), float(3.0)]);
        s.assign(state, new);
    }
    (Planned::new(&s.g, &s.request(&[]), target), states)
}

/// Buckets on lanes, captured and not, with delays of the hosts; then their times.
#[test]
fn gradients_in_buckets_equal_those_of_the_cpu() {
    let Some(target) = target() else { return };
    let _alone = alone();
    // On GPUs one of more bytes than copy engines fetch at once (`executable/mesh/copies.rs`).
    let sizes = if is_on_cpu() { [32, 64, 96, 64, 48, 64, 32] } else { [96, 256, 512, 4096, 2304, 512, 96] };
    let ((on_gpu, states), (on_cpu, _)) = (layers(&*target, &sizes), layers(&Null, &sizes));
    let calls: Vec<usize> =
        on_gpu.program.kernels.iter().filter_map(lanes::collective).map(|l| l.inputs.len()).collect();
    assert!(calls.iter().any(|n| *n > 1) && (is_on_cpu() || calls.len() > 1), "{calls:?}");
    let hidden = on_gpu.program.in_flight.iter().filter(|f| f.wait > f.start + 1).count();
    assert!(hidden > 0, "{:?}", on_gpu.program.in_flight);
    for ranks in [2, 3, 4, 8].into_iter().filter(|ranks| has_room(*ranks)) {
        let mesh = Mesh::new(&[(Axis::Dp, ranks)]).unwrap();
        let train = |rank: &mut Rank, planned: &Planned| {
            let step = rank.load(planned);
            for (state, n) in &states {
                rank.upload(*state, &ones(DType::F32, &[*n], |i| (i % 3) as f64));
            }
            for run in 0..12 {
                let k = rank.device.rank;
                rank.upload(1, &ones(DType::F32, &[ROWS, sizes[0]], |i| ((i * 7 + k * 3 + run) % 4) as f64 - 1.0));
                rank.run(&step).unwrap_or_else(|f| panic!("{}", f.error));
            }
            states.iter().map(|s| rank.value(s.0)).collect::<Vec<_>>()
        };
        let want = each(mesh, 0, |_| Box::new(Cpu::new(Some(1))), |mut rank| train(&mut rank, &on_cpu));
        let got = each(mesh, 300, open, |mut rank| train(&mut rank, &on_gpu));
        for (rank, (got, want)) in got.iter().zip(&want).enumerate() {
            let differs = got.iter().zip(want).position(|(a, b)| a.bytes != b.bytes);
            assert_eq!(differs, None, "{ranks} devices: a State on device {rank}");
        }
        let times = each(mesh, 0, open, |mut rank| {
            train(&mut rank, &on_gpu);
            let step = rank.load(&on_gpu);
            rank.times(&step)
        });
        for [times, hidden] in times {
            let calls = on_gpu.program.kernels.iter().map(|k| lanes::collective(k).is_some());
            for ((is_call, seconds), beside) in calls.zip(times).zip(hidden) {
                assert!(seconds >= 0.0 && beside >= 0.0 && (is_call || beside == 0.0));
            }
        }
    }
}

/// A lookup whose index is bad on one device stops the State writes of all, and is an error on all in the same run.
#[test]
fn a_bad_index_on_one_device_stops_all() {
    let Some(target) = target() else { return };
    if is_on_cpu() {
        return; // a CPU reports a bad index at once, and its device alone
    }
    let _alone = alone();
    let mut s = Sketch::default();
    let (table, w) = s.state(DType::F32, &[5, 4]);
    let (count, n) = s.state(DType::I64, &[1]);
    let ids = s.leaf(DType::I64, &[3]);
    let rows = s.call("index_select", &[t(w), int(0), t(ids)]);
    let sums = s.g.push(&ALL_REDUCE, &[rows], &[Axis::Dp as i64, code(Combine::Sum)]).unwrap();
    let sums = s.call("sum", &[t(sums)]);
    let w2 = s.call("add", &[t(w), t(sums)]);
    let w2 = s.call("remainder", &[t(w2), float(17.0)]);
    let one = s.call("add", &[t(n), int(1)]);
    s.assign(table, w2);
    s.assign(count, one);
    let leaf = 3;
    let planned = Planned::new(&s.g, &s.request(&[sums]), &*target);
    for (dp, tp) in [(2, 1), (4, 1), (2, 2), (3, 2)].into_iter().filter(|(dp, tp)| has_room(dp * tp)) {
        let mesh = Mesh::new(&[(Axis::Dp, dp), (Axis::Tp, tp)]).unwrap();
        // Bad in the first run, which waits; in a later one, which does not; and in a replayed one, with runs queued behind it.
        for bad_run in [0, 3, 9] {
            let bad_rank = mesh.devices() - 1;
            let all = each(mesh, 200, open, |mut rank| {
                rank.upload(table, &ones(DType::F32, &[5, 4], |i| i as f64));
                rank.upload(count, &ones(DType::I64, &[1], |_| 0.0));
                let step = rank.load(&planned);
                let mut ended = Vec::new();
                for run in 0..16 {
                    let is_bad = run == bad_run && rank.device.rank == bad_rank;
                    let id = if is_bad { 5 } else { run % 5 };
                    rank.upload(leaf, &ones(DType::I64, &[3], |i| if i == 1 { id as f64 } else { 2.0 }));
                    match rank.run(&step) {
                        Ok(roots) if run == 6 && bad_run != 3 => drop(rank.read(&roots[0]).unwrap()),
                        Ok(_) => {}
                        Err(f) => ended.push((run, f.error.message)),
                    }
                }
                (ended, rank.value(table), rank.value(count))
            });
            let runs = |k: usize| all[k].0.iter().map(|e| e.0).collect::<Vec<_>>();
            let errors: Vec<_> = all.iter().map(|a| &a.0).collect();
            assert_eq!(runs(0).len(), 1, "{mesh}, bad in run {bad_run}: {errors:?}");
            let own = &all[bad_rank].0[0].1;
            assert!(own.contains("index 5 is out of range"), "{own}");
            for k in 0..mesh.devices() {
                assert_eq!(runs(k), runs(0), "{mesh}, bad in run {bad_run}: {errors:?}");
                assert!(k == bad_rank || all[k].0[0].1.contains("another device"), "{errors:?}");
                assert_eq!(all[k].1, all[0].1, "{mesh}, bad in run {bad_run}: the States differ");
            }
            // The runs from the bad one to the error wrote nothing.
            let error = runs(0)[0];
            println!("{mesh}: bad in run {bad_run}, error in run {error}");
            let lost = if bad_run == 0 { 1 } else { error - bad_run + 1 };
            assert!(all.iter().all(|a| a.2.get_i64(0) == 16 - lost as i64), "{mesh}, bad in run {bad_run}");
        }
    }
}

/// A device that fails ends the run of the others, which write no State; the next run is as if there had been none.
#[test]
fn a_failed_device_ends_the_run_of_all() {
    let Some(target) = target() else { return };
    let _alone = alone();
    let mut s = Sketch::default();
    let (state, w) = s.state(DType::F32, &[1000]);
    let sums = s.g.push(&ALL_REDUCE, &[w], &[Axis::Dp as i64, code(Combine::Sum)]).unwrap();
    let n = if has_room(3) { 3 } else { 2 };
    let joined = s.g.push(&ALL_GATHER, &[sums], &[Axis::Dp as i64, 0, n as i64]).unwrap();
    let most = s.call("amax", &[t(joined)]);
    let w2 = s.call("add", &[t(sums), t(most)]);
    s.assign(state, w2);
    let planned = Planned::new(&s.g, &s.request(&[]), &*target);
    let mesh = Mesh::new(&[(Axis::Dp, n)]).unwrap();
    for good in 0..6 {
        let again = Exchanges::new(mesh, 100);
        let all = each(mesh, 100, open, |mut rank| {
            rank.upload(state, &ones(DType::F32, &[1000], |i| (i % 2) as f64));
            let loaded = rank.load(&planned);
            (0..good).for_each(|_| drop(rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error))));
            if rank.device.rank == 1 {
                rank.device.shared.fail();
            } else {
                let failure = rank.run(&loaded).unwrap_err();
                assert!(failure.error.message.contains("another device has failed"), "{}", failure.error);
            }
            let between = rank.value(state);
            let device = Device::new(&again, rank.device.rank);
            let rank = Rank { device: &device, ..rank };
            (0..6).for_each(|_| drop(rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error))));
            (between, rank.value(state))
        });
        let sum =
            |runs| (0..runs).fold(vec![0.0, 1.0], |w: Vec<f64>, _| w.iter().map(|x| n as f64 * (x + w[1])).collect());
        let values = |runs| ones(DType::F32, &[1000], |i| sum(runs)[i % 2]);
        for (between, end) in all {
            assert!(between == values(good) && end == values(good + 6), "after {good} runs");
        }
    }
}

/// Measures collectives of virtual devices; run with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn times() {
    let Some(target) = target() else { return };
    let _alone = alone();
    for ranks in [2, 4, 8].into_iter().filter(|ranks| has_room(*ranks)) {
        for n in [1, 1 << 14, 1 << 18, 1 << 22, 1 << 26] {
            for kind in [Kind::AllReduce(Combine::Sum), Kind::AllGather(0), Kind::ReduceScatter(0, Combine::Sum)] {
                let n = if kind == Kind::AllReduce(Combine::Sum) { n } else { n.max(ranks) / ranks * ranks };
                let case = Case {
                    kind,
                    dtype: DType::BF16,
                    dims: vec![n],
                    lie: Lie::Whole,
                    axis: Axis::Dp,
                    ranks,
                    widened: false,
                };
                let planned = case.plan(&*target);
                let runs = 30;
                let seconds = each(case.mesh(), 0, open, |mut rank| {
                    rank.upload(1, &ones(DType::BF16, &[n], |i| (i % 7) as f64));
                    let loaded = rank.load(&planned);
                    let wait = |rank: &Rank| {
                        let roots = rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error));
                        rank.read(&roots[0]).unwrap();
                    };
                    (0..3).for_each(|_| wait(&rank));
                    let start = Instant::now();
                    for _ in 0..runs {
                        rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error));
                    }
                    let queued = start.elapsed().as_secs_f64();
                    rank.synchronize();
                    (queued / runs as f64, start.elapsed().as_secs_f64() / runs as f64)
                });
                let (queued, all) = seconds[0];
                println!(
                    "{ranks} devices, {kind:?}, {} bytes each: {:.1} us, host {:.1} us",
                    2 * n,
                    all * 1e6,
                    queued * 1e6
                );
            }
        }
    }
}
