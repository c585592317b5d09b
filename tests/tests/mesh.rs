//! Programs for meshes: one program, run with the run-time numbers of each device, makes the parts of one global tensor.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis, Combine};
use perilune_core::ops::{create, random};
use perilune_core::{DType, Graph, HostTensor, Interrupt, Mesh, Placement, Shape};
use perilune_cpu::Cpu;
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, Options, Request, RunContext, Tracer, pipeline};
use std::sync::Arc;

/// A graph with a seed and a step, so that no number is that of element 0 by chance.
fn graph() -> Graph {
    let mut g = Graph::new();
    (g.rng.seed, g.rng.step) = (0x1234_5678_9abc, 7);
    g
}

/// Plans the roots, and returns the recorded run-time numbers too.
fn plan(g: &Graph, roots: &[NodeId], cpu: &Cpu) -> (Arc<Program>, Tracer) {
    let (mut tracer, request) = (Tracer::default(), Request { roots: roots.to_vec(), ..Request::default() });
    tracer.run(g, &request, |_| None);
    let program = pipeline::plan(g, &tracer, &request, Options::default(), cpu).unwrap();
    perilune_plan::check::check(&program).unwrap();
    (Arc::new(program), tracer)
}

/// What a device computes.
fn run(cpu: &Cpu, program: &Arc<Program>, recorded: &[u64], mesh: &Mesh, rank: usize) -> Vec<HostTensor> {
    let exec = cpu.compile(program.clone()).unwrap();
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| cpu.alloc(desc).unwrap()).collect();
    let numbers = program.numbers(recorded, &mesh.coordinates(rank));
    exec.run(&[], &numbers, &outputs, RunContext::new(&Interrupt::default())).unwrap_or_else(|f| panic!("{}", f.error));
    outputs.iter().map(|b| HostTensor::new(b.desc().dtype, b.desc().shape, cpu.download(b).unwrap())).collect()
}

/// Numbers of a shape: uniform ones, and their index in the whole tensor plus a recorded number.
fn record(g: &mut Graph, shape: Shape, mesh: &Mesh, placement: &Placement) -> Vec<NodeId> {
    let uniform = random::draw(g, shape).unwrap();
    let part = create::shard(g, uniform, mesh, placement).unwrap();
    // A map over the part and, for a matrix, a sum of its rows: the loads are those of fused kernels.
    let scaled = g.mul_c(part, 3.0).unwrap();
    let mut roots = vec![part, scaled];
    if shape.rank() == 2 {
        roots.push(g.permute(part, &[1, 0]).unwrap());
    }
    if shape.rank() == 1 {
        let ramp = create::iota(g, shape.numel()).unwrap();
        let ramp = create::shard(g, ramp, mesh, placement).unwrap();
        let offset = g.scalar(perilune_core::Number::Int(100), DType::I64);
        let offset = g.expand(offset, g.shape(ramp)).unwrap();
        roots.push(ramp);
        roots.push(g.add_(ramp, offset).unwrap());
    }
    roots
}

/// Compares the parts of all devices with the tensor that one device makes; returns how many elements were compared.
fn check(cpu: &Cpu, shape: &[usize], mesh: &str, placement: Placement) -> usize {
    let (shape, mesh) = (Shape::of(shape), Mesh::parse(mesh).unwrap());
    let what = format!("{shape} on {mesh}, {placement}");
    let mut one = graph();
    let roots = record(&mut one, shape, &Mesh::ONE, &placement);
    let (whole, tracer) = plan(&one, &roots, cpu);
    assert!(whole.starts.is_empty(), "{what}: one device has a start");
    let want = run(cpu, &whole, &tracer.trace.slots, &Mesh::ONE, 0);
    let mut many = graph();
    let roots = record(&mut many, shape, &mesh, &placement);
    let (program, tracer) = plan(&many, &roots, cpu);
    assert!(!program.starts.is_empty() && program.slots.len() == tracer.trace.slots.len() + program.starts.len());
    let mut compared = 0;
    for rank in 0..mesh.devices() {
        let local = placement.local(&mesh, &mesh.coordinates(rank), &shape).unwrap();
        let got = run(cpu, &program, &tracer.trace.slots, &mesh, rank);
        assert_eq!(got.len(), want.len());
        for (k, (part, whole)) in got.iter().zip(&want).enumerate() {
            // Result 2 of a matrix is transposed.
            let turned = shape.rank() == 2 && k == 2;
            for i in 0..local.valid.numel() {
                let (mut rest, mut from, mut at, mut step) = (i, 0, 0, 1);
                for d in (0..shape.rank()).rev() {
                    let c = rest % local.valid.dims()[d];
                    rest /= local.valid.dims()[d];
                    let (stride, pitch) = match (turned, d) {
                        (true, 0) => (1, 1),
                        (true, _) => (shape.dims()[0], local.shape.dims()[0]),
                        _ => (shape.strides()[d] as usize, step),
                    };
                    from += (local.start[d] + c) * stride;
                    at += c * pitch;
                    step *= local.shape.dims()[d];
                }
                assert_eq!(part.get_f64(at), whole.get_f64(from), "{what}: result {k} of device {rank}, element {i}");
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn two_devices_make_the_halves_of_one_random_tensor() {
    let cpu = Cpu::new(Some(1));
    let halves = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    assert_eq!(check(&cpu, &[1000], "dp=2", halves), 4000);
    assert_eq!(check(&cpu, &[6, 40], "dp=2", halves), 720);
}

#[test]
fn parts_of_any_shape_are_those_of_the_whole_tensor() {
    let cpu = Cpu::new(Some(2));
    let at = |list: &[(Axis, u8)]| list.iter().fold(Placement::REPLICATED, |p, (a, d)| p.with(*a, Along::Split(*d)));
    // Starts beside a group of four numbers, uneven parts, inner dims, and dims that two axes split.
    check(&cpu, &[7], "dp=4", at(&[(Axis::Dp, 0)]));
    check(&cpu, &[4099], "dp=3", at(&[(Axis::Dp, 0)]));
    check(&cpu, &[5, 13], "tp=4", at(&[(Axis::Tp, 1)]));
    check(&cpu, &[6, 16], "dp=3,tp=2", at(&[(Axis::Dp, 0), (Axis::Tp, 1)]));
    check(&cpu, &[70, 30], "dp=2,tp=4", at(&[(Axis::Tp, 0), (Axis::Dp, 1)]));
    check(&cpu, &[26], "dp=2,shard=3", at(&[(Axis::Dp, 0), (Axis::Shard, 0)]));
    // Axes that split nothing do not matter.
    check(&cpu, &[64], "pp=2,dp=2,tp=2", at(&[(Axis::Dp, 0)]));
}

#[test]
fn only_meshes_record_parts_and_only_of_what_is_generated() {
    let mesh = Mesh::parse("dp=2").unwrap();
    let halves = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    let mut g = graph();
    let x = random::draw(&mut g, Shape::of(&[8])).unwrap();
    assert_eq!(create::shard(&mut g, x, &Mesh::ONE, &halves).unwrap(), x);
    assert_eq!(create::shard(&mut g, x, &mesh, &Placement::REPLICATED).unwrap(), x);
    let partial = Placement::REPLICATED.with(Axis::Dp, Along::Partial(Combine::Sum));
    assert!(create::shard(&mut g, x, &mesh, &partial).is_err());
    let y = g.mul_c(x, 2.0).unwrap();
    let e = create::shard(&mut g, y, &mesh, &halves).unwrap_err();
    assert_eq!(e.message, "mul is stored; only random numbers and index ramps are made in parts");
    // Another mesh is another plan; another device of a mesh is not.
    let cpu = Cpu::new(Some(1));
    let key = |mesh: &str| {
        let mut g = graph();
        let roots = record(&mut g, Shape::of(&[24]), &Mesh::parse(mesh).unwrap(), &halves);
        plan(&g, &roots, &cpu).1.trace.key
    };
    assert!(key("dp=2") == key("dp=2") && key("dp=2") != key("dp=4") && key("dp=2") != key(""));
}
