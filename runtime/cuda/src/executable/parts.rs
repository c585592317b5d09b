//! Divides the steps of a program into parts, between which a run meets other devices or the host.
//!
//! The steps of a program without a mesh are one part. What a run waits for divides them into several: the ends of collectives, transfers,
//! and the agreement of a mesh. So do kernels of a recipe whose code is guarded: each launch has a number of its own. A collective that
//! starts divides nothing: the part in which it lies marks where its pieces are complete, and behind the part the devices meet and start it.

use super::Step;
use std::ops::Range;

/// A part of what a run queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Part {
    /// Steps of which none waits for another device. A collective among them is the point where its pieces are complete.
    Steps(Range<usize>),
    /// Starts a collective on its lane.
    Collective(usize),
    /// Waits for a collective.
    Wait(usize),
    /// Sends a value to another pipeline stage, or receives one.
    Transfer(usize),
    /// Launches a recipe's kernel whose code is guarded, with a number of its own in each run.
    Guarded(usize),
    Agreement,
}

/// How a step is queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Among others, in a graph.
    Plain,
    /// Among others as a point, then on its lane.
    Collective,
    Transfer,
    Guarded,
}

impl Kind {
    pub fn of(step: &Step) -> Kind {
        match step {
            Step::Collective(_) => Kind::Collective,
            Step::Transfer(_) => Kind::Transfer,
            Step::Launch { history: Some(_), .. } => Kind::Guarded,
            _ => Kind::Plain,
        }
    }
}

/// Divides steps where collectives are waited for (`waits`: a step, and before which one), at transfers and before the step `agreement`,
/// which may be their number. Collectives start behind the steps among which they are.
pub(super) fn divided(kinds: &[Kind], waits: &[(usize, usize)], agreement: Option<usize>) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut start = 0;
    for i in 0..=kinds.len() {
        let alone = match kinds.get(i) {
            Some(Kind::Transfer) => Some(Part::Transfer(i)),
            Some(Kind::Guarded) => Some(Part::Guarded(i)),
            Some(Kind::Plain | Kind::Collective) | None => None,
        };
        let due = || waits.iter().filter(|w| w.1 == i).map(|w| Part::Wait(w.0));
        let ends = alone.is_some() || i == kinds.len() || agreement == Some(i) || due().next().is_some();
        if ends && start < i {
            parts.push(Part::Steps(start..i));
            parts.extend((start..i).filter(|k| kinds[*k] == Kind::Collective).map(Part::Collective));
            start = i;
        }
        parts.extend(due());
        if agreement == Some(i) {
            parts.push(Part::Agreement);
        }
        if let Some(part) = alone {
            parts.push(part);
            start = i + 1;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use Part::{Agreement, Collective, Guarded, Steps, Transfer, Wait};

    #[test]
    fn steps_are_divided_at_waits_transfers_and_the_agreement() {
        let without = [Kind::Plain; 4];
        assert_eq!(divided(&without, &[], None), [Steps(0..4)], "a program without a mesh is one graph");
        assert_eq!(divided(&without, &[], Some(2)), [Steps(0..2), Agreement, Steps(2..4)]);
        assert_eq!(divided(&without, &[], Some(4)), [Steps(0..4), Agreement]);
        let with = [Kind::Collective, Kind::Plain, Kind::Collective, Kind::Collective, Kind::Plain];
        let started = [Collective(0), Collective(2), Collective(3)];
        let waits = [(0, 1), (2, 4), (3, 5)];
        let (early, late) = ([Steps(0..1), Collective(0), Wait(0)], [Wait(2), Steps(4..5), Wait(3)]);
        let all = [&early[..], &[Steps(1..4)], &started[1..], &late].concat();
        assert_eq!(divided(&with, &waits, None), all);
        let between = [Steps(1..3), Collective(2), Agreement, Steps(3..4), Collective(3)];
        assert_eq!(divided(&with, &waits, Some(3)), [&early[..], &between, &late].concat());
        assert_eq!(divided(&with, &waits, Some(0)), [&[Agreement], &all[..]].concat());
        let last = [(0, 5), (2, 5), (3, 5)];
        assert_eq!(divided(&with, &last, None), [&[Steps(0..5)], &started[..], &last.map(|w| Wait(w.0))].concat());
        let stages = [Kind::Transfer, Kind::Plain, Kind::Plain, Kind::Transfer, Kind::Transfer, Kind::Plain];
        let between = [Transfer(0), Steps(1..3), Transfer(3), Transfer(4)];
        assert_eq!(divided(&stages, &[], None), [&between[..], &[Steps(5..6)]].concat());
        assert_eq!(divided(&stages, &[], Some(5)), [&between[..], &[Agreement, Steps(5..6)]].concat());
        assert_eq!(divided(&stages, &[], Some(6)), [&between[..], &[Steps(5..6), Agreement]].concat());
        let guarded = [Kind::Plain, Kind::Guarded, Kind::Guarded, Kind::Plain];
        assert_eq!(divided(&guarded, &[], None), [Steps(0..1), Guarded(1), Guarded(2), Steps(3..4)]);
        assert_eq!(divided(&[], &[], Some(0)), [Agreement]);
        assert_eq!(divided(&[], &[], None), []);
    }
}
