//! Packs documents of token ids into sequences of one length, without attention or loss across documents.
//!
//! A sequence of `length` positions has the fields of a language model: `x`, `y` (the next token of the same document, or -100 where
//! there is none or the loss leaves it out), `documents` (numbers within the sequence, for attention; padding is the last one) and
//! `positions` (from 0 in each document). A window of `length + 1` tokens is laid out by first-fit decreasing ([`bins`]), and
//! shifted by one.

use super::bins::{self, Piece, TooLong};
use super::scan::Scan;
use super::{first, located as at, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash};
use perilune_core::{DType, HostTensor, Shape};
use std::sync::Arc;

/// The target of a position without one: what `cross_entropy` ignores.
pub const IGNORED: i64 = -100;

/// The field of the mask by default, as `chat` makes it.
const MASK: &str = "mask";

/// How documents become sequences.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Positions of a sequence.
    pub length: usize,
    /// The field with the token ids of a document.
    pub ids: String,
    /// The field that says which tokens the loss trains: booleans, or numbers that are 0 or not. By default `mask`; all tokens of a
    /// document that has no such field.
    pub mask: Option<String>,
    /// The id at padding.
    pub padding: i64,
    pub too_long: TooLong,
}

struct Pack {
    inner: Arc<dyn Dataset>,
    options: PackOptions,
    bins: Vec<Vec<Piece>>,
    fingerprint: Fingerprint,
}

/// Packs the documents of a dataset whose epochs are equal.
///
/// # Errors
/// A record has no list of integers in the field, or a document is too long and that is an error.
pub fn pack(inner: Arc<dyn Dataset>, options: PackOptions, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let lengths = scan.each(&*inner, |_, record| Ok(document(&record, &options)?.0.len()))?;
    let window = options.length + 1;
    if let (TooLong::Error, Some(row)) = (options.too_long, lengths.iter().position(|n| *n > window)) {
        let rule = format!("the document has {} tokens, and a sequence holds {window}", lengths[row]);
        let error = Error::function(rule).hint("use a larger length, or too_long = \"truncate\" or \"split\"");
        return Err(at(&*inner, row as u64, error));
    }
    let bins = bins::pack(&lengths, window, options.too_long)?;
    let arguments = format!("{options:?}");
    let fingerprint = hash::stage("pack/1", &[arguments.as_bytes()], &[&*inner]);
    Ok(Arc::new(Pack { inner, options, bins, fingerprint }))
}

/// The token ids of a document, and which of them are trained.
fn document(record: &Record, options: &PackOptions) -> Result<(Vec<i64>, Option<Vec<bool>>)> {
    let ids = integers(record, &options.ids)?;
    let name = match &options.mask {
        Some(name) => name,
        None if record.get(MASK).is_some() => MASK,
        None => return Ok((ids, None)),
    };
    let mask: Vec<bool> = integers(record, name)?.into_iter().map(|m| m != 0).collect();
    if mask.len() != ids.len() {
        let rule = format!("'{name}' has {} elements and '{}' {}", mask.len(), options.ids, ids.len());
        return Err(Error::function(rule).hint("the mask has an element for each token"));
    }
    Ok((ids, Some(mask)))
}

/// The elements of a list of integers or booleans.
fn integers(record: &Record, name: &str) -> Result<Vec<i64>> {
    let wrong = |found: &str| {
        Error::function(format!("'{name}' is {found}; pack needs a list of integers"))
            .hint("make it by a map, such as function(r) return { ids = tokenizer:encode(r.text) } end")
    };
    match record.get(name) {
        Some(Value::Array(array)) if array.dtype.is_int() || array.dtype == DType::Bool => Ok(array.to_i64()),
        Some(Value::List(list)) => {
            let one = |v: &Value| match v {
                Value::Int(i) => Ok(*i),
                Value::Bool(b) => Ok(i64::from(*b)),
                other => Err(wrong(&format!("a list with {}", other.type_name()))),
            };
            list.iter().map(one).collect()
        }
        // A table without fields is the empty list.
        Some(Value::Map(map)) if map.fields.is_empty() => Ok(Vec::new()),
        Some(other) => Err(wrong(other.type_name())),
        None => Err(wrong("missing")),
    }
}

impl Pack {
    fn pieces(&self, index: u64) -> impl Iterator<Item = (u64, &Piece)> {
        let (epoch, bin) = place(index, self.len());
        self.bins[bin as usize].iter().map(move |p| (first(epoch, self.inner.len()) + p.document, p))
    }
}

impl Dataset for Pack {
    fn len(&self) -> u64 {
        self.bins.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        let window = self.options.length + 1;
        let (mut ids, mut targets) = (Vec::with_capacity(window), Vec::with_capacity(window));
        let (mut documents, mut positions) = (Vec::with_capacity(window), Vec::with_capacity(window));
        let mut number = 0;
        for (row, piece) in self.pieces(index) {
            let read = self.inner.get(row).and_then(|record| document(&record, &self.options));
            let (own, mask) = read.map_err(|e| at(&*self.inner, row, e))?;
            let tokens = piece.tokens.clone();
            if tokens.end > own.len() {
                let rule = format!("the document had {} tokens or more and has {} now", tokens.end, own.len());
                let error = Error::function(rule).hint("the stages before pack must depend on the record alone");
                return Err(at(&*self.inner, row, error));
            }
            for (position, token) in tokens.enumerate() {
                // Nothing in the sequence predicts the first token.
                let trained = position > 0 && mask.as_ref().is_none_or(|m| m[token]);
                ids.push(own[token]);
                targets.push(if trained { own[token] } else { IGNORED });
                documents.push(number);
                positions.push(position as i64);
            }
            number += 1;
        }
        for position in 0..window - ids.len() {
            ids.push(self.options.padding);
            targets.push(IGNORED);
            documents.push(number);
            positions.push(position as i64);
        }
        let length = self.options.length;
        let array = |values: &[i64], dtype| Value::Array(Arc::new(integer_array(values, dtype)));
        let fields = vec![
            ("x".into(), array(&ids[..length], DType::I32)),
            ("y".into(), array(&targets[1..], DType::I64)),
            ("documents".into(), array(&documents[..length], DType::I32)),
            ("positions".into(), array(&positions[..length], DType::I32)),
        ];
        Ok(Record { fields })
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let mut out = Vec::new();
        for (row, _) in self.pieces(index) {
            out.extend(self.inner.origins(row)?);
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

fn integer_array(values: &[i64], dtype: DType) -> HostTensor {
    HostTensor::from_i64(Shape::of(&[values.len()]), values).cast(dtype)
}
