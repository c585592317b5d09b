"""Measures readers of data beside their rivals on the same files, in turns in one run.

    python3 tests/bench/data.py PERILUNE [CASE...]      PERILUNE is the program; needs NumPy

token_windows: batches of 32 windows of 1,025 tokens at random places of a file of 256M u16 tokens that the page cache holds, as i64. The
rival is a NumPy memory map, read as nanoGPT's get_batch does. A figure is the median over rounds, in millions of tokens a second.
"""
import os, statistics, subprocess, sys, tempfile, time

import numpy as np

ROUNDS, BATCHES, BATCH, SPAN = 7, 2000, 32, 1025
OURS = """
local pl = require "perilune"
local loader = pl.data.token_files("%s"):windows { length = %d, batch = %d, seed = 1 }
local function read(first, count)
  for k = first, first + count - 1 do pl.step(function() loader:batch_at(k) end) end
end
read(0, 100)
local start = pl.clock()
read(100, %d)
print(pl.clock() - start)
"""


def ours(program, folder, path):
    script = os.path.join(folder, "windows.lua")
    with open(script, "w") as out:
        out.write(OURS % (path, SPAN - 1, BATCH, BATCHES))
    done = subprocess.run([program, "run", script, "--device", "cpu"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


def rival(path, rng):
    def batch():
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = rng.integers(0, len(data) - SPAN + 1, BATCH)
        return np.stack([data[i : i + SPAN].astype(np.int64) for i in starts])

    for _ in range(100):
        batch()
    start = time.perf_counter()
    for _ in range(BATCHES):
        batch()
    return time.perf_counter() - start


def token_windows(program):
    with tempfile.TemporaryDirectory() as folder:
        path, rng = os.path.join(folder, "tokens.bin"), np.random.default_rng(1)
        rng.integers(0, 50257, 1 << 28).astype(np.uint16).tofile(path)
        seconds = [(ours(program, folder, path), rival(path, rng)) for _ in range(ROUNDS)]
    tokens = BATCHES * BATCH * SPAN / 1e6
    a, b = (statistics.median(tokens / s for s in column) for column in zip(*seconds))
    print(f"token_windows  ours {a:.1f}  NumPy memmap {b:.1f} million tokens a second  ratio {a / b:.2f}")


CASES = {"token_windows": token_windows}

if __name__ == "__main__":
    if len(sys.argv) < 2 or any(name not in CASES for name in sys.argv[2:]):
        raise SystemExit(__doc__)
    for name in sys.argv[2:] or CASES:
        CASES[name](sys.argv[1])
