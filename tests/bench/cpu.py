#!/usr/bin/env python3
"""Ours against PyTorch eager on the CPU, same threads, from one run.

    cargo build --release && python3 tests/bench/cpu.py [case ...]

Needs PyTorch (pip install torch). The two take turns, round by round, so that a drifting machine hits both; each
figure is the median over rounds of the median within a round. The issue's goals stand in the last column.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent


def chain(n):
    x, y = torch.randn(n), torch.randn(n)
    return lambda: (torch.relu((x * 1.5 + y) * x - 0.5) * y + x) * 0.25 - y


def layer_norm_grad():
    x, w, b = (t.requires_grad_() for t in (torch.randn(4096, 768), torch.ones(768), torch.zeros(768)))
    g = torch.randn(4096, 768)
    return lambda: torch.autograd.grad((F.layer_norm(x, (768,), w, b) * g).sum(), (x, w, b))


def cross_entropy():
    x, t = torch.randn(512, 32768).requires_grad_(), torch.randint(0, 32768, (512,))
    return lambda: torch.autograd.grad(F.cross_entropy(x, t), x)


def unary(shape, fn):
    x = torch.randn(shape)
    return lambda: fn(x)


def matmul(m, k, n):
    a, b = torch.randn(m, k), torch.randn(k, n)
    return lambda: a @ b


def adamw():
    ws = [torch.randn(512, 512).requires_grad_() for _ in range(16)]
    for w in ws:
        w.grad = torch.randn(512, 512)
    opt = torch.optim.AdamW(ws, lr=1e-3, weight_decay=0.1, fused=True)
    return opt.step


class Block(torch.nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = torch.nn.LayerNorm(c, bias=False), torch.nn.LayerNorm(c, bias=False)
        self.qkv, self.out = torch.nn.Linear(c, 3 * c, bias=False), torch.nn.Linear(c, c, bias=False)
        self.up, self.down = torch.nn.Linear(c, 4 * c, bias=False), torch.nn.Linear(4 * c, c, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def chargpt():
    v, c, t, b = 65, 128, 64, 12
    tokens, positions = torch.nn.Embedding(v, c), torch.nn.Embedding(t, c)
    blocks, norm = torch.nn.ModuleList(Block(c, 4) for _ in range(4)), torch.nn.LayerNorm(c, bias=False)
    params = [p for m in (tokens, positions, blocks, norm) for p in m.parameters()]
    opt = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)
    x, y, at = torch.randint(0, v, (b, t)), torch.randint(0, v, (b * t,)), torch.arange(t)

    def step():
        h = tokens(x) + positions(at)
        for block in blocks:
            h = block(h)
        loss = F.cross_entropy((norm(h) @ tokens.weight.T).view(-1, v), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()

    return step


CASES = {  # name: (PyTorch's side, goal: theirs / ours)
    "chargpt": (chargpt, 1.5),
    "chain": (lambda: chain(4 * 1024 * 1024), 2.0),
    "chain_small": (lambda: chain(65536), 2.0),
    "gelu": (lambda: unary((1024, 4096), F.gelu), 1.0),
    "softmax": (lambda: unary((4096, 1024), lambda x: x.softmax(-1)), 1.5),
    "layer_norm": (lambda: unary((4096, 768), lambda x: F.layer_norm(x, (768,), torch.ones(768), torch.zeros(768))), 1.5),
    "layer_norm_grad": (layer_norm_grad, 1.5),
    "cross_entropy": (cross_entropy, 1.5),
    "matmul_64": (lambda: matmul(64, 64, 64), 0.85),
    "matmul_256": (lambda: matmul(256, 256, 256), 0.85),
    "matmul_1024": (lambda: matmul(1024, 1024, 1024), 0.85),
    "matmul_768x128x512": (lambda: matmul(768, 128, 512), 0.85),
    "matmul_1x1024x1024": (lambda: matmul(1, 1024, 1024), 0.85),
    "matmul_1024x1024x1": (lambda: matmul(1024, 1024, 1), 0.85),
    "matmul_5x1024x1024": (lambda: matmul(5, 1024, 1024), 0.85),
    "adamw": (adamw, 1.2),
}


def measure(work, seconds):
    for _ in range(3):
        work()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 5:
        before = time.perf_counter()
        work()
        times.append((time.perf_counter() - before) * 1e6)
    return statistics.median(times)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("cases", nargs="*", default=[], help=", ".join(CASES))
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--seconds", type=float, default=0.4)
    args.add_argument("--binary", default=str(HERE.parent.parent / "target/release/perilune"))
    a = args.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {a.threads} threads, {a.rounds} rounds; medians in microseconds")
    print(f"{'case':<20} {'ours':>12} {'PyTorch':>12} {'ratio':>7} {'goal':>6}")
    for name in a.cases or CASES:
        if name not in CASES:
            sys.exit(f"there is no case '{name}': one of {', '.join(CASES)}")
        make, goal = CASES[name]
        work, ours, theirs = make(), [], []
        for _ in range(a.rounds):
            command = [a.binary, "run", str(HERE / "cpu.lua"), "--set", f"case={name}", "--set", f"seconds={a.seconds}", "--threads", str(a.threads)]
            ours.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
            theirs.append(measure(work, a.seconds))
        o, t = statistics.median(ours), statistics.median(theirs)
        print(f"{name:<20} {o:>12.1f} {t:>12.1f} {t / o:>6.2f}x {goal:>5.2f}x", flush=True)


if __name__ == "__main__":
    main()
