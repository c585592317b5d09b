//! Lists the files of bundles with their readers and small valid files.
//!
//! Checks and hashes refuse nearly every change, so the archive is fuzzed behind them: the mutated bytes are those of the tar file, or
//! of the frame of Zstandard, and the rest is computed again.

use crate::engine::Format;
use crate::forge::{END, Frame, packed, plain, with_checks};
use perilune_bundle::manifest::{DataFile, FORMAT, FileEntry, MANIFEST, Manifest, RunFacts};
use perilune_bundle::sign::{self, TrustedKeys};
use perilune_bundle::{Bundle, Error};
use std::fs;
use std::path::Path;

const LUA: (&str, &[u8]) = ("recipe/a.lua", b"return 1\n");
const DATA: &[u8] = b"1,2\n";

fn manifest() -> Manifest {
    let entry = |path: &str, bytes: &[u8]| FileEntry {
        path: path.into(),
        bytes: bytes.len() as u64,
        blake3: blake3::hash(bytes).to_hex().to_string(),
    };
    let inside = entry(&format!("data/{}", blake3::hash(DATA).to_hex()), DATA);
    let run = RunFacts {
        steps: 12,
        weights: inside.blake3.clone(),
        metrics: serde_json::from_str(r#"{"loss": 0.5, "valid/loss": 1e-3}"#).unwrap(),
        started: "2026-01-01T00:00:00Z".into(),
        seconds: 1.5,
        device: "cpu".into(),
        device_description: "CPU, 2 threads".into(),
        mesh: Some("dp=2".into()),
        precision: "f32".into(),
        edits: 1,
        resumes: 0,
        checkpoints: vec![4, 12],
    };
    Manifest {
        format: FORMAT,
        perilune: "0.1.0".into(),
        stdlib: inside.blake3.clone(),
        name: "a".into(),
        license: Some("MIT".into()),
        recipe: LUA.0.into(),
        command: ["perilune", "run", "a.lua"].map(String::from).to_vec(),
        params: serde_json::from_str(r#"{"lr": 0.1, "name": "é"}"#).unwrap(),
        run: Some(run),
        data: vec![DataFile {
            path: "points/a.csv".into(),
            bytes: DATA.len() as u64,
            blake3: inside.blake3.clone(),
            address: None,
            inside: true,
            folder: Some("points".into()),
        }],
        asks: serde_json::from_str(r#"{"kernels": true, "net": ["a.example"]}"#).unwrap(),
        files: vec![inside, entry(LUA.0, LUA.1)],
    }
}

fn tar() -> Vec<u8> {
    let manifest = manifest();
    let entries =
        [plain(MANIFEST, manifest.text().as_bytes()), plain(&manifest.files[0].path, DATA), plain(LUA.0, LUA.1)];
    [entries.concat(), END.to_vec()].concat()
}

/// Opens and unpacks a bundle: what is accepted is what its manifest lists.
fn open(dir: &Path, bundle: &Path) -> Result<(), Error> {
    let opened = Bundle::open(bundle)?;
    let to = dir.join("out");
    let _ = fs::remove_dir_all(&to);
    fs::create_dir(&to).unwrap();
    opened.extract(&to, &|_| true).unwrap();
    for file in &opened.manifest().files {
        let hash = blake3::hash(&fs::read(to.join(&file.path)).unwrap()).to_hex();
        assert_eq!(hash.as_str(), file.blake3, "{}", file.path);
    }
    Ok(())
}

/// Writes a bundle made of the mutated bytes beside them, under the same name, and opens it.
fn wrapped(dir: &Path, path: &Path, wrap: fn(&[u8]) -> Vec<u8>) -> Result<(), String> {
    let beside = dir.join("wrapped");
    fs::create_dir_all(&beside).unwrap();
    let to = beside.join(path.file_name().unwrap());
    let _ = fs::remove_file(&to);
    fs::write(&to, wrap(&fs::read(path).unwrap())).unwrap();
    open(dir, &to).map_err(|e| e.to_string())
}

const JSON: &[&[u8]] = &[
    b"\"",
    b"\\u",
    b"\\ud800",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"null",
    b"true",
    b"1e999",
    b"-0",
    b"\n",
    b"\xff",
    b"../",
    b"NaN",
    b"\"folder\": \"a\"",
];
const NAMES: &[&[u8]] =
    &[b"../", b"/etc/passwd", b"ustar\x0000", b"manifest.json", b"\x1b[2J", b"2", b"\xff", b"000000000"];
const KEYS: &[&[u8]] =
    &[b"untrusted comment: ", b"trusted comment: ", b"RW", b"ED", b"Ed", b"=", b"\n", b"\r\n", b"\xff", b"AAAA"];

/// The keys, a small bundle and its signature, in a folder that lasts as long as the process.
fn signed() -> (&'static Path, Vec<u8>, Vec<u8>, Vec<u8>) {
    let dir: &'static Path = Box::leak(Box::new(tempfile::tempdir().unwrap())).path();
    let bundle = dir.join("a.plb");
    fs::write(&bundle, packed(&tar())).unwrap();
    sign::generate(&dir.join("a.key"), false).unwrap();
    let key = sign::secret_key(&dir.join("a.key"), false).unwrap();
    sign::sign(&bundle, &key, Bundle::open(&bundle).unwrap().hash()).unwrap();
    let read = |name: &str| fs::read(dir.join(name)).unwrap();
    (dir, read("a.plb.minisig"), read("a.pub"), read("a.key"))
}

pub fn all() -> Vec<Format> {
    let (dir, signature, public, secret) = signed();
    let stored = Frame::new(17).stored(&tar()).finish();
    let compressed = zstd::stream::encode_all(&tar()[..], 3).unwrap();
    vec![
        Format {
            name: "file.plb",
            seeds: vec![packed(&tar())],
            words: &[b"PLBcheck"],
            read: Box::new(|dir, path| open(dir, path).map_err(|e| e.to_string())),
        },
        Format {
            name: "frame.plb",
            seeds: vec![stored, compressed],
            words: &[b"\x28\xb5\x2f\xfd", b"\x5b\x2a\x4d\x18"],
            read: Box::new(|dir, path| wrapped(dir, path, with_checks)),
        },
        Format {
            name: "tar.plb",
            seeds: vec![tar()],
            words: NAMES,
            read: Box::new(|dir, path| wrapped(dir, path, packed)),
        },
        Format {
            name: MANIFEST,
            seeds: vec![manifest().text().into_bytes()],
            words: JSON,
            read: Box::new(|_, path| {
                let bytes = fs::read(path).unwrap();
                let parsed = Manifest::parse(&bytes).map_err(|e| e.to_string())?;
                assert_eq!(parsed.text().as_bytes(), bytes);
                Ok(())
            }),
        },
        Format {
            name: "signed.plb.minisig",
            seeds: vec![signature],
            words: KEYS,
            read: Box::new(move |at, path| {
                let bundle = path.with_extension("");
                let _ = fs::remove_file(&bundle);
                fs::copy(dir.join("a.plb"), at.join(&bundle)).unwrap();
                let found = sign::verify(&bundle, None, &TrustedKeys::default()).map_err(|e| e.to_string())?;
                // The key is that of the comment, or the comment was changed and the signature has no other.
                assert!(found.is_some_and(|signer| signer.key.starts_with("RW")));
                Ok(())
            }),
        },
        Format {
            name: "a.pub",
            seeds: vec![public],
            words: KEYS,
            read: Box::new(|_, path| sign::public_key(path.to_str().unwrap()).map(drop).map_err(|e| e.to_string())),
        },
        Format {
            name: "a.key",
            seeds: vec![secret],
            words: KEYS,
            read: Box::new(|_, path| sign::secret_key(path, false).map(drop).map_err(|e| e.to_string())),
        },
    ]
}
