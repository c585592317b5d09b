-- Tests spectrograms against NumPy (tests/golden/augment/make.py), their gradients and their arguments.

local pl = require "perilune"
local audio = pl.audio
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local golden = pl.load "../golden/augment/reference.safetensors"

describe("spectrograms", function()
  it("agree with NumPy", function()
    local mel = audio.log_mel(golden.sounds, { rate = 8000, window = 256, hop = 100, mels = 24 })
    expect(mel.shape):to_equal(golden.log_mel.shape)
    expect(mel):to_be_near(golden.log_mel, 1e-4)
  end)

  it("find the frequency of a tone", function()
    local rate, n = 1000, 200
    local tone = (pl.arange(n):to("f64") * (2 * math.pi * 125 / rate)):sin():to("f32")
    local power = audio.power(tone, { window = 40, hop = 20 })
    expect(power.shape):to_equal { 9, 21 }
    -- 125 Hz is bin 125 * 40 / 1000.
    expect(power:argmax(-1)):to_equal { 5, 5, 5, 5, 5, 5, 5, 5, 5 }
  end)

  it("have bands that add up to 1 between the first and the last centre", function()
    local bands = audio.mel_bands { rate = 8000, window = 1024, mels = 10 }
    expect(bands.shape):to_equal { 513, 10 }
    expect(bands:sum(1):narrow(0, 60, 300)):to_be_near(pl.ones { 300 }, 1e-5)
    expect(bands:min():item()):to_be(0)
  end)

  it("have gradients", function()
    pl.gradcheck(function(x) return audio.power(x, { window = 8, hop = 4 }):sum() end, { pl.randn { 2, 16 } })
  end)

  it("refuse wrong sounds and options", function()
    expect(function() audio.power(pl.zeros { 10 }) end):to_raise "10 samples, and a window has 400"
    expect(function() audio.power(pl.zeros { 10 }, { hop = 0, window = 4 }) end):to_raise "at least 1"
    expect(function() audio.log_mel(pl.zeros { 800 }) end):to_raise "'rate' is missing"
    expect(function() audio.log_mel(pl.zeros { 800 }, { rate = 8000, mel = 3 }) end):to_raise "mels"
    expect(function() audio.mel_bands { rate = 8000, high = 5000 } end):to_raise "from 0 to 4000"
    expect(function() audio.mel_bands { rate = 8000, low = 4000 } end):to_raise "low must be below high"
  end)
end)
