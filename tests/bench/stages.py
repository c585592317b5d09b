"""Measures a training step of GPT-2 in pipeline stages, one device of the pipeline a GPU, beside one GPU.

    python3 tests/bench/stages.py PERILUNE [--size 774M] [--micro 8] [--batch 4] [--vocab 50304] [--devices 2] [--schedules 1f1b]

PERILUNE is the program. With a small vocabulary the layers can be divided into equal stages. One GPU takes the same micro-batches one after
the other (`accumulate`), so all sides compute the same step. The bubble is the share of a step in which a GPU does not do its part of that work: 1 - t1 / (P tP) on P devices. It counts transfers and stages of
unequal work too. With equal stages and free transfers `1f1b` has (P - 1) / (m + P - 1) for m micro-batches. The figures are medians over two
rounds, in which all sides take turns.
"""
import argparse, statistics

from mesh import GPT2, step_ms

CONTEXT, STEPS, ROUNDS = 1024, 24, 2


def main():
    parse = argparse.ArgumentParser(usage=__doc__)
    parse.add_argument("program")
    parse.add_argument("--size", default="774M")
    parse.add_argument("--micro", type=int, default=8)
    parse.add_argument("--batch", type=int, default=4)
    parse.add_argument("--vocab", type=int, default=50304)
    parse.add_argument("--devices", type=int, default=2)
    parse.add_argument("--schedules", default="1f1b")
    a = parse.parse_args()
    if a.micro < a.devices or a.batch < 1:
        raise SystemExit(f"{a.micro} micro-batches of {a.batch}: a step needs at least {a.devices} micro-batches, of at least 1 sample")
    options = [f"size={a.size}", "--set", f"accumulate={a.micro}", "--set", f"batch={a.batch}", "--set", f"vocab={a.vocab}"]
    schedules = a.schedules.split(",")
    gpus = "cuda:" + ",".join(map(str, range(a.devices)))
    sides = [("cuda:0", options)] + [(gpus, options + ["--mesh", f"pp={a.devices},schedule={s}"]) for s in schedules]
    rounds = [[step_ms(a.program, GPT2, STEPS, device, more) for device, more in sides] for _ in range(ROUNDS)]
    one, *staged = (statistics.median(side) for side in zip(*rounds))
    tokens = a.batch * a.micro * CONTEXT
    print(f"GPT-2 {a.size}, {a.micro} micro-batches of {a.batch} x {CONTEXT} tokens, {a.vocab} of them known, bf16, {a.devices} devices")
    print(f"  {'':14} {'ms':>8} {'tokens/s':>10} {'speed-up':>9} {'bubble':>8}")
    print(f"  {'one GPU':14} {one:8.1f} {tokens / one * 1e3:10.0f}")
    for schedule, ms in zip(schedules, staged):
        bubble, ideal = 1 - one / (a.devices * ms), (a.devices - 1) / (a.micro + a.devices - 1)
        beside = f", of the schedule {ideal:.4f}" if schedule == "1f1b" else ""
        print(f"  {schedule:14} {ms:8.1f} {tokens / ms * 1e3:10.0f} {one / ms:9.3f} {bubble:8.4f}{beside}")


if __name__ == "__main__":
    main()
