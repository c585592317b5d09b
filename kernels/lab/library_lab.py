"""Runs the library's kernels on a GPU: correctness against the CPU backend and torch, the same bits twice, and times.

Launches come from the Rust code itself, so that what is checked here is what ships. On the build machine:

    cargo run -p perilune-cuda --example library_cases target/library-cases
    python3 kernels/lab/library_lab.py pack target/library-cases target/library-cases.tgz

and on a machine with a GPU, torch and cupy, at the root of the repository (the archive is carried there):

    python3 kernels/lab/library_lab.py target/library-cases.tgz [--only REGEX] [--no-cases] [--no-bench]
"""

import argparse
import ctypes
import re
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def pack(folder, to):
    with tarfile.open(to, "w:gz", compresslevel=6) as tar:
        for p in sorted(Path(folder).iterdir()):
            tar.add(p, arcname=p.name)
    print(to, Path(to).stat().st_size >> 10, "KiB")


class Device:
    """The driver API, by ctypes: launches with any arguments."""

    def __init__(self, texts):
        import cupy
        import torch

        torch.zeros(1, device="cuda")
        self.cuda = ctypes.CDLL("libcuda.so.1")
        cupy.cuda.Device(0).use()
        self.functions = {}
        names = sorted(texts)
        for i in range(0, len(names), 64):
            group = names[i : i + 64]
            module = cupy.RawModule(
                code="\n".join(texts[k] for k in group), options=("-std=c++17", f"-I{HERE}"), backend="nvrtc"
            )
            for k in group:
                raw = module.get_function(f"f_{k}")
                raw.max_dynamic_shared_size_bytes = 96 << 10
                self.functions[k] = (raw.kernel.ptr, raw)
        print(len(names), "functions compiled")

    def launch(self, k, grid, block, shared, args):
        slots = (ctypes.c_void_p * max(1, len(args)))(*[ctypes.cast(a, ctypes.c_void_p) for a in args])
        status = self.cuda.cuLaunchKernel(
            ctypes.c_void_p(self.functions[k][0]), grid, 1, 1, block, 1, 1, shared, ctypes.c_void_p(0), slots, None
        )
        if status:
            sys.exit(f"cuLaunchKernel of f_{k}: error {status}")


class Case:
    def __init__(self, name, text):
        self.name, self.inputs, self.launches, self.scratch = name, [], [], 0
        for line in text.splitlines():
            word, *rest = line.split(" ")
            if word == "label":
                self.label = " ".join(rest)
            elif word == "input":
                self.inputs.append((int(rest[0]), rest[1]))
            elif word == "output":
                self.output = (int(rest[0]), rest[1])
            elif word == "scratch" and not self.launches:
                self.scratch = int(rest[0])
            elif word == "launch":
                self.launches.append([int(x) for x in rest] + [[]])
            else:
                self.launches[-1][4].append((word, rest))

    def prepare(self, device, inputs):
        """Returns a function that runs the launches; outputs and workspace start with garbage values."""
        import torch

        def room(n, fill):
            return torch.full((max(16, n),), fill, dtype=torch.uint8, device="cuda")

        out, scratch, fault = room(self.output[0], 0xEE), room(self.scratch, 0xCC), room(64, 0)
        values = [t.data_ptr() for t in inputs] + [out.data_ptr()]
        keep, calls = [], []
        for k, grid, block, shared, given in self.launches:
            args = []
            for word, rest in given:
                if word == "value":
                    a = ctypes.c_uint64(values[int(rest[0])] + int(rest[1]))
                elif word == "scratch":
                    a = ctypes.c_uint64(scratch.data_ptr() + int(rest[0]))
                elif word == "fault":
                    a = ctypes.c_uint64(fault.data_ptr())
                elif word == "i32":
                    a = ctypes.c_int32(int(rest[0]))
                elif word == "i64":
                    a = ctypes.c_int64(int(rest[0]))
                elif word == "bytes":
                    raw = bytes.fromhex(rest[0])
                    a = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
                elif word == "table":
                    words = [int(x) for x in rest]
                    words = [x - (1 << 64) if x >> 63 else x for x in words]
                    keep.append(torch.tensor(words, dtype=torch.int64, device="cuda"))
                    a = ctypes.c_uint64(keep[-1].data_ptr())
                keep.append(a)
                args.append(ctypes.pointer(a))
            calls.append((k, grid, block, shared, args))
        torch.cuda.synchronize()

        def run():
            for c in calls:
                device.launch(*c)

        run.keep = (keep, inputs, scratch)
        return run, out, fault


def dtype_of(name):
    import torch

    return {
        "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
        "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.uint8,
    }[name]  # fmt: skip


SLACK = {"f64": 1e-12, "f32": 4e-6, "f16": 2e-3, "bf16": 1.6e-2}


def wrong(got, want, dtype):
    """The number of elements whose error is too large."""
    import torch

    if dtype not in SLACK:
        return int((got != want).sum())
    g, w = got.double(), want.double()
    scale = torch.where(w.isfinite(), w, torch.zeros_like(w)).abs().amax().clamp(min=1e-30) if w.numel() else 1
    close = (g == w) | (g.isnan() & w.isnan()) | ((g - w).abs() <= SLACK[dtype] * scale)
    return int((~close).sum())


def check_cases(device, cases, files):
    import torch

    bad, exact = 0, 0
    for c in cases:
        inputs = [torch.frombuffer(bytearray(files(f"{c.name}.in{k}") or b"\0" * 16), dtype=torch.uint8).cuda()
                  for k in range(len(c.inputs))]  # fmt: skip
        run, out, fault = c.prepare(device, inputs)
        run()
        torch.cuda.synchronize()
        first = out.clone()
        run()
        torch.cuda.synchronize()
        n, dtype = c.output
        if not torch.equal(first, out):
            print("TWO RESULTS", c.label)
            bad += 1
        said = fault.cpu().view(torch.int64)
        want = files(f"{c.name}.want")
        if want is None:
            if not (int(fault[0]) == 1 and int(said[2]) == 10):
                print("NO FAULT", c.label)
                bad += 1
            continue
        if int(fault[0]):
            print("FAULT", c.label, said[1:3].tolist())
            bad += 1
        if n == 0:
            continue
        want = torch.frombuffer(bytearray(want), dtype=torch.uint8)
        got = out[:n].cpu()
        if torch.equal(got, want):
            exact += 1
            continue
        off = wrong(got.view(dtype_of(dtype)), want.view(dtype_of(dtype)), dtype)
        if off:
            print("WRONG", c.label, off, "elements")
            bad += 1
    print(f"{len(cases)} cases, {exact} exact, {bad} BAD")
    return bad


def time_of(f, repeat=20):
    import torch

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


def bench(device, cases):
    import torch

    bad = 0
    for c in cases:
        op, _, *words = c.label.split(" ")
        torch.manual_seed(1)
        xs = []
        dims = re.findall(r"\[([\d, ]+)\]", c.label)
        shape = [int(x) for x in dims[0].split(",")] if dims else None
        for n, d in c.inputs:
            t = dtype_of(d)
            count = n // torch.empty(0, dtype=t).element_size()
            if d in SLACK:
                xs.append(torch.randn(count, device="cuda").to(t))
            else:
                xs.append(torch.randint(-1000, 1000, (count,), device="cuda").to(t))
        torch_f, want = None, None
        out_dtype = dtype_of(c.output[1])
        if op == "index_add":
            rows, width = (65, 64) if words[-1] == "small" else (50304, 768)
            k = xs[0].numel()
            spread = words[1]
            if spread == "zipf":
                p = 1.0 / torch.arange(1, rows + 1, device="cuda", dtype=torch.float64)
                ids = torch.multinomial(p, k, replacement=True)
            elif spread == "same":
                ids = torch.full((k,), 17, device="cuda")
            else:
                ids = torch.randint(0, rows, (k,), device="cuda")
            xs[0] = ids
            src = xs[1].view(k, width)
            want = torch.zeros(rows, width, device="cuda", dtype=torch.float64).index_add_(0, ids, src.double())
            torch_f = lambda: torch.ops.aten.embedding_dense_backward(src, ids, rows, -1, False)
        elif op == "index_select":
            ids = torch.randint(0, 50304, (65536,), device="cuda")
            xs[1] = ids
            x = xs[0].view(50304, 768)
            torch_f = lambda: torch.index_select(x, 0, ids)
        elif op == "scatter_add":
            bins, k = int(words[0]), int(words[1])
            ids = torch.randint(0, bins, (k,), device="cuda")
            xs[0] = ids
            src = xs[1]
            want = torch.zeros(bins, device="cuda", dtype=torch.float64).index_add_(0, ids, src.double())
            torch_f = lambda: torch.zeros(bins, device="cuda").scatter_add_(0, ids, src)
        elif op in ("gather", "scatter"):
            axis = int(words[0])
            x = xs[0].view(4096, 4096)
            ids = torch.randint(0, 4096, (4096, 4096), device="cuda")
            if op == "scatter":
                ids = torch.argsort(torch.rand(4096, 4096, device="cuda"), 1)
            xs[1] = ids
            if op == "gather":
                torch_f = lambda: torch.gather(x, axis, ids)
            else:
                src = xs[2].view(4096, 4096)
                torch_f = lambda: torch.scatter(x, axis, ids, src)
        elif op == "argsort":
            x, way = xs[0].view(shape), words[-1] == "1"
            torch_f = lambda: torch.sort(x, 1, descending=way, stable=True)
            want = torch_f()[1]
        elif op == "argreduce":
            x, axis, way = xs[0].view(shape), int(words[-2]), words[-1] == "1"
            torch_f = (lambda: torch.argmax(x, axis)) if way else (lambda: torch.argmin(x, axis))
            hit = torch_f().unsqueeze(axis)
            best = torch.gather(x, axis, hit)
            ramp = torch.arange(shape[axis], device="cuda").view([-1, 1] if axis == 0 else [1, -1])
            want = torch.where(x == best, ramp, 1 << 40).amin(axis)
        elif op == "cumsum":
            x, axis = xs[0].view(shape), int(words[-1])
            torch_f = lambda: torch.cumsum(x, axis)
            want = torch.cumsum(x.double() if out_dtype.is_floating_point else x, axis)
        elif op == "cat":
            a, b = xs[0].view(4096, 4096), xs[1].view(4096, 4096)
            torch_f = lambda: torch.cat([a, b], 1)
        elif op == "strided_pad":
            low, shape, total = (64, (4096, 4096), 4224) if words[-1] == "64" else (3, (64, 256, 256), 262)
            x = xs[0].view(shape)
            torch_f = lambda: torch.nn.functional.pad(x, (low, total - low - shape[-1]))
        elif op == "col2im":
            x = xs[0].view(2048, 56, 58, 3)
            want = sum(torch.nn.functional.pad(x[..., s], (0, 0, s, 2 - s)) for s in range(3))
        elif op == "matmul":
            a, b = xs[0].view(1024, 1024), xs[1].view(1024, 1024)
            if out_dtype.is_floating_point:
                torch_f = lambda: a @ b
                want = a.double() @ b.double()
            else:
                want = (a.double() @ b.double()).to(out_dtype)
        if want is None:
            want = torch_f()
        inputs = [t.contiguous().view(torch.uint8).view(-1) for t in xs]
        run, out, fault = c.prepare(device, inputs)
        run()
        torch.cuda.synchronize()
        first = out.clone()
        run()
        torch.cuda.synchronize()
        same = torch.equal(first, out)
        got = out[: c.output[0]].view(out_dtype)
        off = wrong(got, want.reshape(-1).to(torch.float64 if c.output[1] in SLACK else out_dtype), c.output[1])
        if off or not same or int(fault[0]):
            bad += 1
        moved = sum(n for n, _ in c.inputs) + c.output[0]
        ours, theirs = time_of(run), time_of(torch_f) if torch_f else float("nan")
        floor = moved / 4.3e9
        note = "" if same and not off and not int(fault[0]) else f"  BAD: {off} wrong, same bits {same}, fault {int(fault[0])}"
        print(
            f"{c.label:48} {ours * 1e3:9.1f} us  torch {theirs * 1e3:9.1f} us  x{theirs / ours:5.2f}  "
            f"floor {floor * 1e3:8.1f} us  launches {len(c.launches)}{note}",
            flush=True,
        )
        del inputs, run, out, first, got, want, xs
    return bad


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "pack":
        return pack(sys.argv[2], sys.argv[3])
    p = argparse.ArgumentParser()
    p.add_argument("archive")
    p.add_argument("--only", default="")
    p.add_argument("--no-cases", action="store_true")
    p.add_argument("--no-bench", action="store_true")
    a = p.parse_args()
    tar = {}
    with tarfile.open(a.archive) as t:
        for m in t:
            tar[m.name] = t.extractfile(m).read()
    cases = [Case(n[:-5], b.decode()) for n, b in tar.items() if n.endswith(".case")]
    cases = [c for c in cases if re.search(a.only, c.label)]
    if a.no_bench:
        cases = [c for c in cases if " bench " not in c.label]
    if a.no_cases:
        cases = [c for c in cases if " bench " in c.label]
    wanted = {l[0] for c in cases for l in c.launches}
    device = Device({k: tar[f"f_{k}.cu"].decode() for k in wanted})
    small, large = [c for c in cases if " bench " not in c.label], [c for c in cases if " bench " in c.label]
    bad = check_cases(device, small, tar.get) + bench(device, large)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
