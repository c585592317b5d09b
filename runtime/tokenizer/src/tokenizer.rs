//! Defines the tokenizer: bytes, characters, or a model of a `tokenizer.json`.
//!
//! A [`Tokenizer`] never changes after it is made; threads share one by `Arc`.

use crate::byte_level::{ByteLevel, is_surely_nfc};
use crate::components;
use crate::encoding::{Encode, Encoding, whole_characters};
use crate::shared_model::{Shared, SharedModel};
use crate::special::{AddedTokens, Config};
use perilune_data::error::quote;
use perilune_data::{Error, Result};
use perilune_policy::{Kind as Entry, Opened, Opener};
use serde_json::Value;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use tokenizers::{OffsetReferential, OffsetType, PostProcessor, PostProcessorWrapper, TokenizerBuilder};

/// Larger files are refused.
const MAX_JSON: u64 = 256 << 20;
/// Larger templates and configurations are refused.
const MAX_CONFIG: u64 = 16 << 20;
/// Ids above this are refused: tokens are stored in 32 bits, and tables have an entry for each id.
const MAX_ID: u32 = 1 << 26;

/// Encodes text as ids and decodes ids.
#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    config: Config,
    size: usize,
    hash: String,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    Chars { chars: Vec<char>, ids: HashMap<char, u32> },
    Json(Box<Json>),
}

/// A model of the `tokenizers` crate.
#[derive(Debug)]
struct Json {
    /// Special tokens in a text become their ids.
    parses: Shared,
    /// Special tokens in a text are text.
    plain: Shared,
    /// Adds tokens at the ends; not part of the above, because some processors shorten offsets.
    processor: Option<PostProcessorWrapper>,
    added: AddedTokens,
    fast: Option<ByteLevel>,
    /// The pre-tokenizer treats the beginning of a text differently from later parts.
    marks_first: bool,
}

/// Runs a function of the `tokenizers` crate. A panic of it becomes an error that names the file or the text.
pub(crate) fn guarded<T>(
    failed: impl Fn(String) -> Error,
    f: impl FnOnce() -> std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(failed(e.to_string())),
        Err(_) => Err(failed("the tokenizers library cannot use it".into())),
    }
}

/// Reads a whole file of at most `most` bytes.
fn read(mut file: Opened, most: u64) -> Result<Vec<u8>> {
    let path = file.path().to_path_buf();
    if file.len() > most {
        return Err(Error::too_large(&path, "the size in bytes", file.len(), most));
    }
    let mut bytes = Vec::new();
    file.by_ref().take(most + 1).read_to_end(&mut bytes).map_err(|e| Error::io(&path, "read", e))?;
    match bytes.len() as u64 > most {
        true => Err(Error::too_large(&path, "the size in bytes", bytes.len() as u64, most)),
        false => Ok(bytes),
    }
}

/// What is read of a `tokenizer.json` beside the tokenizer of the crate.
struct Facts {
    fast: Option<ByteLevel>,
    marks_first: bool,
    /// The added tokens with their ids.
    added: Vec<(String, u64)>,
    /// The largest id and 1.
    size: u64,
}

impl Facts {
    fn of(json: &Value) -> Facts {
        let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default().iter();
        let added: Vec<(String, u64)> =
            added.filter_map(|t| Some((t["content"].as_str()?.to_string(), t["id"].as_u64()?))).collect();
        // Ids of Unigram are places in a list.
        let of_model = match &json["model"]["vocab"] {
            Value::Object(ids) => ids.values().filter_map(Value::as_u64).max(),
            Value::Array(pieces) => (pieces.len() as u64).checked_sub(1),
            _ => None,
        };
        let largest = added.iter().map(|t| t.1).chain(of_model).max();
        let marks_first = json["pre_tokenizer"].to_string().contains("\"prepend_scheme\":\"first\"");
        Facts { fast: ByteLevel::of(json), marks_first, added, size: largest.map_or(0, |id| id.saturating_add(1)) }
    }
}

impl Tokenizer {
    /// Numbers bytes: ids 0 to 255.
    pub fn bytes() -> Tokenizer {
        Tokenizer { kind: Kind::Bytes, config: Config::default(), size: 256, hash: hash(b"bytes") }
    }

    /// Numbers the characters of a text in sorted order, as `data.text` does.
    pub fn chars(text: &str) -> Tokenizer {
        let vocabulary = perilune_data::text::Vocabulary::of(text).chars();
        let chars: Vec<char> = vocabulary.chars().collect();
        let ids = chars.iter().enumerate().map(|(id, c)| (*c, id as u32)).collect();
        let (size, hash) = (chars.len(), hash(vocabulary.as_bytes()));
        Tokenizer { kind: Kind::Chars { chars, ids }, config: Config::default(), size, hash }
    }

    /// Opens a `tokenizer.json`, or a folder with one, whose `tokenizer_config.json` and `chat_template.jinja` are read too.
    /// `observe` is called with each opened file.
    ///
    /// # Errors
    /// A file cannot be read, or is no tokenizer that is supported.
    pub fn open(opener: &dyn Opener, path: &Path, observe: &mut dyn FnMut(&Opened)) -> Result<Tokenizer> {
        let entries = match opener.list(path) {
            Ok(entries) => entries,
            Err(_) => {
                let file = opener.open(path)?;
                observe(&file);
                return Tokenizer::from_json(path, &read(file, MAX_JSON)?, Config::default());
            }
        };
        let has = |name: &str| entries.iter().any(|e| e.name == name && e.kind == Entry::File);
        let mut part = |name: &str, most: u64| -> Result<Vec<u8>> {
            let file = opener.open(&path.join(name))?;
            observe(&file);
            read(file, most)
        };
        if !has("tokenizer.json") {
            let error = Error::argument(path.display().to_string(), "has no tokenizer.json");
            return Err(error.hint("tokenizer.model and vocab.txt: save them as tokenizer.json with transformers"));
        }
        let mut config = match has("tokenizer_config.json") {
            true => Config::read(&path.join("tokenizer_config.json"), &part("tokenizer_config.json", MAX_CONFIG)?)?,
            false => Config::default(),
        };
        if has("chat_template.jinja") {
            let text = String::from_utf8(part("chat_template.jinja", MAX_CONFIG)?);
            let bad = |_| Error::malformed(&path.join("chat_template.jinja"), "file", "is not UTF-8");
            config.chat_template = Some(text.map_err(bad)?);
        }
        Tokenizer::from_json(&path.join("tokenizer.json"), &part("tokenizer.json", MAX_JSON)?, config)
    }

    /// Makes a tokenizer of the text of a `tokenizer.json`; `path` is for messages.
    ///
    /// # Errors
    /// A normaliser, pre-tokenizer, model, post-processor or decoder is unknown, or the parts contradict each other.
    pub fn from_json(path: &Path, text: &[u8], config: Config) -> Result<Tokenizer> {
        let mut json: Value =
            serde_json::from_slice(text).map_err(|e| Error::malformed(path, "file", format!("is not JSON: {e}")))?;
        components::check(path, &json)?;
        // Encoding never cuts or pads by itself.
        json["truncation"] = Value::Null;
        json["padding"] = Value::Null;
        let failed = |e: String| Error::malformed(path, "tokenizer", e);
        // The crate parses text by code that it has compiled; to read `Value`s, all its types would be compiled here again. It gets
        // what has been checked: of a key that a file has twice, the last.
        let parsed = || guarded(failed, || json.to_string().parse::<tokenizers::Tokenizer>());
        let (whole, facts) = rayon::join(parsed, || Facts::of(&json));
        let Facts { fast, marks_first, added: ids, size } = facts;
        let whole = Arc::new(whole?);
        for (content, id) in ids {
            if whole.token_to_id(&content).map(u64::from) != Some(id) {
                let rule = format!("{} has the id {id}, and its place in the vocabulary is another", quote(&content));
                return Err(Error::malformed(path, "added_tokens", rule));
            }
        }
        if size > u64::from(MAX_ID) {
            return Err(Error::too_large(path, "the largest id", size - 1, u64::from(MAX_ID)));
        }
        let processor = whole.get_post_processor().cloned();
        let added = AddedTokens::of(whole.get_added_vocabulary());
        let model = SharedModel(whole.clone());
        let shared = |parse: bool| {
            let mut vocabulary = whole.get_added_vocabulary().clone();
            vocabulary.set_encode_special_tokens(!parse);
            TokenizerBuilder::new()
                .with_model(model.clone())
                .with_normalizer(whole.get_normalizer().cloned())
                .with_pre_tokenizer(whole.get_pre_tokenizer().cloned())
                .with_decoder(whole.get_decoder().cloned())
                .with_added_vocabulary(vocabulary)
                .build()
                .map_err(|e| failed(e.to_string()))
        };
        let (parses, plain) = (shared(true)?, shared(false)?);
        let kind = Kind::Json(Box::new(Json { parses, plain, processor, added, fast, marks_first }));
        Ok(Tokenizer { kind, config, size: size as usize, hash: hash(text) })
    }

    /// The number of ids: the largest one and 1.
    pub fn size(&self) -> usize {
        self.size
    }

    /// BLAKE3 of what defines the ids: the text of `tokenizer.json`, or the characters.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the fast path of byte-level BPE encodes for it.
    pub fn is_fast(&self) -> bool {
        matches!(&self.kind, Kind::Json(json) if json.fast.is_some())
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        let mut chars = token.chars();
        match &self.kind {
            Kind::Bytes => token.bytes().next().filter(|_| token.len() == 1).map(u32::from),
            Kind::Chars { ids, .. } => {
                chars.next().filter(|_| chars.next().is_none()).and_then(|c| ids.get(&c).copied())
            }
            Kind::Json(json) => json.parses.token_to_id(token),
        }
    }

    /// The token of an id, as it stands in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes => u8::try_from(id).ok().map(|b| b.escape_ascii().to_string()),
            Kind::Chars { chars, .. } => chars.get(id as usize).map(char::to_string),
            Kind::Json(json) => json.parses.id_to_token(id),
        }
    }

    pub fn is_special(&self, id: u32) -> bool {
        matches!(&self.kind, Kind::Json(json) if json.added.is_special(id))
    }

    /// The added tokens, for searches in a text.
    pub(crate) fn added(&self) -> Option<&AddedTokens> {
        match &self.kind {
            Kind::Json(json) => Some(&json.added),
            _ => None,
        }
    }

    /// Whether parts of a text can be encoded one by one.
    pub(crate) fn encodes_parts(&self) -> bool {
        !matches!(&self.kind, Kind::Json(json) if json.marks_first)
    }

    /// Encodes a text.
    ///
    /// # Errors
    /// A character is not in the vocabulary of characters, or the model has no token for a part.
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_into(text, options, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_into(&self, text: &str, options: Encode, to: &mut Vec<u32>) -> Result<()> {
        match &self.kind {
            Kind::Json(json) if json.is_covered(text) && !options.add_specials => {
                json.encode_fast(text, options.parse_specials, &mut |ids, _, _| to.extend_from_slice(ids));
                Ok(())
            }
            Kind::Json(json) => json.encode(text, options).map(|found| to.extend(found.ids)),
            Kind::Bytes => {
                to.extend(text.bytes().map(u32::from));
                Ok(())
            }
            Kind::Chars { ids, .. } => {
                for c in text.chars() {
                    to.push(*ids.get(&c).ok_or_else(|| no_such(c))?);
                }
                Ok(())
            }
        }
    }

    /// Encodes a text, with the bytes that each token covers.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_spans(&self, text: &str, options: Encode) -> Result<Encoding> {
        match &self.kind {
            Kind::Json(json) if json.is_covered(text) && !options.add_specials => Ok(json.fast_spans(text, options)),
            Kind::Json(json) => json.encode(text, options),
            Kind::Bytes | Kind::Chars { .. } => {
                let ids = self.encode(text, options)?;
                let bytes = matches!(self.kind, Kind::Bytes);
                let spans = text.char_indices().flat_map(|(at, c)| {
                    let len = c.len_utf8();
                    std::iter::repeat_n(at..at + len, if bytes { len } else { 1 })
                });
                Ok(Encoding { ids, spans: spans.collect() })
            }
        }
    }

    /// Decodes ids; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// An id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_specials: bool) -> Result<String> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.size) {
            let rule = format!("is not in a vocabulary of {} tokens", self.size);
            return Err(Error::argument(format!("id {id}"), rule));
        }
        match &self.kind {
            Kind::Bytes => {
                Ok(String::from_utf8_lossy(&ids.iter().map(|id| *id as u8).collect::<Vec<_>>()).into_owned())
            }
            Kind::Chars { chars, .. } => Ok(ids.iter().map(|id| chars[*id as usize]).collect()),
            Kind::Json(json) => guarded(
                |e| Error::argument("these ids", format!("cannot be decoded: {e}")),
                || json.parses.decode(ids, skip_specials),
            ),
        }
    }
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

fn no_such(c: char) -> Error {
    Error::argument(quote(&c.to_string()), "is not in the vocabulary").hint("make the vocabulary of a text that has it")
}

impl Json {
    /// Whether the fast path encodes a text.
    fn is_covered(&self, text: &str) -> bool {
        self.fast.as_ref().is_some_and(|fast| !fast.nfc || is_surely_nfc(text))
    }

    /// Encodes the parts of a text between added tokens by the fast path. `each` gets ids, the range of the part, and whether it
    /// is an added token.
    fn encode_fast(&self, text: &str, parse: bool, each: &mut dyn FnMut(&[u32], std::ops::Range<usize>, bool)) {
        let Some(fast) = &self.fast else { return };
        let mut ids = Vec::with_capacity(text.len() / 3);
        if !self.added.occurs(text, parse) {
            fast.encode(text, &mut ids);
            return each(&ids, 0..text.len(), false);
        }
        // The crate itself finds the added tokens.
        let all = if parse { &self.parses } else { &self.plain };
        let split = all.get_added_vocabulary().extract_and_normalize(all.get_normalizer(), text);
        for (part, (start, end), tokens) in split.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            ids.clear();
            match tokens {
                Some(tokens) => ids.extend(tokens.iter().map(|t| t.id)),
                None => fast.encode(part, &mut ids),
            }
            each(&ids, start..end, tokens.is_some());
        }
    }

    fn fast_spans(&self, text: &str, options: Encode) -> Encoding {
        let mut all = Encoding::default();
        let Some(fast) = &self.fast else { return all };
        self.encode_fast(text, options.parse_specials, &mut |ids, range, added| {
            let mut at = range.start;
            for id in ids {
                let end = if added { range.end } else { (at + fast.len_of(*id)).min(range.end) };
                all.ids.push(*id);
                all.spans.push(whole_characters(text, at..end));
                at = end;
            }
        });
        all
    }

    fn encode(&self, text: &str, options: Encode) -> Result<Encoding> {
        let all = if options.parse_specials { &self.parses } else { &self.plain };
        let failed = |e: String| Error::argument(format!("text {}", quote(text)), format!("cannot be encoded: {e}"));
        guarded(failed, || {
            let mut found = all.encode(text, false)?;
            if let (true, Some(processor)) = (options.add_specials, &self.processor) {
                found = processor.process(found, None, true)?;
            }
            let spans = found.get_offsets().iter().map(|(start, end)| *start..*end).collect();
            Ok(Encoding { ids: found.get_ids().to_vec(), spans })
        })
    }
}
