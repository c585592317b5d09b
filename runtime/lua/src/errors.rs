//! Formats user-facing errors: op, values, rule, cure, recipe line, and the Lua traceback.
//!
//! Inside Lua an error is an error object whose `tostring` is `file:line: message`. Outside, [`RecipeError`] takes the
//! mlua error apart, adds the source line and a short stack, and removes all Rust names.

use crate::boundary::recipe_line;
use crate::caret;
use crate::host::{Host, INTERNAL};
use crate::missed_field;
use crate::runtime::Params;
use crate::source_text;
use mlua::Error as LuaError;
use perilune_core::source_loc::SourceLoc;
use perilune_engine::Fault;
use std::fmt;
use std::rc::Rc;

/// The cause of an error.
pub enum Raise {
    /// From the engine, at the current line unless the fault has its own.
    Fault(Fault, SourceLoc),
}

/// Classifies an error by its origin, so that callers never compare messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Cause {
    /// The recipe: its code, params or data.
    #[default]
    Recipe,
    /// Device, memory or disk.
    System,
    /// A confined recipe lacks a grant: the hint names the flag.
    Refused,
    /// A cancellation request (`perilune_core::Interrupt`).
    Interrupted,
    /// The first step of a plain script that is only checked has ended.
    FirstStep,
    /// `:quit` at a breakpoint.
    LeftBreakpoint,
    /// A panic in a native function: a bug of the runtime.
    Internal,
}

/// The error value that Lua carries.
#[derive(Clone, Debug)]
pub struct Raised {
    pub file: Option<String>,
    pub line: u32,
    pub message: String,
    pub hint: Option<String>,
    /// The line at which the error surfaced, if it is another one.
    pub while_at: Option<String>,
    pub cause: Cause,
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}:{}: ", self.line)?;
        }
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        if let Some(at) = &self.while_at {
            write!(f, "\n  evaluated at {at}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Raised {}

pub fn raise(host: &Rc<Host>, what: Raise) -> LuaError {
    LuaError::external(raised(host, what))
}

/// Raises [`Cause::LeftBreakpoint`] at the current line.
pub fn left_breakpoint(host: &Rc<Host>, lua: &mlua::Lua) -> LuaError {
    let error = perilune_core::Error::argument("", "left at a breakpoint");
    let raised = raised(host, Raise::Fault(error.into(), current_loc(host, lua)));
    LuaError::external(Raised { cause: Cause::LeftBreakpoint, ..raised })
}

/// Ends a plain script after its first step, by an error with [`Cause::FirstStep`], if it runs under
/// [`crate::Runtime::until_first_step`].
pub fn end_of_step(host: &Rc<Host>, lua: &mlua::Lua) -> mlua::Result<()> {
    let is_recipe = || lua.app_data_ref::<Params>().is_some_and(|p| p.recipe.is_some());
    if !host.first_step_only.get() || is_recipe() {
        return Ok(());
    }
    let error = perilune_core::Error::argument("", "the first step has ended");
    let raised = raised(host, Raise::Fault(error.into(), current_loc(host, lua)));
    Err(LuaError::external(Raised { cause: Cause::FirstStep, ..raised }))
}

fn raised(host: &Rc<Host>, what: Raise) -> Raised {
    let Raise::Fault(fault, here) = what;
    let engine = host.engine.borrow();
    let own = fault.loc.filter(|s| *s != SourceLoc::NONE);
    let loc = own.unwrap_or(here);
    let (file, line) = match engine.recorder.source_map.get(loc) {
        Some((file, line)) => (Some(file.to_string()), line),
        None => (None, 0),
    };
    let while_at = own.filter(|s| *s != here && here != SourceLoc::NONE).map(|_| engine.recorder.source_map.show(here));
    let e = fault.error;
    let message = if e.op.is_empty() { e.message } else { format!("{}: {}", e.op, e.message) };
    let cause = match e.kind {
        perilune_core::Kind::System | perilune_core::Kind::Memory => Cause::System,
        perilune_core::Kind::Interrupted => Cause::Interrupted,
        _ => Cause::Recipe,
    };
    Raised { file, line, message, hint: e.hint, while_at, cause }
}

/// Makes an error of the binding itself (wrong argument type, unknown option) at the current line.
pub fn argument(
    host: &Rc<Host>,
    lua: &mlua::Lua,
    op: &str,
    message: impl Into<String>,
    hint: Option<String>,
) -> LuaError {
    let mut error = perilune_core::Error::argument(op, message.into());
    error.hint = hint;
    raise(host, Raise::Fault(error.into(), current_loc(host, lua)))
}

/// Makes an error of a missing grant at the current line.
pub fn refused(
    host: &Rc<Host>,
    lua: &mlua::Lua,
    op: &str,
    message: impl Into<String>,
    hint: Option<String>,
) -> LuaError {
    let mut error = perilune_core::Error::argument(op, message.into());
    error.hint = hint;
    let raised = raised(host, Raise::Fault(error.into(), current_loc(host, lua)));
    LuaError::external(Raised { cause: Cause::Refused, ..raised })
}

/// Makes an error of a binding that workers have too, whose states have no engine.
pub fn in_any_state(lua: &mlua::Lua, op: &str, message: impl Into<String>, hint: Option<String>) -> LuaError {
    match crate::functions::host(lua) {
        Ok(host) => argument(&host, lua, op, message, hint),
        Err(_) => recipe_line::raised(lua, format!("{op}: {}", message.into()), hint, Cause::Recipe),
    }
}

/// An error of the engine or of a connection, at the line that runs.
pub fn fault(host: &Rc<Host>, lua: &mlua::Lua, error: perilune_core::Error) -> LuaError {
    raise(host, Raise::Fault(error.into(), current_loc(host, lua)))
}

/// Returns the current line, or the start of the recipe if none of its lines is on the stack.
fn current_loc(host: &Rc<Host>, lua: &mlua::Lua) -> SourceLoc {
    match host.loc(lua) {
        SourceLoc::NONE => lua.app_data_ref::<Params>().and_then(|p| p.recipe).unwrap_or(SourceLoc::NONE),
        loc => loc,
    }
}

/// Removes the line from an error of a binding that no line of a recipe called.
pub fn without_line(e: LuaError) -> LuaError {
    match e.downcast_ref::<Raised>() {
        Some(raised) => LuaError::external(Raised { file: None, line: 0, ..raised.clone() }),
        None => e,
    }
}

/// A failed recipe, ready to be printed.
#[derive(Clone, Debug)]
pub struct RecipeError {
    pub message: String,
    pub hint: Option<String>,
    pub file: Option<String>,
    pub line: Option<u32>,
    /// The offending source line, of a file that was loaded.
    pub source: Option<String>,
    /// The line at which the error surfaced, if it is another one.
    pub while_at: Option<String>,
    /// Innermost first: `forward (recipes/digits.lua:40)`.
    pub stack: Vec<String>,
    pub cause: Cause,
}

impl RecipeError {
    /// Takes an mlua error apart.
    pub fn new(error: &LuaError) -> RecipeError {
        let mut traceback: Option<String> = None;
        let mut argument: Option<(Option<String>, usize)> = None;
        let mut at = error.clone();
        loop {
            at = match at {
                LuaError::CallbackError { traceback: t, cause } => {
                    traceback = Some(t); // the innermost traceback has all frames
                    (*cause).clone()
                }
                LuaError::WithContext { cause, .. } => (*cause).clone(),
                LuaError::BadArgument { to, pos, cause, .. } => {
                    argument = Some((to, pos));
                    (*cause).clone()
                }
                other => {
                    at = other;
                    break;
                }
            };
        }
        let mut out = match &at {
            LuaError::ExternalError(e) => match find::<Raised>(&**e) {
                Some(r) => RecipeError {
                    message: shortened(&r.message).into_owned(),
                    hint: r.hint.clone(),
                    file: r.file.clone(),
                    line: r.file.as_ref().map(|_| r.line),
                    source: None,
                    while_at: r.while_at.clone(),
                    stack: Vec::new(),
                    cause: r.cause,
                },
                None => RecipeError::plain(&e.to_string()),
            },
            LuaError::SyntaxError { message, .. } | LuaError::RuntimeError(message) => RecipeError::plain(message),
            LuaError::MemoryError(_) => {
                let (message, cure) = crate::boundary::memory_limit::explain();
                RecipeError { cause: Cause::System, hint: Some(cure), ..RecipeError::plain(&message) }
            }
            LuaError::FromLuaConversionError { from, to, .. } => {
                let (name, pos) = argument.unwrap_or_default();
                let name = name.or_else(|| traceback.as_deref().and_then(native_name));
                let method = name.as_ref().is_some_and(|n| n.contains('.'));
                let pos = pos.saturating_sub(usize::from(method)); // the object of a method is not counted
                let name = name.map(|n| format!("{}: ", n.rsplit('.').next().unwrap_or(&n))).unwrap_or_default();
                let pos = if pos > 0 { format!("argument {pos}") } else { "an argument".into() };
                RecipeError::plain(&format!("{name}{pos} is {}; it must be {}", lua_kind(from), rust_kind(to)))
            }
            other => RecipeError::plain(&other.to_string()),
        };
        if let Some(t) = traceback {
            out.stack = frames(&t);
        }
        let internal = out.file.as_ref().is_some_and(|f| f.starts_with(&INTERNAL[1..]));
        if internal && out.message.contains("(local 'self')") {
            out.hint = Some("a method is called with a colon, as in opt:step() or x:sum()".into());
        }
        if (out.file.is_none() || internal)
            && let Some((file, line)) = out.stack.first().and_then(|f| place(f))
        {
            out.file = Some(file);
            out.line = Some(line);
        }
        if let Some((file, line)) = out.file.as_ref().zip(out.line)
            && let Some(hint) = missed_field::hint(file, line, &out.message)
        {
            out.hint = Some(hint);
        }
        if out.hint.is_none() {
            out.hint = nil_call(&out.message);
        }
        out.source = out.file.as_ref().zip(out.line).and_then(|(f, l)| source_text::line(f, l));
        out
    }

    /// Makes an error found outside of Lua, about a line of a recipe.
    pub fn at(file: &str, line: Option<u32>, message: impl Into<String>, hint: Option<String>) -> RecipeError {
        RecipeError {
            message: message.into(),
            hint,
            file: Some(file.to_string()),
            line,
            source: line.and_then(|l| source_text::line(file, l)),
            while_at: None,
            stack: Vec::new(),
            cause: Cause::Recipe,
        }
    }

    /// Parses Lua's own text: `file:line: message`, perhaps followed by a traceback.
    fn plain(text: &str) -> RecipeError {
        let text = shortened(text);
        let text = &*text;
        let (text, trace) = match text.split_once("\nstack traceback:") {
            Some((t, rest)) => (t, Some(rest)),
            None => (text, None),
        };
        let mut out = RecipeError {
            message: text.to_string(),
            hint: None,
            file: None,
            line: None,
            source: None,
            while_at: None,
            stack: trace.map(frames).unwrap_or_default(),
            cause: Cause::Recipe,
        };
        if let Some((head, rest)) = split_place(text) {
            out.file = Some(head.0);
            out.line = Some(head.1);
            out.message = rest;
        }
        // Lua describes a value that is no text by its kind and address.
        let address = |kind: &&str| out.message.strip_prefix(*kind).is_some_and(|rest| rest.starts_with(": 0x"));
        if let Some(kind) = ["table", "function", "thread", "userdata"].into_iter().find(address) {
            out.message =
                format!("the script raised an error that is a {kind}; raise a text: error(\"what is wrong\")");
        }
        if let Some((message, hint)) = out.message.clone().split_once("\n  hint: ") {
            out.message = message.to_string();
            out.hint = Some(hint.to_string());
        }
        out
    }
}

/// The maximum bytes of an error's text.
const LONGEST: usize = 16 << 10;

/// Truncates a long text, keeping its traceback.
fn shortened(text: &str) -> std::borrow::Cow<'_, str> {
    if text.len() <= LONGEST {
        return text.into();
    }
    let (message, trace) = match text.rfind("\nstack traceback:") {
        Some(at) if text.len() - at <= LONGEST => text.split_at(at),
        _ => (text, ""),
    };
    let head = &message[..message.floor_char_boundary(LONGEST.min(message.len()))];
    format!("{head}… ({} bytes){trace}", message.len()).into()
}

fn find<T: Clone + 'static + std::error::Error>(e: &(dyn std::error::Error + 'static)) -> Option<T> {
    let mut at = Some(e);
    while let Some(e) = at {
        if let Some(found) = e.downcast_ref::<T>() {
            return Some(found.clone());
        }
        at = e.source();
    }
    None
}

/// Splits `file:line: rest`.
fn split_place(text: &str) -> Option<((String, u32), String)> {
    let mut from = 0;
    while let Some(k) = text[from..].find(':') {
        let at = from + k;
        let rest = &text[at + 1..];
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if at > 0 && !digits.is_empty() && rest[digits.len()..].starts_with(':') && !text[..at].contains('\n') {
            let message = rest[digits.len() + 1..].trim_start().to_string();
            return Some(((text[..at].to_string(), digits.parse().ok()?), message));
        }
        from = at + 1;
    }
    None
}

/// Selects the frames of a Lua traceback in the user's files.
fn frames(traceback: &str) -> Vec<String> {
    let mut out = Vec::new();
    for line in traceback.lines() {
        let line = line.trim();
        if line.starts_with('[')
            || line.starts_with("__mlua")
            || line.starts_with(&INTERNAL[1..])
            || line.starts_with("...")
            || line.is_empty()
        {
            continue;
        }
        let Some((head, what)) = line.split_once(": in ") else { continue };
        let Some(((file, number), _)) = split_place(&format!("{head}:")) else { continue };
        let name = what.rsplit('\'').nth(1).map(|n| n.rsplit('.').next().unwrap_or(n)).unwrap_or(match what {
            "main chunk" => "main chunk",
            _ => "function",
        });
        out.push(format!("{name} ({file}:{number})"));
    }
    out
}

/// Returns the native function at the top of a traceback.
fn native_name(traceback: &str) -> Option<String> {
    let line = traceback.lines().map(str::trim).find(|l| l.starts_with("[C]: in "))?;
    line.rsplit('\'').nth(1).map(str::to_string)
}

/// Formats the stack on one line; a recursive frame appears once.
fn stack_line(stack: &[String]) -> String {
    let mut out: Vec<(&str, usize)> = Vec::new();
    for frame in stack {
        match out.last_mut() {
            Some((last, n)) if *last == frame => *n += 1,
            _ => out.push((frame, 1)),
        }
    }
    let frames: Vec<String> =
        out.iter().map(|(frame, n)| if *n > 1 { format!("{frame}, and so on") } else { frame.to_string() }).collect();
    frames.join(" < ")
}

/// Returns a Lua type with its article.
fn lua_kind(from: &str) -> String {
    match from {
        "nil" => "nil".into(),
        "integer" | "userdata" | "error" => format!("an {from}").replace("an userdata", "a tensor or another object"),
        other => format!("a {other}"),
    }
}

/// Describes the type that a binding expected in terms of Lua.
fn rust_kind(to: &str) -> &str {
    match to {
        "i64" | "u64" | "usize" | "i32" | "u32" => "an integer",
        "f64" | "f32" => "a number",
        "bool" => "true or false",
        "String" | "string" | "&str" => "a string",
        "table" => "a table",
        "function" => "a function",
        _ => "of another type",
    }
}

/// Suggests a cure for "attempt to call a nil value (method 'num_params')".
fn nil_call(message: &str) -> Option<String> {
    let name = message.strip_prefix("attempt to call a nil value (")?.strip_suffix("')")?;
    let (kind, name) = name.split_once(" '")?;
    let methods = [
        "forward",
        "parameters",
        "buffers",
        "states",
        "num_parameters",
        "apply",
        "train",
        "eval",
        "step",
        "evaluate",
        "finished",
        "split",
        "shuffle",
        "map",
        "batch",
        "windows",
        "tensors",
        "batches",
        "batch_at",
        "update",
        "swap",
        "copy_to",
        "encode",
        "decode",
    ];
    let ops = perilune_core::ops::all().iter().filter(|o| !o.sig.is_empty()).map(|o| o.name);
    let near = perilune_core::error::did_you_mean(name, methods.into_iter().chain(ops))
        .or_else(|| methods.into_iter().find(|m| name.get(..6).is_some_and(|head| m.starts_with(head))))?;
    (kind == "method" && near != name).then(|| format!("did you mean '{near}'?"))
}

fn place(frame: &str) -> Option<(String, u32)> {
    let inside = frame.split_once('(')?.1.strip_suffix(')')?;
    let (file, line) = inside.rsplit_once(':')?;
    Some((file.to_string(), line.parse().ok()?))
}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(file), Some(line)) = (&self.file, self.line) {
            write!(f, "{file}:{line}: ")?;
        }
        f.write_str(&self.message)?;
        if let (Some(source), Some(line)) = (&self.source, self.line) {
            write!(f, "\n  {line} | {source}")?;
            if let Some(marks) = caret::below(source, &self.message) {
                write!(f, "\n  {:>width$} | {marks}", "", width = line.to_string().len())?;
            }
        }
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        if let Some(at) = &self.while_at {
            write!(f, "\n  evaluated at {at}")?;
        }
        if self.stack.len() > 1 {
            write!(f, "\nstack: {}", stack_line(&self.stack))?;
        }
        Ok(())
    }
}

impl std::error::Error for RecipeError {}
