---@meta perilune
-- Made by `perilune stubs` from the op registry: types for editors. Never run.

---A whole number: 64, or 64.0, as arithmetic may give it.
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

---Every dim, or one.
---@param dim? integer
---@return integer ...
function Tensor:size(dim) end
---How many elements.
---@return integer
function Tensor:numel() end
---How many dims.
---@return integer
function Tensor:dim() end
---The one value there is, evaluated now; a boolean if the tensor is bool.
---@return number
function Tensor:item() end
---All elements, evaluated now: a nested list, or of a scalar the number.
---@return any
function Tensor:tolist() end
---Adds gradients of this scalar to `.grad` of every trainable State that it depends on. With a seed of its shape it may be any tensor.
---@param seed? perilune.Tensor|number
---@param options? {create_graph?: boolean}
function Tensor:backward(seed, options) end
---Writes a State at the end of the step; what was recorded before keeps the old value.
---@param value perilune.Tensor|number
function Tensor:assign(value) end

---Gives the memory back now instead of at the next collection. Using the tensor afterwards is an error.
function Tensor:free() end

---A buffer that changes: `pl.state` makes one, `assign` and optimizers write it.
---@class perilune.State: perilune.Tensor

---@class perilune
---@field nn any
---@field optim any
---@field data any
---@field metrics any
---@field train any
---@field init any
---@field tree any
---@field newaxis table
---@field version string
local pl = {}

---A tensor of a number, a boolean, a list of them (nested, all rows of one length) or of another tensor: i64 of whole numbers, f32 if
---one has a point, bool of booleans, unless a dtype is given.
---@param value any
---@param options? {dtype?: perilune.DType}
---@return perilune.Tensor
function pl.tensor(value, options) end
---A buffer that changes, with the value of x: a weight (`trainable`, the default for floats) or something to keep. `w:assign(v)` writes it.
---@param x perilune.Tensor
---@param options? {trainable?: boolean, role?: "weights"|"optimizer"|"buffers"} role is for pl.memory() alone
---@return perilune.State
function pl.state(x, options) end
---Whether x is a tensor (a State is one).
---@param x any
---@return boolean
function pl.is_tensor(x) end
---Whether x is a State.
---@param x any
---@return boolean
function pl.is_state(x) end
---One step: runs fn(...), evaluates the tensors that it returns, then writes what it assigned. If fn raises, every State is as before.
---@param fn function
---@return any ...
function pl.step(fn, ...) end
---Whether a step is open.
---@return boolean
function pl.in_step() end
---Ends the implicit step of a plain loop, as `opt:step()` does: assignments are written, what the script still holds is evaluated.
function pl.end_step() end
---Evaluates tensors now and returns them. In a step that splits its plan.
---@return any ...
function pl.eval(...) end
---Evaluates tensors when the open step ends, so that they can be read behind it.
---@return any ...
function pl.keep(...) end
---Runs fn(...); what it records is a constant to gradients.
---@param fn function
---@return any ...
function pl.no_grad(fn, ...) end
---Runs fn(...), a function or a module; a backward pass computes again what it recorded instead of keeping it in memory.
---Gradients have the same bits. What is used outside of fn, its results above all, is kept.
---@param fn function|perilune.Module
---@return any ...
function pl.checkpoint(fn, ...) end
---Runs fn(...) with matmuls, convolutions and attention in a 16-bit dtype (what needs f32 stays f32), or with f32 products
---whose operands may be rounded to TF32 (10 bits of mantissa) where the device has such products: GPUs do, the CPU computes f32.
---Backward passes follow what was recorded.
---@param dtype "bf16"|"f16"|"tf32"|"f32"
---@param fn function
---@return any ...
function pl.autocast(dtype, fn, ...) end
---Starts the random numbers anew: the same seed and the same calls give the same numbers on every device.
---@param n integer
function pl.seed(n) end
---Gradients of the scalar y with respect to each of xs. With `create_graph` they can be differentiated again; with `allow_unused` nil
---stands for what y does not depend on, which otherwise is an error.
---@param y perilune.Tensor
---@param xs perilune.Tensor[]
---@param options? {create_graph?: boolean, allow_unused?: boolean}
---@return perilune.Tensor? ...
function pl.grad(y, xs, options) end
---Compares the gradients of all that fn returns with finite differences in f64: true, or an error that names the worst element.
---@param fn fun(...: perilune.Tensor): perilune.Tensor ...
---@param inputs perilune.Tensor[]
---@param options? {eps?: number, tolerance?: number}
---@return boolean
function pl.gradcheck(fn, inputs, options) end
---An elementwise function (...) -> (...) from one expression: `pl.kernel { inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }`,
---or any function of tensors from CUDA source: `pl.kernel { name = "f", inputs = "x: f32", source = "__global__ void f(...) ...", cpu = function(x) ... end }`.
---@param options {name?: string, inputs: string, scalars?: string, expr?: string, backward?: function, source?: string, outputs?: string, shape?: function, grid?: integer|integer[]|function, block?: integer|integer[]|function, shared?: integer|function, args?: function, cpu?: function}
---@return fun(...: any): perilune.Tensor ...
function pl.kernel(options) end
---Runs a kernel from CUDA source and its `cpu` function on the GPU and compares: true, or an error that names the worst element.
---@param kernel function
---@param arguments any[]
---@param options? {rtol?: number, atol?: number}
---@return boolean
function pl.kernel_check(kernel, arguments, options) end
---A function with a backward of its own. forward(...) takes tensors and other values and returns one tensor; backward(g, ...) takes
---the gradient of that and the same arguments, and returns a gradient (or nil) for each tensor among them.
---@param options {forward: function, backward: function, name?: string}
---@return function
function pl.custom(options) end
---Seconds since the runtime started, for timing: `pl.eval(x)` before reading it.
---@return number
function pl.clock() end
---The plan that evaluating tensors would run, as text. With {source = true} at the end also the recipe lines and the CUDA text of
---each kernel; on the CPU, which compiles no text, of the plan that a GPU would run.
---@param ... perilune.Tensor|{source?: boolean}
---@return string
function pl.plan(...) end
---Counts of plans, cache hits and misses, runs and splits, and the bytes that are held.
---@return table
function pl.stats() end
---Opens a prompt here, with the locals of this function, where there is a terminal; elsewhere it is passed by with a warning.
function pl.breakpoint() end
---Output shapes, parameters, FLOP and bytes of outputs, layer by layer, of a model called with these inputs. Nothing is computed.
---@param model perilune.Module
---@param ... any what the model is called with
---@return perilune.Summary
function pl.summary(model, ...) end
---What the device's memory holds: bytes allocated, reserved and at most allocated so far; by_role; owners, largest first, each
---with role, bytes, count, dtype and shape of the largest, and the recipe line. What a step keeps while it runs
---(activations, gradients) is that of the largest plan so far.
---@return {allocated: integer, reserved: integer, peak: integer, limit: integer?, by_role: table<string, integer>, owners: table[]}
function pl.memory() end
---What a step may take with all it reads: more is recomputed in the backward pass, or is an error. nil lifts it.
---@param budget string|integer|nil as in "20GiB", or bytes
---@return integer? before
function pl.memory_budget(budget) end
---Sets switches from here on, or while fn(...) runs; see the guide.
---@param switches {fusion?: boolean, print_plan?: boolean|"source", check_nan?: boolean, report_misses?: boolean}
---@param fn? function
---@return any ...
function pl.switches(switches, fn, ...) end
---Options of a function of your own: `given` over `defaults`; unknown names are errors with a suggestion.
---@param op string
---@param given table?
---@param defaults table
---@return any options
function pl.options(op, given, defaults) end
---Raises an error as the library's own are: op, message, cure, and the caller's line.
---@param op string
---@param message string
---@param hint? string
---@param at? function where the fault is written, if it is not the line being run
function pl.error(op, message, hint, at) end
---The table that a recipe returns: its name, params and parts. Misspelt parts are errors.
---@param recipe table
---@return any recipe the table, to which the recipe's functions are added
function pl.recipe(recipe) end
---The params of a plain script, settable by `--set`.
---@param defaults table
---@return table<string, any>
function pl.params(defaults) end
---Tensors by name of a .safetensors or .npz file or of a sharded model (.safetensors.index.json), the tensor of an .npy file.
---A relative path is one of the current directory, where `pl.save` writes, else one beside the recipe. The command says what may be read (--allow-read).
---@param path string
---@return any
function pl.load(path) end
---Writes tensors by name (.safetensors, .npz) or one tensor (.npy). A relative path is one of the current directory. The command says what may be
---written: a file that a --set names, the run directory, --allow-write.
---@param path string
---@param tensors perilune.Tensor|table<string, perilune.Tensor>
function pl.save(path, tensors) end
---What an op or a function is: signature, options, what it does.
---@param name? string
---@return string
function pl.help(name) end
