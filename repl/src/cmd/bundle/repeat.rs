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
use crate::confined;
use crate::console_out::complain;
use crate::failure::Failure;
use crate::fetching;
use crate::format::{bytes, grouped};
use crate::terminal::one_line;
use perilune_bundle::find::{self, Place};
use perilune_bundle::manifest::{DataFile, MANIFEST, Manifest};
use perilune_bundle::sign;
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
    if let Some(folder) = given.unpacked() {
        let folder = folder.to_path_buf();
        return inside(given, &folder);
    }
    given.check_for_bundle()?;
    let named = given.recipe().to_path_buf();
    let path = local(&named, &given)?;
    check_key(&path, given.key())?;
    let Opened { bundle, signer } = open(&path)?;
    let note = |text: &str| {
        if !given.is_quiet() {
            complain("", text)
        }
    };
    note(&format!("{}: verified · {}", one_line(&named.display().to_string()), signed(signer.as_ref())));
    let manifest = bundle.manifest();
    if manifest.perilune != env!("CARGO_PKG_VERSION") || manifest.stdlib != perilune_lua::stdlib_hash() {
        let text = format!(
            "the bundle was made with perilune {}, and another standard library than this {}; results may differ in their last bits",
            one_line(&manifest.perilune),
            env!("CARGO_PKG_VERSION")
        );
        complain("warning", &text);
    }
    let folder = temporary_folder()?;
    let unpacked = folder.path().canonicalize().unwrap_or_else(|_| folder.path().to_path_buf());
    bundle.extract(&unpacked, &|_| true)?;
    let text = std::fs::write(unpacked.join(MANIFEST), manifest.text());
    text.map_err(|e| {
        Failure::System(format!("cannot write in {}: {}", unpacked.display(), crate::failure::plain(&e)))
    })?;
    let mut roots = given.data().to_vec();
    roots.push(PathBuf::from("."));
    let found = find::data(manifest, &unpacked, &roots)?;
    if !found.missing.is_empty() {
        return Err(missing(&found.missing, &roots));
    }
    let recipe = recorded_run(manifest.command.clone()).map(|args| args.recipe().to_path_buf()).unwrap_or_default();
    let run_dir = given.run_dir().map_or_else(|| run::new_directory(Path::new(&manifest.name)), Path::to_path_buf);
    let (mut terms, remember) = given.grants();
    grants::add(&mut terms, &manifest.asks, bundle.hash(), signer.as_ref().map(|s| s.key.as_str()), remember)?;
    terms.opens.push(unpacked.clone());
    terms.places = places(&recipe, &found.places);
    terms.start = Some(unpacked.clone());
    terms.run_dir = Some(run_dir.clone());
    let mut words: Vec<OsString> = std::env::args_os().collect();
    words.extend(["--unpacked".into(), unpacked.clone().into_os_string()]);
    confined::supervise(words, &terms)?;
    match manifest.run.is_some() && !given.changes_run() {
        true => compare::results(manifest, &unpacked, &run_dir, given.is_json()),
        false => Ok(()),
    }
}

/// Runs an unpacked bundle, in the confined process. The process outside has verified all of it.
fn inside(given: run::RunArgs, folder: &Path) -> Result<(), Failure> {
    if !confined::child::is_confined() {
        return Err(Failure::Usage("--unpacked: is for the process that `perilune run` of a bundle starts".into()));
    }
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
fn local(named: &Path, given: &run::RunArgs) -> Result<PathBuf, Failure> {
    let text = named.to_string_lossy();
    if !is_address(&text) {
        return Ok(named.to_path_buf());
    }
    let (address, hash) = Address::with_hash(&text).map_err(|e| Failure::Usage(e.to_string()))?;
    let Some(hash) = hash else {
        let cure = format!("{text}#blake3:HEX, as `perilune bundle pack` printed it");
        return Err(Failure::Usage(format!("{text}: the address of a bundle needs its hash\n  hint: {cure}")));
    };
    let fetcher = given.parts().2.fetcher()?;
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
