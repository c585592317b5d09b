//! Generates texts from the op registry and the annotations of the standard library: `help`, the editor stubs, the reference.

mod annotations;
mod library;
mod pages;

pub use pages::{Page, pages};

use crate::args::{self, signature};
use mlua::{Lua, Value};
use perilune_core::error::did_you_mean;
use perilune_core::ops::{self, Op, Param, Results, Ty};
use std::fmt::Write;

/// Formats `cross_entropy(logits, target, [{ignore_index, …}])` and the doc.
pub fn help(_: &Lua, name: Value) -> mlua::Result<String> {
    let Value::String(name) = name else {
        let names: Vec<&str> = own().map(|f| f.name).chain(public().map(|o| o.name)).collect();
        return Ok(names.join(" "));
    };
    let name = name.to_string_lossy();
    let short = name.trim_start_matches("pl.");
    match ops::by_name(short).filter(|o| !o.sig.is_empty()) {
        Some(op) => Ok(format!("{}\n  {}", args::usage(op), op.doc.replace('\n', "\n  "))),
        None => Ok(own().find(|f| f.name == short).map_or_else(
            || {
                let near = did_you_mean(short, public().map(|o| o.name).chain(own().map(|f| f.name)));
                let near = near.map(|n| format!(" Did you mean {n}?")).unwrap_or_default();
                format!("no op is called {name}.{near}")
            },
            |f| format!("{}\n  {}", f.call, f.doc.join("\n  ")),
        )),
    }
}

/// A function that is not an op, parsed from the head of the stubs.
struct Own {
    /// `tensor`, or `item` of `Tensor:item`.
    name: &'static str,
    call: &'static str,
    doc: Vec<&'static str>,
    /// The name and type of each parameter.
    params: Vec<(&'static str, &'static str)>,
}

fn own() -> impl Iterator<Item = Own> {
    let (mut doc, mut params) = (Vec::new(), Vec::new());
    STUBS_HEAD.lines().filter_map(move |line| {
        if let Some(text) = line.strip_prefix("---@param ") {
            params.extend(text.split_once(' '));
        } else if let Some(text) = line.strip_prefix("---").filter(|t| !t.starts_with('@')) {
            doc.push(text);
        } else if !line.starts_with("---") {
            let (doc, params) = (std::mem::take(&mut doc), std::mem::take(&mut params));
            let call = line.strip_prefix("function ")?.trim_end_matches(" end");
            let name = call.split(['.', ':', '(']).nth(1)?;
            return Some(Own { name, call, doc, params });
        }
        None
    })
}

fn public() -> impl Iterator<Item = &'static Op> {
    ops::all().iter().copied().filter(|o| !o.sig.is_empty())
}

fn lua_type(ty: &Ty) -> String {
    match ty {
        Ty::Tensor => "perilune.Tensor".into(),
        Ty::Operand => "perilune.Tensor|number|boolean".into(),
        Ty::Tensors => "perilune.Tensor[]".into(),
        Ty::Int => "perilune.Whole".into(),
        Ty::Float | Ty::Number => "number".into(),
        Ty::Bool => "boolean".into(),
        Ty::Ints => "perilune.Whole|perilune.Whole[]".into(),
        Ty::IntsOr(words) => format!("{}|{}", lua_type(&Ty::Ints), lua_type(&Ty::Str(words.clone()))),
        Ty::DType => "perilune.DType".into(),
        Ty::Str(words) if words.is_empty() => "string".into(),
        Ty::Str(words) => words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join("|"),
    }
}

fn results(results: Results) -> String {
    let one = "---@return perilune.Tensor";
    match results {
        Results::One => format!("{one}\n"),
        Results::OneOrTwo => format!("{one}\n{one}?\n"),
        Results::Named(names) => names.iter().map(|name| format!("{one} {name}\n")).collect(),
        // At least one, so that no editor assumes nil.
        Results::Several => format!("{one}\n{one} ...\n"),
    }
}

fn overload_results(results: Results) -> String {
    let one = "perilune.Tensor";
    match results {
        Results::One => one.into(),
        Results::OneOrTwo => format!("{one}, {one}?"),
        Results::Named(names) => vec![one; names.len()].join(", "),
        Results::Several => format!("{one}, {one} ..."),
    }
}

/// Returns the documented functions that are not ops, from the stubs.
pub const STUBS_HEAD: &str = include_str!("../stubs_head.lua");

/// Generates a LuaCATS file for lua-language-server and similar tools.
pub fn stubs() -> String {
    let mut out = String::from(STUBS_HEAD);
    for op in public() {
        let sig = signature(op);
        for method in [false, true] {
            if method && !sig.is_method {
                continue;
            }
            out.push('\n');
            for line in op.doc.lines() {
                let _ = writeln!(out, "---{line}");
            }
            let mut names = Vec::new();
            for (k, p) in sig.params[..sig.positional].iter().enumerate() {
                if method && k == 0 {
                    continue;
                }
                let _ = writeln!(out, "---@param {}{} {}", p.name, if p.optional { "?" } else { "" }, lua_type(&p.ty));
                names.push(p.name);
            }
            // A trailing list may be passed as separate arguments.
            let one_by_one = sig.params[..sig.positional].last().is_some_and(|p| p.ty == Ty::Ints);
            let options = &sig.params[sig.positional..];
            let fields = (!options.is_empty()).then(|| {
                let one = |p: &Param| format!("{}{}: {}", p.name, if p.optional { "?" } else { "" }, lua_type(&p.ty));
                format!("{{{}}}", options.iter().map(one).collect::<Vec<_>>().join(", "))
            });
            if let Some(fields) = &fields {
                let _ = writeln!(out, "---@param options? {fields}");
                names.push("options");
            }
            if one_by_one {
                out.push_str("---@param ... perilune.Whole\n");
                names.push("...");
            }
            // Options may replace an optional argument: `pl.arange(n, { dtype = "f64" })`.
            let from = usize::from(method);
            if let (Some(fields), true) = (&fields, from <= sig.positional) {
                let required = sig.params[from..sig.positional].iter().position(|p| p.optional);
                for k in required.map_or(0..0, |k| from + k..sig.positional) {
                    let mut params: Vec<String> =
                        sig.params[from..k].iter().map(|p| format!("{}: {}", p.name, lua_type(&p.ty))).collect();
                    if method {
                        params.insert(0, "self: perilune.Tensor".into());
                    }
                    params.push(format!("options: {fields}"));
                    let _ = writeln!(out, "---@overload fun({}): {}", params.join(", "), overload_results(op.results));
                }
            }
            out.push_str(&results(op.results));
            let owner = if method { "Tensor:" } else { "pl." };
            let _ = writeln!(out, "function {owner}{}({}) end", op.name, names.join(", "));
        }
    }
    out.push_str("\nreturn pl\n");
    out
}

/// The two functions on files that are not ops.
const FILES: &str = "
## load

    load(path)

path string -> {name = tensor} for .safetensors, .npz and the index of a sharded model (.safetensors.index.json), a tensor for
.npy; on the CPU, with the dtypes of the file.
A relative path is searched for in the current directory, where `pl.save` writes, then in the recipe's folder.
Errors: a missing file (with the nearest name), another extension, a broken file, an unsupported dtype.

## save

    save(path, tensors)

path string, tensors {name = tensor} for .safetensors and .npz, a tensor or a table of one for .npy -> nothing. A relative
path starts at the current directory. Writing is atomic and replaces an existing file.
Errors: an entry that is not a tensor, another extension, a missing folder.
";

#[cfg(test)]
mod tests {
    use super::STUBS_HEAD;

    /// The type checker knows only what the stubs declare.
    #[test]
    fn stubs_declare_every_module() {
        for name in crate::loader::FIELDS {
            let (field, function) = (format!("\n---@field {name} "), format!("\nfunction pl.{name}("));
            assert!(STUBS_HEAD.contains(&field) || STUBS_HEAD.contains(&function), "stubs_head.lua lacks pl.{name}");
        }
    }
}
