//! Finds near duplicates: candidates by MinHash bands, verified by exact Jaccard similarity, joined by union-find.
//!
//! One band is sorted at a time. Of a bucket at most 8 representatives are compared with the others, and comparisons are bounded by 4 a record.

use crate::duplicates::{Exact, Id};
use crate::minhash::BANDS;
use crate::normal::{gram_set, jaccard};
use crate::roles::Roles;
use crate::scan::{Options, Scanned, text_of};
use perilune_data::{Error, Result};
use rayon::prelude::*;
use rustc_hash::FxHashSet;

/// Records of a bucket that others are compared with.
const REPRESENTATIVES: usize = 8;

/// Clusters of similar records.
#[derive(Default)]
pub struct Near {
    /// Records that resemble an earlier one of their split, with that one.
    pub repeated: Vec<(Id, Id)>,
    /// Records of evaluation splits that resemble a training record, with that one.
    pub leaked: Vec<(Id, Id)>,
    leaks: FxHashSet<Id>,
    /// Whether the bound of comparisons was reached.
    pub bounded: bool,
}

impl Near {
    pub fn is_leak(&self, id: Id) -> bool {
        self.leaks.contains(&id)
    }
}

/// Disjoint sets whose root is their least member.
struct Sets(Vec<u32>);

impl Sets {
    fn root(&self, mut at: u32) -> u32 {
        while let Some(&up) = self.0.get(at as usize).filter(|up| **up != at) {
            at = up;
        }
        at
    }

    fn join(&mut self, a: u32, b: u32) {
        let (a, b) = (self.root(a), self.root(b));
        self.0[a.max(b) as usize] = a.min(b);
    }

    /// Makes every path one step long.
    fn flatten(&mut self) {
        for at in 0..self.0.len() {
            // A parent is smaller, so it is flat already.
            self.0[at] = self.0[self.0[at] as usize];
        }
    }
}

/// Finds the clusters of all splits together. Of equal records only the first is compared.
pub fn find(scanned: &[Scanned<'_>], exact: &Exact, roles: &Roles, options: &Options) -> Result<Near> {
    let mut ids: Vec<Id> = Vec::new();
    for (s, split) in (0u32..).zip(scanned) {
        let own = (0u32..).zip(&split.keys).filter(|k| k.1.bands.is_some()).map(|(p, _)| (s, p));
        ids.extend(own.filter(|id| !exact.is_later(*id)));
    }
    let mut out = Near::default();
    let mut sets = Sets((0..u32::try_from(ids.len()).unwrap_or(u32::MAX)).collect());
    let mut left = 4 * ids.len() as u64 + 100_000;
    let text = |node: u32| -> Result<Vec<u32>> {
        let Some((s, place)) = ids.get(node as usize) else { return Ok(Vec::new()) };
        let Some(split) = scanned.get(*s as usize) else { return Ok(Vec::new()) };
        Ok(gram_set(&text_of(split, u64::from(*place), roles)?))
    };
    for band in 0..BANDS {
        let key = |id: &Id| scanned.get(id.0 as usize)?.keys.get(id.1 as usize)?.bands.map(|b| b[band]);
        let mut keyed: Vec<(u32, u32)> = (0u32..).zip(&ids).filter_map(|(node, id)| Some((key(id)?, node))).collect();
        keyed.par_sort_unstable();
        let mut groups: Vec<(&[(u32, u32)], usize)> = Vec::new();
        for group in keyed.chunk_by(|a, b| a.0 == b.0).filter(|g| g.len() > 1) {
            let Some(first) = group.first() else { continue };
            if group.iter().all(|g| sets.root(g.1) == sets.root(first.1)) {
                continue;
            }
            // Large groups come with fewer representatives where the bound is near.
            let most = REPRESENTATIVES.min(group.len() - 1);
            let kept = most.min(usize::try_from(left / group.len() as u64).unwrap_or(most));
            out.bounded |= kept < most;
            if kept == 0 {
                continue;
            }
            left -= (group.len() * kept) as u64;
            groups.push((group, kept));
        }
        let compare = |(group, most): &(&[(u32, u32)], usize)| -> Result<Vec<(u32, u32)>> {
            if options.interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            let (mut edges, mut kept): (Vec<(u32, u32)>, Vec<(u32, Vec<u32>)>) = (Vec::new(), Vec::new());
            for (_, node) in *group {
                let root = sets.root(*node);
                if kept.iter().any(|k| sets.root(k.0) == root) {
                    continue;
                }
                let own = text(*node)?;
                match kept.iter().find(|k| jaccard(&k.1, &own) >= options.similarity) {
                    Some(found) => edges.push((found.0, *node)),
                    None if kept.len() < *most => kept.push((*node, own)),
                    None => {}
                }
            }
            Ok(edges)
        };
        let found: Vec<Result<Vec<(u32, u32)>>> = groups.par_iter().map(compare).collect();
        for edges in found {
            edges?.into_iter().for_each(|(a, b)| sets.join(a, b));
        }
        sets.flatten();
    }
    clusters(scanned, &ids, &sets, &mut out);
    Ok(out)
}

fn clusters(scanned: &[Scanned<'_>], ids: &[Id], sets: &Sets, out: &mut Near) {
    let mut members: Vec<(u32, u32)> = (0u32..).take(ids.len()).map(|node| (sets.root(node), node)).collect();
    members.sort_unstable();
    let evaluation = |id: Id| scanned.get(id.0 as usize).is_some_and(|s| s.split.evaluation);
    for cluster in members.chunk_by(|a, b| a.0 == b.0).filter(|c| c.len() > 1) {
        let cluster: Vec<Id> = cluster.iter().filter_map(|m| ids.get(m.1 as usize).copied()).collect();
        let Some(&first) = cluster.first() else { continue };
        for of_split in cluster.chunk_by(|a, b| a.0 == b.0) {
            let Some(&own) = of_split.first() else { continue };
            out.repeated.extend(of_split.iter().skip(1).map(|id| (*id, own)));
            if evaluation(own) && !evaluation(first) {
                out.leaked.extend(of_split.iter().map(|id| (*id, first)));
            }
        }
    }
    out.repeated.sort_unstable();
    out.leaked.sort_unstable();
    out.leaks = out.leaked.iter().map(|l| l.0).collect();
}
