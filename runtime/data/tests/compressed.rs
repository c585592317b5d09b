//! Reads compressed files of records: the same values as of plain ones, the cache folder, limits, damaged streams.
#![allow(clippy::unwrap_used)]

use perilune_core::Interrupt;
use perilune_core::philox::philox4x32;
use perilune_data::records::{Dataset, JsonArray, LineFormat, Lines, Opening, Record, Table, TableFormat, Value};
use perilune_policy::Policy;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Lines of more than two frames, with blank ones.
fn long() -> Vec<u8> {
    let mut out = Vec::new();
    for k in 0u32..90_000 {
        let [a, b, c, d] = philox4x32([k, 0, 0, 0], [1, 0]);
        writeln!(out, "{{\"k\": {k}, \"t\": \"{a:08x}{b:08x}{c:08x}{}\"}}", "z".repeat(d as usize % 40)).unwrap();
        if k % 1000 == 0 {
            out.push(b'\n');
        }
    }
    assert!(out.len() > 5 << 20);
    out
}

fn gzip(text: &[u8]) -> Vec<u8> {
    // Two members, as `cat a.gz b.gz` makes them.
    let (a, b) = text.split_at(text.len() / 2);
    [a, b]
        .map(|part| {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            to.write_all(part).unwrap();
            to.finish().unwrap()
        })
        .concat()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(text, 1).unwrap()
}

fn open(path: &Path, cache: Option<&Path>) -> perilune_data::Result<Lines> {
    open_as(path, LineFormat::Json, cache)
}

fn open_as(path: &Path, format: LineFormat, cache: Option<&Path>) -> perilune_data::Result<Lines> {
    let policy = Policy::builder().allow_read(path.parent().unwrap()).unwrap().build();
    let interrupt = Interrupt::default();
    let cache = cache.map(PathBuf::from);
    Lines::open(
        &[path.to_path_buf()],
        format,
        Opening { opener: policy, cache, interrupt: &interrupt, observe: &mut |_| {} },
    )
}

fn cached(cache: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(cache.join("records")).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".lock") && !name.starts_with(".in-use-"));
    names.sort();
    names
}

#[test]
fn compressed_lines_are_those_of_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let text = long();
    std::fs::write(dir.path().join("a.jsonl"), &text).unwrap();
    let plain = open(&dir.path().join("a.jsonl"), None).unwrap();
    for (name, packed) in [("a.jsonl.gz", gzip(&text)), ("a.jsonl.zst", zstd(&text))] {
        let path = dir.path().join(name);
        std::fs::write(&path, &packed).unwrap();
        let folder = dir.path().join(format!("{name}.cache"));
        for cache in [None, Some(&*folder), Some(&*folder)] {
            let set = open(&path, cache).unwrap();
            assert_eq!((set.len(), set.fingerprint()), (plain.len(), plain.fingerprint()));
            let rows: Vec<u64> = (0..400).map(|k| u64::from(philox4x32([k, 1, 0, 0], [2, 0])[0]) % set.len()).collect();
            assert_eq!(set.get_many(&rows).unwrap(), plain.get_many(&rows).unwrap());
            assert_eq!(set.origins(50_000).unwrap()[0].line, plain.origins(50_000).unwrap()[0].line);
            assert!(set.origins(0).unwrap()[0].file.ends_with(name));
        }
        // One file for each content, named by the hash of the compressed file.
        assert_eq!(cached(&folder), [format!("{}.zst", blake3::hash(&packed).to_hex())]);
        assert!(
            zstd::stream::decode_all(&std::fs::read(folder.join("records").join(&cached(&folder)[0])).unwrap()[..])
                .unwrap()
                == text
        );
        // A cache file that was cut is made again.
        let file = folder.join("records").join(&cached(&folder)[0]);
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() - 3]).unwrap();
        assert_eq!(open(&path, Some(&folder)).unwrap().get(77).unwrap(), plain.get(77).unwrap());
        assert!(std::fs::read(&file).unwrap() == whole);
        // One with a wrong byte is found by its checksum when it is indexed.
        let mut bad = whole.clone();
        bad[1000] ^= 1;
        std::fs::write(&file, &bad).unwrap();
        let e = open(&path, Some(&folder)).err().unwrap().to_string();
        assert!(
            e.contains(name) && e.contains("in the cache folder is damaged") && e.contains("delete records/"),
            "{e}"
        );
    }
}

#[test]
fn a_folder_that_cannot_be_written_leaves_the_text_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.jsonl.gz"), gzip(b"{\"k\": 1}\n{\"k\": 2}\n")).unwrap();
    std::fs::write(dir.path().join("cache"), "a file, no folder").unwrap();
    let set = open(&dir.path().join("a.jsonl.gz"), Some(&dir.path().join("cache"))).unwrap();
    assert_eq!(set.get(1).unwrap().get("k"), Some(&Value::Int(2)));
}

#[test]
fn processes_share_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl.zst");
    std::fs::write(&path, zstd(&long())).unwrap();
    let cache = dir.path().join("cache");
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..6).map(|_| scope.spawn(|| open(&path, Some(&cache)).unwrap().get(89_999).unwrap())).collect();
        let found: Vec<Record> = all.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(found.iter().all(|r| r.get("k") == Some(&Value::Int(89_999))));
    });
    assert_eq!(cached(&cache).len(), 1);
}

#[test]
fn tables_and_arrays_may_be_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let (csv, json) = (dir.path().join("a.csv.gz"), dir.path().join("a.json.zst"));
    std::fs::write(&csv, gzip(b"a,b\n1,\"x\ny\"\n")).unwrap();
    std::fs::write(&json, zstd(b"{\"d\": [{\"a\": 1}]}")).unwrap();
    let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
    let interrupt = Interrupt::default();
    let (mut first, mut second) = (|_: &_| {}, |_: &_| {});
    let (one, two) = (policy.clone(), policy);
    let one = Opening { opener: one, cache: None, interrupt: &interrupt, observe: &mut first };
    let two = Opening { opener: two, cache: None, interrupt: &interrupt, observe: &mut second };
    let format = TableFormat { delimiter: b',', columns: None, types: vec![], skip_malformed: false };
    let table = Table::open(&[csv], format, one).unwrap();
    assert_eq!(table.get(0).unwrap().get("b"), Some(&Value::Text("x\ny".into())));
    let array = JsonArray::open(&[json], Some("d"), two).unwrap();
    assert_eq!(array.get(0).unwrap().get("a"), Some(&Value::Int(1)));
}

#[test]
fn bombs_and_other_formats_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bomb = vec![b' '; 80 << 20];
    for (name, bytes, part) in [
        ("a.gz", gzip(&bomb), "gzip stream: unpacks to more than 100 times its size (and more than 64 MiB)"),
        ("a.zst", zstd(&bomb), "zstd stream: unpacks to more than 100 times"),
        ("a.xz", b"\xFD7zXZ\0abc".to_vec(), "is compressed (xz)"),
        ("a.bz2", b"BZh91AY&SYabc".to_vec(), "is compressed (bzip2)"),
        ("a.zip", b"PK\x03\x04abcdefg".to_vec(), "is compressed (zip)"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let cache = dir.path().join("cache");
        let e = open(&path, Some(&cache)).err().unwrap().to_string();
        assert!(e.contains(name) && e.contains(part) && e.contains("hint"), "{part}: {e}");
        assert!(cached(&cache).is_empty());
    }
    // A frame whose window has more than 128 MiB.
    let mut wide = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    wide.window_log(28).unwrap();
    wide.write_all(b"{}\n").unwrap();
    std::fs::write(dir.path().join("w.zst"), wide.finish().unwrap()).unwrap();
    let e = open(&dir.path().join("w.zst"), None).err().unwrap().to_string();
    assert!(e.contains("w.zst: zstd stream, before byte ") && e.contains("is damaged ("), "{e}");
}

/// `PERILUNE_FUZZ_COUNT` sets the number of files of each kind.
#[test]
fn damaged_streams_are_read_or_refused() {
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000u32);
    let text: Vec<u8> =
        (0..400u32).flat_map(|k| format!("row {k} {:x}\n", philox4x32([k, 0, 0, 0], [4, 0])[0]).into_bytes()).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let (mut read, mut refused) = (0, 0);
    for good in [gzip(&text), zstd(&text)] {
        for end in (0..good.len()).step_by(97).skip(1) {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, &good[..end]).unwrap();
            if let Err(e) = open_as(&path, LineFormat::Text, None) {
                assert!(e.to_string().contains("ends early") || e.to_string().contains("damaged"), "{e}");
                refused += 1;
            }
        }
        for seed in 0..count {
            let mut bytes = good.clone();
            for k in 0..=seed % 3 {
                let [at, what, byte, near] = philox4x32([seed, k, 0, 0], [6, 0]);
                let at = at as usize % if near % 2 == 0 { bytes.len() } else { 24 }.max(1);
                match what % 3 {
                    0 => bytes[at] = byte as u8,
                    1 => bytes[at] ^= 1 << (byte % 8),
                    _ => bytes.extend_from_within(..at),
                }
            }
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, &bytes).unwrap();
            match open_as(&path, LineFormat::Text, None) {
                Ok(set) => {
                    read += 1;
                    (0..set.len().min(5)).for_each(|k| drop(set.get(k)));
                }
                Err(e) => {
                    assert!(e.to_string().contains(&*path.to_string_lossy()), "{e}");
                    refused += 1;
                }
            }
        }
    }
    assert!(read > 10 && refused > count / 2, "{read} read, {refused} refused");
}
