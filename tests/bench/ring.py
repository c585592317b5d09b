"""Measures causal attention with gradients over a sequence that GPUs divide in a zig-zag ring, beside one GPU and PyTorch.

    python3 tests/bench/ring.py PERILUNE [--length N] [--heads H] [--size D] [--seconds S] [--devices cuda:0,1] [--documents L]

PERILUNE is the program. The ring has one sequence of P N positions on P GPUs (`--devices`); one GPU, and PyTorch's flash attention on it,
have P sequences of N. For each head, a GPU has P N^2 / 2 pairs of a query and a key that it sees (but for the diagonal). A pair counts
14 D floating-point operations: two products of 2 D forward and five backward. (Kernels that compute dq apart from dk and dv execute nine
products.) With packed documents of L positions, which divides N, a GPU of the ring has N L / 2 pairs, and the single one has one sequence
of N; PyTorch has no such mask in this kernel and is left out. Figures are medians of runs of about S seconds, all in turn in one run of this script. First a small ring is compared
with one device: the same random numbers must have the same results.
"""
import argparse, json, os, statistics, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))


def perilune(program, device, mesh, **params):
    """Milliseconds of a run, peak bytes and the norms of the results."""
    command = [program, "run", os.path.join(HERE, "ring.lua"), "--device", device]
    command += ["--mesh", mesh] if mesh else []
    for key, value in params.items():
        command += ["--set", f"{key}={value}"]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {out.returncode}")
    numbers = [float(x) for x in out.stdout.split("\n")[-2].split()]
    return numbers[0], numbers[1], numbers[2:]


def rival(batch, heads, length, size, seconds, device):
    """PyTorch's attention, by its flash kernels on a GPU."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda = device != "cpu"
    shape = (batch, heads, length, size)
    q, k, v, g = (torch.randn(shape, device="cuda" if cuda else "cpu", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(True)

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), g)
        if cuda:
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    times, start = [], time.monotonic()
    while len(times) < 3 or time.monotonic() - start < seconds:
        before = time.monotonic()
        run()
        times.append((time.monotonic() - before) * 1e3)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    print(json.dumps([statistics.median(times), peak]))


def rival_figures(a, ranks):
    numbers = [ranks, a.heads, a.length, a.size, a.seconds, a.devices]
    out = subprocess.run([sys.executable, __file__, "--rival", *map(str, numbers)], stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout) if out.returncode == 0 else None


def check(a, ranks):
    """Compares a small ring with one device."""
    small = dict(batch=1, heads=2, length=min(ranks * a.length, 3000), size=a.size, seconds=0, documents=a.documents and 700)
    one = perilune(a.program, a.devices.split(",")[0], None, **small)[2]
    ring = perilune(a.program, a.devices, f"cp={ranks},keys=ring", **small)[2]
    for name, x, y in zip(("result", "dq", "dk", "dv"), one, ring):
        if not abs(x - y) <= 1e-2 * x:
            raise SystemExit(f"the norm of {name} is {x} on one device, {y} in a ring")


def main():
    parse = argparse.ArgumentParser(usage=__doc__)
    parse.add_argument("program")
    parse.add_argument("--length", type=int, default=65536)
    parse.add_argument("--heads", type=int, default=16)
    parse.add_argument("--size", type=int, default=128)
    parse.add_argument("--seconds", type=float, default=3.0)
    parse.add_argument("--devices", default="cuda:0,1")
    parse.add_argument("--documents", type=int, default=0)
    a = parse.parse_args()
    one, ranks = a.devices.split(",")[0], 2 if a.devices == "cpu" else len(a.devices.split(","))
    if a.documents and a.length % a.documents:
        raise SystemExit(f"documents of {a.documents} positions do not divide a sequence of {a.length}")
    check(a, ranks)
    shared = dict(heads=a.heads, size=a.size, seconds=a.seconds, documents=a.documents)
    whole = dict(batch=1, length=ranks * a.length, **shared)
    figures = [
        (f"zig-zag ring, {ranks} devices", perilune(a.program, a.devices, f"cp={ranks},keys=ring", **whole)),
        (f"heads, {ranks} devices", perilune(a.program, a.devices, f"cp={ranks},keys=heads", **whole)),
        ("one device", perilune(a.program, one, None, batch=1 if a.documents else ranks, length=a.length, **shared)),
    ]
    if not a.documents:
        figures.append(("PyTorch flash, one device", rival_figures(a, ranks)))
    # Pairs of each head of a device.
    pairs = a.length * (a.documents or ranks * a.length) / 2
    flops = 14 * a.size * a.heads * pairs
    documents = f", documents of {a.documents}" if a.documents else ""
    print(f"{a.length} positions a device, {a.heads} heads of {a.size}, bf16, causal{documents}, forward and backward")
    print(f"{'':28} {'ms':>10} {'TFLOP/s a device':>17} {'GiB':>8}")
    for name, found in figures:
        if found is None:
            print(f"{name:28} failed")
        else:
            print(f"{name:28} {found[0]:10.2f} {flops / found[0] / 1e9:17.1f} {found[1] / 2**30:8.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 8 and sys.argv[1] == "--rival":
        rival(*map(int, sys.argv[2:6]), float(sys.argv[6]), sys.argv[7])
    elif len(sys.argv) > 1:
        main()
    else:
        raise SystemExit(__doc__)
