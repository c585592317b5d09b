//! Lists the formats of files with their readers and small valid files.

use crate::engine::Format;
use perilune_core::{DType, Interrupt};
use perilune_data::images::read::{self, Scratch};
use perilune_data::records::{Arrow, Dataset, JsonArray, LineFormat, Lines, Opening, Parquet, Table, TableFormat};
use perilune_data::{Result, csv, idx, image, npy, npz, safetensors, shards, text, tokens, wav};
use perilune_policy::{Opened, Opener, Policy};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records that are read of a file.
const RECORDS: u64 = 24;

/// One file and what opens it.
pub struct Case {
    opener: Arc<dyn Opener>,
    path: PathBuf,
    interrupt: Interrupt,
}

impl Case {
    pub fn new(dir: &Path, path: &Path) -> Case {
        let opener = Policy::builder().allow_read(dir).unwrap().build();
        Case { opener, path: path.to_path_buf(), interrupt: Interrupt::default() }
    }

    fn open(&self) -> Result<Opened> {
        Ok(self.opener.open(&self.path)?)
    }

    /// Opens a dataset and reads some of its records.
    fn records<D: Dataset>(&self, open: impl FnOnce(&[PathBuf], Opening<'_>) -> Result<D>) -> Result<()> {
        let observe = &mut |_: &Opened| {};
        let opening = Opening { opener: self.opener.clone(), cache: None, interrupt: &self.interrupt, observe };
        let set = open(std::slice::from_ref(&self.path), opening)?;
        (0..set.len().min(RECORDS)).try_for_each(|k| set.get(k).map(drop))
    }
}

fn golden(names: &[&str]) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    names.iter().map(|name| std::fs::read(root.join(name)).unwrap()).collect()
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    to.write_all(text).unwrap();
    to.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(text, 1).unwrap()
}

const JSON: &[&[u8]] =
    &[b"\"", b"\\u", b"\\ud800", b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"1e999", b"-0", b"\n", b"\xff"];
const LINES: &[u8] = b"{\"id\": 1, \"text\": \"a \\u00e9 \\ud83d\\ude00\", \"score\": -1.5e3}\n\n{\"id\": 22, \"list\": [1, [2, {\"x\": null}]], \"ok\": true}\n";
const TABLE: &[u8] = b"id,name,score\r\n1,\"a, \"\"b\"\"\",0.5\r\n2,\"two\nlines\",NA\r\n3,c,-1e9\r\n";
const CELLS: &[&[u8]] = &[b",", b"\"", b"\"\"", b"\n", b"\r\n", b";", b"\t", b"nan", b"1e400", b"NA", b"\xff"];

fn ints(dims: &[u32], kind: u8, count: usize) -> Vec<u8> {
    let mut out = vec![0, 0, kind, dims.len() as u8];
    dims.iter().for_each(|d| out.extend_from_slice(&d.to_be_bytes()));
    out.extend((0..count).map(|k| k as u8));
    out
}

fn token_file() -> Vec<u8> {
    let mut out: Vec<u8> = [20240520i32, 1, 40].iter().flat_map(|n| n.to_le_bytes()).collect();
    out.resize(1024, 0);
    out.extend((0..40u16).flat_map(u16::to_le_bytes));
    out
}

fn manifest() -> Vec<u8> {
    let hash = blake3::hash(b"x").to_hex();
    format!(
        "{{\"schema\": \"{}\", \"dtype\": \"u16\", \"vocabulary\": 256, \"tokenizer\": \"{hash}\", \"template\": null, \"eot\": 0, \
         \"shards\": [{{\"file\": \"a.bin\", \"tokens\": 3, \"documents\": 1, \"blake3\": \"{hash}\"}}]}}",
        tokens::manifest::SCHEMA
    )
    .into_bytes()
}

const INDEX: &[u8] =
    b"{\"metadata\": {\"total_size\": 8}, \"weight_map\": {\"a\": \"m-1.safetensors\", \"b\": \"m-2.safetensors\"}}";

pub fn all() -> Vec<Format> {
    let lines = |case: &Case| case.records(|paths, opening| Lines::open(paths, LineFormat::Json, opening));
    let table = |case: &Case| {
        case.records(|paths, opening| {
            Table::open(
                paths,
                TableFormat { delimiter: b',', columns: None, types: vec![], skip_malformed: false },
                opening,
            )
        })
    };
    let parquet = ["flat", "nested", "snappy", "lz4", "encodings", "gzip", "gzip_v2", "int96", "zstd"];
    let parquet: Vec<String> = parquet.iter().map(|name| format!("records/{name}.parquet")).collect();
    let parquet: Vec<&str> = parquet.iter().map(String::as_str).collect();
    type Reader = fn(&Case) -> Result<()>;
    let format = |name, seeds, words, read: Reader| Format {
        name,
        seeds,
        words,
        read: Box::new(move |dir, path| read(&Case::new(dir, path)).map_err(|e| e.to_string())),
    };
    vec![
        format("f.jsonl", vec![LINES.to_vec()], JSON, lines),
        format("f.jsonl.gz", vec![gzip(LINES)], &[], lines),
        format("f.jsonl.zst", vec![zstd(LINES)], &[], lines),
        format("f.json", vec![b"[{\"id\": 1, \"t\": \"]\"},\n {\"id\": [2, {}]}]".to_vec()], JSON, |case| {
            case.records(|paths, opening| JsonArray::open(paths, None, opening))
        }),
        format("f.csv", vec![TABLE.to_vec()], CELLS, table),
        format("numbers.csv", vec![b"a;b\n1;2.5\n3;\n".to_vec(), b"1\t2\n3\t4\n".to_vec()], CELLS, |case| {
            let rows = csv::Rows::read(case.open()?, &csv::Options { missing: Some(0.0), ..Default::default() })?;
            let columns = csv::Columns::Range(0, rows.num_columns());
            rows.numbers(&columns, DType::F32, 1.0, Some(0.0)).map(drop)
        }),
        format("f.txt.gz", vec![gzip("a text, \u{e9}".as_bytes())], &[], |case| {
            text::read(case.open()?, None).map(drop)
        }),
        format("f.parquet", golden(&parquet), &[], |case| {
            case.records(|paths, opening| Parquet::open(paths, None, opening))
        }),
        format(
            "f.arrow",
            golden(&[
                "records/flat_file.arrow",
                "records/flat_stream.arrow",
                "records/nested_lz4.arrow",
                "records/nested_zstd.arrow",
            ]),
            &[],
            |case| case.records(|paths, opening| Arrow::open(paths, None, opening)),
        ),
        format(
            "f-idx3-ubyte",
            vec![ints(&[3, 2, 2], 8, 12), ints(&[2], 13, 8), gzip(&ints(&[4], 8, 4))],
            &[],
            |case| idx::load(case.open()?, Some(1 << 20)).map(drop),
        ),
        format(
            "f.wav",
            golden(&["augment/sounds/high/a.wav", "augment/sounds/low/a.wav"]),
            &[b"fmt ", b"data", b"LIST"],
            |case| wav::load(case.open()?, 8000).map(drop),
        ),
        format(
            "f.npy",
            golden(&["data/le_f4.npy", "data/fortran_be_i8.npy", "data/version3_f4.npy"]),
            &[b"'descr'", b"(1,)", b"'<f8'"],
            |case| npy::load(case.open()?).map(drop),
        ),
        format("f.npz", golden(&["data/deflated.npz"]), &[b"PK\x01\x02", b"PK\x05\x06"], |case| {
            npz::load(case.open()?).map(drop)
        }),
        format("f.safetensors", golden(&["data/mixed.safetensors"]), JSON, |case| {
            safetensors::load(case.open()?).map(drop)
        }),
        format("f.index.json", vec![INDEX.to_vec()], JSON, |case| shards::index(case.open()?).map(drop)),
        format(
            "f.jpg",
            golden(&[
                "images/folder/boat/plain.jpg",
                "images/folder/boat/near/progressive.jpg",
                "images/folder/car/restarts.jpg",
                "images/folder/car/cmyk.jpg",
                "images/folder/car/grey.jpg",
                "images/folder/dog/palette_clear.png",
                "images/folder/dog/grey16.png",
                "images/folder/dog/rgba.png",
                "images/webp/lossy_alpha.webp",
                "images/webp/lossless.webp",
                "images/webp/exif.webp",
            ]),
            &[b"\xff\xd8", b"\xff\xda", b"\xff\xc4", b"IDAT", b"tRNS", b"VP8 ", b"VP8L", b"VP8X", b"ALPH"],
            |case| read::read(case.open()?, &mut Scratch::default()).map(drop),
        ),
        format(
            "f.png",
            golden(&["data/rgb16.png", "data/palette2.png", "data/grey1.png"]),
            &[b"IDAT", b"PLTE"],
            |case| image::load(case.open()?).map(drop),
        ),
        format("f.bin", vec![token_file(), vec![1, 0, 2, 0]], &[], |case| tokens::read_file(case.open()?).map(drop)),
        format("manifest.json", vec![manifest()], JSON, |case| {
            tokens::manifest::Manifest::read(case.open()?).map(drop)
        }),
    ]
}
