"""Writes docs/benchmarks.md from the rows of docs/benchmarks/*.csv.

    python3 tests/bench/report.py            writes the page
    python3 tests/bench/report.py --check    exit status 1 if the page is out of date

A machine is NAME.csv (a row for each measurement, newest last) and NAME.ini (title, setup, notes, descriptions of cases). A row
is replaced on the page by the rows of the same case, unit and rival with a later date; rows of equal date and commit are
calls of one build, and the page shows their medians. Exit status 2 if a row is malformed. Needs Python's standard library only.
"""

import argparse
import configparser
import csv
import datetime
import difflib
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
COLUMNS = ["date", "commit", "machine", "case", "ours", "rival", "rival_name", "unit", "ratio", "script"]

# unit -> its text on the page, and whether more is better
UNITS = {"us": ("µs", False), "ms": ("ms", False), "s": ("s", False), "GiB": ("GiB", False), "MB": ("MB", False), "loss": ("loss", False),
         "TFLOP/s": ("TFLOP/s", True), "TB/s": ("TB/s", True), "GB/s": ("GB/s", True), "MB/s": ("MB/s", True), "images/s": ("images/s", True),
         "accuracy": ("accuracy", True)}

HEAD = """# Benchmarks

<!-- Written by tests/bench/report.py from docs/benchmarks/*.csv. Change the rows, not this page. -->

One table for each machine and unit, with the newest figure of each case: the median of all calls of that build. Speed-up is the rival's time
over ours (ours over the rival's for a rate): above 1 Perilune is faster. Machines are noisy, so compare figures only within one row. The
rows, with their history, are in [docs/benchmarks/](benchmarks/README.md); older pages are in the history of git.

## How to repeat

    perilune bench --device cpu --python PYTHON          PYTHON has PyTorch; the two sides take turns, round by round
    perilune bench --device cuda --python PYTHON         PYTHON has PyTorch with CUDA
    perilune bench --device cuda softmax gpt2_b32        some cases; --list names all, --no-rival measures Perilune only, --json is for programs
    python3 tests/bench/llmc.py TRAIN_GPT2CU             GPT-2 steps beside llm.c's program, on a GPU
    python3 tests/bench/data.py PERILUNE                 readers of data beside NumPy's
    python3 tests/bench/records.py                       readers of records beside orjson, simdjson, pyarrow, pandas, datasets and PyTorch
    python3 kernels/lab/attention_lab.py time f32 tf32   the attention kernels beside cuDNN and PyTorch, on a GPU
    cargo run --release -p perilune-lua --example record the cost of recording an op and of a plan lookup

`perilune bench` starts a process for each figure of ours, so no case inherits memory, plans or clocks from another. A figure is the median over
rounds of the median within a round. The cases are `tests/bench/cpu.lua` and `cuda.lua`; the same work in PyTorch is in `rival_cpu.py` and
`rival_cuda.py`. `first_step_cold` and `first_step_warm` are the seconds until the first GPT-2 step is done.

Memory is the peak during a case, in GiB. Ours is `peak` of `pl.memory()`: buffers, the arena of the largest step and the workspaces of libraries.
PyTorch's is `torch.cuda.max_memory_allocated`: tensors and workspaces, without what its allocator reserves beyond them. Neither counts the
CUDA context, nor what a library or a captured graph takes from the driver by itself.

Where the time of a recipe goes, kernel by kernel and line by line: `perilune profile recipes/gpt2.lua`.
"""


class Malformed(Exception):
    pass


def number(text, where, empty=True):
    """A positive number, or None for an empty cell."""
    if not text and empty:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise Malformed(f"{where}: '{text}' is no positive number")
    return value


def read_row(row, where, machine):
    if None in row or None in row.values():
        raise Malformed(f"{where}: a row has {len(COLUMNS)} cells")
    if row["machine"] != machine:
        raise Malformed(f"{where}: the machine is '{row['machine']}', the file {machine}.csv")
    for column in ("date", "commit", "case", "unit", "script"):
        if not row[column].strip():
            raise Malformed(f"{where}: {column} is empty")
    try:
        datetime.date.fromisoformat(row["date"])
    except ValueError:
        raise Malformed(f"{where}: the date is '{row['date']}'; it is written as 2026-11-23") from None
    if row["unit"] not in UNITS:
        raise Malformed(f"{where}: the unit is '{row['unit']}'; it is one of {', '.join(UNITS)}")
    ours, rival = number(row["ours"], where), number(row["rival"], where)
    ratio = number(row["ratio"], where)
    if ours is None and ratio is None:
        raise Malformed(f"{where}: neither ours nor ratio")
    if bool(row["rival_name"]) != (ratio is not None) or (rival is not None and ratio is None):
        raise Malformed(f"{where}: rival_name and ratio go together")
    if ours and rival:
        true = ours / rival if UNITS[row["unit"]][1] else rival / ours
        if abs(ratio - true) > 0.006 * max(1.0, true):
            raise Malformed(f"{where}: the ratio is {true:.3f}, not {ratio}")
    script = row["script"].split()[0]
    if "/" in script and not (ROOT / script).is_file():
        raise Malformed(f"{where}: there is no {script}")
    return {**row, "ours": ours, "rival": rival, "ratio": ratio}


def read(path):
    """The rows of a machine, and its INI file."""
    with open(path, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        if reader.fieldnames != COLUMNS:
            raise Malformed(f"{path.name}: the first line is {','.join(COLUMNS)}")
        rows = [read_row(row, f"{path.name}:{reader.line_num}", path.stem) for row in reader]
    about = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    about.optionxform = str
    if not about.read(path.with_suffix(".ini"), encoding="utf-8"):
        raise Malformed(f"{path.stem}.ini is missing")
    known = {row["case"] for row in rows}
    for case in sorted(known ^ set(about["cases"])):
        raise Malformed(f"{path.stem}: case '{case}' needs both a row in the CSV and a line in the INI file")
    return rows, about


def current(rows):
    """The rows that the page shows: for each case, unit and rival the calls of the newest build, as one row of medians."""
    newest = {}
    for row in rows:
        key = row["case"], row["unit"], row["rival_name"]
        calls = newest.setdefault(key, [row])
        if calls[0] is row:
            continue
        if (row["date"], row["commit"]) == (calls[0]["date"], calls[0]["commit"]):
            calls.append(row)
        elif row["date"] >= calls[0]["date"]:
            newest[key] = [row]

    def median(calls, column):
        values = [c[column] for c in calls if c[column] is not None]
        return statistics.median(values) if values else None

    return [{**calls[0], **{c: median(calls, c) for c in ("ours", "rival", "ratio")}, "calls": len(calls)} for calls in newest.values()]


def shown(value):
    """A number with thousands marked, or with four digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def against(row, named):
    """A rival's figure, its name if the column does not give it, and the ratio."""
    figure = " ".join(filter(None, [row["rival_name"] if named else "", shown(row["rival"])]))
    ratio = f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.1f}"
    return figure, ratio


def table(rows, unit, about):
    """A line for each case of one unit, with the best rival; the others are in the last column."""
    cases = {}
    for row in rows:
        of_case = cases.setdefault(row["case"], {"ours": row, "rivals": []})
        if row["rival_name"]:
            of_case["rivals"].append(row)
    names = {row["rival_name"] for row in rows if row["rival_name"]}
    several, crowded = len(names) > 1, any(len(c["rivals"]) > 1 for c in cases.values())
    head = ["case", "what", f"ours {UNITS[unit][0]}"]
    if names:
        head.append("best rival" if several else f"{min(names)} {UNITS[unit][0]}")
        head.append("rival / ours" if unit in ("GiB", "MB") else "speed-up")
    head += ["other rivals"] if crowded else []
    head.append("measured")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, of_case in cases.items():
        row, rivals = of_case["ours"], sorted(of_case["rivals"], key=lambda r: r["ratio"])
        cells = [f"`{case}`", about["cases"][case], shown(row["ours"])]
        if names:
            cells += against(rivals[0], several) if rivals else ["", ""]
        if crowded:
            cells.append("; ".join("{} ({})".format(*against(r, True)) for r in rivals[1:]))
        calls = f", {row['calls']} calls" if row["calls"] > 1 else ""
        cells.append(f"{row['date']}, {row['commit']}{calls}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page():
    parts = [HEAD]
    for path in sorted(ROWS.glob("*.csv")):
        rows, about = read(path)
        rows, machine = current(rows), about["machine"]
        parts += [f"## {machine['title']}\n", machine["setup"] + "\n"]
        for unit in dict.fromkeys(row["unit"] for row in rows):
            parts.append(table([row for row in rows if row["unit"] == unit], unit, about))
        if "notes" in machine:
            parts.append(machine["notes"] + "\n")
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    args = parser.parse_args()
    try:
        text = page()
    except Malformed as e:
        print(f"report.py: {e}", file=sys.stderr)
        return 2
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    now = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    diff = list(difflib.unified_diff(now.splitlines(), text.splitlines(), "docs/benchmarks.md", "docs/benchmarks/*.csv", lineterm=""))
    if diff or now != text:
        print(*diff, "run: python3 tests/bench/report.py", sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
