//! Gathers samples from tensors in host memory: rows by index, runs of rows, windows of a token sequence.
//!
//! The first dim counts samples. The functions copy bytes, independent of the dtype. `sample_order` and `split` select
//! the samples.

use crate::error::{Error, Result};
use perilune_core::{HostTensor, Shape};

/// Gathers rows `indices` of `tensor`, in that order: {N, …} -> {indices, …}.
pub fn rows(tensor: &HostTensor, indices: &[u64]) -> Result<HostTensor> {
    let (n, nbytes) = rows_of(tensor)?;
    let mut bytes = Vec::with_capacity(indices.len() * nbytes);
    for &i in indices {
        if i >= n as u64 {
            return Err(Error::argument(format!("sample {i}"), format!("does not exist: there are {n}, from 0")));
        }
        bytes.extend_from_slice(&tensor.bytes[i as usize * nbytes..(i as usize + 1) * nbytes]);
    }
    Ok(HostTensor::new(tensor.dtype, tensor.shape.with(0, indices.len()), bytes))
}

/// Copies rows `lo` to `hi`, half-open.
pub fn run(tensor: &HostTensor, lo: usize, hi: usize) -> Result<HostTensor> {
    let (n, nbytes) = rows_of(tensor)?;
    if lo > hi || hi > n {
        let rule = format!("must ascend and end within the {n} samples");
        return Err(Error::argument(format!("range {{{lo}, {hi}}}"), rule));
    }
    Ok(HostTensor::new(tensor.dtype, tensor.shape.with(0, hi - lo), tensor.bytes[lo * nbytes..hi * nbytes].to_vec()))
}

/// Gathers `span` tokens from each of `starts`: {N} -> {starts, span}.
pub fn windows(tokens: &HostTensor, starts: &[u64], span: usize) -> Result<HostTensor> {
    let size = tokens.dtype.size();
    if tokens.shape.rank() != 1 {
        return Err(Error::argument("windows", format!("tokens have shape {}; one dim is needed", tokens.shape)));
    }
    let n = tokens.numel();
    let shape = Shape::new(&[starts.len(), span]).map_err(|e| Error::argument("windows", e.message))?;
    let mut bytes = Vec::new();
    for &start in starts {
        let end = start.checked_add(span as u64).filter(|&end| end <= n as u64);
        let Some(end) = end else {
            return Err(Error::argument("windows", format!("{span} tokens from {start} do not fit a text of {n}")));
        };
        bytes.extend_from_slice(&tokens.bytes[start as usize * size..end as usize * size]);
    }
    Ok(HostTensor::new(tokens.dtype, shape, bytes))
}

/// Returns the number of rows and the bytes of one.
fn rows_of(tensor: &HostTensor) -> Result<(usize, usize)> {
    if tensor.shape.is_scalar() {
        return Err(Error::argument("a tensor without dims", "has no samples; the first dim counts them"));
    }
    let nbytes = tensor.shape.dims()[1..].iter().product::<usize>() * tensor.dtype.size();
    Ok((tensor.shape.dims()[0], nbytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::DType;

    #[test]
    fn rows_runs_and_windows() -> Result<()> {
        let t = HostTensor::from_f64(DType::F16, Shape::of(&[3, 2]), &[0., 1., 2., 3., 4., 5.]);
        let got = rows(&t, &[2, 0, 2, 1])?;
        assert_eq!((got.shape.dims(), got.to_f64()), (&[4usize, 2][..], vec![4., 5., 0., 1., 4., 5., 2., 3.]));
        assert_eq!(run(&t, 1, 3)?.to_f64(), [2., 3., 4., 5.]);
        assert_eq!((run(&t, 3, 3)?.numel(), rows(&t, &[])?.shape.dims()), (0, &[0usize, 2][..]));
        let tokens = HostTensor::from_i64(Shape::of(&[5]), &[10, 11, 12, 13, 14]);
        let got = windows(&tokens, &[2, 0], 3)?;
        assert_eq!((got.shape.dims(), got.to_i64()), (&[2usize, 3][..], vec![12, 13, 14, 10, 11, 12]));

        assert!(rows(&t, &[3]).map_err(|e| e.to_string()).is_err_and(|m| m.contains("there are 3")));
        assert!(run(&t, 2, 4).is_err() && run(&t, 2, 1).is_err());
        assert!(windows(&tokens, &[3], 3).is_err() && windows(&tokens, &[u64::MAX], 3).is_err());
        assert!(windows(&t, &[0], 1).is_err() && rows(&HostTensor::from_i64(Shape::SCALAR, &[1]), &[0]).is_err());
        let empty = HostTensor::from_i64(Shape::of(&[2, 0]), &[]);
        assert_eq!(rows(&empty, &[1, 1, 1])?.shape.dims(), &[3, 0]);
        Ok(())
    }
}
