//! Parses the options of downloads, asks for grants at a terminal and shows progress.

use crate::console_out::{complain, say};
use crate::failure::Failure;
use crate::format::bytes;
use crate::terminal::one_line;
use indicatif::{ProgressBar, ProgressStyle};
use perilune_core::byte_size::amount;
use perilune_fetch::{Cache, Console, Error, Event, Grants, ProcessFetcher};
use std::io::{BufRead, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Options of which hosts data may be downloaded from.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct NetArgs {
    /// Let data be downloaded from HOST (*.HOST: all hosts below it); may be given several times. A process of its own downloads,
    /// the recipe never connects
    #[arg(long, value_name = "HOST[,HOST]", value_parser = |text: &str| Grants::parse(text).map_err(|e| e.to_string()))]
    allow_net: Vec<Grants>,
    /// Download nothing: data of addresses has to be in the cache
    #[arg(long, conflicts_with = "allow_net")]
    offline: bool,
    /// The largest file that is downloaded, such as 20GiB [default: what is free on the disk]
    #[arg(long, value_name = "BYTES", value_parser = amount)]
    max_download: Option<usize>,
}

/// Whether the variable of Hugging Face's tools forbids connections.
fn hub_is_offline() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_lowercase();
    ["1", "true", "yes", "on"].contains(&value.as_str())
}

impl NetArgs {
    /// Whether data may be downloaded from a host.
    pub fn allows(&self, host: &str) -> bool {
        !self.offline && self.allow_net.iter().any(|grants| grants.allows(host))
    }

    /// Lets data be downloaded from a host too; a name that is none is left out.
    pub fn allow(&mut self, host: &str) {
        self.allow_net.extend(Grants::parse(host).ok());
    }

    /// Returns the fetcher of a command, which starts this program again to download.
    pub fn fetcher(&self) -> Result<Arc<ProcessFetcher>, Failure> {
        let mut grants = Grants::default();
        self.allow_net.iter().for_each(|hosts| grants.extend(hosts));
        let program = std::env::current_exe();
        let program = program.map_err(|e| Failure::System(format!("the program does not find its own file: {e}")))?;
        let offline = match self.offline {
            true => Some("--offline"),
            false => hub_is_offline().then_some("HF_HUB_OFFLINE"),
        };
        Ok(Arc::new(ProcessFetcher {
            cache: Cache::of_user(),
            grants: Mutex::new(grants),
            offline,
            command: (program, vec!["fetch-process".into()]),
            max_bytes: self.max_download.map(|n| n as u64),
            stall_seconds: None,
            console: Box::new(Terminal::default()),
        }))
    }
}

/// The error of a fetch as one of a command.
pub fn failure(e: Error) -> Failure {
    Failure::System(e.to_string())
}

/// The person at a terminal, if there is one.
#[derive(Debug, Default)]
struct Terminal {
    bar: Mutex<Option<ProgressBar>>,
}

impl Console for Terminal {
    fn confirm(&self, host: &str, address: &str) -> bool {
        if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
            return false;
        }
        let mut err = std::io::stderr().lock();
        let text = format!("{} is not in the cache.\nConnect to {}? [y/N] ", one_line(address), one_line(host));
        if err.write_all(text.as_bytes()).and_then(|()| err.flush()).is_err() {
            return false;
        }
        let mut answer = String::new();
        let read = std::io::stdin().lock().read_line(&mut answer);
        read.is_ok() && ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str())
    }

    fn show(&self, address: &str, event: &Event) {
        let live = std::io::stderr().is_terminal();
        let mut bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Waiting => complain("", &format!("another process downloads {address}; waiting for it")),
            // A retry states the size again.
            Event::Size { .. } if bar.is_some() => {}
            Event::Size { total, done } => {
                let size = total
                    .map(|n| format!(" ({})", bytes(usize::try_from(n).unwrap_or(usize::MAX))))
                    .unwrap_or_default();
                complain("", &format!("downloading {address}{size}"));
                let made = match total {
                    Some(total) if live => ProgressBar::new(*total),
                    None if live => ProgressBar::no_length(),
                    _ => ProgressBar::hidden(),
                };
                let style = "{bar:20} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
                let style = if total.is_some() { style } else { "{spinner} {bytes}, {bytes_per_sec}" };
                if let Ok(style) = ProgressStyle::with_template(style) {
                    made.set_style(style);
                }
                made.set_position(*done);
                *bar = Some(made);
            }
            Event::Progress { done } => {
                if let Some(bar) = bar.as_ref() {
                    bar.set_position(*done);
                }
            }
            Event::Done { .. } | Event::Failed(_) => {
                if let Some(bar) = bar.take() {
                    bar.finish_and_clear();
                }
            }
        }
    }
}

/// Prints a line of a listing.
pub fn line(text: &str) -> Result<(), Failure> {
    say(&one_line(text))
}
