//! Tests predictions of `perilune check --for`: times, links, memory, and the ranking of meshes.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, place};

/// Two layers that tp divides, and a batch of 8.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "two", params = { width = 256, batch = 8, layers = 2, samples = 64, steps = 10 } }
function recipe.data(p)
  local x = pl.randn { p.samples, p.width }
  return { train = pl.data.tensors { x = x, y = x:sum(1) }:batch(p.batch) }
end
function recipe.model(p)
  local all = {}
  for k = 1, p.layers do all[2 * k - 1], all[2 * k] = nn.Linear(p.width, p.width), nn.GELU() end
  all[#all + 1] = nn.Linear(p.width, 1)
  return nn.Sequential(all)
end
recipe.sharding = { ["1"] = "column", ["3"] = "row" }
function recipe.optimizer(_, model) return pl.optim.AdamW(model, { lr = 1e-3, clip_norm = 1 }) end
function recipe.loss(model, batch)
  local e = model(batch.x):squeeze(-1) - batch.y
  return (e * e):mean()
end
return recipe
"#;

fn two() -> Place {
    let p = place();
    p.file("two.lua", RECIPE);
    p
}

/// The output of a check for an H200.
fn check(p: &Place, more: &[&str]) -> String {
    let args: Vec<&str> = ["check", "two.lua", "--for", "h200"].into_iter().chain(more.iter().copied()).collect();
    let ran = p.run(&args);
    assert_eq!(ran.status, Some(0), "{more:?}: {}", ran.err);
    ran.out
}

/// The line of a report, without its name.
fn row<'a>(text: &'a str, name: &str) -> &'a str {
    let found = text.lines().find_map(|line| line.strip_prefix(&format!("  {name:<12}")));
    found.unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

/// The first number of microseconds, milliseconds or seconds of a text.
fn seconds(text: &str) -> f64 {
    let words: Vec<&str> = text.split(|c: char| c.is_whitespace() || c == ',').collect();
    let unit = |w: &str| [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)].into_iter().find(|(name, _)| *name == w).map(|u| u.1);
    let found = words.windows(2).find_map(|w| Some(w[0].parse::<f64>().ok()? * unit(w[1])?));
    found.unwrap_or_else(|| panic!("no time in {text:?}"))
}

#[test]
fn a_step_has_a_predicted_time_that_grows_with_its_work() {
    let p = two();
    let small = check(&p, &[]);
    let time = |text: &str| seconds(row(text, "time"));
    assert!(row(&small, "time").starts_with("predicted "), "{small}");
    let wide = check(&p, &["--set", "width=4096"]);
    let deep = check(&p, &["--set", "width=4096", "--set", "layers=6"]);
    assert!(time(&small) < time(&wide) && time(&wide) < time(&deep), "{small}{wide}{deep}");
    assert!(row(&small, "a device").contains("driver"), "{small}");
}

#[test]
fn collectives_have_a_link_and_a_time() {
    let p = two();
    let near = check(&p, &["--mesh", "dp=8", "--set", "width=2048"]);
    assert!(near.contains("NVLink") && !near.contains("network"), "{near}");
    assert!(row(&near, "time").contains("if nothing overlaps"), "{near}");
    let far = check(&p, &["--mesh", "dp=8", "--hosts", "8", "--set", "width=2048"]);
    assert!(far.contains("network"), "{far}");
    assert!(seconds(row(&far, "time")) > seconds(row(&near, "time")), "{near}{far}");
}

/// A step of much work exchanges its gradients through host memory, so that the links sleep; a short one, or one of more bytes, does not.
#[test]
fn long_steps_go_through_host_memory() {
    let p = two();
    let of = |mesh: &str, batch: usize| {
        let (batch, samples) = (format!("batch={batch}"), format!("samples={batch}"));
        check(&p, &["--mesh", mesh, "--set", "width=4096", "--set", &batch, "--set", &samples])
    };
    let long = of("dp=2", 1 << 18);
    assert!(long.contains("through host memory") && !long.contains("NVLink"), "{long}");
    // The last products run beside the last gradient that is sent.
    assert!(long.contains("collective_permute"), "{long}");
    for (mesh, batch) in [("dp=2", 1 << 13), ("dp=4", 1 << 20), ("dp=2,zero=1", 1 << 18), ("tp=2", 1 << 18)] {
        let text = of(mesh, batch);
        assert!(text.contains("NVLink") && !text.contains("host memory"), "{mesh}, {batch}: {text}");
    }
    // Little is sent beside the work of such wide layers, but the next product waits for it.
    let wide = ["--mesh", "tp=2", "--set", "width=65536", "--set", "batch=8192", "--set", "samples=8192"];
    let text = check(&p, &wide);
    assert!(text.contains("NVLink") && !text.contains("host memory"), "{text}");
}

#[test]
fn all_meshes_are_ranked_or_have_a_reason() {
    let p = two();
    let text = check(&p, &["--devices", "8", "--search"]);
    for mesh in ["dp=8 ", "dp=8,zero=1 ", "dp=8,zero=3 ", "dp=4,tp=2 ", "dp=2,tp=4,zero=3 ", "tp=8 "] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(mesh)), "{mesh} is not in\n{text}");
    }
    assert_eq!(text.matches("the fastest").count(), 1, "{text}");
    // A batch of 4 leaves devices of dp=8 without a sample.
    let few = check(&p, &["--devices", "8", "--search", "--set", "batch=4"]);
    let line = few.lines().find(|line| line.trim_start().starts_with("dp=8 ")).unwrap();
    assert!(line.contains("a batch of 4 samples leaves some of the 8 devices"), "{few}");
}

#[test]
fn mistakes_name_the_cure() {
    let p = two();
    let fail = |more: &[&str]| {
        let args: Vec<&str> = ["check", "two.lua"].into_iter().chain(more.iter().copied()).collect();
        let ran = p.run(&args);
        assert_eq!(ran.status, Some(2), "{more:?}: {}{}", ran.out, ran.err);
        ran.err
    };
    assert!(fail(&["--hosts", "2"]).contains("--for"));
    assert!(fail(&["--for", "h200", "--search"]).contains("--devices"));
    let e = fail(&["--for", "h200", "--mesh", "dp=8", "--hosts", "3"]);
    assert!(e.contains("8 devices cannot be spread evenly over 3 hosts"), "{e}");
    // A GPU without rates has memory and no times.
    let ran = p.run(&["check", "two.lua", "--for", "l40s"]);
    assert!(ran.out.contains("not predicted for an l40s: --for takes h200 or h100"), "{}", ran.out);
}
