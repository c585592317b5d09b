//! `perilune bundle diff`: compares two bundles; with `--bisect` it also recomputes their runs (`bisect.rs`).
//!
//! Two bundles of runs are compared as `perilune runs --compare` compares their run directories.

use super::bisect;
use super::opened::{Opened, open};
use super::repeat::{self, Asked, BundleOptions, Prepared};
use crate::cmd::{runs::print_json, runs_compare};
use crate::confined::{Terms, UntrustedArgs};
use crate::console_out::say;
use crate::failure::Failure;
use crate::policy_args::PolicyArgs;
use crate::terminal::{json as json_text, one_line, shortened};
use perilune_bundle::{Bundle, Manifest};
use perilune_train::bundled::RUN;
use perilune_train::history::{Files, dir_of};
use perilune_train::runs::{RunSummary, recipe_diff};
use perilune_train::{Envelope, MetricsLog};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Bytes of a file of a recipe.
const LONGEST: u64 = 64 << 20;
/// Lines of a comparison that are printed, and characters of each: a stranger's bundle can ask for any number. `--json` prints all.
const MOST_LINES: usize = 10_000;
const LONGEST_LINE: usize = 4_000;

#[derive(clap::Args, Debug)]
pub struct DiffArgs {
    a: PathBuf,
    b: PathBuf,
    /// Print the comparison of the runs as JSON; with --bisect its result follows
    #[arg(long)]
    json: bool,
    /// Recompute both runs here, confined, and find the first step, State or tensor that differs, with its line of the recipe
    #[arg(long)]
    bisect: bool,
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
    #[command(flatten)]
    bundle: BundleOptions,
}

/// Compares two bundles.
///
/// # Errors
/// A bundle is damaged, or with `--bisect` a run cannot be recomputed.
pub fn diff(args: &DiffArgs) -> Result<(), Failure> {
    args.check()?;
    let json = args.json;
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let folder = super::repeat::temporary_folder()?;
    let (first, second) = (folder.path().join("a"), folder.path().join("b"));
    if a.bundle.manifest().run.is_none() || b.bundle.manifest().run.is_none() {
        if json {
            let rule = "--json compares runs, and a bundle of a recipe has none";
            return Err(Failure::Usage(rule.into()));
        }
        if args.bisect {
            let rule = "--bisect recomputes runs, and a bundle of a recipe has none";
            return Err(Failure::Usage(format!(
                "{rule}\n  hint: perilune run trains it, and perilune bundle pack packs the run"
            )));
        }
    }
    for to in [&first, &second] {
        std::fs::create_dir(to).map_err(|e| Failure::System(format!("cannot create {}: {e}", to.display())))?;
    }
    if a.bundle.manifest().run.is_none() || b.bundle.manifest().run.is_none() {
        return say(&shortened(&recipes((&a, &first), (&b, &second))?, MOST_LINES, LONGEST_LINE));
    }
    for (opened, to) in [(&a, &first), (&b, &second)] {
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
    match json {
        true => print_json(&found.json())?,
        false => say(&shortened(&runs_compare::text(&found, None), MOST_LINES, LONGEST_LINE))?,
    }
    let [was, is] = [&first, &second].map(|dir| MetricsLog::read(&dir.join(RUN)));
    let weights = |of: &Opened| of.bundle.manifest().run.as_ref().map(|run| run.weights.clone());
    let same = weights(&a) == weights(&b);
    let first = Envelope::default().compare(&was?, &is?).first_difference;
    if !json {
        say(&match &first {
            Some(d) => {
                let show = |v: Option<f64>| v.map_or("missing".into(), |v| v.to_string());
                let (step, name) = (d.step, one_line(&d.metric));
                let (was, is) = (show(d.recorded), show(d.found));
                format!("\nthe first step that differs: step {step}: {name} is {was} in A, {is} in B\n")
            }
            None if same => "\nthe same metrics at every step, and the same weights\n".into(),
            None => "\nthe same metrics at every step; the weights differ\n".into(),
        })?;
    }
    // Where only the length differs, the first step that one of them lacks cannot be recomputed.
    let steps = [&a, &b].map(|of| of.bundle.manifest().run.as_ref().map_or(0, |run| run.steps));
    let shorter = steps[0].min(steps[1]);
    let upto = first.map_or(shorter, |d| d.step.min(shorter)).max(1);
    if !args.bisect || shorter == 0 {
        return Ok(());
    }
    let found = bisect::bisect(&[args.prepared(&args.a)?, args.prepared(&args.b)?], upto)?;
    say(&if json { json_text(&format!("{}\n", found.json())).into_owned() } else { found.text() })
}

impl DiffArgs {
    /// Refuses options of `--bisect` without it.
    fn check(&self) -> Result<(), Failure> {
        let terms = self.terms();
        let given = [
            ("--data", self.bundle.has_data()),
            ("--allow-read", !terms.reads.is_empty()),
            ("--allow-write", !terms.writes.is_empty()),
            ("--allow-kernels", terms.kernels),
            ("--check-kernels", terms.check_kernels),
            ("--kernel-time", terms.kernel_time.is_some()),
            ("--time", terms.time.is_some()),
            ("--process-memory", terms.memory.is_some()),
        ];
        match given.into_iter().find(|option| option.1 && !self.bisect) {
            Some((flag, _)) => {
                Err(Failure::Usage(format!("{flag} goes with --bisect: without it nothing of a bundle is run")))
            }
            None => Ok(()),
        }
    }

    /// What the options grant to both recipes.
    fn terms(&self) -> Terms {
        let mut terms = Terms::default();
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        terms
    }

    /// Unpacks a bundle for a confined process, with what the options grant.
    fn prepared(&self, named: &Path) -> Result<Prepared, Failure> {
        let asked = Asked { named, options: &self.bundle, files: &self.files, remember: false, quiet: true };
        repeat::prepare(&asked, self.terms())
    }
}

/// Lists what differs between the manifests and the recipes of two bundles, each of which has a new folder to unpack its recipe to.
fn recipes((a, to_a): (&Opened, &Path), (b, to_b): (&Opened, &Path)) -> Result<String, Failure> {
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
    let changed = recipe_diff(&texts(&a.bundle, to_a)?, &texts(&b.bundle, to_b)?);
    out += if changed.is_empty() { "recipe\n  equal\n" } else { "recipe\n" };
    for file in changed {
        out += &format!("  {}\n", one_line(&file.path.display().to_string()));
        for line in file.lines {
            out += &format!("    {}\n", one_line(&line));
        }
    }
    Ok(out)
}

/// Returns the recipe of a bundle at its start, the recipe itself first. It is unpacked in one pass over the archive.
fn texts(bundle: &Bundle, to: &Path) -> Result<Files, Failure> {
    let recipe = &bundle.manifest().recipe;
    let folder = dir_of(Path::new(recipe));
    bundle.extract(to, &|name| Path::new(name).starts_with(&folder))?;
    let mut out = Files::new();
    for file in bundle.manifest().files.iter().filter(|f| Path::new(&f.path).starts_with(&folder)) {
        if file.bytes > LONGEST {
            return Err(Failure::Refused(format!("{}: has more than {LONGEST} bytes, and is no recipe", file.path)));
        }
        let path = to.join(&file.path);
        let bytes = std::fs::read(&path).map_err(crate::failure::disk("read", &path))?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
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
