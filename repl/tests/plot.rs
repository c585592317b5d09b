//! Tests `perilune plot` on complete and damaged run directories.

#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, place, tiny};

/// Writes a run directory by hand: a falling curve with an edit, a NaN and a truncated last line.
fn run(p: &Place, dir: &str, factor: f64) {
    std::fs::create_dir_all(p.path(dir)).unwrap();
    let mut lines = String::new();
    for step in 1..=40 {
        let loss = if step == 20 { "null".to_string() } else { (factor / f64::from(step)).to_string() };
        let seconds = f64::from(step) * 60.0;
        let metrics = "{\"accuracy\":0.5}";
        lines += &format!(
            "{{\"event\":\"step\",\"step\":{step},\"seconds\":{seconds},\"loss\":{loss},\"metrics\":{metrics}}}\n"
        );
        if step % 10 == 0 {
            lines += &format!(
                "{{\"event\":\"eval\",\"step\":{step},\"seconds\":{seconds},\"metrics\":{{\"valid/loss\":{}}}}}\n",
                0.5 * factor
            );
        }
        if step == 7 {
            lines += "this is no JSON\n[1, 2]\n{\"step\": \"x\"}\n";
        }
    }
    p.file(&format!("{dir}/metrics.jsonl"), (lines + "{\"event\":\"step\",\"step\":41,\"lo\u{e4}").as_bytes());
    let ledger = "{\"step\":15,\"ok\":true,\"changed\":[\"lr 0.1 -> 0.05 (line 4)\"]}\n\
                  {\"step\":18,\"ok\":false,\"changed\":[],\"error\":\"x\"}\n{\"step\":";
    p.file(&format!("{dir}/ledger.jsonl"), ledger);
}

#[test]
fn the_curves_of_a_run_are_drawn_with_its_edits() {
    let p = place();
    run(&p, "a", 1.0);
    let r = p.run(&["plot", "a"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.out.starts_with("a\n* loss   + valid/loss\n"), "{}", r.out);
    assert!(r.out.contains("┊") && r.out.ends_with("  1  step 15: lr 0.1 -> 0.05 (line 4)\n"), "{}", r.out);
    let one = p.run(&["plot", "a", "--metric", "accuracy"]).out;
    assert!(one.starts_with("a\n━━ accuracy\n"), "{one}");
    let ascii = p.run(&["plot", "a", "--metric", "accuracy", "--ascii"]).out;
    assert!(ascii.is_ascii(), "{ascii}");
    let mut c = p.command(&["plot", "a"]);
    let r: support::Ran = c.env("LC_ALL", "C").output().unwrap().into();
    assert!(r.out.is_ascii(), "{}", r.out);
}

#[test]
fn several_runs_share_one_picture() {
    let p = place();
    run(&p, "one/r", 1.0);
    run(&p, "two/r", 2.0);
    run(&p, "b", 3.0);
    let r = p.run(&["plot", "one/r", "two/r", "b", "--metric", "loss"]);
    assert!(r.out.starts_with("loss\n* one/r   + two/r   o b\n"), "{}{}", r.out, r.err);
    assert!(r.out.contains("  1  one/r step 15: lr"), "{}", r.out);
    let both = p.run(&["plot", "one/r", "b", "--metric", "loss", "--metric", "accuracy"]).out;
    assert!(both.contains("* r loss   + r accuracy   o b loss   x b accuracy"), "{both}");
}

/// Runs of one recipe are named by the params that differ, and by their directories where that does not tell them apart.
#[test]
fn curves_are_named_by_the_params_that_differ() {
    let p = tiny();
    for (dir, lr) in [("a", "0.1"), ("b", "0.05"), ("same", "0.05")] {
        let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", dir, "--set", &format!("lr={lr}")]);
        assert_eq!(r.status, Some(0), "{}", r.err);
    }
    let head = |args: &[&str]| {
        let r = p.run(&[&["plot", "--metric", "loss"][..], args].concat());
        assert_eq!(r.status, Some(0), "{}", r.err);
        r.out.lines().nth(1).unwrap().to_string()
    };
    assert_eq!(head(&["a", "b"]), "* lr=0.1   + lr=0.05");
    assert_eq!(head(&["a", "b", "same"]), "* lr=0.1   + b   o same");
    assert_eq!(head(&["b", "same"]), "* b   + same");
    run(&p, "old", 1.0);
    assert_eq!(head(&["a", "old"]), "* a   + old", "a run without a record");
    assert_eq!(
        head(&["b", "--metric", "valid/loss"]),
        "━━ loss   ━━ valid/loss".replace("━━ loss", "* loss").replace("━━ v", "+ v")
    );
}

#[test]
fn plot_options_select_files_and_axes() {
    let p = place();
    run(&p, "a", 1.0);
    for args in [&["--out", "a.svg"][..], &["--out", "a.png", "--log-y", "--smooth", "0.9"]] {
        let r = p.run(&[&["plot", "a"], args].concat());
        assert_eq!((r.status, r.out.as_str()), (Some(0), &*format!("{}\n", args[1])), "{}", r.err);
    }
    let svg = p.read("a.svg");
    assert!(
        svg.contains("<title>step 15: lr 0.1 -&gt; 0.05 (line 4)</title>") && svg.contains(">valid/loss</text>"),
        "{svg}"
    );
    // The gap at step 20 splits the curve into two; valid/loss is a third.
    assert_eq!(svg.matches("stroke-width=\"1.8\"").count(), 3, "{svg}");
    assert!(std::fs::read(p.path("a.png")).unwrap().starts_with(b"\x89PNG"));
    let time = p.run(&["plot", "a", "--x", "time", "--out", "t.svg"]);
    assert_eq!(time.status, Some(0), "{}", time.err);
    // 2400 seconds are 40 minutes, the edit at the fifteenth.
    let svg = p.read("t.svg");
    assert!(svg.contains(">minutes</text>") && svg.contains(">40</text>") && svg.contains("step 15"), "{svg}");
}

#[test]
fn invalid_plot_input_is_reported() {
    let p = place();
    run(&p, "a", 1.0);
    std::fs::create_dir_all(p.path("empty")).unwrap();
    std::fs::create_dir_all(p.path("new")).unwrap();
    p.file("new/metrics.jsonl", "");
    let cases: [(&[&str], &str); 7] = [
        (
            &["plot", "a", "--metric", "los"],
            "--metric los: no such metric was logged (there are accuracy, loss, valid/loss). Did you mean 'loss'?",
        ),
        (&["plot", "nowhere"], "there is no run nowhere"),
        (&["plot", "empty"], "empty: it contains no metrics.jsonl"),
        (&["plot", "a/metrics.jsonl"], "a/metrics.jsonl is a file; give the run directory"),
        (&["plot", "new"], "no step is logged yet"),
        (&["plot", "a", "--out", "a.jpg"], "--out a.jpg: the name must end in .svg or .png"),
        (&["plot", "a", "--smooth", "2"], "from 0 to below 1"),
    ];
    for (args, message) in cases {
        let r = p.run(args);
        assert_eq!(r.status, Some(2), "{args:?}: {}", r.err);
        assert!(r.err.contains(message), "{args:?}: {}", r.err);
    }
}

/// The log of a real run can be plotted by step and by time.
#[test]
fn a_real_run_can_be_drawn() {
    let p = tiny();
    let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    for args in [&["plot", "r"][..], &["plot", "r", "--x", "time"], &["plot", "r", "--metric", "valid/off"]] {
        let r = p.run(args);
        assert_eq!(r.status, Some(0), "{}", r.err);
        assert!(!r.out.contains("no data"), "{}", r.out);
    }
}
