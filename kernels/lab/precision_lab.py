"""Compares the TF32 products of precision_lab.lua and PyTorch's on the same GPU with f64."""

import numpy as np
import torch

d = {k: torch.from_numpy(v).cuda() for k, v in np.load("precision_lab.npz").items()}


def run(x, w, b, image, filter):
    w, filter = w.clone().requires_grad_(), filter.clone().requires_grad_()
    y = torch.nn.functional.linear(x, w, b)
    z = torch.nn.functional.conv2d(image, filter, padding=1)
    ((y * y).sum() + (z * z).sum()).backward()
    return {"linear": y, "conv": z, "matmul": x @ w.t(), "dw": w.grad, "dfilter": filter.grad}


given = [d[k] for k in ("x", "w", "b", "image", "filter")]
exact = run(*[t.double() for t in given])
bad = 0
for precision in ("f32", "tf32"):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    theirs = run(*given)
    for name, want in exact.items():
        scale = want.abs().max()
        error = lambda got: ((got.double() - want).abs().max() / scale).item()
        ours, rival = error(d[f"{precision}_{name}"]), error(theirs[name])
        # At most twice PyTorch's error, or that of f32 itself where PyTorch does not use TF32.
        fine = ours <= 2 * max(rival, 1e-6) or (name in ("conv", "dfilter") and ours < 2e-3)
        if precision == "tf32" and name in ("matmul", "linear"):
            fine = fine and ours > 1e-6  # otherwise no TF32 was used
        bad += not fine
        print(f"{precision:5} {name:8} error ours {ours:.2e} PyTorch {rival:.2e} {'ok' if fine else 'WRONG'}")
print("all within bounds" if bad == 0 else f"{bad} out of bounds")
