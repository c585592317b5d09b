"""Measures GPT-2 steps of llm.c and of Perilune alternately on one GPU.

    python3 tests/bench/llmc.py TRAIN_GPT2CU [--perilune target/release/perilune] [gpt2_b4 gpt2_b32 …]

TRAIN_GPT2CU is llm.c's program (https://github.com/karpathy/llm.c, tested with f1e2ace), which is not part of this
repository, built in bf16 with cuDNN's attention:

    make train_gpt2cu USE_CUDNN=1        needs nvcc, cuDNN's and cudnn-frontend's headers

With CUDA 13, llmc/cuda_utils.cuh needs a cudaMemLocation where it calls cudaMemAdvise, and the headers of cuDNN must not be
newer than the library that is loaded at run time. Sizes are those of the cases of the same name in cuda.lua, weights and
tokens random, recomputation off (-r 0), and the faster of -ge 1 and 2 counts. Prints medians of a step in microseconds.
"""

import argparse
import glob
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile

# name -> (depth, batch, steps to time)
CASES = {"gpt2_b4": (12, 4, 60), "gpt2_b32": (12, 32, 24), "gpt2_b64": (12, 64, 16), "gpt2_350m_b32": (24, 32, 12),
         "gpt2_1558m_b8": (48, 8, 20)}
# The same with a residual stream in bf16, as in llm.c.
CASES |= {name + "_bf16_residual": CASES[name] for name in ("gpt2_b4", "gpt2_b32", "gpt2_1558m_b8")}
WARM_UP = 5


def tokens(path, n=4_000_000):
    """A file of llm.c's: a header of 256 int32 (magic, version, count), then tokens as uint16."""
    noise = os.urandom(2 * n)
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, n, *[0] * 253))
        f.write(struct.pack(f"<{n}H", *(v % 50257 for v in struct.unpack(f"<{n}H", noise))))


def libraries():
    """The folder of CUDA's libraries if they were installed with PyTorch."""
    roots = [os.path.join(p, "nvidia") for p in sys.path if os.path.isdir(os.path.join(p, "nvidia"))]
    found = {os.path.dirname(lib) for root in roots for lib in glob.glob(root + "/**/lib*.so.[0-9]*", recursive=True)}
    return ":".join([*sorted(found), os.environ.get("LD_LIBRARY_PATH", "")])


def theirs(program, data, depth, batch, steps, fused):
    args = {"-e": f"d{depth}", "-i": data, "-j": data, "-b": batch, "-t": 1024, "-d": batch * 1024, "-x": steps + WARM_UP, "-v": 100000, "-m": 1,
            "-s": 0, "-r": 0, "-ge": fused, "-n": 0, "-h": 0, "-z": 0, "-c": 0.1, "-l": 0.0006}
    command = [program, *(str(word) for pair in args.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": libraries()})
    times = [float(ms) * 1e3 for ms in re.findall(r"\| ([\d.]+) ms \|", done.stdout)][WARM_UP:]
    if len(times) < 3:
        sys.exit(f"llm.c ended with status {done.returncode}: {done.stdout[-400:]}{done.stderr[-400:]}")
    return statistics.median(times)


def ours(program, case):
    command = [program, "bench", "--device", "cuda", "--no-rival", "--rounds", "1", "--json", case]
    done = subprocess.run(command, capture_output=True, text=True)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    figure = next((e["ours"] for e in events if e.get("event") == "case" and "ours" in e), None)
    if figure is None:
        sys.exit(f"perilune bench {case}: {done.stdout[-400:]}{done.stderr[-400:]}")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", metavar="TRAIN_GPT2CU")
    parser.add_argument("case", nargs="*", help="of " + ", ".join(CASES))
    parser.add_argument("--perilune", default="target/release/perilune")
    args = parser.parse_intermixed_args()
    unknown = [c for c in args.case if c not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}: it is one of {', '.join(CASES)}")
    print(f"{'case':<28}{'ours':>12}{'again':>12}{'-ge 1':>12}{'-ge 2':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "tokens.bin")
        tokens(data)
        for case in args.case or CASES:
            depth, batch, steps = CASES[case]
            first = ours(args.perilune, case)
            one = theirs(args.program, data, depth, batch, steps, 1)
            again = ours(args.perilune, case)
            two = theirs(args.program, data, depth, batch, steps, 2)
            ratio = min(one, two) / statistics.mean([first, again])
            print(f"{case:<28}{first:>12.0f}{again:>12.0f}{one:>12.0f}{two:>12.0f}{ratio:>8.3f}", flush=True)


main()
