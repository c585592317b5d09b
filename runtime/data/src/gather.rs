//! Gathers samples from tensors in host memory: rows of several tensors, windows of a token sequence.
//!
//! Both are a [`Source`]: they copy bytes, independent of the dtype. `sample_order` and `split` select the samples.

use crate::error::{Error, Result};
use crate::source::{Column, Sample, Source};
use perilune_core::{HostTensor, Shape};

/// Samples in a task: copying one takes less time than queueing a task.
const GRAIN: usize = 256;

/// The rows of tensors (N, …), a column each. Sample k is row k of each tensor.
pub struct Rows {
    tensors: Vec<HostTensor>,
    columns: Vec<Column>,
    count: usize,
}

impl Rows {
    pub fn new(tensors: Vec<HostTensor>) -> Result<Rows> {
        let mut columns = Vec::with_capacity(tensors.len());
        let mut count = None;
        for (k, t) in tensors.iter().enumerate() {
            let Some((&n, dims)) = t.shape.dims().split_first() else {
                return Err(Error::argument("a tensor without dims", "has no samples; the first dim counts them"));
            };
            if *count.get_or_insert(n) != n {
                let rule = format!("has {n} rows, and the first column has {}", count.unwrap_or(0));
                return Err(Error::argument(format!("column {k}"), rule).hint("each sample has a row in each column"));
            }
            let shape = Shape::new(dims).map_err(|e| Error::argument("rows", e.message))?;
            columns.push(Column { dtype: t.dtype, shape });
        }
        Ok(Rows { tensors, columns, count: count.unwrap_or(0) })
    }
}

impl Source for Rows {
    fn rows(&self) -> usize {
        self.count
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn grain(&self) -> usize {
        GRAIN
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        for ((tensor, column), out) in self.tensors.iter().zip(&self.columns).zip(columns) {
            let nbytes = column.shape.numel() * column.dtype.size();
            out.extend_from_slice(&tensor.bytes[sample.row * nbytes..][..nbytes]);
        }
        Ok(())
    }
}

/// The windows of `span` tokens of a text (N). Sample k starts at token k.
pub struct TokenWindows {
    tokens: HostTensor,
    column: [Column; 1],
    starts: usize,
}

impl TokenWindows {
    pub fn new(tokens: HostTensor, span: usize) -> Result<TokenWindows> {
        if tokens.shape.rank() != 1 {
            return Err(Error::argument("windows", format!("tokens have shape {}; one dim is needed", tokens.shape)));
        }
        let n = tokens.numel();
        if span == 0 || span > n {
            return Err(Error::argument("windows", format!("{span} tokens do not fit a text of {n}"))
                .hint("a window has at least one token and at most those of the text"));
        }
        let column = [Column { dtype: tokens.dtype, shape: Shape::of(&[span]) }];
        Ok(TokenWindows { tokens, column, starts: n - span + 1 })
    }
}

impl Source for TokenWindows {
    fn rows(&self) -> usize {
        self.starts
    }

    fn columns(&self) -> &[Column] {
        &self.column
    }

    fn grain(&self) -> usize {
        GRAIN
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        let (size, span) = (self.tokens.dtype.size(), self.column[0].shape.numel());
        let [out] = columns else { return Err(self.broke_down(sample)) };
        out.extend_from_slice(&self.tokens.bytes[sample.row * size..][..span * size]);
        Ok(())
    }
}
