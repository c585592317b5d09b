"""Compares errors against f64 with PyTorch's: attention, norms, softmax, cross-entropy and GELU, with gradients.

    python3 tests/accuracy/accuracy.py [--device cuda] [--perilune target/release/perilune] [--only softmax]… [--dtype f32]… [--keep DIR]

Makes inputs in bf16, f16 and f32, computes each case in f64 and by PyTorch in that dtype, lets accuracy.lua compute it on
the same inputs, and compares errors against f64: their maximum and their root mean square, over all elements of a result.
A ratio ours / PyTorch's above 2 is a failure (exit status 1). Errors within the rounding of the dtype are not counted:
half a unit in the last place of the largest element for the maximum, and the mean square of evenly distributed
roundings for the root mean square (for a loss, which is one number, half a unit). PyTorch has no options for documents and
windows, so it gets masks. Attention is also compared in tf32: f32 tensors whose products may round operands to
11 bits, against PyTorch's plain products with allow_tf32 (its f32 kernels never do so).

Needs torch; a whole run takes about a minute on a GPU. On a CPU use --small, which omits the largest shapes.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "tf32": torch.float32}
FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
LIMIT = 2.0


# ---- cases: an op, its inputs, its options -------------------------------------------------------------------------
# accuracy.lua gets the name of a case besides the inputs: op, options and dtype.


class Case:
    def __init__(self, op, label, inputs, options=(), ids=()):
        """`inputs` name -> shape, differentiated ones first; `ids` name -> integers, kept as they are."""
        self.op, self.label, self.shapes, self.options, self.ids = op, label, inputs, dict(options), dict(ids)

    def name(self, dtype):
        said = "".join(f"{k}:{v}/" for k, v in sorted(self.options.items()))
        return f"{self.op}/{said}{self.label}/{dtype}"

    def draws(self):
        """The number of random inputs, whose errors are pooled: the maximum of few errors is noisy."""
        return 3 if self.small else 1


def attention(b, h, g, t, s, d, small=True, **options):
    label = f"B{b}-H{h}-G{g}-T{t}-S{s}-D{d}"
    shapes = {"q": (b, h, t, d), "k": (b, g, s, d), "v": (b, g, s, d), "grad": (b, h, t, d)}
    ids = {}
    if options.pop("documents", False):
        # Documents of 1 to t/3 positions, split differently in each row of the batch.
        rows = []
        for _ in range(b):
            lengths = torch.randint(1, max(2, t // 3), (t,))
            rows.append(torch.repeat_interleave(torch.arange(t), lengths)[:t])
        ids, label = {"documents": torch.stack(rows)}, label + "-documents"
    case = Case("attention", label, shapes, options, ids)
    case.small = small
    return case


def rows(op, n, c, small=True, **options):
    shapes = {"x": (n, c)}
    if op in ("layer_norm", "rms_norm"):
        shapes["weight"] = (c,)
    if op == "layer_norm":
        shapes["bias"] = (c,)
    ids = {}
    if op == "cross_entropy":
        target = torch.randint(0, c, (n,))
        target[::7] = -100
        ids = {"target": target}
    else:
        shapes["grad"] = (n, c)
    case = Case(op, f"{n}x{c}", shapes, options, ids)
    case.small = small
    return case


def cases():
    for d in (64, 96, 128, 256):
        yield attention(1, 4, 4, 333, 333, d, causal=1)
        yield attention(1, 6, 2, 450, 450, d, small=d == 64, causal=1, gqa=1)
        yield attention(1, 4, 4, 256, 389, d, small=d == 96)
    for d in (64, 128):
        yield attention(1, 4, 4, 512, 512, d, small=d == 128, window=100)
        yield attention(2, 2, 2, 500, 500, d, small=d == 64, causal=1, documents=True)
    yield attention(1, 8, 8, 4096, 4096, 64, small=False, causal=1)
    yield attention(1, 4, 1, 2048, 2048, 128, small=False, causal=1, gqa=1)
    yield attention(4, 4, 4, 200, 200, 40, causal=1)
    for op in ("layer_norm", "rms_norm", "softmax", "log_softmax"):
        for n, c in ((512, 768), (257, 1000), (63, 4096), (130, 65)):
            yield rows(op, n, c)
        yield rows(op, 4096, 1024, small=False)
        yield rows(op, 32, 50304, small=False)
    for n, c in ((256, 1000), (77, 13), (100, 4097)):
        yield rows("cross_entropy", n, c)
        yield rows("cross_entropy", n, c, smoothing=0.1)
    yield rows("cross_entropy", 256, 50304, small=False)
    for tanh in (0, 1):
        yield rows("gelu", 512, 3072, tanh=tanh)
        yield rows("gelu", 77, 131, tanh=tanh)


def inputs(case, dtype):
    """Values like those of a trained network: activations and weights of about 1, small biases, logits of a few units."""
    made = {}
    for name, shape in case.shapes.items():
        x = torch.randn(shape)
        if name == "weight":
            x = 1 + 0.2 * x
        elif case.op in ("softmax", "log_softmax", "cross_entropy") and name == "x":
            x = 2 * x
        elif name == "x":
            x = x + 0.3
        made[name] = x.to(dtype)
    return made


# ---- the same in PyTorch -------------------------------------------------------------------------------------------


def seen(case, q, k, ids):
    """The mask of the keys of each query, or None where is_causal suffices."""
    t, s = q.shape[-2], k.shape[-2]
    i, j = torch.arange(t, device=q.device)[:, None], torch.arange(s, device=q.device)
    causal, window = "causal" in case.options or "window" in case.options, case.options.get("window")
    mask = torch.ones(t, s, dtype=torch.bool, device=q.device)
    if causal:
        mask &= j <= i
    if window:
        mask &= j > i - window
    if "documents" in ids:
        doc = ids["documents"]
        mask = mask & (doc[:, :, None] == doc[:, None, :])[:, None]
    return mask


def value(case, x, ids, exact):
    """The op's result. `exact`: in f64, by elementary ops where PyTorch would use a fused kernel."""
    if case.op == "attention":
        q, k, v = x["q"], x["k"], x["v"]
        if exact:
            r = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(r, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
            return scores.masked_fill(~seen(case, q, k, ids), -math.inf).softmax(-1) @ v.repeat_interleave(r, 1)
        plain = "window" not in case.options and not ids
        mask = None if plain else seen(case, q, k, ids)
        causal = plain and "causal" in case.options
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa="gqa" in case.options)
    if case.op == "layer_norm":
        return F.layer_norm(x["x"], x["weight"].shape, x["weight"], x["bias"])
    if case.op == "rms_norm":
        return F.rms_norm(x["x"], x["weight"].shape, x["weight"], eps=1e-6)
    if case.op == "cross_entropy":
        return F.cross_entropy(x["x"], ids["target"], label_smoothing=case.options.get("smoothing", 0.0))
    if case.op == "gelu":
        return F.gelu(x["x"], approximate="tanh" if case.options["tanh"] else "none")
    return getattr(F, case.op)(x["x"], -1)


def solve(case, given, ids, exact, tf32=False):
    """Result and gradients, by name."""
    if tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
        with sdpa_kernel(SDPBackend.MATH):
            found = solve(case, given, ids, exact)
        torch.backends.cuda.matmul.allow_tf32 = False
        return found
    x = {k: (v.double() if exact else v).detach().requires_grad_(k != "grad") for k, v in given.items()}
    y = value(case, x, ids, exact)
    wanted = [k for k in x if k != "grad"]
    grads = torch.autograd.grad(y, [x[k] for k in wanted], x.get("grad"))
    return {"y": y.detach(), **{"d" + k: g for k, g in zip(wanted, grads)}}


# ---- safetensors: eight bytes of length, a JSON header, the bytes --------------------------------------------------


def write(path, tensors):
    names = {v: k for k, v in FORMATS.items()}
    header, blobs, at = {}, [], 0
    for name, t in tensors.items():
        data = t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + data.size]}
        blobs.append(data)
        at += data.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for data in blobs:
            data.tofile(f)


def read(path):
    data = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)
    (n,) = struct.unpack("<Q", bytes(data[:8].tolist()))
    out = {}
    for name, t in json.loads(bytes(data[8:8 + n].numpy())).items():
        if name != "__metadata__":
            lo, hi = t["data_offsets"]
            out[name] = data[8 + n + lo:8 + n + hi].clone().view(FORMATS[t["dtype"]]).reshape(t["shape"])
    return out


# ---- errors --------------------------------------------------------------------------------------------------------


def errors(got, want, dtype):
    """(maximum, root mean square) of |got - want|, each in units of the error expected from rounding to the dtype."""
    if got.shape != want.shape:
        return math.inf, math.inf
    info = torch.finfo(DTYPES[dtype])
    eps, big = 2**-10 if dtype == "tf32" else info.eps, want.abs().clamp_min(info.smallest_normal)
    half = torch.exp2(torch.floor(torch.log2(big))) * eps / 2
    error = (got.double() - want).abs()
    error = torch.where(error.isfinite(), error, math.inf)
    spread = 3 if error.numel() > 1 else 1
    return (error.max() / half.max()).item(), (error.square().mean() / (half.square().mean() / spread)).sqrt().item()


def ratio(ours, theirs):
    return ours / max(theirs, 1.0)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--perilune", default=os.path.join(HERE, "..", "..", "target", "release", "perilune"))
    p.add_argument("--only", action="append", help="only cases whose name contains this")
    p.add_argument("--dtype", action="append", choices=list(DTYPES), help="only these dtypes")
    p.add_argument("--small", action="store_true", help="leave out the largest shapes and some head dims")
    p.add_argument("--keep", help="a folder for the files, to look at")
    p.add_argument("--all", action="store_true", help="print every result, not the worst of each op")
    args = p.parse_args()
    start = time.time()
    torch.manual_seed(11)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    folder = args.keep or tempfile.mkdtemp()
    os.makedirs(folder, exist_ok=True)
    work, file = [], {}
    for case in cases():
        if args.small and not case.small:
            continue
        for dtype, kind in DTYPES.items():
            if dtype == "tf32" and case.op != "attention" or args.dtype and dtype not in args.dtype:
                continue
            if args.only and not any(o in case.name(dtype) for o in args.only):
                continue
            for draw in range(case.draws()):
                # tf32 draws from a separate stream, so that the inputs of the others do not change.
                with torch.random.fork_rng(devices=[], enabled=dtype == "tf32"):
                    name, given = f"{case.name(dtype)}/{draw}", inputs(case, kind)
                work.append((case, dtype, name, given))
                file.update({f"{name}/{k}": v for k, v in {**given, **case.ids}.items()})
    write(os.path.join(folder, "inputs.safetensors"), file)
    del file

    script = os.path.join(HERE, "accuracy.lua")
    print(f"inputs made in {time.time() - start:.1f} s", flush=True)
    start = time.time()
    subprocess.run([os.path.abspath(args.perilune), "run", script, "--device", args.device], cwd=folder, check=True)
    ours = read(os.path.join(folder, "outputs.safetensors"))
    print(f"{len(work)} cases, ours took {time.time() - start:.1f} s", flush=True)

    device, found = args.device.split(":")[0], {}
    for case, dtype, name, given in work:
        given, ids = ({k: v.to(device) for k, v in d.items()} for d in (given, case.ids))
        exact, rival = solve(case, given, ids, True), solve(case, given, ids, False, dtype == "tf32")
        for key, want in exact.items():
            got = ours[f"{name}/{key}"].to(device)
            if got.dtype != DTYPES[dtype]:
                sys.exit(f"{name}: {key} is {got.dtype}")
            pair = [errors(x, want, dtype) for x in (got, rival[key])]
            found.setdefault((case.op, dtype, key, case.name(dtype)), []).append(pair)

    print(f"compared with f64 and PyTorch after {time.time() - start:.1f} s", flush=True)
    wrong, worst = [], {}
    for (op, dtype, key, name), pairs in found.items():
        # For Perilune and for PyTorch: the largest error of all draws, and the root mean square of all.
        a, b = ((max(p[i][0] for p in pairs), math.sqrt(sum(p[i][1] ** 2 for p in pairs) / len(pairs))) for i in (0, 1))
        r = max(ratio(x, y) for x, y in zip(a, b))
        line = f"{name} {key}: max {a[0]:.3g} PyTorch {b[0]:.3g}, rms {a[1]:.3g} PyTorch {b[1]:.3g}, ratio {r:.2f}"
        if not r <= LIMIT:
            wrong.append("WRONG " + line)
        if args.all:
            print(line)
        if (op, dtype, key) not in worst or r > worst[op, dtype, key][0]:
            worst[op, dtype, key] = (r, line)
    if not args.all:
        print("The worst case of each op, dtype and result; errors in roundings of the dtype:")
        for r, line in worst.values():
            print(" ", line)
    print("\n".join(wrong))
    print(f"{len(wrong)} results err more than {LIMIT:g} times as much as PyTorch's" if wrong else
          f"all results err at most {LIMIT:g} times as much as PyTorch's")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
