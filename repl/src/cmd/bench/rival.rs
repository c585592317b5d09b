//! Measures cases of PyTorch in one Python process, which answers questions over its pipes.

use super::BenchArgs;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The Python process.
pub struct Rival {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    pub version: String,
}

impl Rival {
    /// Starts Python; an error is the reason for having no rival.
    pub fn start(args: &BenchArgs, folder: &Path, family: &str, threads: usize) -> Result<Rival, String> {
        let python = args.python.display();
        let mut command = Command::new(&args.python);
        command.arg(folder.join("rival.py")).args([family, &threads.to_string()]);
        command.env("TORCHINDUCTOR_CACHE_DIR", folder.join("inductor")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("OMP_NUM_THREADS", threads.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|e| format!("cannot start {python}: {}", crate::failure::plain(&e)))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (Some(to), Some(from)) = (to, from) else { return Err(format!("{python} has no pipes")) };
        let mut rival = Rival { child, to, from: BufReader::new(from), version: String::new() };
        let hello = rival.answer()?;
        match (hello["version"].as_str(), hello["error"].as_str()) {
            (Some(version), _) => rival.version = version.to_string(),
            (_, error) => return Err(format!("{python}: {}", error.unwrap_or("no answer"))),
        }
        Ok(rival)
    }

    fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(n) if n > 0 => {
                serde_json::from_str(&line).map_err(|e| format!("the PyTorch process answered '{}': {e}", line.trim()))
            }
            _ => Err("the PyTorch process ended without an answer".into()),
        }
    }

    /// Measures a case; the answer is the JSON object of `rival.py`.
    pub fn ask(&mut self, case: &str, seconds: f64, compile: bool) -> Result<Value, String> {
        let line = json!({ "case": case, "seconds": seconds, "compile": compile });
        writeln!(self.to, "{line}")
            .and_then(|()| self.to.flush())
            .map_err(|_| "the PyTorch process has ended".to_string())?;
        self.answer()
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
