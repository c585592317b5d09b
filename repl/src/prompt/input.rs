//! Reads lines with an editor: highlighting, completion, multi-line input, and the history file.

use super::commands;
use super::paste::pieces;
use crate::console_out;
use crate::terminal;
use perilune_lua::Console;
use perilune_lua::console::lexer::{Kind, tokens};
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::{CmdKind, Highlighter};
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{ColorMode, CompletionType, Config, Context, Editor, Helper};
use std::borrow::Cow;
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The number of lines in the history file.
const REMEMBERED: usize = 5000;

/// The result of reading a line.
pub enum Typed {
    Line(String),
    /// Ctrl-C: the line was discarded.
    Cleared,
    /// Ctrl-D.
    End,
}

/// The line editor of the process. Prompts share it because it buffers typed or pasted input.
pub type SharedEditor = Rc<RefCell<Option<Editor<Words, FileHistory>>>>;

/// Reads the lines of one prompt.
pub struct Input {
    shared: SharedEditor,
    words: Words,
    history: Option<PathBuf>,
}

impl Input {
    /// Creates a reader that completes words of `console`.
    pub fn new(shared: &SharedEditor, console: &Console, at_breakpoint: bool) -> Input {
        let color = console_out::color(std::io::stdout().is_terminal());
        let words = Words { console: Rc::new(console.clone()), color, at_breakpoint };
        Input { shared: shared.clone(), words, history: history_file() }
    }

    fn editor(&self) -> Result<Editor<Words, FileHistory>, ReadlineError> {
        if let Some(editor) = self.shared.take() {
            return Ok(editor);
        }
        let config = Config::builder()
            .completion_type(CompletionType::List)
            .color_mode(if self.words.color { ColorMode::Enabled } else { ColorMode::Disabled })
            .history_ignore_space(true)
            .max_history_size(REMEMBERED)?
            .auto_add_history(false)
            .build();
        let mut editor = Editor::with_config(config)?;
        if let Some(path) = &self.history {
            // Before the first session there is no history file.
            let _ = editor.load_history(path);
        }
        Ok(editor)
    }

    /// Reads a line, or several that belong together.
    pub fn read(&mut self, prompt: &str) -> Result<Typed, ReadlineError> {
        let mut editor = self.editor()?;
        editor.set_helper(Some(self.words.clone()));
        let typed = match editor.readline(prompt) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    editor.add_history_entry(line.as_str())?;
                    self.save(&mut editor);
                }
                Ok(Typed::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Cleared),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(e) => Err(e),
        };
        // The editor keeps no reference to Lua values between lines.
        editor.set_helper(None);
        self.shared.replace(Some(editor));
        typed
    }

    /// Appends to the history file after each line, so that a crash loses nothing. A full disk does not end the session.
    fn save(&self, editor: &mut Editor<Words, FileHistory>) {
        if let Some(path) = &self.history {
            if let Some(dir) = path.parent() {
                let _ = std::fs::create_dir_all(dir);
            }
            let _ = editor.append_history(path);
        }
    }
}

/// Returns the history file: `PERILUNE_HISTORY` (empty: none), else one below the state directory of the user.
fn history_file() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("PERILUNE_HISTORY") {
        return (!path.is_empty()).then(|| PathBuf::from(path));
    }
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|h| h.join(".local/state")))?;
    Some(state.join("perilune/history"))
}

/// Completes, validates and highlights input.
#[derive(Clone)]
pub struct Words {
    console: Rc<Console>,
    color: bool,
    at_breakpoint: bool,
}

impl Helper for Words {}

impl Hinter for Words {
    type Hint = String;
}

impl Validator for Words {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        let (_, unfinished) = pieces(&self.console, context.input());
        Ok(if unfinished { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Words {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        // The editor writes words to the terminal itself: a name with control characters is not offered.
        let is_shown = |w: &String| *w == terminal::one_line(w);
        let pair = |w: String| Pair { display: w.clone(), replacement: w };
        let plain = |list: Vec<String>| list.into_iter().filter(is_shown).map(pair).collect();
        if let Some((start, words)) = commands::complete(line, pos, self.at_breakpoint) {
            return Ok((start, plain(words)));
        }
        // The text after `:plan` or `?` is Lua.
        let from = commands::lua_part(line).min(pos);
        let found = self.console.complete(&line[from..], pos - from);
        let start = from + found.start;
        if found.file {
            return Ok((start, plain(files(&line[start..pos], &[Path::new(".")]))));
        }
        Ok((start, plain(found.words)))
    }
}

/// Lists files and folders whose names begin with `typed`, with its directory in front.
pub fn files(typed: &str, roots: &[&Path]) -> Vec<String> {
    let (dir, stem) = typed.rfind('/').map_or(("", typed), |k| typed.split_at(k + 1));
    let mut out = Vec::new();
    for root in roots {
        let Ok(entries) = std::fs::read_dir(root.join(dir)) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(stem) && (!name.starts_with('.') || stem.starts_with('.')) {
                let slash = if entry.path().is_dir() { "/" } else { "" };
                out.push(format!("{dir}{name}{slash}"));
            }
        }
    }
    out.sort();
    out.dedup();
    out
}

impl Highlighter for Words {
    fn highlight<'l>(&self, line: &'l str, _: usize) -> Cow<'l, str> {
        if !self.color {
            return Cow::Borrowed(line);
        }
        let from = commands::lua_part(line);
        let mut out = String::with_capacity(line.len() * 2);
        if from > 0 {
            out.push_str(&format!("\x1b[1m{}\x1b[0m", &line[..from]));
        }
        let (text, mut done) = (&line[from..], 0);
        for t in tokens(text) {
            out.push_str(&text[done..t.start]);
            let word = &text[t.start..t.end];
            let code = match t.kind {
                Kind::Keyword if matches!(word, "nil" | "true" | "false") => "36",
                Kind::Keyword => "35",
                Kind::Number => "36",
                Kind::String { .. } => "32",
                Kind::Comment => "2",
                Kind::Name | Kind::Symbol => "",
            };
            if code.is_empty() {
                out.push_str(word);
            } else {
                out.push_str(&format!("\x1b[{code}m{word}\x1b[0m"));
            }
            done = t.end;
        }
        out.push_str(&text[done..]);
        Cow::Owned(out)
    }

    fn highlight_prompt<'b, 's: 'b, 'p: 'b>(&'s self, prompt: &'p str, _: bool) -> Cow<'b, str> {
        if self.color { Cow::Owned(format!("\x1b[1m{prompt}\x1b[0m")) } else { Cow::Borrowed(prompt) }
    }

    fn highlight_char(&self, _: &str, _: usize, _: CmdKind) -> bool {
        self.color
    }
}
