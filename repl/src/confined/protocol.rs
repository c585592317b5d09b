//! Defines the messages between the supervisor and the confined process: lines of JSON on two pipes.
//!
//! ```text
//! supervisor                              child
//!   Start                          ->
//!                                  <-     Walls           after the last wall, before the recipe's first line
//!   Go | Stop                      ->
//!                                  <-     Fetch(address)  one at a time
//!   Fetched | Unfetched            ->
//!                                  <-     Cancel          the run was interrupted meanwhile
//!   Signal(number)                 ->                      unless the child has had it itself
//! ```

use perilune_confine::{Files, Walls};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// The variable with the numbers of the child's two pipes: `READ,WRITE`.
pub const PIPES: &str = "PERILUNE_CONFINED";

/// Bytes of a message at most.
const LONGEST: u64 = 8 << 20;

/// What a person granted to the recipe of the confined process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Grants {
    /// The recipe, in whose folder modules are.
    pub recipe: Option<PathBuf>,
    pub reads: Vec<PathBuf>,
    pub writes: Vec<PathBuf>,
    /// Files and directories that the recipe reads under other names: those names, and what has them here.
    #[serde(default)]
    pub places: Vec<(PathBuf, PathBuf)>,
    /// The directory of results.
    pub run_dir: Option<PathBuf>,
    /// The directory from which relative paths start.
    pub start: Option<PathBuf>,
    pub kernels: bool,
    /// Whether the accesses of its kernels are checked, and the time that a launch may take.
    #[serde(default)]
    pub check_kernels: bool,
    #[serde(default)]
    pub kernel_time: Option<Duration>,
}

/// The first message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    pub grants: Grants,
    pub files: Files,
}

/// What the supervisor says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    Go,
    Stop,
    /// A signal that the supervisor has had.
    Signal(i32),
    Fetched {
        name: PathBuf,
        file: PathBuf,
        content: String,
    },
    Unfetched {
        message: String,
        hint: Option<String>,
        refused: bool,
    },
}

/// What the confined process says. It is not trusted: whatever it says gives it nothing that was not granted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Report {
    Walls(Walls),
    Fetch(String),
    Cancel,
}

/// Writes a message.
pub fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(io::Error::other)?;
    line.push(b'\n');
    to.write_all(&line).and_then(|()| to.flush())
}

/// Reads a message; `None` at the end.
pub fn receive<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if from.by_ref().take(LONGEST).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    serde_json::from_slice(&line).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_lines() {
        let mut pipe = Vec::new();
        send(&mut pipe, &Report::Fetch("https://a/\n".into())).unwrap();
        send(&mut pipe, &Report::Cancel).unwrap();
        let mut from = &pipe[..];
        assert!(matches!(receive(&mut from), Ok(Some(Report::Fetch(address))) if address == "https://a/\n"));
        assert!(matches!(receive(&mut from), Ok(Some(Report::Cancel))));
        assert!(matches!(receive::<Report>(&mut from), Ok(None)));
        assert!(receive::<Report>(&mut &b"{\"Exec\":[]}\n"[..]).is_err());
    }
}
