-- initializers.lua: draws initial weights of a given shape: pl.init. Names and defaults are those of torch.nn.init.
--
-- Each function returns a new tensor: `pl.state(init.xavier_uniform({ 64, 32 }))`. A weight has the shape (out, in, kernel...),
-- so fan_in is in * kernel and fan_out is out * kernel. The random generator is counter-based: the same seed and order of calls
-- give the same weights on every device.

local pl = require "perilune"
local check = require "perilune.check"

local init = {}

---Computes fan_in and fan_out of a weight. Raises for fewer than 2 dims.
---@param shape integer[] (out, in, kernel...)
---@return integer fan_in
---@return integer fan_out
function init.fans(shape)
  if #shape < 2 then
    pl.error("init", ("shape {%s} has %d dims, but a fan needs at least 2"):format(table.concat(shape, ", "), #shape),
      "for a bias or a scale use init.zeros, init.ones or init.uniform")
  end
  local kernel = 1
  for i = 3, #shape do kernel = kernel * shape[i] end
  local out_dim, in_dim = shape[1] --[[@as integer]], shape[2] --[[@as integer]]
  return in_dim * kernel, out_dim * kernel
end

---Returns the recommended gain of a nonlinearity (torch.nn.init.calculate_gain).
---@param nonlinearity string
---@param a number? slope of leaky_relu, 0.01 by default
---@return number
function init.gain(nonlinearity, a)
  local gains = { linear = 1, conv = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4,
                  leaky_relu = math.sqrt(2 / (1 + (a or 0.01) ^ 2)) }
  check.word("init.gain", "nonlinearity", nonlinearity, { "linear", "conv", "sigmoid", "tanh", "relu", "leaky_relu", "selu" })
  return gains[nonlinearity] --[[@as number]]
end

---Makes zeros.
---@param shape integer[]
---@param opts {dtype?: string}? dtype: of the result, f32 by default
function init.zeros(shape, opts)
  return pl.zeros(shape, check.options("init.zeros", opts, { dtype = "f32" }))
end

---Makes ones.
---@param shape integer[]
---@param opts {dtype?: string}? dtype: of the result, f32 by default
function init.ones(shape, opts)
  return pl.ones(shape, check.options("init.ones", opts, { dtype = "f32" }))
end

---Makes a tensor of one value.
---@param shape integer[]
---@param value number
---@param opts {dtype?: string}? dtype: of the result, f32 by default
function init.constant(shape, value, opts)
  return pl.full(shape, value, check.options("init.constant", opts, { dtype = "f32" }))
end

---Makes an identity matrix: 1 on the diagonal, 0 elsewhere.
---@param shape integer[] (rows, columns)
---@param opts {dtype?: string}? dtype: of the result, f32 by default
function init.eye(shape, opts)
  local o = check.options("init.eye", opts, { dtype = "f32" })
  if #shape ~= 2 then pl.error("init.eye", ("shape {%s} must have 2 dims"):format(table.concat(shape, ", "))) end
  local rows, columns = shape[1] --[[@as integer]], shape[2] --[[@as integer]]
  local row, column = pl.arange(rows):unsqueeze(1), pl.arange(columns)
  return row:eq(column):to(o.dtype)
end

---Makes a convolution weight that is the identity: 1 at the center of the kernel where input and output channel are equal, in
---each of `groups` groups of output channels. Zagoruyko and Komodakis, DiracNets (2017).
---@param shape integer[] (out, in, kernel...)
---@param opts {groups?: integer, dtype?: string}? groups: of output channels; dtype: of the result, f32 by default
function init.dirac(shape, opts)
  local o = check.options("init.dirac", opts, { groups = 1, dtype = "f32" })
  if #shape < 3 or #shape > 5 then
    pl.error("init.dirac", ("shape {%s} must have 3 to 5 dims: (out, in, kernel...)"):format(table.concat(shape, ", ")))
  end
  local rows, columns = shape[1] --[[@as integer]], shape[2] --[[@as integer]]
  check.whole("init.dirac", "groups", o.groups)
  if rows % o.groups ~= 0 then pl.error("init.dirac", ("%d output channels cannot be divided into %d equal groups"):format(rows, o.groups)) end
  local w = (pl.arange(rows) % (rows // o.groups)):unsqueeze(1):eq(pl.arange(columns))
  for i = 3, #shape do w = w:unsqueeze(-1):logical_and(pl.arange(shape[i]):eq(shape[i] // 2)) end
  return w:to(o.dtype)
end

---Draws uniform numbers in [a, b).
---@param shape integer[]
---@param opts {a?: number, b?: number, dtype?: string}? a: lower bound; b: upper bound; dtype: of the result, f32 by default
function init.uniform(shape, opts)
  local o = check.options("init.uniform", opts, { a = 0, b = 1, dtype = "f32" })
  return pl.rand(shape, { dtype = o.dtype }) * (o.b - o.a) + o.a
end

---Draws normal numbers.
---@param shape integer[]
---@param opts {mean?: number, std?: number, dtype?: string}? mean: of the distribution; std: its standard deviation; dtype: of the result, f32 by default
function init.normal(shape, opts)
  local o = check.options("init.normal", opts, { mean = 0, std = 1, dtype = "f32" })
  return pl.randn(shape, { dtype = o.dtype }) * o.std + o.mean
end

---Evaluates a polynomial by Horner's method.
---@param x perilune.Tensor
---@param coefficients any numbers, the highest power first
---@return perilune.Tensor
local function horner(x, coefficients)
  local y = coefficients[1] * x + coefficients[2]
  for i = 3, #coefficients do y = y * x + coefficients[i] end
  return y
end

---Computes the inverse of erf for x in (-1, 1), to an error of 4e-7.
---M. Giles, Approximating the erfinv function, GPU Computing Gems 2 (2011).
---@param x perilune.Tensor
---@return perilune.Tensor
local function erfinv(x)
  local w = -(1 - x * x):log()
  local central = horner(w - 2.5, { 2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                                    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941 })
  local tail = horner(w:sqrt() - 3, { -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
                                      -0.0076224613, 0.00943887047, 1.00167406, 2.83297682 })
  return pl.where(w:lt(5), central, tail) * x
end

---Computes the normal distribution function of a number. Abramowitz and Stegun 7.1.26, error 1.5e-7.
local function normal_cdf(x)
  local z = math.abs(x) / math.sqrt(2)
  local t = 1 / (1 + 0.3275911 * z)
  local erf = 1 - ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t * math.exp(-z * z)
  return x < 0 and (1 - erf) / 2 or (1 + erf) / 2
end

---Draws normal numbers truncated to [a, b], by inversion of the distribution function: one draw for each value.
---@param shape integer[]
---@param opts {mean?: number, std?: number, a?: number, b?: number, dtype?: string}? mean: of the distribution; std: its standard deviation; a: lower bound; b: upper bound; dtype: of the result, f32 by default
function init.trunc_normal(shape, opts)
  local o = check.options("init.trunc_normal", opts, { mean = 0, std = 1, a = -2, b = 2, dtype = "f32" })
  if o.a >= o.b then pl.error("init.trunc_normal", ("a = %g must be less than b = %g"):format(o.a, o.b)) end
  local low, high = normal_cdf((o.a - o.mean) / o.std), normal_cdf((o.b - o.mean) / o.std)
  local u = pl.rand(shape, { dtype = o.dtype }) * (2 * (high - low)) + (2 * low - 1)
  local z = erfinv(u:clamp(-1 + 1e-7, 1 - 1e-7)) * math.sqrt(2)
  return (z * o.std + o.mean):clamp(o.a, o.b)
end

---Draws uniform numbers in +-gain * sqrt(6 / (fan_in + fan_out)).
---Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks (2010).
---@param shape integer[]
---@param opts {gain?: number, dtype?: string}? gain: factor of the bound; dtype: of the result, f32 by default
function init.xavier_uniform(shape, opts)
  local o = check.options("init.xavier_uniform", opts, { gain = 1, dtype = "f32" })
  local fan_in, fan_out = init.fans(shape)
  local bound = o.gain * math.sqrt(6 / (fan_in + fan_out))
  return init.uniform(shape, { a = -bound, b = bound, dtype = o.dtype })
end

---Draws normal numbers of standard deviation gain * sqrt(2 / (fan_in + fan_out)). Glorot and Bengio (2010).
---@param shape integer[]
---@param opts {gain?: number, dtype?: string}? gain: factor of the deviation; dtype: of the result, f32 by default
function init.xavier_normal(shape, opts)
  local o = check.options("init.xavier_normal", opts, { gain = 1, dtype = "f32" })
  local fan_in, fan_out = init.fans(shape)
  return init.normal(shape, { std = o.gain * math.sqrt(2 / (fan_in + fan_out)), dtype = o.dtype })
end

local function kaiming_std(op, shape, opts)
  local o = check.options(op, opts, { a = 0, mode = "fan_in", nonlinearity = "leaky_relu", dtype = "f32" })
  check.word(op, "mode", o.mode, { "fan_in", "fan_out" })
  local fan_in, fan_out = init.fans(shape)
  return init.gain(o.nonlinearity, o.a) / math.sqrt(o.mode == "fan_in" and fan_in or fan_out), o.dtype
end

---Draws uniform numbers of standard deviation gain / sqrt(fan). He et al., Delving deep into rectifiers (2015).
---@param shape integer[]
---@param opts {a?: number, mode?: string, nonlinearity?: string, dtype?: string}? a: slope of leaky_relu; mode: "fan_in" or "fan_out"; nonlinearity: what follows the layer, for its gain; dtype: of the result, f32 by default
function init.kaiming_uniform(shape, opts)
  local std, dtype = kaiming_std("init.kaiming_uniform", shape, opts)
  local bound = math.sqrt(3) * std
  return init.uniform(shape, { a = -bound, b = bound, dtype = dtype })
end

---Draws normal numbers of standard deviation gain / sqrt(fan). He et al. (2015).
---@param shape integer[]
---@param opts {a?: number, mode?: string, nonlinearity?: string, dtype?: string}? a: slope of leaky_relu; mode: "fan_in" or "fan_out"; nonlinearity: what follows the layer, for its gain; dtype: of the result, f32 by default
function init.kaiming_normal(shape, opts)
  local std, dtype = kaiming_std("init.kaiming_normal", shape, opts)
  return init.normal(shape, { std = std, dtype = dtype })
end

---Draws normal numbers and sets the fraction `sparsity` of each column, rounded up, to 0.
---Martens, Deep learning via Hessian-free optimization (2010).
---@param shape integer[] (rows, columns)
---@param sparsity number
---@param opts {std?: number, dtype?: string}? std: of the values that are not 0; dtype: of the result, f32 by default
function init.sparse(shape, sparsity, opts)
  local o = check.options("init.sparse", opts, { std = 0.01, dtype = "f32" })
  if #shape ~= 2 then pl.error("init.sparse", ("shape {%s} must have 2 dims"):format(table.concat(shape, ", "))) end
  check.between("init.sparse", "sparsity", sparsity, 0, 1)
  local zeros = math.ceil(sparsity * shape[1] --[[@as integer]])
  local place = pl.rand(shape):argsort(0):argsort(0) -- rank of each element in a random order of its column
  return pl.where(place:lt(zeros), 0, init.normal(shape, { std = o.std, dtype = o.dtype }))
end

---Draws a matrix with orthonormal rows or columns, whichever are fewer; dims after the first are joined.
---Saxe et al., Exact solutions to the nonlinear dynamics of learning (2014).
---Computes the polar factor of a Gaussian matrix, whose distribution equals that of PyTorch's QR factor, with matmuls only:
---Newton-Schulz iterations in f64, 15 quintic ones to bring every singular value near 1, then 8 cubic ones to converge.
---@param shape integer[]
---@param opts {gain?: number, dtype?: string}? gain: factor of the matrix; dtype: of the result, f32 by default
function init.orthogonal(shape, opts)
  local o = check.options("init.orthogonal", opts, { gain = 1, dtype = "f32" })
  local fan_in = init.fans(shape)
  local rows, columns = shape[1] --[[@as integer]], fan_in
  local few, many = math.min(rows, columns) --[[@as integer]], math.max(rows, columns) --[[@as integer]]
  local x = pl.randn({ few, many }, { dtype = "f64" })
  x = x / (x * x):sum():sqrt()
  for _ = 1, 15 do
    local s = x:matmul(x:transpose(0, 1))
    x = 3.4445 * x + (-4.7750 * s + 2.0315 * s:matmul(s)):matmul(x)
  end
  for _ = 1, 8 do x = 1.5 * x - 0.5 * x:matmul(x:transpose(0, 1)):matmul(x) end
  if rows > columns then x = x:transpose(0, 1) end
  return (o.gain * x):to(o.dtype):reshape(shape)
end

return init
