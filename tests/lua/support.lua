-- support.lua: implements describe, it and expect, a subset of busted.
--
--   describe("relu", function()
--     it("cuts below zero", function()
--       expect(pl.tensor({ -1.0, 2.0 }):relu()):to_be_near { 0, 2 }
--     end)
--   end)
--
-- A failure names the line of the expectation. Tensors are compared by value; a nested list equals a tensor of its values.

local pl = require "perilune"

local support = { passed = 0, failures = {} }
local path = {}

---Converts a tensor to nested lists; returns other values unchanged.
local function plain(value)
  return pl.is_tensor(value) and value:tolist() or value
end

local function show(value, depth)
  value = plain(value)
  if type(value) == "string" then return ("%q"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  if (depth or 0) > 5 then return "…" end
  local parts, n = {}, 0
  for i, v in ipairs(value) do
    parts[i], n = show(v, (depth or 0) + 1), i
    if i == 12 then parts[i + 1] = "…" break end
  end
  local names = {}
  for k in pairs(value) do
    if not (math.type(k) == "integer" and k >= 1 and k <= #value) then names[#names + 1] = tostring(k) end
  end
  table.sort(names)
  for _, k in ipairs(names) do parts[#parts + 1] = k .. " = " .. show(value[k], (depth or 0) + 1) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

---Finds where two values differ, or returns nil. `tolerance` is relative to max(1, |value|).
local function difference(got, want, tolerance, at)
  got, want = plain(got), plain(want)
  if type(got) == "table" and type(want) == "table" then
    for k, v in pairs(want) do
      local d = difference(got[k], v, tolerance, at .. "[" .. tostring(k) .. "]")
      if d then return d end
    end
    for k, v in pairs(got) do
      if want[k] == nil then return ("%s is %s, not nil"):format(at .. "[" .. tostring(k) .. "]", show(v)) end
    end
    return nil
  end
  if got == want then return nil end
  if tolerance and type(got) == "number" and type(want) == "number" then
    if math.abs(got - want) <= tolerance * math.max(1, math.abs(want)) or (got ~= got and want ~= want) then return nil end
  end
  return ("%s is %s, not %s"):format(at == "" and "it" or at, show(got), show(want))
end

local Expectation = {}
Expectation.__index = Expectation

-- Level 3: the line that called the method of the expectation.
local function fail(message) error(message, 3) end

---Expects the same value, by ==.
function Expectation:to_be(want)
  if self.value ~= want then fail(("it is %s, not %s"):format(show(self.value), show(want))) end
end

---Expects equal values, in nested tables and tensors.
function Expectation:to_equal(want)
  local d = difference(self.value, want, nil, "")
  if d then fail(d) end
end

---Expects equal values up to a tolerance.
function Expectation:to_be_near(want, tolerance)
  local d = difference(self.value, want, tolerance or 1e-5, "")
  if d then fail(d) end
end

function Expectation:to_be_below(bound)
  if not (plain(self.value) < bound) then fail(("it is %s, not below %s"):format(show(self.value), show(bound))) end
end

function Expectation:to_be_above(bound)
  if not (plain(self.value) > bound) then fail(("it is %s, not above %s"):format(show(self.value), show(bound))) end
end

function Expectation:to_be_true()
  if not self.value then fail(("it is %s"):format(show(self.value))) end
end

---Expects a text that contains `part` literally.
function Expectation:to_contain(part)
  if not tostring(self.value):find(part, 1, true) then fail(("%s does not contain %q"):format(show(tostring(self.value)), part)) end
end

---Expects a function that raises an error containing `part`.
function Expectation:to_raise(part)
  local ok, e = pcall(self.value)
  if ok then fail("no error was raised") end
  if not tostring(e):find(part, 1, true) then fail(("the error is %q, without %q"):format(tostring(e), part)) end
end

function support.expect(value)
  return setmetatable({ value = value }, Expectation)
end

function support.describe(name, body)
  path[#path + 1] = name
  body()
  path[#path] = nil
end

function support.it(name, body)
  local ok, e = pcall(body)
  if ok then
    support.passed = support.passed + 1
  else
    local text = tostring(e):gsub("\nstack traceback:.*", "")
    support.failures[#support.failures + 1] = table.concat(path, " ") .. " " .. name .. ": " .. text
  end
end

---Makes a tensor of golden/*.lua: { shape = , dtype = , { numbers } }.
function support.golden(entry)
  return pl.tensor(entry[1], { dtype = entry.dtype or "f32" }):reshape(entry.shape)
end

---Returns the results to the test binary.
function support.report()
  print(("passed %d"):format(support.passed))
  for _, failure in ipairs(support.failures) do print("failed " .. failure) end
end

return support
