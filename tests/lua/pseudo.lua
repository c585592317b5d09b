-- Tests pseudo-labels: rounds, the stream of samples, exclusion of held-out rows, resumes and edits. repl/tests/resume.rs resumes and replays runs.

local pl = require "perilune"
local data, nn, optim, train = pl.data, pl.nn, pl.optim, require "perilune.train"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local FEW <const>, MANY <const> = 20, 150

---The value of row `i` of the unlabelled records: from -1 to 1, in no order.
local function value(i) return (i * 37 % MANY) * 2 / MANY - 1 + 1 / MANY end

---Labelled records have x of 10 + i, which no other has; unlabelled ones x from -1 to 1.
local function labelled()
  local list = {}
  for i = 1, FEW do list[i] = { x = 10.0 + i, y = i % 2 } end
  return data.list(list)
end

local function unlabelled(n)
  local list = {}
  for i = 1, n or MANY do list[i] = { x = value(i - 1) } end
  return data.list(list)
end

-- A model of one number: the score of class 1 is w * x, that of class 0 its negative. With w = 3 the confidence exceeds 0.95 from |x| = 0.491 on.
local function predict(model, batch)
  local z = model.w * batch.x
  return pl.stack({ -z, z }, 1)
end

local function confidence(x) return 1 / (1 + math.exp(-6 * math.abs(x))) end

---A run whose batches are stored in `seen`; the loss changes no weight.
local function run_of(opts, fields)
  local seen = {}
  fields = fields or {}
  local recipe = pl.recipe { name = "pseudo", params = { steps = 100, seed = 1 } }
  function recipe.data()
    local o = { held = {}, predict = predict, every = 10, batch = 64, seed = 3 }
    for k, v in pairs(opts or {}) do o[k] = v end
    local stream = data.pseudo(fields.labelled or labelled(), fields.unlabelled or unlabelled(), o)
    return { train = stream:map(function(r) return { x = r.x, y = r.y, pseudo = r.pseudo, confidence = r.confidence } end):batch(fields.size or 16) }
  end
  function recipe.model() return nn.module { w = pl.state(pl.full({}, 3.0)), forward = function(m, x) return m.w * x end } end
  function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0 }) end
  function recipe.loss(model, batch)
    seen[#seen + 1] = batch
    return (model(batch.x) * 0):mean()
  end
  recipe.after_step = fields.after_step
  return train.new(recipe), seen
end

---Takes steps and returns the samples of each.
local function steps(run, seen, n)
  local out = {}
  for s = 1, n do
    run:step()
    local batch, list = seen[#seen], {}
    local x, y, pseudo, sure = batch.x:tolist(), batch.y:tolist(), batch.pseudo:tolist(), batch.confidence:tolist()
    for i = 1, #x do list[i] = { x = x[i], y = y[i], pseudo = pseudo[i], confidence = sure[i] } end
    out[s] = list
    for j = 1, #seen do seen[j] = nil end
  end
  return out
end

---Copies the States and the cursor of a run to another.
local function continue(from, to)
  local values = {}
  for _, entry in ipairs(from:states()) do values[entry.path] = entry.state:tolist() end
  for _, entry in ipairs(to:states()) do
    local is, want = entry.state, values[entry.path]
    if type(want) ~= "table" or #want == is:numel() then is:assign(pl.tensor(want, { dtype = is.dtype })) end
  end
  to:seek(from:cursor())
end

describe("data.pseudo", function()
  it("trains on labelled records alone until the first round, then has its share of confident ones", function()
    local run, seen = run_of()
    local list, next_labelled, counts, wrong = steps(run, seen, 10 + 128), 0, {}, 0
    local pseudo = 0
    for s, batch in ipairs(list) do
      for _, sample in ipairs(batch) do
        if sample.pseudo then
          expect(s > 10):to_be(true)
          expect(sample.y):to_be(sample.x > 0 and 1 or 0)
          expect(sample.confidence):to_be_near(confidence(sample.x), 1e-5)
          expect(sample.confidence >= 0.95):to_be(true)
          counts[sample.x], pseudo = (counts[sample.x] or 0) + 1, pseudo + 1
        else
          expect(sample.x):to_be(11.0 + next_labelled % FEW)
          expect({ sample.y, sample.confidence }):to_equal { (next_labelled + 1) % 2, 1 }
          next_labelled = next_labelled + 1
        end
      end
    end
    expect(wrong):to_be(0)
    local chosen = run:pseudo_labels()
    local want = 0
    for i = 0, MANY - 1 do want = want + (confidence(value(i)) >= 0.95 and 1 or 0) end
    expect(#chosen):to_be(want)
    -- Half of the samples, but for what rounds cut off a block.
    expect(math.abs(pseudo / (128 * 16) - 0.5) < 0.05):to_be(true)
    for _, label in ipairs(chosen) do
      expect(label.label):to_be(value(label.origin) > 0 and 1 or 0)
      expect({ label.file, label.row, label.round }):to_equal { "list", label.origin, 1 }
      expect(label.confidence):to_be_near(confidence(value(label.row)), 1e-5)
    end
  end)

  it("names the provenance of a record", function()
    local run = run_of { start = 1, every = 100 }
    run:step(1)
    local records, found = run.data.train.records, 0
    for i = 16, 200 do
      local origin, record = records:origins(i)[1], records:get(i)
      expect(origin.round ~= nil):to_be(record.pseudo)
      if record.pseudo then
        found = found + 1
        expect({ origin.round, origin.label }):to_equal { 1, record.y }
        expect(origin.confidence):to_be(record.confidence)
        expect(record.x):to_be(value(origin.row))
      end
    end
    expect(found > 50):to_be(true)
  end)

  it("leaves out rows that are labelled or held out, by hash", function()
    local held = data.list { { x = value(3), y = 1 }, { x = value(77), y = 0 } }
    local few = labelled():concat(data.list { { x = value(5), y = 1 } })
    local run = run_of({ start = 1, confidence = 0, held = held }, { labelled = few })
    run:step(1)
    local chosen = run:pseudo_labels()
    expect(#chosen):to_be(MANY - 3)
    for _, label in ipairs(chosen) do
      for _, i in ipairs { 3, 5, 77 } do expect(label.origin ~= i):to_be(true) end
    end
    local function fails(opts, text) expect(function() run_of(opts) end):to_raise(text) end
    fails({ held = unlabelled() }, "none of the 150 unlabelled records is left")
    fails({ held = { held, unlabelled() } }, "none of the 150")
    fails({ held = held, fields = "z" }, "no record has a field 'z'")
  end)

  it("keeps what a filter accepts, and the most confident of each class", function()
    local calls = 0
    local run = run_of { start = 1, confidence = 0.5, per_class = 7, filter = function(c)
      calls = calls + 1
      return c.label == 1 or c.row % 2 == 0
    end }
    run:step(1)
    expect(calls):to_be(MANY)
    local least = { [0] = 1, [1] = 1 }
    local counts, kept = { [0] = 0, [1] = 0 }, {}
    for _, c in ipairs(run:pseudo_labels()) do
      counts[c.label], kept[c.row] = counts[c.label] + 1, true
      least[c.label] = math.min(least[c.label], c.confidence)
      expect(c.label == 1 or c.row % 2 == 0):to_be(true)
    end
    expect(counts):to_equal { [0] = 7, [1] = 7 }
    for i = 0, MANY - 1 do
      local class = value(i) > 0 and 1 or 0
      if not kept[i] and (class == 1 or i % 2 == 0) then expect(confidence(value(i)) <= least[class] + 1e-6):to_be(true) end
    end
  end)

  it("labels anew in each round; a row that keeps its label keeps the round", function()
    local seen_previous = {}
    -- After step 15 the model says the opposite for |x| that is small: w * (x^2 - 0.3) * x.
    local run = run_of({ filter = function(c)
      if c.previous then seen_previous[c.round] = (seen_previous[c.round] or 0) + 1 end
      return c.round == 1 or c.row % 3 > 0
    end, predict = function(model, batch)
      local z = model.w * batch.x
      return pl.stack({ -z, z }, 1)
    end }, { after_step = function(run) if run.count == 15 then run.model.w:assign(run.model.w * -1) end end })
    run:step(10)
    local first = {}
    for _, c in ipairs(run:pseudo_labels()) do first[c.row] = c end
    run:step(10)
    local second = run:pseudo_labels()
    expect(#second > 20):to_be(true)
    for _, c in ipairs(second) do
      expect({ c.label, c.round }):to_equal { 1 - first[c.row].label, 2 }
      expect(c.row % 3 > 0):to_be(true)
    end
    expect(seen_previous[2] > #second):to_be(true)
    run:step(10)
    for i, c in ipairs(run:pseudo_labels()) do expect({ c.row, c.round }):to_equal { second[i].row, 2 } end
  end)

  it("goes on from its States and its cursor with the same samples", function()
    local opts = { every = 7, start = 4, confidence = 0.9 }
    local run, seen = run_of(opts)
    local whole = steps(run, seen, 60)
    for _, at in ipairs { 1, 4, 5, 18, 41 } do
      local before, own = run_of(opts)
      steps(before, own, at)
      local again, seen_again = run_of(opts)
      -- A batch that was made before the States are restored is not used after.
      local _ = again.batch
      continue(before, again)
      local rest = steps(again, seen_again, 60 - at)
      for i = 1, 60 - at do expect(rest[i]):to_equal(whole[at + i]) end
    end
  end)

  it("is the same with and without prefetching", function()
    local run, seen = run_of { every = 3 }
    local whole = steps(run, seen, 30)
    local again, records = run_of { every = 3 }, nil
    for s = 1, 30 do
      records = again.data.train.records
      for i = 1, 16 do
        local r = records:get((s - 1) * 16 + i - 1)
        expect({ r.y, r.pseudo }):to_equal { whole[s][i].y, whole[s][i].pseudo }
        expect(whole[s][i].x):to_be_near(r.x, 1e-6)
      end
      again:step()
    end
  end)

  it("repeats and skips no labelled record over an edit of the share, the seed or the batch size", function()
    for _, edit in ipairs { { share = 0.25 }, { seed = 9 }, { size = 10 }, { share = 0.75, size = 24 } } do
      local run, seen = run_of()
      local before = steps(run, seen, 25)
      local again, seen_again = run_of({ share = edit.share, seed = edit.seed }, { size = edit.size })
      continue(run, again)
      expect(#again:pseudo_labels()):to_be(#run:pseudo_labels())
      local after, next_labelled = steps(again, seen_again, 30), 0
      for _, list in ipairs { before, after } do
        for _, batch in ipairs(list) do
          for _, sample in ipairs(batch) do
            if not sample.pseudo then
              expect(sample.x):to_be(11.0 + next_labelled % FEW)
              next_labelled = next_labelled + 1
            end
          end
        end
      end
      -- A second resume goes on from the first one's States.
      local third, seen_third = run_of({ share = edit.share, seed = edit.seed }, { size = edit.size })
      continue(again, third)
      local fourth, seen_fourth = run_of({ share = edit.share, seed = edit.seed }, { size = edit.size })
      continue(third, fourth)
      expect(steps(fourth, seen_fourth, 12)):to_equal(steps(third, seen_third, 12))
    end
  end)

  it("drops labels that were given to other records", function()
    local run = run_of()
    run:step(12)
    local shifted = unlabelled():map(function(r) return { x = r.x + 0.001 } end):cache()
    local again = run_of(nil, { unlabelled = shifted })
    continue(run, again)
    expect(#again:pseudo_labels()):to_be(0)
    again:step(8)
    expect(#again:pseudo_labels() > 20):to_be(true)
    -- The same records by other code keep theirs.
    local same = unlabelled():map(function(r) return { x = r.x * 1 } end)
    local kept = run_of(nil, { unlabelled = same })
    continue(run, kept)
    expect(#kept:pseudo_labels()):to_be(#run:pseudo_labels())
  end)

  it("refuses what it cannot do, with the rule and the cure", function()
    local function fails(opts, text, fields) expect(function() run_of(opts, fields):step(10) end):to_raise(text) end
    expect(function() data.pseudo(labelled(), unlabelled(), { predict = predict }) end):to_raise "option 'held' is missing"
    expect(function() data.pseudo(labelled(), unlabelled(), { held = {} }) end):to_raise "option 'predict' is missing"
    expect(function() data.pseudo({}, unlabelled(), { held = {}, predict = predict }) end):to_raise "give a dataset of records"
    fails({ held = { valid = labelled() } }, "give the dataset, or a list")
    fails({ confidance = 0.9 }, "Did you mean 'confidence'?")
    fails({ confidence = 2 }, "confidence is 2, but must be a number from 0 to 1")
    fails({ share = 1 }, "share is 1")
    fails({ every = 0 }, "every is 0")
    fails({ predict = function(_, batch) return batch.x end }, "predict returned a tensor of shape {64}")
    fails({ predict = function() return 3 end }, "return the scores of the classes")
    fails({ filter = function() return 1 end, confidence = 0 }, "filter returned 1")
    fails({ label = "class" }, "the label 'class' is missing")
    fails({}, "which data.pseudo adds", { labelled = data.list { { x = 0.5, y = 1, confidence = 0.5 } }, unlabelled = data.list { { x = 1.0 } } })
    local stream = data.pseudo(labelled(), unlabelled(), { held = {}, predict = predict })
    expect(function() stream:shuffle(1):batch(4) end):to_raise "only map, tokenize, chat, select, rename and pad may follow"
    expect(function() stream:filter(function() return true end) end):to_raise "needs the same records in every epoch"
    expect(function() labelled():concat(stream) end):to_raise "a dataset is a mixture that changes during the run"
    expect(function() data.mix({ a = stream }, { a = 1 }) end):to_raise "'a' has pseudo-labels"
    expect(function() data.pseudo(stream, unlabelled(), { held = {}, predict = predict }) end):to_raise "give the datasets that it mixes"
    local recipe = pl.recipe { name = "valid", params = { steps = 1 } }
    function recipe.data() return { train = labelled():batch(2), valid = stream:batch(2) } end
    function recipe.model() return nn.Linear(1, 1) end
    function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0 }) end
    function recipe.loss(model, batch) return model(batch.x:unsqueeze(1)):mean() end
    expect(function() train.new(recipe) end):to_raise "which only the training data may have"
    expect(function() train.new(recipe):pseudo_labels() end):to_raise "only the training data"
  end)
end)
