#!/usr/bin/env python3
"""Ours against PyTorch (eager and torch.compile) on one GPU, from one run.

    cargo build --release && python3 tests/bench/gpu.py [case ...]

Needs PyTorch with CUDA. Each figure is the median over rounds; a round queues several runs and ends with a wait. The
ratio is the best of the rival's over ours: more than 1 means that we are faster.
"""

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
BF = torch.bfloat16


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=BF)


def chain():
    x, y = rand(64 << 20), rand(64 << 20)
    return lambda: (torch.relu((x * 1.5 + y) * x - 0.5) * y + x) * 0.25 - y


def unary(fn):
    def make():
        x = rand(65536, 4096)
        return lambda: fn(x)
    return make


def norm(kind):
    def make():
        x, w, b = rand(65536, 4096), rand(4096), rand(4096)
        if kind == "rms":
            return lambda: F.rms_norm(x, (4096,), w)
        return lambda: F.layer_norm(x, (4096,), w, b)
    return make


def layer_norm_grad():
    x, w, b = (t.requires_grad_() for t in (rand(65536, 4096), rand(4096), rand(4096)))
    g = rand(65536, 4096)
    return lambda: torch.autograd.grad(F.layer_norm(x, (4096,), w, b), (x, w, b), g)


def cross_entropy():
    x, t = rand(32768, 50304).requires_grad_(), torch.randint(0, 50304, (32768,), device="cuda")
    return lambda: torch.autograd.grad(F.cross_entropy(x, t), x)


def total():
    x = rand(256 << 20)
    return lambda: x.sum()


def adamw():
    ws = [torch.randn(2048, 2048, device="cuda").requires_grad_() for _ in range(96)]
    for w in ws:
        w.grad = torch.randn(2048, 2048, device="cuda")
    return torch.optim.AdamW(ws, lr=1e-3, weight_decay=0.1, fused=True).step


def matmul(m, k, n, dtype=BF):
    def make():
        a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        return lambda: a @ b
    return make


def attention(b, h, t, d, grad):
    def make():
        q, k, v = (rand(b, h, t, d).requires_grad_(grad) for _ in range(3))
        g = rand(b, h, t, d)

        def run():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(y, (q, k, v), g) if grad else y
        return run
    return make


def train(model, loss):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def make(clip, fn):
        def run():
            opt.zero_grad(set_to_none=True)
            value = fn()
            value.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            return value
        return run
    return make, loss


def mlp(wrap):
    layers = [l for _ in range(8) for l in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    forward = wrap(model)
    make, _ = train(model, None)
    return make(False, lambda: F.mse_loss(forward(x), y))


class Block(torch.nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = torch.nn.LayerNorm(c), torch.nn.LayerNorm(c)
        self.qkv, self.out = torch.nn.Linear(c, 3 * c), torch.nn.Linear(c, c)
        self.up, self.down = torch.nn.Linear(c, 4 * c), torch.nn.Linear(4 * c, c)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, layers=12, heads=12, c=768, v=50304, t=1024):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(v, c), torch.nn.Embedding(t, c)
        self.blocks, self.norm = torch.nn.ModuleList(Block(c, heads) for _ in range(layers)), torch.nn.LayerNorm(c)
        for p in self.parameters():
            torch.nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


def gpt2(batch):
    def build(wrap):
        model = GPT2().cuda()
        x = torch.randint(0, 50257, (batch, 1024), device="cuda")
        y = torch.randint(0, 50257, (batch * 1024,), device="cuda")

        def loss():
            with torch.autocast("cuda", BF):
                return F.cross_entropy(model(x).flatten(0, 1), y)
        fn = wrap(loss)
        make, _ = train(model, None)
        return make(True, fn)
    return build


SIMPLE = {
    "chain": chain,
    "gelu": unary(lambda x: F.gelu(x, approximate="tanh")),
    "softmax": unary(lambda x: x.softmax(-1)),
    "layer_norm": norm("layer"),
    "rms_norm": norm("rms"),
    "layer_norm_grad": layer_norm_grad,
    "cross_entropy": cross_entropy,
    "sum": total,
    "adamw": adamw,
    "matmul_8192": matmul(8192, 8192, 8192),
    "matmul_gpt2_up": matmul(65536, 768, 3072),
    "matmul_f32_4096": matmul(4096, 4096, 4096, torch.float32),
    "attention_d64_1k": attention(16, 32, 1024, 64, False),
    "attention_d64_1k_grad": attention(16, 32, 1024, 64, True),
    "attention_d64_4k": attention(4, 32, 4096, 64, False),
    "attention_d64_4k_grad": attention(4, 32, 4096, 64, True),
    "attention_d128_4k": attention(4, 16, 4096, 128, False),
    "attention_d128_4k_grad": attention(4, 16, 4096, 128, True),
}
STEPS = {"mlp": mlp, "gpt2_b4": gpt2(4), "gpt2_b32": gpt2(32)}
# Cases that torch.compile has nothing to add to.
NO_COMPILE = {"adamw", "sum"} | {n for n in SIMPLE if n.startswith(("matmul", "attention"))}


def measure(run, seconds, n=20):
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 3:
        before = time.perf_counter()
        for _ in range(n):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - before) * 1e6 / n)
        if times[0] > 5e4:
            n = 3
    return statistics.median(times), first


def rival(case, compiled, seconds):
    torch._dynamo.reset()
    wrap = torch.compile if compiled else lambda f: f
    run = STEPS[case](wrap) if case in STEPS else wrap(SIMPLE[case]())
    out = measure(run, seconds)
    del run
    torch.cuda.empty_cache()
    return out


def ours(binary, case, seconds):
    cmd = [binary, "run", str(HERE / "gpu.lua"), "--device", "cuda", "--set", f"case={case}", "--set", f"seconds={seconds}"]
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode != 0:
        return None, (done.stderr or done.stdout).strip().replace("\n", " ")[-300:]
    micro, first = map(float, done.stdout.split()[-2:])
    return micro, first


def main():
    args = argparse.ArgumentParser()
    args.add_argument("cases", nargs="*", default=[])
    args.add_argument("--binary", default=str(HERE.parents[1] / "target/release/perilune"))
    args.add_argument("--seconds", type=float, default=1.0)
    args.add_argument("--no-compile", action="store_true")
    a = args.parse_args()
    print(f"{'case':<24}{'ours us':>12}{'eager us':>12}{'compile us':>12}{'ratio':>8}   first: ours, compile (s)", flush=True)
    for case in a.cases or [*SIMPLE, *STEPS]:
        mine, first = ours(a.binary, case, a.seconds)
        eager, _ = rival(case, False, a.seconds)
        comp, comp_first = float("inf"), 0.0
        if case not in NO_COMPILE and not a.no_compile:
            comp, comp_first = rival(case, True, a.seconds)
        if mine is None:
            print(f"{case:<24}{'failed':>12}{eager:>12.1f}{comp:>12.1f}{'':>8}   {first}", flush=True)
            continue
        ratio = min(eager, comp) / mine
        print(f"{case:<24}{mine:>12.1f}{eager:>12.1f}{comp:>12.1f}{ratio:>8.2f}   {first:.2f}, {comp_first:.2f}", flush=True)


main()
