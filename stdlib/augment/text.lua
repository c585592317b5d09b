-- augment/text.lua: rewrites texts at random: deletes and swaps words (Wei and Zou, "EDA", 2019), and adds noise to characters.
--
--   records:augment(function(r, draw) r.text = pl.augment.text.swap(r.text, draw, 2); return r end, { seed = 1 })
--
-- `draw` is the second argument of a function of records:augment, or math.random. Words are what spaces separate; a rewritten text has
-- one space between two. Workers load this file, so it needs the standard libraries only.

---@class perilune.TextAugment
local text = {}

---@alias perilune.Draw fun(low: integer?, high: integer?): number a number in [0, 1), or an integer from 1 or `low` to `high`

---Checks the arguments that all functions have.
---@param op string
---@param value any
---@param draw any
local function check(op, value, draw)
  if type(value) ~= "string" then error(("augment.text.%s: the text is a %s"):format(op, type(value)), 3) end
  if type(draw) ~= "function" then error(("augment.text.%s: draw is a %s; pass the second argument of the function, or math.random"):format(op, type(draw)), 3) end
end

---@param op string
---@param p any
local function check_probability(op, p)
  if math.type(p) == nil or not (p >= 0 and p <= 1) then error(("augment.text.%s: the probability is %s; it is a number from 0 to 1"):format(op, tostring(p)), 3) end
end

---@param value string
---@return string[]
local function words_of(value)
  local words = {}
  for word in value:gmatch "%S+" do words[#words + 1] = word end
  return words
end

---Deletes each word with a probability; one stays.
---@param value string
---@param draw perilune.Draw
---@param p number the probability, 0.1 in the paper
---@return string
function text.delete(value, draw, p)
  check("delete", value, draw)
  check_probability("delete", p)
  local words, kept = words_of(value), {}
  for _, word in ipairs(words) do
    if draw() >= p then kept[#kept + 1] = word end
  end
  if #kept == 0 and #words > 0 then kept[1] = words[draw(#words)] end
  return table.concat(kept, " ")
end

---Exchanges two words at random places, `n` times.
---@param value string
---@param draw perilune.Draw
---@param n integer? 1 by default; in the paper a tenth of the words
---@return string
function text.swap(value, draw, n)
  check("swap", value, draw)
  n = n or 1
  if math.type(n) ~= "integer" or n < 0 then error(("augment.text.swap: n is %s; it is a whole number of at least 0"):format(tostring(n)), 2) end
  local words = words_of(value)
  if #words < 2 then return table.concat(words, " ") end
  for _ = 1, n do
    local a, b = draw(#words), draw(#words - 1)
    -- Any other place, each equally likely.
    if b >= a then b = b + 1 end
    words[a], words[b] = words[b], words[a]
  end
  return table.concat(words, " ")
end

---Changes each character with a probability, as typing errors do: it is left out, doubled, exchanged with the next one, or replaced by
---another character of the text, each equally likely. Characters are code points, and spaces stay.
---@param value string UTF-8
---@param draw perilune.Draw
---@param p number the probability
---@return string
function text.noise(value, draw, p)
  check("noise", value, draw)
  check_probability("noise", p)
  if not utf8.len(value) then error("augment.text.noise: the text is no UTF-8", 2) end
  local all, letters = {}, {}
  for _, code in utf8.codes(value) do
    all[#all + 1] = utf8.char(code)
    if not all[#all]:find "^%s$" then letters[#letters + 1] = all[#all] end
  end
  local out, i = {}, 1
  while i <= #all do
    local one = all[i]
    if one:find "^%s$" or draw() >= p then
      out[#out + 1] = one
    else
      local kind, following = draw(4), all[i + 1]
      if kind == 2 then
        out[#out + 1] = one .. one
      elseif kind == 3 and following and not following:find "^%s$" then
        out[#out + 1] = following .. one
        i = i + 1
      elseif kind == 4 then
        out[#out + 1] = letters[draw(#letters)]
      elseif kind == 3 then
        out[#out + 1] = one
      end
    end
    i = i + 1
  end
  return table.concat(out)
end

return text
