-- kernel/init.lua: defines custom kernels: pl.kernel.
--
--   local swish = pl.kernel { name = "swish", inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }
--   local y = swish(x, 1.5)
--
-- An elementwise kernel is an expression (expr.lua), which fuses with its neighbours and runs on every device. Any other
-- kernel is CUDA C++ source (source.lua). Scalars are run-time numbers: a new value compiles nothing.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.KernelOptions
---@field name string? for errors
---@field inputs string names of the tensors, in order: "x" or "x, y: bf16"; an argument must have the dtype declared
---@field scalars string? names of the numbers that follow the tensors
---@field expr string an expression of the inputs and scalars
---@field backward (fun(grad: perilune.Tensor, ...: any): perilune.Tensor?, ...)? returns the gradient of each input, from the gradient of the result and the arguments of the call

---@class perilune.SourceKernelOptions
---@field name string of the __global__ function in source
---@field inputs string as above
---@field outputs string? names of the results, "y" by default; a dtype may follow, by default that of the first input
---@field scalars string? names of the numbers that follow, passed by value as f32 or the declared dtype
---@field source string CUDA C++
---@field shape (fun(...: any): integer[] ...)? returns the shape of each output, from the arguments; by default that of the first input
---@field grid integer|integer[]|(fun(...: any): integer|integer[])? blocks; by default one thread for each element of the first output
---@field block integer|integer[]|(fun(...: any): integer|integer[])? threads of a block, 256 by default
---@field shared integer|(fun(...: any): integer)? bytes of dynamic shared memory
---@field args (fun(...: any): integer ...)? returns whole numbers passed after the outputs, such as sizes
---@field cpu (fun(...: any): perilune.Tensor ...)? reference implementation with ops: runs on the CPU and in pl.kernel_check
---@field backward (fun(grad: perilune.Tensor, ...: any): perilune.Tensor?, ...)? as above

---Makes a function of tensors from an elementwise expression or from CUDA source.
---@param given perilune.KernelOptions|perilune.SourceKernelOptions
---@return fun(...: any): perilune.Tensor ...
local function kernel(given)
  local op = "kernel"
  if type(given) ~= "table" then pl.error(op, "the argument is " .. check.show(given), 'pl.kernel { inputs = "x", expr = "x * x" }') end
  ---@cast given -nil
  if given["source"] ~= nil then return require("perilune.kernel.source").kernel(given --[[@as perilune.SourceKernelOptions]]) end
  if given["expr"] == nil then pl.error(op, "it has neither expr nor source", 'an elementwise one is an expr: expr = "x * x"; any other is CUDA source') end
  return require("perilune.kernel.expr").kernel(given --[[@as perilune.KernelOptions]])
end

return kernel
