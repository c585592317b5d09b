//! `perilune check RECIPE --against RUN_DIR`: shows what a reload or a resume with this file would do to that run.
//!
//! It builds the latest version of the run from its history and, like a reload, the new one, and records and plans a
//! step of each. Nothing is trained, and nothing is written.

use crate::console_out::ConsoleOut;
use crate::device::DeviceArgs;
use crate::failure::Failure;
use crate::format::grouped;
use perilune_lua::{DroppedStates, Recipe, Run, Runtime, StateMigration, Taking};
use perilune_train::history::{self, Version};
use perilune_train::{Resume, Source, params, record_of};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A version that has been built.
struct Built {
    recipe: Recipe,
    run: Run,
}

struct Against<'a> {
    runtime: &'a Runtime,
    record: &'a Map<String, Value>,
    device: &'a DeviceArgs,
}

impl Against<'_> {
    fn build(&self, text: &str, path: &Path, version: &Version) -> Result<Built, Failure> {
        let recipe = self.runtime.reload(text, &format!("@{}", path.display()))?;
        let number = |key: &str| self.record.get(key).and_then(Value::as_i64);
        let steps = version.steps.map(|n| n as i64).or(number("steps"));
        if let Some(steps) = steps
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            recipe.set_steps(steps)?;
        }
        let recorded = self.record.get("precision").and_then(Value::as_str);
        let precision = self.device.precision.as_deref().or(recorded);
        let run = recipe.start(number("seed"), precision, self.device.memory_budget)?;
        Ok(Built { recipe, run })
    }
}

/// Compares the recipe with the run in `dir`, and prints what would change.
pub fn against(
    runtime: &Runtime,
    source: &Source,
    dir: &Path,
    device: &DeviceArgs,
    screen: &ConsoleOut,
) -> Result<(), Failure> {
    let record = record_of(dir)?;
    let (first, versions) = history::read(dir, &record, &source.path)?;
    let now = versions.into_iter().next_back().unwrap_or_else(|| Version::of(first));
    let Some((_, text)) = now.files.first() else {
        return Err(Failure::Refused(format!("{}: run.json: files: is empty", dir.display())));
    };
    let object = |key: &str| record.get(key).and_then(Value::as_object).map(params::as_given).unwrap_or_default();
    let row = |name: &str, text: &str| screen.line(&format!("  {name:<12}{text}"));
    let build = Against { runtime, record: &record, device };

    // The run's current version: its params and its files.
    runtime.set_place(source.dir());
    runtime.set_texts(&now.files);
    runtime.offer_params(object("set"));
    runtime.keep_params(object("params"), BTreeMap::new());
    let old = build.build(text, &source.path, &now).map_err(|e| {
        let what = format!("the current version of {} cannot be built here", dir.display());
        Failure::Usage(format!("{what}: {}", e.message()))
    })?;
    let before = old.recipe.params()?;
    let old_kernels = old.run.fingerprint()?;

    // Like a reload, keep params unless their defaults were edited.
    let loaded = runtime.params();
    runtime.set_texts(&[]);
    runtime.keep_params(loaded.kept, loaded.defaults);
    let new = build.build(&source.text, &source.path, &Version::of(Vec::new()))?;
    let handover =
        new.run.take_over(perilune_lua::Source::Run(&old.run), &DroppedStates::default(), Taking::Fitting)?;
    let kernels = new.run.fingerprint()?;

    let mut files = vec![(source.path.clone(), source.text.clone())];
    files.extend(runtime.required());
    screen.line(&format!("{} against {}", screen.bold(&source.path.display().to_string()), dir.display()));
    let or_none = |list: Vec<String>, none: &str| if list.is_empty() { none.to_string() } else { list.join(", ") };
    row("text", &or_none(history::places(&now.files, &files), "no change"));
    row("params", &or_none(params::changes(&before, &new.recipe.params()?), "no change"));
    let migrates = new.recipe.has("migrate");
    for (name, text) in states(&handover, migrates) {
        row(name, &text);
    }
    let fresh = kernels.new_beside(&old_kernels);
    row(
        "step",
        &match fresh {
            0 => format!("{} kernels, none of them new: nothing is compiled", kernels.kernels.len()),
            n => format!("{} kernels, {n} of them new", kernels.kernels.len()),
        },
    );
    let begun = !perilune_checkpoint::list(&dir.join(perilune_checkpoint::CHECKPOINTS))?.is_empty();
    let step = Resume::of(dir.to_path_buf(), "--against").map(|r| r.step());
    row(
        "resume",
        &match (step, handover.exact()) {
            _ if !begun => "from the beginning: the run has no checkpoint".to_string(),
            (Ok(step), true) => format!("from step {}: the States are those of the checkpoint", grouped(step)),
            (Ok(step), false) => {
                format!("from step {}, with `--resume --edited`; without --edited it is refused", grouped(step))
            }
            (Err(e), _) => e.to_string().lines().next().unwrap_or_default().to_string(),
        },
    );
    screen.line("no mistakes found: a run with --watch would apply this version");
    Ok(())
}

/// Formats rows about the States; the moments of the optimizer are counted separately.
fn states(h: &StateMigration, migrates: bool) -> Vec<(&'static str, String)> {
    let moments = |path: &str| path.starts_with("optim.");
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let kept = h.kept.iter().filter(|(to, _)| !moments(to)).count();
    let mut out = vec![("States", format!("{} kept", count(kept, "State")))];
    let begins = if migrates { "recipe.migrate may fill it" } else { "is initialized" };
    out.extend(
        h.reshaped
            .iter()
            .filter(|r| !moments(&r.0))
            .map(|(path, was, is)| ("", format!("{path} {was} -> {is}: {begins}"))),
    );
    out.extend(h.new.iter().filter(|p| !moments(p)).map(|path| ("", format!("{path} is new: {begins}"))));
    out.extend(h.dropped.iter().filter(|p| !moments(p)).map(|path| ("", format!("{path} is dropped"))));
    let (kept, fresh) = (
        h.kept.iter().filter(|(to, _)| moments(to)).count(),
        h.new.iter().filter(|p| moments(p)).count() + h.reshaped.iter().filter(|r| moments(&r.0)).count(),
    );
    let gone = h.dropped.iter().filter(|p| moments(p)).count();
    if kept + fresh + gone > 0 {
        out.push(("moments", format!("{kept} kept, {fresh} initialized, {gone} dropped")));
    }
    out
}
