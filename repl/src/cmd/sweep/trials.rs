//! Runs trials as processes, several side by side, and resumes those that were interrupted.

use super::{is_over, plan};
use crate::console_out::ConsoleOut;
use crate::failure::Failure;
use crate::signals::{exit_status, nohup};
use crate::terminal::one_line;
use console::truncate_str;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use perilune_dist::launch::{bind_child, stop_child};
use perilune_train::runs::{RunSummary, Status};
use perilune_train::sweep::{SweepDir, Trial};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
const REDRAW: Duration = Duration::from_millis(100);
/// How long a run that another process still writes may take to end: one whose sweep was killed writes its checkpoint.
const LEAVING: Duration = Duration::from_secs(60);
/// The part of the error output of a run that is kept, in bytes.
const KEPT: usize = 16 << 10;

/// A trial, and the step at which it stops for now.
#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub trial: &'a Trial,
    pub until: Option<u64>,
}

/// What the output of a run says.
#[derive(Default)]
struct Progress {
    step: u64,
    steps: u64,
    loss: Option<f64>,
    error: Option<String>,
}

struct Running<'a> {
    task: Task<'a>,
    child: Child,
    progress: Arc<Mutex<Progress>>,
    readers: Vec<JoinHandle<()>>,
    begun: Instant,
}

/// The processes of a sweep.
pub struct Pool<'a> {
    dir: &'a SweepDir,
    out: &'a ConsoleOut,
    jobs: usize,
    program: PathBuf,
    threads: usize,
    signal: Arc<AtomicUsize>,
    bar: Option<ProgressBar>,
    over: usize,
}

impl<'a> Pool<'a> {
    pub fn new(dir: &'a SweepDir, out: &'a ConsoleOut, jobs: usize) -> Result<Pool<'a>, Failure> {
        let program = std::env::current_exe().map_err(|e| Failure::System(format!("cannot find this program: {e}")))?;
        let signal = Arc::new(AtomicUsize::new(0));
        // nohup: the sweep outlives its terminal.
        for number in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|n| *n != SIGHUP || !nohup()) {
            signal_hook::flag::register_usize(number, signal.clone(), number as usize)
                .map_err(|e| Failure::System(format!("cannot listen for signals: {e}")))?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let bar = out.live.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
            bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar
        });
        out.set_bar(bar.clone());
        Ok(Pool { dir, out, jobs, program, threads: (cores / jobs).max(1), signal, bar, over: 0 })
    }

    /// Runs tasks until all are over. A trial that has gone far enough is left as it is.
    ///
    /// # Errors
    /// A signal ended the sweep, after its runs have written checkpoints.
    pub fn run(&mut self, tasks: Vec<Task<'a>>) -> Result<(), Failure> {
        let (mut waiting, mut running) = (VecDeque::new(), Vec::<Running<'a>>::new());
        self.over = 0;
        let all = tasks.len();
        for task in tasks {
            if self.is_done(task)? { self.over += 1 } else { waiting.push_back(task) }
        }
        if self.over > 0 {
            self.out.line(&format!("{} of {all} runs have got there before", self.over));
        }
        let (mut drawn, mut asked) = (Instant::now(), 0);
        while !(waiting.is_empty() && running.is_empty()) {
            while asked == 0 && running.len() < self.jobs && self.signal.load(Ordering::SeqCst) == 0 {
                let Some(task) = waiting.pop_front() else { break };
                match self.start(task) {
                    Ok(one) => running.push(one),
                    Err(e) => {
                        self.end(&mut running);
                        return Err(e);
                    }
                }
            }
            for k in (0..running.len()).rev() {
                let ended =
                    running[k].child.try_wait().map_err(|e| Failure::System(format!("cannot wait for a run: {e}")))?;
                if ended.is_some() {
                    let one = running.swap_remove(k);
                    self.finish(one, asked > 0)?;
                }
            }
            let signal = self.signal.load(Ordering::SeqCst);
            if signal != 0 {
                if asked == 0 {
                    self.out.note(&format!("{}: stopping; the runs write checkpoints", crate::signals::name(signal)));
                    running.iter().for_each(|one| stop_child(&one.child));
                    (asked, waiting) = (signal, VecDeque::new());
                    self.signal.store(0, Ordering::SeqCst);
                } else {
                    // A second signal ends the runs at once.
                    running.iter().for_each(|one| stop_child(&one.child));
                    self.signal.store(0, Ordering::SeqCst);
                }
            }
            if drawn.elapsed() > REDRAW {
                drawn = Instant::now();
                self.draw(&running, all);
            }
            std::thread::sleep(POLL);
        }
        if let Some(bar) = &self.bar {
            bar.set_message("");
        }
        let signal = if asked == 0 { self.signal.load(Ordering::SeqCst) } else { asked };
        if signal != 0 {
            let dir = self.dir.path.display();
            self.close();
            self.out.note(&format!("the sweep has stopped; to go on: perilune sweep --resume {dir}"));
            return Err(Failure::Signal(exit_status(signal)));
        }
        Ok(())
    }

    fn close(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.out.set_bar(None);
    }

    /// Ends all processes after an error of the sweep itself.
    fn end(&self, running: &mut [Running<'a>]) {
        for one in running {
            stop_child(&one.child);
            let _ = one.child.wait();
        }
    }

    /// Reads what the run directory of a trial says.
    fn state(&self, trial: &Trial) -> Result<Option<RunSummary>, Failure> {
        let path = self.dir.run_dir(trial);
        if !path.is_dir() {
            return Ok(None);
        }
        Ok(RunSummary::read(&path)?)
    }

    fn is_done(&self, task: Task<'_>) -> Result<bool, Failure> {
        let begun = Instant::now();
        loop {
            let Some(run) = self.state(task.trial)? else { return Ok(false) };
            if run.status != Status::Running {
                let far = task.until.is_some_and(|until| run.status == Status::Stopped && run.step() >= until);
                return Ok(is_over(run.status) || far);
            }
            if begun.elapsed() > LEAVING {
                let dir = run.dir.display();
                return Err(Failure::System(format!(
                    "another process is writing {dir}; wait until it ends, or stop it"
                )));
            }
            std::thread::sleep(POLL);
        }
    }

    fn start(&self, task: Task<'a>) -> Result<Running<'a>, Failure> {
        let path = self.dir.run_dir(task.trial);
        let mut words = plan::words(&self.dir.plan, Some(task.trial));
        let run = plan::run_args(&self.dir.plan, Some(task.trial))?;
        if run.parts().3.place.is_cpu() {
            words.push(format!("--threads={}", self.threads));
        }
        words.extend(task.until.map(|step| format!("--until={step}")));
        if path.is_dir() && RunSummary::read(&path)?.is_some() {
            words.push("--resume".into());
        }
        words.extend(["--run-dir".into(), path.display().to_string(), "--json".into()]);
        let mut command = Command::new(&self.program);
        command.args(&words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        bind_child(&mut command);
        let mut child = command.spawn().map_err(|e| Failure::System(format!("cannot start a run: {e}")))?;
        let progress = Arc::new(Mutex::new(Progress::default()));
        let mut readers = Vec::new();
        if let Some(out) = child.stdout.take() {
            let progress = progress.clone();
            readers.push(std::thread::spawn(move || read_events(out, &progress)));
        }
        if let Some(err) = child.stderr.take() {
            let progress = progress.clone();
            readers.push(std::thread::spawn(move || read_errors(err, &progress)));
        }
        Ok(Running { task, child, progress, readers, begun: Instant::now() })
    }

    /// Reports a process that has ended.
    fn finish(&mut self, mut one: Running<'a>, stopping: bool) -> Result<(), Failure> {
        for reader in one.readers.drain(..) {
            let _ = reader.join();
        }
        let run = self.state(one.task.trial)?;
        let far = |run: &RunSummary| one.task.until.is_some_and(|until| run.step() >= until);
        let got_there = run.as_ref().is_some_and(|run| run.status == Status::Finished || far(run));
        if stopping && !got_there {
            return Ok(());
        }
        self.over += 1;
        let name = &one.task.trial.name;
        let seconds = crate::format::clock(one.begun.elapsed().as_secs_f64());
        match &run {
            Some(run) if got_there => {
                let value = super::report::value(run, &self.dir.plan, one.task.until)?;
                let value = value.map(|(goal, v)| format!(" · {} {}", goal.metric, crate::format::short(v)));
                self.out.line(&format!(
                    "{} · step {}{} · {seconds}",
                    one_line(name),
                    run.step(),
                    value.unwrap_or_default()
                ));
            }
            run => {
                let progress = one.progress.lock().unwrap_or_else(PoisonError::into_inner);
                let recorded = run.as_ref().and_then(|run| run.error.clone());
                let error = recorded.or_else(|| progress.error.clone()).unwrap_or_else(|| "its process ended".into());
                self.out.warn(&format!("{} failed: {error}", one_line(name)));
            }
        }
        let summary = super::report::trial_json(self.dir, one.task.trial, one.task.until)?;
        self.out.event(&summary);
        Ok(())
    }

    /// Rewrites the live line: `12/20 · lr=1e-3 seed=4 300/4000 loss 0.12 · …`.
    fn draw(&self, running: &[Running<'a>], all: usize) {
        let Some(bar) = &self.bar else { return };
        let mut text = format!("{}/{all}", self.over);
        for one in running {
            let progress = one.progress.lock().unwrap_or_else(PoisonError::into_inner);
            let values: Vec<String> = one.task.trial.values.iter().map(|(k, v)| format!("{k}={v}")).collect();
            text += &format!(" · {} {}/{}", one_line(&values.join(" ")), progress.step, progress.steps);
            text += &progress.loss.map(|loss| format!(" loss {}", crate::format::short(loss))).unwrap_or_default();
        }
        let width = crate::table::width().unwrap_or(80).saturating_sub(1);
        bar.set_message(truncate_str(&text, width, "…").into_owned());
    }
}

impl Drop for Pool<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Follows the events of a run.
fn read_events(out: impl Read, progress: &Mutex<Progress>) {
    for line in BufReader::new(out).lines().map_while(Result::ok) {
        let Ok(event) = serde_json::from_str::<Value>(&line) else { continue };
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        match event["event"].as_str() {
            Some("start") => progress.steps = event["steps"].as_u64().unwrap_or(0),
            Some("step") => {
                (progress.step, progress.loss) = (event["step"].as_u64().unwrap_or(0), event["loss"].as_f64());
            }
            Some("error") => {
                let place = event["file"].as_str().zip(event["line"].as_u64()).map(|(f, l)| format!("{f}:{l}: "));
                let message = event["message"].as_str().unwrap_or_default();
                progress.error = Some(format!("{}{message}", place.unwrap_or_default()));
            }
            _ => {}
        }
    }
}

/// Keeps the beginning of the error output, for a run that fails before it has a record.
fn read_errors(mut err: impl Read, progress: &Mutex<Progress>) {
    let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(n) = err.read(&mut buffer) {
        if n == 0 {
            break;
        }
        kept.extend_from_slice(&buffer[..n.min(KEPT - kept.len().min(KEPT))]);
    }
    let text = String::from_utf8_lossy(&kept);
    if let Some(line) = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("warning")) {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.error.get_or_insert_with(|| line.trim_start_matches("error: ").to_string());
    }
}
