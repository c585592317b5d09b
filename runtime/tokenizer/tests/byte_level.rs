//! Compares the fast path of byte-level BPE with the `tokenizers` crate: ids and spans, of random and adversarial texts.

mod common;

use common::{BOOK, Random, count, load, trained};
use perilune_tokenizer::train::{Model, Pattern, Train};
use perilune_tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

/// The crate's tokenizer of the same file, as transformers uses it, and with special tokens as text.
fn oracle(json: &str) -> [tokenizers::Tokenizer; 2] {
    [false, true].map(|parse| {
        let mut one: tokenizers::Tokenizer = json.parse().expect("an oracle");
        one.set_encode_special_tokens(!parse);
        one
    })
}

fn compare(ours: &Tokenizer, theirs: &[tokenizers::Tokenizer; 2], text: &str) {
    for (parse, theirs) in [false, true].into_iter().zip(theirs) {
        let options = Encode { parse_specials: parse, add_specials: false };
        let wanted = theirs.encode(text, false).expect("encoded");
        let found = ours.encode_spans(text, options).expect("encoded");
        assert_eq!(found.ids, wanted.get_ids(), "ids of {text:?}, specials parsed: {parse}");
        let spans: Vec<(usize, usize)> = found.spans.iter().map(|s| (s.start, s.end)).collect();
        assert_eq!(spans, wanted.get_offsets(), "spans of {text:?}, specials parsed: {parse}");
        assert_eq!(ours.encode(text, options).expect("encoded"), wanted.get_ids());
        assert_eq!(
            ours.decode(&found.ids, false).expect("decoded"),
            theirs.decode(&found.ids, false).expect("decoded")
        );
    }
}

/// Vocabularies of three patterns: with added tokens that are not special, with NFC, with merges that are ignored.
fn vocabularies() -> Vec<String> {
    let patterns = [Pattern::Gpt2, Pattern::Llama3, Pattern::Qwen2];
    let base = patterns.map(|pattern| {
        let specials = vec!["<|endoftext|>".to_string(), "<|im_start|>".into(), "<|im_end|>".into()];
        trained(&Train { specials, pattern, ..Train::new(Model::Bpe, 1500) }).tokenizer
    });
    let edit = |json: &str, f: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_str(json).expect("JSON");
        f(&mut value);
        value.to_string()
    };
    let added = edit(&base[1], &|json| {
        let tokens = json["added_tokens"].as_array_mut().expect("a list");
        for (k, (content, strip)) in [("<tool>", false), ("<|im", false), ("<pad>", true)].into_iter().enumerate() {
            tokens.push(
                json!({ "id": 1500 + k, "content": content, "single_word": false, "lstrip": strip, "rstrip": strip,
                                "normalized": k == 0, "special": k == 2 }),
            );
        }
    });
    let nfc = edit(&base[2], &|json| json["normalizer"] = json!({ "type": "NFC" }));
    let ignored = edit(&base[1], &|json| json["model"]["ignore_merges"] = true.into());
    base.into_iter().chain([added, nfc, ignored]).collect()
}

#[test]
fn ids_and_spans_equal_the_crates() {
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<pad>"];
    for (k, json) in vocabularies().iter().enumerate() {
        let (ours, theirs) = (load(json), oracle(json));
        assert!(ours.is_fast(), "vocabulary {k}");
        compare(&ours, &theirs, "");
        compare(&ours, &theirs, &BOOK[..20_000]);
        let mut random = Random(k as u64);
        for _ in 0..count() {
            compare(&ours, &theirs, &random.text(&specials));
        }
        for long in [
            "a".repeat(5000),
            " ".repeat(3000),
            "\n ".repeat(2000),
            "é".repeat(999),
            "the".repeat(1000),
            "9".repeat(1001),
        ] {
            compare(&ours, &theirs, &long);
        }
    }
}

/// All characters, alone and between others.
#[test]
fn every_character_is_split_as_the_expression_does() {
    for pattern in [Pattern::Gpt2, Pattern::Llama3, Pattern::Qwen2] {
        let json = trained(&Train { pattern, ..Train::new(Model::Bpe, 300) }).tokenizer;
        let (ours, theirs) = (load(&json), oracle(&json));
        // All planes that have characters but private ones.
        let all: Vec<char> = (0..0x3_2000).chain(0xe_0000..0xe_0200).filter_map(char::from_u32).collect();
        for chunk in all.chunks(4096) {
            let text: String = chunk.iter().flat_map(|c| [*c, ' ', *c, 'a', *c, '\n', *c]).collect();
            let wanted = theirs[0].encode(text.as_str(), false).expect("encoded");
            assert_eq!(ours.encode(&text, Encode::default()).expect("encoded"), wanted.get_ids(), "{:?}…", chunk[0]);
        }
    }
}

/// What the fast path does not cover is left to the crate, with the same results.
#[test]
fn other_models_use_the_crate() {
    for model in [Model::WordPiece, Model::Unigram] {
        let json = trained(&Train::new(model, 600)).tokenizer;
        let (ours, theirs) = (load(&json), oracle(&json));
        assert!(!ours.is_fast());
        let mut random = Random(9);
        for _ in 0..count().min(20_000) / 10 {
            let text = random.text(&["[SEP]", "<s>"]);
            for (parse, theirs) in [false, true].into_iter().zip(&theirs) {
                let wanted = theirs.encode(text.as_str(), false).expect("encoded");
                let options = Encode { parse_specials: parse, add_specials: false };
                assert_eq!(ours.encode(&text, options).expect("encoded"), wanted.get_ids(), "{text:?}");
                let wanted = theirs.encode(text.as_str(), true).expect("encoded");
                let options = Encode { parse_specials: parse, add_specials: true };
                assert_eq!(ours.encode(&text, options).expect("encoded"), wanted.get_ids(), "{text:?}");
            }
        }
    }
}
