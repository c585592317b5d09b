"""Prints what --untrusted costs: the start of a command and a training step, confined and not, in turn.

    python3 tests/bench/confined.py target/release/perilune [cpu|cuda] [rounds]

A start is `perilune run` of an empty script. A step is the time of a run of 300 steps, without its start, by its number of steps.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

RECIPE = """
local pl = require "perilune"
local recipe = pl.recipe { name = "bench", params = { steps = 300 } }
function recipe.data()
  local x = pl.randn { 1024, 256 }
  return { train = pl.data.tensors { x = x, y = x:sum(1) }:batch(64) }
end
function recipe.model() return pl.nn.Sequential { pl.nn.Linear(256, 512), pl.nn.ReLU(), pl.nn.Linear(512, 1) } end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = 1e-3 }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"""


def main():
    program = os.path.abspath(sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    starts, steps = {False: [], True: []}, {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("empty.lua", "local pl = require 'perilune'\n"), ("bench.lua", RECIPE)):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        for k in range(rounds):
            for confined in (False, True):
                more = ["--device", device] + (["--untrusted"] if confined else [])
                began = time.perf_counter()
                subprocess.run([program, "run", "empty.lua", *more], cwd=folder, check=True, capture_output=True)
                starts[confined].append(time.perf_counter() - began)
                args = [program, "run", "bench.lua", "--json", "--run-dir", f"r{k}{confined}", *more]
                out = subprocess.run(args, cwd=folder, check=True, capture_output=True, text=True).stdout
                done = json.loads(out.splitlines()[-1])
                steps[confined].append(done["seconds"] / done["steps"])
    for name, values, unit, factor in (("start", starts, "ms", 1e3), ("step", steps, "us", 1e6)):
        free, held = (statistics.median(values[c]) * factor for c in (False, True))
        print(f"{name}: {free:.1f} {unit}, confined {held:.1f} {unit}, {held - free:+.1f} {unit} (medians of {rounds}, {device})")


if __name__ == "__main__":
    main()
