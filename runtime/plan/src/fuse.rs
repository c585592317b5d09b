//! Groups primitives into clusters by the fusion rules, and decides which values are stored.
//!
//! Greedy and deterministic, one pass in id order. A *cluster* becomes a region. Every cluster has a depth: one more
//! than the deepest kernel it must wait for. Clusters of equal depth cannot depend on each other, so a node may join its
//! producers' cluster, and clusters of one depth may merge, whenever everything else it reads lies less deep. Where a
//! little that a node also reads comes too late (a weight that is cast first, the number of targets that count), a large
//! cluster *sinks* to wait for it, with those that read the cluster, unless that would close a circle: else it would end
//! there, and the node's kernel would read again all that the cluster control_deps.
//!
//! A node joins where it reads a cluster's values element for element (`Full`), row for row (`Row`), or a row value
//! spread over the row. Any other reading goes through memory. After clustering, a value that crosses clusters is either
//! stored, or, if it is cheap to compute again from no more bytes than loading it would take (give or take a row's
//! statistics), computed again by each reader; since every result is rounded as if stored, that changes no bits.
//!
//! Rows that a product wants with zeros behind them are stored so by the cluster that computes them.

use crate::ir::Level;
use crate::lower::Lowered;
use crate::passes::pad_gemm;
use perilune_core::graph::{Node, NodeId};
use perilune_core::ops::{Class, Generator, ReduceFn, movement};
use perilune_core::{DType, Layout, Shape};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Nodes in one cluster: a bound on kernel size, far above what a training step reaches.
const MAX_NODES: usize = 256;
/// Readings from memory in one cluster that walks rows, a thread of which keeps much of a row in registers. Norms and losses have
/// about ten; updates of many States that wait for a loss over rows of their length would have any number.
const MAX_ROW_LOADS: usize = 12;
/// Work an element may cost to be computed again instead of stored and loaded (see `MapFn::flops`).
const MAX_RECOMPUTE: usize = 96;
/// Work of one random number.
const UNIFORM_FLOPS: usize = 40;
/// Part of a value's bytes by which computing it again may read more than loading it would: not storing it is worth more. It
/// lets a normalised row be made again from the row, its mean and its scale.
const SLACK: usize = 16;
/// A cluster waits for a value only if it has at least so many elements for each of the value's.
const WORTH_WAITING: usize = 8;
/// Kernels that may be put off at a time.
const MAX_SINK: usize = 64;
/// Buffers a recomputed value may depend on.
const MAX_FRONTIER: usize = 4;

/// A reduction seen as `outer x reduced x inner`.
#[derive(Clone, Copy, Debug)]
pub struct Fold {
    pub f: ReduceFn,
    pub outer: usize,
    pub reduced: usize,
    pub inner: usize,
}

pub fn fold(node: &Node, input: Shape) -> Option<Fold> {
    let Class::Reduce(f) = node.op.class else { return None };
    let (lo, hi) = (node.attrs[0] as usize, node.attrs[1] as usize);
    let d = input.dims();
    let n = |s: &[usize]| s.iter().product();
    Some(Fold { f, outer: n(&d[..lo]), reduced: n(&d[lo..hi]), inner: n(&d[hi..]) })
}

#[derive(Clone, Debug)]
pub struct Cluster {
    pub depth: u32,
    /// Elements of the iteration space.
    pub numel: usize,
    /// Row length, once a row reduction or spread has fixed it.
    pub cols: Option<usize>,
    /// Batches of a column reduction, once one has fixed it.
    pub batch: Option<usize>,
    pub nodes: Vec<NodeId>,
    /// Readings from memory.
    loads: usize,
    /// Merged into another cluster.
    into: Option<usize>,
}

impl Cluster {
    /// `batch, rows, cols` of the region.
    pub fn space(&self) -> (usize, usize, usize) {
        match self.cols {
            None => (1, 1, self.numel),
            Some(c) => {
                let b = self.batch.unwrap_or(1);
                (b, self.numel.checked_div(b * c).unwrap_or(0), c)
            }
        }
    }

    fn row_count(&self) -> Option<usize> {
        self.cols.map(|c| self.numel.checked_div(c).unwrap_or(0))
    }
}

/// Where a node runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Assignment {
    /// Leaf, generator or view: nowhere.
    None,
    Library {
        depth: u32,
    },
    Cluster(usize),
}

/// The outcome: clusters, where each node runs, and which nodes are written to memory.
#[derive(Debug)]
pub struct Fusion {
    pub clusters: Vec<Cluster>,
    pub assignment: Vec<Assignment>,
    pub level: Vec<Level>,
    pub stored: Vec<bool>,
}

impl Fusion {
    pub fn cluster_of(&self, id: NodeId) -> Option<usize> {
        match self.assignment[id.index()] {
            Assignment::Cluster(k) => Some(find(&self.clusters, k)),
            _ => None,
        }
    }
}

fn find(clusters: &[Cluster], mut k: usize) -> usize {
    while let Some(next) = clusters[k].into {
        k = next;
    }
    k
}

/// How a node of numel `n` reads element positions of a producer with `m` stored elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// Element for element.
    Same,
    /// Each element of the producer for a run of `n / m` neighbours.
    Broadcast,
    Other,
}

pub fn reading(layout: &Layout, n: usize, m: usize) -> Reading {
    if layout.offset != 0 || n == 0 || m == 0 {
        return Reading::Other;
    }
    let (dims, strides) = (layout.shape.dims(), layout.strides());
    match dims.len() {
        0 if n == 1 && m == 1 => Reading::Same,
        1 if n == m && strides[0] == 1 => Reading::Same,
        1 if m == 1 && strides[0] == 0 => Reading::Broadcast,
        2 if dims[0] == m && dims[0] * dims[1] == n && strides == [1, 0] => Reading::Broadcast,
        _ => Reading::Other,
    }
}

/// Groups the lowered step. With `enabled` off every primitive is a kernel of its own.
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
        loaders: HashMap::new(),
        users: HashMap::new(),
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
    /// The latest cluster that reads all of a base in order, by base.
    loaders: HashMap<NodeId, usize>,
    /// Who reads a kernel's values through memory; clusters by the number they had then.
    users: HashMap<Maker, SmallVec<[Maker; 4]>>,
}

/// What makes values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Maker {
    Cluster(usize),
    Library(NodeId),
}

/// What joining a cluster would ask of it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Ask {
    cols: Option<usize>,
    batch: Option<usize>,
}

impl Fuser<'_> {
    /// What makes `base`, if a kernel does.
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

    /// The depth a kernel reading `base` must have at least.
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

    /// The depth that what `id` waits for asks of it.
    fn held(&self, id: NodeId) -> u32 {
        self.low.control_deps(id).iter().map(|w| self.available(self.low.views[w.index()].0)).max().unwrap_or(0)
    }

    /// Puts a cluster off until `depth`, and what reads it until after that, unless one of `before` is among it.
    fn delay(&mut self, k: usize, depth: u32, before: &[Maker]) -> bool {
        let mut put: HashMap<Maker, u32> = HashMap::new();
        let mut queue = vec![(Maker::Cluster(k), depth)];
        while let Some((m, depth)) = queue.pop() {
            if before.contains(&m) || put.len() >= MAX_SINK {
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
                let depth = node.inputs.iter().map(|x| self.available(self.low.views[x.index()].0)).max().unwrap_or(0);
                let depth = depth.max(self.held(id));
                self.out.assignment[id.index()] = Assignment::Library { depth };
                for x in &node.inputs {
                    self.reads(self.low.views[x.index()].0, Maker::Library(id));
                }
                for w in self.low.control_deps(id) {
                    self.reads(self.low.views[w.index()].0, Maker::Library(id));
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

    /// Lets the cluster that computes rows store them with zeros behind, if that is what `id` is.
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

    /// Finds the cluster for a node over `n` elements that reads `reads`; a reduction says how it folds.
    fn place(&mut self, id: NodeId, n: usize, reads: &Reads, fold: Option<Fold>, enabled: bool) {
        let ask = match fold {
            None => Ask::default(),
            Some(f) if f.inner == 1 => Ask { cols: Some(f.reduced), batch: None },
            Some(f) => Ask { cols: Some(f.inner), batch: Some(f.outer) },
        };
        // Producers whose registers the node could read, with the level it would have there.
        let mut direct: SmallVec<[(usize, Level); 3]> = SmallVec::new();
        let held = self.held(id);
        let mut wait = held;
        for (base, layout) in reads {
            match self.register(*base, layout, n, fold.is_some()) {
                Some(found) if enabled => {
                    if !direct.contains(&found) {
                        direct.push(found);
                    }
                }
                _ => wait = wait.max(self.available(*base)),
            }
        }
        let joined = self.join(&direct, wait, n, ask);
        let small = joined.as_ref().map(|j| self.out.clusters[j.0[0]].numel);
        let size = |k: usize| (self.out.clusters[k].numel, self.out.clusters[k].depth);
        let large = direct.iter().copied().max_by_key(|d| size(d.0));
        let large = large.filter(|d| small.is_none_or(|n| self.out.clusters[d.0].numel / WORTH_WAITING >= n));
        // What is held back (`remat`) does not let others wait for it.
        let mut chosen = match large.filter(|d| held == 0 && self.waits(*d, reads, n, fold.is_some(), ask)) {
            Some((k, level)) => Some((self.unite(&[k], ask), level)),
            None => joined.map(|(peers, level)| {
                let peers = self.unread(peers, level, &direct, n, ask);
                (self.unite(&peers, ask), level)
            }),
        };
        if chosen.is_none() {
            // Nothing to join through registers: all readings are loads.
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
            self.reads(self.low.views[w.index()].0, Maker::Cluster(k));
        }
        self.out.clusters[k].nodes.push(id);
        self.out.assignment[id.index()] = Assignment::Cluster(k);
        self.out.level[id.index()] = match fold {
            None => level,
            Some(f) if f.inner == 1 => Level::Row,
            Some(_) => Level::Col,
        };
    }

    /// The deepest of the producers' clusters, to be merged if they are several, where all else that is read lies less
    /// deep.
    fn join(&self, direct: &[(usize, Level)], wait: u32, n: usize, ask: Ask) -> Option<(SmallVec<[usize; 3]>, Level)> {
        let depth_of = |k: usize| self.out.clusters[k].depth;
        let top = direct.iter().map(|d| depth_of(d.0)).max().filter(|top| wait <= *top)?;
        let deepest = direct.iter().filter(|d| depth_of(d.0) == top);
        let level = deepest.clone().next()?.1;
        let peers: SmallVec<[usize; 3]> = deepest.clone().filter(|d| d.1 == level).map(|d| d.0).collect();
        let all = deepest.count() == peers.len() && (peers.len() == 1 || !self.meets_in_a_number(n, peers[0]));
        (all && self.compatible(&peers, ask)).then_some((peers, level))
    }

    /// Whole reductions that only meet in a number (the losses of micro-batches, their weights) stay apart: as one kernel
    /// they would wait for the later one, and hold what both need.
    fn meets_in_a_number(&self, n: usize, peer: usize) -> bool {
        n == 1 && self.out.clusters[peer].numel > 1
    }

    /// Adds the producers that nobody reads yet through memory: they may as well run as late as the others.
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

    /// Lets a cluster wait for whatever else a node over `n` elements reads that joins it, if that is little.
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

    /// Merges compatible clusters of one depth and fixes what is asked.
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

type Reads = SmallVec<[(NodeId, Layout); 3]>;

/// Whether node `id` is its input with rows that a few zeros fill up, as `align` has them.
pub fn fills(low: &Lowered, id: NodeId) -> bool {
    let node = low.graph.node(id);
    let (Some(word), true) = (low.fills, node.op == &movement::PLACE) else { return false };
    let (axis, size) = (node.attrs[0] as usize, node.dtype.size());
    let row = |s: Shape| s.dims().last().map_or(0, |d| d * size);
    let (from, to) = (row(low.graph.shape(node.inputs[0])), row(node.shape));
    axis + 1 == node.shape.rank()
        && node.attrs[1..] == [0, 1, node.attrs[3], 0]
        && to.is_multiple_of(word)
        && (from + 1..from + pad_gemm::LINE).contains(&to)
}

/// Elements of the space that a clustered node works over: its own, or its input's if it reduces or fills up rows.
pub fn source_numel(low: &Lowered, id: NodeId) -> usize {
    let node = low.graph.node(id);
    match node.op.class {
        Class::Reduce(_) | Class::Library => low.graph.shape(node.inputs[0]).numel(),
        _ => node.shape.numel(),
    }
}

/// The readings of a clustered node.
pub fn reads(low: &Lowered, id: NodeId) -> Reads {
    let node = low.graph.node(id);
    match node.op.class {
        Class::Reduce(_) | Class::Library => {
            let x = node.inputs[0];
            std::iter::once(low.read(x, low.graph.shape(x))).collect()
        }
        _ => node.inputs.iter().map(|x| low.read(*x, node.shape)).collect(),
    }
}

/// Whether a node of cluster `k` sees `base` as a register of that cluster.
pub fn in_register(low: &Lowered, f: &Fusion, k: usize, base: NodeId, layout: &Layout, n: usize) -> bool {
    let m = low.graph.shape(base).numel();
    f.cluster_of(base) == Some(k)
        && !fills(low, base)
        && match (f.level[base.index()], reading(layout, n, m)) {
            (Level::Full | Level::Row, Reading::Same) => true,
            (Level::Row, Reading::Broadcast) => n == f.clusters[k].numel,
            _ => false,
        }
}

/// What computing a value again takes.
#[derive(Clone, Default, Debug)]
struct Expr {
    flops: usize,
    frontier: SmallVec<[NodeId; 4]>,
    /// Cannot be computed again: a reduction, or through readings that are not element for element.
    fixed: bool,
}

/// Decides what is stored.
fn decide(low: &Lowered, f: &mut Fusion, enabled: bool) {
    let g = &low.graph;
    let mut crossing: HashMap<NodeId, SmallVec<[(usize, bool); 4]>> = HashMap::new();
    let mut loads: HashMap<usize, Vec<NodeId>> = HashMap::new();
    // What others wait for must have a kernel of its own to wait for.
    for id in low.roots.iter().chain(&low.state_writes).chain(low.control_deps.iter().flatten()) {
        f.stored[id.index()] = true;
    }
    for id in g.ids() {
        match f.assignment[id.index()] {
            Assignment::Library { .. } => {
                f.stored[id.index()] = true;
                for x in &g.node(id).inputs {
                    f.stored[low.views[x.index()].0.index()] = true;
                }
            }
            Assignment::Cluster(_) => {
                let Some(k) = f.cluster_of(id) else { continue };
                let n = source_numel(low, id);
                f.stored[id.index()] |= fills(low, id);
                for (base, layout) in reads(low, id) {
                    if in_register(low, f, k, base, &layout, n) {
                        continue;
                    }
                    if matches!(f.assignment[base.index()], Assignment::Cluster(_)) {
                        let m = g.shape(base).numel();
                        crossing.entry(base).or_default().push((k, reading(&layout, n, m) == Reading::Same));
                    }
                    loads.entry(k).or_default().push(base);
                }
            }
            Assignment::None => {}
        }
    }
    let mut exprs: Vec<Expr> = Vec::new();
    exprs.resize(g.len(), Expr::default());
    for id in g.ids() {
        if !matches!(f.assignment[id.index()], Assignment::Cluster(_)) {
            continue;
        }
        let mut expr = expression(low, f, &exprs, id);
        if let Some(users) = crossing.get(&id)
            && !f.stored[id.index()]
        {
            let bytes = |b: NodeId| g.shape(b).numel() * g.dtype(b).size();
            let cheap = users.iter().all(|(k, same)| {
                let own = loads.get(k);
                let extra: usize =
                    expr.frontier.iter().filter(|b| own.is_none_or(|l| !l.contains(b))).map(|b| bytes(*b)).sum();
                *same && extra <= bytes(id) + bytes(id) / SLACK
            });
            if enabled && !expr.fixed && expr.flops <= MAX_RECOMPUTE && expr.frontier.len() <= MAX_FRONTIER && cheap {
                // Its readers read its frontier instead.
                for (k, _) in users {
                    loads.entry(*k).or_default().extend(expr.frontier.iter().copied());
                }
                for b in &expr.frontier {
                    if matches!(f.assignment[b.index()], Assignment::Cluster(_)) {
                        f.stored[b.index()] = true;
                    }
                }
            } else if let Some(base) = widened(low, f, id).filter(|_| enabled && users.iter().all(|u| u.1)) {
                // What it was made of goes to memory, and its readers cast.
                for (k, _) in users {
                    loads.entry(*k).or_default().push(base);
                }
                f.stored[base.index()] = true;
                expr = Expr { flops: 1, frontier: SmallVec::from_slice(&[base]), fixed: false };
            } else {
                f.stored[id.index()] = true;
            }
        }
        exprs[id.index()] = expr;
    }
}

/// What a node in f64 is the cast of, where that is narrower and computed beside it. (The loss's sum over rows is in f64, and a
/// kernel of long rows has no registers left to make f64 of what it stores.)
fn widened(low: &Lowered, f: &Fusion, id: NodeId) -> Option<NodeId> {
    let node = low.graph.node(id);
    let (base, layout) = reads(low, id).into_iter().next()?;
    let from = low.graph.node(base);
    let same = reading(&layout, node.shape.numel(), from.shape.numel()) == Reading::Same;
    let cast = matches!(node.op.class, Class::Cast) && node.dtype == DType::F64 && from.dtype.size() < 8;
    (cast && same && f.cluster_of(base).is_some() && low.graph.generator(base).is_none()).then_some(base)
}

/// What node `id` would take to compute again, given what is stored so far.
fn expression(low: &Lowered, f: &Fusion, exprs: &[Expr], id: NodeId) -> Expr {
    let g = &low.graph;
    let node = g.node(id);
    let mut out = Expr::default();
    match node.op.class {
        Class::Map(m) => out.flops = m.flops(),
        Class::Cast => out.flops = 1,
        _ => {
            out.fixed = true;
            return out;
        }
    }
    for (base, layout) in reads(low, id) {
        let b = base.index();
        if let Some(kind) = g.generator(base) {
            out.flops += if kind == Generator::Uniform { UNIFORM_FLOPS } else { 0 };
            continue;
        }
        let same = reading(&layout, node.shape.numel(), g.shape(base).numel()) == Reading::Same;
        let again = matches!(f.assignment[b], Assignment::Cluster(_)) && !f.stored[b] && same && !exprs[b].fixed;
        if again {
            out.flops += exprs[b].flops;
            for &x in &exprs[b].frontier {
                if !out.frontier.contains(&x) {
                    out.frontier.push(x);
                }
            }
        } else if !out.frontier.contains(&base) {
            out.frontier.push(base);
        }
    }
    // A long frontier is not worth carrying.
    if out.frontier.len() > MAX_FRONTIER || out.flops > MAX_RECOMPUTE {
        out.fixed = true;
        out.frontier.clear();
    }
    out
}

impl Fusion {
    /// The row count of the cluster, if rows are fixed.
    pub fn rows(&self, k: usize) -> Option<usize> {
        self.clusters[k].row_count()
    }
}
