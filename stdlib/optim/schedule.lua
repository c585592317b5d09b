-- optim/schedule.lua: computes learning rates as functions of the step.
--
-- A schedule is a callable table: `schedule(step)`, where `step` is the number of updates already done, 0 for the first. It is
-- stateless, so checkpoints store no schedule. Any Lua function of the step can replace it. During warm-up the rate of step i is
-- peak * (i + 1) / (warmup + 1), so that the first update has a rate above 0.

local pl = require "perilune"
local check = require "perilune.check"

local schedule = {}

local meta = {}
function meta.__call(self, step) return self.at(self, step) end
function meta.__tostring(self)
  local parts = {}
  for k, v in pairs(self) do
    if type(v) == "number" then parts[#parts + 1] = ("%s = %g"):format(k, v) end
  end
  table.sort(parts)
  return ("%s { %s }"):format(self.kind, table.concat(parts, ", "))
end

---@class perilune.Schedule
---@field kind string
---@operator call(integer): number

---@return perilune.Schedule
local function new(kind, fields, at)
  fields.kind, fields.at = kind, at
  return setmetatable(fields, meta)
end

---Checks options that are all numbers, and that no rate is negative; those in `required` have no default.
local function numbers(op, given, required, defaults)
  local loose = {}
  for _, name in ipairs(required) do loose[name] = "number" end
  local o = check.options(op, given, defaults, loose)
  check.required(op, o, required)
  for _, name in ipairs { "peak", "floor" } do
    if o[name] then check.between(op, name, o[name], 0, math.huge) end
  end
  return o
end

local function warming(self, step)
  return self.peak * (step + 1) / (self.warmup + 1)
end

---Makes a constant schedule.
---@param rate number
---@return perilune.Schedule
function schedule.constant(rate)
  check.between("optim.constant", "the rate", rate, 0, math.huge)
  return new("constant", { rate = rate }, function(self) return self.rate end)
end

---Makes a schedule that rises linearly to `peak` during `warmup` steps, then stays constant.
---@param opts {peak: number, warmup: integer} peak: rate after the warm-up; warmup: steps
---@return perilune.Schedule
function schedule.linear_warmup(opts)
  local o = numbers("optim.linear_warmup", opts, { "peak", "warmup" }, {})
  return new("linear_warmup", o, function(self, step)
    return step < self.warmup and warming(self, step) or self.peak
  end)
end

---Makes a cosine schedule: warm-up, then half a cosine from `peak` to `floor` at `steps`, then `floor`.
---Loshchilov and Hutter, SGDR (2017), without restarts.
---@param opts {peak: number, steps: integer, warmup: integer?, floor: number?} peak: largest rate; steps: at which the floor is reached, the warm-up included; warmup: steps; floor: last rate
---@return perilune.Schedule
function schedule.cosine(opts)
  local o = numbers("optim.cosine", opts, { "peak", "steps" }, { warmup = 0, floor = 0 })
  return new("cosine", o, function(self, step)
    if step < self.warmup then return warming(self, step) end
    local progress = math.min(1, (step - self.warmup) / math.max(1, self.steps - self.warmup))
    return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
  end)
end

---Makes a warmup-stable-decay schedule: `peak` until the last `decay` steps, then linear to `floor`.
---Hu et al., MiniCPM (2024).
---@param opts {peak: number, steps: integer, decay: integer, warmup: integer?, floor: number?} peak: rate between warm-up and decay; steps: at which the floor is reached; decay: last steps, in which the rate falls; warmup: steps; floor: last rate
---@return perilune.Schedule
function schedule.wsd(opts)
  local o = numbers("optim.wsd", opts, { "peak", "steps", "decay" }, { warmup = 0, floor = 0 })
  if o.warmup + o.decay > o.steps then
    pl.error("optim.wsd", ("warmup = %g and decay = %g do not fit into steps = %g"):format(o.warmup, o.decay, o.steps), "all three count steps")
  end
  return new("wsd", o, function(self, step)
    if step < self.warmup then return warming(self, step) end
    local left = math.max(0, math.min(1, (self.steps - step) / math.max(1, self.decay)))
    return self.floor + (self.peak - self.floor) * left
  end)
end

---Makes a one-cycle schedule: half a cosine from peak / div up to `peak` over the fraction `start` of the steps, then half a
---cosine down to peak / div / final_div. Smith and Topin, Super-Convergence (2018); defaults of PyTorch's OneCycleLR.
---@param opts {peak: number, steps: integer, start: number?, div: number?, final_div: number?} peak: largest rate; steps: length of the cycle; start: fraction of the steps that rise; div: peak over first rate; final_div: first rate over last rate
---@return perilune.Schedule
function schedule.one_cycle(opts)
  local o = numbers("optim.one_cycle", opts, { "peak", "steps" }, { start = 0.3, div = 25, final_div = 1e4 })
  check.between("optim.one_cycle", "start", o.start, 0, 1)
  return new("one_cycle", o, function(self, step)
    local first, last = self.peak / self.div, self.peak / self.div / self.final_div
    local top, final = self.start * self.steps - 1, self.steps - 1
    local from, to, progress
    if step <= top then
      from, to, progress = first, self.peak, step / math.max(1, top)
    else
      from, to, progress = self.peak, last, math.min(1, (step - top) / math.max(1, final - top))
    end
    return to + (from - to) * 0.5 * (1 + math.cos(math.pi * progress))
  end)
end

---Makes a schedule from a list of { step, rate }: each rate applies from its step on; `linear = true` interpolates between them.
---optim.piecewise { { 0, 1e-3 }, { 5000, 1e-4 } }
---@param points {[integer]: {[1]: integer, [2]: number}, linear: boolean?} linear: whether rates between the points are interpolated
---@return perilune.Schedule
function schedule.piecewise(points)
  local op = "optim.piecewise"
  if type(points) ~= "table" or #points == 0 then
    pl.error(op, "no points: it got " .. check.show(points), "give a list: optim.piecewise { { 0, 1e-3 }, { 5000, 1e-4 } }")
  end
  for i, point in ipairs(points) do
    if type(point) ~= "table" or type(point[1]) ~= "number" or type(point[2]) ~= "number" then
      pl.error(op, ("point %d is %s"):format(i, check.show(point)), "a point is { step, rate }")
    end
    if i > 1 and point[1] <= points[i - 1][1] then
      pl.error(op, ("point %d starts at step %g, not after step %g"):format(i, point[1], points[i - 1][1]), "sort the points by their step")
    end
  end
  return new("piecewise", { points = points, linear = points.linear or false }, function(self, step)
    local p, i = self.points, 1
    while i < #p and step >= p[i + 1][1] do i = i + 1 end
    local a, b = p[i], p[i + 1]
    if not self.linear or not b or step <= a[1] then return a[2] end
    return a[2] + (b[2] - a[2]) * (step - a[1]) / (b[1] - a[1])
  end)
end

---Evaluates a learning rate at `step`: a number, a schedule or a function. Raises if it is negative or not finite.
---@param op string
---@param rate number|perilune.Schedule|fun(step: integer): number
---@param step integer
---@return number
function schedule.at(op, rate, step)
  if type(rate) == "number" then
    if not (rate >= 0 and rate < math.huge) then pl.error(op, ("lr is %s at step %d, but must be finite and at least 0"):format(check.show(rate), step)) end
    return rate
  end
  local value = rate(step)
  if type(value) ~= "number" or value ~= value or math.abs(value) == math.huge then
    pl.error(op, ("the schedule returned %s at step %d"):format(check.show(value), step), "a schedule must return a finite number")
  end
  if value < 0 then
    pl.error(op, ("the schedule returned %s at step %d, but a rate must be at least 0"):format(check.show(value), step), "a negative rate trains uphill")
  end
  return value
end

return schedule
