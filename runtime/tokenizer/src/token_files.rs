//! Encodes documents to token files with a manifest, on all cores, in order, restartable at a shard.
//!
//! `perilune_data::tokens::manifest` describes the files. Documents are read while the ones before are encoded. Each shard is
//! written whole or not at all, then the record of the shards so far (`manifest.partial.json`); `manifest.json` comes last. After
//! an interruption the same call goes on behind the last shard; the files are the same as without one.

use crate::chat::{self, Chat, ChatTemplate};
use crate::encoding::Encode;
use crate::inputs::{Content, Document};
use crate::tokenizer::Tokenizer;
use perilune_data::tokens::manifest::{self, Manifest, ShardEntry};
use perilune_data::{Error, Result};
use perilune_policy::{Directory, Opener};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The record of a job that has not ended.
const PARTIAL: &str = "manifest.partial.json";
/// Bytes of text that are encoded together.
const BATCH: usize = 4 << 20;
/// Documents that are encoded together.
const BATCH_DOCUMENTS: usize = 1 << 14;
/// Tokens of a shard by default.
pub const SHARD_TOKENS: u64 = 1 << 26;

/// What is written.
#[derive(Debug)]
pub struct Job<'a> {
    pub tokenizer: &'a Tokenizer,
    pub encode: Encode,
    /// The id at the end of each document.
    pub eot: Option<u32>,
    /// How conversations are rendered and masked; without it they are an error.
    pub chat: Option<(&'a ChatTemplate, Chat)>,
    /// A shard ends with the document that reaches this number.
    pub shard_tokens: u64,
    /// Identifies the inputs: names, sizes, times. A job goes on only with the same.
    pub inputs: String,
}

/// How far a job is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    pub documents: u64,
    pub tokens: u64,
}

/// A record of finished shards.
#[derive(Debug, Serialize, Deserialize)]
struct Partial {
    job: String,
    documents: u64,
    manifest: Manifest,
}

/// The ids of a document, and its mask if it is a conversation.
type Encoded = (Vec<u32>, Option<Vec<bool>>);

/// A shard in memory.
#[derive(Default)]
struct Shard {
    ids: Vec<u8>,
    tokens: u64,
    starts: Vec<u8>,
    mask: Vec<u8>,
}

impl Job<'_> {
    /// Identifies all that the files depend on.
    fn identity(&self) -> String {
        let chat = self.chat.as_ref().map(|(template, chat)| format!("{} {chat:?}", template.hash()));
        let parts = format!(
            "{} {:?} {:?} {chat:?} {} {}",
            self.tokenizer.hash(),
            self.encode,
            self.eot,
            self.shard_tokens,
            self.inputs
        );
        blake3::hash(parts.as_bytes()).to_hex().to_string()
    }

    fn encode(&self, document: &Document) -> Result<Encoded> {
        let made = match (&document.content, &self.chat) {
            (Content::Text(text), _) => self.tokenizer.encode(text, self.encode).map(|mut ids| {
                ids.extend(self.eot);
                (ids, None)
            }),
            (Content::Messages(messages), Some((template, chat))) => {
                chat::encode(self.tokenizer, template, messages, chat).map(|sample| (sample.ids, Some(sample.mask)))
            }
            (Content::Messages(_), None) => {
                let error = Error::argument("this record", "is a conversation, and the tokenizer has no chat template");
                Err(error.hint("put chat_template.jinja into the tokenizer's folder"))
            }
        };
        made.map_err(|e| document.error(&e))
    }
}

/// Writes token files of documents into `dir`; `progress` is called after each part.
///
/// # Errors
/// A document cannot be read or encoded, or a file cannot be written.
pub fn write(
    dir: &Directory,
    job: &Job<'_>,
    mut documents: impl Iterator<Item = Result<Document>> + Send,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest> {
    write_all(dir, job, &mut documents, progress)
}

/// Compiled once, not for each type of iterator.
fn write_all(
    dir: &Directory,
    job: &Job<'_>,
    documents: &mut (dyn Iterator<Item = Result<Document>> + Send),
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest> {
    let narrow = job.tokenizer.size() <= 1 << 16;
    let identity = job.identity();
    let fresh = Manifest {
        schema: manifest::SCHEMA.into(),
        dtype: if narrow { "u16" } else { "u32" }.into(),
        vocabulary: job.tokenizer.size() as u64,
        tokenizer: job.tokenizer.hash().into(),
        template: job.chat.as_ref().map(|(template, _)| template.hash().into()),
        eot: job.eot,
        mask: job.chat.is_some(),
        shards: Vec::new(),
    };
    let mut state = resume(dir, &identity, if narrow { 2 } else { 4 }).unwrap_or(Partial {
        job: identity,
        documents: 0,
        manifest: fresh,
    });
    let mut documents = documents.skip(usize::try_from(state.documents).unwrap_or(usize::MAX));
    let (mut shard, mut seen) = (Shard::default(), state.documents);
    let mut tokens = state.manifest.tokens();
    progress(Progress { documents: seen, tokens });
    let mut batch = next_batch(&mut documents)?;
    while !batch.is_empty() {
        let (encoded, next) =
            rayon::join(|| batch.par_iter().map(|d| job.encode(d)).collect::<Vec<_>>(), || next_batch(&mut documents));
        for one in encoded {
            let (ids, mask) = one?;
            shard.add(&ids, mask.as_deref(), narrow, state.manifest.mask);
            (seen, tokens) = (seen + 1, tokens + ids.len() as u64);
            if shard.tokens >= job.shard_tokens.max(1) {
                shard.finish(dir, &mut state, seen)?;
            }
        }
        progress(Progress { documents: seen, tokens });
        batch = next?;
    }
    if shard.tokens > 0 {
        shard.finish(dir, &mut state, seen)?;
    }
    if state.manifest.tokens() == 0 {
        return Err(Error::argument("the inputs", "hold no text"));
    }
    dir.replace(manifest::NAME, &json(&state.manifest)?)?;
    dir.remove(PARTIAL)?;
    Ok(state.manifest)
}

fn json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| Error::argument("the manifest", e.to_string()))?;
    text.push(b'\n');
    Ok(text)
}

fn next_batch(documents: &mut impl Iterator<Item = Result<Document>>) -> Result<Vec<Document>> {
    let (mut batch, mut weight) = (Vec::new(), 0);
    while weight < BATCH && batch.len() < BATCH_DOCUMENTS {
        let Some(document) = documents.next().transpose()? else { break };
        weight += document.weight();
        batch.push(document);
    }
    Ok(batch)
}

/// The record of a job with this identity, if its shards are there.
fn resume(dir: &Directory, identity: &str, width: u64) -> Option<Partial> {
    let text = dir.open(Path::new(PARTIAL)).ok()?.text(256 << 20).ok()?;
    let state: Partial = serde_json::from_str(&text).ok()?;
    let there = |shard: &ShardEntry| {
        let len = |name: &str| dir.open(Path::new(name)).map(|f| f.len()).ok();
        let stem = shard.file.strip_suffix(".bin").unwrap_or(&shard.file);
        len(&shard.file) == shard.tokens.checked_mul(width)
            && len(&format!("{stem}.doc")) == shard.documents.checked_mul(8)
            && (!state.manifest.mask || len(&format!("{stem}.mask")) == Some(shard.tokens.div_ceil(8)))
    };
    (state.job == identity && state.manifest.shards.iter().all(there)).then_some(state)
}

impl Shard {
    fn add(&mut self, ids: &[u32], mask: Option<&[bool]>, narrow: bool, masked: bool) {
        self.starts.extend_from_slice(&self.tokens.to_le_bytes());
        match narrow {
            true => self.ids.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
            false => self.ids.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
        if masked {
            self.mask.resize((self.tokens + ids.len() as u64).div_ceil(8) as usize, 0);
            for k in 0..ids.len() {
                // Every token of a plain text is trained but the first, which nothing predicts.
                if mask.map_or(k > 0, |mask| mask[k]) {
                    let bit = self.tokens + k as u64;
                    self.mask[(bit / 8) as usize] |= 1 << (bit % 8);
                }
            }
        }
        self.tokens += ids.len() as u64;
    }

    /// Writes the shard and records it, then begins the next one.
    fn finish(&mut self, dir: &Directory, state: &mut Partial, documents: u64) -> Result<()> {
        let shard = std::mem::take(self);
        let stem = format!("tokens-{:05}", state.manifest.shards.len());
        dir.replace(&format!("{stem}.doc"), &shard.starts)?;
        if state.manifest.mask {
            dir.replace(&format!("{stem}.mask"), &shard.mask)?;
        }
        let file = format!("{stem}.bin");
        dir.replace(&file, &shard.ids)?;
        state.documents = documents;
        state.manifest.shards.push(ShardEntry {
            file,
            tokens: shard.tokens,
            documents: shard.starts.len() as u64 / 8,
            blake3: blake3::hash(&shard.ids).to_hex().to_string(),
        });
        Ok(dir.replace(PARTIAL, &json(state)?)?)
    }
}
