//! Implements `:plot X`: draws a curve, a histogram or a heat map in the terminal or into a file.
//!
//! The shape of X selects the drawing: a list of numbers is a curve, two of them curves on one axis, a matrix a heat map, and
//! anything of more dims, or given with `hist`, a histogram.

use crate::failure::{Failure, disk};
use crate::plot::{Figure, Series};
use perilune_core::HostTensor;
use perilune_lua::Console;
use std::path::PathBuf;

/// Rows of a drawing.
const ROWS: usize = 16;
/// A matrix of at most this many rows is drawn as curves.
const CURVES: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Style {
    Lines,
    Histogram,
    Heat,
}

/// Parses the style, the expression and the file of a command.
fn parse(text: &str) -> Result<(Option<Style>, &str, Option<PathBuf>), String> {
    let (text, file) = match text.rsplit_once("->") {
        Some((text, file)) if !file.contains(['(', ')', '{', '}']) => {
            let file = PathBuf::from(file.trim().trim_matches(['"', '\'']));
            match file.extension().and_then(|e| e.to_str()) {
                Some("svg" | "png") => (text, Some(file)),
                _ => return Err(format!(":plot writes .svg and .png files, not \"{}\"", file.display())),
            }
        }
        _ => (text, None),
    };
    let text = text.trim();
    let (style, rest) = match text.split_once(char::is_whitespace) {
        Some(("lines" | "line", rest)) => (Some(Style::Lines), rest),
        Some(("hist" | "histogram", rest)) => (Some(Style::Histogram), rest),
        Some(("heat", rest)) => (Some(Style::Heat), rest),
        _ => (None, text),
    };
    // A variable may have such a name: `hist = …`, `:plot hist`.
    match rest.trim() {
        "" => Err(":plot needs a tensor or a list of numbers, as in :plot x".into()),
        rest => Ok((style, rest, file)),
    }
}

fn values(t: &HostTensor) -> Vec<f64> {
    (0..t.numel()).map(|i| t.get_f64(i)).collect()
}

fn curve(name: &str, values: &[f64]) -> Series {
    Series::new(name, values.iter().enumerate().map(|(i, v)| (i as f64, *v)).collect())
}

fn figure(style: Option<Style>, title: &str, list: &[HostTensor]) -> Result<Figure, String> {
    let no = |t: &str| Err(format!(":plot: {t}"));
    let Some(first) = list.first() else { return no("there is nothing to draw: the expression gives no value") };
    if list.iter().any(|t| t.numel() == 0) {
        return no("there is nothing to draw: the tensor is empty");
    }
    let dims: Vec<usize> = first.shape.dims().iter().copied().filter(|d| *d != 1).collect();
    let style = style.unwrap_or(match dims.len() {
        _ if list.len() > 1 => Style::Lines,
        0 | 1 => Style::Lines,
        2 if dims[0] <= CURVES => Style::Lines,
        2 => Style::Heat,
        _ => Style::Histogram,
    });
    match style {
        Style::Histogram => {
            let all: Vec<f64> = list.iter().flat_map(values).collect();
            Ok(Figure::histogram(title, &all, None))
        }
        Style::Heat => match dims[..] {
            [rows, cols] if list.len() == 1 => Ok(Figure::heat(title, rows, cols, values(first))),
            _ => no(&format!("a heat map needs one matrix; the shape is {}", first.shape)),
        },
        Style::Lines => {
            let mut series = Vec::new();
            for (k, t) in list.iter().enumerate() {
                let dims: Vec<usize> = t.shape.dims().iter().copied().filter(|d| *d != 1).collect();
                let all = values(t);
                match dims[..] {
                    [rows, cols] if rows <= 8 => {
                        series.extend((0..rows).map(|r| curve(&format!("[{r}]"), &all[r * cols..(r + 1) * cols])));
                    }
                    [] | [_] => {
                        series.push(curve(&if list.len() > 1 { (k + 1).to_string() } else { title.into() }, &all))
                    }
                    _ => return no(&format!("lines need one dim, or up to 8 rows; the shape is {}", t.shape)),
                }
            }
            // One curve is named like the drawing.
            Ok(Figure::lines(if series.len() > 1 { title } else { "" }, "index", series))
        }
    }
}

/// Evaluates and draws an expression; returns the drawing, or a line about the file.
pub fn plot(console: &Console, text: &str, color: bool) -> Result<String, Failure> {
    let (style, expression, file) = parse(text).map_err(Failure::Usage)?;
    let list = console.numbers(expression)?;
    let figure = figure(style, expression, &list).map_err(Failure::Usage)?;
    let Some(file) = file else {
        let cols = columns().clamp(30, 120);
        return Ok(figure.text(cols, ROWS, color).trim_end().to_string());
    };
    let bytes = if file.extension().is_some_and(|e| e == "svg") { figure.svg().into_bytes() } else { figure.png() };
    std::fs::write(&file, &bytes).map_err(disk("write", &file))?;
    Ok(format!("{} written, {} bytes", file.display(), bytes.len()))
}

/// Returns the width of the terminal, or 80 without a terminal.
fn columns() -> usize {
    let term = console::Term::stdout();
    if term.is_term() { usize::from(term.size().1) } else { 80 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::Shape;

    fn tensor(dims: &[usize]) -> HostTensor {
        let shape = Shape::of(dims);
        HostTensor::from_i64(shape, &(0..shape.numel() as i64).collect::<Vec<_>>())
    }

    #[test]
    fn the_plot_command_parses_its_arguments() {
        let of = |t| parse(t).map(|(s, e, f)| (s, e.to_string(), f.map(|f| f.display().to_string())));
        assert_eq!(of("x"), Ok((None, "x".into(), None)));
        assert_eq!(
            of("hist x:view(-1) -> a.svg"),
            Ok((Some(Style::Histogram), "x:view(-1)".into(), Some("a.svg".into())))
        );
        assert_eq!(of("hist"), Ok((None, "hist".into(), None)));
        assert_eq!(of("lines a, b -> out/b.png"), Ok((Some(Style::Lines), "a, b".into(), Some("out/b.png".into()))));
        assert!(of("x -> a.txt").is_err_and(|e| e.contains(".svg and .png")));
        assert!(of("").is_err() && of("-> a.svg").is_err());
    }

    #[test]
    fn the_kind_of_plot_follows_from_the_shape() {
        let kind = |dims: &[usize]| match figure(None, "x", &[tensor(dims)]) {
            Ok(Figure::Lines { series, .. }) => format!("lines {}", series.len()),
            Ok(Figure::Histogram { .. }) => "histogram".into(),
            Ok(Figure::Heat { rows, cols, .. }) => format!("heat {rows} {cols}"),
            Err(e) => e,
        };
        assert_eq!(kind(&[5]), "lines 1");
        assert_eq!(kind(&[]), "lines 1");
        assert_eq!(kind(&[3, 5]), "lines 3");
        assert_eq!(kind(&[1, 6, 5]), "heat 6 5");
        assert_eq!(kind(&[2, 3, 4]), "histogram");
        assert!(kind(&[0]).contains("empty"));
        assert!(figure(Some(Style::Heat), "x", &[tensor(&[3])]).is_err_and(|e| e.contains("one matrix")));
        assert!(figure(Some(Style::Lines), "x", &[tensor(&[9, 9])]).is_err_and(|e| e.contains("8 rows")));
    }
}
