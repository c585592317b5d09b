//! Fuzzes the reader with a hundred thousand damaged checkpoints. Each is read or refused; none makes the reader panic or
//! allocate more memory than the file's size justifies. The hashes in `run.json` are recomputed each time, as an attacker
//! would do, so that the test covers the reader and not BLAKE3.
#![allow(clippy::unwrap_used)]

use perilune_checkpoint::{Snapshot, read, write};
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// SplitMix64: the same files in every run.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

fn snapshot() -> Snapshot {
    let make = |d: DType, dims: &[usize]| {
        let n = dims.iter().product::<usize>();
        HostTensor::from_f64(d, Shape::of(dims), &vec![1.0; n])
    };
    let record = Map::from_iter([("cursor".to_string(), json!({ "index": 3 })), ("rng".into(), json!({ "seed": 1 }))]);
    Snapshot {
        step: 3,
        model: vec![
            ("0.weight".into(), make(DType::F32, &[4, 3])),
            ("0.bias".into(), make(DType::BF16, &[3])),
            ("1.mask".into(), make(DType::Bool, &[2, 2])),
        ],
        optimizer: vec![
            ("optim.adamw.m.0.weight".into(), make(DType::F32, &[4, 3])),
            ("n".into(), make(DType::I64, &[])),
        ],
        record,
    }
}

/// Numbers and words that break the format's rules.
const WORDS: [&str; 30] = [
    "0",
    "-1",
    "1",
    "7",
    "12",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "1e999",
    "null",
    "true",
    "[]",
    "{}",
    "[0,0]",
    "[48,0]",
    "[-1,4]",
    "[0,18446744073709551615]",
    "\"\"",
    "\"F32\"",
    "\"F4\"",
    "\"0.weight\"",
    "\"../x\"",
    "\"\\u0000\"",
    "\"__metadata__\"",
    "[[[[[[[[",
    "\"x\":",
    ",",
    "[99999999999,99999999999]",
    "[1,1,1,1,1,1,1,1,1]",
];

/// Truncates, flips, inserts and repeats raw bytes.
fn garble(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(6) {
            0 => bytes.truncate(at),
            1 if !bytes.is_empty() => bytes[at] = rng.next() as u8,
            2 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            3 => {
                let word = rng.pick(&WORDS).bytes().collect::<Vec<_>>();
                bytes.splice(at..at, word);
            }
            4 => {
                let piece = bytes[at..(at + rng.below(40)).min(bytes.len())].to_vec();
                let to = rng.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                bytes.drain(at..(at + rng.below(9)).min(bytes.len()));
            }
        }
    }
}

/// Replaces one value, key or element inside a JSON value.
fn twist(rng: &mut Rng, v: &mut Value) {
    match v {
        Value::Object(map) if !map.is_empty() && rng.below(4) > 0 => {
            let key = map.keys().nth(rng.below(map.len())).unwrap().clone();
            match rng.below(6) {
                0 => {
                    map.remove(&key);
                }
                1 => {
                    let value = map[&key].clone();
                    map.insert(rng.pick(&["", "../x", "0.weight", "a b", "files", "__metadata__"]).to_string(), value);
                }
                _ => twist(rng, map.get_mut(&key).unwrap()),
            }
        }
        Value::Array(list) if !list.is_empty() && rng.below(4) > 0 => {
            let at = rng.below(list.len());
            match rng.below(4) {
                0 => {
                    list.remove(at);
                }
                1 => {
                    let more = list[at].clone();
                    list.extend(std::iter::repeat_n(more, 1 + rng.below(100)));
                }
                _ => twist(rng, &mut list[at]),
            }
        }
        other => *other = serde_json::from_str(WORDS[rng.below(WORDS.len())]).unwrap_or(Value::Null),
    }
}

/// Damages the header of a safetensors file: it stays valid JSON, or its length is wrong.
fn twist_header(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    if rng.below(5) == 0 {
        let length = *rng.pick(&[0, 1, 7, n as u64 - 1, n as u64 + 1, 1 << 20, 1 << 40, u64::MAX, u64::MAX - 7]);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        return;
    }
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    for _ in 0..1 + rng.below(2) {
        twist(rng, &mut header);
    }
    let mut text = header.to_string();
    if rng.below(8) == 0 {
        // A duplicate key, which a JSON value cannot represent.
        let again = text[1..].to_string();
        text = format!("{},{again}", text.trim_end_matches('}'));
    }
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.bytes());
    out.extend(&bytes[8 + n..]);
    *bytes = out;
}

/// Returns a record's text with its correct hash, which is the last key.
fn seal(mut record: Value) -> String {
    if let Value::Object(map) = &mut record {
        map.shift_remove("blake3");
        map.insert("blake3".into(), "".into());
    }
    let mut text = record.to_string();
    if let Some(at) = text.rfind("\"\"") {
        let hash = blake3::hash(text.as_bytes()).to_hex();
        text.insert_str(at + 1, &hash);
    }
    text
}

fn sign(record: &mut Value, file: &str, bytes: &[u8]) {
    record["files"][file] = json!({ "bytes": bytes.len(), "blake3": blake3::hash(bytes).to_hex().as_str() });
}

/// Returns the peak memory of the process in bytes.
fn peak() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|l| l.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// Returns a temporary directory, in memory where possible, because the test does not depend on the disk.
fn directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir()
        && let Ok(dir) = tempfile::tempdir_in(memory)
    {
        return dir;
    }
    tempfile::tempdir().unwrap()
}

#[test]
fn a_hundred_thousand_damaged_checkpoints() {
    let dir = directory();
    let whole = |limit: u64, name: &str| -> (PathBuf, Vec<(String, Vec<u8>)>) {
        let path =
            write(&Directory::open(dir.path()).and_then(|d| d.make_directory(name)).unwrap(), &snapshot(), limit)
                .unwrap();
        let files = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut files: Vec<_> = files.map(|f| (f.clone(), std::fs::read(path.join(f)).unwrap())).collect();
        files.sort();
        (path, files)
    };
    let cases = [whole(1 << 30, "plain"), whole(16, "sharded")];
    let mut rng = Rng(20261122);
    let before = peak();
    let (mut refused, mut read_well) = (0u32, 0u32);
    for k in 0..100_000 {
        let (path, files) = &cases[k % 2];
        let (file, bytes) = rng.pick(files);
        let mut bad = bytes.clone();
        match (rng.below(2), file.ends_with(".json")) {
            (0, _) => garble(&mut rng, &mut bad),
            (_, true) => {
                let mut v: Value = serde_json::from_slice(&bad).unwrap();
                twist(&mut rng, &mut v);
                bad = if file == "run.json" { seal(v) } else { v.to_string() }.into_bytes();
            }
            (_, false) => twist_header(&mut rng, &mut bad),
        }
        std::fs::write(path.join(file), &bad).unwrap();
        let record = &files.iter().find(|f| f.0 == "run.json").unwrap().1;
        if file != "run.json" {
            let mut v: Value = serde_json::from_slice(record).unwrap();
            sign(&mut v, file, &bad);
            std::fs::write(path.join("run.json"), seal(v)).unwrap();
        }
        match read(path) {
            Err(e) => {
                refused += 1;
                let text = e.to_string();
                assert!(text.contains(path.to_str().unwrap()), "no file is named: {text}");
            }
            Ok(s) => {
                read_well += 1;
                let size: usize = s.model.iter().chain(&s.optimizer).map(|t| t.1.bytes.len()).sum();
                assert!(size < 4096, "{size} bytes from {} of a file", bad.len());
            }
        }
        std::fs::write(path.join(file), bytes).unwrap();
        std::fs::write(path.join("run.json"), record).unwrap();
    }
    assert!(refused > 60_000 && read_well > 1_000, "{refused} refused, {read_well} read");
    for (path, _) in &cases {
        assert_eq!(read(path).unwrap().step, 3);
    }
    if let (Some(before), Some(after)) = (before, peak()) {
        assert!(after - before < 64 << 20, "{} bytes more", after - before);
    }
}
