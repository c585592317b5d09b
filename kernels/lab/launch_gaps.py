"""Measures the part of a training step outside kernels: launch gaps, waits for the host, copies of results.

    python3 kernels/lab/launch_gaps.py [--perilune target/release/perilune] [--steps 300] [--limit 2] -- recipes/gpt2.lua
        --set size=124M --set batch=4 --precision bf16

Trains the recipe as `perilune run` does: once plainly, and twice (for a few steps and for many) with a small library in the
process, through which CUPTI records when each kernel, copy and fill begins and ends on the GPU, including those of a replayed
graph. The busy time of the steps in between is the difference of the two; overlapping intervals count once. A step's time is
that of the plain run, since CUPTI does not slow kernels down but lengthens the gaps. Exit status 1 above `--limit` per cent.

Needs an NVIDIA GPU, a C compiler (or --library, compiled elsewhere with cc -shared -fPIC -O2) and libcupti of the CUDA
toolkit or of PyTorch's wheels.
"""

import argparse
import ctypes.util
import glob
import json
import os
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
WARM = 40

# Activity records of kernels, copies and fills all store their start and end, in nanoseconds, at bytes 16 and 24.
LIBRARY = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*Enable)(int);
typedef int (*Flush)(uint32_t);
typedef int (*Next)(uint8_t*, size_t, uint8_t**);
typedef int (*Register)(void (*)(uint8_t**, size_t*, size_t*), void (*)(void*, uint32_t, uint8_t*, size_t, size_t));
static Next next;
static Flush flush_all;
static FILE* out;

static void wants(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 8 << 20;
    *records = 0;
    if (posix_memalign((void**)buffer, 64, *size)) abort();
}

static void got(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
    uint8_t* r = 0;
    while (next(buffer, valid, &r) == 0) {
        int32_t kind = *(int32_t*)r;
        uint64_t line[3] = {(uint64_t)kind, *(uint64_t*)(r + 16), *(uint64_t*)(r + 24)};
        if (kind == 1 || kind == 2 || kind == 10 || kind == 3) fwrite(line, sizeof line, 1, out);
    }
    free(buffer);
}

static void end(void) {
    flush_all(1);
    fclose(out);
}

/* Called by the driver, which loads what CUDA_INJECTION64_PATH names. */
int InitializeInjection(void) {
    void* lib = dlopen(getenv("GAPS_CUPTI"), RTLD_NOW);
    if (!lib) { fprintf(stderr, "%s\n", dlerror()); return 0; }
    next = (Next)dlsym(lib, "cuptiActivityGetNextRecord");
    flush_all = (Flush)dlsym(lib, "cuptiActivityFlushAll");
    out = fopen(getenv("GAPS_OUT"), "wb");
    ((Register)dlsym(lib, "cuptiActivityRegisterCallbacks"))(wants, got);
    /* CONCURRENT_KERNEL, MEMCPY, MEMSET */
    int kinds[3] = {10, 1, 2};
    for (int i = 0; i < 3; i++) {
        int rc = ((Enable)dlsym(lib, "cuptiActivityEnable"))(kinds[i]);
        if (rc) fprintf(stderr, "cuptiActivityEnable(%d): %d\n", kinds[i], rc);
    }
    atexit(end);
    return 1;
}
"""


def cupti():
    places = [os.path.join(p, "nvidia", kind, "lib") for p in sys.path for kind in ("cu13", "cuda_cupti")]
    places += ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]
    for place in places:
        for path in sorted(glob.glob(os.path.join(place, "libcupti.so.1[0-9]"))):
            return path
    return ctypes.util.find_library("cupti") or sys.exit("libcupti was not found")


def train(args, steps, env=None):
    """Milliseconds per step between the warm-up and the end, by the run's own clock."""
    with tempfile.TemporaryDirectory() as folder:
        line = [args.perilune, "run", *args.recipe, "--device", "cuda", "--steps", str(steps), "--json", "--run-dir", folder + "/run"]
        done = subprocess.run(line, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True, check=True)
    events = [json.loads(text) for text in done.stdout.splitlines()]
    at = {e["step"]: e["seconds"] for e in events if e["event"] == "step"}
    return (at[steps] - at[WARM]) / (steps - WARM) * 1e3 if steps > WARM else None


def busy(args, steps, library, folder):
    """Milliseconds in which the GPU ran kernels, and ran anything, and the number of kernels."""
    path = os.path.join(folder, f"record-{steps}")
    traced = train(args, steps, {"CUDA_INJECTION64_PATH": library, "GAPS_CUPTI": cupti(), "GAPS_OUT": path})
    records = [r for r in struct.iter_unpack("<3Q", open(path, "rb").read()) if r[2] >= r[1] > 0]

    def union(kinds):
        total = last = 0
        for start, end in sorted((r[1], r[2]) for r in records if r[0] in kinds):
            total += max(0, end - max(start, last))
            last = max(last, end)
        return total / 1e6

    return union((3, 10)), union((1, 2, 3, 10)), sum(r[0] in (3, 10) for r in records), traced


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--perilune", default=os.path.join(HERE, "..", "..", "target", "release", "perilune"))
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--limit", type=float, default=2.0, help="maximum per cent of a step outside kernels")
    p.add_argument("--library", help="the compiled library, if there is no C compiler")
    p.add_argument("recipe", nargs="+", help="the recipe and options of `perilune run`, after --")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = args.library
        if not library:
            library = os.path.join(folder, "gaps.so")
            source = os.path.join(folder, "gaps.c")
            with open(source, "w") as f:
                f.write(LIBRARY)
            subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        n = WARM + args.steps
        plain = [train(args, n)]
        few, many = busy(args, WARM, os.path.abspath(library), folder), busy(args, n, os.path.abspath(library), folder)
        plain.append(train(args, n))
    kernels, all_, count = ((many[i] - few[i]) / args.steps for i in range(3))
    if count < 1:
        sys.exit("CUPTI recorded no kernels")
    step = min(plain)
    print(f"a step: {plain[0]:.3f} and {plain[1]:.3f} ms plainly, {many[3]:.3f} ms under CUPTI; {count:.0f} kernels busy for "
          f"{kernels:.3f} ms, with copies and fills {all_:.3f} ms")
    outside = (1 - kernels / step) * 100
    print(f"outside of kernels: {outside:.2f} % of the step ({(step - kernels) * 1e3:.0f} us), without copies and fills {(1 - all_ / step) * 100:.2f} %")
    sys.exit(outside > args.limit)


if __name__ == "__main__":
    main()
