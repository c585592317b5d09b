"""Prints the constants of `expert_placement.rs`: replicas and loads of devices that EPLB finds for the example of its README.

The two functions are those of `eplb.py` (github.com/deepseek-ai/EPLB, MIT) in NumPy, for one layer, one node and one group.
"""

import numpy as np


def replicate_experts(weight, slots):
    copies = np.ones(len(weight), int)
    expert = list(range(len(weight)))
    for _ in range(len(weight), slots):
        heaviest = int((weight / copies).argmax())
        expert.append(heaviest)
        copies[heaviest] += 1
    return np.array(expert), copies


def balanced_packing(weight, packs):
    loads, items = [0.0] * packs, [0] * packs
    for item in np.argsort(-weight, kind="stable"):
        pack = min((i for i in range(packs) if items[i] < len(weight) // packs), key=loads.__getitem__)
        loads[pack] += float(weight[item])
        items[pack] += 1
    return loads


for layer in [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]:
    weight = np.array(layer, np.float64)
    expert, copies = replicate_experts(weight, 16)
    loads = balanced_packing((weight / copies)[expert], 4)
    print(copies.tolist(), max(loads))
