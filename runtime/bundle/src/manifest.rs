//! Defines the manifest: the first entry of a bundle, which lists all others and says what the bundle needs.
//!
//! It is JSON. The text of a manifest is the one that [`Manifest::text`] gives for what was parsed from it, so it has no field
//! that this version does not know, and no field twice.

use crate::error::{Error, Result, cut, refused};
use crate::name;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;

/// The name of the entry.
pub const MANIFEST: &str = "manifest.json";
/// The version of the format that this release writes and reads.
pub const FORMAT: u32 = 1;
/// Bytes of a manifest.
pub(crate) const LONGEST: u64 = 64 << 20;
/// Entries of a bundle, and files of its data.
const MOST: usize = 1 << 20;
/// Hosts that a bundle may ask for: as many as a person reads before an answer.
const MOST_HOSTS: usize = 32;
/// Bytes of a text that is shown in a line.
const LONGEST_TEXT: usize = 2000;
/// Bytes of a path of data.
const LONGEST_PATH: usize = 4096;
/// Data files inside the bundle are named by their hash in this folder.
pub const DATA: &str = "data";

/// What a bundle has and needs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of Perilune that packed it.
    pub perilune: String,
    /// BLAKE3 of the standard library of that version.
    pub stdlib: String,
    /// The name of the recipe.
    pub name: String,
    /// As its author states it: an SPDX expression, or the name of an entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    /// The entry of the recipe at the start of the run.
    pub recipe: String,
    /// The words of the `perilune run` that the bundle repeats.
    pub command: Vec<String>,
    /// The params of the recipe with which it ran, or would.
    #[serde(default)]
    pub params: Map<String, Value>,
    /// The recorded run; none in the bundle of a recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunFacts>,
    /// The files that the recipe reads.
    #[serde(default)]
    pub data: Vec<DataFile>,
    #[serde(default)]
    pub asks: Asks,
    /// All other entries, in the order of their names.
    pub files: Vec<FileEntry>,
}

/// The results of a recorded run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunFacts {
    pub steps: u64,
    /// BLAKE3 of all States after the last step.
    pub weights: String,
    /// The last metrics.
    pub metrics: Map<String, Value>,
    /// When the run was started.
    pub started: String,
    /// Seconds of training.
    pub seconds: f64,
    /// The kind of device (`cpu`, `cuda`), its description with driver and libraries, and the devices of a mesh.
    pub device: String,
    pub device_description: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<String>,
    pub precision: String,
    /// Versions of the recipe that the run applied after its first, and times that it was resumed.
    pub edits: u64,
    pub resumes: u64,
    /// Steps with a checkpoint in the bundle.
    pub checkpoints: Vec<u64>,
}

/// A file that the recipe reads. A folder is listed file by file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// As the recipe names it: a path, or an address with its hash. Of a file of a folder, the folder's path and the name.
    pub path: String,
    /// 0 of an address.
    pub bytes: u64,
    /// BLAKE3 of its content; empty for an address with another hash.
    pub blake3: String,
    /// The address with its hash, if the recipe names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether its content is in the bundle, as `data/BLAKE3`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub inside: bool,
    /// The folder that the recipe names, if this is a file of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
}

/// What a bundle asks for beside its own files and data. The person who runs it grants it, or not.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asks {
    /// To compile and launch kernels whose source is in the recipe.
    #[serde(default, skip_serializing_if = "is_false")]
    pub kernels: bool,
    /// To download from these hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<String>,
}

/// An entry of the archive.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    pub path: String,
    pub bytes: u64,
    /// BLAKE3 of its content.
    pub blake3: String,
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl DataFile {
    /// Returns the entry that has its content, if it is inside.
    pub fn entry(&self) -> String {
        format!("{DATA}/{}", self.blake3)
    }
}

impl Manifest {
    /// Returns the text of the entry.
    pub fn text(&self) -> String {
        // A manifest has string keys and finite numbers only, so this cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Parses the text of an entry and checks its rules.
    ///
    /// # Errors
    /// It is malformed, of another version, or not the text that this version writes.
    pub fn parse(text: &[u8]) -> Result<Manifest> {
        let wrong = |rule: String| Error::Refused(format!("{MANIFEST}: {}", cut(&rule)));
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(text).map_err(|e| wrong(e.to_string()))?;
        if version.format != FORMAT {
            return Err(wrong(format!(
                "format: is {}, and this version reads {FORMAT}; a newer Perilune may read it",
                version.format
            )));
        }
        let manifest: Manifest = serde_json::from_slice(text).map_err(|e| wrong(e.to_string()))?;
        if manifest.text().as_bytes() != text {
            return Err(wrong("must be written as Perilune writes it, without repeated fields".into()));
        }
        manifest.check().map_err(|e| wrong(e.to_string()))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<()> {
        if self.files.len() > MOST || self.data.len() > MOST {
            return refused(format!("files, data: must have at most {MOST} items"));
        }
        let hash = |of: &str, hash: &str| match is_hash(hash) {
            true => Ok(()),
            false => refused(format!("{of}: {hash:?} is no BLAKE3 hash of 64 hexadecimal digits")),
        };
        hash("stdlib", &self.stdlib)?;
        if self.asks.net.len() > MOST_HOSTS {
            return refused(format!("asks: net: must have at most {MOST_HOSTS} hosts"));
        }
        if let Some(host) = self.asks.net.iter().find(|host| !is_host(host)) {
            return refused(format!("asks: net: {host:?} is no name of a host"));
        }
        if let Some(run) = &self.run {
            hash("run: weights", &run.weights)?;
        }
        self.check_texts()?;
        let mut folded = HashSet::from([name::folded(MANIFEST)]);
        let mut last = "";
        for file in &self.files {
            name::check(&file.path)?;
            hash(&file.path, &file.blake3)?;
            if file.path.as_str() <= last {
                return refused(format!("files: {} must come after {last}, in the order of names, once", file.path));
            }
            if !folded.insert(name::folded(&file.path)) {
                return refused(format!("files: {} differs from another one only in the case of letters", file.path));
            }
            last = &file.path;
        }
        // No entry is the folder of another one.
        let paths: HashSet<&str> = self.files.iter().map(|f| f.path.as_str()).collect();
        for path in &paths {
            let above = path.match_indices('/').map(|(at, _)| &path[..at]);
            if let Some(both) = above.into_iter().find(|above| paths.contains(above) || *above == MANIFEST) {
                return refused(format!("files: {both} is a file, and the folder of {path}"));
            }
        }
        if !paths.contains(self.recipe.as_str()) {
            return refused(format!("recipe: {:?} is not among the files", self.recipe));
        }
        self.check_data()
    }

    /// Checks the texts that commands show in a line.
    fn check_texts(&self) -> Result<()> {
        let run = self.run.as_ref();
        let of_run = |text: fn(&RunFacts) -> &str| run.map_or("", text);
        let texts = [
            ("perilune", self.perilune.as_str()),
            ("name", &self.name),
            ("license", self.license.as_deref().unwrap_or_default()),
            ("run: started", of_run(|run| &run.started)),
            ("run: device", of_run(|run| &run.device)),
            ("run: device_description", of_run(|run| &run.device_description)),
            ("run: mesh", of_run(|run| run.mesh.as_deref().unwrap_or_default())),
            ("run: precision", of_run(|run| &run.precision)),
        ];
        match texts.iter().find(|(_, text)| text.len() > LONGEST_TEXT) {
            Some((name, _)) => refused(format!("{name}: must have at most {LONGEST_TEXT} bytes")),
            None => Ok(()),
        }
    }

    fn check_data(&self) -> Result<()> {
        let hash = |of: &str, hash: &str| match is_hash(hash) {
            true => Ok(()),
            false => refused(format!("{of}: {hash:?} is no BLAKE3 hash of 64 hexadecimal digits")),
        };
        // A file may be read by itself and as one of a folder.
        let names: HashSet<(Option<&str>, &str)> =
            self.data.iter().map(|data| (data.folder.as_deref(), data.path.as_str())).collect();
        if names.len() < self.data.len() {
            return refused("data: a file is listed twice");
        }
        for data in &self.data {
            if data.address.is_none() || !data.blake3.is_empty() {
                hash(&data.path, &data.blake3)?;
            }
            if data.path.is_empty() || data.path.len() > LONGEST_PATH || data.path.contains('\0') {
                return refused(format!("data: a path must have 1 to {LONGEST_PATH} bytes, none of them zero"));
            }
            if let Some(folder) = &data.folder {
                let rest = data.path.strip_prefix(folder.as_str()).and_then(|rest| rest.strip_prefix('/'));
                if rest.is_none_or(|rest| rest.split('/').any(|part| ["", ".", ".."].contains(&part))) {
                    return refused(format!("data: {:?} is not beneath the folder {folder:?}", data.path));
                }
                let mut above = data.path.match_indices('/').map(|(at, _)| &data.path[..at]);
                if let Some(both) = above.find(|above| names.contains(&(Some(folder), above))) {
                    return refused(format!("data: {both:?} is a file, and the folder of {:?}", data.path));
                }
            }
            if data.inside {
                let entry = data.entry();
                let found = self.files.binary_search_by(|f| f.path.as_str().cmp(&entry)).map(|at| &self.files[at]);
                if found.is_ok_and(|f| f.bytes != data.bytes || f.blake3 != data.blake3) || found.is_err() {
                    return refused(format!(
                        "data: {:?} is said to be inside, and {entry} is not its content",
                        data.path
                    ));
                }
            }
        }
        Ok(())
    }

    /// Returns the bytes of all entries, the manifest left out.
    pub fn unpacked(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

/// Whether a text is a BLAKE3 hash as this crate writes it.
pub(crate) fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a text is the name or the number of one host. It is shown in the question for a grant, so it has no words beside.
fn is_host(text: &str) -> bool {
    (1..=253).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b".:-_".contains(&b))
}
