local pl = require "perilune"
os.execute("ls")
