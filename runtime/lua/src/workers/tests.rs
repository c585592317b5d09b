use super::state::States;
use super::*;
use crate::{Runtime, RuntimeOptions, no_tail_calls};
use mlua::{AnyUserData, UserData};
use perilune_data::records::{Dataset, List};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// A native object that workers share.
#[derive(Clone)]
struct Shared(Arc<String>);

impl UserData for Shared {
    fn add_methods<M: mlua::UserDataMethods<Self>>(methods: &mut M) {
        crate::boundary::Methods(methods).add_method("text", |_, this, ()| Ok(this.0.to_string()));
    }
}

use mlua::UserDataMethods;

struct SharedText(Arc<String>);

impl Portable for SharedText {
    fn bring(self: Arc<Self>, lua: &Lua) -> mlua::Result<mlua::Value> {
        Ok(mlua::Value::UserData(lua.create_userdata(Shared(self.0.clone()))?))
    }

    fn fingerprint(&self) -> [u8; 32] {
        *blake3::hash(self.0.as_bytes()).as_bytes()
    }
}

pub(super) fn recognise(object: &AnyUserData) -> Option<Arc<dyn Portable>> {
    Some(Arc::new(SharedText(object.borrow::<Shared>().ok()?.0.clone())))
}

fn runtime() -> Runtime {
    let backend = Arc::new(perilune_cpu::Cpu::new(Some(1)));
    let (params, policy, print) = (Vec::new(), perilune_policy::Policy::closed(), Rc::new(|_: &str| ()));
    Runtime::new(RuntimeOptions { backend, params, policy, strict: true, print }).expect("a runtime")
}

/// Runs a chunk called sft.lua, which returns a function.
fn function(runtime: &Runtime, text: &str) -> Function {
    let chunk = no_tail_calls::compile(runtime.lua(), text, "@sft.lua", None).expect("compiles");
    chunk.call(()).expect("returns a function")
}

fn carried(runtime: &Runtime, text: &str) -> Arc<LuaFunction> {
    carry(runtime.lua(), "map", &function(runtime, text), 0).expect("can be copied")
}

/// The message for a function that cannot be copied.
fn refused(text: &str) -> String {
    let runtime = runtime();
    match carry(runtime.lua(), "map", &function(&runtime, text), 0) {
        Ok(_) => panic!("copied: {text}"),
        Err(e) => crate::RecipeError::new(&e).to_string(),
    }
}

fn record(fields: &[(&str, Value)]) -> Record {
    Record { fields: fields.iter().map(|(name, value)| ((*name).into(), value.clone())).collect() }
}

fn text(s: &str) -> Value {
    Value::Text(s.into())
}

/// Calls with a record { n = n }.
fn call(f: &LuaFunction, n: i64) -> Result<Value> {
    f.call(record(&[("n", Value::Int(n))]), n as u64)
}

fn field(value: Value, name: &str) -> Value {
    match value {
        Value::Map(record) => record.get(name).cloned().unwrap_or(Value::Null),
        other => panic!("{other:?} is no record"),
    }
}

const MIXED: &str = r#"
    local floor, fmt = math.floor, string.format
    local words = { "a", "b", [10] = true, sub = { deep = 1.5 } }
    words.self = words
    local function fib(n) return n < 2 and n or fib(n - 1) + fib(n - 2) end
    local even, odd
    function even(n) if n == 0 then return true end return odd(n - 1) end
    function odd(n) if n == 0 then return false end return even(n - 1) end
    local function scaled(x) return x * words.self.sub.deep end
    return function(r)
      return { fib = fib(r.n % 15), even = even(r.n), half = floor(r.n / 2), text = fmt("%03d", r.n), w = scaled(r.n),
               list = { words[1], words[2], words[10] }, up = ("x"):rep(r.n % 4):upper() }
    end"#;

#[test]
fn sixteen_threads_compute_what_the_recipe_does() {
    let runtime = runtime();
    let own = function(&runtime, MIXED);
    let f = carry(runtime.lua(), "map", &own, 0).expect("can be copied");
    assert_eq!(f.place(), "sft.lua:10");
    let expected: Vec<Value> = (0..64)
        .map(|n| {
            let table = crate::record_value::table(runtime.lua(), &record(&[("n", Value::Int(n))])).expect("a table");
            let out = own.call(table).expect("runs");
            crate::record_value::from_lua(runtime.lua(), &out).expect("memory").expect("a record")
        })
        .collect();
    assert_eq!(field(expected[9].clone(), "w"), Value::Float(13.5));
    let (f, expected) = (&f, &expected);
    std::thread::scope(|scope| {
        for k in 0..16 {
            scope.spawn(move || {
                for n in (0..64).map(|n| (n * 7 + k) % 64) {
                    assert_eq!(call(f, n).expect("runs"), expected[n as usize]);
                }
            });
        }
    });
}

#[test]
fn shared_variables_stay_shared() {
    let runtime = runtime();
    let f = carried(
        &runtime,
        "local n, shared = 0, { 5 }
         local function add(k) n = n + k end
         local function get() return n end
         local pair = { a = shared, b = shared }
         return function(r) n = 0; add(r.n); add(1); pair.a[1] = r.n; return { n = get(), same = pair.b[1] } end",
    );
    let out = call(&f, 41).expect("runs");
    assert_eq!((field(out.clone(), "n"), field(out, "same")), (Value::Int(42), Value::Int(41)));
}

#[test]
fn what_cannot_be_copied_is_refused_by_name() {
    let pl = "local pl = require 'perilune'\n";
    for (code, expected) in [
        (
            "local cache = { model = pl.state(pl.ones { 2 }) } return function(r) return cache.model end",
            "upvalue 'cache.model' is a State",
        ),
        ("local x = pl.ones { 2 } return function(r) return x end", "upvalue 'x' is a tensor; use it after :batch"),
        ("local co = coroutine.create(print) return function(r) return co end", "upvalue 'co' is a coroutine"),
        (
            "local t = { { setmetatable({}, {}) } } return function(r) return t end",
            "upvalue 't[1][1]' is a table with a metatable",
        ),
        ("local t = { [{}] = 1 } return function(r) return t end", "upvalue 't' is a table with a table as a key"),
        (
            "local ones = pl.ones return function(r) return ones { 2 } end",
            "upvalue 'ones' is pl.ones, which workers do not have",
        ),
        (
            "local net = pl.nn.Linear(2, 2) return function(r) return net end",
            "upvalue 'net' is a table with a metatable",
        ),
        (
            "local x = pl.ones { 2 }\nlocal function f() return x end\nreturn function(r) return f() end",
            "map at sft.lua:4: upvalue 'x' of the function at sft.lua:3 is a tensor",
        ),
        (
            "local t = {} local u = t for _ = 1, 200 do u.t = {}; u = u.t end return function(r) return t end",
            "nested deeper than",
        ),
        ("local s = ('x'):rep(17 << 20) return function(r) return s end", "take more than 16.0 MiB up to upvalue 's'"),
        (
            "local t = {} for k = 1, 600000 do t[k] = k end return function(r) return t end",
            "take more than 16.0 MiB up to upvalue 't'",
        ),
        ("return math.floor", "map: its function is not written in Lua"),
    ] {
        let message = refused(&format!("{pl}{code}"));
        assert!(message.contains(expected), "{code}\n{message}");
        assert!(message.contains("hint:"), "{message}");
    }
}

#[test]
fn params_and_the_recipe_bring_their_params() {
    let runtime = runtime();
    let text = "local pl = require 'perilune'
        local recipe = pl.recipe { name = 'r', params = { context = 7 } }
        local params = recipe.params
        function recipe.model() return pl.ones { 2 } end
        return function(r) return { n = r.n + recipe.params.context, m = params[r.key] } end";
    let f = carried(&runtime, text);
    let with = |key: &str| f.call(record(&[("n", Value::Int(1)), ("key", text_of(key))]), 0);
    assert_eq!(field(with("context").expect("runs"), "n"), Value::Int(8));
    let message = with("contxt").expect_err("raises").to_string();
    assert!(message.contains("sft.lua:5: ") && message.contains("has no \"contxt\""), "{message}");
}

fn text_of(s: &str) -> Value {
    text(s)
}

#[test]
fn tables_are_walked_in_one_order() {
    let runtime = runtime();
    let f = carried(
        &runtime,
        r#"return function(r)
             local t = { zeta = 1, alpha = 2, [3] = 1, [-1] = 1, [0.5] = 1, [true] = 1, mid = 3, [1] = 1, beta = 4 }
             local seen, walked, k = {}, {}, nil
             for key, value in pairs(t) do
               seen[#seen + 1] = tostring(key)
               t[key] = nil
             end
             for key in pairs { 7, 8, 9 } do walked[#walked + 1] = key end
             local f = { b = 1, a = 2, c = 3 }
             k = next(f)
             while k do walked[#walked + 1] = k; k = next(f, k) end
             assert(next {} == nil and next(t) == nil)
             return { seen = table.concat(seen, " "), walked = table.concat(walked, " ") }
           end"#,
    );
    for _ in 0..20 {
        let (out, _) = state::with_states(States::default(), || call(&f, 0).expect("runs"));
        assert_eq!(field(out.clone(), "seen"), text("true -1 0.5 1 3 alpha beta mid zeta"));
        assert_eq!(field(out, "walked"), text("1 2 3 a b c"));
    }
    let f = carried(&runtime, "return function(r) for _ in pairs { [{}] = 1 } do end end");
    let message = call(&f, 0).expect_err("raises").to_string();
    assert!(message.contains("sft.lua:1: pairs: the table has a table as a key"), "{message}");
}

#[test]
fn sort_is_stable_and_right() {
    let runtime = runtime();
    let f = carried(
        &runtime,
        "return function(r)
           for n = 0, 700, 37 do
             local t, plain = {}, {}
             for k = 1, n do t[k] = { key = k * 7919 % 11, at = k }; plain[k] = k * 7919 % 101 end
             table.sort(t, function(a, b) return a.key < b.key end)
             table.sort(plain)
             for k = 2, n do
               assert(plain[k - 1] <= plain[k] and t[k - 1].key <= t[k].key)
               assert(n <= 200 or t[k - 1].key < t[k].key or t[k - 1].at < t[k].at)
             end
             assert(#t == n and #plain == n)
           end
           return { ok = true }
         end",
    );
    assert_eq!(field(call(&f, 0).expect("sorts"), "ok"), Value::Bool(true));
}

#[test]
fn random_numbers_are_those_of_the_index() {
    let runtime = runtime();
    let code = "local random = math.random
        return function(r) return { a = random(), b = random(6), c = math.random(-5, 5), d = random(0) } end";
    let f = carried(&runtime, code);
    let forwards: Vec<Value> = (0..50).map(|n| call(&f, n).expect("runs")).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..50).rev() {
                assert_eq!(call(&f, n).expect("runs"), forwards[n as usize]);
            }
        });
    });
    assert!(forwards.windows(2).all(|pair| pair[0] != pair[1]));
    let seeded =
        carry_with(runtime.lua(), "map", &function(&runtime, code), 1, Takes::Record, Limits::of(runtime.lua()))
            .expect("copied");
    assert_ne!(call(&seeded, 0).expect("runs"), forwards[0]);
    assert_ne!(seeded.fingerprint(), f.fingerprint());
    for (code, expected) in [
        ("return function(r) math.randomseed(1) end", "math.randomseed: in a worker the seed"),
        ("return function(r) return math.random(2, 1) end", "there is no integer from 2 to 1"),
    ] {
        let message = call(&carried(&runtime, code), 0).expect_err("raises").to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn workers_have_the_standard_libraries_only() {
    let runtime = runtime();
    for (code, expected) in [
        ("return function(r) print(r.n) end", "sft.lua:1: print: a function of a pipeline prints nothing"),
        ("return function(r) return os.time() end", "sft.lua:1: global 'os' is not defined in a worker"),
        ("return function(r) return tostrin(r) end", "did you mean 'tostring'?"),
        ("return function(r) count = 1 end", "assignment to the undeclared global 'count'"),
        (
            "local pl = require 'perilune'\nreturn function(r) return pl.clock() end",
            "sft.lua:2: pl.clock: a function of a pipeline",
        ),
        ("return function(r) return require 'perilune.data'.csv end", "pl.data.csv: a function of a pipeline"),
        ("return function(r) return require 'unknown' end", "a worker has no module \"unknown\""),
        ("return function(r) return load('return 6 * 7')() + nil end", "attempt to perform arithmetic on a nil value"),
        ("return function(r) setmetatable({}, { __gc = print }) end", "__gc is not allowed"),
        ("return function(r) return string.dump(load '') end", "attempt to call a nil value (field 'dump')"),
    ] {
        let message = call(&carried(&runtime, code), 3).expect_err(code).to_string();
        assert!(message.contains(expected) && message.starts_with("map at sft.lua:"), "{code}\n{message}");
    }
}

#[test]
fn errors_name_the_record_and_the_line() {
    let runtime = runtime();
    let f = carried(
        &runtime,
        "local function first(r)\n  return r.words[1]\nend\nreturn function(r)\n  return first(r)\nend",
    );
    let message = call(&f, 12).expect_err("raises").to_string();
    assert!(
        message.starts_with("map at sft.lua:4, record 12: sft.lua:2: attempt to index a nil value (field 'words')"),
        "{message}"
    );
    let list: Arc<dyn Dataset> = Arc::new(List::new("train.jsonl", vec![record(&[("n", Value::Int(1))])]));
    let mapped = perilune_data::records::stages::Map::new(list, f.clone());
    let message = mapped.get(0).expect_err("raises").to_string();
    assert!(message.contains("train.jsonl") && message.contains("sft.lua:2: "), "{message}");
    for (code, expected) in [
        ("return function(r) return { f = print } end", "of what it returns, 'f' is a function"),
        ("return function(r) return { a = { { 1, x = 2 } } } end", "'a[1].x' is a key of a table that is also a list"),
        ("return function(r) error('no answer') end", "record 3: sft.lua:1: no answer"),
        ("return function(r) error { code = 1 } end", "the script raised an error that is a table"),
    ] {
        let message = call(&carried(&runtime, code), 3).expect_err(code).to_string();
        assert!(message.contains(expected), "{code}\n{message}");
    }
    assert_eq!(call(&carried(&runtime, "return function(r) end"), 0).expect("runs"), Value::Null);
}

#[test]
fn a_record_has_limits_of_time_and_memory() {
    let runtime = runtime();
    let limits = Limits { memory: 32 << 20, time: Duration::from_millis(100) };
    let of = |code: &str| {
        carry_with(runtime.lua(), "map", &function(&runtime, code), 0, Takes::Record, limits).expect("copied")
    };
    for code in [
        "return function(r)\n  if r.n > 0 then return { n = r.n } end\n  while true do end\nend",
        "return function(r)\n  if r.n > 0 then return { n = r.n } end\n  while true do pcall(function() while true do end end) end\nend",
        "return function(r)\n  if r.n > 0 then return { n = r.n } end\n  return ('a'):rep(40):find(('.-'):rep(20) .. 'x')\nend",
    ] {
        let (f, start) = (of(code), Instant::now());
        let message = call(&f, 0).expect_err("is ended").to_string();
        assert!(message.contains("sft.lua:3: it has not ended within 0.1 s"), "{message}");
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!(field(call(&f, 5).expect("the next record runs"), "n"), Value::Int(5));
    }
    let f = carry_with(
        runtime.lua(),
        "map",
        &function(
            &runtime,
            "return function(r) local t = {} for k = 1, r.n do t[k] = ('x'):rep(1000) .. k end return { n = #t } end",
        ),
        0,
        Takes::Record,
        Limits { time: Duration::from_secs(20), ..limits },
    );
    let f = f.expect("copied");
    let message = call(&f, 1_000_000).expect_err("is ended").to_string();
    assert!(message.contains("out of Lua memory") && message.contains("32.0 MiB"), "{message}");
    assert_eq!(field(call(&f, 10).expect("the next record runs"), "n"), Value::Int(10));
}

#[test]
fn records_that_are_passed_together_are_computed_as_alone() {
    let runtime = runtime();
    let code = "return function(r)\n  if r.n == 3 then error('three') end\n  if r.n == 4 then return print end\n  \
                while r.n == 5 do end\n  return { n = r.n, draw = math.random() }\nend";
    let limits = Limits { memory: 32 << 20, time: Duration::from_millis(100) };
    let f = carry_with(runtime.lua(), "map", &function(&runtime, code), 7, Takes::Record, limits).expect("copied");
    let many = |numbers: &[i64], indices: &[u64]| {
        f.call_many(numbers.iter().map(|n| record(&[("n", Value::Int(*n))])).collect(), indices)
    };
    let one = |n: i64, index: u64| {
        let (mut values, failed) = many(&[n], &[index]);
        assert!(failed.is_none());
        values.pop().expect("a result")
    };
    let (values, failed) = many(&[1, 2, 1], &[10, 11, 30]);
    assert!(failed.is_none());
    assert_eq!(values, [one(1, 10), one(2, 11), one(1, 30)]);
    assert_ne!(field(values[0].clone(), "draw"), field(values[2].clone(), "draw"), "draws depend on the index");
    for (fault, expected) in [
        (3, "record 21: sft.lua:2: three"),
        (4, "record 21: of what it returns, it is a function"),
        (5, "record 21: sft.lua:4: it has not ended within 0.1 s"),
    ] {
        let (values, failed) = many(&[1, fault, 2], &[20, 21, 22]);
        let message = failed.expect("a fault").to_string();
        assert!(message.contains(expected), "{message}");
        assert_eq!(values, [one(1, 20)]);
    }
    assert!(matches!(many(&[], &[]), (values, None) if values.is_empty()));
}

#[test]
fn an_interrupt_of_the_run_ends_workers() {
    let runtime = runtime();
    let f = carried(&runtime, "return function(r) while r.n < 1 do end return { n = r.n } end");
    let interrupt = runtime.host().interrupt.clone();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&f, 0));
        std::thread::sleep(Duration::from_millis(50));
        interrupt.request();
        assert!(matches!(waiting.join().expect("no panic"), Err(perilune_data::Error::Interrupted)));
    });
    interrupt.clear();
    assert!(call(&f, 1).is_ok());
}

#[test]
fn a_rehearsal_finds_what_depends_on_more_than_the_record() {
    let runtime = runtime();
    let records = (0..40).map(|n| record(&[("n", Value::Int(n)), ("t", text("a b c"))])).collect();
    let list: Arc<dyn Dataset> = Arc::new(List::new("train.jsonl", records));
    let rehearsed = |code: &str| {
        let f = carried(&runtime, code);
        let mapped = perilune_data::records::stages::Map::new(list.clone(), f.clone());
        (rehearse_function(&f, &*list), rehearse(&mapped))
    };
    let pure = "local seen = {} return function(r) seen[r.n] = seen[r.n] or r.n * 2; return { n = seen[r.n], x = math.random() } end";
    let (one, whole) = rehearsed(pure);
    assert!(one.is_ok() && whole.is_ok(), "{one:?} {whole:?}");
    for code in [
        "local count = 0 return function(r) count = count + 1; return { n = count } end",
        "local last return function(r) local n = last; last = r.n; return { n = n } end",
        "return function(r) return { s = tostring({}) } end",
        "return function(r) string.count = (rawget(string, 'count') or 0) + 1; return { n = string.count } end",
        "local done return function(r) if done then error 'twice' end done = true return { n = 0 } end",
    ] {
        let (one, whole) = rehearsed(code);
        let (one, whole) = (one.expect_err(code).to_string(), whole.expect_err(code).to_string());
        assert!(
            one.contains("map at sft.lua:1, record 0 (train.jsonl: record 0): the results in two workers differ"),
            "{one}"
        );
        assert!(whole.contains("record 0 (train.jsonl: record 0): the results in two workers differ"), "{whole}");
    }
    let (one, _) = rehearsed("return function(r) return { n = r.n + r.missing } end");
    assert!(one.expect_err("raises").to_string().contains("attempt to perform arithmetic"));
}

/// Sets the texts of files that the recipe may require.
fn with_files(runtime: &Runtime, files: &[(&str, &str)]) {
    let files: Vec<_> =
        files.iter().map(|(file, text)| (PathBuf::from(format!("./{file}")), text.to_string())).collect();
    let texts: BTreeMap<_, _> =
        files.iter().cloned().map(|(f, t)| (f.strip_prefix("./").map(PathBuf::from).unwrap_or(f), t)).collect();
    runtime.set_texts(&texts.into_iter().collect::<Vec<_>>());
}

const CLEAN: &str = "local rules = require 'parts.rules' local M = {} function M.clean(s) return (s:gsub(rules.space, ' ')) end return M";

#[test]
fn modules_are_those_that_the_recipe_has_required() {
    let code = "local clean = require 'clean' return function(r) return { t = clean.clean(r.t), u = require 'parts.rules'.name } end";
    let of = |rules: &str| {
        let runtime = runtime();
        with_files(&runtime, &[("clean.lua", CLEAN), ("parts/rules.lua", rules)]);
        let f = carried(&runtime, code);
        (f.call(record(&[("t", text("a   b"))]), 0), f.fingerprint())
    };
    let (out, one) = of("return { space = '%s+', name = ... }");
    let out = out.expect("runs");
    assert_eq!((field(out.clone(), "t"), field(out, "u")), (text("a b"), text("parts.rules")));
    let (out, two) = of("return { space = 'a', name = ... }");
    assert_eq!(field(out.expect("runs"), "t"), text("    b"));
    assert_ne!(one, two);
    assert_eq!(one, of("return { space = '%s+', name = ... }").1);
}

#[test]
fn a_fingerprint_is_that_of_code_and_values() {
    let of = |code: &str| carried(&runtime(), code).fingerprint();
    let base = "local k, t = 2, { a = 1, b = 2, c = 3, d = 4, e = 5 } local f = function(x) return x * k end return function(r) return { n = f(r.n), t = t } end";
    let same = format!("-- a comment\n\n{}", base.replace(" return", "\n  return"));
    assert_eq!(of(base), of(&same));
    for (from, to) in
        [("2, {", "3, {"), ("c = 3", "c = 4"), ("c = 3", "x = 3"), ("x * k", "x + k"), ("f(r.n)", "f(r.m)")]
    {
        assert_ne!(of(base), of(&base.replacen(from, to, 1)), "{from}");
    }
}

#[test]
fn native_objects_may_be_shared() {
    let runtime = runtime();
    let shared = Arc::new("in all states".to_string());
    let make = |of: &Arc<String>| {
        let object = runtime.lua().create_userdata(Shared(of.clone())).expect("made");
        let code = "local o = ... return function(r) return { t = o:text() } end";
        let chunk = no_tail_calls::compile(runtime.lua(), code, "@sft.lua", None).expect("compiles");
        carry(runtime.lua(), "map", &chunk.call(object).expect("returns a function"), 0).expect("can be copied")
    };
    let f = make(&shared);
    assert_eq!(field(call(&f, 0).expect("runs"), "t"), text("in all states"));
    assert_ne!(f.fingerprint(), make(&Arc::new("other".into())).fingerprint());
}

#[test]
fn tokenizers_encode_in_workers() {
    let runtime = runtime();
    let head = "local pl = require 'perilune' local tok = pl.data.bytes() return function(r) ";
    let f = carried(
        &runtime,
        &format!("{head} local ids = tok:encode(r.t) return {{ ids = ids, back = tok:decode(ids) }} end"),
    );
    let with = |f: &LuaFunction| f.call(record(&[("t", text("ab"))]), 0);
    let out = with(&f).expect("runs");
    assert_eq!(field(out.clone(), "ids"), Value::List(vec![Value::Int(97), Value::Int(98)]));
    assert_eq!(field(out, "back"), text("ab"));
    for (body, expected) in [
        (
            "return tok:encode(r.t, { tensor = true })",
            "sft.lua:1: tokenizer:encode: option 'tensor' is true; it must be false in a worker",
        ),
        ("return tok:encode(r.t, { special = true })", "unknown option 'special'"),
        ("return tok:encode(r.n)", "tokenizer:encode: the text is nil; it must be a string"),
        ("return tok:decode { 1.5 }", "an id is 1.5"),
        ("return tok:chat { 1 }", "tokenizer:chat: "),
    ] {
        let message = with(&carried(&runtime, &format!("{head} {body} end"))).expect_err(body).to_string();
        assert!(message.contains(expected), "{body}\n{message}");
    }
}

#[test]
fn states_of_functions_that_are_gone_are_closed() {
    let runtime = runtime();
    let make = |k: i64| carried(&runtime, &format!("return function(r) return {{ n = r.n + {k} }} end"));
    std::thread::scope(|scope| {
        let functions: Vec<_> = (0..40).map(make).collect();
        let last = make(100);
        scope.spawn(move || {
            for (k, f) in functions.iter().enumerate() {
                assert_eq!(field(call(f, 1).expect("runs"), "n"), Value::Int(1 + k as i64));
            }
            assert_eq!(States::count(), 32);
            assert_eq!(field(call(&functions[0], 1).expect("runs again"), "n"), Value::Int(1));
            drop(functions);
            assert!(call(&last, 1).is_ok());
            assert_eq!(States::count(), 1);
        });
    });
}

#[test]
fn records_are_made_of_their_numbers() {
    let runtime = runtime();
    let code = "local first = 10 return function(i) return { n = first + i, draw = math.random() } end";
    let f = carry_maker(runtime.lua(), "data.generate", &function(&runtime, code), 0).expect("copied");
    let made = perilune_data::records::Generate::new(20, f.clone());
    let all: Vec<Record> = (0..40).map(|i| made.get(i).expect("runs")).collect();
    assert_eq!(all[7].get("n"), Some(&Value::Int(17)));
    assert!(all[0].get("draw") != all[1].get("draw") && all[..20] == all[20..]);
    assert_eq!(made.origins(27).expect("one")[0].to_string(), "data.generate at sft.lua:1: record 7");
    let other = perilune_data::records::Generate::new(21, f);
    assert_ne!(made.fingerprint(), other.fingerprint());
}
