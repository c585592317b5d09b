-- kernel/check.lua: tests a kernel from CUDA source against its reference: pl.kernel_check.
--
--   pl.kernel_check(scale_rows, { pl.randn { 64, 1000 }, pl.randn { 64 }, 1.5 })
--
-- Runs the kernel and its `cpu` function on the GPU, on the same arguments, and compares every element of every output.

local pl = require "perilune"
local check = require "perilune.check"

local op = "kernel_check"

---Compares a kernel with its reference on a GPU. Returns true, or raises with the element that differs most.
---@param kernel fun(...: any): perilune.Tensor ... from pl.kernel { source = ..., cpu = ... }
---@param arguments any[] of the call
---@param opts {rtol?: number, atol?: number}? rtol: relative tolerance; atol: absolute tolerance
---@return boolean
local function kernel_check(kernel, arguments, opts)
  local known = require("perilune.kernel.source").known[kernel]
  if not known then pl.error(op, "the kernel is " .. check.show(kernel), "pass the result of pl.kernel { source = ... }") end
  if type(arguments) ~= "table" then pl.error(op, "the arguments are " .. check.show(arguments), "a list: { x, w, 1.5 }") end
  local o = check.options(op, opts, { rtol = 1e-5, atol = 1e-6 })
  if not known.cpu then pl.error(op, known.name .. " has no reference", "add `cpu`, a function of tensors that computes the same result") end
  if pl.is_tensor(arguments[1]) and arguments[1].device == "cpu" then
    pl.error(op, "the device is the CPU, where only the reference runs", "run it with --device cuda")
  end
  local reference = known.cpu --[[@as function]]
  local got, want = {}, {}
  pl.no_grad(function()
    got = { known.run(table.unpack(arguments)) }
    want = { reference(table.unpack(arguments)) }
  end)
  for i, y in ipairs(got) do
    local a, b = y:to "f64":flatten(), want[i]:to "f64":flatten()
    if a:numel() > 0 then
      -- NaN equals NaN, and an infinity the same infinity.
      local same = a:eq(b):logical_or(a:isnan():logical_and(b:isnan()))
      local off = a:sub(b):abs():sub(o.atol):sub(b:abs():mul(o.rtol))
      off = pl.where(same, -1.0, pl.where(off:isnan(), math.huge, off))
      local k = off:argmax():item()
      if off:max():item() > 0 then
        pl.error(known.name, ("output %d differs at flat position %d: the kernel gives %.9g, the reference %.9g"):format(i, k, a[k]:item(), b[k]:item()),
          ("the tolerances are rtol %g and atol %g"):format(o.rtol, o.atol))
      end
    end
  end
  return true
end

return kernel_check
