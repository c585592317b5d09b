-- kernel/source.lua: launches custom kernels from CUDA C++ source.
--
--   local scale_rows = pl.kernel {
--     name = "scale_rows", inputs = "x: f32, w: f32", outputs = "y", scalars = "alpha",
--     source = [[
--       __global__ void scale_rows(const float* x, const float* w, float* y, int cols, float alpha) {
--         for (int c = threadIdx.x; c < cols; c += blockDim.x) {
--           long long i = (long long)blockIdx.x * cols + c;
--           y[i] = alpha * w[blockIdx.x] * x[i];
--         }
--       }
--     ]],
--     grid = function(x) return x:size(0) end, block = 256,
--     args = function(x) return x:size(1) end,
--     cpu = function(x, w, alpha) return alpha * w:unsqueeze(1) * x end,
--   }
--
-- The __global__ function receives the addresses of the inputs, those of the outputs, the numbers of `args`, and the scalars by
-- value. Inputs are contiguous and read-only; outputs are not initialized. A call is one node of the graph: planned, captured in
-- CUDA graphs, and differentiated by `backward`. On the CPU the launch is checked and `cpu` computes the result;
-- `pl.kernel_check` compares the two on a GPU.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local signature = require "perilune.kernel.signature"

local M = {}

---The kernels made here, by the function returned; pl.kernel_check reads it.
---@type table<function, {name: string, run: function, cpu: function?}>
M.known = setmetatable({}, { __mode = "k" })

local most_threads, most_numbers, most_outputs = 1024, 32, 8
local most_blocks = { 2147483647, 65535, 65535 }   -- of every GPU, by axis of the grid

local options = { name = "string", inputs = "string", outputs = "string", scalars = "string", source = "string", shape = "function",
                  grid = "number|table|function", block = "number|table|function", shared = "number|function", args = "function",
                  cpu = "function", backward = "function" }

---Evaluates an option that is a constant or a function of the call's arguments.
local function value(rule, ...)
  if check.is(rule, "function") then return rule(...) end
  return rule
end

local function whole(v, least)
  return math.type(v) == "integer" and v >= least or (math.type(v) == "float" and v == math.floor(v) and v >= least)
end

---Checks the extents of a grid or block, a number or a list of one to three; returns three.
local function extents(name, what, v, least)
  local list = type(v) == "number" and { v } or v
  local fine = type(list) == "table" and #list >= 1 and #list <= 3
  for _, n in ipairs(fine and list or {}) do fine = fine and whole(n, least) end
  if not fine then
    local words = {}
    for i, n in ipairs(type(v) == "table" and v or {}) do words[i] = tostring(n) end
    local got = type(v) == "table" and "{" .. table.concat(words, ", ") .. "}" or check.show(v)
    pl.error(name, ("%s is %s"):format(what, got), ("it must be a whole number from %d on, or a list of one to three: %s = { 8, 4 }"):format(least, what))
  end
  local out = {}
  for i = 1, 3 do out[i] = math.tointeger(list[i] or 1) end
  return out
end

---Checks that the source defines the function and uses no feature that the launch cannot provide.
local function check_source(name, source)
  if not name:match "^[%a_][%w_]*$" then pl.error("kernel", ("name is '%s'"):format(name), "it must be the name of the __global__ function in source") end
  if not source:find("%f[%w_]" .. name .. "%s*%(") then
    local found = {}
    for word in source:gmatch "__global__[^;{(]-([%a_][%w_]*)%s*%(" do found[#found + 1] = word end
    local near = native.near(name, found)
    pl.error(name, "its source has no function of that name", near and ("did you mean name = \"%s\"?"):format(near)
      or #found > 0 and "functions there are " .. table.concat(found, ", ") or ("write `__global__ void %s(...)` there"):format(name))
  end
  for _, word in ipairs { "__cluster_dims__", "__grid_constant__" } do
    if source:find(word, 1, true) then pl.error(name, ("its source has %s"):format(word), "kernels from source support neither clusters nor structures by value") end
  end
end

---Makes a kernel from the options of pl.kernel with `source`.
---@param given perilune.SourceKernelOptions
---@return fun(...: any): perilune.Tensor ...
function M.kernel(given)
  local op = "kernel"
  if given["expr"] ~= nil then pl.error(op, "it has both expr and source", "an elementwise kernel is an expr, any other one a source") end
  check.options(op, given, {}, options)
  check.required(op, given, { "name", "inputs", "source" })
  local name, source = given.name, given.source
  check_source(name, source)
  local sig = signature.new(name, given, true)
  local inputs, outputs, scalars = sig.inputs, sig.outputs, sig.scalars
  if #inputs == 0 then pl.error(name, "inputs is empty", "a kernel needs at least one tensor, which determines its device") end
  if #outputs == 0 or #outputs > most_outputs then pl.error(name, ("it has %d outputs"):format(#outputs), ("from 1 to %d"):format(most_outputs)) end
  if given.backward and #outputs > 1 then
    pl.error(name, "it has several outputs and a backward", "this version differentiates kernels with one output only: split the kernel, or omit backward")
  end
  local file, line = native.source_place(source)
  local names = {}   -- for messages: inputs, scalars, outputs, in the order of the parameters' addresses
  for _, list in ipairs { inputs, scalars, outputs } do table.move(list, 1, #list, #names + 1, names) end

  ---Checks the arguments of a call; numbers become scalar tensors of their declared dtypes.
  local function arguments(...)
    local list = sig:check(...)
    for i, scalar in ipairs(scalars) do
      local v, dtype = list[#inputs + i], sig.dtypes[scalar] or "f32" ---@type any, any
      list[#inputs + i] = type(v) == "number" and pl.full({}, v, { dtype = dtype }) or v:to(dtype)
    end
    return list
  end

  ---Computes the shapes and dtypes of the outputs.
  ---@return any list for each output its sizes, with the dtype as a field
  local function results(...)
    local shapes = given.shape and table.pack(given.shape(...))
    if shapes and shapes.n ~= #outputs then
      pl.error(name, ("shape returned %d values for %d outputs"):format(shapes.n, #outputs), "return a list of sizes for each output", given.shape)
    end
    local first = (...)
    local out = {}
    for i, output in ipairs(outputs) do
      local sizes = shapes and shapes[i] or first.shape
      local fine = type(sizes) == "table"
      for _, n in ipairs(fine and sizes or {}) do fine = fine and whole(n, 0) end
      if not fine then
        pl.error(name, ("shape returned %s for %s"):format(check.show(sizes), output), "return a list of sizes, as in { x:size(0), 4 }", given.shape)
      end
      local dtype = sizes.dtype or sig.dtypes[output] or first.dtype
      check.word(name, "dtype of " .. output, dtype, signature.dtypes)
      out[i] = { table.unpack(sizes --[[@as any]]) }
      for k, n in ipairs(out[i]) do out[i][k] = math.tointeger(n) end
      out[i].dtype = dtype
    end
    return out
  end

  local function text(meta) return ("{%s} %s"):format(table.concat(meta, ", "), meta.dtype) end

  ---Runs the reference `cpu` and checks that its results have the shapes and dtypes `want`.
  local function reference(want, ...)
    local got = table.pack((given.cpu --[[@as function]])(...))
    if got.n ~= #outputs then pl.error(name, ("cpu returned %d values for %d outputs"):format(got.n, #outputs), "return a tensor for each output", given.cpu) end
    for i, y in ipairs(got) do
      local fine = pl.is_tensor(y) and y.dtype == want[i].dtype and #y.shape == #want[i]
      for k, n in ipairs(fine and y.shape or {}) do fine = fine and n == want[i][k] end
      if not fine then
        local is = check.show(y)
        if pl.is_tensor(y) then
          local meta = { table.unpack(y.shape) } ---@type table
          meta.dtype = y.dtype
          is = text(meta)
        end
        pl.error(name, ("cpu returned %s for %s, which is declared as %s"):format(is, outputs[i], text(want[i])), "the reference must have the outputs of the kernel", given.cpu)
      end
    end
    return table.unpack(got, 1, got.n)
  end

  ---Builds the launch of a call. Raises, on every device, for a launch that no GPU accepts.
  local function launch(...)
    local list, made_of = arguments(...), results(...)
    local block = extents(name, "block", value(given.block or 256, ...), 1)
    local threads = block[1] * block[2] * block[3]
    if threads > most_threads then
      pl.error(name, ("block has %d threads"):format(threads), ("a block has at most %d"):format(most_threads))
    end
    local elements = 1
    for _, n in ipairs(made_of[1]) do elements = elements * n --[[@as integer]] end
    -- By default one thread for each element of the first output.
    local grid = extents(name, "grid", given.grid == nil and (elements + threads - 1) // threads or value(given.grid, ...), 0)
    for axis, most in ipairs(most_blocks) do
      if grid[axis] > most then
        pl.error(name, ("grid is {%d, %d, %d}"):format(grid[1], grid[2], grid[3]), ("its extent %d may be at most %d"):format(axis, most))
      end
    end
    local shared = value(given.shared or 0, ...)
    if not whole(shared, 0) then pl.error(name, "shared is " .. check.show(shared), "it must be a number of bytes") end
    local numbers = given.args and table.pack(given.args(...)) or { n = 0 }
    for i = 1, numbers.n do
      if not whole(numbers[i], math.mininteger) then
        pl.error(name, ("args returned %s"):format(check.show(numbers[i])), "args must be whole numbers, which are part of the plan; pass other numbers as scalars", given.args)
      end
      numbers[i] = math.tointeger(numbers[i])
    end
    if numbers.n > most_numbers then pl.error(name, ("args returned %d numbers"):format(numbers.n), ("at most %d"):format(most_numbers), given.args) end
    return {
      name = name, text = source, file = file, line = line, names = names, inputs = list, scalars = #scalars, outputs = made_of, grid = grid, block = block,
      shared = math.tointeger(shared), args = { table.unpack(numbers, 1, numbers.n) },
    }
  end

  local function run(...) return native.source_kernel(launch(...)) end

  local function forward(...)
    local first = (...)
    if not (pl.is_tensor(first) and first.device == "cpu") then return run(...) end
    local call = launch(...)
    if not given.cpu then
      pl.error(name, "its CUDA source needs a GPU, but the device is the CPU", "add `cpu`, a function of tensors that computes the same result, or run with --device cuda")
    end
    local got = { reference(call.outputs, ...) }
    native.record_offline_kernel(call, got)
    return table.unpack(got)
  end

  ---Raises for a gradient of a kernel without `backward`, on every device.
  local function refuse()
    pl.error(name, "it has no backward, so it cannot be differentiated", ("add one: backward = function(grad, %s) ... end"):format(sig.usage:match "%((.*)%)"))
  end

  local kernel
  if #outputs == 1 then
    kernel = pl.custom { name = name, forward = forward, backward = given.backward or refuse }
  else
    kernel = function(...)
      local got = { pl.no_grad(forward, ...) }
      for i, y in ipairs(got) do
        got[i] = pl.custom { name = name, forward = function() return y end, backward = refuse }(...)
      end
      return table.unpack(got)
    end
  end
  M.known[kernel] = { name = name, run = run, cpu = given.cpu and function(...) return reference(results(...), ...) end }
  return kernel
end

return M
