"""Tests and times attention's kernels on a GPU: accuracy, repeatability, speed, and the choice of tiles.

    python3 kernels/lab/attention_lab.py [check] [time] [documents] [sweep] [f32] [tf32]   (all without arguments; over 2 minutes)

Needs torch and an NVIDIA GPU. Kernel texts are those of runtime/cuda/src/attention, from the same headers and the same
table of tiles, compiled by NVRTC and launched through the driver. `check` compares with attention in f64 (the error may be
at most twice that of torch's flash attention, if torch supports the case) and requires equal bits from two runs into
poisoned outputs; document ids are ordered in some cases and random in others. `time` compares with torch's flash and cuDNN
attention; a causal mask counts half the work. `documents` times kernels with and without documents. `sweep` times other
tiles for each kernel. `f32` checks, times and sweeps the f32 kernels with three TF32 products and compares with torch's
memory-efficient attention; `tf32` does so for one product and compares with torch's decomposition into TF32 products. Exit
status 1 if a check fails. CASES=12 checks only the first twelve cases, for compute-sanitizer; KIND=documents (or plain)
checks only those; SWEEP=64 sweeps only heads of 64; WARPS=1 omits the warpgroup kernels.
"""

import ctypes
import glob
import itertools
import math
import multiprocessing
import os
import re
import statistics
import struct
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.dirname(HERE)
RUST = os.path.join(KERNELS, "..", "runtime", "cuda", "src", "attention")
START = time.time()

# ---- texts --------------------------------------------------------------------------------------------------------

# Tile: (warps, mt, bn, stages, held, split, blocks), as in mma.rs.
NAMES = {"Forward": "forward", "BackwardQ": "backward_q", "BackwardKv": "backward_kv"}
PLANS = {"Forward": "ForwardPlan", "BackwardQ": "BackwardQPlan", "BackwardKv": "BackwardKVPlan"}
POINTERS = {
    "Forward": [("const T*", "q"), ("const T*", "k"), ("const T*", "v"), ("T*", "out"), ("f32*", "lse")],
    "BackwardQ": [("const T*", "q"), ("const T*", "k"), ("const T*", "v"), ("const T*", "grad"), ("const f32*", "lse"),
                  ("const f32*", "delta"), ("T*", "dq")],
    "BackwardKv": [("const T*", "q"), ("const T*", "k"), ("const T*", "v"), ("const T*", "grad"), ("const f32*", "lse"),
                   ("const f32*", "delta"), ("T*", "dk"), ("T*", "dv")],
}
SIZES = [32, 64, 96, 128, 256]

# Warpgroup tiles (sm_90a): ("sm90", groups, bn, stages, lean, blocks).
SM90_POINTERS = {
    "Forward": [("MAP", "q"), ("MAP", "k"), ("MAP", "v"), ("T*", "out"), ("f32*", "lse")],
    "BackwardQ": [("MAP", "q"), ("MAP", "k"), ("MAP", "v"), ("MAP", "grad"), ("const T*", "grad"), ("const T*", "out"),
                  ("const f32*", "lse"), ("float2*", "stats"), ("T*", "dq")],
    "BackwardKv": [("MAP", "q"), ("MAP", "k"), ("MAP", "v"), ("MAP", "grad"), ("const float2*", "stats"), ("T*", "dk"),
                   ("T*", "dv")],
}


# f32 tiles: ("tf32", products, warps, mt, bn, stages, side, blocks).
PRODUCTS = {"f32": 3, "tf32": 1}


class Table:
    """Parses the tile of each kernel from the Rust source."""

    def __init__(self, arch, shared):
        self.shared = shared
        row = r"\(Pass::(\w+), (\d+), (\d+), tf32\((\d+), (\d+), (\d+), (\d+), (\d+), (\d+)\)\)"
        self.tf32 = [(r[0], *map(int, r[1:])) for r in re.findall(row, open(os.path.join(RUST, "tf32.rs")).read())]
        assert {r[:3] for r in self.tf32} == {(p, c, n) for p in NAMES for c in SIZES for n in (1, 3)}, "tf32.rs changed"
        self.newer, hopper = arch >= (10, 0), arch == (9, 0)
        large = hopper and shared >= 200 << 10
        row = r"\(Pass::(\w+), (\d+), When::(\w+), tile\((\d+), (\d+), (\d+), (\d+), (\w+), (\d+), (\d+)\)\)"
        self.large, self.rows = large, re.findall(row, open(os.path.join(RUST, "mma.rs")).read())
        row = r"\(Pass::(\w+), (\d+), When::(\w+), groups\((\d+), (\d+), (\d+), (\w+), (\d+)\)\)"
        self.groups = re.findall(row, open(os.path.join(RUST, "warpgroup.rs")).read()) if hopper else []
        assert {(r[0], int(r[1])) for r in self.rows} == {(p, c) for p in NAMES for c in SIZES}, "mma.rs changed"
        assert not hopper or len({(r[0], r[1]) for r in self.groups}) == 6, "warpgroup.rs changed"

    def of(self, p, size, causal, window, documents=False, dtype="bf16"):
        if dtype in PRODUCTS:
            kinds = [("tf32", *r[2:]) for r in self.tf32 if r[:3] == (p, size, PRODUCTS[dtype])]
            return next(k for k in kinds if k[7] * (shared_bytes(p, size, k) + 1024) <= self.shared + 1024)
        holds = {"Always": True, "Large": self.large and not window and not documents, "Masked": causal or window,
                 "Bare100": self.newer and not (causal or window or documents), "Documents": documents,
                 "Mixed": documents and (window or not causal), "Shifted": False}
        for r in self.groups:
            if r[0] == p and int(r[1]) == made_for(size) and holds[r[2]]:
                return ("sm90", *map(number, r[3:]))
        found = next(r for r in self.rows if r[0] == p and int(r[1]) == size and holds[r[2]])
        return tuple(map(number, found[3:]))


def element(dtype):
    return "f32" if dtype == "tf32" else dtype


def number(x):
    return int(x) if x.isdigit() else x == "true"


def made_for(size):
    """The head size that a warpgroup kernel is compiled for."""
    return 128 if size == 96 else size


def of_documents(documents):
    """The additional parameters and arguments of a kernel with documents."""
    if not documents:
        return "", ""
    return "const i32* labels, const int4* bounds, ", ", attention::SegmentIds{labels, bounds}"


def sm90_text(p, size, tile, t, causal, window, documents=False):
    size = made_for(size)
    _, groups, bn, stages, lean, blocks = tile
    lower = lambda x: "true" if x else "false"
    plan = f"attention::{PLANS[p].replace('Plan', 'Sm90Plan')}<{size}, {groups}, {bn}, {stages}"
    plan += ">" if p == "Forward" else f", {lower(lean)}>"
    kinds = {"MAP": "const __grid_constant__ attention::TensorMap"}
    names = [name + "s" * (kind != "MAP" and name == "grad") for kind, name in SM90_POINTERS[p]]
    params = ", ".join(f"{kinds.get(kind, kind).replace('T*', t + '*')} {name}" for (kind, _), name in zip(SM90_POINTERS[p], names))
    args = ", ".join(names)
    more, given = of_documents(documents)
    return (f'#include "attention/{NAMES[p]}_sm90.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__({128 * groups}, {blocks}) KERNEL({params}, {more}'
            f"const __grid_constant__ attention::Problem p) {{\n"
            f"    attention::{NAMES[p]}_sm90<{t}, {plan}, {lower(causal)}, {lower(window)}>({args}, p{given});\n}}\n")


def tf32_text(p, size, tile, causal, window, documents=False):
    _, products, warps, mt, bn, stages, side, blocks = tile
    lower = lambda x: "true" if x else "false"
    params = ", ".join(f"{kind.replace('T', 'f32')} {name}" for kind, name in POINTERS[p])
    args = ", ".join(name for _, name in POINTERS[p])
    more, given = of_documents(documents)
    return (f'#include "attention/{NAMES[p]}_tf32.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__({32 * warps}, {blocks}) KERNEL({params}, {more}'
            f"const attention::Problem p) {{\n"
            f"    attention::{NAMES[p]}_tf32<attention::Tf32Plan<{size}, {products}, {warps}, {mt}, {bn}, {stages}, {side}>, "
            f"{lower(causal)}, {lower(window)}>({args}, p{given});\n}}\n")


def text(p, size, tile, t, causal, window, documents=False):
    if tile[0] == "sm90":
        return sm90_text(p, size, tile, t, causal, window, documents)
    if tile[0] == "tf32":
        return tf32_text(p, size, tile, causal, window, documents)
    warps, mt, bn, stages, held, split, blocks = tile
    lower = lambda x: "true" if x else "false"
    plan = f"attention::{PLANS[p]}<{size}, {warps}, {mt}, {bn}, {stages}, {lower(held)}"
    plan += f", {split}>" if p == "BackwardKv" else ">"
    params = ", ".join(f"{kind.replace('T', t)} {name}" for kind, name in POINTERS[p])
    args = ", ".join(name for _, name in POINTERS[p])
    more, given = of_documents(documents)
    return (f'#include "attention/{NAMES[p]}.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__({32 * warps}, {blocks}) KERNEL({params}, {more}'
            f"const attention::Problem p) {{\n"
            f"    attention::{NAMES[p]}<{t}, {plan}, {lower(causal)}, {lower(window)}>({args}, p{given});\n}}\n")


BOUNDS = ('#include "attention/segment_ids.cuh"\n'
          'extern "C" __global__ void __launch_bounds__(256) KERNEL(const i64* ids, i32* labels, int4* bounds, '
          "const attention::SegmentParams p) {\n    attention::segment_bounds(ids, labels, bounds, p);\n}\n")


def delta_text(size, t):
    lanes = 1 << (size // 8 - 1).bit_length()
    return (f'#include "attention/preprocess.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__(256) KERNEL(const {t}* grad, const {t}* out, f32* delta, '
            f"const attention::Problem p) {{\n    attention::row_delta<{t}, {lanes}>(grad, out, delta, p);\n}}\n")


def threads(tile):
    if tile[0] == "tf32":
        return 32 * tile[2]
    return 128 * tile[1] if tile[0] == "sm90" else 32 * tile[0]


def tile_rows(tile):
    if tile[0] == "tf32":
        return 16 * tile[2] * tile[3] // tile[6]
    return 64 * tile[1] if tile[0] == "sm90" else 16 * tile[1] * tile[0]


def sm90_shared_bytes(p, size, tile):
    size = made_for(size)
    _, groups, bn, stages, _, _ = tile
    own, step = 64 * groups * size * 2, bn * size * 2
    return {"Forward": own + stages * (2 * step + 32) + 8, "BackwardQ": 2 * own + stages * (2 * step + 16) + 8,
            "BackwardKv": 2 * own + stages * (2 * step + bn * 8 + 16) + 8}[p]


def shared_bytes(p, size, tile):
    if tile[0] == "sm90":
        return sm90_shared_bytes(p, size, tile)
    if tile[0] == "tf32":
        _, _, _, _, bn, stages, side, _ = tile
        rows = tile_rows(tile)
        kept, numbers = rows if p == "Forward" else 2 * rows, 2 * bn if p == "BackwardKv" else 0
        weights = rows * (bn + 8 + (2 if p == "Forward" else 0)) if side == 2 else 0
        return 4 * (kept * (size + 4) + stages * (2 * bn * (size + 4) + numbers) + weights)
    warps, mt, bn, stages, _, _, _ = tile
    rows, step = 16 * mt * warps * size * 2, bn * size * 2
    return {"Forward": rows + 2 * stages * step, "BackwardQ": 2 * rows + 2 * stages * step,
            "BackwardKv": 2 * rows + stages * (2 * step + 1024)}[p]


# ---- NVRTC and the driver -----------------------------------------------------------------------------------------


def nvrtc():
    folders = [os.environ.get("PERILUNE_NVRTC", "")]
    for site in sys.path:
        folders += sorted(glob.glob(os.path.join(site, "nvidia", "cu1*", "lib")), reverse=True)
        folders += glob.glob(os.path.join(site, "nvidia", "cuda_nvrtc", "lib"))
    folders += ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]
    for folder in folders:
        found = sorted(glob.glob(os.path.join(folder, "libnvrtc.so.1[0-9]")), reverse=True) if folder else []
        for path in found:
            for b in glob.glob(os.path.join(folder, "libnvrtc-builtins.so.*")):
                try:
                    ctypes.CDLL(b, mode=ctypes.RTLD_GLOBAL)
                except OSError:
                    pass
            return ctypes.CDLL(path)
    sys.exit("libnvrtc was not found: set PERILUNE_NVRTC to its folder")


def compile_one(job):
    """(text, arch) -> (machine code or None, log)."""
    source, arch = job
    lib = nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"attention.cu", 0, None, None)
    options = [b"-std=c++17", f"--gpu-architecture={arch}".encode(), f"-I{KERNELS}".encode(), b"--ptxas-options=-v"]
    status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if status:
        return None, log.value.decode()
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, code)
    return code.raw, log.value.decode()


def aligned(data):
    """The bytes in ctypes memory, aligned to 64 as a tensor map requires."""
    room = ctypes.create_string_buffer(len(data) + 64)
    at = -ctypes.addressof(room) % 64
    view = (ctypes.c_char * len(data)).from_buffer(room, at)
    view[:] = data
    return view


class Gpu:
    def __init__(self):
        self.codes, self.functions, self.cuda = {}, {}, None

    def compile(self, texts):
        """Compiles new kernels, one process per core, before the first launch, so that child processes hold no context."""
        major, minor = self.arch
        arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
        new = [t for t in dict.fromkeys(texts) if t not in self.codes]
        with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
            for t, got in zip(new, pool.map(compile_one, [(t.replace("KERNEL", "kernel"), arch) for t in new], 1)):
                self.codes[t] = got
                if got[0] is None:
                    print(f"does not compile:\n{t}\n{got[1][:2000]}", flush=True)

    def call(self, name, *args):
        status = getattr(self.cuda, name)(*args)
        if status:
            raise RuntimeError(f"{name}: error {status}")

    def function(self, t, shared=0):
        if self.cuda is None:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        if t not in self.functions:
            module, f = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(self.codes[t][0]))
            self.call("cuModuleGetFunction", ctypes.byref(f), module, b"kernel")
            self.call("cuFuncSetAttribute", f, 8, shared)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.functions[t] = f
        return self.functions[t]

    def map(self, x, width, rows):
        """A tensor map over (column, row, head, batch) of x (batch, head, row, column), with boxes of 64 columns."""
        if self.cuda is None:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        room = aligned(bytes(128))
        dims = (ctypes.c_uint64 * 4)(width, x.shape[2], x.shape[1], x.shape[0])
        strides = (ctypes.c_uint64 * 3)(*(2 * x.stride(i) if x.shape[i] > 1 else 16 for i in (2, 1, 0)))
        box, ones = (ctypes.c_uint32 * 4)(64, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        kind = 9 if x.dtype == torch.bfloat16 else 6
        self.call("cuTensorMapEncodeTiled", ctypes.byref(room), kind, 4, ctypes.c_uint64(x.data_ptr()), dims, strides,
                  box, ones, 0, 3, 2, 0)  # no interleave, 128-byte swizzle, L2 promotion to 128 bytes, zero fill
        return bytes(room)

    def facts(self, t, threads, shared):
        """Registers, bytes of local memory (spills), blocks per multiprocessor."""
        f = self.function(t, shared)
        regs, local, blocks = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(regs), 4, f)
        self.call("cuFuncGetAttribute", ctypes.byref(local), 3, f)
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), f, threads,
                  ctypes.c_size_t(shared))
        return regs.value, local.value, blocks.value

    def launch(self, t, grid, threads, shared, args):
        """`args`: tensors, None, or bytes for a structure."""
        f = self.function(t, shared)
        hold = [aligned(a) if isinstance(a, bytes)
                else ctypes.c_uint64(0 if a is None else a if isinstance(a, int) else a.data_ptr()) for a in args]
        pointers = (ctypes.c_void_p * len(hold))(*[ctypes.cast(ctypes.byref(h), ctypes.c_void_p) for h in hold])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuLaunchKernel", f, *grid, threads, 1, 1, shared, stream, pointers, None)


# ---- one problem --------------------------------------------------------------------------------------------------


class Case:
    """q, k and v as views of one projection (B, T, H + 2 G, D), or of two if T differs from S or D from E."""

    def __init__(self, b, h, g, t, s, d, e, causal, window=0, dtype="bf16", fused=True, documents=None):
        self.b, self.h, self.g, self.t, self.s, self.d, self.e = b, h, g, t, s, d, e
        self.causal, self.window, self.dtype = causal or window > 0, window if window < t else 0, dtype
        self.size = next(c for c in SIZES if c >= max(d, e))
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32,
                "tf32": torch.float32}[dtype]
        new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32).to(kind)
        if fused and t == s and d == e:
            x = new(b, t, h + 2 * g, d).transpose(1, 2)
            self.q, self.k, self.v = x[:, :h], x[:, h:h + g], x[:, h + g:]
        elif fused:
            self.q = new(b, t, h, d).transpose(1, 2)
            self.k, self.v = new(b, s, g, d).transpose(1, 2), new(b, s, g, e).transpose(1, 2)
        else:
            self.q, self.k, self.v = new(b, h, t, d), new(b, g, s, d), new(b, g, s, e)
        self.grad = new(b, t, h, e).transpose(1, 2)
        empty = lambda *shape, kind=kind: torch.full(shape, math.nan, device="cuda", dtype=kind)
        self.out, self.lse = empty(b, h, t, e), empty(b, h, t, kind=torch.float32)
        self.delta = empty(b, h, t, kind=torch.float32)
        self.padded = -(-t // 128) * 128 + 128
        self.numbers = empty(b, h, self.padded, 2, kind=torch.float32)
        self.dq, self.dk, self.dv = empty(b, h, t, d), empty(b, g, s, d), empty(b, g, s, e)
        self.documents, self.ids = documents, numbers(documents, b, t)
        self.labels = torch.full((b, self.padded), -7, device="cuda", dtype=torch.int32)
        self.bounds = torch.full((b, -(-t // 64), 4), -7, device="cuda", dtype=torch.int32)

    def __str__(self):
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        mask += f", documents {self.documents}" if self.documents else ""
        return f"B{self.b} H{self.h} G{self.g} T{self.t} S{self.s} D{self.d} E{self.e} {self.dtype} {mask}"

    def tile(self, tiles, p):
        return tiles.of(p, self.size, self.causal, self.window > 0, self.documents is not None, self.dtype)

    def text(self, p, tile):
        return text(p, self.size, tile, self.dtype, self.causal, self.window > 0, self.documents is not None)

    def texts(self, tiles):
        kinds = [self.text(p, self.tile(tiles, p)) for p in NAMES] + ([BOUNDS] if self.documents else [])
        return kinds if self.sm90(tiles) else [*kinds, delta_text(self.size, element(self.dtype))]

    def sm90(self, tiles):
        return self.tile(tiles, "BackwardQ")[0] == "sm90"

    def problem(self, p, rows):
        r = self.h // self.g
        pairs = self.b * (self.g if p == "BackwardKv" else self.h)
        again = self.t * r if p == "BackwardKv" else self.s // r
        section = max(1, min(pairs, (16 << 20) // max(1, again * (self.d + self.e) * self.q.element_size())))
        if p != "BackwardKv":
            section = min(pairs, -(-section // r) * r)
        strides = []
        for x in (self.q, self.k, self.v, self.out, self.grad, self.dq, self.dk, self.dv):
            strides += x.stride()[:3]
        length = self.s if p == "BackwardKv" else self.t
        tiles = -(-length // rows)
        ints = [self.t, self.s, self.d, self.e, self.h, self.g, r, self.window, pairs, section]
        return struct.pack("<24q10ifi", *strides, *ints, 1 / math.sqrt(self.d), self.padded), pairs * tiles

    def launches(self, gpu, p, tile):
        """The arguments of Gpu.launch for one kernel."""
        data, blocks = self.problem(p, tile_rows(tile))
        if tile[0] == "sm90":
            # The side that a block keeps is read BM rows at a time, the other BN.
            kept = {"Forward": "q", "BackwardQ": ("q", "grad"), "BackwardKv": ("k", "v")}[p]
            box = lambda name: tile_rows(tile) if name in kept else tile[2]
            width = lambda name: self.e if name in ("v", "grad") else self.d
            args = [gpu.map(getattr(self, name), width(name), box(name)) if kind == "MAP" else getattr(self, name)
                    for kind, name in SM90_POINTERS[p]]
        else:
            args = [getattr(self, name) for _, name in POINTERS[p]]
        t = self.text(p, tile)
        args += [self.labels, self.bounds] if self.documents else []
        split = tile[5] if isinstance(tile[0], int) else 1
        return t, (blocks, split, 1), threads(tile), shared_bytes(p, self.size, tile), [*args, data]

    def delta_launch(self):
        """The launches before the warp-level kernels. (Warpgroup kernels compute delta themselves.)"""
        per_block = 256 // (1 << (self.size // 8 - 1).bit_length())
        data, blocks = self.problem("Delta", per_block)
        return delta_text(self.size, element(self.dtype)), (blocks, 1, 1), 256, 0, [self.grad, self.out, self.delta, data]

    def backward_launches(self, gpu, tiles):
        first = [] if self.sm90(tiles) else [self.delta_launch()]
        return first + [self.launches(gpu, p, self.tile(tiles, p)) for p in ("BackwardQ", "BackwardKv")]

    def bounds_launch(self):
        data = struct.pack("<15q2i", *[1] * 6, self.b, *[0] * 6, self.ids.stride(0), self.ids.stride(1), self.t, self.padded)
        return BOUNDS, (self.b * self.bounds.shape[1], 1, 1), 256, 0, [self.ids, self.labels, self.bounds, data]

    def run(self, gpu, tiles, backward=True):
        if self.documents:
            gpu.launch(*self.bounds_launch())
        gpu.launch(*self.launches(gpu, "Forward", self.tile(tiles, "Forward")))
        if backward:
            self.run_backward(gpu, tiles)

    def run_backward(self, gpu, tiles):
        for launch in self.backward_launches(gpu, tiles):
            gpu.launch(*launch)

    def results(self):
        return {"out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv}

    def reference(self):
        r = self.h // self.g
        q, k, v, grad = (x.double() for x in (self.q, self.k, self.v, self.grad))
        q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        x = q @ k.repeat_interleave(r, 1).transpose(-1, -2) / math.sqrt(self.d)
        i, j = torch.arange(self.t, device="cuda")[:, None], torch.arange(self.s, device="cuda")
        seen = torch.ones(self.t, self.s, dtype=torch.bool, device="cuda")
        if self.causal:
            seen &= j <= i
        if self.window:
            seen &= j > i - self.window
        if self.documents:
            seen = seen & (self.ids[:, :, None] == self.ids[:, None, :])[:, None]
        x = x.masked_fill(~seen, -math.inf)
        any_key = seen.any(-1, keepdim=True)
        lse = torch.where(any_key, torch.logsumexp(x, -1, keepdim=True), 0.0)
        p = torch.where(seen, (x - lse).exp(), 0.0)
        out = p @ v.repeat_interleave(r, 1)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        return {"out": out, "lse": lse[..., 0], "dq": dq, "dk": dk, "dv": dv}

    def flash(self):
        """torch's results, if it supports this case."""
        if self.window or self.documents or self.h != self.g or self.d != self.e or (self.causal and self.t != self.s):
            return {}
        try:
            q, k, v = (x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if self.dtype in PRODUCTS else SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), self.grad)
            return {"out": out, "dq": dq, "dk": dk, "dv": dv}
        except RuntimeError:
            return {}


def numbers(kind, b, t):
    """Ids of documents (b, t): "packed" documents of random lengths, numbered from 0; "wide": the same with numbers
    beyond 32 bits; "falling": the last one first; "mixed": any of five in any order; "turns": runs of two in turns; "one"
    for all; "each": every position its own."""
    if kind is None:
        return None
    draw = torch.Generator().manual_seed(3 * t + b)
    if kind in ("packed", "wide", "falling"):
        ids = (torch.rand(b, t, generator=draw) < 4.0 / (t + 4)).long().cumsum(1)
        ids = ids * (1 << 40) + 5 if kind == "wide" else 1000 - ids if kind == "falling" else ids
    elif kind == "mixed":
        ids = torch.randint(-2, 3, (b, t), generator=draw)
    elif kind == "turns":
        ids = torch.arange(t).div(90, rounding_mode="floor").remainder(2).expand(b, t)
    elif kind == "one":
        ids = torch.full((1, t), 9).expand(b, t)
    else:
        ids = torch.arange(t).expand(b, t)
    return ids.cuda()


def distance(x, ref):
    x, ref = x.detach().double(), ref.detach()
    norm = ref.norm().item()
    # If the reference consists only of rounding errors (one visible key: dq is 0), compare with 1.
    return (x - ref).norm().item() / (norm if norm > 1e-6 * math.sqrt(max(1, ref.numel())) else math.sqrt(ref.numel()))


def cases():
    for d in (64, 96, 128, 256):
        for t in (1, 7, 64, 100, 1024):
            yield 2, 3, 3, t, t, d, d, True
        yield 2, 3, 3, 1024, 1024, d, d, False
        yield 1, 2, 2, 100, 333, d, d, False
        yield 1, 2, 2, 333, 100, d, d, True
        yield 1, 2, 2, 100, 333, d, d, True
        yield 2, 8, 2, 300, 300, d, d, True
        yield 2, 6, 1, 200, 77, d, d, False
        for window in (1, 64, 200):
            yield 1, 4, 2, 1000, 1000, d, d, True, window
        yield 1, 2, 2, 500, 200, d, d, True, 50
        yield 2, 3, 3, 515, 515, d, d, True, 0, "f16"
        yield 2, 3, 3, 515, 515, d, d, True, 100, "f16"
    yield 2, 4, 4, 300, 300, 32, 32, True
    yield 2, 4, 4, 300, 300, 16, 24, True, 40
    yield 2, 4, 2, 200, 300, 40, 64, False
    yield 2, 4, 2, 200, 200, 80, 128, True
    yield 1, 2, 1, 150, 150, 192, 136, True


def document_cases():
    every = ("packed", "wide", "falling", "mixed", "turns", "one", "each")
    for d in (64, 128):
        for kind in every:
            yield 2, 4, 2, 1000, 1000, d, d, True, 0, "bf16", True, kind
        for kind in ("packed", "mixed"):
            yield 2, 3, 3, 515, 515, d, d, False, 0, "bf16", True, kind
            yield 2, 3, 3, 777, 777, d, d, True, 100, "bf16", True, kind
        for t in (1, 7, 64, 129, 193):
            yield 3, 2, 2, t, t, d, d, True, 0, "f16", True, "packed"
        yield 1, 2, 2, 4096, 4096, d, d, True, 0, "bf16", True, "packed"
    for d in (32, 96, 256):
        for kind in ("packed", "mixed"):
            yield 2, 4, 2, 515, 515, d, d, True, 0, "bf16", True, kind
            yield 2, 2, 2, 300, 300, d, d, False, 0, "bf16", True, kind
            yield 2, 2, 2, 515, 515, d, d, True, 70, "bf16", True, kind


def f32_cases(dtype):
    for case in cases():
        if len(case) < 10:
            yield *case, *((0,) if len(case) == 8 else ()), dtype
    for d in (64, 128):
        for kind in ("packed", "wide", "mixed", "each"):
            yield 2, 4, 2, 515, 515, d, d, True, 0, dtype, True, kind
        for kind in ("packed", "mixed"):
            yield 2, 2, 2, 300, 300, d, d, False, 0, dtype, True, kind
            yield 2, 2, 2, 515, 515, d, d, True, 70, dtype, True, kind
    for d in (4, 12, 36, 60, 100, 200):
        yield 2, 4, 2, 200, 200, d, d, True, 0, dtype


def some_cases(dtype=None):
    if dtype:
        return itertools.islice(f32_cases(dtype), int(os.environ.get("CASES", "1000")))
    kinds = {"all": itertools.chain(cases(), document_cases()), "documents": document_cases(), "plain": cases()}
    return itertools.islice(kinds[os.environ.get("KIND", "all")], int(os.environ.get("CASES", "1000")))


def check(gpu, tiles, dtype=None):
    bad = count = 0
    worst = {}
    for spec in some_cases(dtype):
        c = Case(*spec)
        c.run(gpu, tiles)
        torch.cuda.synchronize()
        first = {k: x.clone() for k, x in c.results().items()}
        for x in c.results().values():
            x.fill_(math.nan)
        c.run(gpu, tiles)
        torch.cuda.synchronize()
        # Bit for bit; NaN never compares equal.
        same = all(torch.equal(first[k], x) for k, x in c.results().items())
        ref, flash = c.reference(), c.flash() if dtype != "tf32" else {}
        floor = {"bf16": 2.5e-3, "f16": 3.2e-4, "f32": 5e-7, "tf32": 4e-4}[c.dtype]
        line = []
        for k, x in first.items():
            err = distance(x, ref[k])
            base = distance(flash[k], ref[k]) if k in flash else 0.0
            limit = {"f32": 1e-6, "tf32": 1e-3}.get(dtype, 1e-5) if k == "lse" else 2 * max(base, floor)
            ok = err <= limit
            worst[k, c.dtype] = max(worst.get((k, c.dtype), 0.0), err)
            line.append(f"{k} {err:.1e}" + (f" ({base:.1e})" if base else "") + ("" if ok else " BAD"))
            bad += not ok
        bad += not same
        count += 1
        text_ = f"{c}: {', '.join(line)}" + ("" if same else "  TWO RUNS DIFFER")
        if "BAD" in text_ or not same or os.environ.get("VERBOSE"):
            print(text_, flush=True)
    print(f"check: {count} cases, {bad} failures; worst errors",
          {f"{k} {d}": float(f"{x:.1e}") for (k, d), x in worst.items()}, f"[{time.time() - START:.0f} s]", flush=True)
    return bad


# ---- time ---------------------------------------------------------------------------------------------------------

SHAPES = [(d, h, b, t) for d, h in ((64, 32), (128, 16)) for b, t in ((16, 1024), (4, 4096), (1, 16384))]


def milliseconds(f, repeat=15):
    for _ in range(3):
        f()
    # Keeps the host ahead of the GPU, so that no launch delays the measurement.
    torch.cuda._sleep(4_000_000)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for a, b in marks:
        a.record()
        f()
        b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks)


def rival(c, backend, causal=True):
    q, k, v = (x.detach().contiguous().requires_grad_() for x in (c.q, c.k, c.v))
    grad = c.grad.contiguous()
    try:
        with sdpa_kernel(backend):
            run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            out = run()
            back = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
            with torch.no_grad():
                return milliseconds(run), back
    except RuntimeError as e:
        print("  ", backend, str(e).splitlines()[0], flush=True)
        return math.nan, math.nan


def timing(gpu, tiles):
    print("\ncausal bf16, TFLOP/s forward / backward; ours in ms: forward; dq + dk, dv, after delta for mma kernels")
    for d, h, b, t in SHAPES:
        c = Case(b, h, h, t, t, d, d, True)
        work = 4 * b * h * t * t * d / 2 / 1e9
        ready = [c.launches(gpu, "Forward", c.tile(tiles, "Forward")), *c.backward_launches(gpu, tiles)]
        forward, *each = [milliseconds(lambda: gpu.launch(*x)) for x in ready]
        backward = milliseconds(lambda: [gpu.launch(*x) for x in ready[1:]])
        line = f"d{d} {b}x{t}: ours {work / forward:.0f} / {2.5 * work / backward:.0f}"
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            f, r = rival(c, backend)
            line += f"   {name} {work / f:.0f} / {2.5 * work / r:.0f}"
        print(f"{line}   [{forward:.3f}; {' + '.join(f'{x:.3f}' for x in each)}]", flush=True)
        del c
        torch.cuda.empty_cache()


def timing_documents(gpu, tiles):
    print("\ncausal bf16 with documents, in ms: bounds; forward; dq + dk, dv; in brackets without them")
    for d, h, b, t in SHAPES:
        for kind in ("packed", "mixed", "one"):
            line = f"d{d} {b}x{t} {kind}:"
            for documents in (kind, None):
                c = Case(b, h, h, t, t, d, d, True, documents=documents)
                c.run(gpu, tiles)
                ready = [c.bounds_launch()] if documents else []
                ready += [c.launches(gpu, "Forward", c.tile(tiles, "Forward")), *c.backward_launches(gpu, tiles)]
                each = [milliseconds(lambda: gpu.launch(*x)) for x in ready]
                if documents:
                    line += f" {each.pop(0):.3f};"
                line += f" {each[0]:.3f}; {' + '.join(f'{x:.3f}' for x in each[1:])}" + ("  [" if documents else "]")
            print(line, flush=True)
            del c
            torch.cuda.empty_cache()


F32_SHAPES = [(64, 12, 4, 1024), (64, 12, 4, 4096), (128, 12, 4, 1024), (128, 12, 2, 4096), (32, 12, 4, 1024), (96, 12, 4, 1024), (256, 12, 2, 1024)]


def timing_f32(gpu, tiles, dtype):
    print(f"\n{dtype}, TFLOP/s forward / backward (of 5 products; a causal mask counts half the work); ours in ms: forward; delta + dq + dk, dv")
    for d, h, b, t in F32_SHAPES:
        for causal in (True, False):
            c = Case(b, h, h, t, t, d, d, causal, dtype=dtype)
            c.run(gpu, tiles)
            work = 4 * b * h * t * t * d / (2 if causal else 1) / 1e9
            ready = [c.launches(gpu, "Forward", c.tile(tiles, "Forward")), *c.backward_launches(gpu, tiles)]
            forward, *each = [milliseconds(lambda: gpu.launch(*x), 5) for x in ready]
            # PyTorch's f32 kernels never use single TF32 products; its decomposition does.
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            f, r = rival(c, SDPBackend.MATH if dtype == "tf32" else SDPBackend.EFFICIENT_ATTENTION, causal)
            torch.backends.cuda.matmul.allow_tf32 = False
            print(f"d{d} {b}x{t} {'causal' if causal else 'full'}: ours {work / forward:.1f} / {2.5 * work / sum(each):.1f}"
                  f"   torch's {work / f:.1f} / {2.5 * work / r:.1f}   [{forward:.3f}; {' + '.join(f'{x:.3f}' for x in each)}]",
                  flush=True)
            del c
            torch.cuda.empty_cache()


# (warps, mt, bn, stages, side, blocks), for three products and for one.
F32_SWEEP = {
    ("Forward", 32): [(4, 2, 64, 2, 1, 2), (4, 1, 64, 2, 1, 3)],
    ("BackwardQ", 32): [(4, 2, 32, 2, 1, 2), (4, 1, 64, 2, 1, 2)],
    ("BackwardKv", 32): [(4, 2, 32, 2, 1, 2), (4, 1, 64, 2, 1, 2)],
    ("Forward", 64): [(8, 1, 64, 2, 1, 1), (4, 2, 32, 1, 1, 2), (4, 1, 64, 2, 1, 2)],
    ("BackwardQ", 64): [(4, 1, 64, 2, 1, 2), (4, 2, 32, 2, 1, 2), (4, 2, 64, 1, 2, 2)],
    ("BackwardKv", 64): [(4, 2, 64, 1, 2, 2), (4, 1, 64, 1, 1, 2), (4, 1, 32, 2, 1, 2)],
    ("Forward", 96): [(4, 1, 32, 2, 1, 2), (4, 1, 64, 1, 1, 2)],
    ("BackwardQ", 96): [(4, 1, 32, 2, 1, 2), (4, 1, 64, 1, 1, 2)],
    ("BackwardKv", 96): [(4, 1, 32, 2, 1, 2), (4, 1, 32, 1, 1, 2)],
    ("Forward", 128): [(8, 1, 32, 2, 1, 1), (8, 2, 64, 1, 2, 1), (8, 1, 64, 2, 2, 1), (4, 1, 64, 1, 1, 2)],
    ("BackwardQ", 128): [(8, 1, 32, 2, 1, 1), (8, 1, 64, 2, 2, 1), (8, 2, 32, 2, 2, 1)],
    ("BackwardKv", 128): [(8, 1, 64, 2, 2, 1), (4, 1, 16, 2, 1, 2), (4, 2, 32, 1, 2, 2)],
    ("Forward", 256): [(8, 1, 64, 1, 2, 1), (8, 1, 32, 1, 2, 1)],
    ("BackwardQ", 256): [(8, 1, 32, 1, 2, 1), (8, 1, 16, 2, 2, 1)],
    ("BackwardKv", 256): [(8, 1, 32, 1, 2, 1), (8, 1, 16, 2, 2, 1)],
}


SWEEP = {
    ("Forward", 64): [(4, 2, 64, 2, True, 1, 2), (4, 2, 64, 2, False, 1, 2),
        ("sm90", 2, 64, 4, False, 2), ("sm90", 2, 64, 5, False, 2), ("sm90", 2, 64, 3, False, 2), ("sm90", 2, 128, 4, False, 1),
        ("sm90", 3, 64, 4, False, 1), ("sm90", 3, 128, 3, False, 1), ("sm90", 2, 32, 5, False, 2), ("sm90", 1, 64, 3, False, 3),
        ("sm90", 2, 80, 3, False, 2), ("sm90", 2, 80, 4, False, 2), ("sm90", 3, 96, 3, False, 1)],
    ("Forward", 128): [(4, 2, 64, 1, False, 1, 2), (4, 2, 64, 2, False, 1, 2),
        ("sm90", 3, 96, 3, False, 1), ("sm90", 3, 64, 4, False, 1), ("sm90", 2, 64, 4, False, 1), ("sm90", 2, 128, 3, False, 1),
        ("sm90", 2, 96, 3, False, 1)],
    ("BackwardQ", 64): [(4, 2, 32, 2, True, 1, 2), (4, 2, 64, 2, False, 1, 2),
        ("sm90", 2, 64, 4, True, 2), ("sm90", 2, 64, 3, True, 2), ("sm90", 3, 64, 3, False, 1), ("sm90", 3, 64, 3, True, 1),
        ("sm90", 2, 128, 3, False, 1), ("sm90", 2, 64, 4, False, 1), ("sm90", 2, 32, 4, False, 2),
        ("sm90", 1, 64, 3, False, 3),
        ("sm90", 1, 96, 3, True, 3), ("sm90", 2, 48, 4, True, 2), ("sm90", 2, 80, 3, True, 1)],
    ("BackwardQ", 128): [(4, 2, 32, 2, False, 1, 2), (4, 2, 32, 1, False, 1, 2),
        ("sm90", 2, 64, 3, False, 1), ("sm90", 3, 64, 3, True, 1), ("sm90", 2, 64, 4, False, 1), ("sm90", 3, 32, 4, False, 1),
        ("sm90", 2, 64, 3, True, 1),
        ("sm90", 3, 48, 4, False, 1), ("sm90", 3, 48, 4, True, 1)],
    ("BackwardKv", 64): [(4, 2, 32, 2, False, 1, 2), (4, 1, 64, 2, False, 1, 3),
        ("sm90", 2, 64, 4, False, 1), ("sm90", 2, 64, 3, False, 1), ("sm90", 3, 64, 3, False, 1), ("sm90", 3, 64, 3, True, 1),
        ("sm90", 2, 32, 4, False, 2), ("sm90", 2, 32, 4, True, 2), ("sm90", 2, 128, 3, True, 1), ("sm90", 1, 64, 3, False, 2),
        ("sm90", 1, 64, 3, True, 3),
        ("sm90", 1, 96, 3, False, 2), ("sm90", 1, 96, 3, True, 2), ("sm90", 1, 48, 4, False, 3), ("sm90", 1, 48, 4, True, 3), ("sm90", 2, 96, 3, False, 1), ("sm90", 2, 96, 3, True, 1), ("sm90", 2, 48, 4, False, 1), ("sm90", 2, 128, 3, False, 1), ("sm90", 3, 48, 4, False, 1), ("sm90", 1, 80, 3, True, 2), ("sm90", 1, 80, 3, False, 2)],
    ("BackwardKv", 128): [(4, 1, 32, 2, True, 1, 2), (4, 1, 64, 2, False, 1, 2),
        ("sm90", 2, 64, 3, False, 1), ("sm90", 2, 64, 4, True, 1), ("sm90", 2, 64, 3, True, 1), ("sm90", 2, 32, 4, False, 1),
        ("sm90", 2, 80, 3, True, 1), ("sm90", 2, 48, 4, False, 1)],
}


def sweeps():
    size = os.environ.get("SWEEP", "")
    return {k: v for k, v in F32_SWEEP.items() if str(k[1]) == size or not size}


def sweep_f32(gpu, tiles, dtype):
    print(f"\nsweep of {dtype}: (warps, mt, bn, stages, side, blocks): registers, local bytes, blocks an SM; TFLOP/s of the "
          "kernel's own products, causal at 4 x 12 heads x 1024 and 4096, full at 1024; the distance of its "
          "results from the table's tile; * is the table's")
    products = {"Forward": 2, "BackwardQ": 3, "BackwardKv": 4}
    wrote = {"Forward": ["out", "lse"], "BackwardQ": ["dq"], "BackwardKv": ["dk", "dv"]}
    for (p, d), list_ in sweeps().items():
        list_ = [("tf32", PRODUCTS[dtype], *tile) for tile in list_]
        speeds, far = {tile: [] for tile in list_}, {}
        for b, t, causal in ((4, 1024, True), (4, 4096, True), (4, 1024, False)):
            c = Case(b, 12, 12, t, t, d, d, causal, dtype=dtype)
            c.run(gpu, tiles)
            right = [getattr(c, name).clone() for name in wrote[p]]
            work = products[p] * (1 if causal else 2) * c.b * c.h * c.t * c.t * d / 1e9
            for tile in list_:
                if gpu.codes[text(p, d, tile, dtype, causal, False)][0] is None:
                    continue
                try:
                    ready = c.launches(gpu, p, tile)
                    speeds[tile].append(work / milliseconds(lambda: gpu.launch(*ready), 5))
                    got = max(distance(getattr(c, x), y.double()) for x, y in zip(wrote[p], right))
                    far[tile] = max(far.get(tile, 0.0), got)
                except RuntimeError as e:
                    print(p, d, tile, e)
            del c
        for tile, got in speeds.items():
            if got:
                facts = gpu.facts(text(p, d, tile, dtype, True, False), threads(tile), shared_bytes(p, d, tile))
                mark = "*" if tiles.of(p, d, True, False, dtype=dtype) == tile else " "
                print(f"{mark} {p} d{d} {tile[2:]}: {facts}  {' '.join(f'{x:.1f}' for x in got)}  {far[tile]:.0e}", flush=True)


def sweep(gpu, tiles):
    print("\nsweep: (warps, mt, bn, stages, held, split, blocks) or (sm90, groups, bn, stages, lean, blocks): registers, "
          "local bytes, blocks an SM; TFLOP/s of the kernel's own products at 16x1024, 4x4096, 1x16384; the distance of "
          "its results from the table's tile; * is the table's")
    products = {"Forward": 2, "BackwardQ": 3, "BackwardKv": 4}
    wrote = {"Forward": ["out", "lse"], "BackwardQ": ["dq"], "BackwardKv": ["dk", "dv"]}
    for (p, d), list_ in SWEEP.items():
        speeds, far = {tile: [] for tile in list_}, {}
        for d_, h, b, t in SHAPES:
            if d_ != d:
                continue
            c = Case(b, h, h, t, t, d, d, True)
            c.run(gpu, tiles)
            gpu.launch(*c.delta_launch())
            right = [getattr(c, name).clone() for name in wrote[p]]
            work = products[p] * 2 * b * h * t * t * d / 2 / 1e9
            for tile in list_:
                if time.time() - START > LIMIT:
                    print("sweep: out of time")
                    return
                if tile[0] == "sm90" and gpu.arch != (9, 0) or gpu.codes[text(p, d, tile, "bf16", True, False)][0] is None:
                    continue
                try:
                    ready = c.launches(gpu, p, tile)
                    speeds[tile].append(work / milliseconds(lambda: gpu.launch(*ready), 7))
                    got = [getattr(c, name) for name in wrote[p]]
                    far[tile] = max([far.get(tile, 0.0)] + [distance(x, y.double()) for x, y in zip(got, right)])
                except RuntimeError as e:
                    print(p, d, tile, e)
            del c
        for tile, got in speeds.items():
            if got:
                facts = gpu.facts(text(p, d, tile, "bf16", True, False), threads(tile), shared_bytes(p, d, tile))
                mark = "*" if tiles.of(p, d, True, False) == tile else " "
                print(f"{mark} {p} d{d} {tile}: {facts}  {' '.join(f'{x:.0f}' for x in got)}  {far[tile]:.0e}", flush=True)


LIMIT = 165


def main():
    global torch, F, SDPBackend, sdpa_kernel
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    todo = sys.argv[1:] or ["check", "time", "documents", "sweep", "f32", "tf32"]
    torch.manual_seed(1)
    gpu = Gpu()
    gpu.arch = torch.cuda.get_device_capability()
    tiles = Table(gpu.arch, torch.cuda.get_device_properties(0).shared_memory_per_block_optin)
    if os.environ.get("WARPS"):
        tiles.groups = []
    texts = []
    if set(todo) - set(PRODUCTS):
        texts += [t for d, h, b, t_ in SHAPES[::3] for t in Case(1, 1, 1, 8, 8, d, d, True).texts(tiles)]
    if "documents" in todo:
        texts += [t for d in (64, 128) for t in Case(1, 1, 1, 8, 8, d, d, True, documents="one").texts(tiles)]
    if "check" in todo:
        texts += [t for spec in some_cases() for t in Case(*spec).texts(tiles)]
    for dtype in (d for d in PRODUCTS if d in todo):
        texts += [t for spec in some_cases(dtype) for t in Case(*spec).texts(tiles)]
        texts += [t for d in SIZES for causal in (True, False) for t in Case(1, 1, 1, 8, 8, d, d, causal, dtype=dtype).texts(tiles)]
        texts += [text(p, d, ("tf32", PRODUCTS[dtype], *t), dtype, causal, False)
                  for (p, d), list_ in sweeps().items() for t in list_ for causal in (True, False)]
    if "sweep" in todo:
        texts += [text(p, d, tile, "bf16", True, False) for (p, d), list_ in SWEEP.items() for tile in list_]
        texts += [delta_text(d, "bf16") for d in (64, 128)]
    gpu.compile(texts)
    print(f"{torch.cuda.get_device_name()}, {len(gpu.codes)} kernels compiled [{time.time() - START:.0f} s]", flush=True)
    print("tiles: registers, local bytes, blocks an SM (bf16, causal where timed)")
    for p, size in ((p, size) for p in NAMES for size in SIZES):
        tile = tiles.of(p, size, True, False)
        t = text(p, size, tile, "bf16", True, False)
        if gpu.codes.get(t, (None,))[0]:
            print(f"  {p} {size} {tile}: {gpu.facts(t, threads(tile), shared_bytes(p, size, tile))}")
    bad = check(gpu, tiles) if "check" in todo else 0
    for dtype in (d for d in PRODUCTS if d in todo):
        bad += check(gpu, tiles, dtype)
        timing_f32(gpu, tiles, dtype)
        sweep_f32(gpu, tiles, dtype)
    if "time" in todo:
        timing(gpu, tiles)
    if "documents" in todo:
        timing_documents(gpu, tiles)
    if "sweep" in todo:
        sweep(gpu, tiles)
    print(f"done in {time.time() - START:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
