//! Tests runs, edits, resumes and replays through the crate alone, by comparing hashes of the weights.
#![allow(clippy::unwrap_used)]

use perilune_cpu::Cpu;
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_policy::Policy;
use perilune_train::{Control, End, Error, Event, Outcome, Replay, Result, RunSpec, StartOptions, Trainer, record_of};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Sixty-four points on a plane, with a momentum optimizer: its moments have to survive a resume too.
const TINY: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "tiny", params = { lr = 0.1, steps = 12, seed = 3, width = 4 } }
function recipe.data(p)
  local x = pl.randn { 64, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p) return pl.nn.Sequential { pl.nn.Linear(p.width, 1) } end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

/// A temporary directory with the recipe.
struct Place {
    dir: tempfile::TempDir,
}

/// A summary of the events of a run.
type Log = Rc<RefCell<Vec<String>>>;

impl Place {
    fn new() -> Place {
        let place = Place { dir: tempfile::tempdir().unwrap() };
        place.save(TINY);
        place
    }

    fn recipe(&self) -> PathBuf {
        self.dir.path().join("tiny.lua")
    }

    fn save(&self, text: &str) {
        std::fs::write(self.recipe(), text).unwrap();
    }

    fn at(&self, run: &str) -> PathBuf {
        self.dir.path().join(run)
    }

    fn spec(&self, run: &str) -> RunSpec {
        RunSpec { recipe: self.recipe(), run_dir: Some(self.at(run)), ..RunSpec::default() }
    }

    fn resume(&self, run: &str) -> RunSpec {
        RunSpec { resume: true, ..self.spec(run) }
    }

    fn replay(&self, of: &str) -> RunSpec {
        let record = record_of(&self.at(of)).unwrap();
        let replay = Replay::read(&self.at(of), &record, &self.recipe()).unwrap();
        RunSpec { replay: Some(replay), ..self.spec(&format!("{of}-again")) }
    }

    fn status(&self, run: &str) -> String {
        record_of(&self.at(run)).unwrap()["status"].as_str().unwrap().to_string()
    }

    /// The weights of an uninterrupted run.
    fn plain(&self, run: &str) -> String {
        let (outcome, _) = train(self.spec(run), Control::default(), |_| {});
        assert_eq!((outcome.end, outcome.steps), (End::Finished, 12));
        outcome.weights.unwrap()
    }
}

fn open(spec: &RunSpec) -> Result<Runtime> {
    let print = Rc::new(|_: &str| ());
    let backend = Arc::new(Cpu::new(Some(1)));
    Ok(Runtime::new(RuntimeOptions {
        backend,
        params: spec.params.clone(),
        policy: Policy::builder().recipe(&spec.recipe).build(),
        strict: true,
        print,
    })?)
}

/// Trains; `at_step` is called when the numbers of a step have been read, which is after the next step was issued.
fn try_train(spec: RunSpec, control: Control, at_step: impl Fn(u64) + 'static) -> (Result<Outcome>, Log) {
    let log = Log::default();
    let lines = log.clone();
    let listener = move |event: &Event<'_>| {
        let line = match event {
            Event::Step { step, .. } => {
                at_step(*step);
                return;
            }
            Event::Resumed { step, .. } => format!("resumed {step}"),
            Event::Applied { step, changed, .. } => format!("applied {step}: {}", changed.join(", ")),
            Event::Refused { step, error, .. } => format!("refused {step}: {error}"),
            Event::Checkpoint { step, .. } => format!("checkpoint {step}"),
            Event::Failed { run_dir, .. } => format!("failed {}", run_dir.is_some()),
            Event::Stopped { code, .. } => format!("stopped {code}"),
            Event::Reproduced => "reproduced".into(),
            _ => return,
        };
        lines.borrow_mut().push(line);
    };
    (Trainer::new(spec, control, Rc::new(listener)).run(open), log)
}

fn train(spec: RunSpec, control: Control, at_step: impl Fn(u64) + 'static) -> (Outcome, Vec<String>) {
    let (outcome, log) = try_train(spec, control, at_step);
    (outcome.unwrap(), log.take())
}

/// Trains until a stop request at step 4, which takes effect after step 5.
fn train_and_stop(spec: RunSpec) -> Outcome {
    let control = Control::default();
    let request = control.clone();
    let (outcome, log) = train(spec, control, move |step| {
        if step == 4 {
            request.stop(7);
        }
    });
    assert_eq!((outcome.end, outcome.steps), (End::Stopped { code: 7 }, 5));
    assert_eq!(log, ["checkpoint 5", "stopped 7"]);
    outcome
}

/// Trains with an edit that is saved at step 4, and applied after step 5.
fn train_and_edit(place: &Place, run: &str, text: &str) -> (Outcome, Vec<String>) {
    let control = Control::default();
    let (request, path, text) = (control.clone(), place.recipe(), text.to_string());
    train(place.spec(run), control, move |step| {
        if step == 4 {
            std::fs::write(&path, &text).unwrap();
            request.reload();
        }
    })
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let place = Place::new();
    let plain = place.plain("plain");
    train_and_stop(place.spec("run"));
    assert_eq!(place.status("run"), "interrupted");
    let (outcome, log) = train(place.resume("run"), Control::default(), |_| {});
    assert_eq!(log[0], "resumed 5");
    assert_eq!((outcome.end, outcome.weights.as_ref()), (End::Finished, Some(&plain)));
    assert_eq!(place.status("run"), "done");
    let (again, log) = train(place.replay("run"), Control::default(), |_| {});
    assert_eq!(again.weights, Some(plain));
    assert!(log.contains(&"reproduced".to_string()), "{log:?}");
}

#[test]
fn an_edit_equals_a_stop_an_edit_and_a_resume_and_is_replayed() {
    let place = Place::new();
    let plain = place.plain("plain");
    let edited = TINY.replace("lr = 0.1", "lr = 0.05");
    let (outcome, log) = train_and_edit(&place, "edited", &edited);
    assert!(log[0].starts_with("applied 5: lr 0.1 -> 0.05"), "{log:?}");
    let weights = outcome.weights.unwrap();
    assert_ne!(weights, plain);

    place.save(TINY);
    train_and_stop(place.spec("stopped"));
    place.save(&edited);
    let spec = RunSpec { edited: true, ..place.resume("stopped") };
    let (outcome, log) = train(spec, Control::default(), |_| {});
    assert_eq!(log[0], "resumed 5");
    assert_eq!(outcome.weights.as_ref(), Some(&weights));

    // A replay ignores the files on the disk.
    place.save("this is no Lua");
    for of in ["edited", "stopped"] {
        let (outcome, log) = train(place.replay(of), Control::default(), |_| {});
        assert_eq!(outcome.weights.as_ref(), Some(&weights), "{of}");
        assert!(log.contains(&"reproduced".to_string()), "{of}: {log:?}");
    }
}

#[test]
fn a_refused_edit_changes_no_bit() {
    let place = Place::new();
    let plain = place.plain("plain");
    let raises = "    error('no', 0)\n  local error = ";
    let edits = [
        ("syntax", format!("{TINY} end"), "tiny.lua:"),
        ("model", TINY.replace("function recipe.model(p)", "function recipe.model(p) error('no', 0)"), "no"),
        ("step", TINY.replace("  local error = ", raises), "no"),
        // An error of the recipe with the text of a cancellation is not a cancellation.
        (
            "text",
            TINY.replace("function recipe.data(p)", "function recipe.data(p) error('interrupted', 0)"),
            "interrupted",
        ),
    ];
    for (run, text, part) in edits {
        place.save(TINY);
        let (outcome, log) = train_and_edit(&place, run, &text);
        assert!(log[0].starts_with("refused 5: ") && log[0].contains(part), "{log:?}");
        assert!(!log[0].contains("look for a loop"), "{log:?}");
        assert_eq!(outcome.weights.as_ref(), Some(&plain), "{run}");
    }
}

#[test]
fn a_build_that_never_ends_is_cancelled() {
    let place = Place::new();
    let plain = place.plain("plain");
    let control = Control::default();
    let done = Arc::new(AtomicBool::new(false));
    let canceller = {
        let (control, done) = (control.clone(), done.clone());
        std::thread::spawn(move || {
            while !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(50));
                control.cancel();
            }
        })
    };
    let endless = TINY.replace("function recipe.data(p)", "function recipe.data(p) while true do end");
    let (request, path) = (control.clone(), place.recipe());
    let (outcome, log) = train(place.spec("run"), control, move |step| {
        if step == 4 {
            std::fs::write(&path, &endless).unwrap();
            request.reload();
        }
    });
    done.store(true, Ordering::SeqCst);
    canceller.join().unwrap();
    assert!(log[0].contains("this version was still being built"), "{log:?}");
    assert_eq!(outcome.weights, Some(plain));
}

#[test]
fn a_request_is_for_one_run() {
    let place = Place::new();
    let other = Control::default();
    other.stop(1);
    let (outcome, _) = train(place.spec("run"), Control::default(), |_| {});
    assert_eq!(outcome.end, End::Finished);
    let (outcome, _) = train(place.spec("other"), other, |_| {});
    assert_eq!((outcome.end, outcome.steps), (End::Stopped { code: 1 }, 0));
}

#[test]
fn a_failure_is_an_error_and_is_recorded() {
    let place = Place::new();
    place.save(&TINY.replace("  local error = ", "  error('no', 0)\n  local error = "));
    let (outcome, log) = try_train(place.spec("run"), Control::default(), |_| {});
    assert!(matches!(outcome, Err(Error::Recipe(_))), "{outcome:?}");
    assert_eq!(*log.borrow(), ["failed true"]);
    assert_eq!(place.status("run"), "failed");
    // No run directory was made for a missing recipe.
    let spec = RunSpec { recipe: place.at("none.lua"), ..place.spec("none") };
    let (outcome, log) = try_train(spec, Control::default(), |_| {});
    assert!(matches!(outcome, Err(Error::Usage(_))), "{outcome:?}");
    assert_eq!(*log.borrow(), ["failed false"]);
    assert!(!Path::new(&place.at("none")).exists());
}

#[test]
fn options_of_the_caller_override_the_recipe() {
    let place = Place::new();
    let start = StartOptions { steps: Some(3), ..StartOptions::default() };
    let (outcome, log) =
        train(RunSpec { start, checkpoint_every: Some(2), ..place.spec("run") }, Control::default(), |_| {});
    assert_eq!((outcome.end, outcome.steps), (End::Finished, 3));
    assert_eq!(log, ["checkpoint 2", "checkpoint 3"]);
    let both = RunSpec {
        params: vec![("steps".into(), "4".into())],
        start: StartOptions { steps: Some(3), ..StartOptions::default() },
        ..place.spec("both")
    };
    let (outcome, _) = try_train(both, Control::default(), |_| {});
    assert!(matches!(outcome, Err(Error::Usage(_))), "{outcome:?}");
}

/// Every loader but that for training is evaluated: `test` at the end only, the others every `eval_every` steps too.
#[test]
fn loaders_of_any_name_are_evaluated() {
    let place = Place::new();
    let text = TINY
        .replace("valid = set:split(\"valid\", 0.25, p.seed):batch(8) }", "val = set:batch(8), test = set:batch(16) }")
        .replace("steps = 12, ", "steps = 12, eval_every = 5, ");
    assert_ne!(text, TINY);
    place.save(&text);
    train(place.spec("a"), Control::default(), |_| ());
    let log = std::fs::read_to_string(place.at("a").join("metrics.jsonl")).unwrap();
    let evaluations = |split: &str| {
        let events =
            log.lines().filter(|line| line.contains("\"eval\"") && line.contains(&format!("\"{split}/loss\"")));
        events
            .map(|line| line.split("\"step\":").nth(1).unwrap().split([',', '}']).next().unwrap().to_string())
            .collect()
    };
    let (val, test): (Vec<String>, Vec<String>) = (evaluations("val"), evaluations("test"));
    assert_eq!((val, test), (vec!["5".into(), "10".into(), "12".into()], vec!["12".to_string()]), "{log}");
}

#[test]
fn early_stopping_says_why() {
    let place = Place::new();
    place.save(
        &TINY
            .replace("params = {", "eval_every = 1, early_stop = { patience = 2 }, params = {")
            .replace("lr = 0.1", "lr = 50.0"),
    );
    train(place.spec("a"), Control::default(), |_| ());
    let log = std::fs::read_to_string(place.at("a").join("metrics.jsonl")).unwrap();
    let line = log.lines().find(|line| line.contains("early_stop")).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("valid/loss has not improved on ") && line.contains(" in 2 evaluations"), "{line}");
}

#[test]
fn prints_and_errors_name_states_by_their_paths() {
    let place = Place::new();
    let options = RuntimeOptions {
        backend: Arc::new(Cpu::new(Some(1))),
        params: Vec::new(),
        policy: Policy::closed(),
        strict: true,
        print: Rc::new(|_| ()),
    };
    let runtime = Runtime::new(options).unwrap();
    let Loaded::Recipe(recipe) = runtime.load(&place.recipe()).unwrap() else { panic!("a recipe") };
    let run = recipe.start(None, None, None).unwrap();
    let chunk = "local run = ...; local w = run.model[1].weight
        return tostring(w), tostring(select(2, pcall(function() w:assign(w:t()) end)))";
    let (shown, error): (String, String) = runtime.lua().load(chunk).call(run.table.clone()).unwrap();
    assert!(shown.starts_with("tensor {1, 4} f32 cpu state model.1.weight\n"), "{shown}");
    assert!(error.contains("does not fit a State of shape {1, 4} (model.1.weight)"), "{error}");
}
