//! `perilune run NAME.plb`: verifies a bundle, finds its data, runs it and compares the results.
//!
//! A bundle of a run is repeated with its edits, stops and resumes, as `perilune replay` repeats a run directory. On the same kind
//! of device and the same version it gives the same bits; otherwise its metrics must lie within the envelope that the bundle
//! records. With `--set` and other options that change the run, its last recipe is trained as a run of its own, and nothing is
//! compared. The recipe sees its data under the names that it uses, wherever they are on this machine.

use super::compare;
use super::opened::{Opened, open, signed, trusted_keys};
use super::pack::ENDING;
use crate::cmd::{recorded_run, run};
use crate::console_out::complain;
use crate::failure::Failure;
use crate::fetching;
use crate::format::{bytes, grouped};
use crate::terminal::one_line;
use perilune_bundle::find::{self, Place};
use perilune_bundle::manifest::DataFile;
use perilune_bundle::{Bundle, sign};
use perilune_fetch::{Address, Algorithm};
use perilune_policy::is_address;
use perilune_train::bundled::{FILES, RUN};
use perilune_train::history::{Files, dir_of};
use perilune_train::{Replay, record_of};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Whether the command line names a bundle: a file NAME.plb, or the address of one.
pub fn is_bundle(named: &Path) -> bool {
    let text = named.to_string_lossy();
    let bare = text.split(['#', '?']).next().unwrap_or(&text);
    Path::new(bare).extension().is_some_and(|e| e == ENDING)
}

/// Runs a bundle and compares the results.
///
/// # Errors
/// The bundle or its data are not what they are said to be, the run fails, or its results differ.
pub fn repeat(given: run::RunArgs) -> Result<(), Failure> {
    given.check_for_bundle()?;
    let named = given.recipe().to_path_buf();
    let path = local(&named, &given)?;
    check_key(&path, given.key())?;
    let Opened { bundle, signer } = open(&path)?;
    let quiet = given.is_quiet();
    let note = |text: &str| {
        if !quiet {
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
    bundle.extract(folder.path(), &|_| true)?;
    let mut roots = given.data().to_vec();
    roots.push(PathBuf::from("."));
    let found = find::data(manifest, folder.path(), &roots)?;
    if !found.missing.is_empty() {
        return Err(missing(&found.missing, &roots));
    }
    let json = given.is_json();
    let args = arguments(&bundle, folder.path(), &found.places, given)?;
    let is_repeated = args.replay.is_some();
    let outcome = run::run_to_end(args)?;
    match is_repeated {
        true => compare::results(manifest, folder.path(), &outcome, json),
        false => Ok(()),
    }
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
fn arguments(bundle: &Bundle, folder: &Path, places: &[Place], given: run::RunArgs) -> Result<run::RunArgs, Failure> {
    let manifest = bundle.manifest();
    let shown = bundle.path().display();
    let mut again = recorded_run(manifest.command.clone()).ok_or_else(|| {
        Failure::Refused(format!("{shown}: command: is not a `perilune run` command of this version"))
    })?;
    let home = dir_of(again.recipe());
    let placed = places.iter().flat_map(|place| {
        let named = PathBuf::from(&place.named);
        [(home.join(&named), place.actual.clone()), (named, place.actual.clone())]
    });
    let recorded = run::Recorded::of_bundle(folder.to_path_buf(), placed.collect(), &given);
    let changes_run = given.changes_run();
    let device = manifest.run.as_ref().map(|run| run.device.as_str());
    match manifest.run {
        Some(_) => {
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
        }
        None => {
            let mut files = Files::new();
            let inside = format!("{FILES}/");
            let entries = manifest.files.iter().filter(|file| file.path.starts_with(&inside));
            for entry in entries {
                let text = bundle.read(&entry.path, 64 << 20)?;
                let text = String::from_utf8(text)
                    .map_err(|_| Failure::Refused(format!("{shown}: {}: is not UTF-8 text", entry.path)))?;
                files.push((again.recipe().with_file_name(&entry.path[inside.len()..]), text));
            }
            files.sort_by_key(|(path, _)| path != again.recipe());
            again.again_as(&Default::default(), recorded, given, device);
            again.store(files);
        }
    }
    Ok(again)
}

/// The public key that `--key` names must have signed the bundle.
fn check_key(path: &Path, key: Option<&str>) -> Result<(), Failure> {
    let Some(key) = key else { return Ok(()) };
    sign::verify(path, Some(&sign::public_key(key)?), &trusted_keys())?;
    Ok(())
}
