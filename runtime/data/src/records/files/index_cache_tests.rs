#![allow(clippy::unwrap_used)]

use super::*;
use crate::records::files::Opening;
use crate::records::files::line_index::{PIECE, block_size};
use perilune_core::philox::philox4x32;
use perilune_policy::Policy;
use std::path::PathBuf;
use std::time::SystemTime;

/// Bytes of the checksum at the end of a file.
const CHECKSUM: usize = 32;

fn text(path: &Path) -> TextFiles {
    let policy = Policy::builder().allow_read(path.parent().unwrap()).unwrap().build();
    let interrupt = Interrupt::default();
    let mut opening = Opening { opener: policy, cache: None, interrupt: &interrupt, observe: &mut |_| {} };
    TextFiles::new(&[path.to_path_buf()], &mut opening).unwrap()
}

fn lines(cache: &IndexCache, path: &Path) -> LineIndex {
    cache.lines(&text(path), 0, &Interrupt::default()).unwrap()
}

/// Sets the time of the content, but that of the attributes is now.
fn settle(path: &Path) {
    let past = SystemTime::now() - Duration::from_secs(3600);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(past).unwrap();
    std::thread::sleep(SETTLED + Duration::from_millis(1100));
}

fn indexes(dir: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir.join("index")).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|e| e == "lines")).collect()
}

/// Rows and lines by a simple reader.
fn slow(text: &[u8]) -> Vec<(u64, u64)> {
    let (mut out, mut at) = (Vec::new(), 0);
    for (k, line) in text.split_inclusive(|b| *b == b'\n').enumerate() {
        let mark = if k == 0 && text.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
        if !line[mark..].iter().all(u8::is_ascii_whitespace) {
            out.push(((at + mark) as u64, k as u64 + 1));
        }
        at += line.len();
    }
    out
}

fn compare(index: &LineIndex, text: &[u8]) {
    let expected = slow(text);
    assert_eq!(index.len(), expected.len() as u64);
    for (row, (start, line)) in (0..).zip(&expected) {
        assert_eq!((index.start(row), index.line(row)), (*start, *line), "row {row}");
    }
    assert_eq!(index.start(index.len()), text.len() as u64);
    assert_eq!(index.hash, *blake3::hash(text).as_bytes());
}

#[test]
fn an_index_is_that_of_a_simple_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    let none = IndexCache::new(None);
    let mark: &[u8] = b"\xEF\xBB\xBF";
    for text in
        [b"" as &[u8], b"\n", b"a", b"a\n", b" \n\n\t\r\na", mark, &[mark, b"\n"].concat(), &[mark, b"a"].concat()]
    {
        std::fs::write(&path, text).unwrap();
        compare(&lines(&none, &path), text);
    }
    // Newlines at the borders of pieces and blocks, and lines over several pieces.
    for seed in 0..4 {
        let mut text = Vec::new();
        for k in 0u32.. {
            let [length, kind, ..] = philox4x32([seed, k, 0, 0], [3, 1]);
            let byte = if kind % 3 == 0 { b' ' } else { b'x' };
            let piece = PIECE - text.len() % PIECE;
            let length = match kind % 5 {
                0 => 0,
                1 => piece - 1,
                2 => piece,
                3 => length as usize % 3000,
                _ => length as usize % (2 * PIECE),
            };
            text.resize(text.len() + length, byte);
            text.push(b'\n');
            if text.len() > block_size() + PIECE {
                break;
            }
        }
        if seed % 2 == 0 {
            text.pop();
        }
        std::fs::write(&path, &text).unwrap();
        compare(&lines(&none, &path), &text);
    }
}

#[test]
fn a_kept_index_is_used_until_the_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    let cache = IndexCache::keeping(Some(dir.path()), 0);
    std::fs::write(&path, "{}\n{}\n").unwrap();
    assert_eq!(lines(&cache, &path).len(), 2);
    assert!(indexes(dir.path()).is_empty(), "it has changed just now");
    settle(&path);
    let fresh = lines(&cache, &path);
    let [kept] = &indexes(dir.path())[..] else { panic!("one index") };
    assert_eq!(lines(&cache, &path), fresh);
    // What is loaded is that file: one with another hash and a right checksum is believed.
    let bytes = std::fs::read(kept).unwrap();
    let mut other = bytes[..bytes.len() - CHECKSUM].to_vec();
    other[MAGIC.len()] ^= 1;
    let checksum = blake3::hash(&other);
    std::fs::write(kept, [&other[..], checksum.as_bytes()].concat()).unwrap();
    assert_ne!(lines(&cache, &path).hash, fresh.hash);
    // One that is cut or damaged is built and written again.
    for seed in 0..40 {
        let [at, bit, ..] = philox4x32([seed, 0, 0, 0], [9, 9]);
        let at = at as usize % bytes.len();
        let damaged = match seed % 4 {
            0 => bytes[..at].to_vec(),
            1 => [&bytes[..], b"more"].concat(),
            _ => bytes.iter().enumerate().map(|(k, b)| if k == at { b ^ (1 << (bit % 8)) } else { *b }).collect(),
        };
        std::fs::write(kept, damaged).unwrap();
        assert_eq!(lines(&cache, &path), fresh, "{seed}");
        assert_eq!(std::fs::read(kept).unwrap(), bytes, "{seed}");
    }
    // The same size and time of the content, but another content: the time of the attributes differs.
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    std::fs::write(&path, "{}{}\n\n").unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    assert_eq!(lines(&cache, &path).len(), 1);
}

#[test]
fn a_cache_without_a_folder_or_the_right_to_write_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    std::fs::write(&path, "{}\n").unwrap();
    settle(&path);
    std::fs::write(dir.path().join("file"), "").unwrap();
    for place in [None, Some(dir.path().join("file")), Some(PathBuf::from("/proc/self"))] {
        assert_eq!(lines(&IndexCache::keeping(place.as_deref(), 0), &path).len(), 1);
    }
    // A folder where the index is to be.
    let cache = IndexCache::keeping(Some(dir.path()), 0);
    lines(&cache, &path);
    let [kept] = &indexes(dir.path())[..] else { panic!("one index") };
    std::fs::remove_file(kept).unwrap();
    std::fs::create_dir(kept).unwrap();
    assert_eq!(lines(&cache, &path).len(), 1);
    // Small texts are not kept.
    std::fs::remove_dir(kept).unwrap();
    lines(&IndexCache::new(Some(dir.path())), &path);
    assert!(indexes(dir.path()).is_empty());
}

#[test]
fn processes_that_open_a_file_together_get_one_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    std::fs::write(&path, "{}\n".repeat(10_000)).unwrap();
    settle(&path);
    let all: Vec<LineIndex> = std::thread::scope(|scope| {
        let one = || lines(&IndexCache::keeping(Some(dir.path()), 0), &path);
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(all.iter().all(|index| *index == all[0] && index.len() == 10_000));
    assert_eq!(indexes(dir.path()).len(), 1);
}

#[test]
fn an_interrupt_ends_indexing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    std::fs::write(&path, "{}\n".repeat(3_000_000)).unwrap();
    let interrupt = Interrupt::default();
    interrupt.request();
    let made = IndexCache::keeping(Some(dir.path()), 0).lines(&text(&path), 0, &interrupt);
    assert!(matches!(made, Err(crate::Error::Interrupted)));
    assert!(indexes(dir.path()).is_empty());
}
