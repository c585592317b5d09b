-- Tries to read what the recipe may not. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# absolute_npy: read an array outside the recipe's folder by an absolute path
--# expect: error
local pl = require "perilune"
print(pl.load(OUTSIDE .. "/secret.npy"))

--# parent_npy: read an array above the recipe's folder
--# expect: error
local pl = require "perilune"
print(pl.load("../victim/secret.npy"))

--# dotted_parent: leave the folder through a name that begins inside
--# expect: error
local pl = require "perilune"
print(pl.load("inside/../../victim/secret.npy"))

--# link_to_file: follow a link to a file outside
--# expect: error
local pl = require "perilune"
print(pl.load("link.npy"))

--# link_to_folder: follow a link to a folder outside
--# expect: error
local pl = require "perilune"
print(pl.load("outside/secret.npy"))

--# link_of_link: follow a link to a link that leaves
--# expect: error
local pl = require "perilune"
print(pl.load("twice.npy"))

--# csv_outside: read a table outside
--# expect: error
local pl = require "perilune"
print(pl.data.csv("../victim/secret.csv"))

--# table_outside: read records of a table outside
--# expect: error
local pl = require "perilune"
print(pl.data.table("../victim/secret.csv"):get(0))

--# parquet_device: read a device as a columnar file
--# expect: error
local pl = require "perilune"
print(pl.data.parquet("zero.npy"))

--# json_fifo: wait for a pipe
--# expect: error
local pl = require "perilune"
print(pl.data.json("pipe.txt"))

--# csv_passwd: read a system file as a table
--# expect: error
local pl = require "perilune"
print(pl.data.csv("/etc/passwd", { delimiter = ":" }))

--# idx_outside: read an array outside
--# expect: error
local pl = require "perilune"
print(pl.data.idx("../victim/secret.csv"))

--# idx_passwd: read a system file as an array
--# expect: error
local pl = require "perilune"
print(pl.data.idx("/etc/passwd"))

--# wav_outside: read a sound outside
--# expect: error
local pl = require "perilune"
print(pl.data.wav("../victim/secret.csv", { rate = 8000 }))

--# sounds_outside: list a folder outside
--# expect: error
local pl = require "perilune"
print(pl.data.sounds("..", { rate = 8000, seconds = 1 }))

--# fifo_wav: wait for a pipe forever, as a sound
--# expect: error
local pl = require "perilune"
print(pl.data.wav("pipe.csv", { rate = 8000 }))

--# text_outside: read a text outside
--# expect: error
local pl = require "perilune"
print(pl.data.text("../victim/secret.txt"))

--# text_environment: read the environment of the process
--# expect: error
local pl = require "perilune"
print(pl.data.text("/proc/self/environ"))

--# text_proc_root: reach the root through /proc
--# expect: error
local pl = require "perilune"
print(pl.data.text("/proc/self/root/etc/hostname"))

--# text_proc_cwd: reach the parent through /proc
--# expect: error
local pl = require "perilune"
print(pl.data.text("/proc/self/cwd/../victim/secret.txt"))

--# text_descriptor: read an open descriptor of the process
--# expect: error
local pl = require "perilune"
print(pl.data.text("/proc/self/fd/0"))

--# tokenizer_outside: open a tokenizer outside
--# expect: error
local pl = require "perilune"
print(pl.data.tokenizer("../victim/secret.txt"))

--# images_root: list the root folder as a data set
--# expect: error
local pl = require "perilune"
print(pl.data.images("/", { pixels = 8 }))

--# images_outside: decode pictures outside
--# expect: error
local pl = require "perilune"
print(pl.data.images("../victim", { pixels = 8 }))

--# images_link: decode pictures through a link
--# expect: error
local pl = require "perilune"
print(pl.data.images("outside", { pixels = 8 }))

--# image_list_outside: name pictures outside in a list
--# expect: error
local pl = require "perilune"
print(pl.data.images(pl.data.list { { file = "../victim/secret.png" } }, { path = "file", pixels = 8 }))

--# image_list_absolute: name a file of the system in a list of pictures
--# expect: error
local pl = require "perilune"
print(pl.data.images(pl.data.list { { file = "/etc/passwd" } }, { path = "file", pixels = 8 }))

--# image_list_link: name a picture through a link in a list
--# expect: error
local pl = require "perilune"
print(pl.data.images(pl.data.list { { file = "outside/secret.txt" } }, { path = "file", pixels = 8 }))

--# image_list_folder: start the paths of a list outside
--# expect: error
local pl = require "perilune"
print(pl.data.images(pl.data.list { { file = "secret.txt" } }, { path = "file", folder = "../victim", pixels = 8 }))

--# train_tokenizer_outside: train a tokenizer on a secret
--# expect: error
local pl = require "perilune"
print(pl.data.train_tokenizer("../victim/secret.txt", { vocab = 300 }))

--# nul_in_path: end a path early with a zero byte
--# expect: error
local pl = require "perilune"
print(pl.load("ok.npy\0.npy"))

--# long_path: overflow a path
--# expect: error
local pl = require "perilune"
print(pl.load(("a/"):rep(100000) .. "x.npy"))

--# fifo_npy: wait for a pipe forever
--# expect: error
local pl = require "perilune"
print(pl.load("pipe.npy"))

--# fifo_csv: wait for a pipe forever, as a table
--# expect: error
local pl = require "perilune"
print(pl.data.csv("pipe.csv"))

--# fifo_text: wait for a pipe forever, as a text
--# expect: error
local pl = require "perilune"
print(pl.data.text("pipe.txt"))

--# device_zero: read an endless device
--# expect: error
local pl = require "perilune"
print(pl.data.text("zero.txt"))

--# device_zero_npy: read an endless device as an array
--# expect: error
local pl = require "perilune"
print(pl.load("zero.npy"))

--# device_tty: read the terminal
--# expect: error
local pl = require "perilune"
print(pl.data.text("/dev/tty"))

--# folder_as_file: read a folder as a file
--# expect: error
local pl = require "perilune"
print(pl.load("folder.npy"))

--# socket_as_file: read a socket
--# expect: error
local pl = require "perilune"
print(pl.data.text("socket.txt"))

--# shards_outside: name a shard outside in an index
--# expect: error
local pl = require "perilune"
print(pl.load("evil.safetensors.index.json"))

--# suggestion_lists: list a foreign folder through a suggestion
--# expect: error
local pl = require "perilune"
print(pl.load("../victim/secre.npy"))

--# suggestion_home: list the home folder through a suggestion
--# expect: error
local pl = require "perilune"
print(pl.data.csv("../victim/secret.cs"))

--# native_binding: reach the bindings below the library
--# expect: error
local pl = require "perilune"
print(pl.native.load("../victim/secret.npy"))

--# native_by_require: require the bindings below the library
--# expect: error
print(require "perilune.native")

--# require_parent: load a module above the recipe
--# expect: error
print(require "../victim/secret")

--# require_dotted: load a module above the recipe, spelled with dots
--# expect: error
print(require "...victim.secret")

--# require_absolute: load a module by an absolute path
--# expect: error
print(require(OUTSIDE .. "/secret"))

--# require_link: load a module through a link
--# expect: error
print(require "outside.secret")

--# require_fifo: wait for a pipe as a module
--# expect: error
print(require "pipe")

--# require_nul: end a module name early
--# expect: error
print(require "secret\0x")

--# require_self: require the recipe itself forever
--# expect: error
return require "attack"

--# chunk_name_file: show a file's line through the chunk name of an error
--# expect: error
local f = load("error('boom')", "@" .. OUTSIDE .. "/secret.txt")
f()

--# chunk_name_library: pass for the library
--# expect: error
local f = load("error('boom')", "@perilune/nn/linear.lua")
f()

--# chunk_name_fifo: make the message wait for a pipe
--# expect: error
local f = load("error('boom')", "@pipe.txt")
f()

--# chunk_name_device: make the message read a device
--# expect: error
local f = load("error('boom')", "@/dev/zero")
f()

--# dofile: run a file outside
--# expect: error
print(dofile(OUTSIDE .. "/secret.lua"))

--# loadfile: load a file outside
--# expect: error
print(loadfile(OUTSIDE .. "/secret.lua"))

--# io_open: open a file with Lua's io
--# expect: error
print(io.open("/etc/passwd"):read "a")

--# io_by_require: require Lua's io
--# expect: error
print(require "io".open("/etc/passwd"):read "a")

--# io_by_loaded: take io out of package.loaded
--# expect: error
print(package.loaded.io.open("/etc/passwd"))

--# io_by_string: find io behind the metatable of strings
--# expect: error
local G = getmetatable("").__index
for k, v in pairs(G) do assert(k ~= "open" and k ~= "execute", k) end
print(G.open("/etc/passwd"))

--# debug_registry: walk the registry
--# expect: error
print(debug.getregistry())

--# debug_upvalue: change an upvalue of the library
--# expect: error
print(debug.setupvalue(require("perilune").load, 1, nil))

--# os_getenv: read the environment
--# expect: error
print(os.getenv "HOME")

--# load_run_outside: load a run outside the recipe's folder by an absolute path
--# expect: error
local pl = require "perilune"
print(pl.load_run(OUTSIDE).recipe)

--# load_run_parent: load a run above the recipe's folder
--# expect: error
local pl = require "perilune"
print(pl.load_run("../victim").recipe)

--# load_run_options: load a run at a step that is none
--# expect: error
local pl = require "perilune"
print(pl.load_run(".", { at = -9007199254740993 }).recipe)
