//! Compares every value of Parquet and Arrow files that pyarrow wrote with what pyarrow reads of them, and reads damaged files.
//! `tests/golden/records/make.py` writes the files.
#![allow(clippy::unwrap_used)]

use perilune_core::Interrupt;
use perilune_core::philox::philox4x32;
use perilune_data::records::{Arrow, Dataset, Opening, Parquet, Record, Value};
use perilune_policy::{Opener, Policy};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/records").canonicalize().unwrap()
}

fn policy(dir: &Path) -> Arc<dyn Opener> {
    Policy::builder().allow_read(dir).unwrap().build()
}

fn open_in(dir: &Path, names: &[&str], columns: Option<&[&str]>) -> perilune_data::Result<Arc<dyn Dataset>> {
    let paths: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
    let columns: Option<Vec<String>> = columns.map(|list| list.iter().map(|c| c.to_string()).collect());
    let (columns, interrupt) = (columns.as_deref(), Interrupt::default());
    let opening = Opening { opener: policy(dir), cache: None, interrupt: &interrupt, observe: &mut |_| {} };
    Ok(match names[0].ends_with(".parquet") {
        true => Arc::new(Parquet::open(&paths, columns, opening)?),
        false => Arc::new(Arrow::open(&paths, columns, opening)?),
    })
}

fn open(names: &[&str]) -> Arc<dyn Dataset> {
    open_in(&golden(), names, None).unwrap()
}

fn refused(dir: &Path, names: &[&str], columns: Option<&[&str]>) -> String {
    open_in(dir, names, columns).err().expect("refused").to_string()
}

/// Writes a value with the tags of `make.py`; floats by their bits.
fn tagged(value: &Value) -> serde_json::Value {
    use serde_json::json;
    match value {
        Value::Null => json!(null),
        Value::Bool(b) => json!(b),
        Value::Int(i) => json!({ "i": i.to_string() }),
        Value::Float(x) => json!({ "f": bits(*x) }),
        Value::Text(t) => json!({ "t": &**t }),
        Value::Bytes(b) => json!({ "y": b.iter().map(|b| format!("{b:02x}")).collect::<String>() }),
        Value::List(list) => list.iter().map(tagged).collect(),
        Value::Map(record) => {
            json!({ "m": record.fields.iter().map(|(n, v)| json!([&**n, tagged(v)])).collect::<Vec<_>>() })
        }
        Value::Array(_) => panic!("a reader makes no arrays"),
    }
}

fn bits(x: f64) -> String {
    if x.is_nan() { "nan".into() } else { format!("{:016x}", x.to_bits()) }
}

/// Parses the hexadecimal floats of Python: "-0x1.8p+3".
fn hex_float(text: &str) -> f64 {
    let (sign, rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let Some(digits) = rest.strip_prefix("0x") else { return sign * rest.parse::<f64>().unwrap() };
    let (mantissa, exponent) = digits.split_once('p').unwrap();
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let word = u64::from_str_radix(&format!("{whole}{fraction}"), 16).unwrap() as f64;
    let exponent = exponent.parse::<i32>().unwrap() - 4 * fraction.len() as i32;
    // Two steps, so that a subnormal number is not rounded to zero on the way.
    sign * word * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2)
}

fn with_bits(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::{Value, json};
    match value {
        Value::Object(map) if map.contains_key("f") => json!({ "f": bits(hex_float(map["f"].as_str().unwrap())) }),
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), with_bits(v))).collect(),
        Value::Array(list) => list.iter().map(with_bits).collect(),
        other => other.clone(),
    }
}

fn expected(name: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(golden().join(format!("{name}.jsonl"))).unwrap();
    text.lines().map(|line| with_bits(&serde_json::from_str(line).unwrap())).collect()
}

fn compare(name: &str, found: &dyn Dataset, expected: &[serde_json::Value]) {
    assert_eq!(found.len(), expected.len() as u64, "{name}");
    for (row, expected) in expected.iter().enumerate() {
        let record = found.get(row as u64).unwrap_or_else(|e| panic!("{name}: {e}"));
        for ((n, value), pair) in record.fields.iter().zip(expected["m"].as_array().unwrap()) {
            assert_eq!(serde_json::json!([&**n, tagged(value)]), *pair, "{name}, row {row}");
        }
        assert_eq!(record.fields.len(), expected["m"].as_array().unwrap().len(), "{name}");
    }
}

#[test]
fn values_are_those_of_pyarrow() {
    for (file, values) in [
        ("flat.parquet", "flat.parquet"),
        ("nested.parquet", "nested.parquet"),
        ("none.parquet", "codecs.parquet"),
        ("snappy.parquet", "codecs.parquet"),
        ("gzip.parquet", "codecs.parquet"),
        ("gzip_v2.parquet", "codecs.parquet"),
        ("zstd.parquet", "codecs.parquet"),
        ("lz4.parquet", "codecs.parquet"),
        ("encodings.parquet", "codecs.parquet"),
        ("int96.parquet", "int96.parquet"),
        ("flat_stream.arrow", "flat.arrow"),
        ("flat_file.arrow", "flat.arrow"),
        ("nested_lz4.arrow", "nested.arrow"),
        ("nested_zstd.arrow", "nested.arrow"),
        ("dictionaries.arrow", "dictionaries.arrow"),
    ] {
        compare(file, &*open(&[file]), &expected(values));
    }
}

#[test]
fn several_files_are_one_sequence() {
    for files in
        [["gzip.parquet", "empty.parquet", "lz4.parquet"], ["flat_file.arrow", "flat_stream.arrow", "flat_file.arrow"]]
    {
        let all = open(&files);
        let parts: Vec<_> = files.iter().map(|f| open(&[f])).collect();
        assert_eq!(all.len(), parts.iter().map(|p| p.len()).sum::<u64>());
        let mut row = 0;
        for (part, file) in parts.iter().zip(&files) {
            for k in 0..part.len() {
                assert_eq!(format!("{:?}", all.get(row).unwrap()), format!("{:?}", part.get(k).unwrap()));
                let origin = all.origins(row).unwrap().remove(0);
                assert!(origin.file.ends_with(file) && origin.row == k && origin.line.is_none());
                row += 1;
            }
        }
        assert_eq!(
            format!("{:?}", all.get(all.len() + 3).unwrap()),
            format!("{:?}", all.get(3).unwrap()),
            "the next epoch"
        );
    }
    for name in ["empty.parquet", "empty.arrow"] {
        assert!(open(&[name]).is_empty());
        assert!(open(&[name]).get_many(&[]).unwrap().is_empty());
    }
}

#[test]
fn many_records_are_those_of_single_reads() {
    for name in ["nested.parquet", "nested_zstd.arrow"] {
        let set = open(&[name]);
        let few = set.project(&["words".into(), "ints".into(), "absent".into()]).unwrap();
        for seed in 0..40 {
            let draw = |k: u32| u64::from(philox4x32([seed, k, 0, 0], [3, 0])[0]) % (3 * set.len());
            let indices: Vec<u64> = (0..seed % 30).map(draw).collect();
            let single: Vec<Record> = indices.iter().map(|k| set.get(*k).unwrap()).collect();
            // By their text, since NaN differs from itself.
            assert_eq!(format!("{:?}", set.get_many(&indices).unwrap()), format!("{single:?}"));
            for (small, whole) in few.get_many(&indices).unwrap().iter().zip(&single) {
                assert_eq!(small.names().collect::<Vec<_>>(), ["ints", "words"]);
                assert!(small.fields.iter().all(|(n, v)| whole.get(n) == Some(v)));
            }
        }
    }
}

#[test]
fn columns_are_chosen_by_name() {
    for name in ["zstd.parquet", "flat_stream.arrow"] {
        let pair = if name == "zstd.parquet" { ["score", "id"] } else { ["f64", "i8"] };
        let set = open_in(&golden(), &[name], Some(&pair)).unwrap();
        assert_eq!(set.get(7).unwrap().names().collect::<Vec<_>>(), pair);
        assert_ne!(set.fingerprint(), open(&[name]).fingerprint());
        assert_eq!(set.fingerprint(), open_in(&golden(), &[name], Some(&pair)).unwrap().fingerprint());
        let e = refused(&golden(), &[name], Some(&["f65", "scor"]));
        assert!(e.contains(name) && e.contains("has no column 'f65'") && e.contains("hint: "), "{e}");
    }
    assert!(refused(&golden(), &["zstd.parquet"], Some(&["scor"])).contains("did you mean 'score'?"));
    let e = refused(&golden(), &["zstd.parquet", "int96.parquet"], None);
    assert!(e.contains("int96.parquet: schema: has no column 'id', as ") && e.contains("columns = "), "{e}");
    assert_eq!(open_in(&golden(), &["zstd.parquet", "int96.parquet"], Some(&["text"])).unwrap().len(), 204);
    let e = open(&["brotli.parquet"]).get(0).unwrap_err().to_string();
    assert!(e.contains("brotli.parquet: row group 0, column 'id'") && e.to_lowercase().contains("brotli"), "{e}");
}

#[test]
fn other_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    for (name, bytes, part) in [
        ("a.parquet", &b""[..], "has 0 bytes, too few"),
        ("a.parquet", b"{\"a\": 1}\n{\"a\": 2}\n", "does not end with PAR1"),
        ("a.parquet", b"PAR1aaaaaaaaaaaa\xFF\xFF\xFF\x7FPAR1", "has a footer of 2147483647 bytes"),
        ("a.parquet", b"PAR1aaaaaaaaaaaa\x04\x00\x00\x00PARE", "is encrypted"),
        ("a.parquet", b"PAR1aaaaaaaaaaaa\x04\x00\x00\x00PAR1", "footer: cannot be decoded"),
        ("a.arrow", b"", "the file is empty"),
        ("a.arrow", b"{\"a\": 1}\n{\"a\": 2}\n", "is no Arrow file or stream\n  hint: it begins with '{\"a\": 1}'"),
        ("a.arrow", b"ARROW1\0\0", "ends before its footer"),
        ("a.arrow", b"ARROW1\0\0aaaaaaaaaaaaaaaaaaaaaaaa", "does not end with ARROW1"),
        ("a.arrow", b"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7Faaaa", "is no Arrow file or stream"),
        ("a.arrow", b"\x08\x00\x00\x00aaaaaaaa", "is no Arrow file or stream"),
    ] {
        write(name, bytes);
        let e = refused(dir.path(), &[name], None);
        assert!(e.contains(name) && e.contains(part), "{part}: {e}");
    }
    assert!(refused(dir.path(), &["b.parquet"], None).contains("b.parquet"));
    std::fs::create_dir(dir.path().join("c.arrow")).unwrap();
    assert!(refused(dir.path(), &["c.arrow"], None).contains("a directory"));
}

/// `PERILUNE_FUZZ_COUNT` sets the number of files of each kind.
#[test]
fn damaged_files_are_read_or_refused() {
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(120u32);
    let panics = Arc::new(AtomicUsize::new(0));
    let counted = panics.clone();
    std::panic::set_hook(Box::new(move |info| {
        if counted.fetch_add(1, Ordering::Relaxed) < 10 {
            eprintln!("{info}");
        }
    }));
    let (mut read, mut refused) = (0u64, 0u64);
    for name in [
        "flat.parquet",
        "nested.parquet",
        "snappy.parquet",
        "lz4.parquet",
        "encodings.parquet",
        "gzip.parquet",
        "gzip_v2.parquet",
        "flat_stream.arrow",
        "flat_file.arrow",
        "nested_lz4.arrow",
        "nested_zstd.arrow",
        "dictionaries.arrow",
    ] {
        let good = std::fs::read(golden().join(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for seed in 0..count {
            let bytes = damaged(&good, seed);
            // Truncating a file in place would wait for the disk.
            let _ = std::fs::remove_file(dir.path().join(name));
            std::fs::write(dir.path().join(name), &bytes).unwrap();
            let Ok(set) = open_in(dir.path(), &[name], None) else {
                refused += 1;
                continue;
            };
            // A hostile count of rows is bounded by the reader, not by the test.
            for k in 0..set.len().min(40) {
                match set.get(k) {
                    Ok(_) => read += 1,
                    Err(e) => {
                        refused += 1;
                        assert!(e.to_string().contains(name), "{e}");
                    }
                }
            }
        }
    }
    let _ = std::panic::take_hook();
    eprintln!("{} panics inside the decoders", panics.load(Ordering::Relaxed));
    assert!(read > u64::from(count) && refused > u64::from(count), "{read} read, {refused} refused");
}

/// Flips bytes, sets words to extreme numbers, cuts and doubles ranges; more often at the ends, where headers and footers are.
fn damaged(good: &[u8], seed: u32) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for k in 0..=seed % 4 {
        let [at, what, byte, near] = philox4x32([seed, k, 0, 0], [11, 0]);
        let span = if near % 3 == 0 { bytes.len() } else { bytes.len().min(2_000) };
        let at = at as usize % span.max(1);
        let at = if near % 3 == 1 { bytes.len().saturating_sub(at + 1) } else { at };
        match what % 8 {
            0..=3 if at < bytes.len() => bytes[at] = byte as u8,
            4 if at + 8 <= bytes.len() => {
                let word = [u64::MAX, 1 << 31, 1 << 62, i64::MAX as u64, 0xFFFF_FFFF, 1 << 40][byte as usize % 6];
                bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
            5 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
            6 => bytes.truncate(at),
            _ => bytes.extend_from_within(..at.min(bytes.len())),
        }
    }
    bytes
}
