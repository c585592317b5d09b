-- nn/batch_norm.lua: normalizes each channel over the batch. Ioffe and Szegedy, Batch Normalization (2015).
--
-- Training uses the statistics of the batch and updates the running statistics by `assign`, at the end of the step. Evaluation
-- uses the running statistics. As in PyTorch, `momentum` is the weight of the new value, and the running variance is unbiased.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function forward(self, x)
  if x:dim() ~= 2 and x:dim() ~= self.rank then
    pl.error("nn." .. self.kind, ("x has %d dims"):format(x:dim()), ("it takes (B, C) or a tensor of %d dims with channels in dim 1"):format(self.rank))
  end
  if not self.training then
    return pl.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, { eps = self.eps })
  end
  local n, m = x:numel() // x:size(1), self.momentum
  if n < 2 then
    pl.error("nn." .. self.kind, "one value per channel has no variance", "give a batch of at least 2, or call model:eval()")
  end
  local y, mean, var = pl.batch_norm_train(x, self.weight, self.bias, { eps = self.eps })
  local old_mean, old_var = self.running_mean, self.running_var
  old_mean:assign(old_mean * (1 - m) + mean:detach() * m)
  old_var:assign(old_var * (1 - m) + var:detach() * (m * n / (n - 1)))
  return y
end

local function batch_norm(kind, rank, channels, opts)
  local op = "nn." .. kind
  check.whole(op, "channels", channels)
  local o = check.options(op, opts, { eps = 1e-5, momentum = 0.1, affine = true })
  check.between(op, "momentum", o.momentum, 0, 1)
  return module {
    kind = kind, info = tostring(channels), forward = forward, rank = rank, eps = o.eps, momentum = o.momentum,
    weight = o.affine and pl.state(pl.ones { channels }) or nil,
    bias = o.affine and pl.state(pl.zeros { channels }) or nil,
    running_mean = pl.state(pl.zeros { channels }, { trainable = false }),
    running_var = pl.state(pl.ones { channels }, { trainable = false }),
  }
end

---Normalizes each channel of x (B, C) or (B, C, T).
---@param channels integer
---@param opts {eps?: number, momentum?: number, affine?: boolean}? eps: added to the variance; momentum: weight of the present batch in the running statistics; affine: whether it scales and shifts
---@return perilune.Module
local function BatchNorm1d(channels, opts)
  return batch_norm("BatchNorm1d", 3, channels, opts)
end

---Normalizes each channel of x (B, C, H, W).
---@param channels integer
---@param opts {eps?: number, momentum?: number, affine?: boolean}? eps: added to the variance; momentum: weight of the present batch in the running statistics; affine: whether it scales and shifts
---@return perilune.Module
local function BatchNorm2d(channels, opts)
  return batch_norm("BatchNorm2d", 4, channels, opts)
end

return { BatchNorm1d = BatchNorm1d, BatchNorm2d = BatchNorm2d }
