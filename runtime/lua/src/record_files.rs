//! Opens files of records for Lua: a thin wrapper of `perilune_data::records`.

use crate::functions::host;
use crate::recipe_files::{fail, matching, text_arg};
use crate::records::RecordSet;
use crate::tokens::Files;
use mlua::{AnyUserData, IntoLua, Lua, MultiValue, Table, Value};
use perilune_data::records::{LineFormat, Lines};
use std::path::Path;
use std::sync::Arc;

/// `native.record_lines(paths, format, skip)`: opens files with a record on each line. Returns the dataset and, if lines that are no
/// records are skipped, how many there are.
pub(crate) fn lines(lua: &Lua, (paths, format, skip): (Table, String, bool)) -> mlua::Result<MultiValue> {
    let (op, format) = match format.as_str() {
        "text" => ("data.lines", LineFormat::Text),
        _ => ("data.jsonl", LineFormat::Json),
    };
    let host = host(lua)?;
    let (mut all, mut names) = (Vec::new(), Vec::new());
    for path in paths.sequence_values::<Value>() {
        let name = text_arg(&host, lua, op, "a path", &path?)?;
        all.extend(matching(&host, lua, op, &name)?);
        names.push(name);
    }
    let opened = Lines::open(host.policy.clone(), &all, format, &host.interrupt, &mut |file| {
        if all.len() == 1 {
            host.policy.record_file(&names[0], file);
        }
    });
    let mut lines = opened.map_err(|e| fail(&host, lua, op, e))?;
    if all.len() > 1 {
        let folder = all[0].parent().unwrap_or(Path::new(".")).to_path_buf();
        host.policy.record_folder(&names.join(", "), &folder, Arc::new(Files(all)));
    }
    let skipped = match skip {
        true => Some(lines.skip_malformed(&host.interrupt).map_err(|e| fail(&host, lua, op, e))?),
        false => None,
    };
    let set: AnyUserData = lua.create_userdata(RecordSet(Arc::new(lines)))?;
    Ok(MultiValue::from_iter([Value::UserData(set), skipped.into_lua(lua)?]))
}
