//! Trains a vocabulary: byte-level BPE, WordPiece or Unigram, by the trainers of the `tokenizers` crate.
//!
//! The same texts give the same bytes of `tokenizer.json`, on any number of threads. The crate's trainers alone do not promise
//! that, because they walk hash tables: WordPiece numbers its characters, and Unigram gives scores to characters that it has pruned, as
//! such a walk comes; sums of Unigram depend on the order of its words and on threads. So the characters of WordPiece are given in sorted
//! order, Unigram gets sorted words on one thread, and the scores of pruned characters are assigned in sorted order.

pub use crate::byte_level::scan::Pattern;
use crate::tokenizer::guarded;
use perilune_data::{Error, Result};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::{AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer, Trainer};

/// The version of what the same texts and options become, for caches.
pub const VERSION: &str = "1, tokenizers 0.23";

/// Words above this number of bytes are not counted: merges of a word take time that grows with its square.
const MAX_WORD: usize = 1000;
/// The trainers count pairs in 32 bits, signed.
const MAX_TEXT: u64 = i32::MAX as u64;

/// The model of a new vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Model {
    /// Byte-level byte-pair encoding, as GPT-2 and Llama 3 use it.
    #[default]
    Bpe,
    /// WordPiece, as BERT uses it.
    WordPiece,
    /// A unigram language model of pieces, as SentencePiece makes it.
    Unigram,
}

impl Model {
    pub const ALL: [(&'static str, Model); 3] =
        [("bpe", Model::Bpe), ("wordpiece", Model::WordPiece), ("unigram", Model::Unigram)];

    pub fn parse(name: &str) -> Option<Model> {
        Model::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, model)| model)
    }
}

/// What is trained.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Train {
    pub model: Model,
    /// Ids in all, special tokens included.
    pub vocabulary: usize,
    /// Special tokens; they get the first ids. Empty for those of the model.
    pub specials: Vec<String>,
    /// How text is split before byte-pair encoding.
    pub pattern: Pattern,
    /// Pairs that occur more rarely do not merge.
    pub min_frequency: u64,
}

impl Train {
    pub fn new(model: Model, vocabulary: usize) -> Train {
        Train { model, vocabulary, specials: Vec::new(), pattern: Pattern::Gpt2, min_frequency: 2 }
    }

    fn special_tokens(&self) -> Vec<String> {
        let own: &[&str] = match self.model {
            Model::Bpe => &["<|endoftext|>"],
            Model::WordPiece => &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            Model::Unigram => &["<unk>", "<s>", "</s>", "<pad>"],
        };
        // The model needs its own ones.
        let needed = own.iter().filter(|t| self.model != Model::Bpe || self.specials.is_empty() || **t == "<unk>");
        let mut all: Vec<String> = needed.map(|t| t.to_string()).collect();
        all.extend(self.specials.iter().filter(|t| !own.contains(&t.as_str()) || self.model == Model::Bpe).cloned());
        all
    }

    /// The token that ends a document.
    fn end(&self) -> String {
        match self.model {
            Model::Bpe => self.special_tokens().first().cloned().unwrap_or_default(),
            Model::WordPiece => "[SEP]".into(),
            Model::Unigram => "</s>".into(),
        }
    }
}

/// A trained vocabulary, as the texts of its files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trained {
    /// `tokenizer.json`
    pub tokenizer: String,
    /// `tokenizer_config.json`
    pub config: String,
}

type Texts<'a> = dyn Iterator<Item = Result<String>> + Send + 'a;

/// Trains a vocabulary of texts.
///
/// # Errors
/// A text cannot be read, there are none, they exceed 2 GiB, or the vocabulary is too small for the characters.
pub fn train(mut texts: impl Iterator<Item = Result<String>> + Send, options: &Train) -> Result<Trained> {
    train_on(&mut texts, options)
}

/// Compiled once, not for each type of iterator.
fn train_on(texts: &mut Texts<'_>, options: &Train) -> Result<Trained> {
    let specials = options.special_tokens();
    let distinct: BTreeSet<&String> = specials.iter().collect();
    if distinct.len() != specials.len() || specials.iter().any(String::is_empty) {
        return Err(Error::argument("special tokens", "are empty or doubled"));
    }
    let least = specials.len() + if options.model == Model::Bpe { 256 } else { 1 };
    if options.vocabulary < least || options.vocabulary > 1 << 24 {
        let rule = format!("is {}; it is at least {least}, and at most 2^24", options.vocabulary);
        return Err(Error::argument("the size of the vocabulary", rule));
    }
    let mut json = skeleton(options, &specials);
    let words = count(texts, &json)?;
    let failed = |rule| Error::argument("training", rule);
    json["model"] = guarded(failed, || match options.model {
        Model::Bpe => bpe(options, &specials, &words),
        Model::WordPiece => wordpiece(options, &specials, &words),
        Model::Unigram => unigram(options, &specials, &words),
    })?;
    let text =
        |value: &Value| serde_json::to_string_pretty(value).map_err(|e| Error::argument("training", e.to_string()));
    Ok(Trained { tokenizer: text(&json)?, config: text(&config(options))? })
}

fn config(options: &Train) -> Value {
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": options.end() });
    match options.model {
        Model::Bpe => {}
        Model::WordPiece => {
            config["pad_token"] = "[PAD]".into();
            config["unk_token"] = "[UNK]".into();
        }
        Model::Unigram => {
            config["bos_token"] = "<s>".into();
            config["pad_token"] = "<pad>".into();
            config["unk_token"] = "<unk>".into();
        }
    }
    config
}

/// The file without its model.
fn skeleton(options: &Train, specials: &[String]) -> Value {
    let added = specials.iter().enumerate().map(|(id, content)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true })
    });
    let added: Vec<Value> = added.collect();
    let (normalizer, pre_tokenizer, post_processor, decoder) = match options.model {
        Model::Bpe => {
            let byte_level = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": regex });
            let pre = match options.pattern {
                Pattern::Gpt2 => byte_level(true),
                other => json!({ "type": "Sequence", "pretokenizers": [
                    { "type": "Split", "pattern": { "Regex": other.expression() }, "behavior": "Isolated", "invert": false },
                    byte_level(false),
                ] }),
            };
            (Value::Null, pre, Value::Null, byte_level(true))
        }
        Model::WordPiece => {
            let piece = |id: &str, kind: u32| json!({ "SpecialToken": { "id": id, "type_id": kind } });
            let text = |id: &str, kind: u32| json!({ "Sequence": { "id": id, "type_id": kind } });
            let special = |id: &str, number: u32| json!({ "id": id, "ids": [number], "tokens": [id] });
            let template = json!({
                "type": "TemplateProcessing",
                "single": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0)],
                "pair": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0), text("B", 1), piece("[SEP]", 1)],
                "special_tokens": { "[CLS]": special("[CLS]", 2), "[SEP]": special("[SEP]", 3) },
            });
            (
                json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": false }),
                json!({ "type": "BertPreTokenizer" }),
                template,
                json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
            )
        }
        Model::Unigram => {
            let space = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
            (json!({ "type": "NFKC" }), space.clone(), Value::Null, space)
        }
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder,
    })
}

/// Counts the words of texts, as the normaliser and the pre-tokenizer of a file make them; in sorted order.
fn count(texts: &mut Texts<'_>, json: &Value) -> Result<Vec<(String, u32)>> {
    let without_words = json!({
        "version": "1.0", "added_tokens": [], "normalizer": json["normalizer"], "pre_tokenizer": json["pre_tokenizer"],
        "model": { "type": "BPE", "vocab": {}, "merges": [] },
    });
    let whole = guarded(|rule| Error::argument("training", rule), || without_words.to_string().parse::<Tokenizer>())?;
    let normalizer = whole.get_normalizer();
    let (bytes, failed) = (AtomicU64::new(0), Mutex::new(None));
    let fail = |e: Error| {
        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    };
    let texts = texts.map_while(|text| text.map_err(&fail).ok());
    let texts = texts.take_while(|text| {
        let before = bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        let fits = before + (text.len() as u64) < MAX_TEXT;
        if !fits {
            fail(
                Error::argument("the texts", "exceed 2 GiB")
                    .hint("train on a part of them: counts of pairs have 32 bits"),
            );
        }
        fits
    });
    use rayon::iter::{ParallelBridge, ParallelIterator};
    let one = |mut all: HashMap<String, u32>, text: String| {
        let added = tokenizers::AddedVocabulary::new();
        let mut split: PreTokenizedString = added.extract_and_normalize(normalizer, &text);
        match whole.get_pre_tokenizer().map_or(Ok(()), |pre| pre.pre_tokenize(&mut split)) {
            Ok(()) => {
                for (word, _, _) in split.get_splits(OffsetReferential::Original, OffsetType::None) {
                    if word.len() > MAX_WORD || word.is_empty() {
                        continue;
                    }
                    match all.get_mut(word) {
                        Some(count) => *count += 1,
                        None => {
                            all.insert(word.to_string(), 1);
                        }
                    }
                }
            }
            Err(e) => fail(Error::argument("a text", format!("cannot be split: {e}"))),
        }
        all
    };
    let join = |mut a: HashMap<String, u32>, mut b: HashMap<String, u32>| {
        if a.len() < b.len() {
            std::mem::swap(&mut a, &mut b);
        }
        for (word, count) in b {
            *a.entry(word).or_default() += count;
        }
        a
    };
    let all = texts.par_bridge().fold(HashMap::new, one).reduce(HashMap::new, join);
    if let Some(e) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(e);
    }
    if all.is_empty() {
        return Err(
            Error::argument("the texts", "have no words").hint("name files with text, or the field of a JSONL file")
        );
    }
    let mut words: Vec<(String, u32)> = all.into_iter().collect();
    words.sort();
    Ok(words)
}

type Made<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn added(specials: impl IntoIterator<Item = String>) -> Vec<AddedToken> {
    specials.into_iter().map(|t| AddedToken::from(t, true)).collect()
}

/// Feeds a trainer of the crate words with their counts: each word is counted as often as it stands in the list.
fn feed<T: Trainer>(trainer: &mut T, words: &[(String, u32)]) -> Made<()> {
    // A text is a number of a word and a count; the trainer asks for its words. Large counts come in parts, to bound memory.
    const PART: u32 = 4096;
    let texts = words.iter().enumerate().flat_map(|(k, (_, count))| {
        (0..*count).step_by(PART as usize).map(move |from| format!("{k} {}", (count - from).min(PART)))
    });
    trainer.feed(texts, |text| {
        let (number, count) = text.split_once(' ').ok_or("a word without its count")?;
        let word = &words.get(number.parse::<usize>()?).ok_or("a number of no word")?.0;
        Ok(std::iter::repeat_n(word.clone(), count.parse()?).collect())
    })
}

fn bpe(options: &Train, specials: &[String], words: &[(String, u32)]) -> Made<Value> {
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(options.vocabulary)
        .min_frequency(options.min_frequency)
        .initial_alphabet(tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect())
        .special_tokens(added(specials.iter().cloned()))
        .build();
    feed(&mut trainer, words)?;
    let mut model = BPE::default();
    trainer.train(&mut model)?;
    Ok(serde_json::to_value(&model)?)
}

fn wordpiece(options: &Train, specials: &[String], words: &[(String, u32)]) -> Made<Value> {
    let alphabet: BTreeSet<char> = words.iter().flat_map(|(word, _)| word.chars()).collect();
    let inside = words.iter().flat_map(|(word, _)| word.chars().skip(1)).collect::<BTreeSet<char>>();
    let characters = alphabet.iter().map(char::to_string).chain(inside.iter().map(|c| format!("##{c}")));
    let first: Vec<String> = specials.iter().cloned().chain(characters).collect();
    if first.len() > options.vocabulary {
        return Err(format!(
            "the texts have {} characters, more than a vocabulary of {}",
            first.len(),
            options.vocabulary
        )
        .into());
    }
    let mut trainer = WordPieceTrainer::builder()
        .show_progress(false)
        .vocab_size(options.vocabulary)
        .min_frequency(options.min_frequency)
        .special_tokens(added(first))
        .build();
    feed(&mut trainer, words)?;
    let mut model = WordPiece::builder().unk_token("[UNK]".into()).build()?;
    Trainer::train(&trainer, &mut model)?;
    Ok(serde_json::to_value(&model)?)
}

fn unigram(options: &Train, specials: &[String], words: &[(String, u32)]) -> Made<Value> {
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size(u32::try_from(options.vocabulary)?)
        .unk_token(Some("<unk>".into()))
        .special_tokens(added(specials.iter().cloned()))
        .build()?;
    let mut model = Unigram::default();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    pool.install(|| trainer.do_train(words.to_vec(), &mut model))?;
    let mut json = serde_json::to_value(&model)?;
    if let Some(pieces) = json["vocab"].as_array_mut() {
        canonical(pieces, specials.len());
    }
    Ok(json)
}

/// Orders pieces by score and text. Characters that training pruned have got scores from the lowest on in steps of 0.0001, in
/// the order of a hash table; they get them in their own order. Characters that were not pruned may have the lowest score too. They
/// cannot be told from the pruned ones, so all characters with one of these scores share the scores out, in their order.
fn canonical(pieces: &mut Vec<Value>, specials: usize) {
    let read = |piece: &Value| Some((piece[0].as_str()?.to_string(), piece[1].as_f64()?));
    let Some(mut list) = pieces.get(specials..).and_then(|l| l.iter().map(read).collect::<Option<Vec<_>>>()) else {
        return;
    };
    let lowest = list.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let (mut penalty, mut pruned, mut scores) = (0.0, Vec::new(), Vec::new());
    loop {
        let score = lowest + penalty;
        let one = |p: &&(String, f64)| p.1 == score && p.0.chars().count() == 1;
        let before = pruned.len();
        pruned.extend(list.iter().filter(one).map(|p| p.0.clone()));
        if pruned.len() == before {
            break;
        }
        scores.resize(pruned.len(), score);
        penalty += 0.0001;
    }
    pruned.sort();
    let assigned: HashMap<String, f64> = pruned.into_iter().zip(scores).collect();
    for piece in &mut list {
        if let Some(score) = assigned.get(&piece.0) {
            piece.1 = *score;
        }
    }
    list.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    pieces.truncate(specials);
    pieces.extend(list.into_iter().map(|(text, score)| json!([text, score])));
}
