//! Archives with forged bytes: each command refuses them before anything is unpacked.

use super::{Expect, Hostile, LUA, TINY, first, listing};
use crate::archive::{
    END, Frame, Header, KIND, LINK, MODE, UID, archive, entry, header, octal, packed, plain, with_checks,
};
use perilune_bundle::manifest::MANIFEST;
use std::os::unix::fs::symlink;
use std::path::Path;

const NAME: &str = "the name";
const HEADER: &str = "not that of a plain file";

/// The recipe's files, then an entry that is not listed.
fn and(hostile: &[u8]) -> Vec<u8> {
    let lua = TINY.as_bytes();
    archive(&[&first(&[(LUA, lua)]), hostile, &plain(LUA, lua)])
}

/// An entry whose header is changed.
fn changed(change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut out = header(LUA.as_bytes(), TINY.len() as u64);
    change(&mut out);
    and(&entry(out, TINY.as_bytes()))
}

/// An entry of a kind, whose link leads to `to`.
fn kind(kind: u8, to: &str) -> Vec<u8> {
    changed(|header| {
        header[KIND] = kind;
        header[LINK..LINK + to.len()].copy_from_slice(to.as_bytes());
    })
}

/// A bundle whose manifest lists two files beside the recipe.
fn twins(a: &str, b: &str) -> Vec<u8> {
    let (mut names, lua) = ([a, b], TINY.as_bytes());
    names.sort_unstable();
    let files = [(names[0], &b"x"[..]), (names[1], b"x"), (LUA, lua)];
    archive(&[&first(&files), &plain(names[0], b"x"), &plain(names[1], b"x"), &plain(LUA, lua)])
}

/// A manifest that lists one more file of `bytes` zeros, its entry's header, and the zeros.
fn bomb(bytes: u64, window: u8) -> Vec<u8> {
    let mut manifest = listing(&[("a", b""), (LUA, TINY.as_bytes())]);
    manifest.files[0].bytes = bytes;
    let tar = [&plain(MANIFEST, manifest.text().as_bytes())[..], &header(b"a", bytes)].concat();
    with_checks(&Frame::new(window).stored(&tar).zeros(bytes.min(4 << 30)).finish())
}

pub fn all() -> Vec<Hostile> {
    let lua = TINY.as_bytes();
    let files = [(LUA, lua)];
    let whole = [&first(&files)[..], &plain(LUA, lua), &END].concat();
    let good = packed(&whole);
    let frame = Frame::new(17).stored(&whole).finish();
    let mut out = Vec::new();
    let mut add =
        |name: &str, rule: &'static str, bytes: Vec<u8>| out.push(Hostile::bytes(name, Expect::Refused(rule), bytes));
    for (name, entry) in [
        ("traversal", "../x"),
        ("traversal-inside", "recipe/../../victim/secret.txt"),
        ("absolute", "/etc/cron.d/x"),
        ("empty-part", "a//b"),
        ("hidden", ".bashrc"),
        ("option", "-rf"),
        ("line", "a\nb"),
        ("escape", "\u{1b}[2J\u{1b}]0;owned\u{7}"),
        ("direction", "\u{202e}aul.x"),
        ("drive", "C:\\x"),
        ("device-name", "con.lua"),
        ("wildcard", "*"),
    ] {
        add(&format!("name-{name}"), NAME, and(&plain(entry, b"x")));
    }
    add("name-bytes", "no UTF-8", and(&entry(header(b"\xff\xfe\x1b[2J", 1), b"x")));
    add("symbolic-link", HEADER, kind(b'2', "/etc/passwd"));
    add("hard-link", HEADER, kind(b'1', "../../victim/secret.txt"));
    add("character-device", HEADER, kind(b'3', ""));
    add("block-device", HEADER, kind(b'4', ""));
    add("folder", HEADER, kind(b'5', ""));
    add("fifo", HEADER, kind(b'6', ""));
    add("long-name", HEADER, kind(b'L', ""));
    add("extended-header", HEADER, kind(b'x', ""));
    add("global-header", HEADER, kind(b'g', ""));
    add("sparse", HEADER, kind(b'S', ""));
    add("setuid", HEADER, changed(|header| octal(header, MODE, 0o4755)));
    add("owner", HEADER, changed(|header| octal(header, UID, 1000)));
    add("two-of-one-name", "is not listed", archive(&[&first(&files), &plain(LUA, lua), &plain(LUA, b"os.exit()")]));
    add("two-manifests", "is where manifest.json lists", archive(&[&first(&files), &first(&[]), &plain(LUA, lua)]));
    add("case", "only in the case of letters", twins("recipe/A.lua", "recipe/a.lua"));
    add("case-folded", "only in the case of letters", twins("recipe/\u{17f}et.lua", "recipe/set.lua"));
    add("normalization", "must not contain", twins("recipe/\u{d55c}.lua", "recipe/\u{1112}\u{1161}\u{11ab}.lua"));
    add("accent", "must not contain", twins("recipe/\u{e9}.lua", "recipe/e\u{301}.lua"));
    add("bomb", "unpacks to more than its size allows", bomb(3 << 30, 17));
    add("bomb-of-an-exabyte", "unpacks to more than its size allows", bomb(1 << 60, 17));
    add("window-of-a-terabyte", "cannot be unpacked", bomb(1 << 20, 40));
    let many: Vec<u8> = (0..20_000).flat_map(|k| plain(&format!("z/{k}"), b"")).collect();
    add("many-entries", "is not listed", archive(&[&first(&files), &plain(LUA, lua), &many]));
    add("no-manifest", "its first entry must be", archive(&[&plain(LUA, lua)]));
    add("no-entries", "the archive is empty", archive(&[]));
    let large = header(MANIFEST.as_bytes(), (64 << 20) + 1);
    add(
        "manifest-of-64-MiB",
        "its first entry must be",
        with_checks(&Frame::new(17).stored(&large).zeros(70 << 20).finish()),
    );
    let zeros = header(MANIFEST.as_bytes(), 64 << 20);
    add("manifest-of-zeros", MANIFEST, with_checks(&Frame::new(17).stored(&zeros).zeros(64 << 20).finish()));
    add("missing-file", "is missing", archive(&[&first(&files)]));
    add("other-content", "its hash is", archive(&[&first(&files), &plain(LUA, "x".repeat(lua.len()).as_bytes())]));
    add("after-the-end", "something follows its end", packed(&[&whole[..], b"x"].concat()));
    add("second-frame", "something follows the archive", with_checks(&[&frame[..], &frame].concat()));
    add("half-an-end", "cannot be unpacked", packed(&whole[..whole.len() - 512]));
    add("cut-entry", "cannot be unpacked", packed(&whole[..whole.len() - 1024 - 300]));
    add("trailing-bytes", "what follows byte", [&good[..], b"\x1b[2Jmore"].concat());
    add("cut-file", "was cut off", good[..good.len() / 2].to_vec());
    add("other-magic", "it is no bundle", [b"PK\x03\x04", &[7; 5000][..]].concat());
    add("no-bytes", "it is no bundle", Vec::new());
    add("no-zstd", "cannot be unpacked", with_checks(&b"\x1f\x8b\x08".repeat(3000)));
    add("changed-byte", "byte 100 is 0x", [&good[..100], &[good[100] ^ 1], &good[101..]].concat());
    let mut place = |name: &str, rule: &'static str, write: fn(&Path)| {
        out.push(Hostile { name: name.into(), expect: Expect::Refused(rule), write: Box::new(write) });
    };
    place("is-a-fifo", "is a FIFO", |path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    });
    place("is-a-folder", "bad.plb", |path| std::fs::create_dir(path).unwrap());
    place("is-a-link-to-a-device", "is a device", |path| symlink("/dev/zero", path).unwrap());
    place("is-a-link-to-itself", "bad.plb", |path| symlink("bad.plb", path).unwrap());
    out
}
