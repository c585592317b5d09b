//! Defines the error type: the mistake in a recipe, and its cure.
//!
//! A message names the op, the offending values, the rule and, if there is one, the cure (`hint`). The Lua layer adds
//! the recipe's file and line. Callers match on `kind`, never on text.

use std::fmt;

/// The kind of mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Shapes do not fit the op.
    Shape,
    /// Dtypes do not fit the op.
    DType,
    /// An argument or option is out of its range, misspelt or missing.
    Argument,
    /// A handle is used after the step that recorded it has ended.
    Stale,
    /// A derivative that does not exist was requested.
    Gradient,
    /// Memory, or a budget for it, is exhausted. The engine adds what holds it.
    Memory,
    /// A device or a file failed.
    System,
    /// The user interrupted the run.
    Interrupted,
    /// A device has stopped for a mistake that another device of its mesh reports.
    Elsewhere,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    pub kind: Kind,
    /// The op or function as the user spells it; empty if there is none.
    pub op: String,
    pub message: String,
    pub hint: Option<String>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(kind: Kind, op: impl Into<String>, message: impl Into<String>) -> Error {
        Error { kind, op: op.into(), message: message.into(), hint: None }
    }

    pub fn shape(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::Shape, op, message)
    }

    pub fn dtype(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::DType, op, message)
    }

    pub fn argument(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::Argument, op, message)
    }

    pub fn gradient(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::Gradient, op, message)
    }

    pub fn memory(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::Memory, op, message)
    }

    pub fn system(op: &str, message: impl Into<String>) -> Error {
        Error::new(Kind::System, op, message)
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.op.is_empty() {
            write!(f, "{}: ", self.op)?;
        }
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Bytes of a name that is compared with others.
const LONGEST_NAME: usize = 100;
/// Candidates that a name is compared with.
const MOST_CANDIDATES: usize = 5000;

/// The candidate nearest to `name`, if it is near enough for a likely typo.
///
/// The distance is optimal string alignment (insert, delete, substitute, swap of adjacent letters). A candidate is near
/// if at most a third of its letters, and at most three, differ. A name that contains the candidate as a whole word or
/// prefix also counts (`leraning_rate` matches `lr` only through the caller's alias list).
///
/// Names longer than 100 bytes have no suggestion, and of very many candidates only the first 5,000 are compared, which bounds
/// the work.
pub fn did_you_mean<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST_NAME {
        return None;
    }
    let lower = name.to_lowercase();
    candidates
        .into_iter()
        .take(MOST_CANDIDATES)
        .filter(|c| c.len() <= LONGEST_NAME)
        .map(|c| (edit_distance(&lower, &c.to_lowercase()), c))
        .filter(|(d, c)| *d <= (c.chars().count().max(name.chars().count()) / 3).clamp(1, 3))
        .min_by_key(|(d, c)| (*d, c.len()))
        .map(|(_, c)| c)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for j in 0..=b.len() {
        rows[0][j] = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let cost = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + cost);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions_are_near_or_absent() {
        assert_eq!(did_you_mean("keepdims", ["keepdim", "dim"]), Some("keepdim"));
        assert_eq!(did_you_mean("stpes", ["steps", "batch"]), Some("steps"));
        assert_eq!(did_you_mean("zebra", ["steps", "batch"]), None);
    }
}
