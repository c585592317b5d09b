//! Formats params: as JSON, as `--set` takes them, and as Lua writes them.

use perilune_lua::ParamValue;
use serde_json::{Map, Value};

/// Param names and values, in the order of the recipe.
pub type Params = [(String, ParamValue)];

/// Returns params as a JSON object.
pub fn to_json(values: &Params) -> Value {
    let one = |v: &ParamValue| match v {
        ParamValue::Int(i) => Value::from(*i),
        ParamValue::Float(f) => serde_json::Number::from_f64(*f).map_or(Value::Null, Value::Number),
        ParamValue::Bool(b) => Value::from(*b),
        ParamValue::Str(s) | ParamValue::Other(s) => Value::from(s.as_str()),
    };
    Value::Object(values.iter().map(|(k, v)| (k.clone(), one(v))).collect())
}

/// Returns params of a JSON object as `--set` would give them; nulls are left out.
pub fn as_given(params: &Map<String, Value>) -> Vec<(String, String)> {
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    params.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), text(v))).collect()
}

/// Formats a value as a Lua literal.
pub fn literal(v: &ParamValue) -> String {
    match v {
        ParamValue::Int(i) => i.to_string(),
        ParamValue::Float(f) => f.to_string(),
        ParamValue::Bool(b) => b.to_string(),
        ParamValue::Str(s) => format!("\"{s}\""),
        ParamValue::Other(s) => s.clone(),
    }
}

/// Lists the differences between two sets of params: `lr 0.01 -> 0.02`, `width 4` (added), `no width` (removed).
pub fn changes(before: &Params, after: &Params) -> Vec<String> {
    let of = |list: &Params, name: &str| list.iter().find(|p| p.0 == name).map(|p| p.1.clone());
    let mut out = Vec::new();
    for (name, value) in after {
        match of(before, name) {
            Some(was) if was == *value => {}
            Some(was) => out.push(format!("{name} {} -> {}", literal(&was), literal(value))),
            None => out.push(format!("{name} {}", literal(value))),
        }
    }
    out.extend(before.iter().filter(|(n, _)| of(after, n).is_none()).map(|(n, _)| format!("no {n}")));
    out
}
