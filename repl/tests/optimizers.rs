//! Tests recipes with several optimizers under the commands: `check`, `--resume`, `--precision fp16` and `replay`.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, place};

/// Two optimizers with schedules of their own; `critic` is updated twice a step, `body` in every third step.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "pair", params = { lr = 0.05, steps = 40, seed = 3 } }
function recipe.data(p)
  local x = pl.randn { 64, 4 }
  return { train = pl.data.tensors { x = x, y = x:sum(1) }:shuffle(p.seed):batch(8) }
end
function recipe.model()
  return nn.module { body = nn.Linear(4, 8), critic = nn.Linear(8, 1) }
end
function recipe.optimizer(p, model)
  local warm = { peak = p.lr, warmup = 5, steps = 80 }
  return { body = optim.AdamW(model.body, { lr = optim.cosine(warm) }), critic = optim.Adam(model.critic, { lr = optim.cosine(warm) }) }
end
function recipe.step(run, batch)
  local loss
  local function backward()
    local y = run.model.critic(run.model.body(batch.x):tanh()):squeeze(-1)
    loss = ((y - batch.y) ^ 2):mean()
    local scaled = run.scaler and run.scaler:scale(loss) or loss
    scaled:backward()
  end
  backward()
  run.opt.critic:step { scaler = run.scaler }
  run.opt.body:zero_grad()
  backward()
  run.opt.critic:step { scaler = run.scaler }
  if run.count % 3 == 0 then run.opt.body:step { scaler = run.scaler } end
  return loss
end
return recipe
"#;

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

#[test]
fn several_optimizers_resume_and_replay_to_the_bits_of_an_uninterrupted_run() {
    let p = place();
    p.file("pair.lua", RECIPE);
    for precision in ["f32", "fp16"] {
        let (straight, halves, again) = (format!("s-{precision}"), format!("h-{precision}"), format!("r-{precision}"));
        let run = |dir: &str, more: &[&str]| {
            let r =
                p.run(&[&["run", "pair.lua", "--quiet", "--precision", precision, "--run-dir", dir], more].concat());
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{dir} {more:?}");
        };
        run(&straight, &[]);
        run(&halves, &["--steps", "20"]);
        run(&halves, &["--resume", "--steps", "40"]);
        assert_eq!(weights(&p, &straight), weights(&p, &halves));
        // Every third step has a plan of its own, which a replay reports once.
        let r = p.run(&["replay", &halves, "--run-dir", &again]);
        assert!(
            r.status == Some(0) && r.err.lines().all(|l| l.starts_with("warning: new plan")),
            "{} {}",
            r.out,
            r.err
        );
        assert_eq!(weights(&p, &again), weights(&p, &straight));
    }
}

#[test]
fn an_optimizer_that_a_run_would_not_save_is_found_by_check_and_run() {
    let p = place();
    // The second optimizer is a local variable of the recipe.
    let hidden = RECIPE
        .replace("local recipe =", "local hidden\nlocal recipe =")
        .replace("return { body = optim", "hidden = optim")
        .replace(", critic = optim.Adam(", "\n  return optim.Adam(")
        .replace("optim.cosine(warm) }) }", "optim.cosine(warm) })")
        .replace("run.opt.critic", "run.opt")
        .replace("run.opt.body", "hidden");
    p.file("hidden.lua", &hidden);
    let line = hidden.lines().position(|l| l.contains("hidden:step")).unwrap() + 1;
    let made = hidden.lines().position(|l| l.contains("hidden = optim")).unwrap() + 1;
    for command in ["check", "run"] {
        let r = p.run(&[command, "hidden.lua"]);
        assert_eq!(r.status, Some(3), "{command}: {} {}", r.out, r.err);
        let text = format!("{}{}", r.out, r.err);
        assert!(text.contains(&format!("hidden.lua:{line}: optim.AdamW: step() of an optimizer")), "{text}");
        assert!(
            text.contains(&format!("made at hidden.lua:{made}")) && text.contains("return { G = ..., D = ... }"),
            "{text}"
        );
    }
}
