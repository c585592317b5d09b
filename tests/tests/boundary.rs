//! Tests attacks of a recipe on memory, time and the runtime's state: each results in an error that `pcall` catches or in a
//! value, never in a panic, an abort or an uninterruptible loop, and the runtime works afterwards.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Cause, Console, Failed};
use perilune_tests::scripts::{Script, script};
use std::time::{Duration, Instant};

const LIMIT: usize = 48 << 20;

fn limited() -> Script {
    let s = script(2, &[]).unwrap_or_else(|e| panic!("{e}"));
    s.runtime.limit_lua_memory(LIMIT).unwrap();
    s
}

/// Runs a script that must succeed.
fn run(s: &Script, text: &str) -> Result<(), Failed> {
    s.runtime.load_text(text, "@attack.lua").map(drop)
}

/// Runs a script that must fail and returns its message.
fn fails(s: &Script, text: &str) -> String {
    match run(s, text) {
        Ok(()) => panic!("no error: {text}"),
        Err(e) => {
            let e = e.to_string();
            assert!(!e.contains("internal error"), "{text}\n{e}");
            e
        }
    }
}

/// Asserts that after an attack the runtime computes and its memory is free.
fn works(s: &Script) {
    let text = "local pl = require 'perilune'\nassert(pl.ones({ 3 }):sum():item() == 3)\nlocal t = {}\nfor i = 1, 100000 do t[i] = i end";
    run(s, text).unwrap_or_else(|e| panic!("afterwards: {e}"));
}

/// Runs a script and interrupts it; it must end soon by that interrupt.
fn interrupted(s: &Script, text: &str) {
    let interrupt = s.runtime.host().interrupt.clone();
    let asks = std::thread::spawn({
        let interrupt = interrupt.clone();
        move || {
            std::thread::sleep(Duration::from_millis(60));
            interrupt.request();
        }
    });
    let begun = Instant::now();
    let out = s.runtime.interruptible(|| run(s, text)).unwrap();
    let took = begun.elapsed();
    asks.join().unwrap();
    interrupt.clear();
    match out {
        Err(Failed::Recipe(e)) if e.cause == Cause::Interrupted => {}
        Err(e) => panic!("{text}\n{e}"),
        Ok(()) => panic!("it ended by itself: {text}"),
    }
    assert!(took < Duration::from_secs(8), "{took:?}: {text}");
}

// ---- memory ----------------------------------------------------------------------------------------------------------

/// Attacks that need more memory than the limit. None may allocate it outside of Lua either.
const GREEDY: [(&str, &str); 17] = [
    ("a string is repeated", "local s = ('x'):rep(1 << 40)"),
    ("a string is repeated with a separator", "local s = ('x'):rep(1 << 20, ('y'):rep(1 << 20))"),
    ("a string is doubled", "local s = 'x' while true do s = s .. s end"),
    ("a list grows", "local t = {} for i = 1, 1e9 do t[i] = i end"),
    ("a table grows", "local t = {} for i = 1, 1e9 do t[i * 1.5] = {} end"),
    ("a list is joined", "local t = {} for i = 1, 1000 do t[i] = ('x'):rep(100000) end local s = table.concat(t)"),
    (
        "a virtual list is joined",
        "local s = table.concat(setmetatable({}, { __index = function() return ('x'):rep(1000) end }), '', 1, 1 << 40)",
    ),
    (
        "a list is filled by move",
        "local t = table.move(setmetatable({}, { __index = function() return 1 end }), 1, 1 << 40, 1, {})",
    ),
    ("a substitution multiplies", "local s = ('a'):rep(100000):gsub('a', ('b'):rep(100000))"),
    (
        "a substitution by a function multiplies",
        "local b = ('b'):rep(1e6) local s = ('a'):rep(100000):gsub('a', function() return b end)",
    ),
    ("a substitution by a table multiplies", "local s = ('a'):rep(100000):gsub('a', { a = ('b'):rep(1e6) })"),
    (
        "a format repeats",
        "local s = ('x'):rep(1e6) local t = s:rep(10) local f = ('%s'):rep(90) local u = f:format(t, t, t, t, t, t, t, t, t, t, t, t, t, t, t, t, t, t, t, t)",
    ),
    ("a pack pads", "local s = ('c' .. (1 << 30)):pack('')"),
    ("a closure chain", "local f = function() end while true do local g = f f = function() return g end end"),
    ("a varargs bomb", "local t = {} for i = 1, 200000 do t[i] = { table.unpack({}, 1, 200) } t[i][200] = i end"),
    ("coroutines pile up", "local t = {} for i = 1, 1e7 do t[i] = coroutine.create(function() end) end"),
    ("a tensor's list", "local pl = require 'perilune' local t = pl.zeros({ 4000, 1000 }):tolist()"),
];

#[test]
fn exceeding_the_memory_limit_is_an_error() {
    for (name, text) in GREEDY {
        let s = limited();
        let e = fails(&s, text);
        assert!(e.contains("memory") && (e.contains("48.0 MiB") || e.contains("not enough memory")), "{name}: {e}");
        assert!(e.contains("--lua-memory"), "{name}: {e}");
        works(&s);
        // Also within a pcall, after which the script continues.
        let caught = format!(
            "local ok, e = pcall(function() {text} end)\nassert(not ok)\ncollected = tostring(e)\nlocal t = {{}}\nfor i = 1, 1000 do t[i] = {{}} end"
        );
        run(
            &s,
            &caught
                .replace("collected = tostring(e)", "assert(tostring(e):find('--lua-memory', 1, true), tostring(e))"),
        )
        .unwrap_or_else(|e| panic!("{name}: {e}"));
        works(&s);
    }
}

/// If Lua's error has no line, the message has that of the pcall; if a native function fails, that of its call.
#[test]
fn a_memory_error_names_a_line() {
    let s = limited();
    assert!(
        fails(&s, "local x\n\nx = ('x'):rep(1 << 40)")
            .starts_with("attack.lua:3: string.rep: its result would take 1.0 TiB")
    );
    run(&s, "local ok, e = pcall(function()\nlocal s = 'x' while true do s = s .. s end\nend)\nprint(tostring(e))")
        .unwrap();
    let said = s.output();
    assert!(said.contains("attack.lua:") && said.contains("out of Lua memory"), "{said}");
    assert!(said.contains("may take 48.0 MiB"), "{said}");
}

#[test]
fn memory_errors_in_callbacks_handlers_and_coroutines_are_errors() {
    let grow = "local s = 'x' while true do s = s .. s end";
    for text in [
        format!("local pl = require 'perilune' pl.step(function() {grow} end)"),
        format!("local pl = require 'perilune' pl.no_grad(function() {grow} end)"),
        format!("xpcall(error, function() {grow} end) {grow}"),
        format!("local c = coroutine.wrap(function() {grow} end) c()"),
        format!("local t <close> = setmetatable({{}}, {{ __close = function() {grow} end }}) error 'x'"),
        format!("print(setmetatable({{}}, {{ __tostring = function() {grow} end }}))"),
        format!("error(setmetatable({{}}, {{ __tostring = function() {grow} end }}))"),
        format!("table.sort({{ 3, 2, 1 }}, function() {grow} end)"),
        format!("string.gsub('aaa', 'a', function() {grow} end)"),
        format!(
            "local pl = require 'perilune'\nlocal f = pl.custom {{ forward = function(x) return x * 2 end, backward = function(g, x) {grow} end }}\nlocal w = pl.state(pl.ones {{ 2 }})\npl.step(function() f(w):sum():backward() end)"
        ),
        format!("local f = load(function() {grow} end)() "),
    ] {
        let s = limited();
        let e = run(&s, &text).expect_err(&text).to_string();
        assert!(!e.contains("internal error"), "{text}: {e}");
        works(&s);
    }
}

/// A prompt whose globals fill the memory can still release them.
#[test]
fn the_prompt_survives_a_full_memory() {
    let s = limited();
    let console = Console::new(&s.runtime, "stdin").unwrap();
    assert!(console.eval("big = {} for i = 1, 1e9 do big[i] = 'number ' .. i end").is_err());
    assert!(console.eval("#big > 1000").unwrap().shown[0].contains("true"));
    console.eval("big = nil").unwrap();
    assert_eq!(console.eval("1 + 1").unwrap().shown, ["2"]);
    console.eval("t = {} for i = 1, 100000 do t[i] = i end").unwrap();
}

/// A list that occurs in another many times is small in Lua and huge as a tensor.
#[test]
fn shared_lists_do_not_multiply() {
    let s = limited();
    let text = "local pl = require 'perilune'\nlocal t = {}\nfor i = 1, 600 do t[i] = 1 end\nfor _ = 1, 4 do local u = {} for i = 1, 600 do u[i] = t end t = u end\npl.tensor(t)";
    let begun = Instant::now();
    let e = fails(&s, text);
    assert!(e.contains("more than") && e.contains("do not fit into Lua's memory"), "{e}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn suggestions_and_messages_stay_short() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let begun = Instant::now();
    for text in [
        "local pl = require 'perilune' return pl[('x'):rep(1e7)]",
        "return _G[('x'):rep(1e7)]",
        "local pl = require 'perilune' return pl.zeros({ 2 })[('x'):rep(1e7)]",
        "local pl = require 'perilune' return pl.nn.Linear(2, 3, { [('x'):rep(1e6)] = 1 })",
        "local pl = require 'perilune' return pl.zeros({ 2 }, { dtype = ('x'):rep(1e7) })",
        "require(('x'):rep(1e7))",
        "error(('x'):rep(1e7))",
        "error(('a'):rep(1e6) .. '\\n' .. ('1:'):rep(1e6))",
    ] {
        let e = match run(&s, text) {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        };
        assert!(e.len() < 64 << 10, "{} bytes: {text}", e.len());
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

// ---- time ------------------------------------------------------------------------------------------------------------

/// Work that does not end, in the library's C code or in metamethods.
const ENDLESS: [&str; 26] = [
    "while true do end",
    "while true do pcall(function() while true do end end) end",
    "local f f = function() return f() end while true do pcall(f) end",
    "xpcall(error, function() while true do end end) while true do end",
    "local s = ('a'):rep(5000):find(('.-'):rep(20) .. 'b')",
    "local s = ('a'):rep(5000):match(('.*'):rep(20) .. 'b')",
    "for k in ('a'):rep(5000):gmatch(('a*'):rep(20) .. 'b') do end",
    "local s = ('a'):rep(5000):gsub(('a?'):rep(30) .. ('.-'):rep(9) .. 'b', '')",
    "local s = ('('):rep(1e6):find(('%b()'):rep(3))  while true do s = ('('):rep(1e6):find('%b()', 1) end",
    "while true do pcall(string.find, ('a'):rep(5000), ('.-'):rep(20) .. 'b') end",
    "local n = (''):rep(1 << 62) while true do end",
    "table.concat(setmetatable({}, { __index = function() return '' end }), '', 1, 1 << 62)",
    "table.concat(setmetatable({}, { __index = setmetatable({}, { __index = function() return '' end }) }), '', 1, 1 << 62)",
    "table.insert(setmetatable({}, { __len = function() return 1 << 62 end }), 1, 1)",
    "table.remove(setmetatable({}, { __len = function() return 1 << 62 end }), 1)",
    "table.sort(setmetatable({}, { __len = function() return (1 << 31) - 2 end, __index = function() return 1 end, __newindex = type }))",
    "table.move({}, 1, 1 << 62, 2)",
    "table.move({}, 1, 1 << 62, 2, setmetatable({}, { __newindex = type }))",
    "table.sort({ 3, 1, 2 }, function() while true do end end)",
    "string.gsub('a', 'a', function() while true do end end)",
    "load(function() return ' ' end)",
    "load(function() while true do end end)",
    "local c = coroutine.wrap(function() while true do end end) c()",
    "while true do local c = coroutine.wrap(function() local c = coroutine.wrap(function() while true do end end) c() end) pcall(c) end",
    "local t = {} for i = 1, 2e6 do t[i] = i end for i = 1, 2e6 do t[i] = nil end while next(t) == nil do end",
    "local s = ('x'):rep(8e6) while true do local t = s .. 'y' end",
];

#[test]
fn nothing_outlives_an_interrupt() {
    for text in ENDLESS {
        eprintln!("{text}"); // which one does not end
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        s.runtime.limit_lua_memory(256 << 20).unwrap();
        interrupted(&s, text);
        works(&s);
    }
}

/// Loops of the library are interrupted too, even if the recipe catches the first interrupt.
#[test]
fn a_loop_in_the_library_ends() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let endless = "local pl = require 'perilune'\nlocal keys = setmetatable({}, { __pairs = function() return function(_, k) return (k or 0) + 1, 1 end end })\n";
    interrupted(&s, &format!("{endless}while true do pcall(pl.tree.names, keys) end"));
    works(&s);
}

// ---- depth -----------------------------------------------------------------------------------------------------------

#[test]
fn deep_and_cyclic_tables_are_refused() {
    let deep = "local pl = require 'perilune'\nlocal t = { w = pl.state(pl.ones { 1 }) }\nfor i = 1, 100000 do t = { next = t } end\n";
    for use_it in [
        "pl.tree.states(t)",
        "pl.nn.module(t):parameters()",
        "print(pl.nn.module(t))",
        "pl.summary(pl.nn.module(t), pl.ones { 1 })",
        "pl.optim.SGD(pl.nn.module(t), { lr = 1 })",
        "t.forward = function(x) return x end pl.nn.module(t):train()",
    ] {
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        let begun = Instant::now();
        let e = fails(&s, &format!("{deep}{use_it}"));
        assert!(e.contains("nested more than 200 deep"), "{use_it}: {e}");
        assert!(begun.elapsed() < Duration::from_secs(5));
        works(&s);
    }
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let cyclic = "local pl = require 'perilune'\nlocal t = { w = pl.state(pl.ones { 1 }) } t.t = t t.u = { t, t }\nassert(#pl.tree.states(t) == 1)\nprint(pl.nn.module(t))";
    run(&s, cyclic).unwrap_or_else(|e| panic!("{e}"));
    assert!(fails(&s, "local pl = require 'perilune' local t = {} t[1] = t pl.tensor(t)").contains("nested more than"));
}

#[test]
fn a_recipe_with_deep_states_is_refused() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let text = "local pl = require 'perilune'\nlocal recipe = pl.recipe { name = 'deep', params = { steps = 1 } }\nfunction recipe.data() local x = pl.ones { 8, 2 } return { train = pl.data.tensors { x = x }:batch(4) } end\nfunction recipe.model() local t = { w = pl.state(pl.ones { 1 }) } for i = 1, 100000 do t = { next = t } end t.forward = function() end return pl.nn.module(t) end\nfunction recipe.optimizer(p, m) return pl.optim.SGD(m, { lr = 1 }) end\nfunction recipe.loss(m, b) return b.x:sum() end\nreturn recipe";
    let Ok(perilune_lua::Loaded::Recipe(recipe)) = s.runtime.load_text(text, "@deep.lua") else { panic!("no recipe") };
    let e = recipe.start(None, None, None).map(drop).expect_err("too deep").to_string();
    assert!(e.contains("nested more than 200 deep"), "{e}");
}

/// Nesting and recursion that exhaust a stack are Lua's own errors.
#[test]
fn deep_code_is_an_error() {
    for text in [
        "assert(load(('('):rep(100000) .. '1' .. (')'):rep(100000)))",
        "assert(load(('{'):rep(100000) .. ('}'):rep(100000)))",
        "assert(load('return ' .. ('-'):rep(1000000) .. '1'))",
        "assert(load(('do '):rep(100000) .. ('end '):rep(100000)))",
        "assert(load('return ' .. ('function() return '):rep(100000) .. '1' .. (' end'):rep(100000)))",
        "assert(load('x = ' .. ('a.'):rep(1000000) .. 'b'))()",
        "local function f(n) return 1 + f(n + 1) end f(1)",
        "local function f(n) local ok, e = pcall(f, n + 1) if not ok then error(e, 0) end end f(1)",
        "local function f() return coroutine.wrap(f)() end f()",
        "local t = setmetatable({}, {}) getmetatable(t).__index = t return t.x",
        "local t = setmetatable({}, {}) getmetatable(t).__index = function(t, k) return t[k] end return t.x",
        "local t = setmetatable({}, {}) getmetatable(t).__tostring = function(t) return tostring(t) end print(t)",
        "local t = setmetatable({}, {}) getmetatable(t).__concat = function(a, b) return a .. b end return t .. 'x'",
        "local t = setmetatable({}, { __tostring = function() return {} end }) print(t)",
        "error(setmetatable({}, { __tostring = function() error 'again' end }))",
        "error(setmetatable({}, { __tostring = function() return 7 end }))",
        "local t = setmetatable({}, {}) getmetatable(t).__tostring = function(t) error(t) end error(t)",
        "error(nil)",
        "error({})",
        "error(coroutine.create(function() end))",
        "error(require 'perilune'.ones { 2 })",
        "string.gsub('a', 'a', function(x) local f f = function() return string.gsub('a', 'a', f) end return f() end)",
        "local function f() print(setmetatable({}, { __tostring = f })) return '' end f()",
        "require 'perilune'.no_grad(function() local pl = require 'perilune' local function f() return pl.no_grad(f) end f() end)",
    ] {
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        let e = match run(&s, text) {
            Ok(()) => continue,
            Err(e) => e.to_string(),
        };
        assert!(!e.contains("internal error"), "{text}: {e}");
        works(&s);
    }
}

// ---- the runtime's own state -----------------------------------------------------------------------------------------

/// Scripts that ended in a panic once, or could: each is an error with this text.
const MISTAKES: [(&str, &str); 14] = [
    ("pl.tensor { 1, nil, 3 }", "element 2 of a list of 3 is nil"),
    ("pl.tensor { { 1, 2, 3 }, { 3, nil, 5 } }", "element 2 of a list of 3 is nil"),
    ("pl.step(function() pl.step(function() end) end)", "cannot be opened inside a step"),
    ("local x = pl.ones { 2 } x:free() print(x + 1)", "freed"),
    ("local x pl.step(function() x = pl.ones({ 2 }) * 3 end) print(x)", "step"),
    ("pl.step(function() coroutine.yield() end)", "yield"),
    ("pl.step(coroutine.wrap(function() coroutine.yield(1) error 'after' end)) error 'before'", "before"),
    ("coroutine.wrap(function() pl.step(function() coroutine.yield() end) end)()", "yield"),
    ("pl.no_grad(function() coroutine.yield() end)", "yield"),
    (
        "local f = pl.custom { forward = function(x) return x * 2 end, backward = function(g) coroutine.yield() end }\nlocal w = pl.state(pl.ones { 2 }) pl.step(function() f(w):sum():backward() end)",
        "yield",
    ),
    (
        "local f = pl.custom { forward = function(x) return x * 2 end, backward = function(g) pl.step(function() end) end }\nlocal w = pl.state(pl.ones { 2 }) pl.step(function() f(w):sum():backward() end)",
        "inside a step",
    ),
    (
        "local f f = pl.custom { forward = function(x) return f(x) end, backward = function(g) return g end } f(pl.ones { 2 })",
        "stack overflow",
    ),
    ("setmetatable(pl.ones({ 2 }), {})", "table expected"),
    ("local x = pl.ones { 2 } getmetatable(x).__index = nil error 'reached'", ""),
];

#[test]
fn mistakes_are_errors() {
    for (text, want) in MISTAKES {
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        let e = fails(&s, &format!("local pl = require 'perilune'\n{text}"));
        assert!(e.contains(want), "{text}: {e}");
        works(&s);
        // The same at a prompt, which goes on.
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        let console = Console::new(&s.runtime, "stdin").unwrap();
        console.eval("pl = require 'perilune'").unwrap();
        assert!(console.eval(text).is_err(), "{text}");
        assert_eq!(console.eval("pl.ones({ 3 }):sum():item()").unwrap().shown, ["3.0"], "{text}");
    }
}

/// A run's dry run within a step or within itself.
#[test]
fn a_dry_run_does_not_nest() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let text = "local pl = require 'perilune'\nlocal recipe = pl.recipe { name = 'dry', params = { batch = 4, steps = 2 } }\nlocal inner\nfunction recipe.data() local x = pl.ones { 8, 2 } return { train = pl.data.tensors { x = x }:batch(4) } end\nfunction recipe.model() return pl.nn.Linear(2, 1) end\nfunction recipe.optimizer(p, m) return pl.optim.SGD(m, { lr = 1 }) end\nfunction recipe.loss(m, b) if inner then inner:dry_run() end return m(b.x):sum() end\nlocal train = require 'perilune.train'\nlocal run = train.new(recipe, recipe.params, {})\ninner = run\nlocal ok, e = pcall(function() run:dry_run() end)\nassert(not ok and tostring(e):find('cannot begin inside one'), tostring(e))\nok, e = pcall(pl.step, function() run:dry_run() end)\nassert(not ok and tostring(e):find('cannot begin inside one'), tostring(e))\ninner = nil\nrun:dry_run() run:step()\n";
    run(&s, text).unwrap_or_else(|e| panic!("{e}"));
    works(&s);
}

/// A recipe may break its own copy of a library table, and nothing else.
#[test]
fn broken_library_tables_are_the_recipes_own_trouble() {
    for text in [
        "rawset(string, 'find', 7) rawset(string, 'format', nil)",
        "for k in pairs(string) do string[k] = nil end",
        "for k in pairs(table) do table[k] = error end",
        "local pl = require 'perilune' for k in pairs(pl) do rawset(pl, k, function() error('mine') end) end",
        "local pl = require 'perilune' for k in pairs(pl.nn) do pl.nn[k] = 3 end",
        "getmetatable('').__index = function() error 'mine' end",
        "rawset(_G, 'pairs', nil) rawset(_G, 'tostring', function() return {} end) print(1)",
        "setmetatable(_G, nil) tostring = nil type = nil error = nil pcall = nil",
        "rawset(_G, 'collectgarbage', 1) rawset(_G, 'require', function() return {} end)",
    ] {
        let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
        if let Err(e) = run(&s, text) {
            assert!(!e.to_string().contains("internal error"), "{text}: {e}");
        }
        // Another runtime is untouched, and this one ends without a panic.
        let _ = run(&s, "local pl = require 'perilune' pl.step(function() return pl.ones({ 2 }) end)");
        works(&script(1, &[]).unwrap_or_else(|e| panic!("{e}")));
    }
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert!(fails(&s, "collectgarbage('stop')").contains("'collectgarbage' is not defined"));
}

/// A recipe replaces all globals and library functions by ones that count their calls: the standard library, most of which is loaded
/// after that, calls none of them.
#[test]
fn replaced_globals_do_not_reach_the_library() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let text = r##"
        local pl = require "perilune"
        local raise, make, assert_, original = error, setmetatable, assert, {}
        for name, value in pairs(_G) do original[name] = value end
        local called = {}
        local function spy(library, name, f)
          library[name] = function(...) called[#called + 1] = name return f(...) end
        end
        local libraries = { _G, string, table, math, coroutine, utf8 }
        for _, library in ipairs(libraries) do
          local found = {}
          for name, value in next, library do
            if type(value) == "function" then found[name] = value end
          end
          for name, value in next, found do spy(library, name, value) end
        end
        called = {}
        for _, name in original.ipairs { "error", "options", "is_tensor", "is_state", "step", "eval", "tensor" } do
          pl[name] = function() called[#called + 1] = "pl." .. name end
        end
        -- Every part of the library is loaded and used.
        local model = pl.nn.Sequential { pl.nn.Linear(4, 8), pl.nn.ReLU(), pl.nn.Linear(8, 2) }
        local opt = pl.optim.AdamW(model, { lr = 0.1 })
        local x, y = pl.ones { 8, 4 }, pl.zeros({ 8 }, { dtype = "i64" })
        local set = pl.data.tensors { x = x, y = y }
        local batch = set:split("train", 0.5, 1):shuffle(1):batch(2):batch_at(0)
        local loss = pl.cross_entropy(model(batch.x), batch.y)
        loss:backward()
        opt:step()
        local accuracy = pl.metrics.accuracy(model(x), y):item()
        local shown = pl.summary(model, x)
        local text = original.tostring(model) .. original.tostring(shown)
        local bad = original.select(2, original.pcall(pl.nn.Linear, 4, "wide"))
        bad = original.tostring(bad)
        if not bad:find("wide", 1, true) then raise(bad) end
        if #called > 0 then raise("the library called " .. called[1]) end
    "##;
    run(&s, text).unwrap_or_else(|e| panic!("{e}"));
    // What a recipe adds to `string` is a method of strings; what it replaces there is a function of its own.
    let methods = "function string.twice(s) return s .. s end assert((\"ab\"):twice() == \"abab\")\n\
                   string.upper = function() return 1 end assert(string.upper \"a\" == 1 and (\"a\"):upper() == \"A\")";
    run(&s, methods).unwrap_or_else(|e| panic!("{e}"));
    let private = "local seen = {} local ok = pcall(require, \"perilune.data.native\") assert(not ok)";
    run(&s, private).unwrap_or_else(|e| panic!("{e}"));
}

/// A release build checks sums, too, in every crate that computes sizes, shapes or offsets: all but the backends.
#[test]
fn a_release_build_checks_overflows_of_sizes() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let text = std::fs::read_to_string(format!("{root}/Cargo.toml")).unwrap();
    for entry in std::fs::read_dir(format!("{root}/runtime")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let checked = text.contains(&format!("[profile.release.package.perilune-{name}]\noverflow-checks = true\n"));
        assert_eq!(checked, !matches!(name.as_str(), "cpu" | "cuda"), "{name}");
    }
}

/// The functions that replace Lua's own do what those do, and say what those say.
#[test]
fn replaced_functions_mean_the_same() {
    let s = script(1, &[]).unwrap_or_else(|e| panic!("{e}"));
    let text = r##"
        local function virtual(t) return setmetatable({}, { __index = t, __len = function() return #t end, __newindex = t }) end
        local function list(t) local out = {} for i = 1, #t do out[i] = tostring(t[i]) end return table.concat(out, " ") end
        for _, make in ipairs { function(t) return t end, virtual } do
          local raw = { 3, 1, 2 }
          local t = make(raw)
          table.sort(t) assert(list(raw) == "1 2 3")
          table.sort(t, function(a, b) return a > b end) assert(list(raw) == "3 2 1")
          table.insert(t, 9) table.insert(t, 1, 8) table.insert(t, 3, 7) assert(list(raw) == "8 3 7 2 1 9")
          assert(table.remove(t) == 9 and table.remove(t, 1) == 8 and table.remove(t, 2) == 7 and list(raw) == "3 2 1")
          assert(table.concat(t, ", ") == "3, 2, 1" and table.concat(t, "", 2, 3) == "21" and table.concat(t, "x", 3, 2) == "")
          assert(list(table.move(t, 1, 3, 2)) == "3 3 2 1" and #table.move(t, 1, 2, 1, {}) == 2)
          assert(not pcall(table.insert, t, 9, 1) and not pcall(table.insert, t) and not pcall(table.remove, t, 9))
          assert(not pcall(table.concat, make { {} }))
        end
        assert(table.remove({}) == nil and table.remove({}, 0) == nil)
        local big = {} for i = 1, 150000 do big[i] = (i * 7919) % 150001 end
        table.sort(big) for i = 2, #big do assert(big[i - 1] <= big[i]) end
        local first, last = big[1], big[150000]
        assert(#table.move(big, 1, 150000, 3) == 150002 and big[150002] == last and big[3] == first)
        assert(("ab"):rep(3, "-") == "ab-ab-ab" and (""):rep(1e9) == "" and ("x"):rep(0) == "" and ("x"):rep(-1) == "")
        assert(select("#", pcall(error)) == 2 and select(2, pcall(error, nil)) == nil)
        assert(select("#", xpcall(function(...) return ... end, print, 1, nil, nil)) == 4)
        local ok, e = xpcall(error, function(e) return e .. "!" end, "why") assert(not ok and e == "why!")
        assert(select(2, xpcall(error, function() error("in it", 0) end)) == "in it")
        local c = coroutine.create(function(a) local b = coroutine.yield(a + 1) error("e" .. b, 0) end)
        assert(select(2, coroutine.resume(c, 1)) == 2 and select(2, coroutine.resume(c, 7)) == "e7")
        local inner = coroutine.wrap(function() return pcall(function() return coroutine.yield(1) + 1 end) end)
        assert(inner() == 1 and select(2, inner(4)) == 5)
    "##;
    run(&s, text).unwrap_or_else(|e| panic!("{e}"));
    for (text, want) in [
        ("\ntable.insert(nil, 1)", "attack.lua:2: bad argument #1 to 'insert' (table expected, got nil)"),
        ("table.concat({ {} })", "attack.lua:1: invalid value (table) at index 1 in table for 'concat'"),
        ("table.insert({}, 1, 2, 3)", "attack.lua:1: wrong number of arguments to 'insert'"),
        ("xpcall(print)", "attack.lua:1: bad argument #2 to 'xpcall' (function expected, got nil)"),
        ("\nstring.find('a', '[')", "attack.lua:2: string.find: malformed pattern (missing ']')"),
    ] {
        let e = fails(&s, text);
        assert!(e.starts_with(want), "{text}: {e}");
    }
}
