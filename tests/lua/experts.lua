-- Tests the placement of experts: moved rows and replicas are the same function, loads, what is refused.

local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local C, E, T = 6, 4, 24

---Two layers with the same weights, of which the second has experts that may move.
local function pair(opts, rebalance)
  local plain = nn.MoE(C, E, opts)
  local own = { rebalance = rebalance }
  for k, v in pairs(opts) do own[k] = v end
  local moving = nn.MoE(C, E, own)
  for _, entry in ipairs(plain:states()) do
    local to = moving
    for name in entry.path:gmatch "[^.]+" do to = to[name] end
    to:assign(entry.state:detach())
  end
  return plain, moving
end

---A router that sends every token to expert 0 first, and then to the others in order.
local function skew(layer)
  local rows = {}
  for e = 1, E do rows[e] = pl.full({ 1, C }, (E - e) * 0.3) end
  layer.router.weight:assign(pl.cat(rows, 0))
end

local function rows_by_expert(layer, state) return state:index_select(0, layer.placement.rows) end

describe("experts that move", function()
  for _, opts in ipairs { { top = 2 }, { top = 1, kind = "gelu" }, { top = 3, hidden = 5 } } do
    for _, replicas in ipairs { 0, 2, 4 } do
      it(("train as others do, %d of a token, %d replicas"):format(opts.top, replicas), function()
        local plain, moving = pair(opts, { every = 0, replicas = replicas })
        local targets = { plain, moving }
        local opt, ema = {}, {}
        for i, m in ipairs(targets) do
          opt[i], ema[i] = optim.AdamW(m, { lr = 1e-2 }), optim.EMA(m, 0.9)
        end
        local moved = 0
        for step = 1, 6 do
          local x, y = pl.eval(pl.randn { T, C }), {}
          for i, m in ipairs(targets) do
            local out, balance = m(x)
            y[i] = out:detach()
            local loss = (out ^ 2):mean() + balance * 0.05
            loss:backward()
            opt[i]:step()
            ema[i]:update()
          end
          expect(y[2]):to_be_near(y[1]:tolist(), 1e-5)
          if step % 2 == 0 then
            for _, r in ipairs(nn.rebalance_experts(moving, { optimizers = { opt[2] }, ema = ema[2], devices = 2 })) do
              expect(r.after <= r.before):to_be(true)
              moved = moved + r.moved
            end
            expect(moving.placement.load:tolist()):to_equal { 0, 0, 0, 0 }
          end
        end
        for _, name in ipairs { "up", "gate", "down" } do
          if plain[name] then
            expect(rows_by_expert(moving, moving[name])):to_be_near(plain[name]:tolist(), 1e-5)
            local function slots(i)
              for _, p in ipairs(opt[i].groups[1].params) do
                if p.state == targets[i][name] then return p.slots end
              end
            end
            for key, slot in pairs(slots(1)) do expect(rows_by_expert(moving, slots(2)[key])):to_be_near(slot:tolist(), 1e-5) end
          end
        end
        -- Averages have the rows of the weights, so they may take the place of the weights.
        local x = pl.eval(pl.randn { T, C })
        for i, m in ipairs(targets) do
          ema[i]:swap()
          m:eval()
        end
        expect((moving(x))):to_be_near((plain(x)):tolist(), 1e-5)
      end)
    end
  end

  for _, precision in ipairs { "bf16", "f16" } do
    it("have the bits of others in " .. precision, function()
      local plain, moving = pair({ top = 2, hidden = 5 }, { every = 0, replicas = 4 })
      local x = pl.eval(pl.randn { T, C })
      local function run(m)
        local y = pl.autocast(precision, function() return (m(x)) end)
        return y, pl.grad((y:to("f32") ^ 2):sum(), { m.up, m.gate, m.down })
      end
      run(moving)
      pl.end_step()
      nn.rebalance_experts(moving, { devices = 4 })
      local theirs, ours = { run(plain) }, { run(moving) }
      expect(ours[1]):to_equal(theirs[1]:tolist())
      -- The gradients of copies are rounded, and added in f32.
      for i = 2, 4 do
        expect(ours[i].dtype):to_be "f32"
        expect(rows_by_expert(moving, ours[i])):to_be_near(theirs[i]:tolist(), 2e-2)
      end
    end)
  end

  it("need no gradient if they are frozen", function()
    local _, m = pair({ top = 2 }, { every = 0, replicas = 2 })
    for _, name in ipairs { "up", "gate", "down" } do m[name] = pl.state(m[name]:detach(), { trainable = false }) end
    local x = pl.eval(pl.randn { T, C })
    local d = pl.grad((m(x)):sum(), { m.router.weight })
    expect(d.shape):to_equal { E, C }
  end)

  it("even out the loads of devices", function()
    local _, m = pair({ top = 2 }, { every = 0 })
    skew(m)
    m(pl.ones { T, C })
    expect(m.placement.load:tolist()):to_equal { T, T, 0, 0 }
    local found = nn.rebalance_experts(m, { devices = 2 })
    expect(#found):to_be(1)
    expect(found[1].path):to_be ""
    expect(found[1].before):to_be(2.0)
    expect(found[1].after):to_be(1.0)
    expect(found[1].moved):to_be(2)
    -- The loads are measured anew; without any nothing moves.
    local again = nn.rebalance_experts(m, { devices = 2 })[1]
    expect(again.moved):to_be(0)
    expect(again.before):to_be(1.0)
  end)

  it("have replicas where the load is", function()
    local _, m = pair({ top = 1 }, { every = 0, replicas = 4 })
    skew(m)
    m(pl.ones { T, C })
    local found = nn.rebalance_experts(m, { devices = 4 })[1]
    -- At first every expert has one.
    expect(found.before):to_be(2.0)
    expect(found.after):to_be_near(1.0, 1e-3)
    local row = m.placement.rows:tolist()[1]
    local copies = 1
    for _, source in ipairs(m.placement.sources:tolist()) do copies = copies + (source == row and 1 or 0) end
    expect(copies):to_be(4)
  end)

  it("are measured in training mode only", function()
    local m = nn.MoE(C, E, { rebalance = {} })
    m:eval()
    m(pl.randn { T, C })
    expect(m.placement.load:sum():item()):to_be(0)
    m:train()
    m(pl.randn { T, C })
    m(pl.randn { T, C })
    expect(m.placement.load:sum():item()):to_be(4 * T)
    expect(m.placement.every):to_be(100)
  end)

  it("move without a new plan", function()
    local m = nn.MoE(C, E, { rebalance = { replicas = 2 } })
    local function turn(e)
      m.router.weight:assign(pl.one_hot(pl.tensor { e, (e + 1) % E, 0, 1 }, C):to("f32"))
      pl.step(function() return (m(pl.ones { T, C })) end)
      return nn.rebalance_experts(m, { devices = 2 })[1].before
    end
    for e = 0, 5 do turn(e % E) end
    local before = pl.stats().misses
    for e = 0, 5 do turn(e % E) end
    expect(pl.stats().misses):to_be(before)
  end)

  it("have one row and one expert at least", function()
    local m = nn.MoE(C, 1, { top = 1, rebalance = { replicas = 1 } })
    expect((m(pl.randn { 1, C })).shape):to_equal { 1, C }
    expect(nn.rebalance_experts(m)[1].after):to_be(1.0)
  end)

  it("leave random numbers as they are", function()
    local _, m = pair({ top = 2 }, { every = 0 })
    skew(m)
    pl.step(function() return (m(pl.ones { T, C })) end)
    pl.seed(5)
    local expected = pl.randn({ 4 }):tolist()
    pl.seed(5)
    nn.rebalance_experts(m, { devices = 2 })
    expect(pl.randn { 4 }):to_equal(expected)
  end)
end)

describe("nn.rebalance_experts", function()
  local function moving() return nn.MoE(C, E, { rebalance = {} }) end

  it("refuses what it cannot move", function()
    expect(function() nn.rebalance_experts(3) end):to_raise "the model is 3"
    expect(function() nn.rebalance_experts(nn.Linear(2, 2)) end):to_raise "no mixture whose experts may move"
    expect(function() nn.rebalance_experts(nn.MoE(C, E)) end):to_raise "no mixture whose experts may move"
    expect(function() nn.rebalance_experts(moving(), { optimizer = 1 }) end):to_raise "Did you mean 'optimizers'"
    local m = moving()
    expect(function() nn.rebalance_experts(m, { optimizers = optim.AdamW(m) }) end):to_raise "give a list"
    expect(function() nn.rebalance_experts(m, { optimizers = { m } }) end):to_raise "optimizers[1] is a table"
    expect(function() nn.rebalance_experts(m, { devices = 3 }) end):to_raise "3 devices do not divide 4 experts"
    expect(function() nn.rebalance_experts(m, { devices = 0 }) end):to_raise "devices is 0"
    expect(function() pl.step(function() nn.rebalance_experts(m) end) end):to_raise "call it between two steps"
  end)

  it("refuses rows that are not those of a placement", function()
    local m = moving()
    for _, rows in ipairs { { 0, 0, 1, 2 }, { 0, 1, 2, 9 }, { 0, 1, 2, -1 } } do
      m.placement.rows:assign(pl.tensor(rows))
      expect(function() nn.rebalance_experts(m, { devices = 2 }) end):to_raise "no expert is in row 3"
    end
    m = nn.MoE(C, E, { rebalance = { replicas = 2 } })
    m.placement.sources:assign(pl.tensor { 0, 4 })
    expect(function() nn.rebalance_experts(m, { devices = 2 }) end):to_raise "`placement.sources` has 4, and rows are 0 to 3"
  end)

  it("refuses States of an optimizer whose rows it does not know", function()
    local m = moving()
    local opt = optim.AdamW(m)
    opt.groups[1].params[1].slots.row = pl.state(pl.zeros { E })
    expect(function() nn.rebalance_experts(m, { optimizers = { opt } }) end):to_raise "which elements belong to an expert is not known"
  end)

  it("refuses weights of two layers with different rows", function()
    local a, b = moving(), moving()
    b.up = a.up
    expect(function() nn.rebalance_experts(nn.Sequential { a, b }) end):to_raise "have different placements of experts"
    b = nn.MoE(C, E)
    b.up = a.up
    expect(function() nn.rebalance_experts(nn.Sequential { a, b }) end):to_raise "have different placements of experts"
  end)

  it("is an option of a layer, with checked values", function()
    expect(function() nn.MoE(C, E, { rebalance = { every = -1 } }) end):to_raise "rebalance.every is -1"
    expect(function() nn.MoE(C, E, { rebalance = { replica = 1 } }) end):to_raise "Did you mean 'replicas'"
    expect(function() nn.MoE(C, E, { rebalance = 100 }) end):to_raise "option 'rebalance' is 100"
    expect(function() nn.TransformerBlock(8, 2, { rebalance = {} }) end):to_raise "give `experts` too"
    local block = nn.TransformerBlock(8, 2, { experts = 4, rebalance = { every = 7 } })
    expect(block.mlp.placement.every):to_be(7)
  end)
end)
