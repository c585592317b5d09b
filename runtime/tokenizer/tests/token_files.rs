//! Tests token files: contents, masks, hashes, and that an interrupted job ends with the files of one that was not.

mod common;

use common::{BOOK, load, trained};
use perilune_data::tokens::{Tokens, manifest::Manifest};
use perilune_data::{Error, Result};
use perilune_policy::{Directory, Policy};
use perilune_tokenizer::chat::{Chat, ChatTemplate};
use perilune_tokenizer::inputs::{Content, Document, Inputs};
use perilune_tokenizer::token_files::{Job, write};
use perilune_tokenizer::train::{Model, Train};
use perilune_tokenizer::{Encode, Tokenizer};
use serde_json::json;
use std::path::Path;

fn tokenizer() -> Tokenizer {
    load(&trained(&Train::new(Model::Bpe, 400)).tokenizer)
}

fn texts() -> Vec<Document> {
    let texts = BOOK.split("\n\n").filter(|t| !t.is_empty());
    texts.map(|t| Document { content: Content::Text(t.into()), path: Path::new("book").into(), line: None }).collect()
}

fn job(tokenizer: &Tokenizer) -> Job<'_> {
    Job { tokenizer, encode: Encode::default(), eot: Some(0), chat: None, shard_tokens: 10_000, inputs: "book".into() }
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .expect("a folder")
        .map(|e| e.expect("an entry"))
        .map(|e| (e.file_name().to_string_lossy().into_owned(), std::fs::read(e.path()).expect("read")))
        .collect();
    all.sort();
    all
}

#[test]
fn files_hold_the_ids_of_all_documents_in_order() {
    let (tokenizer, dir) = (tokenizer(), tempfile::tempdir().expect("a folder"));
    let directory = Directory::open(dir.path()).expect("opened");
    let mut last = Default::default();
    let made = write(&directory, &job(&tokenizer), texts().into_iter().map(Ok), &mut |p| last = p).expect("written");
    assert!(made.shards.len() > 3 && made.dtype == "u16" && made.vocabulary == 400, "{made:?}");
    let mut wanted = Vec::new();
    for document in texts() {
        let Content::Text(text) = &document.content else { panic!("a text") };
        tokenizer.encode_into(text, Encode::default(), &mut wanted).expect("encoded");
        wanted.push(0);
    }
    assert_eq!((last.tokens, last.documents), (wanted.len() as u64, texts().len() as u64));
    let policy = Policy::builder().allow_read(dir.path()).expect("a root").build();
    let path = dir.path().join("manifest.json");
    let tokens = Tokens::open(policy, std::slice::from_ref(&path), &mut |_| ()).expect("opened");
    let mut bytes = Vec::new();
    tokens.read(0..tokens.len(), &mut bytes).expect("read");
    let found: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert!(found == wanted);
    // The manifest that is read is the one that was made; hashes and document starts are those of the files.
    let read = Manifest::read(perilune_policy::open_named(&path).expect("opened")).expect("read");
    assert_eq!(read, made);
    for shard in &made.shards {
        let ids = std::fs::read(dir.path().join(&shard.file)).expect("read");
        assert_eq!(blake3::hash(&ids).to_hex().to_string(), shard.blake3);
        let starts = std::fs::read(dir.path().join(shard.file.replace(".bin", ".doc"))).expect("read");
        assert_eq!(starts.len() as u64, 8 * shard.documents);
        for start in starts.chunks_exact(8).skip(1) {
            let at = u64::from_le_bytes(start.try_into().expect("8 bytes")) as usize;
            assert_eq!(ids[2 * at - 2..2 * at], [0, 0], "the token before a document ends one");
        }
    }
}

#[test]
fn an_interrupted_job_goes_on_behind_its_last_shard() {
    let (tokenizer, whole) = (tokenizer(), tempfile::tempdir().expect("a folder"));
    let directory = Directory::open(whole.path()).expect("opened");
    write(&directory, &job(&tokenizer), texts().into_iter().map(Ok), &mut |_| ()).expect("written");
    let parts = tempfile::tempdir().expect("a folder");
    let directory = Directory::open(parts.path()).expect("opened");
    let count = texts().len();
    for stop in [count / 3, count / 3 + 1, 2 * count / 3] {
        let broken = texts().into_iter().take(stop).map(Ok).chain([Err(Error::argument("the power", "is gone"))]);
        // Batches are small enough to write shards before the end only if documents come one by one.
        let slow = broken.flat_map(|d| [d].into_iter());
        let error = write(&directory, &job(&tokenizer), slow, &mut |_| ()).expect_err("broken").to_string();
        assert!(error.contains("the power"), "{error}");
        assert!(!parts.path().join("manifest.json").exists());
    }
    let mut first = None;
    let made = write(&directory, &job(&tokenizer), texts().into_iter().map(Ok), &mut |p| {
        first.get_or_insert(p);
    });
    made.expect("written");
    assert_eq!(files(whole.path()), files(parts.path()));
    // Other inputs begin anew.
    let other = Job { inputs: "another".into(), ..job(&tokenizer) };
    write(&directory, &other, texts().into_iter().take(3).map(Ok), &mut |_| ()).expect("written");
    let made = Manifest::read(perilune_policy::open_named(&parts.path().join("manifest.json")).expect("opened"))
        .expect("read");
    assert_eq!((made.shards.len(), made.shards[0].documents), (1, 3));
}

/// A job that failed after its first shard goes on there, and not at the beginning.
#[test]
fn finished_shards_are_not_encoded_again() {
    let (tokenizer, dir) = (tokenizer(), tempfile::tempdir().expect("a folder"));
    let directory = Directory::open(dir.path()).expect("opened");
    // More than a batch, so that shards are written before the failure is seen.
    let many = || (0..60).flat_map(|_| texts());
    let job = Job { shard_tokens: 200_000, ..job(&tokenizer) };
    let broken = many().map(Ok).chain([Err(Error::argument("the power", "is gone"))]);
    assert!(write(&directory, &job, broken, &mut |_| ()).is_err());
    let done = files(dir.path()).iter().filter(|f| f.0.ends_with(".bin")).count();
    assert!(done > 2, "{done} shards");
    let mut first = None;
    write(&directory, &job, many().map(Ok), &mut |p| {
        first.get_or_insert(p);
    })
    .expect("written");
    assert!(first.expect("progress").tokens >= 2 * 200_000);
    let again = tempfile::tempdir().expect("a folder");
    let directory = Directory::open(again.path()).expect("opened");
    write(&directory, &job, many().map(Ok), &mut |_| ()).expect("written");
    assert_eq!(files(dir.path()), files(again.path()));
}

#[test]
fn conversations_have_a_mask() {
    let (tokenizer, dir) = (tokenizer(), tempfile::tempdir().expect("a folder"));
    let source = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}";
    let template = ChatTemplate::parse(source).expect("a template");
    std::fs::write(dir.path().join("a.jsonl"), concat!(
        "{\"chat\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Ho!\"}]}\n\n",
        "{\"chat\": \"a text\"}\n",
    )).expect("written");
    let inputs = |name: &str, field: &str| -> Result<Inputs> {
        Inputs::new(vec![perilune_policy::open_named(&dir.path().join(name)).expect("opened")], Some(field.into()))
    };
    let out = tempfile::tempdir().expect("a folder");
    let directory = Directory::open(out.path()).expect("opened");
    let job = Job { chat: Some((&template, Chat::default())), eot: None, ..job(&tokenizer) };
    let made = write(&directory, &job, inputs("a.jsonl", "chat").expect("inputs"), &mut |_| ()).expect("written");
    assert!(made.mask && made.template.is_some());
    let ids = std::fs::read(out.path().join("tokens-00000.bin")).expect("read");
    let ids: Vec<u32> = ids.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
    let mask = std::fs::read(out.path().join("tokens-00000.mask")).expect("read");
    let trained = |k: &usize| mask[k / 8] >> (k % 8) & 1 == 1;
    let shown: Vec<u32> = (0..ids.len()).filter(trained).map(|k| ids[k]).collect();
    let text = tokenizer.decode(&shown, false).expect("decoded");
    // The second document is a plain text: all but its first token.
    let first = tokenizer.encode("a text", Encode::default()).expect("encoded");
    assert_eq!(text, format!("Ho!{}", tokenizer.decode(&first[1..], false).expect("decoded")));

    std::fs::write(dir.path().join("bad.jsonl"), "{\"chat\": \"fine\"}\n{\"chat\": 3}\n").expect("written");
    let error = write(&directory, &job, inputs("bad.jsonl", "chat").expect("inputs"), &mut |_| ())
        .expect_err("bad")
        .to_string();
    assert!(error.contains("bad.jsonl:2: field 'chat' is neither a text nor a list of messages"), "{error}");
    let error =
        write(&directory, &job, inputs("a.jsonl", "text").expect("inputs"), &mut |_| ()).expect_err("bad").to_string();
    assert!(error.contains("a.jsonl:1: has no field 'text' (fields: chat)"), "{error}");
    let only_user = json!({ "chat": [{ "role": "user", "content": "x" }] });
    std::fs::write(dir.path().join("user.jsonl"), only_user.to_string()).expect("written");
    let error = write(&directory, &job, inputs("user.jsonl", "chat").expect("inputs"), &mut |_| ())
        .expect_err("bad")
        .to_string();
    assert!(error.contains("user.jsonl:1: the messages: have no turn") && error.contains("hint: train_on"), "{error}");
}
