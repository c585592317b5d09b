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
