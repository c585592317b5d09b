//! Divides random graphs among devices, with random placements of their inputs, and compares with one device.
//!
//! `PERILUNE_FUZZ_SEED=123` runs one graph, `PERILUNE_FUZZ_COUNT=10000` that many.

use crate::step::difference;
use perilune_core::graph::Node;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Class;
use perilune_core::{DType, Graph, HostTensor, Mesh, Placement, Shape};
use perilune_engine::Engine;
use perilune_plan::request::InputBuffer;
use perilune_plan::{Null, Options, Request};
use perilune_tests::random::{self, Recipe};
use perilune_tests::rng::Pcg;
use perilune_tests::virtual_devices::{self, Spread};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const MESHES: [&str; 7] = ["dp=2", "dp=3", "dp=4", "tp=5", "dp=2,tp=2", "dp=3,tp=2", "dp=2,shard=2,tp=2"];

/// A random placement of a tensor along one axis.
fn along(rng: &mut Pcg, shape: &Shape, devices: usize) -> Along {
    if shape.rank() == 0 || rng.one_in(3) {
        return Along::Replicated;
    }
    let dim = if rng.one_in(2) { 0 } else { rng.below(shape.rank()) };
    let segments: Vec<u8> = (2..=4).filter(|n| shape.dims()[dim].is_multiple_of(usize::from(*n))).collect();
    if rng.one_in(5) && shape.dims()[dim].is_multiple_of(4 * devices) {
        return Along::Sections(dim as u8, *rng.pick(&[[2, 1, 1], [1, 3, 0], [3, 1, 0]]));
    }
    if segments.is_empty() || !rng.one_in(4) {
        Along::Split(dim as u8)
    } else {
        Along::Segments(dim as u8, *rng.pick(&segments))
    }
}

pub fn spread(mesh: &str, rng: &mut Pcg, values: &HashMap<InputBuffer, HostTensor>) -> Spread {
    let mesh = Mesh::parse(mesh).unwrap();
    let mut buffers: Vec<&InputBuffer> = values.keys().collect();
    buffers.sort_by_key(|b| format!("{b:?}"));
    let mut placements = HashMap::new();
    for buffer in buffers {
        let mut placement = Placement::REPLICATED;
        for axis in Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1) {
            // The inner axis splits what the outer ones leave.
            let local = placement.local(&mesh, &[0; Axis::ALL.len()], &values[buffer].shape).unwrap().shape;
            placement = placement.with(axis, along(rng, &local, mesh.size(axis)));
        }
        placements.insert(*buffer, placement);
    }
    Spread { mesh, placements, keeps_weights: rng.below(2) == 1, ..Spread::default() }
}

/// Integers are averaged in f32, and random numbers are f32; all else is in f64.
fn tolerance(g: &Graph) -> f64 {
    let computes = |n: &Node| n.dtype == DType::F32 && !matches!(n.op.class, Class::Generator(_) | Class::View(_));
    if g.nodes().iter().any(computes) { 2e-3 } else { 1e-7 }
}

/// The inputs with other last bits.
fn moved(values: &HashMap<InputBuffer, HostTensor>, k: u64) -> HashMap<InputBuffer, HostTensor> {
    let mut rng = Pcg::new(k);
    let mut buffers: Vec<(&InputBuffer, &HostTensor)> = values.iter().collect();
    buffers.sort_by_key(|b| format!("{:?}", b.0));
    let mut other = |x: &HostTensor| match x.dtype {
        DType::F64 => {
            let all: Vec<f64> = x.to_f64().iter().map(|v| v * (1.0 + rng.range(-4, 5) as f64 * f64::EPSILON)).collect();
            HostTensor::from_f64(x.dtype, x.shape, &all)
        }
        _ => x.clone(),
    };
    buffers.into_iter().map(|(b, x)| (*b, other(x))).collect()
}

/// Compares the devices of a mesh with one device.
pub fn compare(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
) -> Option<String> {
    let one = Spread { mesh: Mesh::ONE, placements: HashMap::new(), ..Spread::default() };
    let (want, _) = match virtual_devices::run(g, request, values, &one) {
        Ok(found) => found,
        Err(e) => return Some(format!("one device: {e}")),
    };
    // Each on its own, in buckets of a few tensors, and in as few as can be.
    let bucket = [0, 256, 4096, Options::default().bucket][g.len() % 4];
    let options = Options { bucket, ..Options::default() };
    let found = match virtual_devices::run_planned(g, request, values, spread, options) {
        Ok((got, _)) => difference(&got, &want, tolerance(g)).filter(|_| {
            // A sum that is 1 but for its last bit, say, and is compared with 1.
            let near = |k| virtual_devices::run(g, request, &moved(values, k), &one);
            (0..6).all(|k| near(k).is_ok_and(|(near, _)| difference(&near, &want, tolerance(g)).is_none()))
        }),
        Err(e) => Some(e),
    };
    let placed = || spread.placements.iter().map(|(b, p)| format!("{b:?} {p}")).collect::<Vec<_>>();
    found.map(|e| format!("{e}\n{:?}", placed()))
}

/// Returns the first difference between the devices of a mesh and one device.
fn fault(recipe: Recipe) -> Option<String> {
    let checked = catch_unwind(AssertUnwindSafe(|| {
        let mut e = Engine::new(Arc::new(Null));
        let made = random::record(&mut e, recipe, recipe.seed % 4 == 3);
        let mut rng = Pcg::new(recipe.seed ^ 0x3e5b);
        let mesh = *rng.pick(&MESHES);
        let spread = spread(mesh, &mut rng, &made.values);
        compare(&e.recorder.graph, &made.request, &made.values, &spread).map(|text| format!("{mesh}: {text}"))
    }));
    checked.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Some(text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default())
    })
}

/// Finds the smallest graph of that seed that still fails, with one root if possible.
fn shrink(mut recipe: Recipe, mut text: String) -> (Recipe, String) {
    for ops in 0..recipe.ops {
        if let Some(found) = fault(Recipe { ops, ..recipe }) {
            (recipe.ops, text) = (ops, found);
            break;
        }
    }
    for root in 0..40 {
        if let Some(found) = fault(Recipe { root: Some(root), ..recipe }) {
            (recipe.root, text) = (Some(root), found);
            break;
        }
    }
    (recipe, text)
}

/// Seeds of graphs that failed once: indices that a collective in flight brings were checked before they had arrived.
const FOUND: [u64; 2] = [380, 792];

#[test]
fn random_graphs_with_random_placements() {
    let one = std::env::var("PERILUNE_FUZZ_SEED").ok().and_then(|s| s.parse::<u64>().ok());
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|s| s.parse().ok()).unwrap_or(300);
    let seeds: Vec<u64> = one.map_or_else(|| (1..=count).chain(FOUND).collect(), |seed| vec![seed]);
    let mut faults = Vec::new();
    for seed in seeds {
        let recipe = Recipe { seed, ops: 3 + (seed % 23) as usize, root: None, big: false };
        if let Some(text) = fault(recipe) {
            let (small, text) = shrink(recipe, text);
            faults.push(format!("{small:?}\n{text}\n{}", random::show_wide(small)));
        }
        if faults.len() >= 5 {
            break;
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
