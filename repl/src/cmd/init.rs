//! `perilune init`: creates a directory with a recipe that runs, and with type stubs for an editor.

use crate::console_out;
use crate::failure::{Failure, disk};
use std::fs;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct InitArgs {
    /// The new directory
    dir: PathBuf,
}

const RECIPE: &str = include_str!("init_recipe.lua");

const LUARC: &str = r#"{
  "runtime.version": "Lua 5.4",
  "workspace.library": ["types"]
}
"#;

/// Creates the directory, which must not exist or be empty.
pub fn init(args: &InitArgs) -> Result<(), Failure> {
    let dir = &args.dir;
    if fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) || dir.is_file() {
        return Err(Failure::Usage(format!("{} already exists and is not empty", dir.display())));
    }
    let types = dir.join("types");
    fs::create_dir_all(&types).map_err(disk("create", &types))?;
    let stubs = perilune_lua::stubs();
    let files = [
        ("recipe.lua", RECIPE),
        (".luarc.json", LUARC),
        (".gitignore", "runs/\n"),
        ("types/perilune.lua", stubs.as_str()),
    ];
    for (name, text) in files {
        let path = dir.join(name);
        fs::write(&path, text).map_err(disk("write", &path))?;
    }
    console_out::say(&format!("{} is ready. Next: perilune run {}", dir.display(), dir.join("recipe.lua").display()))
}
