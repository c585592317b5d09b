//! Bundles that are whole, beside signatures that are not theirs.

use super::{Expect, Hostile};
use crate::support::Place;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A signature beside the bundle.
fn beside(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.minisig", path.display()))
}

pub fn all(author: &Place) -> Vec<Hostile> {
    let good = std::fs::read(author.path("good.plb")).unwrap();
    let signature = author.read("good.plb.minisig");
    let lines: Vec<&str> = signature.lines().collect();
    let edited = |edit: &dyn Fn(&mut Vec<String>)| {
        let mut lines: Vec<String> = lines.iter().map(|l| l.to_string()).collect();
        edit(&mut lines);
        lines.join("\n") + "\n"
    };
    let other = author.read("other.plb.minisig");
    let others: Vec<&str> = other.lines().collect();
    let mut out = Vec::new();
    let mut add = |name: &str, expect: Expect, signature: Vec<u8>| {
        let good = good.clone();
        let write = move |path: &Path| {
            std::fs::write(path, &good).unwrap();
            std::fs::write(beside(path), &signature).unwrap();
        };
        out.push(Hostile { name: format!("signature-{name}"), expect, write: Box::new(write) });
    };
    const NONE: &str = "is no signature of minisign";
    const OTHER: &str = "is not the signature of";
    add("of-another-file", Expect::Refused(OTHER), other.clone().into_bytes());
    // The key that the comment names did not make it.
    let claimed = edited(&|l| l[0] = others[0].into());
    add("of-another-key", Expect::Refused("is by a key that it does not contain"), claimed.into_bytes());
    let mixed = edited(&|l| (l[2], l[3]) = (others[2].into(), others[3].into()));
    add("of-two-files", Expect::Refused(OTHER), mixed.into_bytes());
    let trusted = edited(&|l| l[2] = format!("{}\u{1b}[2Jtrusted by ada", l[2]));
    add("comment-changed", Expect::Refused(OTHER), trusted.into_bytes());
    // The signature does not cover the first comment, so it is not shown.
    let first = edited(&|l| l[0] = l[0].replace("signature of", "\u{1b}[2J\u{9b}31m\u{202e}signed by ada"));
    add("comment-escape", Expect::Contained, first.into_bytes());
    // The same key under the name of another algorithm.
    let algorithm = edited(&|l| l[0] = l[0].replace(" RW", " RX"));
    add("other-algorithm", Expect::Refused("is by a key that it does not contain"), algorithm.into_bytes());
    add("empty", Expect::Refused(NONE), Vec::new());
    add("no-text", Expect::Refused(NONE), vec![0xff; 300]);
    add("cut", Expect::Refused(NONE), signature.as_bytes()[..150].to_vec());
    add("short", Expect::Refused(NONE), edited(&|l| l[1].truncate(40)).into_bytes());
    add("long", Expect::Refused(NONE), edited(&|l| l[1] = l[1].repeat(300)).into_bytes());
    add("huge", Expect::Refused("is no key or signature"), edited(&|l| l[2] = l[2].repeat(100_000)).into_bytes());
    add("zeros", Expect::Refused("is no key or signature"), vec![0; 32 << 20]);
    let mut place = |name: &str, rule: &'static str, put: fn(&Path)| {
        let good = good.clone();
        let write = move |path: &Path| {
            std::fs::write(path, &good).unwrap();
            put(&beside(path));
        };
        out.push(Hostile { name: format!("signature-{name}"), expect: Expect::Refused(rule), write: Box::new(write) });
    };
    place("is-a-fifo", "bad.plb.minisig", |path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    });
    place("is-a-folder", "bad.plb.minisig", |path| std::fs::create_dir(path).unwrap());
    place("is-a-device", "bad.plb.minisig", |path| symlink("/dev/zero", path).unwrap());
    place("is-a-secret", NONE, |path| symlink("../victim/secret.txt", path).unwrap());
    out
}
