//! Fuzzes a policy with random trees of files, links, loops, hard links and FIFOs, and random paths through them, while a second
//! thread renames directories and swaps them for links.
//!
//! The oracle is an inventory by device and inode: no opened file is one that lies outside the granted directories, no listing
//! shows a name of such a directory, and at the end the directories that may not be written have the same entries and bytes. A
//! call that does not return ends the test with the seed of its tree. `PERILUNE_FUZZ_COUNT` sets the number of trees.

#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::disallowed_methods)]

use perilune_policy::{Directory, Error, Opener, Policy, Resolution};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Trees of a run without `PERILUNE_FUZZ_COUNT`, and paths tried in each.
const TREES: u64 = 100;
const PATHS: usize = 120;
/// Far longer than a tree takes on a busy machine.
const HANG: Duration = Duration::from_secs(300);

/// SplitMix64: the same trees and paths in every run.
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

    fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }
}

/// `granted` may be read and written, `readonly` may be read, `outside` neither. `limbo` is where the second thread puts
/// directories of `granted` aside.
const AREAS: [&str; 3] = ["granted", "readonly", "outside"];
const NAMES: [&str; 8] = ["a", "b", "c", "d", "x.npy", "y.npy", "z.npy", "w.csv"];

/// A directory of any area.
fn any(rng: &mut Rng, dirs: &BTreeMap<&str, Vec<PathBuf>>) -> PathBuf {
    let area = rng.pick(&AREAS);
    rng.pick(&dirs[area])
}

struct Tree {
    top: tempfile::TempDir,
    /// A name of `outside` that no other directory has.
    outside: BTreeSet<OsString>,
    drawn: BTreeSet<&'static str>,
}

impl Tree {
    fn new(rng: &mut Rng) -> Tree {
        let top = tempfile::tempdir().unwrap();
        fs::create_dir(top.path().join("limbo")).unwrap();
        let mut tree = Tree { top, outside: BTreeSet::new(), drawn: BTreeSet::new() };
        let mut dirs: BTreeMap<&str, Vec<PathBuf>> = BTreeMap::new();
        for area in AREAS {
            let all = dirs.entry(area).or_default();
            all.push(tree.path(area));
            fs::create_dir(&all[0]).unwrap();
            for _ in 0..rng.below(5) {
                let dir = rng.pick(all).join(rng.pick(&NAMES[..4]));
                if fs::create_dir(&dir).is_ok() {
                    all.push(dir);
                }
            }
        }
        let mut files: Vec<PathBuf> = Vec::new();
        for k in 0..12 {
            let area = rng.pick(&AREAS);
            let mut file = rng.pick(&dirs[area]).join(rng.pick(&NAMES[4..]));
            if area == "outside" && rng.below(2) == 0 {
                file.set_file_name(format!("secret-{k}.npy"));
            }
            if fs::write(&file, format!("{area} {k}")).is_ok() {
                files.push(file);
            }
        }
        for _ in 0..12 {
            let dir = any(rng, &dirs);
            tree.draw_special(rng, &dir, &dirs, &files);
        }
        for dir in &dirs["outside"] {
            for entry in fs::read_dir(dir).unwrap().flatten() {
                if entry.file_name().as_bytes().starts_with(b"secret-") {
                    tree.outside.insert(entry.file_name());
                }
            }
        }
        tree
    }

    /// Puts a link, hard link or FIFO in `dir`.
    fn draw_special(&mut self, rng: &mut Rng, dir: &Path, dirs: &BTreeMap<&str, Vec<PathBuf>>, files: &[PathBuf]) {
        let name = dir.join(rng.pick(&NAMES));
        let granted = dir.starts_with(self.path("granted"));
        let (kind, target): (&str, PathBuf) = match rng.below(10) {
            0 => ("link within its directory", rng.pick(&NAMES).into()),
            1 => ("link to itself", name.file_name().unwrap().into()),
            2 => ("absolute link to a directory", any(rng, dirs)),
            3 => ("absolute link to a file", files.get(rng.below(files.len())).cloned().unwrap_or_default()),
            4 => ("link by ..", Path::new("../").join(rng.pick(&AREAS)).join(rng.pick(&NAMES))),
            5 => (
                "link by many ..",
                Path::new("../../../..").join(self.path(rng.pick(&AREAS)).strip_prefix("/").unwrap()),
            ),
            6 => ("link to /proc", self.proc_path(rng)),
            7 => ("link to a device", rng.pick(&["/dev/zero", "/dev/tty", "/dev/stdin"]).into()),
            8 => {
                // Where it is granted it may have a name of the same area only: a hard link is the file itself.
                let same: Vec<&PathBuf> =
                    files.iter().filter(|f| f.starts_with(self.path("granted")) == granted).collect();
                let same: Vec<&&PathBuf> = same.iter().filter(|f| granted || dir.starts_with(self.area(f))).collect();
                if !same.is_empty() && fs::hard_link(rng.pick(&same), &name).is_ok() {
                    self.drawn.insert("hard link");
                }
                return;
            }
            _ => {
                let path = CString::new(name.as_os_str().as_bytes()).unwrap();
                let made = rustix::fs::mknodat(
                    rustix::fs::CWD,
                    path.as_c_str(),
                    rustix::fs::FileType::Fifo,
                    rustix::fs::Mode::from_raw_mode(0o600),
                    0,
                );
                if made.is_ok() {
                    self.drawn.insert("FIFO");
                }
                return;
            }
        };
        if symlink(target, &name).is_ok() {
            self.drawn.insert(kind);
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    fn area(&self, file: &Path) -> PathBuf {
        let rest = file.strip_prefix(self.top.path()).unwrap();
        self.top.path().join(rest.components().next().unwrap())
    }

    /// A path of the kernel that leads to a file of the process or back into the tree.
    fn proc_path(&self, rng: &mut Rng) -> PathBuf {
        let inside = self.path(rng.pick(&AREAS)).join(rng.pick(&NAMES));
        let inside = inside.strip_prefix("/").unwrap();
        match rng.below(5) {
            0 => format!("/proc/self/fd/{}", rng.below(24)).into(),
            1 => Path::new("/proc/self/root").join(inside),
            2 => Path::new("/proc/self/cwd").join(rng.pick(&NAMES)),
            3 => Path::new("/proc/thread-self/fd").join(rng.below(24).to_string()).join(rng.pick(&NAMES)),
            _ => (rng.pick(&["/proc/self/environ", "/proc/self/mem", "/proc/self/maps"])).into(),
        }
    }

    /// A path that a hostile recipe may ask for.
    fn asked(&self, rng: &mut Rng) -> PathBuf {
        let mut path = match rng.below(12) {
            0 => self.proc_path(rng),
            1 => PathBuf::from("/dev/zero"),
            2 => PathBuf::from("../".repeat(rng.below(30))).join(self.path("outside").strip_prefix("/").unwrap()),
            3 => self.path("outside"),
            4 => self.path("limbo"),
            5 | 6 => self.path("readonly"),
            _ => self.path("granted"),
        };
        for _ in 0..rng.below(5) {
            match rng.below(10) {
                0 => path.push(".."),
                1 => path.as_mut_os_string().push("/.//"),
                2 => path.push(Path::new("..").join(rng.pick(&AREAS))),
                3 if rng.below(4) == 0 => path.push(rng.pick(&["n".repeat(300), "\0".into(), "\u{1b}[2J".into()])),
                4 if rng.below(4) == 0 => path.push(OsString::from_vec(vec![0xff, b'/', 0xfe])),
                5 if !self.outside.is_empty() => {
                    path.push(self.outside.iter().nth(rng.below(self.outside.len())).unwrap())
                }
                _ => path.push(rng.pick(&NAMES)),
            }
        }
        path
    }

    /// Every entry of an area without following links: what it is, its bytes, and its time of modification.
    fn inventory(&self, area: &str) -> BTreeMap<PathBuf, (u64, u32, Vec<u8>, i64)> {
        let mut out = BTreeMap::new();
        let mut left = vec![self.path(area)];
        while let Some(path) = left.pop() {
            let about = fs::symlink_metadata(&path).unwrap();
            let bytes = if about.is_file() {
                fs::read(&path).unwrap()
            } else if about.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_vec()
            } else {
                Vec::new()
            };
            if about.is_dir() {
                left.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
            out.insert(path, (about.ino(), about.mode(), bytes, about.mtime_nsec()));
        }
        out
    }
}

/// Swaps directories of `granted` for links, and moves them to `limbo` and back.
fn disturb(tree: &Tree, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng(seed);
    while !stop.load(Ordering::Relaxed) {
        let dir = tree.path("granted").join(rng.pick(&NAMES[..4]));
        let aside = tree.path("limbo").join(rng.pick(&NAMES[..4]));
        if !dir.symlink_metadata().is_ok_and(|m| m.is_dir()) || fs::rename(&dir, &aside).is_err() {
            std::thread::yield_now();
            continue;
        }
        let target = tree.path(rng.pick(&["outside", "limbo", "readonly"])).join(rng.pick(&NAMES[..4]));
        if rng.below(2) == 0 && symlink(&target, &dir).is_ok() {
            std::thread::yield_now();
            let _ = fs::remove_file(&dir);
        }
        if rng.below(2) == 0 {
            let deep = aside.join(rng.pick(&NAMES[..4]));
            let moved = tree.path("limbo").join("moved");
            if fs::rename(&deep, &moved).is_ok() {
                let _ = fs::rename(&moved, &deep);
            }
        }
        let _ = fs::rename(&aside, &dir);
    }
}

/// What the calls of all trees have met.
#[derive(Default)]
struct Met(BTreeMap<&'static str, usize>);

impl Met {
    fn count<T>(&mut self, done: &'static str, found: Result<T, Error>) -> Option<T> {
        let name = match &found {
            Ok(_) => done,
            Err(Error::Denied { left: true, .. }) => "left",
            Err(Error::Denied { .. }) => "denied",
            Err(Error::NotRegular { .. }) => "not regular",
            Err(Error::NotDirectory { .. }) => "not a directory",
            Err(Error::Name { .. }) => "name",
            Err(Error::Fetch { .. }) => "fetch",
            Err(Error::Io { source, .. }) if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                "loop"
            }
            Err(Error::Io { .. }) => "system",
        };
        *self.0.entry(name).or_default() += 1;
        found.ok()
    }
}

/// Tries one path in every way.
fn attack(tree: &Tree, policy: &Policy, rng: &mut Rng, denied: &BTreeSet<(u64, u64)>, device: u64, met: &mut Met) {
    let path = tree.asked(rng);
    if let Some(file) = met.count("opened", policy.open(&path)) {
        let about = file.into_file().metadata().unwrap();
        assert!(about.is_file() && about.dev() == device, "{path:?}");
        assert!(!denied.contains(&(about.dev(), about.ino())), "{path:?} was opened");
    }
    if let Some(entries) = met.count("listed", policy.list(&path)) {
        assert!(!entries.iter().any(|e| tree.outside.contains(&e.name)), "{path:?} was listed");
    }
    let _ = policy.kind(&path);
    let target = path.join(rng.pick(&NAMES[4..]));
    if let Some(mut file) = met.count("created", policy.create(&target, &["npy"])) {
        file.write_all(b"written").unwrap();
        met.count("committed", file.commit());
    }
    // The directory that a run owns: by one name each, and by paths of names.
    let own = Directory::open(&tree.path("granted")).unwrap();
    let (one, two) = (rng.pick(&NAMES), rng.pick(&NAMES));
    let rest = Path::new(one).join(two);
    if let Some(file) = met.count("opened", own.open_unlinked(&rest)) {
        let about = file.into_file().metadata().unwrap();
        assert!(!denied.contains(&(about.dev(), about.ino())), "{rest:?} was opened");
    }
    match rng.below(6) {
        0 => drop(met.count("made", own.make_directories(&rest)).map(|dir| dir.replace("x.npy", b"written"))),
        1 => drop(met.count("removed", own.remove(one))),
        2 => drop(met.count("renamed", own.rename(one, two))),
        3 => drop(met.count("created", own.create_over(one)).map(|mut file| file.write_all(b"written"))),
        4 => drop(met.count("created", own.append(one)).map(|mut file| file.write_all(b"written"))),
        _ => drop(met.count("created", own.open_or_create(one)).map(|mut file| file.write_all(b"written"))),
    }
    for bad in ["..", "../outside", "/", "", "a/../.."] {
        assert!(own.remove(bad).is_err() && own.subdirectory(bad).is_err() && own.rename(one, bad).is_err(), "{bad}");
    }
}

#[test]
fn no_path_leads_out_of_the_granted_directories() {
    let trees = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(TREES);
    let at = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let (mut met, mut drawn) = (Met::default(), BTreeSet::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut since) = (u64::MAX, Duration::ZERO);
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
                let now = at.load(Ordering::Relaxed);
                since = if now == last { since + Duration::from_millis(50) } else { Duration::ZERO };
                last = now;
                if since > HANG {
                    eprintln!("tree {now} hangs");
                    std::process::abort();
                }
            }
        });
        let end = Ended(&done);
        for seed in 0..trees {
            at.store(seed, Ordering::Relaxed);
            fuzz_tree(seed, &mut met, &mut drawn);
        }
        drop(end);
    });
    let kinds = [
        "FIFO",
        "absolute link to a directory",
        "absolute link to a file",
        "hard link",
        "link by ..",
        "link by many ..",
        "link to /proc",
        "link to a device",
        "link to itself",
        "link within its directory",
    ];
    assert_eq!(drawn.into_iter().collect::<Vec<_>>(), kinds);
    for name in [
        "opened",
        "listed",
        "created",
        "committed",
        "made",
        "removed",
        "renamed",
        "left",
        "denied",
        "not regular",
        "not a directory",
        "name",
        "loop",
        "system",
    ] {
        assert!(met.0.get(name).is_some_and(|n| *n > 0), "no call met '{name}': {:?}", met.0);
    }
}

/// Ends the watch also where an assertion fails.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn fuzz_tree(seed: u64, met: &mut Met, drawn: &mut BTreeSet<&'static str>) {
    let mut rng = Rng(seed);
    let tree = Tree::new(&mut rng);
    drawn.extend(tree.drawn.iter());
    let how = if rng.below(2) == 0 { Resolution::Auto } else { Resolution::Walk };
    let granted = tree.path("granted");
    let policy = Policy::builder().resolution(how).allow_read(&granted).unwrap().allow_write(&granted).unwrap();
    let policy = policy.allow_read(&tree.path("readonly")).unwrap().build();
    let before = ["readonly", "outside"].map(|area| tree.inventory(area));
    let device = fs::metadata(tree.top.path()).unwrap().dev();
    let denied: BTreeSet<(u64, u64)> = before[1].values().map(|(ino, ..)| (device, *ino)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| disturb(&tree, seed ^ 0x5eed, &stop));
        let end = Ended(&stop);
        for _ in 0..PATHS {
            attack(&tree, &policy, &mut rng, &denied, device, met);
        }
        drop(end);
    });
    let after = ["readonly", "outside"].map(|area| tree.inventory(area));
    assert_eq!(after, before, "seed {seed}, {how:?}: a write landed in a directory that may not be written");
    let mut names: Vec<OsString> = fs::read_dir(tree.top.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["granted", "limbo", "outside", "readonly"].map(OsStr::new), "seed {seed}, {how:?}");
}
