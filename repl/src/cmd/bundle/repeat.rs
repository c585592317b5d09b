//! `perilune run NAME.plb`: verifies a bundle, finds its data, runs it and compares the results.
//!
//! A bundle of a run is repeated with its edits, stops and resumes, as `perilune replay` repeats a run directory. On the same kind
//! of device and the same version it gives the same bits; otherwise its metrics must lie within the envelope that the bundle
//! records. With `--set` and other options that change the run, its last recipe is trained as a run of its own, and nothing is
//! compared. The recipe sees its data under the names that it uses, wherever they are on this machine.
//!
//! The recipe runs in a confined process (`confined`), which gets the unpacked bundle, the data and the run directory. This process
//! stays outside: it verifies before, and compares afterwards.

use super::opened::{Opened, open, signed, trusted_keys};
use super::pack::ENDING;
use super::{compare, grants};
use crate::cmd::{recorded_run, run};
use crate::confined::{self, Terms};
use crate::console_out::complain;
use crate::failure::Failure;
use crate::fetching;
use crate::format::{bytes, grouped};
use crate::policy_args::PolicyArgs;
use crate::terminal::one_line;
use perilune_bundle::find::{self, Place};
use perilune_bundle::manifest::{DataFile, MANIFEST, Manifest};
use perilune_bundle::{Bundle, sign};
use perilune_fetch::{Address, Algorithm};
use perilune_policy::is_address;
use perilune_train::bundled::{FILES, RUN};
use perilune_train::history::{Files, dir_of};
use perilune_train::{Replay, record_of};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Whether the command line names a bundle: a file NAME.plb, or the address of one.
pub fn is_bundle(named: &Path) -> bool {
    let text = named.to_string_lossy();
    let bare = text.split(['#', '?']).next().unwrap_or(&text);
    Path::new(bare).extension().is_some_and(|e| e == ENDING)
}

/// Runs a bundle in a confined process, and compares the results.
///
/// # Errors
/// The bundle or its data are not what they are said to be, the run fails, or its results differ.
pub fn repeat(given: run::RunArgs) -> Result<(), Failure> {
    if let Some(folder) = given.bundle().unpacked()? {
        let folder = folder.to_path_buf();
        return inside(given, &folder);
    }
    given.check_for_bundle()?;
    let named = given.recipe().to_path_buf();
    let (terms, remember) = given.grants();
    let files = given.parts().2;
    let asked = Asked { named: &named, options: given.bundle(), files, remember, quiet: given.is_quiet() };
    let mut prepared = prepare(&asked, terms)?;
    let manifest = prepared.bundle.manifest();
    let run_dir = given.run_dir().map_or_else(|| run::new_directory(Path::new(&manifest.name)), Path::to_path_buf);
    prepared.terms.run_dir = Some(run_dir.clone());
    prepared.supervise()?;
    let manifest = prepared.bundle.manifest();
    match manifest.run.is_some() && !given.changes_run() {
        true => compare::results(manifest, &prepared.unpacked, &run_dir, given.is_json()),
        false => Ok(()),
    }
}

/// Options of commands that run a bundle.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct BundleOptions {
    /// With a bundle: look for its data in DIR, or in a file, by their hash; may be given several times [default: the current
    /// directory, under the names that the recipe uses]
    #[arg(long, value_name = "DIR")]
    data: Vec<PathBuf>,
    /// With a bundle: refuse it unless this public key has signed it, RW… or a file with it
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The folder to which the process outside has unpacked the bundle
    #[arg(long, value_name = "DIR", hide = true)]
    unpacked: Option<PathBuf>,
}

impl BundleOptions {
    /// The folder to which the process outside has unpacked the bundle.
    ///
    /// # Errors
    /// This is not the confined process.
    pub fn unpacked(&self) -> Result<Option<&Path>, Failure> {
        if self.unpacked.is_some() && !confined::child::is_confined() {
            return Err(Failure::Usage("--unpacked: is for the process that a command on a bundle starts".into()));
        }
        Ok(self.unpacked.as_deref())
    }

    /// Whether places of data are given.
    pub fn has_data(&self) -> bool {
        !self.data.is_empty()
    }

    /// Refuses these options for what is no bundle.
    ///
    /// # Errors
    /// One is given.
    pub fn refuse_for(&self, named: &Path) -> Result<(), Failure> {
        let given = [("--data", !self.data.is_empty()), ("--key", self.key.is_some())];
        match given.into_iter().find(|option| option.1) {
            Some((flag, _)) => Err(Failure::Usage(format!(
                "{flag}: is an option of bundles, and {} is none\n  hint: --allow-read DIR lets a recipe read DIR",
                named.display()
            ))),
            None => Ok(()),
        }
    }
}

/// A bundle that a command names, with the options that concern it.
pub struct Asked<'a> {
    pub named: &'a Path,
    pub options: &'a BundleOptions,
    pub files: &'a PolicyArgs,
    pub remember: bool,
    pub quiet: bool,
}

/// A bundle that has been verified and unpacked for a confined process.
pub struct Prepared {
    pub bundle: Bundle,
    pub unpacked: PathBuf,
    pub terms: Terms,
    /// Removed at the end.
    _folder: TempDir,
}

impl Prepared {
    /// Runs this command again, confined.
    pub fn supervise(&self) -> Result<(), Failure> {
        confined::supervise(self.unpacked_for(std::env::args_os().collect()), &self.terms)
    }

    /// Runs another command on the bundle, confined, with results in `run_dir`.
    pub fn supervise_as(&self, words: Vec<OsString>, run_dir: &Path) -> Result<(), Failure> {
        let terms = Terms { run_dir: Some(run_dir.to_path_buf()), ..self.terms.clone() };
        confined::supervise(self.unpacked_for(words), &terms)
    }

    fn unpacked_for(&self, mut words: Vec<OsString>) -> Vec<OsString> {
        words.extend(["--unpacked".into(), self.unpacked.clone().into_os_string()]);
        words
    }
}

/// Verifies a bundle, unpacks it, finds its data, and asks for what it asks for. `terms`: what flags grant.
///
/// # Errors
/// The bundle, its signature or its data are not what they are said to be.
pub fn prepare(asked: &Asked<'_>, mut terms: Terms) -> Result<Prepared, Failure> {
    let path = local(asked.named, asked.files)?;
    check_key(&path, asked.options.key.as_deref())?;
    let Opened { bundle, signer } = open(&path)?;
    if !asked.quiet {
        let shown = one_line(&asked.named.display().to_string());
        complain("", &format!("{shown}: verified · {}", signed(signer.as_ref())));
    }
    let manifest = bundle.manifest();
    if manifest.perilune != env!("CARGO_PKG_VERSION") || manifest.stdlib != perilune_lua::stdlib_hash() {
        let (theirs, ours) = (one_line(&manifest.perilune), env!("CARGO_PKG_VERSION"));
        let rule = "results may differ in their last bits";
        let text = format!(
            "the bundle was made with perilune {theirs} or another standard library than that of this {ours}; {rule}"
        );
        complain("warning", &text);
    }
    let folder = temporary_folder()?;
    let unpacked = folder.path().canonicalize().unwrap_or_else(|_| folder.path().to_path_buf());
    bundle.extract(&unpacked, &|_| true)?;
    let text = unpacked.join(MANIFEST);
    std::fs::write(&text, manifest.text()).map_err(crate::failure::disk("write", &text))?;
    let mut roots = asked.options.data.clone();
    roots.push(PathBuf::from("."));
    let found = find::data(manifest, &unpacked, &roots)?;
    if !found.missing.is_empty() {
        return Err(missing(&found.missing, &roots));
    }
    let recipe = recorded_run(manifest.command.clone()).map(|args| args.recipe().to_path_buf()).unwrap_or_default();
    let key = signer.as_ref().map(|s| s.key.as_str());
    grants::add(&mut terms, &manifest.asks, bundle.hash(), key, asked.remember)?;
    terms.opens.push(unpacked.clone());
    terms.places = places(&recipe, &found.places);
    terms.start = Some(unpacked.clone());
    Ok(Prepared { bundle, unpacked, terms, _folder: folder })
}

/// Runs an unpacked bundle, in the confined process. The process outside has verified all of it.
fn inside(given: run::RunArgs, folder: &Path) -> Result<(), Failure> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read(&path).map_err(crate::failure::disk("read", &path))?;
    run::run_to_end(arguments(&Manifest::parse(&text)?, folder, given)?).map(drop)
}

/// Returns the names under which the recipe looks for its data: beside itself, and where it was started.
fn places(recipe: &Path, found: &[Place]) -> Vec<(PathBuf, PathBuf)> {
    let home = dir_of(recipe);
    let names = |place: &Place| {
        let named = PathBuf::from(&place.named);
        [(home.join(&named), place.actual.clone()), (named, place.actual.clone())]
    };
    found.iter().flat_map(names).collect()
}

/// A folder of this process alone, which is removed when it is dropped.
pub fn temporary_folder() -> Result<TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("perilune-bundle-").tempdir();
    made.map_err(|e| Failure::System(format!("cannot create a temporary folder: {}", crate::failure::plain(&e))))
}

/// Returns the file of a bundle; one at an address is downloaded, and must have a hash.
fn local(named: &Path, files: &PolicyArgs) -> Result<PathBuf, Failure> {
    let text = named.to_string_lossy();
    if !is_address(&text) {
        return Ok(named.to_path_buf());
    }
    let (address, hash) = Address::with_hash(&text).map_err(|e| Failure::Usage(e.to_string()))?;
    let Some(hash) = hash else {
        let cure = format!("{text}#blake3:HEX, as `perilune bundle pack` printed it");
        return Err(Failure::Usage(format!("{text}: the address of a bundle needs its hash\n  hint: {cure}")));
    };
    let fetcher = files.fetcher()?;
    let cached = fetcher.get(&address, Some(&hash), Algorithm::Blake3, &|| false).map_err(fetching::failure)?;
    Ok(cached.path)
}

fn missing(files: &[DataFile], roots: &[PathBuf]) -> Failure {
    const LISTED: usize = 8;
    let mut lines: Vec<String> = files
        .iter()
        .take(LISTED)
        .map(|f| {
            format!(
                "  {} ({}, blake3:{})",
                one_line(&f.path),
                bytes(usize::try_from(f.bytes).unwrap_or(usize::MAX)),
                f.blake3
            )
        })
        .collect();
    if files.len() > LISTED {
        lines.push(format!("  and {} more", grouped((files.len() - LISTED) as u64)));
    }
    let looked: Vec<String> = roots.iter().map(|root| root.display().to_string()).collect();
    Failure::Usage(format!(
        "the data of the bundle are not here (looked in {}):\n{}\n  hint: --data DIR names a folder, or a file, where they are under any name; folders must have all their files",
        looked.join(", "),
        lines.join("\n")
    ))
}

/// Returns the arguments of the run: those of the bundle, with the device and the folders of the person who runs it.
fn arguments(manifest: &Manifest, folder: &Path, given: run::RunArgs) -> Result<run::RunArgs, Failure> {
    let mut again = recorded_run(manifest.command.clone()).ok_or_else(|| {
        Failure::Refused(format!("{MANIFEST}: command: is not a `perilune run` command of this version"))
    })?;
    let recorded = given.recorded(folder);
    let changes_run = given.changes_run();
    let device = manifest.run.as_ref().map(|run| run.device.as_str());
    if manifest.run.is_some() {
        let dir = folder.join(RUN);
        let record = record_of(&dir)?;
        let replay = Replay::read(&dir, &record, again.recipe())?;
        again.again_as(&record, recorded, given, device);
        if changes_run {
            let last = replay.versions.last().map_or(&replay.files, |version| &version.files);
            again.store(last.clone());
        } else {
            again.replay = Some(replay.compared_by_caller());
        }
        return Ok(again);
    }
    let mut files = Files::new();
    let inside = format!("{FILES}/");
    for entry in manifest.files.iter().filter(|file| file.path.starts_with(&inside)) {
        let path = folder.join(&entry.path);
        let text = std::fs::read_to_string(&path).map_err(crate::failure::disk("read", &path))?;
        files.push((again.recipe().with_file_name(&entry.path[inside.len()..]), text));
    }
    files.sort_by_key(|(path, _)| path != again.recipe());
    again.again_as(&Default::default(), recorded, given, device);
    again.store(files);
    Ok(again)
}

/// The public key that `--key` names must have signed the bundle.
fn check_key(path: &Path, key: Option<&str>) -> Result<(), Failure> {
    let Some(key) = key else { return Ok(()) };
    sign::verify(path, Some(&sign::public_key(key)?), &trusted_keys())?;
    Ok(())
}
