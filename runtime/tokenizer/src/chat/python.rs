//! Writes template values as Python writes them: `json.dumps` and `str`.
//!
//! `tojson` of transformers is `json.dumps(x, ensure_ascii=False)`: separators ", " and ": ", insertion order, no HTML escapes.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// Values within each other; deeper ones are an error.
const DEEPEST: usize = 100;

/// How `tojson` is called.
#[derive(Debug)]
pub struct Layout {
    indent: Option<usize>,
    item: String,
    key: String,
    sort: bool,
    ascii: bool,
}

impl Layout {
    pub fn of(options: &Kwargs) -> Result<Layout, Error> {
        let indent: Option<usize> = options.get("indent")?;
        let separators: Option<Vec<String>> = options.get("separators")?;
        let (item, key) = match separators.as_deref() {
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => return Err(wrong("separators are two strings")),
            None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
        };
        let flag = |name: &str| options.get::<Option<bool>>(name).map(|v| v.unwrap_or(false));
        let layout = Layout { indent, item, key, sort: flag("sort_keys")?, ascii: flag("ensure_ascii")? };
        options.assert_all_used()?;
        Ok(layout)
    }
}

fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// `json.dumps(value)`.
pub fn json(value: &Value, layout: &Layout) -> Result<String, Error> {
    let mut out = String::new();
    write_json(value, layout, 0, &mut out)?;
    Ok(out)
}

fn new_line(layout: &Layout, depth: usize, out: &mut String) {
    if let Some(indent) = layout.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
    }
}

fn write_json(value: &Value, layout: &Layout, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(wrong(format!("a value has more than {DEEPEST} levels")));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match number(value).as_str() {
            "inf" => out.push_str("Infinity"),
            "-inf" => out.push_str("-Infinity"),
            "nan" => out.push_str("NaN"),
            other => out.push_str(other),
        },
        ValueKind::String => quote_json(&value.to_string(), layout.ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut empty = true;
            for item in value.try_iter()? {
                if !empty {
                    out.push_str(&layout.item);
                }
                empty = false;
                new_line(layout, depth + 1, out);
                write_json(&item, layout, depth + 1, out)?;
            }
            if !empty {
                new_line(layout, depth, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if layout.sort {
                keys.sort_by_key(Value::to_string);
            }
            for (k, key) in keys.iter().enumerate() {
                if k > 0 {
                    out.push_str(&layout.item);
                }
                new_line(layout, depth + 1, out);
                match key.kind() {
                    ValueKind::String => quote_json(&key.to_string(), layout.ascii, out),
                    _ => {
                        let mut text = String::new();
                        write_json(key, layout, depth + 1, &mut text)?;
                        quote_json(&text, layout.ascii, out);
                    }
                }
                out.push_str(&layout.key);
                write_json(&value.get_item(key)?, layout, depth + 1, out)?;
            }
            if !keys.is_empty() {
                new_line(layout, depth, out);
            }
            out.push('}');
        }
        other => return Err(wrong(format!("{other} is not JSON serializable"))),
    }
    Ok(())
}

fn quote_json(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' => out.write_str("\\\""),
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            '\u{8}' => out.write_str("\\b"),
            '\u{c}' => out.write_str("\\f"),
            c if (c as u32) < 0x20 => write!(out, "\\u{:04x}", c as u32),
            c if ascii && !c.is_ascii() => {
                c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))
            }
            c => out.write_char(c),
        };
    }
    out.push('"');
}

/// A number as `repr` writes it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    float(x)
}

/// A float as `repr` writes it: the fewest digits, an exponent below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_string();
    }
    let text = format!("{x:e}");
    let Some((digits, exponent)) = text.split_once('e').and_then(|(d, e)| Some((d, e.parse::<i32>().ok()?))) else {
        return text;
    };
    match exponent {
        -4..16 => {
            let plain = format!("{x}");
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        _ => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

/// `str(value)`, as a template prints it.
pub fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.to_string(),
        _ => {
            let mut out = String::new();
            repr(value, 0, &mut out);
            out
        }
    }
}

fn repr(value: &Value, depth: usize, out: &mut String) {
    if depth > DEEPEST {
        return out.push('…');
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quote_repr(&value.to_string(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (k, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if k > 0 { ", " } else { "" });
                repr(&item, depth + 1, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (k, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if k > 0 { ", " } else { "" });
                repr(&key, depth + 1, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), depth + 1, out);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// A string as `repr` quotes it: in single quotes, unless it has these and no double ones.
fn quote_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let _ = match c {
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => write!(out, "\\x{:02x}", c as u32),
            c => out.write_char(c),
        };
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_python_does() {
        let known = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.5, "1.5"),
            (100.0, "100.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e-5, "1.25e-05"),
            (1e-4, "0.0001"),
            (0.1, "0.1"),
            (1e300, "1e+300"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ];
        for (x, text) in known {
            assert_eq!(float(x), text);
        }
    }
}
