"""Tests and times grouped products on a GPU: accuracy, repeatability, speed, and the choice of tiles.

    python3 kernels/lab/grouped_lab.py [check] [time] [sweep]   (all without arguments)

Needs torch and an NVIDIA GPU. Kernel texts are those of runtime/cuda/src/library/grouped.rs, with its tiles and others,
compiled by NVRTC and launched through the driver. `check` compares with products in f64. It requires equal bits from two
runs into poisoned outputs, no write past them, no use of the NaN stored between the groups' operands, and a report of bad
ends. `time` compares with torch's grouped_mm (CUTLASS), and with one product of all rows. `sweep` times other tiles;
KIND=Warps times only those. Exit status 1 if a check fails.
"""

import os
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import attention_lab  # noqa: E402

START = time.time()

# Tile: (kind, rows, columns, deep, stages, threads, blocks), as in grouped.rs.
WARPS = ("Warps", 128, 128, 32, 4, 128, 2)
WARPGROUPS = ("Warpgroups", 128, 128, 64, 3, 256, 2)
WIDE_WARPGROUPS = ("Warpgroups", 128, 256, 64, 4, 256, 1)
SWEEP = [
    WARPS,
    ("Warps", 128, 128, 64, 3, 128, 2),
    ("Warps", 128, 256, 32, 4, 256, 1),
    ("Warps", 128, 256, 64, 3, 256, 1),
    ("Warps", 256, 128, 32, 4, 256, 1),
    WARPGROUPS,
    ("Warpgroups", 128, 128, 64, 4, 256, 1),
    WIDE_WARPGROUPS,
    ("Warpgroups", 256, 128, 64, 4, 512, 1),
]
PLAIN = 64


def call_of(op, tile, t, down):
    kind, rows, cols, deep, stages, *_ = tile
    shape = f"library::{kind}<{rows}, {cols}, {deep}, {stages}>, {t}" + (f", {str(down).lower()}" if op == "rows" else "")
    return f"grouped_{op}<{shape}>"


def text(op, tile, t, down=True):
    if tile == PLAIN:
        more, given = ("i64 matrix, ", " matrix,") if op == "rows" else ("", "")
        return (f'#include "matmul/grouped_plain.cuh"\nextern "C" __global__ void __launch_bounds__(256, 1) KERNEL('
                f"const {t}* x, const {t}* w, const i64* ends, {t}* out, const __grid_constant__ library::GroupEnds e, "
                f"const __grid_constant__ library::Product p, {more}Fault* fault) {{\n    "
                f"library::grouped_{op}_plain(x, w, ends, out, e, p,{given} fault);\n}}\n")
    header = "grouped_sm90" if tile[0] == "Warpgroups" else "grouped"
    return (f'#include "matmul/{header}.cuh"\nextern "C" __global__ void __launch_bounds__({tile[5]}, {tile[6]}) KERNEL('
            f"const {t}* x, const {t}* w, const i64* ends, {t}* out, const __grid_constant__ library::Grouped p, "
            f"Fault* fault) {{\n    library::{call_of(op, tile, t, down)}(x, w, ends, out, p, fault);\n}}\n")


def shared_bytes(tile):
    return 0 if tile == PLAIN else tile[4] * (tile[1] + tile[2]) * tile[3] * 2


def most_tiles(rows, groups, side):
    return (rows + min(groups + 1, rows) * (side - 1)) // side


def up(n):
    return -(-n // 8) * 8


def launch_of(op, tile, x, w, ends, out, fault, groups):
    """Arguments of `Gpu.launch`. x (T, K), w (E, K, N) or (T, N); columns of 16-bit operands are padded if they must be."""
    t = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}[x.dtype]
    rows, k, n = x.shape[0], x.shape[1], w.shape[-1]
    head = struct.pack("<qii", 1, groups, rows)
    ceil = lambda a, b: -(-a // b)
    if tile == PLAIN:
        wide = ceil(n, PLAIN)
        if op == "rows":
            numbers = [rows, n, k, x.stride(0), x.stride(1), w.stride(1), w.stride(2), 0, wide, 0]
            blocks = most_tiles(rows, groups, PLAIN) * wide
        else:
            numbers = [k, n, rows, x.stride(1), x.stride(0), w.stride(0), w.stride(1), ceil(k, PLAIN), wide, 0]
            blocks = groups * ceil(k, PLAIN) * wide
        more = [w.stride(0)] if op == "rows" else []
        args = [x, w, ends, out, head, struct.pack("<10q", *numbers), *more, fault, 0]
        return text(op, tile, t), (blocks, 1, 1), 256, 0, args
    down = w.stride(-1) == 1
    wide = ceil(n, tile[2])
    numbers = struct.pack("<3q", x.stride(0), w.stride(-2 if down else -1), w.stride(0) if op == "rows" else 0)
    if op == "rows":
        tall = most_tiles(rows, groups, tile[1])
        sizes, blocks = (0, n_of(out), k_of(x), tall, wide), tall * wide
    else:
        tall = ceil(out.shape[1], tile[1])
        sizes, blocks = (out.shape[1], n_of(out), 0, tall, wide), groups * tall * wide
    p = head + numbers + struct.pack("<6i", *sizes, 0)
    return text(op, tile, t, down), (blocks, 1, 1), tile[5], shared_bytes(tile), [x, w, ends, out, p, fault, 0]


def n_of(out):
    return out.shape[-1]


def k_of(x):
    return getattr(x, "real_k", x.shape[1])


def padded(x):
    """x with columns padded with zeros to a multiple of 8, as `pad_rows` does, and poison after the rows."""
    wide = up(x.shape[-1])
    y = torch.zeros(*x.shape[:-1], wide, dtype=x.dtype, device=x.device)
    y[..., : x.shape[-1]] = x
    y.real_k = x.shape[-1]
    return y


def want_of(op, x, w, ends):
    x, w, start = x.double(), w.double(), 0
    if op == "rows":
        out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64, device=x.device)
    else:
        out = torch.zeros(len(ends), x.shape[1], w.shape[1], dtype=torch.float64, device=x.device)
    for e, end in enumerate(ends):
        if op == "rows":
            out[start:end] = x[start:end] @ w[e]
        else:
            out[e] = x[start:end].t() @ w[start:end]
        start = end
    return out


EPS = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22, "f64": 2.0**-50}
SHAPES = [
    (7, 8, 16, [2, 2, 6]),
    (300, 72, 136, [0, 130, 131, 290]),
    (300, 33, 70, [300]),
    (1000, 256, 384, [128, 128, 500, 756, 1000]),
    (150, 16, 8, [1] * 70),
    (640, 64, 200, [i * 4 for i in range(1, 101)]),
    (4096, 512, 640, [700, 710, 2500, 2500, 4000]),
    (129, 1000, 24, [64, 129]),
    (5, 0, 8, [3, 5]),
    (40, 96, 104, [0, 0, 0]),
]


def check(gpu, tiles):
    bad = done = 0
    names = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
    for name, dtype in names.items():
        mine = [PLAIN] + ([t for t in tiles if gpu.codes[text("rows", t, name)][0]] if name in ("bf16", "f16") else [])
        for rows, k, n, ends in SHAPES:
            for op, turned in (("rows", False), ("rows", True), ("sums", False)):
                e, last = len(ends), ends[-1]
                if op == "sums" and k == 0:
                    continue  # products without elements launch nothing
                x = torch.randn(rows, k, device="cuda").to(dtype)
                w = torch.randn(*((e, k, n) if op == "rows" else (rows, n)), device="cuda").to(dtype)
                want = want_of(op, x, w, ends)
                # Nothing reads the rows after the last end.
                x[last:] = float("nan")
                if op == "sums":
                    w[last:] = float("nan")
                at = torch.tensor(ends, device="cuda")
                scale = want_of(op, x.nan_to_num().abs(), w.nan_to_num().abs(), ends)
                for tile in mine:
                    if tile == PLAIN:
                        a, b = x, w.transpose(1, 2).contiguous().transpose(1, 2) if turned else w
                    elif turned:
                        a, b = padded(x), padded(w.transpose(1, 2).contiguous()).transpose(1, 2)
                    else:
                        a, b = padded(x), padded(w)
                    results = []
                    for poison in (float("nan"), 7.0):
                        room = torch.full((want.numel() + 64,), poison, device="cuda").to(dtype)
                        out = room[: want.numel()].view(want.shape)
                        fault = torch.zeros(3, dtype=torch.int64, device="cuda")
                        gpu.launch(*launch_of(op, tile, a, b, at, out, fault, e))
                        torch.cuda.synchronize()
                        behind = room[want.numel():]
                        clean = bool(behind.isnan().all()) if poison != poison else bool((behind == 7).all())
                        results.append((out.clone(), clean and int(fault[0]) == 0))
                    first, second = results[0][0], results[1][0]
                    room = EPS[name] * want.abs() + 2e-6 * scale if dtype != torch.float64 else 1e-13 * scale
                    off = (first.double() - want).abs() > room + 1e-30
                    off |= first.isnan()
                    same = torch.equal(first, second)
                    done += 1
                    if int(off.sum()) or not same or not (results[0][1] and results[1][1]):
                        bad += 1
                        where = off.nonzero()[:3].tolist()
                        print(f"BAD {name} {op} turned {turned} {rows} {k} {n} {len(ends)} {tile}: {int(off.sum())} of "
                              f"{off.numel()} off {where}, same bits {same}, clean {results[0][1]}", flush=True)
    for ends in ([3, 11], [-1, 4], [7, 4]):
        for op in ("rows", "sums"):
            for tile in [PLAIN] + tiles:
                x = torch.randn(10, 16, device="cuda").bfloat16()
                w = torch.randn(*((2, 16, 16) if op == "rows" else (10, 16)), device="cuda").bfloat16()
                out = torch.empty(*((10, 16) if op == "rows" else (2, 16, 16)), device="cuda").bfloat16()
                fault = torch.zeros(3, dtype=torch.int64, device="cuda")
                gpu.launch(*launch_of(op, tile, x, w, torch.tensor(ends, device="cuda"), out, fault, 2))
                torch.cuda.synchronize()
                said = fault.tolist()
                done += 1
                if said[0] & 0xFFFFFFFF != 1 or said[1] not in ends or said[2] != 10:
                    bad += 1
                    print(f"BAD ends {ends} {op} {tile}: {said}", flush=True)
    print(f"{done} checks, {bad} BAD [{time.time() - START:.0f} s]", flush=True)
    return bad


def milliseconds(f, repeat=10):
    f()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(repeat):
            f()
        b.record()
        torch.cuda.synchronize()
        best = min(best, a.elapsed_time(b) / repeat)
    return best


def uneven(rows, groups):
    """Ends of groups whose sizes vary by a factor of 3, as with a router."""
    sizes = [1 + 2 * ((5 * e) % groups) / max(1, groups - 1) for e in range(groups)]
    total, ends = sum(sizes), []
    for e in range(groups):
        ends.append(int(sum(sizes[: e + 1]) / total * rows + 0.5))
    return ends


TIMED = [(16384, 2048, 2048, 8), (16384, 2048, 8192, 8), (16384, 4096, 14336, 8), (16384, 2048, 1024, 64), (512, 2048, 1024, 64),
         (65536, 1024, 1024, 16)]


def timing(gpu, tiles):
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    print("\nTFLOP/s (ms) of bf16: rows (x w), its gradient of x, its gradient of w; torch's grouped_mm; one product")
    for rows, k, n, e in TIMED:
        ends = uneven(rows, e)
        at, at32 = torch.tensor(ends, device="cuda"), torch.tensor(ends, device="cuda", dtype=torch.int32)
        fault = torch.zeros(3, dtype=torch.int64, device="cuda")
        make = lambda *s: torch.randn(*s, device="cuda").bfloat16()
        x, w, d = make(rows, k), make(e, k, n), make(rows, n)
        y, dx, dw = make(rows, n), make(rows, k), make(e, k, n)
        work = 2 * rows * k * n / 1e9
        rivals = [lambda: grouped(x, w, offs=at32), lambda: grouped(d, w.transpose(1, 2), offs=at32),
                  lambda: grouped(x.t(), d, offs=at32)]
        theirs = []
        for f in rivals:
            try:
                theirs.append(milliseconds(f))
            except RuntimeError as error:
                theirs.append(float("nan"))
                print("torch:", str(error).splitlines()[0])
        flat = milliseconds(lambda: x @ w[0])
        shown = lambda ms: "  ".join(f"{work / m:4.0f} ({m:.3f})" for m in ms)
        print(f"{rows}x{k}x{n}, {e} groups: torch {shown(theirs)}; one {shown([flat])}", flush=True)
        for tile in tiles:
            if gpu.codes[text("rows", tile, "bf16")][0] is None:
                continue
            try:
                ready = [launch_of("rows", tile, x, w, at, y, fault, e),
                         launch_of("rows", tile, d, w.transpose(1, 2), at, dx, fault, e),
                         launch_of("sums", tile, x, d, at, dw, fault, e)]
                print(f"    {' '.join(map(str, tile)):32} {shown([milliseconds(lambda: gpu.launch(*r)) for r in ready])}", flush=True)
            except RuntimeError as error:
                print(f"    {tile}: {error}", flush=True)
        del x, w, d, y, dx, dw
        torch.cuda.empty_cache()


def main():
    global torch
    import torch

    attention_lab.torch = torch
    todo = sys.argv[1:] or ["check", "time", "sweep"]
    torch.manual_seed(1)
    gpu = attention_lab.Gpu()
    gpu.arch = torch.cuda.get_device_capability()
    hopper = gpu.arch == (9, 0)
    tiles = SWEEP if "sweep" in todo else [WARPS, WARPGROUPS, WIDE_WARPGROUPS]
    kinds = os.environ.get("KIND", "Warps,Warpgroups" if hopper else "Warps").split(",")
    tiles = [t for t in tiles if t[0] in kinds]
    texts = []
    for op, down in (("rows", True), ("rows", False), ("sums", True)):
        texts += [text(op, tile, t, down) for tile in tiles for t in ("bf16", "f16")]
        texts += [text(op, PLAIN, t) for t in ("bf16", "f16", "f32", "f64")]
    gpu.compile(texts)
    torch.zeros(1, device="cuda")  # creates a context before modules are loaded
    print(f"{torch.cuda.get_device_name()}, {len(gpu.codes)} kernels compiled [{time.time() - START:.0f} s]", flush=True)
    print("registers, local bytes, blocks an SM of rows, rows of turned matrices, sums")
    for tile in tiles:
        made = [text("rows", tile, "bf16"), text("rows", tile, "bf16", False), text("sums", tile, "bf16")]
        if all(gpu.codes[t][0] for t in made):
            print(f"  {tile}: {[gpu.facts(t, tile[5], shared_bytes(tile)) for t in made]}")
    bad = check(gpu, tiles) if "check" in todo else 0
    if "time" in todo or "sweep" in todo:
        timing(gpu, tiles)
    print(f"done in {time.time() - START:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
