"""Writes scikit-learn's results for the Lua tests of tables (tables.lua): areas under the ROC curve, and columns fitted and encoded.

    pip install numpy scikit-learn==1.9.1
    python tables.py
"""

import pathlib

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

HERE = pathlib.Path(__file__).parent
rng = np.random.default_rng(0)


def lua(value, depth=1):
    """A Python value as a Lua literal; None and NaN are nil."""
    if isinstance(value, dict):
        pad = "  " * depth
        return "{\n%s%s}" % ("".join("%s%s = %s,\n" % (pad, k, lua(v, depth + 1)) for k, v in value.items()), "  " * (depth - 1))
    if isinstance(value, (list, tuple)):
        return "{ %s }" % ", ".join(lua(v, depth + 1) for v in value)
    if value is None or isinstance(value, float) and np.isnan(value):
        return "nil"
    if isinstance(value, str):
        return '"%s"' % value
    return "%.17g" % value if isinstance(value, float) else str(value)


def auc_case(n, levels, share):
    """Scores in f32, with ties if they have few levels."""
    labels = (rng.random(n) < share).astype(int)
    scores = (rng.normal(size=n) + labels).astype(np.float32)
    if levels:
        scores = (np.round(scores * levels) / levels).astype(np.float32)
    area = float(roc_auc_score(labels, scores.astype(np.float64)))
    return {"scores": [float(s) for s in scores], "labels": [int(v) for v in labels], "area": area}


def columns_case(n):
    """Two columns of numbers, one with missing cells, and the rows as StandardScaler and a sorted list of categories encode them."""
    age = rng.integers(18, 80, n)
    income = np.round(rng.normal(50000, 15000, n), 2)
    missing = rng.random(n) < 0.25
    cities = np.array(["Turin", "Bern", "Graz", ""])[rng.integers(0, 4, n)]
    numbers = np.stack([age.astype(float), np.where(missing, np.nan, income)], 1)
    train = slice(0, n // 2)
    scaler = StandardScaler().fit(numbers[train])
    encoded = np.nan_to_num(scaler.transform(numbers), nan=0.0)
    # Turin is left out of the training rows, so it is unknown.
    known = sorted(set(c for c in cities[train] if c not in ("", "Turin")))
    cities[train] = np.where(cities[train] == "Turin", "Bern", cities[train])
    ids = [0 if c == "" else 2 + known.index(c) if c in known else 1 for c in cities]
    rows = []
    for i in range(n):
        row = {"age": int(age[i]), "city": str(cities[i])}
        if not missing[i]:
            row["income"] = float(income[i])
        rows.append("{ %s }" % ", ".join("%s = %s" % (k, lua(v)) for k, v in row.items()))
    x = [[float(encoded[i, 0]), float(encoded[i, 1]), float(missing[i])] for i in range(n)]
    mean, scale = scaler.mean_, scaler.scale_
    return "{\n  train = %d,\n  rows = {\n    %s,\n  },\n  mean = %s,\n  deviation = %s,\n  values = %s,\n  x = %s,\n  c = %s,\n}" % (
        n // 2, ",\n    ".join(rows), lua([float(v) for v in mean]), lua([float(v) for v in scale]), lua(known), lua(x), lua(ids))


cases = [auc_case(4, 0, 0.5), auc_case(50, 0, 0.5), auc_case(200, 2, 0.3), auc_case(300, 1, 0.05), auc_case(64, 0, 0.9)]
with open(HERE / "tables.lua", "w") as out:
    out.write("-- tables.lua: areas under the ROC curve, and fitted columns, of scikit-learn. Made by tables.py beside this file.\n\n")
    out.write("local out = {}\n\nout.auc = {\n  %s,\n}\n\n" % ",\n  ".join(lua(c, 2) for c in cases))
    out.write("out.columns = %s\n\nreturn out\n" % columns_case(24))
