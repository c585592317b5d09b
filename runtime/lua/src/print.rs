//! Prints tensors: shape, dtype, device, then values as in NumPy, with large tensors summarised.

use crate::table;
use crate::tensor::{Ref, Tensor};
use mlua::Lua;
use perilune_core::{DType, HostTensor};

/// The number of elements above which a tensor is summarised.
const WHOLE: usize = 1000;
/// The number of elements shown at each end of a summarised dim.
const EDGE: usize = 3;
/// The width of a line; longer rows continue on the next one.
const LINE: usize = 76;

/// `tostring(x)`: evaluates it.
pub fn tensor(lua: &Lua, t: &Tensor) -> mlua::Result<String> {
    let device = t.host().engine.borrow().backend().name().to_string();
    let state = match t.what {
        Ref::State(id) => {
            let engine = t.host().engine.borrow();
            let path = engine.state_path(id).map_or_else(String::new, |path| format!(" {path}"));
            let mesh = engine.mesh();
            let placement = engine.state_info(id).ok().map(|info| info.placement).filter(|p| !p.is_replicated(&mesh));
            let placement = placement.map_or_else(String::new, |p| format!(" ({p})"));
            format!(" state{path}{placement}")
        }
        Ref::Node(_) => String::new(),
    };
    let value = table::read(lua, t)?;
    let state = match t.what {
        Ref::State(_) => state,
        Ref::Node(handle) => {
            let mut engine = t.host().engine.borrow_mut();
            let mesh = engine.mesh();
            let placement = engine.placement_of(handle).filter(|p| !p.is_replicated(&mesh));
            placement.map_or_else(String::new, |p| format!(" ({p})"))
        }
    };
    let head = format!("tensor {} {} {device}{state}", value.shape, value.dtype);
    if value.numel() == 0 {
        return Ok(head);
    }
    let body = values(&value);
    Ok(match value.shape.rank() {
        0 => format!("{head}   {body}"),
        1 if !body.contains('\n') => format!("{head}   {body}"),
        1 => format!("{head}\n {body}"),
        _ => format!("{head}\n{body}"),
    })
}

/// Formats only the values, one row per line.
pub fn values(t: &HostTensor) -> String {
    let summary = t.numel() > WHOLE;
    let mut shown = Vec::new();
    walk(t.shape.dims(), 0, summary, &mut |i| shown.push(i));
    let format = Format::of(t, &shown);
    let width = shown.iter().map(|&i| format.number(t, i).chars().count()).max().unwrap_or(1);
    let mut out = String::new();
    lines(t, t.shape.dims(), 0, summary, &format, width, &mut out);
    out.trim_end_matches('\n').to_string()
}

fn picks(n: usize, summary: bool) -> Vec<Option<usize>> {
    if summary && n > 2 * EDGE {
        (0..EDGE).map(Some).chain([None]).chain((n - EDGE..n).map(Some)).collect()
    } else {
        (0..n).map(Some).collect()
    }
}

fn walk(dims: &[usize], at: usize, summary: bool, f: &mut impl FnMut(usize)) {
    let Some((&n, rest)) = dims.split_first() else { return f(at) };
    let step: usize = rest.iter().product();
    for i in picks(n, summary).into_iter().flatten() {
        walk(rest, at + i * step, summary, f);
    }
}

fn lines(t: &HostTensor, dims: &[usize], at: usize, summary: bool, format: &Format, width: usize, out: &mut String) {
    match dims {
        [] => out.push_str(&format.number(t, at)),
        [n] => {
            let all = if summary && *n > 2 * EDGE { usize::MAX } else { LINE };
            let in_line = ((all - 1) / (width + 1)).max(1);
            for (k, i) in picks(*n, summary).into_iter().enumerate() {
                if k > 0 {
                    // Indent continuation lines, so that the start of the next row is visible.
                    out.push_str(if k % in_line == 0 { "\n  " } else { " " });
                }
                match i {
                    Some(i) => out.push_str(&format!("{:>width$}", format.number(t, at + i))),
                    None => out.push('…'),
                }
            }
            out.push('\n');
        }
        [n, rest @ ..] => {
            let step: usize = rest.iter().product();
            for (k, i) in picks(*n, summary).into_iter().enumerate() {
                if k > 0 && rest.len() > 1 {
                    out.push('\n');
                }
                match i {
                    Some(i) => {
                        if rest.len() == 1 {
                            out.push(' ');
                        }
                        lines(t, rest, at + i * step, summary, format, width, out);
                    }
                    None => out.push_str(" …\n"),
                }
            }
        }
    }
}

/// The common format of all numbers of a tensor.
enum Format {
    Bool,
    Int,
    /// Digits after the decimal point.
    Fixed(usize),
    Exp,
}

impl Format {
    fn of(t: &HostTensor, shown: &[usize]) -> Format {
        if t.dtype == DType::Bool {
            return Format::Bool;
        }
        if t.dtype.is_int() {
            return Format::Int;
        }
        let (mut low, mut high, mut whole) = (f64::INFINITY, 0f64, true);
        for &i in shown {
            let v = t.get_f64(i).abs();
            if v.is_finite() && v != 0.0 {
                low = low.min(v);
                high = high.max(v);
                whole &= v.fract() == 0.0;
            }
        }
        if high == 0.0 || (whole && high < 1e8) {
            return Format::Fixed(if high == 0.0 { 0 } else { 1 });
        }
        if high >= 1e6 || low < 1e-4 && high / low > 1e4 || high < 1e-3 { Format::Exp } else { Format::Fixed(4) }
    }

    fn number(&self, t: &HostTensor, i: usize) -> String {
        match self {
            Format::Bool => (t.get_i64(i) != 0).to_string(),
            Format::Int => t.get_i64(i).to_string(),
            Format::Fixed(n) => {
                let v = t.get_f64(i);
                if v.is_nan() {
                    "nan".into()
                } else if v.is_infinite() {
                    if v > 0.0 { "inf".into() } else { "-inf".into() }
                } else {
                    format!("{v:.n$}")
                }
            }
            Format::Exp => format!("{:.4e}", t.get_f64(i)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::Shape;

    #[test]
    fn long_rows_go_on_in_the_next_line() {
        let of = |dims: &[usize]| {
            let shape = Shape::of(dims);
            values(&HostTensor::from_i64(shape, &(0..shape.numel() as i64).collect::<Vec<_>>()))
        };
        assert_eq!(of(&[3]), "0 1 2");
        assert_eq!(of(&[2, 3]), " 0 1 2\n 3 4 5");
        let text = of(&[2, 40]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|l| l.len() <= LINE), "{text}");
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("  0  1 ") && lines[1].starts_with("  25 26 ") && lines[2].starts_with(" 40 41 "));
        assert!(of(&[1000]).lines().all(|l| l.len() <= LINE));
        assert_eq!(of(&[1001]), "   0    1    2 …  998  999 1000");
    }
}
