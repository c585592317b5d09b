//! Archives and manifests that a hostile author would write: each is refused by its rule.

use super::forge::{END, archive, entry, packed, plain, with_checks};
use super::{LUA, Place, error, forge, item, listing, manifest, noise};
use crate::manifest::{DataFile, FileEntry, MANIFEST, Manifest};
use crate::{Bundle, Content, Item, pack};
use std::fs;
use std::io::Write;

fn header(name: &str, len: u64) -> tar::Header {
    let mut header = tar::Header::new_old();
    header.as_mut_bytes().copy_from_slice(&forge::header(name.as_bytes(), len));
    header
}

#[test]
fn the_tests_write_archives_that_are_accepted() {
    let place = Place::new();
    let text = listing(&[(LUA, b"return 1\n")]).text();
    let good = archive(&[&plain(MANIFEST, text.as_bytes()), &plain(LUA, b"return 1\n")]);
    Bundle::open(&place.write("a.plb", &good)).expect("the tests' own archives are right");
}

#[test]
fn hostile_entries_are_refused() {
    let place = Place::new();
    let lua: &[u8] = b"return 1\n";
    let good = listing(&[(LUA, lua)]);
    let first = plain(MANIFEST, good.text().as_bytes());
    let changed = |change: &dyn Fn(&mut tar::Header)| {
        let mut header = header(LUA, lua.len() as u64);
        change(&mut header);
        entry(*header.as_bytes(), lua)
    };
    let kinds = [
        tar::EntryType::Symlink,
        tar::EntryType::Link,
        tar::EntryType::Char,
        tar::EntryType::Block,
        tar::EntryType::Directory,
        tar::EntryType::Fifo,
        tar::EntryType::Continuous,
        tar::EntryType::GNULongName,
        tar::EntryType::GNULongLink,
        tar::EntryType::GNUSparse,
        tar::EntryType::XGlobalHeader,
        tar::EntryType::XHeader,
    ];
    for kind in kinds {
        let hostile = changed(&|header| header.set_entry_type(kind));
        let text = error(&place.write("b.plb", &archive(&[&first, &hostile])));
        assert!(text.contains("not that of a plain file"), "{kind:?}: {text}");
    }
    type Change<'a> = &'a dyn Fn(&mut tar::Header);
    let changes: [(&str, Change<'_>); 9] = [
        ("setuid", &|h| h.set_mode(0o4755)),
        ("executable", &|h| h.set_mode(0o755)),
        ("owner", &|h| h.set_uid(1000)),
        ("group", &|h| h.set_gid(1000)),
        ("time", &|h| h.set_mtime(1)),
        ("link name", &|h| h.set_link_name_literal("/etc/passwd").expect("set")),
        ("device", &|h| h.set_device_major(1).expect("set")),
        ("user name", &|h| h.set_username("root").expect("set")),
        ("reserved bytes", &|h| h.as_mut_bytes()[505] = 1),
    ];
    for (what, change) in changes {
        let text = error(&place.write("b.plb", &archive(&[&first, &changed(change)])));
        assert!(text.contains("not that of a plain file"), "{what}: {text}");
    }
    let names =
        ["../x", "/etc/cron.d/x", "a/../../x", "a//b", ".ssh/id", "C:\\x", "a\nb", "con", "-rf", "a/./b", "\u{202e}a"];
    for name in names {
        let text = error(&place.write("b.plb", &archive(&[&first, &plain(name, lua)])));
        assert!(text.contains("the name"), "{name:?}: {text}");
    }
    let mut bytes = plain("a", lua);
    bytes[0] = 0xff;
    let text = error(&place.write("b.plb", &archive(&[&first, &bytes])));
    assert!(text.contains("no UTF-8"), "{text}");
}

#[test]
fn archives_that_are_not_their_manifest_are_refused() {
    let place = Place::new();
    let lua: &[u8] = b"return 1\n";
    let refused = |bytes: &[u8]| error(&place.write("b.plb", bytes));
    let first = |files: &[(&str, &[u8])]| plain(MANIFEST, listing(files).text().as_bytes());
    let one = [(LUA, lua)];
    let rules: [(&str, Vec<u8>, &str); 14] = [
        ("no entries", archive(&[]), "the archive is empty"),
        ("no manifest", archive(&[&plain(LUA, lua)]), "its first entry must be manifest.json"),
        ("manifest twice", archive(&[&first(&one), &first(&one), &plain(LUA, lua)]), "is where manifest.json lists"),
        ("missing", archive(&[&first(&one)]), "is missing"),
        ("other content", archive(&[&first(&one), &plain(LUA, b"return 2\n")]), "its hash is"),
        ("other length", archive(&[&first(&one), &plain(LUA, b"return 10\n")]), "is where manifest.json lists"),
        ("extra", archive(&[&first(&one), &plain(LUA, lua), &plain("z", b"")]), "z is not listed"),
        ("twice", archive(&[&first(&one), &plain(LUA, lua), &plain(LUA, lua)]), "is not listed"),
        ("half an end", packed(&[&first(&one)[..], &plain(LUA, lua), &[0; 512]].concat()), "cannot be unpacked"),
        ("no end", packed(&[&first(&one)[..], &plain(LUA, lua)].concat()), "cannot be unpacked"),
        (
            "after the end",
            packed(&[&first(&one)[..], &plain(LUA, lua), &END, b"x"].concat()),
            "something follows its end",
        ),
        (
            "padding",
            {
                let mut tar = [&first(&one)[..], &plain(LUA, lua), &END].concat();
                let at = first(&one).len() + 512 + lua.len();
                tar[at] = 1;
                packed(&tar)
            },
            "padded with other bytes",
        ),
        (
            "checksum",
            {
                let mut bad = plain(LUA, lua);
                bad[150] ^= 1;
                archive(&[&first(&one), &bad])
            },
            "its header is not",
        ),
        ("cut entry", packed(&[&first(&one)[..], &plain(LUA, lua)[..515]].concat()), "ends inside an entry"),
    ];
    for (what, bytes, rule) in rules {
        let text = refused(&bytes);
        assert!(text.contains(rule), "{what}: {text}");
    }
    let zstd = zstd::stream::encode_all(&[&first(&one)[..], &plain(LUA, lua), &END].concat()[..], 3).expect("packed");
    let twice = refused(&with_checks(&[&zstd[..], &zstd].concat()));
    assert!(twice.contains("something follows the archive"), "{twice}");
    let behind = refused(&with_checks(&[&zstd[..], b"\0\0"].concat()));
    assert!(behind.contains("something follows the archive"), "{behind}");
    assert!(refused(&with_checks(&zstd[..zstd.len() / 2])).contains("cannot be unpacked"));
    assert!(refused(&with_checks(&noise(5, 9000))).contains("cannot be unpacked"));
    assert!(refused(&with_checks(b"")).contains("cannot be unpacked"));
}

#[test]
fn bombs_are_refused_before_they_unpack() {
    let place = Place::new();
    // An entry of 2 GiB of zeros in a few hundred kilobytes.
    let mut manifest = listing(&[(LUA, b"")]);
    manifest.files[0].bytes = 2 << 30;
    let tar = [&plain(MANIFEST, manifest.text().as_bytes())[..], &header(LUA, 2 << 30).as_bytes()[..]].concat();
    let text = error(&place.write("b.plb", &packed(&tar)));
    assert!(text.contains("unpacks to more than its size allows"), "{text}");
    // A window of 1 GiB.
    let mut to = zstd::stream::Encoder::new(Vec::new(), 3).expect("an encoder");
    to.window_log(30).and_then(|()| to.write_all(&tar)).expect("written");
    let text = error(&place.write("b.plb", &with_checks(&to.finish().expect("packed"))));
    assert!(text.contains("cannot be unpacked"), "{text}");
    // A manifest that is too long.
    let tar = header(MANIFEST, (64 << 20) + 1).as_bytes().to_vec();
    let text = error(&place.write("b.plb", &packed(&tar)));
    assert!(text.contains("its first entry must be"), "{text}");
    // What a reader would refuse is not packed.
    let zeros = place.at("zeros");
    fs::File::create(&zeros).and_then(|file| file.set_len(2 << 30)).expect("a sparse file");
    let items = [item(LUA, b""), Item { name: "zeros".into(), content: Content::File(zeros) }];
    if std::env::var_os("PERILUNE_SOAK").is_some() {
        let text = pack(&place.at("z.plb"), &mut super::manifest(), &items).expect_err("a bomb").to_string();
        assert!(text.contains("refuse as a bomb"), "{text}");
        assert!(!place.at("z.plb").exists());
    }
}

#[test]
fn hostile_manifests_are_refused() {
    let place = Place::new();
    let lua: &[u8] = b"return 1\n";
    let good = listing(&[(LUA, lua)]);
    let refused =
        |text: &str| error(&place.write("b.plb", &archive(&[&plain(MANIFEST, text.as_bytes()), &plain(LUA, lua)])));
    let with = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        manifest.text()
    };
    let hash = blake3::hash(lua).to_hex().to_string();
    let file = |path: &str| FileEntry { path: path.into(), bytes: 9, blake3: hash.clone() };
    let data = |path: &str, inside: bool, folder: Option<&str>| DataFile {
        path: path.into(),
        bytes: 9,
        blake3: hash.clone(),
        address: None,
        inside,
        folder: folder.map(String::from),
    };
    type Change<'a> = &'a dyn Fn(&mut Manifest);
    let changes: [(Change<'_>, &str); 14] = [
        (&|m| m.format = 2, "a newer Perilune may read it"),
        (&|m| m.recipe = "recipe/other.lua".into(), "is not among the files"),
        (&|m| m.stdlib = "x".into(), "is no BLAKE3 hash"),
        (&|m| m.files[0].blake3 = hash.to_uppercase(), "is no BLAKE3 hash"),
        (&|m| m.files.push(file("a")), "in the order of names"),
        (&|m| m.files.push(file(LUA)), "in the order of names"),
        (&|m| m.files.push(file("recipe/DIGITS.lua")), "in the order of names"),
        (&|m| m.files.insert(0, file("recipe/Digits.lua")), "only in the case of letters"),
        (&|m| m.files.push(file("recipe/digits.lua/x")), "is a file, and the folder of"),
        (&|m| m.files.push(file("../x")), "the name"),
        (&|m| m.data.push(data("x.csv", true, None)), "is said to be inside"),
        (&|m| m.data.push(data("", false, None)), "must have 1 to 4096 bytes"),
        (&|m| m.data.push(data("f/../../x", false, Some("f"))), "is not beneath the folder"),
        (&|m| m.data.push(data("g/x", false, Some("f"))), "is not beneath the folder"),
    ];
    for (change, rule) in changes {
        let text = refused(&with(change));
        assert!(text.contains(rule), "{rule}: {text}");
    }
    let text = good.text();
    let unknown = text.replacen("{\n", "{\n  \"extra\": 1,\n", 1);
    assert!(refused(&unknown).contains("unknown field"), "{}", refused(&unknown));
    let twice = text.replacen("{\n", "{\n  \"format\": 1,\n", 1);
    assert!(refused(&twice).contains("duplicate field"), "{}", refused(&twice));
    let param = text.replacen("\"lr\": 0.003", "\"lr\": 1.0, \"lr\": 0.003", 1);
    assert!(refused(&param).contains("as Perilune writes it"), "{}", refused(&param));
    assert!(refused(&text.replace('\n', "\r\n")).contains("as Perilune writes it"));
    assert!(refused(&"[".repeat(100_000)).contains("manifest.json"));
    assert!(refused("").contains("manifest.json"));
    assert!(refused("\u{feff}{}").contains("manifest.json"));
}

#[test]
fn what_cannot_be_read_is_not_packed() {
    let place = Place::new();
    let to = place.at("a.plb");
    for name in ["../x", "recipe/DIGITS.lua", "recipe/digits.lua/x", ".git/config"] {
        let items = [item(LUA, b""), item(name, b"")];
        assert!(pack(&to, &mut manifest(), &items).is_err(), "{name}");
        assert!(!to.exists());
    }
    let gone = Item { name: "a".into(), content: Content::File(place.at("gone")) };
    assert!(pack(&to, &mut manifest(), &[item(LUA, b""), gone]).is_err());
    assert!(fs::read_dir(place.0.path()).expect("listed").next().is_none(), "nothing is left behind");
}

#[test]
fn the_forged_format_is_that_of_the_writer() {
    for (name, len) in [("a", 0), (LUA, 9), ("data/x", (1 << 33) - 1)] {
        let found = forge::header(name.as_bytes(), len);
        assert_eq!(crate::archive::header(name, len).expect("a header").as_bytes()[..], found[..], "{name}");
    }
    for len in [0, 1, 4095, 4096, 4097, 700_000] {
        let content = noise(8, len);
        let mut to = crate::checks::Writer::new(Vec::new());
        to.write_all(&content).expect("written");
        assert_eq!(to.finish().expect("finished"), with_checks(&content), "{len}");
    }
}
