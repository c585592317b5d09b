-- nn/init.lua: the parts of networks. Each file beside this one holds a family and can be read by itself.
--
-- A module is a plain table with a `forward`; nn/module.lua says all there is to know about that.

local nn = { module = require("perilune.nn.module").module, is_module = require("perilune.nn.module").is_module }

for _, family in ipairs {
  require "perilune.nn.linear", require "perilune.nn.conv", require "perilune.nn.embedding", require "perilune.nn.norm",
  require "perilune.nn.batch_norm", require "perilune.nn.activation", require "perilune.nn.dropout", require "perilune.nn.shape",
  require "perilune.nn.sequential", require "perilune.nn.attention", require "perilune.nn.transformer", require "perilune.nn.moe",
  require "perilune.nn.rnn", require "perilune.nn.lora", require "perilune.nn.weights", { use_fp8 = require("perilune.nn.fp8").use_fp8 },
} do
  for name, part in pairs(family) do nn[name] = part end
end

return nn
