-- Tries to write what the recipe may not. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# home_png: replace a start-up file by a picture
--# expect: error
local pl = require "perilune"
pl.data.save_png(OUTSIDE .. "/.profile", pl.zeros { 4, 4, 3 })

--# home_png_ending: write a picture to the home folder
--# expect: error
local pl = require "perilune"
pl.data.save_png(OUTSIDE .. "/x.png", pl.zeros { 4, 4, 3 })

--# parent_npy: write above the recipe's folder
--# expect: error
local pl = require "perilune"
pl.save("../victim/x.npy", pl.ones { 2 })

--# over_secret: replace a file outside
--# expect: error
local pl = require "perilune"
pl.save("../victim/secret.npy", pl.ones { 2 })

--# over_link: write through a link
--# expect: error
local pl = require "perilune"
pl.save("link.npy", pl.ones { 2 })

--# through_folder_link: write through a linked folder
--# expect: error
local pl = require "perilune"
pl.save("outside/x.npy", pl.ones { 2 })

--# over_pipe: wait for a reader of a pipe
--# expect: error
local pl = require "perilune"
pl.save("pipe.npy", pl.ones { 2 })

--# over_device: write to a device
--# expect: error
local pl = require "perilune"
pl.save("zero.npy", pl.ones { 2 })

--# over_folder: replace a folder
--# expect: error
local pl = require "perilune"
pl.save("folder.npy", pl.ones { 2 })

--# over_recipe: replace the recipe by a picture
--# expect: error
local pl = require "perilune"
pl.data.save_png("attack.lua", pl.zeros { 4, 4, 3 })

--# lua_ending: write a Lua file that a later run loads
--# expect: error
local pl = require "perilune"
pl.save("base.lua", { x = pl.ones { 2 } })

--# hidden: write a hidden start-up file
--# expect: error
local pl = require "perilune"
pl.save(".profile", { x = pl.ones { 2 } })

--# nul: cut the ending off with a zero byte
--# expect: error
local pl = require "perilune"
pl.save(OUTSIDE .. "/.profile\0.npy", pl.ones { 2 })

--# proc_cwd: write through /proc
--# expect: error
local pl = require "perilune"
pl.save("/proc/self/cwd/../victim/x.npy", pl.ones { 2 })

--# dev_shm: write to shared memory
--# expect: error
local pl = require "perilune"
pl.save("/dev/shm/perilune-attack.npy", pl.ones { 2 })

--# tmp: write to the temporary folder
--# expect: error
local pl = require "perilune"
pl.save(TEMP .. "/x.npy", pl.ones { 2 })

--# safetensors_outside: write named tensors outside
--# expect: error
local pl = require "perilune"
pl.save(OUTSIDE .. "/x.safetensors", { a = pl.ones { 2 } })

--# npz_outside: write an archive outside
--# expect: error
local pl = require "perilune"
pl.save(OUTSIDE .. "/x.npz", { ["../../evil"] = pl.ones { 2 } })

--# in_model: write outside while the model is built
--# expect: error
local pl = require "perilune"
return require "base" { model = function() pl.save("../victim/x.npy", pl.ones { 2 }); return pl.nn.Linear(4, 1) end }

--# in_step: write outside in a step
--# expect: error
local pl = require "perilune"
return require "base" { loss = function(m, b) pl.data.save_png("../victim/x.png", pl.zeros { 4, 4, 3 }); return m(b.x):mean() end }

--# in_gc: write outside in a finaliser
--# expect: any
local pl = require "perilune"
setmetatable({}, { __gc = function() pl.save("../victim/x.npy", pl.ones { 2 }) end })
collectgarbage() collectgarbage()

--# in_close: write outside when a variable is closed
--# expect: error
local pl = require "perilune"
do local x <close> = setmetatable({}, { __close = function() pl.save("../victim/x.npy", pl.ones { 2 }) end }) end

--# os_remove: remove a file
--# expect: error
os.remove(OUTSIDE .. "/secret.txt")

--# os_execute: run a program
--# expect: error
os.execute("touch " .. OUTSIDE .. "/x")

--# io_popen: run a program with a pipe
--# expect: error
io.popen("touch " .. OUTSIDE .. "/x")

--# package_loadlib: load a C library
--# expect: error
print(package.loadlib("/lib/x86_64-linux-gnu/libc.so.6", "system"))

--# run_name: leave the runs folder by the recipe's name
--# expect: any
return require "base" { name = "../../victim/run" }

--# run_name_control: put control characters into the run's name
--# expect: any
return require "base" { name = "a\27[2J\nb/../c" }

--# tokenizer_outside: write a trained tokenizer outside
--# expect: error
local pl = require "perilune"
pl.data.train_tokenizer(pl.data.list { { text = "some words" } }, { vocab = 300, out = "../victim/tok.json" })

--# tokenizer_link: write a trained tokenizer through a link
--# expect: error
local pl = require "perilune"
pl.data.train_tokenizer(pl.data.list { { text = "some words" } }, { vocab = 300, out = "outside/tok.json" })
