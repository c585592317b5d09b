-- Takes one step of each optimizer over parameters of many sizes.
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim

for _, name in ipairs { "SGD", "Adam", "AdamW", "Lion", "RMSprop", "Adafactor", "Muon" } do
  local model = nn.Sequential { nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 64), nn.LayerNorm(64), nn.Linear(64, 7) }
  local opt = optim[name](model, { lr = 1e-3, clip_norm = 1 })
  for _ = 1, 2 do
    local y = model(pl.randn { 16, 20 })
    local loss = (y * y):mean()
    loss:backward()
    opt:step()
  end
end
