//! Evaluates the lines of a prompt on a runtime, without a terminal.
//!
//! Lines run in a separate environment over the globals: they may define globals, whereas recipes and files that are
//! required may not, and do not see those of the prompt. Each line is a chunk; `chunk.rs` parses it. Between two
//! lines garbage is collected and the engine releases unreachable values, so an error keeps no tensor alive.

mod breakpoint;
mod chunk;
mod complete;
mod examples;
mod help;
pub(crate) mod interrupt;
pub mod lexer;
mod scope;
mod value;

pub(crate) use breakpoint::breakpoint;
pub use breakpoint::{Ended, Pause};
pub use complete::Completion;
pub use examples::library as library_example;
pub use help::example;

use crate::args::show;
use crate::boundary::{Guarded, caught, memory_limit, recipe_line};
use crate::errors::{self, Cause, RecipeError};
use crate::functions::host as host_of;
use crate::host::Host;
use crate::run::Run;
use crate::runtime::{Failed, Place, Runtime};
use crate::tensor::Tensor;
use crate::{library_env, no_tail_calls};
use breakpoint::Frame;
use mlua::{Error as LuaError, Function, Lua, MultiValue, Table, Value};
use perilune_core::HostTensor;
use perilune_core::error::did_you_mean;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The result of a line.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Its results, as text.
    pub shown: Vec<String>,
    /// For each result that is a chat sample, its parts with their styles.
    pub samples: Vec<Option<Vec<crate::Segment>>>,
    /// Names that were declared `local` and became globals.
    pub locals: Vec<String>,
}

fn samples(lua: &Lua, values: &MultiValue) -> Vec<Option<Vec<crate::Segment>>> {
    values.iter().map(|v| crate::tokenizer::segments(lua, v)).collect()
}

/// A clone shares the values, for an editor that completes words.
#[derive(Clone)]
pub struct Console {
    lua: Lua,
    host: Rc<Host>,
    /// The environment of lines.
    env: Table,
    /// The table of the prompt's globals: `env`, or at a breakpoint the table behind it.
    base: Table,
    /// At a breakpoint, the stopped function.
    frame: Option<Rc<RefCell<Frame>>>,
    /// Declared names, which may be nil.
    declared: Table,
    /// The chunk name of lines in messages: `prompt`, or `stdin`.
    name: String,
    /// Every line so far, for messages about functions defined in them.
    lines: RefCell<Vec<String>>,
    /// The number of input lines before the next one.
    at: Cell<usize>,
}

/// The number of source lines kept.
const REMEMBERED: usize = 10_000;

impl Console {
    /// Creates a prompt over a runtime. `name` is the chunk name of its lines in messages.
    pub fn new(runtime: &Runtime, name: &str) -> Result<Console, Failed> {
        Console::over(runtime.lua(), name).map_err(Failed::from)
    }

    fn over(lua: &Lua, name: &str) -> mlua::Result<Console> {
        let declared = lua.create_table()?;
        let env = scope::scope(lua, declared.clone())?;
        interrupt::listen(lua)?;
        let host = host_of(lua)?;
        *host.scratch.borrow_mut() = Some(env.clone());
        let (base, lua, name) = (env.clone(), lua.clone(), name.into());
        Ok(Console { lua, host, env, base, frame: None, declared, name, lines: RefCell::default(), at: Cell::new(0) })
    }

    /// Creates a prompt in the middle of a function: its locals shadow the names of the outer prompt.
    fn paused(lua: &Lua, frame: Frame) -> mlua::Result<Console> {
        let (host, declared) = (host_of(lua)?, lua.create_table()?);
        let known = host.scratch.borrow().clone();
        let base = match known {
            Some(base) => base,
            None => {
                let base = scope::scope(lua, declared.clone())?;
                interrupt::listen(lua)?;
                *host.scratch.borrow_mut() = Some(base.clone());
                base
            }
        };
        let frame = Rc::new(RefCell::new(frame));
        let (env, meta) = (lua.create_table()?, lua.create_table()?);
        let (mine, behind) = (frame.clone(), base.clone());
        let index = move |lua: &Lua, (_, key): (Table, Value)| {
            let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
            if mine.borrow().has(&name) {
                return mine.borrow().get(&name);
            }
            let known = behind.raw_get::<Value>(key.clone())?;
            if known.is_nil() && lua.globals().raw_get::<Value>(key.clone())?.is_nil() {
                let names = mine.borrow().names();
                if let Some(near) = did_you_mean(&name, names.iter().map(String::as_str)) {
                    let hint = format!("did you mean '{near}'?");
                    return Err(errors::argument(
                        &host_of(lua)?,
                        lua,
                        "",
                        format!("'{name}' is not defined"),
                        Some(hint),
                    ));
                }
            }
            behind.get::<Value>(key)
        };
        let (mine, behind) = (frame.clone(), base.clone());
        let newindex =
            move |_: &Lua, (_, key, value): (Table, Value, Value)| match key.as_string().map(|s| s.to_string_lossy()) {
                Some(name) if mine.borrow().has(&name) => mine.borrow().set(&name, value),
                _ => behind.raw_set(key, value),
            };
        meta.raw_set("__index", Guarded(lua).create_function(index)?)?;
        meta.raw_set("__newindex", Guarded(lua).create_function(newindex)?)?;
        meta.raw_set("__metatable", false)?;
        env.set_metatable(Some(meta))?;
        let (lua, lines, at) = (lua.clone(), RefCell::default(), Cell::new(0));
        Ok(Console { lua, host, env, base, frame: Some(frame), declared, name: "breakpoint".into(), lines, at })
    }

    /// Whether a name has a value at the prompt.
    pub fn knows(&self, name: &str) -> bool {
        self.resolve(name).is_some()
    }

    /// Describes tensors that were recorded and not computed, after an interrupt; `None` if there are none.
    pub fn unevaluated(&self) -> Option<String> {
        let engine = self.host.engine.borrow();
        let pending = |r: &crate::tensor::Ref| match r {
            crate::tensor::Ref::Node(h) => engine.is_pending(*h),
            crate::tensor::Ref::State(_) => false,
        };
        let count = engine.pending_handles();
        let mut names: Vec<String> = Vec::new();
        for (name, value) in self.base.pairs::<String, Value>().flatten() {
            if let Some(t) = value.as_userdata().and_then(|u| u.borrow::<Tensor>().ok())
                && pending(&t.what)
            {
                names.push(name);
            }
        }
        names.sort();
        let last = names.last()?;
        let (are, them) = if names.len() == 1 { ("is", "it") } else { ("are", "them") };
        let more = match count.saturating_sub(names.len()) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let list = names.join(", ");
        Some(format!(
            "{list}{more} {are} recorded and not computed: a line that reads {them}, or the next step, computes {them}; {last} = nil drops {}",
            if names.len() == 1 { "it" } else { "one" }
        ))
    }

    /// Returns the names of the locals at a breakpoint.
    pub fn locals(&self) -> Vec<String> {
        let Some(frame) = &self.frame else { return Vec::new() };
        let mut frame = frame.borrow_mut();
        frame.fetch().map(|()| frame.names()).unwrap_or_default()
    }

    pub fn host(&self) -> &Rc<Host> {
        &self.host
    }

    /// Sets the global `run` to a training run.
    pub fn set_run(&self, run: &Run) -> Result<(), Failed> {
        Ok(self.base.raw_set("run", &run.table)?)
    }

    /// Returns whether the text is an unfinished chunk.
    pub fn is_unfinished(&self, text: &str) -> bool {
        let mut open = false;
        for reading in chunk::readings(text).texts {
            match self.lua.load(reading.as_str()).set_mode(mlua::chunk::ChunkMode::Text).into_function() {
                Ok(_) => return false,
                Err(LuaError::SyntaxError { incomplete_input, .. }) => open |= incomplete_input,
                Err(_) => {}
            }
        }
        open
    }

    /// Runs one or several lines and formats their results. The first result becomes `_`.
    pub fn eval(&self, text: &str) -> Result<Answer, Failed> {
        let outcome = self.guarded(text, true, |console| {
            let (values, locals) = console.run_line(text)?;
            let shown = console.show(&values)?;
            if let Some(first) = values.front() {
                console.base.raw_set("_", first)?;
            }
            Ok(Answer { shown, samples: samples(&console.lua, &values), locals })
        });
        self.tidy();
        outcome
    }

    /// Runs a file in the prompt's environment, which keeps its globals.
    pub fn load(&self, path: &Path) -> Result<Answer, Failed> {
        let text = crate::loader::text_of(path)?;
        crate::source_text::keep(&crate::loader::chunk_name(path), &text);
        let text = if text.starts_with("#!") { format!("--{text}") } else { text };
        let outcome = self.guarded("", false, |console| {
            let chunk =
                no_tail_calls::compile(&console.lua, &text, &crate::loader::chunk_name(path), Some(&console.env))?;
            let values: MultiValue = chunk.call(())?;
            let shown = console.show(&values)?;
            if let Some(first) = values.front() {
                console.base.raw_set("_", first)?;
            }
            Ok(Answer { shown, samples: samples(&console.lua, &values), locals: Vec::new() })
        });
        self.tidy();
        outcome
    }

    /// Calls a function of the standard library's `perilune.prompt` with the values of an expression, and returns its text.
    pub fn command(&self, function: &str, expression: &str) -> Result<String, Failed> {
        let outcome = self.guarded(expression, false, |console| {
            let values = match expression.trim() {
                "" => MultiValue::new(),
                _ => console.run_line(expression)?.0,
            };
            let require = library_env::function(&console.lua, "require")?;
            let module: Table = require.call("perilune.prompt")?;
            let f: Function = module.get(function)?;
            let mut args = MultiValue::from_vec(vec![Value::Table(console.base.clone())]);
            args.extend(values);
            let out: Value = f.call(args)?;
            value::tostring(&console.lua, &out)
        });
        self.tidy();
        outcome
    }

    /// Evaluates an expression to numbers: downloads tensors, and converts lists of numbers.
    pub fn numbers(&self, expression: &str) -> Result<Vec<HostTensor>, Failed> {
        let outcome = self.guarded(expression, false, |console| {
            let (values, _) = console.run_line(expression)?;
            let mut out = Vec::new();
            for v in values {
                let t = match v {
                    Value::UserData(u) if u.is::<Tensor>() => {
                        crate::table::read(&console.lua, &*u.borrow::<Tensor>()?)?
                    }
                    Value::Nil | Value::String(_) | Value::Function(_) | Value::Thread(_) => {
                        let message =
                            format!(":plot: the value is {}; it draws tensors and lists of numbers", show(&v));
                        let cure = Some("as in :plot x, or :plot { 1, 4, 9 }".into());
                        return Err(recipe_line::raised(&console.lua, message, cure, Cause::Recipe));
                    }
                    other => {
                        let made = crate::table::tensor(&console.lua, (other, Value::Nil));
                        let made = made.map_err(errors::without_line)?;
                        crate::table::read(&console.lua, &made)?
                    }
                };
                out.push(t);
            }
            Ok(out)
        });
        self.tidy();
        outcome
    }

    /// Runs a line and evaluates its tensors without formatting them.
    pub fn time(&self, text: &str) -> Result<(), Failed> {
        let outcome = self.guarded(text, false, |console| {
            let (values, _) = console.run_line(text)?;
            for v in &values {
                // A download waits for a device that works asynchronously.
                if let Some(u) = v.as_userdata()
                    && let Ok(t) = u.borrow::<Tensor>()
                {
                    crate::table::read(&console.lua, &t)?;
                }
            }
            if let Some(first) = values.front() {
                console.base.raw_set("_", first)?;
            }
            Ok(())
        });
        self.tidy();
        outcome
    }

    /// Unloads the user's required files, so that they are read again.
    pub fn forget_required(&self) -> Result<(), Failed> {
        crate::loader::forget_own(&self.lua)?;
        Ok(())
    }

    /// Formats results. Tensors are evaluated together by one plan, with one wait for the device.
    fn show(&self, values: &MultiValue) -> mlua::Result<Vec<String>> {
        let nodes: MultiValue = values.iter().filter(|v| v.is_userdata()).cloned().collect();
        let refs = crate::functions::tensors_of(&nodes);
        if refs.len() > 1 {
            self.host.record(&self.lua, |engine| {
                let ids: Result<Vec<_>, _> = refs
                    .iter()
                    .filter(|r| matches!(r.0, crate::tensor::Ref::Node(_)))
                    .map(|r| r.node(engine))
                    .collect();
                engine.evaluate(&ids?)
            })?;
        }
        values.iter().map(|v| value::show(&self.lua, v)).collect()
    }

    fn run_line(&self, text: &str) -> mlua::Result<(MultiValue, Vec<String>)> {
        let readings = chunk::readings(text);
        let base = self.at.get();
        let name = format!("={}", self.name);
        let mut failed = None;
        for reading in &readings.texts {
            match no_tail_calls::compile(&self.lua, &format!("{}{reading}", "\n".repeat(base)), &name, Some(&self.env))
            {
                Ok(chunk) => {
                    for name in &readings.locals {
                        self.declared.raw_set(name.as_str(), true)?;
                    }
                    return Ok((chunk.call(())?, readings.locals));
                }
                Err(e) => failed = Some(e),
            }
        }
        Err(failed.unwrap_or_else(|| LuaError::runtime("an empty line")))
    }

    /// Runs `f` for a line of the prompt. An error is converted immediately, so that it keeps no Lua value alive.
    /// Lines evaluated by a command are not counted: its whole line is skipped afterwards.
    fn guarded<T>(&self, text: &str, counts: bool, f: impl FnOnce(&Console) -> mlua::Result<T>) -> Result<T, Failed> {
        let fetched = self.frame.as_ref().map_or(Ok(()), |frame| frame.borrow_mut().fetch());
        let room = || memory_limit::make_room(&self.lua);
        let mut outcome = fetched.and_then(|()| room()).and_then(|()| caught(&self.lua, || f(self)));
        if let Some(frame) = &self.frame {
            let stored = frame.borrow().store().and_then(|()| frame.borrow().clear());
            outcome = outcome.and_then(|out| stored.map(|()| out));
        }
        let outcome = outcome.map_err(|e| {
            let mut failed = Failed::from(e);
            if let Failed::Recipe(error) = &mut failed {
                self.point(error, text);
            }
            failed
        });
        self.host.interrupt.clear();
        if counts {
            self.pass(text);
        }
        outcome
    }

    /// Adds the source line to an error in a line of the prompt, even if a file has the same name.
    fn point(&self, error: &mut RecipeError, text: &str) {
        if error.file.as_deref() != Some(self.name.as_str()) {
            return;
        }
        let lines = self.lines.borrow();
        let at = error.line.unwrap_or(1).max(1) as usize - 1;
        let source = match at.checked_sub(self.at.get()) {
            Some(k) => text.lines().nth(k).map(str::to_string),
            None => lines.get(at).cloned(),
        };
        error.source = source;
    }

    /// Counts input lines that are not evaluated (commands, blank lines), so that line numbers equal those of the input.
    pub fn pass(&self, text: &str) {
        self.at.set(self.at.get() + text.lines().count().max(1));
        let mut lines = self.lines.borrow_mut();
        if lines.len() < REMEMBERED {
            lines.extend(text.lines().map(str::to_string).chain(text.is_empty().then(String::new)));
        }
    }

    /// Collects the garbage of the line, in Lua and in the engine.
    fn tidy(&self) {
        // The first pass frees objects with finalisers, the second what these referenced.
        let _ = self.host.collect(&self.lua).and_then(|()| self.host.collect(&self.lua));
        if self.frame.is_some() {
            return; // the stopped function may be in the middle of a recording, such as a custom backward
        }
        let mut engine = self.host.engine.borrow_mut();
        engine.tidy();
        if engine.recorder.graph.is_empty() {
            self.host.customs.borrow_mut().clear();
        }
    }

    pub(crate) fn place(&self) -> Place {
        self.lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default()
    }

    /// Returns the candidate files for a path typed at the prompt, best first.
    pub fn find(&self, path: &str) -> PathBuf {
        let (here, beside) = (PathBuf::from(path), self.place().at(path));
        if here.exists() || !beside.exists() { here } else { beside }
    }
}
