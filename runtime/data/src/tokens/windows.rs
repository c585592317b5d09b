//! Reads windows of a corpus, as a [`Source`] of one column (N, span) i32.

use super::Tokens;
use crate::error::{Error, Result};
use crate::source::{Column, Sample, Source};
use perilune_core::{DType, Shape};
use std::ops::Range;
use std::sync::Arc;

/// Windows in a task: reading one of 1,024 tokens takes about a microsecond.
const GRAIN: usize = 16;

/// The windows of `span` tokens in a part of a corpus. Row k is the window that starts at token k of the part.
pub struct TokenWindows {
    tokens: Arc<Tokens>,
    part: Range<u64>,
    span: usize,
    columns: [Column; 1],
}

impl TokenWindows {
    /// # Errors
    /// The part exceeds the corpus, or no window fits into it.
    pub fn new(tokens: Arc<Tokens>, part: Range<u64>, span: usize) -> Result<TokenWindows> {
        let size = part.end.saturating_sub(part.start);
        if part.end > tokens.len() || span == 0 || size < span as u64 {
            let rule = format!("of {span} tokens do not fit into tokens {} to {}", part.start, part.end);
            return Err(Error::argument("windows", rule).hint("shorten the context, or take a longer text"));
        }
        let shape = Shape::new(&[span]).map_err(|e| Error::argument("windows", e.message))?;
        Ok(TokenWindows { tokens, part, span, columns: [Column { dtype: DType::I32, shape }] })
    }
}

impl Source for TokenWindows {
    fn rows(&self) -> usize {
        usize::try_from(self.part.end - self.part.start - self.span as u64 + 1).unwrap_or(usize::MAX)
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn grain(&self) -> usize {
        GRAIN
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        let [ids] = columns else { return Err(self.broke_down(sample)) };
        let start = self.part.start + sample.row as u64;
        self.tokens.read(start..start + self.span as u64, ids)
    }

    fn too_large(&self, count: usize) -> Error {
        let rule = format!("of {count} windows of {} tokens does not fit into the host's memory", self.span);
        Error::argument("a batch", rule)
            .hint("shorter windows, or a smaller batch with `accumulate = n` for the same gradients")
    }
}
