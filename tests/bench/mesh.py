"""Measures training steps on one GPU and on a mesh, in turns, beside PyTorch DDP in the same run.

    python3 tests/bench/mesh.py PERILUNE [CASE...]      PERILUNE is the program; needs two GPUs, four for the cases
                                                    that say so, and torchrun for the rival

A figure is the median over rounds of the median time between `step` events, without evaluations. Scaling is samples a second on the mesh over those
of as many GPUs without a mesh: of `one GPU`, of which the first two are measured while the others idle, and of `all apart`, runs of one GPU on all of them at
once, of which the slowest counts, as on a mesh. 1 is ideal. `gpt2_strict` compares strict shards with micro-batches of the same size, both on one GPU. NVLink multicast stays off.
"""
import json, math, os, statistics, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor

GPT2, LLAMA, RESNET = "recipes/gpt2.lua", "recipes/llama.lua", "recipes/resnet50.lua"
# recipe, steps, options of one GPU, options of the mesh, samples on the mesh over samples on one
CASES = {
    "gpt2_dp2": (GPT2, 60, ["batch=32"], ["batch=64", "--mesh", "dp=2"], 2),
    "gpt2_dp2_zero1": (GPT2, 60, ["batch=32"], ["batch=64", "--mesh", "dp=2,zero=1"], 2),
    "gpt2_1558m_zero3": (GPT2, 24, ["batch=8", "--set", "size=1558M"], ["batch=16", "--set", "size=1558M", "--mesh", "dp=2,zero=3"], 2),
    "resnet50_dp2": (RESNET, 60, ["batch=256"], ["batch=512", "--mesh", "dp=2"], 2),
    "gpt2_dp4": (GPT2, 60, ["batch=32"], ["batch=128", "--mesh", "dp=4"], 4),
    "gpt2_dp4_zero1": (GPT2, 60, ["batch=32"], ["batch=128", "--mesh", "dp=4,zero=1"], 4),
    "gpt2_1558m_zero3_dp4": (GPT2, 24, ["batch=8", "--set", "size=1558M"], ["batch=32", "--set", "size=1558M", "--mesh", "dp=4,zero=3"], 4),
    "llama_1b_tp2": (LLAMA, 18, ["batch=4"], ["batch=4", "--mesh", "tp=2"], 1),
    # The price of strict shards: of one GPU both, and the strict run on two.
    "gpt2_strict": (GPT2, 24, ["batch=4", "--set", "accumulate=8"], ["batch=32", "--strict-shards", "8"], 2),
    "gpt2_strict_dp2": (GPT2, 24, ["batch=4", "--set", "accumulate=8"], ["batch=32", "--strict-shards", "8", "--mesh", "dp=2"], 1),
}
RIVALS = {"gpt2_dp2": 32, "gpt2_dp4": 32}
SECONDS = 120
# Steps that are timed together.
TOGETHER = 4


def step_ms(program, recipe, steps, device, options, midway=lambda: None):
    """The median time of a step after the first third of a run, in ms. Calls `midway` after the second: the checkpoint at the end takes memory.

    The host runs ahead, so events come in bursts: several steps are timed together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "run", recipe, "--precision", "bf16", "--json", "--steps", str(steps), "--device", device]
        command += ["--run-dir", folder + "/run", "--set", "eval_every=0", "--set"] + options
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        times, end = [], time.monotonic() + SECONDS
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "error":
                raise SystemExit(f"{recipe} {options}: {event['message']}")
            if event["event"] == "step":
                times.append(time.monotonic())
                if len(times) == 2 * steps // 3:
                    midway()
            # The checkpoint at the end is no part of a step.
            if len(times) == steps or time.monotonic() > end:
                process.kill()
        process.wait()
    times = times[steps // 3:]
    if len(times) < 3:
        raise SystemExit(f"{recipe} {options}: too few steps within {SECONDS} s")
    many = min(TOGETHER, len(times) // 2)
    return statistics.median((b - a) / many for a, b in zip(times, times[many:])) * 1e3


def apart_ms(program, recipe, steps, gpus, options):
    """The time of a step of the slowest of runs on all GPUs at once."""
    with ThreadPoolExecutor(gpus) as pool:
        times = list(pool.map(lambda k: step_ms(program, recipe, steps, f"cuda:{k}", options), range(gpus)))
    return max(times)


def rival(batch):
    """A training step of GPT-2 124M under DDP and compile, as one process of torchrun."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import rival_cuda

    dist.init_process_group("nccl")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    model = rival_cuda.GPT2(12, 12, 768, torch.float32).cuda()
    net = torch.compile(torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if n > 1 else model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    x = torch.randint(0, 50257, (batch, 1024), device="cuda")
    y = torch.randint(0, 50257, (batch * 1024,), device="cuda")

    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(x).flatten(0, 1), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    times = []
    for k in range(6):
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(8):
            step()
        torch.cuda.synchronize()
        times += [(time.monotonic() - start) / 8 * 1e3] if k else []
    if rank == 0:
        print(json.dumps(statistics.median(times)))
    dist.destroy_process_group()


def rival_ms(batch, n):
    command = ["torchrun", f"--nproc-per-node={n}", __file__, "--rival", str(batch)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"NCCL_NVLS_ENABLE": "0"})
    return float(out.stdout.split()[-1]) if out.returncode == 0 else None


def devices(options):
    """How many devices the mesh in these options has; 1 without one."""
    axes = options[options.index("--mesh") + 1].split(",") if "--mesh" in options else []
    sizes = dict(axis.split("=") for axis in axes)
    return math.prod(int(n) for axis, n in sizes.items() if axis not in ("zero", "bucket", "schedule"))


def main(program, names):
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"there is no case {unknown[0]}; the cases are {', '.join(CASES)}")
    print(f"{'case':22} {'GPUs':>4} {'one GPU':>10} {'all apart':>10} {'mesh':>10} {'scaling':>8} {'of apart':>8} {'DDP one':>10} {'DDP mesh':>10} {'scaling':>8} {'speed-up':>8}")
    for name in names or CASES:
        recipe, steps, one, mesh, samples = CASES[name]
        gpus = devices(mesh)
        of_mesh = lambda k: "cuda:" + ",".join(map(str, range(gpus))) if gpus > 1 else f"cuda:{k}"
        sides = lambda k: (
            step_ms(program, recipe, steps, f"cuda:{k}", one),
            apart_ms(program, recipe, steps, max(gpus, 2), one),
            step_ms(program, recipe, steps, of_mesh(k), mesh),
        )
        a, apart, b = (statistics.median(side) for side in zip(*(sides(k) for k in range(2))))
        # Strict shards on one GPU are compared with as many micro-batches there.
        scaling = samples / max(gpus, 2) / b
        row = f"{name:22} {gpus:4} {a:7.2f} ms {apart:7.2f} ms {b:7.2f} ms {a * scaling:8.3f} {apart * scaling:8.3f}"
        if name in RIVALS:
            c, d = rival_ms(RIVALS[name], 1), rival_ms(RIVALS[name], gpus)
            row += f" {c:7.2f} ms {d:7.2f} ms {c / d:8.3f} {d / b:8.2f}" if c and d else "   torchrun failed"
        print(row, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--rival":
        rival(int(sys.argv[2]))
    elif len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        raise SystemExit(__doc__)
