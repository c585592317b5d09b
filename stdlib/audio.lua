-- audio.lua: computes spectrograms of sounds as tensors: short windows, their Fourier transform as a matrix product, and mel bands.
--
-- The transform of a window is a product with the matrix of cosines and sines, which the mel bands of the power follow as another
-- product: both run on the device and have gradients. Definitions are those of torchaudio's MelSpectrogram.

local pl = require "perilune"
local check = require "perilune.check"

local audio = {}

---Converts a frequency in Hz to mel, as HTK.
local function mel_of(hz) return 2595 * math.log(1 + hz / 700, 10) end

local function hz_of(mel) return 700 * (10 ^ (mel / 2595) - 1) end

---Makes the matrix (bins, mels) of triangular bands that are even on the mel scale from `low` to `high` Hz, without normalization.
---@param opts {rate: integer, window?: integer, mels?: integer, low?: number, high?: number} rate: samples a second; window: samples of a Fourier transform; mels: number of bands; low: lowest frequency in Hz; high: highest frequency in Hz, half the rate by default
---@return perilune.Tensor (window // 2 + 1, mels) f32
function audio.mel_bands(opts)
  local op = "audio.mel_bands"
  local o = check.options(op, opts, { window = 400, mels = 80, low = 0 }, { rate = "number", high = "number" })
  check.required(op, o, { "rate" })
  check.whole(op, "rate", o.rate)
  check.whole(op, "window", o.window, 2)
  check.whole(op, "mels", o.mels)
  check.between(op, "mels", o.mels, 1, 4096)
  check.between(op, "window", o.window, 2, 65536)
  local high = check.between(op, "high", o.high or o.rate / 2, 0, o.rate / 2)
  check.between(op, "low", o.low, 0, high)
  if o.low >= high then pl.error(op, ("the bands go from %g to %g Hz"):format(o.low, high), "low must be below high") end
  local bins, edges = o.window // 2 + 1, {}
  for i = 0, o.mels + 1 do edges[i] = hz_of(mel_of(o.low) + (mel_of(high) - mel_of(o.low)) * i / (o.mels + 1)) end
  local rows = {}
  for k = 0, bins - 1 do
    local f, row = k * o.rate / o.window, {}
    for m = 1, o.mels do
      local up, down = (f - edges[m - 1]) / (edges[m] - edges[m - 1]), (edges[m + 1] - f) / (edges[m + 1] - edges[m])
      row[m] = math.max(0, math.min(up, down)) + 0.0
    end
    rows[k + 1] = row
  end
  return pl.tensor(rows, { dtype = "f32" })
end

---Makes the matrix (window, 2 * bins) of a Hann window times the cosines and the sines of a Fourier transform.
---@param window integer
---@param dtype "f32"|"f64"
---@return perilune.Tensor
local function transform(window, dtype)
  local bins = window // 2 + 1
  local n = pl.arange(window):reshape(window, 1)
  -- Angles are reduced to one turn as integers: products of large numbers would lose digits as floats.
  local turn = (n * pl.arange(bins) % window):to("f64") * (2 * math.pi / window)
  local hann = 0.5 - 0.5 * (n:to("f64") * (2 * math.pi / window)):cos()
  return pl.cat({ hann * turn:cos(), hann * turn:sin() }, 1):to(dtype)
end

---Computes the power spectrum of overlapping windows of sounds: Hann windows of `window` samples, `hop` apart, from the first sample on.
---@param x perilune.Tensor (..., N) floats
---@param opts {window?: integer, hop?: integer}? window: samples of a Fourier transform, 25 ms at 16 kHz; hop: samples between two windows, 10 ms at 16 kHz
---@return perilune.Tensor (..., frames, window // 2 + 1) f32 (f64 of f64), frames = (N - window) // hop + 1
function audio.power(x, opts)
  local op = "audio.power"
  local o = check.options(op, opts, { window = 400, hop = 160 })
  check.between(op, "window", check.whole(op, "window", o.window, 2), 2, 65536)
  check.whole(op, "hop", o.hop)
  if not pl.is_tensor(x) or x:dim() == 0 then pl.error(op, "x is " .. check.show(x), "give sounds as a tensor (..., samples)") end
  if x:size(-1) < o.window then
    pl.error(op, ("the sounds have %d samples, and a window has %d"):format(x:size(-1), o.window), "use longer sounds or a shorter window")
  end
  local bins = o.window // 2 + 1
  local dtype = x.dtype == "f64" and "f64" or "f32"
  local spectrum = x:to(dtype):unfold(-1, o.window, o.hop):matmul(transform(o.window, dtype))
  local re, im = spectrum:narrow(-1, 0, bins), spectrum:narrow(-1, bins, bins)
  return re * re + im * im
end

---Computes the log-mel spectrogram of sounds: log(power in mel bands + eps).
---@param x perilune.Tensor (..., N) floats
---@param opts {rate: integer, window?: integer, hop?: integer, mels?: integer, low?: number, high?: number, eps?: number} rate: samples a second; window: samples of a Fourier transform; hop: samples between two windows; mels: number of bands; low: lowest frequency in Hz; high: highest frequency in Hz, half the rate by default; eps: added before the logarithm
---@return perilune.Tensor (..., frames, mels) f32
function audio.log_mel(x, opts)
  local op = "audio.log_mel"
  local o = check.options(op, opts, { window = 400, hop = 160, mels = 80, low = 0, eps = 1e-6 }, { rate = "number", high = "number" })
  check.required(op, o, { "rate" })
  check.between(op, "eps", o.eps, 1e-30, 1)
  local bands = audio.mel_bands { rate = o.rate, window = o.window, mels = o.mels, low = o.low, high = o.high }
  local power = audio.power(x, { window = o.window, hop = o.hop })
  return (power:matmul(bands:to(power.dtype)) + o.eps):log()
end

return audio
