//! Runs an interactive prompt: reads lines, evaluates Lua, and executes commands such as `:plot`.
//!
//! `input.rs` reads lines, `commands.rs` and `run.rs` execute commands, and `perilune_lua::Console` evaluates Lua. At a
//! breakpoint (`pause.rs`) a second prompt of the same kind runs inside the first, or inside a training run.

pub mod commands;
mod input;
mod interrupts;
mod paste;
mod pause;
mod plot;
mod run;

pub use input::SharedEditor;
pub use interrupts::Interrupts;
pub use pause::{Around, InRun, pause};
pub use run::Training;

use crate::console_out;
use crate::failure::Failure;
use crate::terminal::styled;
use perilune_core::Interrupt;
use perilune_lua::{Answer, Cause, Console, Segment};
use std::cell::{Cell, RefCell};
use std::io::BufRead;
use std::path::PathBuf;
use std::rc::Rc;

/// The next action after a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    Go,
    /// Leave a breakpoint.
    Continue,
    Quit,
}

/// A part of a chat sample: green if the loss trains it, else dim; special tokens bold, tokens that a border cuts underlined.
fn styled_part((text, style): &Segment) -> String {
    let mut codes = vec![if style.trained { "32" } else { "2" }];
    codes.extend(style.special.then_some("1"));
    codes.extend(style.cut.then_some("4"));
    styled(&codes.join(";"), text)
}

/// The state of a prompt, besides Lua's values.
pub struct Prompt<'a> {
    pub training: Option<RefCell<Training<'a>>>,
    /// Files of `:load`, for `:reload`.
    loaded: RefCell<Vec<PathBuf>>,
    /// The last input, for `:edit`.
    last: RefCell<String>,
    color: bool,
    at_breakpoint: bool,
    /// Whether the note about locals has been printed.
    noted_locals: Cell<bool>,
    raised: Cell<bool>,
}

impl Prompt<'_> {
    /// Returns a prompt without a recipe.
    pub fn bare<'a>(color: bool) -> Prompt<'a> {
        Prompt {
            training: None,
            loaded: RefCell::default(),
            last: RefCell::default(),
            color,
            at_breakpoint: false,
            noted_locals: Cell::new(false),
            raised: Cell::new(false),
        }
    }

    /// Prints a result.
    pub fn say(&self, text: &str) {
        if !text.is_empty() {
            // A closed pipe is not an error, and a full disk is reported by the command that fills it.
            let _ = console_out::say(text);
        }
    }

    /// Returns the text dimmed, where there is colour.
    pub fn dim(&self, text: &str) -> String {
        if self.color { styled("2", text) } else { text.to_string() }
    }

    fn show(&self, answer: Answer) {
        for (text, sample) in answer.shown.iter().zip(&answer.samples) {
            match sample.as_ref().filter(|_| self.color) {
                Some(parts) => self.say(&parts.iter().map(styled_part).collect::<String>()),
                None => self.say(text),
            }
        }
        if let Some(name) = answer.locals.first()
            && !self.noted_locals.replace(true)
        {
            let text = format!(
                "(local {name}: at the prompt a top-level local becomes a global, so that later lines can use it)"
            );
            console_out::complain("", &self.dim(&text));
        }
    }

    /// Runs typed or pasted text piece by piece, up to the first error.
    fn text(&self, console: &Console, text: &str) -> Flow {
        let (pieces, _) = paste::pieces(console, text);
        if pieces.len() < 2 {
            return self.line(console, text);
        }
        let before = self.raised.replace(false);
        let mut left = pieces.iter();
        let mut flow = Flow::Go;
        for piece in left.by_ref() {
            flow = self.line(console, piece);
            if flow != Flow::Go || self.raised.get() {
                break;
            }
        }
        if flow == Flow::Go && left.any(|piece| !piece.trim().is_empty()) {
            console_out::complain("", &self.dim("(the rest of the paste was not run)"));
        }
        if !pieces.iter().all(|piece| commands::is_command(piece)) {
            *self.last.borrow_mut() = text.to_string();
        }
        self.raised.set(before || self.raised.get());
        flow
    }

    /// Runs a line of any kind and prints its result or its error.
    fn line(&self, console: &Console, line: &str) -> Flow {
        let outcome = if commands::is_command(line) {
            let outcome = self.command(console, line);
            console.pass(line);
            outcome
        } else if line.trim().is_empty() {
            console.pass(line);
            Ok(Flow::Go)
        } else if commands::leaves(line).is_some_and(|name| !console.knows(name)) {
            return Flow::Quit;
        } else {
            *self.last.borrow_mut() = line.to_string();
            console.eval(line).map(|answer| self.show(answer)).map(|()| Flow::Go).map_err(Failure::from)
        };
        for notice in console.host().take_notices() {
            self.say(notice.trim_end());
        }
        outcome.unwrap_or_else(|failure| {
            // `:quit` at a breakpoint also leaves the outer prompt.
            if let Failure::Recipe(e) = &failure
                && e.cause == Cause::LeftBreakpoint
            {
                return Flow::Quit;
            }
            commands::complain(&failure);
            if let Failure::Recipe(e) = &failure
                && e.cause == Cause::Interrupted
                && let Some(note) = console.unevaluated()
            {
                console_out::complain("", &self.dim(&format!("({note})")));
            }
            self.raised.set(true);
            Flow::Go
        })
    }
}

/// Interrupts the lines of the prompt itself.
pub struct AtPrompt(pub Option<Rc<Interrupts>>);

impl Around for AtPrompt {
    fn during(&self, interrupt: &Interrupt, f: &mut dyn FnMut()) {
        match &self.0 {
            Some(interrupts) => interrupts.during(interrupt, f),
            None => f(),
        }
    }
}

/// Runs the loop on a terminal.
pub fn typed(prompt: &Prompt, console: &Console, around: &dyn Around, editor: &SharedEditor) -> Result<(), Failure> {
    let failed = |e: rustyline::error::ReadlineError| Failure::System(format!("cannot read from the terminal: {e}"));
    let mut lines = input::Input::new(editor, console, false);
    loop {
        match lines.read("> ").map_err(failed)? {
            input::Typed::Cleared => {}
            input::Typed::End => return Ok(()),
            input::Typed::Line(line) => {
                let mut flow = Flow::Go;
                around.during(&console.host().interrupt, &mut || flow = prompt.text(console, &line));
                if flow == Flow::Quit {
                    return Ok(());
                }
            }
        }
    }
}

/// Runs the loop over the lines of stdin. An error does not end it, but changes the exit status.
pub fn piped(prompt: &Prompt, console: &Console) -> Result<(), Failure> {
    let mut text = String::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| Failure::Usage(format!("cannot read stdin: {}", crate::failure::plain(&e))))?;
        if text.is_empty() {
            text = line;
        } else {
            text.push('\n');
            text.push_str(&line);
        }
        let unfinished = !commands::is_command(&text) && console.is_unfinished(&text);
        if unfinished {
            continue;
        }
        if prompt.line(console, &std::mem::take(&mut text)) == Flow::Quit {
            text.clear();
            break;
        }
    }
    if !text.is_empty() {
        prompt.line(console, &text);
    }
    if prompt.raised.get() { Err(Failure::Said(3)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::styled_part;
    use crate::terminal::rendered;
    use perilune_lua::Style;

    #[test]
    fn trained_tokens_are_green_and_special_ones_bold() {
        let part = |text: &str, trained, special, cut| {
            rendered(&styled_part(&(text.into(), Style { trained, special, cut }))).into_owned()
        };
        assert_eq!(part("Ho", true, false, false), "\u{1b}[32mHo\u{1b}[0m");
        assert_eq!(part("<e>", true, true, false), "\u{1b}[32;1m<e>\u{1b}[0m");
        assert_eq!(part("x", false, false, true), "\u{1b}[2;4mx\u{1b}[0m");
        // What a message says is escaped.
        assert_eq!(part("a\u{1b}[31m", false, false, false), "\u{1b}[2ma\\u{1b}[31m\u{1b}[0m");
    }
}
