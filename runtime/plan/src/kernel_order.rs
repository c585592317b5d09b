//! Orders kernels topologically, so that every read follows its write, and merges similar kernels into one launch.

use crate::gathered_updates;
use crate::horizontal_fusion;
use crate::ir::{Kernel, Value, ValueId};
use crate::lanes::{self, BUCKET_BYTES};
use crate::late_products;
use crate::route::{self, Route};
use perilune_core::id_map::IdMap;
use perilune_core::mesh::Mesh;
use perilune_core::ops::collective;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// For each value, the values that must be computed before it (see `Lowered::control_deps`).
pub(crate) type ControlDeps = FxHashMap<ValueId, SmallVec<[ValueId; 2]>>;

/// Kernels in their order.
pub(crate) struct Sorted {
    pub kernels: Vec<Kernel>,
    /// A result of the last large combination, if products wait for its start: it completes its bucket.
    pub last: Option<ValueId>,
    /// The results of exchanges of terms ([`lanes::term_exchanges`]).
    pub exchanged: FxHashSet<ValueId>,
    pub route: Route,
    /// For each kernel, the bytes that are sent while the products behind it run.
    pub hidden: Vec<usize>,
}

/// Sorts kernels topologically; among the ready ones, the earliest anchor comes first. With `group`, similar kernels
/// that are ready at the same time become one launch. Collectives start as early as they can, and the last large one runs beside
/// products. `host`: the mesh, if its devices may exchange tensors through the host.
pub(crate) fn sort(
    mut kernels: Vec<(u32, Kernel)>,
    values: &[Value],
    control_deps: &ControlDeps,
    group: bool,
    host: Option<&Mesh>,
) -> Sorted {
    let mut writer: Vec<Option<usize>> = vec![None; values.len()];
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        for v in kernel.writes() {
            writer[v.0 as usize] = Some(k);
        }
    }
    let mut users: Vec<SmallVec<[usize; 4]>> = vec![smallvec![]; kernels.len()];
    let mut waits = vec![0usize; kernels.len()];
    let mut producers: Vec<Vec<usize>> = Vec::new();
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        let mut from = kernel.reads();
        if !control_deps.is_empty() {
            from.extend(kernel.writes().iter().filter_map(|v| control_deps.get(v)).flatten());
        }
        let mut from: Vec<usize> = from.iter().filter_map(|v| writer[v.0 as usize]).collect();
        from.sort_unstable();
        from.dedup();
        waits[k] = from.len();
        for w in &from {
            users[*w].push(k);
        }
        producers.push(from);
    }
    if kernels.iter().any(|(_, k)| is_transfer(k)) {
        hasten(&mut kernels, &producers, &users);
    }
    let (mut gathered, mut last) = (vec![None; kernels.len()], None);
    let (mut exchanged, mut route, mut works) = (FxHashSet::default(), Route::Links, Vec::new());
    if kernels.iter().any(|(_, k)| lanes::collective(k).is_some()) {
        lanes::advance(&mut kernels, &producers, &users);
        let exchanges = lanes::term_exchanges(&kernels, &users);
        works = route::works(&kernels, values);
        route =
            host.map_or(route, |mesh| route::choose(&kernels, values, &producers, &users, &works, &exchanges, mesh));
        last = late_products::delay(&mut kernels, values, &producers, &users, &exchanges, &works, route);
        exchanged.extend((0..kernels.len()).filter(|k| exchanges[*k]).flat_map(|k| kernels[k].1.writes()));
        gathered = gathered_updates::order(&mut kernels, values, &users);
    }
    let mut movable = if group { horizontal_fusion::movable(&kernels, values) } else { vec![false; kernels.len()] };
    movable.iter_mut().zip(&gathered).for_each(|(movable, bytes)| *movable |= group && bytes.is_some());
    let mut ready = Ready { gathered, ..Ready::default() };
    for k in (0..kernels.len()).filter(|k| waits[*k] == 0) {
        ready.add(k, &kernels[k], movable[k]);
    }
    let mut order: Vec<Vec<usize>> = Vec::with_capacity(kernels.len());
    let mut done = 0;
    while let Some(batch) = ready.next(&kernels) {
        done += batch.len();
        for &k in &batch {
            for &u in &users[k] {
                waits[u] -= 1;
                if waits[u] == 0 {
                    ready.add(u, &kernels[u], movable[u]);
                }
            }
        }
        order.push(batch);
    }
    assert_eq!(done, kernels.len(), "this is a bug: kernels wait for each other in a circle");
    let (mut hidden, mut behind) = (Vec::new(), 0);
    if last.is_some() {
        for batch in order.iter().rev() {
            hidden.push(behind / route.flops_a_byte());
            behind += batch.iter().map(|k| works[*k]).sum::<usize>();
        }
        hidden.reverse();
    }
    let mut kernels: Vec<Option<Kernel>> = kernels.into_iter().map(|k| Some(k.1)).collect();
    let mut take = |k: usize| kernels[k].take();
    let kernels = order
        .into_iter()
        .filter_map(|batch| match batch[..] {
            [k] => take(k),
            _ => Some(Kernel::Multi(batch.into_iter().filter_map(|k| take(k)?.into_region()).collect())),
        })
        .collect();
    Sorted { kernels, last, exchanged, route, hidden }
}

/// Whether a kernel sends to another pipeline stage, or receives from one.
fn is_transfer(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Library(l) if collective::is_transfer(l.op))
}

/// Moves the anchors of a pipeline stage so that no kernel waits for one of a later pass of the schedule unless it has to.
///
/// A region has the anchor of its last result. If that is the gradient of a bias, which a schedule puts off, the gradient of the inputs
/// in the same region would come late too, and another stage waits for it: no anchor is behind those of the kernels that follow. A
/// product has its own anchor, also if it adds what later passes compute: it comes behind these, so that they are not hastened.
fn hasten(kernels: &mut [(u32, Kernel)], producers: &[Vec<usize>], users: &[SmallVec<[usize; 4]>]) {
    let order = one_by_one(kernels, producers, users);
    for &k in &order {
        if matches!(&kernels[k].1, Kernel::Library(l) if l.epilogue.is_some()) {
            let before = producers[k].iter().map(|p| kernels[*p].0).max();
            kernels[k].0 = kernels[k].0.max(before.unwrap_or(0));
        }
    }
    for &k in order.iter().rev() {
        if let Some(first) = users[k].iter().map(|u| kernels[*u].0).min() {
            kernels[k].0 = kernels[k].0.min(first);
        }
    }
}

/// The order in which kernels would run one by one: among those whose producers are done, the earliest anchor comes first.
pub(crate) fn one_by_one(
    kernels: &[(u32, Kernel)],
    producers: &[Vec<usize>],
    users: &[impl AsRef<[usize]>],
) -> Vec<usize> {
    let mut waits: Vec<usize> = producers.iter().map(Vec::len).collect();
    let ready = (0..kernels.len()).filter(|k| waits[*k] == 0);
    let mut ready: BinaryHeap<Reverse<(u32, usize)>> = ready.map(|k| Reverse((kernels[k].0, k))).collect();
    let mut out = Vec::with_capacity(kernels.len());
    while let Some(Reverse((_, k))) = ready.pop() {
        out.push(k);
        for u in users[k].as_ref() {
            waits[*u] -= 1;
            if waits[*u] == 0 {
                ready.push(Reverse((kernels[*u].0, *u)));
            }
        }
    }
    out
}

/// Kernels whose inputs are computed.
#[derive(Default)]
struct Ready {
    queue: BTreeSet<(u32, usize)>,
    /// The movable ready kernels, by signature.
    alike: FxHashMap<u64, BTreeSet<(u32, usize)>>,
    signatures: IdMap<usize, u64>,
    /// For each kernel, the bytes that are gathered of its results, if nothing else reads them: launches of these are limited.
    gathered: Vec<Option<usize>>,
}

impl Ready {
    fn add(&mut self, k: usize, (anchor, kernel): &(u32, Kernel), movable: bool) {
        self.queue.insert((*anchor, k));
        if let (true, Kernel::Region(r)) = (movable, kernel) {
            let s = horizontal_fusion::signature(r) ^ u64::from(self.gathered[k].is_some());
            self.signatures.insert(k, s);
            self.alike.entry(s).or_default().insert((*anchor, k));
        }
    }

    /// Removes the kernel with the earliest anchor, and the kernels that join its launch.
    fn next(&mut self, kernels: &[(u32, Kernel)]) -> Option<Vec<usize>> {
        let (_, first) = self.queue.pop_first()?;
        let Some(s) = self.signatures.get(&first) else { return Some(vec![first]) };
        let mut batch = Vec::new();
        if let (Some(alike), Kernel::Region(r)) = (self.alike.get_mut(s), &kernels[first].1) {
            let joins = |k: usize| matches!(&kernels[k].1, Kernel::Region(other) if horizontal_fusion::same(r, other));
            let mut gathered = 0;
            let has_room = |at: &(u32, usize)| {
                let before = gathered;
                gathered += self.gathered[at.1].unwrap_or(0);
                before == 0 || gathered <= BUCKET_BYTES
            };
            let joined = alike.iter().copied().filter(|&(_, k)| joins(k)).take_while(has_room);
            let joined: Vec<(u32, usize)> = joined.take(horizontal_fusion::MOST).collect();
            for at in joined {
                batch.push(at.1);
                alike.remove(&at);
                self.queue.remove(&at);
            }
        }
        Some(batch)
    }
}
