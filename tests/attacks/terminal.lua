-- Tries to send control characters to the terminal. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# print: clear the screen by a print
--# expect: fine
print("\27[2J\27]0;owned\7\155[31m")

--# error: move the cursor in an error
--# expect: error
error("\27[1A\27[2Kwarning: all is well\r")

--# carriage: overwrite the line by a carriage return
--# expect: fine
print("failed\rpassed")

--# bidirectional: turn the text around
--# expect: fine
print("\u{202e}drowssap")

--# invalid_utf8: print bytes that are no text
--# expect: fine
print("\xff\xfe\x1b[31m")

--# index_name: put control characters into a key
--# expect: error
local pl = require "perilune"
print(pl["\27[2J"])

--# path: put control characters into a path
--# expect: error
local pl = require "perilune"
pl.load("\27[2J\7.npy")

--# chunk: put control characters into a chunk name
--# expect: error
load("error(1)", "=\27[2J")()

--# metric: put control characters into a metric
--# expect: any
return require "base" { loss = function(m, b) return m(b.x):mean(), { ["\27[2J\na"] = 1 } end }

--# param: put control characters into a param
--# expect: any
return require "base" { params = { steps = 3, ["\27[2J"] = "\27[31m" } }

--# name: put control characters into the name
--# expect: any
return require "base" { name = "\27[2J\27[31mx" }
