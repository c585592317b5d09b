//! Tests pipeline stages on virtual devices of a GPU, or on several GPUs: programs that send each other values. Without a GPU most tests
//! are skipped.
//!
//!     cargo test --release -p perilune-cuda --test stages
//!
//! `PERILUNE_MESH_GPUS=N` spreads the virtual devices over N GPUs. `PERILUNE_DEVICE=cpu` takes CPU devices, to check the tests.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod common;
#[path = "common/virtual_mesh.rs"]
mod virtual_mesh;

use common::nvrtc::{Nvrtc, skip};
use common::{Sketch, float, int, t};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::collective::{SEND, is_transfer};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_cpu::Cpu;
use perilune_cuda::launch::Arg;
use perilune_cuda::library::transfer;
use perilune_cuda::{Cuda, OfflineTarget};
use perilune_plan::ir::{Kernel, Library, Storage};
use perilune_plan::request::InputBuffer;
use perilune_plan::{Backend, Buffer, Null};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtual_mesh::{Device, Exchanges, Loaded, Planned, Rank, each};

/// The tests run one after the other: each opens many devices.
static ALONE: Mutex<()> = Mutex::new(());

fn is_on_cpu() -> bool {
    std::env::var("PERILUNE_DEVICE").is_ok_and(|name| name == "cpu")
}

/// Opens the device of a rank. Neighbours along `pp` are on different GPUs, if there are several: the axis is the outermost one.
fn open(mesh: Mesh) -> impl Fn(usize) -> Box<dyn Backend> + Sync {
    move |rank| {
        if is_on_cpu() {
            return Box::new(Cpu::new(Some(1)));
        }
        let gpus: usize = std::env::var("PERILUNE_MESH_GPUS").map_or(1, |n| n.parse().unwrap());
        let stage = mesh.coordinates(rank)[Axis::Pp as usize];
        Box::new(Cuda::new(stage % gpus).unwrap_or_else(|e| panic!("{e}")))
    }
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

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn numbers(dtype: DType, dims: &[usize], value: impl FnMut(usize) -> f64) -> HostTensor {
    let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
    HostTensor::from_f64(dtype, Shape::of(dims), &values)
}

/// The payload of the batch.
const X: u64 = 1;
/// Forward passes of a step.
const PASSES: usize = 3;

/// A step in exact arithmetic: several passes through a layer for each stage, and an update of all layers. Values go from stage to stage
/// contiguous, as columns of a matrix and in 16 bits; new weights, and numbers of 8 bytes, come back.
struct Step {
    g: Sketch,
    roots: [NodeId; 2],
    weights: Vec<u64>,
    count: u64,
    rows: usize,
    wide: usize,
}

impl Step {
    fn new(stages: usize, rows: usize, wide: usize) -> Step {
        let mut s = Sketch::default();
        let x = s.leaf(DType::F32, &[PASSES, rows, wide]);
        let (count, n) = s.state(DType::I64, &[1]);
        let layers: Vec<(u64, NodeId)> = (0..stages).map(|_| s.state(DType::F32, &[wide, wide])).collect();
        let bounded = |s: &mut Sketch, x: NodeId, by: f64| s.call("remainder", &[t(x), float(by)]);
        let transposed = |s: &mut Sketch, x: NodeId| s.call("transpose", &[t(x), int(0), int(1)]);
        // Products of small integers are exact in any order.
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for pass in 0..PASSES {
            let mut h = s.call("select", &[t(x), int(0), int(pass as i64)]);
            first.push(h);
            for (stage, (_, w)) in layers.iter().enumerate() {
                let mut w = *w;
                match stage % 3 {
                    1 => w = s.call("narrow", &[t(w), int(0), int(0), int(wide as i64 / 2)]),
                    2 => h = s.g.cast(h, DType::F32).unwrap(),
                    _ => {}
                }
                h = s.call("matmul", &[t(h), t(w)]);
                h = bounded(&mut s, h, 5.0);
                match stage % 3 {
                    0 if stage + 1 < stages => h = s.call("narrow", &[t(h), int(1), int(3), int(wide as i64 / 2)]),
                    1 if stage + 1 < stages => h = s.g.cast(h, DType::BF16).unwrap(),
                    _ => {}
                }
            }
            last.push(h);
        }
        let one = s.call("add", &[t(n), int(1)]);
        s.assign(count, one);
        let mut sum = None;
        for (stage, (state, w)) in layers.iter().enumerate() {
            let (a, b) = (first[stage % PASSES], last[(stage + 1) % PASSES]);
            let at = transposed(&mut s, a);
            let g = s.call("matmul", &[t(at), t(b)]);
            let g = bounded(&mut s, g, 64.0);
            let new = s.call("add", &[t(*w), t(g)]);
            let new = bounded(&mut s, new, 3.0);
            s.assign(*state, new);
            let most = s.call("amax", &[t(g)]);
            sum = Some(sum.map_or(most, |sum| s.call("add", &[t(sum), t(most)])));
        }
        let weights = layers.into_iter().map(|(state, _)| state).collect();
        Step { g: s, roots: [sum.unwrap(), one], weights, count, rows, wide }
    }

    fn one_device(&self, backend: &dyn Backend) -> Planned {
        Planned::new(&self.g.g, &self.g.request(&self.roots), backend)
    }

    /// The programs of the devices along `pp`, each with a stage. Rows are divided along `dp`.
    fn stages(&self, backend: &dyn Backend, mesh: &Mesh) -> Vec<Planned> {
        let placement = |b: InputBuffer| {
            let on = |stage: u8| Placement::REPLICATED.with(Axis::Pp, Along::Stage { device: stage, stage });
            match b {
                InputBuffer::State(p) => on(self.weights.iter().position(|w| *w == p).unwrap_or(0) as u8),
                InputBuffer::Leaf(_) => Placement::REPLICATED.with(Axis::Dp, Along::Split(1)),
            }
        };
        Planned::stages(&self.g.g, &self.g.request(&self.roots), backend, mesh, placement)
    }

    /// Uploads the States that a stage has, and nothing in the place of the others. On one device all.
    fn begin(&self, rank: &mut Rank, stage: Option<usize>) {
        let none = HostTensor::from_f64(DType::U8, Shape::of(&[0]), &[]);
        for (k, w) in self.weights.iter().enumerate() {
            let own = stage.is_none_or(|stage| stage == k);
            let value = |i: usize| ((i * 5 + k) % 3) as f64;
            rank.upload(*w, &if own { numbers(DType::F32, &[self.wide, self.wide], value) } else { none.clone() });
        }
        let own = stage.is_none_or(|stage| stage == 0);
        rank.upload(self.count, &if own { numbers(DType::I64, &[1], |_| 0.0) } else { none });
    }

    /// Uploads the rows of a batch from `first` on.
    fn batch(&self, rank: &mut Rank, run: usize, first: usize, rows: usize) {
        let at = |i: usize| {
            let (pass, row, column) = (i / (rows * self.wide), i / self.wide % rows + first, i % self.wide);
            ((pass * 11 + row * 7 + column * 3 + run) % 4) as f64 - 1.0
        };
        rank.upload(X, &numbers(DType::F32, &[PASSES, rows, self.wide], at));
    }

    fn states(&self, rank: &Rank, stage: Option<usize>) -> Vec<HostTensor> {
        let of = |k: usize| stage.is_none_or(|stage| stage == k);
        let weights = self.weights.iter().enumerate().filter(|(k, _)| of(*k)).map(|(_, w)| rank.value(*w));
        weights.chain(of(0).then(|| rank.value(self.count))).collect()
    }
}

/// What a device has after a run: its States, and results if they are its own.
type Reading = (Vec<HostTensor>, Vec<HostTensor>);

fn reading(step: &Step, rank: &Rank, stage: Option<usize>, roots: &[Buffer]) -> Reading {
    (step.states(rank, stage), roots.iter().map(|r| rank.read(r).unwrap()).collect())
}

/// States and results after the readings of some runs on one CPU device.
fn expected(step: &Step, read: &[usize]) -> Vec<Reading> {
    let planned = step.one_device(&Null);
    let mesh = Mesh::new(&[]).unwrap();
    let mut all = each(
        mesh,
        0,
        |_| Box::new(Cpu::new(Some(1))),
        |mut rank| {
            step.begin(&mut rank, None);
            let loaded = rank.load(&planned);
            let mut out = Vec::new();
            for run in 0..=*read.last().unwrap() {
                step.batch(&mut rank, run, 0, step.rows);
                let roots = rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error));
                if read.contains(&run) {
                    out.push(reading(step, &rank, None, &roots));
                }
            }
            out
        },
    );
    all.remove(0)
}

/// Compares what all devices of a mesh have with one device.
fn compare(mesh: &Mesh, read: &[usize], got: &[Vec<Reading>], want: &[Reading]) {
    let stages = mesh.size(Axis::Pp);
    for (rank, got) in got.iter().enumerate() {
        let stage = mesh.coordinates(rank)[Axis::Pp as usize];
        for (at, (got, want)) in got.iter().zip(want).enumerate() {
            let what = format!("{mesh}, run {}, device {rank}", read[at]);
            assert!(got.0[0] == want.0[stage], "{what}: the weights");
            let counts = [&got.0[1..], &got.1[..]].concat();
            if stage == 0 {
                assert!(got.0[1] == want.0[stages], "{what}: the number of steps {:?}", got.0[1]);
            }
            for value in counts {
                assert!(value == want.1[0] || value == want.1[1], "{what}: a result {value:?} of {:?}", want.1);
            }
        }
    }
    let roots: usize = got.iter().map(|g| g[0].1.len()).sum();
    assert!(roots >= 2 * got.len() / stages, "results are missing");
}

/// A product without a mesh, which keeps one device's stream busy while the others go ahead.
fn ballast(target: &dyn Backend) -> (Planned, HostTensor) {
    let mut s = Sketch::default();
    let n = if is_on_cpu() { 64 } else { 2048 };
    let a = s.leaf(DType::F32, &[n, n]);
    let b = s.call("matmul", &[t(a), t(a)]);
    (Planned::new(&s.g, &s.request(&[b]), target), numbers(DType::F32, &[n, n], |i| (i % 5) as f64 - 2.0))
}

/// Runs steps in stages, with delays on the hosts and on the GPU that differ between devices. Captured graphs are replayed from the third
/// run on.
fn train(target: &dyn Backend, stages: usize, dp: usize, rows: usize, wide: usize) {
    let mesh = Mesh::new(&[(Axis::Pp, stages), (Axis::Dp, dp)]).unwrap();
    let step = Step::new(stages, rows, wide);
    let read = [0, 1, 2, 3, 7, 11, 19];
    let want = expected(&step, &read);
    let planned = step.stages(target, &mesh);
    let (busy, matrix) = ballast(target);
    let start = Instant::now();
    let got = each(mesh, 500, open(mesh), |mut rank| {
        let [stage, at] = [Axis::Pp, Axis::Dp].map(|axis| rank.device.at[axis as usize]);
        step.begin(&mut rank, Some(stage));
        let loaded = rank.load(&planned[stage]);
        let idle = rank.load(&busy);
        rank.upload(1 << 40, &matrix);
        let mut out = Vec::new();
        for run in 0..=19 {
            step.batch(&mut rank, run, at * rows / dp, rows / dp);
            if (run + rank.device.rank).is_multiple_of(3) {
                (0..4).for_each(|_| rank.run_alone(&idle, 1 << 40));
            }
            let roots = rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error));
            if read.contains(&run) {
                out.push(reading(&step, &rank, Some(stage), &roots));
            }
        }
        out
    });
    println!("{mesh}, {rows} x {wide}: 20 steps in {:.2} s", start.elapsed().as_secs_f64());
    compare(&mesh, &read, &got, &want);
}

#[test]
fn stages_equal_one_device() {
    let Some(target) = target() else { return };
    let _alone = alone();
    for (stages, dp) in [(2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (3, 2)] {
        train(&*target, stages, dp, 24, 32);
    }
    // Messages of 2 MiB, and kernels that run for long.
    for (stages, dp) in [(2, 1), (3, 1), (2, 2)] {
        train(&*target, stages, dp, 1024, 512);
    }
}

fn calls(planned: &Planned) -> Vec<&Library> {
    let libraries =
        planned.program.kernels.iter().filter_map(|k| if let Kernel::Library(l) = k { Some(l) } else { None });
    libraries.filter(|l| is_transfer(l.op)).collect()
}

/// The plans for a GPU, without one: what is sent is contiguous or packed, no transfer is behind a State write, and kernels compile.
#[test]
fn transfers_are_planned_without_a_gpu() {
    let target = OfflineTarget::default();
    let mesh = Mesh::new(&[(Axis::Pp, 4)]).unwrap();
    let planned = Step::new(4, 24, 32).stages(&target, &mesh);
    for (stage, own) in (0..2).flat_map(|at| {
        let mesh = Mesh::new(&[(Axis::Pp, 2)]).unwrap();
        Lookup::new(at).stages(&target, &mesh).into_iter().enumerate()
    }) {
        let transfers: Vec<bool> = calls(&own).iter().map(|l| l.op == &SEND).collect();
        assert_eq!(transfers, [stage == 0], "a lookup in stages");
    }
    let (mut packed, mut texts, mut kinds) = (0, Vec::new(), Vec::new());
    for (stage, own) in planned.iter().enumerate() {
        let program = &own.program;
        let is_state =
            |v: &perilune_plan::ir::ValueId| matches!(program.values[v.0 as usize].storage, Storage::Input(_));
        let writes = |k: &Kernel| k.writes().iter().any(is_state);
        let first = program.kernels.iter().position(writes).unwrap();
        let transfers = |k: &Kernel| matches!(k, Kernel::Library(l) if is_transfer(l.op));
        assert!(!program.kernels[first..].iter().any(transfers), "stage {stage}: a transfer behind a State write");
        for l in calls(own) {
            let (before, transfer) = transfer::parts(program, l).unwrap();
            assert_eq!((transfer.is_send, transfer.axis), (l.op == &SEND, Axis::Pp));
            assert!(transfer.nbytes > 0 && transfer.other != stage && transfer.other < 4, "{transfer:?}");
            assert_eq!(before.launches.is_empty(), matches!(transfer.place, Arg::Value(..)), "{transfer:?}");
            packed += before.launches.len();
            assert!(before.scratch_bytes == 0 || before.scratch_bytes >= transfer.nbytes);
            texts.extend(before.launches.iter().map(|launch| launch.function.text.clone()));
            kinds.push((stage, transfer.other, transfer.is_send, transfer.number, transfer.nbytes));
        }
        for k in 0..program.kernels.len() {
            target.source(program, k).unwrap().unwrap();
        }
    }
    // Every message is sent once and received once, with the same bytes.
    let sent: Vec<_> = kinds.iter().filter(|k| k.2).collect();
    let received = |k: &&(usize, usize, bool, u64, usize)| kinds.contains(&(k.1, k.0, false, k.3, k.4));
    assert!(sent.iter().all(received) && sent.len() * 2 == kinds.len() && sent.len() > 12, "{kinds:?}");
    assert!(packed >= PASSES, "{packed} values are packed");
    texts.sort();
    texts.dedup();
    if let Some(nvrtc) = Nvrtc::open() {
        for arch in ["sm_80", "sm_90a", "sm_100a"] {
            nvrtc.spill_free(&texts, arch);
        }
    }
}

/// The slots of a run that has failed are used again, and memory does not grow.
#[test]
fn a_failed_stage_ends_the_run_of_all() {
    let Some(target) = target() else { return };
    let _alone = alone();
    let mesh = Mesh::new(&[(Axis::Pp, 3)]).unwrap();
    let step = Step::new(3, 256, 256);
    let planned = step.stages(&*target, &mesh);
    // A stage fails where it receives one of its messages. It never takes those that others have sent to it.
    for (failing, received, good) in [(2, 0, 0), (2, 2, 1), (2, 1, 5), (0, 0, 4), (1, 1, 3), (1, 3, 2)] {
        let read: Vec<usize> = (0..good + 6).collect();
        let want = expected(&step, &read);
        let again = Exchanges::new(mesh, 100);
        let got = each(mesh, 100, open(mesh), |mut rank| {
            let stage = rank.device.at[Axis::Pp as usize];
            step.begin(&mut rank, Some(stage));
            let loaded = rank.load(&planned[stage]);
            let mut out = Vec::new();
            let mut run = |rank: &mut Rank, loaded: &Loaded, number: usize| {
                step.batch(rank, number, 0, step.rows);
                let roots = rank.run(loaded).unwrap_or_else(|f| panic!("{}", f.error));
                out.push(reading(&step, rank, Some(stage), &roots));
            };
            (0..good).for_each(|number| run(&mut rank, &loaded, number));
            step.batch(&mut rank, good, 0, step.rows);
            if stage == failing {
                rank.device.receives_left.store(received, Ordering::Relaxed);
            }
            let failure = rank.run(&loaded).unwrap_err();
            let own = if stage == failing { "this device" } else { "another device" };
            assert_eq!(failure.error.message, format!("{own} has failed"));
            let device = Device::new(&again, rank.device.rank);
            let mut rank = Rank { device: &device, ..rank };
            (good..good + 6).for_each(|number| run(&mut rank, &loaded, number));
            out
        });
        compare(&mesh, &read, &got, &want);
    }
}

/// A step of two stages with a lookup in one of them, whose indices are a leaf.
struct Lookup {
    g: Sketch,
    root: NodeId,
    /// By stage.
    states: Vec<(u64, NodeId)>,
    counts: Vec<(u64, NodeId)>,
}

impl Lookup {
    fn new(stage: usize) -> Lookup {
        let mut s = Sketch::default();
        let ids = s.leaf(DType::I64, &[3]);
        let states: Vec<(u64, NodeId)> = (0..2).map(|_| s.state(DType::F32, &[5, 4])).collect();
        let counts: Vec<(u64, NodeId)> = (0..2).map(|_| s.state(DType::I64, &[1])).collect();
        let h = if stage == 0 {
            s.call("index_select", &[t(states[0].1), int(0), t(ids)])
        } else {
            let h = s.call("narrow", &[t(states[0].1), int(0), int(0), int(3)]);
            let rows = s.call("index_select", &[t(states[1].1), int(0), t(ids)]);
            s.call("add", &[t(h), t(rows)])
        };
        let y = s.call("sum", &[t(h)]);
        let new = s.call("add", &[t(states[1].1), t(y)]);
        let new = s.call("remainder", &[t(new), float(17.0)]);
        s.assign(states[1].0, new);
        for (state, n) in &counts {
            let one = s.call("add", &[t(*n), int(1)]);
            s.assign(*state, one);
        }
        Lookup { g: s, root: y, states, counts }
    }

    fn stages(&self, backend: &dyn Backend, mesh: &Mesh) -> Vec<Planned> {
        let place = |b: InputBuffer| {
            let on = |stage: u8| Placement::REPLICATED.with(Axis::Pp, Along::Stage { device: stage, stage });
            match b {
                InputBuffer::State(p) if p == self.states[1].0 || p == self.counts[1].0 => on(1),
                InputBuffer::State(_) => on(0),
                InputBuffer::Leaf(_) => Placement::REPLICATED,
            }
        };
        Planned::stages(&self.g.g, &self.g.request(&[self.root]), backend, mesh, place)
    }
}

/// A lookup whose index is bad in one stage stops the State writes of all, and is an error on all in the same run.
#[test]
fn a_bad_index_in_one_stage_stops_all() {
    let Some(target) = target() else { return };
    if is_on_cpu() {
        return; // a CPU reports a bad index at once, and its device alone
    }
    let _alone = alone();
    for (bad_stage, dp) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
        let mesh = Mesh::new(&[(Axis::Pp, 2), (Axis::Dp, dp)]).unwrap();
        let lookup = Lookup::new(bad_stage);
        let planned = lookup.stages(&*target, &mesh);
        let Lookup { states, counts, .. } = &lookup;
        for bad_run in [0, 3, 9] {
            // Of two devices of the stage one has the bad index.
            let bad_rank = bad_stage * dp + dp - 1;
            let all = each(mesh, 200, open(mesh), |mut rank| {
                let stage = rank.device.at[Axis::Pp as usize];
                let none = HostTensor::from_f64(DType::U8, Shape::of(&[0]), &[]);
                for k in 0..2 {
                    let own = |value: HostTensor| if k == stage { value } else { none.clone() };
                    rank.upload(states[k].0, &own(numbers(DType::F32, &[5, 4], |i| i as f64)));
                    rank.upload(counts[k].0, &own(numbers(DType::I64, &[1], |_| 0.0)));
                }
                let loaded = rank.load(&planned[stage]);
                let mut ended = Vec::new();
                for run in 0..16 {
                    if run == 6 || run == 12 {
                        // Until then the GPU has reported a bad index.
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    let is_bad = run == bad_run && rank.device.rank == bad_rank;
                    let id = if is_bad { 5 } else { run % 5 };
                    let value = |i: usize| if i == 1 { id as f64 } else { 2.0 };
                    // The leaf was recorded first.
                    rank.upload(X, &numbers(DType::I64, &[3], value));
                    if let Err(f) = rank.run(&loaded) {
                        ended.push((run, f.error.message));
                    }
                }
                let (table, count) = (rank.value(states[stage].0), rank.value(counts[stage].0));
                (ended, table, count.get_i64(0))
            });
            let errors: Vec<_> = all.iter().map(|a| &a.0).collect();
            let runs = |k: usize| all[k].0.iter().map(|e| e.0).collect::<Vec<_>>();
            assert_eq!(runs(0).len(), 1, "{mesh}, bad in run {bad_run}: {errors:?}");
            let own = &all[bad_rank].0[0].1;
            assert!(own.contains("index 5 is out of range"), "{own}");
            for k in 0..mesh.devices() {
                assert_eq!(runs(k), runs(0), "{mesh}, bad in run {bad_run}: {errors:?}");
                assert!(k == bad_rank || all[k].0[0].1.contains("another device"), "{errors:?}");
                assert_eq!(all[k].2, all[0].2, "{mesh}, bad in run {bad_run}: a device has written States");
            }
            let error = runs(0)[0];
            let lost = if bad_run == 0 { 1 } else { error - bad_run + 1 };
            assert_eq!(all[0].2, 16 - lost as i64, "{mesh}: bad in run {bad_run}, error in run {error}");
        }
    }
}

/// A message more than there are slots adds one, and runs add none.
#[test]
fn the_memory_of_messages_is_bounded_and_their_times_are_measured() {
    let Some(target) = target() else { return };
    if is_on_cpu() {
        return; // a CPU keeps messages on the board
    }
    let _alone = alone();
    let mesh = Mesh::new(&[(Axis::Pp, 2)]).unwrap();
    let (rows, wide) = (1024, 512);
    let step = Step::new(2, rows, wide);
    let planned = step.stages(&*target, &mesh);
    let largest = calls(&planned[0]).iter().map(|l| transfer::parts(&planned[0].program, l).unwrap().1.nbytes).max();
    let all = each(mesh, 0, open(mesh), |mut rank| {
        let stage = rank.device.at[Axis::Pp as usize];
        step.begin(&mut rank, Some(stage));
        step.batch(&mut rank, 0, 0, rows);
        let loaded = rank.load(&planned[stage]);
        let run = |n: usize| {
            (0..n).for_each(|_| drop(rank.run(&loaded).unwrap_or_else(|f| panic!("{}", f.error))));
            rank.synchronize();
            rank.backend.memory().allocated
        };
        let memory = [run(10), run(100)];
        (memory, rank.times(&loaded))
    });
    for (stage, ([early, late], [times, hidden])) in all.into_iter().enumerate() {
        // At most four more slots, of twice the largest message, on each side; one a run would be far more.
        assert!(late <= early + 16 * largest.unwrap(), "stage {stage}: {early} and {late} bytes");
        let kernels = planned[stage].program.kernels.iter().zip(&times);
        let transfers = kernels.filter(|(k, _)| matches!(k, Kernel::Library(l) if is_transfer(l.op)));
        let seconds: Vec<f64> = transfers.map(|(_, seconds)| *seconds).collect();
        assert!(seconds.iter().all(|s| *s >= 0.0) && seconds.iter().sum::<f64>() > 0.0, "stage {stage}: {times:?}");
        assert!(hidden.iter().all(|seconds| *seconds == 0.0));
    }
}
