-- data/native.lua: the seam to the readers and shufflers written in Rust (runtime/data). All that `perilune.data` asks of
-- the native side goes through these functions, so that a change of its signatures is a change of this file.

local pl = require "perilune"

local native = {}

---@class perilune.NativeRows a table in Rust
---@field size fun(self): integer, integer rows, columns
---@field names fun(self): string[]?
---@field columns fun(self, columns: (integer|string)[], options: table): perilune.Tensor
---@field is_numeric fun(self, column: integer|string): boolean
---@field codes fun(self, column: integer|string, words: string[]?): perilune.Tensor, string[]

---The table in a CSV file (plain or gzip), beside the recipe unless the path is absolute.
---@param path string
---@param opts {header: boolean?, delimiter: string?, comment: string?, missing: number?}
---@return perilune.NativeRows
function native.csv(path, opts)
  return pl.native.csv(path, opts)
end

---Columns as one tensor (rows, #columns), each value times `scale`.
---@param rows perilune.NativeRows
---@param columns (integer|string)[] indices from 0, or names of the header
---@param dtype string
---@param scale number
---@return perilune.Tensor
function native.columns(rows, columns, dtype, scale)
  return rows:columns(columns, { dtype = dtype, scale = scale })
end

---Whether every cell of a column is a number (or missing).
---@param rows perilune.NativeRows
---@param column integer|string
---@return boolean
function native.is_numeric(rows, column)
  return rows:is_numeric(column)
end

---A column of words as codes (rows) i64: the place of each word in `words`, or in the sorted list of those that occur.
---@param rows perilune.NativeRows
---@param column integer|string
---@param words string[]?
---@return perilune.Tensor codes
---@return string[] words
function native.codes(rows, column, words)
  return rows:codes(column, words)
end

---A UTF-8 text file.
---@param path string
---@return string
function native.text(path)
  return pl.native.text(path)
end

---Token ids in a .bin file of u16, as llm.c and nanoGPT write them: (N) i32.
---@param path string
---@return perilune.Tensor
function native.tokens(path)
  return pl.native.tokens(path)
end

---The vocabulary of a text's characters, sorted.
---@param text string
---@return any vocab with :size(), :encode(text) -> i64 tensor, :decode(ids: integer[]) -> string
function native.chars(text)
  return pl.native.chars(text)
end

---Samples `first` .. `first + count - 1` of an endless stream: epoch behind epoch, each 0 .. n - 1 in an order that is a pure function of
---(seed, epoch). Costs what `count` samples cost, however many an epoch has.
---@param seed integer
---@param first integer
---@param count integer
---@param n integer samples in an epoch
---@return integer[] list
function native.shuffled(seed, first, count, n)
  return pl.native.shuffled(seed, first, count, n)
end

---The order in which a split deals its samples: another stream than the epochs', so that one seed may serve both.
---@param seed integer
---@param n integer
---@return integer[] list
function native.split_order(seed, n)
  return pl.native.permutation(seed, 0, n, "split"):tolist()
end

---Starts of windows `first` .. `first + count - 1` of an endless random sequence: each in 0 .. n - length, a pure function of (seed, index).
---@param seed integer
---@param first integer
---@param count integer
---@param n integer length of the text
---@param length integer length of a window
---@return perilune.Tensor (count) i64
function native.text_windows(seed, first, count, n, length)
  return pl.native.text_windows(seed, first, count, n, length)
end

---@class perilune.NativeImages a folder of images, listed
---@field size fun(self): integer
---@field classes fun(self): string[]
---@field path fun(self, i: integer): string the file of image `i`, from 0
---@field reader fun(self, options: table): perilune.NativeReader pixels, threads?, and for random crops seed, scale_low, scale_high, ratio_low, ratio_high, else resize

---@class perilune.NativeReader
---@field batch fun(self, rows: integer[], first: integer): perilune.Tensor, perilune.Tensor x (N, 3, P, P) u8, y (N) i64; `first` is the stream's number of the first
---@field expect fun(self, rows: integer[], first: integer) begins with a batch that will be asked for

---The images of a folder, a class a folder in it.
---@param path string
---@param classes string[]? their names in the order of their ids; by default those that are there, sorted
---@return perilune.NativeImages
function native.images(path, classes)
  return pl.native.images(path, classes)
end

---An image file as floats in [0, 1].
---@param path string
---@return perilune.Tensor (C, H, W) f32, C = 1, 3 or 4
function native.png(path)
  return pl.native.png(path)
end

---@param path string
---@param image perilune.Tensor (C, H, W) u8, C = 1, 3 or 4
function native.save_png(path, image)
  return pl.native.save_png(path, image)
end

return native
