//! Bundles that are whole, and whose run is hostile: its record, logs, checkpoints, samples, envelope.

use super::{ALL_RUNS, Expect, Hostile, REPLAYS, RUNS};
use crate::record::Forger;
use crate::support::{Place, TINY, place};
use perilune_bundle::{Content, Item, Manifest};
use serde_json::{Value, json};
use std::path::Path;

/// The folder of an author: a run with everything that a run records, in `bundle`, and two signed bundles.
pub fn author() -> Place {
    let p = place();
    let logged = TINY.replace("function recipe.data", "recipe.sample_log = true\nfunction recipe.data");
    p.file(
        "tiny.lua",
        logged.replace("{ off = error:abs():mean() }", "{ off = error:abs():mean() }, nil, error * error"),
    );
    let run = |args: &[&str]| {
        let ran = p.run(args);
        assert_eq!(ran.status, Some(0), "{args:?}: {}{}", ran.out, ran.err);
    };
    // On the device that runs its bundles, where they must have its bits.
    let device = crate::sandbox::device();
    run(&["run", "tiny.lua", "--device", &device, "--checkpoint-every", "2", "--keep", "0", "--run-dir", "one", "-q"]);
    run(&["bundle", "key", "me.key", "--no-password"]);
    run(&["bundle", "key", "other.key", "--no-password"]);
    run(&["bundle", "pack", "one", "--checkpoints", "-o", "good.plb", "--sign", "me.key"]);
    run(&["bundle", "pack", "tiny.lua", "-o", "other.plb", "--sign", "other.key"]);
    run(&["bundle", "extract", "good.plb", "bundle"]);
    p
}

/// Lists the files beneath a folder by their names in the bundle.
fn files(dir: &Path, at: &str, out: &mut Vec<Item>) {
    for entry in std::fs::read_dir(dir.join(at)).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        let name = if at.is_empty() { name } else { format!("{at}/{name}") };
        match entry.file_type().unwrap().is_dir() {
            true => files(dir, &name, out),
            false if name == "manifest.json" => {}
            false => out.push(Item { name, content: Content::File(entry.path()) }),
        }
    }
}

/// Packs the author's bundle again after changes of its run and its manifest.
fn repacked(author: &Place, run: &dyn Fn(&Forger), manifest: &dyn Fn(&mut Manifest)) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("bundle");
    let copied = Forger::copy(&author.path("bundle"), &dir);
    run(&Forger { dir: copied.dir.join("run") });
    let mut text: Manifest = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    manifest(&mut text);
    let mut items = Vec::new();
    files(&dir, "", &mut items);
    let to = folder.path().join("bad.plb");
    perilune_bundle::pack(&to, &mut text, &items).unwrap();
    std::fs::read(to).unwrap()
}

/// A list in lists.
fn deep() -> String {
    format!("{}{}", "[".repeat(100_000), "]".repeat(100_000))
}

const EVIL: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}\r";

/// A file of tensors with this header.
fn tensors(length: u64, header: &str) -> Vec<u8> {
    [&length.to_le_bytes()[..], header.as_bytes(), &[0; 64]].concat()
}

pub fn all(author: &Place) -> Vec<Hostile> {
    let mut out = Vec::new();
    let mut add = |name: &str, expect: Expect, run: &dyn Fn(&Forger)| {
        out.push(Hostile::bytes(&format!("run-{name}"), expect, repacked(author, run, &|_| ())));
    };
    let any = || Expect::Contained;
    let runs = |rule| Expect::Where(ALL_RUNS, rule);
    add("as-it-was", any(), &|_| ());
    let put = |file: &'static str, bytes: Vec<u8>| move |f: &Forger| std::fs::write(f.dir.join(file), &bytes).unwrap();
    add("record-deep", runs("run.json"), &put("run.json", deep().into_bytes()));
    add("record-noise", runs("run.json"), &put("run.json", vec![0xfe; 10_000]));
    add("record-long", any(), &put("run.json", format!("{{\"{}\": 1}}", "a".repeat(8 << 20)).into_bytes()));
    add("record-unsealed", runs("run.json"), &|f| {
        let path = f.dir.join("run.json");
        let text = std::fs::read_to_string(&path).unwrap().replace("\"tiny\"", "\"other\"");
        std::fs::write(path, text).unwrap();
    });
    let field =
        |name: &'static str, value: Value| move |f: &Forger| f.record(|r| drop(r.insert(name.into(), value.clone())));
    add("path-outside", any(), &field("path", json!("../../../victim/secret.lua")));
    add("path-absolute", any(), &field("path", json!("/etc/passwd")));
    add("path-escape", any(), &field("path", json!(format!("{EVIL}.lua"))));
    add("directory", any(), &field("directory", json!("/")));
    add("steps-huge", any(), &field("steps", json!(1u64 << 63)));
    add("steps-done-huge", any(), &field("steps_done", json!(u64::MAX)));
    add("steps-negative", any(), &field("steps_done", json!(-1)));
    add("resumed-huge", any(), &field("resumed", json!([u64::MAX, 1u64 << 63, -1, "x"])));
    add("seed-text", any(), &field("seed", json!({ "a": [EVIL] })));
    add("recipe-name", any(), &field("recipe", json!(EVIL)));
    add("device", any(), &field("device_description", json!(EVIL)));
    add("mesh", any(), &field("mesh", json!("dp=1000000,tp=1000000")));
    add("id", any(), &field("id", json!("../../victim")));
    add("params", any(), &field("params", json!({ EVIL: EVIL, "steps": 1e308, "lr": { "a": [] } })));
    add(
        "files-outside",
        runs("leads out of its directory"),
        &field("files", json!([{ "path": "../../../victim/secret.lua", "blake3": "0".repeat(64) }])),
    );
    add("files-many", any(), &field("files", json!(vec![json!({ "path": "x.lua", "blake3": "0" }); 100_000])));
    add(
        "data-outside",
        any(),
        &field("data", json!([{ "path": "/etc/shadow", "bytes": 1, "blake3": "0".repeat(64), "mtime_ns": 1 }])),
    );
    add("data-types", any(), &field("data", json!([7, null, { "path": [EVIL] }])));
    add("command-program", Expect::Where(REPLAYS, "is not a `perilune run` command"), &|f| {
        f.record(|r| drop(r.insert("command".into(), json!(["rm", "-rf", "/"]))));
    });
    add("command-grants", any(), &|f| {
        let words = ["--allow-write=/", "--allow-read=/", "--mlflow", "../../victim/m", "--log", "../../victim/log"];
        f.record(|r| r["command"].as_array_mut().unwrap().extend(words.map(Value::from)));
    });
    add("log-metric-names", any(), &|f| {
        f.log("metrics.jsonl", |lines| {
            for line in lines.iter_mut().filter(|l| l["event"] == "step") {
                line.as_object_mut().unwrap().insert(EVIL.into(), json!(1));
            }
        });
    });
    add("log-steps", any(), &|f| {
        f.log("metrics.jsonl", |lines| {
            for line in lines.iter_mut().filter(|l| l["event"] == "step") {
                line["step"] = json!(u64::MAX - line["step"].as_u64().unwrap());
            }
        });
    });
    add("log-values", any(), &|f| {
        f.log("metrics.jsonl", |lines| lines.iter_mut().for_each(|l| l["loss"] = json!([{ "a": EVIL }])));
    });
    add(
        "log-line",
        Expect::Where(&["diff as a", "diff as b"], "a line has more than"),
        &put("metrics.jsonl", vec![b'a'; 20 << 20]),
    );
    add("log-noise", any(), &put("metrics.jsonl", vec![0xc3; 100_000]));
    add("log-deep", any(), &put("metrics.jsonl", (deep() + "\n").into_bytes()));
    add("log-many-metrics", any(), &|f| {
        let line = |step: u64| {
            format!(
                "{{\"event\":\"step\",\"step\":{step},{}\"z\":1}}\n",
                (0..2000).map(|k| format!("\"m{k}\":{step},")).collect::<String>()
            )
        };
        std::fs::write(f.dir.join("metrics.jsonl"), (1..=100).map(line).collect::<String>()).unwrap();
    });
    let names: Vec<String> = (0..10_001).map(|k| format!("\"m{k}\":1")).collect();
    let line = format!("{{\"event\":\"eval\",\"step\":1,\"metrics\":{{{}}}}}\n", names.join(","));
    add(
        "log-too-many-metrics",
        Expect::Where(&["diff as a", "diff as b"], "more than 10000 metrics"),
        &put("metrics.jsonl", line.into_bytes()),
    );
    add(
        "log-long",
        Expect::Where(RUNS, "the log of metrics has"),
        &put("metrics.jsonl", format!("{{}}{}\n", " ".repeat(15 << 20)).repeat(5).into_bytes()),
    );
    add("ledger-deep", any(), &put("ledger.jsonl", (deep() + "\n").into_bytes()));
    let edit = json!({ "step": 3, "dir": "../../../../victim", "files": [{ "path": "../secret.lua", "blake3": "0" }] });
    add("ledger-outside", any(), &put("ledger.jsonl", format!("{edit}\n").into_bytes()));
    add("samples-noise", any(), &put("samples.bin", vec![0xff; 50_000]));
    add("samples-empty", any(), &put("samples.bin", Vec::new()));
    add("recipe-changed", runs("is not the file that ran"), &put("recipe/tiny.lua", b"print('ran')".to_vec()));
    let step = "checkpoints/step-2/run.json";
    add("checkpoint-deep", Expect::Where(&["replay --steps"], "step-2"), &put(step, deep().into_bytes()));
    add("checkpoint-files", Expect::Where(&["replay --steps"], "step-2"), &|f| {
        f.checkpoint_record(2, |r| drop(r.insert("step".into(), json!(1u64 << 63))));
        let path = f.dir.join(step);
        let text =
            std::fs::read_to_string(&path).unwrap().replace("model.safetensors", "../../../../victim/secret.npy");
        std::fs::write(path, text).unwrap();
    });
    for (name, length, header) in [
        ("length", u64::MAX, "{}".to_string()),
        ("header-deep", 200_000, deep()),
        (
            "shape",
            80,
            r#"{"weight":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,64]}}"#.into(),
        ),
        (
            "offsets",
            90,
            r#"{"weight":{"dtype":"F32","shape":[16],"data_offsets":[18446744073709551552,18446744073709551615]}}"#
                .into(),
        ),
        (
            "names",
            0,
            format!(
                "{{\"{}\":{{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[0,64]}}}}",
                "\\u001b[2J\\u009b31m".repeat(50)
            ),
        ),
    ] {
        let length = if length < 100 { header.len() as u64 } else { length };
        let bytes = tensors(length, &header);
        add(&format!("tensors-{name}"), Expect::Where(&["replay --steps"], "step-2"), &|f| {
            std::fs::write(f.dir.join("checkpoints/step-2/model.safetensors"), &bytes).unwrap();
            f.checkpoint_record(2, |_| ());
        });
    }
    for (name, text) in [
        ("deep", deep()),
        ("text", "\"x\"".into()),
        ("lengths", r#"{"schema":1,"precision":"f32","runs":4,"metrics":{"loss":{"steps":[1,2],"low":[0],"high":[1],"spread":[1]}}}"#.into()),
        ("steps", r#"{"schema":1,"precision":"f32","runs":4,"metrics":{"loss":{"steps":[9223372036854775808,18446744073709551615],"low":[0,0],"high":[1,1],"spread":[1,1]}}}"#.into()),
        ("precision", format!(r#"{{"schema":1,"precision":"{}","runs":4,"metrics":{{}}}}"#, "\\u001b[2J\\u009b".repeat(1000))),
        ("runs", r#"{"schema":1,"precision":"f32","runs":18446744073709551615,"metrics":{}}"#.into()),
    ] {
        add(&format!("envelope-{name}"), any(), &|f| std::fs::write(f.dir.join("../envelope.json"), &text).unwrap());
    }
    let mut with = |name: &str, expect: Expect, manifest: &dyn Fn(&mut Manifest)| {
        out.push(Hostile::bytes(&format!("facts-{name}"), expect, repacked(author, &|_| (), manifest)));
    };
    with("weights", Expect::Where(RUNS, "the weights differ"), &|m| m.run.as_mut().unwrap().weights = "0".repeat(64));
    with("steps", any(), &|m| m.run.as_mut().unwrap().steps = u64::MAX);
    with("checkpoints", any(), &|m| m.run.as_mut().unwrap().checkpoints = (0..200_000).collect());
    with("seconds", any(), &|m| m.run.as_mut().unwrap().seconds = 1e308);
    with("texts", any(), &|m| {
        let run = m.run.as_mut().unwrap();
        (run.started, run.device, run.precision) = (EVIL.into(), EVIL.into(), EVIL.into());
        (run.mesh, run.device_description) = (Some(EVIL.into()), EVIL.into());
        run.metrics = [(EVIL.to_string(), json!({ "a": EVIL })), ("loss".into(), json!(1e300))].into_iter().collect();
    });
    with("edits", any(), &|m| (m.run.as_mut().unwrap().edits, m.run.as_mut().unwrap().resumes) = (u64::MAX, u64::MAX));
    with("no-run", Expect::Where(REPLAYS, "has no run"), &|m| m.run = None);
    out
}
