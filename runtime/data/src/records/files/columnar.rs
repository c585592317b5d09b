//! Shares what readers of columnar files have in common: names of columns, order of reads, messages of foreign errors.

use super::numbered::Numbered;
use crate::error::{Error, Result, quote};
use crate::records::Record;
use perilune_core::error::did_you_mean;
use std::path::Path;
use std::sync::Arc;

/// The place of each of a dataset's columns in a file; `None` for one that the file lacks.
pub(super) fn places(names: &[Arc<str>], own: &[Arc<str>]) -> Vec<Option<usize>> {
    names.iter().map(|name| own.iter().position(|n| n == name)).collect()
}

/// Refuses a schema with two columns of one name.
pub(super) fn distinct(path: &Path, names: &[Arc<str>]) -> Result<()> {
    let mut sorted: Vec<_> = names.iter().collect();
    sorted.sort();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::malformed(path, "schema", format!("has two columns {}", quote(pair[0])))),
    }
}

/// The numbers of the columns that are asked for, which all files must have; all without `asked`.
pub(super) fn choose<T>(
    files: &Numbered<T>,
    names: &[Arc<str>],
    asked: Option<&[String]>,
    places: impl Fn(&T) -> &[Option<usize>],
) -> Result<Arc<[usize]>> {
    let Some(first) = files.files.first() else { return Ok(Arc::from([])) };
    let columns: Vec<usize> = match asked {
        Some(asked) => {
            let find = |name: &String| {
                let found = names.iter().position(|n| **n == **name);
                found.ok_or_else(|| unknown(&first.path, name, names))
            };
            asked.iter().map(find).collect::<Result<_>>()?
        }
        None => (0..names.len()).collect(),
    };
    for file in &files.files {
        let lacks = |column: &&usize| places(&file.index).get(**column).copied().flatten().is_none();
        if let Some(column) = columns.iter().find(lacks) {
            let (name, first) = (quote(&names[*column]), first.path.display());
            let error = Error::malformed(&file.path, "schema", format!("has no column {name}, as {first} has"));
            return Err(error.hint("name the columns that all files have: { columns = { \"text\" } }"));
        }
    }
    Ok(columns.into())
}

pub(super) fn unknown(path: &Path, name: &str, names: &[Arc<str>]) -> Error {
    let list = names.iter().take(20).map(|n| quote(n)).collect::<Vec<_>>().join(", ");
    let hint = match did_you_mean(name, names.iter().map(|n| &**n)) {
        Some(near) => format!("did you mean {}?", quote(near)),
        None => format!("its columns are {list}"),
    };
    Error::malformed(path, "schema", format!("has no column {}", quote(name))).hint(hint)
}

/// The message of a foreign error, as one short line.
pub(super) fn plain(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
    line.trim_end_matches('.').to_string()
}

/// Reads records by file, unit and row there, each unit once, and returns them in the order of `places`.
pub(super) fn by_unit(
    places: &[(usize, usize, usize)],
    mut read: impl FnMut(usize, usize, &[usize]) -> Result<Vec<Record>>,
) -> Result<Vec<Record>> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|k| places[*k]);
    let mut out = vec![Record::default(); places.len()];
    for unit in order.chunk_by(|a, b| (places[*a].0, places[*a].1) == (places[*b].0, places[*b].1)) {
        let (file, number, _) = places[unit[0]];
        let rows: Vec<usize> = unit.iter().map(|k| places[*k].2).collect();
        for (k, record) in unit.iter().zip(read(file, number, &rows)?) {
            out[*k] = record;
        }
    }
    Ok(out)
}
