//! Runs a software pipeline of three stages over blocks of rows: three blocks are in flight, each with its own registers.

use super::run::{Frame, TileRange};
use super::*;
use crate::loops::row_pipeline::Stage;
use crate::worker_pool::TaskQueue;

impl Region {
    /// Runs the blocks of each task; a task has `lines` rows.
    pub(super) fn run_pipeline(&self, pipeline: &RowPipeline, context: &Context, tasks: &TaskQueue, lines: usize) {
        let (total, cols) = (self.space.batch * self.space.rows, self.space.cols);
        let ops = &self.phases[0].ops;
        let mut frames = [(); 3].map(|()| Frame::new(self, context));
        for frame in &mut frames {
            frame.enter(&self.phases[0]);
            frame.run(&ops[..pipeline.invariant], TileRange { row: 0, k: 1, col: 0, w: cols });
        }
        let mut blocks = std::iter::from_fn(|| tasks.claim())
            .flat_map(|t| {
                let hi = ((t + 1) * lines).min(total);
                (t * lines..hi).step_by(self.block_rows).map(move |row| (row, self.block_rows.min(hi - row)))
            })
            .map(|(row, k)| TileRange { row, k, col: 0, w: cols });
        // The newest block is first; a block stays in one frame from its first loop to its last.
        let mut blocks_in_flight: [Option<TileRange>; 3] = [None; 3];
        for turn in 0.. {
            blocks_in_flight = [blocks.next(), blocks_in_flight[0], blocks_in_flight[1]];
            if blocks_in_flight.iter().all(Option::is_none) {
                break;
            }
            let frame = |age: usize| (turn + 3 - age) % 3;
            if let Some(range) = blocks_in_flight[0] {
                frames[frame(0)].run(&ops[pipeline.invariant..pipeline.at[0]], range);
            }
            match blocks_in_flight {
                [Some(a), Some(b), Some(c)] if a.k == b.k && a.k == c.k => {
                    let stage = |age: usize| Stage { ops: &pipeline.ops[age], views: frames[frame(age)].views() };
                    // SAFETY: as for the ops that the pipeline replaces; blocks of rows are disjoint.
                    unsafe { (pipeline.kernel)([stage(0), stage(1), stage(2)], &pipeline.prefetched, a.k, cols) };
                }
                _ => {
                    for (age, range) in blocks_in_flight.iter().enumerate() {
                        if let Some(range) = *range {
                            frames[frame(age)].run(&ops[pipeline.at[age]..=pipeline.at[age]], range);
                        }
                    }
                }
            }
            let ends = [pipeline.at[1], pipeline.at[2], ops.len()];
            for (age, range) in blocks_in_flight.iter().enumerate() {
                if let Some(range) = *range {
                    frames[frame(age)].run(&ops[pipeline.at[age] + 1..ends[age]], range);
                }
            }
        }
    }
}
