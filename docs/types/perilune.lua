---@meta perilune
-- Made by `perilune stubs` from the op registry: types for editors. Never run.

---A whole number: 64, or 64.0 as a result of arithmetic.
---@alias perilune.Whole number

---@alias perilune.DType "f64"|"f32"|"bf16"|"f16"|"i64"|"i32"|"u8"|"bool"

---@class perilune.Tensor
---@field shape integer[] dims
---@field dtype perilune.DType
---@field device string
---@field grad perilune.Tensor? of a State, after backward
---@field trainable boolean
---@operator add(perilune.Tensor|number): perilune.Tensor
---@operator sub(perilune.Tensor|number): perilune.Tensor
---@operator mul(perilune.Tensor|number): perilune.Tensor
---@operator div(perilune.Tensor|number): perilune.Tensor
---@operator idiv(perilune.Tensor|number): perilune.Tensor
---@operator mod(perilune.Tensor|number): perilune.Tensor
---@operator pow(perilune.Tensor|number): perilune.Tensor
---@operator unm: perilune.Tensor
---@operator len: integer
---@field [any] perilune.Tensor
local Tensor = {}

---Returns all dims, or one.
---@param dim? integer
---@return integer ...
function Tensor:size(dim) end
---Returns the number of elements.
---@return integer
function Tensor:numel() end
---Returns the number of dims.
---@return integer
function Tensor:dim() end
---Evaluates the tensor and returns its only value; a boolean if the tensor is bool.
---@return number
function Tensor:item() end
---Evaluates the tensor and returns all elements: a nested list, or a number for a scalar.
---@return any
function Tensor:tolist() end
---Adds gradients of this scalar to `.grad` of every trainable State that it depends on. With a seed of its shape the tensor need not be a scalar.
---@param seed? perilune.Tensor|number
---@param options? {create_graph?: boolean}
function Tensor:backward(seed, options) end
---Assigns a value to a State: later reads return it, and the end of the step writes it. Earlier reads keep the old value.
---@param value perilune.Tensor|number
function Tensor:assign(value) end

---Returns the tensor with all elements on every device of the mesh: `replicate` by a shorter name.
---@return perilune.Tensor
function Tensor:full() end
---Frees the memory immediately instead of at the next collection. Using the tensor afterwards is an error.
function Tensor:free() end

---A buffer that changes: `pl.state` creates one, `assign` and optimizers write it.
---@class perilune.State: perilune.Tensor

---@class perilune
---@field nn any
---@field optim any
---@field data any
---@field metrics any
---@field augment any
---@field audio any
---@field train any
---@field init any
---@field tree any
---@field newaxis table
---@field version string
local pl = {}

---Makes a tensor from a number, a boolean, a nested list of them (all rows of equal length) or another tensor: i64 from whole numbers, f32 if
---one has a point, bool from booleans, unless a dtype is given.
---@param value any
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.tensor(value, options) end
---Creates a State with the initial value x: a weight (`trainable`, the default for floats) or another value to keep. `w:assign(v)` writes it.
---@param x perilune.Tensor
---@param options? {trainable?: boolean, role?: "weights"|"optimizer"|"buffers"} role is used only by pl.memory()
---@return perilune.State
function pl.state(x, options) end
---Returns whether x is a tensor. A State is a tensor.
---@param x any
---@return boolean
function pl.is_tensor(x) end
---Returns whether x is a State.
---@param x any
---@return boolean
function pl.is_state(x) end
---Returns the number of devices along each axis of the mesh, 1 where an axis is not used: `pl.mesh().dp`.
---@return {pp: integer, dp: integer, shard: integer, cp: integer, ep: integer, tp: integer}
function pl.mesh() end
---Runs fn(...) as a step: evaluates the tensors that it returns and writes its assignments. If fn raises, every State keeps its value.
---@param fn function
---@return any ...
function pl.step(fn, ...) end
---Returns whether a step is open.
---@return boolean
function pl.in_step() end
---Ends the implicit step of a plain loop, like `opt:step()`: writes assignments and evaluates the tensors that the script can still reach.
function pl.end_step() end
---Evaluates tensors immediately and returns them. Inside a step this splits its plan.
---@return any ...
function pl.eval(...) end
---Evaluates tensors when the open step ends, so that they can be read afterwards.
---@return any ...
function pl.keep(...) end
---Runs fn(...) without recording gradients: its results are constants.
---@param fn function
---@return any ...
function pl.no_grad(fn, ...) end
---Runs fn(...), a function or a module. A backward pass recomputes its intermediate values instead of storing them.
---Gradients have the same bits. Values used outside of fn, such as its results, are stored.
---@param fn function|perilune.Module
---@return any ...
function pl.checkpoint(fn, ...) end
---Runs fn(...) with matmuls, convolutions and attention in a 16-bit dtype (ops that need f32 stay f32), or with f32 products
---whose operands may be rounded to TF32 (10 bits of mantissa) where the device has such products: GPUs do, the CPU computes f32.
---Backward passes use the precision of the recording.
---@param dtype "bf16"|"f16"|"tf32"|"f32"
---@param fn function
---@return any ...
function pl.autocast(dtype, fn, ...) end
---Seeds the random numbers: the same seed and the same calls give the same numbers on every device.
---@param n integer
function pl.seed(n) end
---Computes gradients of the scalar y with respect to each of xs. With `create_graph` they can be differentiated again. With `allow_unused`
---the gradient of an x that y does not depend on is nil instead of an error.
---@param y perilune.Tensor
---@param xs perilune.Tensor[]
---@param options? {create_graph?: boolean, allow_unused?: boolean}
---@return perilune.Tensor? ...
function pl.grad(y, xs, options) end
---Compares the gradients of fn's results with finite differences in f64. Returns true, or raises with the element of largest error.
---@param fn fun(...: perilune.Tensor): perilune.Tensor ...
---@param inputs perilune.Tensor[]
---@param options? {eps?: number, tolerance?: number}
---@return boolean
function pl.gradcheck(fn, inputs, options) end
---Makes an elementwise function from an expression: `pl.kernel { inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }`,
---or any function of tensors from CUDA source: `pl.kernel { name = "f", inputs = "x: f32", source = "__global__ void f(...) ...", cpu = function(x) ... end }`.
---@param options {name?: string, inputs: string, scalars?: string, expr?: string, backward?: function, source?: string, outputs?: string, shape?: function, grid?: integer|integer[]|function, block?: integer|integer[]|function, shared?: integer|function, args?: function, cpu?: function}
---@return fun(...: any): perilune.Tensor ...
function pl.kernel(options) end
---Runs a kernel from CUDA source and its `cpu` function on the GPU and compares them. Returns true, or raises with the element of largest error.
---@param kernel function
---@param arguments any[]
---@param options? {rtol?: number, atol?: number}
---@return boolean
function pl.kernel_check(kernel, arguments, options) end
---Makes a function with its own backward. forward(...) takes tensors and other values and returns one tensor; backward(g, ...) takes
---the gradient of the result and the same arguments, and returns a gradient (or nil) for each tensor among them.
---@param options {forward: function, backward: function, name?: string}
---@return function
function pl.custom(options) end
---Returns the seconds since the runtime started. It waits for nothing: ops are recorded and computed later, on a GPU also beside the
---program. To time a computation, read a value of it before the second call: `x:sum():item()`. At the prompt use `:time x`.
---@return number
function pl.clock() end
---Returns the plan for evaluating tensors, as text. With a trailing {source = true} also the recipe lines and the CUDA text of
---each kernel; on the CPU, those of the plan for a GPU.
---@param ... perilune.Tensor|{source?: boolean}
---@return string
function pl.plan(...) end
---Returns counts of plans, cache hits and misses, runs and splits, and the allocated bytes.
---@return table
function pl.stats() end
---Begins the run of a plain script: its directory, its progress bar, and the curves of what run:log gets.
---@param options? {name?: string, steps?: integer, params?: table}
---@return perilune.ScriptRun
function pl.run(options) end
---Opens a prompt here, with the locals of this function. Without a terminal it is skipped with a warning.
function pl.breakpoint() end
---Summarizes a model called with these inputs, layer by layer: output shapes, parameters, FLOP and bytes of outputs. Nothing is computed.
---@param model perilune.Module
---@param ... any inputs of the model
---@return perilune.Summary
function pl.summary(model, ...) end
---Returns the memory use of the device: bytes allocated, reserved and the peak; by_role; owners, largest first, each
---with role, bytes, count, dtype and shape of the largest, and the recipe line. Intermediate values of a step
---(activations, gradients) are those of the largest plan so far. A tensor made from a table or a file counts once a step has read it.
---@return {allocated: integer, reserved: integer, peak: integer, limit: integer?, by_role: table<string, integer>, owners: table[]}
function pl.memory() end
---Limits the memory of a step, including its inputs: above it the backward pass recomputes values, or the step is an error. nil lifts it.
---@param budget string|integer|nil as in "20GiB", or bytes
---@return integer? before
function pl.memory_budget(budget) end
---Sets switches for all later code, or while fn(...) runs; see the guide.
---@param switches {fusion?: boolean, print_plan?: boolean|"source", check_nan?: boolean, report_misses?: boolean}
---@param fn? function
---@return any ...
function pl.switches(switches, fn, ...) end
---Parses the options of a custom function: `given` overrides `defaults`; unknown names are errors with a suggestion.
---@param op string
---@param given table?
---@param defaults table
---@return any options
function pl.options(op, given, defaults) end
---Raises an error in the form of the library: op, message, cure, and the caller's line.
---@param op string
---@param message string
---@param hint? string
---@param at? function whose line is at fault, if it is not the current one
function pl.error(op, message, hint, at) end
---Makes the table that a recipe returns: its name, params and functions. Misspelt fields are errors.
---@param recipe table
---@return any recipe the table, to which the recipe's functions are added
function pl.recipe(recipe) end
---Returns the params of a plain script, which `--set` can change.
---@param defaults table
---@return table<string, any>
function pl.params(defaults) end
---Opens a run directory at its last checkpoint, or at that of the step `at`, and returns its run: recipe, params, data, model, and all States
---as the checkpoint has them. `run.model` is the trained model; `run:evaluate()`, `run:generate()` and `run:step()` go on from there. The
---recipe is the text that the directory stores, with the params of the checkpoint; it must not call `require` later than its data and model
---are built. Nothing is written to the directory, and the random numbers of the caller go on. A relative path is searched for in the current
---directory, then in the recipe's folder; the policy of the command applies (--allow-read). Not inside a step.
---@param dir string as in "runs/digits-20260722-091500"
---@param options? {at?: integer}
---@return perilune.Run
function pl.load_run(dir, options) end
---Reads the named tensors of a .safetensors or .npz file or of a sharded model (.safetensors.index.json), or the tensor of an .npy file.
---A relative path is searched for in the current directory, where `pl.save` writes, then in the recipe's folder. The policy of the command applies
---(--allow-read).
---@param path string
---@return any
function pl.load(path) end
---Writes named tensors (.safetensors, .npz) or one tensor (.npy). A relative path starts at the current directory. The command must allow the write: by
---a --set that names the file, the run directory, or --allow-write.
---@param path string
---@param tensors perilune.Tensor|table<string, perilune.Tensor>
function pl.save(path, tensors) end
---Returns the documentation of an op or a function: signature, options, effect.
---@param name? string
---@return string
function pl.help(name) end

---zeros({d0, d1, ...}) -> (d0, d1, ...), all 0.
---@param shape perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.zeros(shape, options, ...) end

---ones({d0, d1, ...}) -> (d0, d1, ...), all 1.
---@param shape perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.ones(shape, options, ...) end

---full({d0, ...}, value) -> (d0, ...), all `value`.
---dtype defaults to i64 for an integer value and f32 for a float. The value is a run-time number: changing it
---recompiles nothing.
---@param shape perilune.Whole|perilune.Whole[]
---@param value number
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.full(shape, value, options) end

---x (...) -> (...), all 0, of x's dtype unless one is given.
---@param x perilune.Tensor
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.zeros_like(x, options) end

---x (...) -> (...), all 0, of x's dtype unless one is given.
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function Tensor:zeros_like(options) end

---x (...) -> (...), all 1, of x's dtype unless one is given.
---@param x perilune.Tensor
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.ones_like(x, options) end

---x (...) -> (...), all 1, of x's dtype unless one is given.
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function Tensor:ones_like(options) end

---x (...) -> (...), all `value`, of x's dtype unless one is given.
---@param x perilune.Tensor
---@param value number
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.full_like(x, value, options) end

---x (...) -> (...), all `value`, of x's dtype unless one is given.
---@param value number
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function Tensor:full_like(value, options) end

---arange(stop) or arange(start, stop, step) -> (n): start, start + step, ... below stop (above, if step < 0).
---n = ceil((stop - start) / step), but at least 0. i64 if all are integers, else f32; floats are computed as
---start + i * step in f64 and rounded once for f64, in f32 otherwise.
---@param start number
---@param stop? number
---@param step? number
---@param options? {dtype?: perilune.DType}
---@overload fun(start: number, options: {dtype?: perilune.DType}): perilune.Tensor
---@overload fun(start: number, stop: number, options: {dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function pl.arange(start, stop, step, options) end

---linspace(start, stop, n) -> (n): n evenly spaced numbers from start to stop, both included.
---If n = 1, the number is start. Computed from both ends, so that the last is exactly stop.
---@param start number
---@param stop number
---@param steps perilune.Whole
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.linspace(start, stop, steps, options) end

---eye(n[, m]) -> (n, m): 1 where row equals column, else 0.
---@param n perilune.Whole
---@param m? perilune.Whole
---@param options? {dtype?: perilune.DType}
---@overload fun(n: perilune.Whole, options: {dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function pl.eye(n, m, options) end

---rand({d0, ...}) -> (d0, ...): uniform in [0, 1).
---f32 has 24 random bits, f64 48, f16 11, bf16 8. Philox 4x32-10 of (seed, step, call, element).
---@param shape perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.rand(shape, options, ...) end

---uniform({d0, ...}, low, high) -> (d0, ...): uniform in [low, high); rounding may reach high.
---low and high are run-time numbers.
---@param shape perilune.Whole|perilune.Whole[]
---@param low? number
---@param high? number
---@param options? {dtype?: perilune.DType}
---@overload fun(shape: perilune.Whole|perilune.Whole[], options: {dtype?: perilune.DType}): perilune.Tensor
---@overload fun(shape: perilune.Whole|perilune.Whole[], low: number, options: {dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function pl.uniform(shape, low, high, options) end

---randn({d0, ...}) -> (d0, ...): normal with mean 0 and variance 1, by Box and Muller's method from two uniform
---draws. f32 reaches 5.77 standard deviations, f64 8.15. 16-bit floats are rounded from f32.
---@param shape perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.randn(shape, options, ...) end

---randint(low, high, {d0, ...}) -> (d0, ...): integers, uniform in [low, high).
---Ranges to 4096 use one draw of 24 bits, wider ones two (48 bits), so no value is favoured by more than 1 in
---4096; high - low is at most 2^36. low and high are run-time numbers.
---@param low perilune.Whole
---@param high perilune.Whole
---@param shape perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.randint(low, high, shape, options, ...) end

---p (...) float -> (...) of p's dtype: 1 with probability p, else 0; or bernoulli(p, {d0, ...}) -> (d0, ...) f32
---for a number p, which is a run-time number. Probabilities are accurate to 2^-24.
---@param p perilune.Tensor|number|boolean
---@param shape? perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@overload fun(p: perilune.Tensor|number|boolean, options: {dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function pl.bernoulli(p, shape, options, ...) end

---p (...) float -> (...) of p's dtype: 1 with probability p, else 0; or bernoulli(p, {d0, ...}) -> (d0, ...) f32
---for a number p, which is a run-time number. Probabilities are accurate to 2^-24.
---@param shape? perilune.Whole|perilune.Whole[]
---@param options? {dtype?: perilune.DType}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function Tensor:bernoulli(shape, options, ...) end

---x (...) -> (...): uniform in [0, 1), of x's dtype unless one is given. See `rand`.
---@param x perilune.Tensor
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.rand_like(x, options) end

---x (...) -> (...): uniform in [0, 1), of x's dtype unless one is given. See `rand`.
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function Tensor:rand_like(options) end

---x (...) -> (...): normal with mean 0 and variance 1, of x's dtype unless one is given. See `randn`.
---@param x perilune.Tensor
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.randn_like(x, options) end

---x (...) -> (...): normal with mean 0 and variance 1, of x's dtype unless one is given. See `randn`.
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function Tensor:randn_like(options) end

---x (...) -> (...): each element 0 with probability p, else x / (1 - p). p is a run-time number in [0, 1]; at 0 the
---result is x itself. The mask is generated again in the backward pass, not stored. Srivastava et al., JMLR 15
---(2014).
---@param x perilune.Tensor
---@param p? number
---@return perilune.Tensor
function pl.dropout(x, p) end

---x (...) -> (...): each element 0 with probability p, else x / (1 - p). p is a run-time number in [0, 1]; at 0 the
---result is x itself. The mask is generated again in the backward pass, not stored. Srivastava et al., JMLR 15
---(2014).
---@param p? number
---@return perilune.Tensor
function Tensor:dropout(p) end

---x (...) -> (...) with elements of `dtype`.
---Floats round to nearest even. Floats to integers truncate toward zero; beyond the limits of `dtype` they become the
---nearer limit (3e9 as i32 is 2147483647, -1.0 as u8 is 0), and NaN becomes 0. Integers to narrower ones keep the low
---bits (300 as u8 is 44). Anything to bool is "not zero", NaN included. All devices give the same bits.
---@param x perilune.Tensor
---@param dtype perilune.DType
---@return perilune.Tensor
function pl.to(x, dtype) end

---x (...) -> (...) with elements of `dtype`.
---Floats round to nearest even. Floats to integers truncate toward zero; beyond the limits of `dtype` they become the
---nearer limit (3e9 as i32 is 2147483647, -1.0 as u8 is 0), and NaN becomes 0. Integers to narrower ones keep the low
---bits (300 as u8 is 44). Anything to bool is "not zero", NaN included. All devices give the same bits.
---@param dtype perilune.DType
---@return perilune.Tensor
function Tensor:to(dtype) end

---x (...) -> (...), the same values, contiguous in row-major order.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.contiguous(x) end

---x (...) -> (...), the same values, contiguous in row-major order.
---@return perilune.Tensor
function Tensor:contiguous() end

---x (...) -> (...): -x. Also the operator `-x`.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.neg(x) end

---x (...) -> (...): -x. Also the operator `-x`.
---@return perilune.Tensor
function Tensor:neg() end

---x (...) -> (...): |x|. The gradient at 0 is 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.abs(x) end

---x (...) -> (...): |x|. The gradient at 0 is 0.
---@return perilune.Tensor
function Tensor:abs() end

---x (...) -> (...): -1, 0 or 1; NaN stays NaN.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.sign(x) end

---x (...) -> (...): -1, 0 or 1; NaN stays NaN.
---@return perilune.Tensor
function Tensor:sign() end

---x (...) -> (...): e^x.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.exp(x) end

---x (...) -> (...): e^x.
---@return perilune.Tensor
function Tensor:exp() end

---x (...) -> (...): natural logarithm; -inf at 0, NaN below.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.log(x) end

---x (...) -> (...): natural logarithm; -inf at 0, NaN below.
---@return perilune.Tensor
function Tensor:log() end

---x (...) -> (...): log(1 + x), accurate near 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.log1p(x) end

---x (...) -> (...): log(1 + x), accurate near 0.
---@return perilune.Tensor
function Tensor:log1p() end

---x (...) -> (...): e^x - 1, accurate near 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.expm1(x) end

---x (...) -> (...): e^x - 1, accurate near 0.
---@return perilune.Tensor
function Tensor:expm1() end

---x (...) -> (...): square root; NaN below 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.sqrt(x) end

---x (...) -> (...): square root; NaN below 0.
---@return perilune.Tensor
function Tensor:sqrt() end

---x (...) -> (...): 1 / sqrt(x).
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.rsqrt(x) end

---x (...) -> (...): 1 / sqrt(x).
---@return perilune.Tensor
function Tensor:rsqrt() end

---x (...) -> (...): 1 / x.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.reciprocal(x) end

---x (...) -> (...): 1 / x.
---@return perilune.Tensor
function Tensor:reciprocal() end

---x (...) -> (...): sine of x in radians.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.sin(x) end

---x (...) -> (...): sine of x in radians.
---@return perilune.Tensor
function Tensor:sin() end

---x (...) -> (...): cosine of x in radians.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.cos(x) end

---x (...) -> (...): cosine of x in radians.
---@return perilune.Tensor
function Tensor:cos() end

---x (...) -> (...): tangent of x in radians.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.tan(x) end

---x (...) -> (...): tangent of x in radians.
---@return perilune.Tensor
function Tensor:tan() end

---x (...) -> (...): hyperbolic tangent.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.tanh(x) end

---x (...) -> (...): hyperbolic tangent.
---@return perilune.Tensor
function Tensor:tanh() end

---x (...) -> (...): 1 / (1 + e^-x).
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.sigmoid(x) end

---x (...) -> (...): 1 / (1 + e^-x).
---@return perilune.Tensor
function Tensor:sigmoid() end

---x (...) -> (...): the error function, 2/sqrt(pi) times the integral of e^-t^2 from 0 to x.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.erf(x) end

---x (...) -> (...): the error function, 2/sqrt(pi) times the integral of e^-t^2 from 0 to x.
---@return perilune.Tensor
function Tensor:erf() end

---x (...) -> (...): the largest integer not above x, as a float; integers are unchanged. The gradient is 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.floor(x) end

---x (...) -> (...): the largest integer not above x, as a float; integers are unchanged. The gradient is 0.
---@return perilune.Tensor
function Tensor:floor() end

---x (...) -> (...): the smallest integer not below x, as a float; integers are unchanged. The gradient is 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.ceil(x) end

---x (...) -> (...): the smallest integer not below x, as a float; integers are unchanged. The gradient is 0.
---@return perilune.Tensor
function Tensor:ceil() end

---x (...) -> (...): the nearest integer, ties to even, as a float; integers are unchanged. The gradient is 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.round(x) end

---x (...) -> (...): the nearest integer, ties to even, as a float; integers are unchanged. The gradient is 0.
---@return perilune.Tensor
function Tensor:round() end

---x (...), y (...) -> broadcast: x + y. Also the operator `+`. Integers wrap around; for bools it is `or`.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.add(x, y) end

---x (...), y (...) -> broadcast: x + y. Also the operator `+`. Integers wrap around; for bools it is `or`.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:add(y) end

---x (...), y (...) -> broadcast: x - y. Also the operator `-`. Integers wrap around, bools become i64.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.sub(x, y) end

---x (...), y (...) -> broadcast: x - y. Also the operator `-`. Integers wrap around, bools become i64.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:sub(y) end

---x (...), y (...) -> broadcast: x * y. Also the operator `*`. Integers wrap around; for bools it is `and`.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.mul(x, y) end

---x (...), y (...) -> broadcast: x * y. Also the operator `*`. Integers wrap around; for bools it is `and`.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:mul(y) end

---x (...), y (...) -> broadcast: x / y, always a float (integers are converted to f32). Also the operator `/`.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.div(x, y) end

---x (...), y (...) -> broadcast: x / y, always a float (integers are converted to f32). Also the operator `/`.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:div(y) end

---x (...), y (...) -> broadcast: floor(x / y), as in Lua and Python. Also the operator `//`.
---An integer divided by 0 gives 0. The gradient is 0.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.floor_div(x, y) end

---x (...), y (...) -> broadcast: floor(x / y), as in Lua and Python. Also the operator `//`.
---An integer divided by 0 gives 0. The gradient is 0.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:floor_div(y) end

---x (...), y (...) -> broadcast: x - floor(x / y) * y, with the sign of y. Also the operator `%`.
---An integer modulo 0 gives 0.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.remainder(x, y) end

---x (...), y (...) -> broadcast: x - floor(x / y) * y, with the sign of y. Also the operator `%`.
---An integer modulo 0 gives 0.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:remainder(y) end

---x (...), y (...) -> broadcast: x to the power y. Also the operator `^`.
---The numbers 2, 3, 0.5, -0.5, 1 and -1 as exponents are part of the program and become products and roots; any
---other number is a run-time slot. Integers wrap; an integer to a negative power is 0 unless x is 1 or -1.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.pow(x, y) end

---x (...), y (...) -> broadcast: x to the power y. Also the operator `^`.
---The numbers 2, 3, 0.5, -0.5, 1 and -1 as exponents are part of the program and become products and roots; any
---other number is a run-time slot. Integers wrap; an integer to a negative power is 0 unless x is 1 or -1.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:pow(y) end

---x (...), y (...) -> broadcast: the larger of the two; NaN if either is. Equal values share the gradient.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.maximum(x, y) end

---x (...), y (...) -> broadcast: the larger of the two; NaN if either is. Equal values share the gradient.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:maximum(y) end

---x (...), y (...) -> broadcast: the smaller of the two; NaN if either is. Equal values share the gradient.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.minimum(x, y) end

---x (...), y (...) -> broadcast: the smaller of the two; NaN if either is. Equal values share the gradient.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:minimum(y) end

---x (...), y (...) -> broadcast bool: x == y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.eq(x, y) end

---x (...), y (...) -> broadcast bool: x == y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:eq(y) end

---x (...), y (...) -> broadcast bool: x != y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.ne(x, y) end

---x (...), y (...) -> broadcast bool: x != y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:ne(y) end

---x (...), y (...) -> broadcast bool: x < y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.lt(x, y) end

---x (...), y (...) -> broadcast bool: x < y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:lt(y) end

---x (...), y (...) -> broadcast bool: x <= y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.le(x, y) end

---x (...), y (...) -> broadcast bool: x <= y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:le(y) end

---x (...), y (...) -> broadcast bool: x > y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.gt(x, y) end

---x (...), y (...) -> broadcast bool: x > y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:gt(y) end

---x (...), y (...) -> broadcast bool: x >= y. A method, since Lua's own comparisons return plain booleans.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.ge(x, y) end

---x (...), y (...) -> broadcast bool: x >= y. A method, since Lua's own comparisons return plain booleans.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:ge(y) end

---x (...) -> bool (...): whether the element is NaN.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.isnan(x) end

---x (...) -> bool (...): whether the element is NaN.
---@return perilune.Tensor
function Tensor:isnan() end

---x (...) -> bool (...): whether the element is positive or negative infinity.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.isinf(x) end

---x (...) -> bool (...): whether the element is positive or negative infinity.
---@return perilune.Tensor
function Tensor:isinf() end

---x (...), y (...) -> broadcast bool: whether both are not zero.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.logical_and(x, y) end

---x (...), y (...) -> broadcast bool: whether both are not zero.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:logical_and(y) end

---x (...), y (...) -> broadcast bool: whether at least one is not zero.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.logical_or(x, y) end

---x (...), y (...) -> broadcast bool: whether at least one is not zero.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:logical_or(y) end

---x (...), y (...) -> broadcast bool: whether exactly one is not zero.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.logical_xor(x, y) end

---x (...), y (...) -> broadcast bool: whether exactly one is not zero.
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:logical_xor(y) end

---x (...) -> bool (...): whether the element is zero.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.logical_not(x) end

---x (...) -> bool (...): whether the element is zero.
---@return perilune.Tensor
function Tensor:logical_not() end

---cond (...) bool, x (...), y (...) -> broadcast: x where cond is true, else y. `cond:where(x, y)` works too.
---@param cond perilune.Tensor
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.where(cond, x, y) end

---cond (...) bool, x (...), y (...) -> broadcast: x where cond is true, else y. `cond:where(x, y)` works too.
---@param x perilune.Tensor|number|boolean
---@param y perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:where(x, y) end

---x (...) -> (...): x limited to [min, max]; either bound may be nil. NaN stays NaN. No gradient flows where x is
---outside the bounds.
---@param x perilune.Tensor
---@param min? perilune.Tensor|number|boolean
---@param max? perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.clamp(x, min, max) end

---x (...) -> (...): x limited to [min, max]; either bound may be nil. NaN stays NaN. No gradient flows where x is
---outside the bounds.
---@param min? perilune.Tensor|number|boolean
---@param max? perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:clamp(min, max) end

---x (...) -> bool (...): whether the element is neither infinite nor NaN.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.isfinite(x) end

---x (...) -> bool (...): whether the element is neither infinite nor NaN.
---@return perilune.Tensor
function Tensor:isfinite() end

---x (...) -> (...): max(x, 0); NaN stays NaN. The gradient at 0 is 0.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.relu(x) end

---x (...) -> (...): max(x, 0); NaN stays NaN. The gradient at 0 is 0.
---@return perilune.Tensor
function Tensor:relu() end

---x (...) -> (...): x times the normal distribution function at x; `approximate = "tanh"` is the form of GPT-2,
---0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks and Gimpel, arXiv:1606.08415.
---@param x perilune.Tensor
---@param options? {approximate?: "none"|"tanh"}
---@return perilune.Tensor
function pl.gelu(x, options) end

---x (...) -> (...): x times the normal distribution function at x; `approximate = "tanh"` is the form of GPT-2,
---0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks and Gimpel, arXiv:1606.08415.
---@param options? {approximate?: "none"|"tanh"}
---@return perilune.Tensor
function Tensor:gelu(options) end

---x (...) -> (...): x * sigmoid(x), also called swish.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.silu(x) end

---x (...) -> (...): x * sigmoid(x), also called swish.
---@return perilune.Tensor
function Tensor:silu() end

---x (...) -> (...): log(1 + exp(beta x)) / beta; x itself where beta x > threshold.
---@param x perilune.Tensor
---@param beta? number
---@param threshold? number
---@return perilune.Tensor
function pl.softplus(x, beta, threshold) end

---x (...) -> (...): log(1 + exp(beta x)) / beta; x itself where beta x > threshold.
---@param beta? number
---@param threshold? number
---@return perilune.Tensor
function Tensor:softplus(beta, threshold) end

---x (...) -> (...): x where x > 0, else alpha (exp(x) - 1). The gradient at 0 is alpha.
---@param x perilune.Tensor
---@param alpha? number
---@return perilune.Tensor
function pl.elu(x, alpha) end

---x (...) -> (...): x where x > 0, else alpha (exp(x) - 1). The gradient at 0 is alpha.
---@param alpha? number
---@return perilune.Tensor
function Tensor:elu(alpha) end

---x (...) -> (...): 1.0507 * elu(x, 1.67326), the self-normalising unit of Klambauer et al., arXiv:1706.02515.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.selu(x) end

---x (...) -> (...): 1.0507 * elu(x, 1.67326), the self-normalising unit of Klambauer et al., arXiv:1706.02515.
---@return perilune.Tensor
function Tensor:selu() end

---x (...) -> (...): x where x > 0, else slope x. The gradient at 0 is slope.
---@param x perilune.Tensor
---@param slope? number
---@return perilune.Tensor
function pl.leaky_relu(x, slope) end

---x (...) -> (...): x where x > 0, else slope x. The gradient at 0 is slope.
---@param slope? number
---@return perilune.Tensor
function Tensor:leaky_relu(slope) end

---x (...) -> (...): x tanh(log(1 + exp(x))). Misra, arXiv:1908.08681. Computed with one exponential, as
---x w / (w + 2) with w = e^x (e^x + 2).
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.mish(x) end

---x (...) -> (...): x tanh(log(1 + exp(x))). Misra, arXiv:1908.08681. Computed with one exponential, as
---x w / (w + 2) with w = e^x (e^x + 2).
---@return perilune.Tensor
function Tensor:mish() end

---x (...) -> (...): x relu6(x + 3) / 6. Howard et al., arXiv:1905.02244.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.hardswish(x) end

---x (...) -> (...): x relu6(x + 3) / 6. Howard et al., arXiv:1905.02244.
---@return perilune.Tensor
function Tensor:hardswish() end

---x (...) -> (...): relu6(x + 3) / 6.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.hardsigmoid(x) end

---x (...) -> (...): relu6(x + 3) / 6.
---@return perilune.Tensor
function Tensor:hardsigmoid() end

---x (...) -> (...): min(max(x, 0), 6). The gradient is 0 at 0 and 6 and beyond them.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.relu6(x) end

---x (...) -> (...): min(max(x, 0), 6). The gradient is 0 at 0 and 6 and beyond them.
---@return perilune.Tensor
function Tensor:relu6() end

---x (...) -> (...): log(sigmoid(x)), without overflow: min(x, 0) - log(1 + exp(-|x|)).
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.logsigmoid(x) end

---x (...) -> (...): log(sigmoid(x)), without overflow: min(x, 0) - log(1 + exp(-|x|)).
---@return perilune.Tensor
function Tensor:logsigmoid() end

---x (...) -> (...): x / (1 + |x|).
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.softsign(x) end

---x (...) -> (...): x / (1 + |x|).
---@return perilune.Tensor
function Tensor:softsign() end

---x (...) -> the sum over `dims` (all when absent).
---Integers and bools sum in i64. 16-bit floats accumulate in f32 and round once. The sum of zero elements is 0.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.sum(x, dims, options, ...) end

---x (...) -> the sum over `dims` (all when absent).
---Integers and bools sum in i64. 16-bit floats accumulate in f32 and round once. The sum of zero elements is 0.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:sum(dims, options, ...) end

---x (...) -> the product over `dims` (all when absent). Integers and bools multiply in i64. The product of zero
---elements is 1.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.prod(x, dims, options, ...) end

---x (...) -> the product over `dims` (all when absent). Integers and bools multiply in i64. The product of zero
---elements is 1.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:prod(dims, options, ...) end

---x (...) -> the largest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.amax(x, dims, options, ...) end

---x (...) -> the largest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:amax(dims, options, ...) end

---x (...) -> the smallest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.amin(x, dims, options, ...) end

---x (...) -> the smallest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:amin(dims, options, ...) end

---x (...) -> the largest element; or, along `dim`: values, positions (i64, the first of equal elements).
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor, perilune.Tensor?
---@return perilune.Tensor
---@return perilune.Tensor?
function pl.max(x, dim, options) end

---x (...) -> the largest element; or, along `dim`: values, positions (i64, the first of equal elements).
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor, perilune.Tensor?
---@return perilune.Tensor
---@return perilune.Tensor?
function Tensor:max(dim, options) end

---x (...) -> the smallest element; or, along `dim`: values, positions (i64, the first of equal elements).
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor, perilune.Tensor?
---@return perilune.Tensor
---@return perilune.Tensor?
function pl.min(x, dim, options) end

---x (...) -> the smallest element; or, along `dim`: values, positions (i64, the first of equal elements).
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor, perilune.Tensor?
---@return perilune.Tensor
---@return perilune.Tensor?
function Tensor:min(dim, options) end

---x (...) -> the arithmetic mean over `dims` (all when absent); integers are converted to f32. The mean of zero
---elements is NaN.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.mean(x, dims, options, ...) end

---x (...) -> the arithmetic mean over `dims` (all when absent); integers are converted to f32. The mean of zero
---elements is NaN.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:mean(dims, options, ...) end

---x (...) -> the variance over `dims` (all when absent), two-pass; divided by n - 1 if `unbiased`, else by n.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {unbiased?: boolean, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {unbiased?: boolean, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.var(x, dims, options, ...) end

---x (...) -> the variance over `dims` (all when absent), two-pass; divided by n - 1 if `unbiased`, else by n.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {unbiased?: boolean, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {unbiased?: boolean, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:var(dims, options, ...) end

---x (...) -> the standard deviation over `dims` (all when absent): the square root of `var`. Its gradient is 0 where
---it is 0.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {unbiased?: boolean, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {unbiased?: boolean, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.std(x, dims, options, ...) end

---x (...) -> the standard deviation over `dims` (all when absent): the square root of `var`. Its gradient is 0 where
---it is 0.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {unbiased?: boolean, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {unbiased?: boolean, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:std(dims, options, ...) end

---x (...) -> (sum |x|^p)^(1/p) over `dims` (all when absent); p may be math.huge (largest |x|), 1 or any p > 0.
---The gradient of a norm that is 0 is 0.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {p?: number, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {p?: number, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.norm(x, dims, options, ...) end

---x (...) -> (sum |x|^p)^(1/p) over `dims` (all when absent); p may be math.huge (largest |x|), 1 or any p > 0.
---The gradient of a norm that is 0 is 0.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {p?: number, keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {p?: number, keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:norm(dims, options, ...) end

---x (...) -> log(sum(exp(x))) over `dims` (all when absent), without overflow.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.logsumexp(x, dims, options, ...) end

---x (...) -> log(sum(exp(x))) over `dims` (all when absent), without overflow.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:logsumexp(dims, options, ...) end

---x (...) -> bool: whether some element over `dims` (all when absent) is not zero. False for zero elements.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.any(x, dims, options, ...) end

---x (...) -> bool: whether some element over `dims` (all when absent) is not zero. False for zero elements.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:any(dims, options, ...) end

---x (...) -> bool: whether every element over `dims` (all when absent) is not zero. True for zero elements.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.all(x, dims, options, ...) end

---x (...) -> bool: whether every element over `dims` (all when absent) is not zero. True for zero elements.
---@param dims? perilune.Whole|perilune.Whole[]
---@param options? {keepdim?: boolean}
---@param ... perilune.Whole
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:all(dims, options, ...) end

---x (...) -> i64: position of the largest element along `dim`, or in the flattened tensor. Of equal elements the
---first counts; NaN is the largest.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.argmax(x, dim, options) end

---x (...) -> i64: position of the largest element along `dim`, or in the flattened tensor. Of equal elements the
---first counts; NaN is the largest.
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:argmax(dim, options) end

---x (...) -> i64: position of the smallest element along `dim`, or in the flattened tensor. Of equal elements the
---first counts; NaN is the smallest.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(x: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.argmin(x, dim, options) end

---x (...) -> i64: position of the smallest element along `dim`, or in the flattened tensor. Of equal elements the
---first counts; NaN is the smallest.
---@param dim? perilune.Whole
---@param options? {keepdim?: boolean}
---@overload fun(self: perilune.Tensor, options: {keepdim?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:argmin(dim, options) end

---x (..., N, ...) -> (..., N, ...): element i is the sum of elements 0 to i along `dim`. Integers and bools sum in
---i64.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@return perilune.Tensor
function pl.cumsum(x, dim) end

---x (..., N, ...) -> (..., N, ...): element i is the sum of elements 0 to i along `dim`. Integers and bools sum in
---i64.
---@param dim perilune.Whole
---@return perilune.Tensor
function Tensor:cumsum(dim) end

---x (..., N, ...) -> (..., N, ...): element i is the product of elements 0 to i along `dim`. Integers and bools
---multiply in i64. The second derivative is exact where no element is 0, the first everywhere.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@return perilune.Tensor
function pl.cumprod(x, dim) end

---x (..., N, ...) -> (..., N, ...): element i is the product of elements 0 to i along `dim`. Integers and bools
---multiply in i64. The second derivative is exact where no element is 0, the first everywhere.
---@param dim perilune.Whole
---@return perilune.Tensor
function Tensor:cumprod(dim) end

---x (...) -> (shape): the same elements in row-major order under other dims; one dim may be -1 and is inferred.
---Free if strides can express it; otherwise the elements are copied.
---@param x perilune.Tensor
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.reshape(x, shape, ...) end

---x (...) -> (shape): the same elements in row-major order under other dims; one dim may be -1 and is inferred.
---Free if strides can express it; otherwise the elements are copied.
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:reshape(shape, ...) end

---x (...) -> (shape): the same as `reshape`, since tensors never alias.
---@param x perilune.Tensor
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.view(x, shape, ...) end

---x (...) -> (shape): the same as `reshape`, since tensors never alias.
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:view(shape, ...) end

---x (...) -> dims start to stop (both included) merged into one.
---@param x perilune.Tensor
---@param start? perilune.Whole
---@param stop? perilune.Whole
---@return perilune.Tensor
function pl.flatten(x, start, stop) end

---x (...) -> dims start to stop (both included) merged into one.
---@param start? perilune.Whole
---@param stop? perilune.Whole
---@return perilune.Tensor
function Tensor:flatten(start, stop) end

---x (...) -> dim `dim` split into `sizes`, of which one may be -1.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param sizes perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.unflatten(x, dim, sizes, ...) end

---x (...) -> dim `dim` split into `sizes`, of which one may be -1.
---@param dim perilune.Whole
---@param sizes perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:unflatten(dim, sizes, ...) end

---x (...) -> without its dims of size 1: those named, or all. A named dim of another size is kept.
---@param x perilune.Tensor
---@param dims? perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.squeeze(x, dims, ...) end

---x (...) -> without its dims of size 1: those named, or all. A named dim of another size is kept.
---@param dims? perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:squeeze(dims, ...) end

---x (...) -> with a new dim of size 1 at `dim` (-1 puts it last).
---@param x perilune.Tensor
---@param dim perilune.Whole
---@return perilune.Tensor
function pl.unsqueeze(x, dim) end

---x (...) -> with a new dim of size 1 at `dim` (-1 puts it last).
---@param dim perilune.Whole
---@return perilune.Tensor
function Tensor:unsqueeze(dim) end

---x (...) -> dims in the order named: dim i of the result is dim dims[i] of x.
---@param x perilune.Tensor
---@param dims perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.permute(x, dims, ...) end

---x (...) -> dims in the order named: dim i of the result is dim dims[i] of x.
---@param dims perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:permute(dims, ...) end

---x (...) -> with dims dim0 and dim1 swapped.
---@param x perilune.Tensor
---@param dim0 perilune.Whole
---@param dim1 perilune.Whole
---@return perilune.Tensor
function pl.transpose(x, dim0, dim1) end

---x (...) -> with dims dim0 and dim1 swapped.
---@param dim0 perilune.Whole
---@param dim1 perilune.Whole
---@return perilune.Tensor
function Tensor:transpose(dim0, dim1) end

---x (..., M, N) -> (..., N, M): the last two dims swapped. A vector or scalar is unchanged.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.t(x) end

---x (..., M, N) -> (..., N, M): the last two dims swapped. A vector or scalar is unchanged.
---@return perilune.Tensor
function Tensor:t() end

---x (...) -> (shape): dims of size 1, and new leading dims, repeat without a copy; -1 keeps a dim.
---@param x perilune.Tensor
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.expand(x, shape, ...) end

---x (...) -> (shape): dims of size 1, and new leading dims, repeat without a copy; -1 keeps a dim.
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:expand(shape, ...) end

---x (...) -> (shape): as `expand`.
---@param x perilune.Tensor
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.broadcast_to(x, shape, ...) end

---x (...) -> (shape): as `expand`.
---@param shape perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:broadcast_to(shape, ...) end

---x (...) -> with the order of elements along `dims` reversed.
---@param x perilune.Tensor
---@param dims perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.flip(x, dims, ...) end

---x (...) -> with the order of elements along `dims` reversed.
---@param dims perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:flip(dims, ...) end

---x (...) -> elements shifted by `shifts` along `dims`; those shifted out re-enter at the front. Without dims, the
---flattened tensor is rolled.
---@param x perilune.Tensor
---@param shifts perilune.Whole|perilune.Whole[]
---@param dims? perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.roll(x, shifts, dims, ...) end

---x (...) -> elements shifted by `shifts` along `dims`; those shifted out re-enter at the front. Without dims, the
---flattened tensor is rolled.
---@param shifts perilune.Whole|perilune.Whole[]
---@param dims? perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:roll(shifts, dims, ...) end

---x (...) -> (...): the same values; no gradient flows back through it.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.detach(x) end

---x (...) -> (...): the same values; no gradient flows back through it.
---@return perilune.Tensor
function Tensor:detach() end

---x (..., M, N) -> the same with elements above the diagonal set to 0; `diagonal` shifts it up.
---@param x perilune.Tensor
---@param diagonal? perilune.Whole
---@return perilune.Tensor
function pl.tril(x, diagonal) end

---x (..., M, N) -> the same with elements above the diagonal set to 0; `diagonal` shifts it up.
---@param diagonal? perilune.Whole
---@return perilune.Tensor
function Tensor:tril(diagonal) end

---x (..., M, N) -> the same with elements below the diagonal set to 0; `diagonal` shifts it up.
---@param x perilune.Tensor
---@param diagonal? perilune.Whole
---@return perilune.Tensor
function pl.triu(x, diagonal) end

---x (..., M, N) -> the same with elements below the diagonal set to 0; `diagonal` shifts it up.
---@param diagonal? perilune.Whole
---@return perilune.Tensor
function Tensor:triu(diagonal) end

---x (...) -> the whole tensor repeated along each dim, as NumPy's tile: repeats align at the last dim.
---@param x perilune.Tensor
---@param repeats perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.tile(x, repeats, ...) end

---x (...) -> the whole tensor repeated along each dim, as NumPy's tile: repeats align at the last dim.
---@param repeats perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:tile(repeats, ...) end

---x (..., N, ...) -> (..., N * repeats, ...): each element repeated `repeats` times along `dim`, or along the
---flattened tensor. `repeats` may be a list of N numbers; the result then has as many elements as their sum.
---@param x perilune.Tensor
---@param repeats perilune.Whole|perilune.Whole[]
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.repeat_interleave(x, repeats, dim) end

---x (..., N, ...) -> (..., N * repeats, ...): each element repeated `repeats` times along `dim`, or along the
---flattened tensor. `repeats` may be a list of N numbers; the result then has as many elements as their sum.
---@param repeats perilune.Whole|perilune.Whole[]
---@param dim? perilune.Whole
---@return perilune.Tensor
function Tensor:repeat_interleave(repeats, dim) end

---x (..., N, N) -> (..., N): the elements whose last two coordinates are equal.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.diagonal(x) end

---x (..., N, N) -> (..., N): the elements whose last two coordinates are equal.
---@return perilune.Tensor
function Tensor:diagonal() end

---x (...) -> `length` elements of dim `dim` from `start` on.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param start perilune.Whole
---@param length perilune.Whole
---@return perilune.Tensor
function pl.narrow(x, dim, start, length) end

---x (...) -> `length` elements of dim `dim` from `start` on.
---@param dim perilune.Whole
---@param start perilune.Whole
---@param length perilune.Whole
---@return perilune.Tensor
function Tensor:narrow(dim, start, length) end

---x (...) -> the slice at `index` of dim `dim`, which is removed. Indices count from 0, negative ones from the
---back.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Whole
---@return perilune.Tensor
function pl.select(x, dim, index) end

---x (...) -> the slice at `index` of dim `dim`, which is removed. Indices count from 0, negative ones from the
---back.
---@param dim perilune.Whole
---@param index perilune.Whole
---@return perilune.Tensor
function Tensor:select(dim, index) end

---x (...) -> elements start, start + step, ... below stop of dim `dim`. Negative ends count from the back; ends
---beyond the dim are clamped. The same as `x[{ {start, stop} }]` on that dim. step must be 1 or more.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param start? perilune.Whole
---@param stop? perilune.Whole
---@param step? perilune.Whole
---@return perilune.Tensor
function pl.slice(x, dim, start, stop, step) end

---x (...) -> elements start, start + step, ... below stop of dim `dim`. Negative ends count from the back; ends
---beyond the dim are clamped. The same as `x[{ {start, stop} }]` on that dim. step must be 1 or more.
---@param dim perilune.Whole
---@param start? perilune.Whole
---@param stop? perilune.Whole
---@param step? perilune.Whole
---@return perilune.Tensor
function Tensor:slice(dim, start, stop, step) end

---x (..., L, ...) -> (..., N, ..., size): all windows of `size` elements along `dim`, `step` apart, as a new last dim.
---N = (L - size) // step + 1. This is a view: overlapping windows share memory.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param size perilune.Whole
---@param step? perilune.Whole
---@return perilune.Tensor
function pl.unfold(x, dim, size, step) end

---x (..., L, ...) -> (..., N, ..., size): all windows of `size` elements along `dim`, `step` apart, as a new last dim.
---N = (L - size) // step + 1. This is a view: overlapping windows share memory.
---@param dim perilune.Whole
---@param size perilune.Whole
---@param step? perilune.Whole
---@return perilune.Tensor
function Tensor:unfold(dim, size, step) end

---x (...) -> padded with a constant: pads = {before, after} of the last dim, then of the one before it, and so on,
---as in PyTorch. Negative pads crop.
---@param x perilune.Tensor
---@param pads perilune.Whole|perilune.Whole[]
---@param options? {value?: number}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.pad(x, pads, options, ...) end

---x (...) -> padded with a constant: pads = {before, after} of the last dim, then of the one before it, and so on,
---as in PyTorch. Negative pads crop.
---@param pads perilune.Whole|perilune.Whole[]
---@param options? {value?: number}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:pad(pads, options, ...) end

---xs of (..., Ni, ...) -> (..., sum of Ni, ...): concatenated along `dim`; all other dims must be equal.
---@param xs perilune.Tensor[]
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.cat(xs, dim) end

---xs of (...), n of them -> (..., n, ...): joined along a new dim at `dim`; all shapes must be equal.
---@param xs perilune.Tensor[]
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.stack(xs, dim) end

---x (..., N, ...) -> several: pieces of the given sizes along `dim`, or of one size each (the last may be smaller).
---@param x perilune.Tensor
---@param sizes perilune.Whole|perilune.Whole[]
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function pl.split(x, sizes, dim) end

---x (..., N, ...) -> several: pieces of the given sizes along `dim`, or of one size each (the last may be smaller).
---@param sizes perilune.Whole|perilune.Whole[]
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function Tensor:split(sizes, dim) end

---x (..., N, ...) -> at most `chunks` pieces of ceil(N / chunks) along `dim`; the last may be smaller.
---@param x perilune.Tensor
---@param chunks perilune.Whole
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function pl.chunk(x, chunks, dim) end

---x (..., N, ...) -> at most `chunks` pieces of ceil(N / chunks) along `dim`; the last may be smaller.
---@param chunks perilune.Whole
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function Tensor:chunk(chunks, dim) end

---x (..., N, ...) -> N tensors (..., ...): the slices along `dim`, which is removed.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function pl.unbind(x, dim) end

---x (..., N, ...) -> N tensors (..., ...): the slices along `dim`, which is removed.
---@param dim? perilune.Whole
---@return perilune.Tensor
---@return perilune.Tensor ...
function Tensor:unbind(dim) end

---An alias of `cat`.
---@param xs perilune.Tensor[]
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.concat(xs, dim) end

---x (..., N, ...), index (..., K, ...) int -> (..., K, ...): out[.., k, ..] = x[.., index[.., k, ..], ..] along `dim`.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function pl.gather(x, dim, index) end

---x (..., N, ...), index (..., K, ...) int -> (..., K, ...): out[.., k, ..] = x[.., index[.., k, ..], ..] along `dim`.
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function Tensor:gather(dim, index) end

---x (..., N, ...), index (..., K, ...) int -> (..., K, ...): as `gather`, but x and index broadcast in the other dims
---(NumPy's take_along_axis).
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function pl.take_along(x, dim, index) end

---x (..., N, ...), index (..., K, ...) int -> (..., K, ...): as `gather`, but x and index broadcast in the other dims
---(NumPy's take_along_axis).
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function Tensor:take_along(dim, index) end

---x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with x[.., index[.., k, ..], ..] replaced
---by src[.., k, ..]. Of several writes to one element, the last in row-major order is kept.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.scatter(x, dim, index, src) end

---x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with x[.., index[.., k, ..], ..] replaced
---by src[.., k, ..]. Of several writes to one element, the last in row-major order is kept.
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:scatter(dim, index, src) end

---x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with src[.., k, ..] added at
---[.., index[.., k, ..], ..], in row-major order of index.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.scatter_add(x, dim, index, src) end

---x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with src[.., k, ..] added at
---[.., index[.., k, ..], ..], in row-major order of index.
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:scatter_add(dim, index, src) end

---x (..., N, ...), index (K) int -> (..., K, ...): the slices of dim `dim` that index names.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function pl.index_select(x, dim, index) end

---x (..., N, ...), index (K) int -> (..., K, ...): the slices of dim `dim` that index names.
---@param dim perilune.Whole
---@param index perilune.Tensor
---@return perilune.Tensor
function Tensor:index_select(dim, index) end

---x (..., N, ...), index (K) int, src (..., K, ...) -> x with slice k of src added to slice index[k], in order.
---@param x perilune.Tensor
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor
---@return perilune.Tensor
function pl.index_add(x, dim, index, src) end

---x (..., N, ...), index (K) int, src (..., K, ...) -> x with slice k of src added to slice index[k], in order.
---@param dim perilune.Whole
---@param index perilune.Tensor
---@param src perilune.Tensor
---@return perilune.Tensor
function Tensor:index_add(dim, index, src) end

---x (...), mask (...) bool -> broadcast: `value` where mask is true, else x.
---@param x perilune.Tensor
---@param mask perilune.Tensor
---@param value perilune.Tensor|number|boolean
---@return perilune.Tensor
function pl.masked_fill(x, mask, value) end

---x (...), mask (...) bool -> broadcast: `value` where mask is true, else x.
---@param mask perilune.Tensor
---@param value perilune.Tensor|number|boolean
---@return perilune.Tensor
function Tensor:masked_fill(mask, value) end

---ids (...) int -> (..., classes) i64: 1 at the position of the id, else 0. An id outside 0 to classes - 1 is an
---error when the step runs.
---@param ids perilune.Tensor
---@param classes perilune.Whole
---@return perilune.Tensor
function pl.one_hot(ids, classes) end

---ids (...) int -> (..., classes) i64: 1 at the position of the id, else 0. An id outside 0 to classes - 1 is an
---error when the step runs.
---@param classes perilune.Whole
---@return perilune.Tensor
function Tensor:one_hot(classes) end

---weight (V, D), ids (...) int -> (..., D): row ids[...] of weight. The gradient adds rows in order of position. An id
---outside 0 to V - 1 is an error when the step runs.
---@param weight perilune.Tensor
---@param ids perilune.Tensor
---@return perilune.Tensor
function pl.embedding(weight, ids) end

---weight (V, D), ids (...) int -> (..., D): row ids[...] of weight. The gradient adds rows in order of position. An id
---outside 0 to V - 1 is an error when the step runs.
---@param ids perilune.Tensor
---@return perilune.Tensor
function Tensor:embedding(ids) end

---x (d0, ..., dk) -> (n, k + 1) i64: the coordinates of the elements that are not zero, in row-major order.
---Reads the tensor on the host, which splits the step.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.nonzero(x) end

---x (d0, ..., dk) -> (n, k + 1) i64: the coordinates of the elements that are not zero, in row-major order.
---Reads the tensor on the host, which splits the step.
---@return perilune.Tensor
function Tensor:nonzero() end

---x (...), mask (...) bool of the same shape -> (n): the elements of x where mask is true, in row-major order.
---Reads the tensors on the host, which splits the step.
---@param x perilune.Tensor
---@param mask perilune.Tensor
---@return perilune.Tensor
function pl.masked_select(x, mask) end

---x (...), mask (...) bool of the same shape -> (n): the elements of x where mask is true, in row-major order.
---Reads the tensors on the host, which splits the step.
---@param mask perilune.Tensor
---@return perilune.Tensor
function Tensor:masked_select(mask) end

---x (..., N, ...) -> (..., N, ...) i64: the positions along `dim` in the order of their elements. Equal elements keep
---their order; NaN comes last, or first if `descending`.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {descending?: boolean}
---@overload fun(x: perilune.Tensor, options: {descending?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.argsort(x, dim, options) end

---x (..., N, ...) -> (..., N, ...) i64: the positions along `dim` in the order of their elements. Equal elements keep
---their order; NaN comes last, or first if `descending`.
---@param dim? perilune.Whole
---@param options? {descending?: boolean}
---@overload fun(self: perilune.Tensor, options: {descending?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:argsort(dim, options) end

---x (..., N, ...) -> values (..., N, ...), positions (..., N, ...) i64: in order along `dim`. See `argsort`.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {descending?: boolean}
---@overload fun(x: perilune.Tensor, options: {descending?: boolean}): perilune.Tensor, perilune.Tensor
---@return perilune.Tensor values
---@return perilune.Tensor positions
function pl.sort(x, dim, options) end

---x (..., N, ...) -> values (..., N, ...), positions (..., N, ...) i64: in order along `dim`. See `argsort`.
---@param dim? perilune.Whole
---@param options? {descending?: boolean}
---@overload fun(self: perilune.Tensor, options: {descending?: boolean}): perilune.Tensor, perilune.Tensor
---@return perilune.Tensor values
---@return perilune.Tensor positions
function Tensor:sort(dim, options) end

---x (..., N, ...) -> values (..., k, ...), positions (..., k, ...) i64: the k largest elements along `dim`, or the
---smallest, in order. Of equal elements, the first are taken. The result is in order even if `sorted` is false.
---@param x perilune.Tensor
---@param k perilune.Whole
---@param dim? perilune.Whole
---@param options? {largest?: boolean, sorted?: boolean}
---@overload fun(x: perilune.Tensor, k: perilune.Whole, options: {largest?: boolean, sorted?: boolean}): perilune.Tensor, perilune.Tensor
---@return perilune.Tensor values
---@return perilune.Tensor positions
function pl.topk(x, k, dim, options) end

---x (..., N, ...) -> values (..., k, ...), positions (..., k, ...) i64: the k largest elements along `dim`, or the
---smallest, in order. Of equal elements, the first are taken. The result is in order even if `sorted` is false.
---@param k perilune.Whole
---@param dim? perilune.Whole
---@param options? {largest?: boolean, sorted?: boolean}
---@overload fun(self: perilune.Tensor, k: perilune.Whole, options: {largest?: boolean, sorted?: boolean}): perilune.Tensor, perilune.Tensor
---@return perilune.Tensor values
---@return perilune.Tensor positions
function Tensor:topk(k, dim, options) end

---x (...) -> values (n), the distinct elements of the flattened tensor in ascending order; then, if requested,
---(...) i64, the position of each element in values, and (n) i64, the number of occurrences of each value. Every
---NaN is distinct. Reads the tensor on the host, which splits the step.
---@param x perilune.Tensor
---@param options? {return_inverse?: boolean, return_counts?: boolean}
---@return perilune.Tensor
function pl.unique(x, options) end

---x (...) -> values (n), the distinct elements of the flattened tensor in ascending order; then, if requested,
---(...) i64, the position of each element in values, and (n) i64, the number of occurrences of each value. Every
---NaN is distinct. Reads the tensor on the host, which splits the step.
---@param options? {return_inverse?: boolean, return_counts?: boolean}
---@return perilune.Tensor
function Tensor:unique(options) end

---a (..., M, K), b (..., K, N) -> (..., M, N); leading dims broadcast. A vector a (K) or b (K) works too; its dim
---is removed from the result.
---Sums are in f32 for f32 and 16-bit floats, in f64 for f64, wrapping for integers. Both must promote to one dtype.
---@param a perilune.Tensor
---@param b perilune.Tensor
---@return perilune.Tensor
function pl.matmul(a, b) end

---a (..., M, K), b (..., K, N) -> (..., M, N); leading dims broadcast. A vector a (K) or b (K) works too; its dim
---is removed from the result.
---Sums are in f32 for f32 and 16-bit floats, in f64 for f64, wrapping for integers. Both must promote to one dtype.
---@param b perilune.Tensor
---@return perilune.Tensor
function Tensor:matmul(b) end

---a (M, K), b (K, N) -> (M, N).
---@param a perilune.Tensor
---@param b perilune.Tensor
---@return perilune.Tensor
function pl.mm(a, b) end

---a (M, K), b (K, N) -> (M, N).
---@param b perilune.Tensor
---@return perilune.Tensor
function Tensor:mm(b) end

---a (B, M, K), b (B, K, N) -> (B, M, N).
---@param a perilune.Tensor
---@param b perilune.Tensor
---@return perilune.Tensor
function pl.bmm(a, b) end

---a (B, M, K), b (B, K, N) -> (B, M, N).
---@param b perilune.Tensor
---@return perilune.Tensor
function Tensor:bmm(b) end

---x (..., I), weight (O, I), bias (O) -> (..., O): x times weight transposed, plus bias.
---The bias is added before the sum is rounded, so 16-bit floats round once.
---@param x perilune.Tensor
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@return perilune.Tensor
function pl.linear(x, weight, bias) end

---x (..., I), weight (O, I), bias (O) -> (..., O): x times weight transposed, plus bias.
---The bias is added before the sum is rounded, so 16-bit floats round once.
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@return perilune.Tensor
function Tensor:linear(weight, bias) end

---a (N), b (N) -> scalar: sum of products.
---@param a perilune.Tensor
---@param b perilune.Tensor
---@return perilune.Tensor
function pl.dot(a, b) end

---a (N), b (N) -> scalar: sum of products.
---@param b perilune.Tensor
---@return perilune.Tensor
function Tensor:dot(b) end

---a (M), b (N) -> (M, N): out[i, j] = a[i] * b[j].
---@param a perilune.Tensor
---@param b perilune.Tensor
---@return perilune.Tensor
function pl.outer(a, b) end

---a (M), b (N) -> (M, N): out[i, j] = a[i] * b[j].
---@param b perilune.Tensor
---@return perilune.Tensor
function Tensor:outer(b) end

---einsum("bij,bjk->bik", {x, y}): sum of products over the letters absent from the right side, as in NumPy.
---Letters are a-z and A-Z; one that occurs twice in an operand takes its diagonal. `...` matches any dims, which
---broadcast, as do dims of size 1. Without `->` the result has the dims of `...` and the letters that occur once,
---in alphabetical order. Pairs are contracted from left to right by matmul.
---@param equation string
---@param xs perilune.Tensor[]
---@return perilune.Tensor
function pl.einsum(equation, xs) end

---x (T, K), w (E, K, N), ends (E) int -> (T, N): rows ends[e-1] to ends[e] of x times w[e], where group 0 begins at row
---0; rows after the last end are 0. Or x (M, T), w (T, N), ends (E) int -> (E, M, N): the columns of x times the
---rows of w, group by group, 0 for an empty group. One launch computes the products of all groups, whatever their
---sizes: with tokens sorted by expert, `ends` is the cumulative sum of the tokens per expert. It is read on the
---device, so the host does not wait for it, and every routing has the same plan. Dtypes and sums are as in
---`matmul`. Ends that descend, are negative or above T are an error when the step runs. PyTorch's
---torch.nn.functional.grouped_mm(x, w, offs=ends).
---@param x perilune.Tensor
---@param w perilune.Tensor
---@param ends perilune.Tensor
---@return perilune.Tensor
function pl.grouped_matmul(x, w, ends) end

---x (T, K), w (E, K, N), ends (E) int -> (T, N): rows ends[e-1] to ends[e] of x times w[e], where group 0 begins at row
---0; rows after the last end are 0. Or x (M, T), w (T, N), ends (E) int -> (E, M, N): the columns of x times the
---rows of w, group by group, 0 for an empty group. One launch computes the products of all groups, whatever their
---sizes: with tokens sorted by expert, `ends` is the cumulative sum of the tokens per expert. It is read on the
---device, so the host does not wait for it, and every routing has the same plan. Dtypes and sums are as in
---`matmul`. Ends that descend, are negative or above T are an error when the step runs. PyTorch's
---torch.nn.functional.grouped_mm(x, w, offs=ends).
---@param w perilune.Tensor
---@param ends perilune.Tensor
---@return perilune.Tensor
function Tensor:grouped_matmul(w, ends) end

---x (...), scale (broadcasts to x) -> (...) u8: the bytes of the 8-bit floats nearest to x times 1 / scale, ties to
---even. Larger magnitudes become the largest (448, or 57344 for e5m2); NaN stays NaN; infinity stays infinity in
---e5m2 and becomes NaN in e4m3. Computed in f32. Has no gradient. Micikevicius et al., arXiv:2209.05433.
---@param x perilune.Tensor
---@param scale? perilune.Tensor|number|boolean
---@param options? {format?: "e4m3"|"e5m2"}
---@overload fun(x: perilune.Tensor, options: {format?: "e4m3"|"e5m2"}): perilune.Tensor
---@return perilune.Tensor
function pl.quantize_fp8(x, scale, options) end

---x (...), scale (broadcasts to x) -> (...) u8: the bytes of the 8-bit floats nearest to x times 1 / scale, ties to
---even. Larger magnitudes become the largest (448, or 57344 for e5m2); NaN stays NaN; infinity stays infinity in
---e5m2 and becomes NaN in e4m3. Computed in f32. Has no gradient. Micikevicius et al., arXiv:2209.05433.
---@param scale? perilune.Tensor|number|boolean
---@param options? {format?: "e4m3"|"e5m2"}
---@overload fun(self: perilune.Tensor, options: {format?: "e4m3"|"e5m2"}): perilune.Tensor
---@return perilune.Tensor
function Tensor:quantize_fp8(scale, options) end

---x (...) u8, scale (broadcasts to x) -> (...) of `dtype`: the values of the bytes, times scale. A constant to
---autograd.
---@param x perilune.Tensor
---@param scale? perilune.Tensor|number|boolean
---@param options? {format?: "e4m3"|"e5m2", dtype?: perilune.DType}
---@overload fun(x: perilune.Tensor, options: {format?: "e4m3"|"e5m2", dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function pl.dequantize_fp8(x, scale, options) end

---x (...) u8, scale (broadcasts to x) -> (...) of `dtype`: the values of the bytes, times scale. A constant to
---autograd.
---@param scale? perilune.Tensor|number|boolean
---@param options? {format?: "e4m3"|"e5m2", dtype?: perilune.DType}
---@overload fun(self: perilune.Tensor, options: {format?: "e4m3"|"e5m2", dtype?: perilune.DType}): perilune.Tensor
---@return perilune.Tensor
function Tensor:dequantize_fp8(scale, options) end

---a (M, K) u8, b (N, K) u8, bias (N) -> (M, N) of `dtype`: a times b transposed, times scale_a * scale_b, plus bias,
---where bytes are 8-bit floats and each scale is one number. Sums are in f32 and rounded once at the end; `fast`
---lets a GPU add with fewer bits. GPUs from sm_89 on multiply 8-bit floats if K and N are multiples of 16 and not
---both formats are e5m2; otherwise, and on a CPU, the product is computed in f32. Has no gradient.
---@param a perilune.Tensor
---@param b perilune.Tensor
---@param scale_a? perilune.Tensor|number|boolean
---@param scale_b? perilune.Tensor|number|boolean
---@param bias? perilune.Tensor
---@param options? {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}
---@overload fun(a: perilune.Tensor, b: perilune.Tensor, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@overload fun(a: perilune.Tensor, b: perilune.Tensor, scale_a: perilune.Tensor|number|boolean, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@overload fun(a: perilune.Tensor, b: perilune.Tensor, scale_a: perilune.Tensor|number|boolean, scale_b: perilune.Tensor|number|boolean, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@return perilune.Tensor
function pl.matmul_fp8(a, b, scale_a, scale_b, bias, options) end

---a (M, K) u8, b (N, K) u8, bias (N) -> (M, N) of `dtype`: a times b transposed, times scale_a * scale_b, plus bias,
---where bytes are 8-bit floats and each scale is one number. Sums are in f32 and rounded once at the end; `fast`
---lets a GPU add with fewer bits. GPUs from sm_89 on multiply 8-bit floats if K and N are multiples of 16 and not
---both formats are e5m2; otherwise, and on a CPU, the product is computed in f32. Has no gradient.
---@param b perilune.Tensor
---@param scale_a? perilune.Tensor|number|boolean
---@param scale_b? perilune.Tensor|number|boolean
---@param bias? perilune.Tensor
---@param options? {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}
---@overload fun(self: perilune.Tensor, b: perilune.Tensor, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@overload fun(self: perilune.Tensor, b: perilune.Tensor, scale_a: perilune.Tensor|number|boolean, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@overload fun(self: perilune.Tensor, b: perilune.Tensor, scale_a: perilune.Tensor|number|boolean, scale_b: perilune.Tensor|number|boolean, options: {format_a?: "e4m3"|"e5m2", format_b?: "e4m3"|"e5m2", dtype?: perilune.DType, fast?: boolean}): perilune.Tensor
---@return perilune.Tensor
function Tensor:matmul_fp8(b, scale_a, scale_b, bias, options) end

---x (N, C, L), weight (O, C / groups, k), bias (O) -> (N, O, M): cross-correlation, as in PyTorch.
---M = (L + 2 padding - dilation (k - 1) - 1) // stride + 1. x may be (C, L). padding "same" adds zeros so that M =
---L and needs a stride of 1 (if their number is odd, the extra one is at the end); "valid" adds none. 16-bit floats
---are summed in f32, with the bias, and rounded once.
---@param x perilune.Tensor
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function pl.conv1d(x, weight, bias, options) end

---x (N, C, L), weight (O, C / groups, k), bias (O) -> (N, O, M): cross-correlation, as in PyTorch.
---M = (L + 2 padding - dilation (k - 1) - 1) // stride + 1. x may be (C, L). padding "same" adds zeros so that M =
---L and needs a stride of 1 (if their number is odd, the extra one is at the end); "valid" adds none. 16-bit floats
---are summed in f32, with the bias, and rounded once.
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function Tensor:conv1d(weight, bias, options) end

---x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O) -> (N, O, OH, OW): cross-correlation, as in PyTorch.
---OH = (H + 2 padding - dilation (kh - 1) - 1) // stride + 1, OW likewise. Options are one int or {h, w}.
---x may be (C, H, W). padding "same" adds zeros so that OH = H and OW = W and needs a stride of 1 (if their number
---is odd, the extra one is at the end); "valid" adds none. 16-bit floats are summed in f32, with the bias, and
---rounded once; so are the gradients.
---@param x perilune.Tensor
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function pl.conv2d(x, weight, bias, options) end

---x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O) -> (N, O, OH, OW): cross-correlation, as in PyTorch.
---OH = (H + 2 padding - dilation (kh - 1) - 1) // stride + 1, OW likewise. Options are one int or {h, w}.
---x may be (C, H, W). padding "same" adds zeros so that OH = H and OW = W and needs a stride of 1 (if their number
---is odd, the extra one is at the end); "valid" adds none. 16-bit floats are summed in f32, with the bias, and
---rounded once; so are the gradients.
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[]|"same"|"valid", dilation?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function Tensor:conv2d(weight, bias, options) end

---x (N, C, L), weight (C, O / groups, k), bias (O) -> (N, O, M): the gradient of conv1d with respect to its input.
---M = (L - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1. x may be (C, L). Rounds as conv1d does.
---@param x perilune.Tensor
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}): perilune.Tensor
---@return perilune.Tensor
function pl.conv_transpose1d(x, weight, bias, options) end

---x (N, C, L), weight (C, O / groups, k), bias (O) -> (N, O, M): the gradient of conv1d with respect to its input.
---M = (L - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1. x may be (C, L). Rounds as conv1d does.
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}): perilune.Tensor
---@return perilune.Tensor
function Tensor:conv_transpose1d(weight, bias, options) end

---x (N, C, H, W), weight (C, O / groups, kh, kw), bias (O) -> (N, O, OH, OW): the gradient of conv2d with respect to
---its input. OH = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1, OW likewise. Options are one
---int or {h, w}. x may be (C, H, W). Rounds as conv2d does.
---@param x perilune.Tensor
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}): perilune.Tensor
---@return perilune.Tensor
function pl.conv_transpose2d(x, weight, bias, options) end

---x (N, C, H, W), weight (C, O / groups, kh, kw), bias (O) -> (N, O, OH, OW): the gradient of conv2d with respect to
---its input. OH = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1, OW likewise. Options are one
---int or {h, w}. x may be (C, H, W). Rounds as conv2d does.
---@param weight perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], output_padding?: perilune.Whole|perilune.Whole[], groups?: perilune.Whole, dilation?: perilune.Whole|perilune.Whole[]}): perilune.Tensor
---@return perilune.Tensor
function Tensor:conv_transpose2d(weight, bias, options) end

---x (N, C, L) -> (N, C, M): the largest element of each window. See max_pool2d.
---@param x perilune.Tensor
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], dilation?: perilune.Whole|perilune.Whole[], ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.max_pool1d(x, kernel, options, ...) end

---x (N, C, L) -> (N, C, M): the largest element of each window. See max_pool2d.
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], dilation?: perilune.Whole|perilune.Whole[], ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:max_pool1d(kernel, options, ...) end

---x (N, C, H, W) -> (N, C, OH, OW): the largest element of each window of `kernel`, one int or {h, w}, `stride` apart
---(the kernel's size unless given). Padding counts as -inf. Equal elements share the gradient (PyTorch gives it to
---the first). Sizes as in conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the
---end if it starts inside x or the padding before it. x may be (C, H, W).
---@param x perilune.Tensor
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], dilation?: perilune.Whole|perilune.Whole[], ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.max_pool2d(x, kernel, options, ...) end

---x (N, C, H, W) -> (N, C, OH, OW): the largest element of each window of `kernel`, one int or {h, w}, `stride` apart
---(the kernel's size unless given). Padding counts as -inf. Equal elements share the gradient (PyTorch gives it to
---the first). Sizes as in conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the
---end if it starts inside x or the padding before it. x may be (C, H, W).
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], dilation?: perilune.Whole|perilune.Whole[], ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:max_pool2d(kernel, options, ...) end

---x (N, C, L) -> (N, C, M): the mean of each window. See avg_pool2d.
---@param x perilune.Tensor
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], count_include_pad?: boolean, ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.avg_pool1d(x, kernel, options, ...) end

---x (N, C, L) -> (N, C, M): the mean of each window. See avg_pool2d.
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], count_include_pad?: boolean, ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:avg_pool1d(kernel, options, ...) end

---x (N, C, H, W) -> (N, C, OH, OW): the mean of each window of `kernel`, one int or {h, w}, `stride` apart (the
---kernel's size unless given). Padding counts as 0, or not at all if count_include_pad is false. Sizes as in
---conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the end if it starts inside
---x or the padding before it. Elements beyond the padding never count. x may be (C, H, W).
---@param x perilune.Tensor
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], count_include_pad?: boolean, ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.avg_pool2d(x, kernel, options, ...) end

---x (N, C, H, W) -> (N, C, OH, OW): the mean of each window of `kernel`, one int or {h, w}, `stride` apart (the
---kernel's size unless given). Padding counts as 0, or not at all if count_include_pad is false. Sizes as in
---conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the end if it starts inside
---x or the padding before it. Elements beyond the padding never count. x may be (C, H, W).
---@param kernel perilune.Whole|perilune.Whole[]
---@param options? {stride?: perilune.Whole|perilune.Whole[], padding?: perilune.Whole|perilune.Whole[], count_include_pad?: boolean, ceil_mode?: boolean}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:avg_pool2d(kernel, options, ...) end

---x (N, C, H, W) -> (N, C, OH, OW) for size OH = OW or {OH, OW}: means of windows that cover x as evenly as
---possible with whole elements. Window i of OH is rows floor(i H / OH) to ceil((i + 1) H / OH) - 1. x may be (C, H,
---W).
---@param x perilune.Tensor
---@param size perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.adaptive_avg_pool2d(x, size, ...) end

---x (N, C, H, W) -> (N, C, OH, OW) for size OH = OW or {OH, OW}: means of windows that cover x as evenly as
---possible with whole elements. Window i of OH is rows floor(i H / OH) to ceil((i + 1) H / OH) - 1. x may be (C, H,
---W).
---@param size perilune.Whole|perilune.Whole[]
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:adaptive_avg_pool2d(size, ...) end

---x (N, C, L) or (N, C, H, W) -> (N, C, out...): resampled to `size`, one int or one for each dim, or by the factor
---`scale` (sizes rounded down). Coordinates as in PyTorch: element centres coincide at the ends of the image, or the
---centres of the corner elements if align_corners. "linear" is for one dim, "bilinear" for two; f32 for 16-bit
---floats. Nearest computes its indices exactly.
---@param x perilune.Tensor
---@param options? {size?: perilune.Whole|perilune.Whole[], scale?: number, mode?: "nearest"|"linear"|"bilinear", align_corners?: boolean}
---@return perilune.Tensor
function pl.interpolate(x, options) end

---x (N, C, L) or (N, C, H, W) -> (N, C, out...): resampled to `size`, one int or one for each dim, or by the factor
---`scale` (sizes rounded down). Coordinates as in PyTorch: element centres coincide at the ends of the image, or the
---centres of the corner elements if align_corners. "linear" is for one dim, "bilinear" for two; f32 for 16-bit
---floats. Nearest computes its indices exactly.
---@param options? {size?: perilune.Whole|perilune.Whole[], scale?: number, mode?: "nearest"|"linear"|"bilinear", align_corners?: boolean}
---@return perilune.Tensor
function Tensor:interpolate(options) end

---x (N, C, H, W), matrix (N, 2, 3) -> (N, C, OH, OW), floats: bilinear interpolation of each image where its matrix maps the
---pixels of the result. (column, row, 1) of the centre of a result's pixel is multiplied by the matrix and gives the
---position in x, in pixels; the centre of the first pixel is (0.5, 0.5). `size` is the result's, one int or {h, w}, by
---default that of x. Outside of x there is `fill`, or with border "edge" the nearest pixel. u8 is read as bytes and gives f32
---from 0 to 255. Without a gradient. The `pl.augment` functions compose matrices.
---@param x perilune.Tensor
---@param matrix perilune.Tensor
---@param options? {size?: perilune.Whole|perilune.Whole[], border?: "constant"|"edge", fill?: number}
---@return perilune.Tensor
function pl.affine_sample(x, matrix, options) end

---x (N, C, H, W), matrix (N, 2, 3) -> (N, C, OH, OW), floats: bilinear interpolation of each image where its matrix maps the
---pixels of the result. (column, row, 1) of the centre of a result's pixel is multiplied by the matrix and gives the
---position in x, in pixels; the centre of the first pixel is (0.5, 0.5). `size` is the result's, one int or {h, w}, by
---default that of x. Outside of x there is `fill`, or with border "edge" the nearest pixel. u8 is read as bytes and gives f32
---from 0 to 255. Without a gradient. The `pl.augment` functions compose matrices.
---@param matrix perilune.Tensor
---@param options? {size?: perilune.Whole|perilune.Whole[], border?: "constant"|"edge", fill?: number}
---@return perilune.Tensor
function Tensor:affine_sample(matrix, options) end

---x (..., C, ...) -> (..., C, ...): exp(x) / sum(exp(x)) along `dim`, without overflow. Integers are converted to
---f32. A row of -inf gives NaN.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.softmax(x, dim) end

---x (..., C, ...) -> (..., C, ...): exp(x) / sum(exp(x)) along `dim`, without overflow. Integers are converted to
---f32. A row of -inf gives NaN.
---@param dim? perilune.Whole
---@return perilune.Tensor
function Tensor:softmax(dim) end

---x (..., C, ...) -> (..., C, ...): x - log(sum(exp(x))) along `dim`, without overflow. Integers are converted to f32.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@return perilune.Tensor
function pl.log_softmax(x, dim) end

---x (..., C, ...) -> (..., C, ...): x - log(sum(exp(x))) along `dim`, without overflow. Integers are converted to f32.
---@param dim? perilune.Whole
---@return perilune.Tensor
function Tensor:log_softmax(dim) end

---x (..., C), weight (C), bias (C) -> (..., C): (x - mean) / sqrt(var + eps) * weight + bias, with mean and biased
---variance over the trailing dims of weight; without weight and bias, over the last `dims` dims (default 1).
---Arithmetic is in f32 for 16-bit floats. Ba, Kiros and Hinton, arXiv:1607.06450.
---@param x perilune.Tensor
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number, dims?: perilune.Whole}
---@overload fun(x: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function pl.layer_norm(x, weight, bias, options) end

---x (..., C), weight (C), bias (C) -> (..., C): (x - mean) / sqrt(var + eps) * weight + bias, with mean and biased
---variance over the trailing dims of weight; without weight and bias, over the last `dims` dims (default 1).
---Arithmetic is in f32 for 16-bit floats. Ba, Kiros and Hinton, arXiv:1607.06450.
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number, dims?: perilune.Whole}
---@overload fun(self: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function Tensor:layer_norm(weight, bias, options) end

---x (..., C), weight (C) -> (..., C): x / sqrt(mean(x^2) + eps) * weight over the trailing dims of weight; without
---weight, over the last `dims` dims (default 1). Arithmetic is in f32 for 16-bit floats. Zhang and Sennrich,
---arXiv:1910.07467.
---@param x perilune.Tensor
---@param weight? perilune.Tensor
---@param options? {eps?: number, dims?: perilune.Whole}
---@overload fun(x: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function pl.rms_norm(x, weight, options) end

---x (..., C), weight (C) -> (..., C): x / sqrt(mean(x^2) + eps) * weight over the trailing dims of weight; without
---weight, over the last `dims` dims (default 1). Arithmetic is in f32 for 16-bit floats. Zhang and Sennrich,
---arXiv:1910.07467.
---@param weight? perilune.Tensor
---@param options? {eps?: number, dims?: perilune.Whole}
---@overload fun(self: perilune.Tensor, options: {eps?: number, dims?: perilune.Whole}): perilune.Tensor
---@return perilune.Tensor
function Tensor:rms_norm(weight, options) end

---x (N, C, ...), weight (C), bias (C) -> (N, C, ...): each of `groups` groups of adjacent channels normalised to
---mean 0 and variance 1 per sample, then scaled and shifted per channel. Arithmetic is in f32 for 16-bit floats.
---Wu and He, arXiv:1803.08494.
---@param x perilune.Tensor
---@param groups perilune.Whole
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(x: perilune.Tensor, groups: perilune.Whole, options: {eps?: number}): perilune.Tensor
---@overload fun(x: perilune.Tensor, groups: perilune.Whole, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function pl.group_norm(x, groups, weight, bias, options) end

---x (N, C, ...), weight (C), bias (C) -> (N, C, ...): each of `groups` groups of adjacent channels normalised to
---mean 0 and variance 1 per sample, then scaled and shifted per channel. Arithmetic is in f32 for 16-bit floats.
---Wu and He, arXiv:1803.08494.
---@param groups perilune.Whole
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(self: perilune.Tensor, groups: perilune.Whole, options: {eps?: number}): perilune.Tensor
---@overload fun(self: perilune.Tensor, groups: perilune.Whole, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function Tensor:group_norm(groups, weight, bias, options) end

---x (N, C, ...), mean (C), var (C), weight (C), bias (C) -> (N, C, ...): (x - mean) / sqrt(var + eps) * weight + bias
---per channel, with the given statistics: running ones, or those of the batch, through which gradients flow.
---Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.
---@param x perilune.Tensor
---@param mean perilune.Tensor
---@param var perilune.Tensor
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(x: perilune.Tensor, mean: perilune.Tensor, var: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@overload fun(x: perilune.Tensor, mean: perilune.Tensor, var: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function pl.batch_norm(x, mean, var, weight, bias, options) end

---x (N, C, ...), mean (C), var (C), weight (C), bias (C) -> (N, C, ...): (x - mean) / sqrt(var + eps) * weight + bias
---per channel, with the given statistics: running ones, or those of the batch, through which gradients flow.
---Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.
---@param mean perilune.Tensor
---@param var perilune.Tensor
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(self: perilune.Tensor, mean: perilune.Tensor, var: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@overload fun(self: perilune.Tensor, mean: perilune.Tensor, var: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function Tensor:batch_norm(mean, var, weight, bias, options) end

---x (N, C, ...), weight (C), bias (C) -> y (N, C, ...), mean (C), var (C): batch_norm with the mean and the biased variance
---of the batch itself, which are also returned, in f32 for 16-bit floats. Gradients flow through all three.
---Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.
---@param x perilune.Tensor
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(x: perilune.Tensor, options: {eps?: number}): perilune.Tensor, perilune.Tensor, perilune.Tensor
---@overload fun(x: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor, perilune.Tensor, perilune.Tensor
---@return perilune.Tensor y
---@return perilune.Tensor mean
---@return perilune.Tensor var
function pl.batch_norm_train(x, weight, bias, options) end

---x (N, C, ...), weight (C), bias (C) -> y (N, C, ...), mean (C), var (C): batch_norm with the mean and the biased variance
---of the batch itself, which are also returned, in f32 for 16-bit floats. Gradients flow through all three.
---Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.
---@param weight? perilune.Tensor
---@param bias? perilune.Tensor
---@param options? {eps?: number}
---@overload fun(self: perilune.Tensor, options: {eps?: number}): perilune.Tensor, perilune.Tensor, perilune.Tensor
---@overload fun(self: perilune.Tensor, weight: perilune.Tensor, options: {eps?: number}): perilune.Tensor, perilune.Tensor, perilune.Tensor
---@return perilune.Tensor y
---@return perilune.Tensor mean
---@return perilune.Tensor var
function Tensor:batch_norm_train(weight, bias, options) end

---x (..., C, ...) -> (..., C, ...): x / max(|x|, eps), with |x| the Euclidean norm along `dim`. A row of zeros stays 0.
---@param x perilune.Tensor
---@param dim? perilune.Whole
---@param options? {eps?: number}
---@overload fun(x: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function pl.normalize(x, dim, options) end

---x (..., C, ...) -> (..., C, ...): x / max(|x|, eps), with |x| the Euclidean norm along `dim`. A row of zeros stays 0.
---@param dim? perilune.Whole
---@param options? {eps?: number}
---@overload fun(self: perilune.Tensor, options: {eps?: number}): perilune.Tensor
---@return perilune.Tensor
function Tensor:normalize(dim, options) end

---q (..., H, T, D), k (..., G, S, D), v (..., G, S, E) -> (..., H, T, E): softmax(scale q k^T) v.
---scale is 1 / sqrt(D) unless given. mask broadcasts to (..., H, T, S): bool, true for the keys to attend to, or
---float, added to the scores. With is_causal, query i attends to keys 0 to i; with window = w, only to the last w
---of these. The result of a query without visible keys is 0. With enable_gqa, H may be a multiple of G: H / G
---adjacent query heads share a key head.
---documents (..., T) int, or a shape that broadcasts to q without heads and D, needs S = T: query i attends to key
---j only if documents[i] == documents[j]. Ids may be any integers; runs of equal ids are fast.
---Scores and softmax are in f32 for 16-bit floats; the weights are rounded to the dtype of q before multiplying v.
---Vaswani et al., arXiv:1706.03762; Ainslie et al., arXiv:2305.13245.
---@param q perilune.Tensor
---@param k perilune.Tensor
---@param v perilune.Tensor
---@param options? {mask?: perilune.Tensor, is_causal?: boolean, scale?: number, window?: perilune.Whole, enable_gqa?: boolean, documents?: perilune.Tensor}
---@return perilune.Tensor
function pl.scaled_dot_product_attention(q, k, v, options) end

---q (..., H, T, D), k (..., G, S, D), v (..., G, S, E) -> (..., H, T, E): softmax(scale q k^T) v.
---scale is 1 / sqrt(D) unless given. mask broadcasts to (..., H, T, S): bool, true for the keys to attend to, or
---float, added to the scores. With is_causal, query i attends to keys 0 to i; with window = w, only to the last w
---of these. The result of a query without visible keys is 0. With enable_gqa, H may be a multiple of G: H / G
---adjacent query heads share a key head.
---documents (..., T) int, or a shape that broadcasts to q without heads and D, needs S = T: query i attends to key
---j only if documents[i] == documents[j]. Ids may be any integers; runs of equal ids are fast.
---Scores and softmax are in f32 for 16-bit floats; the weights are rounded to the dtype of q before multiplying v.
---Vaswani et al., arXiv:1706.03762; Ainslie et al., arXiv:2305.13245.
---@param k perilune.Tensor
---@param v perilune.Tensor
---@param options? {mask?: perilune.Tensor, is_causal?: boolean, scale?: number, window?: perilune.Whole, enable_gqa?: boolean, documents?: perilune.Tensor}
---@return perilune.Tensor
function Tensor:scaled_dot_product_attention(k, v, options) end

---x (..., T, D), positions (T) or any shape that broadcasts to (..., T) -> (..., T, D): pairs of elements rotated by
---position * base^(-2i / D), i from 0 to D/2 - 1, or by position * rates[i]: rates (D/2), for models that scale
---them (nn.rope_rates). Positions are 0 to T - 1 unless given. A pair is elements i and i + D/2 (Llama, NeoX), or
---2i and 2i + 1 if `interleaved` (GPT-J). Angles are computed in f64 and reduced to half a turn; sines, cosines and
---the rotation are in f32 (f64 for f64). The error of a pair is at most 5e-7 of its length before it is rounded to
---x's dtype, at every position up to 2^24. Su et al., arXiv:2104.09864.
---@param x perilune.Tensor
---@param positions? perilune.Tensor
---@param options? {base?: number, interleaved?: boolean, rates?: perilune.Tensor}
---@overload fun(x: perilune.Tensor, options: {base?: number, interleaved?: boolean, rates?: perilune.Tensor}): perilune.Tensor
---@return perilune.Tensor
function pl.rope(x, positions, options) end

---x (..., T, D), positions (T) or any shape that broadcasts to (..., T) -> (..., T, D): pairs of elements rotated by
---position * base^(-2i / D), i from 0 to D/2 - 1, or by position * rates[i]: rates (D/2), for models that scale
---them (nn.rope_rates). Positions are 0 to T - 1 unless given. A pair is elements i and i + D/2 (Llama, NeoX), or
---2i and 2i + 1 if `interleaved` (GPT-J). Angles are computed in f64 and reduced to half a turn; sines, cosines and
---the rotation are in f32 (f64 for f64). The error of a pair is at most 5e-7 of its length before it is rounded to
---x's dtype, at every position up to 2^24. Su et al., arXiv:2104.09864.
---@param positions? perilune.Tensor
---@param options? {base?: number, interleaved?: boolean, rates?: perilune.Tensor}
---@overload fun(self: perilune.Tensor, options: {base?: number, interleaved?: boolean, rates?: perilune.Tensor}): perilune.Tensor
---@return perilune.Tensor
function Tensor:rope(positions, options) end

---logits (..., C), target (...) int or (..., C) float -> scalar, or (...) with reduction = "none".
---The negative log-probability of the target under softmax(logits); the classes are the last dim. A target is a class
---id, or a probability for each class. Ids equal to ignore_index are ignored, and "mean" divides by the number of
---the other ids; any other id outside 0 to C - 1 is an error when the step runs. weight (C) multiplies the terms of
---each class; for ids, "mean" then divides by the sum of the weights of those not ignored. label_smoothing mixes
---the target with the uniform distribution (Szegedy et al., arXiv:1512.00567). Computed in f32 and rounded to the
---dtype of logits.
---@param logits perilune.Tensor
---@param target perilune.Tensor
---@param options? {ignore_index?: perilune.Whole, label_smoothing?: number, reduction?: "mean"|"sum"|"none", weight?: perilune.Tensor}
---@return perilune.Tensor
function pl.cross_entropy(logits, target, options) end

---logits (..., C), target (...) int or (..., C) float -> scalar, or (...) with reduction = "none".
---The negative log-probability of the target under softmax(logits); the classes are the last dim. A target is a class
---id, or a probability for each class. Ids equal to ignore_index are ignored, and "mean" divides by the number of
---the other ids; any other id outside 0 to C - 1 is an error when the step runs. weight (C) multiplies the terms of
---each class; for ids, "mean" then divides by the sum of the weights of those not ignored. label_smoothing mixes
---the target with the uniform distribution (Szegedy et al., arXiv:1512.00567). Computed in f32 and rounded to the
---dtype of logits.
---@param target perilune.Tensor
---@param options? {ignore_index?: perilune.Whole, label_smoothing?: number, reduction?: "mean"|"sum"|"none", weight?: perilune.Tensor}
---@return perilune.Tensor
function Tensor:cross_entropy(target, options) end

---logp (..., C), target (...) int -> scalar, or (...) with reduction = "none": minus the log-probability of the
---target, for logp from log_softmax; the classes are the last dim. Ids equal to ignore_index are ignored, and
---"mean" divides by the number of the other ids; any other id outside 0 to C - 1 is an error when the step runs.
---weight (C) multiplies the losses of each class, and "mean" divides by the sum of the weights of the ids not
---ignored.
---@param logp perilune.Tensor
---@param target perilune.Tensor
---@param options? {ignore_index?: perilune.Whole, reduction?: "mean"|"sum"|"none", weight?: perilune.Tensor}
---@return perilune.Tensor
function pl.nll_loss(logp, target, options) end

---logp (..., C), target (...) int -> scalar, or (...) with reduction = "none": minus the log-probability of the
---target, for logp from log_softmax; the classes are the last dim. Ids equal to ignore_index are ignored, and
---"mean" divides by the number of the other ids; any other id outside 0 to C - 1 is an error when the step runs.
---weight (C) multiplies the losses of each class, and "mean" divides by the sum of the weights of the ids not
---ignored.
---@param target perilune.Tensor
---@param options? {ignore_index?: perilune.Whole, reduction?: "mean"|"sum"|"none", weight?: perilune.Tensor}
---@return perilune.Tensor
function Tensor:nll_loss(target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": (x - target)^2.
---Shapes must be equal; they are not broadcast. Computed in f32 for 16-bit floats.
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.mse_loss(x, target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": (x - target)^2.
---Shapes must be equal; they are not broadcast. Computed in f32 for 16-bit floats.
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:mse_loss(target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": |x - target|. The gradient at 0 is 0.
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.l1_loss(x, target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": |x - target|. The gradient at 0 is 0.
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:l1_loss(target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": with d = x - target, d^2 / (2 beta)
---where |d| < beta, else |d| - beta / 2. Girshick, arXiv:1504.08083.
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {beta?: number, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.smooth_l1_loss(x, target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": with d = x - target, d^2 / (2 beta)
---where |d| < beta, else |d| - beta / 2. Girshick, arXiv:1504.08083.
---@param target perilune.Tensor|number|boolean
---@param options? {beta?: number, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:smooth_l1_loss(target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": with d = x - target, d^2 / 2 where
---|d| <= delta, else delta (|d| - delta / 2). Huber, Ann. Math. Statist. 35 (1964).
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {delta?: number, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.huber_loss(x, target, options) end

---x (...), target (...) or a number -> scalar, or (...) with reduction = "none": with d = x - target, d^2 / 2 where
---|d| <= delta, else delta (|d| - delta / 2). Huber, Ann. Math. Statist. 35 (1964).
---@param target perilune.Tensor|number|boolean
---@param options? {delta?: number, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:huber_loss(target, options) end

---logits (...), target (...) in [0, 1] -> scalar, or (...) with reduction = "none": binary cross-entropy of
---sigmoid(logits), without overflow. pos_weight, which broadcasts to logits, multiplies the loss of positives.
---@param logits perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {pos_weight?: perilune.Tensor, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.bce_with_logits(logits, target, options) end

---logits (...), target (...) in [0, 1] -> scalar, or (...) with reduction = "none": binary cross-entropy of
---sigmoid(logits), without overflow. pos_weight, which broadcasts to logits, multiplies the loss of positives.
---@param target perilune.Tensor|number|boolean
---@param options? {pos_weight?: perilune.Tensor, reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:bce_with_logits(target, options) end

---x (...) in [0, 1], target (...) in [0, 1] -> scalar, or (...) with reduction = "none": binary cross-entropy of
---probabilities. Logarithms are clamped at -100, as in PyTorch. bce_with_logits is more accurate.
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function pl.bce_loss(x, target, options) end

---x (...) in [0, 1], target (...) in [0, 1] -> scalar, or (...) with reduction = "none": binary cross-entropy of
---probabilities. Logarithms are clamped at -100, as in PyTorch. bce_with_logits is more accurate.
---@param target perilune.Tensor|number|boolean
---@param options? {reduction?: "mean"|"sum"|"none"}
---@return perilune.Tensor
function Tensor:bce_loss(target, options) end

---x (...) log-probabilities, target (...) probabilities -> scalar, or (...) with reduction = "none":
---target (log(target) - x), 0 where target is 0; with log_target, exp(target) (target - x). "batchmean" divides the
---sum by the size of dim 0, which gives the KL divergence; "mean" by the number of elements, as in PyTorch.
---@param x perilune.Tensor
---@param target perilune.Tensor|number|boolean
---@param options? {log_target?: boolean, reduction?: "mean"|"sum"|"batchmean"|"none"}
---@return perilune.Tensor
function pl.kl_div(x, target, options) end

---x (...) log-probabilities, target (...) probabilities -> scalar, or (...) with reduction = "none":
---target (log(target) - x), 0 where target is 0; with log_target, exp(target) (target - x). "batchmean" divides the
---sum by the size of dim 0, which gives the KL divergence; "mean" by the number of elements, as in PyTorch.
---@param target perilune.Tensor|number|boolean
---@param options? {log_target?: boolean, reduction?: "mean"|"sum"|"batchmean"|"none"}
---@return perilune.Tensor
function Tensor:kl_div(target, options) end

---w, g, m, v, all (...) -> new w, m, v: one step of AdamW for weights w with gradient g and moments m, v; `step`
---counts from 1. m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w (1 - lr weight_decay)
---- lr mhat / (sqrt(vhat) + eps), with mhat = m / (1 - beta1^step), vhat = v / (1 - beta2^step).
---Computed in f32 (f64 for f64); each result has the dtype of its old value. Options are run-time numbers or scalar
---tensors. Loshchilov and Hutter, arXiv:1711.05101.
---@param w perilune.Tensor
---@param g perilune.Tensor
---@param m perilune.Tensor
---@param v perilune.Tensor
---@param options? {lr: perilune.Tensor|number|boolean, beta1?: perilune.Tensor|number|boolean, beta2?: perilune.Tensor|number|boolean, eps?: perilune.Tensor|number|boolean, weight_decay?: perilune.Tensor|number|boolean, step: perilune.Tensor|number|boolean}
---@return perilune.Tensor w
---@return perilune.Tensor m
---@return perilune.Tensor v
function pl.adamw_update(w, g, m, v, options) end

---w, g, m, v, all (...) -> new w, m, v: one step of AdamW for weights w with gradient g and moments m, v; `step`
---counts from 1. m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w (1 - lr weight_decay)
---- lr mhat / (sqrt(vhat) + eps), with mhat = m / (1 - beta1^step), vhat = v / (1 - beta2^step).
---Computed in f32 (f64 for f64); each result has the dtype of its old value. Options are run-time numbers or scalar
---tensors. Loshchilov and Hutter, arXiv:1711.05101.
---@param g perilune.Tensor
---@param m perilune.Tensor
---@param v perilune.Tensor
---@param options? {lr: perilune.Tensor|number|boolean, beta1?: perilune.Tensor|number|boolean, beta2?: perilune.Tensor|number|boolean, eps?: perilune.Tensor|number|boolean, weight_decay?: perilune.Tensor|number|boolean, step: perilune.Tensor|number|boolean}
---@return perilune.Tensor w
---@return perilune.Tensor m
---@return perilune.Tensor v
function Tensor:adamw_update(g, m, v, options) end

---x (...) -> x, of which each device along a named axis of the mesh stores a block of the dim given for the axis:
---`x:shard{ dp = 0 }`. The value is the same; the placement decides what is stored and sent. Blocks are of equal size, the
---last ones padded if the axis does not divide the dim. An axis of one device splits nothing. The gradient is placed alike.
---@param x perilune.Tensor
---@param options? {pp?: perilune.Whole, dp?: perilune.Whole, shard?: perilune.Whole, cp?: perilune.Whole, ep?: perilune.Whole, tp?: perilune.Whole}
---@return perilune.Tensor
function pl.shard(x, options) end

---x (...) -> x, of which each device along a named axis of the mesh stores a block of the dim given for the axis:
---`x:shard{ dp = 0 }`. The value is the same; the placement decides what is stored and sent. Blocks are of equal size, the
---last ones padded if the axis does not divide the dim. An axis of one device splits nothing. The gradient is placed alike.
---@param options? {pp?: perilune.Whole, dp?: perilune.Whole, shard?: perilune.Whole, cp?: perilune.Whole, ep?: perilune.Whole, tp?: perilune.Whole}
---@return perilune.Tensor
function Tensor:shard(options) end

---x (...) -> x, of which each device of the mesh stores all elements: joins the blocks of `shard`, and completes sums.
---`x:full()` is the same.
---@param x perilune.Tensor
---@return perilune.Tensor
function pl.replicate(x) end

---x (...) -> x, of which each device of the mesh stores all elements: joins the blocks of `shard`, and completes sums.
---`x:full()` is the same.
---@return perilune.Tensor
function Tensor:replicate() end

---x (..., n k, ...) -> (..., k, ...): the n blocks of dim `dim`, one for each of the n devices along the axis, combined
---element by element; every device stores the result. Dtypes: those of `sum` and `amax`, the result has that of x;
---16-bit floats are summed in f32. The axis has to divide the dim. Along an axis of one device it is x.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {dim?: perilune.Whole, op?: "sum"|"max"|"min"|"mean"}
---@return perilune.Tensor
function pl.all_reduce(x, axis, options) end

---x (..., n k, ...) -> (..., k, ...): the n blocks of dim `dim`, one for each of the n devices along the axis, combined
---element by element; every device stores the result. Dtypes: those of `sum` and `amax`, the result has that of x;
---16-bit floats are summed in f32. The axis has to divide the dim. Along an axis of one device it is x.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {dim?: perilune.Whole, op?: "sum"|"max"|"min"|"mean"}
---@return perilune.Tensor
function Tensor:all_reduce(axis, options) end

---x (..., n k, ...) -> (..., k, ...): the same value as `all_reduce`, of which each of the n devices along the axis stores
---a block of dim `scatter`. Along an axis of one device it is x.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {dim?: perilune.Whole, scatter?: perilune.Whole, op?: "sum"|"max"|"min"|"mean"}
---@return perilune.Tensor
function pl.reduce_scatter(x, axis, options) end

---x (..., n k, ...) -> (..., k, ...): the same value as `all_reduce`, of which each of the n devices along the axis stores
---a block of dim `scatter`. Along an axis of one device it is x.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {dim?: perilune.Whole, scatter?: perilune.Whole, op?: "sum"|"max"|"min"|"mean"}
---@return perilune.Tensor
function Tensor:reduce_scatter(axis, options) end

---x (...) -> x, of which each device along the axis stores all elements: the blocks that they had are joined. `x:full()`
---gathers along all axes.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@return perilune.Tensor
function pl.all_gather(x, axis) end

---x (...) -> x, of which each device along the axis stores all elements: the blocks that they had are joined. `x:full()`
---gathers along all axes.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@return perilune.Tensor
function Tensor:all_gather(axis) end

---x (...) -> x: each device along the axis had a block of dim `from` and has one of dim `to` then: from a split of sequences
---to one of heads, say. The value is the same. Blocks are padded if the axis does not divide a dim.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param from perilune.Whole
---@param to perilune.Whole
---@return perilune.Tensor
function pl.all_to_all(x, axis, from, to) end

---x (...) -> x: each device along the axis had a block of dim `from` and has one of dim `to` then: from a split of sequences
---to one of heads, say. The value is the same. Blocks are padded if the axis does not divide a dim.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param from perilune.Whole
---@param to perilune.Whole
---@return perilune.Tensor
function Tensor:all_to_all(axis, from, to) end

---x (..., n k, ...) -> (..., k, ...): block `root` of the n blocks of dim `dim`, that of the device at coordinate `root`
---along the axis; every device stores it. `root` counts from 0. Along an axis of one device it is x.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {root?: perilune.Whole, dim?: perilune.Whole}
---@return perilune.Tensor
function pl.broadcast(x, axis, options) end

---x (..., n k, ...) -> (..., k, ...): block `root` of the n blocks of dim `dim`, that of the device at coordinate `root`
---along the axis; every device stores it. `root` counts from 0. Along an axis of one device it is x.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {root?: perilune.Whole, dim?: perilune.Whole}
---@return perilune.Tensor
function Tensor:broadcast(axis, options) end

---x (..., n k, ...) -> the same shape: the n blocks of dim `dim`, one for each of the n devices along the axis, `by` places
---further on: the device at coordinate r gets the block of r - by. With `wrap` the first ones get those of the last, else
---zeros. `by` may be negative. The axis has to divide the dim. Each device keeps its block. The gradient goes back.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {by?: perilune.Whole, wrap?: boolean, dim?: perilune.Whole}
---@return perilune.Tensor
function pl.shift(x, axis, options) end

---x (..., n k, ...) -> the same shape: the n blocks of dim `dim`, one for each of the n devices along the axis, `by` places
---further on: the device at coordinate r gets the block of r - by. With `wrap` the first ones get those of the last, else
---zeros. `by` may be negative. The axis has to divide the dim. Each device keeps its block. The gradient goes back.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param options? {by?: perilune.Whole, wrap?: boolean, dim?: perilune.Whole}
---@return perilune.Tensor
function Tensor:shift(axis, options) end

---x (..., n k, ...) -> the same shape: of the n blocks of dim `dim`, one for each of the n devices along the axis, that of the
---device at coordinate r goes to the device at coordinate to[r + 1], or to none if that is -1. Who gets none has zeros.
---Coordinates count from 0, and no two devices send to the same one. The axis has to divide the dim. Each device keeps its
---block. The gradient of a block goes back to its sender. JAX calls this `ppermute`.
---@param x perilune.Tensor
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param to perilune.Whole|perilune.Whole[]
---@param options? {dim?: perilune.Whole}
---@param ... perilune.Whole
---@return perilune.Tensor
function pl.send_recv(x, axis, to, options, ...) end

---x (..., n k, ...) -> the same shape: of the n blocks of dim `dim`, one for each of the n devices along the axis, that of the
---device at coordinate r goes to the device at coordinate to[r + 1], or to none if that is -1. Who gets none has zeros.
---Coordinates count from 0, and no two devices send to the same one. The axis has to divide the dim. Each device keeps its
---block. The gradient of a block goes back to its sender. JAX calls this `ppermute`.
---@param axis "pp"|"dp"|"shard"|"cp"|"ep"|"tp"
---@param to perilune.Whole|perilune.Whole[]
---@param options? {dim?: perilune.Whole}
---@param ... perilune.Whole
---@return perilune.Tensor
function Tensor:send_recv(axis, to, options, ...) end

---x (...) -> x, which no device along the axis reads before all of them have computed their part of it; without an axis, no
---device of the mesh. Stages of a pipeline (`pp`) are not waited for. Ops are recorded and run when a value is read, so a
---barrier orders what follows from its result: `pl.barrier(x):item()` waits for all devices. The gradient does not wait.
---@param x perilune.Tensor
---@param axis? "dp"|"shard"|"cp"|"ep"|"tp"
---@return perilune.Tensor
function pl.barrier(x, axis) end

---x (...) -> x, which no device along the axis reads before all of them have computed their part of it; without an axis, no
---device of the mesh. Stages of a pipeline (`pp`) are not waited for. Ops are recorded and run when a value is read, so a
---barrier orders what follows from its result: `pl.barrier(x):item()` waits for all devices. The gradient does not wait.
---@param axis? "dp"|"shard"|"cp"|"ep"|"tp"
---@return perilune.Tensor
function Tensor:barrier(axis) end

return pl
