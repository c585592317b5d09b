//! `perilune bundle pack`: packs a run or a recipe, and signs the bundle.

use crate::cmd::{command_of, run};
use crate::console_out::{ConsoleOut, Mode, complain, say};
use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::format::bytes;
use crate::policy_args::{PolicyArgs, start_directory};
use perilune_bundle::manifest::{FORMAT, Manifest};
use perilune_bundle::{Content, Item, Packed, sign};
use perilune_fetch::Address;
use perilune_lua::{Loaded, RuntimeOptions};
use perilune_train::bundled::{self, Checkpoints, Contents, ENVELOPE};
use perilune_train::envelope::PERTURBED_RUNS;
use perilune_train::{Envelope, MetricsLog, Replay, Source, record_of, runs};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct PackArgs {
    /// A run directory, the name of one below runs/, or a recipe
    source: PathBuf,
    /// The file to write [default: NAME.plb in the current directory]
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Of a recipe: set a param; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Put the content of the data into the bundle; without it the bundle has their hashes
    #[arg(long)]
    include_data: bool,
    /// Of a run: put its last checkpoint into the bundle
    #[arg(long)]
    weights: bool,
    /// Of a run: put all its checkpoints into the bundle, so that windows of it can be repeated
    #[arg(long, conflicts_with = "weights")]
    checkpoints: bool,
    /// Of a run: repeat it three times with initial weights changed by one ulp, to measure how far rounding on other devices may move
    /// its metrics [default: if the run took less than two minutes]
    #[arg(long)]
    envelope: bool,
    /// Do not measure that
    #[arg(long, conflicts_with = "envelope")]
    no_envelope: bool,
    /// A text about the bundle, which becomes README.md
    #[arg(long, value_name = "FILE")]
    readme: Option<PathBuf>,
    /// An SPDX expression such as Apache-2.0, or a file with the licence
    #[arg(long, value_name = "LICENSE")]
    license: Option<String>,
    /// Sign the bundle with this secret key (perilune bundle key, or minisign -G)
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
}

/// Seconds of a run whose envelope is measured unasked.
const SHORT: f64 = 120.0;
/// The ending of a bundle's name.
pub const ENDING: &str = "plb";
/// The size of a README or a licence.
const LONGEST: u64 = 4 << 20;

pub fn pack(args: PackArgs) -> Result<(), Failure> {
    // A wrong key or text is reported before the data are hashed.
    let key = match &args.sign {
        Some(path) => Some(sign::secret_key(path, std::io::stdin().is_terminal())?),
        None => None,
    };
    let (license, mut texts) = args.texts()?;
    if args.out.as_ref().is_some_and(|out| out.extension().is_none_or(|e| e != ENDING)) {
        let out = args.out.unwrap_or_default();
        return Err(Failure::Usage(format!("--out {}: the name of a bundle ends in .{ENDING}", out.display())));
    }
    let is_recipe = args.source.extension().is_some_and(|e| e == "lua");
    let contents = if is_recipe { args.recipe()? } else { args.run()? };
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.{ENDING}", file_stem(&contents.name))));
    let mut manifest = manifest(&contents, license);
    let mut items = contents.items;
    items.append(&mut texts);
    for (file, (_, path)) in manifest.data.iter_mut().zip(&contents.data) {
        if Path::new(&file.path).is_absolute() && file.address.is_none() {
            complain("warning", &format!("{}: who reads the bundle sees this path of your machine", file.path));
        }
        if args.include_data && file.address.is_none() {
            file.inside = true;
            items.push(Item { name: file.entry(), content: Content::File(path.clone()) });
        }
    }
    manifest.asks.net = hosts(&manifest)?;
    let packed = perilune_bundle::pack(&out, &mut manifest, &items)?;
    let signer = key.map(|key| sign::sign(&out, &key, &packed.hash)).transpose()?;
    report(&out, &manifest, &packed, signer.as_deref())
}

impl PackArgs {
    fn run(&self) -> Result<Contents, Failure> {
        if let Some((name, _)) = self.set.first() {
            let rule = "a run has the params that it was trained with";
            return Err(Failure::Usage(format!("--set {name}: {rule}; leave it out, or pack the recipe")));
        }
        let keep = match (self.weights, self.checkpoints) {
            (_, true) => Checkpoints::All,
            (true, _) => Checkpoints::Last,
            _ => Checkpoints::None,
        };
        let dir = runs::find(&self.source)?;
        let mut contents = bundled::of_run(&dir, keep)?;
        let seconds = contents.run.as_ref().map_or(0.0, |run| run.seconds);
        if self.envelope || (!self.no_envelope && seconds < SHORT) {
            contents.items.push(self.measured(&dir)?);
        }
        Ok(contents)
    }

    /// Repeats a run with initial weights changed by one ulp, and measures how far its metrics move.
    fn measured(&self, dir: &Path) -> Result<Item, Failure> {
        let record = record_of(dir)?;
        let precision = record.get("precision").and_then(Value::as_str).unwrap_or("f32").to_string();
        let front = run::Front::open(Mode::Quiet)?;
        let folder = super::repeat::temporary_folder()?;
        let original = MetricsLog::read(dir)?;
        let mut others = Vec::new();
        for seed in 1..=PERTURBED_RUNS as u64 {
            complain("", &format!("measuring how far rounding moves the metrics: run {seed} of {PERTURBED_RUNS}"));
            let mut again = command_of(&record, dir)?;
            let start = start_directory(&record);
            let recorded = run::Recorded { start, files: self.files.clone(), verify_data: false };
            let to = folder.path().join(seed.to_string());
            again.again(&record, recorded, Some(to.clone()), false, true);
            again.perturb_by(seed);
            again.replay = Some(Replay::read(dir, &record, again.recipe())?.compared_by_caller());
            run::recompute(&again, &front)?;
            others.push(MetricsLog::read(&to)?);
        }
        let envelope = Envelope::measure(&original, &others, &precision)?;
        let text = envelope.json().to_string().into_bytes();
        Ok(Item { name: ENVELOPE.into(), content: Content::Text(text) })
    }

    /// Builds the run of a recipe, which reads its data, and takes no step.
    fn recipe(&self) -> Result<Contents, Failure> {
        if self.weights || self.checkpoints {
            let rule = "a recipe has no checkpoints; name the run directory";
            return Err(Failure::Usage(format!("--weights, --checkpoints: {rule}")));
        }
        let source = Source::read(&self.source)?;
        let screen = Rc::new(ConsoleOut::new(Mode::Quiet));
        let print = Rc::new(move |text: &str| screen.note(text));
        let policy = self.files.recipe(&self.source, &self.set)?.read_only(true).build();
        let (backend, params) = (self.device.open()?, self.set.clone());
        let runtime = self.device.runtime(RuntimeOptions { backend, params, policy, strict: true, print })?;
        let Loaded::Recipe(recipe) = source.load(&runtime)? else {
            let rule = "is a plain script; a bundle has a recipe, which returns pl.recipe { … }";
            return Err(Failure::Usage(format!("{} {rule}", self.source.display())));
        };
        recipe.start(None, self.device.precision.as_deref(), self.device.memory_budget)?;
        let set = self.set.iter().flat_map(|(key, value)| ["--set".to_string(), format!("{key}={value}")]);
        let precision = self.device.precision.iter().flat_map(|p| ["--precision".to_string(), p.clone()]);
        let words: Vec<String> = set.chain(precision).collect();
        Ok(bundled::of_recipe(&self.source, &source.text, &runtime, &recipe, &words)?)
    }

    /// Returns the licence as the manifest states it, and the items of README and licence.
    fn texts(&self) -> Result<(Option<String>, Vec<Item>), Failure> {
        let read = |path: &Path, name: &str| -> Result<Item, Failure> {
            let size = std::fs::metadata(path).map(|m| m.len());
            let text = size.and_then(|size| match size <= LONGEST {
                true => std::fs::read(path),
                false => Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it has more than 4 MiB")),
            });
            let failed = |e: std::io::Error| {
                Failure::Usage(format!("cannot read {}: {}", path.display(), crate::failure::plain(&e)))
            };
            Ok(Item { name: name.into(), content: Content::Text(text.map_err(failed)?) })
        };
        let mut items = Vec::new();
        if let Some(path) = &self.readme {
            items.push(read(path, "README.md")?);
        }
        let license = match &self.license {
            Some(given) if Path::new(given).is_file() => {
                items.push(read(Path::new(given), "LICENSE")?);
                Some("LICENSE".to_string())
            }
            Some(given) if given.chars().all(|c| c.is_ascii_alphanumeric() || " .-+()".contains(c)) => {
                Some(given.clone())
            }
            Some(given) => {
                let rule = "is neither a file nor an SPDX expression such as Apache-2.0";
                return Err(Failure::Usage(format!("--license {given}: {rule}")));
            }
            None => None,
        };
        Ok((license, items))
    }
}

/// A file name of a recipe's name.
fn file_stem(name: &str) -> String {
    let plain = |c: char| if c.is_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let stem: String = name.chars().map(plain).collect();
    let stem = stem.trim_matches(['.', '-']);
    if stem.is_empty() { "recipe".into() } else { stem.into() }
}

fn manifest(contents: &Contents, license: Option<String>) -> Manifest {
    Manifest {
        format: FORMAT,
        perilune: env!("CARGO_PKG_VERSION").into(),
        stdlib: perilune_lua::stdlib_hash(),
        name: contents.name.clone(),
        license,
        recipe: contents.recipe.clone(),
        command: contents.command.clone(),
        params: contents.params.clone(),
        run: contents.run.clone(),
        data: contents.data.iter().map(|(file, _)| file.clone()).collect(),
        asks: contents.asks.clone(),
        files: Vec::new(),
    }
}

/// Returns the hosts that the addresses of the data lead to.
fn hosts(manifest: &Manifest) -> Result<Vec<String>, Failure> {
    let mut out = BTreeSet::new();
    for address in manifest.data.iter().filter_map(|file| file.address.as_deref()) {
        let bare = address.split('#').next().unwrap_or(address);
        let host = Address::parse(bare).and_then(|a| a.host()).map_err(|e| Failure::Usage(e.to_string()))?;
        out.insert(host);
    }
    Ok(out.into_iter().collect())
}

/// Prints one line on what was packed, and hints.
fn report(out: &Path, manifest: &Manifest, packed: &Packed, signer: Option<&str>) -> Result<(), Failure> {
    let mut parts = vec![out.display().to_string(), bytes(usize::try_from(packed.bytes).unwrap_or(usize::MAX))];
    parts.push(describe(manifest).join(", "));
    let mut text = parts.join(" · ") + "\n";
    text += &format!("  blake3:{}\n", packed.hash);
    if let Some(key) = signer {
        text += &format!("  signed by {key}\n");
    }
    if manifest.data.iter().any(|file| !file.inside && file.address.is_none()) {
        text += "  hint: --include-data puts the data inside; without them, who runs it names their folder with --data DIR\n";
    }
    if manifest.run.is_some() && !manifest.files.iter().any(|file| file.path == ENVELOPE) {
        text +=
            "  hint: --envelope measures how far results on other devices may differ; without it they must be equal\n";
    }
    say(&text)
}

/// Lists what a bundle has, in words.
pub fn describe(manifest: &Manifest) -> Vec<String> {
    let plural = |n: usize, one: &str, many: &str| if n == 1 { format!("1 {one}") } else { format!("{n} {many}") };
    let mut out = vec!["recipe".to_string()];
    let folder = Path::new(&manifest.recipe).parent().unwrap_or(Path::new(""));
    let required =
        manifest.files.iter().filter(|f| f.path != manifest.recipe && Path::new(&f.path).starts_with(folder)).count();
    if required > 0 {
        out.push(plural(required, "file that it requires", "files that it requires"));
    }
    let data = &manifest.data;
    if !data.is_empty() {
        let sum = data.iter().fold(0, |sum: u64, file| sum.saturating_add(file.bytes));
        let inside = data.iter().filter(|file| file.inside).count();
        let place = match inside {
            0 => "not included".to_string(),
            n if n == data.len() => "included".to_string(),
            n => format!("{n} of them included"),
        };
        let size = bytes(usize::try_from(sum).unwrap_or(usize::MAX));
        out.push(format!("{} by hash ({size}, {place})", plural(data.len(), "data file", "data files")));
    }
    if let Some(run) = &manifest.run {
        if run.edits > 0 {
            out.push(plural(run.edits as usize, "edit", "edits"));
        }
        if run.resumes > 0 {
            out.push(plural(run.resumes as usize, "resume", "resumes"));
        }
        if !run.checkpoints.is_empty() {
            out.push(plural(run.checkpoints.len(), "checkpoint", "checkpoints"));
        }
        out.push(format!("weights {}…", &run.weights[..12]));
    }
    out
}
