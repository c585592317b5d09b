//! Finds and opens the files that a recipe names, and words their errors with the recipe line.
//!
//! An address is resolved by the policy, which has its content downloaded and verified. A relative path is searched for beside the recipe and in the current directory. The policy of the command opens every file.

use crate::args::show;
use crate::boundary;
use crate::errors;
use crate::host::Host;
use crate::runtime::Place;
use crate::tensor::Tensor;
use mlua::{Lua, Value};
use perilune_core::HostTensor;
use perilune_policy::{Entry, Opened, Opener, Policy, Staged, is_address, near};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Converts a data error to one with the recipe line.
pub(crate) fn fail(host: &Rc<Host>, lua: &Lua, op: &str, e: perilune_data::Error) -> mlua::Error {
    if matches!(e, perilune_data::Error::Interrupted) {
        return boundary::recipe_line::raised(lua, e.to_string(), None, errors::Cause::Interrupted);
    }
    let refused = host.policy.is_granted_only() && matches!(&e, perilune_data::Error::Denied(e) if e.is_refusal());
    let text = e.to_string();
    let (message, hint) = match text.split_once("\n  hint: ") {
        Some((message, hint)) => (message.to_string(), Some(hint.to_string())),
        None => (text, None),
    };
    match refused {
        true => errors::refused(host, lua, op, message, hint),
        false => errors::argument(host, lua, op, message, hint),
    }
}

/// Like [`fail`], also in the states of workers.
pub(crate) fn fail_in_any_state(lua: &Lua, op: &str, e: perilune_data::Error) -> mlua::Error {
    match crate::functions::host(lua) {
        Ok(host) => fail(&host, lua, op, e),
        Err(_) => {
            let refused =
                matches!(&e, perilune_data::Error::Denied(perilune_policy::Error::Denied { params: false, .. }));
            let cause = if refused { errors::Cause::Refused } else { errors::Cause::Recipe };
            boundary::recipe_line::raised(lua, format!("{op}: {e}"), None, cause)
        }
    }
}

/// The folder in which a relative path is searched for first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    /// The recipe's folder, for data.
    Beside,
    /// The current directory, so that `pl.load` finds what `pl.save` wrote under the same path.
    Here,
}

/// The path by which the policy opens the file of an address; none for other paths.
fn downloaded(host: &Rc<Host>, lua: &Lua, op: &str, path: &str) -> mlua::Result<Option<PathBuf>> {
    if !is_address(path) {
        return Ok(None);
    }
    let fetched = host.policy.fetch(path, &|| host.interrupt.is_requested());
    fetched.map(Some).map_err(|e| match host.interrupt.is_requested() {
        true => fail(host, lua, op, perilune_data::Error::Interrupted),
        false => fail(host, lua, op, e.into()),
    })
}

/// Opens a file to read: an address, or beside the recipe or in the current directory, whichever has it first.
pub(crate) fn readable(host: &Rc<Host>, lua: &Lua, op: &str, path: &str, first: First) -> mlua::Result<Opened> {
    let file = match downloaded(host, lua, op, path)? {
        Some(name) => host.policy.open(&name).map_err(|e| fail(host, lua, op, e.into()))?,
        None => found(host, lua, op, "file", path, first, |policy, path| policy.open(path))?,
    };
    host.policy.record_file(path, &file);
    Ok(file)
}

/// Opens files of an index and records them as data.
#[derive(Debug)]
pub(crate) struct Recorded<'a>(pub &'a Policy);

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
    if is_address(path) {
        let hint = "list its files, each with its address and hash";
        return Err(errors::argument(host, lua, op, format!("{path} is an address of one file"), Some(hint.into())));
    }
    found(host, lua, op, "folder", path, First::Beside, |policy, path| policy.kind(path).map(|_| path.to_path_buf()))
}

/// The path of a file or a folder of data.
pub(crate) fn file_or_folder(host: &Rc<Host>, lua: &Lua, op: &str, path: &str) -> mlua::Result<PathBuf> {
    if let Some(name) = downloaded(host, lua, op, path)? {
        return Ok(name);
    }
    let kind = |policy: &Policy, path: &Path| policy.kind(path).map(|_| path.to_path_buf());
    found(host, lua, op, "file or folder", path, First::Beside, kind)
}

/// Lists the files that a path names: that of an address, itself, or those that match a pattern in its last part, sorted by name.
pub(crate) fn matching(host: &Rc<Host>, lua: &Lua, op: &str, path: &str) -> mlua::Result<Vec<PathBuf>> {
    if let Some(name) = downloaded(host, lua, op, path)? {
        return Ok(vec![name]);
    }
    let is_pattern = |part: &str| part.contains(['*', '?', '[']);
    let (parent, name) = path.rsplit_once('/').map_or(("", path), |(parent, name)| (parent, name));
    if !is_pattern(path) {
        return Ok(vec![found(host, lua, op, "file", path, First::Beside, |policy, path| {
            policy.open(path).map(|file| file.path().to_path_buf())
        })?]);
    }
    let bad = |message: String, hint: &str| errors::argument(host, lua, op, message, Some(hint.into()));
    if is_pattern(parent) {
        let message = format!("\"{path}\" is a pattern in the name of a folder");
        return Err(bad(message, "use * and ? in the last part only: data/train-*.bin"));
    }
    let pattern = glob::Pattern::new(name);
    let pattern = pattern.map_err(|e| bad(format!("\"{path}\" is no pattern: {}", e.msg), "as in data/train-*.bin"))?;
    let parent = match parent {
        "" if path.starts_with('/') => "/",
        "" => ".",
        parent => parent,
    };
    let place = lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
    for folder in [place.at(parent), PathBuf::from(parent)] {
        let Ok(entries) = host.policy.list(&folder) else { continue };
        let files = entries.into_iter().filter(|e| e.kind == perilune_policy::Kind::File);
        let mut names: Vec<String> = files.filter_map(|e| e.name.into_string().ok()).collect();
        names.retain(|name| pattern.matches(name));
        names.sort();
        if !names.is_empty() {
            return Ok(names.into_iter().map(|name| folder.join(name)).collect());
        }
    }
    // A folder that is missing or may not be read is the error, if it is one.
    folder(host, lua, op, parent)?;
    let hint = "paths start beside the recipe, then at the current directory";
    Err(bad(format!("no file of the folder \"{parent}\" matches \"{name}\""), hint))
}

pub(crate) fn found<T>(
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
        return Err(match host.policy.is_granted_only() {
            true => errors::refused(host, lua, op, message, Some(hint)),
            false => errors::argument(host, lua, op, message, Some(hint)),
        });
    }
    let named = here.is_absolute() || beside == here;
    let near = order.into_iter().find_map(|p| {
        let near = near(&*host.policy, p)?;
        Some(format!("did you mean \"{}{near}\"?", path.strip_suffix(p.file_name()?.to_str()?)?))
    });
    if let Some(e) = denied {
        // A relative path that is not there beside the recipe; whether it is elsewhere is not looked at.
        if named || host.policy.is_granted_only() || !host.policy.kind(&beside).is_err_and(|e| e.is_not_found()) {
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
pub(crate) fn writable(host: &Rc<Host>, lua: &Lua, op: &str, path: &str, endings: &[&str]) -> mlua::Result<Staged> {
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
