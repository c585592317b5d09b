//! Tests external changes of the run directory: edited records and logs, links, a second writer, a directory that
//! disappears.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use support::{Place, Running, place, tiny};

/// Makes a run with checkpoints at steps 3 and 6.
fn finished() -> Place {
    let p = tiny();
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--checkpoint-every", "3"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    p
}

/// Rewrites a file of the run.
fn edit(p: &Place, name: &str, change: impl Fn(&str) -> String) {
    let (was, name) = (p.read(name), name);
    let now = change(&was);
    assert_ne!(was, now, "{name}");
    p.file(name, now);
}

/// Asserts that a resume is refused with this message, and restores the directory.
#[track_caller]
fn refused(p: &Place, name: &str, change: impl Fn(&str) -> String, message: &str) {
    let was = p.read(name);
    edit(p, name, change);
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", "8"]);
    assert_eq!(r.status, Some(4), "{}{}", r.out, r.err);
    assert!(r.err.contains(message), "{message}: {}", r.err);
    p.file(name, was);
}

fn without_line(text: &str, at: usize) -> String {
    text.lines().enumerate().filter(|(k, _)| *k != at).map(|(_, l)| format!("{l}\n")).collect()
}

#[test]
fn an_edited_record_or_log_is_refused() {
    let p = finished();
    refused(&p, "r/run.json", |t| t.replace("\"lr\": 0.1", "\"lr\": 0.7"), "r/run.json: blake3: is ");
    refused(&p, "r/run.json", |t| t.replace("\"blake3\": \"", "\"blake4\": \""), "r/run.json: blake3: must be ");
    let metrics = "r/metrics.jsonl";
    refused(&p, metrics, |t| t.replacen("\"loss\":", "\"loss\":1", 1), "r/metrics.jsonl:1: seal: is ");
    refused(&p, metrics, |t| without_line(t, 2), "r/metrics.jsonl:3: seal: is ");
    refused(&p, metrics, |t| without_line(t, t.lines().count() - 1), "lines were removed");
    refused(&p, metrics, |t| t.replacen(",\"seal\":", ",\"mark\":", 1), "r/metrics.jsonl:1: seal: is missing");

    // The unchanged run resumes, also a second time after the first resume has truncated the log.
    for steps in ["8", "9"] {
        let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", steps]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    let ledger = "r/ledger.jsonl";
    assert_eq!(p.read(ledger).lines().count(), 2);
    refused(&p, ledger, |t| t.replacen("\"ok\":true", "\"ok\":false", 1), "r/ledger.jsonl:1: seal: is ");
    refused(&p, ledger, |t| without_line(t, 0), "r/ledger.jsonl:1: seal: is ");
    refused(&p, ledger, |t| without_line(t, 1), "lines were removed");
    let was = p.read(ledger);
    edit(&p, ledger, |t| t.replacen("\"steps\":8", "\"steps\":7", 1));
    let r = p.run(&["replay", "r", "--run-dir", "again"]);
    assert!(r.status == Some(4) && r.err.contains("r/ledger.jsonl:1: seal: is "), "{}", r.err);
    p.file(ledger, was);
    let r = p.run(&["replay", "r", "--run-dir", "again"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
}

/// The log of another run of the same recipe is refused.
#[test]
fn the_log_of_another_run_is_refused() {
    let p = finished();
    assert_eq!(p.run(&["run", "tiny.lua", "--run-dir", "other"]).status, Some(0));
    let other = p.read("other/metrics.jsonl");
    refused(&p, "r/metrics.jsonl", |_| other.clone(), "r/metrics.jsonl:1: seal: is ");
}

/// Runs of releases without seals can be resumed, and are sealed from then on.
#[test]
fn a_run_without_seals_is_resumed() {
    let p = finished();
    let record = p.run_json("r");
    let mut old = record.as_object().unwrap().clone();
    for key in ["id", "blake3", "logs"] {
        assert!(old.shift_remove(key).is_some(), "{key}");
    }
    p.file("r/run.json", serde_json::to_string(&old).unwrap());
    edit(&p, "r/metrics.jsonl", |t| t.lines().map(|l| perilune_checkpoint::seal::unsealed(l) + "\n").collect());
    // Their checkpoints have no field for logs.
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", "8"]);
    assert!(r.status == Some(4) && r.err.contains("r/run.json: id: is missing"), "{}", r.err);
    for step in [3, 6] {
        let at = format!("r/checkpoints/step-{step}/run.json");
        let mut record = p.run_json(&format!("r/checkpoints/step-{step}")).as_object().unwrap().clone();
        record.shift_remove("logs");
        p.file(&at, perilune_checkpoint::seal::seal(record));
    }
    for steps in ["8", "9"] {
        let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", steps]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    assert!(p.read("r/metrics.jsonl").lines().all(|l| l.contains("\"seal\":\"")));
    refused(&p, "r/metrics.jsonl", |t| without_line(t, 2), "r/metrics.jsonl:3: seal: is ");
}

/// Starts a run with enough steps to inspect it from outside.
fn long() -> (Place, Running) {
    let p = tiny();
    let mut run = Running::start(
        &p,
        &["run", "tiny.lua", "--run-dir", "r", "--steps", "1000000", "--json", "--checkpoint-every", "20"],
    );
    run.next("checkpoint");
    (p, run)
}

#[test]
fn a_run_has_one_writer_and_any_readers() {
    let (p, mut run) = long();
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume"]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    let message = format!("r: process {} on ", run.child.id());
    assert!(r.err.contains(&message) && r.err.contains("is writing this run"), "{}", r.err);
    for args in [&["plot", "r", "--out", "x.svg"][..], &["ckpt", "verify", "r"]] {
        // Retention may remove a checkpoint while it is read, but the lock causes no error.
        let r = p.run(args);
        assert!(!r.err.contains("is writing this run"), "{}", r.err);
    }
    // The kernel releases the lock of a killed process.
    run.signal("-KILL");
    run.child.wait().unwrap();
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", "30"]);
    assert!(!r.err.contains("is writing this run"), "{}", r.err);
}

#[test]
fn a_directory_that_vanishes_is_an_error_that_names_it() {
    for replaced in [false, true] {
        let p = tiny();
        let out = std::fs::File::create(p.path("err")).unwrap();
        let mut child = p
            .command(&["run", "tiny.lua", "--run-dir", "r", "--steps", "100000000", "--quiet"])
            .stderr(out)
            .spawn()
            .unwrap();
        while !p.path("r/metrics.jsonl").metadata().is_ok_and(|m| m.len() > 0) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        std::fs::rename(p.path("r"), p.path("moved")).unwrap();
        if replaced {
            std::fs::create_dir(p.path("r")).unwrap();
            p.file("r/metrics.jsonl", "of another\n");
            p.file("r/run.json", "of another\n");
        }
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(1));
        assert!(p.read("err").contains("the run directory r is gone"), "{}", p.read("err"));
        if replaced {
            assert_eq!(p.read("r/run.json") + &p.read("r/metrics.jsonl"), "of another\nof another\n");
        } else {
            assert!(!p.path("r").exists());
        }
    }
}

/// Links in an untrusted run directory are not followed to files outside it.
#[test]
fn links_in_a_run_directory_are_not_followed() {
    let link = |p: &Place, name: &str| {
        let at = p.path(name);
        let _ = std::fs::remove_file(&at).or_else(|_| std::fs::remove_dir_all(&at));
        std::os::unix::fs::symlink(p.path("victim"), at).unwrap();
    };
    let victim = |p: &Place| (p.read("victim/file"), std::fs::read_dir(p.path("victim")).unwrap().count());
    let resume = ["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", "8"];
    // Anything with a temporary name is replaced.
    for name in ["r/.run.json.new", "r/.metrics.jsonl.new", "r/.ledger.jsonl.new"] {
        let p = finished();
        p.file("victim", "mine");
        link(&p, name);
        let r = p.run(&resume);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{name}");
        assert_eq!(p.read("victim"), "mine", "{name}");
    }
    for name in ["r/.lock", "r/run.json", "r/metrics.jsonl", "r/ledger.jsonl", "r/tb", "r/checkpoints"] {
        let p = finished();
        std::fs::create_dir(p.path("victim")).unwrap();
        p.file("victim/file", "mine");
        if name == "r/checkpoints" {
            copy(&p.path(name), &p.path("victim"));
        }
        let before = victim(&p);
        link(&p, name);
        let r = p.run(&resume);
        assert_eq!(r.status, Some(4), "{name}: {}{}", r.out, r.err);
        assert!(r.err.contains(name) && r.err.contains("link"), "{name}: {}", r.err);
        assert_eq!(victim(&p), before, "{name}");
    }
}

/// A link that takes the place of the run directory, or of `checkpoints` while the run goes on redirects no write.
#[test]
fn a_link_during_a_run_redirects_no_write() {
    for name in ["r", "r/checkpoints"] {
        let p = tiny();
        // What a redirected save, retention or tidying would change.
        let trap = ["victim/checkpoints/step-1/run.json", "victim/step-1/run.json", "victim/.step-2.new/x"];
        for file in trap.iter().chain(&["victim/run.json", "victim/metrics.jsonl"]) {
            std::fs::create_dir_all(p.path(file).parent().unwrap()).unwrap();
            p.file(file, "mine");
        }
        let listing = || {
            let mut find = std::process::Command::new("find");
            find.arg(p.path("victim")).args(["-printf", "%P %s %T@\\n"]);
            String::from_utf8(find.output().unwrap().stdout).unwrap()
        };
        let before = listing();
        assert_eq!(before.matches(" 4 ").count(), 5, "{before}");
        let err = std::fs::File::create(p.path("err")).unwrap();
        let args = ["run", "tiny.lua", "--run-dir", "r", "--steps", "100000000", "--quiet", "--checkpoint-every", "5"];
        let mut child = p.command(&args).stderr(err).spawn().unwrap();
        while !p.path("r/checkpoints").exists() {
            assert!(child.try_wait().unwrap().is_none(), "{}", p.read("err"));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // A save in progress may create the directory anew between the two calls.
        std::fs::rename(p.path(name), p.path("moved")).unwrap();
        while std::os::unix::fs::symlink(p.path("victim"), p.path(name)).is_err() {
            std::fs::rename(p.path(name), p.path(&format!("moved{}", unused()))).unwrap();
        }
        let status = child.wait().unwrap();
        let err = p.read("err");
        let rule = match name {
            "r" => (1, "the run directory r is gone"),
            _ => (4, "r/checkpoints: directory: is a link; a directory is needed"),
        };
        assert!(status.code() == Some(rule.0) && err.contains(rule.1), "{name}: {status}: {err}");
        assert_eq!(listing(), before, "{name}");
    }
}

/// Returns a name that no other call returns.
fn unused() -> u32 {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let status = std::process::Command::new("cp").arg("-r").arg(entry.path()).arg(to).status().unwrap();
        assert!(status.success());
    }
}

/// A pipe in place of a file is refused without waiting for it.
#[test]
fn pipes_are_refused() {
    for name in ["r/run.json", "r/metrics.jsonl", "r/ledger.jsonl", "r/.lock", "r/recipe/tiny.lua"] {
        let p = finished();
        let _ = std::fs::remove_file(p.path(name));
        assert!(std::process::Command::new("mkfifo").arg(p.path(name)).status().unwrap().success());
        let resume = ["run", "tiny.lua", "--run-dir", "r", "--resume", "--steps", "8"];
        let replay = ["replay", "r", "--run-dir", "again"];
        let r = p.run(if name.ends_with(".lua") { &replay } else { &resume });
        assert_eq!(r.status, Some(4), "{name}: {}{}", r.out, r.err);
        assert!(r.err.contains(name) && r.err.contains("is a FIFO; a regular file is needed"), "{name}: {}", r.err);
    }
    // The recipe itself.
    let p = place();
    assert!(std::process::Command::new("mkfifo").arg(p.path("x.lua")).status().unwrap().success());
    let r = p.run(&["run", "x.lua"]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    assert!(r.err.contains("x.lua"), "{}", r.err);
}
