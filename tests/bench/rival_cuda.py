"""Defines the cases of cuda.lua in PyTorch: the same sizes on one GPU, eager and by torch.compile."""

import torch
import torch.nn.functional as F

BF = torch.bfloat16


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=BF)


def chain():
    x, y = rand(64 << 20), rand(64 << 20)
    return lambda: (torch.relu((x * 1.5 + y) * x - 0.5) * y + x) * 0.25 - y


def unary(fn):
    def make():
        x = rand(65536, 4096)
        return lambda: fn(x)
    return make


def norm(kind):
    def make():
        x, w, b = rand(65536, 4096), rand(4096), rand(4096)
        if kind == "rms":
            return lambda: F.rms_norm(x, (4096,), w)
        return lambda: F.layer_norm(x, (4096,), w, b)
    return make


def layer_norm_grad():
    x, w, b = (t.requires_grad_() for t in (rand(65536, 4096), rand(4096), rand(4096)))
    g = rand(65536, 4096)
    return lambda: torch.autograd.grad(F.layer_norm(x, (4096,), w, b), (x, w, b), g)


def cross_entropy():
    x, t = rand(32768, 50304).requires_grad_(), torch.randint(0, 50304, (32768,), device="cuda")
    return lambda: torch.autograd.grad(F.cross_entropy(x, t), x)


def total():
    x = rand(256 << 20)
    return lambda: x.sum()


def adamw():
    ws = [torch.randn(2048, 2048, device="cuda").requires_grad_() for _ in range(96)]
    for w in ws:
        w.grad = torch.randn(2048, 2048, device="cuda")
    return torch.optim.AdamW(ws, lr=1e-3, weight_decay=0.1, fused=True).step


def matmul(m, k, n, dtype=BF):
    def make():
        a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        return lambda: a @ b
    return make


def grouped(grad):
    def make():
        x, w, g = rand(16384, 2048).requires_grad_(grad), rand(8, 2048, 2048).requires_grad_(grad), rand(16384, 2048)
        ends = torch.tensor([1024, 3511, 5120, 8192, 10386, 11703, 14482, 16384], device="cuda", dtype=torch.int32)
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm

        def run():
            y = product(x, w, offs=ends)
            return torch.autograd.grad(y, (x, w), g) if grad else y
        return run
    return make


def attention(b, h, t, d, grad, dtype=BF):
    def make():
        q, k, v, g = (torch.randn(b, h, t, d, device="cuda", dtype=dtype) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_(grad)

        def run():
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(y, (q, k, v), g) if grad else y
        return run
    return make


def train(model, loss):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def make(clip, fn):
        def run():
            opt.zero_grad(set_to_none=True)
            value = fn()
            value.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            return value
        return run
    return make, loss


def mlp(wrap):
    layers = [l for _ in range(8) for l in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    forward = wrap(model)
    make, _ = train(model, None)
    return make(False, lambda: F.mse_loss(forward(x), y))


class Block(torch.nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = torch.nn.LayerNorm(c), torch.nn.LayerNorm(c)
        self.qkv, self.out = torch.nn.Linear(c, 3 * c), torch.nn.Linear(c, c)
        self.up, self.down = torch.nn.Linear(c, 4 * c), torch.nn.Linear(4 * c, c)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, layers, heads, c, residual, v=50304, t=1024):
        super().__init__()
        self.residual, self.wte, self.wpe = residual, torch.nn.Embedding(v, c), torch.nn.Embedding(t, c)
        self.blocks, self.norm = torch.nn.ModuleList(Block(c, heads) for _ in range(layers)), torch.nn.LayerNorm(c)
        for p in self.parameters():
            torch.nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = (self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))).to(self.residual)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


def gpt2(batch, layers=12, heads=12, c=768, residual=torch.float32):
    def build(wrap):
        model = GPT2(layers, heads, c, residual).cuda()
        x = torch.randint(0, 50257, (batch, 1024), device="cuda")
        y = torch.randint(0, 50257, (batch * 1024,), device="cuda")

        def loss():
            with torch.autocast("cuda", BF):
                return F.cross_entropy(model(x).flatten(0, 1), y)
        fn = wrap(loss)
        make, _ = train(model, None)
        return make(True, fn)
    return build


class Llama(torch.nn.Module):
    """Llama 3.2 1B: grouped queries, SwiGLU, RMSNorm, rotary positions, tied embeddings."""

    class Block(torch.nn.Module):
        def __init__(self, c, heads, kv, hidden):
            super().__init__()
            self.heads, self.kv, self.d = heads, kv, c // heads
            linear = lambda i, o: torch.nn.Linear(i, o, bias=False)
            self.n1, self.n2 = torch.nn.RMSNorm(c, eps=1e-5), torch.nn.RMSNorm(c, eps=1e-5)
            self.qkv, self.out = linear(c, (heads + 2 * kv) * self.d), linear(c, c)
            self.gate, self.up, self.down = linear(c, hidden), linear(c, hidden), linear(hidden, c)

        def forward(self, x, cos, sin):
            b, t, c = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, -1, self.d).transpose(1, 2).split((self.heads, self.kv, self.kv), 1)

            def turn(u):
                p, q = u.chunk(2, -1)
                return u * cos + torch.cat((-q, p), -1) * sin
            y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def __init__(self, layers=16, c=2048, heads=32, kv=8, hidden=8192, v=128256, t=4096):
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(v, c), torch.nn.RMSNorm(c, eps=1e-5)
        self.blocks = torch.nn.ModuleList(self.Block(c, heads, kv, hidden) for _ in range(layers))
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        rates = 500000.0 ** (-torch.arange(0, c // heads, 2) / (c // heads))
        turns = 8192 * rates / (2 * torch.pi)
        kept = ((turns - 1) / 3).clamp(0, 1)
        angle = torch.outer(torch.arange(t), rates * (kept + (1 - kept) / 32)).repeat(1, 2)
        self.register_buffer("cos", angle.cos().to(BF))
        self.register_buffer("sin", angle.sin().to(BF))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embed.weight)


def llama_1b(wrap):
    model = Llama().cuda()
    x, y = (torch.randint(0, 128256, shape, device="cuda") for shape in ((4, 4096), (4 * 4096,)))

    def loss():
        with torch.autocast("cuda", BF):
            return F.cross_entropy(model(x).flatten(0, 1), y)
    make, _ = train(model, None)
    return make(True, wrap(loss))


class Bottleneck(torch.nn.Module):
    def __init__(self, inside, c, stride):
        super().__init__()
        conv = lambda i, o, k, s=1: torch.nn.Conv2d(i, o, k, stride=s, padding=k // 2, bias=False)
        bn = torch.nn.BatchNorm2d
        self.main = torch.nn.Sequential(conv(inside, c, 1), bn(c), torch.nn.ReLU(), conv(c, c, 3, stride), bn(c), torch.nn.ReLU(), conv(c, 4 * c, 1), bn(4 * c))
        self.short = torch.nn.Sequential(conv(inside, 4 * c, 1, stride), bn(4 * c)) if stride != 1 or inside != 4 * c else torch.nn.Identity()

    def forward(self, x):
        return F.relu(self.main(x) + self.short(x))


def resnet50(wrap):
    """v1.5, channels last, which is the layout of cuDNN's 16-bit kernels."""
    parts, inside = [torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)], 64
    for i, blocks in enumerate((3, 4, 6, 3)):
        for k in range(blocks):
            parts.append(Bottleneck(inside, 64 << i, 2 if k == 0 and i > 0 else 1))
            inside = 256 << i
    parts += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2048, 1000)]
    model = torch.nn.Sequential(*parts).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (256,), device="cuda")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

    def loss():
        with torch.autocast("cuda", BF):
            return F.cross_entropy(model(x), y, label_smoothing=0.1)
    fn = wrap(loss)

    def run():
        opt.zero_grad(set_to_none=True)
        value = fn()
        value.backward()
        opt.step()
        return value
    return run


def convolution(fn, x, w, **options):
    """With a bias, forward and backward."""
    def make():
        t = [v.requires_grad_() for v in (rand(*x), rand(*w), rand(w[0]))]
        g = torch.ones_like(fn(*t, **options))
        return lambda: torch.autograd.grad(fn(*t, **options), t, g)
    return make


def sort():
    x = torch.randn(16384, 4096, device="cuda")
    return lambda: x.sort(-1)


def cumsum():
    x = rand(65536, 4096)
    return lambda: x.cumsum(-1)


SIMPLE = {
    "chain": chain,
    "gelu": unary(lambda x: F.gelu(x, approximate="tanh")),
    "softmax": unary(lambda x: x.softmax(-1)),
    "layer_norm": norm("layer"),
    "rms_norm": norm("rms"),
    "layer_norm_grad": layer_norm_grad,
    "cross_entropy": cross_entropy,
    "sum": total,
    "adamw": adamw,
    "matmul_8192": matmul(8192, 8192, 8192),
    "matmul_gpt2_up": matmul(65536, 768, 3072),
    "matmul_2048": matmul(2048, 2048, 2048),
    "matmul_llama_up": matmul(16384, 2048, 8192),
    "matmul_f32_4096": matmul(4096, 4096, 4096, torch.float32),
    "grouped_matmul": grouped(False),
    "grouped_matmul_grad": grouped(True),
    "attention_d64_1k": attention(16, 32, 1024, 64, False),
    "attention_d64_1k_grad": attention(16, 32, 1024, 64, True),
    "attention_d64_4k": attention(4, 32, 4096, 64, False),
    "attention_d64_4k_grad": attention(4, 32, 4096, 64, True),
    "attention_d64_16k": attention(1, 32, 16384, 64, False),
    "attention_d64_16k_grad": attention(1, 32, 16384, 64, True),
    "attention_d128_1k": attention(16, 16, 1024, 128, False),
    "attention_d128_1k_grad": attention(16, 16, 1024, 128, True),
    "attention_d128_4k": attention(4, 16, 4096, 128, False),
    "attention_d128_4k_grad": attention(4, 16, 4096, 128, True),
    "attention_d128_16k": attention(1, 16, 16384, 128, False),
    "attention_d128_16k_grad": attention(1, 16, 16384, 128, True),
    "attention_f32_d64_1k": attention(4, 12, 1024, 64, False, torch.float32),
    "attention_f32_d64_1k_grad": attention(4, 12, 1024, 64, True, torch.float32),
    "attention_f32_d64_4k": attention(4, 12, 4096, 64, False, torch.float32),
    "attention_f32_d64_4k_grad": attention(4, 12, 4096, 64, True, torch.float32),
    "attention_f32_d128_4k": attention(2, 12, 4096, 128, False, torch.float32),
    "attention_f32_d128_4k_grad": attention(2, 12, 4096, 128, True, torch.float32),
    "conv1d": convolution(F.conv1d, (32, 256, 4096), (256, 256, 3), padding=1),
    "conv1d_depthwise": convolution(F.conv1d, (32, 256, 4096), (256, 1, 3), padding=1, groups=256),
    "conv1d_groups": convolution(F.conv1d, (32, 768, 512), (768, 48, 128), padding=64, groups=16),
    "conv2d": convolution(F.conv2d, (64, 128, 56, 56), (128, 128, 3, 3), padding=1),
    "conv2d_odd": convolution(F.conv2d, (64, 125, 56, 56), (131, 125, 3, 3), padding=1),
    "cumsum": cumsum,
    "sort": sort,
}
STEPS = {
    "mlp": mlp,
    "gpt2_b4": gpt2(4),
    "gpt2_b32": gpt2(32),
    "gpt2_b32_12gib": gpt2(32),  # only Perilune has a memory budget
    "gpt2_b64": gpt2(64),
    "gpt2_350m_b32": gpt2(32, 24, 16, 1024),
    "gpt2_1558m_b8": gpt2(8, 48, 25, 1600),
    "gpt2_b4_bf16_residual": gpt2(4, residual=BF),
    "gpt2_b32_bf16_residual": gpt2(32, residual=BF),
    "gpt2_1558m_b8_bf16_residual": gpt2(8, 48, 25, 1600, BF),
    "llama_1b": llama_1b,
    "resnet50": resnet50,
}
# Goals for the ratio theirs / ours in the same run.
GOALS = {n: 1.0 for n in ("gpt2_b32", "gpt2_b64", "gpt2_350m_b32", "gpt2_1558m_b8", "llama_1b")} | {"resnet50": 0.9}
# Steps whose time depends on launches.
LAUNCHES = {"mlp", "gpt2_b4"}
# Cases without a gain from torch.compile.
NO_COMPILE = {"adamw", "sum", "cumsum", "sort"} | {n for n in SIMPLE if n.startswith(("matmul", "grouped", "attention", "conv"))}


def build(name, wrap):
    return STEPS[name](wrap) if name in STEPS else wrap(SIMPLE[name]())


def goal(name):
    return GOALS.get(name)


def modes(name):
    """Ways to compile a case; "reduce-overhead" replays CUDA graphs, which pays where launches are slow compared to the kernels."""
    if name in NO_COMPILE:
        return []
    return ["default", "reduce-overhead"] if name in LAUNCHES else ["default"]


def wait():
    torch.cuda.synchronize()


def clean():
    """Frees unused memory and resets the peak; returns the bytes of tensors that are still allocated."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak():
    """The peak bytes of PyTorch's tensors and workspaces since clean()."""
    return torch.cuda.max_memory_allocated()


ROUND = 20
