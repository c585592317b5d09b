//! Runs one benchmark case of Perilune in a child process and parses its timings.

use super::FIRST;
use crate::failure::Failure;
use std::path::Path;
use std::process::{Command, Stdio};

/// A measurement: microseconds of a run, seconds of the first one, peak bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    pub micros: f64,
    pub first: f64,
    pub bytes: u64,
}

/// The command line of a case's process.
pub struct Ours<'a> {
    pub folder: &'a Path,
    pub family: &'static str,
    pub device: String,
    pub threads: usize,
}

impl Ours<'_> {
    fn run(&self, case: &str, seconds: f64, cache: Option<&Path>) -> Result<String, String> {
        let me = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
        let mut command = Command::new(me);
        command.arg("run").arg(self.folder.join(format!("{}.lua", self.family))).arg("--quiet");
        command.args(["--device", &self.device, "--threads", &self.threads.to_string()]);
        command.args(["--set", &format!("case={case}"), "--set", &format!("seconds={seconds:?}")]);
        if let Some(cache) = cache {
            command.env("PERILUNE_CACHE", cache);
        }
        let out =
            command.stdin(Stdio::null()).output().map_err(|e| format!("cannot start a process for the case: {e}"))?;
        if out.status.success() {
            return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&out.stderr);
        let line = text.lines().find(|l| !l.trim().is_empty()).unwrap_or("it ended without output");
        Err(format!("ours: {line}"))
    }

    /// Lists the cases of the device, derived ones included.
    pub fn cases(&self) -> Result<Vec<String>, Failure> {
        let out = self.run("list", 0.0, None).map_err(Failure::System)?;
        let mut names: Vec<String> = out.lines().map(str::to_string).collect();
        let made = FIRST.iter().filter(|f| names.iter().any(|n| n == f.1)).map(|f| f.0.to_string());
        names.extend(made.collect::<Vec<_>>());
        Ok(names)
    }

    /// Measures a case for about `seconds`, with its own kernel cache if one is given.
    pub fn measure(&self, case: &str, seconds: f64, cache: Option<&Path>) -> Result<Figure, String> {
        figure(&self.run(case, seconds, cache)?)
    }

    /// Whether the table has memory peaks: not on the CPU, where PyTorch does not count them.
    pub fn counts_memory(&self) -> bool {
        self.family != "cpu"
    }
}

/// Reads the last line of a case: `micros first bytes`.
fn figure(out: &str) -> Result<Figure, String> {
    let line = out.lines().last().unwrap_or("");
    let words: Vec<&str> = line.split_whitespace().collect();
    let read = match words[..] {
        [micros, first, bytes] => micros.parse().ok().zip(first.parse().ok()).zip(bytes.parse().ok()),
        _ => None,
    };
    let figure = read.map(|((micros, first), bytes)| Figure { micros, first, bytes });
    figure.ok_or_else(|| format!("ours printed '{line}' where a time and a memory peak were expected"))
}

#[cfg(test)]
mod tests {
    use super::{Figure, figure};

    #[test]
    fn the_result_is_parsed_from_the_last_line() {
        let expected = Figure { micros: 12.5, first: 0.25, bytes: 12 << 30 };
        assert_eq!(figure("a word\n12.5 0.25 12884901888\n").unwrap(), expected);
        for bad in ["12.5", "12.5 0.25", "12.5 0.25 -1", "12.5 0.25 1e9", "12.5 0.25 1 2", ""] {
            assert!(figure(bad).unwrap_err().contains(&format!("'{bad}'")), "{bad}");
        }
    }
}
