//! Attempts forbidden acts by native system calls in a process of its own, behind both walls, behind each alone, and behind none.
//!
//! An act that a wall refuses must be refused wherever that wall stands, in the first thread, in a thread from before the walls and in
//! one from after them. Without the wall it must not be refused, which shows that the attempt is one.
#![allow(unsafe_code, clippy::unwrap_used)]
// The type of some constants differs among C libraries.
#![allow(clippy::unnecessary_cast)]

#[cfg(target_os = "linux")]
#[path = "walls/acts.rs"]
mod acts;

#[cfg(target_os = "linux")]
mod linux {
    use super::acts::{self, By};
    use perilune_confine::{Files, Wall, Walls, enter_calls, enter_files, needs};
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::mpsc;

    const MODES: [&str; 4] = ["both", "files", "calls", "none"];

    /// A folder with what is granted, what is not, and traps.
    fn place() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["read", "write", "closed", "list/inner"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["read/a", "write/a", "closed/secret", "closed/probe", "list/a", "one", "two"] {
            std::fs::write(at(file), "content\n").unwrap();
        }
        std::os::unix::fs::symlink(at("closed/secret"), at("read/link")).unwrap();
        std::os::unix::fs::symlink(at("closed"), at("write/up")).unwrap();
        dir
    }

    fn files(dir: &Path, mode: &str) -> Files {
        let at = |name: &str| dir.join(name);
        let mut files = Files {
            // Paths that are not there stand before and among the others: they must not weaken the rest.
            read: vec![at("missing"), at("read"), at("nowhere/at/all"), at("one")],
            list: vec![at("list")],
            write: vec![at("gone"), at("write")],
            devices: vec![PathBuf::from("/dev/nvidia-missing")],
            probe: Some(at("closed/probe")),
            without: if mode == "both" || mode == "files" { vec![] } else { vec![Wall::Files] },
        };
        needs::add(&mut files, false, &[]);
        files
    }

    /// Enters the walls of a mode and prints what each act did: `NAME THREAD ERRNO`, 0 for one that was done.
    fn act(dir: &Path, mode: &str) {
        let mut walls = Walls::default();
        if mode != "none" {
            walls.extend(enter_files(&files(dir, mode)).unwrap());
        }
        // A thread from before the filter, which waits.
        let (go, wait) = mpsc::channel::<()>();
        let here = dir.to_path_buf();
        let before = std::thread::spawn(move || {
            wait.recv().unwrap();
            acts::all(&here).into_iter().map(|act| (act.name, act.attempt())).collect::<Vec<_>>()
        });
        if mode == "both" || mode == "calls" {
            walls.extend(enter_calls().unwrap());
        }
        let here = dir.to_path_buf();
        let attempts = move || acts::all(&here).into_iter().map(|act| (act.name, act.attempt())).collect::<Vec<_>>();
        let main = attempts();
        go.send(()).unwrap();
        let before = before.join().unwrap();
        let after = std::thread::spawn(attempts).join().unwrap();
        for (thread, list) in [("main", main), ("before", before), ("after", after)] {
            for (name, errno) in list {
                println!("act {name} {thread} {errno}");
            }
        }
        for wall in Wall::ALL {
            println!("wall {wall:?} {}", walls.stands(wall));
        }
        println!("skipped {}", walls.skipped.len());
        acts::allowed(dir);
        println!("end");
    }

    fn run(mode: &str, broken: &mut Vec<String>) {
        let dir = place();
        let me = std::env::current_exe().unwrap();
        let out = Command::new(me).args(["--act", mode]).arg(dir.path()).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        if !out.status.success() || !text.ends_with("end\n") {
            let said = String::from_utf8_lossy(&out.stderr);
            broken.push(format!("{mode}: the process ended with {}: {text}{said}", out.status));
            return;
        }
        let mut did: BTreeMap<(String, String), i32> = BTreeMap::new();
        let mut stands: BTreeMap<String, bool> = BTreeMap::new();
        for line in text.lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["act", name, thread, errno] => drop(did.insert((name.into(), thread.into()), errno.parse().unwrap())),
                ["wall", wall, stand] => drop(stands.insert(wall.into(), stand == "true")),
                // Four paths of the test; of the program's own only those that are there are named.
                ["skipped", n] if (mode == "both" || mode == "files") && n != "4" => {
                    broken.push(format!("{mode}: {n} paths are reported as skipped, not 4"));
                }
                _ => {}
            }
        }
        let files = mode == "both" || mode == "files";
        let calls = mode == "both" || mode == "calls";
        for (wall, expected) in [("Files", files), ("Programs", calls), ("Sockets", calls), ("Calls", calls)] {
            if stands[wall] != expected {
                broken.push(format!("{mode}: {wall} is reported as {}", stands[wall]));
            }
        }
        // EXDEV: what Landlock says of a link or a rename between directories.
        let refusal = |errno: i32| matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EXDEV);
        for act in acts::all(dir.path()) {
            for thread in ["main", "before", "after"] {
                let Some(errno) = did.get(&(act.name.to_string(), thread.to_string())) else {
                    broken.push(format!("{mode}: {} was not attempted in the {thread} thread", act.name));
                    continue;
                };
                let refused = match act.by {
                    By::Files => files,
                    By::Calls => calls,
                };
                if refused && !refusal(*errno) {
                    broken.push(format!("{mode}: {} in the {thread} thread: errno {errno}", act.name));
                }
                let other = act.by == By::Calls && !calls || act.by == By::Files && !files;
                if other && act.free && refusal(*errno) {
                    broken.push(format!("{mode}: {} is refused without its wall: errno {errno}", act.name));
                }
            }
        }
        println!("{mode}: {} acts", did.len());
        if let Ok(left) = std::fs::read(dir.path().join("closed/secret")) {
            if files && left != b"content\n" {
                broken.push(format!("{mode}: the closed file was changed"));
            }
        } else {
            broken.push(format!("{mode}: the closed file is gone"));
        }
    }

    pub fn main() {
        let args: Vec<String> = std::env::args().collect();
        if let [_, flag, mode, dir] = &args[..]
            && flag == "--act"
        {
            return act(Path::new(dir), mode);
        }
        if args.iter().any(|a| a == "--list") {
            return println!("walls: test");
        }
        let mut broken = Vec::new();
        for mode in MODES {
            run(mode, &mut broken);
        }
        assert!(broken.is_empty(), "{} are broken:\n{}", broken.len(), broken.join("\n"));
    }
}

fn main() {
    #[cfg(target_os = "linux")]
    linux::main();
}
