#!/usr/bin/env python3
"""Measures the PyTorch cases of `perilune bench`, which starts this process and requests one case after the other.

    python3 rival.py cpu|cuda THREADS

It prints its version as a line of JSON, then answers each line {"case":, "seconds":, "compile":} with one line: medians in
microseconds over rounds that end with a wait, the seconds of the first run, and on a GPU the peak bytes of the case. If a case can
be compiled in several ways, the fastest counts and is named.
"""

import gc
import importlib
import json
import statistics
import sys
import time


def say(**values):
    print(json.dumps(values), flush=True)


def measure(cases, run, seconds):
    n = cases.ROUND
    start = time.perf_counter()
    run()
    cases.wait()
    first = time.perf_counter() - start
    for _ in range(3):
        run()
    cases.wait()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < (3 if cases.ROUND > 1 else 5):
        before = time.perf_counter()
        for _ in range(n):
            run()
        cases.wait()
        times.append((time.perf_counter() - before) * 1e6 / n)
        if times[0] > 5e4:
            n = min(n, 3)
    return statistics.median(times), first


def one(torch, cases, name, seconds, mode):
    torch._dynamo.reset() if mode else None
    before = cases.clean()
    run = cases.build(name, (lambda f: torch.compile(f, mode=mode)) if mode else lambda f: f)
    try:
        median, first = measure(cases, run, seconds)
        peak = cases.peak()
        return median, first, peak and peak - before
    finally:
        del run
        gc.collect()
        cases.clean()


def main():
    device, threads = sys.argv[1], int(sys.argv[2])
    try:
        import torch
    except ImportError as e:
        return say(error=str(e))
    if device == "cuda" and not torch.cuda.is_available():
        return say(error=f"PyTorch {torch.__version__} sees no GPU")
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    cases = importlib.import_module(f"rival_{device}")
    say(version=torch.__version__)
    for line in sys.stdin:
        ask = json.loads(line)
        name, out = ask["case"], {}
        for kind, mode in [("eager", None)] + [("compile", m) for m in cases.modes(name) if ask["compile"]]:
            try:
                median, first, peak = one(torch, cases, name, ask["seconds"], mode)
                # The compile time is that of the first way; later ones find its results in inductor's cache.
                out.setdefault("first" if kind == "eager" else "compile_first", first)
                if median < out.get(kind, float("inf")):
                    out[kind] = median
                    if mode:
                        out["compile_mode"] = mode
                    if peak is not None:
                        out[f"{kind}_bytes"] = peak
            except Exception as e:  # the other cases still run
                out["error"] = f"{mode or kind}: {type(e).__name__}: {e}".splitlines()[0]
        if cases.goal(name):
            out["goal"] = cases.goal(name)
        say(**out)


main()
