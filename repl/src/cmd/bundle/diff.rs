//! `perilune bundle diff`: compares two bundles.
//!
//! Two bundles of runs are compared as `perilune runs --compare` compares their run directories.

use super::compare::shown;
use super::opened::{Opened, open};
use crate::cmd::runs_compare;
use crate::console_out::say;
use crate::failure::Failure;
use crate::terminal::one_line;
use perilune_bundle::{Bundle, Manifest};
use perilune_train::bundled::RUN;
use perilune_train::history::{Files, dir_of};
use perilune_train::runs::{RunSummary, recipe_diff};
use perilune_train::{Envelope, MetricsLog};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of a file of a recipe.
const LONGEST: u64 = 64 << 20;

pub fn diff(a: &Path, b: &Path, json: bool) -> Result<(), Failure> {
    let (a, b) = (open(a)?, open(b)?);
    let folder = super::repeat::temporary_folder()?;
    let (first, second) = (folder.path().join("a"), folder.path().join("b"));
    if a.bundle.manifest().run.is_none() || b.bundle.manifest().run.is_none() {
        if json {
            let rule = "--json compares runs, and a bundle of a recipe has none";
            return Err(Failure::Usage(rule.into()));
        }
        return say(&recipes(&a, &b)?);
    }
    for (opened, to) in [(&a, &first), (&b, &second)] {
        std::fs::create_dir(to).map_err(|e| Failure::System(format!("cannot create {}: {e}", to.display())))?;
        opened.bundle.extract(to, &|name| name.starts_with(RUN) && !name.contains("/checkpoints/"))?;
    }
    let summary = |dir: &Path, of: &Opened| -> Result<RunSummary, Failure> {
        RunSummary::read(&dir.join(RUN))?
            .ok_or_else(|| Failure::Refused(format!("{}: its run has no run.json", of.bundle.path().display())))
    };
    let mut found = perilune_train::runs::compare(summary(&first, &a)?, summary(&second, &b)?)?;
    for (run, of) in found.runs.iter_mut().zip([&a, &b]) {
        run.dir = of.bundle.path().to_path_buf();
    }
    runs_compare::print_comparison(&found, json, None)?;
    if json {
        return Ok(());
    }
    let [was, is] = [&first, &second].map(|dir| MetricsLog::read(&dir.join(RUN)));
    let weights = |of: &Opened| of.bundle.manifest().run.as_ref().map(|run| run.weights.clone());
    let same = weights(&a) == weights(&b);
    let text = match Envelope::default().compare(&was?, &is?).first_difference {
        Some(d) => format!("\nthe first step that differs: {}\n", shown(&d)),
        None if same => "\nthe same metrics at every step, and the same weights\n".into(),
        None => "\nthe same metrics at every step; the weights differ\n".into(),
    };
    say(&text)
}

/// Lists what differs between the manifests of two bundles.
fn recipes(a: &Opened, b: &Opened) -> Result<String, Failure> {
    let (first, second) = (a.bundle.manifest(), b.bundle.manifest());
    let mut out = format!(
        "A {}\nB {}\n",
        one_line(&a.bundle.path().display().to_string()),
        one_line(&b.bundle.path().display().to_string())
    );
    let params = |m: &Manifest| m.params.iter().map(|(k, v)| (k.clone(), v.to_string())).collect();
    let data = |m: &Manifest| {
        m.data.iter().map(|d| (d.path.clone(), format!("{} bytes, blake3 {}", d.bytes, d.blake3))).collect()
    };
    let versions = |m: &Manifest| {
        let parts = [("perilune", m.perilune.clone()), ("stdlib", m.stdlib.clone()), ("command", m.command.join(" "))];
        parts.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
    };
    section(&mut out, "params", params(first), params(second));
    section(&mut out, "data", data(first), data(second));
    section(&mut out, "versions", versions(first), versions(second));
    let changed = recipe_diff(&texts(&a.bundle)?, &texts(&b.bundle)?);
    out += if changed.is_empty() { "recipe\n  equal\n" } else { "recipe\n" };
    for file in changed {
        out += &format!("  {}\n", one_line(&file.path.display().to_string()));
        for line in file.lines {
            out += &format!("    {}\n", one_line(&line));
        }
    }
    Ok(out)
}

/// Returns the recipe of a bundle at its start, the recipe itself first.
fn texts(bundle: &Bundle) -> Result<Files, Failure> {
    let recipe = &bundle.manifest().recipe;
    let folder = dir_of(Path::new(recipe));
    let mut out = Files::new();
    for file in bundle.manifest().files.iter().filter(|f| Path::new(&f.path).starts_with(&folder)) {
        let text = String::from_utf8_lossy(&bundle.read(&file.path, LONGEST)?).into_owned();
        let inside = Path::new(&file.path).strip_prefix(&folder).unwrap_or(Path::new(&file.path)).to_path_buf();
        out.push((inside, text));
    }
    out.sort_by_key(|(path, _)| folder.join(path) != Path::new(recipe));
    Ok(out)
}

fn section(out: &mut String, title: &str, a: BTreeMap<String, String>, b: BTreeMap<String, String>) {
    *out += &format!("{title}\n");
    let mut equal = true;
    for name in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
        let (x, y) = (a.get(name), b.get(name));
        if x != y {
            equal = false;
            let show = |v: Option<&String>| v.map_or("none".into(), |v| one_line(v));
            *out += &format!("  {}: {} -> {}\n", one_line(name), show(x), show(y));
        }
    }
    if equal {
        *out += "  equal\n";
    }
}
