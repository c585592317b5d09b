#!/usr/bin/env python3
"""Makes table.npz: complete tables of PyTorch's 8-bit floats.

    python tests/golden/fp8/make.py        # needs torch, numpy

values_FORMAT: the value of each of the 256 bytes, f32. bytes_FORMAT: the byte of each bf16 (byte k is that of the bf16 with
bits k), u8. Values above the largest number are clamped first, because PyTorch's result for them depends on its version. For
infinity and NaN the table has the bytes of IEEE rounding to nearest (E5M2), or NaN if there is no infinity (E4M3).
"""

import os

import numpy as np
import torch

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0, 0x7F), "e5m2": (torch.float8_e5m2, 57344.0, 0x7C)}

out = {}
x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
for name, (dtype, top, infinite) in FORMATS.items():
    out[f"values_{name}"] = torch.arange(256).to(torch.uint8).view(dtype).float().numpy()
    code = torch.nan_to_num(x, nan=0.0).clamp(-top, top).to(dtype).view(torch.uint8).clone()
    code[torch.isnan(x)] = 0x7F
    sign = (x < 0).to(torch.uint8) * 0x80 if name == "e5m2" else 0
    code = torch.where(torch.isinf(x), infinite | sign, code).to(torch.uint8)
    out[f"bytes_{name}"] = code.numpy()
np.savez_compressed(os.path.join(os.path.dirname(os.path.abspath(__file__)), "table.npz"), **out)
