//! Tests of the format: round trips, damage in every byte, and archives that a hostile author would write.

use crate::manifest::{DataFile, FORMAT, FileEntry, MANIFEST, Manifest};
use crate::{Bundle, Content, Error, Item, checks, pack};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

fn manifest() -> Manifest {
    Manifest {
        format: FORMAT,
        perilune: "0.1.0".into(),
        stdlib: blake3::hash(b"stdlib").to_hex().to_string(),
        name: "digits".into(),
        license: Some("MIT".into()),
        recipe: "recipe/digits.lua".into(),
        command: ["perilune", "run", "digits.lua"].map(String::from).to_vec(),
        params: serde_json::from_str(r#"{"lr": 0.003, "steps": 400}"#).expect("params"),
        run: None,
        data: Vec::new(),
        asks: Default::default(),
        files: Vec::new(),
    }
}

fn item(name: &str, bytes: &[u8]) -> Item {
    Item { name: name.into(), content: Content::Text(bytes.to_vec()) }
}

/// Bytes that do not compress, from a seed (xorshift64).
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().expect("a directory"))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.at(name);
        fs::write(&path, bytes).expect("written");
        path
    }
}

fn small(place: &Place, len: usize) -> PathBuf {
    let items = [item("recipe/digits.lua", b"return 1\n"), item("data/x", &noise(1, len)), item("empty", b"")];
    let to = place.at("a.plb");
    pack(&to, &mut manifest(), &items).expect("packed");
    to
}

fn error(path: &Path) -> String {
    match Bundle::open(path) {
        Err(e @ Error::Refused(_)) => e.to_string(),
        Err(e) => panic!("not refused: {e}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn a_bundle_comes_back_and_is_the_same_each_time() {
    let place = Place::new();
    let data = noise(2, 100_000);
    let mut items =
        vec![item("recipe/digits.lua", b"return 1\n"), item("recipe/lib/a.lua", b""), item("data/b", &data)];
    let mut first = manifest();
    let packed = pack(&place.at("a.plb"), &mut first, &items).expect("packed");
    items.reverse();
    let again = pack(&place.at("b.plb"), &mut manifest(), &items).expect("packed");
    assert_eq!(packed, again);
    assert_eq!(fs::read(place.at("a.plb")).expect("bytes"), fs::read(place.at("b.plb")).expect("bytes"));

    let bundle = Bundle::open(&place.at("a.plb")).expect("opened");
    assert_eq!((bundle.hash(), bundle.bytes()), (packed.hash.as_str(), packed.bytes));
    assert_eq!(bundle.manifest(), &first);
    assert_eq!(bundle.read("data/b", 1 << 20).expect("read"), data);
    assert!(bundle.read("data/b", 10).is_err());
    assert!(bundle.read("data/c", 10).is_err());
    bundle.extract(&place.at("out"), &|_| true).expect("extracted");
    assert_eq!(fs::read(place.at("out/data/b")).expect("bytes"), data);
    assert_eq!(fs::read(place.at("out/recipe/lib/a.lua")).expect("bytes"), b"");
    assert!(bundle.extract(&place.at("out"), &|_| true).is_err(), "nothing is written over");
}

#[test]
fn other_programs_read_the_archive() {
    let place = Place::new();
    let bytes = fs::read(small(&place, 5000)).expect("bytes");
    // A decoder of Zstandard skips the frame of checks.
    let tar = zstd::stream::decode_all(&bytes[..]).expect("unpacked");
    let mut archive = tar::Archive::new(&tar[..]);
    let names: Vec<String> = archive
        .entries()
        .expect("entries")
        .map(|e| e.expect("an entry").path().expect("a path").display().to_string())
        .collect();
    assert_eq!(names, [MANIFEST, "data/x", "empty", "recipe/digits.lua"]);
}

/// Flips one bit pattern of one byte and expects that the error names the byte.
fn flips(path: &Path, count: usize, seed: u64) {
    let good = fs::read(path).expect("bytes");
    let at = path.with_extension("flipped.plb");
    let choices = noise(seed, count * 5);
    for choice in choices.chunks(5) {
        let place = u32::from_le_bytes([choice[0], choice[1], choice[2], choice[3]]) as usize % good.len();
        let mask = choice[4].max(1);
        let mut bad = good.clone();
        bad[place] ^= mask;
        fs::write(&at, &bad).expect("written");
        let error = error(&at);
        let expected = format!("byte {place} is 0x{:02x}, and was written as 0x{:02x}", bad[place], good[place]);
        // A byte of the length in a footer may make the file's own length wrong; the other copy says so.
        assert!(error.contains(&expected), "byte {place} of {}: {error}", good.len());
    }
}

#[test]
fn one_changed_byte_is_named() {
    let place = Place::new();
    // The frame's header, its levels and both footers are a tenth of the small file; the large one has three levels.
    let count = usize::try_from(cases()).expect("a number");
    flips(&small(&place, 3000), count, 1);
    flips(&small(&place, 60_000), count, 2);
    flips(&small(&place, 900_000), count / 20, 3);
}

#[test]
fn the_checks_of_every_byte_of_the_end_are_named() {
    let place = Place::new();
    let path = small(&place, 9000);
    let good = fs::read(&path).expect("bytes");
    for at in good.len() - 200..good.len() {
        let mut bad = good.clone();
        bad[at] = bad[at].wrapping_add(1);
        let error = error(&place.write("b.plb", &bad));
        assert!(error.contains(&format!("byte {at} is")), "{at}: {error}");
    }
}

#[test]
fn other_damage_is_found() {
    let place = Place::new();
    let good = fs::read(small(&place, 9000)).expect("bytes");
    let refused = |bytes: &[u8]| error(&place.write("b.plb", bytes));
    for len in (0..good.len()).step_by(97).chain([good.len() - 1]) {
        let text = refused(&good[..len]);
        assert!(text.contains("was cut off") || text.contains("it ends at byte"), "{len}: {text}");
    }
    let longer = refused(&[&good[..], b"more"].concat());
    assert!(longer.contains("what follows byte"), "{longer}");
    // Two bytes of one block, and two of different blocks.
    let mut bad = good.clone();
    (bad[100], bad[200]) = (bad[100] ^ 1, bad[200] ^ 4);
    assert!(refused(&bad).contains("one of bytes 0 to 4095"), "{}", refused(&bad));
    let mut bad = good.clone();
    (bad[5000], bad[8500]) = (bad[5000] ^ 1, bad[8500] ^ 4);
    assert!(refused(&bad).contains("byte 5000 is"), "{}", refused(&bad));
    assert!(refused(b"").contains("no bundle"));
    assert!(refused(&noise(4, 10_000)).contains("no bundle"));
}

// Hostile archives, whose checks are right.

/// Writes an archive of these tar bytes with its checks.
fn with_checks(zstd: &[u8]) -> Vec<u8> {
    let mut to = checks::Writer::new(Vec::new());
    to.write_all(zstd).expect("written");
    to.finish().expect("finished")
}

fn packed(tar: &[u8]) -> Vec<u8> {
    with_checks(&zstd::stream::encode_all(tar, 3).expect("packed"))
}

fn header(name: &str, len: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_size(len);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    header
}

/// An entry with its padding.
fn entry(mut header: tar::Header, content: &[u8]) -> Vec<u8> {
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend(content);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn plain(name: &str, content: &[u8]) -> Vec<u8> {
    entry(header(name, content.len() as u64), content)
}

const END: [u8; 1024] = [0; 1024];
const LUA: &str = "recipe/digits.lua";

/// A manifest of these files.
fn listing(files: &[(&str, &[u8])]) -> Manifest {
    let mut out = manifest();
    out.files = files
        .iter()
        .map(|(name, bytes)| FileEntry {
            path: (*name).into(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
        })
        .collect();
    out
}

fn archive(parts: &[&[u8]]) -> Vec<u8> {
    packed(&[parts.concat(), END.to_vec()].concat())
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
        entry(header, lua)
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
        let text = pack(&place.at("z.plb"), &mut super::tests::manifest(), &items).expect_err("a bomb").to_string();
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
        (&|m| m.data.push(data("", false, None)), "a path is empty"),
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

/// Cases of a test with random changes.
fn cases() -> u64 {
    std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(500)
}

/// Changes bytes at random: flips, deletes, repeats, or copies a part to another place.
fn mutated(good: &[u8], seed: u64) -> Vec<u8> {
    let choice = noise(seed, 64);
    let number = |at: usize| u32::from_le_bytes([choice[at], choice[at + 1], choice[at + 2], choice[at + 3]]) as usize;
    let mut out = good.to_vec();
    for k in 0..1 + choice[0] as usize % 3 {
        if out.is_empty() {
            break;
        }
        let (at, len) = (number(4 + 12 * k) % out.len(), 1 + number(8 + 12 * k) % 600);
        let end = (at + len).min(out.len());
        match choice[1 + k] % 5 {
            0 => out[at] = choice[12 + 12 * k],
            1 => drop(out.drain(at..end)),
            2 => {
                let part = out[at..end].to_vec();
                out.splice(at..at, part);
            }
            3 => {
                let (part, to) = (out[at..end].to_vec(), number(12 + 12 * k) % out.len());
                out.splice(to..to, part);
            }
            _ => out.truncate(at),
        }
    }
    out
}

#[test]
fn changed_archives_are_refused_or_are_what_they_list() {
    let place = Place::new();
    let lua: &[u8] = b"return 1\n";
    let files: [(&str, &[u8]); 3] = [("data/x", &noise(6, 700)), ("empty", b""), (LUA, lua)];
    let parts: Vec<Vec<u8>> = std::iter::once(plain(MANIFEST, listing(&files).text().as_bytes()))
        .chain(files.iter().map(|(name, bytes)| plain(name, bytes)))
        .chain([END.to_vec()])
        .collect();
    let tar = parts.concat();
    let mut accepted = 0;
    for seed in 0..cases() {
        let bad = mutated(&tar, seed);
        let path = place.write("b.plb", &with_checks(&zstd::stream::encode_all(&bad[..], 1).expect("packed")));
        match Bundle::open(&path) {
            Ok(bundle) => {
                accepted += 1;
                let total: u64 = bundle.manifest().files.iter().map(|f| 512 + f.bytes.next_multiple_of(512)).sum();
                let manifest = bundle.manifest().text().len() as u64;
                assert_eq!(bad.len() as u64, total + 512 + manifest.next_multiple_of(512) + 1024, "seed {seed}");
            }
            Err(Error::Refused(_)) => {}
            Err(e) => panic!("seed {seed}: {e}"),
        }
    }
    assert!(accepted * 10 < cases(), "{accepted} of {} changed archives are accepted", cases());
}

#[test]
fn changed_manifests_and_signatures_are_refused() {
    let place = Place::new();
    let good = listing(&[(LUA, b"return 1\n")]).text();
    for seed in 0..cases() {
        let bad = mutated(good.as_bytes(), seed);
        if let Ok(manifest) = Manifest::parse(&bad) {
            assert_eq!(manifest.text().as_bytes(), bad, "seed {seed}");
        }
    }
    let bundle = small(&place, 100);
    let hash = Bundle::open(&bundle).expect("opened").hash().to_string();
    crate::sign::generate(&place.at("k.key"), false).expect("a key");
    let key = crate::sign::secret_key(&place.at("k.key"), false).expect("read");
    let public = crate::sign::sign(&bundle, &key, &hash).expect("signed");
    let path = crate::sign::signature_path(&bundle);
    let good = fs::read(&path).expect("bytes");
    let trusted = crate::sign::TrustedKeys::default();
    let signer = crate::sign::verify(&bundle, None, &trusted).expect("valid").expect("signed");
    assert_eq!(signer.key, public);
    let key = crate::sign::public_key(&public).expect("a key");
    for seed in 0..cases() {
        let bad = mutated(&good, seed);
        if bad == good {
            continue;
        }
        fs::write(&path, &bad).expect("written");
        // The untrusted comment is not signed; with the key given it does not matter.
        let comment_only = {
            let rest = |bytes: &[u8]| bytes.splitn(2, |b| *b == b'\n').nth(1).map(<[u8]>::to_vec);
            rest(&bad) == rest(&good) || bad.trim_ascii_end() == good.trim_ascii_end()
        };
        let found = crate::sign::verify(&bundle, Some(&key), &trusted);
        assert!(found.is_err() || comment_only, "seed {seed}: {}", String::from_utf8_lossy(&bad));
    }
}
