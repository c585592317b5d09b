-- Tries to run kernels without leave, and hostile kernels with it. The harness is repl/tests/attacks.rs: each block is a script of its own.
-- `walled`: an error where the recipe is confined. Scripts that need a GPU are errors without one.

--# no_grant: make a kernel without leave, in every form
--# expect: walled
local pl = require "perilune"
local source = "__global__ void k(const float* x, float* y) { y[0] = x[0]; }"
local same = function(x) return x end
local forms = {
  { name = "k", inputs = "x: f32", outputs = "y", source = source, grid = 1, block = 1, cpu = same },
  { name = "k", inputs = "x", source = source, cpu = same },
  setmetatable({ name = "k", inputs = "x: f32", cpu = same }, { __index = { source = source } }),
  { name = "k", inputs = "x: f32", source = source, cpu = same, expr = "x" },
}
local made = 0
for _, form in ipairs(forms) do if pcall(pl.kernel, form) then made = made + 1 end end
error(made == 0 and "no kernel is made" or nil)

--# no_grant_in_step: make a kernel in a step
--# expect: walled
local pl = require "perilune"
return require "base" { loss = function(m, b)
  pl.kernel { name = "k", inputs = "x: f32", source = "__global__ void k(const float* x, float* y) {}", cpu = function(x) return x end }
  return m(b.x):mean()
end } -- a recipe

--# no_grant_by_module: reach the kernels of source below the library
--# expect: error
local source = require "perilune.kernel.source"
source.kernel { name = "k", inputs = "x", source = "", cpu = function(x) return x end, grant = true }

--# expression: put source into an expression
--# expect: error
local pl = require "perilune"
for _, expr in ipairs { "x; asm(\"trap;\")", "x /* */", "__shfl_sync(~0, x, 0)", "*(float*)0", "x)\n#include \"/etc/passwd\"\n(x", "({ while(1); x; })", "x[1000000]" } do
  assert(not pcall(pl.kernel, { inputs = "x", expr = expr }))
end
pl.kernel { inputs = "x", expr = "x; }" }

--# expression_deep: nest an expression without end
--# expect: any
local pl = require "perilune"
local f = pl.kernel { inputs = "x", expr = ("("):rep(100000) .. "x" .. (")"):rep(100000) }
print(f(pl.ones { 1 }):item())

--# expression_names: name inputs as code
--# expect: error
local pl = require "perilune"
pl.kernel { inputs = "x) { } int main(", expr = "x" }

--# include_host_file: include a file of this computer
--# expect: error
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1, block = 1, cpu = function(x) return x end,
  source = '#include "' .. OUTSIDE .. '/secret.txt"\n#include "/etc/passwd"\n__global__ void k(const float* x, float* y) { y[0] = x[0]; }',
}
print(k(pl.ones { 1 }):item())

--# include_probe: learn by an include whether a file is there
--# expect: error
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1, block = 1, cpu = function(x) return x end,
  source = '#if __has_include("' .. OUTSIDE .. '/secret.txt")\n#error it is there: 4711\n#endif\n#error it is not there\n__global__ void k(const float* x, float* y) {}',
}
print(k(pl.ones { 1 }):item())

--# huge_source: compile a source of great size
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1, block = 1, cpu = function(x) return x end,
  source = ("__device__ int f%d() { return 1; }\n"):rep(1):rep(400000):gsub("%%d", "") .. "__global__ void k(const float* x, float* y) {}",
}
print(k(pl.ones { 1 }):item())

--# template_bomb: instantiate templates without end
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1, block = 1, cpu = function(x) return x end,
  source = "template<int N> struct F { static const int v = F<N - 1>::v + F<N - 2>::v * F<N - 1>::v; };\n__global__ void k(const float* x, float* y) { y[0] = F<1 << 30>::v; }",
}
print(k(pl.ones { 1 }):item())

--# write_outside: write far outside the tensors of a kernel
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1, block = 1, cpu = function(x) return x end,
  source = "__global__ void k(const float* x, float* y) { for (long i = 0; i < (1l << 36); i += 4096) y[i] = 1; }",
}
print(k(pl.ones { 1 }):item())

--# print_flood: print from a kernel
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 4096, block = 256, cpu = function(x) return x end,
  source = '__global__ void k(const float* x, float* y) { for (int i = 0; i < 100; i++) printf("%c[2Jowned\\n", 27); y[0] = 1; }',
}
print(k(pl.ones { 1 }):item())

--# device_heap: take the heap of the device in a kernel
--# expect: stops
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1024, block = 1024, cpu = function(x) return x end,
  source = "__global__ void k(const float* x, float* y) { for (;;) { char* p = (char*)malloc(1 << 16); if (!p) break; p[0] = 1; } y[0] = 1; }",
}
print(k(pl.ones { 1 }):item())

--# launch_shape: launch with a grid that no device has
--# expect: error
local pl = require "perilune"
if pl.ones({ 1 }).device == "cpu" then error "this needs a GPU" end
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", grid = 1 << 40, block = 1 << 20, shared = 1 << 30, cpu = function(x) return x end,
  source = "__global__ void k(const float* x, float* y) { y[0] = 1; }",
}
print(k(pl.ones { 1 }):item())

--# output_shape: claim an output larger than the device
--# expect: error
local pl = require "perilune"
local k = pl.kernel {
  name = "k", inputs = "x: f32", outputs = "y", shape = function() return { 1 << 40, 1 << 20 } end, grid = 1, block = 1,
  source = "__global__ void k(const float* x, float* y) {}", cpu = function() return "no tensor" end,
}
print(k(pl.ones { 1 }):item())
