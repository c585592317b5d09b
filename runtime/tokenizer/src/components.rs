//! Checks the parts of a `tokenizer.json` before the `tokenizers` crate reads them, so that an error names the part.
//!
//! The crate reports an unknown normaliser as "data did not match any variant", and some contradictions between the vocabulary
//! and the merges would make it panic.

use perilune_data::error::quote;
use perilune_data::{Error, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// A part of the file: its key, what it is called in messages, the key of a sequence of such parts, the known types.
struct Part {
    key: &'static str,
    called: &'static str,
    sequence: &'static str,
    known: &'static [&'static str],
}

const PARTS: [Part; 4] = [
    Part {
        key: "normalizer",
        called: "normaliser",
        sequence: "normalizers",
        known: &[
            "Bert",
            "BertNormalizer",
            "Strip",
            "StripAccents",
            "NFC",
            "NFD",
            "NFKC",
            "NFKD",
            "Sequence",
            "Lowercase",
            "Nmt",
            "Precompiled",
            "Replace",
            "Prepend",
            "ByteLevel",
        ],
    },
    Part {
        key: "pre_tokenizer",
        called: "pre-tokenizer",
        sequence: "pretokenizers",
        known: &[
            "BertPreTokenizer",
            "ByteLevel",
            "CharDelimiterSplit",
            "Delimiter",
            "Metaspace",
            "Whitespace",
            "Sequence",
            "Split",
            "Punctuation",
            "WhitespaceSplit",
            "Digits",
            "UnicodeScripts",
            "FixedLength",
        ],
    },
    Part {
        key: "post_processor",
        called: "post-processor",
        sequence: "processors",
        known: &["RobertaProcessing", "BertProcessing", "ByteLevel", "TemplateProcessing", "Sequence"],
    },
    Part {
        key: "decoder",
        called: "decoder",
        sequence: "decoders",
        known: &[
            "BPEDecoder",
            "ByteLevel",
            "WordPiece",
            "Metaspace",
            "CTC",
            "Sequence",
            "Replace",
            "Fuse",
            "Strip",
            "ByteFallback",
        ],
    },
];

const MODELS: [&str; 4] = ["BPE", "WordPiece", "WordLevel", "Unigram"];
/// Parts of a sequence within a sequence.
const DEEPEST: usize = 8;

/// Checks the types of all parts, and the vocabulary against the merges.
///
/// # Errors
/// A part has an unknown type, or contradicts the others.
pub fn check(path: &Path, json: &Value) -> Result<()> {
    let Value::Object(_) = json else {
        let error = Error::malformed(path, "file", "is not an object of JSON");
        return Err(
            error.hint("a tokenizer of Hugging Face's library is saved with tokenizer.save(\"tokenizer.json\")")
        );
    };
    for part in &PARTS {
        check_part(path, part, &json[part.key], 0)?;
    }
    let model = &json["model"];
    match (model, model["type"].as_str()) {
        (Value::Object(_), Some("BPE")) => check_bpe(path, model),
        (Value::Object(_), Some(kind)) if MODELS.contains(&kind) => Ok(()),
        // Files of old versions have no type.
        (Value::Object(_), None) if model["type"].is_null() => match model["merges"].is_null() {
            true => Ok(()),
            false => check_bpe(path, model),
        },
        (Value::Object(_), _) => {
            let rule = format!("type {} is not known; the models are {}", shown(&model["type"]), MODELS.join(", "));
            Err(Error::unsupported(path, "model", rule))
        }
        _ => Err(Error::malformed(path, "model", "is missing").hint("this file is no tokenizer.json")),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => quote(text),
        other => quote(&other.to_string()),
    }
}

fn check_part(path: &Path, part: &Part, value: &Value, depth: usize) -> Result<()> {
    let unknown = |rule: String| Err(Error::unsupported(path, part.called, rule));
    match value {
        Value::Null => Ok(()),
        Value::Object(_) => match value["type"].as_str() {
            Some(kind) if !part.known.contains(&kind) => {
                unknown(format!("type {} is not known; known are {}", quote(kind), part.known.join(", ")))
            }
            Some("Sequence") => {
                if depth == DEEPEST {
                    return unknown(format!("has more than {DEEPEST} sequences within each other"));
                }
                let list = value[part.sequence].as_array().map(Vec::as_slice).unwrap_or_default();
                list.iter().try_for_each(|one| check_part(path, part, one, depth + 1))
            }
            Some("FixedLength") if value["length"].as_u64() == Some(0) => {
                unknown("FixedLength has the length 0".into())
            }
            Some("TemplateProcessing") => check_template(path, part, value),
            Some(_) => Ok(()),
            None => unknown("has no type".into()),
        },
        other => unknown(format!("is {}, not an object with a type", quote(&other.to_string()))),
    }
}

/// Checks that a template of special tokens says what these are.
fn check_template(path: &Path, part: &Part, value: &Value) -> Result<()> {
    let known = value["special_tokens"].as_object();
    if value["single"].as_array().is_some_and(|list| list.iter().any(|piece| piece["Sequence"]["id"] == "B")) {
        return Err(Error::malformed(
            path,
            part.called,
            "TemplateProcessing has a second text in the template of a single one",
        ));
    }
    let pieces = ["single", "pair"].into_iter().flat_map(|key| value[key].as_array().into_iter().flatten());
    for id in pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str()) {
        let Some(token) = known.and_then(|k| k.get(id)) else {
            let rule = format!("TemplateProcessing adds {}, which is not among its special_tokens", quote(id));
            return Err(Error::malformed(path, part.called, rule));
        };
        if token["id"] != *id {
            let rule = format!("TemplateProcessing names the token {} differently in special_tokens", quote(id));
            return Err(Error::malformed(path, part.called, rule));
        }
    }
    Ok(())
}

/// Checks that both sides of each merge, and what they make, are in the vocabulary.
fn check_bpe(path: &Path, model: &Value) -> Result<()> {
    if model["dropout"].as_f64().is_some_and(|p| p > 0.0) {
        let error = Error::unsupported(path, "model: dropout", "merges would be dropped at random");
        return Err(error.hint("set \"dropout\" to null: encoding is the same in every run"));
    }
    let vocabulary: HashSet<&str> = match model["vocab"].as_object() {
        Some(map) => map.keys().map(String::as_str).collect(),
        None => return Err(Error::malformed(path, "model: vocab", "is not an object of tokens and ids")),
    };
    let empty = Vec::new();
    let merges = match &model["merges"] {
        Value::Null => &empty,
        Value::Array(list) => list,
        _ => return Err(Error::malformed(path, "model: merges", "is not a list")),
    };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    for (k, merge) in merges.iter().enumerate() {
        let bad = |rule: String| Err(Error::malformed(path, format!("model: merge {k}"), rule));
        let pair = match merge {
            Value::String(line) => line.split_once(' '),
            Value::Array(two) => match two.as_slice() {
                [a, b] => a.as_str().zip(b.as_str()),
                _ => None,
            },
            _ => None,
        };
        let Some((a, b)) = pair else { return bad(format!("{} is not a pair of tokens", shown(merge))) };
        let Some(rest) = b.strip_prefix(prefix) else {
            return bad(format!(
                "{} does not begin with the prefix {} of tokens within a word",
                quote(b),
                quote(prefix)
            ));
        };
        for token in [a, b, &format!("{a}{rest}")] {
            if !vocabulary.contains(token) {
                return bad(format!("{} is not in the vocabulary", quote(token)));
            }
        }
    }
    Ok(())
}
