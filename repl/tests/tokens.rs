//! Tests `perilune tokens`: a vocabulary, token files that a recipe reads, an encoded conversation, wrong usage.

#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, place};

const BOOK: &str = include_str!("../../recipes/data/alice.txt");

fn trained() -> Place {
    let p = place();
    p.file("book.txt", BOOK);
    let records: Vec<String> =
        BOOK.split("\n\n").map(|text| serde_json::json!({ "id": 1, "text": text }).to_string()).collect();
    p.file("book.jsonl", records.join("\n"));
    let r = p.run(&[
        "tokens",
        "train",
        "book.txt",
        "-o",
        "tok",
        "--vocab",
        "500",
        "--special",
        "<eot>",
        "--special",
        "<|im_end|>",
    ]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    assert!(r.out.contains("tok/tokenizer.json: 500 tokens from"), "{}", r.out);
    p
}

#[test]
fn a_corpus_is_encoded_and_read() {
    let p = trained();
    let encode = [
        "tokens",
        "encode",
        "book.jsonl",
        "--field",
        "text",
        "--tokenizer",
        "tok",
        "-o",
        "out",
        "--shard-tokens",
        "20000",
    ];
    let r = p.run(&encode);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    assert!(r.out.contains("out/manifest.json: ") && r.out.contains(" shards of u16"), "{}", r.out);
    let manifest: serde_json::Value = serde_json::from_str(&p.read("out/manifest.json")).unwrap();
    assert_eq!((manifest["dtype"].as_str(), manifest["eot"].as_u64()), (Some("u16"), Some(0)));
    let tokens: u64 = manifest["shards"].as_array().unwrap().iter().map(|s| s["tokens"].as_u64().unwrap()).sum();
    let first = BOOK.split("\n\n").next().unwrap();
    p.file(
        "read.lua",
        format!(
            r#"
        local pl = require "perilune"
        local tok = pl.data.tokenizer "tok"
        local text = pl.data.token_files "out/manifest.json"
        assert(text:size() == {tokens})
        assert(pl.data.tokens("out/manifest.json"):size(0) == {tokens})
        local ids = tok:encode([==[
{first}]==])
        assert(tok:decode(text:ids(0, #ids)) == tok:decode(ids))
        assert(text:ids(#ids, 1):item() == tok:id "<eot>")
        print("read")
    "#
        ),
    );
    let r = p.run(&["run", "read.lua"]);
    assert_eq!((r.status, r.out.trim()), (Some(0), "read"), "{}", r.err);
    // The same job again changes nothing, and --json has events.
    let before = p.read("out/manifest.json");
    let r = p.run(&[&encode[..], &["--json"]].concat());
    assert_eq!(p.read("out/manifest.json"), before);
    let events = r.events();
    let last = events.last().unwrap();
    assert_eq!((last["event"].as_str(), last["tokens"].as_u64()), (Some("encoded"), Some(tokens)));
}

#[test]
fn conversations_are_encoded_by_the_template() {
    let p = trained();
    p.file("tok/chat_template.jinja", "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}");
    let record = serde_json::json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" }] });
    p.file("chat.jsonl", format!("{record}\n{record}\n"));
    let r = p.run(&["tokens", "encode", "chat.jsonl", "--field", "messages", "--tokenizer", "tok", "-o", "out"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    let manifest: serde_json::Value = serde_json::from_str(&p.read("out/manifest.json")).unwrap();
    assert_eq!(manifest["mask"], true);
    assert!(manifest["template"].is_string());
    assert!(p.path("out/tokens-00000.mask").exists());
    // At the prompt, brackets enclose what is trained.
    let mut child = p.command(&["repl"]);
    child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = child.spawn().unwrap();
    let line = "tok = pl.data.tokenizer 'tok'; tok:chat { { role = 'user', content = 'Hi' }, { role = 'assistant', content = 'Ho' } }\n";
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), line.as_bytes()).unwrap();
    let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(out.contains("user\nHi⟨<|im_end|>⟩\nassistant\n[Ho⟨<|im_end|>⟩]\n"), "{out}");
}

#[test]
fn tokens_of_a_text_are_shown() {
    let p = trained();
    let r = p.run(&["tokens", "show", "tok", "Alice<eot>", "--parse-specials"]);
    assert!(r.out.contains("      0  \"<eot>\"\n") && r.out.contains("tokens of 10 bytes"), "{} {}", r.out, r.err);
    let r = p.run(&["tokens", "show", "tok/tokenizer.json", "é<eot>", "--json"]);
    let events = r.events();
    assert!(events.iter().all(|e| e["special"] == false), "{}", r.out);
    let ids: Vec<u64> = events.iter().map(|e| e["id"].as_u64().unwrap()).collect();
    assert!(ids.len() > 2 && !ids.contains(&0), "{ids:?}");
}

#[test]
fn wrong_usage_names_the_cure() {
    let p = trained();
    let says = |args: &[&str], message: &str| {
        let r = p.run(args);
        assert_eq!(r.status, Some(2), "{args:?}: {}{}", r.out, r.err);
        assert!(r.err.contains(message), "{args:?}: {}", r.err);
    };
    says(&["tokens", "train", "book.txt", "-o", "x", "--vocab", "500", "--model", "bep"], "Did you mean bpe?");
    says(&["tokens", "train", "book.txt", "-o", "x", "--vocab", "10"], "it is at least 257");
    says(&["tokens", "train", "book.jsonl", "-o", "x", "--vocab", "500"], "--field text names the field");
    says(&["tokens", "train", "none.txt", "-o", "x", "--vocab", "500"], "none.txt: cannot open");
    says(&["tokens", "encode", "book.txt", "--tokenizer", "none", "-o", "x"], "none: cannot open");
    says(&["tokens", "encode", "book.txt", "--tokenizer", ".", "-o", "x"], "has no tokenizer.json");
    says(
        &["tokens", "encode", "book.txt", "--tokenizer", "tok", "-o", "x", "--eot", "<end>"],
        "\"none\" leaves it out",
    );
    says(
        &["tokens", "encode", "book.jsonl", "--tokenizer", "tok", "-o", "x", "--field", "body"],
        "book.jsonl:1: has no field 'body'",
    );
    p.file("odd.json", r#"{"normalizer": {"type": "Backwards"}, "model": {"type": "BPE", "vocab": {}, "merges": []}}"#);
    says(&["tokens", "show", "odd.json", "x"], "normaliser: type 'Backwards' is not known");
}
