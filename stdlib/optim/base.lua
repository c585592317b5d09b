-- optim/base.lua: implements the class of all optimizers: parameter groups, clipping, schedule, step, State names.
--
-- An optimizer is a list of parameters, each with the options of its group, its slots (States such as moments) and a rule. A
-- rule defines the slots of a parameter and records one update; adam.lua and the other files of this folder define rules. A
-- step reads nothing back. The learning rate and the counts of updates are run-time inputs of the plan.
--
-- Each parameter has a count of its updates, on which bias correction depends (Kingma and Ba, 2015): moments that start at zero
-- in step 1,000 need the correction of a first update. On the host the count of a parameter is `count - missed`. A loss scaler
-- decides on the device whether an update takes effect, so with one the count is a slot, the State `step`.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local clip = require "perilune.optim.clip"
local groups = require "perilune.optim.groups"
local schedule = require "perilune.optim.schedule"

---@class perilune.Rule
---@field name string first component of the path of its slots
---@field slots fun(weight: perilune.State, options: any): table<string, perilune.Tensor> returns the initial values
---@field update (fun(weight: perilune.State, grad: perilune.Tensor, slots: table<string, perilune.State>, options: any, lr: number, step: any))? `step` counts the updates of the parameter from 1: a number, or a scalar tensor if `uses_step`
---@field update_all (fun(batch: perilune.UpdateBatch, grads: perilune.GradientList, lr: number, step: any))? replaces `update`: updates many parameters at once
---@field uses_step (fun(options: any): boolean)? whether updates depend on `step`

---@class perilune.Parameter
---@field path string
---@field state perilune.State
---@field rule perilune.Rule
---@field options any of the rule
---@field group table<string, any> options of its group
---@field lr (number|perilune.Schedule)? its rate, if it is not the group's
---@field slots table<string, perilune.State>
---@field missed integer updates of the optimizer in which it had no gradient

---@class perilune.Optimizer
---@field kind string
---@field count integer updates done
---@field absences integer sum of `missed` over all parameters
---@field groups {options: table, params: perilune.Parameter[]}[]
---@field clip_norm number?
---@field clip_value number?
---@field place integer source location of the recipe line that made it
---@field scope table? the training step in which it was made
---@field on_device boolean? whether its parameters count their updates on the device
---@field measured boolean? whether a step computes the norm of all gradients although nothing is clipped
---@field norm perilune.Tensor? that norm, of the step being recorded
---@field states_list any the parameters, for the runtime
---@field batches perilune.UpdateBatches? of the last step
local Optimizer = {}
local meta = { __index = Optimizer }

---Raises for an assignment such as `opt.lr = 0`, which would replace a method and leave the rate as it was.
function meta.__newindex(self, key, value)
  if Optimizer[key] ~= nil then
    pl.error("optim." .. self.kind, ("%s is a method, and cannot be set to %s"):format(tostring(key), check.show(value)),
      key == "lr" and "set the rate of a group: opt.groups[1].options.lr = 1e-4, or give a schedule: lr = optim.cosine { ... }"
        or "store the value under another name")
  end
  rawset(self, key, value)
end

local base = {}

---The training step being recorded, with the optimizers that its run saves; nil outside of one.
---@type {known: table<perilune.Optimizer, boolean>}?
base.scope = nil

---Makes the zero value of a slot: f32, or f64 for f64 weights.
---@param weight perilune.State
---@param shape integer[]?
---@return perilune.Tensor
function base.zeros(weight, shape)
  return pl.zeros(shape or weight.shape, { dtype = weight.dtype == "f64" and "f64" or "f32" })
end

local common = { clip_norm = "number", clip_value = "number" }

-- Upper bounds of the options that must not be negative: a negative rate would silently train uphill.
local bounds = { lr = math.huge, weight_decay = math.huge, eps = math.huge, momentum = math.huge, alpha = 1, d = math.huge }

local function check_bounds(op, options)
  for _, name in ipairs(tree.names(bounds)) do
    local value, most = options[name], bounds[name] --[[@as number]]
    if value == math.huge then pl.error(op, name .. " is inf, but must be finite") end
    if type(value) == "number" then check.between(op, name, value, 0, most) end
  end
end

local function check_clip(op, name, most)
  if most ~= nil and not (most > 0) then
    pl.error(op, ("%s is %s, but must be above 0"):format(name, check.show(most)), "omit it to use the gradients unclipped")
  end
end

---Makes an optimizer.
---@param kind string its name in `optim`
---@param target any a module, a list of States, or a list of groups
---@param given table? options of the call
---@param defaults table<string, any> options that have a default
---@param loose table<string, string>? kinds of the other options; `lr` is always one
---@param choose fun(options: table, entry: perilune.Entry): perilune.Rule, table, any? returns the rule of a parameter, its options, and its rate if it differs from the group's
---@param lr number default learning rate
---@return perilune.Optimizer
function base.new(kind, target, given, defaults, loose, choose, lr)
  local op = "optim." .. kind
  local group_loose, all_loose = { lr = "number|function" }, {}
  for k, v in pairs(loose or {}) do group_loose[k] = v end
  for k, v in pairs(group_loose) do all_loose[k] = v end
  for k, v in pairs(common) do all_loose[k] = v end
  local o = check.options(op, given, defaults, all_loose)
  for _, name in ipairs { "clip_norm", "clip_value" } do check_clip(op, name, o[name]) end
  local shared = {}
  for k in pairs(defaults) do shared[k] = o[k] end
  for k in pairs(group_loose) do shared[k] = o[k] end

  local parsed = groups.read(op, target)
  local self = setmetatable({ kind = kind, count = 0, absences = 0, scope = base.scope, clip_norm = o.clip_norm, clip_value = o.clip_value, groups = {}, place = native.place() }, meta)
  local seen, all = {}, {}
  -- A recipe may give a parameter a rate of its own at any time.
  local parameter = { __newindex = function(p, key, value)
    rawset(p, key, value)
    self.batches = nil
  end }
  for i, group in ipairs(parsed) do
    local merged = {}
    for k, v in pairs(shared) do merged[k] = v end
    for k, v in pairs(group.given) do merged[k] = v end
    local options = check.options(op, merged, defaults, group_loose)
    if options.lr == nil then options.lr = lr end
    check_bounds(op, options)
    local params = {}
    for j, entry in ipairs(group.entries) do
      if seen[entry.state] then pl.error(op, ("parameter '%s' is listed twice"):format(entry.path), "put each parameter into one group") end
      seen[entry.state] = true
      local rule, rule_options, own_lr = choose(options, entry)
      local slots = {}
      local starts = rule.slots(entry.state, rule_options)
      for _, name in ipairs(tree.names(starts)) do slots[name] = pl.state(starts[name], { trainable = false, role = "optimizer" }) end
      params[j] = setmetatable({ path = entry.path, state = entry.state, rule = rule, options = rule_options, group = options, lr = own_lr, slots = slots, missed = 0 }, parameter)
      all[#all + 1] = entry.state
    end
    self.groups[i] = { options = options, params = params }
  end
  if #all == 0 then pl.error(op, "there is nothing to train", "every State is frozen, or the model has none; see print(model)") end
  self.states_list = native.state_list(all)
  return self
end

---Returns the learning rate of the next update, of group `i` (1 by default).
---@param i integer?
---@return number
function Optimizer:lr(i)
  local op, group = "optim." .. self.kind, self.groups[i or 1]
  if group then return schedule.at(op, group.options.lr, self.count) end
  pl.error(op .. ":lr", ("there is no group %s"):format(tostring(i)), ("groups are 1 to %d"):format(#self.groups))
  return 0
end

---Calls `visit` for every parameter, in order.
local function each_parameter(self, visit)
  for _, group in ipairs(self.groups) do
    for _, p in ipairs(group.params) do visit(p) end
  end
end

---Drops the gradients of all parameters of this optimizer.
---Needed where a step calls `backward` for several optimizers: the loss of one also leaves gradients in the parameters of another.
---At the end of a step all gradients are dropped.
function Optimizer:zero_grad()
  each_parameter(self, function(p) p.state.grad = nil end)
end

---Lists every slot as { path = "adamw.m.PATH", state = }, PATH that of the parameter, in a stable order.
---@return perilune.Entry[]
function Optimizer:states()
  local out = {}
  each_parameter(self, function(p)
    for _, name in ipairs(tree.keys(p.slots)) do
      out[#out + 1] = { path = ("%s.%s.%s"):format(p.rule.name, name, p.path), state = p.slots[name] }
    end
  end)
  return out
end

---Counts updates on the device from now on, as a State `step` of each parameter whose updates depend on the count.
---A loss scaler needs it: whether an update takes effect is known there only.
function Optimizer:count_on_device()
  if self.on_device then return end
  self.on_device, self.batches = true, nil
  each_parameter(self, function(p)
    local uses = p.rule.uses_step
    if uses and uses(p.options) then
      p.slots.step = pl.state(pl.full({}, self.count - p.missed), { trainable = false, role = "optimizer" })
    end
  end)
end

---Returns the counts of updates on the host, for `set_counts`.
---@return {count: integer, missed: integer[]?}
function Optimizer:counts()
  if self.absences == 0 then return { count = self.count } end
  local missed = {}
  each_parameter(self, function(p) missed[#missed + 1] = p.missed end)
  return { count = self.count, missed = missed }
end

---Sets the counts of updates to those that `counts` returned.
---@param counts {count: integer, missed: integer[]?} count: updates done; missed: updates of each parameter in which it had no gradient
function Optimizer:set_counts(counts)
  local missed, k = counts.missed or {}, 0
  self.count, self.batches = counts.count, nil
  if self.absences == 0 and not counts.missed then return end
  self.absences = 0
  each_parameter(self, function(p)
    k = k + 1
    p.missed = missed[k] or 0
    self.absences = self.absences + p.missed
  end)
end

---Records an update that takes effect only if `ok` is true on the device.
local function keep_unless(ok, state, slots, update)
  local states = { state }
  for _, name in ipairs(tree.keys(slots)) do states[#states + 1] = slots[name] end
  local before = {}
  for i, s in ipairs(states) do before[i] = s:detach() end
  update()
  for i, s in ipairs(states) do s:assign(pl.where(ok, s:detach(), before[i])) end
end

---@class perilune.GradientList gradients of one step, kept by the runtime
---@field get fun(self: perilune.GradientList, k: integer): perilune.Tensor
---@field set fun(self: perilune.GradientList, k: integer, g: perilune.Tensor)
---@field copy fun(self: perilune.GradientList): perilune.GradientList
---@field scale fun(self: perilune.GradientList, factor: number|perilune.Tensor)
---@field clamp fun(self: perilune.GradientList, most: number)
---@field squares fun(self: perilune.GradientList): perilune.Tensor
---@field free fun(self: perilune.GradientList)

---@class perilune.UpdateBatch parameters updated by one call of a rule
---@field rule perilune.Rule
---@field options any
---@field group table<string, any>
---@field own_lr (number|perilune.Schedule)?
---@field missed integer
---@field first integer position of its first gradient
---@field params perilune.Parameter[]
---@field lists table<string, any>? what the rule keeps of the parameters, for the runtime

---@class perilune.UpdateBatches
---@field [integer] perilune.UpdateBatch
---@field missing string positions of the parameters without a gradient
---@field absent perilune.Parameter[] these parameters

---Whether no parameter of a batch was given another rate.
local function rates_stand(batches)
  for _, b in ipairs(batches) do
    if b.own_lr then
      for _, p in ipairs(b.params) do
        if p.lr ~= b.own_lr then return false end
      end
    end
  end
  return true
end

---Batches adjacent parameters of the same rule, options, rate and count; if updates are counted on the device each parameter is a
---batch. The batches of the last step stay while the same parameters have gradients: a step of a deep model reads no parameter.
---@param positions integer[]? of parameters without a gradient
---@return perilune.UpdateBatches
local function update_batches(self, positions)
  local missing = positions and table.concat(positions, " ") or ""
  local known = self.batches
  if known and known.missing == missing and rates_stand(known) then return known end
  local out, skip, i, first = { missing = missing, absent = {} }, {}, 0, 1
  for _, k in ipairs(positions or {}) do skip[k] = true end
  each_parameter(self, function(p)
    i = i + 1
    if skip[i] then
      out.absent[#out.absent + 1] = p
      return
    end
    local b = out[#out]
    if not b or self.on_device or b.rule ~= p.rule or b.options ~= p.options or b.group ~= p.group or b.own_lr ~= p.lr or b.missed ~= p.missed then
      b = { rule = p.rule, options = p.options, group = p.group, own_lr = p.lr, missed = p.missed, first = first, params = {} }
      out[#out + 1] = b
    end
    b.params[#b.params + 1] = p
    first = first + 1
  end)
  self.batches = out
  return out
end

---Raises if a step of a recipe uses an optimizer that its run does not save: it was not returned by recipe.optimizer, and it was
---made before this step.
local function check_known(op, self)
  local scope = base.scope
  if not scope or scope.known[self] or self.scope == scope then return end
  pl.error(op, ("step() of an optimizer that the run does not save, made at %s: a resumed run would lose its moments and its count of updates")
      :format(native.show_place(self.place)),
    "return it from recipe.optimizer, several by name: return { G = ..., D = ... }; recipe.step finds them as run.opt.G and run.opt.D")
end

---Records one update from the gradients of this step: scales, clips, and applies the rule of each parameter.
---Parameters without a gradient do not change. Outside of a step scope this ends the implicit step. Raises if no parameter
---has a gradient.
---@param opts {scale?: number|perilune.Tensor, scaler?: perilune.LossScaler}? scale: factor of all gradients, before clipping; scaler: the one that scaled the loss
---@return perilune.Tensor? norm of all gradients before clipping, if `clip_norm` or `measured` is set
function Optimizer:step(opts)
  local op = "optim." .. self.kind
  local o = check.options(op .. ":step", opts, {}, { scale = "number|tensor", scaler = "table" })
  local scale, scaler = o.scale, o.scaler
  check_known(op, self)
  -- Attribute the ops to the line that made the optimizer: the default loop has no line of the recipe on the stack.
  local before = native.at(self.place)
  if scaler then
    if type(scaler.update) ~= "function" then pl.error(op .. ":step", "scaler is " .. check.show(scaler), "pass the result of optim.LossScaler()") end
    scale = (scale or 1) / scaler.factor:detach()
    self:count_on_device()
  end
  local grads, positions = native.gradients(self.states_list) ---@type perilune.GradientList, integer[]?
  if scale then grads:scale(scale) end
  if #grads == 0 then
    pl.error(op, "no parameter has a gradient at step()", "call loss:backward() before it, in the same step, on a loss made from the parameters")
  end
  if self.clip_value then grads:clamp(self.clip_value) end
  local norm = (self.clip_norm or scaler or self.measured) and grads:squares():sum():sqrt() or nil
  self.norm = norm
  -- The norm is finite only if every gradient is.
  local ok = scaler and norm and norm:isfinite() ---@type any
  if self.clip_norm and norm then
    grads:scale(clip.factor(norm, self.clip_norm))
  end
  local rates = {} -- calls each schedule once
  local batches = update_batches(self, positions)
  for _, b in ipairs(batches) do
    local rule, rate = b.rule, b.own_lr or b.group.lr -- read at every step: a recipe may change the rate of a group
    local lr = rates[rate] or schedule.at(op, rate, self.count)
    rates[rate] = lr
    local one = b.params[1] --[[@as perilune.Parameter]]
    local counter = one.slots.step ---@type perilune.State?
    local function update()
      local step = math.max(1, self.count + 1 - b.missed) ---@type any
      if counter then
        step = counter:detach() + 1
        counter:assign(step)
      end
      if rule.update_all then
        rule.update_all(b, grads, lr, step)
      elseif rule.update then
        for i, p in ipairs(b.params) do
          rule.update(p.state, grads:get(b.first + i - 1), p.slots, b.options, lr, step)
        end
      end
    end
    if ok then keep_unless(ok, one.state, one.slots, update) else update() end
  end
  if scaler then scaler:update(ok) end
  for _, p in ipairs(batches.absent) do p.missed = p.missed + 1 end
  self.count, self.absences = self.count + 1, self.absences + #batches.absent
  native.at(before)
  if pl.in_step() then grads:free() else pl.end_step() end
  return (self.clip_norm or self.measured) and norm or nil
end

function meta.__tostring(self)
  local lines = {}
  for i, group in ipairs(self.groups) do
    local lr = group.options.lr
    lines[i] = ("%s  group %d: %d parameters, lr %s"):format(self.kind, i, #group.params, type(lr) == "function" and "by a function" or tostring(lr))
  end
  return table.concat(lines, "\n")
end

return base
