//! Measures the cost of recording: nanoseconds from the Lua call to the recorded node, and of a plan lookup on a hit.
//!
//!     cargo run --release -p perilune-lua --example record
//!
//! Runs on the null device, so only the host is measured.

use perilune_lua::{Runtime, RuntimeOptions};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    let options = RuntimeOptions {
        backend: Arc::new(perilune_plan::Null),
        params: Vec::new(),
        strict: true,
        print: Rc::new(|s| println!("{s}")),
    };
    let runtime = Runtime::new(options).unwrap_or_else(|e| panic!("{e}"));
    let lua = runtime.lua();
    let n = 5000;
    for (name, body) in [
        ("empty loop", "for i = 1, n do end"),
        ("x:exp()", "local y = x for i = 1, n do y = x:exp() end"),
        ("x + y", "local y = x for i = 1, n do y = x + x end"),
        ("x * 2.0", "local y = x for i = 1, n do y = x * 2.0 end"),
        ("x:sum(-1)", "local y = x for i = 1, n do y = x:sum(-1) end"),
        ("x:softmax(-1)", "local y = x for i = 1, n do y = x:softmax(-1) end"),
        ("x:matmul(x)", "local y = x for i = 1, n do y = x:matmul(x) end"),
        ("x:reshape(2, 8)", "local y = x for i = 1, n do y = x:reshape(2, 8) end"),
        ("pl.linear(x, w, b)", "local y = x for i = 1, n do y = pl.linear(x, w, b) end"),
    ] {
        let chunk = format!(
            "local pl = require 'perilune'\nlocal x, w, b, n = pl.zeros({{4, 4}}), pl.zeros({{4, 4}}), pl.zeros({{4}}), {n}\nreturn function() pl.step(function() {body} end) end"
        );
        let f: mlua::Function = lua.load(&chunk).set_name("@bench.lua").eval().unwrap_or_else(|e| panic!("{e}"));
        let mut times = Vec::new();
        for _ in 0..31 {
            let start = Instant::now();
            f.call::<()>(()).unwrap_or_else(|e| panic!("{e}"));
            times.push(start.elapsed().as_nanos() as f64 / n as f64);
        }
        times.sort_by(f64::total_cmp);
        println!("{name:<22} {:>7.0} ns (fastest {:.0})", times[times.len() / 2], times[0]);
    }
    // A chain of 5,000 nodes evaluated repeatedly: lookup on a hit.
    let chunk = "local pl = require 'perilune'\nlocal w = pl.state(pl.zeros({64}))\nreturn function() return pl.step(function() local y = w for i = 1, 5000 do y = y:exp() end return y end) end";
    let f: mlua::Function = lua.load(chunk).set_name("@bench.lua").eval().unwrap_or_else(|e| panic!("{e}"));
    let mut times = Vec::new();
    let before = runtime.host().engine.borrow().stats();
    for _ in 0..31 {
        let start = Instant::now();
        f.call::<mlua::Value>(()).unwrap_or_else(|e| panic!("{e}"));
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    println!("5,000-node step, recorded and looked up: {:.2} ms", times[times.len() / 2]);
    let after = runtime.host().engine.borrow().stats();
    let each = (after.lookup_ms - before.lookup_ms) / (after.hits - before.hits) as f64;
    println!("5,000-node step, lookup alone: {each:.3} ms");
}
