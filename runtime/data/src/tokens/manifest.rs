//! Defines the manifest of token files: what the ids are, and the shards with their sizes and hashes.
//!
//! A shard is a `.bin` file of little-endian u16 or u32 ids without a header. Beside it, with the same stem, are `.doc` with the
//! place in the shard of the first token of each document (u64), and `.mask` with a bit a token, the lowest bit of a byte first,
//! if a loss trains some tokens only.

use super::layout::Width;
use crate::error::{Error, Result, quote};
use perilune_policy::Opened;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The value of `schema`.
pub const SCHEMA: &str = "perilune.tokens/1";
/// The name of the file in its folder.
pub const NAME: &str = "manifest.json";
/// Larger manifests are refused: a million shards take less.
const MAX_BYTES: u64 = 256 << 20;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: String,
    /// "u16" or "u32".
    pub dtype: String,
    /// Ids are below this.
    pub vocabulary: u64,
    /// BLAKE3 of the tokenizer.
    pub tokenizer: String,
    /// BLAKE3 of the chat template, if documents are conversations.
    pub template: Option<String>,
    /// The id at the end of each document, if there is one.
    pub eot: Option<u32>,
    /// Whether each shard has a `.mask`.
    #[serde(default)]
    pub mask: bool,
    pub shards: Vec<ShardEntry>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ShardEntry {
    /// A file name in the folder of the manifest.
    pub file: String,
    pub tokens: u64,
    pub documents: u64,
    /// BLAKE3 of the file.
    pub blake3: String,
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// The file is larger than a manifest can be, no JSON of this schema, or names what is not a file beside it.
    pub fn read(mut file: Opened) -> Result<Manifest> {
        let path = file.path().to_path_buf();
        if file.len() > MAX_BYTES {
            return Err(Error::too_large(&path, "the size in bytes", file.len(), MAX_BYTES));
        }
        let mut text = Vec::new();
        file.by_ref().take(MAX_BYTES).read_to_end(&mut text).map_err(|e| Error::io(&path, "read", e))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| {
            let error = Error::malformed(&path, "file", format!("is no manifest of token files: {e}"));
            error.hint("perilune tokens encode writes manifests")
        })?;
        if manifest.schema != SCHEMA {
            let rule = format!("is {}, and {SCHEMA} is known", quote(&manifest.schema));
            return Err(Error::unsupported(&path, "schema", rule));
        }
        manifest.width(&path)?;
        for shard in &manifest.shards {
            let plain = Path::new(&shard.file).file_name().is_some_and(|name| name == shard.file.as_str());
            if !plain || !shard.file.ends_with(".bin") {
                let rule = format!("{} is not the name of a .bin file in the same folder", quote(&shard.file));
                return Err(Error::malformed(&path, "shards", rule));
            }
        }
        Ok(manifest)
    }

    /// Tokens of all shards.
    pub fn tokens(&self) -> u64 {
        self.shards.iter().fold(0, |sum, s| sum.saturating_add(s.tokens))
    }

    pub(super) fn width(&self, path: &Path) -> Result<Width> {
        match self.dtype.as_str() {
            "u16" => Ok(Width::U16),
            "u32" => Ok(Width::U32),
            other => Err(Error::unsupported(path, "dtype", format!("is {}; ids are u16 or u32", quote(other)))),
        }
    }
}

/// The path of a shard of a manifest.
pub(super) fn beside(manifest: &Path, file: &str) -> PathBuf {
    manifest.parent().unwrap_or(Path::new("")).join(file)
}
