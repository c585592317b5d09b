//! Lays out tables for a terminal of any width: aligned columns, or a block of lines for each row where they do not fit.

use crate::terminal::{one_line, styled};
use console::measure_text_width;
use std::io::IsTerminal;

/// The space between two columns.
const GAP: usize = 2;
/// The indentation of the lines that belong to a row.
const INDENT: usize = 2;

/// A column by its title.
#[derive(Clone, Debug)]
pub struct Column {
    title: String,
    /// Numbers are aligned at the right.
    right: bool,
    /// It may be moved to a line below the row.
    may_wrap: bool,
}

/// Rows of text. An empty cell is left out of a block.
#[derive(Clone, Debug, Default)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

/// A text, and the code of its style where there is colour.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    style: Option<&'static str>,
}

impl Cell {
    /// Creates a cell in a style; `code` is the text between `ESC [` and `m`.
    pub fn styled(text: impl Into<String>, code: &'static str) -> Cell {
        let text: String = text.into();
        Cell { style: Some(code), ..Cell::from(text) }
    }

    fn show(&self, color: bool) -> String {
        match self.style.filter(|_| color) {
            Some(code) => styled(code, &self.text),
            None => self.text.clone(),
        }
    }

    fn width(&self) -> usize {
        measure_text_width(&self.text)
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell { text: one_line(&text), style: None }
    }
}

impl From<Option<String>> for Cell {
    fn from(text: Option<String>) -> Cell {
        Cell::from(text.unwrap_or_default())
    }
}

/// Returns the columns of the terminal, or of COLUMNS; none for a pipe or a file, whose lines may have any length.
pub fn width() -> Option<usize> {
    let told = std::env::var("COLUMNS").ok().and_then(|text| text.parse::<usize>().ok()).filter(|n| *n > 0);
    let terminal = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    terminal.map(|(w, _)| usize::from(w.0)).or(told)
}

impl Table {
    /// Adds a column of text.
    pub fn text_column(&mut self, title: &str) {
        self.add(title, false, false);
    }

    /// Adds a column of numbers.
    pub fn number_column(&mut self, title: &str) {
        self.add(title, true, false);
    }

    /// Adds a column that is moved to lines below the rows where the table is too wide.
    pub fn wrapping_column(&mut self, title: &str) {
        self.add(title, false, true);
    }

    fn add(&mut self, title: &str, right: bool, may_wrap: bool) {
        self.columns.push(Column { title: one_line(title), right, may_wrap });
    }

    /// Adds a row, with a cell for each column.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// Formats the table in lines of at most `width` columns, as far as its words allow.
    pub fn text(&self, width: Option<usize>, color: bool) -> String {
        let width = width.unwrap_or(usize::MAX);
        let all: Vec<usize> = (0..self.columns.len()).collect();
        let fixed: Vec<usize> = all.iter().copied().filter(|k| !self.columns[*k].may_wrap).collect();
        let lines = match (self.width_of(&all) <= width, self.width_of(&fixed) <= width) {
            (true, _) => self.aligned(&all, &[], width, color),
            (_, true) => {
                let rest: Vec<usize> = all.iter().copied().filter(|k| self.columns[*k].may_wrap).collect();
                self.aligned(&fixed, &rest, width, color)
            }
            _ => self.blocks(width, color),
        };
        lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    fn column_width(&self, k: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[k].width());
        cells.chain([measure_text_width(&self.columns[k].title)]).max().unwrap_or(0)
    }

    fn width_of(&self, columns: &[usize]) -> usize {
        let widths: usize = columns.iter().map(|k| self.column_width(*k)).sum();
        widths + GAP * columns.len().saturating_sub(1)
    }

    fn line(&self, columns: &[usize], cell: impl Fn(usize) -> (String, usize)) -> String {
        let mut out = String::new();
        for (i, k) in columns.iter().enumerate() {
            let (text, used) = cell(*k);
            let pad = " ".repeat(self.column_width(*k) - used);
            let gap = if i > 0 { " ".repeat(GAP) } else { String::new() };
            out += &if self.columns[*k].right { format!("{gap}{pad}{text}") } else { format!("{gap}{text}{pad}") };
        }
        out
    }

    fn aligned(&self, columns: &[usize], below: &[usize], width: usize, color: bool) -> Vec<String> {
        let title = |k: usize| {
            let text = Cell { text: self.columns[k].title.clone(), style: Some("2") };
            (text.show(color), text.width())
        };
        let mut out = vec![self.line(columns, title)];
        for row in &self.rows {
            out.push(self.line(columns, |k| (row[k].show(color), row[k].width())));
            out.extend(self.items(row, below, width, color));
        }
        out
    }

    fn blocks(&self, width: usize, color: bool) -> Vec<String> {
        let mut out = Vec::new();
        let rest: Vec<usize> = (1..self.columns.len()).collect();
        for row in &self.rows {
            out.extend(row.first().map(|cell| cell.show(color)));
            out.extend(self.items(row, &rest, width, color));
        }
        out
    }

    /// Lists cells with their titles in indented lines, wrapped between cells.
    fn items(&self, row: &[Cell], columns: &[usize], width: usize, color: bool) -> Vec<String> {
        let (mut lines, mut used) = (Vec::<String>::new(), usize::MAX);
        for k in columns.iter().filter(|k| !row[**k].text.is_empty()) {
            let title = &self.columns[*k].title;
            let item = if title.is_empty() { row[*k].show(color) } else { format!("{title} {}", row[*k].show(color)) };
            let gap = if title.is_empty() { 0 } else { 1 };
            let size = measure_text_width(title) + gap + row[*k].width();
            match lines.last_mut() {
                Some(line) if used.saturating_add(GAP + size) <= width => {
                    *line += &format!("{}{item}", " ".repeat(GAP));
                    used += GAP + size;
                }
                _ => {
                    lines.push(format!("{}{item}", " ".repeat(INDENT)));
                    used = INDENT + size;
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut t = Table::default();
        t.text_column("name");
        t.number_column("step");
        t.wrapping_column("lr");
        t.wrapping_column("width");
        for (name, step, lr, wide) in [("one", "5", "0.1", "4"), ("another", "1000", "", "128")] {
            t.row([name, step, lr, wide].map(|text| Cell::from(text.to_string())).to_vec());
        }
        t
    }

    #[test]
    fn a_table_fits_its_terminal() {
        let t = table();
        let wide = "name     step  lr   width\none         5  0.1  4\nanother  1000       128\n";
        assert_eq!(t.text(None, false), wide);
        assert_eq!(t.text(Some(25), false), wide);
        let middle = "name     step\none         5\n  lr 0.1  width 4\nanother  1000\n  width 128\n";
        assert_eq!(t.text(Some(24), false), middle);
        let narrow = "one\n  step 5\n  lr 0.1\n  width 4\nanother\n  step 1000\n  width 128\n";
        assert_eq!(t.text(Some(12), false), narrow);
        for width in 12..60 {
            let text = t.text(Some(width), false);
            assert!(text.lines().all(|line| measure_text_width(line) <= width), "{width}:\n{text}");
        }
    }

    #[test]
    fn cells_cannot_move_the_cursor() {
        let mut t = Table::default();
        t.text_column("name");
        t.row(vec![Cell::from("a\x1b[2J\nb".to_string())]);
        assert_eq!(t.text(None, false), "name\na\\u{1b}[2J\\nb\n");
        assert!(Cell::styled("x", "32").show(true).ends_with("0m") && Cell::styled("x", "32").show(false) == "x");
    }
}
