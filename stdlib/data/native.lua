-- data/native.lua: declares the readers and sample orders that are written in Rust (runtime/data), with their types.

---@type string, table the name of this module, and what only the library may call
local _, bound = ...

local native = {}

---@class perilune.NativeRows a parsed CSV file
---@field size fun(self): integer, integer rows, columns
---@field names fun(self): string[]?
---@field columns fun(self, columns: (integer|string)[], options: table): perilune.Tensor
---@field is_numeric fun(self, column: integer|string): boolean
---@field codes fun(self, column: integer|string, words: string[]?): perilune.Tensor, string[]

---Parses a CSV file, plain or gzip. A relative path starts at the recipe's folder.
---@param path string
---@param opts {header: boolean?, delimiter: string?, comment: string?, missing: number?, max_bytes: integer?}
---@return perilune.NativeRows
function native.csv(path, opts)
  return bound.csv(path, opts)
end

---Returns columns as one tensor (rows, #columns), multiplied by `scale`.
---@param rows perilune.NativeRows
---@param columns (integer|string)[] indices from 0, or names of the header
---@param dtype string
---@param scale number
---@return perilune.Tensor
function native.columns(rows, columns, dtype, scale)
  return rows:columns(columns, { dtype = dtype, scale = scale })
end

---Whether every cell of a column is a number or missing.
---@param rows perilune.NativeRows
---@param column integer|string
---@return boolean
function native.is_numeric(rows, column)
  return rows:is_numeric(column)
end

---Encodes a column of words as i64 codes (rows): positions in `words`, or in the sorted list of the words that occur.
---@param rows perilune.NativeRows
---@param column integer|string
---@param words string[]?
---@return perilune.Tensor codes
---@return string[] words
function native.codes(rows, column, words)
  return rows:codes(column, words)
end

---Reads a UTF-8 text file.
---@param path string
---@param max_bytes integer?
---@return string
function native.text(path, max_bytes)
  return bound.text(path, max_bytes)
end

---Reads token ids from a .bin file of u16, as llm.c and nanoGPT write it.
---@param path string
---@return perilune.Tensor (N) i32
function native.tokens(path)
  return bound.tokens(path)
end

---@class perilune.NativeTokens token ids in files or in host memory
---@field size fun(self): integer
---@field ids fun(self, first: integer, count: integer): perilune.Tensor (count) i32
---@field reader fun(self, low: integer, high: integer, span: integer): perilune.NativeWindows

---@class perilune.NativeWindows
---@field batch fun(self, starts: integer[], first: integer): perilune.Tensor (#starts, span) i32; `first` is the number of the first in the stream
---@field prefetch fun(self, starts: integer[], first: integer) starts to make a batch

---Opens files of token ids as one corpus, in this order; a path may be a pattern.
---@param paths string[]
---@return perilune.NativeTokens
function native.token_files(paths)
  return bound.token_files(paths)
end

---@class perilune.NativeRecords a dataset of records; stages return new ones
---@field size fun(self): integer
---@field varies fun(self): boolean whether epochs differ
---@field get fun(self, index: integer): table<string, any>
---@field origins fun(self, index: integer): {file: string, row: integer, line: integer?, label: integer?, confidence: number?, round: integer?, rewritten: boolean?}[]
---@field mixture fun(self): string[]?, string? names and schedule of the mixture whose records these are, one for one
---@field decide fun(self, first: integer, weights: number[]) gives the places from `first` on other weights
---@field resume_mixture fun(self, names: string[], schedule: string, sample: integer, live: boolean)
---@field pseudo fun(self): integer?, integer? places of chosen records in 1,024 of a stream of pseudo-labels, and its seed
---@field taken fun(self, index: integer): integer labelled records before a place of that stream
---@field taken_by fun(self, seed: integer, share: integer, first: integer, taken: integer, chosen: boolean, index: integer): integer the same for a stream of other options
---@field choose fun(self, first: integer, taken: integer, labels: {row: integer, class: integer, confidence: number, round: integer}[]) gives the places from `first` on these labels
---@field digest fun(self, fields: string[]): integer hash of the content of all records
---@field map fun(self, fn: function, seed: integer): perilune.NativeRecords
---@field augment fun(self, fn: function, seed: integer, keep: number, copies: integer?): perilune.NativeRecords
---@field rewrite fun(self, lists: perilune.Record[][], replace: boolean): perilune.NativeRecords
---@field tokenize fun(self, tokenizer: perilune.Tokenizer, options: table?): perilune.NativeRecords
---@field chat fun(self, tokenizer: perilune.Tokenizer, options: table?): perilune.NativeRecords
---@field preference fun(self, tokenizer: perilune.Tokenizer, options: table?): perilune.NativeRecords
---@field filter fun(self, fn: function, seed: integer): perilune.NativeRecords
---@field flat_map fun(self, fn: function, seed: integer): perilune.NativeRecords
---@field shuffle fun(self, seed: integer): perilune.NativeRecords
---@field range fun(self, first: integer, count: integer): perilune.NativeRecords
---@field repeated fun(self, times: integer): perilune.NativeRecords
---@field windows fun(self, size: integer, stride: integer): perilune.NativeRecords
---@field select fun(self, fields: string[]): perilune.NativeRecords
---@field rename fun(self, fields: table<string, string>): perilune.NativeRecords
---@field concat fun(self, others: perilune.NativeRecords[]): perilune.NativeRecords
---@field interleave fun(self, others: perilune.NativeRecords[]): perilune.NativeRecords
---@field zip fun(self, others: perilune.NativeRecords[]): perilune.NativeRecords
---@field join fun(self, other: perilune.NativeRecords, field: string): perilune.NativeRecords
---@field sort fun(self, key: string|function, descending: boolean): perilune.NativeRecords
---@field group fun(self, key: string|function): perilune.NativeRecords
---@field unique fun(self, fields: string[]): perilune.NativeRecords
---@field without fun(self, other: perilune.NativeRecords, fields: string[]): perilune.NativeRecords
---@field sample fun(self, count: integer, seed: integer): perilune.NativeRecords
---@field part fun(self, op: string, seed: integer, low: number, high: number): perilune.NativeRecords
---@field cached fun(self): perilune.NativeRecords
---@field bucket fun(self, field: string, batch: integer, seed: integer): perilune.NativeRecords
---@field pack fun(self, options: table): perilune.NativeRecords
---@field fit_columns fun(self, numbers: string[], categories: string[]): {count: integer, mean: number, deviation: number}[], (string|integer|boolean)[][]
---@field reader fun(self, pads: table[], threads: integer?): string[], perilune.NativeBatches

---@class perilune.NativeBatches
---@field batch fun(self, rows: integer[], first: integer): perilune.Tensor... one for each column
---@field prefetch fun(self, rows: integer[], first: integer) starts to make a batch

---Opens files of records by a function of the library. Returns how many lines were skipped, if they are.
---@param op string the function: "data.jsonl"
---@param paths string[]
---@param options table its options, checked
---@return perilune.NativeRecords
---@return integer?
function native.record_file(op, paths, options)
  return bound.record_file(op, paths, options)
end

---Makes a dataset of a list of tables.
---@param list table<string, any>[]
---@return perilune.NativeRecords
function native.record_list(list)
  return bound.record_list(list)
end

---Makes a source of records that a function makes of their numbers.
---@param count integer
---@param fn fun(number: integer): table<string, any>
---@param seed integer
---@return perilune.NativeRecords
function native.generate(count, fn, seed)
  return bound.generate(count, fn, seed)
end

---Mixes labelled records with those that a model labels.
---@param labelled perilune.NativeRecords
---@param unlabelled perilune.NativeRecords
---@param field string the label
---@param share number
---@param seed integer
---@return perilune.NativeRecords
function native.pseudo(labelled, unlabelled, field, share, seed)
  return bound.pseudo(labelled, unlabelled, field, share, seed)
end

---Returns the records beneath a shuffle, or these.
---@param op string
---@param set perilune.NativeRecords
---@return perilune.NativeRecords
function native.unordered(op, set)
  return bound.unordered(op, set)
end

---@type userdata null in a list of a record
native.null = bound.null

---Mixes datasets by weights.
---@param parts {name: string, set: perilune.NativeRecords, weight: number}[]
---@param seed integer
---@param live boolean whether weights may be 0 and change
---@return perilune.NativeRecords
function native.mix(parts, seed, live)
  return bound.mix(parts, seed, live)
end

---Returns the vocabulary of the characters of a text, sorted.
---@param text string
---@return any vocab with :size(), :encode(text) -> i64 tensor, :corpus(text) -> NativeTokens, :decode(ids: integer[]) -> string
function native.chars(text)
  return bound.chars(text)
end

---Opens a tokenizer.json, or a folder that has one.
---@param path string
---@return perilune.Tokenizer
function native.tokenizer(path)
  return bound.tokenizer(path)
end

---Trains a tokenizer, or finds it in the cache.
---@param source perilune.NativeRecords|string[] records, or the paths of text files
---@param options {model: string, vocab: integer, field: string?, pattern: string, special: string[]?, min_frequency: integer, out: string?}
---@return perilune.Tokenizer
function native.train_tokenizer(source, options)
  return bound.train_tokenizer(source, options)
end

---@return perilune.Tokenizer of bytes
function native.byte_tokenizer()
  return bound.byte_tokenizer()
end

---@param text string
---@return perilune.Tokenizer of the characters of a text
function native.char_tokenizer(text)
  return bound.char_tokenizer(text)
end

---Returns samples `first` .. `first + count - 1` of the sample order: a permutation of 0 .. n - 1 for each epoch.
---The order is a pure function of (seed, epoch). The cost grows with `count` only, not with n.
---@param seed integer
---@param first integer
---@param count integer
---@param n integer samples in an epoch
---@return integer[] list
function native.shuffled(seed, first, count, n)
  return bound.shuffled(seed, first, count, n)
end

---Returns the permutation that a split divides; independent of the sample order of the same seed.
---@param seed integer
---@param n integer
---@return integer[] list
function native.split_order(seed, n)
  return bound.permutation(seed, 0, n, "split"):tolist()
end

---Draws the start positions of windows `first` .. `first + count - 1`: uniform in 0 .. n - length, a pure function of (seed, index).
---@param seed integer
---@param first integer
---@param count integer
---@param n integer length of the text
---@param length integer length of a window
---@return integer[]
function native.window_starts(seed, first, count, n, length)
  return bound.window_starts(seed, first, count, n, length)
end

---@class perilune.NativeImages the files of a folder or a list of images
---@field size fun(self): integer
---@field labels fun(self): string[] the columns of labels
---@field classes fun(self, column: string): string[]? of a column of labels; nil where they are numbers
---@field path fun(self, i: integer): string the file of image `i`, from 0
---@field reader fun(self, options: table): perilune.NativeReader pixels, threads?, and for random crops seed, scale_low, scale_high, ratio_low, ratio_high, else resize

---@class perilune.NativeReader
---@field batch fun(self, rows: integer[], first: integer): perilune.Tensor... x (N, 3, P, P) u8, and the columns of labels; `first` is the number of the first in the stream
---@field prefetch fun(self, rows: integer[], first: integer) starts to make a batch

---Lists the images of a folder that contains one folder for each class.
---@param path string
---@param classes string[]? names in the order of their ids; by default the names of the folders, sorted
---@return perilune.NativeImages
function native.images(path, classes)
  return bound.images(path, classes)
end

---Opens the images that records name.
---@param records perilune.NativeRecords
---@param options {path: string, labels: {column: string, field: string, classes: string[]?}[], folder: string?, threads: integer?}
---@return perilune.NativeImages
function native.image_list(records, options)
  return bound.image_list(records, options)
end

---Reads an IDX file.
---@param path string
---@param max_bytes integer?
---@return perilune.Tensor
function native.idx(path, max_bytes)
  return bound.idx(path, max_bytes)
end

---Reads a WAV file of `rate` samples a second.
---@param path string
---@param rate integer
---@return perilune.Tensor (N) f32
function native.wav(path, rate)
  return bound.wav(path, rate)
end

---Reads the WAV files of a folder of classes.
---@param path string
---@param classes string[]?
---@param rate integer
---@param samples integer of each
---@return perilune.Tensor x (N, samples) f32
---@return perilune.Tensor y (N) i64
---@return string[] classes
function native.sounds(path, classes, rate, samples)
  local x, y, names = bound.sounds(path, classes, rate, samples)
  return x, y, names
end

---Reads a PNG file as floats in [0, 1].
---@param path string
---@return perilune.Tensor (C, H, W) f32, C = 1, 3 or 4
function native.png(path)
  return bound.png(path)
end

---Writes a PNG file.
---@param path string
---@param image perilune.Tensor (C, H, W) u8, C = 1, 3 or 4
function native.save_png(path, image)
  return bound.save_png(path, image)
end

return native
