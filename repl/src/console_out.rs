//! Routes text to stdout and stderr: results and progress to stdout, warnings and errors to stderr; with `--json` only events
//! go to stdout.
//!
//! A closed pipe (`| head`) neither panics nor stops a training run: further output is dropped. Colour follows NO_COLOR,
//! CLICOLOR_FORCE and TERM=dumb. All text is escaped (`terminal.rs`).

use crate::terminal::{json, rendered, styled};
use indicatif::ProgressBar;
use serde_json::Value;
use std::cell::Cell;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Selects what goes to stdout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Human,
    Quiet,
    Json,
    /// Nothing: another process of the job prints.
    Silent,
}

/// The output of a command.
pub struct ConsoleOut {
    pub mode: Mode,
    /// A progress line is rewritten in place.
    pub live: bool,
    pub color: bool,
    bar: SharedBar,
    /// The pipe of stdout is closed.
    lost: Cell<bool>,
    /// Whether training has begun, which a closed pipe does not end.
    pub training: Cell<bool>,
}

/// The progress bar that other output has to avoid.
type SharedBar = Arc<Mutex<Option<ProgressBar>>>;

/// Runs `f` while the progress line is hidden.
fn beside(bar: &SharedBar, f: impl FnOnce()) {
    let bar = bar.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(f),
        None => f(),
    }
}

/// Prints from other threads than that of the run.
#[derive(Clone)]
pub struct Notifier {
    mode: Mode,
    bar: SharedBar,
}

impl Notifier {
    /// Prints a text on stderr, and with `--json` an event on stdout.
    pub fn note(&self, text: &str, event: &Value) {
        if self.mode == Mode::Silent {
            return;
        }
        beside(&self.bar, || {
            complain("", text);
            if self.mode == Mode::Json {
                // One call of write, so that no other line comes between; a closed pipe is reported elsewhere.
                let line = format!("{}\n", json(&event.to_string()));
                let mut out = std::io::stdout().lock();
                let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
            }
        });
    }
}

fn set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|v| !v.is_empty())
}

fn dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|t| t == "dumb")
}

/// Whether a stream takes colour (no-color.org, bixense.com/clicolors).
pub fn color(is_terminal: bool) -> bool {
    if set("NO_COLOR") {
        return false;
    }
    let forced = std::env::var_os("CLICOLOR_FORCE").is_some_and(|v| !v.is_empty() && v != "0");
    forced || (is_terminal && !dumb())
}

/// Prints `word: text` on stderr, the word in colour.
pub fn complain(word: &str, text: &str) {
    let text = rendered(text);
    let mut err = std::io::stderr().lock();
    let code = if word == "warning" { 33 } else { 31 };
    let _ = match (word, color(std::io::stderr().is_terminal())) {
        ("", _) => writeln!(err, "{text}"),
        (word, true) => writeln!(err, "\x1b[1;{code}m{word}:\x1b[0m {text}"),
        (word, false) => writeln!(err, "{word}: {text}"),
    };
}

/// Prints an error that begins with a file and a line on stderr. Without a terminal nothing is in front of them.
pub fn complain_at(text: &str) {
    complain(if color(std::io::stderr().is_terminal()) { "error" } else { "" }, text);
}

/// Prints a text. A closed pipe is not an error.
pub fn say(text: &str) -> Result<(), crate::failure::Failure> {
    let mut out = std::io::stdout().lock();
    let text = rendered(text);
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    match write!(out, "{text}{newline}").and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(crate::failure::Failure::System(format!("cannot write to stdout: {}", crate::failure::plain(&e))))
        }
        _ => Ok(()),
    }
}

impl ConsoleOut {
    /// Creates the output; colour and the live line depend on the terminal.
    pub fn new(mode: Mode) -> ConsoleOut {
        let terminal = std::io::stdout().is_terminal();
        ConsoleOut {
            mode,
            live: mode == Mode::Human && terminal && !dumb(),
            color: color(terminal),
            bar: SharedBar::default(),
            lost: Cell::new(false),
            training: Cell::new(false),
        }
    }

    /// Returns what prints from other threads.
    pub fn notifier(&self) -> Notifier {
        Notifier { mode: self.mode, bar: self.bar.clone() }
    }

    /// Sets the progress bar that other output has to avoid.
    pub fn set_bar(&self, bar: Option<ProgressBar>) {
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }

    /// Runs `f` while the progress line is hidden.
    fn aside(&self, f: impl FnOnce()) {
        beside(&self.bar, f);
    }

    /// Runs `f`, which prints directly, while there is no progress line.
    pub fn without_bar<T>(&self, f: impl FnOnce() -> T) -> T {
        let bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take();
        let out = match &bar {
            Some(bar) => bar.suspend(f),
            None => f(),
        };
        self.set_bar(bar);
        out
    }

    /// Prints a line, escaped.
    fn out(&self, text: &str) {
        self.raw(&rendered(text));
    }

    fn raw(&self, text: &str) {
        if self.lost.get() || self.mode == Mode::Silent {
            return;
        }
        self.aside(|| {
            let mut out = std::io::stdout().lock();
            if let Err(e) = writeln!(out, "{text}").and_then(|()| out.flush()) {
                if e.kind() != ErrorKind::BrokenPipe {
                    complain("warning", &format!("cannot write to stdout: {}", crate::failure::plain(&e)));
                } else if !self.training.get() {
                    std::process::exit(0);
                }
                self.lost.set(true);
            }
        });
    }

    /// Prints a line of progress: not with `--quiet` or `--json`.
    pub fn line(&self, text: &str) {
        if self.mode == Mode::Human {
            self.out(text);
        }
    }

    /// Prints a result: not with `--json`.
    pub fn result(&self, text: &str) {
        if self.mode != Mode::Json {
            self.out(text);
        }
    }

    /// Prints output of the recipe.
    pub fn print(&self, text: &str) {
        if self.mode == Mode::Json {
            let _ = writeln!(std::io::stderr().lock(), "{}", rendered(text));
        } else {
            self.out(text);
        }
    }

    /// Prints an event, with `--json` only.
    pub fn event(&self, event: &Value) {
        if self.mode == Mode::Json {
            self.raw(&json(&event.to_string()));
        }
    }

    /// Prints a warning on stderr.
    pub fn warn(&self, text: &str) {
        if self.mode != Mode::Silent {
            self.aside(|| complain("warning", text));
        }
    }

    /// Prints text on stderr without a prefix.
    pub fn note(&self, text: &str) {
        if self.mode != Mode::Silent {
            self.aside(|| complain("", text));
        }
    }

    /// Returns `text` dimmed, where there is colour.
    pub fn dim(&self, text: &str) -> String {
        if self.color { styled("2", text) } else { text.to_string() }
    }

    /// Returns `text` in bold, where there is colour.
    pub fn bold(&self, text: &str) -> String {
        if self.color { styled("1", text) } else { text.to_string() }
    }
}
