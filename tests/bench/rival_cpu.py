"""Defines the cases of cpu.lua in PyTorch: the same sizes, on the CPU, f32, eager."""

import torch
import torch.nn.functional as F


def chain(n):
    x, y = torch.randn(n), torch.randn(n)
    return lambda: (torch.relu((x * 1.5 + y) * x - 0.5) * y + x) * 0.25 - y


def layer_norm_grad():
    x, w, b = (t.requires_grad_() for t in (torch.randn(4096, 768), torch.ones(768), torch.zeros(768)))
    g = torch.randn(4096, 768)
    return lambda: torch.autograd.grad((F.layer_norm(x, (768,), w, b) * g).sum(), (x, w, b))


def cross_entropy():
    x, t = torch.randn(512, 32768).requires_grad_(), torch.randint(0, 32768, (512,))
    return lambda: torch.autograd.grad(F.cross_entropy(x, t), x)


def unary(shape, fn):
    x = torch.randn(shape)
    return lambda: fn(x)


def matmul(m, k, n):
    a, b = torch.randn(m, k), torch.randn(k, n)
    return lambda: a @ b


def grouped():
    """One product per group: grouped_mm supports bf16 only."""
    x, w = torch.randn(2048, 512), torch.randn(8, 512, 512)
    ends = [128, 439, 640, 1024, 1298, 1463, 1810, 2048]
    return lambda: torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip([0] + ends, ends))])


def attention(grad):
    q, k, v = (torch.randn(4, 8, 256, 64).requires_grad_(grad) for _ in range(3))
    g = torch.randn(4, 8, 256, 64)

    def run():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), g) if grad else y
    return run


def adamw():
    ws = [torch.randn(512, 512).requires_grad_() for _ in range(16)]
    for w in ws:
        w.grad = torch.randn(512, 512)
    opt = torch.optim.AdamW(ws, lr=1e-3, weight_decay=0.1, fused=True)
    return opt.step


class Block(torch.nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = torch.nn.LayerNorm(c, bias=False), torch.nn.LayerNorm(c, bias=False)
        self.qkv, self.out = torch.nn.Linear(c, 3 * c, bias=False), torch.nn.Linear(c, c, bias=False)
        self.up, self.down = torch.nn.Linear(c, 4 * c, bias=False), torch.nn.Linear(4 * c, c, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def chargpt():
    v, c, t, b = 65, 128, 64, 12
    tokens, positions = torch.nn.Embedding(v, c), torch.nn.Embedding(t, c)
    blocks, norm = torch.nn.ModuleList(Block(c, 4) for _ in range(4)), torch.nn.LayerNorm(c, bias=False)
    params = [p for m in (tokens, positions, blocks, norm) for p in m.parameters()]
    opt = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)
    x, y, at = torch.randint(0, v, (b, t)), torch.randint(0, v, (b * t,)), torch.arange(t)

    def step():
        h = tokens(x) + positions(at)
        for block in blocks:
            h = block(h)
        loss = F.cross_entropy((norm(h) @ tokens.weight.T).view(-1, v), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()

    return step


CASES = {  # name: (makes the work, goal: theirs / ours)
    "chargpt": (chargpt, 1.5),
    "chain": (lambda: chain(4 * 1024 * 1024), 2.0),
    "chain_small": (lambda: chain(65536), 2.0),
    "gelu": (lambda: unary((1024, 4096), F.gelu), None),
    "softmax": (lambda: unary((4096, 1024), lambda x: x.softmax(-1)), 1.5),
    "layer_norm": (lambda: unary((4096, 768), lambda x: F.layer_norm(x, (768,), torch.ones(768), torch.zeros(768))), 1.5),
    "layer_norm_grad": (layer_norm_grad, 1.5),
    "cross_entropy": (cross_entropy, 1.5),
    "matmul_64": (lambda: matmul(64, 64, 64), 0.85),
    "matmul_256": (lambda: matmul(256, 256, 256), 0.85),
    "matmul_1024": (lambda: matmul(1024, 1024, 1024), 0.85),
    "matmul_768x128x512": (lambda: matmul(768, 128, 512), 0.85),
    "matmul_1x1024x1024": (lambda: matmul(1, 1024, 1024), 0.85),
    "matmul_1024x1024x1": (lambda: matmul(1024, 1024, 1), 0.85),
    "matmul_5x1024x1024": (lambda: matmul(5, 1024, 1024), 0.85),
    "grouped_matmul": (grouped, None),
    "cumsum": (lambda: unary((1024, 4096), lambda x: x.cumsum(-1)), None),
    "sort": (lambda: unary((1024, 1024), lambda x: x.sort(-1)), None),
    "attention": (lambda: attention(False), None),
    "attention_grad": (lambda: attention(True), None),
    "adamw": (adamw, 1.2),
}


def build(name, wrap):
    return CASES[name][0]()


def goal(name):
    return CASES.get(name, (None, None))[1]


def modes(name):
    """Ways to compile a case: none here."""
    return []


def wait():
    pass


def clean():
    return None


def peak():
    return None


ROUND = 1
