"""Reads what a run has logged with the programs that people use, and compares it with the run's own log.

    python3 read_back.py tensorboard RUN
    python3 read_back.py mlflow RUN STORE

RUN is a run directory, STORE the folder of --mlflow. Ends with an assertion if a number, text, picture or histogram differs. Needs
tensorboard (2.21) or mlflow-skinny (3.x).
"""

import json
import math
import sys


def events(run):
    with open(run + "/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def curves(log):
    """(name, step) -> value, of the events of steps, of evaluations and of run:log; the last value of a step stands."""
    out = {}
    for event in log:
        values = dict(event.get("metrics", {}))
        if "loss" in event:
            values["loss"] = event["loss"]
        for name, value in values.items():
            out[name, event["step"]] = math.nan if value is None else value
    return out


def same(a, b):
    return math.isnan(a) and math.isnan(b) or abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def logged(log, kind):
    return {(name, e["step"]): value for e in log if e["event"] == "log" for name, value in e.get(kind, {}).items()}


def tensorboard(run):
    from tensorboard.backend.event_processing import event_accumulator as ea

    everything = {kind: 0 for kind in ea.STORE_EVERYTHING_SIZE_GUIDANCE}
    seen = ea.EventAccumulator(run + "/tb", size_guidance=everything).Reload()
    log, tags = events(run), seen.Tags()
    wanted = curves(log)
    assert {name for name, _ in wanted} == set(tags["scalars"]), (sorted({n for n, _ in wanted}), tags["scalars"])
    for name in tags["scalars"]:
        read = {e.step: e.value for e in seen.Scalars(name)}
        for (_, step), value in filter(lambda item: item[0][0] == name, wanted.items()):
            assert same(read[step], value), (name, step, read[step], value)
    for (name, step), image in logged(log, "images").items():
        read = next(e for e in seen.Images(name) if e.step == step)
        assert (read.width, read.height) == (image["width"], image["height"]), (name, step)
        with open(f"{run}/{image['file']}", "rb") as file:
            assert read.encoded_image_string == file.read(), (name, step)
    for (name, step), histogram in logged(log, "histograms").items():
        read = next(e for e in seen.Histograms(name) if e.step == step).histogram_value
        assert list(read.bucket) == histogram["counts"] and read.num == sum(histogram["counts"]), (name, step)
        assert all(same(a, b) for a, b in zip(read.bucket_limit, histogram["edges"][1:])), (name, step)
        assert same(read.sum, histogram["sum"]) and same(read.sum_squares, histogram["sum_squares"]), (name, step)
    for (name, step), text in logged(log, "texts").items():
        assert seen.summary_metadata[name].plugin_data.plugin_name == "text", name
        read = next(e for e in seen.Tensors(name) if e.step == step).tensor_proto
        assert [s.decode() for s in read.string_val] == [text], (name, step)
    return len(wanted)


def mlflow(run, store):
    import os

    # MLflow keeps its file store, and asks that those who use it say so.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    with open(run + "/run.json") as file:
        record = json.load(file)
    client = MlflowClient(tracking_uri="file://" + os.path.abspath(store))
    experiment = client.get_experiment_by_name(record["recipe"])
    found = [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_id == record["mlflow"]["run"]]
    assert len(found) == 1, found
    status = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[record["status"]]
    assert found[0].info.status == status, (found[0].info.status, record["status"])
    assert found[0].info.run_name == os.path.basename(os.path.normpath(run))
    params = {name: value if isinstance(value, str) else json.dumps(value) for name, value in record["params"].items()}
    assert found[0].data.params == params, (found[0].data.params, params)
    wanted = curves(events(run))
    names = {name for name, _ in wanted}
    assert set(found[0].data.metrics) == names, (sorted(found[0].data.metrics), sorted(names))
    for name in names:
        read = {m.step: m.value for m in client.get_metric_history(found[0].info.run_id, name)}
        steps = {step: value for (other, step), value in wanted.items() if other == name}
        assert set(read) == set(steps) and all(same(read[step], value) for step, value in steps.items()), name
    return len(wanted)


if __name__ == "__main__":
    program, *paths = sys.argv[1:]
    print(f"{program}: {dict(tensorboard=tensorboard, mlflow=mlflow)[program](*paths)} values equal those of the run")
