//! Stores the line of a file on which each row of a table starts, as runs of rows on consecutive lines: most tables are one run.

/// The line on which each row starts, from 1: runs of rows on consecutive lines.
#[derive(Clone, Default, PartialEq, Debug)]
pub(crate) struct Lines {
    runs: Vec<Run>,
    rows: usize,
    /// Rows at the start that are not counted: the header.
    skipped: usize,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Run {
    row: u32,
    line: u32,
}

impl Lines {
    /// Returns the number of rows, without the header.
    pub fn len(&self) -> usize {
        self.rows - self.skipped
    }

    /// Returns the bytes that the runs take.
    pub fn nbytes(&self) -> usize {
        self.runs.len() * size_of::<Run>()
    }

    /// Makes the first row the header, which is not counted.
    pub fn skip_header(&mut self) {
        self.skipped = 1;
    }

    pub fn push(&mut self, line: u32) {
        let row = self.rows as u32;
        if self.runs.last().is_none_or(|run| run.line + (row - run.row) != line) {
            self.runs.push(Run { row, line });
        }
        self.rows += 1;
    }

    pub fn get(&self, row: usize) -> u64 {
        let row = (row + self.skipped) as u32;
        let run = self.runs[self.runs.partition_point(|run| run.row <= row) - 1];
        u64::from(run.line + (row - run.row))
    }
}
