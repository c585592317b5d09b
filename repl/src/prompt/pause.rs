//! `pl.breakpoint()`: a prompt in the middle of a function. Without a terminal nobody could answer, so it is passed by, with a
//! warning the first time a line comes to it.

use super::input::{self, Desk};
use super::interrupts::Interrupts;
use super::{Flow, Prompt};
use crate::screen::{self, Screen};
use crate::signals::Signals;
use perilune_lua::Console;
use perilune_lua::console::{Ended, Pause};
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::rc::Rc;

/// What runs around a prompt at a breakpoint.
pub trait Around {
    /// A line is about to run; Ctrl-C is for it.
    fn during(&self, f: &mut dyn FnMut());
}

/// Around the breakpoints of a training run.
pub struct InRun {
    pub signals: Signals,
    /// Made at the first line of the first breakpoint.
    interrupts: OnceCell<Option<Interrupts>>,
}

impl InRun {
    pub fn new(signals: &Signals) -> Rc<InRun> {
        Rc::new(InRun { signals: signals.clone(), interrupts: OnceCell::new() })
    }
}

impl Around for InRun {
    fn during(&self, f: &mut dyn FnMut()) {
        // Without them Ctrl-C waits for the end of the line.
        let interrupts = self.interrupts.get_or_init(|| Interrupts::install().ok());
        self.signals.set_aside(|| match interrupts {
            Some(interrupts) => interrupts.during(f),
            None => f(),
        });
    }
}

/// A breakpoint's prompt for a runtime. Lines are run by `around`, which knows whose Ctrl-C it is.
pub fn pause(around: Rc<dyn Around>, screen: Option<Rc<Screen>>, desk: Desk) -> Pause {
    let passed: RefCell<BTreeSet<String>> = RefCell::default();
    Rc::new(move |console, place| {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            if passed.borrow_mut().insert(place.to_string()) {
                screen::complain("warning", &format!("pl.breakpoint() in {place} is passed by: there is no terminal"));
            }
            return Ended::Continue;
        }
        let stay = || stop(console, place, &*around, &desk);
        match &screen {
            Some(screen) => screen.without_bar(stay),
            None => stay(),
        }
    })
}

fn stop(console: &Console, place: &str, around: &dyn Around, desk: &Desk) -> Ended {
    let color = screen::color(std::io::stdout().is_terminal());
    let prompt = Prompt { at_breakpoint: true, ..Prompt::bare(color) };
    prompt.say(&format!("breakpoint in {place} · locals: {} · :continue goes on", console.locals().join(" ")));
    let mut lines = input::Input::new(desk, console, true);
    let short = place.split(" (").next().filter(|p| !p.starts_with('(')).unwrap_or("breakpoint").to_string();
    loop {
        let line = match lines.read(&format!("{short}> ")) {
            Ok(input::Typed::Line(line)) => line,
            Ok(input::Typed::Cleared) => continue,
            Ok(input::Typed::End) => return Ended::Continue,
            Err(e) => {
                screen::complain("warning", &format!("no line can be read at the breakpoint: {e}"));
                return Ended::Continue;
            }
        };
        let mut flow = Flow::Go;
        around.during(&mut || flow = prompt.text(console, &line));
        match flow {
            Flow::Go => {}
            Flow::Continue => return Ended::Continue,
            Flow::Quit => return Ended::Quit,
        }
    }
}
