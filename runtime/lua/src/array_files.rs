//! Binds IDX arrays and WAV sounds for Lua: thin wrappers of `perilune_data`. `stdlib/data` checks the options.

use crate::errors;
use crate::functions::host;
use crate::recipe_files::{First, Recorded, fail, folder, input, readable, text_arg};
use crate::tensor::Tensor;
use mlua::{Lua, Table, Value};
use perilune_data::{idx, wav};

const SOUNDS: &str = "data.sounds";

/// `native.idx(path, max_bytes)` -> the array of an IDX file.
fn idx(lua: &Lua, (path, max_bytes): (Value, Option<u64>)) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, "data.idx", "the path", &path)?;
    let file = readable(&host, lua, "data.idx", &path, First::Beside)?;
    let t = idx::load(file, max_bytes).map_err(|e| fail(&host, lua, "data.idx", e))?;
    input(&host, lua, t)
}

/// `native.wav(path, rate)` -> the samples of a WAV file, (N) f32.
fn wav(lua: &Lua, (path, rate): (Value, u32)) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, "data.wav", "the path", &path)?;
    let file = readable(&host, lua, "data.wav", &path, First::Beside)?;
    let t = wav::load(file, rate).map_err(|e| fail(&host, lua, "data.wav", e))?;
    input(&host, lua, t)
}

/// `native.sounds(path, classes, rate, samples)` -> x (N, samples) f32, y (N) i64, the names of the classes.
fn sounds(
    lua: &Lua,
    (path, classes, rate, samples): (Value, Option<Vec<String>>, u32, u64),
) -> mlua::Result<(Tensor, Tensor, Vec<String>)> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, SOUNDS, "the path", &path)?;
    let at = folder(&host, lua, SOUNDS, &path)?;
    let samples = usize::try_from(samples)
        .map_err(|_| errors::argument(&host, lua, SOUNDS, format!("{samples} samples are too many"), None))?;
    let found = wav::folder(&Recorded(&host.policy), &at, classes.as_deref(), rate, samples);
    let found = found.map_err(|e| fail(&host, lua, SOUNDS, e))?;
    Ok((input(&host, lua, found.x)?, input(&host, lua, found.y)?, found.classes))
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("idx", lua.create_function(idx)?)?;
    native.set("wav", lua.create_function(wav)?)?;
    native.set("sounds", lua.create_function(sounds)?)
}
