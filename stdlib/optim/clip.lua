-- optim/clip.lua: clips gradients by norm or value, on the device, with no read-back.
--
-- Optimizers clip in their step (`clip_norm`, `clip_value`); the public functions here are for loops that clip by themselves.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"

local clip = {}

---Converts 16-bit gradients to f32, the dtype of updates.
---@param g perilune.Tensor
---@return perilune.Tensor
function clip.wide(g)
  return (g.dtype == "bf16" or g.dtype == "f16") and g:to("f32") or g
end

---Computes the norm of several tensors as one vector.
---@param tensors perilune.Tensor[]
---@param norm_type number? 2 by default; math.huge for the largest magnitude
---@return perilune.Tensor scalar
function clip.total_norm(tensors, norm_type)
  norm_type = norm_type or 2
  local parts = {}
  for i, g in ipairs(tensors) do
    g = clip.wide(g)
    if norm_type == math.huge then
      parts[i] = g:abs():max()
    elseif norm_type == 2 then
      parts[i] = (g * g):sum()
    else
      parts[i] = (g:abs() ^ norm_type):sum()
    end
  end
  local all = pl.stack(parts, 0)
  if norm_type == math.huge then return (all:max()) end
  if norm_type == 2 then return all:sum():sqrt() end
  return all:sum() ^ (1 / norm_type)
end

---Computes min(1, max / (norm + 1e-6)), the factor that reduces a norm to `max`, as in PyTorch.
---@param norm perilune.Tensor
---@param max number
---@return perilune.Tensor scalar
function clip.factor(norm, max)
  return (max / (norm + 1e-6)):clamp(nil, 1)
end

---Lists the States of a module (trainable ones), a list of States, or a list of { path =, state = }.
---@param op string
---@param params any
---@return perilune.Entry[]
function clip.entries(op, params)
  if pl.is_state(params) then return { { path = "1", state = params } } end
  if type(params) ~= "table" then
    pl.error(op, "the parameters are " .. check.show(params), "give a module, a list of States, or model:parameters()")
  end
  local out = {}
  if #params == 0 or getmetatable(params) then
    for _, entry in ipairs(tree.states(params)) do
      if entry.state.trainable then out[#out + 1] = entry end
    end
    return out
  end
  for i, p in ipairs(params) do
    if pl.is_state(p) then
      out[i] = { path = tostring(i), state = p }
    elseif type(p) == "table" and pl.is_state(p.state) and type(p.path) == "string" then
      out[i] = { path = p.path, state = p.state }
    else
      pl.error(op, ("parameter %d is %s"):format(i, check.show(p)),
        "a parameter is a State, as in pl.state(pl.zeros({8})); pass a module itself, not in a list")
    end
  end
  return out
end

local function with_grad(op, params)
  local states, grads = {}, {}
  for _, entry in ipairs(clip.entries(op, params)) do
    local g = entry.state.grad
    if g then states[#states + 1], grads[#grads + 1] = entry.state, g end
  end
  if #grads == 0 then pl.error(op, "no parameter has a gradient", "call loss:backward() before it, in the same step") end
  return states, grads
end

---Scales all gradients so that their total norm is at most `max`. Returns the norm before.
---Pascanu et al., On the difficulty of training recurrent neural networks (2013).
---@param params perilune.Module|perilune.State[]|perilune.Entry[]
---@param max number
---@param opts {norm_type?: number}? norm_type: p of the p-norm, math.huge for the largest magnitude
---@return perilune.Tensor norm
function clip.clip_grad_norm(params, max, opts)
  local op = "optim.clip_grad_norm"
  check.between(op, "max", max, 0, math.huge)
  local o = check.options(op, opts, { norm_type = 2 })
  local states, grads = with_grad(op, params)
  local norm = clip.total_norm(grads, o.norm_type)
  local factor = clip.factor(norm, max)
  for i, state in ipairs(states) do state.grad = grads[i] * factor end
  return norm
end

---Clamps every element of every gradient to [-max, max].
---@param params perilune.Module|perilune.State[]|perilune.Entry[]
---@param max number
function clip.clip_grad_value(params, max)
  local op = "optim.clip_grad_value"
  check.between(op, "max", max, 0, math.huge)
  local states, grads = with_grad(op, params)
  for i, state in ipairs(states) do state.grad = grads[i]:clamp(-max, max) end
end

return clip
