-- train.lua: the default training loop, as a `run` that a host drives one step at a time.
--
--   local run = train.new(recipe, params, { seed = 1 })
--   while not run:finished() do run:step() end
--   print(run:evaluate("valid").loss)
--
-- The command line, the prompt and a script drive it alike; it prints nothing, keeps no clock and reads nothing back
-- except in `evaluate`. All that a run is at step k follows from the recipe, the params, the seed and its States: batches
-- are functions of their number, schedules of the count of updates.
--
-- A recipe's loss(model, batch) returns the mean loss, optionally a table of metrics (scalar tensors), and optionally the
-- weight of the batch (how many tokens or samples the mean is over: a number or a tensor). With `accumulate` = n one step
-- takes n micro-batches and divides by the weights of them all, so that the result is the mean over everything in the step.
-- Of a cross_entropy or nll_loss, returned as it is, the weight is known: the number of tokens that count. Of any other
-- loss it is the number of samples unless the recipe says.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"

local train = {}

---@class perilune.Recipe
---@field name string
---@field params table<string, any>
---@field data fun(params: table): table<string, perilune.Loader>
---@field model fun(params: table, data: table): perilune.Module
---@field optimizer (fun(params: table, model: perilune.Module): perilune.Optimizer)?
---@field loss (fun(model: perilune.Module, batch: table): perilune.Tensor, table?, any)?
---@field evaluate (fun(model: perilune.Module, batch: table): any, table?, any)? instead of loss, in evaluation
---@field step (fun(run: perilune.Run, batch: table): perilune.Tensor, table?)? instead of the standard step
---@field ema (number|fun(params: table, model: perilune.Module): perilune.EMA)? weights averaged; evaluation uses them
---@field accumulate integer?
---@field steps integer? where params has none
---@field memory_budget string|integer? what a step may take, as in "20GiB": activations are recomputed until it fits
---@field precision "f32"|"tf32"|"bf16"|"fp16"|"fp8"? of matmuls, convolutions and attention; weights and everything that needs it stay f32
---@field eval_every integer?
---@field on_nan "stop"|"skip"|"warn"? when the loss or the norm of the gradients is NaN or infinite; "stop" by default
---@field on_spike "warn"|"skip"|"stop"|"off"? when the loss leaps far above what it was; "warn" by default
---@field early_stop {metric: string, patience: integer, mode: string}?
---@field states table? States of the recipe's own that a step changes, by name: running metrics, queues; checkpoints and edits carry them over
---@field keep {last: integer?, every: integer?, best: string?, mode: string?}? which checkpoints stay, as --keep, --keep-every and --keep-best say it
---@field finish fun(run: perilune.Run)?
---@field migrate fun(old: table<string, perilune.State>, new: table<string, perilune.State>)? after an edit that changed States: fills the new ones

---@class perilune.Run
---@field recipe perilune.Recipe
---@field place integer the recipe line that stands for what the loop itself records
---@field params table
---@field data table<string, perilune.Loader>
---@field model perilune.Module
---@field opt perilune.Optimizer?
---@field ema perilune.EMA?
---@field steps integer steps of the whole run
---@field count integer steps done
---@field accumulate integer micro-batches in a step
---@field precision string
---@field scaler perilune.LossScaler? with precision "fp16"
---@field eval_every integer?
---@field seed integer
---@field on_nan "stop"|"skip"|"warn" with "stop" and "skip" a step whose loss or gradient norm is not finite changes no State
---@field on_spike "warn"|"skip"|"stop"|"off" with "skip" a step whose loss is above `loss_limit` changes no State
---@field loss_limit number? for the next step; the host that drives the run sets it
---@field looked integer? steps that were searched for States that no checkpoint holds
---@field stopped boolean early stopping has ended the run
---@field early_stop {split: string, metric: string, mode: string, patience: integer, bad: integer, best: number?}?
---@field batch table the training batch at the run's position, recorded anew when read
local Run = {}

local function is_loader(value)
  return type(value) == "table" and type(value.batch_at) == "function" and type(value.batches) == "function"
end

local meta = {}
function meta.__index(run, key)
  if key == "batch" then return (run.data.train:batch_at(run.count * run.accumulate)) end
  if key == "optimizer" then return rawget(run, "opt") end
  return Run[key]
end
meta.__methods, meta.__made = Run, { "batch", "optimizer" } -- for completion

local batch_names = setmetatable({}, { __mode = "k" }) ---@type table<table, string[]>

---For completion: the fields of what is made when it is read. They are looked up in one batch, and remembered.
meta.__names = {
  batch = function(run)
    local names = batch_names[run]
    if not names then
      names = {}
      for name in pairs(run.batch) do
        if type(name) == "string" then names[#names + 1] = name end
      end
      batch_names[run] = names
    end
    return names
  end,
}

---A number as progress lines show it: four digits that matter.
local function short(n)
  if n ~= n or n == math.huge or n == -math.huge then return tostring(n) end
  if math.type(n) == "integer" then return tostring(n) end
  local size = math.abs(n)
  if size >= 1e5 or (size > 0 and size < 1e-3) then return ("%.2e"):format(n) end
  local text = ("%." .. (size >= 100 and 1 or size >= 10 and 2 or 3) .. "f"):format(n)
  return text
end

---`loss 0.412 · accuracy 0.890`: the loss first.
local function said(loss, metrics)
  local parts = { loss and "loss " .. short(loss) }
  for _, name in ipairs(tree.names(metrics)) do
    local value = metrics[name]
    if pl.is_tensor(value) then value = value:numel() == 1 and value:item() or nil end
    if type(value) == "number" and name ~= "loss" then parts[#parts + 1] = name .. " " .. short(value) end
  end
  return table.concat(parts, " · ")
end

function meta.__tostring(run)
  return ("run of %s · step %d of %d · %s parameters"):format(run.recipe.name or "a recipe", run.count, run.steps,
    require("perilune.nn.module").grouped(run.model:num_parameters()))
end

local parts = { "name", "description", "params", "data", "model", "optimizer", "loss", "evaluate", "step", "ema", "accumulate",
                "steps", "eval_every", "early_stop", "finish", "precision", "migrate", "memory_budget", "keep", "on_nan", "on_spike",
                "states" }

---Refuses `recipe.optimiser`: a misspelt part would be as good as absent.
local function check_names(recipe)
  local known = {}
  for _, name in ipairs(parts) do known[name] = true end
  for _, name in ipairs(tree.names(recipe)) do
    local near = type(name) == "string" and not known[name] and pl.native.near(name, parts)
    if near and recipe[near] == nil then
      local value = recipe[name]
      pl.error("recipe", ("it has a part '%s' that nothing uses"):format(name), ("did you mean recipe.%s?"):format(near),
        type(value) == "function" and value or nil)
    end
  end
end

---What a recipe's function must be.
local function part(recipe, name, needed)
  local fn = recipe[name]
  if fn == nil and not needed then return nil end
  if not check.is(fn, "function") then
    pl.error("recipe", ("recipe.%s is %s"):format(name, check.show(fn)), ("write `function recipe.%s(...) ... end`"):format(name))
  end
  return fn
end

---Raises at the line where a part of the recipe is written.
local function fault(recipe, name, message, hint)
  local fn = recipe[name]
  pl.error("recipe." .. name, message, hint, type(fn) == "function" and fn or nil)
end

local function build_data(recipe, params)
  local data = part(recipe, "data", true)(params)
  if type(data) ~= "table" or not is_loader(data.train) then
    local got = type(data) == "table" and "data.train as " .. check.show(data.train) or check.show(data)
    fault(recipe, "data", "it returned " .. got, "return { train = set:batch(64), valid = ... } with loaders, which :batch(n) or :windows{} make")
  end
  return data
end

local function early_stop_of(recipe)
  if not recipe.early_stop then return nil end
  local o = check.options("recipe.early_stop", recipe.early_stop, { metric = "valid/loss", patience = 5, mode = "min" })
  check.word("recipe.early_stop", "mode", o.mode, { "min", "max" })
  check.whole("recipe.early_stop", "patience", o.patience)
  local split, metric = o.metric:match "^([^/]+)/(.+)$"
  return { split = split or "valid", metric = metric or o.metric, mode = o.mode, patience = o.patience, bad = 0 }
end

local function keep_of(recipe)
  if not recipe.keep then return nil end
  local o = check.options("recipe.keep", recipe.keep, {}, { last = "number", every = "number", best = "string", mode = "string" })
  if o.last then check.whole("recipe.keep", "last", o.last, 0) end
  if o.every then check.whole("recipe.keep", "every", o.every) end
  if o.mode then check.word("recipe.keep", "mode", o.mode, { "min", "max" }) end
  return o
end

---A run at its first step: builds data, model and optimizer, with all random numbers from the seed.
---@param recipe perilune.Recipe
---@param params table? every param with its final value; recipe.params by default
---@param opts {seed?: integer, precision?: string, memory_budget?: string|integer}? params.seed by default, else 0; recipe.precision by default, else "f32"
---@return perilune.Run
function train.new(recipe, params, opts)
  local op = "train.new"
  if type(recipe) ~= "table" then pl.error(op, "the recipe is " .. check.show(recipe), "give the table that pl.recipe returned") end
  check_names(recipe)
  params = params or recipe.params or {}
  local o = check.options(op, opts, {}, { seed = "number", precision = "string", memory_budget = "string|number" })
  local seed = check.whole(op, "seed", o.seed or params.seed or 0, 0)
  local precision = o.precision or recipe.precision or "f32"
  check.word(op, "precision", precision, { "f32", "tf32", "bf16", "fp16", "fp8" })
  local run = { recipe = recipe, params = params, seed = seed, count = 0, stopped = false, early_stop = early_stop_of(recipe),
                precision = precision, keep = keep_of(recipe) }
  local budget = o.memory_budget or params.memory_budget or recipe.memory_budget
  if budget then pl.memory_budget(budget) end
  if recipe.states ~= nil and type(recipe.states) ~= "table" then
    pl.error("recipe", "recipe.states is " .. check.show(recipe.states), "write recipe.states = { level = pl.state(pl.zeros {}) }")
  end

  pl.seed(seed)
  run.data = build_data(recipe, params)
  pl.seed(seed) -- what the data drew does not move the weights
  run.model = part(recipe, "model", true)(params, run.data)
  if type(run.model) ~= "table" or #tree.states(run.model) == 0 then
    local got = check.show(run.model) .. (type(run.model) == "table" and " without any State" or "")
    fault(recipe, "model", "it returned " .. got, "return a module: nn.Sequential { ... } or nn.module(t)")
  end
  if precision == "fp8" then
    if not require("perilune.nn.module").is_module(run.model) then fault(recipe, "model", "it returned a table that is no module", "precision = \"fp8\" needs one: nn.module(t)") end
    require("perilune.nn.fp8").use_fp8(run.model)
  end
  local optimizer = part(recipe, "optimizer", recipe.step == nil)
  if optimizer then
    run.opt = optimizer(params, run.model)
    if type(run.opt) ~= "table" or type(run.opt.step) ~= "function" then
      fault(recipe, "optimizer", "it returned " .. check.show(run.opt), "return an optimizer, as in `return optim.AdamW(model, { lr = p.lr })`")
    end
  end
  if precision == "fp16" then run.scaler = require("perilune.optim.scaler").LossScaler() end
  if recipe.ema then
    local ema = recipe.ema
    if type(ema) == "number" then run.ema = require("perilune.optim.ema").EMA(run.model, ema) else run.ema = ema(params, run.model) end
  end
  local loss = part(recipe, "loss", recipe.step == nil)
  local loop = recipe.step or loss ---@type any
  run.place = type(loop) == "function" and pl.native.written_at(loop) or 0

  run.accumulate = check.whole("recipe", "accumulate", params.accumulate or recipe.accumulate or 1)
  local steps = params.steps or recipe.steps
  if not steps and params.epochs then steps = math.ceil(params.epochs * run.data.train:batches() / run.accumulate) end
  if not steps then pl.error("recipe", "neither params.steps nor params.epochs says how long to train", "add `steps = 1000` to recipe.params") end
  run.steps = check.whole("recipe", "steps", steps, 0)
  run.eval_every = params.eval_every or recipe.eval_every
  run.on_nan, run.on_spike = params.on_nan or recipe.on_nan or "stop", params.on_spike or recipe.on_spike or "warn"
  check.word("recipe", "on_nan", run.on_nan, { "stop", "skip", "warn" })
  check.word("recipe", "on_spike", run.on_spike, { "warn", "skip", "stop", "off" })
  return setmetatable(run, meta)
end

---What a loss function returned, checked: the loss, its metrics, the weight, and whether the recipe gave that.
---@return perilune.Tensor
---@return table<string, perilune.Tensor|number>
---@return any weight a number or a tensor
---@return boolean given whether the recipe gave the weight
local function outcome(recipe, name, count, loss, values, weight)
  if not pl.is_tensor(loss) or loss:numel() ~= 1 then
    local got = pl.is_tensor(loss) and ("a tensor of shape {%s}"):format(table.concat(loss.shape, ", ")) or check.show(loss)
    fault(recipe, name, "it returned " .. got, "return the mean loss, a scalar tensor, first; reduce with :mean()")
  end
  if values ~= nil and type(values) ~= "table" then
    fault(recipe, name, "its second value is " .. check.show(values), "metrics are a table: return loss, { accuracy = ... }")
  end
  return loss, values or {}, weight or count, weight ~= nil
end

---Sums over micro-batches of weight * value.
---@param sums table<string, perilune.Tensor|number>
---@param values table<string, perilune.Tensor|number>
---@param weight perilune.Tensor|number
local function add(sums, values, weight)
  for _, name in ipairs(tree.names(values)) do
    local v = values[name] * weight
    if pl.is_tensor(v) then v = (v --[[@as perilune.Tensor]]):detach() end
    sums[name] = sums[name] and sums[name] + v or v
  end
end

---What autocast is told in a precision; with fp8 the layers do the rest.
local casts = { tf32 = "tf32", bf16 = "bf16", fp16 = "f16", fp8 = "bf16" }

---Calls a function of the recipe in the run's precision.
local function call(run, fn, ...)
  if run.precision == "f32" then return fn(...) end
  return pl.autocast(casts[run.precision], fn, ...)
end

---A loss ready for backward().
local function scaled(run, loss)
  return run.scaler and run.scaler:scale(loss) or loss
end

---Records forward, backward and update over the micro-batches {batch, count}; returns loss and metrics.
local function record(run, batches)
  local recipe, model = run.recipe, run.model
  if recipe.step then
    local loss, values = call(run, recipe.step, run, batches[1][1])
    if run.ema then run.ema:update() end
    return outcome(recipe, "step", 1, loss, values)
  end
  local loss, norm
  local values = {}
  if #batches == 1 then
    local batch, count = table.unpack(batches[1])
    loss, values = outcome(recipe, "loss", count, call(run, recipe.loss, model, batch))
    scaled(run, loss):backward()
    norm = run.opt:step { scaler = run.scaler }
  else
    -- Micro-batch by micro-batch, so that activations of only one are alive; the weights' sum, perhaps known only on the
    -- device, divides at the end.
    local sums, extra = {}, {}
    local total, unit ---@type any, any the weights' sum and the first of them: numbers or tensors
    for _, b in ipairs(batches) do
      local l, v, weight, given = outcome(recipe, "loss", b[2], call(run, recipe.loss, model, b[1]))
      local sum, tokens
      if not given then sum, tokens = pl.native.loss_sum(l) end
      weight = tokens or weight
      if pl.is_tensor(weight) then weight = weight:to("f32") end
      sum = sum or l * weight
      if run.scaler then
        -- In fp16 a sum over thousands of tokens would overflow what the scale leaves room for: shares of the first one's.
        unit = unit or (pl.is_tensor(weight) and weight:clamp(1) or math.max(weight, 1))
        run.scaler:scale(sum / unit):backward()
      else
        sum:backward()
      end
      add(sums, { loss = sum }, 1)
      add(extra, v, weight)
      total = total and total + weight or weight
    end
    norm = run.opt:step { scale = (unit or 1) / total, scaler = run.scaler }
    loss = sums.loss / total
    for _, name in ipairs(tree.names(extra)) do values[name] = extra[name] / total end
  end
  if norm and values.grad_norm == nil then values.grad_norm = norm end
  if run.scaler and values.loss_scale == nil then values.loss_scale = run.scaler.factor:detach() end
  if run.ema then run.ema:update() end
  return loss, values
end

---Keeps a step that went wrong out of the States, all of them, on the device and with nothing read back. The norm of the
---gradients counts where there is one; with fp16 the loss scaler looks after it.
local function guard(run, loss)
  local norm = run.opt and not run.scaler and run.opt.norm or nil
  if run.opt then run.opt.norm = nil end
  if loss:dim() > 0 then loss = loss:sum() end
  local ok
  if run.on_nan ~= "warn" then
    ok = loss:isfinite()
    if norm then ok = ok:logical_and(norm:isfinite()) end
  end
  if run.on_spike == "skip" then
    local fits = loss:gt(run.loss_limit or math.huge):logical_not()
    ok = ok and ok:logical_and(fits) or fits
  end
  if ok then pl.native.guard(ok) end
end

---A table's names in order, and its values as a list.
local function unzip(values)
  local names, list = tree.names(values), {}
  for i, name in ipairs(names) do list[i] = values[name] end
  return names, list
end

---Runs `fn` as a step scope; `fn` returns a table of tensors and numbers, which comes back evaluated.
---@param fn fun(): table<string, any>
---@return table<string, any>
local function evaluated(fn)
  local names = {} ---@type string[]
  local results = { pl.step(function()
    local list
    names, list = unzip(fn())
    return table.unpack(list)
  end) }
  local out = {}
  for i, name in ipairs(names) do out[name] = results[i] end
  return out
end

---@class perilune.StepResult
---@field step integer how many steps are done
---@field loss perilune.Tensor
---@field metrics table<string, perilune.Tensor>
---@field samples integer

local step_meta = { __tostring = function(result) return ("step %d · %s"):format(result.step, said(result.loss:item(), result.metrics)) end }

---Counts that a step moves on and that are no States.
local function counts(run) return run.opt and run.opt.count, run.ema and run.ema.count end

---Calls `fn` when the block ends in which it stands, by an error too. Who wants the run to stop is heard after it.
local function finally(fn)
  return setmetatable({}, { __close = function() pl.native.undisturbed(fn) end })
end

---What the loop itself records until the block ends has the line on which the recipe's loss (or step) begins: no line of the
---recipe is being run then.
local function placed(run)
  local before = pl.native.at(run.place)
  return setmetatable({}, { __close = function() pl.native.at(before) end })
end

---Records a step over the batches; returns { loss =, [".metric"] = } and how many samples there were.
---@return table<string, any>
---@return integer
local function record_step(run, get_batches)
  local batches, samples = get_batches(), 0
  for _, b in ipairs(batches) do samples = samples + b[2] end
  local loss, extra = record(run, batches)
  local all = { loss = loss }
  for name, value in pairs(extra) do all["." .. name] = value end
  return all, samples
end

---The training batches of the step at the run's position.
local function next_batches(run)
  local batches, start = {}, pl.clock()
  for i = 1, run.accumulate do batches[i] = { run.data.train:batch_at(run.count * run.accumulate + i - 1) } end
  pl.native.waited(pl.clock() - start)   -- for `perilune profile`
  return batches
end

---@return perilune.StepResult
local function take_step(run, get_batches)
  -- A step that failed and was caught (out of memory) has changed no State: it shall not have counted either.
  local failed = run.unfinished
  if failed and run.opt then run.opt.count = failed[1] end
  if failed and run.ema then run.ema.count = failed[2] end
  run.unfinished = { counts(run) }
  if failed then pl.native.at(0) end
  if run.opt then run.opt.measured = run.on_nan == "skip" end
  local samples = 0
  local values = evaluated(function()
    local _placed <close> = placed(run)
    local all, n = record_step(run, get_batches)
    samples = n
    guard(run, all.loss)
    -- In the second step, too: States may be made when they are first needed.
    local looked = run.looked or 0
    if looked < 2 then
      run.looked = looked + 1
      local known = {}
      for _, entry in ipairs(run:states()) do known[#known + 1] = entry.state end
      if pl.native.unsaved(known) then run.looked = 2 end
    end
    return all
  end)
  run.count, run.unfinished = run.count + 1, nil
  local result = setmetatable({ step = run.count, loss = values.loss, metrics = {}, samples = samples }, step_meta)
  for name, value in pairs(values) do
    if name ~= "loss" then result.metrics[name:sub(2)] = value end
  end
  return result
end

---One optimizer step. With `n`, that many, and the result of the last.
---@param n integer?
---@return perilune.StepResult
function Run:step(n)
  local result ---@type perilune.StepResult
  self.model:train()
  for _ = 1, n and check.whole("run:step", "n", n) or 1 do
    result = take_step(self, function() return next_batches(self) end)
  end
  return result
end

---Records the step at the run's position once more and asks where its first NaN or infinity came from. Nothing is written.
---@return {op: string, shape: string, nan: boolean, input: boolean, state: integer?, file: string?, line: integer?}? found nil if all of it is finite
function Run:diagnose()
  local before, found, done = { counts(self) }, nil, false
  self.model:train()
  if self.opt then self.opt.measured = not self.scaler end
  local ok, problem = pcall(pl.step, function()
    local loss = record(self, next_batches(self))
    local norm = self.opt and not self.scaler and self.opt.norm or nil
    if norm then found = pl.native.not_finite(loss, norm) else found = pl.native.not_finite(loss) end
    done = true
    error("so that nothing of it stays")
  end)
  if self.opt then self.opt.count, self.opt.norm = before[1], nil end
  if self.ema then self.ema.count = before[2] end
  if not (ok or done) then error(problem, 0) end
  return found
end

---Which samples step `k` trained on, counted from 1, if the loader knows: what they are called, and their numbers.
---@param k integer
---@return string? what
---@return integer[]? ids
function Run:samples_of(k)
  local train, all, what = self.data.train, {}, nil
  if type(train.ids_at) ~= "function" then return nil end
  for i = 0, self.accumulate - 1 do
    local name, ids = train:ids_at((k - 1) * self.accumulate + i)
    if not name or not ids then return nil end
    what = name
    table.move(ids, 1, #ids, #all + 1, all)
  end
  return what, all
end

---Whether all steps are done, or early stopping has ended the run.
---@return boolean
function Run:finished()
  return self.stopped or self.count >= self.steps
end

local function watch(self, split, result)
  local es = self.early_stop
  if not es or es.split ~= split then return end
  local value = result[es.metric]
  if value == nil then
    pl.error("recipe.early_stop", ("there is no metric '%s/%s'"):format(split, es.metric), "name one that recipe.loss or recipe.evaluate returns")
  end
  local better = es.best == nil or (es.mode == "min" and value < es.best) or (es.mode == "max" and value > es.best)
  if better then es.best, es.bad = value, 0 else es.bad = es.bad + 1 end
  self.stopped = es.bad >= es.patience
end

---Records the evaluation of batch `k`; returns { loss =, [".metric"] = } and the weight of the batch.
---@return table<string, any>
---@return any
local function record_evaluation(run, loader, k)
  local fn, name = run.recipe.evaluate, "evaluate"
  if not fn then fn, name = part(run.recipe, "loss", true), "loss" end
  return pl.no_grad(function()
    local batch, count = loader:batch_at(k)
    local first, second, third = call(run, fn, run.model, batch)
    local all = {} ---@type table<string, any>
    if type(first) == "table" and not pl.is_tensor(first) then -- evaluate may return metrics alone
      for key, value in pairs(first) do all["." .. key] = value end
      return all, second or count
    end
    local loss, extra, weight, given = outcome(run.recipe, name, count, first, second, third)
    all.loss = loss
    if not given then weight = select(2, pl.native.loss_sum(loss)) or weight end
    for key, value in pairs(extra) do all["." .. key] = value end
    return all, weight
  end)
end

---Loss and metrics over a whole split, as plain numbers: means by weight over its batches, without gradients, in
---evaluation mode, with the averaged weights if the recipe keeps some.
---@param split string? "valid" by default
---@param limit integer? batches at most
---@return table<string, number>
function Run:evaluate(split, limit)
  split = split or "valid"
  local loader = self.data[split]
  if not is_loader(loader) then
    local names = {}
    for name, value in pairs(self.data) do
      if is_loader(value) then names[#names + 1] = name end
    end
    table.sort(names)
    pl.error("run:evaluate", ("there is no split '%s'"):format(tostring(split)), "this recipe's data has " .. table.concat(names, ", "))
  end
  local mean = require("perilune.metrics").Mean()
  local _back <close> = finally(function() self.model:train() end)
  self.model:eval()
  if self.ema then pl.native.undisturbed(function() self.ema:swap() end) end
  -- The weights come back whatever happens: a run that is being edited goes on after an error.
  local _unswap <close> = finally(function() if self.ema then self.ema:swap() end end)
  local batches = loader:batches()
  if limit then batches = math.min(batches, check.whole("run:evaluate", "limit", limit)) end
  for k = 0, batches - 1 do
    local weight
    local values = evaluated(function()
      local _placed <close> = placed(self)
      local all, w = record_evaluation(self, loader, k)
      weight = w
      if pl.is_tensor(weight) then all.weight, weight = weight, nil end
      return all
    end)
    weight, values.weight = weight or values.weight, nil
    local named = { loss = values.loss }
    for key, value in pairs(values) do
      if key ~= "loss" then named[key:sub(2)] = value end
    end
    mean:add(named, weight)
  end
  local result = mean:result()
  watch(self, split, result)
  return setmetatable(result, { __tostring = function(r) return ("%s %s"):format(split, said(r.loss, r)) end })
end

---Records a step and an evaluation of one batch as they would be now, and runs neither: what they would raise about shapes,
---dtypes and names is raised here, and nothing has changed afterwards. A value that the recipe reads on the way is computed.
---@param plan ("kernels"|"code")? also plans the step, or begins to make the machine code that it lacks
---@return boolean known with "code": whether such a step has been planned before, and so lacks none
function Run:rehearse(plan)
  local opt_count, ema_count = counts(self)
  local _back <close> = finally(function()
    if self.opt then self.opt.count = opt_count end
    if self.ema then self.ema.count = ema_count end
    self.model:train()
  end)
  self.model:train()
  local measured = self.opt and self.opt.measured
  if self.opt then self.opt.measured = self.on_nan == "skip" end
  -- All that a step records, so that its plan is the step's.
  local known = pl.native.rehearse(function()
    local _placed <close> = placed(self)
    local all = record_step(self, function() return next_batches(self) end)
    guard(self, all.loss)
    local _, list = unzip(all)
    return table.unpack(list)
  end, plan)
  if self.opt then self.opt.measured = measured end
  local valid = self.data.valid
  if is_loader(valid) and (self.recipe.evaluate or self.recipe.loss) then
    self.model:eval()
    pl.native.rehearse(function() record_evaluation(self, valid, 0) end)
  end
  return known
end

---Every State of the run, with the names a checkpoint uses: model.*, optim.*, ema.*, scaler.*, recipe.*.
---@return perilune.Entry[]
function Run:states()
  local out = {}
  local function append(prefix, entries)
    for _, entry in ipairs(entries) do out[#out + 1] = { path = tree.join(prefix, entry.path), state = entry.state } end
  end
  append("model", tree.states(self.model))
  if self.opt then append("optim", self.opt:states()) end
  if self.ema then append("ema", self.ema:states()) end
  if self.scaler then append("scaler", self.scaler:states()) end
  if self.recipe.states then append("recipe", tree.states(self.recipe.states)) end
  return out
end

---What a checkpoint holds besides the States: plain numbers, from which `seek` goes on.
---@return table
function Run:cursor()
  local at = self.data.train:position(self.count * self.accumulate)
  local es = self.early_stop
  return {
    step = self.count, epoch = at.epoch, index = at.index, seed = self.seed, stopped = self.stopped,
    updates = self.opt and self.opt.count, ema_updates = self.ema and self.ema.count,
    best = es and es.best, bad = es and es.bad,
  }
end

---The rates of the next update, one a group of the optimizer; nil without an optimizer that has groups.
---@return number[]?
function Run:rates()
  local opt = self.opt
  if not (opt and opt.groups and opt.lr) then return nil end
  local out = {}
  for i = 1, #opt.groups do out[i] = opt:lr(i) end
  return out
end

---Goes to where `cursor` was taken. The States are loaded apart from it.
---@param cursor table
function Run:seek(cursor)
  self.count = check.whole("run:seek", "step", cursor.step, 0)
  self.stopped = cursor.stopped or false
  if self.opt then self.opt.count = cursor.updates or self.count end
  if self.ema then self.ema.count = cursor.ema_updates or self.count end
  if self.early_stop then self.early_stop.best, self.early_stop.bad = cursor.best, cursor.bad or 0 end
end

---A test of model and loss: can they learn one batch by heart? If not, something is wrong that more data will not mend.
---Trains on the first training batch until its loss is at most `threshold`.
---@param recipe perilune.Recipe
---@param params table?
---@param opts {steps?: integer, threshold?: number, seed?: integer}?
---@return {ok: boolean, first: number, last: number, steps: integer}
function train.memorise(recipe, params, opts)
  local o = check.options("train.memorise", opts, { steps = 300, threshold = 0.05 }, { seed = "number" })
  local run = train.new(recipe, params, { seed = o.seed })
  run.model:train()
  local first, last, done = math.huge, math.huge, 0
  while done < o.steps and last > o.threshold do
    local result = take_step(run, function() return { { run.data.train:batch_at(0) } } end)
    done = done + 1
    if done == 1 then first = result.loss:item() end
    if done % 10 == 0 or done == o.steps then last = result.loss:item() end
  end
  return { ok = last <= o.threshold, first = first, last = last, steps = done }
end

return train
