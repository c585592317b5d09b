-- Tries shapes, indices and numbers that overflow. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# narrow_wraps: wrap the end of a narrow
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:narrow(0, 1 << 62, (1 << 62) + 1):sum():item())

--# narrow_negative: narrow by a negative length
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:narrow(0, 0, -1):sum():item())

--# narrow_min: narrow at the least integer
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:narrow(math.mininteger, 0, 1):sum():item())

--# slice_min: slice by the least integer
--# expect: any
local pl = require "perilune"
print(pl.ones { 4, 4 }:slice(0, math.mininteger, math.maxinteger):sum():item())

--# slice_step: slice by a great step
--# expect: any
local pl = require "perilune"
print(pl.ones { 4, 4 }:slice(0, 0, 4, math.maxinteger):sum():item())

--# select: select past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:select(0, math.maxinteger):sum():item())

--# index: index past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }[math.maxinteger]:sum():item())

--# index_range: index a range that wraps
--# expect: any
local pl = require "perilune"
print(pl.ones { 4, 4 }[{ { math.mininteger, math.maxinteger } }]:sum():item())

--# shape_wraps: wrap the number of elements
--# expect: error
local pl = require "perilune"
print(pl.zeros { 1 << 32, 1 << 32, 1 << 32 }:sum():item())

--# shape_wraps_zero: hide a wrap behind an empty dim
--# expect: any
local pl = require "perilune"
print(pl.zeros { 0, 1 << 62, 1 << 62 }:sum():item())

--# shape_negative: make a negative dim
--# expect: error
local pl = require "perilune"
print(pl.zeros { -1 << 40 }:sum():item())

--# shape_float: make a dim of infinite size
--# expect: error
local pl = require "perilune"
print(pl.zeros { math.huge }:sum():item())

--# shape_nan: make a dim that is not a number
--# expect: error
local pl = require "perilune"
print(pl.zeros { 0 / 0 }:sum():item())

--# view_wraps: view as a shape that wraps
--# expect: error
local pl = require "perilune"
print(pl.zeros { 4, 4 }:view(1 << 32, 1 << 32, 16):sum():item())

--# view_infer: infer two dims
--# expect: error
local pl = require "perilune"
print(pl.zeros { 4, 4 }:view(-1, -1):sum():item())

--# expand_wraps: expand past the address space
--# expect: error
local pl = require "perilune"
print(pl.zeros { 1, 1 }:expand(1 << 40, 1 << 40):sum():item())

--# tile_wraps: tile so that the size wraps
--# expect: error
local pl = require "perilune"
print(pl.zeros { 2, 2 }:tile(1 << 32, 1 << 32):sum():item())

--# pad_wraps: pad so that the size wraps
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:pad({ math.maxinteger, math.maxinteger }):sum():item())

--# pad_negative: pad by less than there is
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:pad({ math.mininteger, 0 }):sum():item())

--# unfold_wraps: unfold with a great step
--# expect: error
local pl = require "perilune"
print(pl.ones { 16 }:unfold(0, math.maxinteger, 1):sum():item())

--# unfold_step: unfold with a step of nothing
--# expect: error
local pl = require "perilune"
print(pl.ones { 16 }:unfold(0, 2, 0):sum():item())

--# conv_stride: convolve with a great stride
--# expect: any
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv2d(pl.ones { 1, 1, 2, 2 }, nil, { stride = math.maxinteger }):sum():item())

--# conv_padding: convolve with a great padding
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv2d(pl.ones { 1, 1, 2, 2 }, nil, { padding = math.maxinteger }):sum():item())

--# conv_dilation: convolve with a great dilation
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv2d(pl.ones { 1, 1, 2, 2 }, nil, { dilation = math.maxinteger }):sum():item())

--# conv_groups: convolve in great groups
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv2d(pl.ones { 1, 1, 2, 2 }, nil, { groups = 1 << 62 }):sum():item())

--# conv_zero_stride: convolve with a stride of nothing
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv2d(pl.ones { 1, 1, 2, 2 }, nil, { stride = 0 }):sum():item())

--# conv_transpose: transpose a convolution past memory
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:conv_transpose2d(pl.ones { 1, 1, 2, 2 }, nil, { stride = 1 << 60, output_padding = 1 << 61 }):sum():item())

--# pool_kernel: pool over a great window
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:max_pool2d(1 << 62, { padding = 1 << 61 }):sum():item())

--# adaptive_pool: pool to a great size
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:adaptive_avg_pool2d(1 << 40):sum():item())

--# arange_wraps: count with a step of nothing
--# expect: error
local pl = require "perilune"
print(pl.arange(0, 10, 0):sum():item())

--# arange_tiny: count in tiny steps
--# expect: error
local pl = require "perilune"
print(pl.arange(0, 1e300, 1e-300):sum():item())

--# linspace: place a great number of points
--# expect: error
local pl = require "perilune"
print(pl.linspace(0, 1, math.maxinteger):sum():item())

--# eye_wraps: make a square that wraps
--# expect: any
local pl = require "perilune"
print(pl.eye(1 << 32):sum():item())

--# roll: roll by the least integer
--# expect: any
local pl = require "perilune"
print(pl.ones { 4 }:roll(math.mininteger, 0):sum():item())

--# diagonal: take a diagonal far away
--# expect: any
local pl = require "perilune"
print(pl.ones { 4, 4 }:diagonal(math.mininteger):sum():item())

--# tril: cut a triangle far away
--# expect: any
local pl = require "perilune"
print(pl.ones { 4, 4 }:tril(math.mininteger):sum():item())

--# split: split by nothing
--# expect: error
local pl = require "perilune"
print(pl.ones { 4 }:split(0, 0))

--# chunk: cut into a great number of parts
--# expect: any
local pl = require "perilune"
print(pl.ones { 4 }:chunk(math.maxinteger, 0))

--# topk: take more than there are
--# expect: error
local pl = require "perilune"
print(pl.ones { 4 }:topk(math.maxinteger, 0))

--# one_hot_wraps: make classes that wrap
--# expect: error
local pl = require "perilune"
print(pl.zeros({ 4 }, { dtype = "i64" }):one_hot(math.maxinteger):sum():item())

--# one_hot_negative: give a negative class
--# expect: error
local pl = require "perilune"
print(pl.tensor({ -1, 2 }, { dtype = "i64" }):one_hot(3):sum():item())

--# embedding_index: read a row past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:embedding(pl.tensor({ 1 << 40 }, { dtype = "i64" })):sum():item())

--# embedding_negative: read a row before the start
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:embedding(pl.tensor({ math.mininteger }, { dtype = "i64" })):sum():item())

--# gather_index: gather past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4 }:gather(0, pl.tensor({ math.maxinteger }, { dtype = "i64" })):sum():item())

--# scatter_index: write past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4 }:scatter(0, pl.tensor({ 1 << 40 }, { dtype = "i64" }), pl.ones { 1 }):sum():item())

--# index_add: add past the end
--# expect: error
local pl = require "perilune"
print(pl.ones { 4 }:index_add(0, pl.tensor({ 99 }, { dtype = "i64" }), pl.ones { 1 }):sum():item())

--# class_id: give a class past the end
--# expect: error
local pl = require "perilune"
print(pl.cross_entropy(pl.ones { 2, 4 }, pl.tensor({ 1, 1 << 40 }, { dtype = "i64" })):item())

--# einsum_letters: write an equation of great length
--# expect: error
local pl = require "perilune"
print(pl.einsum(("a"):rep(100000) .. "->a", { pl.ones { 2 } }))

--# einsum_outer: make an outer product past memory
--# expect: error
local pl = require "perilune"
print(pl.einsum("a,b,c,d->abcd", { pl.ones { 1 << 16 }, pl.ones { 1 << 16 }, pl.ones { 1 << 16 }, pl.ones { 1 << 16 } }))

--# permute: permute twice the same dim
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:permute(0, 0))

--# axis: reduce over a dim far away
--# expect: error
local pl = require "perilune"
print(pl.ones { 4, 4 }:sum(math.mininteger))

--# cast_float: cast what no integer holds
--# expect: any
local pl = require "perilune"
print(pl.tensor { 3e9, -3e9, 0 / 0, math.huge }:to("i32"):tolist()[1])

--# cast_byte: cast what no byte holds
--# expect: any
local pl = require "perilune"
print(pl.tensor { 300, -1 }:to("u8"):tolist()[1])

--# divide: divide integers by nothing
--# expect: any
local pl = require "perilune"
print((pl.ones({ 2 }, { dtype = "i64" }) // pl.zeros({ 2 }, { dtype = "i64" })):tolist()[1])

--# divide_min: divide the least integer by minus one
--# expect: any
local pl = require "perilune"
print((pl.full({ 2 }, math.mininteger, { dtype = "i64" }) // pl.full({ 2 }, -1, { dtype = "i64" })):tolist()[1])

--# remainder_min: take the remainder of the least integer
--# expect: any
local pl = require "perilune"
print(pl.full({ 2 }, math.mininteger, { dtype = "i64" }):remainder(-1):tolist()[1])

--# randint: draw from an empty range
--# expect: error
local pl = require "perilune"
print(pl.randint(5, 5, { 4 }):sum():item())

--# randint_wide: draw from a range that wraps
--# expect: any
local pl = require "perilune"
print(pl.randint(math.mininteger, math.maxinteger, { 4 }):sum():item())

--# pow_int: raise integers past their range
--# expect: any
local pl = require "perilune"
print((pl.full({ 2 }, 10, { dtype = "i64" }) ^ 40):tolist()[1])

--# interpolate_zero: scale to nothing
--# expect: any
local pl = require "perilune"
print(pl.ones { 1, 1, 4, 4 }:interpolate({ size = { 0, 0 } }):sum():item())

--# attention_heads: attend with heads that do not divide
--# expect: error
local pl = require "perilune"
print(pl.scaled_dot_product_attention(pl.ones { 1, 3, 4, 8 }, pl.ones { 1, 2, 4, 8 }, pl.ones { 1, 2, 4, 8 }):sum():item())

--# group_norm: normalise in no groups
--# expect: error
local pl = require "perilune"
print(pl.ones { 2, 4, 3 }:group_norm(0):sum():item())
