-- Compares placements and collectives with what blocks give by hand, on the mesh that it runs on: values, gradients, printing.

local pl = require "perilune"
local n = pl.mesh().dp
local function same(a, b, what)
  local far = (a:to("f64") - b:to("f64")):abs():max():item()
  if far > 1e-9 or table.concat(a.shape, ",") ~= table.concat(b.shape, ",") then error(what .. ": they differ by " .. far .. " " .. table.concat(a.shape, ",")) end
end
local function blocks(x, dim)
  local size, out = x:size(dim) // n, {}
  for r = 1, n do out[r] = x:narrow(dim, (r - 1) * size, size) end
  return out
end
local function fold(list, f)
  local y = list[1]
  for k = 2, #list do y = f(y, list[k]) end
  return y
end
local hand = {
  sum = function(x, dim) return fold(blocks(x, dim), function(a, b) return a + b end) end,
  mean = function(x, dim) return fold(blocks(x, dim), function(a, b) return a + b end) / n end,
  max = function(x, dim) return fold(blocks(x, dim), function(a, b) return a:maximum(b) end) end,
  min = function(x, dim) return fold(blocks(x, dim), function(a, b) return a:minimum(b) end) end,
}
local function gradient(f, x)
  local w = pl.state(x)
  local y = f(w)
  local ramp = pl.arange(y:numel()):to("f64"):reshape(y.shape)
  return pl.grad((y * y * ramp):sum(), { w })
end
local data = pl.eval(pl.randn({ 12, 24, 5 }, { dtype = "f64" }))
local places = {
  function(x) return x end,
  function(x) return x:shard { dp = 0 } end,
  function(x) return x:shard { dp = 1 } end,
  function(x) return x:shard { dp = -1 } end,
  function(x) return pl.eval(x:shard { dp = 1 }) end,
}
for p, place in ipairs(places) do
  for how, f in pairs(hand) do
    for dim = 0, 1 do
      local what = ("%s of dim %d, place %d"):format(how, dim, p)
      same(pl.all_reduce(place(data), "dp", { dim = dim, op = how }), f(data, dim), "all_reduce, " .. what)
      same(pl.reduce_scatter(place(data), "dp", { dim = dim, scatter = 1, op = how }), f(data, dim), "reduce_scatter, " .. what)
      if p < 5 and how ~= "mean" then
        local a = gradient(function(x) return pl.all_reduce(place(x), "dp", { dim = dim, op = how }) end, data)
        local b = gradient(function(x) return f(x, dim) end, data)
        same(a, b, "gradient of all_reduce, " .. what)
      end
    end
  end
  for from = 0, 2 do
    for to = 0, 2 do
      local what = ("from %d to %d, place %d"):format(from, to, p)
      local y = pl.all_to_all(place(data), "dp", from, to):exp()
      same(y, data:exp(), "all_to_all, " .. what)
      same(pl.all_to_all(y, "dp", to, from):full(), data:exp(), "back, " .. what)
    end
  end
  for root = 0, n - 1 do
    for dim = 0, 1 do
      same(pl.broadcast(place(data), "dp", { root = root, dim = dim }), blocks(data, dim)[root + 1], "broadcast")
      local whole = (data * 100):to("i64")
      same(pl.broadcast(place(whole), "dp", { root = root, dim = dim }), blocks(whole, dim)[root + 1], "broadcast of integers")
    end
  end
  same(pl.all_gather(place(data), "dp") * 2, data * 2, "all_gather")
  same(pl.all_reduce(place((data * 100):to("i32")), "dp"), hand.sum((data * 100):to("i32"), 0), "integers")
end
local y = pl.eval(data:shard { dp = 1, tp = 0 })
assert(tostring(y):find("dp: split 1", 1, true) or n == 1, tostring(y):sub(1, 80))
assert(not tostring(pl.eval(y:full())):find("split", 1, true))
print("placed on", n, pl.mesh().tp)
