//! Tests of the format: round trips, damage in every byte, random changes. `tests/hostile.rs` has what a hostile author would write.

use crate::manifest::{FORMAT, FileEntry, MANIFEST, Manifest};
use crate::{Bundle, Content, Error, Item, pack};
use std::fs;
use std::path::{Path, PathBuf};

#[path = "../tests/support/forge.rs"]
mod forge;
mod hostile;

use forge::{END, plain, with_checks};

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
        // Neither the untrusted comment nor space at the end is signed; with the key given they do not matter.
        let signed = |bytes: &[u8]| {
            let lines = bytes.splitn(2, |b| *b == b'\n').nth(1);
            lines.map(|lines| lines.trim_ascii_end().to_vec())
        };
        let same = bad.trim_ascii_end() == good.trim_ascii_end() || signed(&bad) == signed(&good);
        let found = crate::sign::verify(&bundle, Some(&key), &trusted);
        assert!(found.is_err() || same, "seed {seed}: {}", String::from_utf8_lossy(&bad));
    }
}
