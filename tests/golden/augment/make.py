#!/usr/bin/env python3
"""Makes reference.safetensors: results of torchvision v2 for given parameters, and of NumPy for draws and log-mel spectrograms. Also small
files of images and sounds.

    python tests/golden/augment/make.py        # needs torch, torchvision, numpy, safetensors

Geometry is computed by torchvision from f64 images, so that its own rounding is not part of the comparison. `draws` is an
implementation of Squares (arXiv:2004.06278) with unsigned 64-bit words, written without the library's.
"""

import gzip
import os
import struct
import wave

import numpy as np
import torch
import torchvision
import torchvision.transforms.v2.functional as F
from safetensors.torch import save_file
from torchvision.transforms import InterpolationMode

BILINEAR = InterpolationMode.BILINEAR
M64 = (1 << 64) - 1


def splitmix(state):
    state = (state + 0x9E3779B97F4A7C15) & M64
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31), state


def key_of(seed):
    key, state = 0, seed & M64
    for half in range(2):
        digits = list(range(1, 16))
        for i in range(8):
            word, state = splitmix(state)
            at = i + (word >> 1) % (15 - i)
            digits[i], digits[at] = digits[at], digits[i]
        if half == 1 and digits[7] % 2 == 0:
            odd = next(i for i in range(7) if digits[i] % 2)
            digits[odd], digits[7] = digits[7], digits[odd]
        for d in digits[:8]:
            key = (key << 4 | d) & M64
    return key


def word(counter, key):
    x = counter * key & M64
    y = x
    z = (y + key) & M64
    rotated = lambda v: (v >> 32 | v << 32) & M64
    x = rotated((x * x + y) & M64)
    x = rotated((x * x + z) & M64)
    x = rotated((x * x + y) & M64)
    return (x * x + z) & M64


def uniform(seed, sample, visit, k):
    key = key_of(seed)
    first = word((word(sample & M64, key) + visit) & M64, key)
    bits = [((word((first + i) & M64, key) >> 40) + (1 << 23)) % (1 << 24) for i in range(k)]
    return [b / 2**24 for b in bits]


def log_mel(x, rate, window, hop, mels, eps):
    n = np.arange(window)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * n / window)
    frames = np.stack([x[s : s + window] for s in range(0, len(x) - window + 1, hop)])
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    mel = lambda f: 2595 * np.log10(1 + f / 700)
    edges = 700 * (10 ** (np.linspace(mel(0), mel(rate / 2), mels + 2) / 2595) - 1)
    f = np.arange(window // 2 + 1)[:, None] * rate / window
    up, down = (f - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - f) / (edges[2:] - edges[1:-1])
    return np.log(power @ np.maximum(0, np.minimum(up, down)) + eps)


def main():
    torch.manual_seed(7)
    # Smooth images with some noise; 19 x 23 pixels, so that rows and columns cannot be confused.
    y, x = torch.meshgrid(torch.linspace(0, 1, 19), torch.linspace(0, 1, 23), indexing="ij")
    smooth = torch.stack([torch.stack([x, y, (x + y) / 2]), torch.stack([y * y, 1 - x, (x - y).abs()])])
    f32 = (smooth * 0.8 + 0.2 * torch.rand(2, 3, 19, 23)).float().contiguous()
    # Grey pixels, black, white, and equal channels.
    f32[0, :, 0, :5] = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.75])
    u8 = (f32 * 255).round().to(torch.uint8)
    f64 = f32.double()
    out = {"f32": f32, "u8": u8}

    def geometry(name, fn):
        out[f"{name} f32"] = fn(f64).float().contiguous()
        out[f"{name} u8"] = fn(u8).contiguous()

    def colors(name, fn):
        out[f"{name} f32"] = fn(f32).contiguous()
        out[f"{name} u8"] = fn(u8).contiguous()

    geometry("crop", lambda v: F.crop(v, -2, 3, 12, 24))
    geometry("flip", F.horizontal_flip)
    geometry("flip rows", F.vertical_flip)
    geometry("resize up", lambda v: F.resize(v, [31, 40], BILINEAR, antialias=False))
    geometry("resize down", lambda v: F.resize(v, [14, 17], BILINEAR, antialias=False))
    geometry("rotate", lambda v: F.rotate(v, 33.0, BILINEAR))
    geometry("affine", lambda v: F.affine(v, -20.0, [2, -3], 1.2, [11.0, -7.0], BILINEAR))
    geometry("shear", lambda v: F.affine(v, 0.0, [0, 0], 1.0, [25.0, 0.0], BILINEAR))
    for factor in (0.0, 0.6, 1.7):
        colors(f"brightness {factor}", lambda v: F.adjust_brightness(v, factor))
        colors(f"contrast {factor}", lambda v: F.adjust_contrast(v, factor))
        colors(f"saturation {factor}", lambda v: F.adjust_saturation(v, factor))
    for factor in (-0.5, -0.13, 0.0, 0.3):
        colors(f"hue {factor}", lambda v: F.adjust_hue(v, factor))
    out["solarize f32"] = F.solarize(f32, 0.5)
    out["solarize u8"] = F.solarize(u8, 128)
    for bits in (1, 4, 8):
        out[f"posterize {bits} u8"] = F.posterize(u8, bits)
    colors("blur", lambda v: F.gaussian_blur(v, [5, 5], [1.3, 1.3]))
    out["normalize f32"] = F.normalize(f32, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])

    cases = [(0, 0, 0), (1, 5, 2), (-3, 123456789012, 7), (2**40, 17, 2**33)]
    out["draw cases"] = torch.tensor(cases)
    # Multiples of 2^-24: exact in f32.
    out["draws"] = torch.tensor([uniform(*case, 6) for case in cases], dtype=torch.float32)

    t = np.arange(1600) / 8000
    sounds = np.stack([0.5 * np.sin(2 * np.pi * 440 * t) + 0.1 * np.sin(2 * np.pi * 1700 * t), np.random.default_rng(3).normal(0, 0.2, 1600)])
    sounds = sounds.astype(np.float32)
    out["sounds"] = torch.from_numpy(sounds)
    mel = np.stack([log_mel(s.astype(np.float64), 8000, 256, 100, 24, 1e-6) for s in sounds])
    out["log mel"] = torch.from_numpy(mel.astype(np.float32))

    folder = os.path.dirname(os.path.abspath(__file__))
    images = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    header = struct.pack(">HBBIII", 0, 8, 3, *images.shape)
    with open(os.path.join(folder, "images-idx3-ubyte.gz"), "wb") as f:
        f.write(gzip.compress(header + images.tobytes(), mtime=0))
    for name, hz, count in (("high", 1000, 400), ("low", 200, 900)):
        os.makedirs(os.path.join(folder, "sounds", name), exist_ok=True)
        tone = np.round(16384 * np.sin(2 * np.pi * hz * np.arange(count) / 8000)).astype("<i2")
        with wave.open(os.path.join(folder, "sounds", name, "a.wav"), "wb") as f:
            f.setparams((1, 2, 8000, 0, "NONE", ""))
            f.writeframes(tone.tobytes())
    path = os.path.join(folder, "reference.safetensors")
    out = {name.replace(" ", "_"): x.clone() for name, x in out.items()}
    save_file(out, path, {"made_with": f"torch {torch.__version__}, torchvision {torchvision.__version__}"})
    print(f"{len(out)} tensors")


if __name__ == "__main__":
    main()
