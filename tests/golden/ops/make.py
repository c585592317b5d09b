#!/usr/bin/env python3
"""Makes reference.safetensors: PyTorch's results for every sample of the op registry.

    cargo build --workspace --example dump_cases
    target/debug/examples/dump_cases /tmp/cases.json
    python tests/golden/ops/make.py /tmp/cases.json        # needs torch, numpy, safetensors

A case is an op, its arguments by name and a variant. Variants `full` and `grid` are in f64 (the numbers of `grid` are
exact in every float dtype, so its reference serves f32, bf16 and f16 too); the others have small integers or bools in
their place. If PyTorch does not support these, and for composites, which convert integers to floats here, the reference is that
of the same numbers in i64 or f64, listed under `fallback` in the metadata: its values count, its dtype does not. `dtypes`
lists the result dtypes of PyTorch for f32, bf16 and f16 inputs.
"""

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool,
}
NAMES = {v: k for k, v in DTYPES.items()}


def tensor(x):
    """An operand as a tensor: a number becomes a rank-0 tensor, which promotes as a number does."""
    return x if torch.is_tensor(x) else torch.tensor(x)


def dims(d):
    return tuple(d) if d is not None else None


def one(d):
    return d[0] if d is not None and len(d) == 1 else d


def like(x, y):
    return y if torch.is_tensor(y) else torch.full_like(x, y)


def all_dims(x, d):
    return tuple(range(x.dim())) if d is None else tuple(d)


def arg(x, dim, keepdim, f):
    flat = x.detach().to(torch.float64).numpy()
    if dim is None:
        at = torch.tensor(int(f(flat.reshape(-1))))
        return at.reshape([1] * x.dim()) if keepdim else at
    if x.dim() == 0:
        return torch.tensor(0)
    out = torch.from_numpy(np.asarray(f(flat, axis=dim), dtype=np.int64))
    return out.unsqueeze(dim) if keepdim else out


def extreme(x, dim, keepdim, value, position):
    if dim is None:
        return value(x)
    return value(x, dim=dim, keepdim=keepdim), arg(x, dim, keepdim, position)


def prod(a):
    if a.dims is None:
        return torch.prod(a.x)
    (d,) = a.dims
    return torch.prod(a.x, dim=d, keepdim=a.keepdim)


def affine_sample(a):
    """Interpolates images at the positions of a matrix, with one gather for each of the four pixels."""
    x, m = a.x, a.matrix
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    result = x.dtype if x.dtype.is_floating_point else torch.float32
    n, c, h, w = x.shape
    oh, ow = (h, w) if a.size is None else (list(a.size) * 2)[:2]
    m = m.to(work)
    v, u = torch.meshgrid(torch.arange(oh, dtype=work) + 0.5, torch.arange(ow, dtype=work) + 0.5, indexing="ij")
    px, py = (m[:, i, 0, None, None] * u + m[:, i, 1, None, None] * v + m[:, i, 2, None, None] - 0.5 for i in (0, 1))
    edge = a.border == "edge"
    if edge:
        px, py = px.clamp(0, w - 1), py.clamp(0, h - 1)
    left, top = px.floor(), py.floor()
    fx, fy = px - left, py - top
    flat, out = x.to(work).reshape(n, c, h * w), torch.zeros(n, c, oh, ow, dtype=work)
    for row, wy in ((top, 1 - fy), (top + 1, fy)):
        for column, wx in ((left, 1 - fx), (left + 1, fx)):
            inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
            at = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).long().reshape(n, 1, oh * ow).expand(n, c, oh * ow)
            value = torch.gather(flat, 2, at).reshape(n, c, oh, ow)
            if not edge:
                value = torch.where(inside[:, None], value, torch.tensor(a.fill, dtype=work))
            out = out + value * (wy * wx)[:, None]
    return out.to(result)


def reduce_bool(f, a):
    out = a.x.bool()
    return f(out, dim=all_dims(out, a.dims), keepdim=a.keepdim)


def sort(x, dim, descending):
    s = torch.sort(x, dim=dim, descending=descending, stable=True)
    return s.values, s.indices


def topk(a):
    if a.x.dim() == 0:
        return torch.topk(a.x, a.k)
    v, i = sort(a.x, a.dim, a.largest)
    return v.narrow(a.dim, 0, a.k), i.narrow(a.dim, 0, a.k)


def unique(a):
    out = torch.unique(a.x, return_inverse=True, return_counts=True)
    picked = [out[0]] + ([out[1]] if a.return_inverse else []) + ([out[2]] if a.return_counts else [])
    return tuple(picked)


def slice_(a):
    d = a.dim % a.x.dim()
    index = [slice(None)] * a.x.dim()
    index[d] = slice(a.start, a.stop, a.step)
    return a.x[tuple(index)]


def split(a):
    return torch.split(a.x, a.sizes[0] if len(a.sizes) == 1 else list(a.sizes), dim=a.dim)


def layer_norm(a):
    shape = next((t.shape for t in (a.weight, a.bias) if t is not None), a.x.shape[-(a.dims or 1):])
    return F.layer_norm(a.x, shape, a.weight, a.bias, a.eps)


def batch_norm_train(a):
    """By elementary ops: PyTorch rejects one value per channel, and does not return the statistics."""
    x = a.x.float() if a.x.dtype in (torch.bfloat16, torch.float16) else a.x
    others = tuple(d for d in range(x.dim()) if d != 1)
    mean, var = x.mean(others), x.var(others, unbiased=False)
    y = F.batch_norm(x, mean, var, *(None if w is None else w.to(x.dtype) for w in (a.weight, a.bias)), False, 0.0, a.eps)
    return y.to(a.x.dtype), mean, var


def grouped_matmul(a):
    """By elementary ops: torch.nn.functional.grouped_mm supports bf16 on one kind of GPU, with rows of multiples of 16 bytes."""
    dtype = torch.promote_types(a.x.dtype, a.w.dtype)
    x, w = a.x.to(dtype), a.w.to(dtype)
    stops = [int(end) for end in a.ends]
    groups = list(zip([0] + stops, stops))
    if w.dim() == 2:
        out = [torch.matmul(x[:, start:stop], w[start:stop]) for start, stop in groups]
        return torch.stack(out) if out else x.new_zeros(0, x.shape[0], w.shape[1])
    last = stops[-1] if stops else 0
    out = [torch.matmul(x[start:stop], w[e]) for e, (start, stop) in enumerate(groups)]
    return torch.cat(out + [x.new_zeros(x.shape[0] - last, w.shape[2])])


def rms_norm(a):
    n = a.weight.dim() if a.weight is not None else (a.dims or 1)
    d = tuple(range(-n, 0))
    y = a.x * torch.rsqrt(a.x.pow(2).mean(d, keepdim=True) + a.eps)
    return y * a.weight if a.weight is not None else y


def attention(a):
    q, k, v = a.q, a.k, a.v
    if a.enable_gqa:
        n = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(n, -3), v.repeat_interleave(n, -3)
    scale = a.scale if a.scale is not None else 1 / math.sqrt(q.shape[-1])
    s = q @ k.transpose(-1, -2) * scale
    rows = torch.arange(s.shape[-2]).unsqueeze(1)
    cols = torch.arange(s.shape[-1]).unsqueeze(0)
    if a.is_causal or a.window is not None:
        s = s.masked_fill(cols > rows, -math.inf)
    if a.window is not None:
        s = s.masked_fill(cols <= rows - a.window, -math.inf)
    if a.documents is not None:
        d = a.documents
        same = d.unsqueeze(-1) == d.unsqueeze(-2)
        s = s.masked_fill(~(same.unsqueeze(-3) if q.dim() > 2 else same), -math.inf)
    if a.mask is not None:
        s = s.masked_fill(~a.mask, -math.inf) if a.mask.dtype == torch.bool else s + a.mask
    return torch.nan_to_num(torch.softmax(s, -1), nan=0.0) @ v


def rope(a):
    x, d = a.x, a.x.shape[-1]
    t = a.positions.to(x.dtype) if a.positions is not None else torch.arange(x.shape[-2], dtype=x.dtype)
    freq = a.base ** (-2 * torch.arange(d // 2, dtype=x.dtype) / d) if a.rates is None else a.rates
    angle = t.unsqueeze(-1) * freq
    c, s = torch.cos(angle), torch.sin(angle)
    if a.interleaved:
        p, q = x[..., 0::2], x[..., 1::2]
        return torch.stack([p * c - q * s, q * c + p * s], -1).flatten(-2)
    p, q = x[..., : d // 2], x[..., d // 2:]
    return torch.cat([p * c - q * s, q * c + p * s], -1)


def cross_entropy(a):
    x, t = a.logits, a.target
    if x.dim() == 1:
        return F.cross_entropy(x, t, weight=a.weight, ignore_index=a.ignore_index, label_smoothing=a.label_smoothing, reduction=a.reduction)
    n = x.shape[-1]
    flat_t = t.reshape(-1) if not t.is_floating_point() else t.reshape(-1, n)
    y = F.cross_entropy(x.reshape(-1, n), flat_t, weight=a.weight, ignore_index=a.ignore_index, label_smoothing=a.label_smoothing, reduction=a.reduction)
    return y.reshape(x.shape[:-1]) if a.reduction == "none" else y


def nll(a):
    n = a.logp.shape[-1]
    y = F.nll_loss(a.logp.reshape(-1, n), a.target.reshape(-1), weight=a.weight, ignore_index=a.ignore_index, reduction=a.reduction)
    return y.reshape(a.logp.shape[:-1]) if a.reduction == "none" else y


def adamw(a):
    m = a.beta1 * a.m + (1 - a.beta1) * a.g
    v = a.beta2 * a.v + (1 - a.beta2) * a.g * a.g
    mhat, vhat = m / (1 - a.beta1**a.step), v / (1 - a.beta2**a.step)
    return a.w * (1 - a.lr * a.weight_decay) - a.lr * mhat / (vhat.sqrt() + a.eps), m, v


def arange(a):
    args = (a.start,) if a.stop is None else (a.start, a.stop, a.step)
    whole = all(isinstance(v, int) for v in args)
    return torch.arange(*args, dtype=a.dtype or (torch.int64 if whole else torch.float32))


def full(a):
    dtype = a.dtype or (torch.int64 if isinstance(a.value, int) else torch.float32)
    return torch.full(a.shape, a.value, dtype=dtype)


def conv(f):
    return lambda a: f(a.x, a.weight, a.bias, one(a.stride), a.padding if isinstance(a.padding, str) else one(a.padding), one(a.dilation), a.groups)


def conv_transpose(f):
    return lambda a: f(a.x, a.weight, a.bias, one(a.stride), one(a.padding), one(a.output_padding), a.groups, one(a.dilation))


def max_pool(f):
    return lambda a: f(a.x, one(a.kernel), one(a.stride), one(a.padding), one(a.dilation), ceil_mode=a.ceil_mode)


def avg_pool(f):
    return lambda a: f(a.x, one(a.kernel), one(a.stride), one(a.padding), ceil_mode=a.ceil_mode, count_include_pad=a.count_include_pad)


def interpolate(a):
    corners = a.align_corners if a.mode != "nearest" else None
    return F.interpolate(a.x, size=one(a.size), scale_factor=a.scale, mode=a.mode, align_corners=corners)


def scatter(a):
    return a.x.scatter(a.dim, a.index, a.src)


def scatter_add(a):
    src = a.src if torch.is_tensor(a.src) else torch.full(a.index.shape, a.src).to(a.x.dtype)
    return a.x.scatter_add(a.dim, a.index, src)


def loss(f, *names):
    return lambda a: f(a.x, like(a.x, a.target), reduction=a.reduction, **{n: getattr(a, n) for n in names})


def smooth_l1(a):
    return F.smooth_l1_loss(a.x, like(a.x, a.target), beta=a.beta, reduction=a.reduction)


def sign(x):
    return torch.where(torch.isnan(x), x, torch.sign(x))


def erf(x):
    """In f64, because torch's erf on 16 bits is not correctly rounded near 0."""
    return torch.erf(x.double()).to(x.dtype) if x.dtype in (torch.bfloat16, torch.float16) else torch.erf(x)


def remainder(x, y):
    """torch.remainder, exact where the quotient overflows and torch gives NaN."""
    out = torch.remainder(x, y)
    if out.dtype != torch.float64:
        return out
    xs, ys = torch.broadcast_tensors(x, y)
    lost = torch.isnan(out) & torch.isfinite(xs) & torch.isfinite(ys) & (ys != 0)
    exact = torch.from_numpy(np.remainder(xs.double().numpy(), ys.double().numpy()))
    return torch.where(lost, exact, out)


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "sign": sign, "exp": torch.exp, "log": torch.log, "log1p": torch.log1p,
    "expm1": torch.expm1, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": erf,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "isnan": torch.isnan, "isinf": torch.isinf,
    "isfinite": torch.isfinite, "logical_not": torch.logical_not, "relu": torch.relu, "silu": F.silu, "selu": F.selu,
    "mish": F.mish, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "relu6": F.relu6, "logsigmoid": F.logsigmoid,
    "softsign": F.softsign, "contiguous": torch.clone, "detach": torch.clone, "nonzero": torch.nonzero,
    "t": lambda x: x.transpose(-1, -2) if x.dim() > 1 else x, "diagonal": lambda x: torch.diagonal(x, dim1=-2, dim2=-1),
}
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floor_div": torch.floor_divide,
    "remainder": remainder, "maximum": torch.maximum, "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or, "logical_xor": torch.logical_xor,
}
def to_fp8(a):
    """The bytes. Values are clamped first, because PyTorch's result for larger numbers depends on its version."""
    dtype, top = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[a.format]
    scale = a.scale.to(torch.float32) if torch.is_tensor(a.scale) else torch.tensor(a.scale, dtype=torch.float32)
    x = a.x if a.x.dtype == torch.float64 else a.x.to(torch.float32)
    return (x * (1 / scale).to(x.dtype)).clamp(-top, top).to(dtype).view(torch.uint8)


def of_fp8(x, scale, name):
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    scale = scale.to(torch.float32) if torch.is_tensor(scale) else torch.tensor(scale, dtype=torch.float32)
    return x.view(dtype).to(torch.float32) * scale


def matmul_fp8(a):
    x, y = of_fp8(a.a, a.scale_a, a.format_a).double(), of_fp8(a.b, a.scale_b, a.format_b).double()
    out = x @ y.T
    if a.bias is not None:
        out = out + a.bias.to(a.dtype)
    return out.to(a.dtype)


# On one device a tensor has one block, and a collective is the identity.
IDENTITIES = ("shard", "replicate", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "shift", "send_recv",
              "barrier")
OPS = {
    **{name: lambda a: a.x.clone() for name in IDENTITIES},
    "quantize_fp8": to_fp8,
    "dequantize_fp8": lambda a: of_fp8(a.x, a.scale, a.format).to(a.dtype),
    "matmul_fp8": matmul_fp8,
    "zeros": lambda a: torch.zeros(a.shape, dtype=a.dtype),
    "ones": lambda a: torch.ones(a.shape, dtype=a.dtype),
    "full": full,
    "zeros_like": lambda a: torch.zeros_like(a.x, dtype=a.dtype),
    "ones_like": lambda a: torch.ones_like(a.x, dtype=a.dtype),
    "full_like": lambda a: torch.full_like(a.x, a.value, dtype=a.dtype),
    "arange": arange,
    "linspace": lambda a: torch.linspace(a.start, a.stop, a.steps, dtype=torch.float64).to(a.dtype),
    "eye": lambda a: torch.eye(a.n, a.m if a.m is not None else a.n, dtype=a.dtype),
    "to": lambda a: a.x.to(a.dtype),
    "pow": lambda a: torch.pow(a.x, a.y),
    "where": lambda a: torch.where(a.cond, a.x, a.y),
    "clamp": lambda a: torch.clamp(a.x, *(None if v is None else like_clamp(a, v) for v in (a.min, a.max))),
    "gelu": lambda a: F.gelu(a.x, approximate=a.approximate),
    "softplus": lambda a: F.softplus(a.x, a.beta, a.threshold),
    "elu": lambda a: F.elu(a.x, a.alpha),
    "leaky_relu": lambda a: F.leaky_relu(a.x, a.slope),
    "sum": lambda a: torch.sum(a.x, dim=dims(a.dims), keepdim=a.keepdim),
    "prod": prod,
    "amax": lambda a: torch.amax(a.x, dim=all_dims(a.x, a.dims), keepdim=a.keepdim),
    "amin": lambda a: torch.amin(a.x, dim=all_dims(a.x, a.dims), keepdim=a.keepdim),
    "max": lambda a: extreme(a.x, a.dim, a.keepdim, torch.amax, np.argmax),
    "min": lambda a: extreme(a.x, a.dim, a.keepdim, torch.amin, np.argmin),
    "mean": lambda a: torch.mean(a.x if a.x.is_floating_point() else a.x.float(), dim=dims(a.dims), keepdim=a.keepdim),
    "var": lambda a: torch.var(a.x, dim=dims(a.dims), correction=int(a.unbiased), keepdim=a.keepdim),
    "std": lambda a: torch.std(a.x, dim=dims(a.dims), correction=int(a.unbiased), keepdim=a.keepdim),
    "norm": lambda a: torch.linalg.vector_norm(a.x, ord=a.p, dim=dims(a.dims), keepdim=a.keepdim),
    "logsumexp": lambda a: torch.logsumexp(a.x, dim=all_dims(a.x, a.dims), keepdim=a.keepdim),
    "any": lambda a: reduce_bool(torch.any, a),
    "all": lambda a: reduce_bool(torch.all, a),
    "argmax": lambda a: arg(a.x, a.dim, a.keepdim, np.argmax),
    "argmin": lambda a: arg(a.x, a.dim, a.keepdim, np.argmin),
    "cumsum": lambda a: torch.cumsum(a.x, a.dim),
    "cumprod": lambda a: torch.cumprod(a.x, a.dim),
    "reshape": lambda a: a.x.reshape(a.shape),
    "view": lambda a: a.x.reshape(a.shape),
    "flatten": lambda a: torch.flatten(a.x, a.start, a.stop),
    "unflatten": lambda a: a.x.unflatten(a.dim, a.sizes),
    "squeeze": lambda a: torch.squeeze(a.x) if a.dims is None else torch.squeeze(a.x, dims(a.dims)),
    "unsqueeze": lambda a: a.x.unsqueeze(a.dim),
    "permute": lambda a: a.x.permute(a.dims),
    "transpose": lambda a: a.x.transpose(a.dim0, a.dim1),
    "expand": lambda a: a.x.expand(a.shape),
    "broadcast_to": lambda a: torch.broadcast_to(a.x, a.shape),
    "narrow": lambda a: a.x.narrow(a.dim, a.start, a.length),
    "select": lambda a: a.x.select(a.dim, a.index),
    "slice": slice_,
    "flip": lambda a: a.x.flip(a.dims),
    "roll": lambda a: torch.roll(a.x, a.shifts, a.dims) if a.dims is not None else torch.roll(a.x, a.shifts[0]),
    "unfold": lambda a: a.x.unfold(a.dim, a.size, a.step),
    "cat": lambda a: torch.cat(a.xs, a.dim),
    "concat": lambda a: torch.cat(a.xs, a.dim),
    "stack": lambda a: torch.stack(a.xs, a.dim),
    "split": split,
    "chunk": lambda a: torch.chunk(a.x, a.chunks, a.dim),
    "unbind": lambda a: torch.unbind(a.x, a.dim),
    "pad": lambda a: F.pad(a.x, a.pads, value=a.value),
    "tril": lambda a: torch.tril(a.x, a.diagonal),
    "triu": lambda a: torch.triu(a.x, a.diagonal),
    "tile": lambda a: torch.tile(a.x, a.repeats),
    "repeat_interleave": lambda a: torch.repeat_interleave(a.x, a.repeats[0] if len(a.repeats) == 1 else torch.tensor(a.repeats), a.dim),
    "gather": lambda a: torch.gather(a.x, a.dim, a.index),
    "take_along": lambda a: torch.take_along_dim(a.x, a.index, a.dim),
    "scatter": scatter,
    "scatter_add": scatter_add,
    "affine_sample": affine_sample,
    "index_select": lambda a: torch.index_select(a.x, a.dim, a.index),
    "index_add": lambda a: torch.index_add(a.x, a.dim, a.index, a.src),
    "masked_fill": lambda a: torch.where(a.mask, tensor(a.value).to(a.x.dtype), a.x),
    "one_hot": lambda a: F.one_hot(a.ids.long(), a.classes) if a.ids.numel() else torch.zeros(*a.ids.shape, a.classes, dtype=torch.int64),
    "embedding": lambda a: a.weight[a.ids],
    "masked_select": lambda a: torch.masked_select(a.x, a.mask),
    "argsort": lambda a: sort(a.x, a.dim, a.descending)[1],
    "sort": lambda a: sort(a.x, a.dim, a.descending),
    "topk": topk,
    "unique": unique,
    "matmul": lambda a: torch.matmul(a.a, a.b),
    "mm": lambda a: torch.mm(a.a, a.b),
    "bmm": lambda a: torch.bmm(a.a, a.b),
    "grouped_matmul": grouped_matmul,
    "linear": lambda a: F.linear(a.x, a.weight, a.bias),
    "dot": lambda a: torch.dot(a.a, a.b),
    "outer": lambda a: torch.outer(a.a, a.b),
    "einsum": lambda a: torch.einsum(a.equation, *a.xs),
    "conv1d": conv(F.conv1d),
    "conv2d": conv(F.conv2d),
    "conv_transpose1d": conv_transpose(F.conv_transpose1d),
    "conv_transpose2d": conv_transpose(F.conv_transpose2d),
    "max_pool1d": max_pool(F.max_pool1d),
    "max_pool2d": max_pool(F.max_pool2d),
    "avg_pool1d": avg_pool(F.avg_pool1d),
    "avg_pool2d": avg_pool(F.avg_pool2d),
    "adaptive_avg_pool2d": lambda a: F.adaptive_avg_pool2d(a.x, one(a.size)),
    "interpolate": interpolate,
    "softmax": lambda a: torch.softmax(a.x, a.dim),
    "log_softmax": lambda a: torch.log_softmax(a.x, a.dim),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": lambda a: F.group_norm(a.x, a.groups, a.weight, a.bias, a.eps),
    "batch_norm_train": batch_norm_train,
    "batch_norm": lambda a: F.batch_norm(a.x, a.mean, a.var, a.weight, a.bias, False, 0.0, a.eps),
    "normalize": lambda a: F.normalize(a.x, dim=a.dim, eps=a.eps),
    "scaled_dot_product_attention": attention,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "nll_loss": nll,
    "mse_loss": loss(F.mse_loss),
    "l1_loss": loss(F.l1_loss),
    "smooth_l1_loss": smooth_l1,
    "huber_loss": loss(F.huber_loss, "delta"),
    "bce_with_logits": lambda a: F.binary_cross_entropy_with_logits(
        a.logits, like(a.logits, a.target), pos_weight=a.pos_weight, reduction=a.reduction),
    "bce_loss": loss(F.binary_cross_entropy),
    "kl_div": loss(F.kl_div, "log_target"),
    "adamw_update": adamw,
}


def like_clamp(a, v):
    return v if torch.is_tensor(v) else (torch.tensor(v) if torch.is_tensor(a.min) or torch.is_tensor(a.max) else v)


for name, f in UNARY.items():
    OPS[name] = lambda a, f=f: f(a.x)
for name, f in BINARY.items():
    OPS[name] = lambda a, f=f: f(tensor(a.x), tensor(a.y))


def read(v, floats=None, others=None):
    """An argument from its JSON; `floats` and `others` map dtypes of the tensors that may be floats, and of the rest."""
    if isinstance(v, dict):
        if "dtype_name" in v:
            return DTYPES[v["dtype_name"]]
        if "number" in v:
            return float(v["number"])
        own = DTYPES[v["dtype"]]
        x = torch.tensor([float(x) for x in v["values"]], dtype=torch.float64).reshape(v["shape"]).to(own)
        return x.to(((floats if v["float"] else others) or {}).get(own, own))
    if isinstance(v, list) and v and isinstance(v[0], dict):
        return [read(x, floats, others) for x in v]
    return v


def run(case, floats=None):
    # PyTorch requires i64 positions; their dtype has no effect.
    others = INTS_TO_I64 if case["op"] in POSITIONS else None
    # A bool mask has a meaning that no number has.
    keep = {k for k in case["args"] if k == "mask" and case["variant"] == "bool"}
    args = SimpleNamespace(**{k: read(v, None if k in keep else floats, others) for k, v in case["args"].items()})
    out = OPS[case["op"]](args)
    return [x.contiguous() for x in (out if isinstance(out, (tuple, list)) else (out,))]


POSITIONS = {"gather", "take_along", "scatter", "scatter_add", "index_select", "index_add", "embedding", "cross_entropy",
             "nll_loss", "one_hot", "rope"}
INTS_TO_I64 = {torch.int32: torch.int64, torch.uint8: torch.int64}
TO_F64 = {d: torch.float64 for d in (torch.int64, torch.int32, torch.uint8, torch.bool)}
FALLBACKS = [{torch.bool: torch.int64}, TO_F64]
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)


def reference(case, fallback):
    integers = case["variant"] not in ("full", "grid")
    error = None
    tries = [None] + FALLBACKS
    if integers and case["composite"]:
        tries = [TO_F64]
    if case["key"].startswith("sub: ") and "u8" in case["key"]:
        tries = [None, {torch.bool: torch.uint8}]
    for floats in tries:
        try:
            out = run(case, floats)
            if floats:
                fallback.append(case["key"])
            return out
        except REFUSALS as e:
            error = error or e
    print("no reference:", case["key"], str(error).splitlines()[0], file=sys.stderr)
    return None


def main():
    cases = json.load(open(sys.argv[1]))
    tensors, dtypes, fallback, missing = {}, {}, [], []
    for case in cases:
        key = case["key"]
        out = reference(case, fallback)
        if out is None:
            missing.append(key)
            continue
        for k, x in enumerate(out):
            tensors[f"{key} #{k}"] = x.clone()
        if case["variant"] == "grid":
            found = {}
            for name in ("f32", "bf16", "f16"):
                try:
                    found[name] = [NAMES[x.dtype] for x in run(case, {torch.float64: DTYPES[name]})]
                except REFUSALS:
                    pass
            dtypes[key] = found
    metadata = {
        "made_with": f"torch {torch.__version__}",
        "dtypes": json.dumps(dtypes, separators=(",", ":")),
        "fallback": json.dumps(fallback),
        "missing": json.dumps(missing),
    }
    path = os.path.abspath(__file__).replace("make.py", "reference.safetensors")
    save_file(tensors, path, metadata)
    print(f"{len(cases)} cases, {len(tensors)} tensors, {len(fallback)} by fallback, {len(missing)} without")


if __name__ == "__main__":
    main()
