"""Measures collectives between two GPUs beside PyTorch's NCCL, in turns of one run.

    python3 tests/bench/collectives.py PERILUNE [OP...]      PERILUNE is the program; OP: all_reduce all_gather reduce_scatter

Bus bandwidth in GB/s as nccl-tests define it: 2 (p - 1) / p of the bytes of an all-reduce over the time, (p - 1) / p of the others.
`memory`: GPUs of one process that read each other's memory; `nccl`: two processes, as under a launcher. Medians over the rounds.
NVLink multicast stays off.
"""
import json, os, statistics, subprocess, sys

OPS = ["all_reduce", "all_gather", "reduce_scatter"]
MIB = [1, 16, 128, 1024]
ROUNDS = 3
LUA = os.path.join(os.path.dirname(__file__), "collectives.lua")


def ours(program, op, processes):
    """Microseconds by MiB."""
    run = ["run", LUA, "--mesh", "dp=2,bucket=0", "--device", "cuda", "--set", f"op={op}", "--set", f"mib={','.join(map(str, MIB))}"]
    command = [program] + (["launch", "-n", "2"] if processes == 2 else []) + run
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [line.split() for line in out.splitlines()]
    return {int(mib): float(us) for mib, us in (row for row in rows if len(row) == 2 and row[0].isdigit())}


def theirs(op):
    command = ["torchrun", "--nproc-per-node=2", __file__, "--rival", op]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stderr=subprocess.DEVNULL, env=os.environ | {"NCCL_NVLS_ENABLE": "0"})
    return {int(mib): us for mib, us in json.loads(out.stdout.splitlines()[-1]).items()}


def rival(op):
    """The same under torchrun."""
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    result = {}
    for mib in MIB:
        n = mib << 18
        x = torch.zeros(n, device="cuda")
        part = torch.zeros(n // p, device="cuda")
        call = {
            "all_reduce": lambda: dist.all_reduce(x),
            "all_gather": lambda: dist.all_gather_into_tensor(x, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
        }[op]
        times = []
        for k in range(5):
            torch.cuda.synchronize()
            start = time.monotonic()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            times += [(time.monotonic() - start) / 20 * 1e6] if k else []
        result[mib] = statistics.median(times)
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def main(program, ops):
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise SystemExit(f"there is no collective {unknown[0]}; they are {', '.join(OPS)}")
    print(f"{'op':16} {'MiB':>5} {'memory':>12} {'nccl':>12} {'PyTorch':>12} {'memory/PT':>10} {'nccl/PT':>10}   bus bandwidth in GB/s")
    for op in ops or OPS:
        rounds = [(ours(program, op, 1), ours(program, op, 2), theirs(op)) for _ in range(ROUNDS)]
        share = 1.0 if op == "all_reduce" else 0.5
        for mib in MIB:
            a, b, c = (statistics.median(share * (mib << 20) / us[mib] / 1e3 for us in side) for side in zip(*rounds))
            print(f"{op:16} {mib:5} {a:12.1f} {b:12.1f} {c:12.1f} {a / c:10.2f} {b / c:10.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--rival":
        rival(sys.argv[2])
    elif len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        raise SystemExit(__doc__)
