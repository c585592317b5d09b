//! Renders a figure with characters.
//!
//! Curves are dots of the Braille block, eight to a character. Several curves differ in colour; without colour, and in ASCII,
//! each has its own symbol, at the resolution of whole characters.

use super::axis::{Axis, drawable, range};
use super::{Figure, Mark, Series, shrink, viridis};

/// The capabilities of the terminal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    pub color: bool,
    pub unicode: bool,
}

const COLORS: [u8; 6] = [36, 33, 35, 32, 34, 31];
const SIGNS: [char; 6] = ['*', '+', 'o', 'x', '#', '@'];
/// The bits of a Braille character, by row and column.
const BRAILLE: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];
const ASCII_SHADES: [char; 8] = ['.', ':', '-', '=', '+', '*', '#', '@'];
/// The most marks listed below a plot; more would fill the screen.
const MARKS: usize = 12;

/// Whether the locale has characters beyond ASCII; an unset locale counts as UTF-8.
pub fn utf8_locale() -> bool {
    let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let said = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG"));
    said.is_none_or(|v| v.to_lowercase().replace('-', "").contains("utf8"))
}

impl Look {
    fn paint(self, code: u8, text: &str) -> String {
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    fn dim(self, text: &str) -> String {
        self.paint(2, text)
    }

    /// Characters with the codes of their colours, 0 being none: neighbours of one colour share the code.
    fn row(self, cells: &[(char, u8)]) -> String {
        let runs = cells.chunk_by(|a, b| a.1 == b.1);
        let text = |run: &[(char, u8)]| run.iter().map(|c| c.0).collect::<String>();
        runs.map(|run| if run[0].1 == 0 { text(run) } else { self.paint(run[0].1, &text(run)) }).collect()
    }

    fn pick<T>(self, unicode: T, ascii: T) -> T {
        if self.unicode { unicode } else { ascii }
    }
}

/// Draws a figure, at most `cols` wide and `rows` high.
pub fn draw(figure: &Figure, cols: usize, rows: usize, look: Look) -> String {
    let (cols, rows) = (cols.clamp(24, 500), rows.clamp(6, 200));
    let lines = match figure {
        Figure::Lines { title, x_label, series, marks, log_y } => {
            curves(title, x_label, series, marks, *log_y, cols, rows, look)
        }
        Figure::Histogram { title, lo, hi, counts, left_out } => {
            histogram(title, (*lo, *hi), counts, *left_out, cols, rows, look)
        }
        Figure::Heat { title, rows: r, cols: c, values } => heat(title, *r, *c, values, cols, rows, look),
    };
    lines.iter().map(|l| l.trim_end()).collect::<Vec<_>>().join("\n")
}

/// Truncates a text to so many characters.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_string();
    }
    text.chars().take(width.saturating_sub(1)).chain(['~']).collect()
}

#[derive(Clone, Copy, Default)]
struct Cell {
    dots: u8,
    series: Option<usize>,
}

/// The area between the axes, in dots.
struct Canvas {
    cells: Vec<Cell>,
    cols: usize,
    rows: usize,
    /// Dots in a cell, across and down.
    fine: (usize, usize),
}

impl Canvas {
    fn dot(&mut self, x: i64, y: i64, series: usize) {
        let (x, y) = (x.max(0) as usize, y.max(0) as usize);
        let (col, row) = ((x / self.fine.0).min(self.cols - 1), (y / self.fine.1).min(self.rows - 1));
        let cell = &mut self.cells[row * self.cols + col];
        cell.dots |= BRAILLE[y % self.fine.1][x % self.fine.0];
        cell.series = Some(series);
    }

    fn line(&mut self, (x0, y0): (i64, i64), (x1, y1): (i64, i64), series: usize) {
        let n = (x1 - x0).abs().max((y1 - y0).abs()).max(1);
        for i in 0..=n {
            let at = |a: i64, b: i64| a + ((b - a) * i * 2 + n * (b - a).signum()) / (2 * n);
            self.dot(at(x0, x1), at(y0, y1), series);
        }
    }
}

/// Draws the axis on the left: a label where there is a tick.
fn left_axis(axis: &Axis, rows: usize, look: Look) -> Vec<String> {
    let mut labels = vec![String::new(); rows];
    for (v, label) in &axis.ticks {
        let row = ((1.0 - axis.at(*v)) * (rows - 1) as f64).round() as usize;
        if labels[row.min(rows - 1)].is_empty() {
            labels[row.min(rows - 1)] = label.clone();
        }
    }
    let width = labels.iter().map(String::len).max().unwrap_or(0);
    let stroke = |l: &str| if l.is_empty() { look.pick("│", "|") } else { look.pick("┤", "+") };
    labels.iter().map(|l| format!("{l:>width$} {}", look.dim(stroke(l)))).collect()
}

/// Draws the axis below and its labels; `indent` is where it begins.
fn bottom_axis(axis: &Axis, cols: usize, indent: usize, name: &str, look: Look) -> [String; 2] {
    let mut stroke = vec![look.pick('─', '-'); cols];
    let mut labels = vec![' '; indent + 1 + cols];
    let mut free = 0;
    for (v, label) in &axis.ticks {
        let at = ((axis.at(*v) * (cols - 1) as f64).round() as usize).min(cols - 1);
        stroke[at] = look.pick('┬', '+');
        let begin = (indent + 1 + at).saturating_sub(label.len() / 2).min(labels.len().saturating_sub(label.len()));
        if begin >= free {
            for (i, c) in label.chars().enumerate() {
                labels[begin + i] = c;
            }
            free = begin + label.len() + 2;
        }
    }
    let width = name.chars().count();
    // The name is at the right end, if the labels leave room.
    if width > 0 && labels.len() > width + 1 && labels[labels.len() - width - 1..].iter().all(|c| *c == ' ') {
        let begin = labels.len() - width;
        for (i, c) in name.chars().enumerate() {
            labels[begin + i] = c;
        }
    }
    let stroke: String = stroke.into_iter().collect();
    let corner = look.pick("└", "+");
    [format!("{}{}", " ".repeat(indent), look.dim(&format!("{corner}{stroke}"))), labels.into_iter().collect()]
}

/// The middle of a plot without numbers.
fn nothing(cols: usize) -> String {
    format!("{}no data", " ".repeat(cols.saturating_sub(7) / 2))
}

fn curves(
    title: &str,
    x_label: &str,
    series: &[Series],
    marks: &[Mark],
    log: bool,
    cols: usize,
    rows: usize,
    look: Look,
) -> Vec<String> {
    let shown: Vec<&Series> = series.iter().filter(|s| !s.faint).collect();
    let good = |p: &&(f64, f64)| drawable(p.0, false) && drawable(p.1, log);
    let points = || shown.iter().flat_map(|s| s.points.iter()).filter(good);
    let signs = shown.len() > 1 && !look.color || !look.unicode;
    let legend: Vec<String> = shown
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let sign = if signs { SIGNS[i % 6].to_string() } else { "━━".to_string() };
            format!("{} {}", look.paint(COLORS[i % 6], &sign), s.name)
        })
        .collect();
    let mut out = vec![cut(title, cols)];
    out.retain(|t| !t.is_empty());
    out.push(legend.join("   "));
    let (Some(xs), Some(ys)) = (range(points().map(|p| p.0)), range(points().map(|p| p.1))) else {
        out.push(nothing(cols));
        return out;
    };
    let height = rows.saturating_sub(out.len() + 2 + usize::from(!marks.is_empty())).max(3);
    let y = Axis::new(ys, log, 0.0, (height / 3).clamp(2, 8));
    let left = left_axis(&y, height, look);
    let indent = y.ticks.iter().map(|t| t.1.len()).max().unwrap_or(0) + 1;
    let width = cols.saturating_sub(indent + 1).max(8);
    let x = Axis::new(xs, false, 0.0, (width / 12).max(2));
    let fine = if signs { (1, 1) } else { (2, 4) };
    let mut canvas = Canvas { cells: vec![Cell::default(); width * height], cols: width, rows: height, fine };
    let (wide, high) = ((width * fine.0 - 1) as f64, (height * fine.1 - 1) as f64);
    let place = |p: &(f64, f64)| ((x.at(p.0) * wide).round() as i64, ((1.0 - y.at(p.1)) * high).round() as i64);
    for (i, s) in shown.iter().enumerate() {
        let mut before = None;
        for p in &s.points {
            let here = good(&p).then(|| place(p));
            if let Some(here) = here {
                canvas.line(before.unwrap_or(here), here, i);
            }
            before = here;
        }
    }
    let mut columns = vec![None; width];
    for (k, mark) in marks.iter().enumerate() {
        if (xs.0..=xs.1).contains(&mark.x) {
            columns[((x.at(mark.x) * (width - 1) as f64).round() as usize).min(width - 1)] = Some(k);
        }
    }
    if !marks.is_empty() {
        out.push(numbers_above(&columns, indent + 1));
    }
    for (row, axis) in left.iter().enumerate() {
        let cells: Vec<(char, u8)> = (0..width)
            .map(|col| match (canvas.cells[row * width + col], columns[col]) {
                (Cell { series: Some(s), dots }, _) => {
                    (if signs { SIGNS[s % 6] } else { braille(dots) }, COLORS[s % 6])
                }
                (_, Some(_)) => (look.pick('┊', ':'), 2),
                _ => (' ', 0),
            })
            .collect();
        out.push(format!("{axis}{}", look.row(&cells)));
    }
    out.extend(bottom_axis(&x, width, indent, x_label, look));
    for (k, mark) in marks.iter().enumerate().take(MARKS) {
        out.push(format!("{:>3}  {}", k + 1, cut(&mark.label, cols.saturating_sub(5))));
    }
    if marks.len() > MARKS {
        out.push(format!("     and {} more", marks.len() - MARKS));
    }
    out
}

/// Writes the numbers of marks above their columns, as far as there is room.
fn numbers_above(columns: &[Option<usize>], indent: usize) -> String {
    let mut line = " ".repeat(indent);
    for (col, mark) in columns.iter().enumerate() {
        let Some(k) = mark else { continue };
        let at = indent + col;
        if line.len() < at || col == 0 {
            line.push_str(&" ".repeat(at - line.len()));
            line.push_str(&(k + 1).to_string());
        }
    }
    line
}

fn braille(dots: u8) -> char {
    char::from_u32(0x2800 + u32::from(dots)).unwrap_or('?')
}

fn histogram(
    title: &str,
    ends: (f64, f64),
    counts: &[u64],
    left_out: u64,
    cols: usize,
    rows: usize,
    look: Look,
) -> Vec<String> {
    let total: u64 = counts.iter().sum();
    let mut about = vec![format!("{total} numbers")];
    if left_out > 0 {
        about.push(format!("{left_out} NaN or infinite"));
    }
    let mut out = vec![cut(title, cols), cut(&about.join(", "), cols)];
    out.retain(|t| !t.is_empty());
    let most = counts.iter().copied().max().unwrap_or(0);
    if most == 0 {
        out.push(nothing(cols));
        return out;
    }
    let height = rows.saturating_sub(out.len() + 2).max(3);
    let widest = crate::format::grouped(most).len() + 2;
    let room = cols.saturating_sub(widest).max(8);
    // All bins are equally wide. If there are more bins than columns, neighbours are summed.
    let bins = counts.len().min(room);
    let per = room / bins;
    let sums: Vec<u64> =
        (0..bins).map(|i| counts[i * counts.len() / bins..(i + 1) * counts.len() / bins].iter().sum()).collect();
    let most = sums.iter().copied().max().unwrap_or(1).max(1);
    let y = Axis::new((0.0, most as f64), false, 0.0, (height / 3).clamp(2, 6));
    let width = bins * per;
    let left = left_axis(&y, height, look);
    let indent = y.ticks.iter().map(|t| t.1.len()).max().unwrap_or(0) + 1;
    for (row, axis) in left.iter().enumerate() {
        let mut line = String::new();
        for n in &sums {
            // Eighths of a character that the column reaches above the lower edge of this row.
            let eighths = *n as f64 / most as f64 * (height * 8) as f64 - ((height - 1 - row) * 8) as f64;
            let mut full = (eighths.round().clamp(0.0, 8.0)) as usize;
            if *n > 0 && row + 1 == height {
                full = full.max(1);
            }
            let c = look.pick(EIGHTHS[full], if full >= 4 || full > 0 && row + 1 == height { '#' } else { ' ' });
            line.extend(std::iter::repeat_n(c, per));
        }
        out.push(format!("{axis}{}", look.paint(COLORS[0], line.trim_end())));
    }
    let x = Axis::new(ends, false, 0.0, (width / 10).max(2));
    out.extend(bottom_axis(&x, width, indent, "", look));
    out
}

fn heat(title: &str, r: usize, c: usize, values: &[f64], cols: usize, rows: usize, look: Look) -> Vec<String> {
    let mut out = vec![cut(title, cols)];
    out.retain(|t| !t.is_empty());
    let Some((lo, hi)) = range(values.iter().copied().filter(|v| drawable(*v, false))) else {
        out.push(nothing(cols));
        return out;
    };
    // Half a character is a pixel where there is colour; else a pixel is a character, or two of them, nearly square.
    let halves = look.color && look.unicode;
    let high = rows.saturating_sub(out.len() + 1).max(3);
    let wide = if !halves && c * 2 <= cols { 2 } else { 1 };
    let (r, c, values) = shrink(r, c, values, (if halves { high * 2 } else { high }, cols / wide));
    let share = |v: f64| (v - lo) / (hi - lo);
    let ink = |v: f64, what: u8| {
        let (red, green, blue) = viridis(share(v));
        format!("\x1b[{what};2;{red};{green};{blue}m")
    };
    let shades: &[char] = look.pick(&SHADES[..], &ASCII_SHADES[..]);
    let sign = |v: f64| match v.is_nan() {
        true => ' ',
        false => shades[((share(v) * shades.len() as f64) as usize).min(shades.len() - 1)],
    };
    for row in (0..r).step_by(if halves { 2 } else { 1 }) {
        let mut line = String::new();
        for col in 0..c {
            let top = values[row * c + col];
            if halves {
                let below = if row + 1 < r { values[(row + 1) * c + col] } else { f64::NAN };
                match (top.is_nan(), below.is_nan()) {
                    (true, true) => line.push(' '),
                    (false, true) => line.push_str(&format!("{}▀\x1b[0m", ink(top, 38))),
                    (true, false) => line.push_str(&format!("{}▄\x1b[0m", ink(below, 38))),
                    (false, false) => line.push_str(&format!("{}{}▀\x1b[0m", ink(top, 38), ink(below, 48))),
                }
            } else if look.color && !top.is_nan() {
                line.push_str(&format!("{}{}\x1b[0m", ink(top, 48), " ".repeat(wide)));
            } else {
                line.extend(std::iter::repeat_n(sign(top), wide));
            }
        }
        out.push(line);
    }
    let steps = cols.saturating_sub(18).min(10);
    let scale: String = (0..steps)
        .map(|i| {
            let v = lo + (hi - lo) * (i as f64 + 0.5) / steps as f64;
            if look.color { format!("{} \x1b[0m", ink(v, 48)) } else { sign(v).to_string() }
        })
        .collect();
    out.push(format!("{} {scale} {}", crate::format::short(lo), crate::format::short(hi)));
    out
}
