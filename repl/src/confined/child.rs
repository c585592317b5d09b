//! Enters the walls in the confined process, and asks the supervisor for what it may not do itself.

use super::protocol::{self, Grants, Order, PIPES, Report, Start};
use crate::failure::Failure;
use perilune_confine::{Wall, Walls, die_with_parent, enter_calls, enter_files};
use perilune_policy::{Fetched, Fetcher, Policy, PolicyBuilder, Unfetched};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::fs::File;
use std::io::BufReader;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The state of a confined process.
struct Confined {
    grants: Grants,
    /// What the walls of files found, until it is reported.
    walls: Mutex<Option<Walls>>,
    /// The pipe from the supervisor, until a thread reads it.
    from: Mutex<Option<BufReader<File>>>,
    to: Mutex<File>,
    /// The walls of system calls are left out.
    without_calls: bool,
    /// The answers to requests.
    orders: Mutex<Option<Receiver<Order>>>,
}

/// The signals that handlers of this process have had since the supervisor last named them.
static HAD: [LazyLock<Arc<AtomicBool>>; 4] = [const { LazyLock::new(Arc::default) }; 4];
const NOTED: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGHUP];

/// The time in which a signal to a group reaches all its processes.
const TOGETHER: Duration = Duration::from_millis(100);

static CONFINED: OnceLock<Confined> = OnceLock::new();

/// Time between two looks at the interrupt while a download runs.
const POLL: Duration = Duration::from_millis(20);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process is a confined one.
pub fn is_confined() -> bool {
    CONFINED.get().is_some()
}

/// What was granted to the recipe of this process; `None` outside the walls.
pub fn grants() -> Option<&'static Grants> {
    CONFINED.get().map(|confined| &confined.grants)
}

#[expect(unsafe_code, reason = "it takes over file descriptors that the supervisor has named")]
fn pipes(numbers: &str) -> Option<(File, File)> {
    let (from, to) = numbers.split_once(',')?;
    let open = |number: &str| {
        let number: i32 = number.parse().ok().filter(|n| *n > 2)?;
        // An open descriptor: its link can be read.
        std::fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
        // SAFETY: the supervisor has left the two descriptors of its pipes open for this process, and `main` calls this once, before
        // anything else opens a file.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).ok()?;
        Some(File::from(fd))
    };
    Some((open(from)?, open(to)?))
}

/// Enters the walls of files, if a supervisor has started this process. `main` calls it first, while there is one thread.
///
/// # Errors
/// The supervisor says nothing, or a wall cannot be built.
pub fn enter() -> Result<(), Failure> {
    let Some(numbers) = std::env::var_os(PIPES) else { return Ok(()) };
    let lost = || Failure::System(format!("{PIPES} is set, and there is no supervisor\n  hint: unset it"));
    let (from, to) = numbers.to_str().and_then(pipes).ok_or_else(lost)?;
    if !die_with_parent() {
        return Err(lost());
    }
    let mut from = BufReader::new(from);
    let start: Option<Start> = protocol::receive(&mut from).map_err(|e| Failure::System(format!("{PIPES}: {e}")))?;
    let Start { grants, files } = start.ok_or_else(lost)?;
    let walls = enter_files(&files).map_err(|e| Failure::System(e.to_string()))?;
    super::limit_kernels(grants.check_kernels, grants.kernel_time);
    let confined = Confined {
        grants,
        walls: Mutex::new(Some(walls)),
        from: Mutex::new(Some(from)),
        to: Mutex::new(to),
        without_calls: files.without.contains(&Wall::Calls),
        orders: Mutex::new(None),
    };
    drop(CONFINED.set(confined));
    Ok(())
}

/// Enters the walls of system calls, reports all walls, and waits for leave to go on. Devices and libraries are open by now, and no line of
/// the recipe has run. Outside the walls, and from the second call on, it does nothing.
///
/// # Errors
/// A wall cannot be built, or the supervisor has ended.
pub fn seal() -> Result<(), Failure> {
    let Some(confined) = CONFINED.get() else { return Ok(()) };
    let Some(mut walls) = lock(&confined.walls).take() else { return Ok(()) };
    if !confined.without_calls {
        walls.extend(enter_calls().map_err(|e| Failure::System(e.to_string()))?);
    }
    let lost = |_| Failure::System("the supervisor of this process has ended".into());
    protocol::send(&*lock(&confined.to), &Report::Walls(walls)).map_err(lost)?;
    let Some(mut from) = lock(&confined.from).take() else { return Ok(()) };
    match protocol::receive(&mut from).map_err(lost)? {
        Some(Order::Go) => {}
        // The supervisor has said why.
        _ => return Err(Failure::Said(4)),
    }
    let (send, orders) = mpsc::channel();
    *lock(&confined.orders) = Some(orders);
    let read = move || {
        while let Ok(Some(order)) = protocol::receive(&mut from) {
            if let Order::Signal(signal) = order {
                take(signal);
            } else if send.send(order).is_err() {
                break;
            }
        }
    };
    let started = std::thread::Builder::new().name("supervisor".into()).spawn(read);
    started.map(drop).map_err(|e| Failure::System(format!("cannot listen to the supervisor: {e}")))
}

/// Notes the signals that this process has handled itself. Whoever installs a handler of one calls it.
///
/// # Errors
/// The handler cannot be installed.
pub fn note(signals: &[i32]) -> std::io::Result<()> {
    if !is_confined() {
        return Ok(());
    }
    for (signal, had) in NOTED.iter().zip(&HAD).filter(|(signal, _)| signals.contains(signal)) {
        signal_hook::flag::register(*signal, Arc::clone(had))?;
    }
    Ok(())
}

/// Takes a signal that the supervisor has had, unless this process has had it too: a terminal, and those who end jobs, signal all
/// processes.
fn take(signal: i32) {
    std::thread::sleep(TOGETHER);
    let had = NOTED.iter().position(|noted| *noted == signal).map(|k| HAD[k].swap(false, Ordering::SeqCst));
    if had == Some(true) {
        return;
    }
    if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
        if let Some(k) = NOTED.iter().position(|noted| *noted == signal.as_raw()) {
            HAD[k].store(false, Ordering::SeqCst);
        }
    }
}

/// The policy of a confined recipe: the modules of its folder, and what was granted. Nothing else of the command line opens anything.
pub fn policy(grants: &Grants, recipe: Option<&Path>) -> Result<PolicyBuilder, Failure> {
    let wrong = |e: perilune_policy::Error| Failure::Usage(format!("--untrusted: {e}"));
    let mut policy = Policy::builder().granted_only().allow_kernels(grants.kernels);
    if let Some(start) = &grants.start {
        policy = policy.relative_to(start);
    }
    if let Some(recipe) = grants.recipe.as_deref().or(recipe) {
        policy = policy.modules(recipe);
    }
    for path in &grants.reads {
        policy = policy.allow_read(path).map_err(wrong)?;
    }
    for (named, actual) in &grants.places {
        policy = policy.place(named, actual).map_err(wrong)?;
    }
    for path in &grants.writes {
        policy = policy.allow_write(path).map_err(wrong)?;
    }
    Ok(policy.fetcher(Arc::new(Supervisor)))
}

/// Asks the supervisor for the files of addresses.
#[derive(Debug)]
struct Supervisor;

impl Fetcher for Supervisor {
    fn fetch(&self, address: &str, stop: &dyn Fn() -> bool) -> Result<Fetched, Unfetched> {
        let failed = |message: &str| Unfetched { message: format!("{address}: {message}"), hint: None, refused: false };
        let confined = CONFINED.get().ok_or_else(|| failed("this process has no supervisor"))?;
        // One request at a time.
        let orders = lock(&confined.orders);
        let orders = orders.as_ref().ok_or_else(|| failed("the walls do not stand yet"))?;
        let ask = |report: Report| protocol::send(&*lock(&confined.to), &report);
        ask(Report::Fetch(address.into())).map_err(|_| failed("the supervisor has ended"))?;
        let mut cancelled = false;
        loop {
            match orders.recv_timeout(POLL) {
                Ok(Order::Fetched { name, file, content }) => return Ok(Fetched { name, file, content }),
                Ok(Order::Unfetched { message, hint, refused }) => return Err(Unfetched { message, hint, refused }),
                Ok(Order::Go | Order::Stop | Order::Signal(_)) => {}
                Err(RecvTimeoutError::Timeout) if stop() && !cancelled => {
                    cancelled = ask(Report::Cancel).is_ok();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(failed("the supervisor has ended")),
            }
        }
    }
}
