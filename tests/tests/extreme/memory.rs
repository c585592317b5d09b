//! Asks for more memory than any machine has: an error that names the bytes and the line, after which work goes on.

use crate::script;
use perilune_tests::harness;
use std::time::{Duration, Instant};

/// What each asks for cannot be had: results, what lies in between, partial sums, host copies, States.
const CALLS: &[&str] = &[
    "pl.ones({ 1 << 48 }):sum():item()",
    "pl.ones({ 1 << 24, 1 << 24 }):sum(0)[0]:item()",
    "pl.arange(1 << 48):amax():item()",
    "pl.rand({ 1 << 48 }):mean():item()",
    "pl.rand({ 1 << 48 }):var():item()",
    "pl.rand({ 1 << 48 }):logsumexp():item()",
    "pl.eval(pl.rand { 1 << 47 })",
    "pl.eval(pl.zeros { 1 << 48 })",
    "pl.zeros({ 1 << 47 }):tolist()",
    "pl.eval(pl.rand({ 1 << 47 }):softmax(0))",
    "pl.rand({ 1 << 47 }):argsort(0):sum():item()",
    "pl.rand({ 1 << 47 }):cumsum(0):sum():item()",
    "pl.rand({ 1 << 47 }):unique()",
    "pl.rand({ 1 << 47 }):nonzero()",
    "pl.ones({ 1 << 23, 1 << 24 }):matmul(pl.ones { 1 << 24, 1 << 23 }):sum():item()",
    "pl.ones({ 1 << 23, 1 << 24 }):to('bf16'):matmul(pl.ones({ 1 << 24, 2 }):to('bf16')):sum():item()",
    "pl.ones({ 1 << 40 }):to('i64'):one_hot(200):sum():item()",
    "pl.embedding(pl.ones { 4, 1 << 20 }, pl.zeros({ 1 << 26 }):to('i64')):to('f64'):sort(0):sum():item()",
    "pl.ones({ 1, 1, 1 << 22, 1 << 22 }):conv2d(pl.ones { 4, 1, 3, 3 }):sum():item()",
    "pl.ones({ 4 }):pad({ 1 << 46, 0 }):sum():item()",
    "pl.ones({ 2, 2 }):tile({ 1 << 22, 1 << 22 }):to('f64'):cumsum(0):sum():item()",
];

#[test]
fn oversized_allocations_are_errors_with_bytes_and_line() {
    for call in CALLS {
        let text = format!(
            "local pl = require 'perilune'\n\
             local s = pl.state(pl.ones {{ 2 }})\n\
             for _ = 1, 2 do\n\
             local ok, e = pcall(function()\n\
             return {call}\n\
             end)\n\
             assert(not ok, 'is accepted')\n\
             print(tostring(e))\n\
             pl.step(function() s:assign(s + 1) end)\n\
             end\n\
             assert(s:tolist()[2] == 3 and pl.ones({{ 9 }}):sum():item() == 9)"
        );
        let start = Instant::now();
        let said = script(&text).unwrap_or_else(|e| panic!("{call}: {e}"));
        // A GPU also limits what one launch takes.
        let limits = ["a GPU sorts at most 2^31 at once", "too large for one launch"];
        let limited = harness::on_gpu() && limits.iter().any(|limit| said.contains(limit));
        let parts: &[&str] = if limited { &["extreme.lua:5"] } else { &["out of memory", "iB", "extreme.lua:5"] };
        for part in parts {
            assert!(said.contains(part), "{call}: '{part}' is not in\n{said}");
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{call} took {:?}", start.elapsed());
    }
}

/// The State stays pending until its handle is collected, as a step that fails for lack of memory does.
#[test]
fn a_state_that_has_no_room_is_forgotten_with_its_handle() {
    let text = "local pl = require 'perilune'\n\
        local ok, e = pcall(function() return pl.state(pl.zeros { 1 << 47 }):tolist() end)\n\
        assert(not ok)\n\
        print(tostring(e))\n\
        pcall(pl.step, function() return pl.ones { 2 } end)\n\
        pl.step(function() return pl.ones { 2 } end)\n\
        print(pl.ones({ 3 }):sum():item())";
    let said = script(text).unwrap();
    assert!(said.contains("out of memory") && said.ends_with("3.0\n"), "{said}");
}

#[test]
fn many_large_values_are_refused_before_their_sum_overflows() {
    let text = "local pl = require 'perilune'\n\
        local all = {}\n\
        for k = 1, 3000 do all[k] = pl.rand({ 1 << 48 }) * k end\n\
        local ok, e = pcall(pl.eval, table.unpack(all))\n\
        assert(not ok)\n\
        print(tostring(e))\n\
        print(pl.ones({ 3 }):sum():item())";
    let said = script(text).unwrap();
    assert!(said.contains("at most 2^60 can be planned") && said.ends_with("3.0\n"), "{said}");
}
