local pl = require "perilune"
-- The labels are checked when the step runs.
local w = pl.state(pl.zeros({4, 10}))
local labels = pl.tensor {1, 2, 3, 10}     -- 10 classes are 0 to 9
pl.step(function()
  local loss = pl.cross_entropy(w, labels)
  loss:backward()
  return loss
end)
