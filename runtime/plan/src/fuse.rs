//! Groups primitives into clusters that share a kernel (kernel fusion).
//!
//! The algorithm is greedy and deterministic: one pass in id order. A *cluster* becomes a region. Every cluster has a
//! depth: one more than that of the deepest kernel that it must wait for. Clusters of equal depth cannot depend on each
//! other. So a node may join its producers' cluster, and clusters of one depth may merge, if everything else that the
//! node reads has a lower depth. If a small value that a node also reads is computed later (a weight that is cast
//! first, the number of valid targets), a large cluster is *delayed* until after it, together with the readers of the
//! cluster, unless that would create a cycle. Otherwise the cluster would end there, and the node's kernel would reload
//! everything that the cluster holds in registers.
//!
//! A node joins a cluster if it reads the cluster's values element for element (`Full`), row for row (`Row`), or as a
//! row value broadcast over the row. Every other read goes through memory. `recompute` then decides which values are
//! stored.
//!
//! If a product needs rows padded with zeros, the cluster that computes the rows stores them padded.

use crate::cluster::{Assignment, Cluster, Fold, Fusion, Reads, fills, find, fold, reads};
use crate::ir::Level;
use crate::lowered::Lowered;
use crate::reading::{Reading, reading};
use crate::recompute::decide;
use perilune_core::Layout;
use perilune_core::graph::NodeId;
use perilune_core::id_map::IdMap;
use perilune_core::ops::Class;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Maximum nodes in one cluster: a bound on kernel size, far above what a training step reaches.
const MAX_NODES: usize = 256;
/// Maximum reads from memory in a cluster that iterates over rows, since each thread keeps much of a row in registers.
/// Norms and losses have about ten. Without a limit, the updates of many States that wait for a loss over rows of their
/// length would all join.
const MAX_ROW_LOADS: usize = 12;
/// A cluster waits for a value only if it has at least this many elements per element of the value.
const WORTH_WAITING: usize = 8;
/// Maximum number of kernels that one delay may move.
const MAX_DELAYED: usize = 64;

/// Groups the nodes of a lowered step. Without `enabled`, every primitive is a separate kernel.
pub fn fuse(low: &Lowered, enabled: bool) -> Fusion {
    let count = low.graph.len();
    let mut f = Fuser {
        low,
        out: Fusion {
            clusters: Vec::new(),
            assignment: vec![Assignment::None; count],
            level: vec![Level::Full; count],
            stored: vec![false; count],
        },
        loaders: IdMap::default(),
        users: IdMap::default(),
    };
    for id in low.graph.ids() {
        f.visit(id, enabled);
    }
    let mut out = f.out;
    decide(low, &mut out, enabled);
    out
}

struct Fuser<'a> {
    low: &'a Lowered,
    out: Fusion,
    /// For each base, the latest cluster that reads all of it in order.
    loaders: IdMap<NodeId, usize>,
    /// The kernels that read a kernel's values through memory. Clusters are numbered as they were at that time.
    users: IdMap<Maker, SmallVec<[Maker; 4]>>,
}

/// A kernel that computes values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Maker {
    Cluster(usize),
    Library(NodeId),
}

/// The row length and batches that a node requires of its cluster.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Ask {
    cols: Option<usize>,
    batch: Option<usize>,
}

impl Fuser<'_> {
    /// Returns the kernel that computes `base`, if there is one.
    fn maker(&self, base: NodeId) -> Option<Maker> {
        match self.out.assignment[base.index()] {
            Assignment::None => None,
            Assignment::Library { .. } => {
                let node = self.low.graph.node(base);
                Some(Maker::Library(if matches!(node.op.class, Class::TupleGet) { node.inputs[0] } else { base }))
            }
            Assignment::Cluster(k) => Some(Maker::Cluster(find(&self.out.clusters, k))),
        }
    }

    fn depth(&self, m: Maker) -> u32 {
        match m {
            Maker::Cluster(k) => self.out.clusters[find(&self.out.clusters, k)].depth,
            Maker::Library(id) => match self.out.assignment[id.index()] {
                Assignment::Library { depth } => depth,
                _ => 0,
            },
        }
    }

    /// The minimum depth of a kernel that reads `base`.
    fn available(&self, base: NodeId) -> u32 {
        self.maker(base).map_or(0, |m| self.depth(m) + 1)
    }

    fn reads(&mut self, base: NodeId, by: Maker) {
        if let Some(m) = self.maker(base).filter(|m| *m != by) {
            let users = self.users.entry(m).or_default();
            if !users.contains(&by) {
                users.push(by);
            }
        }
    }

    /// The minimum depth that the control dependencies of `id` allow.
    fn held(&self, id: NodeId) -> u32 {
        self.low.control_deps(id).iter().map(|w| self.available(self.low.views.owner(*w))).max().unwrap_or(0)
    }

    /// Delays a cluster to `depth`, and its readers beyond that; fails if one of `before` is among them.
    fn delay(&mut self, k: usize, depth: u32, before: &[Maker]) -> bool {
        let mut put: FxHashMap<Maker, u32> = FxHashMap::default();
        let mut queue = vec![(Maker::Cluster(k), depth)];
        while let Some((m, depth)) = queue.pop() {
            if before.contains(&m) || put.len() >= MAX_DELAYED {
                return false;
            }
            if self.depth(m) >= depth || put.get(&m).is_some_and(|d| *d >= depth) {
                continue;
            }
            put.insert(m, depth);
            for user in self.users.get(&m).into_iter().flatten() {
                let user = match *user {
                    Maker::Cluster(k) => Maker::Cluster(find(&self.out.clusters, k)),
                    library => library,
                };
                if user != m {
                    queue.push((user, depth + 1));
                }
            }
        }
        for (m, depth) in put {
            match m {
                Maker::Cluster(k) => self.out.clusters[k].depth = depth,
                Maker::Library(id) => self.out.assignment[id.index()] = Assignment::Library { depth },
            }
        }
        true
    }

    fn visit(&mut self, id: NodeId, enabled: bool) {
        let node = self.low.graph.node(id);
        match node.op.class {
            Class::Library if enabled && self.fill(id) => {}
            Class::Library | Class::Fused(_) => {
                let depth = node.inputs.iter().map(|x| self.available(self.low.views.owner(*x))).max().unwrap_or(0);
                let depth = depth.max(self.held(id));
                self.out.assignment[id.index()] = Assignment::Library { depth };
                for x in &node.inputs {
                    self.reads(self.low.views.owner(*x), Maker::Library(id));
                }
                for w in self.low.control_deps(id) {
                    self.reads(self.low.views.owner(*w), Maker::Library(id));
                }
            }
            Class::TupleGet => self.out.assignment[id.index()] = self.out.assignment[node.inputs[0].index()],
            Class::Map(_) | Class::Cast => {
                let n = node.shape.numel();
                let reads: Reads = node.inputs.iter().map(|x| self.low.read(*x, node.shape)).collect();
                self.place(id, n, &reads, None, enabled);
            }
            Class::Reduce(_) => {
                let x = node.inputs[0];
                let shape = self.low.graph.shape(x);
                let reads: Reads = std::iter::once(self.low.read(x, shape)).collect();
                self.place(id, shape.numel(), &reads, fold(node, shape), enabled);
            }
            _ => {}
        }
    }

    /// Adds `id` to the cluster that computes its input, if it pads rows with zeros.
    fn fill(&mut self, id: NodeId) -> bool {
        if !fills(self.low, id) || !self.low.control_deps(id).is_empty() {
            return false;
        }
        let x = self.low.graph.shape(self.low.graph.node(id).inputs[0]);
        let (base, layout) = reads(self.low, id)[0];
        let Some((k, Level::Full)) = self.register(base, &layout, x.numel(), false) else { return false };
        let ask = Ask { cols: x.dims().last().copied(), batch: None };
        if self.out.clusters[k].numel != x.numel() || !self.compatible(&[k], ask) {
            return false;
        }
        let k = self.unite(&[k], ask);
        self.out.clusters[k].nodes.push(id);
        self.out.assignment[id.index()] = Assignment::Cluster(k);
        true
    }

    /// Finds the cluster for a node over `n` elements that reads `reads`. `fold` describes a reduction.
    fn place(&mut self, id: NodeId, n: usize, reads: &Reads, fold: Option<Fold>, enabled: bool) {
        let ask = match fold {
            None => Ask::default(),
            Some(f) if f.inner == 1 => Ask { cols: Some(f.reduced), batch: None },
            Some(f) => Ask { cols: Some(f.inner), batch: Some(f.outer) },
        };
        // Producers whose registers the node could read, each with the node's level there.
        let mut direct: SmallVec<[(usize, Level); 3]> = SmallVec::new();
        let held = self.held(id);
        let mut wait = held;
        // Kernels that must end before the node's begins.
        let mut before: SmallVec<[Maker; 3]> =
            self.low.control_deps(id).iter().filter_map(|w| self.maker(self.low.views.owner(*w))).collect();
        for (base, layout) in reads {
            match self.register(*base, layout, n, fold.is_some()) {
                Some(found) if enabled => {
                    if !direct.contains(&found) {
                        direct.push(found);
                    }
                }
                _ => {
                    wait = wait.max(self.available(*base));
                    before.extend(self.maker(*base));
                }
            }
        }
        let joined = self.join(&direct, wait, n, ask);
        let small = joined.as_ref().map(|j| self.out.clusters[j.0[0]].numel);
        let size = |k: usize| (self.out.clusters[k].numel, self.out.clusters[k].depth);
        let large = direct.iter().copied().max_by_key(|d| size(d.0));
        let large = large.filter(|d| small.is_none_or(|n| self.out.clusters[d.0].numel / WORTH_WAITING >= n));
        // A recomputed node with control dependencies does not delay other kernels.
        let mut chosen = match large.filter(|d| held == 0 && self.waits(*d, reads, n, fold.is_some(), ask)) {
            Some((k, level)) => Some((self.unite(&[k], ask), level)),
            None => joined.map(|(peers, level)| {
                let producers: SmallVec<[(usize, Level); 3]> =
                    direct.iter().copied().filter(|d| !before.contains(&Maker::Cluster(d.0))).collect();
                let peers = self.unread(peers, level, &producers, n, ask);
                (self.unite(&peers, ask), level)
            }),
        };
        if chosen.is_none() {
            // There is no cluster to join through registers: all reads are loads.
            for (base, _) in reads {
                wait = wait.max(self.available(*base));
            }
            if enabled {
                let sibling = reads.iter().find_map(|(base, layout)| {
                    let k = find(&self.out.clusters, *self.loaders.get(base)?);
                    let c = &self.out.clusters[k];
                    let m = self.low.graph.shape(*base).numel();
                    (c.depth == wait
                        && c.numel == n
                        && reading(layout, n, m) == Reading::Same
                        && self.compatible(&[k], ask))
                    .then_some(k)
                });
                if let Some(k) = sibling {
                    chosen = Some((self.unite(&[k], ask), Level::Full));
                }
            }
        }
        let (k, level) = chosen.unwrap_or_else(|| {
            self.out.clusters.push(Cluster {
                depth: wait,
                numel: n,
                cols: ask.cols,
                batch: ask.batch,
                nodes: Vec::new(),
                loads: 0,
                into: None,
            });
            (self.out.clusters.len() - 1, Level::Full)
        });
        for (base, layout) in reads {
            let m = self.low.graph.shape(*base).numel();
            if self.out.cluster_of(*base) == Some(k) {
                continue;
            }
            self.out.clusters[k].loads += usize::from(m > 1);
            if reading(layout, n, m) == Reading::Same && level == Level::Full {
                self.loaders.insert(*base, k);
            }
        }
        for (base, _) in reads {
            self.reads(*base, Maker::Cluster(k));
        }
        for w in self.low.control_deps(id) {
            self.reads(self.low.views.owner(*w), Maker::Cluster(k));
        }
        self.out.clusters[k].nodes.push(id);
        self.out.assignment[id.index()] = Assignment::Cluster(k);
        self.out.level[id.index()] = match fold {
            None => level,
            Some(f) if f.inner == 1 => Level::Row,
            Some(_) => Level::Col,
        };
    }

    /// Returns the deepest of the producers' clusters, to be merged if there are several, provided that everything else
    /// that is read has a lower depth.
    fn join(&self, direct: &[(usize, Level)], wait: u32, n: usize, ask: Ask) -> Option<(SmallVec<[usize; 3]>, Level)> {
        let depth_of = |k: usize| self.out.clusters[k].depth;
        let top = direct.iter().map(|d| depth_of(d.0)).max().filter(|top| wait <= *top)?;
        let deepest = direct.iter().filter(|d| depth_of(d.0) == top);
        let level = deepest.clone().next()?.1;
        let peers: SmallVec<[usize; 3]> = deepest.clone().filter(|d| d.1 == level).map(|d| d.0).collect();
        let all = deepest.count() == peers.len() && (peers.len() == 1 || !self.meets_in_a_number(n, peers[0]));
        (all && self.compatible(&peers, ask)).then_some((peers, level))
    }

    /// Full reductions that are only combined as scalars (the losses of micro-batches, their weights) stay separate:
    /// one kernel would wait for the later one and keep the inputs of both alive.
    fn meets_in_a_number(&self, n: usize, peer: usize) -> bool {
        n == 1 && self.out.clusters[peer].numel > 1
    }

    /// Adds the producers that no kernel has read through memory yet; they can run as late as the others. `direct` has none
    /// that must end before the node's kernel begins.
    fn unread(
        &mut self,
        mut peers: SmallVec<[usize; 3]>,
        level: Level,
        direct: &[(usize, Level)],
        n: usize,
        ask: Ask,
    ) -> SmallVec<[usize; 3]> {
        if self.meets_in_a_number(n, peers[0]) {
            return peers;
        }
        let depth = self.out.clusters[peers[0]].depth;
        for &(k, at) in direct.iter().filter(|d| !peers.contains(&d.0)).collect::<SmallVec<[_; 3]>>() {
            let unread = self.users.get(&Maker::Cluster(k)).is_none_or(SmallVec::is_empty);
            peers.push(k);
            if unread && at == level && self.compatible(&peers, ask) {
                self.out.clusters[k].depth = depth;
            } else {
                peers.pop();
            }
        }
        peers
    }

    /// Delays a cluster until after everything else that a joining node over `n` elements reads, if that is small.
    fn waits(&mut self, to: (usize, Level), reads: &Reads, n: usize, reduces: bool, ask: Ask) -> bool {
        let c = &self.out.clusters[to.0];
        let (room, mut depth) = (c.numel / WORTH_WAITING, c.depth);
        let mut before: SmallVec<[Maker; 3]> = SmallVec::new();
        for (base, layout) in reads {
            match self.maker(*base) {
                None => {}
                Some(Maker::Cluster(k)) if k == to.0 && self.register(*base, layout, n, reduces) == Some(to) => {}
                Some(Maker::Cluster(k)) if k == to.0 => return false,
                Some(_) if self.low.graph.shape(*base).numel() > room => return false,
                Some(m) => {
                    depth = depth.max(self.depth(m) + 1);
                    before.push(m);
                }
            }
        }
        self.compatible(&[to.0], ask) && self.delay(to.0, depth, &before)
    }

    /// The cluster and level at which a node over `n` elements reads `base` as a register.
    fn register(&self, base: NodeId, layout: &Layout, n: usize, reduces: bool) -> Option<(usize, Level)> {
        let k = self.out.cluster_of(base).filter(|_| !fills(self.low, base))?;
        let c = &self.out.clusters[k];
        let m = self.low.graph.shape(base).numel();
        let how = reading(layout, n, m);
        match (self.out.level[base.index()], how) {
            (Level::Full, Reading::Same) => Some((k, Level::Full)),
            (Level::Row, Reading::Same) if !reduces => Some((k, Level::Row)),
            (Level::Row, Reading::Broadcast) if n == c.numel => Some((k, Level::Full)),
            _ => None,
        }
    }

    fn compatible(&self, peers: &[usize], ask: Ask) -> bool {
        let mut sum = ask;
        let (mut nodes, mut loads) = (1, 0);
        for &k in peers {
            let c = &self.out.clusters[k];
            nodes += c.nodes.len();
            loads += c.loads;
            if c.numel != self.out.clusters[peers[0]].numel {
                return false;
            }
            for (a, b) in [(&mut sum.cols, c.cols), (&mut sum.batch, c.batch)] {
                match (*a, b) {
                    (Some(x), Some(y)) if x != y => return false,
                    (None, Some(y)) => *a = Some(y),
                    _ => {}
                }
            }
        }
        nodes <= MAX_NODES && (sum.cols.is_none() || loads <= MAX_ROW_LOADS)
    }

    /// Merges compatible clusters of one depth and determines rows and batches.
    fn unite(&mut self, peers: &[usize], ask: Ask) -> usize {
        let keep = peers[0];
        let mut sum = ask;
        for &k in &peers[1..] {
            let c = &mut self.out.clusters[k];
            c.into = Some(keep);
            sum = Ask { cols: sum.cols.or(c.cols), batch: sum.batch.or(c.batch) };
            let (nodes, loads) = (std::mem::take(&mut c.nodes), c.loads);
            self.out.clusters[keep].nodes.extend(nodes);
            self.out.clusters[keep].loads += loads;
            if let Some(users) = self.users.remove(&Maker::Cluster(k)) {
                self.users.entry(Maker::Cluster(keep)).or_default().extend(users);
            }
        }
        let c = &mut self.out.clusters[keep];
        c.cols = c.cols.or(sum.cols);
        c.batch = c.batch.or(sum.batch);
        keep
    }
}
