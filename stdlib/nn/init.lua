-- nn/init.lua: collects the layers. Every other file of this folder defines one family.
--
-- A module is a plain table with a `forward` function; nn/module.lua defines what that means.

local nn = { module = require("perilune.nn.module").module, is_module = require("perilune.nn.module").is_module }

for _, family in ipairs {
  require "perilune.nn.linear", require "perilune.nn.conv", require "perilune.nn.embedding", require "perilune.nn.norm",
  require "perilune.nn.batch_norm", require "perilune.nn.activation", require "perilune.nn.dropout", require "perilune.nn.shape",
  require "perilune.nn.sequential", require "perilune.nn.attention", require "perilune.nn.transformer", require "perilune.nn.moe",
  require "perilune.nn.rnn", require "perilune.nn.lora", require "perilune.nn.weights", require("perilune.nn.rebalance").functions,
  { use_fp8 = require("perilune.nn.fp8").use_fp8 },
} do
  for name, part in pairs(family) do nn[name] = part end
end

return nn
