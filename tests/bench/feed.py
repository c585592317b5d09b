"""Measures how well data feeds a GPU: what a step waits for the images of JPEG files and for the tokens of a file, beside data on the device.

    python3 tests/bench/feed.py PERILUNE [--images 20000] [--steps 150] [--workers N] [--device cuda] [CASE...]      needs NumPy and Pillow; decode needs PyTorch

PERILUNE may be several programs with commas between them; they are run in turns. All files are made first, from a seed.

decode   images a second that loaders make of JPEG files of 500 x 375, quality 90: random crops of 224 x 224, batches of 256, --workers threads (all processors). The
         rival is PyTorch's DataLoader with torchvision's RandomResizedCrop. Beside it, what one processor decodes with libjpeg-turbo (Pillow).
resnet50 milliseconds a step of ResNet-50 in bf16, 256 images: noise on the device, JPEG files of 256 x 192, JPEG files of 500 x 375.
copy     milliseconds a step of 15 products of 8192 x 8192 in bf16: alone, and with a batch of 32 MiB from the host, which is read once.
gpt2     milliseconds a step of GPT-2 124M in bf16, 32 x 1024 tokens: random tokens on the device, a file of 1 GiB.

A time is the mean over the steps after the first third, in which kernels are compiled; a figure is the median of three rounds.
"""
import argparse, concurrent.futures, io, json, os, statistics, subprocess, tempfile, time

import numpy as np

ROUNDS = 3
LOADER = """
local pl = require "perilune"
local loader = pl.data.images("%s", { pixels = 224, crop = "random", threads = %d }):shuffle(1):batch(256)
local function read(first, count)
  for k = first, first + count - 1 do pl.step(function() loader:batch_at(k) end) end
end
read(0, 4)
local start = pl.clock()
read(4, %d)
print(256 * %d / (pl.clock() - start))
"""

PRODUCTS = """
local pl = require "perilune"
local loader = pl.data.token_files("%s"):windows { length = 65535, batch = 64, seed = 1 }
local w = pl.state((pl.randn { 8192, 8192 } * 0.01):to "bf16")
local last
local function steps(first, count, batches)
  for k = first, first + count - 1 do
    local result = pl.step(function()
      local y, sum = w, 0
      for _ = 1, 15 do y = y:matmul(w) end
      if batches then sum = loader:batch_at(k).x:sum() end
      return y:to("f32"):sum() + sum
    end)
    if last then last:item() end
    last = result
  end
  last:item()
end
for _, batches in ipairs { false, true } do
  steps(0, 10, batches)
  local start = pl.clock()
  steps(10, 60, batches)
  print(1e3 * (pl.clock() - start) / 60)
end
"""


def picture(seed, width, height):
    """Makes an image as smooth as a photograph: noise of several scales."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((4, 90), (16, 40), (64, 30), (max(width, height), 18)):
        noise = rng.integers(0, 256, (max(cells * height // width, 1), cells, 3), np.uint8)
        total += (np.asarray(Image.fromarray(noise).resize((width, height), Image.BICUBIC), np.float32) - 127.5) * (weight / 90)
    return Image.fromarray(np.clip(total + 127.5, 0, 255).astype(np.uint8))


def write_some(folder, numbers, width, height):
    for n in numbers:
        with open(os.path.join(folder, f"class{n % 10}", f"{n}.jpg"), "wb") as out:
            picture(n, width, height).save(out, "JPEG", quality=90)


def make_images(folder, count, width, height):
    for k in range(10):
        os.makedirs(os.path.join(folder, f"class{k}"))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        parts = [pool.submit(write_some, folder, range(k, count, 64), width, height) for k in range(64)]
        for part in parts:
            part.result()


def run(program, *arguments):
    done = subprocess.run([program, "run", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def loader_rate(program, folder, batches, workers):
    script = os.path.join(folder, "..", "loader.lua")
    with open(script, "w") as out:
        out.write(LOADER % (os.path.abspath(folder), workers, batches, batches))
    return float(run(program, script, "--device", "cpu", f"--allow-read={folder}").split()[-1])


def torch_rate(folder, batches, workers):
    import torch, torchvision

    t = torchvision.transforms
    crop = t.Compose([t.RandomResizedCrop(224), t.PILToTensor()])
    images = torchvision.datasets.ImageFolder(folder, crop)
    loader = torch.utils.data.DataLoader(images, 256, shuffle=True, num_workers=workers, drop_last=True)
    batch = iter(loader)
    for _ in range(4):
        next(batch)
    start = time.perf_counter()
    for _ in range(batches):
        next(batch)
    return 256 * batches / (time.perf_counter() - start)


def decode_rate(folder):
    """Images a second that one processor decodes whole."""
    from PIL import Image

    names = sorted(os.listdir(os.path.join(folder, "class0")))[:200]
    contents = [open(os.path.join(folder, "class0", name), "rb").read() for name in names]
    start = time.perf_counter()
    for content in contents:
        Image.open(io.BytesIO(content)).convert("RGB").load()
    return len(contents) / (time.perf_counter() - start)


def step_ms(program, folder, recipe, steps, device, *settings):
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        given = [word for setting in settings for word in ("--set", setting)]
        out = os.path.join(runs, "run")
        run(program, recipe, "--device", device, "--precision", "bf16", "--steps", str(steps), "--run-dir", out, *given)
        with open(os.path.join(out, "metrics.jsonl")) as lines:
            times = [e["seconds"] for e in map(json.loads, lines) if e["event"] == "step"]
    first = steps // 3
    return 1e3 * (times[-1] - times[first]) / (len(times) - 1 - first)


def copy_ms(program, folder, device):
    """Milliseconds a step without and with a batch."""
    path, script = os.path.join(folder, "windows.bin"), os.path.join(folder, "copy.lua")
    if not os.path.exists(path):
        np.random.default_rng(1).integers(0, 50257, 1 << 28).astype(np.uint16).tofile(path)
    with open(script, "w") as out:
        out.write(PRODUCTS % path)
    return [float(word) for word in run(program, script, "--device", device).split()]


def compare(name, programs, cases, measure):
    """Prints the medians of cases, which take turns, and what each adds to the first."""
    found = {(p, c): [] for p in programs for c in cases}
    for _ in range(ROUNDS):
        for program in programs:
            for case, settings in cases.items():
                found[program, case].append(measure(program, settings))
    for program in programs:
        base = statistics.median(found[program, next(iter(cases))])
        for case in cases:
            ms = statistics.median(found[program, case])
            print(f"{name}  {os.path.basename(program)}  {case}: {ms:.2f} ms  {100 * (ms / base - 1):+.1f} %", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("programs")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    programs, cases = [os.path.abspath(p) for p in args.programs.split(",")], args.cases or ["decode", "resnet50", "copy", "gpt2"]
    recipes = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "recipes")
    with tempfile.TemporaryDirectory() as folder:
        large, small = os.path.join(folder, "large"), os.path.join(folder, "small")
        if "decode" in cases or "resnet50" in cases:
            make_images(large, args.images, 500, 375)
            make_images(small, args.images, 256, 192)
        if "decode" in cases:
            batches = min(max(args.images // 256 - 8, 4), 6 * args.workers)
            rates = [(loader_rate(programs[-1], large, batches, args.workers), torch_rate(large, batches, args.workers)) for _ in range(ROUNDS)]
            a, b = (statistics.median(column) for column in zip(*rates))
            one = statistics.median(decode_rate(large) for _ in range(ROUNDS))
            print(f"decode  ours {a:.0f}  PyTorch {b:.0f} images a second, {args.workers} workers  ratio {a / b:.2f}")
            print(f"decode  ours {a / args.workers:.0f} images a second and worker  libjpeg-turbo alone {one:.0f}", flush=True)
        if "resnet50" in cases:
            sources = {"noise": [], "256 x 192": [f"images={small}"], "500 x 375": [f"images={large}"]}
            recipe = os.path.join(recipes, "resnet50.lua")
            compare("resnet50", programs, sources, lambda p, s: step_ms(p, folder, recipe, args.steps, args.device, *s))
        if "copy" in cases:
            found = {program: [] for program in programs}
            for _ in range(ROUNDS):
                for program in programs:
                    found[program].append(copy_ms(program, folder, args.device))
            for program, rounds in found.items():
                alone, fed = (statistics.median(column) for column in zip(*rounds))
                print(f"copy  {os.path.basename(program)}  alone {alone:.2f}  with batches {fed:.2f} ms  {100 * (fed / alone - 1):+.1f} %", flush=True)
        if "gpt2" in cases:
            path = os.path.join(folder, "tokens.bin")
            np.random.default_rng(1).integers(0, 50257, 1 << 29).astype(np.uint16).tofile(path)
            sources = {"random": [], "file": [f"tokens={path}"]}
            recipe = os.path.join(recipes, "gpt2.lua")
            compare("gpt2", programs, sources, lambda p, s: step_ms(p, folder, recipe, args.steps, args.device, *s))


main()
