"""Measures a training step of GPT-2 in two pipeline stages on two GPUs, beside one GPU and the bubble that the schedule `1f1b` has.

    python3 tests/bench/stages.py PERILUNE [SIZE] [MICRO_BATCHES] [BATCH]      774M, 8 and 4; PERILUNE is the program; needs two GPUs

One GPU takes the same micro-batches one after the other (`accumulate`), so both sides compute the same step. The bubble is the share of a step
in which a GPU does not do its half of that work: 1 - t1 / (2 t2). It counts transfers and stages of unequal work too. With equal stages and free
transfers it is (P - 1) / (m + P - 1) for m micro-batches on P devices. The figures are medians over two rounds, in which both sides take turns.
"""
import statistics, sys

from mesh import GPT2, step_ms

STAGES, CONTEXT, STEPS, ROUNDS = 2, 1024, 15, 2
# The bubble may be larger than that of the schedule by so much of it.
GOAL = 0.05


def main(program, size, micro, batch):
    options = [f"size={size}", "--set", f"accumulate={micro}", "--set", f"batch={batch}"]
    sides = (("cuda:0", options), ("cuda:0,1", options + ["--mesh", f"pp={STAGES}"]))
    rounds = [[step_ms(program, GPT2, STEPS, device, more) for device, more in sides] for _ in range(ROUNDS)]
    one, two = (statistics.median(side) for side in zip(*rounds))
    tokens = batch * micro * CONTEXT
    bubble, ideal = 1 - one / (STAGES * two), (STAGES - 1) / (micro + STAGES - 1)
    # The time of a step whose bubble is that of the schedule.
    least = one / STAGES / (1 - ideal)
    print(f"GPT-2 {size}, {micro} micro-batches of {batch} x {CONTEXT} tokens, bf16, 1f1b")
    print(f"  one GPU          {one:8.1f} ms {tokens / one * 1e3:10.0f} tokens/s")
    print(f"  two GPUs, pp=2   {two:8.1f} ms {tokens / two * 1e3:10.0f} tokens/s   speed-up {one / two:.3f}, at best {one / least:.3f}")
    print(f"  bubble           {bubble:8.4f}, of the schedule {ideal:.4f}: {bubble / ideal - 1:+.1%} of it (goal: {GOAL:+.0%})")
    print(f"  step time        {two / least - 1:+8.1%} beyond that of the schedule")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 5:
        raise SystemExit(__doc__)
    size, micro, batch = (sys.argv[2:] + ["774M", "8", "4"][len(sys.argv) - 2:])[:3]
    if not (micro.isdigit() and batch.isdigit() and int(micro) >= STAGES and int(batch) >= 1):
        raise SystemExit(f"{micro} micro-batches of {batch}: a step needs at least {STAGES} micro-batches, of at least 1 sample")
    main(sys.argv[1], size, int(micro), int(batch))
