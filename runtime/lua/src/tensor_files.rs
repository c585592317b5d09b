//! Binds files of tensors for Lua: `pl.load` and `pl.save` of safetensors, npy and npz, and PNG images.

use crate::args::show;
use crate::errors;
use crate::functions::host;
use crate::recipe_files::{First, Recorded, fail, input, readable, text_arg, writable};
use crate::table;
use crate::tensor::Tensor;
use mlua::{Lua, Table, Value};
use perilune_core::{DType, HostTensor};
use perilune_data::{image, npy, npz, safetensors, shards};
use perilune_policy::is_address;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// `pl.load(path)` -> {name = tensor} for safetensors, their index (`….safetensors.index.json`) and npz, a tensor for npy. A relative path starts where `pl.save`
/// writes, at the current directory, then in the recipe's folder.
fn load(lua: &Lua, path: Value) -> mlua::Result<Value> {
    let host = host(lua)?;
    let name = text_arg(&host, lua, "load", "the path", &path)?;
    // The hash and the query of an address are no part of the name.
    let bare = if is_address(&name) { name.split(['#', '?']).next().unwrap_or(&name) } else { &name };
    let index = shards::is_index(Path::new(bare));
    if index && is_address(&name) {
        let message = format!("{name} is an index: its shards have addresses of their own");
        return Err(errors::argument(&host, lua, "load", message, Some("load each shard by its address".into())));
    }
    let known = |e: &&str| PathBuf::from(bare).extension().is_some_and(|x| x == std::ffi::OsStr::new(e));
    if !index && !["safetensors", "npy", "npz"].iter().any(known) {
        let torch = [".pt", ".pth", ".bin", ".ckpt"].iter().any(|e| name.ends_with(e));
        let cure = "in Python: safetensors.torch.save_file(model.state_dict(), \"model.safetensors\")";
        let message = format!("\"{name}\" is none of .safetensors, .npy, .npz");
        return Err(errors::argument(&host, lua, "load", message, torch.then(|| cure.into())));
    }
    let file = readable(&host, lua, "load", &name, First::Here)?;
    let many = |list: Vec<(String, HostTensor)>| -> mlua::Result<Value> {
        let t = lua.create_table()?;
        for (name, value) in list {
            t.raw_set(name, input(&host, lua, value)?)?;
        }
        Ok(Value::Table(t))
    };
    match Path::new(bare).extension().and_then(|e| e.to_str()) {
        _ if index => {
            many(shards::load(&Recorded(&host.policy), file.path()).map_err(|e| fail(&host, lua, "load", e))?.tensors)
        }
        Some("safetensors") => many(safetensors::load(file).map_err(|e| fail(&host, lua, "load", e))?.tensors),
        Some("npz") => many(npz::load(file).map_err(|e| fail(&host, lua, "load", e))?),
        _ => {
            let t = npy::load(file).map_err(|e| fail(&host, lua, "load", e))?;
            crate::functions::into_lua(lua, input(&host, lua, t)?)
        }
    }
}

/// The endings of what `pl.save` writes.
const SAVED: [&str; 3] = ["safetensors", "npy", "npz"];

/// `pl.save(path, {name = tensor})`, or a tensor for npy. Writing is atomic; a relative path starts at the current
/// directory.
fn save(lua: &Lua, (path, what): (Value, Value)) -> mlua::Result<()> {
    let host = host(lua)?;
    let name = text_arg(&host, lua, "save", "the path", &path)?;
    let file = PathBuf::from(&name);
    let one = |v: &Value| match v {
        Value::UserData(u) => match u.borrow::<Tensor>() {
            Ok(t) => table::read(lua, &t).map(Some),
            Err(_) => Ok(None),
        },
        _ => Ok(None),
    };
    let mut list = Vec::new();
    match &what {
        Value::Table(t) => {
            for pair in t.pairs::<Value, Value>() {
                let (k, v) = pair?;
                let key = k.as_string().map(|s| s.to_string_lossy());
                match (key, one(&v)?) {
                    (Some(key), Some(value)) => list.push((key, value)),
                    _ => {
                        let message = format!("entry {} is {}; entries are name = tensor", show(&k), show(&v));
                        return Err(errors::argument(
                            &host,
                            lua,
                            "save",
                            message,
                            Some("pl.tensor(3) makes a tensor of a number".into()),
                        ));
                    }
                }
            }
            list.sort_by(|a, b| a.0.cmp(&b.0));
        }
        v => match one(v)? {
            Some(value) => list.push(("tensor".into(), value)),
            None => {
                return Err(errors::argument(
                    &host,
                    lua,
                    "save",
                    format!("argument 2 is {}; it must be a table of tensors", show(v)),
                    None,
                ));
            }
        },
    }
    let known = file.extension().and_then(|e| e.to_str()).filter(|e| SAVED.contains(e));
    let Some(ending) = known else {
        let hint = Some("the end of the name says the format: \"weights.safetensors\"".into());
        let message = format!("\"{name}\" is none of .safetensors, .npy, .npz");
        return Err(errors::argument(&host, lua, "save", message, hint));
    };
    if ending == "npy" && list.len() != 1 {
        let message = format!("an npy file holds one tensor, not {}", list.len());
        return Err(errors::argument(&host, lua, "save", message, Some("use .npz or .safetensors".into())));
    }
    let out = writable(&host, lua, "save", &name, &SAVED)?;
    let result = match ending {
        "safetensors" => safetensors::save(out, &list, &BTreeMap::new()),
        "npz" => npz::save(out, &list, false),
        _ => npy::save(out, &list[0].1),
    };
    result.map_err(|e| fail(&host, lua, "save", e))
}

/// `native.check_save(op, path)`: raises if `pl.save` of named tensors could not write there.
fn check_save(lua: &Lua, (op, path): (String, Value)) -> mlua::Result<()> {
    let host = host(lua)?;
    let name = text_arg(&host, lua, &op, "the path", &path)?;
    let _held = host.policy.hold_writes();
    writable(&host, lua, &op, &name, &["safetensors", "npz"]).map(drop)
}

pub fn install(lua: &Lua, pl: &Table, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    pl.set("load", lua.create_function(load)?)?;
    pl.set("save", lua.create_function(save)?)?;
    native.set("check_save", lua.create_function(check_save)?)?;
    native.set(
        "png",
        lua.create_function(|lua, path: Value| {
            let host = host(lua)?;
            let path = text_arg(&host, lua, "png", "the path", &path)?;
            let t = image::load(readable(&host, lua, "png", &path, First::Beside)?)
                .map_err(|e| fail(&host, lua, "png", e))?;
            let id = host.record(lua, |engine| {
                let x = engine.from_host(t);
                let g = &mut engine.recorder.graph;
                let x = g.permute(x, &[2, 0, 1])?;
                let x = g.cast(x, DType::F32)?;
                Ok(g.mul_c(x, 1.0 / 255.0)?)
            })?;
            Ok(host.tensor(id))
        })?,
    )?;
    native.set(
        "save_png",
        lua.create_function(|lua, (path, image_chw): (Value, Value)| {
            let host = host(lua)?;
            let path = text_arg(&host, lua, "save_png", "the path", &path)?;
            let r = match &image_chw {
                Value::UserData(u) => crate::args::RefGuard(u.borrow::<Tensor>()?.what),
                other => {
                    return Err(errors::argument(
                        &host,
                        lua,
                        "save_png",
                        format!("the image is {}", show(other)),
                        None,
                    ));
                }
            };
            let t = host.record(lua, |engine| {
                let x = r.node(engine)?;
                let x = if engine.recorder.graph.shape(x).rank() == 3 {
                    engine.recorder.graph.permute(x, &[1, 2, 0])?
                } else {
                    x
                };
                let x = engine.recorder.graph.copy(x)?;
                engine.read_node(x)
            })?;
            let out = writable(&host, lua, "save_png", &path, &["png"])?;
            image::save(out, &t).map_err(|e| fail(&host, lua, "save_png", e))
        })?,
    )?;
    Ok(())
}
