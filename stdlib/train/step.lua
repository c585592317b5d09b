-- train/step.lua: records one training step: forward pass, loss, backward pass, optimizer update, moving average.
--
-- `step` is the default of `recipe.step`; to change it, copy it into a recipe. With one batch a step, in f32, it reduces to
--
--   function recipe.step(run, batch)
--     local loss, metrics = recipe.loss(run.model, batch)
--     loss:backward()
--     run.opt:step()
--     return loss, metrics
--   end

local accumulator = require "perilune.train.accumulate"
local optimizers = require "perilune.train.optimizers"
local recipes = require "perilune.train.recipe"
local sample_log = require "perilune.train.sample_log"

---@param run perilune.Run
---@param batches any[][] micro-batches as { batch, number of samples }
---@return perilune.Tensor loss mean over the step
---@return table<string, any> metrics
---@return perilune.train.SampleValues[] each of the micro-batches, for the sample log
local function step(run, batches)
  local recipe, opt, scaler = run.recipe, run.opt --[[@as perilune.Optimizer]], run.scaler -- the loss scaler exists in fp16 only
  local sums, each = accumulator(#batches, scaler ~= nil), {}
  for _, micro in ipairs(batches) do
    local batch, samples = micro[1], micro[2]
    -- Forward pass under autocast; `weight` is the number of tokens or samples that the mean loss is over.
    local loss, metrics, weight, own = recipes.check_loss(recipe, "loss", samples, recipes.call(run, recipe.loss, run.model, batch))
    -- Backward pass. Gradients accumulate in the parameters; only one micro-batch's activations are alive at a time.
    local term = sums:term(loss, weight, samples)
    if scaler then term = scaler:scale(term) end
    term:backward()
    sums:add(metrics)
    if run.sample_log then each[#each + 1] = sample_log.values(run, "loss", samples, loss, own) end
  end
  -- Divide by the weights and the loss scale, clip, evaluate the learning-rate schedule, update weights and moments.
  local norm = opt:step { scale = sums:scale(), scaler = scaler }
  local loss, metrics = sums:means()
  if metrics.grad_norm == nil then metrics.grad_norm = norm end
  if scaler and metrics.loss_scale == nil then metrics.loss_scale = scaler.factor:detach() end
  return loss, metrics, each
end

---Records the recipe's own step or the default one, then updates the moving average of the weights.
return function(run, batches)
  local _known <close> = optimizers.scope(run)
  local own, loss, metrics, each = run.recipe.step, nil, nil, nil ---@type any, any, any, any
  if own then loss, metrics, each = recipes.call(run, own, run, batches[1][1]) else loss, metrics, each = step(run, batches) end
  if run.ema then run.ema:update() end
  if own then
    loss, metrics = recipes.check_loss(run.recipe, "step", 1, loss, metrics)
    each = run.sample_log and { sample_log.values(run, "step", batches[1][2], loss, each) }
  end
  return loss, metrics, each
end
