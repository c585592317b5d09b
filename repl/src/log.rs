//! Sets up tracing: `PERILUNE_LOG` selects what is logged (as in `debug` or `perilune_engine=trace`), `--log` the file. Without
//! either, spans and events cost a load and a branch each.

use crate::failure::{Failure, disk};
use crate::terminal::EscapedLog;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// The filter of `--log FILE` without the variable.
const DEFAULT: &str = "debug";

static FILE: OnceLock<PathBuf> = OnceLock::new();

/// The file of the log, if there is one.
pub fn file() -> Option<&'static Path> {
    FILE.get().map(PathBuf::as_path)
}

/// Starts logging if the variable or the option is set.
pub fn start(file: Option<&Path>) -> Result<(), Failure> {
    let asked = std::env::var("PERILUNE_LOG").ok().filter(|v| !v.is_empty());
    if asked.is_none() && file.is_none() {
        return Ok(());
    }
    let filter = asked.as_deref().unwrap_or(DEFAULT);
    let filter = EnvFilter::try_new(filter).map_err(|e| {
        Failure::Usage(format!(
            "PERILUNE_LOG={filter}: {e}; give a level (error, warn, info, debug, trace) or target=level"
        ))
    })?;
    // A span logs its duration when it ends.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_span_events(FmtSpan::CLOSE);
    match file {
        Some(path) => {
            let out = std::fs::File::create(path).map_err(disk("write the log to", path))?;
            let _ = FILE.set(path.to_path_buf());
            log.with_ansi(false).with_writer(Mutex::new(EscapedLog { to: out, color: false })).init();
        }
        None => {
            let color = crate::console_out::color(std::io::stderr().is_terminal());
            log.with_ansi(color).with_writer(move || EscapedLog { to: std::io::stderr(), color }).init();
        }
    }
    Ok(())
}
