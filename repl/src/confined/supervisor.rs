//! Starts the confined process and stays outside: answers its requests, passes on signals, and ends it at its limits.

use super::private::Private;
use super::protocol::{self, Grants, Order, PIPES, Report, Start};
use super::{Terms, environment, modules};
use crate::console_out::complain;
use crate::failure::Failure;
use crate::terminal::one_line;
use perilune_confine::{Files, Group, Wall, Walls, needs};
use perilune_core::byte_size::show;
use perilune_core::cache_folder::cache_folder;
use perilune_fetch::ProcessFetcher;
use perilune_policy::Fetcher;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, IsTerminal, PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two looks at the memory of the child.
const LOOK: Duration = Duration::from_millis(100);
/// The time that the child has to write a checkpoint after its limit, before it is killed.
const GRACE: Duration = Duration::from_millis(1200);
/// Bytes of an address at most: an answer, which repeats it, fits the pipe.
const LONGEST_ADDRESS: usize = 8 << 10;
/// The threads that the group of the child may have, where there is a group.
const TASKS: u64 = 4096;

/// Runs a command of this program as a confined process: the words of its command line, with the program's name first. It returns when the
/// process has ended. A status other than 0 is [`Failure::Said`]: the process, or this function, has printed the reason.
///
/// # Errors
/// A granted path is not there, the process cannot be started, or what it ended with.
pub fn supervise(args: Vec<OsString>, terms: &Terms) -> Result<(), Failure> {
    if !cfg!(target_os = "linux") && !terms.accept_missing_walls {
        return Err(Failure::Refused(format!(
            "{} has none of the walls that confine a recipe, and the language alone would hold it\n  \
             hint: --accept-missing-walls runs it all the same",
            std::env::consts::OS
        )));
    }
    if !perilune_dist::launch::end_with_launcher(&perilune_dist::rendezvous::process_env) {
        return Err(Failure::System("the process that started this run has ended".into()));
    }
    let run_dir = RunDirectory::make(terms.run_dir.as_deref())?;
    let private = Private::create()?;
    let start = start(terms, run_dir.path(), &private)?;
    let fetcher = terms.net.fetcher()?;
    let limit = terms.memory.unwrap_or_else(default_memory);
    let group = Group::create(&format!("perilune-{}", std::process::id()), Some(limit), Some(TASKS));
    let signals = Signals::listen()?;
    let began = Instant::now();
    let mut running = Running::spawn(&args, &private)?;
    if let Some(group) = &group {
        // The limits of the program itself remain where the kernel refuses it.
        let _ = group.add(running.child.id());
    }
    let requests = running.serve(start, private, fetcher, terms.accept_missing_walls)?;
    let (status, why) = running.wait(&signals, began, terms.time, limit);
    // It ends with the pipe, and removes the private folder.
    let _ = requests.join();
    drop(run_dir);
    match why {
        Some(Ended::Time(limit)) => {
            complain("error", &format!("the run reached its limit of time (--time {})", shown(limit)));
            return Err(Failure::Said(124));
        }
        Some(Ended::Memory(bytes)) => {
            let limit = show(usize::try_from(limit).unwrap_or(usize::MAX));
            let bytes = show(usize::try_from(bytes).unwrap_or(usize::MAX));
            complain("error", &format!("the process had {bytes} of memory, and its limit is {limit}"));
            return Err(Failure::Said(1));
        }
        None => {}
    }
    if running.line.refused.load(Ordering::SeqCst) {
        return Err(Failure::Said(4));
    }
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(Failure::Said(u8::try_from(code).unwrap_or(1))),
        (None, Some(SIGINT | SIGTERM | SIGHUP)) => Err(Failure::Said(128 + status.signal().unwrap_or(0) as u8)),
        _ => {
            let hint = "it may have reached a limit of memory, or a call that no wall lets pass";
            complain("error", &format!("the confined process was ended ({status})\n  hint: {hint}"));
            Err(Failure::Said(1))
        }
    }
}

fn shown(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds.fract() == 0.0 { format!("{seconds:.0}s") } else { format!("{seconds}s") }
}

/// Three quarters of the machine's memory.
fn default_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib / 4 * 3 * 1024)
}

/// The directory of results, which the child finds made. An empty one is removed again, with the folder made for it.
struct RunDirectory {
    made: Vec<PathBuf>,
    path: Option<PathBuf>,
}

impl RunDirectory {
    fn make(path: Option<&Path>) -> Result<RunDirectory, Failure> {
        let Some(path) = path else { return Ok(RunDirectory { made: Vec::new(), path: None }) };
        let missing = path.ancestors().take_while(|at| !at.as_os_str().is_empty() && !at.exists());
        let made = missing.map(Path::to_path_buf).collect();
        std::fs::create_dir_all(path).map_err(crate::failure::disk("create the run directory", path))?;
        Ok(RunDirectory { made, path: Some(path.to_path_buf()) })
    }

    fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        for path in &self.made {
            if std::fs::remove_dir(path).is_err() {
                break;
            }
        }
    }
}

/// What the child is told, with absolute paths.
/// Returns places with absolute paths.
fn placed(here: &Path, places: &[(PathBuf, PathBuf)]) -> Vec<(PathBuf, PathBuf)> {
    places.iter().map(|(named, actual)| (named.clone(), here.join(actual))).collect()
}

fn start(terms: &Terms, run_dir: Option<&Path>, private: &Private) -> Result<Start, Failure> {
    let here = std::env::current_dir().map_err(|e| Failure::System(format!("there is no current directory: {e}")))?;
    let there = |flag: &str, paths: &[PathBuf]| -> Result<Vec<PathBuf>, Failure> {
        let absolute = |path: &PathBuf| match std::fs::metadata(path) {
            Ok(_) => Ok(here.join(path)),
            Err(e) => {
                let why = crate::failure::plain(&e);
                Err(Failure::Usage(format!("{flag}: {}: cannot open: {why}", path.display())))
            }
        };
        paths.iter().map(absolute).collect()
    };
    let grants = Grants {
        recipe: terms.recipe.clone(),
        reads: there("--allow-read", &terms.reads)?,
        writes: there("--allow-write", &terms.writes)?,
        places: placed(&here, &terms.places),
        run_dir: run_dir.map(|dir| dir.to_path_buf()),
        start: terms.start.clone(),
        kernels: terms.kernels,
        check_kernels: terms.check_kernels,
        kernel_time: Some(terms.kernel_time.unwrap_or(super::KERNEL_TIME)),
    };
    let mut files = Files { read: grants.reads.clone(), write: grants.writes.clone(), ..Files::default() };
    if let Some(recipe) = &terms.recipe {
        let folder = recipe.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        files.read.push(here.join(recipe));
        files.read.extend(modules::beneath(&here.join(folder)));
    }
    files.read.extend(grants.places.iter().map(|(_, actual)| actual.clone()));
    files.read.extend(there("a file of the command", &terms.opens)?);
    files.write.extend(there("a file of the command", &terms.keeps)?);
    files.write.extend(crate::log::file().map(|file| here.join(file)));
    files.write.extend(run_dir.map(|dir| here.join(dir)));
    // Kernels that trusted runs compiled may be used, and never added to.
    let shared = cache_folder().unwrap_or_default();
    files.read.extend(["kernels", "products"].map(|name| shared.join(name)).into_iter().filter(|dir| dir.is_dir()));
    files.read.push(private.data());
    files.write.extend([private.cache(), private.temp()]);
    let real = private.probe();
    let covers = |path: &PathBuf| path.canonicalize().is_ok_and(|granted| real.starts_with(granted));
    files.without = left_out()?;
    let open = files.read.iter().chain(&files.write).any(covers);
    files.probe = (!open).then_some(real);
    make_devices();
    let libraries = perilune_cuda::dylib::library_folders();
    needs::add(&mut files, Path::new("/dev/nvidiactl").exists() || Path::new("/dev/dxg").exists(), &libraries);
    Ok(Start { grants, files })
}

/// Makes the devices of NVIDIA's driver that are not there yet. The helper gains privileges, which it cannot behind the walls.
fn make_devices() {
    if Path::new("/proc/driver/nvidia").exists() && !Path::new("/dev/nvidia-uvm").exists() {
        // Without the helper, opening the device says what is missing.
        let _ = Command::new("nvidia-modprobe").args(["-c", "0", "-u"]).stdin(Stdio::null()).status();
    }
}

/// The walls that `PERILUNE_WITHOUT_WALLS` leaves out, for tests of the others. They are missing like those that a kernel lacks.
fn left_out() -> Result<Vec<Wall>, Failure> {
    match std::env::var("PERILUNE_WITHOUT_WALLS").unwrap_or_default().as_str() {
        "" => Ok(Vec::new()),
        "files" => Ok(vec![Wall::Files]),
        "calls" => Ok(vec![Wall::Calls]),
        other => Err(Failure::Usage(format!("PERILUNE_WITHOUT_WALLS={other}: it must be files or calls"))),
    }
}

/// The signals that reach the supervisor.
struct Signals(mpsc::Receiver<i32>);

impl Signals {
    fn listen() -> Result<Signals, Failure> {
        let failed = |e: std::io::Error| Failure::System(format!("cannot listen for signals: {e}"));
        let all = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGCHLD];
        // The child inherits that a signal is ignored, as SIGHUP is under nohup.
        let heard = all.into_iter().filter(|signal| !is_ignored(*signal));
        let mut signals = signal_hook::iterator::Signals::new(heard).map_err(failed)?;
        let (send, events) = mpsc::channel();
        let work = move || {
            for signal in signals.forever() {
                if send.send(signal).is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(work).map_err(failed)?;
        Ok(Signals(events))
    }
}

/// Whether this process ignores a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// Why the supervisor ended the child.
enum Ended {
    Time(Duration),
    Memory(u64),
}

/// The confined process. It is killed when this is dropped.
struct Running {
    child: Child,
    from: Option<PipeReader>,
    line: Arc<Line>,
}

/// The pipe to the child, and what is known of it.
struct Line {
    to: Mutex<PipeWriter>,
    /// It listens: the walls stand.
    listens: AtomicBool,
    /// It was not allowed to go on.
    refused: AtomicBool,
}

impl Line {
    /// Sends the first message, which may be longer than the pipe is. From then on nothing waits for the child to listen.
    fn begin(&self, start: &Start) {
        let to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        // A child that ended at once says why itself.
        let _ = protocol::send(&*to, start);
        let _ = rustix::fs::fcntl_setfl(&*to, rustix::fs::OFlags::NONBLOCK);
    }

    /// Sends a message; whether it was taken. A child that does not read its pipe gets no more.
    fn say(&self, order: &Order) -> bool {
        protocol::send(&*self.to.lock().unwrap_or_else(PoisonError::into_inner), order).is_ok()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Running {
    fn spawn(args: &[OsString], private: &Private) -> Result<Running, Failure> {
        let failed = |e: std::io::Error| Failure::System(format!("cannot start the confined process: {e}"));
        let program = std::env::current_exe().map_err(failed)?;
        let (from_child, to_us) = std::io::pipe().map_err(failed)?;
        let (from_us, to_child) = std::io::pipe().map_err(failed)?;
        // Only these two descriptors are left open for the child, and closed here after its start.
        rustix::io::fcntl_setfd(&to_us, rustix::io::FdFlags::empty()).map_err(|e| failed(e.into()))?;
        rustix::io::fcntl_setfd(&from_us, rustix::io::FdFlags::empty()).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(program);
        if let Some(name) = args.first() {
            command.arg0(name);
        }
        command.args(args.iter().skip(1)).env_clear().envs(environment::passed());
        command.env(PIPES, format!("{},{}", from_us.as_raw_fd(), to_us.as_raw_fd()));
        command.env("PERILUNE_CACHE", private.cache()).env("TMPDIR", private.temp());
        command.env("CUDA_CACHE_PATH", private.cache().join("nvidia"));
        if let Some(shared) = cache_folder() {
            command.env("PERILUNE_SHARED_CACHE", shared);
        }
        let libraries = perilune_cuda::dylib::library_folders();
        if let Ok(libraries) = std::env::join_paths(&libraries) {
            command.env("PERILUNE_LIBRARIES", libraries);
        }
        let child = command.spawn().map_err(failed)?;
        let (listens, refused) = Default::default();
        let line = Arc::new(Line { to: Mutex::new(to_child), listens, refused });
        Ok(Running { child, from: Some(from_child), line })
    }

    /// Starts the thread that answers the child.
    fn serve(
        &mut self,
        start: Start,
        private: Private,
        fetcher: Arc<ProcessFetcher>,
        accept: bool,
    ) -> Result<JoinHandle<()>, Failure> {
        let lost = |e: std::io::Error| Failure::System(format!("cannot reach the confined process: {e}"));
        let Some(from) = self.from.take() else {
            return Err(Failure::System("this is a bug: the pipe is in use".into()));
        };
        let server = Server { line: self.line.clone(), private, fetcher, cancel: AtomicBool::new(false) };
        let serve = move || {
            server.line.begin(&start);
            server.serve(BufReader::new(from), &start.grants, accept);
        };
        std::thread::Builder::new().name("requests".into()).spawn(serve).map_err(lost)
    }

    /// Waits for the end of the child, and ends it at its limits.
    fn wait(
        &mut self,
        signals: &Signals,
        began: Instant,
        time: Option<Duration>,
        memory: u64,
    ) -> (ExitStatus, Option<Ended>) {
        let deadline = time.and_then(|time| began.checked_add(time));
        let (mut why, mut asked, mut kills) = (None, None::<Instant>, None::<Instant>);
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return (status, why);
            }
            let now = Instant::now();
            if why.is_none() && deadline.is_some_and(|at| now >= at) {
                why = time.map(Ended::Time);
                kills = Some(now + GRACE);
                self.signal(SIGTERM);
            }
            if why.is_none() {
                let bytes = resident(self.child.id());
                if bytes > memory {
                    why = Some(Ended::Memory(bytes));
                    kills = Some(now);
                }
            }
            if kills.is_some_and(|at| now >= at) {
                let _ = self.child.kill();
            }
            let next = [deadline.filter(|_| why.is_none()), kills].into_iter().flatten().min();
            let wait = next.map_or(LOOK, |at| at.saturating_duration_since(now).clamp(Duration::from_millis(1), LOOK));
            match signals.0.recv_timeout(wait) {
                Ok(SIGCHLD) | Err(RecvTimeoutError::Timeout) => {}
                Ok(signal) => {
                    // A second request, and a child that takes none of them, end at once.
                    if signal != SIGUSR2 && asked.replace(now).is_some() {
                        kills = kills.or(Some(now + Duration::from_secs(2)));
                    }
                    self.pass_on(signal);
                }
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(wait),
            }
        }
    }

    /// Tells the child of a signal. It may have had it already, as part of a group that was signalled; it takes it once. Before the walls
    /// stand, nothing in it listens.
    fn pass_on(&self, signal: i32) {
        if !self.line.listens.load(Ordering::SeqCst) || !self.line.say(&Order::Signal(signal)) {
            self.signal(signal);
        }
    }

    fn signal(&self, signal: i32) {
        let (Some(pid), Some(signal)) =
            (rustix::process::Pid::from_raw(self.child.id() as i32), rustix::process::Signal::from_named_raw(signal))
        else {
            return;
        };
        // It may have ended.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The memory of a process that no file holds, in bytes.
fn resident(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    line.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Answers the requests of the child.
struct Server {
    line: Arc<Line>,
    private: Private,
    fetcher: Arc<ProcessFetcher>,
    cancel: AtomicBool,
}

impl Server {
    fn serve(&self, mut from: BufReader<PipeReader>, granted: &Grants, accept: bool) {
        let (busy, mut reported) = (AtomicBool::new(false), false);
        std::thread::scope(|scope| {
            // What cannot be read ends the conversation: the child asks for nothing more.
            while let Ok(Some(report)) = protocol::receive::<Report>(&mut from) {
                match report {
                    // The walls are reported once, before the recipe's first line. A later report would repeat warnings and questions.
                    Report::Walls(_) if reported => {}
                    Report::Walls(walls) => {
                        reported = true;
                        let go = allowed(&walls, granted, accept);
                        self.line.refused.store(!go, Ordering::SeqCst);
                        self.line.say(if go { &Order::Go } else { &Order::Stop });
                        self.line.listens.store(go, Ordering::SeqCst);
                    }
                    Report::Cancel => self.cancel.store(true, Ordering::SeqCst),
                    Report::Fetch(_) if busy.swap(true, Ordering::SeqCst) => {}
                    Report::Fetch(address) => {
                        self.cancel.store(false, Ordering::SeqCst);
                        let busy = &busy;
                        scope.spawn(move || {
                            let answer = self.fetch(&address);
                            busy.store(false, Ordering::SeqCst);
                            // A child that has ended hears nothing.
                            self.line.say(&answer);
                        });
                    }
                }
            }
            self.cancel.store(true, Ordering::SeqCst);
        });
    }

    fn fetch(&self, address: &str) -> Order {
        if address.len() > LONGEST_ADDRESS {
            let message = format!("an address has {} bytes, and the limit is {LONGEST_ADDRESS}", address.len());
            return Order::Unfetched { message, hint: None, refused: false };
        }
        match self.fetcher.fetch(address, &|| self.cancel.load(Ordering::SeqCst)) {
            Ok(found) => match self.private.show(&found.file) {
                Ok(file) => Order::Fetched { name: found.name, file, content: found.content },
                Err(e) => {
                    let message = format!("{}: cannot show it to the confined process: {e}", one_line(address));
                    Order::Unfetched { message, hint: None, refused: false }
                }
            },
            Err(e) => Order::Unfetched { message: e.message, hint: e.hint, refused: e.refused },
        }
    }
}

/// Whether the child may go on with these walls.
fn allowed(walls: &Walls, granted: &Grants, accept: bool) -> bool {
    for (path, why) in
        walls.skipped.iter().filter(|(path, _)| granted.reads.contains(path) || granted.writes.contains(path))
    {
        complain("warning", &format!("{}: cannot be opened to the recipe: {why}", path.display()));
    }
    let missing = walls.missing();
    if missing.is_empty() {
        return true;
    }
    let list: Vec<String> = missing.iter().map(|(wall, why)| format!("  {}: {why}", wall.keeps())).collect();
    let what = "this system lacks walls that confine a recipe; the language alone holds it back from";
    complain("warning", &format!("{what}:\n{}", list.join("\n")));
    if accept || missing.iter().all(|(wall, _)| *wall == Wall::Limits) {
        return true;
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        complain("error", "the recipe was not run\n  hint: --accept-missing-walls runs it all the same");
        return false;
    }
    let mut err = std::io::stderr().lock();
    let asked = err.write_all(b"Run it all the same? [y/N] ").and_then(|()| err.flush());
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    asked.is_ok() && read.is_ok() && ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str())
}
