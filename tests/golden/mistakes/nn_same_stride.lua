local nn = require("perilune").nn
local conv = nn.Conv2d(3, 4, 3, { padding = "same", stride = 2 })
