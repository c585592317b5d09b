//! Column sums end together.
//!
//! A column reduction takes two launches: one leaves partials of chunks of rows in the workspace, one adds them up. The
//! second has next to nothing to do, and a backward pass has one for each bias and each norm, long before anyone asks for the
//! sums. So they wait, until something touches what one of them writes or the partials take too much room, and those of one
//! kind go in one launch. What they add and in which order stays the same.

use crate::codegen::{self, Stage, overlap};
use crate::launch::{Launch, Props, Work};
use perilune_plan::ir::{Kernel, Level, Program, Region, ValueId};

/// Bytes of partials that may wait: more launches are saved with more, but memory is worth more than the last few.
const ROOM: usize = 64 << 20;

/// The joins that wait.
#[derive(Default)]
pub struct Joins {
    /// The number of each one's kernel, its stage, and what it writes.
    list: Vec<(usize, Stage, Vec<ValueId>)>,
    used: usize,
    /// Bytes of partials that waited at a time.
    pub most: usize,
}

/// What waited, and the number of the kernel whose join came last.
pub type Together = (usize, Vec<Launch>);

/// What a region takes now.
pub struct Now {
    /// What has to go first: there is no room to wait any longer.
    pub before: Option<Together>,
    pub work: Work,
    /// Whether its join waits: its workspace counts from the partials' own start then.
    pub waits: bool,
}

impl Joins {
    /// Kernel `k`, a region. Its join waits from now on, if it has one.
    pub fn region(&mut self, program: &Program, k: usize, r: &Region, props: &Props) -> Now {
        let work = |stages: &[Stage], scratch_bytes: usize| Work {
            launches: stages.iter().map(Stage::single).collect(),
            scratch_bytes,
        };
        let (mut stages, mut end) = codegen::stages_of(program, r, props, self.used);
        if !stages.last().is_some_and(|s| s.joins) || end - self.used > ROOM {
            if end > self.used {
                (stages, end) = codegen::stages_of(program, r, props, 0);
                return Now { before: None, work: work(&stages, end), waits: false };
            }
            return Now { before: None, work: work(&stages, 0), waits: false };
        }
        let mut before = None;
        if end > ROOM {
            before = self.take();
            (stages, end) = codegen::stages_of(program, r, props, 0);
        }
        let sums = r.stores.iter().filter(|s| r.body[s.0 as usize].level == Level::Col).map(|s| s.1).collect();
        self.list.extend(stages.pop().map(|join| (k, join, sums)));
        self.used = end;
        self.most = self.most.max(end);
        Now { before, work: work(&stages, end), waits: true }
    }

    /// What must run before a kernel that touches a sum that waits.
    pub fn before(&mut self, program: &Program, kernel: &Kernel) -> Option<Together> {
        if self.list.is_empty() {
            return None;
        }
        let touched = [kernel.reads(), kernel.writes()].concat();
        let due = |sum: &ValueId| touched.iter().any(|v| overlap(program, *sum, *v));
        if self.list.iter().any(|w| w.2.iter().any(due)) { self.take() } else { None }
    }

    /// All that waits.
    pub fn take(&mut self) -> Option<Together> {
        let last = self.list.last()?.0;
        let launches = codegen::together(self.list.iter().map(|w| &w.1));
        self.list.clear();
        self.used = 0;
        Some((last, launches))
    }
}
