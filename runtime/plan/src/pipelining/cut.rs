//! Cuts a model into pipeline stages: decides which stage stores which State.
//!
//! The forward pass of the first micro-batch, in recording order, is cut where a State is first read. Of all cuts, those are considered
//! whose largest stage has at most an eighth more work than it must have; the one that sends the fewest bytes is taken, of several the
//! one with the least work in its largest stage. Work counts the operations of all nodes, so the embedding and the head count as what
//! they cost. A State belongs to the stage that reads it first; another stage that reads it too (a tied weight) receives its value in
//! each step, and sends its gradient back.

use crate::key::Trace;
use crate::request::InputBuffer;
use crate::show::products;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::Class;
use rustc_hash::FxHashMap;

/// Which stage stores which State.
#[derive(Clone, Debug, Default)]
pub struct Cut {
    /// The stage of each State that the forward pass reads, by payload.
    pub stages: FxHashMap<u64, usize>,
    pub costs: Vec<StageCost>,
}

/// What a stage does in the forward pass of one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageCost {
    /// Operations of all nodes.
    pub flops: u64,
    /// Bytes that come from the stage before.
    pub received: u64,
}

/// A part of the forward pass that begins where a State is first read.
struct Segment {
    flops: u64,
    /// Bytes computed before it that it or a later one reads.
    crossing: u64,
    /// States that are first read here.
    states: Vec<u64>,
    /// Whether it has a product that reads a State.
    is_layer: bool,
}

/// Cuts the traced step for `stages` stages.
pub fn cut(g: &Graph, trace: &Trace, stages: usize) -> Result<Cut> {
    let end = trace.order.iter().position(|id| g.remat.back_of(*id).is_some()).unwrap_or(trace.order.len());
    let segments = segments(g, trace, end);
    let layers = segments.iter().filter(|s| s.is_layer).count();
    if layers < stages {
        let message = format!(
            "{stages} stages: the model has {layers} of the {stages} layers with weights that as many stages need"
        );
        return Err(Error::argument("mesh", message).hint("use a smaller pp, fewer chunks, or a deeper model"));
    }
    let starts = best(&segments, stages);
    let mut out = Cut { costs: vec![StageCost::default(); stages], ..Cut::default() };
    let mut stage = 0;
    for (k, segment) in segments.iter().enumerate() {
        if starts.get(stage + 1) == Some(&k) {
            stage += 1;
            out.costs[stage].received = segment.crossing;
        }
        out.costs[stage].flops += segment.flops;
        out.stages.extend(segment.states.iter().map(|state| (*state, stage)));
    }
    Ok(out)
}

fn segments(g: &Graph, trace: &Trace, end: usize) -> Vec<Segment> {
    let order = &trace.order[..end];
    let place = |id: NodeId| order.binary_search(&id).ok();
    let input = |at: usize| trace.leaves[at].map(|k| trace.inputs[k as usize]);
    // The State that a node is, or is a view or cast of.
    let mut weight: Vec<Option<u64>> = vec![None; end];
    // Whether a node depends on a State, so that its value belongs to a stage.
    let mut pinned = vec![false; end];
    let mut base: Vec<usize> = (0..end).collect();
    let mut last_read = vec![0; end];
    let mut known: Vec<u64> = Vec::new();
    let mut out = vec![Segment { flops: 0, crossing: 0, states: Vec::new(), is_layer: false }];
    let mut begins: Vec<usize> = vec![0];
    let mut pending: Vec<u64> = Vec::new();
    for at in 0..end {
        let node = g.node(order[at]);
        match input(at) {
            Some(InputBuffer::State(state)) => {
                (weight[at], pinned[at]) = (Some(state), true);
                continue;
            }
            Some(InputBuffer::Leaf(_)) => continue,
            None => {}
        }
        let inputs: Vec<usize> = node.inputs.iter().filter_map(|x| place(*x)).collect();
        pinned[at] = inputs.iter().any(|x| pinned[*x]);
        if let [x] = inputs[..]
            && matches!(node.op.class, Class::View(_) | Class::Cast)
        {
            weight[at] = weight[x];
            if matches!(node.op.class, Class::View(_)) {
                base[at] = base[x];
            }
            if weight[at].is_some() {
                continue;
            }
        }
        let read: Vec<u64> = inputs.iter().filter_map(|x| weight[*x]).collect();
        let new: Vec<u64> = read.iter().copied().filter(|state| !known.contains(state)).collect();
        if !new.is_empty() {
            known.extend(&new);
            pending.extend(&new);
            // A State that is read before any activation stays with the first segment.
            if out.len() > 1 || out[0].is_layer || !out[0].states.is_empty() {
                begins.push(at);
                out.push(Segment { flops: 0, crossing: 0, states: Vec::new(), is_layer: false });
            }
        }
        for x in inputs {
            last_read[base[x]] = at;
        }
        let own = out.last_mut();
        let Some(own) = own else { continue };
        own.states.append(&mut pending);
        own.flops += products(g, order[at]).unwrap_or_else(|| node.shape.numel() as f64) as u64;
        own.is_layer |=
            !read.is_empty() && (products(g, order[at]).is_some() || !matches!(node.op.class, Class::Map(_)));
    }
    for (segment, begin) in out.iter_mut().zip(&begins) {
        let crosses = |x: &usize| pinned[*x] && weight[*x].is_none() && base[*x] == *x && last_read[*x] >= *begin;
        let bytes = |x: usize| (g.shape(order[x]).numel() * g.dtype(order[x]).size()) as u64;
        segment.crossing = (0..*begin).filter(crosses).map(bytes).sum();
    }
    out
}

/// The segments with which the stages begin.
fn best(segments: &[Segment], stages: usize) -> Vec<usize> {
    let n = segments.len();
    let mut upto = vec![(0u64, 0usize); n + 1];
    for (k, s) in segments.iter().enumerate() {
        upto[k + 1] = (upto[k].0 + s.flops, upto[k].1 + usize::from(s.is_layer));
    }
    let flops = |from: usize, to: usize| upto[to].0 - upto[from].0;
    let has_layer = |from: usize, to: usize| upto[to].1 > upto[from].1;
    // cost[s][k]: of the first k segments in s stages, the least maximum of work; within a limit, the least bytes before it.
    let solve = |limit: Option<u64>| -> Option<(u64, Vec<usize>)> {
        let mut cost: Vec<Vec<Option<((u64, u64), usize)>>> = vec![vec![None; n + 1]; stages + 1];
        cost[0][0] = Some(((0, 0), 0));
        for s in 1..=stages {
            for to in 1..=n {
                for from in 0..to {
                    let Some(((bytes, most), _)) = cost[s - 1][from] else { continue };
                    let work = flops(from, to);
                    if !has_layer(from, to) || limit.is_some_and(|limit| work > limit) {
                        continue;
                    }
                    let sent = if from > 0 { segments[from].crossing } else { 0 };
                    let total = (if limit.is_some() { bytes + sent } else { 0 }, most.max(work));
                    if cost[s][to].is_none_or(|best| total < best.0) {
                        cost[s][to] = Some((total, from));
                    }
                }
            }
        }
        let ((_, most), _) = cost[stages][n]?;
        let (mut starts, mut to) = (Vec::new(), n);
        for s in (1..=stages).rev() {
            to = cost[s][to]?.1;
            starts.push(to);
        }
        starts.reverse();
        Some((most, starts))
    };
    let even = solve(None);
    let limited = even.as_ref().and_then(|(most, _)| solve(Some(most + most / 8)));
    limited.or(even).map_or_else(|| (0..stages).collect(), |found| found.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Tracer;
    use crate::request::Request;
    use perilune_core::ops::create;
    use perilune_core::{DType, Shape};

    /// Records x (8, widths[0]) through a product for each following width; `tied`: the last one reads the first weight again.
    fn stages(widths: &[usize], tied: bool, stages: usize) -> Result<(Vec<Option<usize>>, Vec<StageCost>)> {
        let mut g = Graph::new();
        let mut x = g.leaf(&create::LEAF, Shape::of(&[8, widths[0]]), DType::F32, &[], 1);
        for (k, pair) in widths.windows(2).enumerate() {
            let number = if tied && k + 2 == widths.len() { 100 } else { 100 + k as u64 };
            let w = g.leaf(&create::STATE, Shape::of(pair), DType::F32, &[], number);
            x = g.matmul(x, w).expect("recorded");
            x = g.mul(x, x).expect("recorded");
        }
        let mut tracer = Tracer::default();
        tracer.run(&g, &Request { roots: vec![x], ..Request::default() }, |_| None);
        let cut = cut(&g, &tracer.trace, stages)?;
        let of = |k: usize| cut.stages.get(&(100 + k as u64)).copied();
        Ok(((0..widths.len() - 1).map(of).collect(), cut.costs))
    }

    #[test]
    fn stages_have_equal_work_and_the_head_counts() {
        let even = stages(&[16, 16, 16, 16, 16], false, 2).unwrap();
        assert_eq!(even.0, [0, 0, 1, 1].map(Some));
        assert_eq!((even.1[0].flops, even.1[0].received), (even.1[1].flops, 0));
        assert_eq!(even.1[1].received, 8 * 16 * 4);
        // The last product has as much work as the four before it.
        assert_eq!(stages(&[16, 16, 16, 16, 16, 64], false, 2).unwrap().0, [0, 0, 0, 0, 1].map(Some));
        assert_eq!(stages(&[16, 16, 16, 16, 16], false, 4).unwrap().0, [0, 1, 2, 3].map(Some));
        // Of cuts that send as much the even one, although nine layers beside seven are within the limit.
        let of = stages(&[16; 17], false, 2).unwrap().0;
        assert_eq!(of.iter().filter(|stage| **stage == Some(0)).count(), 8, "{of:?}");
    }

    #[test]
    fn of_cuts_with_about_equal_work_the_one_that_sends_less_is_taken() {
        // The narrow value between the second and the third product.
        let widths = [64, 64, 8, 64, 64];
        assert_eq!(stages(&widths, false, 2).unwrap().0, [0, 0, 1, 1].map(Some));
        let (_, costs) = stages(&widths, false, 2).unwrap();
        assert_eq!(costs[1].received, 8 * 8 * 4);
    }

    #[test]
    fn a_tied_weight_belongs_to_the_stage_that_reads_it_first() {
        let (found, _) = stages(&[16, 16, 16, 16, 16], true, 2).unwrap();
        assert_eq!(found, [Some(0), Some(0), Some(1), None], "the last product has no weight of its own");
    }

    #[test]
    fn more_stages_than_layers_are_refused() {
        let e = stages(&[16, 16, 16], false, 3).unwrap_err();
        assert_eq!(e.message, "3 stages: the model has 2 of the 3 layers with weights that as many stages need");
        assert!(e.hint.is_some());
    }
}
