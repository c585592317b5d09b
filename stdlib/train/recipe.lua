-- train/recipe.lua: defines the fields of a recipe, validates them, and calls its functions in the run's precision.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"

---@class perilune.Recipe
---@field name string of the run directory and the progress line
---@field params table<string, any> what --set can change, with defaults, whose types a value must have
---@field data fun(params: table): table<string, perilune.Loader> returns loaders by name, of which `train` is required, and other values for the model
---@field model fun(params: table, data: table): perilune.Module returns the module to train
---@field optimizer (fun(params: table, model: perilune.Module): perilune.Optimizer|table<string, perilune.Optimizer>)? one optimizer, or several by name for a `step` of the recipe
---@field loss (fun(model: perilune.Module, batch: table): perilune.Tensor, table?, any, any)? the mean loss, metrics (scalar tensors by name), the weight of the batch, and the losses of its samples for the sample log
---@field evaluate (fun(model: perilune.Module, batch: table): any, table?, any)? replaces `loss` in evaluations
---@field step (fun(run: perilune.Run, batch: table): perilune.Tensor, table?, any)? replaces the default step
---@field ema (number|fun(params: table, model: perilune.Module): perilune.EMA)? decay of a moving average of the weights, which evaluations use
---@field accumulate integer? micro-batches of a step
---@field steps integer? length of the run, if params has no `steps`
---@field memory_budget string|integer? device memory of a step, such as "20GiB": activations are recomputed until it fits
---@field precision "f32"|"tf32"|"bf16"|"fp16"|"fp8"? of matrix products, convolutions and attention; weights, statistics and losses stay f32
---@field eval_every integer? steps between evaluations
---@field on_nan "stop"|"skip"|"warn"? policy for a NaN or infinite loss or gradient norm; "stop" by default
---@field on_spike "warn"|"skip"|"stop"|"off"? policy for a loss far above the recent ones; "warn" by default
---@field early_stop {metric: string, patience: integer, mode: string}? ends the run after `patience` evaluations without improvement
---@field states table? States of the recipe that a step updates, by name: running metrics, queues. Checkpoints and hot reloads preserve them
---@field keep {last: integer?, every: integer?, best: string?, mode: string?}? retention of checkpoints: the options --keep, --keep-every and --keep-best
---@field mesh table<string, integer|string>|string? the devices that share the work: { dp = 2, zero = 1 }; the option --mesh
---@field strict_shards integer? cuts every batch into so many shards, whose sums are added in a fixed tree: bits do not depend on the mesh; the option --strict-shards
---@field pipeline {schedule: string?}? how the stages along pp take turns: "1f1b" (the default), "fill-drain", "zb-h1", or a table of cells
---@field sharding table<string, "column"|"row"|"whole">? how layers are divided along tp, by paths in which * is one name; layers of the library have rules of their own
---@field strict boolean? findings of the data check before the first step end the run; the option --strict
---@field finish fun(run: perilune.Run)? called after the last step
---@field on_step fun(run: perilune.Run, event: perilune.StepEvent)? observes every step once its numbers have been read, which is after the next one was issued
---@field on_eval fun(run: perilune.Run, event: perilune.EvalEvent)? observes every evaluation
---@field on_end fun(run: perilune.Run, status: "done"|"interrupted")? called last, also after a stop request; not after an error
---@field sinks fun(event: table)[]? functions that get every event of the run, with the fields of metrics.jsonl
---@field sample (fun(run: perilune.Run, prompt: string?): any)? generates a text, which it returns: for run:generate, and the command `perilune sample`
---@field after_step fun(run: perilune.Run)? called after every step, before its evaluation and checkpoint; may assign States
---@field sample_log boolean? records the samples of every step with their losses, for run:samples, run:worst and run:sample
---@field migrate fun(old: table<string, perilune.State>, new: table<string, perilune.State>)? initializes new States after an edit that changed their names or shapes

---@class perilune.StepEvent
---@field step integer from 1
---@field loss number
---@field metrics table<string, number>
---@field samples integer of the step
---@field seconds number of training so far

---@class perilune.EvalEvent
---@field step integer steps done
---@field split string
---@field loss number? nil if recipe.evaluate returns metrics alone
---@field metrics table<string, number>

local recipe = {}

local names = { "name", "description", "params", "data", "model", "optimizer", "loss", "evaluate", "step", "ema", "accumulate",
                "steps", "eval_every", "early_stop", "finish", "precision", "migrate", "memory_budget", "keep", "on_nan", "on_spike",
                "states", "mesh", "pipeline", "strict_shards", "sharding", "strict", "sample_log", "after_step", "sample", "on_step", "on_eval", "on_end", "sinks" }

---The values of `precision`.
recipe.precisions = { "f32", "tf32", "bf16", "fp16", "fp8" }

-- The autocast dtype of each precision but f32. With fp8 the layers quantize, and everything else is bf16.
local autocast = { tf32 = "tf32", bf16 = "bf16", fp16 = "f16", fp8 = "bf16" } ---@type table<string, any>

---Whether a value provides batches: the methods `batch_at` and `batches`.
---@param value any
---@return boolean
function recipe.is_loader(value)
  return type(value) == "table" and type(value.batch_at) == "function" and type(value.batches) == "function"
end

---Raises for a misspelt field such as `recipe.optimiser`, which would otherwise be ignored.
---@param given perilune.Recipe
function recipe.check_names(given)
  local known = {}
  for _, name in ipairs(names) do known[name] = true end
  for _, name in ipairs(tree.names(given)) do
    local near = type(name) == "string" and not known[name] and native.near(name, names)
    if near and given[near] == nil then
      local value = given[name]
      pl.error("recipe", ("it has an unknown field '%s'"):format(name), ("did you mean recipe.%s?"):format(near),
        type(value) == "function" and value or nil)
    end
  end
end

---Returns a function of the recipe. Raises if it is `needed` and missing, or if it is not a function.
---@param given perilune.Recipe
---@param name string
---@param needed boolean?
---@return any fn
function recipe.part(given, name, needed)
  local fn = given[name]
  if fn == nil and not needed then return nil end
  if not check.is(fn, "function") then
    pl.error("recipe", ("recipe.%s is %s"):format(name, check.show(fn)), ("write `function recipe.%s(...) ... end`"):format(name))
  end
  return fn
end

---Raises unless `sinks` is a list of functions.
---@param given perilune.Recipe
function recipe.check_sinks(given)
  local sinks = given.sinks --[[@as any]]
  if sinks == nil then return end
  local hint = "write recipe.sinks = { function(event) ... end }"
  if type(sinks) ~= "table" then pl.error("recipe", "recipe.sinks is " .. check.show(sinks), hint) end
  for _, key in ipairs(tree.names(sinks)) do
    if type(key) ~= "number" or not check.is(sinks[key], "function") then
      pl.error("recipe", ("recipe.sinks[%s] is %s"):format(check.show(key), check.show(sinks[key])), hint)
    end
  end
end

---Raises at the line where a function of the recipe begins.
---@param given perilune.Recipe
---@param name string
---@param message string
---@param hint string?
function recipe.fault(given, name, message, hint)
  local fn = given[name]
  pl.error("recipe." .. name, message, hint, type(fn) == "function" and fn or nil)
end

---Calls a function under the autocast policy of the run's precision.
---@param run perilune.Run
---@param fn any
---@param ... any
---@return any ...
function recipe.call(run, fn, ...)
  if run.precision == "f32" then return fn(...) end
  return pl.autocast(autocast[run.precision], fn, ...)
end

---Checks what a loss function returned: a scalar loss and a table of metrics.
---@param given perilune.Recipe
---@param name string the recipe's function, for errors
---@param samples integer the weight if the function returned false
---@param loss any
---@param metrics any
---@param weight any
---@param each any
---@return perilune.Tensor loss
---@return table<string, perilune.Tensor|number> metrics
---@return any weight a number or a scalar tensor; nil if the function returned none
---@return any each the values of the samples; nil if the function returned none
function recipe.check_loss(given, name, samples, loss, metrics, weight, each)
  if not pl.is_tensor(loss) or loss:numel() ~= 1 then
    local got = pl.is_tensor(loss) and ("a tensor of shape {%s}"):format(table.concat(loss.shape, ", ")) or check.show(loss)
    recipe.fault(given, name, "it returned " .. got, "return the mean loss, a scalar tensor, first; reduce with :mean()")
  end
  if metrics ~= nil and type(metrics) ~= "table" then
    recipe.fault(given, name, "its second value is " .. check.show(metrics), "metrics are a table: return loss, { accuracy = ... }")
  end
  if weight == false then weight = samples end
  return loss, metrics or {}, weight, each
end

return recipe
