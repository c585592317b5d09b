//! Binds the run of a plain script (`pl.run`) to the driver that keeps its directory.

use crate::errors;
use crate::functions::host;
use crate::run::ParamValue;
use mlua::{Lua, Table, Value};
use std::path::PathBuf;

/// What a script asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct ScriptRun {
    /// That of the script's file, unless it gives one.
    pub name: Option<String>,
    /// The length, if it has one.
    pub steps: Option<u64>,
    pub params: Vec<(String, ParamValue)>,
}

/// Keeps the run of a script. Errors are messages.
pub trait ScriptDriver {
    /// Creates the run directory. Returns the name of the run, and the directory in the process that writes it.
    fn open(&self, run: ScriptRun) -> Result<(String, Option<PathBuf>), String>;

    /// Reports a step that has ended, with what was logged. Returns whether the script is to take another.
    fn step(&self, step: u64) -> Result<bool, String>;
}

const OP: &str = "run";

fn open(
    lua: &Lua,
    (name, steps, names, values): (Option<String>, Option<u64>, Vec<String>, Table),
) -> mlua::Result<(String, Option<String>)> {
    let host = host(lua)?;
    let Some(driver) = host.script.borrow().clone() else {
        let hint = "write it in a script without a recipe, and start it by `perilune run FILE.lua`";
        let message = "only a plain script that `perilune run` starts has such a run".to_string();
        return Err(errors::argument(&host, lua, OP, message, Some(hint.into())));
    };
    let mut params = Vec::new();
    for (k, name) in (1..).zip(names) {
        params.push((name, ParamValue::of(values.raw_get::<Value>(k)?)));
    }
    let opened = driver.open(ScriptRun { name, steps, params });
    let (name, dir) = opened.map_err(|message| errors::argument(&host, lua, OP, message, None))?;
    Ok((name, dir.map(|dir| dir.display().to_string())))
}

fn step(lua: &Lua, step: u64) -> mlua::Result<bool> {
    let host = host(lua)?;
    let Some(driver) = host.script.borrow().clone() else { return Ok(true) };
    driver.step(step).map_err(|message| errors::argument(&host, lua, OP, message, None))
}

pub(crate) fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("script_open", lua.create_function(open)?)?;
    native.set("script_step", lua.create_function(step)?)
}
