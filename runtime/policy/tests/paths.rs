//! Attacks the boundary of a policy: links, `..`, absolute paths, special files, renames during an open.

#![allow(clippy::unwrap_used)]

use perilune_policy::{Directory, Entry, Error, Kind, Opener, Policy, Resolution, near, open_named};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BOTH: [Resolution; 2] = [Resolution::Auto, Resolution::Walk];

/// `inside/` is granted, `outside/secret` is not.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        for dir in ["inside/sub/deep", "outside"] {
            fs::create_dir_all(tree.path(dir)).unwrap();
        }
        for (file, text) in [("inside/a.csv", "a"), ("inside/sub/b.csv", "b"), ("outside/secret", "secret")] {
            fs::write(tree.path(file), text).unwrap();
        }
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) {
        symlink(target, self.path(name)).unwrap();
    }

    fn policy(&self, how: Resolution) -> Arc<Policy> {
        let inside = self.path("inside");
        Policy::builder().resolution(how).allow_read(&inside).unwrap().allow_write(&inside).unwrap().build()
    }
}

fn read(opener: &dyn Opener, path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    opener.open(path)?.read_to_string(&mut text).unwrap();
    Ok(text)
}

fn put(policy: &Policy, path: &Path, text: &str) -> Result<(), Error> {
    let mut file = policy.create(path, &["npy", "png"])?;
    file.write_all(text.as_bytes()).unwrap();
    file.commit()
}

#[test]
fn files_beneath_a_root_open_and_links_within_it_are_followed() {
    let t = Tree::new();
    t.link("sub/b.csv", "inside/link");
    t.link("../a.csv", "inside/sub/up");
    t.link("sub", "inside/dir");
    t.link("link", "inside/chain");
    for how in BOTH {
        let policy = t.policy(how);
        for (name, text) in [
            ("a.csv", "a"),
            ("sub/b.csv", "b"),
            ("./sub//b.csv", "b"),
            ("sub/../a.csv", "a"),
            ("sub/deep/../../a.csv", "a"),
            ("link", "b"),
            ("sub/up", "a"),
            ("dir/b.csv", "b"),
            ("dir/up", "a"),
            ("chain", "b"),
        ] {
            let path = t.path("inside").join(name);
            assert_eq!(read(&*policy, &path).unwrap(), text, "{name} {how:?}");
        }
        let file = policy.open(&t.path("inside/a.csv")).unwrap();
        assert_eq!((file.path(), file.len()), (t.path("inside/a.csv").as_path(), 1));
        assert!(file.modified().is_some() && !file.is_empty());
    }
}

#[test]
fn every_way_out_is_denied() {
    let t = Tree::new();
    t.link(t.path("outside/secret"), "inside/absolute");
    t.link("../outside/secret", "inside/relative");
    t.link("../outside", "inside/dir");
    t.link("dir/secret", "inside/chain");
    t.link("/", "inside/all");
    t.link("/proc/self/root", "inside/magic");
    t.link("..", "inside/sub/up");
    let secret = t.path("outside/secret");
    for how in BOTH {
        let policy = t.policy(how);
        let inside = t.path("inside");
        let mut paths: Vec<PathBuf> =
            ["absolute", "relative", "dir/secret", "chain", "../outside/secret", "sub/up/../outside/secret"]
                .iter()
                .map(|name| inside.join(name))
                .collect();
        paths.push(secret.clone());
        paths.push(inside.join(format!("all{}", secret.display())));
        paths.push(inside.join(format!("magic{}", secret.display())));
        paths.push("/etc/passwd".into());
        paths.push("/proc/self/environ".into());
        paths.push(PathBuf::from(format!("/proc/self/root{}", secret.display())));
        for path in paths {
            let e = policy.open(&path).map(drop).unwrap_err();
            assert!(matches!(e, Error::Denied { .. }), "{} {how:?}: {e}", path.display());
            assert!(e.to_string().contains("\n  hint: allow it on the command line: --allow-read="), "{e}");
            // The target of a write is never the link itself, nor behind it.
            let name = path.with_extension("npy");
            if !name.starts_with(&inside) || name.components().count() > inside.components().count() + 1 {
                assert!(put(&policy, &name, "x").is_err(), "{}", name.display());
            }
        }
        let denied = policy.open(&inside.join("dir/secret")).unwrap_err().to_string();
        assert!(
            denied.contains("leads out of")
                && denied.contains(&format!("--allow-read={}", t.path("outside").display()))
        );
        assert!(policy.list(&inside.join("dir")).is_err() && policy.list(&t.path("outside")).is_err());
    }
    assert_eq!(fs::read_to_string(secret).unwrap(), "secret");
    assert_eq!(fs::read_dir(t.path("outside")).unwrap().count(), 1);
}

#[test]
fn a_link_from_one_root_to_another_is_followed() {
    let t = Tree::new();
    t.link(t.path("outside"), "inside/dir");
    for how in BOTH {
        let policy = Policy::builder().resolution(how).allow_read(&t.path("inside")).unwrap();
        let policy = policy.allow_read(&t.path("outside")).unwrap().build();
        assert_eq!(read(&*policy, &t.path("inside/dir/secret")).unwrap(), "secret");
        assert_eq!(read(&*policy, &t.path("inside/../outside/secret")).unwrap(), "secret");
        assert_eq!(policy.list(&t.path("inside/dir")).unwrap(), [Entry { name: "secret".into(), kind: Kind::File }]);
    }
}

#[test]
fn a_root_that_is_named_through_a_link_is_the_directory_it_leads_to() {
    let t = Tree::new();
    t.link("inside", "name");
    let policy = Policy::builder().allow_read(&t.path("name")).unwrap().build();
    for path in ["name/a.csv", "inside/a.csv"] {
        assert_eq!(read(&*policy, &t.path(path)).unwrap(), "a");
    }
    // Another link in its place grants nothing more.
    fs::remove_file(t.path("name")).unwrap();
    t.link("outside", "name");
    assert!(policy.open(&t.path("name/secret")).is_err());
    assert_eq!(read(&*policy, &t.path("name/a.csv")).unwrap(), "a", "the handle stays");
}

#[cfg(target_os = "linux")]
#[test]
fn only_regular_files_open_and_no_open_waits() {
    let t = Tree::new();
    let fifo = t.path("inside/pipe.npy");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(t.path("inside/socket.npy")).unwrap();
    t.link("pipe.npy", "inside/to_pipe.npy");
    fs::create_dir(t.path("inside/folder.npy")).unwrap();
    for how in BOTH {
        let policy = Policy::builder().resolution(how).allow_read(&t.path("inside")).unwrap();
        let policy = policy.allow_read(Path::new("/dev")).unwrap().allow_read(Path::new("/")).unwrap();
        let policy = policy.allow_write(&t.path("inside")).unwrap().build();
        let begun = std::time::Instant::now();
        for (path, found) in [
            (fifo.clone(), "a FIFO"),
            (t.path("inside/to_pipe.npy"), "a FIFO"),
            (t.path("inside/socket.npy"), "a socket"),
            (t.path("inside/folder.npy"), "a directory"),
            ("/dev/zero".into(), "a device"),
            ("/proc/self/environ".into(), "a view of the kernel"),
            ("/proc/self/status".into(), "a view of the kernel"),
        ] {
            let e = policy.open(&path).map(drop).unwrap_err();
            assert!(matches!(&e, Error::NotRegular { found: f, .. } if f.contains(found)), "{how:?}: {e}");
        }
        for name in ["pipe.npy", "to_pipe.npy", "socket.npy", "folder.npy"] {
            let e = put(&policy, &t.path("inside").join(name), "x").unwrap_err();
            assert!(matches!(e, Error::NotRegular { .. }), "{name}: {e}");
        }
        assert!(begun.elapsed().as_secs() < 2);
    }
    assert!(matches!(open_named(&fifo).unwrap_err(), Error::NotRegular { found: "a FIFO", .. }));
    assert!(matches!(open_named(&t.path("inside")).unwrap_err(), Error::NotRegular { .. }));
    assert_eq!(open_named(&t.path("inside/a.csv")).unwrap().text(1).unwrap(), "a");
    assert!(open_named(&t.path("inside/a.csv")).unwrap().text(0).is_err());
}

#[test]
fn endless_links_and_odd_names_are_errors() {
    let t = Tree::new();
    t.link("loop", "inside/loop");
    t.link("b", "inside/a");
    t.link("a", "inside/b");
    t.link("sub/none", "inside/nowhere");
    for how in BOTH {
        let policy = t.policy(how);
        for name in ["loop", "a", "nowhere", "none", "a.csv/x", "sub\0x"] {
            let e = policy.open(&t.path("inside").join(name)).map(drop).unwrap_err();
            assert!(!matches!(e, Error::Denied { .. }), "{name}: {e}");
        }
        assert!(policy.open(&t.path("inside/none")).unwrap_err().is_not_found());
        assert!(policy.open(Path::new("")).is_err());
        let long = t.path("inside").join("sub/../".repeat(2000)).join("a.csv");
        // As long as a path may be, or an error; never outside.
        assert!(read(&*policy, &long).is_ok_and(|text| text == "a") || policy.open(&long).is_err());
    }
}

#[test]
fn a_write_is_atomic() {
    let t = Tree::new();
    for how in BOTH {
        let policy = t.policy(how);
        let path = t.path("inside/w.npy");
        put(&policy, &path, "old").unwrap();
        let mut half = policy.create(&path, &["npy"]).unwrap();
        half.write_all(b"half").unwrap();
        drop(half);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        let mut file = policy.create(&path, &["npy"]).unwrap();
        file.write_all(b"xew").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(b"n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old", "until it is committed");
        file.commit().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        put(&policy, &t.path("inside/sub/w.png"), "x").unwrap();
        let names: Vec<_> = fs::read_dir(t.path("inside")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(!names.iter().any(|n| n.to_string_lossy().contains("tmp")), "{names:?}");
    }
}

#[test]
fn denied_writes_name_the_reason() {
    let t = Tree::new();
    t.link("a.csv", "inside/link.npy");
    t.link("../outside", "inside/dir");
    let policy = t.policy(Resolution::Auto);
    for (name, rule) in [
        ("w.lua", "is none of .npy, .png"),
        (".bashrc", "is none of .npy, .png"),
        ("w.NPY", "is none of"),
        ("link.npy", "is a link"),
        ("dir/w.npy", "leads out of the directories that may be written"),
        ("none/w.npy", "there is no folder"),
        ("w.npy/", "has no file name"),
        ("..", "has no file name"),
        ("../outside/w.npy", "is not in a directory that may be written"),
    ] {
        let e = put(&policy, &t.path("inside").join(name), "x").unwrap_err().to_string();
        assert!(e.contains(rule), "{name}: {e}");
    }
    let e = put(&policy, &t.path("outside/w.npy"), "x").unwrap_err().to_string();
    assert!(
        e.contains(&format!("--allow-write={}", t.path("outside").display())) && e.contains("--set out=FILE"),
        "{e}"
    );
    assert_eq!(fs::read_dir(t.path("outside")).unwrap().count(), 1);
}

/// A link that comes to stand at the target while the file is written is not followed and not replaced.
#[test]
fn a_link_that_appears_before_the_end_stays() {
    let t = Tree::new();
    let policy = t.policy(Resolution::Auto);
    let path = t.path("inside/w.npy");
    let mut file = policy.create(&path, &["npy"]).unwrap();
    file.write_all(b"x").unwrap();
    t.link("../outside/secret", "inside/w.npy");
    assert!(matches!(file.commit().unwrap_err(), Error::NotRegular { found: "a link", .. }));
    assert_eq!(fs::read_to_string(t.path("outside/secret")).unwrap(), "secret");
}

#[test]
fn held_writes_check_everything_and_write_nothing() {
    let t = Tree::new();
    let policy = t.policy(Resolution::Auto);
    let path = t.path("inside/a.npy");
    fs::write(&path, "old").unwrap();
    let hold = policy.hold_writes();
    let inner = policy.hold_writes();
    put(&policy, &path, "new").unwrap();
    let mut file = policy.create(&path, &["npy"]).unwrap();
    file.write_all(b"1234").unwrap();
    assert_eq!((file.seek(SeekFrom::Start(1)).unwrap(), file.seek(SeekFrom::End(-1)).unwrap()), (1, 3));
    file.commit().unwrap();
    drop(inner);
    put(&policy, &t.path("inside/b.npy"), "new").unwrap();
    assert!(put(&policy, &t.path("outside/w.npy"), "x").is_err());
    assert!(put(&policy, &t.path("inside/w.sh"), "x").is_err());
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    assert!(!t.path("inside/b.npy").exists());
    drop(hold);
    put(&policy, &path, "new").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    let policy = Policy::builder().allow_write(&t.path("inside")).unwrap().read_only(true).build();
    put(&policy, &path, "newer").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
}

#[test]
fn arguments_grant_what_they_name_and_no_more() {
    let t = Tree::new();
    let text = |name: &str| t.path(name).display().to_string();
    fs::write(t.path("outside/other.csv"), "other").unwrap();
    fs::write(t.path("outside/m-1.safetensors"), "m").unwrap();
    t.link("outside/secret", "named");

    let policy = Policy::builder().argument(&text("outside/other.csv")).build();
    assert_eq!(read(&*policy, &t.path("outside/other.csv")).unwrap(), "other");
    assert!(policy.open(&t.path("outside/secret")).is_err() && policy.list(&t.path("outside")).is_err());

    let policy = Policy::builder().argument(&text("outside")).build();
    assert_eq!(read(&*policy, &t.path("outside/secret")).unwrap(), "secret");
    assert!(put(&policy, &t.path("outside/w.npy"), "x").is_err(), "a directory of data is for reading");

    let policy = Policy::builder().argument(&text("outside/w.npy")).build();
    put(&policy, &t.path("outside/w.npy"), "x").unwrap();
    assert_eq!(read(&*policy, &t.path("outside/w.npy")).unwrap(), "x", "what was written is read back");
    assert!(put(&policy, &t.path("outside/v.npy"), "x").is_err());

    let policy = Policy::builder().argument(&text("none/w.npy")).build();
    let e = put(&policy, &t.path("none/w.npy"), "x").unwrap_err().to_string();
    assert!(e.contains("there is no folder"), "{e}");

    let policy = Policy::builder().argument(&text("named")).build();
    assert_eq!(read(&*policy, &t.path("named")).unwrap(), "secret", "the link that the argument names");

    let policy = Policy::builder().argument(&text("outside/m.safetensors.index.json")).build();
    assert_eq!(read(&*policy, &t.path("outside/m-1.safetensors")).unwrap(), "m");
    assert!(policy.open(&t.path("outside/secret")).is_err());

    for value in ["/", "..", "../..", ".", "", "3e-4", "a\0b"] {
        let policy = Policy::builder().argument(value).build();
        assert!(policy.open(&t.path("outside/secret")).is_err(), "{value:?}");
        assert!(policy.open(Path::new("/etc/passwd")).is_err(), "{value:?}");
        assert!(policy.open(Path::new("Cargo.toml")).is_err(), "{value:?}");
    }
    assert!(Policy::builder().allow_read(&t.path("none")).is_err());
    assert!(Policy::builder().allow_write(&t.path("inside/a.csv")).is_err());
    let one = Policy::builder().allow_read(&t.path("outside/secret")).unwrap().build();
    assert!(read(&*one, &t.path("outside/secret")).is_ok() && one.open(&t.path("outside/other.csv")).is_err());
}

#[test]
fn a_recipe_reads_its_folder_and_the_current_directory_around_it() {
    // Tests run in the folder of the crate.
    let t = Tree::new();
    fs::write(t.path("inside/r.lua"), "").unwrap();
    let policy = Policy::builder().recipe(&t.path("inside/r.lua")).build();
    assert_eq!(read(&*policy, &t.path("inside/sub/b.csv")).unwrap(), "b");
    assert!(policy.open(Path::new("Cargo.toml")).is_err(), "the recipe is not beneath the current directory");
    assert!(put(&policy, &t.path("inside/w.npy"), "x").is_err(), "reads only");
    let policy = Policy::builder().recipe(Path::new("src/lib.rs")).build();
    assert!(policy.open(Path::new("Cargo.toml")).is_ok() && policy.open(Path::new("src/lib.rs")).is_ok());
    assert!(policy.open(Path::new("../data/Cargo.toml")).is_err());
    let policy = Policy::builder().recorded_recipe(&t.path("inside/r.lua")).build();
    assert!(policy.open(&t.path("inside/a.csv")).is_err(), "a record opens nothing");
    let policy = Policy::builder().recorded_recipe(Path::new("src/lib.rs")).build();
    assert!(policy.open(Path::new("src/lib.rs")).is_ok());
    assert!(Policy::closed().open(Path::new("Cargo.toml")).is_err());
}

/// Only the names of relative paths depend on it; flags start from the current directory.
#[test]
fn a_start_elsewhere_grants_nothing() {
    let t = Tree::new();
    let start = || Policy::builder().relative_to(&t.path("inside"));
    let policy = start().recorded_recipe(Path::new("r.lua")).build();
    assert_eq!(policy.elsewhere(), Some(t.path("inside").as_path()));
    for path in ["a.csv", "sub/b.csv", "../outside/secret", "Cargo.toml"] {
        let error = policy.open(Path::new(path)).unwrap_err();
        assert!(matches!(error, Error::Denied { .. }), "{path}: {error}");
    }
    // The flag of the cure is one for the current directory.
    let cure = policy.open(Path::new("sub/b.csv")).unwrap_err().cure().unwrap();
    assert_eq!(cure, format!("allow it on the command line: --allow-read={}", t.path("inside/sub").display()));
    let policy = start().allow_read(Path::new("src")).unwrap().allow_read(&t.path("inside")).unwrap().build();
    assert_eq!(read(&*policy, Path::new("sub/b.csv")).unwrap(), "b");
    let src = std::env::current_dir().unwrap().join("src");
    assert!(policy.open(&src.join("lib.rs")).is_ok() && policy.open(Path::new("src/lib.rs")).is_err());
    // The recipe of the record beneath the current directory.
    let policy = Policy::builder().relative_to(&src).recorded_recipe(Path::new("lib.rs")).build();
    assert!(policy.open(Path::new("lib.rs")).is_ok() && policy.open(Path::new("../Cargo.toml")).is_ok());
    assert!(policy.open(Path::new("../../data/Cargo.toml")).is_err());
    // A run directory is granted by the path of this command.
    let policy = start().build();
    policy.grant_directory(Path::new("src")).unwrap();
    assert!(policy.open(&src.join("lib.rs")).is_ok());
}

#[test]
fn directories_list_what_may_be_read_and_suggest_only_that() {
    let t = Tree::new();
    t.link("../outside", "inside/out");
    t.link("sub", "inside/in");
    t.link("none", "inside/nowhere");
    for how in BOTH {
        let policy = t.policy(how);
        let mut found = policy.list(&t.path("inside")).unwrap();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        let found: Vec<(&str, Kind)> = found.iter().map(|e| (e.name.to_str().unwrap(), e.kind)).collect();
        let want = [
            ("a.csv", Kind::File),
            ("in", Kind::Directory),
            ("nowhere", Kind::Other),
            ("out", Kind::Outside),
            ("sub", Kind::Directory),
        ];
        assert_eq!(found, want);
        let dir = Directory::resolving(&t.path("inside"), how).unwrap();
        let mut same = dir.list(Path::new("")).unwrap();
        same.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(same.iter().map(|e| e.kind).collect::<Vec<_>>(), want.map(|w| w.1));
        assert_eq!(near(&*policy, &t.path("inside/a.cvs")).as_deref(), Some("a.csv"));
        assert_eq!(near(&*policy, &t.path("outside/secrte")), None);
        assert_eq!(near(&*policy, &t.path("inside/out/secrte")), None);
    }
}

#[test]
fn a_directory_opens_files_of_its_own_only() {
    let t = Tree::new();
    t.link("a.csv", "inside/link");
    t.link("sub", "inside/dir");
    t.link("inside", "name");
    for how in BOTH {
        let dir = Directory::resolving(&t.path("inside"), how).unwrap();
        assert_eq!(dir.open_unlinked(Path::new("sub/b.csv")).unwrap().text(9).unwrap(), "b");
        for path in ["link", "dir/b.csv"] {
            assert!(matches!(
                dir.open_unlinked(Path::new(path)).unwrap_err(),
                Error::NotRegular { found: "a link", .. }
            ));
        }
        for path in ["../outside/secret", "/etc/passwd"] {
            assert!(dir.open_unlinked(Path::new(path)).is_err());
        }
        let mut file = dir.create("new").unwrap();
        file.write_all(b"x").unwrap();
        file.commit().unwrap();
        dir.sync().unwrap();
        for name in ["../new", "", ".", "..", "sub/x", "/x", "sub", "link"] {
            assert!(dir.create(name).is_err(), "{name}");
        }
    }
    assert!(Directory::open_itself(&t.path("name")).is_err() && Directory::open(&t.path("name")).is_ok());
    assert!(Directory::open_itself(&t.path("inside/")).is_ok());
}

/// While a directory is swapped for a link to another place and back, an open gives the file beneath the root or an error.
#[test]
fn renames_during_an_open_lead_nowhere_else() {
    for how in BOTH {
        let t = Tree::new();
        fs::create_dir_all(t.path("inside/d/e")).unwrap();
        fs::write(t.path("inside/d/e/secret"), "mine").unwrap();
        fs::create_dir_all(t.path("outside/e")).unwrap();
        fs::write(t.path("outside/e/secret"), "secret").unwrap();
        let policy = t.policy(how);
        let stop = AtomicBool::new(false);
        let (mut opened, mut refused) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (dir, aside) = (t.path("inside/d"), t.path("inside/aside"));
                let (deep, moved) = (t.path("inside/aside/e"), t.path("outside/moved"));
                while !stop.load(Ordering::Relaxed) {
                    fs::rename(&dir, &aside).unwrap();
                    symlink("../outside", &dir).unwrap();
                    // Moved out of the root, so that its `..` is outside.
                    fs::rename(&deep, &moved).unwrap();
                    fs::rename(&moved, &deep).unwrap();
                    fs::remove_file(&dir).unwrap();
                    fs::rename(&aside, &dir).unwrap();
                }
            });
            let end = std::time::Instant::now() + std::time::Duration::from_millis(700);
            while std::time::Instant::now() < end {
                for name in ["inside/d/e/secret", "inside/d/e/../e/secret"] {
                    match read(&*policy, &t.path(name)) {
                        Ok(text) => {
                            assert_eq!(text, "mine");
                            opened += 1;
                        }
                        Err(_) => refused += 1,
                    }
                }
                let _ = put(&policy, &t.path("inside/d/e/w.npy"), "x");
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(opened > 0 && refused > 0, "{how:?}: {opened} opened, {refused} refused");
        assert!(!t.path("outside/e/w.npy").exists(), "{how:?}");
    }
}
