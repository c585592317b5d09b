//! Measures the speed of encoding for `tests/bench/tokens.py`: reads a tokenizer.json and a file with a JSON text a line, encodes all
//! texts several times on one thread and on all, and prints the best seconds and a hash of the ids as JSON.

use perilune_tokenizer::{Config, Encode, Tokenizer};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::path::Path;
use std::time::Instant;

fn best(rounds: usize, mut f: impl FnMut() -> Vec<Vec<u32>>) -> (f64, Vec<Vec<u32>>) {
    let (mut least, mut last) = (f64::INFINITY, Vec::new());
    for _ in 0..rounds {
        let start = Instant::now();
        last = f();
        least = least.min(start.elapsed().as_secs_f64());
    }
    (least, last)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [vocabulary, texts, rounds] = args.as_slice() else { return Err("encode_speed TOKENIZER TEXTS ROUNDS".into()) };
    let start = Instant::now();
    let tokenizer = Tokenizer::from_json(Path::new(vocabulary), &std::fs::read(vocabulary)?, Config::default())?;
    let load = start.elapsed().as_secs_f64();
    let file = std::fs::read_to_string(texts)?;
    let texts = file.lines().map(serde_json::from_str).collect::<Result<Vec<String>, _>>()?;
    let encode = |text: &String| tokenizer.encode(text, Encode::default()).unwrap_or_default();
    let (one, ids) = best(rounds.parse()?, || texts.iter().map(encode).collect());
    let (all, _) = best(rounds.parse()?, || texts.par_iter().map(encode).collect());
    let mut hash = blake3::Hasher::new();
    ids.iter().flatten().for_each(|id| {
        hash.update(&id.to_le_bytes());
    });
    let bytes: usize = texts.iter().map(String::len).sum();
    let tokens: usize = ids.iter().map(Vec::len).sum();
    println!(
        "{}",
        serde_json::json!({
            "fast": tokenizer.is_fast(), "load": load, "one": one, "all": all, "threads": rayon::current_num_threads(), "bytes": bytes,
            "tokens": tokens, "ids": hash.finalize().to_hex().to_string(),
        })
    );
    Ok(())
}
