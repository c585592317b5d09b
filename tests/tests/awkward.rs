//! Calls every function of the library and every tensor method with awkward arguments: an error or a value, never a panic.
#![allow(clippy::unwrap_used)]

use perilune_core::Interrupt;
use perilune_cpu::Cpu;
use perilune_lua::{Runtime, RuntimeOptions};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Prints a line for each call that met a panic.
const DRIVER: &str = r#"
local pl = require "perilune"
local state = SEED
local function below(n)
  state = (state * 6364136223846793005 + 1442695040888963407)
  return (state >> 33) % n
end
local cyclic = {} cyclic[1] = cyclic cyclic.x = cyclic
local deep = {} for i = 1, 1000 do deep = { deep } end
local freed = pl.ones({ 2, 2 }) freed:free()
local stale
pl.step(function() stale = pl.ones({ 3 }) * 2 end)
local w = pl.state(pl.ones({ 3, 2 }))
local raising = setmetatable({}, {
  __index = function() error "index" end, __len = function() error "len" end, __tostring = function() error "tostring" end,
  __pairs = function() error "pairs" end, __call = function() error "call" end, __eq = function() error "eq" end,
})
local function values()
  return {
    nil, true, false, 0, -1, 1, 2, 7, 1 << 31, -(1 << 31), 1 << 62, math.maxinteger, math.mininteger, 0 / 0, 1 / 0, -1 / 0, 1e-320, 2.5,
    "", "f32", "sum", "\0", "no such word", ("x"):rep(300), "\27[2J", {}, { 1, nil, 3 }, { 0 }, { 2, 3 }, { -1, 1 << 62 }, { 1.5 }, { "a" }, { {} },
    { { 1, 2 }, { 3 } }, { dtype = "f16" }, { no_such_option = 1 }, { 1, x = 2 }, { keepdim = 3 }, { [0] = 1 }, { [1 << 40] = 1 },
    cyclic, deep, raising, function() end, function(x) return x end, function() return nil, {} end, function() error "as meant" end,
    function() error(raising) end, coroutine.create(function() end), coroutine.wrap(function() coroutine.yield(1) end), coroutine.yield, print,
    freed, stale, w, pl.ones({}), pl.ones({ 2, 3 }), pl.zeros({ 0, 2 }), pl.ones({ 2, 2 }):to("i64"), pl.ones({ 2, 3, 4 }):to("bool"),
    pl.ones({ 2, 3 }):to("bf16"), pl.tensor({ 0 / 0, 1 / 0 }), { pl.ones({ 2 }), pl.ones({ 3 }) }, { w }, { freed }, pl.newaxis, pl, pl.nn, _G,
    { { 0, 1 }, { 1 << 62, -5 } }, { { 0, 1, 0 } }, { forward = function(x) return x end, backward = function() return 1, 2, 3 end },
  }, 74
end
local function short(v)
  local ok, text = pcall(tostring, v)
  return ok and text:sub(1, 40):gsub("%c", " ") or "?"
end
local function try(name, f, first, has_first)
  local function once()
    -- What a call before left recorded may be too large to evaluate, which a new tensor is told.
    local made, pool, n
    repeat made, pool, n = pcall(values) until made
    local count = below(5)
    local args = {}
    for k = 1, count do args[k] = pool[below(n) + 1] end
    if has_first then table.move(args, 1, count, 2) args[1] = first count = count + 1 end
    local call = function() return f(table.unpack(args, 1, count)) end
    local inside = below(4)
    print(name)
    local ok, e
    if inside == 0 then ok, e = pcall(pl.step, call)
    elseif inside == 1 then ok, e = pcall(coroutine.wrap(call))
    else ok, e = pcall(call) end
    local text = short(e)
    if not ok then
      local said, whole = pcall(tostring, e)
      if said and whole:find("internal error", 1, true) then
        local list = {}
        for k = 1, count do list[k] = short(args[k]) end
        print(("%s(%s): %s"):format(name, table.concat(list, ", "), whole:sub(1, 400)))
      end
    end
  end
  for _ = 1, ROUNDS do pcall(once) end -- an interrupt may come between the call and the next
end
local skip = { breakpoint = true, help = true }
local function all(name, t)
  local names = {}
  for k, v in pairs(t) do
    if type(k) == "string" and type(v) == "function" and not skip[k] then names[#names + 1] = k end
  end
  table.sort(names)
  for _, k in ipairs(names) do
    try(name .. k, t[k])
    pl.memory_budget(nil)
    pl.switches({ fusion = true, print_plan = false, check_nan = false, report_misses = false })
  end
end
all("pl.", pl)
if rawget(pl, "native") then all("pl.native.", pl.native) end
for _, part in ipairs { "nn", "optim", "data", "metrics", "init", "tree", "train", "summary" } do
  if type(pl[part]) == "table" then all("pl." .. part .. ".", pl[part]) else try("pl." .. part, pl[part]) end
end
local methods = { "size", "numel", "dim", "item", "tolist", "is_evaluated", "is_state", "assign", "backward", "free" }
for _, name in ipairs(NAMES) do methods[#methods + 1] = name end
for _, name in ipairs(methods) do
  for _, x in ipairs { w, pl.ones({ 2, 3 }), stale, freed } do
    local found, f = pcall(function() return x[name] end)
    if found and type(f) == "function" then try("x:" .. name, f, x, true) end
  end
end
for _, x in ipairs { w, pl.ones({ 2, 3 }), stale, freed } do
  try("x[]", function(k) return x[k] end)
  try("x[]=", function(k, v) x[k] = v end)
  try("x+", function(y) return x + y, y - x, x // y, x % y, x ^ y, -x, #x end)
  try("x.grad", function(y) x.grad = y return x.grad end)
end
"#;

/// Interrupts a call that takes long: a loop to 2^62 has no end.
fn watch(calls: &AtomicU64, done: &AtomicBool, interrupt: &Interrupt) {
    let mut seen = 0;
    while !done.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(500));
        let now = calls.load(Ordering::SeqCst);
        if now == seen {
            interrupt.request();
            std::thread::sleep(Duration::from_millis(100));
            interrupt.clear();
        }
        seen = now;
    }
}

#[test]
fn awkward_arguments_are_errors() {
    let printed: Rc<RefCell<Vec<String>>> = Rc::default();
    let calls = Arc::new(AtomicU64::new(0));
    let (sink, count) = (printed.clone(), calls.clone());
    let print = move |line: &str| {
        count.fetch_add(1, Ordering::SeqCst);
        if line.contains("internal error") {
            sink.borrow_mut().push(line.to_string());
        }
    };
    let runtime = Runtime::new(RuntimeOptions {
        backend: Arc::new(Cpu::limited(Some(1), Some(64 << 20))),
        params: Vec::new(),
        policy: perilune_policy::Policy::closed(),
        strict: true,
        print: Rc::new(print),
    })
    .unwrap();
    runtime.limit_lua_memory(256 << 20).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let watcher = std::thread::spawn({
        let (done, interrupt) = (done.clone(), runtime.host().interrupt.clone());
        move || watch(&calls, &done, &interrupt)
    });
    let folder = tempfile::tempdir().unwrap();
    runtime.set_place(folder.path());
    let names: Vec<String> = perilune_core::ops::all().iter().map(|op| format!("\"{}\"", op.name)).collect();
    let rounds = std::env::var("PERILUNE_AWKWARD_ROUNDS").unwrap_or_else(|_| "6".into());
    let seed = std::env::var("PERILUNE_AWKWARD_SEED").unwrap_or_else(|_| "12345".into());
    let text = DRIVER
        .replace("ROUNDS", &rounds)
        .replace("SEED", &seed)
        .replace("NAMES", &format!("{{ {} }}", names.join(", ")));
    let outcome = runtime.interruptible(|| runtime.load_text(&text, "@awkward.lua")).unwrap();
    done.store(true, Ordering::SeqCst);
    watcher.join().unwrap();
    let panics: Vec<String> = printed.borrow().iter().filter(|line| line.contains("internal error")).cloned().collect();
    assert!(panics.is_empty(), "{} calls panic:\n{}", panics.len(), panics.join("\n"));
    outcome.map(drop).unwrap_or_else(|e| panic!("{e}"));
}
