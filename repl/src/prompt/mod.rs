//! `perilune repl`: a prompt. On a terminal a line editor; otherwise the lines of stdin are run and their results printed
//! plainly, and the exit status is 3 if one of them raised.
//!
//! `input.rs` reads lines, `commands.rs` and `run.rs` do what is not Lua; Lua itself is `perilune_lua::Console`'s. At a
//! breakpoint (`pause.rs`) a second prompt of the same kind runs inside the first, or inside a training run.

mod commands;
mod input;
mod interrupts;
mod pause;
mod pieces;
mod plot;
mod run;

pub use input::Desk;
use pause::Around;
pub use pause::{InRun, pause};

use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::screen;
use interrupts::Interrupts;
use perilune_lua::{Answer, Console, Runtime, RuntimeOptions};
use run::Training;
use std::cell::{Cell, RefCell};
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct ReplArgs {
    /// A recipe to explore: its run is there as `run`
    recipe: Option<PathBuf>,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// The seed of all random numbers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What follows a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    Go,
    /// From a breakpoint.
    Continue,
    Quit,
}

/// What a prompt keeps from line to line besides Lua's values.
pub struct Prompt<'a> {
    training: Option<RefCell<Training<'a>>>,
    /// Files of `:load`, for `:reload`.
    loaded: RefCell<Vec<PathBuf>>,
    /// What was typed last, for `:edit`.
    last: RefCell<String>,
    color: bool,
    at_breakpoint: bool,
    /// Whether it has been said what happens to locals.
    said_locals: Cell<bool>,
    raised: Cell<bool>,
}

impl Prompt<'_> {
    fn bare<'a>(color: bool) -> Prompt<'a> {
        Prompt {
            training: None,
            loaded: RefCell::default(),
            last: RefCell::default(),
            color,
            at_breakpoint: false,
            said_locals: Cell::new(false),
            raised: Cell::new(false),
        }
    }

    fn say(&self, text: &str) {
        if !text.is_empty() {
            // A reader that went away has nothing to hear; a full disk is said once, by the command that fills it.
            let _ = screen::say(text);
        }
    }

    fn dim(&self, text: &str) -> String {
        if self.color { format!("\x1b[2m{text}\x1b[0m") } else { text.to_string() }
    }

    fn show(&self, answer: Answer) {
        for text in &answer.shown {
            self.say(text);
        }
        if let Some(name) = answer.locals.first()
            && !self.said_locals.replace(true)
        {
            let text = format!(
                "(local {name}: at the prompt a local of the top level is a global, so that the next line has it)"
            );
            screen::complain("", &self.dim(&text));
        }
    }

    /// Runs what was typed or pasted, piece by piece, as far as nothing goes wrong.
    fn text(&self, console: &Console, text: &str) -> Flow {
        let (pieces, _) = pieces::pieces(console, text);
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
            screen::complain("", &self.dim("(what follows it was not run)"));
        }
        if !pieces.iter().all(|piece| commands::is_command(piece)) {
            *self.last.borrow_mut() = text.to_string();
        }
        self.raised.set(before || self.raised.get());
        flow
    }

    /// Runs a line of any kind and says what it gives, or what went wrong.
    fn line(&self, console: &Console, line: &str) -> Flow {
        let outcome = if commands::is_command(line) {
            let outcome = self.command(console, line);
            console.pass(line);
            outcome
        } else if line.trim().is_empty() {
            console.pass(line);
            Ok(Flow::Go)
        } else {
            *self.last.borrow_mut() = line.to_string();
            console.eval(line).map(|answer| self.show(answer)).map(|()| Flow::Go).map_err(Failure::from)
        };
        for notice in console.host().take_notices() {
            self.say(notice.trim_end());
        }
        outcome.unwrap_or_else(|failure| {
            // Who left at a breakpoint wants to leave.
            if let Failure::Recipe(e) = &failure
                && e.message == perilune_lua::RecipeError::LEFT
            {
                return Flow::Quit;
            }
            commands::complain(&failure);
            self.raised.set(true);
            Flow::Go
        })
    }
}

pub fn repl(args: ReplArgs) -> Result<(), Failure> {
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let backend = args.device.open()?;
    let print = |text: &str| drop(screen::say(text));
    let options = RuntimeOptions { backend: backend.clone(), params: args.set, strict: true, print: Rc::new(print) };
    let runtime = Runtime::new(options)?;
    crate::told::on_paper(&runtime);
    {
        let mut engine = runtime.host().engine.borrow_mut();
        // Every line is something new.
        engine.switches.report_misses = false;
        if let Some(seed) = args.seed {
            engine.recorder.seed(seed as u64);
        }
    }
    runtime.offer_params(args.seed.map(|n| ("seed".to_string(), n.to_string())).into_iter().collect());
    let console = Console::new(&runtime, if terminal { "prompt" } else { "stdin" })?;
    let mut prompt = Prompt::bare(terminal && screen::color(true));
    if let Some(path) = args.recipe {
        prompt.training = Some(RefCell::new(Training::new(&runtime, path, args.seed, args.device)));
    }
    let interrupts = if terminal { Some(Rc::new(Interrupts::install()?)) } else { None };
    let around = Rc::new(AtPrompt(interrupts.clone()));
    let desk = input::Desk::default();
    *runtime.host().pause.borrow_mut() = Some(pause(around.clone(), None, desk.clone()));
    if terminal {
        let banner = format!("perilune {} · Lua 5.4 · {} · ? for help", version(), backend.describe());
        prompt.say(&prompt.dim(&banner));
    }
    if let Some(training) = &prompt.training {
        let mut built = Ok(String::new());
        around.during(&mut || built = training.borrow_mut().build(&console));
        match built {
            Ok(said) if terminal => prompt.say(&prompt.dim(&said)),
            Ok(_) => {}
            // At a terminal it can be mended: :edit, :reload.
            Err(e @ Failure::Recipe(_)) if terminal => commands::complain(&e),
            Err(e) => return Err(e),
        }
    }
    let outcome = if terminal { typed(&prompt, &console, &*around, &desk) } else { piped(&prompt, &console) };
    *runtime.host().pause.borrow_mut() = None;
    outcome
}

/// `0.1` of `0.1.0`.
fn version() -> &'static str {
    let all = env!("CARGO_PKG_VERSION");
    all.strip_suffix(".0").unwrap_or(all)
}

struct AtPrompt(Option<Rc<Interrupts>>);

impl Around for AtPrompt {
    fn during(&self, f: &mut dyn FnMut()) {
        match &self.0 {
            Some(interrupts) => interrupts.during(f),
            None => f(),
        }
    }
}

/// The loop on a terminal.
fn typed(prompt: &Prompt, console: &Console, around: &dyn Around, desk: &input::Desk) -> Result<(), Failure> {
    let failed = |e: rustyline::error::ReadlineError| Failure::System(format!("cannot read from the terminal: {e}"));
    let mut lines = input::Input::new(desk, console, false);
    loop {
        match lines.read("> ").map_err(failed)? {
            input::Typed::Cleared => {}
            input::Typed::End => return Ok(()),
            input::Typed::Line(line) => {
                let mut flow = Flow::Go;
                around.during(&mut || flow = prompt.text(console, &line));
                if flow == Flow::Quit {
                    return Ok(());
                }
            }
        }
    }
}

/// The loop over the lines of stdin. An error does not end it; the exit status tells of it.
fn piped(prompt: &Prompt, console: &Console) -> Result<(), Failure> {
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
