-- data/init.lua: collects the dataset readers: CSV files, texts, tokenizers, tensors, folders of images and sounds, IDX arrays.
--
--   local set = data.csv("data/digits.csv.gz"):tensors { x = { columns = {0, 64} }, y = { column = 64, dtype = "i64" } }
--   return { train = set:split("train", 0.8, 1):shuffle(1):batch(64), valid = set:split("valid", 0.2, 1):batch(256) }

return {
  csv = require("perilune.data.rows").csv,
  text = require("perilune.data.text").text,
  sequence = require("perilune.data.text").sequence,
  tokens = require("perilune.data.text").tokens,
  token_files = require("perilune.data.text").token_files,
  language = require("perilune.data.text").language,
  jsonl = require("perilune.data.sources").jsonl,
  lines = require("perilune.data.sources").lines,
  parquet = require("perilune.data.sources").parquet,
  arrow = require("perilune.data.sources").arrow,
  table = require("perilune.data.sources").table,
  json = require("perilune.data.sources").json,
  records = require("perilune.data.sources").records,
  list = require("perilune.data.sources").list,
  mix = require("perilune.data.sources").mix,
  null = require("perilune.data.native").null,
  tokenizer = require("perilune.data.tokenizer").open,
  train_tokenizer = require("perilune.data.tokenizer").train,
  bytes = require("perilune.data.tokenizer").bytes,
  chars = require("perilune.data.tokenizer").chars,
  images = require("perilune.data.images").images,
  tensors = require("perilune.data.set").tensors,
  pad = require("perilune.data.pad").pad,
  bucket = require("perilune.data.pad").bucket,
  idx = require("perilune.data.arrays").idx,
  wav = require("perilune.data.arrays").wav,
  sounds = require("perilune.data.arrays").sounds,
  png = require("perilune.data.image").png,
  save_png = require("perilune.data.image").save_png,
}
