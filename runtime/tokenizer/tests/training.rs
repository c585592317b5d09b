//! Tests that training is deterministic and makes tokenizers that load and decode what they encoded.

mod common;

use common::{BOOK, load, trained};
use perilune_tokenizer::Encode;
use perilune_tokenizer::train::{Model, Train, train};

#[test]
fn the_same_texts_give_the_same_bytes() {
    for (name, model) in Model::ALL {
        let options = Train::new(model, 700);
        let first = trained(&options);
        // Another number of threads, and another order of the texts.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads");
        let texts: Vec<&str> = BOOK.split("\n\n").collect();
        let second =
            pool.install(|| train(texts.iter().rev().map(|t| Ok(t.to_string())), &options).expect("a vocabulary"));
        assert!(first == second, "{name}");
        let tokenizer = load(&first.tokenizer);
        assert!(tokenizer.size() <= 700 && tokenizer.size() > 300, "{name}: {}", tokenizer.size());
    }
}

/// Characters that occur once have the score of those that training prunes, which the crate numbers by a walk of a hash table.
#[test]
fn scores_of_pruned_characters_have_one_order() {
    let rare: String = ('\u{4e00}'..'\u{4e40}').collect();
    let texts: Vec<String> = BOOK.split("\n\n").map(String::from).chain([rare, "ab\u{3b1}ab\u{3b2}".into()]).collect();
    let options = Train::new(Model::Unigram, 300);
    let run = || train(texts.iter().map(|t| Ok(t.clone())), &options).expect("a vocabulary").tokenizer;
    let first = run();
    assert!((0..4).all(|_| run() == first));
}

#[test]
fn byte_pairs_decode_to_the_text() {
    let options = Train { specials: vec!["<eot>".into()], ..Train::new(Model::Bpe, 600) };
    let tokenizer = load(&trained(&options).tokenizer);
    assert_eq!((tokenizer.id("<eot>"), tokenizer.size()), (Some(0), 600));
    assert!(tokenizer.is_special(0) && !tokenizer.is_special(1));
    for text in ["", "Alice wondered.", "naïve 漢字 🙂\r\n\t x"] {
        let ids = tokenizer.encode(text, Encode::default()).expect("encoded");
        assert_eq!(tokenizer.decode(&ids, false).expect("decoded"), text);
    }
    // 600 ids compress the book well below a token a byte.
    let ids = tokenizer.encode(BOOK, Encode::default()).expect("encoded");
    assert!(ids.len() * 2 < BOOK.len(), "{} of {}", ids.len(), BOOK.len());
}

#[test]
fn what_cannot_be_trained_is_an_error() {
    let none = || std::iter::empty::<perilune_data::Result<String>>();
    let message = |options: &Train| train(none(), options).expect_err("refused").to_string();
    assert!(message(&Train::new(Model::Bpe, 256)).contains("at least 257"));
    assert!(message(&Train::new(Model::Unigram, 3)).contains("at least 5"));
    assert!(message(&Train::new(Model::Bpe, 1000)).contains("have no words"));
    let doubled = Train { specials: vec!["<a>".into(), "<a>".into()], ..Train::new(Model::Bpe, 1000) };
    assert!(message(&doubled).contains("doubled"));
    let texts = [Ok("one".to_string()), Err(perilune_data::Error::argument("line 2", "is bad"))];
    let error = train(texts.into_iter(), &Train::new(Model::Bpe, 300)).expect_err("a bad text").to_string();
    assert!(error.contains("line 2: is bad"), "{error}");
    for (model, vocabulary) in [(Model::WordPiece, 20), (Model::Unigram, 20)] {
        let texts = common::BOOK.lines().map(|l| Ok(l.to_string()));
        let error = train(texts, &Train::new(model, vocabulary)).expect_err("too small").to_string();
        assert!(error.contains("training: "), "{error}");
    }
}
