"""Writes PyTorch's results for the Lua tests: layers with weights, outputs and gradients (nn.lua), ten steps of optimizers (optim.lua),
schedules (schedule.lua). Run it beside this file with PyTorch installed; made with PyTorch 2.15 on the CPU in f32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


def lua(value, depth=1):
    """A Python value as a Lua literal."""
    if isinstance(value, torch.Tensor):
        t = value.detach()
        return "{ shape = {%s}, %s{ %s } }" % (
            ", ".join(map(str, t.shape)),
            "" if t.is_floating_point() else 'dtype = "i64", ',
            ", ".join("%.8g" % v for v in t.flatten().tolist()) if t.is_floating_point() else ", ".join(map(str, t.flatten().tolist())),
        )
    if isinstance(value, dict):
        pad = "  " * depth
        keys = (k if k.isidentifier() else '["%s"]' % k for k in value)
        return "{\n%s%s}" % ("".join("%s%s = %s,\n" % (pad, k, lua(v, depth + 1)) for k, v in zip(keys, value.values())), "  " * (depth - 1))
    if isinstance(value, (list, tuple)):
        return "{ %s }" % ", ".join(lua(v, depth + 1) for v in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"%s"' % value
    return "%.9g" % value if isinstance(value, float) else str(value)


def write(name, about, value):
    with open(name, "w") as f:
        f.write("-- %s: %s. Made by make.py beside this file.\n\nreturn %s\n" % (name, about, lua(value)))


def rename(path):
    """Converts PyTorch's name of a weight to Perilune's."""
    return {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}.get(path, path)


def case(module, *inputs, call=None):
    """Output and gradients of sum(output * weights), weights rising from 0.5."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    states = {rename(k): v.detach().clone() for k, v in module.state_dict().items() if "num_batches" not in k}
    out = call(module, *inputs) if call else module(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.arange(o.numel(), dtype=torch.float32).reshape(o.shape) * 0.1 + 0.5 for o in outs]
    sum((o * w).sum() for o, w in zip(outs, weights)).backward()
    after = {rename(k): v.detach().clone() for k, v in module.state_dict().items() if "running" in k}
    return {
        "states": states, "inputs": inputs, "outputs": list(outs), "after": after,
        "grads": {rename(k): p.grad for k, p in module.named_parameters()},
        "input_grads": [x.grad for x in inputs if x.is_floating_point()],
    }


def attention(module, x):
    T = x.shape[1]
    return module(x, x, x, need_weights=False, attn_mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)[0]


def flat_state(module, x):
    """Outputs and last states of an RNN, h and c separately."""
    y, state = module(x)
    return (y, *state) if isinstance(state, tuple) else (y, state)


def randomise(module):
    for p in module.parameters():
        p.data.uniform_(-0.5, 0.5)
    return module


class Block(nn.Module):
    """The pre-norm block of perilune: norm1, attn, norm2, mlp.up, mlp.down."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Module()
        self.mlp.up, self.mlp.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.attn.qkv(self.norm1(x)).view(B, T, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attn.out(y)
        return x + self.mlp.down(F.gelu(self.mlp.up(self.norm2(x))))


def layers():
    r = torch.randn
    return {
        "linear": case(nn.Linear(4, 3), r(2, 5, 4)),
        "conv1d": case(nn.Conv1d(2, 3, 3, stride=2, padding=1), r(2, 2, 7)),
        "conv2d": case(nn.Conv2d(2, 3, 3, padding=1), r(2, 2, 4, 5)),
        "conv2d_groups": case(nn.Conv2d(4, 4, (2, 3), stride=2, dilation=(1, 2), groups=2), r(1, 4, 5, 7)),
        "conv_transpose2d": case(nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), r(1, 2, 3, 3)),
        "embedding": case(nn.Embedding(5, 3), torch.tensor([[0, 4], [4, 2]])),
        "layer_norm": case(randomise(nn.LayerNorm(6)), r(3, 6)),
        "layer_norm_two_dims": case(randomise(nn.LayerNorm((3, 4))), r(2, 3, 4)),
        "rms_norm": case(randomise(nn.RMSNorm(6, eps=1e-6)), r(3, 6)),
        "group_norm": case(randomise(nn.GroupNorm(2, 4)), r(2, 4, 3)),
        "batch_norm1d": case(randomise(nn.BatchNorm1d(3)), r(6, 3)),
        "batch_norm2d": case(randomise(nn.BatchNorm2d(3)), r(2, 3, 2, 2)),
        "rnn": case(nn.RNN(3, 4), r(5, 2, 3), call=flat_state),
        "rnn_relu": case(nn.RNN(3, 4, nonlinearity="relu"), r(5, 2, 3), call=flat_state),
        "lstm": case(nn.LSTM(3, 4, num_layers=2, bidirectional=True), r(4, 2, 3), call=flat_state),
        "gru": case(nn.GRU(3, 4, batch_first=True), r(2, 5, 3), call=flat_state),
        "attention": case(nn.MultiheadAttention(8, 2, batch_first=True), r(2, 4, 8), call=attention),
        "block": case(Block(), r(2, 4, 8)),
        "gelu": case(nn.GELU(), r(9) * 2),
        "gelu_tanh": case(nn.GELU(approximate="tanh"), r(9) * 2),
        "elu": case(nn.ELU(0.7), r(9)),
        "leaky_relu": case(nn.LeakyReLU(0.1), r(9)),
        "max_pool2d": case(nn.MaxPool2d(2), r(1, 2, 4, 5)),
        "avg_pool2d": case(nn.AvgPool2d(3, stride=2, padding=1), r(1, 2, 5, 5)),
    }


def later_layers():
    """Later cases with separate random numbers, so that earlier cases do not change."""
    r = torch.randn
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return {
            "conv2d_same": case(nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(1, 2)), r(1, 2, 4, 5)),
            "max_pool2d_ceil": case(nn.MaxPool2d(2, stride=2, padding=1, ceil_mode=True), r(1, 2, 4, 5)),
            "avg_pool2d_ceil": case(nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), r(1, 2, 4, 6)),
        }


class Lion(torch.optim.Optimizer):
    """Chen et al. (2023), algorithm 2."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * (b1 * m + (1 - b1) * p.grad).sign())
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def optimizers():
    X, Y, w0, b0 = torch.randn(8, 3), torch.randn(8, 4), torch.randn(3, 4) * 0.5, torch.zeros(4)
    out = {"X": X, "Y": Y, "w": w0, "b": b0}

    def steps(name, make, clip=None):
        w, b = w0.clone().requires_grad_(), b0.clone().requires_grad_()
        opts = make(w, b)
        losses = []
        for _ in range(10):
            loss = ((X @ w + b).tanh() - Y).square().mean()
            for o in opts:
                o.zero_grad()
            loss.backward()
            if clip:
                clip([w, b])
            for o in opts:
                o.step()
            losses.append(loss.item())
        out[name] = {"losses": losses, "w": w, "b": b}

    o = torch.optim
    steps("sgd", lambda w, b: [o.SGD([w, b], lr=0.1)])
    steps("sgd_momentum", lambda w, b: [o.SGD([w, b], lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)])
    steps("sgd_nesterov", lambda w, b: [o.SGD([w, b], lr=0.1, momentum=0.9, nesterov=True)])
    steps("adam", lambda w, b: [o.Adam([w, b], lr=0.05)])
    steps("adam_decay", lambda w, b: [o.Adam([w, b], lr=0.05, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)])
    steps("adamw", lambda w, b: [o.AdamW([w, b], lr=0.05, weight_decay=0.1)])
    steps("rmsprop", lambda w, b: [o.RMSprop([w, b], lr=0.02)])
    steps("rmsprop_centered", lambda w, b: [o.RMSprop([w, b], lr=0.02, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.01)])
    steps("lion", lambda w, b: [Lion([w, b], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)])
    steps("adafactor", lambda w, b: [o.Adafactor([w, b], lr=0.05)])
    bfloat16, torch.bfloat16 = torch.bfloat16, torch.float32  # PyTorch's Newton-Schulz runs in bf16, ours in f32
    steps("muon", lambda w, b: [o.Muon([w], lr=0.05, weight_decay=0.1), o.AdamW([b], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)])
    torch.bfloat16 = bfloat16
    steps("clip_norm", lambda w, b: [o.SGD([w, b], lr=0.5)], clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.1))
    steps("clip_value", lambda w, b: [o.SGD([w, b], lr=0.5)], clip=lambda ps: nn.utils.clip_grad_value_(ps, 0.02))
    return out


def schedules():
    def rates(make, n):
        opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        s, out = make(opt), []
        for _ in range(n):
            out.append(opt.param_groups[0]["lr"])
            opt.step()
            s.step()
        return out

    lr = torch.optim.lr_scheduler
    return {
        "one_cycle": rates(lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=20), 20),
        "cosine": rates(lambda o: lr.CosineAnnealingLR(o, T_max=10, eta_min=0.1), 11),
    }


write("nn.lua", "layers of PyTorch, their weights, outputs and gradients", {**layers(), **later_layers()})
write("optim.lua", "ten steps of optimizers", optimizers())
write("schedule.lua", "learning rates", schedules())
