//! Compares the port of Lua's pattern matcher with the original on random and on selected patterns and subjects.

use crate::host::Host;
use mlua::{Lua, Table};
use perilune_engine::Engine;
use perilune_plan::Null;
use std::sync::Arc;

/// Two Lua states: with the original functions, and with the port.
fn pair() -> (Lua, Lua) {
    let (theirs, ours) = (Lua::new(), Lua::new());
    // The library checks the interrupt of the state's engine.
    ours.set_app_data(Host::new(Engine::new(Arc::new(Null)), perilune_policy::Policy::closed()));
    let string: Table = ours.globals().get("string").expect("a library");
    super::install(&ours, &string).expect("installed");
    (theirs, ours)
}

/// Formats the results of all four functions for a subject and a pattern. Messages are compared without location and name.
const DRIVER: &str = r#"
local s, p, repl, init = ...
local out = {}
local function add(...)
  local list = table.pack(...)
  for i = 1, list.n do list[i] = tostring(list[i]) end
  out[#out + 1] = table.concat(list, "|")
end
local function try(name, f)
  local list = table.pack(pcall(f))
  if list[1] then
    add(name, table.unpack(list, 2, list.n))
  else
    local text = tostring(list[2]):match("^[^\n]*"):gsub("^.-:%d+: ", ""):gsub("^string%.%a+: ", "")
    add(name, "error", (text:gsub("^%s+", "")))
  end
end
try("find", function() return s:find(p, init) end)
try("plain", function() return s:find(p, init, true) end)
try("match", function() return s:match(p, init) end)
try("gmatch", function()
  local all = {}
  for a, b in s:gmatch(p, init) do
    all[#all + 1] = tostring(a) .. "," .. tostring(b)
    if #all > 40 then break end
  end
  return table.concat(all, ";")
end)
try("text", function() return s:gsub(p, repl) end)
try("twice", function() return s:gsub(p, "<%0>", 2) end)
try("function", function() return s:gsub(p, function(a, b) if a ~= "b" then return "[" .. tostring(a) .. tostring(b) .. "]" end end) end)
try("table", function() return s:gsub(p, { a = "A", b = 7, c = false, ab = 1.5 }) end)
return table.concat(out, "\n")
"#;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }

    fn text(&mut self, pieces: &[&[u8]], most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).flat_map(|_| pieces[self.below(pieces.len())].to_vec()).collect()
    }
}

#[test]
fn patterns_mean_what_lua_says() {
    let (theirs, ours) = pair();
    let load = |lua: &Lua| lua.load(DRIVER).set_name("=t").into_function().expect("compiles");
    let (theirs_run, ours_run) = (load(&theirs), load(&ours));
    let pieces: [&[u8]; 46] = [
        b"a", b"b", b"c", b".", b"%a", b"%d", b"%s", b"%w", b"%S", b"%p", b"%x", b"%c", b"%z", b"%.", b"%%", b"[ab]",
        b"[^a]", b"[a-c]", b"[%a_]", b"[]]", b"[^]]", b"[a-]", b"[%]x]", b"*", b"+", b"-", b"?", b"(", b")", b"()",
        b"(a*)", b"(.-)", b"(%w)", b"%1", b"%2", b"%b()", b"%bab", b"%f[%w]", b"%f[^a]", b"^", b"$", b"%", b"[", b"\0",
        b"%f", b"%b",
    ];
    let letters: [&[u8]; 14] =
        [b"a", b"b", b"c", b"ab", b"(", b")", b" ", b"1", b"_", b"]", b"-", b"\0", b"\xe4", b"a b"];
    let replacements: [&[u8]; 8] = [b"x", b"%0", b"%1", b"%2", b"%%", b"%", b"a", b"%9"];
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    for round in 0..30_000 {
        let (s, p, r) = (rng.text(&letters, 12), rng.text(&pieces, 6), rng.text(&replacements, 3));
        let init = rng.below(40) as i64 - 20;
        let run = |lua: &Lua, f: &mlua::Function| -> String {
            let text = |b: &[u8]| lua.create_string(b).expect("a string");
            let out = f.call::<mlua::LuaString>((text(&s), text(&p), text(&r), init)).expect("a text");
            String::from_utf8_lossy(&out.as_bytes()).into_owned()
        };
        let (want, got) = (run(&theirs, &theirs_run), run(&ours, &ours_run));
        let shown = |b: &[u8]| b.escape_ascii().to_string();
        assert_eq!(got, want, "round {round}: \"{}\" \"{}\" \"{}\" {init}", shown(&s), shown(&p), shown(&r));
    }
}

#[test]
fn limits_are_those_of_lua() {
    let (theirs, ours) = pair();
    let cases = [
        r#"return pcall(string.find, ("a"):rep(300), ("a?"):rep(300) .. "b")"#,
        r#"return pcall(string.find, ("a"):rep(40), ("(a)"):rep(33))"#,
        r#"return ("x"):rep(3):gsub("", "-")"#,
        r#"return ("abc"):gsub("%w", "%0%0"), ("abc def"):gsub("(%w+) (%w+)", "%2 %1")"#,
        r#"return ("hello world"):find("o", -5), ("a.b"):find(".", 1, true), ("abc"):find("", 10), ("abc"):find("", 4)"#,
        r#"return string.match(55, "5"), ("12"):gsub(1, 2), ("a"):gsub("a", 1.5)"#,
        r#"return ("a,b,,c"):gsub(",", { [","] = ";" })"#,
        r#"local t = {} for k, v in ("a=1, b=2"):gmatch("(%w+)=(%w+)") do t[#t + 1] = k .. v end return table.concat(t, " ")"#,
        r#"return ("x y"):match("^(%S+)()")"#,
        r#"local f = ("ab"):gmatch("^a") return f(), f()"#,
    ];
    for case in cases {
        let run = |lua: &Lua| -> Vec<String> {
            let values: mlua::MultiValue =
                lua.load(case).set_name("=t").eval().unwrap_or_else(|e| panic!("{case}: {e}"));
            let text = |v: &mlua::Value| v.to_string().map(|t| t.lines().next().unwrap_or_default().to_string());
            let strip = |t: String| t.rsplit(": ").next().unwrap_or_default().to_string();
            values.iter().map(|v| strip(text(v).unwrap_or_default())).collect()
        };
        assert_eq!(run(&ours), run(&theirs), "{case}");
    }
}

#[test]
fn a_text_that_outgrows_the_memory_is_an_error() {
    let (_, ours) = pair();
    super::memory_limit::set(&ours, 64 << 20).expect("set");
    let source = r#"return ("a"):rep(100000):gsub("a", ("b"):rep(100000))"#;
    let e = ours.load(source).eval::<mlua::Value>().expect_err("too long");
    assert!(e.to_string().contains("string.gsub: its result would take"), "{e}");
}
