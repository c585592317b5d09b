//! Calls with very many letters, operands, dims or pieces: errors or results, in bounded time and with short messages.

use crate::script;
use std::time::{Duration, Instant};

/// Calls, and what the error says; the others give a number.
const CALLS: &[(&str, Option<&str>)] = &[
    ("pl.einsum(('i'):rep(100000), { x })", Some("names 100000 dims")),
    ("pl.einsum(('i,'):rep(99999) .. 'i', { x })", Some("names 100000 operands, 1 are given")),
    ("pl.einsum(('...'):rep(30000), { x })", Some("einsum")),
    ("pl.einsum(('->'):rep(30000), { x })", Some("einsum")),
    ("pl.einsum(('i,'):rep(999) .. 'i->i', copies(1000)):sum():item()", None),
    ("pl.einsum(('i,'):rep(999) .. 'i', copies(1000)):item()", None),
    ("pl.zeros(list(100000, 1))", Some("has 100000 dims; at most 8 are allowed")),
    ("x:view(list(100000, 1))", Some("cannot become {1, 1, 1,")),
    ("x:expand(list(9, 3))", Some("has 9 dims")),
    ("x:tile(list(9, 1))", Some("has 9 dims")),
    ("x:permute(list(100000, 0))", Some("permute")),
    ("x:sum(list(100000, 0))", Some("dim 0 is named twice")),
    ("x:pad(list(100000, 1))", Some("100000 pads")),
    ("x:roll(list(1000, 1), list(1000, 0)):sum():item()", None),
    ("x:repeat_interleave(list(100000, 1))", Some("100000 repeats")),
    ("pl.eval(pl.zeros { 100000 }):split(1)", Some("would return 100000 tensors")),
    ("pl.zeros({ 1 << 40 }):unbind()", Some("would return 1099511627776 tensors")),
    ("pl.zeros({ 1 << 40 }):chunk(1 << 39)", Some("would return")),
    ("pl.cat(copies(10000)):sum():item()", None),
    ("pl.stack(copies(2000)):sum():item()", None),
];

#[test]
fn long_lists_take_bounded_time_and_give_short_errors() {
    for (call, want) in CALLS {
        let text = format!(
            "local pl = require 'perilune'\n\
             local x = pl.eval(pl.ones {{ 3 }})\n\
             local function list(n, v) local t = {{}} for k = 1, n do t[k] = v end return t end\n\
             local function copies(n) return list(n, x) end\n\
             local ok, e = pcall(function()\n\
             return {call}\n\
             end)\n\
             print(ok, tostring(e))"
        );
        let start = Instant::now();
        let said = script(&text).unwrap_or_else(|e| panic!("{call}: {e}"));
        match want {
            Some(part) => {
                assert!(said.starts_with("false") && said.contains(part) && said.len() < 800, "{call}: {said}")
            }
            None => assert!(said.starts_with("true"), "{call}: {said}"),
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{call} took {:?}", start.elapsed());
    }
}
