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

describe("files of arrays and sounds", function()
  local data = pl.data

  it("read IDX", function()
    local x = data.idx "../golden/augment/images-idx3-ubyte.gz"
    expect({ x.dtype, table.unpack(x.shape) }):to_equal { "u8", 5, 4, 3 }
    expect(x:flatten(0)):to_equal(pl.arange(60):tolist())
    expect(function() data.idx "../golden/augment/make.py" end):to_raise "not with two zero bytes"
    expect(function() data.idx("../golden/augment/images-idx3-ubyte.gz", { max_bytes = 10 }) end):to_raise "max_bytes"
    expect(function() data.idx("../golden/augment/images-idx3-ubyte.gz", { max_byte = 10 }) end):to_raise "max_bytes"
    expect(function() data.idx(3) end):to_raise "the path is 3"
  end)

  it("read WAV of one rate", function()
    local x = data.wav("../golden/augment/sounds/high/a.wav", { rate = 8000 })
    expect(x.shape):to_equal { 400 }
    expect(x):to_be_near(0.5 * (pl.arange(400):to("f64") * (2 * math.pi * 1000 / 8000)):sin(), 1e-4)
    expect(function() data.wav("../golden/augment/sounds/high/a.wav", { rate = 16000 }) end):to_raise "8000 Hz, not 16000 Hz"
    expect(function() data.wav "../golden/augment/sounds/high/a.wav" end):to_raise "'rate' is missing"
    expect(function() data.wav("../golden/augment/make.py", { rate = 8000 }) end):to_raise "WAV file"
  end)

  it("read folders of sounds as a dataset", function()
    local set = data.sounds("../golden/augment/sounds", { rate = 8000, seconds = 0.1 })
    expect({ set:size(), set.classes }):to_equal { 2, { "high", "low" } }
    local batch = set:batch(2):batch_at(0)
    expect(batch.x.shape):to_equal { 2, 800 }
    expect(batch.y):to_equal { 0, 1 }
    -- 400 samples are padded with zeros, 900 are cut.
    expect(batch.x[0]:narrow(0, 400, 400):abs():max():item()):to_be(0)
    expect(batch.x[1]:narrow(0, 700, 100):abs():max():item() > 0.4):to_be_true()
    expect(function() data.sounds("../golden/augment/sounds", { rate = 8000, seconds = 0.1, classes = { "low" } }) end):to_raise "none of the 1 classes"
    expect(function() data.sounds("../golden/augment/sounds", { rate = 8000, seconds = 0 }) end):to_raise "at least one sample"
    expect(function() data.sounds("../golden/augment/sounds", { rate = 8000, second = 1 }) end):to_raise "seconds"
  end)
end)
