//! Drives a run whose arguments are complete: opens the device and the runtime, trains, and turns its end into a status.

use super::{RunArgs, command_line};
use crate::console_out::{ConsoleOut, Mode};
use crate::diagnostics;
use crate::failure::Failure;
use crate::job::Job;
use crate::prompt;
use crate::run_printer::RunPrinter;
use crate::signals::{self, Signals};
use perilune_lua::RuntimeOptions;
use perilune_train::{Control, End, Event, Listener, Outcome, Trainer};
use std::rc::Rc;

/// What the runs of one command share.
pub struct Front {
    pub out: Rc<ConsoleOut>,
    control: Control,
    signals: Signals,
}

impl Front {
    /// Opens the output, and makes signals requests to stop.
    pub fn open(mode: Mode) -> Result<Front, Failure> {
        let control = Control::default();
        let signals = Signals::install(&control)?;
        Ok(Front { out: Rc::new(ConsoleOut::new(mode)), control, signals })
    }
}

pub(super) fn train(args: RunArgs, job: &Job) -> Result<Outcome, Failure> {
    let front = Front::open(if job.is_first() { args.mode() } else { Mode::Silent })?;
    let command = args.recorded.is_none().then(command_line);
    let printer = Rc::new(RunPrinter::new(front.out.clone(), front.signals.clone(), command));
    let outcome = drive(&args, job, &front, &printer, printer.clone())?;
    result(&outcome)?;
    Ok(outcome)
}

/// Returns the failure of a run that a signal has ended.
fn result(outcome: &Outcome) -> Result<(), Failure> {
    match outcome.end {
        End::Finished | End::Paused => Ok(()),
        End::Stopped { code } => Err(Failure::Signal(signals::exit_status(code))),
        End::LeftBreakpoint => Err(Failure::Signal(130)),
    }
}

/// Recomputes the window of `args.replay`. Of its events only warnings and errors are printed.
pub fn recompute(args: &RunArgs, front: &Front) -> Result<Outcome, Failure> {
    let printer = Rc::new(RunPrinter::new(front.out.clone(), front.signals.clone(), None));
    let listener = {
        let printer = printer.clone();
        move |event: &Event<'_>| match event {
            Event::Training | Event::LoopEnded | Event::Warning { .. } | Event::ComparesData { .. } => {
                printer.event(event)
            }
            // Its run directory is removed.
            Event::Failed { error, .. } => printer.event(&Event::Failed { error, run_dir: None }),
            _ => {}
        }
    };
    let outcome = drive(args, &Job::alone()?, front, &printer, Rc::new(listener))?;
    result(&outcome)?;
    Ok(outcome)
}

/// Trains in a runtime of its own.
fn drive(
    args: &RunArgs,
    job: &Job,
    front: &Front,
    printer: &Rc<RunPrinter>,
    listener: Rc<dyn Listener>,
) -> Result<Outcome, Failure> {
    let Front { out, control, signals } = front;
    let policy = args.policy()?;
    let trainer = Trainer::new(args.spec(), control.clone(), listener).in_job(job.links.clone());
    let outcome = trainer.run(|spec| {
        let print = {
            let out = out.clone();
            move |text: &str| out.print(text)
        };
        let backend = args.device.open_in(job)?;
        let params = spec.params.clone();
        let policy = policy.build();
        let runtime = args
            .device
            .runtime_in(job, RuntimeOptions { backend, params, policy, strict: true, print: Rc::new(print) })?;
        diagnostics::plans(&runtime, out);
        diagnostics::notices(&runtime, printer.clone());
        // A line typed at the breakpoint of one process would not run in the others.
        if !job.has_several() {
            let at_breakpoint =
                prompt::pause(prompt::InRun::new(signals), Some(out.clone()), prompt::SharedEditor::default());
            *runtime.host().pause.borrow_mut() = Some(at_breakpoint);
        }
        Ok(runtime)
    })?;
    Ok(outcome)
}
