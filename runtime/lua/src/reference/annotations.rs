//! Parses the LuaLS annotations of the standard library: docs, parameters, results, classes, and the defaults of options.

use crate::loader::stdlib_files;

/// The annotations above a function.
#[derive(Default, Clone)]
pub struct Doc {
    pub text: Vec<String>,
    pub params: Vec<Named>,
    pub returns: Vec<Named>,
}

/// A parameter, a field, an option or a result. `name` is empty where it has none.
#[derive(Clone)]
pub struct Named {
    pub name: String,
    pub ty: String,
    pub text: String,
}

/// A class with its fields and the methods that its file defines.
pub struct Class {
    pub name: String,
    pub base: Option<String>,
    pub fields: Vec<Named>,
    pub methods: Vec<Method>,
}

pub struct Method {
    /// `set:batch(size, opts)` without the receiver: `batch(size, opts)`.
    pub name: String,
    pub arguments: Vec<String>,
    pub doc: Doc,
    /// The file and the lines of the function, for the defaults of its options.
    pub place: Place,
}

/// The lines `first..last` of a file of the standard library, counted from 0.
#[derive(Clone, Copy)]
pub struct Place {
    pub file: &'static str,
    pub first: usize,
    pub last: usize,
}

/// Splits `TYPE text` behind the type. Brackets nest, and a type goes on after `:` and `,` of a function type.
pub fn split_type(text: &str) -> (String, String) {
    let text = text.trim();
    let (mut depth, mut quoted, mut end) = (0i32, false, text.len());
    let mut before = ' ';
    for (k, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' | '{' | '[' | '<' if !quoted => depth += 1,
            ')' | '}' | ']' | '>' if !quoted => depth -= 1,
            ' ' if depth == 0 && !quoted && !matches!(before, ':' | ',' | '|') => {
                end = k;
                break;
            }
            _ => {}
        }
        before = c;
    }
    (text[..end].to_string(), text[end..].trim().trim_start_matches("# ").to_string())
}

/// Parses the comment directly above line `at`. Comments with two dashes count where a function has no others.
pub fn above(lines: &[&str], at: usize) -> Doc {
    let mut first = at;
    while first > 0 && lines[first - 1].trim_start().starts_with("--") {
        first -= 1;
    }
    let mut doc = Doc::default();
    for line in &lines[first..at] {
        let line = line.trim_start();
        let line = line.strip_prefix("---").or_else(|| line.strip_prefix("-- ")).unwrap_or("");
        match line.strip_prefix('@').map(|tag| tag.split_once(' ').unwrap_or((tag, ""))) {
            Some(("param", rest)) => {
                let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                let (mut ty, text) = split_type(rest);
                if name.ends_with('?') {
                    ty.push('?');
                }
                doc.params.push(Named { name: name.trim_end_matches('?').into(), ty, text });
            }
            Some(("return", rest)) => {
                let (ty, text) = split_type(rest);
                doc.returns.push(Named { name: String::new(), ty, text });
            }
            Some(_) => {}
            None => doc.text.push(line.to_string()),
        }
    }
    doc
}

/// Returns the names of the parameters of the function that begins in line `at`.
pub fn arguments(line: &str) -> Vec<String> {
    let Some((_, rest)) = line.split_once('(') else { return Vec::new() };
    let inside = rest.split(')').next().unwrap_or_default();
    inside.split(',').map(|a| a.trim().to_string()).filter(|a| !a.is_empty()).collect()
}

/// Returns all classes of the standard library. A class that is declared in several files has the members of all.
pub fn classes() -> Vec<Class> {
    let mut out: Vec<Class> = Vec::new();
    for (_, file, text) in stdlib_files() {
        let lines: Vec<&str> = text.lines().collect();
        let mut bound: Vec<(String, String)> = Vec::new();
        let mut open: Option<String> = None;
        for (k, line) in lines.iter().enumerate() {
            if let Some(rest) = line.strip_prefix("---@class ") {
                let rest = rest.trim_start_matches("(partial) ");
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || matches!(c, '.' | '_')).collect();
                let base = rest[name.len()..].strip_prefix(": ").and_then(|b| b.split_whitespace().next());
                if !out.iter().any(|c| c.name == name) {
                    let base = base.map(str::to_string);
                    out.push(Class { name: name.clone(), base, fields: Vec::new(), methods: Vec::new() });
                }
                open = Some(name);
            } else if let (Some(name), Some(rest)) = (&open, line.strip_prefix("---@field ")) {
                let (field, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                let (mut ty, text) = split_type(rest);
                if field.ends_with('?') {
                    ty.push('?');
                }
                let field = Named { name: field.trim_end_matches('?').into(), ty, text };
                if let Some(class) = out.iter_mut().find(|c| c.name == *name) {
                    class.fields.push(field);
                }
            } else if !line.starts_with("---") {
                let local = line.strip_prefix("local ").and_then(|l| l.split([' ', '=']).next());
                if let (Some(name), Some(local)) = (open.take(), local) {
                    bound.push((local.to_string(), name));
                }
                let Some(call) = line.strip_prefix("function ") else { continue };
                let Some((owner, rest)) = call.split_once(':') else { continue };
                let method = rest.split('(').next().unwrap_or_default();
                let Some((_, class)) = bound.iter().find(|(local, _)| local == owner) else { continue };
                let last = (k..lines.len()).find(|&i| lines[i] == "end").unwrap_or(k) + 1;
                let doc = above(&lines, k);
                if let Some(class) = out.iter_mut().find(|c| c.name == *class) {
                    let place = Place { file, first: k, last };
                    class.methods.push(Method { name: method.into(), arguments: arguments(line), doc, place });
                }
            }
        }
    }
    out
}

/// Returns the fields of a class and of those that it extends.
pub fn fields_of(classes: &[Class], name: &str) -> Vec<Named> {
    let Some(class) = classes.iter().find(|c| c.name == name) else { return Vec::new() };
    let mut out = class.base.as_deref().map(|base| fields_of(classes, base)).unwrap_or_default();
    out.extend(class.fields.iter().cloned());
    out
}

/// Splits a text at commas and semicolons outside of brackets and quotes.
fn parts(text: &str) -> Vec<&str> {
    split_at(text, &[',', ';'])
}

fn split_at<'a>(text: &'a str, marks: &[char]) -> Vec<&'a str> {
    let (mut out, mut depth, mut quoted, mut start) = (Vec::new(), 0i32, false, 0);
    for (k, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' | '{' | '[' | '<' if !quoted => depth += 1,
            ')' | '}' | ']' | '>' if !quoted => depth -= 1,
            c if marks.contains(&c) && depth == 0 && !quoted => {
                out.push(text[start..k].trim());
                start = k + 1;
            }
            _ => {}
        }
    }
    out.push(text[start..].trim());
    out.retain(|p| !p.is_empty());
    out
}

/// Returns the text inside the bracket that opens at byte `from`, which must be `{`.
fn braced(text: &str, from: usize) -> Option<&str> {
    let (mut depth, mut quoted) = (0i32, false);
    for (k, c) in text.get(from..)?.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '{' if !quoted => depth += 1,
            '}' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return text.get(from + 1..from + k);
                }
            }
            _ => {}
        }
    }
    None
}

/// Returns the options of a parameter: the fields of its table type, or of the class that it names. Meanings of an inline table are
/// those of the parameter's text, `name: meaning; name: meaning`.
pub fn options(classes: &[Class], param: &Named) -> Vec<Named> {
    let mut out = Vec::new();
    let union = param.ty.trim_end_matches('?');
    let union = union.strip_prefix('(').and_then(|u| u.strip_suffix(')')).unwrap_or(union);
    for part in split_at(union, &['|']) {
        if part.starts_with('{') {
            let Some(inside) = braced(part, 0) else { continue };
            for field in parts(inside) {
                let Some((name, ty)) = field.split_once(':') else { continue };
                let (name, ty) = (name.trim(), ty.trim());
                if name.starts_with('[') {
                    continue;
                }
                let ty = if name.ends_with('?') { format!("{ty}?") } else { ty.to_string() };
                let name = name.trim_end_matches('?').to_string();
                let text = meaning(&param.text, &name).unwrap_or_default();
                out.push(Named { name, ty, text });
            }
        } else if part.ends_with("Options") || part.ends_with("Call") {
            out.extend(fields_of(classes, part));
        }
    }
    out
}

/// Finds the meaning of an option in `name: meaning; other: meaning`.
fn meaning(text: &str, name: &str) -> Option<String> {
    text.split("; ").find_map(|part| {
        let (names, meaning) = part.split_once(": ")?;
        names.split(", ").any(|n| n.trim() == name).then(|| meaning.trim().to_string())
    })
}

/// Takes `X by default` out of a meaning. Returns X and the rest.
pub fn stated_default(text: &str) -> (Option<String>, String) {
    let mut found = None;
    let rest: Vec<&str> = parts(text)
        .into_iter()
        .filter(|part| match part.strip_suffix(" by default").map(|d| d.trim_start_matches("by default ")) {
            Some(value) if found.is_none() && !value.contains(' ') || part.ends_with("} by default") => {
                found = part.strip_suffix(" by default").map(str::to_string);
                false
            }
            _ => true,
        })
        .collect();
    match found {
        None => (None, text.to_string()),
        found => (found, rest.join("; ")),
    }
}

/// Whether a parameter's text consists of the meanings of its options.
pub fn lists_options(param: &Named, options: &[Named]) -> bool {
    !param.text.is_empty() && options.iter().any(|o| meaning(&param.text, &o.name).is_some())
}

/// Returns the default of each option, as the code says it: the tables of the calls of `check.options` in a function, or in a function of
/// the same file that it calls.
pub fn defaults(place: Place) -> Vec<(String, String)> {
    let Some((_, _, text)) = stdlib_files().iter().find(|(_, path, _)| *path == place.file) else { return Vec::new() };
    let lines: Vec<&str> = text.lines().collect();
    let body = lines.get(place.first..place.last.min(lines.len())).unwrap_or_default().join("\n");
    let mut out = own_defaults(&body);
    if out.is_empty() {
        for (k, line) in lines.iter().enumerate() {
            let Some(rest) = line.strip_prefix("local function ") else { continue };
            let name = rest.split('(').next().unwrap_or_default();
            if k == place.first || !body.contains(&format!("{name}(")) {
                continue;
            }
            let last = (k..lines.len()).find(|&i| lines[i] == "end").unwrap_or(k) + 1;
            out = own_defaults(&lines[k..last].join("\n"));
            if !out.is_empty() {
                break;
            }
        }
    }
    out
}

/// Splits a table of Lua into names and values that are literals.
fn pairs_of(table: Option<&str>) -> Vec<(String, String)> {
    let pairs = parts(table.unwrap_or_default()).into_iter().filter_map(|p| p.split_once('='));
    let literal = |value: &str| {
        value.starts_with(['"', '{', '-'])
            || value.starts_with(|c: char| c.is_ascii_digit())
            || matches!(value, "true" | "false")
    };
    pairs
        .map(|(name, value)| (name.trim().to_string(), value.trim().to_string()))
        .filter(|(_, value)| literal(value))
        .collect()
}

/// Returns the table that `local NAME = { … }` assigns in a function.
fn local_table<'a>(body: &'a str, name: &str) -> Option<&'a str> {
    let head = format!("local {name} = ");
    body.find(&format!("{head}{{")).and_then(|k| braced(body, k + head.len()))
}

fn own_defaults(body: &str) -> Vec<(String, String)> {
    // Optimizers pass `defaults` to the function that checks.
    let Some((_, call)) = body.split_once("check.options(") else { return pairs_of(local_table(body, "defaults")) };
    // The first two arguments are the name of the function and what was given.
    let mut depth = 0i32;
    let mut commas = call.char_indices().filter(|(_, c)| {
        match c {
            '(' | '{' => depth += 1,
            ')' | '}' => depth -= 1,
            ',' => return depth == 0,
            _ => {}
        }
        false
    });
    let Some((_, rest)) = commas.nth(1).map(|(k, _)| call.split_at(k + 1)) else { return Vec::new() };
    let rest = rest.trim_start();
    if rest.starts_with('{') {
        return pairs_of(braced(rest, 0));
    }
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    pairs_of(local_table(body, &name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_end_where_their_text_begins() {
        let split = |text| split_type(text);
        assert_eq!(split("integer the number of rows"), ("integer".into(), "the number of rows".into()));
        assert_eq!(split("{a?: integer, b: string}? a: one").0, "{a?: integer, b: string}?");
        assert_eq!(
            split("fun(a: table): perilune.Tensor, table? the loss").0,
            "fun(a: table): perilune.Tensor, table?"
        );
        assert_eq!(split("\"a b\"|\"c\" which").0, "\"a b\"|\"c\"");
    }

    #[test]
    fn options_have_types_meanings_and_defaults() {
        let lines = [
            "---Wraps a layer.",
            "---@param opts {rank?: integer, alpha?: number}? rank: of the adapter; alpha: its scale",
            "local function LoRA(linear, opts)",
        ];
        let doc = above(&lines, 2);
        let options = options(&[], &doc.params[0]);
        let shown: Vec<_> = options.iter().map(|o| (o.name.as_str(), o.ty.as_str(), o.text.as_str())).collect();
        assert_eq!(shown, [("rank", "integer?", "of the adapter"), ("alpha", "number?", "its scale")]);
        let body = "local o = check.options(\"nn.LoRA\", opts, { rank = 8, betas = { 0.9, 0.999 } })";
        assert_eq!(own_defaults(body), [("rank", "8"), ("betas", "{ 0.9, 0.999 }")].map(|(a, b)| (a.into(), b.into())));
        assert_eq!(arguments(lines[2]), ["linear", "opts"]);
        assert_eq!(stated_default("1e-3 by default"), (Some("1e-3".into()), String::new()));
        assert_eq!(stated_default("L2; { 0.9, 0.99 } by default"), (Some("{ 0.9, 0.99 }".into()), "L2".into()));
        assert_eq!(stated_default("the norm of all gradients"), (None, "the norm of all gradients".into()));
    }

    #[test]
    fn classes_of_the_library_have_fields_and_methods() {
        let all = classes();
        let set = all.iter().find(|c| c.name == "perilune.Set").unwrap();
        assert!(set.methods.iter().any(|m| m.name == "batch" && m.arguments == ["size", "opts"]));
        assert!(fields_of(&all, "perilune.Recipe").iter().any(|f| f.name == "accumulate" && !f.text.is_empty()));
    }
}
