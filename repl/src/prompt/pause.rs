//! Runs a prompt at `pl.breakpoint()`, in the middle of a function. Without a terminal a breakpoint is skipped, with one
//! warning a line.

use super::input::{self, SharedEditor};
use super::interrupts::Interrupts;
use super::{Flow, Prompt};
use crate::console_out::{self, ConsoleOut};
use crate::signals::Signals;
use perilune_core::Interrupt;
use perilune_lua::Console;
use perilune_lua::console::{Ended, Pause};
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::rc::Rc;

/// Wraps the execution of a line typed at a breakpoint.
pub trait Around {
    /// Runs a line; Ctrl-C ends it through `interrupt`.
    fn during(&self, interrupt: &Interrupt, f: &mut dyn FnMut());
}

/// Wraps the lines at breakpoints of a training run.
pub struct InRun {
    pub signals: Signals,
    /// Installed at the first line of the first breakpoint.
    interrupts: OnceCell<Option<Interrupts>>,
}

impl InRun {
    /// Creates the wrapper; signals that arrive during a line are not requests to the run.
    pub fn new(signals: &Signals) -> Rc<InRun> {
        Rc::new(InRun { signals: signals.clone(), interrupts: OnceCell::new() })
    }
}

impl Around for InRun {
    fn during(&self, interrupt: &Interrupt, f: &mut dyn FnMut()) {
        // Without a handler Ctrl-C waits for the end of the line.
        let interrupts = self.interrupts.get_or_init(|| Interrupts::install().ok());
        self.signals.set_aside(|| match interrupts {
            Some(interrupts) => interrupts.during(interrupt, f),
            None => f(),
        });
    }
}

/// Returns the breakpoint handler of a runtime. `around` runs the lines.
pub fn pause(around: Rc<dyn Around>, out: Option<Rc<ConsoleOut>>, editor: SharedEditor) -> Pause {
    let passed: RefCell<BTreeSet<String>> = RefCell::default();
    Rc::new(move |console, place| {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            if passed.borrow_mut().insert(place.to_string()) {
                console_out::complain(
                    "warning",
                    &format!("pl.breakpoint() in {place} is skipped: there is no terminal"),
                );
            }
            return Ended::Continue;
        }
        let stay = || stop(console, place, &*around, &editor);
        match &out {
            Some(out) => out.without_bar(stay),
            None => stay(),
        }
    })
}

fn stop(console: &Console, place: &str, around: &dyn Around, editor: &SharedEditor) -> Ended {
    let color = console_out::color(std::io::stdout().is_terminal());
    let prompt = Prompt { at_breakpoint: true, ..Prompt::bare(color) };
    prompt.say(&format!("breakpoint in {place} · locals: {} · :continue resumes", console.locals().join(" ")));
    let mut lines = input::Input::new(editor, console, true);
    let short = place.split(" (").next().filter(|p| !p.starts_with('(')).unwrap_or("breakpoint").to_string();
    loop {
        let line = match lines.read(&format!("{short}> ")) {
            Ok(input::Typed::Line(line)) => line,
            Ok(input::Typed::Cleared) => continue,
            Ok(input::Typed::End) => return Ended::Continue,
            Err(e) => {
                console_out::complain("warning", &format!("no line can be read at the breakpoint: {e}"));
                return Ended::Continue;
            }
        };
        let mut flow = Flow::Go;
        around.during(&console.host().interrupt, &mut || flow = prompt.text(console, &line));
        match flow {
            Flow::Go => {}
            Flow::Continue => return Ended::Continue,
            Flow::Quit => return Ended::Quit,
        }
    }
}
