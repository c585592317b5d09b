//! Lists hostile bundles.

mod archives;
mod manifests;
pub mod records;
mod signatures;

use crate::archive::{archive, plain};
use perilune_bundle::Manifest;
use perilune_bundle::manifest::{FORMAT, FileEntry, MANIFEST};
use std::path::Path;

/// How the commands may end.
pub enum Expect {
    /// All are refused, and the message has this text.
    Refused(&'static str),
    /// These commands are refused with this text. The others end in any contained way.
    Where(&'static [&'static str], &'static str),
    /// In any contained way.
    Contained,
}

/// The commands that run a bundle.
pub const RUNS: &[&str] = &["run", "run --json"];
pub const REPLAYS: &[&str] = &["replay", "replay --steps"];
pub const ALL_RUNS: &[&str] = &["run", "run --json", "replay", "replay --steps"];

/// A bundle, and how it may end.
pub struct Hostile {
    pub name: String,
    pub expect: Expect,
    /// Writes it, with a signature where it has one.
    pub write: Box<dyn Fn(&Path) + Sync>,
}

impl Hostile {
    /// A bundle of these bytes.
    fn bytes(name: &str, expect: Expect, bytes: Vec<u8>) -> Hostile {
        Hostile { name: name.into(), expect, write: Box::new(move |path| std::fs::write(path, &bytes).unwrap()) }
    }
}

/// A recipe that trains for three steps, in a bundle without a run.
pub const TINY: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "tiny", params = { steps = 3 } }
function recipe.data()
  local x = pl.randn { 16, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:batch(8) }
end
function recipe.model() return pl.nn.Linear(4, 1) end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 0.01 }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

/// The name of the recipe's entry.
pub const LUA: &str = "recipe/tiny.lua";

/// A manifest that lists these files, of which the recipe is one.
pub fn listing(files: &[(&str, &[u8])]) -> Manifest {
    let list = files.iter().map(|(name, bytes)| FileEntry {
        path: (*name).into(),
        bytes: bytes.len() as u64,
        blake3: blake3::hash(bytes).to_hex().to_string(),
    });
    Manifest {
        format: FORMAT,
        perilune: "0.1.0".into(),
        stdlib: blake3::hash(b"stdlib").to_hex().to_string(),
        name: "tiny".into(),
        license: None,
        recipe: LUA.into(),
        command: ["perilune", "run", "tiny.lua"].map(String::from).to_vec(),
        params: Default::default(),
        run: None,
        data: Vec::new(),
        asks: Default::default(),
        files: list.collect(),
    }
}

/// The manifest's entry for these files.
pub fn first(files: &[(&str, &[u8])]) -> Vec<u8> {
    plain(MANIFEST, listing(files).text().as_bytes())
}

/// A bundle of the recipe, with another text of the manifest.
pub fn with_manifest(text: &str, lua: &str) -> Vec<u8> {
    archive(&[&plain(MANIFEST, text.as_bytes()), &plain(LUA, lua.as_bytes())])
}

/// All hostile bundles.
pub fn all(author: &crate::support::Place) -> Vec<Hostile> {
    let mut out = archives::all();
    out.extend(manifests::all());
    out.extend(signatures::all(author));
    out.extend(records::all(author));
    out
}
