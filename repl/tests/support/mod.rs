//! Runs the built `perilune` in a temporary directory with a recipe.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses a part of it

use serde_json::Value;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// A recipe with sixty-four points on a plane, whose loss falls from the first step.
pub const TINY: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "tiny", params = { lr = 0.1, steps = 6, seed = 3, width = 4 } }
function recipe.data(p)
  local x = pl.randn { 64, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p) return pl.nn.Sequential { pl.nn.Linear(p.width, 1) } end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean(), { off = error:abs():mean() }
end
return recipe
"#;

/// A model of sequences: its loader states how long they are.
pub const SEQUENCES: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "sequences", params = { steps = 2, seed = 3, context = 16, stated = 16 } }
function recipe.data(p)
  local ids = pl.randint(0, 20, { 32, p.context }, { dtype = "i64" })
  return { train = pl.data.tensors { x = ids, y = ids }:shuffle(p.seed):batch(4, { context = p.stated }) }
end
function recipe.model(p)
  local m = { embed = nn.Embedding(20, 16), block = nn.TransformerBlock(16, 4, { causal = true, rope = true, kv_heads = 2 }) }
  function m:forward(x) return pl.linear(self.block(self.embed(x)), self.embed.weight) end
  return nn.module(m)
end
function recipe.optimizer(p, model) return optim.AdamW(model, { lr = 0.01 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x):flatten(0, 1), batch.y:flatten()) end
return recipe
"#;

pub struct Place {
    pub dir: tempfile::TempDir,
}

pub fn place() -> Place {
    Place { dir: tempfile::tempdir().unwrap() }
}

pub fn tiny() -> Place {
    let p = place();
    p.file("tiny.lua", TINY);
    p
}

/// The result of a command.
pub struct Ran {
    pub status: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Returns stderr without warnings about loss spikes. The step of an edit varies between runs, and after some
    /// steps an edit causes a spike.
    pub fn complaints(&self) -> Vec<&str> {
        self.err.lines().filter(|l| !(l.starts_with("warning: ") && l.contains(": the loss rises to "))).collect()
    }
}

impl From<Output> for Ran {
    fn from(o: Output) -> Ran {
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        Ran { status: o.status.code(), out: text(&o.stdout), err: text(&o.stderr) }
    }
}

impl Ran {
    /// Parses every line of stdout as JSON.
    pub fn events(&self) -> Vec<Value> {
        self.out.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
    }
}

impl Place {
    pub fn file(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.dir.path().join(name), text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_perilune");
        let mut c = if cfg!(target_os = "linux") {
            // A shell starts jobs in the background with interrupts ignored, nohup with hang-ups.
            let mut c = Command::new("/usr/bin/env");
            c.args(["--default-signal=HUP,INT,QUIT", program]);
            c
        } else {
            Command::new(program)
        };
        c.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        for name in ["NO_COLOR", "CLICOLOR_FORCE", "TERM", "RUST_BACKTRACE"] {
            c.env_remove(name);
        }
        c
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.command(args).output().unwrap().into()
    }

    pub fn run_json(&self, dir: &str) -> Value {
        serde_json::from_str(&self.read(&format!("{dir}/run.json"))).unwrap()
    }

    /// The directories below runs/.
    pub fn runs(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("runs")) else { return Vec::new() };
        let mut out: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        out.sort();
        out
    }
}

/// Saves a file as editors do, by writing a new file and renaming it.
pub fn save(p: &Place, name: &str, text: &str) {
    p.file("new~", text);
    std::fs::rename(p.path("new~"), p.path(name)).unwrap();
}

/// The number of events that a run may be ahead of its reader, besides those in the pipe.
const AHEAD: usize = 256;

/// A run whose events the test reads. The run does not get far ahead of its reader.
pub struct Running {
    pub child: Child,
    lines: Receiver<String>,
    /// Events that have been read but not consumed.
    seen: VecDeque<String>,
}

impl Running {
    pub fn start(p: &Place, args: &[&str]) -> Running {
        let mut child = p.command(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = std::sync::mpsc::sync_channel(AHEAD);
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
        Running { child, lines, seen: VecDeque::new() }
    }

    /// Returns the next event of a kind.
    pub fn next(&mut self, kind: &str) -> Value {
        loop {
            let line = self.seen.pop_front().or_else(|| self.lines.recv().ok());
            let line = line.unwrap_or_else(|| panic!("the run ended before a {kind} event"));
            if line.contains(&format!("\"event\":\"{kind}\"")) {
                return serde_json::from_str(&line).unwrap();
            }
        }
    }

    /// Waits until no event has arrived for two seconds, which means that the run executes code that does not end.
    pub fn hangs(&mut self) {
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(2)) {
            self.seen.push_back(line);
        }
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Reads events up to that of this step.
    pub fn until(&mut self, step: u64) {
        while self.next("step")["step"].as_u64().unwrap() < step {}
    }
}

/// A `recipe.migrate` in Lua: a wider layer keeps its old weights, and the new ones start at zero.
pub const MIGRATE: &str = r#"
function recipe.migrate(old, new)
  for path, w in pairs(new) do
    local was = old[path]
    if was and table.concat(was.shape, ",") ~= table.concat(w.shape, ",") then
      local value = was:detach()
      for d = 1, #w.shape do
        local shape = {}
        for k, n in ipairs(value.shape) do shape[k] = n end
        shape[d] = w.shape[d] - value.shape[d]
        if shape[d] > 0 then value = pl.cat({ value, pl.zeros(shape) }, d - 1) end
      end
      w:assign(value)
    end
  end
end
"#;

/// The files below a directory with their contents.
pub type Snapshot = std::collections::BTreeMap<String, Vec<u8>>;

/// Reads every file below a directory.
pub fn snapshot_of(dir: &std::path::Path) -> Snapshot {
    let mut out = Snapshot::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(&at).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else {
                out.insert(path.display().to_string(), std::fs::read(&path).unwrap());
            }
        }
    }
    out
}
