//! Binds datasets of records for Lua: a thin wrapper of `perilune_data::records`. `stdlib/data/records.lua` builds the API on it.

use crate::errors;
use crate::functions::host;
use crate::reader::Reader;
use crate::recipe_files::fail;
use crate::record_value::{self, Refused};
use crate::workers;
use mlua::{AnyUserData, Function, IntoLua, Lua, MultiValue, Table, UserData, UserDataMethods, Value};
use perilune_data::records::batch::{Pad, RecordBatches};
use perilune_data::records::columns;
use perilune_data::records::stages::{
    self, Augment, Bucket, Cached, Concat, Fields, FlatMap, Interleave, Map, Mix, PackOptions, Pseudo, PseudoLabel,
};
use perilune_data::records::stages::{
    Range, Repeat, Rewrites, Rewritten, Scan, Shuffle, TooLong, Windows, Zip, commute,
};
use perilune_data::records::{Dataset, Field, Generate, Length, List, MEMORY, RecordFn};
use std::sync::Arc;

type Shared = Arc<dyn Dataset>;

/// A dataset of records.
pub(crate) struct RecordSet(pub(crate) Shared);

/// Converts the errors of a function of the recipe.
pub(crate) fn or_fail<T>(lua: &Lua, op: &str, result: perilune_data::Result<T>) -> mlua::Result<T> {
    let host = host(lua)?;
    result.map_err(|e| fail(&host, lua, op, e))
}

pub(crate) fn scan(lua: &Lua, op: &str, threads: Option<usize>) -> mlua::Result<Scan> {
    let interrupt = host(lua)?.interrupt.clone();
    or_fail(lua, op, Scan::new(threads, interrupt))
}

/// A function of a record: a Lua function with the seed of its random numbers, or the name of a field. A stage that scans `first` calls
/// it at once, so it is rehearsed before; a map is rehearsed with its batches.
fn function(
    lua: &Lua,
    op: &str,
    value: Value,
    seed: Option<i64>,
    first: Option<&Shared>,
) -> mlua::Result<Arc<dyn RecordFn>> {
    match value {
        Value::String(name) => Ok(Arc::new(Field(name.to_string_lossy()))),
        Value::Function(f) => {
            let f = workers::carry(lua, op, &f, seed.unwrap_or(0) as u64)?;
            if let Some(dataset) = first {
                or_fail(lua, op, workers::rehearse_function(&f, &**dataset))?;
            }
            Ok(f)
        }
        other => {
            let message = format!("the function is {}", crate::args::show(&other));
            Err(errors::argument(&host(lua)?, lua, op, message, Some("give function(record) ... end".into())))
        }
    }
}

/// The datasets of a list of userdata.
fn all(own: &Shared, others: Table) -> mlua::Result<Vec<Shared>> {
    let mut out = vec![own.clone()];
    for other in others.sequence_values::<AnyUserData>() {
        out.push(other?.borrow::<RecordSet>()?.0.clone());
    }
    Ok(out)
}

fn texts(list: Table) -> mlua::Result<Vec<String>> {
    list.sequence_values::<String>().collect()
}

impl UserData for RecordSet {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        methods.add_method("varies", |_, this, ()| Ok(this.0.varies()));
        methods.add_method("get", |lua, this, index: u64| {
            let record = or_fail(lua, "records:get", this.0.get(index))?;
            record_value::table(lua, &record)
        });
        // The rows of files that a record is made of: a list of { file, row, line, rewritten }, of a pseudo-label with { label, confidence,
        // round }.
        methods.add_method("origins", |lua, this, index: u64| {
            let out = lua.create_table()?;
            for origin in or_fail(lua, "records:origins", this.0.origins(index))? {
                let entry = lua.create_table()?;
                entry.raw_set("file", origin.file.display().to_string())?;
                entry.raw_set("row", origin.row)?;
                entry.raw_set("line", origin.line)?;
                if let Some(set) = this.0.pseudo()
                    && let Some(label) = or_fail(lua, "records:origins", set.label(index))?
                {
                    entry.raw_set("label", label.class)?;
                    entry.raw_set("confidence", f64::from(label.confidence))?;
                    entry.raw_set("round", label.round)?;
                }
                entry.raw_set("rewritten", origin.rewritten.then_some(true))?;
                out.raw_push(entry)?;
            }
            Ok(out)
        });
        // The names and the schedule of the mixture whose records these are, one for one; nothing if they are not.
        methods.add_method("mixture", |_, this, ()| {
            let Some((names, text)) = this.0.mixture().map(Mix::state) else { return Ok((None, None)) };
            Ok((Some(names.to_vec()), Some(text)))
        });
        methods.add_method("decide", |lua, this, (first, weights): (u64, Vec<f64>)| {
            let Some(mix) = this.0.mixture() else { return Ok(()) };
            or_fail(lua, "data.mix", mix.decide(first, &weights))
        });
        methods.add_method(
            "resume_mixture",
            |lua, this, (names, text, sample, live): (Vec<String>, String, u64, bool)| {
                let Some(mix) = this.0.mixture() else { return Ok(()) };
                or_fail(lua, "data.mix", mix.resume(&names, &text, sample, live))
            },
        );
        // The places that chosen records get in a block of the stream of pseudo-labels, and its seed; nothing if this is none.
        methods.add_method("pseudo", |_, this, ()| {
            Ok(this.0.pseudo().map_or((None, None), |set| (Some(set.share()), Some(set.seed() as i64))))
        });
        methods.add_method("taken", |_, this, index: u64| Ok(this.0.pseudo().map_or(0, |set| set.taken(index))));
        methods.add_method("taken_by", |_, _, (seed, share, first, taken, chosen, index): TakenBy| {
            Ok(Pseudo::taken_by(seed as u64, share, first, taken, chosen, index))
        });
        // Gives the places from `first` on the labels of a list of { row, class, confidence, round }.
        methods.add_method("choose", |lua, this, (first, taken, labels): (u64, u64, Table)| {
            let Some(set) = this.0.pseudo() else { return Ok(()) };
            let mut all = Vec::with_capacity(labels.raw_len());
            for label in labels.sequence_values::<Table>() {
                let label = label?;
                let (row, class) = (label.get("row")?, label.get("class")?);
                let (confidence, round) = (label.get::<f64>("confidence")? as f32, label.get("round")?);
                all.push(PseudoLabel { row, class, confidence, round });
            }
            or_fail(lua, "data.pseudo", set.choose(first, taken, all))
        });
        // A hash of the content of all records in some fields.
        methods.add_method("digest", |lua, this, fields: Table| {
            let (op, fields) = ("data.pseudo", texts(fields)?);
            let scan = scan(lua, op, None)?;
            let hash = or_fail(lua, op, stages::digest(&*this.0, &fields, &scan))?;
            Ok(hash[..8].iter().fold(0i64, |word, byte| word << 8 | i64::from(*byte)))
        });
        methods.add_method("shuffle", |_, this, seed: i64| {
            Ok(RecordSet(Arc::new(Shuffle::new(this.0.clone(), seed as u64))))
        });
        methods.add_method("range", |_, this, (first, count): (u64, u64)| {
            Ok(RecordSet(Arc::new(Range::new(this.0.clone(), first, count))))
        });
        methods
            .add_method("repeated", |_, this, times: u64| Ok(RecordSet(Arc::new(Repeat::new(this.0.clone(), times)))));
        methods.add_method("windows", |_, this, (size, stride): (u64, u64)| {
            Ok(RecordSet(Arc::new(Windows::new(this.0.clone(), size, stride))))
        });
        methods.add_method("select", |_, this, names: Table| {
            Ok(RecordSet(Arc::new(Fields::select(this.0.clone(), &texts(names)?))))
        });
        methods.add_method("rename", |_, this, names: Table| {
            let mut pairs = names.pairs::<String, String>().collect::<mlua::Result<Vec<_>>>()?;
            pairs.sort();
            Ok(RecordSet(Arc::new(Fields::rename(this.0.clone(), &pairs))))
        });
        methods
            .add_method("concat", |_, this, others: Table| Ok(RecordSet(Arc::new(Concat::new(all(&this.0, others)?)))));
        methods.add_method("interleave", |_, this, others: Table| {
            Ok(RecordSet(Arc::new(Interleave::new(all(&this.0, others)?))))
        });
        methods.add_method("zip", |lua, this, others: Table| {
            let zip = or_fail(lua, "records:zip", Zip::new(all(&this.0, others)?))?;
            Ok(RecordSet(Arc::new(zip)))
        });
        methods.add_method("map", |lua, this, (f, seed): (Value, Option<i64>)| {
            let f = function(lua, "records:map", f, seed, None)?;
            Ok(RecordSet(Arc::new(Map::new(this.0.clone(), f))))
        });
        // `keep` is a probability; `copies` is nil or the number of rewrites beside the original.
        methods.add_method("augment", |lua, this, (f, seed, keep, copies): (Value, i64, f64, Option<u64>)| {
            let op = workers::AUGMENT;
            let f = function(lua, op, f, Some(seed), None)?;
            let rewrites = copies.map_or(Rewrites::Instead { keep }, |copies| Rewrites::Beside { copies });
            or_fail(lua, op, Augment::of(&this.0, f, rewrites, seed as u64)).map(RecordSet)
        });
        // `lists` has a list of records for each of the records beneath a shuffle.
        methods.add_method("rewrite", |lua, this, (lists, replace): (Table, bool)| {
            let op = "records:rewrite";
            let beneath = or_fail(lua, op, unordered("rewrite", &this.0))?;
            let mut rewrites = Vec::with_capacity(lists.raw_len());
            for (row, list) in (0..).zip(lists.sequence_values::<Table>()) {
                let list = list?;
                let records = list.sequence_values::<Value>().map(|value| rewritten(lua, op, &*beneath, row, &value?));
                rewrites.push(records.collect::<mlua::Result<Vec<_>>>()?);
            }
            let made = commute("rewrite", &this.0, |inner| Rewritten::of(inner, rewrites, replace));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("tokenize", |lua, this, (tokenizer, options): (Value, Value)| {
            let f = crate::tokenizer::tokenize(lua, &tokenizer, options)?;
            Ok(RecordSet(Arc::new(Map::new(this.0.clone(), Arc::new(f)))))
        });
        methods.add_method("chat", |lua, this, (tokenizer, options): (Value, Value)| {
            let f = crate::tokenizer::render_chat(lua, &tokenizer, options)?;
            Ok(RecordSet(Arc::new(Map::new(this.0.clone(), Arc::new(f)))))
        });
        methods.add_method("preference", |lua, this, (tokenizer, options): (Value, Value)| {
            let f = crate::tokenizer::preference(lua, &tokenizer, options)?;
            Ok(RecordSet(Arc::new(Map::new(this.0.clone(), Arc::new(f)))))
        });
        methods.add_method("filter", |lua, this, (f, seed): (Value, Option<i64>)| {
            let op = "records:filter";
            let (f, scan) = (function(lua, op, f, seed, Some(&this.0))?, scan(lua, op, None)?);
            let made = commute("filter", &this.0, |inner| stages::filter(inner, &*f, &scan));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("flat_map", |lua, this, (f, seed): (Value, Option<i64>)| {
            let op = "records:flat_map";
            let (f, scan) = (function(lua, op, f, seed, Some(&this.0))?, scan(lua, op, None)?);
            let made = commute("flat_map", &this.0, |inner| Ok(Arc::new(FlatMap::new(inner, f, &scan)?)));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("sort", |lua, this, (f, descending): (Value, bool)| {
            let op = "records:sort";
            let (f, scan) = (function(lua, op, f, None, Some(&this.0))?, scan(lua, op, None)?);
            let made = unordered("sort", &this.0).and_then(|inner| stages::sort(inner, &*f, descending, &scan));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("group", |lua, this, f: Value| {
            let op = "records:group";
            let (f, scan) = (function(lua, op, f, None, Some(&this.0))?, scan(lua, op, None)?);
            let made = commute("group", &this.0, |inner| stages::group(inner, &*f, &scan));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("join", |lua, this, (other, field): (AnyUserData, String)| {
            let op = "records:join";
            let (other, scan) = (other.borrow::<RecordSet>()?.0.clone(), scan(lua, op, None)?);
            let made = unordered("join", &other)
                .and_then(|other| commute("join", &this.0, |inner| stages::join(inner, other, &field, &scan)));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("unique", |lua, this, fields: Table| {
            let (op, fields) = ("records:unique", texts(fields)?);
            let scan = scan(lua, op, None)?;
            let made = commute("unique", &this.0, |inner| stages::unique(inner, &fields, &scan));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("without", |lua, this, (other, fields): (AnyUserData, Table)| {
            let (op, fields) = ("records:without", texts(fields)?);
            let (other, scan) = (other.borrow::<RecordSet>()?.0.clone(), scan(lua, op, None)?);
            let made = unordered("without", &other)
                .and_then(|other| commute("without", &this.0, |inner| stages::without(inner, &*other, &fields, &scan)));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("part", |lua, this, (op, seed, low, high): (String, i64, f64, f64)| {
            let scan = scan(lua, &op, None)?;
            let made = commute("split", &this.0, |inner| stages::part(inner, seed as u64, low, high, &scan));
            or_fail(lua, &op, made).map(RecordSet)
        });
        methods.add_method("sample", |lua, this, (count, seed): (u64, i64)| {
            let made = commute("sample", &this.0, |inner| Ok(stages::sample(inner, count, seed as u64)));
            or_fail(lua, "records:sample", made).map(RecordSet)
        });
        methods.add_method("cached", |lua, this, ()| {
            let op = "records:cache";
            let scan = scan(lua, op, None)?;
            let made = commute("cache", &this.0, |inner| Ok(Arc::new(Cached::new(inner, &scan)?)));
            or_fail(lua, op, made).map(RecordSet)
        });
        methods.add_method("bucket", |lua, this, (field, batch, seed): (String, u64, i64)| {
            let op = "records:bucket";
            let scan = scan(lua, op, None)?;
            let made = unordered("bucket", &this.0).and_then(|inner| stages::sort(inner, &Length(field), false, &scan));
            Ok(RecordSet(Arc::new(Bucket::new(or_fail(lua, op, made)?, batch, seed as u64))))
        });
        methods.add_method("pack", |lua, this, o: Table| {
            let op = "records:pack";
            let too_long = match o.get::<String>("too_long")?.as_str() {
                "truncate" => TooLong::Truncate,
                "split" => TooLong::Split,
                _ => TooLong::Error,
            };
            let options = PackOptions {
                length: o.get("length")?,
                ids: o.get("ids")?,
                mask: o.get("mask")?,
                padding: o.get("padding")?,
                too_long,
            };
            let scan = scan(lua, op, None)?;
            let made = commute("pack", &this.0, |inner| stages::pack(inner, options, &scan));
            or_fail(lua, op, made).map(RecordSet)
        });
        // The fit of columns: a list of { count, mean, deviation } for those of numbers, a list of values for those of categories.
        methods.add_method("fit_columns", |lua, this, (numbers, categories): (Table, Table)| {
            let (op, numbers, categories) = ("data.fit_columns", texts(numbers)?, texts(categories)?);
            let scan = scan(lua, op, None)?;
            let fit = unordered(op, &this.0).and_then(|inner| columns::fit(&*inner, &numbers, &categories, &scan));
            let fit = or_fail(lua, op, fit)?;
            let (numbers, categories) = (lua.create_table()?, lua.create_table()?);
            for column in &fit.numbers {
                let entry = lua.create_table()?;
                entry.raw_set("count", column.count)?;
                entry.raw_set("mean", column.mean)?;
                entry.raw_set("deviation", column.deviation)?;
                numbers.raw_push(entry)?;
            }
            for column in &fit.categories {
                let values = lua.create_table_with_capacity(column.len(), 0)?;
                for value in column {
                    values.raw_push(record_value::to_lua(lua, value)?)?;
                }
                categories.raw_push(values)?;
            }
            Ok((numbers, categories))
        });
        // The names of the columns of a batch, and the reader of batches of one loader.
        methods.add_method("reader", |lua, this, (pads, threads): (Table, Option<usize>)| {
            let mut all = Vec::new();
            for pad in pads.sequence_values::<Table>() {
                let pad = pad?;
                all.push(Pad { field: pad.get("field")?, length: pad.get("length")?, value: pad.get("value")? });
            }
            let op = "records:batch";
            or_fail(lua, op, workers::rehearse(&*this.0))?;
            let batches = or_fail(lua, op, RecordBatches::new(this.0.clone(), &all))?;
            let names: Vec<String> = batches.names().iter().map(|n| n.to_string()).collect();
            let reader = lua.create_userdata(Reader::new(lua, batches, threads, op, "record")?)?;
            Ok(MultiValue::from_iter([names.into_lua(lua)?, Value::UserData(reader)]))
        });
    }
}

/// The arguments of `taken_by`: seed, share, first, taken, whether there are chosen records, index.
type TakenBy = (i64, u64, u64, u64, bool, u64);

/// The dataset in an order that all epochs share, for a stage that orders the records itself.
fn unordered(what: &str, dataset: &Shared) -> perilune_data::Result<Shared> {
    let mut inner = None;
    commute(what, dataset, |found| {
        inner = Some(found.clone());
        Ok(found)
    })?;
    Ok(inner.unwrap_or_else(|| dataset.clone()))
}

/// A record that the function of `rewrite` gave for row `row`.
fn rewritten(
    lua: &Lua,
    op: &str,
    beneath: &dyn Dataset,
    row: u64,
    value: &Value,
) -> mlua::Result<perilune_data::records::Record> {
    record_value::record(lua, value)?.or_else(|refused| {
        let origin = or_fail(lua, op, beneath.origins(row))?.into_iter().next();
        let of = origin.map_or_else(|| format!("record {row}"), |origin| origin.to_string());
        let message = format!("a rewrite of {of}: {}", refused.message());
        Err(errors::argument(&host(lua)?, lua, op, message, Some(Refused::hint().into())))
    })
}

/// `native.record_list(records)`: makes a dataset of a list of tables.
pub(crate) fn list(lua: &Lua, records: Table) -> mlua::Result<AnyUserData> {
    let mut all = Vec::new();
    for (k, record) in (1..).zip(records.sequence_values::<Value>()) {
        let record = record_value::record(lua, &record?)?.or_else(|refused| {
            let message = format!("record {k}: {}", refused.message());
            Err(errors::argument(&host(lua)?, lua, "data.list", message, Some(Refused::hint().into())))
        })?;
        all.push(record);
    }
    lua.create_userdata(RecordSet(Arc::new(List::new(MEMORY, all))))
}

/// `native.pseudo(labelled, unlabelled, field, share, seed)`: mixes labelled records with those that a model labels.
pub(crate) fn pseudo(
    lua: &Lua,
    (labelled, unlabelled, field, share, seed): (AnyUserData, AnyUserData, String, f64, i64),
) -> mlua::Result<AnyUserData> {
    const OP: &str = "data.pseudo";
    let (labelled, unlabelled) =
        (labelled.borrow::<RecordSet>()?.0.clone(), unlabelled.borrow::<RecordSet>()?.0.clone());
    let set = or_fail(lua, OP, Pseudo::new(labelled, unlabelled, &field, share, seed as u64))?;
    lua.create_userdata(RecordSet(Arc::new(set)))
}

/// `native.unordered(op, records)`: the records beneath a shuffle, or these.
pub(crate) fn unshuffled(lua: &Lua, (op, records): (String, AnyUserData)) -> mlua::Result<AnyUserData> {
    let stage = op.rsplit([':', '.']).next().unwrap_or(&op);
    let set = or_fail(lua, &op, unordered(stage, &records.borrow::<RecordSet>()?.0))?;
    lua.create_userdata(RecordSet(set))
}

/// `native.generate(count, function, seed)`: makes a source of records that a function makes of their numbers.
pub(crate) fn generate(lua: &Lua, (count, function, seed): (u64, Function, i64)) -> mlua::Result<AnyUserData> {
    let f = workers::carry_maker(lua, "data.generate", &function, seed as u64)?;
    lua.create_userdata(RecordSet(Arc::new(Generate::new(count, f))))
}

/// `native.mix(parts, seed, live)`: mixes datasets by weights; a part is { name, set, weight }.
pub(crate) fn mix(lua: &Lua, (parts, seed, live): (Table, i64, bool)) -> mlua::Result<AnyUserData> {
    let mut all = Vec::new();
    for part in parts.sequence_values::<Table>() {
        let part = part?;
        let set = part.get::<AnyUserData>("set")?.borrow::<RecordSet>()?.0.clone();
        all.push((part.get("name")?, set, part.get("weight")?));
    }
    let mix = or_fail(lua, "data.mix", Mix::new(all, seed as u64, live))?;
    lua.create_userdata(RecordSet(Arc::new(mix)))
}
