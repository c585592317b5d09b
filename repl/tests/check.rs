//! Tests `perilune check`, `doctor`, `init`, `profile` and the generated texts.

#![allow(clippy::unwrap_used)]

mod support;

use support::{TINY, place, tiny};

#[test]
fn check_reports_and_leaves_nothing_behind() {
    let p = tiny();
    let r = p.run(&["check", "tiny.lua", "--set", "lr=0.5"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    for part in [
        "tiny · tiny.lua · cpu (",
        "params      lr 0.5, seed 3, steps 6, width 4",
        "model       5 parameters, 2 States",
        "train       48 samples, 6 batches an epoch",
        "valid       16 samples, 2 batches an epoch",
        " kernels",
        "memory      ",
        "owners      ",
        "evaluation  valid loss ",
        "no mistakes found",
    ] {
        assert!(r.out.contains(part), "{part}: {}", r.out);
    }
    assert!(p.runs().is_empty());
}

/// A name that the writer of checkpoints refuses is found before the first step, not at the first checkpoint.
#[test]
fn a_state_that_no_checkpoint_can_hold_is_named() {
    let p = tiny();
    let layers = |text: &str| TINY.replace("pl.nn.Sequential { pl.nn.Linear(p.width, 1) }", text);
    let long = "x".repeat(513);
    let named = "pl.nn.module { [NAME] = pl.state(pl.zeros { 4, 1 }), forward = function(self, x) return x:matmul(self[NAME]) end }";
    for (name, rule) in [
        ("my weight", "name 'my weight' has the character ' '; allowed are A-Z a-z 0-9 _ . : / -"),
        ("poids_été", "has the character 'é'"),
        ("..", "must not contain '..'"),
        ("__metadata__", "name '__metadata__' is that of the metadata"),
        (long.as_str(), "must have 1 to 512 bytes, not 513"),
    ] {
        p.file("tiny.lua", layers(&named.replace("NAME", &format!("{name:?}"))));
        for args in [&["check", "tiny.lua"][..], &["run", "tiny.lua", "--run-dir", "r"]] {
            let r = p.run(args);
            assert_eq!(r.status, Some(3), "{name}: {}{}", r.out, r.err);
            assert!(r.err.starts_with("tiny.lua:9: a checkpoint cannot hold the State \"model."), "{}", r.err);
            assert!(r.err.contains(rule), "{rule}: {}", r.err);
            assert!(r.err.contains("hint: rename it: "), "{}", r.err);
        }
        assert!(!p.path("r").exists(), "no directory for a run that cannot be saved");
    }
    p.file("tiny.lua", layers(&named.replace("NAME", "\"my_weight\"")));
    for args in [&["check", "tiny.lua"][..], &["run", "tiny.lua", "--run-dir", "r"]] {
        assert_eq!(p.run(args).status, Some(0));
    }
}

#[test]
fn check_against_a_run_says_what_an_edit_would_do() {
    let p = tiny();
    assert_eq!(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r", "--set", "seed=4"]).status, Some(0));
    let check = |text: String, parts: &[&str]| {
        p.file("tiny.lua", text);
        let r = p.run(&["check", "tiny.lua", "--against", "r"]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
        for part in parts {
            assert!(r.out.contains(part), "{part}: {}", r.out);
        }
    };
    check(
        TINY.into(),
        &[
            "text        no change",
            "params      no change",
            "States      2 States kept",
            "nothing is compiled",
            "from step 6: the States are those",
        ],
    );
    // Params from the command line stay; defaults in the file may change.
    check(
        TINY.replace("lr = 0.1", "lr = 0.2").replace("seed = 3", "seed = 5"),
        &["text        tiny.lua:3", "params      lr 0.1 -> 0.2\n", "nothing is compiled"],
    );
    check(
        TINY.replace("pl.optim.SGD", "pl.optim.AdamW")
            .replace("nn.Linear(p.width, 1)", "nn.Linear(p.width, 2), pl.nn.Linear(2, 1)"),
        &[
            "model.1.weight f32 {1, 4} -> f32 {2, 4}: is initialized",
            "model.2.bias is new: is initialized",
            "moments     0 kept, 8 initialized, 0 dropped",
            " of them new",
            "from step 6, with `--resume --edited`",
        ],
    );
    for (text, says) in [
        (TINY.replace("p.width, 1)", "p.width + 1, 1)"), "tiny.lua:"),
        (TINY.replace("return recipe", "return recipe }"), "tiny.lua:15:"),
    ] {
        p.file("tiny.lua", text);
        let r = p.run(&["check", "tiny.lua", "--against", "r"]);
        assert_eq!(r.status, Some(3), "{}", r.out);
        assert!(r.err.contains(says), "{says}: {}", r.err);
    }
    let r = p.run(&["check", "tiny.lua", "--against", "nowhere"]);
    assert!(r.status == Some(1) && r.err.contains("cannot open nowhere: no such file"), "{}", r.err);
}

#[test]
fn profile_says_where_the_time_goes_and_writes_a_timeline() {
    let p = tiny();
    let r = p.run(&["profile", "tiny.lua", "--steps", "2", "--trace", "t.json"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), "timeline written to t.json\n"));
    for part in [
        "ms a step",
        "ceiling, measured: ",
        "of it is outside of them",
        "bound by  recipe line",
        "tiny.lua:",
        "us a run · ",
    ] {
        assert!(r.out.contains(part), "{part}: {}", r.out);
    }
    let trace: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(p.path("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let ends: Vec<f64> = events
        .iter()
        .filter(|e| e["ph"] == "X" && e["pid"] == 0 && e["tid"] == 0)
        .map(|e| e["ts"].as_f64().unwrap())
        .collect();
    assert!(ends.len() > 1 && ends.is_sorted(), "{ends:?}");
    assert!(events.iter().any(|e| e["args"]["line"].as_str().is_some_and(|l| l.starts_with("tiny.lua:"))));
    assert!(events.iter().any(|e| e["cat"] == "wait" && e["name"] == "data"));
    // A value read in the middle of a step is reported with its line.
    p.file("sync.lua", TINY.replace("  return (error", "  local seen = error:abs():amax():item()\n  return (error"));
    let r = p.run(&["profile", "sync.lua", "--steps", "2"]);
    let table: Vec<String> = r.out.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for row in
        ["the host makes batches 1.0 a step data recipe.data", "the host waits for a value 1.0 a step sync sync.lua:13"]
    {
        assert!(table.iter().any(|l| l.ends_with(row)), "{row}: {}", r.out);
    }
    assert!(r.out.contains("1.0 reads a step wait for the device"), "{}", r.out);
    let r = p.run(&["profile", "tiny.lua", "--steps", "1", "--trace", "none/t.json"]);
    assert_eq!(r.status, Some(1));
    assert!(r.err.contains("--trace none/t.json: "), "{}", r.err);
}

/// The parts of a step, as they are printed, sum to the step to the last digit.
#[test]
fn the_parts_of_a_profile_sum_to_the_step() {
    let p = place();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/regression.lua");
    let r = p.run(&["profile", recipe, "--steps", "4", "--device", "cpu"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.out.contains("parts of a step, medians of 4 steps"), "{}", r.out);
    let rows: Vec<(i64, &str)> = r
        .out
        .lines()
        .skip_while(|l| !l.starts_with("parts of a step"))
        .skip(2)
        .map_while(|l| {
            let (_, rest) = l.split_once(" % ")?;
            let (micros, name) = rest.trim_start().split_once("  ")?;
            Some((micros.replace('.', "").parse().ok()?, name))
        })
        .collect();
    let Some(((step, last), parts)) = rows.split_last() else { panic!("no parts: {}", r.out) };
    assert_eq!((*last, parts.len()), ("step", 5), "{}", r.out);
    assert_eq!(parts.iter().map(|p| p.0).sum::<i64>(), *step, "{}", r.out);
    assert!(parts[0].0 > 0 && parts[1].0 > 0 && *step > 0, "{}", r.out);
    let head = r.out.lines().next().unwrap();
    let shown: f64 = head.split(" · ").last().unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((shown * 1e3 - *step as f64 / 10.0).abs() < 1.0, "{head}: {step}");
}

#[test]
fn profile_attributes_memory_and_time_to_recipe_lines() {
    let p = tiny();
    let r = p.run(&["profile", "tiny.lua", "--steps", "2", "--device", "cpu"]);
    // Points, weights and gradients take a few kilobytes; the megabytes of the roofline measurement are not included.
    let memory = r.out.lines().find(|l| l.starts_with("memory: ")).unwrap();
    assert!(memory.ends_with("KiB at most") && !memory.contains("MiB"), "{memory}");
    // Batches are made outside of any recipe line, so they have the line that created the loader.
    assert!(r.out.lines().any(|l| l.contains("index_select") && l.ends_with("tiny.lua:7")), "{}", r.out);
    assert!(!r.out.lines().any(|l| l.ends_with(" ?")), "{}", r.out);
    // No share of the roofline exceeds 100 % by more than the roofline's precision.
    let shares = r.out.lines().filter(|l| l.contains(" GB/s ") && l.contains("memory  "));
    for line in shares {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().rposition(|w| *w == "%").unwrap();
        assert!(words[at - 1].parse::<f64>().unwrap() <= 105.0, "{line}");
    }
}

#[test]
fn profile_refuses_a_script_and_writes_nothing() {
    let p = place();
    p.file("script.lua", "local pl = require 'perilune'\npl.save('w.npy', pl.ones({ 3 }))\n");
    let r = p.run(&["profile", "script.lua", "--allow-write=."]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    assert!(r.err.contains("script.lua is a plain script; profile takes a recipe"), "{}", r.err);
    assert!(!p.path("w.npy").exists());
}

#[test]
fn a_count_below_one_and_an_export_into_nowhere_are_found_at_the_start() {
    let p = place();
    p.file("tiny.lua", TINY.replace("width = 4 }", "width = 4, batch = 8 }").replace(":batch(8)", ":batch(p.batch)"));
    for value in ["-3", "0"] {
        let r = p.run(&["check", "tiny.lua", "--set", &format!("batch={value}")]);
        assert_eq!(r.status, Some(3), "{}", r.out);
        let want = format!("tiny.lua:3: recipe: param batch = {value} must be at least 1");
        assert!(r.err.contains(&want), "{}", r.err);
    }
    assert_eq!(p.run(&["check", "tiny.lua", "--set", "batch=4"]).status, Some(0));
    let recipes = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes");
    for (recipe, more) in [
        ("gpt2.lua", ["size=tiny", "context=8"]),
        ("llama.lua", ["size=tiny", "context=8"]),
        ("resnet50.lua", ["size=tiny", "size=tiny"]),
    ] {
        let path = format!("{recipes}/{recipe}");
        let r = p.run(&[
            "run",
            &path,
            "--device",
            "cpu",
            "--steps",
            "1",
            "--set",
            more[0],
            "--set",
            more[1],
            "--set",
            "batch=2",
            "--set",
            "export=no/such/w.safetensors",
        ]);
        assert_eq!(r.status, Some(3), "{recipe}: {}", r.err);
        assert!(r.err.contains(recipe) && r.err.contains("there is no folder no/such"), "{recipe}: {}", r.err);
        assert!(p.runs().is_empty(), "{recipe}: it has begun");
    }
}

#[test]
fn check_names_params_that_nothing_reads() {
    let p = place();
    let finish = "function recipe.finish(run) print(run.params.late) end\nreturn recipe";
    p.file(
        "tiny.lua",
        TINY.replace("seed = 3,", "seed = 3, momentum = 0.9, late = 1,").replace("return recipe", finish),
    );
    let r = p.run(&["check", "tiny.lua"]);
    assert_eq!(r.status, Some(0));
    assert_eq!(r.err, "warning: param 'momentum' is read nowhere in tiny.lua\n");
    assert!(r.out.ends_with("no mistakes found, 1 warning\n"), "{}", r.out);
}

#[test]
fn a_param_that_is_read_and_not_declared_is_an_error_in_check_and_run() {
    let p = place();
    p.file("tiny.lua", TINY.replace("lr = p.lr", "lr = p.lrr"));
    for command in ["check", "run"] {
        let r = p.run(&[command, "tiny.lua"]);
        assert_eq!(r.status, Some(3));
        assert!(r.err.starts_with("tiny.lua:10: the recipe has no param 'lrr'\n"), "{}", r.err);
        assert!(r.err.contains("did you mean 'lr'?"), "{}", r.err);
    }
    assert!(p.runs().is_empty());
}

#[test]
fn check_finds_shape_mistakes_with_their_line() {
    let p = tiny();
    let r = p.run(&["check", "tiny.lua", "--set", "width=5"]);
    assert_eq!(r.status, Some(3));
    assert!(r.err.starts_with("tiny.lua:12: linear: "), "{}", r.err);
    assert!(p.runs().is_empty());
}

/// A recipe is a file that returns one, wherever its text says so; a plain script runs until its first step has ended, and writes
/// nothing.
#[test]
fn check_recognizes_a_recipe_by_its_return_value() {
    let p = tiny();
    p.file("same.lua", "return require \"tiny\"");
    p.file(
        "named.lua",
        "local make = require('perilune')['rec' .. 'ipe']\n".to_string() + &TINY.replace("pl.recipe", "make"),
    );
    for file in ["same.lua", "named.lua"] {
        let r = p.run(&["check", file]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{file}");
        assert!(r.out.contains("5 parameters, 2 States") && r.out.contains("no mistakes found"), "{}", r.out);
    }
    let train = "-- perilune run my.recipe\nlocal pl = require 'perilune'\nlocal w = pl.state(pl.ones { 2 })\n\
                 pl.save('w.npy', w)\nfor k = 1, 3 do\n  print('step ' .. k)\n  STEP\nend\n";
    let says = "a plain script (it returns no recipe): no error up to the end of its first step, line 7";
    let implicit = "local opt = pl.optim.SGD({ w }, { lr = 1 }); (w * w):sum():backward() opt:step()";
    for step in ["pl.step(function() w:assign(w * 2) end)", implicit] {
        p.file("s.lua", train.replace("STEP", step));
        let r = p.run(&["check", "s.lua", "--allow-write=."]);
        // What a recipe prints goes to stderr.
        assert_eq!((r.status, r.err.as_str()), (Some(0), "step 1\n"), "{}", r.out);
        assert!(r.out.contains(says), "{}", r.out);
        assert!(!p.path("w.npy").exists());
    }
    p.file("s.lua", "print('it ran')");
    let r = p.run(&["check", "s.lua"]);
    assert!(r.status == Some(0) && r.err == "it ran\n" && r.out.contains("it ran to its end"), "{}", r.out);
    p.file("s.lua", "local pl = require 'perilune'\npl.ones({ 2 }):sum(3)");
    let r = p.run(&["check", "s.lua"]);
    assert!(r.status == Some(3) && r.err.starts_with("s.lua:2: sum: "), "{}", r.err);
}

/// A model with frozen weights shows both counts.
const FROZEN: &str = "local m = pl.nn.Sequential { pl.nn.Linear(p.width, 40), pl.nn.BatchNorm1d(40), pl.nn.Linear(40, 1) } \
                      pl.nn.add_lora(m, '1', { rank = 2 }) return m";

#[test]
fn frozen_weights_are_counted_apart() {
    let p = place();
    p.file("lora.lua", TINY.replace("return pl.nn.Sequential { pl.nn.Linear(p.width, 1) }", FROZEN));
    // Linear(4, 40), the weight and bias of BatchNorm1d, Linear(40, 1); the pattern matches the first.
    let says = "409 parameters, 88 of them trained";
    let r = p.run(&["check", "lora.lua"]);
    assert!(r.status == Some(0) && r.out.contains(says), "{}{}", r.out, r.err);
    let r = p.run(&["run", "lora.lua", "--run-dir", "r"]);
    assert!(r.status == Some(0) && r.out.contains(says), "{}{}", r.out, r.err);
    let record = std::fs::read_to_string(p.path("r/run.json")).unwrap();
    assert!(record.contains("\"parameters\": 88,") && record.contains("\"frozen_parameters\": 321,"), "{record}");
}

/// The fit on a GPU that is not there is estimated from plans: nothing of the size of the model is allocated here.
#[test]
fn the_fit_on_another_device_is_estimated() {
    let p = place();
    let wide =
        "return pl.nn.Sequential { pl.nn.Linear(p.width, 30000), pl.nn.Linear(30000, 30000), pl.nn.Linear(30000, 1) }";
    p.file("wide.lua", TINY.replace("return pl.nn.Sequential { pl.nn.Linear(p.width, 1) }", wide));
    let r = p.run(&["check", "wide.lua", "--for", "h200"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    for part in [
        "a GPU (sm_90",
        "900,210,001 parameters",
        " kernels, planned and not run",
        "fit  ",
        "of 140 GiB (",
        "on an h200, with 512 MiB for the driver",
    ] {
        assert!(r.out.contains(part), "{part}: {}", r.out);
    }
    let r = p.run(&["check", "wide.lua", "--for", "4GiB"]);
    assert_eq!(r.status, Some(1), "{}", r.out);
    assert!(r.err.contains("the run needs ") && r.err.contains("a GPU of 4.0 GiB has 4.0 GiB"), "{}", r.err);
    let r = p.run(&["check", "wide.lua", "--for", "h20"]);
    assert!(r.status == Some(2) && r.err.contains("did you mean h200?"), "{}", r.err);
}

#[test]
fn a_budget_below_the_states_blames_them() {
    let p = place();
    p.file("wide.lua", TINY.replace("pl.nn.Linear(p.width, 1)", "pl.nn.Linear(p.width, 5000), pl.nn.Linear(5000, 1)"));
    let r = p.run(&["check", "wide.lua", "--memory-budget", "20KiB"]);
    assert_eq!(r.status, Some(1), "{}", r.err);
    assert!(
        r.err.starts_with("wide.lua:9: memory_budget: the States alone take 117 KiB, and the budget is 20.0 KiB"),
        "{}",
        r.err
    );
    let largest = r.err.lines().skip_while(|l| !l.contains("the largest owners")).nth(1).unwrap_or_default();
    assert!(largest.contains("weights") && largest.contains("wide.lua:9"), "{}", r.err);
    assert!(
        r.err.contains("a smaller model; a larger memory_budget") && !r.err.contains("a smaller batch"),
        "{}",
        r.err
    );
}

#[test]
fn the_doctor_finds_the_cpu_in_working_order() {
    let p = place();
    let r = p.run(&["doctor"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    for part in [
        "perilune ",
        "Lua 5.4",
        "system",
        "memory",
        "CUDA driver",
        "NVRTC",
        "cuBLASLt",
        "NVML",
        "cuDNN",
        "NCCL",
        "self test     passed",
    ] {
        assert!(r.out.contains(part), "{part}: {}", r.out);
    }
}

#[test]
fn init_makes_a_recipe_that_trains() {
    let p = place();
    assert_eq!(p.run(&["init", "new"]).status, Some(0));
    assert!(p.read("new/types/perilune.lua").starts_with("---@meta"));
    let r = p.run(&["run", "new/recipe.lua", "--json", "--steps", "100"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let events = r.events();
    assert!(events.last().unwrap()["metrics"]["valid/loss"].as_f64().unwrap() < 0.6);
    assert_eq!(p.run(&["init", "new"]).err, "error: new already exists and is not empty\n");
}

#[test]
fn reference_stubs_and_completions_are_printed() {
    let p = place();
    assert!(p.run(&["reference"]).out.contains("\n## matmul\n"));
    assert!(p.run(&["stubs"]).out.trim_end().ends_with("return pl"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(p.run(&["completions", shell]).out.contains("perilune"));
    }
}
