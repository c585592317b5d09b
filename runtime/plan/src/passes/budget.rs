//! Fits a step into a memory budget by activation recomputation: chooses which parts of the forward pass the backward
//! pass recomputes.
//!
//! The cheapest cut is tried first. It cuts the recorded forward pass (of each micro-batch) after every product. Norms,
//! activations and other ops between products are then recomputed, but no product, since the next segment reads its
//! value. If that does not suffice, the pass is cut into K segments of about equal size where the fewest bytes cross
//! the cut; in a network of blocks, these are the block boundaries. In both cases as many segments as the budget
//! requires become spans of [`crate::passes::remat`]: those with the least work per byte first, earlier ones before
//! later ones. K grows from 2 until the plan fits: few long segments keep the least between segments, many short ones
//! need the least inside one. The memory of a choice is not estimated; the step is planned with it. The result is a
//! function of the traced step and the budget.

use crate::buffer_desc::BufferDesc;
use crate::ir::{Program, Stage};
use crate::show::products;
use crate::unplanned::Unplanned;
use perilune_core::byte_size;
use perilune_core::error::Error;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::Class;

/// Numbers of segments that are tried, in order.
const SEGMENTS: [usize; 11] = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
/// Number of finer cuts that are tried after the first one that fits, since they may need less work.
const FINER: usize = 2;

type Span = (NodeId, NodeId);

/// Bytes that a step needs while it runs: inputs, outputs and temporaries.
pub fn needs(p: &Program) -> usize {
    if !p.stages.is_empty() {
        return p.stages.iter().map(|stage| needs_along_pp(p, stage)).max().unwrap_or(0);
    }
    let inputs: usize = p.inputs.iter().map(|(shape, dtype)| shape.numel() * dtype.size()).sum();
    inputs + p.outputs.iter().map(BufferDesc::nbytes).sum::<usize>() + p.arena_bytes
}

/// Bytes that a device with these pipeline stages needs.
fn needs_along_pp(p: &Program, stage: &Stage) -> usize {
    let used = p.inputs.iter().zip(&stage.uses).filter(|(_, uses)| **uses);
    let inputs: usize = used.map(|((shape, dtype), _)| shape.numel() * dtype.size()).sum();
    inputs + stage.program.outputs.iter().map(BufferDesc::nbytes).sum::<usize>() + stage.program.arena_bytes
}

/// Finds the plan with the least recomputation that stays within `limit`. `with` plans the step with additional spans.
/// If none fits, the error includes the plan that needs the least memory.
pub(crate) fn fit(
    g: &Graph,
    order: &[NodeId],
    plain: Program,
    limit: usize,
    mut with: impl FnMut(&[Span]) -> Result<Program, Unplanned>,
) -> Result<Program, Unplanned> {
    let passes = forward_passes(g, order);
    let whole = needs(&plain);
    let mut least = plain;
    let mut best: Option<(f64, Program)> = None;
    let mut finer = 0;
    for k in std::iter::once(None).chain(SEGMENTS.map(Some)) {
        let cut = |p: &Forward| k.map_or_else(|| p.cut_behind_products(g), |k| p.cut(g, k));
        let mut parts: Vec<Segment> = passes.iter().flat_map(cut).collect();
        if parts.is_empty() {
            if k.is_none() {
                continue;
            }
            break;
        }
        // The sort is stable: of equal segments, the earlier comes first.
        parts.sort_by(|a, b| a.last.cmp(&b.last).then((a.work / a.bytes).total_cmp(&(b.work / b.bytes))));
        let spans = |m: usize| -> Vec<Span> { parts[..m].iter().map(|p| p.span).collect() };
        let work = |m: usize| -> f64 { parts[..m].iter().map(|p| p.work).sum() };
        let all = with(&spans(parts.len()))?;
        if needs(&all) > limit {
            if needs(&all) < needs(&least) {
                least = all;
            }
        } else {
            let (mut low, mut high, mut found) = (0, parts.len(), all);
            while high - low > 1 {
                let middle = (low + high) / 2;
                let p = with(&spans(middle))?;
                if needs(&p) <= limit {
                    (high, found) = (middle, p);
                } else {
                    low = middle;
                }
            }
            if best.as_ref().is_none_or(|b| work(high) < b.0) {
                best = Some((work(high), found));
            }
        }
        if best.is_some() {
            finer += 1;
            if k.is_none() || finer > FINER {
                break;
            }
        }
    }
    match best {
        Some((_, p)) => Ok(p),
        None => {
            let message = format!(
                "the step needs {}, and {} with all recomputation that helps: the budget is {}",
                byte_size::show(whole),
                byte_size::show(needs(&least)),
                byte_size::show(limit)
            );
            let error = Error::memory("memory_budget", message);
            Err(Unplanned { least: Some(Box::new(least)), ..error.into() })
        }
    }
}

/// The nodes that one forward pass recorded.
struct Forward {
    ids: Vec<NodeId>,
    /// For each node, its bytes and its work.
    bytes: Vec<f64>,
    work: Vec<f64>,
    /// For each node, the bytes produced before it that it or a later node reads.
    crossing: Vec<f64>,
}

struct Segment {
    span: Span,
    bytes: f64,
    work: f64,
    /// Whether the backward pass begins with this segment; recomputing it saves the least.
    last: bool,
}

fn forward_passes(g: &Graph, order: &[NodeId]) -> Vec<Forward> {
    let backward = |at: usize| g.remat.back_of(order[at]).is_some();
    let mut out = Vec::new();
    let mut from = 0;
    while from < order.len() {
        let to = (from..order.len()).find(|at| backward(*at)).unwrap_or(order.len());
        // Segments that no backward pass follows are never recomputed.
        if to > from + 1 && to < order.len() {
            out.push(Forward::new(g, &order[from..to]));
        }
        from = (to..order.len()).find(|at| !backward(*at)).unwrap_or(order.len());
    }
    out
}

impl Forward {
    fn new(g: &Graph, order: &[NodeId]) -> Forward {
        let place = |id: NodeId| order.binary_search(&id).ok();
        let n = order.len();
        // Reading a view reads its base.
        let mut base: Vec<usize> = (0..n).collect();
        let mut last: Vec<usize> = (0..n).collect();
        let (mut bytes, mut work) = (vec![0.0; n], vec![0.0; n]);
        for at in 0..n {
            let node = g.node(order[at]);
            let held = (node.shape.numel() * node.dtype.size()) as f64;
            for x in &node.inputs {
                if let Some(x) = place(*x) {
                    last[base[x]] = at;
                }
            }
            match node.op.class {
                Class::View(_) => {
                    if let Some(x) = node.inputs.first().and_then(|x| place(*x)) {
                        base[at] = base[x];
                    }
                }
                Class::Leaf | Class::Generator(_) => {}
                _ => {
                    bytes[at] = held;
                    work[at] = flops(g, order[at]);
                }
            }
        }
        let mut crossing = vec![0.0; n + 1];
        for at in 0..n {
            if last[at] > at {
                crossing[at + 1] += bytes[at];
                crossing[last[at] + 1] -= bytes[at];
            }
        }
        for at in 1..=n {
            crossing[at] += crossing[at - 1];
        }
        Forward { ids: order.to_vec(), bytes, work, crossing }
    }

    /// Segments that end with a product or with the pass. Their cost is the work before the product.
    fn cut_behind_products(&self, g: &Graph) -> Vec<Segment> {
        let n = self.ids.len();
        let marked = |at: usize| g.remat.spans.iter().any(|s| s.0 < self.ids[at] && self.ids[at] < s.1);
        let mut out = Vec::new();
        let part = |at: usize| matches!(g.node(self.ids[at]).op.class, Class::TupleGet);
        let (mut from, mut bytes, mut work, mut behind) = (0, 0.0, 0.0, false);
        for at in 0..n {
            // An op and the parts of its result stay together.
            behind = products(g, self.ids[at]).is_some() || (behind && part(at));
            if !behind {
                bytes += self.bytes[at];
                work += self.work[at];
            }
            if at + 1 == n || (behind && !part(at + 1) && !marked(at + 1)) {
                let end = self.ids.get(at + 1).copied().unwrap_or(NodeId(self.ids[n - 1].0 + 1));
                if bytes > 0.0 {
                    out.push(Segment { span: (self.ids[from], end), bytes, work, last: at + 1 == n });
                }
                (from, bytes, work) = (at + 1, 0.0, 0.0);
            }
        }
        out
    }

    /// At most `k` segments. Each cut is placed where the fewest bytes cross, within half a segment of its even
    /// position.
    fn cut(&self, g: &Graph, k: usize) -> Vec<Segment> {
        let n = self.ids.len();
        let mut upto = vec![0.0; n + 1];
        for at in 0..n {
            upto[at + 1] = upto[at] + self.bytes[at];
        }
        let share = upto[n] / k as f64;
        let marked = |at: usize| g.remat.spans.iter().any(|s| s.0 < self.ids[at] && self.ids[at] < s.1);
        let mut ends: Vec<usize> = Vec::new();
        for j in 1..k {
            let place = |f: f64| upto.partition_point(|b| *b < share * (j as f64 + f));
            let window = place(-0.5).max(1)..(place(0.5) + 1).min(n);
            let least = window.filter(|at| !marked(*at)).min_by(|a, b| self.crossing[*a].total_cmp(&self.crossing[*b]));
            ends.extend(least.filter(|at| ends.last().is_none_or(|e| e < at)));
        }
        if ends.is_empty() {
            return Vec::new();
        }
        ends.push(n);
        let mut from = 0;
        let mut out = Vec::new();
        for to in ends {
            let end = self.ids.get(to).copied().unwrap_or(NodeId(self.ids[n - 1].0 + 1));
            let (bytes, work) = (upto[to] - upto[from], self.work[from..to].iter().sum());
            if bytes > 0.0 {
                out.push(Segment { span: (self.ids[from], end), bytes, work, last: to == n });
            }
            from = to;
        }
        out
    }
}

/// Approximate cost of recomputing a node.
fn flops(g: &Graph, id: NodeId) -> f64 {
    products(g, id).unwrap_or_else(|| 4.0 * g.shape(id).numel() as f64)
}
