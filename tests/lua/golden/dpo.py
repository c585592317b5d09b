"""Writes NumPy's results, in f64, for the Lua test of direct preference optimization (dpo.lua): log-probabilities of answers, the loss and its
gradient with respect to the log-probabilities.

    pip install numpy
    python dpo.py
"""

import pathlib

import numpy as np

rng = np.random.default_rng(1)
B, T, V = 3, 5, 7
BETA = 0.3

logits = rng.normal(size=(2 * B, T, V)).astype(np.float32)
targets = rng.integers(0, V, (2 * B, T))
for row, first in enumerate([2, 2, 1, 1, 3, 3]):
    targets[row, :first] = -100
targets[1, 4:] = -100
reference = rng.normal(size=(B, 2)).astype(np.float32) - 8

x = logits.astype(np.float64)
log_probs = x - np.log(np.exp(x).sum(-1, keepdims=True))
own = np.array([sum(log_probs[r, t, targets[r, t]] for t in range(T) if targets[r, t] >= 0) for r in range(2 * B)])
policy = own.reshape(B, 2)
rewards = BETA * (policy - reference.astype(np.float64))
margin = rewards[:, 0] - rewards[:, 1]
loss = np.log1p(np.exp(-margin)).mean()
slope = -BETA / (1 + np.exp(margin)) / B
gradient = np.stack([slope, -slope], 1)


def lua(value):
    if isinstance(value, list):
        return "{ %s }" % ", ".join(map(lua, value))
    return "%.17g" % value if isinstance(value, float) else str(value)


fields = {"beta": BETA, "logits": logits.astype(np.float64).tolist(), "targets": targets.tolist(), "reference": reference.astype(np.float64).tolist(),
          "log_probs": own.tolist(), "loss": float(loss), "margin": float(margin.mean()), "preferred": float((margin > 0).mean()), "gradient": gradient.tolist()}
with open(pathlib.Path(__file__).parent / "dpo.lua", "w") as out:
    out.write("-- dpo.lua: direct preference optimization of three pairs, by NumPy. Made by dpo.py beside this file.\n\nreturn {\n")
    out.writelines("  %s = %s,\n" % (name, lua(value)) for name, value in fields.items())
    out.write("}\n")
