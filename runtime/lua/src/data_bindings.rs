//! Binds tables, text and sample order for Lua: thin wrappers of `perilune_data`. `stdlib/data` builds the API on them.

use crate::args::{as_int, show};
use crate::boundary;
use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::kernels;
use crate::recipe_files::{First, fail, input, readable, text_arg};
use crate::table;
use crate::tensor::Tensor;
use mlua::{Function, Lua, Table, UserData, UserDataMethods, Value};
use perilune_core::error::did_you_mean;
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::csv::{Columns, Header, Options, Rows};
use perilune_data::sample_order::{Permutation, Stream, Windows};
use perilune_data::text::Vocabulary;
use perilune_data::{text, tokens::read_file};
use perilune_engine::profile::Bound;
use std::rc::Rc;

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

pub(crate) struct VocabularyData(pub(crate) Vocabulary);

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
        // The ids of a text as a corpus in host memory, a byte each if the vocabulary allows it.
        methods.add_method("corpus", |lua, this, text: Value| {
            let host = host(lua)?;
            let text = text_arg(&host, lua, "encode", "the text", &text)?;
            let dtype = if this.0.len() <= 256 { DType::U8 } else { DType::I32 };
            let ids = this.0.encode(&text, dtype).map_err(|e| fail(&host, lua, "encode", e))?;
            crate::tokens::list(lua, ids)
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
    let native = lua.create_table()?;
    crate::tensor_files::install(lua, pl, &native)?;
    crate::array_files::install(lua, &native)?;
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
            let t = read_file(readable(&host, lua, "tokens", &path, First::Beside)?)
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
    native.set("tokenizer", lua.create_function(crate::tokenizer::open)?)?;
    native.set("train_tokenizer", lua.create_function(crate::train_tokenizer::train_tokenizer)?)?;
    native.set("byte_tokenizer", lua.create_function(crate::tokenizer::bytes)?)?;
    native.set("char_tokenizer", lua.create_function(crate::tokenizer::chars)?)?;
    native.set("token_files", lua.create_function(crate::tokens::files)?)?;
    native.set("record_list", lua.create_function(crate::records::list)?)?;
    native.set("pseudo", lua.create_function(crate::records::pseudo)?)?;
    native.set("unordered", lua.create_function(crate::records::unshuffled)?)?;
    native.set("generate", lua.create_function(crate::records::generate)?)?;
    native.set("record_file", lua.create_function(crate::record_files::open)?)?;
    native.set("null", Value::NULL)?;
    native.set("mix", lua.create_function(crate::records::mix)?)?;
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
    native.set("image_list", lua.create_function(crate::images::list)?)?;
    native.set(
        "window_starts",
        lua.create_function(|lua, (seed, first, count, n, length): (i64, u64, u64, i64, i64)| {
            let host = host(lua)?;
            let w =
                Windows::new(n.max(0) as usize, length.max(0) as usize).map_err(|e| fail(&host, lua, "windows", e))?;
            boundary::numbers(lua, "window_starts", first, count, |i| w.random(seed as u64, i) as i64)
        })?,
    )?;
    native.set("source_place", lua.create_function(kernels::place)?)?;
    native.set("source_kernel", lua.create_function(kernels::record)?)?;
    native.set("record_offline_kernel", lua.create_function(crate::offline_source::record_kernel)?)?;
    native.set("loss_sum", lua.create_function(loss_sum)?)?;
    native.set("sample_losses", lua.create_function(crate::sample_log::losses)?)?;
    native.set("sample_log", lua.create_function(crate::sample_log::create)?)?;
    crate::observers::install(lua, &native)?;
    crate::script_run::install(lua, &native)?;
    native.set("missed", lua.create_function(crate::missed_field::missed)?)?;
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
    // Says something about the run that is no error, once.
    native.set(
        "notice",
        lua.create_function(|lua, text: String| {
            host(lua)?.engine.borrow_mut().diagnostics.notices.say(text);
            Ok(())
        })?,
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
    crate::mesh::install(lua, &native)?;
    crate::experts::install(lua, &native)?;
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
    fn oversized_native_calls_are_errors() {
        let (backend, params, print) = (Arc::new(perilune_plan::Null), Vec::new(), Rc::new(|_: &str| ()));
        let options = RuntimeOptions { backend, params, policy: Policy::closed(), strict: false, print };
        let runtime = Runtime::new(options).expect("a runtime");
        runtime.limit_lua_memory(48 << 20).expect("a limit");
        let native: Table = runtime.lua().named_registry_value(crate::loader::NATIVE).expect("the library's functions");
        runtime.lua().globals().raw_set("native", native).expect("a global");
        for call in
            ["permutation(1, 0, 1 << 40)", "shuffled(1, 0, 1 << 62, 10)", "window_starts(1, 0, 1 << 62, 100, 10)"]
        {
            let e = runtime.load_text(&format!("local t = native.{call}"), "@attack.lua").map(drop).expect_err(call);
            assert!(e.to_string().contains("--lua-memory"), "{call}: {e}");
        }
        let many = "local t = {} for i = 1, 1e5 do t[i] = ('y'):rep(90) end local x = native.near(('x'):rep(90), t)";
        runtime.load_text(many, "@attack.lua").expect("many names");
    }
}
