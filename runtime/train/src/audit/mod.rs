//! Recomputes a window of a recorded run and compares it with the record bit for bit.
//!
//! A window `A..B` is the steps A + 1 to B. It is recomputed from the last checkpoint of the record at or before A (from the beginning
//! where there is none), with the versions of the recipe that the history has, so the steps from that checkpoint on are all compared:
//!
//! - of each step the loss and every metric (the norm of the gradients is one), and the samples, where the run logged them;
//! - every evaluation;
//! - at each checkpoint of the record inside the window every State, weights and others alike, the position in the data, the random
//!   numbers and the learning rates;
//! - at the end of the run its weights, params and seed.
//!
//! The checkpoint at the start is trusted. The window before it ends there and compares its States, so windows that begin and end at
//! checkpoints (`windows.rs`) leave no gap. Not compared is what has no bits to compare: times, sensors, and what a recipe logs
//! itself (`run:log`), since observers do not run in a replay.

mod compare;
mod recording;
mod states;
pub mod windows;

pub(crate) use compare::Audit;
pub use recording::Recording;

use crate::error::Error;
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;

/// The steps `from + 1` to `to` of a run; without `to`, to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub from: u64,
    pub to: Option<u64>,
}

/// Parses `A..B`, `A..`, `..B` and `..`.
impl FromStr for Window {
    type Err = Error;

    fn from_str(text: &str) -> Result<Window, Error> {
        let wrong = |rule: &str| {
            Error::Usage(format!(
                "--steps {text}: {rule}\n  hint: A..B is the steps A + 1 to B, such as 400..500; A.. and ..B are open"
            ))
        };
        let (from, to) = text.split_once("..").ok_or_else(|| wrong("is not a window"))?;
        let bound = |side: &str| match side {
            "" => Ok(None),
            digits => digits.parse::<u64>().map(Some).map_err(|_| wrong(&format!("{digits} is not a number of steps"))),
        };
        let window = Window { from: bound(from)?.unwrap_or(0), to: bound(to)? };
        if window.to.is_some_and(|to| to <= window.from) {
            return Err(wrong("has no steps"));
        }
        Ok(window)
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to {
            Some(to) => write!(f, "{}..{to}", self.from),
            None => write!(f, "{}..", self.from),
        }
    }
}

/// The first value of a window that the recomputation does not have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The step after which it differs; 0 for what is known before the first step.
    pub step: u64,
    /// As in `loss`, `grad_norm`, `valid/loss`, `State model.weight`, `samples`.
    pub what: String,
    pub recorded: String,
    pub found: String,
    /// The file and line of the recipe that it belongs to, where they are known.
    pub place: Option<(String, u32)>,
}

impl Difference {
    /// Returns the difference as the fields of an event.
    pub fn json(&self) -> Value {
        let (file, line) = self.place.clone().unzip();
        json!({
            "step": self.step, "what": self.what, "recorded": self.recorded, "recomputed": self.found, "file": file, "line": line,
        })
    }
}

/// Formats `step 12: loss: recorded 0.5, recomputed 0.25 (a.lua:7)`.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {}: recorded {}, recomputed {}", self.step, self.what, self.recorded, self.found)?;
        self.place.as_ref().map_or(Ok(()), |(file, line)| write!(f, " ({file}:{line})"))
    }
}

/// The result of a window.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Audited {
    /// The checkpoint that it was recomputed from, whose States are trusted; 0 for the beginning of the run.
    pub start: u64,
    pub from: u64,
    pub to: u64,
    /// The numbers of steps, evaluations, checkpoints and logged samples that were compared.
    pub steps: u64,
    pub evaluations: u64,
    pub checkpoints: u64,
    pub samples: u64,
    pub difference: Option<Difference>,
}

impl Audited {
    /// Returns the event `window` of `--json`.
    pub fn json(&self) -> Value {
        json!({
            "event": "window", "from": self.from, "to": self.to, "start": self.start, "trusted": self.start > 0,
            "steps": self.steps, "evaluations": self.evaluations, "checkpoints": self.checkpoints, "samples": self.samples,
            "same": self.difference.is_none(), "difference": self.difference.as_ref().map(Difference::json),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_parsed() {
        let parse = |text: &str| text.parse::<Window>().map_err(|e| e.to_string());
        for (text, from, to) in [("3..9", 3, Some(9)), ("..9", 0, Some(9)), ("3..", 3, None), ("..", 0, None)] {
            assert_eq!(parse(text), Ok(Window { from, to }), "{text}");
        }
        assert_eq!(Window { from: 3, to: Some(9) }.to_string(), "3..9");
        for (text, rule) in [
            ("9", "is not a window"),
            ("a..9", "a is not a number"),
            ("9..9", "has no steps"),
            ("1...4", "not a number"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(rule) && error.contains("hint: A..B is the steps A + 1 to B"), "{error}");
        }
    }
}
