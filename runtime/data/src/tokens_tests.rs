use super::*;
use crate::source::{Prefetcher, Samples, Source};
use perilune_policy::Policy;

const GPT2: (i32, i32) = (20_240_520, 1);
const LLAMA3: (i32, i32) = (20_240_801, 7);

fn le<T, const N: usize>(ids: &[T], bytes: fn(&T) -> [u8; N]) -> Vec<u8> {
    ids.iter().flat_map(bytes).collect()
}

fn headed((magic, version): (i32, i32), count: i32, ids: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 1024];
    for (k, word) in [magic, version, count].iter().enumerate() {
        out[4 * k..4 * k + 4].copy_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(ids);
    out
}

fn npy(descr: &str, ids: &[u8], len: usize) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({len},), }}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((header.len() as u16).to_le_bytes());
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(ids);
    out
}

struct Folder(tempfile::TempDir, Arc<Policy>);

impl Folder {
    fn new() -> Folder {
        let dir = tempfile::tempdir().expect("a directory");
        let policy = Policy::builder().allow_read(dir.path()).expect("a root").build();
        Folder(dir, policy)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    }

    fn open(&self, paths: &[PathBuf]) -> Result<Tokens> {
        Tokens::open(self.1.clone(), paths, &mut |_| ())
    }
}

fn ids(tokens: &Tokens, range: Range<u64>) -> Vec<i32> {
    let mut bytes = Vec::new();
    tokens.read(range, &mut bytes).expect("read");
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn every_format_and_width_is_one_corpus() {
    let f = Folder::new();
    let (narrow, wide) = (le(&[1u16, 50256, 65535], |i| i.to_le_bytes()), le(&[7u32, 128_255], |i| i.to_le_bytes()));
    let paths = [
        f.file("plain.bin", &narrow),
        f.file("gpt2.bin", &headed(GPT2, 3, &narrow)),
        f.file("llama.bin", &headed(LLAMA3, 2, &wide)),
        f.file("a.npy", &npy("<u2", &narrow, 3)),
        f.file("b.npy", &npy("|u1", &[9, 255], 2)),
        f.file("c.npy", &npy("<i4", &wide, 2)),
        f.file("d.npy", &npy("<i8", &le(&[5i64, 6], |i| i.to_le_bytes()), 2)),
        f.file("empty.bin", &[]),
        f.file("e.npy", &npy("<u4", &wide, 2)),
    ];
    let tokens = f.open(&paths).expect("a corpus");
    let want = [1, 50256, 65535, 1, 50256, 65535, 7, 128_255, 1, 50256, 65535, 9, 255, 7, 128_255, 5, 6, 7, 128_255];
    assert_eq!(tokens.len(), want.len() as u64);
    for start in 0..=want.len() {
        for end in start..=want.len() {
            assert_eq!(ids(&tokens, start as u64..end as u64), want[start..end], "{start}..{end}");
        }
    }
    for path in &paths[..2] {
        let whole = read_file(crate::file::named::open(path).expect("opened")).expect("read");
        assert_eq!((whole.dtype, whole.shape), (DType::I32, Shape::of(&[3])));
        assert_eq!(whole.bytes, le(&[1i32, 50256, 65535], |i| i.to_le_bytes()));
    }
}

/// Ranges longer than what is read at a time, in shards of every width.
#[test]
fn long_ranges_are_read_in_pieces() {
    let f = Folder::new();
    let all: Vec<u16> = (0..1_500_000u32).map(|i| (i % 60_013) as u16).collect();
    let wide: Vec<i64> = all.iter().map(|i| i64::from(*i)).collect();
    let (narrow, wide) = (le(&all, |i| i.to_le_bytes()), le(&wide, |i| i.to_le_bytes()));
    let tokens = f.open(&[f.file("a.bin", &narrow), f.file("b.npy", &npy("<i8", &wide, all.len()))]).expect("a corpus");
    let both: Vec<i32> = all.iter().chain(&all).map(|i| i32::from(*i)).collect();
    assert_eq!(ids(&tokens, 0..tokens.len()), both);
    assert_eq!(ids(&tokens, 400_000..2_900_001), both[400_000..2_900_001]);
}

#[test]
fn bad_files_are_named_with_the_rule() {
    let f = Folder::new();
    let two = le(&[1u16, 2], |i| i.to_le_bytes());
    for (name, bytes, rule) in [
        ("odd.bin", &two[..3], "3 bytes are not a whole number of u16 ids"),
        ("short.bin", &headed(GPT2, 3, &two), "the header declares 3 tokens of 2 bytes, and 4 bytes follow"),
        ("version.bin", &headed((GPT2.0, 9), 2, &two), "version 9 is not known; 1 is"),
        ("float.npy", &npy("<f4", &two, 1), "the ids are f4"),
        ("big.npy", &npy(">u2", &two, 2), "the ids are big-endian"),
        ("cut.npy", &npy("<u2", &two, 3), "takes 6 bytes, but 4 follow"),
        ("none.bin", &[], "holds no tokens"),
    ] {
        let error = f.open(&[f.file(name, bytes)]).expect_err(name).to_string();
        assert!(error.contains(rule) && error.contains(name), "{error}");
    }
    assert!(f.open(&[]).expect_err("none").to_string().contains("has no files"));
    let wide = f.file("wide.npy", &npy("<i8", &le(&[3i64, 1 << 31], |i| i.to_le_bytes()), 2));
    let error = f.open(&[wide]).expect("opened").read(0..2, &mut Vec::new()).expect_err("too wide").to_string();
    assert!(error.contains("wide.npy: file: token 1 is negative or above 2^31 - 1"), "{error}");
}

#[test]
fn windows_of_a_corpus_cross_its_shards() {
    let f = Folder::new();
    let all: Vec<u16> = (0..100).map(|i| i * 3).collect();
    let paths: Vec<_> =
        all.chunks(7).enumerate().map(|(k, c)| f.file(&format!("{k}.bin"), &le(c, |i| i.to_le_bytes()))).collect();
    let tokens = Arc::new(f.open(&paths).expect("a corpus"));
    let source = TokenWindows::new(tokens.clone(), 10..90, 17).expect("windows");
    assert_eq!(source.rows(), 64);
    let mut reader = Prefetcher::new(source, Some(2)).expect("threads");
    let samples = Samples { first: 5, rows: vec![0, 63, 30] };
    reader.announce(&samples);
    let batch = reader.take(&samples).expect("a batch");
    let want = samples.rows.iter().flat_map(|r| (0..17).map(move |i| ((10 + r + i) * 3) as i32));
    assert_eq!(batch.columns[0].shape, Shape::of(&[3, 17]));
    assert_eq!(batch.columns[0].bytes, le(&want.collect::<Vec<_>>(), |i| i.to_le_bytes()));
    for (part, span) in [(0..101, 2), (0..5, 6), (5..5, 1), (0..9, 0)] {
        assert!(TokenWindows::new(tokens.clone(), part, span).is_err());
    }
}

fn manifest(dtype: &str, shards: &[(&str, u64)]) -> Vec<u8> {
    let shards: Vec<String> = shards
        .iter()
        .map(|(file, tokens)| {
            format!("{{\"file\": \"{file}\", \"tokens\": {tokens}, \"documents\": 1, \"blake3\": \"\"}}")
        })
        .collect();
    format!(
        "{{\"schema\": \"perilune.tokens/1\", \"dtype\": \"{dtype}\", \"vocabulary\": 70000, \"tokenizer\": \"\", \"shards\": [{}]}}",
        shards.join(", ")
    )
    .into_bytes()
}

#[test]
fn a_manifest_stands_for_its_shards() {
    let f = Folder::new();
    // The first id would be the magic number of llm.c: files of a manifest have no header.
    f.file("a.bin", &le(&[GPT2.0 as u32, 2, 3], |i| i.to_le_bytes()));
    f.file("b.bin", &le(&[69_999u32], |i| i.to_le_bytes()));
    let path = f.file("manifest.json", &manifest("u32", &[("a.bin", 3), ("b.bin", 1)]));
    let tokens = f.open(&[path]).expect("opened");
    assert_eq!(ids(&tokens, 0..4), [GPT2.0, 2, 3, 69_999]);
}

#[test]
fn wrong_manifests_are_refused() {
    let f = Folder::new();
    f.file("a.bin", &[0; 12]);
    let outside = f.0.path().join("a.bin").display().to_string();
    for (dtype, shards, message) in [
        ("u32", vec![("a.bin", 4)], "has 12 bytes, and the manifest lists 4 tokens of 4 bytes"),
        ("u32", vec![("a.bin", u64::MAX)], "the manifest lists"),
        ("u8", vec![("a.bin", 12)], "'u8'; ids are u16 or u32"),
        ("u16", vec![("../a.bin", 6)], "not the name of a .bin file"),
        ("u16", vec![(outside.as_str(), 6)], "not the name of a .bin file"),
        ("u16", vec![("manifest.json", 6)], "not the name of a .bin file"),
        ("u16", vec![("c.bin", 6)], "c.bin"),
        ("u16", vec![], "holds no tokens"),
    ] {
        let path = f.file("manifest.json", &manifest(dtype, &shards));
        let error = f.open(&[path]).expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
    let path = f.file("manifest.json", b"{\"schema\": 1}");
    assert!(f.open(&[path]).expect_err("no manifest").to_string().contains("is no manifest of token files"));
}
