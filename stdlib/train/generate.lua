-- train/generate.lua: generates text, or anything else, with the recipe's function `sample`.

local pl = require "perilune"
local check = require "perilune.check"
local recipes = require "perilune.train.recipe"
local scope = require "perilune.train.scope"

---@class (partial) perilune.Run
local Run = {}

---Calls `recipe.sample(run, prompt)` and returns what it returns, usually a text.
---The model is in evaluation mode, with the averaged weights if the recipe has `ema`, in the run's precision and without gradients. Weights and
---modes are restored, also after an error. Raises if the recipe has no such function.
---@param prompt string? nil leaves the beginning to the recipe
---@return any sample
function Run:generate(prompt)
  local recipe = self.recipe
  local fn = recipes.part(recipe, "sample")
  if not fn then
    pl.error("run:generate", ("the recipe %s has no function `sample`"):format(check.show(recipe.name or "without a name")),
      "write `function recipe.sample(run, prompt) ... end`, which returns a text; prompt is nil where none is given", recipe.loss or recipe.step)
  end
  if prompt ~= nil and not check.is(prompt, "string") then
    pl.error("run:generate", "the prompt is " .. check.show(prompt), "pass a string, or nothing")
  end
  local _back <close> = scope.evaluation(self)
  local made = pl.no_grad(function() return (recipes.call(self, fn, self, prompt)) end)
  return made
end

return { methods = Run }
