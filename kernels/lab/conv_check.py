"""Compares convolutions and batch norm on a GPU with PyTorch: values, gradients, and equal bits in two processes.

    python3 kernels/lab/conv_check.py path/to/perilune [device]

Perilune's and PyTorch's results are both compared with PyTorch's in f64 on the CPU. Perilune's error may be at most twice
that of PyTorch on the same device, plus a rounding error of the largest element.
"""

import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

PERILUNE = os.path.abspath(sys.argv[1])
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda:0"

# x, weight, stride, padding, dilation, groups, bias
CASES = [
    ((8, 64, 14, 14), (128, 64, 1, 1), 1, 0, 1, 1, False),
    ((8, 64, 14, 14), (64, 64, 3, 3), 1, 1, 1, 1, False),
    ((8, 64, 15, 13), (128, 64, 3, 3), 2, 1, 1, 1, False),
    ((8, 256, 14, 14), (512, 256, 1, 1), 2, 0, 1, 1, False),
    ((4, 3, 64, 64), (64, 3, 7, 7), 2, 3, 1, 1, False),
    ((4, 16, 12, 12), (32, 16, 3, 3), 1, 1, 1, 1, True),
    ((2, 5, 9, 11), (7, 5, 3, 2), 1, 0, 1, 1, True),
    ((2, 8, 16, 16), (16, 8, 3, 3), 1, 2, 2, 1, False),
    ((2, 32, 10, 10), (32, 8, 3, 3), 1, 1, 1, 4, False),
    ((2, 16, 10, 10), (16, 1, 3, 3), 1, 1, 1, 16, True),
    ((1, 1, 28, 28), (8, 1, 5, 5), 1, 2, 1, 1, True),
    ((3, 24, 7, 7), (10, 24, 7, 7), 1, 0, 1, 1, False),
]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
EPS = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}

LUA = """
local pl = require "perilune"
local p = pl.params {{ out = "out.npz" }}
local given, results = pl.load("in.npz"), {{}}
local cases = {{ {cases} }}
for i, c in ipairs(cases) do
  for _, dtype in ipairs {{ "bf16", "f16", "f32" }} do
    local function take(name) local t = given[name .. i]; return t and t:to(dtype) end
    local x, w, b, g = pl.eval(take "x"), pl.eval(take "w"), take "b", pl.eval(take "g")
    if b then b = pl.eval(b) end
    local function work()
      local y = pl.conv2d(x, w, b, {{ stride = c[1], padding = c[2], dilation = c[3], groups = c[4] }})
      local of = {{ x, w, b }}
      local grads = {{ pl.grad((y:to("f32") * g:to("f32")):sum(), of) }}
      return y:to("f32"), grads[1]:to("f32"), grads[2]:to("f32"), b and grads[3]:to("f32") or nil
    end
    local y, dx, dw, db
    for _ = 1, 4 do y, dx, dw, db = pl.step(work) end
    local at = dtype .. "_" .. i
    results["y_" .. at], results["dx_" .. at], results["dw_" .. at] = y, dx, dw
    if db then results["db_" .. at] = db end
  end
end
-- Batch norm over a convolution, relu and a sum: what a block of a ResNet does.
for _, dtype in ipairs {{ "bf16", "f32" }} do
  local x, w, v, s, b, g = pl.eval(given.x1:to(dtype)), pl.eval(given.w2:to(dtype)), pl.eval((given.w2:to(dtype) * 0.5):detach()), given.s, given.t, given.g2
  local function work()
    local function norm(y) return (pl.batch_norm_train(y, s, b)) end
    local y = norm(pl.conv2d(x, w, nil, {{ padding = 1 }})):relu()
    y = pl.max_pool2d(y, 3, {{ stride = 1, padding = 1 }})
    y = (norm(pl.conv2d(y, v, nil, {{ padding = 1 }})) + x):relu()
    local d = {{ pl.grad((y:to("f32") * g):sum(), {{ x, w, v, s, b }}) }}
    return y:to("f32"), d[1]:to("f32"), d[2]:to("f32"), d[3]:to("f32"), d[4], d[5]
  end
  local out
  for _ = 1, 4 do out = {{ pl.step(work) }} end
  for k, t in ipairs(out) do results[("block%d_%s"):format(k, dtype)] = t end
end
pl.save(p.out, results)
"""


def inputs():
    rng = np.random.default_rng(1)
    out = {}
    for i, (xs, ws, stride, padding, dilation, groups, bias) in enumerate(CASES, 1):
        out[f"x{i}"] = rng.standard_normal(xs).astype(np.float32)
        out[f"w{i}"] = (rng.standard_normal(ws) / np.sqrt(np.prod(ws[1:]))).astype(np.float32)
        if bias:
            out[f"b{i}"] = rng.standard_normal(ws[0]).astype(np.float32)
        y = F.conv2d(torch.tensor(out[f"x{i}"]), torch.tensor(out[f"w{i}"]), None, stride, padding, dilation, groups)
        out[f"g{i}"] = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    out["s"], out["t"] = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    return out


def rival(given, i, case, dtype, device, wide):
    """y, dx, dw, db with operands rounded to `dtype`, computed in f64 if `wide`."""
    _, _, stride, padding, dilation, groups, bias = case
    names = ["x", "w"] + (["b"] if bias else [])
    t = [torch.tensor(given[f"{n}{i}"], device=device).to(dtype) for n in names]
    if wide:
        t = [a.double() for a in t]
    elif dtype != torch.float32:
        t[:2] = [a.contiguous(memory_format=torch.channels_last) for a in t[:2]]
    for a in t:
        a.requires_grad_()
    y = F.conv2d(t[0], t[1], t[2] if bias else None, stride, padding, dilation, groups)
    g = torch.tensor(given[f"g{i}"], device=device).to(dtype)
    grads = torch.autograd.grad(y, t, g.to(y.dtype))
    return [a.detach().double().cpu() for a in (y, *grads)]


def block(given, dtype, device, wide):
    x, w, v = (torch.tensor(given[n], device=device).to(dtype) for n in ("x1", "w2", "w2"))
    v = v * 0.5
    s, b = (torch.tensor(given[n], device=device) for n in ("s", "t"))
    if wide:
        x, w, v, s, b = (t.double() for t in (x, w, v, s, b))
    for t in (x, w, v, s, b):
        t.requires_grad_()
    norm = lambda y: F.batch_norm(y, None, None, s.to(y.dtype) if wide else s, b.to(y.dtype) if wide else b, True)
    y = norm(F.conv2d(x, w, padding=1)).relu()
    y = F.max_pool2d(y, 3, 1, 1)
    y = (norm(F.conv2d(y, v, padding=1)) + x).relu()
    g = torch.tensor(given["g2"], device=device)
    grads = torch.autograd.grad((y.to(torch.float64 if wide else torch.float32) * g).sum(), (x, w, v, s, b))
    return [a.detach().double().cpu() for a in (y, *grads)]


def run(folder, out):
    command = [PERILUNE, "run", "check.lua", "--device", DEVICE, "--set", f"out={out}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return np.load(os.path.join(folder, out))


def main():
    given = inputs()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    there = "cuda" if DEVICE.startswith("cuda") else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        np.savez(os.path.join(folder, "in.npz"), **given)
        cases = ", ".join("{ %d, %d, %d, %d }" % c[2:6] for c in CASES)
        with open(os.path.join(folder, "check.lua"), "w") as f:
            f.write(LUA.format(cases=cases))
        ours, again = run(folder, "a.npz"), run(folder, "b.npz")
        bad = 0
        differ = [k for k in ours.files if ours[k].tobytes() != again[k].tobytes()]
        bad += len(differ)
        print(f"{len(ours.files)} results, {len(differ)} differ between two processes {differ[:5]}")
        for name, dtype in DTYPES.items():
            jobs = [(f"case {i}", ["y", "dx", "dw", "db"], f"{{}}_{name}_{i}", rival, (given, i, c)) for i, c in enumerate(CASES, 1)]
            if name != "f16":
                jobs.append(("block", [f"block{k}" for k in range(1, 7)], f"{{}}_{name}", block, (given,)))
            for title, parts, pattern, make, args in jobs:
                exact, theirs = make(*args, dtype, "cpu", True), make(*args, dtype, there, False)
                for part, e, t in zip(parts, exact, theirs):
                    mine = torch.tensor(ours[pattern.format(part)]).double()
                    scale = e.abs().max().item() + 1e-30
                    # Rounding may change the choice of a maximum or a relu, so the block is judged by its mean error.
                    err = (lambda a: (a - e).abs().mean().item() / e.abs().mean().item()) if title == "block" else (lambda a: (a - e).abs().max().item() / scale)
                    m, r = err(mine), err(t)
                    ok = m <= 2 * r + EPS[name]
                    bad += not ok
                    print(f"{'ok ' if ok else 'BAD'} {name} {title} {part}: {m:.2e}, PyTorch {r:.2e}")
    print("all good" if not bad else f"{bad} bad")
    sys.exit(bool(bad))


main()
