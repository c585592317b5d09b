//! Parses the structure of typed lines: their possible readings, whether they are unfinished, and which locals must persist.
//!
//! A line is parsed as an expression first (`return LINE`), then as statements whose last part, after a `;` or a line
//! end, is an expression, then as statements. Each line is a separate chunk, so a `local` of its top level would be lost
//! with it. Such locals become plain assignments, and the prompt reports this.

use super::lexer::{Kind, Token, tokens};

/// The readings of a line, in the order in which they are tried. Positions of words and lines are preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readings {
    pub texts: Vec<String>,
    /// Names that were declared `local` at the top level.
    pub locals: Vec<String>,
}

pub fn readings(text: &str) -> Readings {
    let (text, locals) = keep_locals(text);
    let mut texts = vec![format!("return {text}")];
    if let Some(at) = last_part(&text) {
        texts.push(format!("{} return {}", &text[..at], &text[at..]));
    }
    texts.push(text);
    Readings { texts, locals }
}

/// Computes the nesting depth of each token in blocks and brackets; an opening token counts as outside.
fn depths(text: &str, list: &[Token]) -> Vec<i32> {
    let mut depth = 0;
    let mut out = Vec::with_capacity(list.len());
    // `while … do` and `for … do` open one block.
    let mut heads = 0;
    for t in list {
        let word = &text[t.start..t.end];
        let closes = matches!(word, "end" | "until" | ")" | "]" | "}") && t.kind != Kind::Comment;
        if closes && !matches!(t.kind, Kind::String { .. }) {
            depth -= 1;
        }
        out.push(depth);
        if matches!(t.kind, Kind::String { .. } | Kind::Comment) {
            continue;
        }
        match word {
            "while" | "for" => {
                heads += 1;
                depth += 1;
            }
            "do" if heads > 0 => heads -= 1,
            "do" | "function" | "if" | "repeat" | "(" | "[" | "{" => depth += 1,
            _ => {}
        }
    }
    out
}

/// Returns the start of the last statement, after a `;` or at the start of a line, if there is more than one.
fn last_part(text: &str) -> Option<usize> {
    let list: Vec<Token> = tokens(text).into_iter().filter(|t| t.kind != Kind::Comment).collect();
    let depth = depths(text, &list);
    let mut end = list.len();
    while end > 0 && &text[list[end - 1].start..list[end - 1].end] == ";" {
        end -= 1;
    }
    (1..end).rev().find_map(|k| {
        let behind = &text[list[k - 1].start..list[k - 1].end] == ";";
        let word = &text[list[k].start..list[k].end];
        // `end` closes a block, and is not an expression.
        if list[k].kind == Kind::Keyword && !["not", "nil", "true", "false", "function"].contains(&word) {
            return None;
        }
        // A bracket or a string on the next line continues the call before it.
        let begins = matches!(list[k].kind, Kind::Name | Kind::Keyword | Kind::Number);
        let new_line = begins && text[list[k - 1].end..list[k].start].contains('\n');
        (depth[k] == 0 && (behind || new_line)).then_some(list[k].start)
    })
}

/// Converts a top-level `local x = 1` to `x = 1`, and returns the names. `local x <const> = 1` is unchanged.
fn keep_locals(text: &str) -> (String, Vec<String>) {
    let list: Vec<Token> = tokens(text).into_iter().filter(|t| t.kind != Kind::Comment).collect();
    let depth = depths(text, &list);
    let word = |k: usize| list.get(k).map_or("", |t| &text[t.start..t.end]);
    let (mut out, mut names, mut done) = (String::new(), Vec::new(), 0);
    for k in 0..list.len() {
        if word(k) != "local" || list[k].kind != Kind::Keyword || depth[k] != 0 {
            continue;
        }
        out.push_str(&text[done..list[k].start]);
        done = list[k].end;
        if word(k + 1) == "function" {
            names.push(word(k + 2).to_string());
            continue;
        }
        let mut at = k + 1;
        let mut found = Vec::new();
        while list.get(at).is_some_and(|t| t.kind == Kind::Name) {
            found.push(word(at).to_string());
            at += 1;
            if word(at) != "," {
                break;
            }
            at += 1;
        }
        if found.is_empty() || word(at) == "<" || word(at - 1) == "," {
            out.push_str("local"); // an attribute, or not Lua: unchanged
            continue;
        }
        names.extend(found);
        if word(at) != "=" {
            let end = list[at - 1].end;
            out.push_str(&text[done..end]);
            out.push_str(" = nil");
            done = end;
        }
    }
    out.push_str(&text[done..]);
    (out, names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locals(text: &str) -> (String, Vec<String>) {
        let (text, names) = keep_locals(text);
        (text.split_whitespace().collect::<Vec<_>>().join(" "), names)
    }

    #[test]
    fn locals_of_the_top_level_stay() {
        let own = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        assert_eq!(locals("local x = 1"), ("x = 1".into(), own(&["x"])));
        assert_eq!(locals("local a, b = f()"), ("a, b = f()".into(), own(&["a", "b"])));
        assert_eq!(locals("local a, b"), ("a, b = nil".into(), own(&["a", "b"])));
        assert_eq!(locals("local x; x = 2"), ("x = nil; x = 2".into(), own(&["x"])));
        assert_eq!(locals("local function f() local y = 1 end"), ("function f() local y = 1 end".into(), own(&["f"])));
        assert_eq!(
            locals("for i = 1, 3 do local y = i end local z = 1"),
            ("for i = 1, 3 do local y = i end z = 1".into(), own(&["z"]))
        );
        assert_eq!(locals("while x do local y end"), ("while x do local y end".into(), own(&[])));
        assert_eq!(locals("repeat local y = 1 until y"), ("repeat local y = 1 until y".into(), own(&[])));
        assert_eq!(locals("local x <const> = 1"), ("local x <const> = 1".into(), own(&[])));
        assert_eq!(locals("s = 'local x = 1'"), ("s = 'local x = 1'".into(), own(&[])));
        assert_eq!(locals("f(function() local x = 1 end)"), ("f(function() local x = 1 end)".into(), own(&[])));
        assert_eq!(locals("local"), ("local".into(), own(&[])));
        assert_eq!(locals("local x,"), ("local x,".into(), own(&[])));
    }

    #[test]
    fn the_last_part_is_an_expression() {
        let of = |text: &str| last_part(text).map(|at| text[at..].to_string());
        assert_eq!(of("x = pl.randn({2, 3}); x"), Some("x".into()));
        assert_eq!(of("x = 1; y = 2;"), Some("y = 2;".into()));
        assert_eq!(of("x"), None);
        assert_eq!(of("f(a; b)"), None);
        assert_eq!(of("for i = 1, 3 do\n  f(i)\nend\nx + 1"), Some("x + 1".into()));
        assert_eq!(of("if a then b; c end"), None);
        assert_eq!(of("for i = 1, 3 do\n  print(i)\nend"), None);
        assert_eq!(of("do x = 1; end"), None);
        assert_eq!(of("repeat\n  x = 1\nuntil x"), None);
        assert_eq!(readings("x = 1; x").texts, ["return x = 1; x", "x = 1;  return x", "x = 1; x"]);
    }
}
