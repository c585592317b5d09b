"""Kills one of several processes of a run, a process a GPU, and resumes it on fewer devices.

    python3 tests/bench/kills.py PERILUNE [--processes 2] [--trials 5] [--device cuda] [--steps 300] [--seed 1]

PERILUNE is the program. Each trial starts a run of `recipes/chargpt.lua` with strict shards, sends SIGKILL to a random process after a
random step, and waits for the launcher. It fails if that takes more than 30 s, if the launcher does not name the process, or if the run,
resumed in one process on a smaller number of devices, drawn from those that divide the shards, does not end with the weights of a run that nobody killed.
"""
import argparse, json, os, random, signal, subprocess, tempfile, time

LIMIT_S = 30


def weights(lines):
    """The hash in the last event."""
    return json.loads(lines[-1])["weights"]


def options(a, folder):
    return ["run", "recipes/chargpt.lua", "--device", a.device, "--steps", str(a.steps), "--checkpoint-every", "20", "--strict-shards", "8",
            "--set", "batch=16", "--set", "dropout=0.1", "--json", "--run-dir", folder]


def ranks(launcher):
    """The process of each rank."""
    found = {}
    with open(f"/proc/{launcher}/task/{launcher}/children") as children:
        for pid in children.read().split():
            with open(f"/proc/{pid}/environ", "rb") as environ:
                for variable in environ.read().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        found[int(variable[5:])] = int(pid)
    return found


def trial(a, chance, folder, want):
    at, victim = chance.randrange(1, a.steps * 3 // 4), chance.randrange(a.processes)
    command = [a.program, "launch", "-n", str(a.processes)] + options(a, folder) + ["--mesh", f"dp={a.processes}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] >= at:
            break
    os.kill(ranks(process.pid)[victim], signal.SIGKILL)
    start = time.monotonic()
    try:
        errors = process.communicate(timeout=10 * LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"rank {victim} killed after step {at}: the others still run after {10 * LIMIT_S} s")
    seconds, cause = time.monotonic() - start, f"rank {victim} was killed by SIGKILL"
    # Strict shards divide among these.
    fewer = chance.choice([n for n in (1, 2, 4) if n < a.processes])
    command = [a.program] + options(a, folder) + ["--resume"] + (["--mesh", f"dp={fewer}"] if fewer > 1 else [])
    resumed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    same = resumed.returncode == 0 and weights(resumed.stdout.splitlines()) == want
    print(f"rank {victim} killed after step {at}: stopped in {seconds:.1f} s; resumed on {fewer}: {'same weights' if same else 'OTHER WEIGHTS'}", flush=True)
    if process.returncode == 0 or cause not in errors:
        raise SystemExit(f"the launcher ended with {process.returncode} and does not say {cause!r}:\n{errors}")
    if seconds > LIMIT_S or not same:
        raise SystemExit(1)


def main():
    parse = argparse.ArgumentParser(usage=__doc__)
    parse.add_argument("program")
    for name, default in (("processes", 2), ("trials", 5), ("steps", 300), ("seed", 1)):
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--device", default="cuda")
    a = parse.parse_args()
    chance = random.Random(a.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = subprocess.run([a.program] + options(a, folder + "/whole"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        want = weights(whole.stdout.splitlines())
        for k in range(a.trials):
            trial(a, chance, f"{folder}/{k}", want)


if __name__ == "__main__":
    main()
