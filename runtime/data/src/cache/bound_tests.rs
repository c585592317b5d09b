#![allow(clippy::unwrap_used)]

use super::*;
use perilune_core::Interrupt;

/// Stores files of 100 bytes in all, used the given hours ago.
fn cache(files: &[(&str, &str, u64)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (part, name, hours) in files {
        let folder = dir.path().join(part);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), [0; 100]).unwrap();
        age(&folder.join(name), *hours);
    }
    dir
}

fn age(path: &Path, hours: u64) {
    let file = File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    list(dir).unwrap().into_iter().map(|entry| format!("{}/{}", entry.part, entry.name)).collect()
}

#[test]
fn what_was_used_least_recently_is_removed() {
    let dir =
        cache(&[("index", "a", 3), ("kernels", "b", 4), ("records", "c", 1), ("tokenizers", "d", 2), ("data", "e", 9)]);
    assert_eq!(names(dir.path()), ["kernels/b", "index/a", "tokenizers/d", "records/c"]);
    // Using a file puts it behind the others, and the file keeps its own time.
    let part = CachePart::open(Some(dir.path()), "kernels").unwrap();
    let before = dir.path().join("kernels/b").metadata().unwrap().modified().unwrap();
    part.mark_used("b");
    assert_eq!(dir.path().join("kernels/b").metadata().unwrap().modified().unwrap(), before);
    assert_eq!(names(dir.path()), ["index/a", "tokenizers/d", "records/c", "kernels/b"]);
    assert_eq!(shrink(dir.path(), 400, None).unwrap(), Removed { left: 400, ..Removed::default() });
    let two = Removed { files: 2, bytes: 200, left: 200, in_use: 0 };
    assert_eq!(shrink(dir.path(), 299, None).unwrap(), two);
    assert_eq!(names(dir.path()), ["records/c", "kernels/b"]);
    assert_eq!(shrink(dir.path(), 0, Some("kernels")).unwrap().files, 1);
    assert!(!dir.path().join("kernels/b.lock").exists() && dir.path().join("data/e").exists());
    assert_eq!(names(dir.path()), ["records/c"]);
    assert!(names(&dir.path().join("none")).is_empty());
}

#[test]
fn what_a_process_makes_or_reads_by_position_stays() {
    let dir = cache(&[("records", "abc.zst", 9), ("records", "bcd.zst", 8), ("index", "a.lines", 7)]);
    let records = CachePart::open(Some(dir.path()), "records").unwrap();
    let reading = records.hold("abc.zst").unwrap();
    let index = CachePart::open(Some(dir.path()), "index").unwrap();
    let making = index.lock("a.lines", &Interrupt::default()).unwrap();
    assert_eq!(shrink(dir.path(), 0, None).unwrap(), Removed { files: 1, bytes: 100, left: 200, in_use: 200 });
    drop((reading, making));
    assert_eq!(shrink(dir.path(), 0, None).unwrap(), Removed { files: 2, bytes: 200, left: 0, in_use: 0 });
}

#[test]
fn remains_of_killed_processes_are_removed_after_a_day() {
    let dir = cache(&[
        ("index", ".perilune-0123.tmp", 25),
        ("index", ".perilune-4567.tmp", 1),
        ("index", "gone.lines.lock", 25),
        ("index", "held.lines.lock", 25),
        ("index", "new.lines.lock", 1),
    ]);
    let index = CachePart::open(Some(dir.path()), "index").unwrap();
    let held = index.lock("held.lines", &Interrupt::default()).unwrap();
    age(&dir.path().join("index/held.lines.lock"), 25);
    shrink(dir.path(), u64::MAX, None).unwrap();
    let mut left: Vec<_> = std::fs::read_dir(dir.path().join("index"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, [".perilune-4567.tmp", "held.lines.lock", "new.lines.lock"]);
    drop(held);
}

#[test]
fn stored_files_have_a_checksum_and_a_format() {
    let dir = tempfile::tempdir().unwrap();
    let part = CachePart::open(Some(dir.path()), "index").unwrap();
    part.store("a", b"format 1", b"body").unwrap();
    let load = |magic: &[u8]| part.load("a", magic, "a test");
    assert_eq!(
        (load(b"format 1").as_deref(), load(b"format 2"), part.load("b", b"", "a test")),
        (Some(&b"body"[..]), None, None)
    );
    let path = dir.path().join("index/a");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(load(b"format 1"), None);
    std::fs::write(&path, &bytes[..20]).unwrap();
    assert_eq!(load(b"format 1"), None);
}
