"""Measures readers of records beside their rivals on the same files, in turns in one run.

    python3 -m pip install --target target/tools/rivals orjson pysimdjson pyarrow pandas datasets torch
    cargo build --release && cargo build --release --workspace --example read_records
    python3 tests/bench/records.py [--size MB] [CASE...]

A seeded generator writes the files; the page cache holds them. A figure is the median over rounds of a case's rate, in MB of file a second
of processor time (of the clock in jsonl_warm and jsonl_map).
A rival that is not installed is left out, by name. --csv prints rows for docs/benchmarks.

jsonl_select   opening a file and reading its column `text`, on one core: records of (id, url, score, text, meta). orjson and simdjson parse
               the lines that Python reads from the file, pyarrow.json reads the whole file with a schema of that column on one thread.
jsonl_whole    the same with all columns.
jsonl_warm     opening again a file whose index is in the cache folder, by the clock; beside a loop of Python that finds its lines.
jsonl_map      a function of fields (lower case, length) and a filter by it, 2 workers; `datasets` with num_proc=2, and PyTorch's DataLoader
               with 2 workers over orjson, which does the same with a list of lines.
table_rows     opening a CSV file of (id, name, score, text) and reading its rows as records, on one core; pandas and pyarrow.csv to dicts.
"""

import argparse, datetime, json, os, pathlib, random, shutil, statistics, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "target/tools/rivals"))
EXAMPLE, PROGRAM = ROOT / "target/release/examples/read_records", ROOT / "target/release/perilune"
ROUNDS = 5
MAP = """
local pl = require "perilune"
local start = pl.clock()
local set = pl.data.jsonl("%s"):select { "id", "text" }
  :map(function(r) return { id = r.id, text = r.text:lower(), n = #r.text } end)
  :filter(function(r) return r.n %% 2 == 0 end)
print(set:size(), pl.clock() - start)
"""


def make_lines(path, size):
    """JSONL of about `size` bytes: texts of 20 to 200 words, with escapes and characters beyond ASCII."""
    rng, written, k = random.Random(1), 0, 0
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9))) for _ in range(4000)]
    words += ["naïve", "Köln", "東京", "said:\n", '"quoted"', "A\tB"]
    with open(path, "w", encoding="utf-8") as out:
        while written < size:
            text = " ".join(rng.choices(words, k=rng.randint(20, 200)))
            meta = {"lang": "en", "tags": rng.sample(words, 3), "ok": rng.random() < 0.9, "tokens": len(text) // 4}
            row = {"id": k, "url": f"https://example.org/{rng.getrandbits(40):x}", "score": rng.random(), "text": text, "meta": meta}
            written += out.write(json.dumps(row, ensure_ascii=False) + "\n")
            k += 1


def make_table(path, size):
    rng, written, k = random.Random(2), 0, 0
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9))) for _ in range(4000)] + ["a, b", "say", "Köln"]
    with open(path, "w", encoding="utf-8") as out:
        out.write("id,name,score,text\n")
        while written < size:
            text = " ".join(rng.choices(words, k=rng.randint(10, 60)))
            written += out.write(f'{k},{rng.choice(words[:4000])},{rng.random():.6f},"{text}"\n')
            k += 1


def one_core():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def ours(format, path, fields=(), cache="none", rounds=1):
    """The seconds of processor time of opening a file and reading it, or only of opening it, on one core; and those of the clock."""
    done = subprocess.Popen([EXAMPLE, format, path, str(rounds), cache, *fields], stdout=subprocess.PIPE, text=True, preexec_fn=one_core)
    text = done.stdout.read()
    _, status, usage = os.wait4(done.pid, 0)
    done.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"read_records fails with status {done.returncode}")
    return usage.ru_utime + usage.ru_stime, json.loads(text)["open"]


def on_one_core(f):
    """The seconds of processor time of a function, in a process of one core."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            one_core()
            start = time.process_time()
            f()
            os.write(write, str(time.process_time() - start).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"a rival fails with status {status}")
    return float(text)


def installed(name):
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as e:
        print(f"skipped: {name} is not installed ({e})", file=sys.stderr)
        return None


def line_rivals(path, column):
    """Functions that read the text of each line, or all fields."""
    found = {}
    if orjson := installed("orjson"):
        def with_orjson():
            with open(path, "rb") as lines:
                return sum(len(orjson.loads(line)["text"]) for line in lines)
        found["orjson"] = with_orjson
    if simdjson := installed("simdjson"):
        def with_simdjson():
            parser = simdjson.Parser()
            with open(path, "rb") as lines:
                if column:
                    return sum(len(parser.parse(line)["text"]) for line in lines)
                return sum(len(parser.parse(line).as_dict()["text"]) for line in lines)
        found["simdjson"] = with_simdjson
    if installed("pyarrow"):
        import pyarrow as pa, pyarrow.json as pj
        def with_pyarrow():
            schema = pa.schema([("text", pa.string())])
            parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore") if column else None
            # A block holds some hundred lines or more.
            table = pj.read_json(str(path), read_options=pj.ReadOptions(use_threads=False, block_size=4 << 20), parse_options=parse)
            return sum(len(batch.column("text").to_pylist()) for batch in table.to_batches())
        found["pyarrow.json"] = with_pyarrow
    return found


def jsonl_select(folder, size, column=True):
    path = folder / "lines.jsonl"
    make_lines(path, size)
    mb, fields = path.stat().st_size / 1e6, ["text"] if column else []
    mine, rivals = [], line_rivals(path, column)
    seconds = {name: [] for name in rivals}
    for _ in range(ROUNDS):
        mine.append(ours("jsonl", path, fields)[0])
        for name, f in rivals.items():
            seconds[name].append(on_one_core(f))
    opening = statistics.median(ours("jsonl", path, fields, rounds=0)[0] for _ in range(ROUNDS))
    both = statistics.median(mine)
    print(f"  opening {mb / opening:.0f} MB/s, reading {mb / (both - opening):.0f} MB/s", file=sys.stderr)
    return mb / both, {n: mb / statistics.median(s) for n, s in seconds.items()}


def jsonl_whole(folder, size):
    return jsonl_select(folder, size, column=False)


def jsonl_warm(folder, size):
    path = folder / "warm.jsonl"
    make_lines(path, size)
    time.sleep(4)
    mb, cache = path.stat().st_size / 1e6, str(folder / "cache")
    cold = mb / open_only(path, cache)
    warm = [mb / open_only(path, cache) for _ in range(ROUNDS)]
    print(f"  cold {cold:.0f} MB/s", file=sys.stderr)
    def find_lines():
        with open(path, "rb") as lines:
            at, starts = 0, []
            for line in lines:
                starts.append(at)
                at += len(line)
    return statistics.median(warm), {"a Python loop": mb / statistics.median(on_one_core(find_lines) for _ in range(ROUNDS))}


def open_only(path, cache):
    return ours("jsonl", path, ["text"], cache, rounds=0)[1]


def lower(row):
    return {"id": row["id"], "text": row["text"].lower(), "n": len(row["text"].encode())}


class Mapped:
    """A dataset of PyTorch over the lines of a file."""

    def __init__(self, path):
        with open(path, "rb") as lines:
            self.lines = lines.read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, k):
        import orjson
        return lower(orjson.loads(self.lines[k]))


def jsonl_map(folder, size):
    path = folder / "map.jsonl"
    make_lines(path, size)
    mb, script = path.stat().st_size / 1e6, folder / "map.lua"
    script.write_text(MAP % path)
    environment = {**os.environ, "PERILUNE_CACHE": str(folder / "none")}
    def with_program():
        command = [PROGRAM, "run", script, "--device", "cpu", "--allow-read", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(done.stderr)
        count, seconds = done.stdout.split()[-2:]
        return int(count), float(seconds)
    rivals, counts = {}, {}
    if installed("datasets") and installed("orjson"):
        import datasets
        datasets.disable_progress_bars()
        def with_datasets():
            cache = tempfile.mkdtemp(dir=folder)
            start = time.perf_counter()
            rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
            rows = rows.select_columns(["id", "text"]).map(lower, num_proc=2).filter(lambda r: r["n"] % 2 == 0, num_proc=2)
            counts["datasets"], seconds = len(rows), time.perf_counter() - start
            shutil.rmtree(cache)
            return seconds
        rivals["datasets"] = with_datasets
    if (torch := installed("torch")) and installed("orjson"):
        def with_torch():
            start = time.perf_counter()
            loader = torch.utils.data.DataLoader(Mapped(path), batch_size=256, num_workers=2, collate_fn=list)
            counts["DataLoader"] = sum(row["n"] % 2 == 0 for batch in loader for row in batch)
            return time.perf_counter() - start
        rivals["DataLoader"] = with_torch
    mine, seconds = [], {name: [] for name in rivals}
    for _ in range(3):
        count, one = with_program()
        mine.append(one)
        for name, f in rivals.items():
            seconds[name].append(f())
    assert all(other == count for other in counts.values()), (count, counts)
    return mb / statistics.median(mine), {n: mb / statistics.median(s) for n, s in seconds.items()}


def table_rows(folder, size):
    path = folder / "table.csv"
    make_table(path, size)
    mb, rivals = path.stat().st_size / 1e6, {}
    if pandas := installed("pandas"):
        rivals["pandas"] = lambda: len(pandas.read_csv(path).to_dict("records"))
    if installed("pyarrow"):
        import pyarrow.csv as pc
        rivals["pyarrow.csv"] = lambda: len(pc.read_csv(path, read_options=pc.ReadOptions(use_threads=False)).to_pylist())
    mine, seconds = [], {name: [] for name in rivals}
    for _ in range(ROUNDS):
        mine.append(ours("table", path)[0])
        for name, f in rivals.items():
            seconds[name].append(on_one_core(f))
    opening = statistics.median(ours("table", path, rounds=0)[0] for _ in range(ROUNDS))
    both = statistics.median(mine)
    print(f"  opening {mb / opening:.0f} MB/s, reading {mb / (both - opening):.0f} MB/s", file=sys.stderr)
    return mb / both, {n: mb / statistics.median(s) for n, s in seconds.items()}


CASES = {f.__name__: f for f in (jsonl_select, jsonl_whole, jsonl_warm, jsonl_map, table_rows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of " + ", ".join(CASES))
    parser.add_argument("--size", type=int, default=200, help="MB of a file")
    parser.add_argument("--csv", metavar="MACHINE", help="print rows of docs/benchmarks/MACHINE.csv too")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]}; the cases are {', '.join(CASES)}")
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            mine, rivals = CASES[name](pathlib.Path(folder), args.size * 1_000_000)
        if not rivals:
            print(f"{name:13} ours {mine:8.1f} MB/s", flush=True)
        for rival, rate in rivals.items():
            print(f"{name:13} ours {mine:8.1f} MB/s   {rival:14} {rate:8.1f} MB/s   ratio {mine / rate:.2f}", flush=True)
            if args.csv:
                commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
                cells = [datetime.date.today(), commit, args.csv, name, f"{mine:.1f}", f"{rate:.1f}", rival, "MB/s",
                         f"{float(f'{mine:.1f}') / float(f'{rate:.1f}'):.3f}", "tests/bench/records.py"]
                print(",".join(map(str, cells)))


if __name__ == "__main__":
    main()
