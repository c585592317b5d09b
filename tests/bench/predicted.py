"""Compares what `perilune check --for` predicts for one GPU and for a mesh with what runs take.

    python3 tests/bench/predicted.py PERILUNE [CASE...]      PERILUNE is the program; a case of a mesh needs as many GPUs

Both time columns are of a step: the prediction with collectives beside kernels, and the median time between `step` events after the first
third of a run. Memory is of the GPU that uses most of it: the prediction with 512 MiB for the driver, and what NVML reports between two steps.
"""
import re, subprocess, sys
from mesh import GPT2, LLAMA, RESNET, devices, step_ms

LARGE = ["--set", "size=1558M"]
# recipe, steps, options
CASES = {
    "gpt2": (GPT2, 40, ["batch=32"]),
    "gpt2_dp2": (GPT2, 40, ["batch=64", "--mesh", "dp=2"]),
    "gpt2_dp2_zero1": (GPT2, 40, ["batch=64", "--mesh", "dp=2,zero=1"]),
    "gpt2_tp2": (GPT2, 40, ["batch=32", "--mesh", "tp=2"]),
    "gpt2_pp2": (GPT2, 18, ["batch=8", "--set", "accumulate=8", "--mesh", "pp=2"]),
    "gpt2_dp4": (GPT2, 40, ["batch=128", "--mesh", "dp=4"]),
    "gpt2_dp2_tp2": (GPT2, 40, ["batch=64", "--mesh", "dp=2,tp=2"]),
    "gpt2_pp4": (GPT2, 18, ["batch=8", "--set", "accumulate=8", "--mesh", "pp=4"]),
    "gpt2_1558m_zero3_dp4": (GPT2, 18, ["batch=32", *LARGE, "--mesh", "dp=4,zero=3"]),
    # Those with which four GPUs were judged, beside the four before.
    "gpt2_dp4_zero1": (GPT2, 40, ["batch=128", "--mesh", "dp=4,zero=1"]),
    "gpt2_774m_zero3_dp4": (GPT2, 24, ["batch=32", "--set", "size=774M", "--mesh", "dp=4,zero=3"]),
    "gpt2_350m_dp2_pp2": (GPT2, 18, ["batch=16", "--set", "size=350M", "--set", "accumulate=8", "--mesh", "dp=2,pp=2"]),
    "gpt2_1558m_pp4": (GPT2, 18, ["batch=4", *LARGE, "--set", "accumulate=8", "--mesh", "pp=4"]),
    "llama_1b_tp4": (LLAMA, 18, ["batch=4", "--mesh", "tp=4"]),
    "llama_1b_cp4": (LLAMA, 18, ["batch=4", "--mesh", "cp=4"]),
    "llama_1b_dp2_tp2": (LLAMA, 18, ["batch=8", "--mesh", "dp=2,tp=2"]),
    "llama_1b_zero3_dp4": (LLAMA, 18, ["batch=16", "--mesh", "dp=4,zero=3"]),
    "resnet50_dp4": (RESNET, 40, ["batch=1024", "--mesh", "dp=4"]),
    "gpt2_1558m": (GPT2, 18, ["batch=8", *LARGE]),
    "gpt2_1558m_zero3": (GPT2, 18, ["batch=16", *LARGE, "--mesh", "dp=2,zero=3"]),
    "llama_1b": (LLAMA, 18, ["batch=4"]),
    "llama_1b_tp2": (LLAMA, 18, ["batch=4", "--mesh", "tp=2"]),
    "llama_1b_cp2": (LLAMA, 18, ["batch=4", "--mesh", "cp=2"]),
    "llama_1b_pp2": (LLAMA, 18, ["batch=1", "--set", "accumulate=8", "--mesh", "pp=2"]),
    "resnet50": (RESNET, 40, ["batch=256"]),
    "resnet50_dp2": (RESNET, 40, ["batch=256", "--mesh", "dp=2"]),
}


def gpu():
    """The name of a GPU as `--for` takes it, such as h200."""
    name = subprocess.check_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True)
    return re.search(r"[A-Z]+\d+", name)[0].lower()


def predicted(program, recipe, options, target):
    """Milliseconds of a step and GiB of a GPU."""
    command = [program, "check", recipe, "--precision", "bf16", "--for", target, "--set", *options]
    text = subprocess.check_output(command, text=True)
    times = re.search(r"predicted ([\d.]+) (us|ms|s) a step(?:.*?nothing overlaps, ([\d.]+) (us|ms|s) if)?", text)
    number, unit = times.group(3, 4) if times.group(3) else times.group(1, 2)
    memory = re.search(r"fit +([\d.]+) (MiB|GiB)", text)
    return float(number) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit], float(memory[1]) / {"MiB": 1024, "GiB": 1}[memory[2]]


def used():
    """GiB in use on the GPU that uses most."""
    lines = subprocess.check_output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True)
    return max(int(line) for line in lines.split()) / 1024


def measured(program, recipe, steps, options):
    """Milliseconds of a step and GiB of a GPU."""
    before, memory = used(), []
    device = "cuda:" + ",".join(map(str, range(devices(options))))
    time = step_ms(program, recipe, steps, device, options, lambda: memory.append(used() - before))
    return time, memory[0]


def main(program, names):
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"there is no case {unknown[0]}; the cases are {', '.join(CASES)}")
    target = gpu()
    print(f"{'case':20} {'predicted':>10} {'measured':>10} {'ratio':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}")
    for name in names or CASES:
        recipe, steps, options = CASES[name]
        (a, m), (b, n) = predicted(program, recipe, options, target), measured(program, recipe, steps, options)
        print(f"{name:20} {a:7.2f} ms {b:7.2f} ms {a / b:6.3f} {m:6.2f} GiB {n:6.2f} GiB {m / n:6.3f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        raise SystemExit(__doc__)
