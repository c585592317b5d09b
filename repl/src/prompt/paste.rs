//! Splits pasted text into pieces that can run one by one: each is a command, or a complete Lua chunk.

use super::commands;
use perilune_lua::Console;

/// Splits a text; returns the pieces and whether the last one is unfinished.
pub fn pieces<'t>(console: &Console, text: &'t str) -> (Vec<&'t str>, bool) {
    cut(text, |lua| console.is_unfinished(lua))
}

fn cut(text: &str, unfinished: impl Fn(&str) -> bool) -> (Vec<&str>, bool) {
    let (mut out, mut start, mut open) = (Vec::new(), 0, false);
    let mut lines = text.split_inclusive('\n').peekable();
    let mut end = 0;
    while let Some(line) = lines.next() {
        end += line.len();
        let piece = &text[start..end];
        open = !piece.trim().is_empty() && !commands::is_command(piece) && unfinished(piece);
        let goes_on = |next: &&str| {
            !commands::is_command(piece) && !piece.trim().is_empty() && continues(next) && {
                let more = &text[start..end + next.len()];
                // For example, `x = 1` before `:mem` would parse as an unfinished method call.
                !unfinished(more) || next.trim_end().ends_with(['(', '{', ','])
            }
        };
        if open || lines.peek().is_some_and(goes_on) {
            continue;
        }
        out.push(piece.strip_suffix('\n').unwrap_or(piece));
        start = end;
    }
    if start < end {
        out.push(&text[start..end]);
    }
    (out, open)
}

/// Whether a line can only continue the one before: `:relu()`, `.weight`, `+ 1`, `and y`.
fn continues(line: &str) -> bool {
    let line = line.trim_start();
    let called = |rest: &str| {
        let name = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
        name.len() < rest.len() && name.starts_with(['(', '{', '"'])
    };
    match line.strip_prefix(':') {
        Some(rest) => called(rest),
        None => {
            line.starts_with(['.', '+', '*', '/', '%', '^', '<', '>', '='])
                || ["~=", "and ", "or "].iter().any(|w| line.starts_with(w))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_cpu::Cpu;
    use perilune_lua::{Runtime, RuntimeOptions};
    use std::rc::Rc;
    use std::sync::Arc;

    fn console() -> (Runtime, Console) {
        let print = Rc::new(|_: &str| ());
        let backend = Arc::new(Cpu::new(Some(1)));
        let runtime = Runtime::new(RuntimeOptions { backend, params: Vec::new(), strict: true, print }).unwrap();
        let console = Console::new(&runtime, "test").unwrap();
        (runtime, console)
    }

    #[test]
    fn pasted_text_is_cut_where_enter_would_be() {
        let (_runtime, console) = console();
        let of = |text: &'static str| pieces(&console, text);
        assert_eq!(of("x"), (vec!["x"], false));
        assert_eq!(of("x = 1\nx\nx + 1\n"), (vec!["x = 1", "x", "x + 1"], false));
        assert_eq!(of("x = 1\n:mem"), (vec!["x = 1", ":mem"], false));
        assert_eq!(of(":time x\n?x\n\ny"), (vec![":time x", "?x", "", "y"], false));
        assert_eq!(of("for i = 1, 2 do\n  f(i)\nend\nx"), (vec!["for i = 1, 2 do\n  f(i)\nend", "x"], false));
        assert_eq!(of("x\nfor i = 1, 2 do"), (vec!["x", "for i = 1, 2 do"], true));
        assert_eq!(of("s = [[\n:mem\n]]\ns"), (vec!["s = [[\n:mem\n]]", "s"], false));
        assert_eq!(of("y = x\n  :relu()\n  :sum()\ny"), (vec!["y = x\n  :relu()\n  :sum()", "y"], false));
        assert_eq!(of("y = x\n  :view(\n    2)\n:mem"), (vec!["y = x\n  :view(\n    2)", ":mem"], false));
        assert_eq!(of("y = 1\n  + 2\ny"), (vec!["y = 1\n  + 2", "y"], false));
        assert_eq!(of("x = = 1\ny"), (vec!["x = = 1", "y"], false));
        assert_eq!(of(""), (vec![], false));
    }
}
