//! Which regions run their three loops over rows in step (`loops::relay`).

use super::*;
use crate::loops::chain::{Act, Link, Place};
use crate::loops::relay::{self, First};
use crate::loops::spelled;
use perilune_plan::ir::LANES;

impl Compiler<'_> {
    /// The relay of a list: it reads f32 rows as they lie in memory, and writes past the caches.
    pub(super) fn relay(&self, list: &mut List) -> Option<Relay> {
        let columns = list.steps.iter().any(|s| matches!(s, Step::Columns { .. }));
        if self.segmented || columns || !self.grid.cols.is_multiple_of(LANES) {
            return None;
        }
        let mut at = Vec::new();
        let mut links: Vec<Box<[Link]>> = Vec::new();
        let mut first = First::Chain;
        for (k, s) in list.steps.iter().enumerate() {
            match s {
                Step::Bind { .. }
                | Step::Out { .. }
                | Step::Store { row: true, .. }
                | Step::Fetch { row: true, .. } => {}
                Step::Run { form: Form::Row, .. } => {}
                Step::Run { out, args, form: Form::Reduce, round: None, link: Some(link), .. } if at.is_empty() => {
                    let load = Link { act: Act::Load, place: Place::View(args[0]) };
                    if let Linked::Max = link {
                        first = First::Largest;
                    }
                    links.push(Box::new([load, Link { act: Act::Sum, place: Place::Sum(0, *out) }]));
                    at.push(k);
                }
                Step::Chain { links: all, form: Form::Rows, .. } => {
                    links.push(all[spelled::reads_ahead(all)..].into());
                    at.push(k);
                }
                _ => return None,
            }
        }
        let (at, links): ([usize; 3], [Box<[Link]>; 3]) = (at.try_into().ok()?, links.try_into().ok()?);
        let past = links[2].iter().any(|l| l.act == Act::Stream);
        let kernel = relay::find(self.isa, first, [&links[0], &links[1], &links[2]]).filter(|_| past)?;
        let dense = list.steps[..at[0]].iter().filter_map(|s| match s {
            Step::Bind { view, place: crate::region::Place::Dense, .. } => Some(*view),
            _ => None,
        });
        let asks: Box<[View]> = dense.take(2).collect();
        if asks.is_empty() {
            return None;
        }
        // What is alike for all blocks comes first.
        let alike = |s: &Step| matches!(s, Step::Bind { place: crate::region::Place::Col, .. });
        list.steps[..at[0]].sort_by_key(|s| !alike(s));
        let from = list.steps[..at[0]].iter().take_while(|s| alike(s)).count();
        Some(Relay { from, at, links, asks, kernel })
    }
}
