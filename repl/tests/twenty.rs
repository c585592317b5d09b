//! Compares a run of 400 steps with twenty edits, good and bad, with a run that is stopped and restarted at each edit.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{MIGRATE, Place, Running, place, save};

/// The empty loop makes a step long enough for twenty edits within 400 steps. The words in capitals are
/// replaced by the edits.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local parts = require "parts"
local recipe = pl.recipe { name = "edited", params = { lr = LR, steps = 400, seed = 3, width = WIDTH, batch = BATCH } }
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(p.batch), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width), nn.ACT(), nn.Dropout(DROP), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model) return optim.OPT(model, { lr = SPEED }) end
local calls = 0
function recipe.loss(model, batch)
  for _ = 1, 1200000 do end
  calls = calls + 1
  local error = model(batch.x AUGMENT):squeeze(-1) - batch.y
  LATE
  return parts.LOSS(error):mean()
end
function recipe.evaluate(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return { METRIC = error:abs():mean() }
end
MIGRATE
return recipe
"#;

const PARTS: &str = r#"local parts = {}
function parts.square(x) return x * x end
function parts.huge(x) return x:abs() end
return parts
"#;

/// The texts of the recipe and of the file that it requires.
#[derive(Clone)]
struct Version {
    words: Vec<(&'static str, String)>,
    comment: &'static str,
    parts: String,
}

impl Version {
    fn first() -> Version {
        let words = [
            ("LR", "0.01"),
            ("WIDTH", "8"),
            ("BATCH", "8"),
            ("ACT", "Tanh"),
            ("DROP", "0.1"),
            ("OPT", "SGD"),
            ("SPEED", "p.lr"),
            ("AUGMENT", ""),
            ("LATE", ""),
            ("LOSS", "square"),
            ("METRIC", "off"),
            ("MIGRATE", ""),
        ];
        Version { words: words.map(|(k, v)| (k, v.to_string())).into(), comment: "", parts: PARTS.into() }
    }

    fn set(&mut self, word: &str, text: &str) {
        self.words.iter_mut().find(|w| w.0 == word).unwrap().1 = text.to_string();
    }

    fn text(&self) -> String {
        let text = self.words.iter().fold(RECIPE.to_string(), |t, (word, with)| t.replace(word, with));
        format!("{text}{}", self.comment)
    }

    fn write(&self, p: &Place) {
        save(p, "parts.lua", &self.parts);
        save(p, "edited.lua", &self.text());
    }
}

struct Script<'a> {
    p: &'a Place,
    run: Running,
    now: Version,
    /// The versions that ran, with their first steps.
    history: Vec<(u64, Version)>,
    edits: u64,
}

impl Script<'_> {
    /// Waits for the step of the next edit, and requests a reload after `write`.
    fn write(&mut self, write: impl FnOnce(&Place)) {
        self.stop();
        write(self.p);
        self.run.signal("-HUP");
        self.run.signal("-CONT");
    }

    /// Halts the run at the step of the next edit; on a busy machine the run might otherwise pass the following ones.
    fn stop(&mut self) {
        self.edits += 1;
        self.run.until(12 * self.edits);
        self.run.signal("-STOP");
    }

    fn lands(&mut self, edit: impl FnOnce(&mut Version)) -> Value {
        let mut next = self.now.clone();
        edit(&mut next);
        let (parts, text) = (next.parts != self.now.parts, next.clone());
        self.write(|p| if parts { save(p, "parts.lua", &text.parts) } else { save(p, "edited.lua", &text.text()) });
        let event = self.run.next("reload");
        assert_eq!(event["ok"], true, "edit {}: {event}", self.edits);
        self.history.push((event["step"].as_u64().unwrap(), next.clone()));
        self.now = next;
        event
    }

    /// A version that never runs.
    fn refused(&mut self, says: &str, write: impl FnOnce(&Place, &Version)) -> Value {
        let now = self.now.clone();
        self.write(|p| write(p, &now));
        let event = self.run.next("reload");
        assert_eq!(event["ok"], false, "edit {}: {event}", self.edits);
        assert!(event["error"].as_str().unwrap().contains(says), "edit {}, {says}: {event}", self.edits);
        event
    }
}

const ARGS: [&str; 8] = ["run", "edited.lua", "--json", "--watch", "--run-dir", "r", "--threads", "1"];

#[test]
fn a_run_applies_twenty_edits() {
    let p = place();
    let first = Version::first();
    first.write(&p);
    let run = Running::start(&p, &ARGS);
    let mut s = Script { p: &p, run, now: first.clone(), history: vec![(0, first)], edits: 0 };

    // The step's operations do not change, so nothing is compiled.
    for edit in [
        (|v| v.set("LR", "0.02")) as fn(&mut Version),
        |v| v.comment = "-- why not\n",
        |v| v.set("METRIC", "distance"),
        |v| v.set("SPEED", "optim.cosine { peak = p.lr, steps = 400 }"),
    ] {
        let event = s.lands(edit);
        assert_eq!(event["plans"], 0, "edit {}: {event}", s.edits);
    }
    s.refused("edited.lua:", |p, v| save(p, "edited.lua", &v.text().replace("return recipe", "return recipe }")));
    let event = s.lands(|v| v.set("ACT", "ReLU"));
    assert!(event["plans"].as_u64().unwrap() >= 1, "{event}");
    s.refused("linear: x {8, 8} and weight {1, 9}", |p, v| {
        save(p, "edited.lua", &v.text().replace("nn.Linear(p.width, 1)", "nn.Linear(p.width + 1, 1)"))
    });
    s.lands(|v| v.set("LOSS", "huge"));

    // It raises in its third step; its first two steps count. The first call was the recorded step.
    let before = s.now.clone();
    s.lands(|v| v.set("LATE", "if calls == 4 then error('three is too many') end"));
    let event = s.run.next("reload");
    assert!(
        event["error"].as_str().unwrap().contains("edited.lua:") && event["error"].to_string().contains("three is")
    );
    let (from, to) = (s.history.last().unwrap().0, event["step"].as_u64().unwrap());
    assert_eq!(to, from + 2);
    s.history.push((to, before.clone()));
    s.now = before;

    s.refused("did you mean 'seed'?", |p, v| save(p, "edited.lua", &v.text().replace("0.75, p.seed", "0.75, p.sead")));
    let event = s.lands(|v| v.set("OPT", "Adam"));
    assert!(event["states"].as_str().unwrap().contains("new: optim.adam.m.1.bias"), "{event}");
    s.refused("there is no module \"parts\"", |p, v| {
        save(p, "edited.lua", &v.text());
        std::fs::remove_file(p.path("parts.lua")).unwrap()
    });
    // The restored text is loaded again without a change.
    s.stop();
    save(&p, "parts.lua", PARTS);
    s.run.signal("-CONT");
    let back = s.run.next("reload");
    assert_eq!((&back["ok"], &back["changed"]), (&Value::Bool(true), &serde_json::json!([])));
    s.history.push((back["step"].as_u64().unwrap(), s.now.clone()));

    let event = s.lands(|v| v.set("OPT", "AdamW"));
    assert!(event["states"].as_str().unwrap().contains("taken over: optim.adam.m.1.bias as optim.adamw.m.1.bias"));
    let event = s.lands(|v| {
        v.set("WIDTH", "12");
        v.set("MIGRATE", MIGRATE);
    });
    assert!(event["changed"].to_string().contains("width 8 -> 12"), "{event}");

    // The loss is NaN in its second step: the run continues from the step of the edit.
    let late = s.now.text().replace("LATE", "").replace(".huge(error)", ".huge(error * (calls == 3 and 0 / 0 or 1))");
    s.write(|p| save(p, "edited.lua", &late));
    let applied = s.run.next("reload");
    let refused = s.run.next("reload");
    assert_eq!((&applied["ok"], &refused["ok"]), (&Value::Bool(true), &Value::Bool(false)), "{refused}");
    assert_eq!(refused["back_to"], applied["step"], "{refused}");

    s.lands(|v| v.set("BATCH", "12"));
    s.lands(|v| v.set("DROP", "0.2"));
    s.refused("parts.lua:", |p, _| save(p, "parts.lua", "return {"));
    s.lands(|v| v.parts = PARTS.replace("return x:abs() end", "return x:abs() * 0.5 end"));
    s.lands(|v| v.set("AUGMENT", "+ pl.randn { 12, 4 } * 0.01"));
    assert!(s.edits >= 20, "{} edits", s.edits);
    let done = s.run.next("done");
    assert!(s.run.child.wait().unwrap().success());
    assert_eq!(done["steps"], 400);

    // The reference run is stopped, checkpointed, edited and restarted each time.
    for (k, (_, version)) in s.history.iter().enumerate() {
        let end = s.history.get(k + 1).map_or(400, |next| next.0).to_string();
        version.write(&p);
        let mut args = vec!["run", "edited.lua", "--quiet", "--run-dir", "s", "--threads", "1", "--steps", &end];
        if k > 0 {
            args.extend(["--resume", "--edited"]);
        }
        let r = p.run(&args);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "part {k}");
    }
    assert_eq!(p.run_json("s")["weights"], done["weights"]);

    // Replay both runs from their run directories.
    for (from, to) in [("r", "r2"), ("s", "s2")] {
        let r = p.run(&["replay", from, "--run-dir", to]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{from}");
        assert_eq!(p.run_json(to)["weights"], done["weights"]);
    }
}
