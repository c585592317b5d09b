//! Normalizes PTX: symbols become numbers, comments and line tables are removed.
//!
//! A symbol is a function, parameter, variable, label or a register that inline assembly declares. Each is replaced by the
//! number of its first appearance in its kernel. So neither a rename in CUDA C++ nor the order in
//! which functions are emitted changes the result: a referenced function is appended at its first reference.

use std::collections::{BTreeMap, HashMap, HashSet};

/// Counts the changes of what this file returns for a text: hashes of an older one are worth nothing.
pub const REVISION: u32 = 1;

/// Returns the kernels of a PTX text by name, each with the functions and variables that it references.
pub fn kernels(ptx: &str) -> BTreeMap<String, String> {
    let items: Vec<Item> = items(tokens(ptx));
    let by_name: HashMap<&str, usize> = items.iter().enumerate().map(|(k, i)| (i.name.as_str(), k)).collect();
    let entries = items.iter().enumerate().filter(|(_, i)| i.tokens.iter().any(|t| t == ".entry"));
    entries.map(|(k, i)| (i.name.clone(), reduced(&items, &by_name, k))).collect()
}

/// A function or a variable of the module.
struct Item {
    name: String,
    tokens: Vec<String>,
    /// The symbols that it declares, including its own name.
    symbols: HashSet<String>,
}

fn reduced(items: &[Item], by_name: &HashMap<&str, usize>, entry: usize) -> String {
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let (mut queue, mut at, mut out) = (vec![entry], 0, String::new());
    while let Some(&k) = queue.get(at) {
        for token in &items[k].tokens {
            let global = by_name.get(token.as_str());
            if items[k].symbols.contains(token) || global.is_some() {
                // Labels are local to a function.
                let key = if global.is_some() { token.clone() } else { format!("{k} {token}") };
                let next = numbers.len();
                out.push_str(&format!("@{} ", numbers.entry(key).or_insert(next)));
            } else {
                out.push_str(token);
                out.push(' ');
            }
            if let Some(g) = global
                && !queue.contains(g)
            {
                queue.push(*g);
            }
        }
        out.push('\n');
        at += 1;
    }
    out
}

/// Splits a text into words, numbers, strings and single characters, without comments and line tables.
fn tokens(ptx: &str) -> Vec<String> {
    let mut out = Vec::new();
    for line in ptx.lines() {
        let line = line.split("//").next().unwrap_or("").trim();
        if [".file", ".loc", ".version", ".target", ".address_size"].iter().any(|d| line.starts_with(d)) {
            continue;
        }
        let mut rest = line;
        while let Some(c) = rest.chars().next() {
            let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '.' | '%');
            let n = match c {
                '"' => rest[1..].find('"').map_or(rest.len(), |n| n + 2),
                c if word(c) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
                c => c.len_utf8(),
            };
            if !c.is_whitespace() {
                out.push(rest[..n].to_string());
            }
            rest = &rest[n..];
        }
    }
    out
}

fn is_symbol(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '$'))
}

/// Splits a module into functions and variables.
fn items(tokens: Vec<String>) -> Vec<Item> {
    let (mut out, mut now, mut depth) = (Vec::new(), Vec::new(), 0usize);
    let mut tokens = tokens.into_iter().peekable();
    while let Some(t) = tokens.next() {
        match t.as_str() {
            "{" => depth += 1,
            "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        let ends = depth == 0 && (t == ";" || (t == "}" && tokens.peek().is_none_or(|n| n != ";")));
        now.push(t);
        if ends {
            out.push(item(std::mem::take(&mut now)));
        }
    }
    out
}

fn item(tokens: Vec<String>) -> Item {
    let symbols = declared(&tokens);
    let function = tokens.iter().position(|t| t == ".entry" || t == ".func");
    let name = match function {
        // A result in parentheses may precede the name.
        Some(k) if tokens.get(k + 1).is_some_and(|t| t == "(") => {
            tokens[k..].iter().skip_while(|t| *t != ")").nth(1).cloned()
        }
        Some(k) => tokens.get(k + 1).cloned(),
        None => tokens.iter().find(|t| is_symbol(t)).cloned(),
    };
    let name = name.unwrap_or_default();
    Item { symbols: symbols.into_iter().chain([name.clone()]).collect(), name, tokens }
}

/// Returns the symbols that declarations and labels introduce.
fn declared(tokens: &[String]) -> HashSet<String> {
    let mut out = HashSet::new();
    let mut declares = false;
    for (k, t) in tokens.iter().enumerate() {
        match t.as_str() {
            ".param" | ".reg" | ".local" | ".shared" | ".global" | ".const" => declares = true,
            ";" | ")" | "{" | "}" | "=" => declares = false,
            t if is_symbol(t) => {
                let label = tokens.get(k + 1).is_some_and(|n| n == ":");
                if declares || label {
                    out.insert(t.to_string());
                }
            }
            _ => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
.version 9.0
.target sm_90a
.address_size 64
.global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.func (.param .b32 func_retval0) helper(
	.param .b32 helper_param_0
)
{
	.reg .b32 	%r<2>;
	ld.param.u32 	%r1, [helper_param_0];	// a comment
	st.param.b32 	[func_retval0+0], %r1;
	ret;
}
.visible .entry first(
	.param .u64 first_param_0
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<2>;
	.shared .align 4 .b8 buffer[64];
	.loc	1 20 3
	ld.param.u64 	%rd1, [first_param_0];
	@%p1 bra 	$L__BB0_2;
	mov.u64 %rd2, table;
	{ .reg .pred p; setp.eq.u32 p, %r1, 0; }
$L__BB0_2:
	call.uni (retval0), helper, (param0);
	ret;
}
.visible .entry second(
	.param .u64 second_param_0
)
{
	ret;
}
";

    #[test]
    fn names_and_order_do_not_matter_and_numbers_do() {
        let base = kernels(TEXT);
        assert_eq!(base.keys().collect::<Vec<_>>(), ["first", "second"]);
        let names =
            [("first", "other"), ("helper", "aide"), ("table", "list"), ("buffer", "shelf"), ("BB0_2", "BB7_9")];
        let renamed = names.iter().fold(TEXT.to_string(), |t, (a, b)| t.replace(a, b));
        let renamed = renamed.replace("pred p;", "pred q;").replace("u32 p,", "u32 q,").replace("a comment", "another");
        assert_eq!(kernels(&renamed)["other"], base["first"]);
        let at = TEXT.find(".visible .entry second").unwrap_or(0);
        let (head, tail) = TEXT.split_at(at);
        let start = head.find(".func").unwrap_or(0);
        let turned = format!("{}{tail}{}", &head[..start], &head[start..]);
        assert_eq!(kernels(&turned), base);
        for (from, to) in
            [("7, 8}", "7, 9}"), ("256, 1", "128, 1"), ("retval0+0", "retval0+4"), ("b8 buffer[64]", "b8 buffer[32]")]
        {
            assert!(TEXT.contains(from) && kernels(&TEXT.replace(from, to))["first"] != base["first"], "{from}");
        }
        assert!(!base["first"].contains("BB0") && !base["first"].contains("first"), "{}", base["first"]);
    }
}
