//! Tests files that are no tokenizers: named parts, limits, and no panic for mutated files. `PERILUNE_FUZZ_COUNT` sets the number.

mod common;

use common::{Random, count, trained};
use perilune_policy::Policy;
use perilune_tokenizer::chat::{self, Chat, ChatTemplate};
use perilune_tokenizer::train::{Model, Pattern, Train};
use perilune_tokenizer::{Config, Encode, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;

fn open(json: &str) -> perilune_data::Result<Tokenizer> {
    Tokenizer::from_json(Path::new("tokenizer.json"), json.as_bytes(), Config::default())
}

#[test]
fn unknown_parts_are_named() {
    let base: Value = serde_json::from_str(&trained(&Train::new(Model::Bpe, 300)).tokenizer).expect("JSON");
    let sequence = json!({ "type": "Sequence", "normalizers": [{ "type": "NFC" }, { "type": "Backwards" }] });
    let mut deep = json!({ "type": "NFC" });
    for _ in 0..20 {
        deep = json!({ "type": "Sequence", "normalizers": [deep] });
    }
    let template = json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }], "pair": [], "special_tokens": {} });
    let second = json!({ "type": "TemplateProcessing", "single": [{ "Sequence": { "id": "B", "type_id": 0 } }], "pair": [], "special_tokens": {} });
    let edits: [(&str, Value, &str); 18] = [
        ("/post_processor", second, "post-processor: TemplateProcessing has a second text"),
        (
            "/post_processor",
            template,
            "post-processor: TemplateProcessing adds '<s>', which is not among its special_tokens",
        ),
        ("/normalizer", json!({ "type": "Backwards" }), "normaliser: type 'Backwards' is not known; known are Bert"),
        ("/normalizer", sequence, "normaliser: type 'Backwards' is not known"),
        ("/normalizer", deep, "more than 8 sequences"),
        ("/normalizer", json!(3), "normaliser: is '3', not an object with a type"),
        ("/normalizer", json!({ "type": "Replace" }), "tokenizer: "),
        ("/pre_tokenizer", json!({ "type": "Syllables" }), "pre-tokenizer: type 'Syllables' is not known"),
        ("/pre_tokenizer", json!({ "type": "FixedLength", "length": 0 }), "the length 0"),
        ("/pre_tokenizer/type", json!("\u{1b}[2J"), "pre-tokenizer: type '\\u{1b}[2J' is not known"),
        ("/post_processor", json!({ "type": "Reverse" }), "post-processor: type 'Reverse' is not known"),
        ("/decoder", json!({ "type": "Morse" }), "decoder: type 'Morse' is not known"),
        (
            "/model/type",
            json!("Markov"),
            "model: type 'Markov' is not known; the models are BPE, WordPiece, WordLevel, Unigram",
        ),
        ("/model/dropout", json!(0.1), "model: dropout: merges would be dropped at random"),
        ("/model/merges", json!([["a", "zzzz"]]), "model: merge 0: 'zzzz' is not in the vocabulary"),
        ("/model/merges", json!(["a b c d"]), "model: merge 0: "),
        ("/model", json!(null), "model: is missing"),
        ("/added_tokens/0/id", json!(77), "has the id 77"),
    ];
    for (place, value, message) in edits {
        let mut edited = base.clone();
        *edited.pointer_mut(place).expect(place) = value;
        let error = open(&edited.to_string()).expect_err(message).to_string();
        assert!(error.starts_with("tokenizer.json: ") && error.contains(message), "{place}: {error}");
    }
    for (text, message) in [
        ("", "is not JSON"),
        ("[]", "is not an object"),
        ("{}", "model: is missing"),
        (&"[".repeat(100_000), "is not JSON"),
    ] {
        assert!(open(text).expect_err(message).to_string().contains(message));
    }
}

/// Of a key that a file has twice the last counts: what is checked is what the crate gets.
#[test]
fn the_last_of_doubled_keys_is_checked_and_used() {
    let text = trained(&Train::new(Model::Bpe, 300)).tokenizer;
    let own = "\"normalizer\": null";
    assert_eq!(text.matches(own).count(), 1);
    let doubled =
        |first: &str, last: &str| text.replace(own, &format!("\"normalizer\": {first}, \"normalizer\": {last}"));
    let unknown = "{ \"type\": \"Backwards\" }";
    open(&doubled(unknown, "null")).expect("opened");
    let e = open(&doubled("null", unknown)).map(|_| ()).expect_err("refused").to_string();
    assert!(e.contains("normaliser: type 'Backwards' is not known"), "{e}");
}

#[test]
fn files_are_opened_by_the_policy() {
    let dir = tempfile::tempdir().expect("a folder");
    let json = trained(&Train::new(Model::Bpe, 300)).tokenizer;
    std::fs::create_dir(dir.path().join("tok")).expect("made");
    std::fs::write(dir.path().join("tok/tokenizer.json"), &json).expect("written");
    let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "chat_template": [{ "name": "default", "template": "old" }] });
    std::fs::write(dir.path().join("tok/tokenizer_config.json"), config.to_string()).expect("written");
    std::fs::write(dir.path().join("tok/chat_template.jinja"), "new").expect("written");
    let policy = Policy::builder().allow_read(dir.path()).expect("a root").build();
    let mut seen = Vec::new();
    let mut observe = |f: &perilune_policy::Opened| seen.push(f.path().file_name().expect("a name").to_owned());
    let found = Tokenizer::open(&*policy, &dir.path().join("tok"), &mut observe).expect("opened");
    assert_eq!(
        (found.config().bos_token.as_deref(), found.config().chat_template.as_deref()),
        (Some("<s>"), Some("new"))
    );
    assert_eq!(seen.len(), 3);
    assert!(Tokenizer::open(&*Policy::closed(), &dir.path().join("tok"), &mut |_| ()).is_err());
    for bad in ["3", "{\"eos_token\": 3}", "{\"chat_template\": [3]}", "{\"bos_token\": {}}"] {
        std::fs::write(dir.path().join("tok/tokenizer_config.json"), bad).expect("written");
        let error = Tokenizer::open(&*policy, &dir.path().join("tok"), &mut |_| ()).expect_err(bad).to_string();
        assert!(error.contains("tokenizer_config.json: "), "{error}");
    }
}

/// Replaces or removes a random part of a value.
fn mutate(value: &mut Value, random: &mut Random) {
    let odd = [
        json!(null),
        json!(-1),
        json!(0),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("▁"),
        json!([]),
        json!({}),
        json!(true),
        json!("a\u{0}b"),
    ];
    match value {
        Value::Array(list) if !list.is_empty() && random.below(5) > 0 => {
            let k = random.below(list.len());
            match random.below(6) {
                0 => {
                    list.remove(k);
                }
                1 => list.push(list[k].clone()),
                _ => mutate(&mut list[k], random),
            }
        }
        Value::Object(map) if !map.is_empty() && random.below(6) > 0 => {
            let key = map.keys().nth(random.below(map.len())).expect("a key").clone();
            match random.below(8) {
                0 => {
                    map.remove(&key);
                }
                1 => {
                    let value = map.remove(&key).unwrap_or_default();
                    map.insert(format!("{key}x"), value);
                }
                _ => mutate(&mut map[&key], random),
            }
        }
        other => *other = odd[random.below(odd.len())].clone(),
    }
}

#[test]
fn mutated_files_are_refused_or_work() {
    let bases = [(Model::Bpe, Pattern::Llama3), (Model::WordPiece, Pattern::Gpt2), (Model::Unigram, Pattern::Gpt2)]
        .map(|(model, pattern)| {
            let text = trained(&Train { pattern, ..Train::new(model, 320) }).tokenizer;
            serde_json::from_str::<Value>(&text).expect("JSON")
        });
    // A panic inside the library is caught and becomes an error; here it is a failure of the test.
    static PANICS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        before(info);
    }));
    let mut random = Random(3);
    let (mut worked, mut refused) = (0, 0);
    for round in 0..count() {
        let mut json = bases[round as usize % 3].clone();
        for _ in 0..1 + random.below(3) {
            mutate(&mut json, &mut random);
        }
        let Ok(tokenizer) = open(&json.to_string()) else {
            refused += 1;
            continue;
        };
        worked += 1;
        for text in ["", "Alice was beginning 漢字 12345\r\n  ", "<|endoftext|>[SEP]</s>"] {
            for parse_specials in [false, true] {
                if let Ok(made) = tokenizer.encode_spans(text, Encode { parse_specials, add_specials: parse_specials })
                {
                    assert!(made.spans.iter().all(|s| text.get(s.clone()).is_some()), "{made:?}");
                    let _ = tokenizer.decode(&made.ids, true);
                }
            }
        }
    }
    assert!(worked > 20 && refused > 20, "{worked} worked, {refused} were refused");
    assert_eq!(PANICS.load(std::sync::atomic::Ordering::Relaxed), 0);
}

/// Templates of random tags, brackets and names end with a text or an error.
#[test]
fn random_templates_end() {
    const PARTS: [&str; 30] = [
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "#}",
        " for m in messages ",
        " endfor ",
        " if ",
        " m ",
        " endif ",
        " generation ",
        " endgeneration ",
        "-",
        "+",
        "'",
        "\"",
        "\n",
        " raw ",
        " endraw ",
        " set x = ",
        " m.content ",
        "|tojson",
        "[0]",
        " messages ",
        " ~ ",
        "(",
        ")",
        "é",
        " loop.first ",
    ];
    let tokenizer = Tokenizer::bytes();
    let messages = [json!({ "role": "user", "content": "a" }), json!({ "role": "assistant", "content": "b" })];
    let mut random = Random(4);
    let mut parsed = 0;
    for _ in 0..20 * count() {
        let source: String = (0..random.below(14)).map(|_| PARTS[random.below(PARTS.len())]).collect();
        if let Ok(template) = ChatTemplate::parse(&source) {
            parsed += 1;
            let _ = chat::encode(&tokenizer, &template, &messages, &Chat::default());
        }
    }
    assert!(parsed > 100, "{parsed}");
}
