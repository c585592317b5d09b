//! Binds files and sample order for Lua: thin wrappers of `perilune_data`. `stdlib/data` builds the API on them.

use crate::args::{as_int, show};
use crate::boundary;
use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::kernels;
use crate::runtime::Place;
use crate::table;
use crate::tensor::Tensor;
use mlua::{Function, Lua, Table, UserData, UserDataMethods, Value};
use perilune_core::error::did_you_mean;
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::csv::{Columns, Header, Options, Rows};
use perilune_data::sample_order::{Permutation, Stream, Windows};
use perilune_data::text::Vocabulary;
use perilune_data::{image, npy, npz, safetensors, shards, text, tokens};
use perilune_engine::profile::Bound;
use perilune_policy::{Entry, Opened, Opener, Policy, Staged, near};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Converts a data error to one with the recipe line.
pub(crate) fn fail(host: &Rc<Host>, lua: &Lua, op: &str, e: perilune_data::Error) -> mlua::Error {
    if matches!(e, perilune_data::Error::Interrupted) {
        return boundary::recipe_line::raised(lua, e.to_string(), None, errors::Cause::Interrupted);
    }
    let text = e.to_string();
    match text.split_once("\n  hint: ") {
        Some((message, hint)) => errors::argument(host, lua, op, message, Some(hint.to_string())),
        None => errors::argument(host, lua, op, text, None),
    }
}

/// The folder in which a relative path is searched for first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    /// The recipe's folder, for data.
    Beside,
    /// The current directory, so that `pl.load` finds what `pl.save` wrote under the same path.
    Here,
}

/// Opens a file to read: beside the recipe or in the current directory, whichever has it first.
fn readable(host: &Rc<Host>, lua: &Lua, op: &str, path: &str, first: First) -> mlua::Result<Opened> {
    let file = found(host, lua, op, "file", path, first, |policy, path| policy.open(path))?;
    host.policy.record_file(path, &file);
    Ok(file)
}

/// Opens files of an index and records them as data.
#[derive(Debug)]
struct Recorded<'a>(&'a Policy);

impl Opener for Recorded<'_> {
    fn open(&self, path: &Path) -> perilune_policy::Result<Opened> {
        let file = self.0.open(path)?;
        self.0.record_file(&path.to_string_lossy(), &file);
        Ok(file)
    }

    fn list(&self, dir: &Path) -> perilune_policy::Result<Vec<Entry>> {
        self.0.list(dir)
    }
}

/// The path of a folder of data.
pub(crate) fn folder(host: &Rc<Host>, lua: &Lua, op: &str, path: &str) -> mlua::Result<PathBuf> {
    found(host, lua, op, "folder", path, First::Beside, |policy, path| policy.kind(path).map(|_| path.to_path_buf()))
}

fn found<T>(
    host: &Rc<Host>,
    lua: &Lua,
    op: &str,
    what: &str,
    path: &str,
    first: First,
    open: impl Fn(&Policy, &Path) -> perilune_policy::Result<T>,
) -> mlua::Result<T> {
    let place = lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
    let (beside, here) = (place.at(path), PathBuf::from(path));
    let order = if first == First::Here { [&here, &beside] } else { [&beside, &here] };
    let mut denied = None;
    for p in order {
        match open(&host.policy, p) {
            Ok(found) => return Ok(found),
            Err(e) if e.is_not_found() => {}
            Err(e @ perilune_policy::Error::Denied { left: false, .. }) => denied = denied.or(Some(e)),
            Err(e) => return Err(fail(host, lua, op, e.into())),
        }
    }
    // A replay that was started elsewhere.
    if let (Some(base), Some(_)) = (host.policy.elsewhere(), &denied)
        && here.is_relative()
        && host.policy.kind(base).is_err()
    {
        let (start, message) = (base.display(), format!("{what} \"{path}\" is not in a directory that may be read"));
        let hint = format!(
            "relative paths start where the run was started; allow it on the command line: --allow-read={start}"
        );
        return Err(errors::argument(host, lua, op, message, Some(hint)));
    }
    let named = here.is_absolute() || beside == here;
    let near = order.into_iter().find_map(|p| {
        let near = near(&*host.policy, p)?;
        Some(format!("did you mean \"{}{near}\"?", path.strip_suffix(p.file_name()?.to_str()?)?))
    });
    if let Some(e) = denied {
        // A relative path that is not there beside the recipe; whether it is elsewhere is not looked at.
        if named || !host.policy.kind(&beside).is_err_and(|e| e.is_not_found()) {
            return Err(fail(host, lua, op, e.into()));
        }
        let message = format!("there is no {what} \"{path}\" beside the recipe");
        let directory = host.policy.elsewhere().unwrap_or(Path::new(".")).display();
        let rule = format!(
            "the current directory is read if it contains the recipe's folder; allow it with --allow-read={directory}"
        );
        return Err(errors::argument(host, lua, op, message, near.or(Some(rule))));
    }
    let looked = if named { "" } else { ", neither beside the recipe nor in the current directory" };
    let rule = match first {
        First::Beside => "paths start beside the recipe, then at the current directory",
        First::Here => "paths start at the current directory, where pl.save writes, then beside the recipe",
    };
    let hint = near.or_else(|| here.is_relative().then(|| rule.into()));
    Err(errors::argument(host, lua, op, format!("there is no {what} \"{path}\"{looked}"), hint))
}

/// Begins a file that the recipe writes.
fn writable(host: &Rc<Host>, lua: &Lua, op: &str, path: &str, endings: &[&str]) -> mlua::Result<Staged> {
    host.policy.create(Path::new(path), endings).map_err(|e| fail(host, lua, op, e.into()))
}

/// Makes a tensor of host memory a tensor of the recipe.
pub(crate) fn input(host: &Rc<Host>, lua: &Lua, t: HostTensor) -> mlua::Result<Tensor> {
    let id = host.record(lua, |engine| Ok(engine.from_host(t)))?;
    Ok(host.tensor(id))
}

pub(crate) fn text_arg(host: &Rc<Host>, lua: &Lua, op: &str, what: &str, v: &Value) -> mlua::Result<String> {
    match v {
        Value::String(s) => Ok(s.to_string_lossy()),
        other => Err(errors::argument(host, lua, op, format!("{what} is {}; it must be a string", show(other)), None)),
    }
}

struct RowsData(Rows);

fn columns(host: &Rc<Host>, lua: &Lua, v: &Value) -> mlua::Result<Columns> {
    let one = |v: &Value| match v {
        Value::String(s) => Some(Columns::Name(s.to_string_lossy())),
        v => as_int(v).and_then(|i| usize::try_from(i).ok()).map(Columns::Index),
    };
    let bad = |v: &Value| {
        let hint = Some("columns are indices from 0, or names of the header".into());
        errors::argument(host, lua, "csv", format!("a column is {}", show(v)), hint)
    };
    let Value::Table(list) = v else { return one(v).ok_or_else(|| bad(v)) };
    let (mut indices, mut names) = (Vec::new(), Vec::new());
    for v in list.sequence_values::<Value>() {
        let v = v?;
        match one(&v) {
            Some(Columns::Index(i)) => indices.push(i),
            Some(Columns::Name(n)) => names.push(n),
            _ => return Err(bad(&v)),
        }
    }
    match (indices.is_empty(), names.is_empty()) {
        (_, true) => Ok(Columns::Indices(indices)),
        (true, _) => Ok(Columns::Names(names)),
        _ => Err(errors::argument(host, lua, "csv", "columns are given partly by index and partly by name", None)),
    }
}

impl UserData for RowsData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok((this.0.len(), this.0.num_columns())));
        methods.add_method("names", |_, this, ()| Ok(this.0.names().map(<[String]>::to_vec)));
        methods.add_method("columns", |lua, this, (which, opts): (Value, Option<Table>)| {
            let host = host(lua)?;
            let list = match which {
                Value::Table(_) => which,
                v => Value::Table(lua.create_sequence_from([v])?),
            };
            let which = columns(&host, lua, &list)?;
            let (mut dtype, mut scale, mut missing) = (DType::F32, 1.0, None);
            if let Some(o) = opts {
                if let Some(name) = o.get::<Option<String>>("dtype")? {
                    let message = || format!("dtype \"{name}\" is none of {}", DType::ALL.map(DType::name).join(", "));
                    dtype = DType::parse(&name).ok_or_else(|| errors::argument(&host, lua, "csv", message(), None))?;
                }
                scale = o.get::<Option<f64>>("scale")?.unwrap_or(1.0);
                missing = o.get::<Option<f64>>("missing")?;
            }
            let t = this.0.numbers(&which, dtype, scale, missing).map_err(|e| fail(&host, lua, "csv", e))?;
            input(&host, lua, t)
        });
        methods.add_method("is_numeric", |lua, this, column: Value| {
            let host = host(lua)?;
            let which = columns(&host, lua, &column)?;
            let at = this.0.resolve(&which).map_err(|e| fail(&host, lua, "csv", e))?;
            Ok(at.iter().all(|c| this.0.is_numeric(*c)))
        });
        methods.add_method("codes", |lua, this, (column, words): (Value, Option<Vec<String>>)| {
            let host = host(lua)?;
            let which = columns(&host, lua, &column)?;
            let (t, words) =
                this.0.codes(&which, DType::I64, words.as_deref()).map_err(|e| fail(&host, lua, "csv", e))?;
            Ok((input(&host, lua, t)?, words))
        });
    }
}

struct VocabularyData(Vocabulary);

impl UserData for VocabularyData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        methods.add_method("chars", |_, this, ()| Ok(this.0.chars()));
        methods.add_method("encode", |lua, this, text: Value| {
            let host = host(lua)?;
            let text = text_arg(&host, lua, "encode", "the text", &text)?;
            let t = this.0.encode(&text, DType::I64).map_err(|e| fail(&host, lua, "encode", e))?;
            input(&host, lua, t)
        });
        methods.add_method("decode", |lua, this, ids: Value| {
            let host = host(lua)?;
            let t = match &ids {
                Value::UserData(u) => table::read(lua, &*u.borrow::<Tensor>()?)?,
                Value::Table(list) => {
                    let mut out = Vec::new();
                    for v in list.sequence_values::<Value>() {
                        let v = v?;
                        let bad = || {
                            errors::argument(
                                &host,
                                lua,
                                "decode",
                                format!("an id is {}; ids are integers", show(&v)),
                                None,
                            )
                        };
                        out.push(as_int(&v).ok_or_else(bad)?);
                    }
                    HostTensor::from_i64(Shape::of(&[out.len()]), &out)
                }
                other => {
                    return Err(errors::argument(
                        &host,
                        lua,
                        "decode",
                        format!("the ids are {}; they must be a list or a tensor", show(other)),
                        None,
                    ));
                }
            };
            this.0.decode(&t).map_err(|e| fail(&host, lua, "decode", e))
        });
    }
}

fn csv(lua: &Lua, (path, opts): (Value, Value)) -> mlua::Result<RowsData> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, "csv", "the path", &path)?;
    let mut o = Options::default();
    if let Value::Table(t) = &opts {
        for pair in t.pairs::<String, Value>() {
            let (key, value) = pair?;
            let wrong = |want: &str| {
                errors::argument(
                    &host,
                    lua,
                    "csv",
                    format!("option {key} is {}; it must be {want}", show(&value)),
                    None,
                )
            };
            let letter = |v: &Value| {
                v.as_string().map(|s| s.to_string_lossy()).and_then(|s| {
                    let mut c = s.chars();
                    c.next().filter(|_| c.next().is_none())
                })
            };
            match key.as_str() {
                "header" => {
                    o.header = match &value {
                        Value::Boolean(true) => Header::Yes,
                        Value::Boolean(false) => Header::No,
                        Value::String(s) if s.to_string_lossy() == "auto" => Header::Auto,
                        _ => return Err(wrong("true, false or \"auto\"")),
                    }
                }
                "delimiter" => o.delimiter = Some(letter(&value).ok_or_else(|| wrong("one character"))?),
                "comment" => o.comment = Some(letter(&value).ok_or_else(|| wrong("one character"))?),
                "max_bytes" => {
                    let bytes = as_int(&value).and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0);
                    o.max_bytes = Some(bytes.ok_or_else(|| wrong("a number of bytes"))?);
                }
                "missing" => {
                    o.missing =
                        Some(value.as_f64().or(value.as_i64().map(|i| i as f64)).ok_or_else(|| wrong("a number"))?)
                }
                _ => {
                    return Err(errors::argument(
                        &host,
                        lua,
                        "csv",
                        format!("unknown option '{key}' (options: comment, delimiter, header, max_bytes, missing)."),
                        None,
                    ));
                }
            }
        }
    }
    Rows::read(readable(&host, lua, "csv", &path, First::Beside)?, &o)
        .map(RowsData)
        .map_err(|e| fail(&host, lua, "csv", e))
}

/// `pl.load(path)` -> {name = tensor} for safetensors, their index (`….safetensors.index.json`) and npz, a tensor for npy. A relative path starts where `pl.save`
/// writes, at the current directory, then in the recipe's folder.
fn load(lua: &Lua, path: Value) -> mlua::Result<Value> {
    let host = host(lua)?;
    let name = text_arg(&host, lua, "load", "the path", &path)?;
    let index = shards::is_index(Path::new(&name));
    let known = |e: &&str| PathBuf::from(&name).extension().is_some_and(|x| x == std::ffi::OsStr::new(e));
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
    match Path::new(&name).extension().and_then(|e| e.to_str()) {
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

/// Caches the permutations of 0..n by epoch.
fn order_of(lua: &Lua, n: u64, seed: i64, stream: Stream) -> mlua::Result<impl Fn(u64) -> Permutation> {
    if n > 1 << 62 {
        let message = format!("the set has {n} samples; at most 2^62 are ordered");
        return Err(errors::argument(&host(lua)?, lua, "data", message, None));
    }
    Ok(move |epoch| Permutation::new(n, seed as u64, epoch, stream))
}

/// `native.loss_sum(loss)`: returns the sum and the divisor of a mean loss over class ids; nothing for other tensors.
fn loss_sum(lua: &Lua, loss: Value) -> mlua::Result<(Option<Tensor>, Option<Tensor>)> {
    let host = host(lua)?;
    let what = loss.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| crate::args::RefGuard(t.what)));
    let Some(what) = what else { return Ok((None, None)) };
    let found = host.record(lua, |engine| {
        let node = what.node(engine)?;
        Ok(perilune_core::ops::loss::sum_and_total(&mut engine.recorder.graph, node)?)
    })?;
    Ok(found.map(|(sum, total)| (host.tensor(sum), host.tensor(total))).unzip())
}

pub fn install(lua: &Lua, pl: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    pl.set("load", lua.create_function(load)?)?;
    pl.set("save", lua.create_function(save)?)?;
    let native = lua.create_table()?;
    native.set("check_save", lua.create_function(check_save)?)?;
    native.set("csv", lua.create_function(csv)?)?;
    native.set(
        "text",
        lua.create_function(|lua, (path, max_bytes): (Value, Option<u64>)| {
            let host = host(lua)?;
            let path = text_arg(&host, lua, "text", "the path", &path)?;
            let file = readable(&host, lua, "text", &path, First::Beside)?;
            text::read(file, max_bytes).map_err(|e| fail(&host, lua, "text", e))
        })?,
    )?;
    native.set(
        "tokens",
        lua.create_function(|lua, path: Value| {
            let host = host(lua)?;
            let path = text_arg(&host, lua, "tokens", "the path", &path)?;
            let t = tokens::read(readable(&host, lua, "tokens", &path, First::Beside)?)
                .map_err(|e| fail(&host, lua, "tokens", e))?;
            input(&host, lua, t)
        })?,
    )?;
    native.set(
        "chars",
        lua.create_function(|lua, text: Value| {
            let host = host(lua)?;
            Ok(VocabularyData(Vocabulary::of(&text_arg(&host, lua, "chars", "the text", &text)?)))
        })?,
    )?;
    native.set(
        "permutation",
        lua.create_function(|lua, (seed, epoch, n, stream): (i64, i64, i64, Option<String>)| {
            let host = host(lua)?;
            let n = n.max(0) as u64;
            let stream = match stream.as_deref() {
                None | Some("shuffle") => Stream::Shuffle,
                Some("split") => Stream::Split,
                Some(other) => {
                    return Err(errors::argument(
                        &host,
                        lua,
                        "permutation",
                        format!("no stream is called \"{other}\""),
                        None,
                    ));
                }
            };
            let order = order_of(lua, n, seed, stream)?;
            let list = boundary::numbers(lua, "permutation", 0, n, |i| order(epoch as u64).at(i) as i64)?;
            input(&host, lua, HostTensor::from_i64(Shape::of(&[list.len()]), &list))
        })?,
    )?;
    // Samples `first` .. `first + count - 1` of an endless stream over 0 .. n - 1, with a new order in each epoch.
    native.set(
        "shuffled",
        lua.create_function(|lua, (seed, first, count, n): (i64, u64, u64, u64)| {
            let order = order_of(lua, n, seed, Stream::Shuffle)?;
            let count = if n == 0 { 0 } else { count };
            boundary::numbers(lua, "shuffled", first, count, |i| order(i / n).at(i % n) as i64)
        })?,
    )?;
    native.set("images", lua.create_function(crate::images::images)?)?;
    native.set(
        "text_windows",
        lua.create_function(|lua, (seed, first, count, n, length): (i64, u64, u64, i64, i64)| {
            let host = host(lua)?;
            let w =
                Windows::new(n.max(0) as usize, length.max(0) as usize).map_err(|e| fail(&host, lua, "windows", e))?;
            let list = boundary::numbers(lua, "text_windows", first, count, |i| w.random(seed as u64, i) as i64)?;
            input(&host, lua, HostTensor::from_i64(Shape::of(&[list.len()]), &list))
        })?,
    )?;
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
    native.set("source_place", lua.create_function(kernels::place)?)?;
    native.set("source_kernel", lua.create_function(kernels::record)?)?;
    native.set("record_offline_kernel", lua.create_function(crate::offline_source::record_kernel)?)?;
    native.set("loss_sum", lua.create_function(loss_sum)?)?;
    native.set("dry_run", lua.create_function(crate::dry_run::dry_run)?)?;
    native.set("unsaved", lua.create_function(crate::state_migration::unsaved)?)?;
    native.set("mode", lua.create_function(crate::grads::mode)?)?;
    // The current recipe line, as a number, and the fallback if there is none.
    native.set("place", lua.create_function(|lua, ()| Ok(host(lua)?.loc(lua).0))?)?;
    native.set("at", lua.create_function(|lua, place: u32| Ok(host(lua)?.called_at.replace(SourceLoc(place)).0))?)?;
    native.set(
        "written_at",
        lua.create_function(|lua, f: Function| Ok(crate::options::written_at(&*host(lua)?, &f).0))?,
    )?;
    native.set(
        "waited",
        lua.create_function(|lua, seconds: f64| {
            if let Some(stalls) = &mut host(lua)?.engine.borrow_mut().diagnostics.host_stalls {
                stalls.add(Bound::Data, SourceLoc::NONE, seconds);
            }
            Ok(())
        })?,
    )?;
    crate::nan_guard::install(lua, &native)?;
    crate::optim::install(lua, &native)?;
    native.set(
        "near",
        lua.create_function(|_, (name, known): (String, Vec<String>)| {
            Ok(did_you_mean(&name, known.iter().map(String::as_str)).map(str::to_string))
        })?,
    )?;
    crate::inspect::install(lua, &native)?;
    crate::console::interrupt::install(lua, &native)?;
    lua.set_named_registry_value(crate::loader::NATIVE, native)
}

#[cfg(test)]
mod tests {
    use crate::{Policy, Runtime, RuntimeOptions};
    use mlua::Table;
    use std::rc::Rc;
    use std::sync::Arc;

    /// The library checks what recipes give it; these functions hold their own limits nevertheless.
    #[test]
    fn greedy_calls_are_errors() {
        let (backend, params, print) = (Arc::new(perilune_plan::Null), Vec::new(), Rc::new(|_: &str| ()));
        let options = RuntimeOptions { backend, params, policy: Policy::closed(), strict: false, print };
        let runtime = Runtime::new(options).expect("a runtime");
        runtime.limit_lua_memory(48 << 20).expect("a limit");
        let native: Table = runtime.lua().named_registry_value(crate::loader::NATIVE).expect("the library's functions");
        runtime.lua().globals().raw_set("native", native).expect("a global");
        for call in
            ["permutation(1, 0, 1 << 40)", "shuffled(1, 0, 1 << 62, 10)", "text_windows(1, 0, 1 << 62, 100, 10)"]
        {
            let e = runtime.load_text(&format!("local t = native.{call}"), "@attack.lua").map(drop).expect_err(call);
            assert!(e.to_string().contains("--lua-memory"), "{call}: {e}");
        }
        let many = "local t = {} for i = 1, 1e5 do t[i] = ('y'):rep(90) end local x = native.near(('x'):rep(90), t)";
        runtime.load_text(many, "@attack.lua").expect("many names");
    }
}
