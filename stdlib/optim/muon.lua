-- optim/muon.lua: updates weight matrices by Muon. Keller Jordan et al., Muon: An optimizer for hidden layers in neural networks
-- (2024), https://kellerjordan.github.io/posts/muon/
--
-- The momentum of a matrix is replaced by its nearest orthogonal matrix, approximated by five Newton-Schulz iterations (matmuls
-- only). Convolution weights are matrices (out, rest). Vectors and scalars are updated by AdamW with its own rate, and so are the
-- matrices that `adamw_for(path, state)` selects: the authors advise embeddings and output layers.

local check = require "perilune.check"
local base = require "perilune.optim.base"
local adam = require "perilune.optim.adam"

local rule = { name = "muon" } ---@class perilune.MuonRule: perilune.Rule

---Approximates the orthogonal polar factor of x (M, N): singular values end in about [0.7, 1.2].
---The quintic coefficients maximize the growth of small singular values: a factor of 3.4445 per iteration.
---@param x perilune.Tensor
---@param steps integer
---@return perilune.Tensor
local function newton_schulz(x, steps)
  local tall = x:size(0) > x:size(1)
  if tall then x = x:transpose(0, 1) end
  x = x / (x * x):sum():sqrt():clamp(1e-7)
  for _ = 1, steps do
    local a = x:matmul(x:transpose(0, 1))
    local b = a * -4.7750 + a:matmul(a) * 2.0315
    x = x * 3.4445 + b:matmul(x)
  end
  return tall and x:transpose(0, 1) or x
end

function rule.slots(w)
  return { momentum = base.zeros(w) }
end

function rule.update(w, g, s, o, lr)
  local m = s.momentum * o.momentum + g * (1 - o.momentum)
  s.momentum:assign(m)
  local update = o.nesterov and g * (1 - o.momentum) + m * o.momentum or m
  local rows = w:size(0)
  local columns = w:numel() // rows
  local direction = newton_schulz(update:reshape(rows, columns), o.ns_steps):reshape(w.shape)
  local rate = lr * math.sqrt(math.max(1, rows / columns))
  w:assign(w * (1 - lr * o.weight_decay) - direction * rate)
end

---@class perilune.MuonOptions
---@field lr number|perilune.Schedule? learning rate of matrices, schedule or function of the step; 0.02 by default
---@field momentum number? decay of the mean of gradients; 0.95 by default
---@field nesterov boolean? whether the step looks ahead along the momentum; true by default
---@field weight_decay number? decoupled
---@field ns_steps integer? Newton-Schulz iterations; 5 by default
---@field adamw {lr: number|perilune.Schedule, betas: number[], eps: number, weight_decay: number}? options of the parameters that AdamW updates
---@field adamw_for (fun(path: string, state: perilune.State): boolean)? selects matrices for AdamW
---@field clip_norm number? limit of the norm of all gradients together
---@field clip_value number? limit of each element of a gradient

---Makes Muon: orthogonalized momentum for matrices, AdamW for other parameters. Jordan et al. (2024).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts perilune.MuonOptions?
---@return perilune.Optimizer
local function Muon(target, opts)
  local defaults = { momentum = 0.95, nesterov = true, weight_decay = 0, ns_steps = 5 }
  return base.new("Muon", target, opts, defaults, { adamw = "table", adamw_for = "function" }, function(o, entry)
    check.whole("optim.Muon", "ns_steps", o.ns_steps)
    if #entry.state.shape >= 2 and not (o.adamw_for and o.adamw_for(entry.path, entry.state)) then return rule, o end
    local a = check.options("optim.Muon adamw", o.adamw, { betas = { 0.9, 0.95 }, eps = 1e-8, weight_decay = 0 }, { lr = "number|function" })
    adam.check_betas("optim.Muon adamw", a.betas)
    return adam.adamw_rule, a, a.lr or 3e-4
  end, 0.02)
end

return { Muon = Muon, newton_schulz = newton_schulz }
