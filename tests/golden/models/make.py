#!/usr/bin/env python3
"""Writes tiny GPT-2, Llama and ResNet models with random weights, and their results by transformers and torchvision, as
references for tests/tests/models.rs.

    python tests/golden/models/make.py                          needs torch, transformers, torchvision, safetensors
    python tests/golden/models/make.py check gpt2 FILE          logits of transformers for a file that the recipe wrote

NAME.safetensors has the weights as these libraries save them, in bf16, which f32 represents exactly. NAME_want.safetensors has inputs,
logits, the loss, and the gradient of each weight under Perilune's path. All results are f32, computed on a CPU. The sizes are the recipes' tiny ones.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
VOCAB, BATCH, CONTEXT = 192, 2, 24


def gpt2():
    config = GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def llama():
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
                         rope_scaling=scaling, tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    return LlamaForCausalLM(config)


class ResNet(torchvision.models.ResNet):
    """torchvision's model with narrower layers than its constructor supports."""

    def __init__(self, width, blocks, classes):
        torch.nn.Module.__init__(self)
        self._norm_layer, self.inplanes, self.dilation, self.groups, self.base_width = torch.nn.BatchNorm2d, width, 1, 1, 64
        self.conv1 = torch.nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1, self.relu, self.maxpool = torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)
        for i, n in enumerate(blocks):
            block = torchvision.models.resnet.Bottleneck
            setattr(self, f"layer{i + 1}", self._make_layer(block, width << i, n, stride=1 if i == 0 else 2))
        self.avgpool, self.fc = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(width * 32, classes)


def resnet50():
    return ResNet(8, [1, 2, 1, 1], 10)


MAKE = {"gpt2": gpt2, "llama": llama, "resnet50": resnet50}


def our_paths(name, grads):
    """Maps gradients from transformers' names to paths of the recipe. Independent of the recipes' tables, to check these."""
    out = {}
    if name == "resnet50":
        for path, g in grads.items():
            parts = path.split(".")
            if parts[0].startswith("layer"):
                parts[1] = str(int(parts[1]) + 1)
            if "downsample" in parts:
                parts[3] = ("conv", "bn")[int(parts[3])]
            out[".".join(parts)] = g
        return out
    for i in range(2):
        b = f"blocks.{i + 1}"
        if name == "gpt2":
            h = f"transformer.h.{i}"
            for ours, theirs in [("attn.qkv", "attn.c_attn"), ("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")]:
                out[f"{b}.{ours}.weight"] = grads[f"{h}.{theirs}.weight"].T
                out[f"{b}.{ours}.bias"] = grads[f"{h}.{theirs}.bias"]
            for k in (1, 2):
                for part in ("weight", "bias"):
                    out[f"{b}.norm{k}.{part}"] = grads[f"{h}.ln_{k}.{part}"]
        else:
            h = f"model.layers.{i}"
            out[f"{b}.attn.qkv.weight"] = torch.cat([grads[f"{h}.self_attn.{p}_proj.weight"] for p in "qkv"])
            out[f"{b}.attn.out.weight"] = grads[f"{h}.self_attn.o_proj.weight"]
            for part in ("gate", "up", "down"):
                out[f"{b}.mlp.{part}.weight"] = grads[f"{h}.mlp.{part}_proj.weight"]
            out[f"{b}.norm1.weight"] = grads[f"{h}.input_layernorm.weight"]
            out[f"{b}.norm2.weight"] = grads[f"{h}.post_attention_layernorm.weight"]
    if name == "gpt2":
        out |= {"wte.weight": grads["transformer.wte.weight"], "wpe.weight": grads["transformer.wpe.weight"],
                "norm.weight": grads["transformer.ln_f.weight"], "norm.bias": grads["transformer.ln_f.bias"]}
    else:
        out |= {"embed.weight": grads["model.embed_tokens.weight"], "norm.weight": grads["model.norm.weight"]}
    return out


def make(name):
    torch.manual_seed(7)
    model = MAKE[name]()
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too: zeros and ones would hide mistakes
            p.copy_((torch.randn_like(p) * 0.1 + (1.0 if p.dim() == 1 and p.mean() == 1 else 0.0)).bfloat16().float())
    if name == "resnet50":
        return make_images(name, model)
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # a copy, because the rates of RoPE would lose bits too
        weights = load_file(f"{folder}/model.safetensors")
    save_file(weights, HERE / f"{name}.safetensors", metadata={"format": "pt"})
    x, y = torch.randint(0, VOCAB, (BATCH, CONTEXT)), torch.randint(0, VOCAB, (BATCH, CONTEXT))
    logits = model(x).logits
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    want = {"x": x, "y": y, "logits": logits.detach(), "loss": loss.detach()}
    if name == "llama":  # positions up to 24 hardly depend on the scaling of the rates
        want["rates"] = model.model.rotary_emb.inv_freq.clone()
    finish(name, model, want)


def make_images(name, model):
    with torch.no_grad():
        for key, b in model.named_buffers():
            if key.endswith(("mean", "var")):
                b.copy_((torch.rand_like(b) * 0.5 + (0.5 if key.endswith("var") else 0.0)).bfloat16().float())
    weights = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(weights, HERE / f"{name}.safetensors", metadata={"format": "pt"})
    x, y = torch.randn(6, 3, 40, 40).bfloat16().float(), torch.randint(0, 10, (6,))
    want = {"x": x, "y": y, "eval": model.eval()(x).detach()}
    logits = model.train()(x)
    loss = F.cross_entropy(logits, y, label_smoothing=0.1)
    loss.backward()
    model(x)  # compare.lua runs the model twice: for the logits, and for the loss
    want |= {"logits": logits.detach(), "loss": loss.detach(), "running_var": model.layer2[1].bn2.running_var.clone()}
    finish(name, model, want)


def finish(name, model, want):
    grads = {n: p.grad for n, p in model.named_parameters()}
    want |= {f"grad/{path}": g for path, g in our_paths(name, grads).items()}
    save_file({k: v.contiguous() for k, v in want.items()}, HERE / f"{name}_want.safetensors")
    print(name, "loss", want["loss"].item(), "of", sum(p.numel() for p in model.parameters()), "parameters")


def check(name, path):
    want = load_file(HERE / f"{name}_want.safetensors")
    if name == "resnet50":
        model, info = MAKE[name](), {}
        info["missing_keys"], info["unexpected_keys"] = model.load_state_dict(load_file(path), strict=False)
        print("missing", info["missing_keys"], "unexpected", info["unexpected_keys"])
        worst = (model.eval()(want["x"]) - want["eval"]).abs().max().item()
        print("largest difference of logits", worst)
        sys.exit(worst > 1e-6 or any("num_batches" not in k for k in info["missing_keys"]) or info["unexpected_keys"] != [])
    with tempfile.TemporaryDirectory() as folder:
        MAKE[name]().config.save_pretrained(folder)
        Path(folder, "model.safetensors").write_bytes(Path(path).read_bytes())
        cls = GPT2LMHeadModel if name == "gpt2" else LlamaForCausalLM
        model, info = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    print("missing", info["missing_keys"], "unexpected", info["unexpected_keys"], "mismatched", info["mismatched_keys"])
    worst = (model(want["x"]).logits - want["logits"]).abs().max().item()
    print("largest difference of logits", worst)
    sys.exit(worst > 1e-6 or any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")))


if len(sys.argv) == 4 and sys.argv[1] == "check":
    check(sys.argv[2], sys.argv[3])
for name in MAKE:
    make(name)
