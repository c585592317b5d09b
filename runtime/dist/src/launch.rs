//! Starts the processes of a job on this host, and ends all of them when one fails.
//!
//! Each process gets the variables of torchrun. Process 0 keeps the terminal's output; what the others print goes to stderr with
//! their rank before each line. The launcher forwards signals. A process that fails tells the others over their connections, so
//! they normally end by themselves; those that do not get SIGTERM and then SIGKILL.

use crate::rendezvous::{Address, Env};
use perilune_core::error::{Error, Result};
use rustc_hash::FxHashMap;
use rustix::process::{Pid, Signal, getppid, kill_process, test_kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// The exit status of a run that has written a checkpoint and asks to be started again.
pub const RESTART: u8 = 75;
/// After a failure: when the other processes get SIGTERM, and when SIGKILL.
const TERM_AFTER: Duration = Duration::from_secs(10);
const KILL_AFTER: Duration = Duration::from_secs(25);
const POLL: Duration = Duration::from_millis(20);
/// Names the launcher's process to those it starts.
const LAUNCHER: &str = "PERILUNE_LAUNCHER";
/// The file for the error of a process, as torchrun names it.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// Bytes of a line that is shown of another process than 0.
const MOST_LINE: u64 = 64 << 10;

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Processes on this host.
    pub processes: usize,
    pub max_restarts: usize,
    /// The number of hosts, each with a launcher, and which of them this is.
    pub nodes: usize,
    pub node_rank: usize,
    /// Where rank 0 listens; needed for several hosts.
    pub address: Option<Address>,
}

/// How a job ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// That of the first failure, or 0.
    pub status: u8,
    /// What to say about it; empty if nothing is left to say.
    pub message: String,
}

fn system(what: &str, e: &std::io::Error) -> Error {
    Error::system("launch", format!("{what}: {e}"))
}

/// Starts the processes, and again after failures that a restart may cure. Blocks until all have ended.
pub fn launch(spec: &Launch, mut note: impl FnMut(&str)) -> Result<Outcome> {
    let rule = |message: String| Err(Error::argument("launch", message));
    if spec.processes == 0 || spec.processes > 1024 {
        return rule(format!("-n {}: the number of processes on a host is from 1 to 1024", spec.processes));
    }
    if spec.node_rank >= spec.nodes {
        return rule(format!(
            "--node-rank {}: not less than --nodes {}; ranks count from 0",
            spec.node_rank, spec.nodes
        ));
    }
    if spec.nodes > 1 && spec.address.is_none() {
        return rule(format!(
            "--nodes {}: several hosts need --master HOST:PORT, the address of the first one",
            spec.nodes
        ));
    }
    // The processes inherit that a signal is ignored, as SIGHUP is under nohup.
    let forwarded = [SIGINT, SIGTERM, SIGUSR1, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
    let mut signals = Signals::new(forwarded).map_err(|e| system("cannot listen for signals", &e))?;
    let mut attempt = 0;
    loop {
        let mut job = Job::start(spec, attempt)?;
        let outcome = job.wait(&mut signals);
        if attempt == spec.max_restarts || job.forwarded.is_some() || !is_curable(outcome.status) {
            return Ok(outcome);
        }
        attempt += 1;
        let why = if outcome.message.is_empty() { format!("exit status {}", outcome.status) } else { outcome.message };
        note(&format!("restart {attempt} of at most {}: {why}", spec.max_restarts));
    }
}

/// Whether another attempt can succeed where one ended with this status. Wrong usage, an error in the recipe, a refusal and a
/// signal by the user stay what they are.
fn is_curable(status: u8) -> bool {
    !matches!(status, 0 | 2 | 3 | 4 | 129 | 130 | 143)
}

/// Whether this process ignores a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// The arguments of a restart: it continues from the last checkpoint.
fn arguments(args: &[OsString], attempt: usize) -> Vec<OsString> {
    let mut args = args.to_vec();
    if attempt > 0 && !args.iter().any(|a| a == "--resume") {
        args.retain(|a| a != "--overwrite");
        args.push("--resume".into());
    }
    args
}

/// The processes of one attempt.
struct Job {
    all: Vec<Process>,
    first_rank: usize,
    /// The folder of the error files.
    errors: PathBuf,
    /// The last signal that was forwarded.
    forwarded: Option<i32>,
}

struct Process {
    child: Child,
    ended: Option<ExitStatus>,
    printers: Vec<JoinHandle<()>>,
}

fn free_port() -> std::io::Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr().map(|a| a.port())
}

impl Job {
    fn start(spec: &Launch, attempt: usize) -> Result<Job> {
        let address = match &spec.address {
            Some(address) => address.clone(),
            None => {
                let port = free_port().map_err(|e| system("there is no free port", &e))?;
                Address { host: "127.0.0.1".into(), port }
            }
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let id = format!("launch-{}-{}", std::process::id(), now.as_millis());
        let errors = std::env::temp_dir().join(format!("perilune-{id}"));
        std::fs::create_dir_all(&errors).map_err(|e| system(&format!("cannot create {}", errors.display()), &e))?;
        let mut job = Job { all: Vec::new(), first_rank: spec.node_rank * spec.processes, errors, forwarded: None };
        let lines = Arc::new(Mutex::new(Lines::default()));
        for local in 0..spec.processes {
            let rank = job.first_rank + local;
            let mut command = Command::new(&spec.program);
            command.args(arguments(&spec.args, attempt));
            // Processes in groups of their own get the terminal's signals through the launcher only, so once.
            command.process_group(0).stdin(Stdio::null());
            if rank > 0 {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            for (name, value) in [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", (spec.processes * spec.nodes).to_string()),
                ("LOCAL_RANK", local.to_string()),
                ("LOCAL_WORLD_SIZE", spec.processes.to_string()),
                ("GROUP_RANK", spec.node_rank.to_string()),
                ("MASTER_ADDR", address.host.clone()),
                ("MASTER_PORT", address.port.to_string()),
                ("TORCHELASTIC_RESTART_COUNT", attempt.to_string()),
                // Launchers of several hosts have no common name for the job.
                ("TORCHELASTIC_RUN_ID", if spec.nodes == 1 { id.clone() } else { "none".into() }),
                (LAUNCHER, std::process::id().to_string()),
            ] {
                command.env(name, value);
            }
            command.env(ERROR_FILE, job.error_file(rank)).env_remove("TORCHELASTIC_USE_AGENT_STORE");
            let child = command.spawn().map_err(|e| system(&format!("cannot start {}", spec.program.display()), &e));
            let mut child = child.inspect_err(|_| job.end_all())?;
            let mut printers = Vec::new();
            let out = child.stdout.take().map(|out| Box::new(out) as Box<dyn Read + Send>);
            let err = child.stderr.take().map(|err| Box::new(err) as Box<dyn Read + Send>);
            for pipe in out.into_iter().chain(err) {
                let lines = lines.clone();
                printers.push(std::thread::spawn(move || print_lines(rank, pipe, &lines)));
            }
            job.all.push(Process { child, ended: None, printers });
        }
        Ok(job)
    }

    fn error_file(&self, rank: usize) -> PathBuf {
        self.errors.join(format!("rank-{rank}.json"))
    }

    fn signal(&self, signal: Signal) {
        for process in self.all.iter().filter(|p| p.ended.is_none()) {
            // It can have ended a moment ago; it is not reaped yet, so the number is still its own.
            let _ = kill_process(Pid::from_child(&process.child), signal);
        }
    }

    fn end_all(&mut self) {
        self.signal(Signal::KILL);
        for process in &mut self.all {
            let _ = process.child.wait();
        }
    }

    /// Waits until all processes have ended.
    fn wait(&mut self, signals: &mut Signals) -> Outcome {
        // Local ranks in the order in which they failed, and when the first did.
        let (mut failed, mut since, mut stage) = (Vec::new(), None, 0);
        while self.all.iter().any(|p| p.ended.is_none()) {
            for signal in signals.pending() {
                self.forwarded = Some(signal);
                if let Some(named) = Signal::from_named_raw(signal) {
                    self.signal(named);
                }
            }
            for (local, process) in self.all.iter_mut().enumerate().filter(|(_, p)| p.ended.is_none()) {
                // An error means that somebody else has reaped the process.
                let ended = process.child.try_wait().unwrap_or(Some(ExitStatus::from_raw(1 << 8)));
                process.ended = ended;
                // What the launcher has signalled because of a failure is no other failure.
                if stage == 0 && ended.is_some_and(|e| is_failure(e, self.forwarded)) {
                    failed.push(local);
                    since.get_or_insert_with(Instant::now);
                }
            }
            let time = since.map_or(Duration::ZERO, |since| since.elapsed());
            if stage == 0 && time >= TERM_AFTER {
                self.signal(Signal::TERM);
                stage = 1;
            }
            if stage == 1 && time >= KILL_AFTER {
                self.signal(Signal::KILL);
                stage = 2;
            }
            std::thread::sleep(POLL);
        }
        for process in &mut self.all {
            // The pipe ends with the process, unless a process that it started still holds it.
            for printer in process.printers.drain(..).filter(|_| stage == 0) {
                let _ = printer.join();
            }
        }
        self.outcome(&failed)
    }

    fn outcome(&self, failed: &[usize]) -> Outcome {
        let of = |local: usize| self.all[local].ended.unwrap_or_default();
        // The process that recorded its error first has failed by itself, the others may have failed because of it.
        let recorded = failed.iter().filter_map(|local| {
            let (time, text) = read_error(&self.error_file(self.first_rank + local))?;
            Some((time, *local, text))
        });
        let recorded = recorded.min();
        let killed = failed.iter().find(|local| of(**local).signal().is_some());
        let first = recorded.as_ref().map(|r| r.1).or(killed.copied()).or(failed.first().copied());
        let Some(local) = first else {
            let codes = || (0..self.all.len()).map(|local| exit_status(of(local)));
            let status = codes().find(|code| *code == RESTART).or(codes().find(|code| *code != 0)).unwrap_or(0);
            return Outcome { status, message: String::new() };
        };
        let how = match of(local).signal() {
            Some(signal) => format!("was killed by {}", signal_name(signal)),
            None => format!("ended with exit status {}", exit_status(of(local))),
        };
        let text = recorded.map(|r| format!(": {}", r.2)).unwrap_or_default();
        Outcome { status: exit_status(of(local)), message: format!("rank {} {how}{text}", self.first_rank + local) }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.all.iter().any(|p| p.ended.is_none()) {
            self.end_all();
        }
        // Nothing in it is needed any more; what stays does no harm.
        let _ = std::fs::remove_dir_all(&self.errors);
    }
}

/// Whether the others have to end: not after success, a stop that asks for a restart, or one by a signal to the launcher.
fn is_failure(status: ExitStatus, forwarded: Option<i32>) -> bool {
    let by_signal = forwarded.is_some_and(|signal| exit_status(status) == 128 + signal as u8);
    !(status.success() || exit_status(status) == RESTART || by_signal)
}

/// The exit status as a shell counts it.
fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

fn signal_name(signal: i32) -> String {
    match signal {
        9 => "SIGKILL (out of memory, or by somebody)".into(),
        6 => "SIGABRT".into(),
        7 => "SIGBUS".into(),
        11 => "SIGSEGV".into(),
        15 => "SIGTERM".into(),
        other => format!("signal {other}"),
    }
}

/// How often each line was printed, and by whom: what all processes print is shown once.
#[derive(Default)]
struct Lines {
    shown: FxHashMap<Vec<u8>, usize>,
    by_rank: FxHashMap<(usize, Vec<u8>), usize>,
}

impl Lines {
    /// Whether a line has to be shown: the n-th time of a rank is not if another rank has printed it n times.
    fn is_new(&mut self, rank: usize, line: &[u8]) -> bool {
        if self.by_rank.len() > 10_000 {
            *self = Lines::default();
        }
        let own = self.by_rank.entry((rank, line.to_vec())).or_default();
        *own += 1;
        let shown = self.shown.entry(line.to_vec()).or_default();
        let new = *own > *shown;
        *shown = (*shown).max(*own);
        new
    }
}

/// Prints what a process writes, each line with its rank.
fn print_lines(rank: usize, pipe: impl Read, lines: &Mutex<Lines>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while (&mut pipe).take(MOST_LINE).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        if text.is_empty() || lines.is_new(rank, text) {
            let mut out = format!("[rank {rank}] ").into_bytes();
            out.extend(text);
            out.push(b'\n');
            // A closed stderr is no reason to end the run.
            let _ = std::io::stderr().write_all(&out);
        }
        line.clear();
    }
}

/// Writes the error of this process to the file that torchrun or `perilune launch` has named for it, so that the launcher can show
/// the error of the process that failed first. To be called by a process that has failed by itself, not because of another one.
pub fn record_failure(env: Env, text: &str) {
    let Some(path) = env(ERROR_FILE).filter(|path| !path.is_empty()) else { return };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (seconds, micros) = (now.as_secs(), now.subsec_micros());
    let json = format!(
        "{{\"message\": {{\"message\": {}, \"extraInfo\": {{\"py_callstack\": \"\", \"timestamp\": \"{seconds}\", \"micros\": \
         \"{micros:06}\"}}}}}}\n",
        quote(text)
    );
    // The launcher knows the exit status without it.
    let _ = std::fs::write(path, json);
}

/// A string of JSON, which is also one of YAML.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The time in microseconds and the text of an error file of this release.
fn read_error(path: &Path) -> Option<(u64, String)> {
    let json = std::fs::read_to_string(path).ok()?;
    let after = |key: &str| json.split_once(&format!("\"{key}\": \"")).map(|(_, rest)| rest);
    let number = |key: &str| after(key)?.split('"').next()?.parse::<u64>().ok();
    let time = number("timestamp")?.checked_mul(1_000_000)?.checked_add(number("micros")?)?;
    let (mut text, mut chars) = (String::new(), json.split_once("{\"message\": \"")?.1.chars());
    loop {
        match chars.next()? {
            '"' => return Some((time, text)),
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'u' => drop((0..4).map(|_| chars.next()).collect::<Option<String>>()?),
                c => text.push(c),
            },
            c => text.push(c),
        }
    }
}

/// Ends this process with SIGTERM when its launcher dies, if `perilune launch` has started it. Returns false if the launcher is
/// dead already.
pub fn end_with_launcher(env: Env) -> bool {
    let Some(launcher) = env(LAUNCHER).and_then(|pid| Pid::from_raw(pid.parse().ok()?)) else { return true };
    if getppid() != Some(launcher) {
        // A process that one of the launcher's has started, or an orphan.
        return test_kill_process(launcher).is_ok();
    }
    #[cfg(target_os = "linux")]
    if rustix::process::set_parent_process_death_signal(Some(Signal::TERM)).is_ok() {
        // The launcher may have died before.
        return getppid() == Some(launcher);
    }
    true
}

/// Prepares a command as a child that ends with this process: it gets SIGTERM when this process dies, if it calls
/// [`end_with_launcher`]. A group of its own keeps the terminal's signals from it, so that this process decides what it gets.
pub fn bind_child(command: &mut Command) {
    command.process_group(0).env(LAUNCHER, std::process::id().to_string());
}

/// Asks a child to stop. It must not have been waited for.
pub fn stop_child(child: &Child) {
    // It can have ended a moment ago; it is not reaped yet, so the number is still its own.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
}

#[cfg(test)]
mod tests;
