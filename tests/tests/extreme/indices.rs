//! Reads and writes with indices out of range, in a step that also assigns a State.

use crate::script;
use perilune_core::ops;

/// Calls with `i`, two indices of which the second is out of range; `x` is (3, 4), `w` a State of that shape. Each with the op
/// that the error names.
const CALLS: &[(&str, &str)] = &[
    ("gather", "x:gather(1, i:reshape { 1, 2 })"),
    ("gather", "x:take_along(1, i:reshape { 1, 2 })"),
    ("gather", "x:t():gather(0, i:reshape { 2, 1 })"),
    ("scatter", "x:scatter(1, i:reshape { 1, 2 }, 2.0)"),
    ("scatter", "x:t():scatter(0, i:reshape { 2, 1 }, 2.0)"),
    ("scatter_add", "x:scatter_add(1, i:reshape { 1, 2 }, pl.ones { 1, 2 })"),
    ("index_select", "x:index_select(1, i)"),
    ("index_select", "x:t()[i]"),
    ("index_add", "x:index_add(1, i, pl.ones { 3, 2 })"),
    ("embedding", "pl.embedding(x:t(), i)"),
    ("one_hot", "pl.one_hot(i, 4)"),
    ("cross_entropy", "x:narrow(0, 0, 2):cross_entropy(i)"),
    ("nll_loss", "pl.nll_loss(x:narrow(0, 0, 2), i)"),
    ("grouped_matmul", "pl.grouped_matmul(pl.ones { 4, 3 }, pl.ones { 2, 3, 2 }, i)"),
    ("grouped_matmul", "pl.grouped_matmul(pl.ones { 3, 4 }, pl.ones { 4, 2 }, i)"),
    // Indices that are computed after the State was written.
    ("index_select", "x:index_select(1, i * pl.eval(pl.tensor { 1, 1 }))"),
    ("gather", "x:gather(1, (i:reshape { 1, 2 } + 0):cumsum(0))"),
    ("cross_entropy", "x:narrow(0, 0, 2):cross_entropy((i:sort(0, { descending = true })))"),
    // Only what the backward pass reads.
    ("index_add", "(function() pl.embedding(w:t(), i):sum():backward() return w.grad end)()"),
    ("scatter_add", "(function() w:gather(1, i:reshape { 1, 2 }):sum():backward() return w.grad end)()"),
    ("cross_entropy", "(function() w:narrow(0, 0, 2):cross_entropy(i):backward() return w.grad end)()"),
];

/// Indices that are none of 4 elements; the largest may be an end of 4 rows, so it is 5.
const BAD: &[i64] = &[-1, 5, 1 << 31, 1 << 32, 1 << 62, i64::MAX, i64::MIN];

#[test]
fn a_bad_index_names_its_line_and_value_and_writes_no_state() {
    // All index-checking ops of the registry are called above, by the name of their own or of the op that they are part of.
    let checking = ops::all().iter().filter(|op| op.index_fault.is_some()).map(|op| op.name);
    let covered = [
        "gather",
        "scatter",
        "scatter_add",
        "index_select",
        "index_add",
        "grouped_matmul",
        "grouped_sums",
        "class_ids",
    ];
    for name in checking {
        assert!(covered.contains(&name), "{name} checks indices, and no call here gives it bad ones");
    }
    for fusion in ["true", "false"] {
        for (op, call) in CALLS {
            for value in BAD {
                // A bad id far above 2^53 must reach the op as it is.
                let value = if *value == i64::MIN { "math.mininteger".to_string() } else { value.to_string() };
                let text = format!(
                    "local pl = require 'perilune'\n\
                     pl.switches {{ fusion = {fusion} }}\n\
                     local s, w = pl.state(pl.ones {{ 4 }}), pl.state(pl.ones {{ 3, 4 }})\n\
                     local x, i = pl.eval(pl.ones {{ 3, 4 }}), pl.tensor {{ 0, {value} }}\n\
                     local ok, e = pcall(pl.step, function()\n\
                     s:assign(s + 1)\n\
                     local y = {call}\n\
                     w:assign(w * 2)\n\
                     return y\n\
                     end)\n\
                     assert(not ok, 'is accepted')\n\
                     for _, v in ipairs(s:tolist()) do assert(v == 1, 'the State was written') end\n\
                     for _, v in ipairs(w:flatten():tolist()) do assert(v == 1, 'the State was written') end\n\
                     pl.step(function() s:assign(s + 1) end)\n\
                     assert(s:tolist()[1] == 2)\n\
                     print(tostring(e))"
                );
                let said = script(&text).unwrap_or_else(|e| panic!("{call} with {value}: {e}"));
                let value = value.replace("math.mininteger", &i64::MIN.to_string());
                for part in [*op, &value, "extreme.lua:7"] {
                    assert!(said.contains(part), "{call} with {value}: '{part}' is not in\n{said}");
                }
            }
        }
    }
}
