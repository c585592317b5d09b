//! Opens files of records for Lua: a thin wrapper of `perilune_data::records`.

use crate::functions::host;
use crate::recipe_files::{fail, matching, text_arg};
use crate::records::RecordSet;
use crate::tokens::Files;
use mlua::{IntoLua, Lua, MultiValue, Table, Value};
use perilune_core::cache_folder::cache_folder;
use perilune_data::records::{
    Arrow, ColumnType, Dataset, JsonArray, LineFormat, Lines, Opening, Parquet, Table as Rows, TableFormat,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `native.record_file(op, paths, options)`: opens files by the function of the library that `op` names. Returns the dataset and, if lines
/// that are no records are skipped, how many there are.
pub(crate) fn open(lua: &Lua, (op, paths, options): (String, Table, Table)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let (mut all, mut names) = (Vec::new(), Vec::new());
    for path in paths.sequence_values::<Value>() {
        let name = text_arg(&host, lua, &op, "a path", &path?)?;
        all.extend(matching(&host, lua, &op, &name)?);
        names.push(name);
    }
    // A bound that is no size is an error before the work, not a bound that is ignored.
    if let Some(cache) = cache_folder() {
        perilune_data::cache::limit(&cache).map_err(|e| fail(&host, lua, &op, e))?;
    }
    let skip = options.get::<Option<bool>>("skip")?.unwrap_or(false);
    let mut observe = |file: &_| {
        if all.len() == 1 {
            host.policy.record_file(&names[0], file);
        }
    };
    let opening = Opening {
        opener: host.policy.clone(),
        cache: cache_folder(),
        interrupt: &host.interrupt,
        observe: &mut observe,
    };
    let made = dataset(&op, &all, &options, skip, opening)?.map_err(|e| fail(&host, lua, &op, e))?;
    if all.len() > 1 {
        let folder = all[0].parent().unwrap_or(Path::new(".")).to_path_buf();
        host.policy.record_folder(&names.join(", "), &folder, Arc::new(Files(all)));
    }
    let set = lua.create_userdata(RecordSet(made.0))?;
    Ok(MultiValue::from_iter([Value::UserData(set), made.1.into_lua(lua)?]))
}

type Made = perilune_data::Result<(Arc<dyn Dataset>, Option<u64>)>;

fn dataset(op: &str, paths: &[PathBuf], options: &Table, skip: bool, opening: Opening<'_>) -> mlua::Result<Made> {
    let columns: Option<Vec<String>> = options.get("columns")?;
    let whole = |set: Arc<dyn Dataset>| (set, None);
    Ok(match op {
        "data.parquet" => Parquet::open(paths, columns.as_deref(), opening).map(|set| whole(Arc::new(set))),
        "data.arrow" => Arrow::open(paths, columns.as_deref(), opening).map(|set| whole(Arc::new(set))),
        "data.json" => {
            let field: Option<String> = options.get("field")?;
            let interrupt = opening.interrupt;
            JsonArray::open(paths, field.as_deref(), opening).and_then(|mut set| {
                let skipped = if skip { Some(set.skip_malformed(interrupt)?) } else { None };
                Ok((Arc::new(set) as Arc<dyn Dataset>, skipped))
            })
        }
        "data.table" => {
            let delimiter = options.get::<mlua::LuaString>("delimiter")?.as_bytes().first().copied().unwrap_or(b',');
            let mut types = Vec::new();
            for pair in options.get::<Table>("types")?.pairs::<String, String>() {
                let (name, kind) = pair?;
                let kind = match kind.as_str() {
                    "integer" => ColumnType::Integer,
                    "number" => ColumnType::Number,
                    _ => ColumnType::Text,
                };
                types.push((name, kind));
            }
            types.sort_by(|a, b| a.0.cmp(&b.0));
            let format = TableFormat { delimiter, columns, types, skip_malformed: skip };
            Rows::open(paths, format, opening).map(|set| {
                let skipped = set.skipped();
                (Arc::new(set) as Arc<dyn Dataset>, skipped)
            })
        }
        op => {
            let format = if op == "data.lines" { LineFormat::Text } else { LineFormat::Json };
            let interrupt = opening.interrupt;
            Lines::open(paths, format, opening).and_then(|mut lines| {
                let skipped = if skip { Some(lines.skip_malformed(interrupt)?) } else { None };
                Ok((Arc::new(lines) as Arc<dyn Dataset>, skipped))
            })
        }
    })
}
