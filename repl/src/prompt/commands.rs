//! Defines the commands of the prompt: names, help texts, completion and execution.

use super::{Flow, Prompt, input, plot};
use crate::console_out;
use crate::failure::Failure;
use crate::terminal::drawn;
use perilune_core::byte_size::show;
use perilune_core::error::did_you_mean;
use perilune_cuda::Cuda;
use perilune_lua::Console;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A command with its help text.
pub struct Command {
    name: &'static str,
    args: &'static str,
    doc: &'static str,
}

const fn command(name: &'static str, args: &'static str, doc: &'static str) -> Command {
    Command { name, args, doc }
}

/// Every command, in the order of `:help`.
pub const ALL: [Command; 14] = [
    command("help", "", "list these commands"),
    command("time", "CODE", "run code, evaluate its result, and print the time"),
    command("mem", "", "device memory by use and by line"),
    command("plan", "X", "the kernels that would evaluate X; nothing runs"),
    command("grad", "[X]", "sizes and norms of gradients: of X for every State it depends on, or of those in .grad"),
    command("plot", "[lines|hist|heat] X [-> FILE.svg|FILE.png]", "plot X here or into a file"),
    command(
        "summary",
        "[MODEL, INPUT]",
        "layers with shapes, parameters, FLOP and bytes; by default of the run's model",
    ),
    command("load", "FILE", "run a file and keep its globals"),
    command(
        "edit",
        "[FILE]",
        "open FILE in $VISUAL or $EDITOR, then run it; by default the recipe, else the last input",
    ),
    command("reload", "", "reload the recipe (or the loaded files); the run keeps its States"),
    command("devices", "", "list the devices"),
    command("locals", "", "at a breakpoint: list the locals of the calling function"),
    command("continue", "", "at a breakpoint: continue (also Ctrl-D)"),
    command("quit", "", "leave the prompt"),
];

/// The first lines of `:help`.
pub const OVERVIEW: &str = "\
The prompt prints values and keeps the last in _. An unfinished line continues. Tab completes.
  ?x, help(x)    signature, doc and example: ?pl.softmax, ?x:softmax, ?pl.nn.Linear
  Ctrl-C         stop the running line; no effect on an empty line
  Ctrl-D, :quit  leave (also quit, exit)";

/// Whether a line is a command (`:word`, `?x`); `::label::` is Lua.
pub fn is_command(line: &str) -> bool {
    let line = line.trim_start();
    (line.starts_with(':') && !line.starts_with("::")) || asks(line).is_some()
}

/// Returns the name in a line that other prompts end with (`exit`, `quit()`); where the user has no value of that name it ends this
/// one too.
pub fn leaves(line: &str) -> Option<&str> {
    let word = line.trim().trim_end_matches(';').trim_end_matches("()").trim_end();
    matches!(word, "exit" | "quit").then_some(word)
}

/// Returns the subject of `?x` or `x?`.
pub fn asks(line: &str) -> Option<&str> {
    let line = line.trim();
    line.strip_prefix('?')
        .or_else(|| line.strip_suffix('?'))
        .filter(|rest| !rest.contains(['"', '\'']) && !rest.contains("--"))
        .map(str::trim)
}

/// Returns where the Lua text of a line begins: after the name of a command, or after `?`.
pub fn lua_part(line: &str) -> usize {
    let begin = line.len() - line.trim_start().len();
    if !is_command(line) {
        return 0;
    }
    match &line[begin..] {
        rest if rest.starts_with('?') => begin + 1,
        rest if rest.starts_with(':') => rest.find(char::is_whitespace).map_or(line.len(), |k| begin + k),
        _ => 0,
    }
}

/// Completes commands and the files that they take.
pub fn complete(line: &str, pos: usize, at_breakpoint: bool) -> Option<(usize, Vec<String>)> {
    let begin = line.len() - line.trim_start().len();
    let typed = line.get(begin..pos)?;
    let word = typed.strip_prefix(':').filter(|w| !w.starts_with(':'))?;
    let Some(space) = word.find(char::is_whitespace) else {
        let mut names: Vec<String> = ALL.iter().map(|c| format!(":{}", c.name)).collect();
        names.retain(|n| n.starts_with(typed) && (at_breakpoint || !matches!(n.as_str(), ":continue" | ":locals")));
        return Some((begin, names));
    };
    let takes_file = matches!(&word[..space], "load" | "edit");
    let into = (&word[..space] == "plot").then(|| typed.rfind("->")).flatten().map(|k| begin + k + 2);
    let start = match (takes_file, into) {
        (true, _) => begin + 1 + space,
        (_, Some(at)) => at,
        _ => return None,
    };
    let start = start + (line[start..pos].len() - line[start..pos].trim_start().len());
    Some((start, input::files(&line[start..pos], &[Path::new(".")])))
}

/// Formats the table of commands, for `:help`.
pub fn table() -> String {
    let mut out = String::from(OVERVIEW);
    for c in &ALL {
        let head = format!(":{} {}", c.name, c.args);
        out.push_str(&format!("\n  {head:<14} {}{}", if head.len() > 14 { "\n                 " } else { "" }, c.doc));
    }
    out
}

/// Finds a command by its name or a unique prefix.
fn named(word: &str) -> Result<&'static str, String> {
    if let Some(c) = ALL.iter().find(|c| c.name == word) {
        return Ok(c.name);
    }
    let begins: Vec<&str> = ALL.iter().map(|c| c.name).filter(|n| !word.is_empty() && n.starts_with(word)).collect();
    if let [only] = begins[..] {
        return Ok(only);
    }
    let near = match begins.is_empty() {
        true => did_you_mean(word, ALL.iter().map(|c| c.name)).map(|n| format!(". Did you mean :{n}?")),
        false => Some(format!(": it could be :{}", begins.join(", :"))),
    };
    Err(format!("there is no command :{word}{}; :help lists them", near.unwrap_or_default()))
}

impl Prompt<'_> {
    /// Runs a line for which [`is_command`] holds.
    pub fn command(&self, console: &Console, line: &str) -> Result<Flow, Failure> {
        let line = line.trim();
        if let Some(what) = asks(line) {
            let text = if let Some(word) = what.strip_prefix(':') {
                let name = named(word).map_err(Failure::Usage)?;
                ALL.iter()
                    .find(|c| c.name == name)
                    .map(|c| format!(":{} {}\n  {}", c.name, c.args, c.doc))
                    .unwrap_or_default()
            } else if what.is_empty() {
                table()
            } else {
                console.describe(what)
            };
            self.say(&text);
            return Ok(Flow::Go);
        }
        let (word, rest) = line[1..].split_once(char::is_whitespace).unwrap_or((&line[1..], ""));
        let rest = rest.trim();
        let name = named(word).map_err(Failure::Usage)?;
        let needs = |what: &str| match rest {
            "" => Err(Failure::Usage(format!(
                ":{name} needs {what}, as in :{name} {}",
                if name == "load" { "more.lua" } else { "x" }
            ))),
            _ => Ok(()),
        };
        match name {
            "help" => self.say(&table()),
            "quit" => return Ok(Flow::Quit),
            "continue" | "locals" if !self.at_breakpoint => {
                return Err(Failure::Usage(format!(
                    ":{name} is for breakpoints; pl.breakpoint() in a function makes one"
                )));
            }
            "continue" => return Ok(Flow::Continue),
            "locals" => self.say(&console.locals().join(" ")),
            "devices" => self.say(&self.devices(console)),
            "mem" => self.say(&memory(console)),
            "time" => {
                needs("code")?;
                self.say(&time(console, rest)?);
            }
            "plan" => {
                needs("a tensor")?;
                self.say(console.command("plan", rest)?.trim_end());
            }
            "grad" => self.say(&console.command("grad", rest)?),
            "summary" => self.say(&console.command("summary", rest)?),
            "plot" => {
                needs("a tensor or a list of numbers")?;
                self.say(&drawn(&plot::plot(console, rest, self.color)?));
            }
            "load" => {
                needs("a file")?;
                self.load(console, &console.find(rest))?;
            }
            "edit" => self.edit(console, rest)?,
            "reload" => self.reload(console)?,
            _ => return Err(Failure::Usage(format!("there is no command :{name}"))),
        }
        Ok(Flow::Go)
    }

    /// Runs a file, and remembers it for `:reload`.
    pub fn load(&self, console: &Console, path: &Path) -> Result<(), Failure> {
        let mut loaded = self.loaded.borrow_mut();
        if !loaded.iter().any(|p| p == path) {
            loaded.push(path.to_path_buf());
        }
        drop(loaded);
        self.show(console.load(path)?);
        Ok(())
    }

    fn edit(&self, console: &Console, rest: &str) -> Result<(), Failure> {
        let recipe = self.recipe_path();
        let scratch = std::env::temp_dir().join(format!("perilune-edit-{}.lua", std::process::id()));
        let (path, is_scratch) = match (rest, &recipe) {
            ("", Some(path)) => (path.clone(), false),
            ("", None) => (scratch, true),
            (file, _) => (console.find(file), false),
        };
        if is_scratch {
            let text = self.last.borrow().clone();
            std::fs::write(&path, text).map_err(crate::failure::disk("write", &path))?;
        }
        editor(&path)?;
        if recipe.is_some_and(|r| r == path) {
            return self.reload(console);
        }
        let outcome = if is_scratch {
            console.load(&path).map(|a| self.show(a)).map_err(Failure::from)
        } else {
            self.load(console, &path)
        };
        if is_scratch {
            if let Ok(text) = std::fs::read_to_string(&path) {
                *self.last.borrow_mut() = text;
            }
            let _ = std::fs::remove_file(&path);
        }
        outcome
    }

    fn devices(&self, console: &Console) -> String {
        let here = console.host().engine.borrow().backend().describe();
        let mut found = vec![perilune_plan::Backend::describe(&perilune_cpu::Cpu::new(None))];
        // Device numbers have no gaps.
        found.extend((0..16).map_while(|k| Cuda::new(k).ok()).map(|gpu| perilune_plan::Backend::describe(&gpu)));
        if !found.contains(&here) {
            found.insert(0, here.clone());
        }
        let line = |d: &String| format!("{} {d}", if *d == here { "*" } else { " " });
        let mut out: Vec<String> = found.iter().map(line).collect();
        if found.iter().all(|d| d.starts_with("cpu")) {
            out.push("  no usable GPU; `perilune doctor` gives the reason".into());
        }
        out.join("\n")
    }
}

/// Opens a file in the user's editor and waits.
fn editor(path: &Path) -> Result<(), Failure> {
    let set = |name: &str| std::env::var(name).ok().filter(|v| !v.trim().is_empty());
    let Some(command) = set("VISUAL").or_else(|| set("EDITOR")) else {
        return Err(Failure::Usage(
            ":edit needs an editor: set VISUAL or EDITOR, as in EDITOR=nano perilune repl".into(),
        ));
    };
    let mut words = command.split_whitespace();
    let program = PathBuf::from(words.next().unwrap_or_default());
    let status = std::process::Command::new(&program).args(words).arg(path).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::Usage(format!("{command} ended with {status}; nothing was run"))),
        Err(e) => Err(Failure::Usage(format!("cannot start {}: {}", program.display(), crate::failure::plain(&e)))),
    }
}

fn time(console: &Console, code: &str) -> Result<String, Failure> {
    let stats = || console.host().engine.borrow().stats();
    let before = stats();
    let start = Instant::now();
    console.time(code)?;
    let seconds = start.elapsed().as_secs_f64();
    let after = stats();
    let ms = |s: f64| if s >= 1.0 { format!("{s:.2} s") } else { format!("{:.3} ms", s * 1e3) };
    let plans = after.misses - before.misses;
    let compiled = match plans {
        0 => "no new plan".into(),
        n => format!(
            "{n} new plan{}: {}",
            if n == 1 { "" } else { "s" },
            ms((after.compile_ms - before.compile_ms) / 1e3)
        ),
    };
    Ok(format!("{} · {compiled} · {} run", ms(seconds), after.runs - before.runs))
}

fn memory(console: &Console) -> String {
    console.host().settle();
    let engine = console.host().engine.borrow();
    let report = engine.memory();
    let (d, handles) = (report.device, engine.stats().handles);
    let limit = d.limit.map(|l| format!(" of {}", show(l))).unwrap_or_default();
    let mut out = format!(
        "{} allocated{limit} · {} reserved · {} at most · {} tensor{} held",
        show(d.allocated),
        show(d.reserved),
        show(d.peak),
        handles,
        if handles == 1 { "" } else { "s" }
    );
    for line in engine.show_owners(&report, 12) {
        out.push('\n');
        out.push_str(&line);
    }
    out
}

/// Prints an error; an interrupt as one line.
pub fn complain(failure: &Failure) {
    match failure {
        Failure::Recipe(e) if e.cause == perilune_lua::Cause::Interrupted => {
            let at = e.file.as_ref().zip(e.line).map(|(f, l)| format!(" at {f}:{l}")).unwrap_or_default();
            console_out::complain("", &format!("interrupted{at}"));
        }
        other => other.show(),
    }
}
