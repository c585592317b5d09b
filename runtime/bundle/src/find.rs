//! Finds the data of a bundle on this machine, by the hash of their content.
//!
//! A file may have any name: the place where the author had it is looked at first, then every file of the same length. A folder
//! must have all its files under their names, since the names may be what the recipe learns from.

use crate::error::{Result, io};
use crate::manifest::{DATA, DataFile, Manifest};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

/// Files of a folder of data that are looked at for one with another name.
const MOST: usize = 200_000;
/// Levels of folders that are looked through.
const DEEPEST: usize = 8;
/// Where the folders of data that are inside the bundle are built, beneath the unpacked bundle.
const FOLDERS: &str = "folders";

/// A file or folder that the recipe names, and where it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// As the recipe names it.
    pub named: String,
    pub actual: PathBuf,
}

/// The data that were found, and those that were not.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Found {
    pub places: Vec<Place>,
    /// Files, and folders that lack a file or have it with another content.
    pub missing: Vec<DataFile>,
}

/// Finds the data of a bundle that was unpacked to `unpacked`, else in the folders or files `roots`. Data of an address are left
/// out: the recipe downloads them.
///
/// # Errors
/// A file cannot be read.
pub fn data(manifest: &Manifest, unpacked: &Path, roots: &[PathBuf]) -> Result<Found> {
    let mut out = Found::default();
    let mut folders: BTreeMap<&str, Vec<&DataFile>> = BTreeMap::new();
    let mut lengths: Vec<Option<HashMap<u64, Vec<PathBuf>>>> = roots.iter().map(|_| None).collect();
    for file in manifest.data.iter().filter(|file| file.address.is_none()) {
        if let Some(folder) = &file.folder {
            folders.entry(folder).or_default().push(file);
            continue;
        }
        let actual = match file.inside {
            true => Some(unpacked.join(file.entry())),
            false => one(file, roots, &mut lengths)?,
        };
        match actual {
            Some(actual) => out.places.push(Place { named: file.path.clone(), actual }),
            None => out.missing.push(file.clone()),
        }
    }
    for (k, (folder, files)) in folders.into_iter().enumerate() {
        let found = match files.iter().all(|file| file.inside) {
            true => Ok(build(&unpacked.join(FOLDERS).join(k.to_string()), folder, &files, unpacked)?),
            false => whole(folder, &files, roots)?,
        };
        match found {
            Ok(actual) => out.places.push(Place { named: folder.to_string(), actual }),
            Err(missing) => out.missing.extend(missing),
        }
    }
    Ok(out)
}

/// Whether a file of the disk has the content.
fn has(path: &Path, file: &DataFile) -> Result<bool> {
    if !fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == file.bytes) {
        return Ok(false);
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path).map_err(io("open", path))?).map_err(io("read", path))?;
    Ok(hasher.finalize().to_hex().as_str() == file.blake3)
}

/// The path beneath a root that a name stands for; none for one that leads out of it.
fn beneath(root: &Path, named: &str) -> Option<PathBuf> {
    let plain = Path::new(named).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    plain.then(|| root.join(named))
}

/// Where a file or folder may be in a root, without a search.
fn candidates(root: &Path, named: &str) -> Vec<PathBuf> {
    let last = Path::new(named).file_name().map(|name| root.join(name));
    [beneath(root, named), last, Some(root.to_path_buf())].into_iter().flatten().collect()
}

type ByLength = HashMap<u64, Vec<PathBuf>>;

fn one(file: &DataFile, roots: &[PathBuf], lengths: &mut [Option<ByLength>]) -> Result<Option<PathBuf>> {
    for root in roots {
        for path in candidates(root, &file.path) {
            if has(&path, file)? {
                return Ok(Some(path));
            }
        }
    }
    for (root, known) in roots.iter().zip(lengths) {
        let known = known.get_or_insert_with(|| {
            let (mut known, mut left) = (HashMap::new(), MOST);
            list(root, DEEPEST, &mut left, &mut known);
            known
        });
        for path in known.get(&file.bytes).into_iter().flatten() {
            if has(path, file)? {
                return Ok(Some(path.clone()));
            }
        }
    }
    Ok(None)
}

/// Lists the files beneath a folder by length, links left out. What cannot be listed is left out too.
fn list(folder: &Path, depth: usize, left: &mut usize, out: &mut ByLength) {
    let mut entries: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if *left == 0 {
            return;
        }
        *left -= 1;
        match entry.metadata() {
            Ok(m) if m.is_file() => out.entry(m.len()).or_default().push(entry.path()),
            Ok(m) if m.is_dir() && depth > 0 => list(&entry.path(), depth - 1, left, out),
            _ => {}
        }
    }
}

/// The rest of a file's name beneath its folder.
fn rest<'a>(file: &'a DataFile, folder: &str) -> &'a str {
    file.path.strip_prefix(folder).map_or(file.path.as_str(), |rest| rest.trim_start_matches('/'))
}

/// Finds a folder with all files, or returns those that the best candidate lacks.
fn whole(folder: &str, files: &[&DataFile], roots: &[PathBuf]) -> Result<std::result::Result<PathBuf, Vec<DataFile>>> {
    let mut missing: Vec<DataFile> = files.iter().map(|file| (*file).clone()).collect();
    for path in roots.iter().flat_map(|root| candidates(root, folder)).filter(|path| path.is_dir()) {
        let mut lacks = Vec::new();
        for file in files {
            let at = path.join(rest(file, folder));
            if !has(&at, file)? {
                lacks.push((*file).clone());
            }
        }
        if lacks.is_empty() {
            return Ok(Ok(path));
        }
        if lacks.len() < missing.len() {
            missing = lacks;
        }
    }
    Ok(Err(missing))
}

/// Builds a folder of data that are inside the bundle.
fn build(at: &Path, folder: &str, files: &[&DataFile], unpacked: &Path) -> Result<PathBuf> {
    for file in files {
        // The manifest's rules keep the name beneath the folder.
        let (to, from) = (at.join(rest(file, folder)), unpacked.join(DATA).join(&file.blake3));
        if let Some(above) = to.parent() {
            fs::create_dir_all(above).map_err(io("create", above))?;
        }
        // One content may stand under several names; a file system without hard links gets copies. A copy never goes over a file that
        // is there: it may be a link to other content.
        match fs::hard_link(&from, &to) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => return Err(io("create", &to)(e)),
            Err(_) => drop(fs::copy(&from, &to).map_err(io("write", &to))?),
            Ok(()) => {}
        }
    }
    Ok(at.to_path_buf())
}
