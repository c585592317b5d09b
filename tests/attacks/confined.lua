-- Tries what a confined recipe may not: kernels without the grant, grants that it writes itself, devices filled or kept busy. The harness is
-- repl/tests/attacks.rs: each block is a script of its own. Scripts that need a GPU are errors without one.

--# grants_file: write the file of remembered grants
--# expect: error
local pl = require "perilune"
pl.save(OUTSIDE .. "/.config/perilune/grants.npy", pl.ones { 1 })

--# parent_environment: read the environment of the process that started this one
--# expect: error
local pl = require "perilune"
print(pl.data.text("/proc/self/environ"))

--# own_pipes: read the pipes of the supervisor
--# expect: any
local pl = require "perilune"
for fd = 0, 40 do pcall(pl.data.lines, "/proc/self/fd/" .. fd) end

--# shared_cache: plant a kernel in the cache of the user
--# expect: error
local pl = require "perilune"
for _, dir in ipairs { "../cache/perilune/kernels", "../cache/perilune/products", "../cache/perilune/data/sha256" } do
  pcall(pl.save, dir .. "/planted.npy", pl.ones { 1 })
end
pl.save("../cache/perilune/kernels/planted.safetensors", { w = pl.ones { 1 } })

--# address_flood: ask for many addresses
--# expect: error
local pl = require "perilune"
for i = 1, 200 do pcall(pl.data.lines, "https://localhost/" .. i, { hash = "sha256:" .. ("0"):rep(64) }) end
pl.data.lines("https://localhost/last", { hash = "sha256:" .. ("0"):rep(64) })

--# long_address: ask for an address that fills the pipe
--# expect: error
local pl = require "perilune"
pl.data.lines("https://localhost/" .. ("a"):rep(1 << 22), { hash = "sha256:" .. ("0"):rep(64) })

--# address_with_lines: forge messages of the pipe by an address
--# expect: error
local pl = require "perilune"
pl.data.lines('https://localhost/"}\n{"Walls":{"found":[],"skipped":[]}}\n', { hash = "sha256:" .. ("0"):rep(64) })

--# many_modules: require names that lead out of the folder
--# expect: error
for _, name in ipairs { "outside.secret", "....victim.secret", "/etc/passwd", "pipe" } do assert(not pcall(require, name)) end
require "outside.secret"

--# device_hog: fill the memory of the device
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local all = {}
for i = 1, 1 << 20 do
  all[i] = pl.ones({ 256, 1024, 1024 })
  pl.eval(all[i])
end

--# device_busy: keep the device busy until an interrupt
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local x = pl.randn { 4096, 4096 }
while true do
  x = x:matmul(x) * 0.001
  pl.eval(x)
end

--# kernel_endless: launch a kernel that does not end
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "spin", inputs = "x: f32", outputs = "y",
  source = "__global__ void spin(const float* x, float* y) { volatile float v = x[0]; while (v > 0) { v = v + 1; } y[0] = v; }",
  grid = 1, block = 1, cpu = function(x) return x end,
}
print(k(pl.ones { 1 }):item())

--# kernel_outside: read and write outside the tensors of a kernel
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "out", inputs = "x: f32", outputs = "y",
  source = "__global__ void out(const float* x, float* y) { float* p = (float*)x; for (long i = -1024; i < 1024; i++) y[0] += p[i * 4096]; }",
  grid = 1, block = 1, cpu = function(x) return x end,
}
print(k(pl.ones { 1 }):item())
