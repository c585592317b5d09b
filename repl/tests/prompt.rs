//! Tests the `perilune repl` binary in a pseudo-terminal, key by key, and through a pipe.
//!
//! No test measures time: each waits for an expected text.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use support::{Place, Ran, place, tiny};

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const UP: &str = "\x1b[A";

/// A program in a pseudo-terminal.
struct Terminal {
    child: Child,
    keys: std::fs::File,
    output: Receiver<Vec<u8>>,
    /// Output that no test has consumed yet, without escape sequences, and all output.
    fresh: String,
    all: String,
    raw: Vec<u8>,
    /// The length of the output when the last input was typed.
    used: usize,
}

impl Terminal {
    fn start(p: &Place, args: &[&str]) -> Terminal {
        Terminal::with(p, args, &[])
    }

    fn with(p: &Place, args: &[&str], env: &[(&str, &str)]) -> Terminal {
        let (pty, pts) = pty_process::blocking::open().unwrap();
        pty.resize(pty_process::Size::new(40, 140)).unwrap();
        let mut command = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"))
            .args(args)
            .current_dir(p.dir.path())
            .env("TERM", "xterm")
            .env("NO_COLOR", "1")
            .env("LC_ALL", "C.UTF-8")
            .env("PERILUNE_HISTORY", p.path("history"))
            .env_remove("VISUAL")
            .env_remove("EDITOR");
        for (name, value) in env {
            command = command.env(name, value);
        }
        let child = command.spawn(pts).unwrap();
        let keys = std::fs::File::from(std::os::fd::OwnedFd::from(pty));
        let mut reader = keys.try_clone().unwrap();
        let (send, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // On Linux the end of the output is an error.
            while let Ok(n) = reader.read(&mut buffer) {
                if n == 0 || send.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keys, output, fresh: String::new(), all: String::new(), raw: Vec::new(), used: 0 }
    }

    fn keys(&mut self, text: &str) {
        self.keys.write_all(text.as_bytes()).unwrap();
    }

    fn pull(&mut self, wait: Duration) -> Result<(), RecvTimeoutError> {
        let bytes = self.output.recv_timeout(wait)?;
        self.raw.extend(bytes);
        // A character or an escape sequence may arrive in two reads; take only complete ones.
        let whole = std::str::from_utf8(&self.raw).map_or_else(|e| e.valid_up_to(), |_| self.raw.len());
        let plain = plain(std::str::from_utf8(&self.raw[..whole]).unwrap());
        self.fresh.push_str(&plain[self.all.len()..]);
        self.all = plain;
        Ok(())
    }

    /// Waits for `text` after the last match, and returns the output before it.
    fn wait(&mut self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.fresh.find(text) {
                let before = self.fresh[..at].to_string();
                self.fresh.drain(..at + text.len());
                return before;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.pull(left).is_err() {
                panic!("{text:?} did not come; there was\n{}", self.all);
            }
        }
    }

    /// Waits until the screen ends with a fresh prompt. Between two prompts keys would go to the running
    /// code, and Ctrl-C would be a signal.
    fn ready(&mut self) {
        let end = Instant::now() + PATIENCE;
        while self.all.len() <= self.used || !self.all.ends_with("> ") {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.pull(left).is_err() {
                panic!("no prompt appeared after\n{}", self.all);
            }
        }
    }

    /// Presses keys at a fresh prompt.
    fn begin(&mut self, keys: &str) {
        self.ready();
        self.used = self.all.len();
        self.keys(keys);
    }

    /// Types a line at a fresh prompt, and waits for an answer.
    fn line(&mut self, text: &str, answer: &str) -> String {
        self.begin(&format!("{text}\r"));
        self.echo(text);
        self.wait(answer)
    }

    /// Waits until the line is on the screen; later output comes from the program.
    fn echo(&mut self, text: &str) {
        // The editor redraws the line at each key; a newline follows the last drawing.
        let last = text.lines().last().unwrap_or_default();
        if !last.is_empty() {
            self.wait(&format!("{last}\n"));
        }
    }

    /// Waits for the end and returns the exit status.
    fn end(mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "it did not end; there was\n{}", self.all);
            let _ = self.pull(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes escape sequences and carriage returns.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => {
                if chars.peek() == Some(&'[') {
                    chars.next();
                    for c in chars.by_ref() {
                        if c.is_ascii_alphabetic() || c == '~' {
                            break;
                        }
                    }
                } else {
                    chars.next();
                }
            }
            '\r' | '\x07' => {}
            c => out.push(c),
        }
    }
    out
}

/// Starts a prompt and waits for its first line.
fn prompt(p: &Place, args: &[&str]) -> Terminal {
    let mut all = vec!["repl", "--device", "cpu", "--threads", "2"];
    all.extend(args);
    let mut t = Terminal::start(p, &all);
    t.wait("? for help");
    t.wait("> ");
    t
}

fn piped(p: &Place, args: &[&str], text: &str) -> Ran {
    let mut all = vec!["repl", "--device", "cpu"];
    all.extend(args);
    let mut child =
        p.command(&all).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    child.wait_with_output().unwrap().into()
}

#[test]
fn results_are_shown_and_kept() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.line("x = pl.tensor({{1, 2}, {3, 4}}); x", "tensor {2, 2} i64 cpu\n 1 2\n 3 4\n");
    t.line("x:sum()", "tensor {} i64 cpu   10\n");
    t.line("_ * 2", "tensor {} i64 cpu   20\n");
    t.line("1 + 1, 'two', {a = x, 7}", "2\ntwo\n{ 7, a = tensor {2, 2} i64 }\n");
    t.line("local y = 5", "(local y:");
    t.line("y + 1", "6\n");
    t.line("nil", "nil\n");
    t.wait("> ");
    t.begin(":quit\r");
    assert_eq!(t.end(), Some(0));
}

#[test]
fn an_unfinished_line_goes_on() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.begin("for i = 1, 3 do\r");
    t.keys("print('row', i * 10)\r");
    t.keys("end\r");
    t.wait("row\t10\nrow\t20\nrow\t30\n");
    t.begin("s = [[a\r");
    t.keys("b]]\r");
    t.line("#s", "3\n");
    // Ctrl-C keeps an empty line and discards a long one.
    t.begin(CTRL_C);
    t.begin("this is no Lua");
    t.wait("this is no Lua");
    t.keys(CTRL_C);
    t.line("'still ' .. 'here'", "still here\n");
    t.begin(CTRL_D);
    assert_eq!(t.end(), Some(0));
}

/// A paste arrives in one read, and all its lines run.
#[test]
fn pasted_statements_run_in_order() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.begin("a = 2\rb = 3\rfor i = 1, 2 do\r  a = a * b\rend\r'a is ' .. a\r");
    t.wait("a is 18\n");
    // A terminal with bracketed paste shows all of it and waits for Enter.
    t.begin("\x1b[200~x = pl.tensor({1, 2})\nx + 1\n:time x\ny = x\n  :sum()\n?pl.relu\ny\n\x1b[201~");
    t.wait("?pl.relu\ny\n");
    t.keys("\r");
    t.wait("tensor {2} i64 cpu   2 3\n");
    t.wait(" new plan");
    t.wait("example: pl.relu(");
    t.wait("tensor {} i64 cpu   3\n");
    // Lines after an error are not run.
    t.begin("\x1b[200~z = 1\nz = nothing_there\nz = 2\n\x1b[201~");
    t.wait("z = 2\n");
    t.keys("\r");
    t.wait("'nothing_there' is not defined");
    t.wait("(the rest of the paste was not run)");
    t.line("'z is ' .. z", "z is 1\n");
}

#[test]
fn errors_name_their_line_and_the_prompt_stays() {
    let p = place();
    p.file("more.lua", "function twice(x)\n  return x + nothing.here\nend\n");
    let mut t = prompt(&p, &[]);
    t.line("pl.zeros({2, 3}):matmul(pl.zeros({4, 2}))", "prompt:1: matmul: shapes {2, 3} and {4, 2} do not chain");
    t.line("x = = 1", "prompt:2: unexpected symbol near '='");
    t.line("pl.soft_max(1)", "did you mean pl.softmax?");
    t.line("undefined_thing", "'undefined_thing' is not defined");
    t.line("randn({2})", "write pl.randn");
    t.line(":load more.lua", "> ");
    t.line("twice(1)", "more.lua:2: ");
    t.wait("2 |   return x + nothing.here");
    t.line(":plam 1", "there is no command :plam. Did you mean :plan?");
    t.line(":load nothing.lua", "cannot read nothing.lua");
    t.line("os.exit(1)", "no access to the system");
    t.line("1 + 1", "2\n");
}

#[test]
fn names_complete_with_tab() {
    let p = place();
    p.file("weights.safetensors", "");
    let mut t = prompt(&p, &[]);
    // A word with a single completion is completed.
    t.begin("pl.cross_ent\t(");
    t.wait("pl.cross_entropy(");
    t.keys(CTRL_C);
    t.line("model = pl.nn.Sequential { pl.nn.Linear(3, 4) }", "> ");
    t.begin("model:num_p\t()\r");
    t.wait("model:num_parameters()\n16\n");
    t.line("x = pl.ones({3})", "> ");
    t.begin("x:softm\t(0):logsumex\t");
    t.wait("x:softmax(0):logsumexp");
    t.keys(CTRL_C);
    t.begin("pl.cross_entropy(x, x, { label_s\t0.5");
    t.wait("label_smoothing = 0.5");
    t.keys(CTRL_C);
    t.begin("pl.optim.AdamW(model, { weight_d\t");
    t.wait("weight_decay = ");
    t.keys(CTRL_C);
    t.begin("pl.load('wei\t");
    t.wait("weights.safetensors");
    t.keys(CTRL_C);
    t.begin("pl.zeros({2}, { dtype = 'bf\t");
    t.wait("'bf16");
    t.keys(CTRL_C);
    t.begin(":dev\t\r");
    t.wait("* cpu");
    // Several completions are listed.
    t.begin("pl.optim.Ada\t\t");
    t.wait("AdamW");
    t.keys(CTRL_C);
}

/// A batch is made again at each read. Its fields complete all the same, and the random numbers of the next line do not change.
#[test]
fn fields_of_a_batch_complete() {
    let p = place();
    p.file(
        "noisy.lua",
        r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "noisy", params = { steps = 2 } }
function recipe.data(p)
  local loader = { batches = function() return 4 end }
  function loader.batch_at() return { inputs = pl.randn { 8, 4 }, labels = pl.zeros { 8 } }, 8 end
  return { train = loader }
end
function recipe.model() return pl.nn.Sequential { pl.nn.Linear(4, 1) } end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 0.1 }) end
function recipe.loss(model, batch) return (model(batch.inputs):squeeze(-1) - batch.labels):square():mean() end
return recipe
"#,
    );
    let mut t = prompt(&p, &["noisy.lua"]);
    t.line("pl.seed(5)", "> ");
    t.line("first = pl.randn({1}):item()", "> ");
    t.line("pl.seed(5)", "> ");
    t.begin("run.batch.lab\t");
    t.wait("run.batch.labels");
    t.keys(CTRL_C);
    t.line("pl.randn({1}):item() == first", "true\n");
    t.begin("run.batch.inp\t:nume\t()\r");
    t.wait("32\n");
    t.begin("run.batch.labels:logsum\t(0):item() > 2\r");
    t.wait("true\n");
    // Completion of other tables is unchanged.
    t.begin("run.params.st\t\r");
    t.wait("2\n");
}

#[test]
fn help_comes_from_the_registry_and_the_comments() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.line("?pl.cross_entropy", "cross_entropy(logits, target, [{ignore_index, label_smoothing, reduction, weight}])");
    t.wait("label_smoothing: a number, default 0.0");
    t.wait("example: pl.cross_entropy(");
    t.line("?pl.nn.Linear", "Linear(in_dim, out_dim, opts)");
    t.wait("x (..., in) -> (..., out)");
    t.line("help(pl.softmax)", "softmax(");
    t.line("?pl.state", "pl.state(x, options)");
    t.line("?soft_max", "Did you mean softmax?");
    t.line("?:plot", ":plot [lines|hist|heat] X");
    t.line("?", "Ctrl-D, :quit");
    t.wait(":devices");
}

#[test]
fn ctrl_c_stops_what_runs_and_keeps_the_prompt() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.line("n = 0", "> ");
    for endless in [
        "while true do n = n + 1 end",
        "while true do pcall(function() while true do n = n + 1 end end) end",
        "c = coroutine.wrap(function() while true do n = n + 1 end end); c()",
        "s = (\"a\"):rep(5000):find((\".-\"):rep(20) .. \"b\")",
        "table.move({}, 1, 1 << 62, 2)",
    ] {
        t.begin(&format!("print('go') {endless}\r"));
        t.wait("\ngo\n");
        t.keys(CTRL_C);
        t.wait("interrupted");
    }
    // Work of the device: many short plans.
    t.begin("print('go') y = pl.ones({64, 64}) while true do y = pl.eval(y:matmul(y) * 1e-2) end\r");
    t.wait("\ngo\n");
    t.keys(CTRL_C);
    t.wait("interrupted");
    t.line("n > 0, pl.ones({2}):sum():item()", "true\n2.0\n");
    t.begin(CTRL_D);
    assert_eq!(t.end(), Some(0));
}

/// Work that cannot be interrupted, as one long kernel: a note says so, and the second Ctrl-C ends the process.
#[test]
fn a_second_ctrl_c_ends_what_does_not_hear_the_first() {
    let p = place();
    let mut t = prompt(&p, &[]);
    // One kernel of minutes that takes no memory: allocating gigabytes may take longer than a finger, and is interrupted.
    t.begin("print('go') y = pl.eval(pl.rand({ 1 << 38 }):sum())\r");
    t.wait("\ngo\n");
    // Until the kernel has begun, a request is heard.
    std::thread::sleep(Duration::from_secs(1));
    t.keys(CTRL_C);
    t.keys(CTRL_C); // a nervous finger: the same request
    t.wait("Ctrl-C once more ends perilune");
    t.keys(CTRL_C);
    assert_eq!(t.end(), Some(130));
}

#[test]
fn history_outlives_the_session() {
    let p = place();
    let mut t = prompt(&p, &[]);
    t.line("answer = 6 * 7", "> ");
    t.line("  secret = 1", "> "); // begins with a space: not recorded
    t.begin(CTRL_D);
    assert_eq!(t.end(), Some(0));
    assert!(p.read("history").contains("answer = 6 * 7") && !p.read("history").contains("secret"));
    let mut t = prompt(&p, &[]);
    t.begin(UP);
    t.wait("answer = 6 * 7");
    t.keys("; answer\r");
    t.wait("\n42\n");
}

#[test]
fn commands_measure_and_draw() {
    let p = tiny();
    let mut t = prompt(&p, &["tiny.lua"]);
    t.line(":time pl.ones({64, 64}):matmul(pl.ones({64, 64}))", " · 1 new plan: ");
    t.wait("1 run");
    t.line(":plan run.model(run.batch.x):mean()", " kernels · ");
    t.wait("FLOP");
    t.line(":mem", "allocated");
    t.line(":grad run.recipe.loss(run.model, run.batch)", "|g|/|w|");
    t.wait("1.weight");
    t.line(":summary", "layer");
    t.wait("Linear");
    t.line("x = pl.arange(20)", "> ");
    t.line(":plot x", "index");
    t.line(":plot hist pl.randn({200}) -> h.svg", "h.svg written");
    t.line(":plot heat x:view(4, 5) -> h.png", "h.png written");
    t.line(":plot x -> h.gif", ".svg and .png");
    t.wait("> ");
    assert!(p.read("h.svg").starts_with("<svg") || p.read("h.svg").starts_with("<?xml"));
    assert!(std::fs::read(p.path("h.png")).unwrap().starts_with(b"\x89PNG"));
    t.line(":continue", ":continue is for breakpoints");
}

#[test]
fn an_editor_is_opened_and_what_it_wrote_runs() {
    let p = place();
    p.file("ed.sh", "#!/bin/sh\necho 'print(\"from the editor\"); kept = 3' > \"$1\"\n");
    std::process::Command::new("chmod").arg("+x").arg(p.path("ed.sh")).status().unwrap();
    let editor = p.path("ed.sh").display().to_string();
    let mut t = Terminal::with(&p, &["repl", "--device", "cpu"], &[("EDITOR", &editor)]);
    t.wait("> ");
    t.line(":edit", "from the editor\n");
    t.line("kept", "3\n");
    t.line(":edit new.lua", "from the editor\n");
    assert!(p.read("new.lua").contains("kept = 3"));
    p.file("new.lua", "kept = 4");
    t.line(":reload", "> ");
    t.line("kept", "4\n");
}

#[test]
fn a_recipe_has_its_run_and_reloads() {
    let p = tiny();
    let mut t = prompt(&p, &["tiny.lua", "--set", "width=4"]);
    t.line("run:step(3)", "step 3 · loss ");
    t.wait(" · off ");
    t.line("run:evaluate()", "valid loss ");
    t.line("run.params.width, run.count", "4\n3\n");
    t.line("run.batch", "{ x = tensor {8, 4} f32, y = tensor {8} f32 }");
    t.line("run.model", "Sequential");
    t.line(":reload", "tiny.lua has not changed");
    t.line("w = run.model[1].weight:tolist()[1][1]", "> ");
    p.file("tiny.lua", support::TINY.replace("lr = 0.1", "lr = 0.05"));
    t.line(":reload", "lr 0.1 -> 0.05, tiny.lua:3 · applied at step 3");
    t.line("run.params.lr, run.count, run.model[1].weight:tolist()[1][1] == w", "0.05\n3\ntrue\n");
    p.file("tiny.lua", support::TINY.replace("return recipe", "retrun recipe"));
    t.line(":reload", "tiny.lua:");
    t.line("run:step()", "step 4 · loss ");
}

/// The tiny recipe with a breakpoint in its loss.
fn stopping() -> Place {
    let p = place();
    let stop = "local scale = 2\n  if not passed then pl.breakpoint() end\n  return (error * error):mean() * scale, ";
    p.file(
        "stop.lua",
        support::TINY.replace("return (error * error):mean(), ", stop).replace("not passed", "batch.x:size(0) == 8"),
    );
    p
}

#[test]
fn a_breakpoint_shows_and_sets_locals() {
    let p = stopping();
    let mut t = prompt(&p, &["stop.lua"]);
    t.begin("run:step()\r");
    t.wait("breakpoint in loss (stop.lua:14) · locals: batch error model pl scale");
    t.wait("loss> ");
    t.line("error:size()", "8\n");
    t.line("scale", "2\n");
    t.line("scale = 100; error = error * 0 + 1", "loss> ");
    t.line("scal", "did you mean 'scale'?");
    t.line("seen = batch.y", "loss> ");
    t.line(":locals", "batch error model");
    t.begin(":continue\r");
    t.wait("step 1 · loss 100.0 · off 1.000");
    t.line("seen:size()", "never evaluated");
    // Ctrl-C interrupts a line there too, and `:quit` ends the run.
    t.begin("run:step()\r");
    t.wait("loss> ");
    t.begin("print('go') while true do end\r");
    t.wait("\ngo\n");
    t.keys(CTRL_C);
    t.wait("interrupted");
    t.wait("loss> ");
    t.begin(":quit\r");
    assert_eq!(t.end(), Some(0));
}

/// Lines typed ahead are read by whichever prompt is active when they are due.
#[test]
fn a_paste_goes_on_at_a_breakpoint() {
    let p = stopping();
    let mut t = prompt(&p, &["stop.lua"]);
    t.begin("run:step()\rscale = 100; error = error * 0 + 1\r:continue\r'count ' .. run.count\r");
    t.wait("step 1 · loss 100.0 · off 1.000");
    t.wait("count 1\n");
    t.begin(":quit\r");
    assert_eq!(t.end(), Some(0));
}

#[test]
fn a_training_run_stops_at_a_breakpoint_too() {
    let p = stopping();
    let mut t = Terminal::start(&p, &["run", "stop.lua", "--device", "cpu", "--steps", "2"]);
    t.wait("breakpoint in loss (stop.lua:14)");
    t.wait("loss> ");
    t.line("scale * 21", "42\n");
    t.begin(":continue\r");
    t.wait("breakpoint in loss (stop.lua:14)");
    t.wait("loss> ");
    t.begin(":quit\r");
    t.wait("left at a breakpoint");
    assert_eq!(t.end(), Some(130));
}

#[test]
fn without_a_terminal_a_breakpoint_is_passed_by() {
    let p = stopping();
    let ran = p.run(&["run", "stop.lua", "--device", "cpu", "--steps", "3", "--quiet"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    assert_eq!(ran.err.matches("is skipped: there is no terminal").count(), 1, "{}", ran.err);
}

#[test]
fn lines_of_a_pipe_are_run_plainly() {
    let p = place();
    let ran = piped(
        &p,
        &[],
        "x = pl.zeros({2}); x\nfor i = 1, 2 do\n  print(i)\nend\n\n-- a comment\n:plan x + 1\n?pl.relu\n",
    );
    assert_eq!((ran.status, ran.err.as_str()), (Some(0), ""));
    assert!(ran.out.starts_with("tensor {2} f32 cpu   0 0\n1\n2\n1 kernels · "), "{}", ran.out);
    assert!(ran.out.contains("relu(x)"), "{}", ran.out);
    // An error does not end the session, but changes the exit status.
    let ran = piped(&p, &[], "a = 1\n\nerror('first')\na + 1\nfor");
    assert_eq!((ran.status, ran.out.as_str()), (Some(3), "2\n"));
    assert!(ran.err.contains("stdin:3: first") && ran.err.contains("stdin:5: "), "{}", ran.err);
    let p = tiny();
    let ran = piped(&p, &["tiny.lua", "--set", "lr=0.05"], "run:step(2)\nrun.params.lr\n");
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    assert!(ran.out.starts_with("step 2 · loss ") && ran.out.ends_with("0.05\n"), "{}", ran.out);
    let ran = piped(&p, &["tinny.lua"], "1\n");
    assert_eq!(ran.status, Some(2));
    assert!(ran.err.contains("Did you mean tiny.lua?"), "{}", ran.err);
}

#[test]
fn parts_of_the_module_have_their_names_at_the_prompt() {
    let p = place();
    let lines = "nn.Linear(2, 3)\noptim.SGD == pl.optim.SGD, metrics == pl.metrics, data == pl.data\n?nn.Linear\n\
                 ?metrics.accuracy\nhelp 'nn.Linear'\nnn = 3\nnn\n";
    let ran = piped(&p, &[], lines);
    assert_eq!((ran.status, ran.err.as_str()), (Some(0), ""));
    for part in ["true\ntrue\ntrue\nLinear(in_dim, out_dim, opts)\n", "accuracy(", "\n3\n"] {
        assert!(ran.out.contains(part), "{part}: {}", ran.out);
    }
    assert!(!ran.out.contains("no help"), "{}", ran.out);
    // A recipe has locals for these.
    p.file("bare.lua", "return nn");
    let ran = p.run(&["run", "bare.lua"]);
    assert!(ran.status == Some(3) && ran.err.contains("global 'nn' is not defined"), "{}", ran.err);
}

#[test]
fn a_plot_of_no_tensor_blames_the_line_typed() {
    let p = tiny();
    let ran = piped(&p, &["tiny.lua"], ":plot nil\n:plot 'x'\n:plot { 1, 'a' }\n:plot { 1, 4, 9 }\n");
    assert_eq!(ran.status, Some(3));
    assert!(ran.err.contains("error: :plot: the value is nil; it draws tensors and lists of numbers"), "{}", ran.err);
    assert!(ran.err.contains(":plot: the value is \"x\"") && ran.err.contains("it holds \"a\""), "{}", ran.err);
    assert!(!ran.err.contains("tiny.lua") && ran.out.contains('9'), "{}{}", ran.out, ran.err);
}

#[test]
fn exit_and_quit_end_the_prompt() {
    let p = place();
    for word in ["exit", "quit", "exit()", "quit();", ":quit", ":q"] {
        let ran = piped(&p, &[], &format!("1 + 1\n{word}\nprint('not reached')\n"));
        assert_eq!((ran.status, ran.out.as_str(), ran.err.as_str()), (Some(0), "2\n", ""), "{word}");
    }
    // A value of that name is the user's.
    let ran = piped(&p, &[], "exit = 7\nexit\n");
    assert_eq!((ran.status, ran.out.as_str()), (Some(0), "7\n"));
    let ran = piped(&p, &[], "");
    assert_eq!((ran.status, ran.out.as_str(), ran.err.as_str()), (Some(0), "", ""));
    let mut t = prompt(&p, &[]);
    t.begin("exit\r");
    assert_eq!(t.end(), Some(0));
}

/// What an interrupted line leaves recorded is named: the next step computes it.
#[test]
fn an_interrupt_names_what_is_not_computed() {
    let p = place();
    let mut t = prompt(&p, &[]);
    let long = "x = pl.ones({ 512, 512 }) for _ = 1, 2000 do x = x:matmul(x) * 1e-3 end";
    t.line(long, "> ");
    t.begin("print('go'), x\r");
    t.wait("\ngo\n");
    t.keys(CTRL_C);
    t.wait("interrupted");
    t.wait("(x is recorded and not computed: a line that reads it, or the next step, computes it; x = nil drops it)");
    t.line("x = nil", "> ");
    t.line("pl.step(function() return pl.ones { 2 } end):sum():item()", "2.0\n");
    t.begin(CTRL_D);
    assert_eq!(t.end(), Some(0));
}

#[test]
fn help_of_the_clock_says_that_it_does_not_wait() {
    let ran = piped(&place(), &[], "?pl.clock\n");
    assert!(
        ran.status == Some(0) && ran.out.contains("It waits for nothing") && ran.out.contains(":time"),
        "{}",
        ran.out
    );
}

#[test]
fn stats_count_the_handles() {
    let p = place();
    let ran = piped(&p, &[], "a = pl.stats().handles\nx, y = pl.ones { 2 }, pl.ones { 2 }\npl.stats().handles - a\n");
    assert_eq!((ran.status, ran.out.as_str()), (Some(0), "2\n"), "{}", ran.err);
}

#[test]
fn repeated_errors_keep_no_tensors_alive() {
    let p = place();
    let fail = [
        "y = pl.eval(pl.ones({512, 512})); error('one')",
        "local z = pl.ones({512, 512}); z:sum():item(); pl.eval(z * 2):matmul(pl.ones({3, 3}))",
        "(function() local big = pl.eval(pl.ones({512, 512}) + 1); big:nothing() end)()",
        "pl.step(function() local s = pl.state(pl.ones({512, 512})); pl.keep(s + 1); error({}) end)",
        "s = pl.state(pl.randn({512, 512})); s = nil; (s + 1):backward()",
    ];
    let look = "print('held', pl.memory().allocated, pl.stats().handles, pl.stats().held_bytes, pl.stats().nodes)\n";
    let round =
        |n: usize| -> String { (0..n).map(|k| format!("{}\ny = nil; z = nil\n", fail[k % fail.len()])).collect() };
    let text = format!("keep = pl.eval(pl.ones({{10}}))\n{}{look}{}{look}", round(10), round(100));
    let ran = piped(&p, &[], &text);
    assert_eq!(ran.status, Some(3));
    let held: Vec<&str> = ran.out.lines().filter(|l| l.starts_with("held")).collect();
    assert_eq!(held.len(), 2, "{}\n{}", ran.out, ran.err);
    assert_eq!(held[0], held[1]);
    let bytes: usize = held[0].split('\t').nth(3).unwrap().parse().unwrap();
    assert!(bytes < 1000, "{}", held[0]);
    assert!(ran.err.matches("stdin:").count() >= 110, "{}", ran.err);
}
