//! Runs downloads in a process of their own, so that the process that runs recipes opens no socket.
//!
//! The fetching process gets one [`Request`] as a line of JSON on its standard input and writes [`Event`]s, one on each line. It
//! ends when the other end of the pipe closes.

use crate::address::Address;
use crate::cache::{Cache, Cached};
use crate::download::{Download, Limits, download};
use crate::error::{Error, Result};
use crate::grants::Grants;
use crate::hash::{Algorithm, ContentHash};
use crate::origin::process_environment;
use perilune_policy::{Fetched, Fetcher, Unfetched};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What the fetching process downloads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    pub address: String,
    pub hash: Option<String>,
    /// Whether to compute BLAKE3 instead of SHA-256 where no hash is given.
    pub blake3: bool,
    pub cache: PathBuf,
    pub grants: Grants,
    pub max_bytes: Option<u64>,
    /// See [`Limits::stall`].
    pub stall_seconds: Option<f64>,
}

/// What the fetching process reports.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Event {
    /// Another process downloads the same content.
    Waiting,
    Size {
        total: Option<u64>,
        done: u64,
    },
    Progress {
        done: u64,
    },
    Done {
        path: PathBuf,
        hash: String,
        bytes: u64,
    },
    Failed(Error),
}

/// Time between two looks at the interrupt.
const POLL: Duration = Duration::from_millis(20);
/// Bytes of a request.
const LONGEST: u64 = 1 << 20;

/// Serves one request: the whole work of the fetching process.
///
/// # Errors
/// The request is malformed, or the pipe is closed. A failed download is an [`Event::Failed`].
pub fn serve(input: impl Read, mut output: impl Write) -> Result<()> {
    let mut line = String::new();
    let read = BufReader::new(input.take(LONGEST)).read_line(&mut line);
    read.map_err(|e| Error::new(format!("no request: {e}")))?;
    let request: Request = serde_json::from_str(&line).map_err(|e| Error::new(format!("no request: {e}")))?;
    let mut write = |event: Event| {
        let text = serde_json::to_string(&event).map_err(|e| Error::new(e.to_string()))?;
        writeln!(output, "{text}").and_then(|()| output.flush()).map_err(|e| Error::new(format!("nobody listens: {e}")))
    };
    match fetch(&request, &mut write) {
        Ok(Cached { path, hash, bytes }) => write(Event::Done { path, hash: hash.to_string(), bytes }),
        Err(e) => write(Event::Failed(e)),
    }
}

fn fetch(request: &Request, report: &mut dyn FnMut(Event) -> Result<()>) -> Result<Cached> {
    let address = Address::parse(&request.address)?;
    let hash = request.hash.as_deref().map(ContentHash::parse).transpose()?;
    let cache = Cache::at(&request.cache);
    let mut limits = Limits { max_bytes: request.max_bytes, ..Limits::default() };
    if let Some(stall) = request.stall_seconds.and_then(|s| std::time::Duration::try_from_secs_f64(s).ok()) {
        limits.stall = stall;
    }
    let job = Download {
        address: &address,
        hash: hash.as_ref(),
        algorithm: if request.blake3 { Algorithm::Blake3 } else { Algorithm::Sha256 },
        cache: &cache,
        grants: &request.grants,
        limits: &limits,
        env: &process_environment,
    };
    download(&job, report)
}

/// Asks the person and shows progress.
pub trait Console: Debug + Send + Sync {
    /// Whether the person allows a connection; `false` where there is nobody to ask.
    fn confirm(&self, host: &str, address: &str) -> bool;

    /// Shows the progress of a download.
    fn show(&self, address: &str, event: &Event);
}

/// Finds content in the cache, or has it downloaded by a process of its own.
#[derive(Debug)]
pub struct ProcessFetcher {
    pub cache: Result<Cache>,
    pub grants: Mutex<Grants>,
    /// What forbids connections, as in `--offline`.
    pub offline: Option<&'static str>,
    /// The program and the arguments that make it [`serve`].
    pub command: (PathBuf, Vec<String>),
    pub max_bytes: Option<u64>,
    pub stall_seconds: Option<f64>,
    pub console: Box<dyn Console>,
}

/// Ends the process with its reader.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ProcessFetcher {
    /// Finds or downloads the content of an address. A download ends when `stop` returns true; what has arrived is kept.
    ///
    /// # Errors
    /// It is not cached and may not be downloaded, or the download fails.
    pub fn get(
        &self,
        address: &Address,
        hash: Option<&ContentHash>,
        algorithm: Algorithm,
        stop: &dyn Fn() -> bool,
    ) -> Result<Cached> {
        let cache = self.cache.as_ref().map_err(Error::clone)?;
        if let Some(found) = hash.and_then(|hash| cache.find(hash)) {
            return Ok(found);
        }
        if let Some(why) = self.offline {
            let content = hash.map(|hash| format!(" ({hash})")).unwrap_or_default();
            return Err(Error::new(format!("{address}{content} is not in the cache, and {why} forbids connections"))
                .hint(format!("download it where there is a network: perilune fetch {address}")));
        }
        let grants = || self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        let host = crate::origin::host(address)?;
        let mut missing = (!grants().allows(&host)).then(|| {
            let e = Error::new(format!("{address} is not in the cache, and the host {host} is not granted"));
            Error { host: Some(host), ..e }
        });
        // Each redirect may lead to one more host.
        for _ in 0..10 {
            if let Some(error) = missing.take() {
                let host = error.host.clone().unwrap_or_default();
                if !self.console.confirm(&host, &address.to_string()) {
                    return Err(error.hint(format!("allow it on the command line: --allow-net={host}")));
                }
                grants().add(&host)?;
            }
            let request = Request {
                address: address.to_string(),
                hash: hash.map(ContentHash::to_string),
                blake3: algorithm == Algorithm::Blake3,
                cache: cache.root().to_path_buf(),
                grants: grants().clone(),
                max_bytes: self.max_bytes,
                stall_seconds: self.stall_seconds,
            };
            match self.ask(&request, stop) {
                Err(e) if e.host.is_some() => missing = Some(e),
                result => return result,
            }
        }
        Err(Error::new(format!("{address} leads to more than 10 hosts")))
    }

    /// Starts the fetching process and waits for its end.
    fn ask(&self, request: &Request, stop: &dyn Fn() -> bool) -> Result<Cached> {
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(format!("{}: cannot start the fetching process: {e}", request.address))
        };
        let (program, arguments) = &self.command;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Ended(command.spawn().map_err(|e| failed(&e))?);
        let text = serde_json::to_string(request).map_err(|e| failed(&e))?;
        let sent = child.0.stdin.take().map(|mut input| writeln!(input, "{text}"));
        sent.transpose().map_err(|e| failed(&e))?;
        let output = child.0.stdout.take().ok_or_else(|| failed(&"it has no output"))?;
        let (send, events) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                let Ok(event) = serde_json::from_str::<Event>(&line) else { break };
                if send.send(event).is_err() {
                    break;
                }
            }
        });
        loop {
            let event = match events.recv_timeout(POLL) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if !stop() => continue,
                Err(RecvTimeoutError::Timeout) => {
                    let e = Error::new(format!("{}: the download was interrupted", request.address));
                    self.console.show(&request.address, &Event::Failed(e.clone()));
                    return Err(e);
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.console.show(&request.address, &event);
            match event {
                Event::Done { path, hash, bytes } => {
                    return Ok(Cached { path, hash: ContentHash::parse(&hash)?, bytes });
                }
                Event::Failed(e) => return Err(e),
                _ if stop() => return Err(Error::new(format!("{}: the download was interrupted", request.address))),
                _ => {}
            }
        }
        let status = child.0.wait().map(|status| status.to_string()).unwrap_or_default();
        Err(Error::new(format!("{}: the download was ended ({status})", request.address))
            .hint("start again: the download continues where it stopped"))
    }
}

impl Fetcher for ProcessFetcher {
    fn fetch(&self, address: &str, stop: &dyn Fn() -> bool) -> std::result::Result<Fetched, Unfetched> {
        let found = Address::with_hash(address).and_then(|(address, hash)| {
            let Some(hash) = hash else {
                return Err(Error::new(format!("{address} has no hash")).hint(format!(
                    "`perilune fetch {address}` downloads it and prints the line to paste: hash = \"sha256:…\""
                )));
            };
            Ok((self.get(&address, Some(&hash), Algorithm::Sha256, stop)?, address, hash))
        });
        match found {
            Ok((cached, address, hash)) => {
                Ok(Fetched { name: PathBuf::from(address.name()), file: cached.path, content: hash.to_string() })
            }
            Err(e) => Err(Unfetched { message: e.message, hint: e.hint, refused: e.host.is_some() }),
        }
    }
}
