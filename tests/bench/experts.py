"""Measures a step of mixtures of experts with skewed routers on a mesh, with experts that stay and experts that move.

    python3 tests/bench/experts.py PERILUNE [--devices 4] [--skew 1.0] [--every 10] [--replicas 4] [--batch 32] [--set NAME=VALUE...]

PERILUNE is the program. `even` has routers without preference, `skewed` those of `experts.lua`, `moved` the same with a rebalancing every
so many steps, and `replicas` with further copies. The load is that of the busiest device relative to the mean, in the block where
it is highest, over the steps since the last rebalancing, after 20 steps. Tokens a second are of the steps from 20 to 40, rebalancing
included, without evaluations. The figures are medians over two rounds, in which all sides take turns.
"""
import argparse, json, statistics, subprocess, tempfile, time

RECIPE, CONTEXT, FIRST, LAST, ROUNDS = "tests/bench/experts.lua", 1024, 20, 40, 2


def side(a, options):
    """Tokens a second, and the load after `FIRST` steps."""
    device = "cuda:" + ",".join(map(str, range(a.devices)))
    with tempfile.TemporaryDirectory() as folder:
        command = [a.program, "run", RECIPE, "--precision", "bf16", "--json", "--steps", str(LAST + 1), "--device", a.device or device]
        command += ["--mesh", f"ep={a.devices}", "--run-dir", folder + "/run", "--set", "eval_every=0"]
        for option in [f"batch={a.batch}"] + a.set + options:
            command += ["--set", option]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        times, load = {}, None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "error":
                raise SystemExit(f"{options}: {event['message']}")
            if event["event"] == "step":
                times[event["step"]] = time.monotonic()
                if event["step"] == FIRST:
                    load = event.get("metrics", event).get("expert_load")
                if event["step"] == LAST:
                    process.kill()
        process.wait()
    return (LAST - FIRST) * a.batch * CONTEXT / (times[LAST] - times[FIRST]), load


def main():
    parse = argparse.ArgumentParser(usage=__doc__)
    parse.add_argument("program")
    parse.add_argument("--devices", type=int, default=4)
    parse.add_argument("--device", help="device of all ranks, if not a GPU each")
    parse.add_argument("--skew", type=float, default=1.0)
    parse.add_argument("--every", type=int, default=10)
    parse.add_argument("--replicas", type=int, default=4)
    parse.add_argument("--batch", type=int, default=32)
    parse.add_argument("--set", action="append", default=[])
    a = parse.parse_args()
    skewed = [f"skew={a.skew}"]
    sides = {
        "even": ["skew=0.0", "rebalance=1000"],
        "skewed": skewed + ["rebalance=1000"],
        "moved": skewed + [f"rebalance={a.every}"],
        "replicas": skewed + [f"rebalance={a.every}", f"replicas={a.replicas}"],
    }
    rounds = [{name: side(a, options) for name, options in sides.items()} for _ in range(ROUNDS)]
    middle = {name: [statistics.median(r[name][k] for r in rounds) for k in range(2)] for name in sides}
    print(f"experts with skew {a.skew}, {a.devices} devices, batch of {a.batch} x {CONTEXT}")
    print(f"  {'':10} {'tokens/s':>10} {'beside skewed':>14} {'load':>6}")
    for name, (rate, load) in middle.items():
        print(f"  {name:10} {rate:10.0f} {rate / middle['skewed'][0]:14.3f} {load:6.3f}")


if __name__ == "__main__":
    main()
