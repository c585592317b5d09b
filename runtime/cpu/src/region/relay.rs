//! Running a relay: three blocks under way, each in a frame of its own.

use super::run::{Frame, Span};
use super::*;
use crate::loops::relay::Runner;
use crate::worker_pool::TaskQueue;

impl Region {
    /// Blocks of the rows of each task, of which there are `lines` rows.
    pub(super) fn relayed(&self, relay: &Relay, context: &Context, tasks: &TaskQueue, lines: usize) {
        let (total, cols) = (self.grid.batch * self.grid.rows, self.grid.cols);
        let steps = &self.phases[0].steps;
        let mut frames = [(); 3].map(|()| Frame::new(self, context));
        for frame in &mut frames {
            frame.enter(&self.phases[0]);
            frame.run(&steps[..relay.from], Span { row: 0, k: 1, col: 0, w: cols });
        }
        let mut blocks = std::iter::from_fn(|| tasks.claim())
            .flat_map(|t| {
                let hi = ((t + 1) * lines).min(total);
                (t * lines..hi).step_by(self.block_rows).map(move |row| (row, self.block_rows.min(hi - row)))
            })
            .map(|(row, k)| Span { row, k, col: 0, w: cols });
        // The newest block first; a block is in the same frame from its first loop to its last.
        let mut spans: [Option<Span>; 3] = [None; 3];
        for turn in 0.. {
            spans = [blocks.next(), spans[0], spans[1]];
            if spans.iter().all(Option::is_none) {
                break;
            }
            let frame = |age: usize| (turn + 3 - age) % 3;
            if let Some(span) = spans[0] {
                frames[frame(0)].run(&steps[relay.from..relay.at[0]], span);
            }
            match spans {
                [Some(a), Some(b), Some(c)] if a.k == b.k && a.k == c.k => {
                    let runner = |age: usize| Runner { links: &relay.links[age], views: frames[frame(age)].views() };
                    // SAFETY: as for the steps that it stands for; blocks of rows do not meet.
                    unsafe { (relay.kernel)([runner(0), runner(1), runner(2)], &relay.asks, a.k, cols) };
                }
                _ => {
                    for (age, span) in spans.iter().enumerate() {
                        if let Some(span) = *span {
                            frames[frame(age)].run(&steps[relay.at[age]..=relay.at[age]], span);
                        }
                    }
                }
            }
            let ends = [relay.at[1], relay.at[2], steps.len()];
            for (age, span) in spans.iter().enumerate() {
                if let Some(span) = *span {
                    frames[frame(age)].run(&steps[relay.at[age] + 1..ends[age]], span);
                }
            }
        }
    }
}
