-- Tests the sandbox: recipes cannot access the system, run bytecode or install finalizers.

local pl = require "perilune"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

describe("the sandbox", function()
  for _, name in ipairs { "os", "io", "debug", "package", "dofile", "loadfile", "collectgarbage", "jit", "newproxy" } do
    it("has no " .. name, function()
      expect(function() return _G[name] end):to_raise(("global '%s' is not defined"):format(name))
    end)
  end

  it("keeps globals undefined", function()
    expect(function() UNDEFINED = 1 end):to_raise "undeclared global 'UNDEFINED'" -- luacheck: ignore
    expect(rawget(_G, "UNDEFINED")):to_be(nil)
  end)

  it("loads text only", function()
    expect(load "return 1 + 1"()):to_be(2)
    local parts = { "return ", "4", "2" }
    local i = 0
    expect(load(function() i = i + 1; return parts[i] end)()):to_be(42)
    local env = { y = 5 }
    expect(load("x = y; return x", "chunk", "t", env)()):to_be(5)
    expect(env.x):to_be(5)
    local f, why = load "\27Lua"
    expect(f):to_be(nil)
    expect(why):to_contain "binary"
    f, why = load("return +", "=chunk")
    expect(f):to_be(nil)
    expect(why):to_contain "chunk:1"
    expect(load("return 1", "=x", "b") ~= nil):to_be_true() -- Perilune forces text mode
    expect(string.dump):to_be(nil)
  end)

  it("names loaded text as its own", function()
    for _, name in ipairs { "@/etc/passwd", "@perilune/nn/init.lua", "=perilune/nn/init.lua", "a\27[2Jb", ("x"):rep(1000) } do
      local _, e = pcall(assert(load("error 'here'", name)))
      expect(tostring(e)):to_contain "load "
      expect(#tostring(e) < 100 and not tostring(e):find "%c"):to_be(true)
    end
  end)

  it("does not show what the library alone may call", function()
    expect(function() return pl.native end):to_raise "perilune has no 'native'"
    expect(function() require "perilune.data.native" end):to_raise "the standard library has no module"
  end)

  it("has no finalisers", function()
    expect(function() setmetatable({}, { __gc = function() end }) end):to_raise "__gc"
    expect(getmetatable(setmetatable({}, { __index = { a = 1 } })).__index.a):to_be(1)
  end)

  it("requires the standard library and files beside the script", function()
    expect(require "perilune"):to_be(pl)
    expect(require "perilune.nn"):to_be(pl.nn)
    expect(require "support"):to_be(t)
    for _, name in ipairs { "../lua", "/etc/passwd", "..", "a/b", "", "a..b" } do
      expect(function() require(name) end):to_raise "is not a module name"
    end
    expect(function() require "nothing_here" end):to_raise "there is no module"
  end)

  it("keeps its metatables", function()
    -- The library's own methods of strings are behind it.
    expect(getmetatable("")):to_be(false)
    expect(("x"):upper()):to_be "X"
    expect(function() getmetatable(pl.zeros { 1 }).__index = nil end):to_raise ""
  end)

  it("keeps errors errors", function()
    local ok, e = pcall(function() return pl.zeros { 2 } + pl.zeros { 3 } end)
    expect(ok):to_be(false)
    expect(tostring(e)):to_contain "sandbox.lua:"
    expect(tostring(e)):to_contain "do not broadcast"
    ok, e = pcall(error, { code = 3 })
    expect(ok):to_be(false)
    expect(e.code):to_be(3)
  end)

  it("keeps frames of tail calls", function()
    local function inner() return pl.zeros { 2 } + pl.zeros { 3 } end
    local function outer() return inner() end
    local _, e = pcall(outer)
    expect(tostring(e)):to_contain "in upvalue 'inner'"
  end)
end)

describe("help", function()
  it("tells an op's contract, and what was meant", function()
    expect(pl.help "softmax"):to_contain "softmax("
    expect(pl.help "pl.softmax"):to_contain "softmax("
    expect(pl.help "sofmax"):to_contain "softmax"
    expect(pl.help()):to_contain "matmul"
  end)
end)
