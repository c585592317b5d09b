"""Measures collectives between two GPUs beside PyTorch's NCCL, in turns of one run.

    python3 tests/bench/collectives.py PERILUNE [OP...]      PERILUNE is the program; OP: all_reduce all_gather reduce_scatter

Bus bandwidth in GB/s as nccl-tests define it: 2 (p - 1) / p of the bytes of an all-reduce over the time, (p - 1) / p of the others.
`memory`: GPUs of one process that read each other's memory; `nccl`: two processes, as under a launcher. Medians over the rounds.
NVLink multicast stays off.

All sides go through as many tensors, like the gradients of a step: one of 16 MiB alone would stay in the GPU's cache. `reused` is what PyTorch
reaches with one tensor.
"""
import json, os, statistics, subprocess, sys

OPS = ["all_reduce", "all_gather", "reduce_scatter"]
MIB = [1, 16, 128, 1024]
# The most tensors, and the most MiB of them, as in `collectives.lua`.
MOST, MOST_MIB = 32, 2048
ROUNDS = 3
# Calls among which the time of the rival is shared.
CALLS = 256
LUA = os.path.join(os.path.dirname(__file__), "collectives.lua")


def ours(program, op, processes):
    """Microseconds by MiB."""
    run = ["run", LUA, "--mesh", "dp=2,bucket=0", "--device", "cuda", "--set", f"op={op}", "--set", f"mib={','.join(map(str, MIB))}"]
    command = [program] + (["launch", "-n", "2"] if processes == 2 else []) + run
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()]
    return {int(mib): float(us) for mib, us in (row for row in rows if len(row) == 2 and row[0].isdigit())}


def theirs(op):
    """Microseconds by MiB: of a tensor of many, and of one that is reused."""
    command = ["torchrun", "--nproc-per-node=2", __file__, "--rival", op]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stderr=subprocess.DEVNULL, env=os.environ | {"NCCL_NVLS_ENABLE": "0"})
    return [{int(mib): us for mib, us in side.items()} for side in json.loads(out.stdout.splitlines()[-1])]


def rival(op):
    """The same under torchrun."""
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)

    def measure(n, count):
        xs = [torch.zeros(n, device="cuda") for _ in range(count)]
        parts = [torch.zeros(n // p, device="cuda") for _ in range(count if op != "all_reduce" else 0)]
        call = {
            "all_reduce": lambda k: dist.all_reduce(xs[k]),
            "all_gather": lambda k: dist.all_gather_into_tensor(xs[k], parts[k]),
            "reduce_scatter": lambda k: dist.reduce_scatter_tensor(parts[k], xs[k]),
        }[op]
        times = []
        for round in range(5):
            torch.cuda.synchronize()
            start = time.monotonic()
            for k in range(CALLS):
                call(k % count)
            torch.cuda.synchronize()
            times += [(time.monotonic() - start) / CALLS * 1e6] if round else []
        return statistics.median(times)

    counts = {mib: max(2, min(MOST, MOST_MIB // mib)) for mib in MIB}
    result = [{mib: measure(mib << 18, count) for mib, count in side.items()} for side in (counts, dict.fromkeys(MIB, 1))]
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def main(program, ops):
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise SystemExit(f"there is no collective {unknown[0]}; they are {', '.join(OPS)}")
    heads = ["memory", "nccl", "PyTorch", "reused"]
    print(f"{'op':16} {'MiB':>5}", *(f"{head:>10}" for head in heads), f"{'memory/PT':>10} {'nccl/PT':>10}   bus bandwidth in GB/s")
    for op in ops or OPS:
        rounds = [(ours(program, op, 1), ours(program, op, 2), *theirs(op)) for _ in range(ROUNDS)]
        share = 1.0 if op == "all_reduce" else 0.5
        for mib in MIB:
            rates = [statistics.median(share * (mib << 20) / us[mib] / 1e3 for us in side) for side in zip(*rounds)]
            print(f"{op:16} {mib:5}", *(f"{rate:10.1f}" for rate in rates), f"{rates[0] / rates[2]:10.2f} {rates[1] / rates[2]:10.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--rival":
        rival(sys.argv[2])
    elif len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        raise SystemExit(__doc__)
