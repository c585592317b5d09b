-- Tries to reach the system by every way that a recipe has: sockets, processes, /proc, other users' files, links and races.
-- The harness is repl/tests/attacks.rs: each block is a script of its own.

--# socket_modules: find a library of sockets
--# expect: error
local found = {}
for _, name in ipairs { "socket", "socket.core", "socket.http", "ssl", "posix", "posix.unistd", "luv", "lfs", "ffi", "jit", "cffi", "alien" } do
  if pcall(require, name) then found[#found + 1] = name end
end
error(#found == 0 and "none is there" or nil)

--# socket_addresses: connect to this computer and to the metadata of a cloud
--# expect: error
local pl, hash = require "perilune", "sha256:" .. ("0"):rep(64)
local hosts = { "http://127.0.0.1:22/", "http://localhost:11434/api", "http://[::1]:6379/", "http://169.254.169.254/latest/meta-data/" }
for _, at in ipairs(hosts) do assert(not pcall(pl.data.lines, at, { hash = hash })) end
pl.data.lines("http://127.0.0.1:22/", { hash = hash })

--# address_schemes: name files and programs by addresses
--# expect: error
local pl, hash = require "perilune", "sha256:" .. ("0"):rep(64)
local schemes = { "file:///etc/passwd", "FILE://localhost/etc/passwd", "ftp://localhost/x", "gopher://127.0.0.1:6379/_x", "data:text/plain,x", "unix:///run/docker.sock", "ssh://localhost/x" }
for _, at in ipairs(schemes) do assert(not pcall(pl.data.lines, at, { hash = hash })) end
pl.data.text "file:///etc/passwd"

--# address_header: put lines into a request
--# expect: error
local pl = require "perilune"
pl.data.lines("https://localhost/\r\nHost: evil\r\nX: y", { hash = "sha256:" .. ("0"):rep(64) })

--# address_user: hide the host behind a user
--# expect: error
local pl = require "perilune"
pl.data.lines("https://huggingface.co@127.0.0.1/x", { hash = "sha256:" .. ("0"):rep(64) })

--# abstract_socket: open sockets of the system as files
--# expect: error
local pl = require "perilune"
for _, at in ipairs { "/run/docker.sock", "/var/run/dbus/system_bus_socket", "socket.txt", "/run/systemd/private", "\0abstract" } do
  assert(not pcall(pl.data.text, at))
end
pl.data.text "socket.txt"

--# process_modules: start a program by everything that has an old name
--# expect: error
for _, call in ipairs { "os.execute('true')", "io.popen('true')", "os.exit(0)", "os.tmpname()", "package.loadlib('libc.so.6', 'system')" } do
  assert(not pcall(load(call)))
end
error "none of them is there"

--# process_memory: read and write the memory of processes
--# expect: error
local pl = require "perilune"
for _, at in ipairs { "/proc/self/mem", "/proc/1/mem", "/proc/self/maps", "/proc/1/environ", "/proc/1/cmdline", "/proc/kcore", "/dev/mem" } do
  assert(not pcall(pl.data.text, at))
end
pl.save("/proc/self/mem.npy", pl.ones { 1 })

--# process_list: list the processes
--# expect: error
local pl = require "perilune"
for pid = 1, 300 do assert(not pcall(pl.data.lines, "/proc/" .. pid .. "/status")) end
pl.data.images("/proc", { pixels = 8 })

--# process_settings: change settings of the kernel
--# expect: error
local pl = require "perilune"
for _, at in ipairs { "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj", "/sys/fs/cgroup/cgroup.procs", "/proc/sysrq-trigger" } do
  assert(not pcall(pl.save, at, pl.ones { 1 }))
  assert(not pcall(pl.save, at .. ".npy", pl.ones { 1 }))
end
pl.data.text "/proc/sys/kernel/core_pattern"

--# threads_names: find the threads of the program
--# expect: error
local pl = require "perilune"
for _, at in ipairs { "/proc/self/task", "/proc/thread-self/comm", "/proc/self/fdinfo/0", "/dev/fd/0", "/dev/stdin" } do assert(not pcall(pl.data.text, at)) end
pl.data.text "/dev/stdin"

--# users_files: read what belongs to other users and to the person
--# expect: error
local pl = require "perilune"
local all = { "/root/.ssh/id_rsa", "/etc/shadow", "/home", "/var/log/syslog", "~/.aws/credentials", "$HOME/.profile", "../victim/.profile", OUTSIDE .. "/secret.csv" }
for _, at in ipairs(all) do
  for _, read in ipairs { pl.data.text, pl.data.lines, pl.data.csv, pl.load } do assert(not pcall(read, at)) end
end
pl.data.text(OUTSIDE .. "/.profile")

--# grant_by_text: claim grants in every way that a recipe has
--# expect: error
local pl = require "perilune"
pl.allow_read, pl.untrusted = OUTSIDE, false
rawset(_G, "arg", { "--allow-read=/" })
pl.data.text(OUTSIDE .. "/secret.txt")

--# hard_link: make a tensor file that shares the bytes of a secret
--# expect: error
local pl = require "perilune"
for _, to in ipairs { OUTSIDE .. "/secret.npy", "../victim/secret.npy", "link.npy", "twice.npy" } do
  assert(not pcall(pl.save, to, pl.ones { 1 }))
  assert(not pcall(pl.load, to))
end
pl.load "twice.npy"

--# rename_race: save over a name while it is read, many times
--# expect: any
local pl = require "perilune"
for i = 1, 200 do
  pcall(pl.save, "runs/race.npy", pl.ones { 8 })
  pcall(pl.load, "runs/race.npy")
  pcall(pl.save, "runs/../../victim/race.npy", pl.ones { 8 })
end
assert(not pcall(pl.load, "runs/../../victim/secret.npy"))

--# part_files: name the temporary files of a save
--# expect: any
local pl = require "perilune"
for _, name in ipairs { "x.npy.part", "x.npy~", ".x.npy.tmp", "x.npy.1.part" } do pcall(pl.save, "outside/" .. name .. ".npy", pl.ones { 1 }) end

--# run_directory_links: use the run directory as a way out
--# expect: any
local recipe = require "base" {}
local pl = require "perilune"
recipe.on_step = function(run)
  for _, up in ipairs { "/../../../victim/x.npy", "/../../victim/x.npy", "/./../x/../../../victim/x.npy" } do pcall(pl.save, run.dir .. up, pl.ones { 1 }) end
  pcall(pl.save, run.dir .. "/run.json", { x = pl.ones { 1 } })
  pcall(pl.save, run.dir .. "/recipe/base.lua", { x = pl.ones { 1 } })
end
return recipe

--# cache_poison: put a module or a kernel where the next run finds it
--# expect: any
local pl = require "perilune"
for _, at in ipairs { "../cache/perilune/kernels/x.npy", "../cache/perilune/products/x.npy", TEMP .. "/x.npy", "/tmp/perilune-attack.npy", "/dev/shm/perilune-attack.npy", "/var/tmp/perilune-attack.npy" } do
  assert(not pcall(pl.save, at, pl.ones { 1 }))
end

--# requires: load modules by names that lead elsewhere
--# expect: error
for _, name in ipairs { "/proc/self/cwd/base", "..base", ".base", "outside/secret", "outside.secret", "base\0x", "perilune.native", "perilune.run_bindings", "https://localhost/x", ("a."):rep(5000) .. "a" } do
  assert(not pcall(require, name))
end
require "outside.secret"

--# signals: raise signals by what ends a process
--# expect: any
local f = function() error(setmetatable({}, { __gc = function() error "again" end, __tostring = function() error "and again" end })) end
for i = 1, 10000 do pcall(f) end

--# time_source: measure time more finely than the language has it
--# expect: any
local pl = require "perilune"
local ok, clock = pcall(function() return os.clock() end)
print(ok, #tostring(clock))

--# other_run: load the run of another user
--# expect: error
local pl = require "perilune"
for _, at in ipairs { "../victim", "/", "runs/../../victim", "outside" } do assert(not pcall(pl.load_run, at)) end
pl.load_run "outside"
