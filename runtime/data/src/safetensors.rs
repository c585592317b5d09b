//! Reads and writes `.safetensors`: named tensors and a map of strings. Headers are validated; writing is atomic and byte-stable.
//!
//! A file is eight bytes of header length, a JSON header, then the tensors' bytes without holes. The header is checked
//! here first, since the `safetensors` crate accepts duplicate keys, unknown fields and any name; its own check
//! follows. Then each tensor is read directly into its buffer, so the file is never in memory twice.
//!
//! In the file the widest dtype comes first, which aligns every tensor for readers that map the file; the header
//! lists tensors in the given order, and `load` returns them in header order. Sets of files with an index are in
//! `shards.rs`. Not supported: dtypes that a `HostTensor` lacks.

use crate::error::{Error, Result, quote};
use crate::file;
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::{Opened, Staged};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{Read, Write};
use std::path::Path;

const MAX_HEADER: u64 = 100_000_000;
/// The key of the metadata in a header.
const METADATA: &str = "__metadata__";
const MAX_TENSORS: usize = 100_000;
/// A longer `shape` array is refused while it is being read.
const MAX_DIMS_READ: usize = 64;

/// The contents of a file, in the order of its header.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Contents {
    pub tensors: Vec<(String, HostTensor)>,
    pub metadata: BTreeMap<String, String>,
}

/// The header's description of one tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    /// The half-open range of bytes, counted from the end of the header.
    pub span: (u64, u64),
}

/// A checked header, without tensor bytes.
#[derive(Clone, PartialEq, Debug)]
pub struct Header {
    pub entries: Vec<Entry>,
    pub metadata: BTreeMap<String, String>,
}

/// Reads a whole file.
pub fn load(mut file: Opened) -> Result<Contents> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    read(&path, &mut file, len)
}

/// Reads the `len` bytes of a file from its start to its end, each once, so that `from` may hash them; `path` is for errors.
pub fn read(path: &Path, from: &mut dyn Read, len: u64) -> Result<Contents> {
    let header = read_header(path, from, len)?;
    // The header check excludes holes, so the order of offsets is the order of the file.
    let mut on_disk: Vec<usize> = (0..header.entries.len()).collect();
    on_disk.sort_by_key(|&i| header.entries[i].span);
    let mut bytes: Vec<Vec<u8>> = vec![Vec::new(); header.entries.len()];
    for i in on_disk {
        let entry = &header.entries[i];
        bytes[i] = vec![0; (entry.span.1 - entry.span.0) as usize];
        from.read_exact(&mut bytes[i]).map_err(|e| Error::io(path, "read", e))?;
        if entry.dtype == DType::Bool {
            check_bools(path, &place(&entry.name), &bytes[i])?;
        }
    }
    let entries = header.entries.into_iter().zip(bytes);
    let tensors = entries.map(|(e, bytes)| (e.name, HostTensor::new(e.dtype, e.shape, bytes))).collect();
    Ok(Contents { tensors, metadata: header.metadata })
}

/// Reads and checks the header alone: names, dtypes, shapes and metadata without the cost of the tensors.
pub fn header(mut file: Opened) -> Result<Header> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    read_header(&path, &mut file, len)
}

/// Writes tensors and metadata. The same arguments give the same bytes.
pub fn save(file: Staged, tensors: &[(String, HostTensor)], metadata: &BTreeMap<String, String>) -> Result<()> {
    save_with(file, tensors, metadata, &mut |_| {})
}

/// [`save`] that passes every byte of the file to `observe`, in order.
pub fn save_with(
    file: Staged,
    tensors: &[(String, HostTensor)],
    metadata: &BTreeMap<String, String>,
    observe: &mut dyn FnMut(&[u8]),
) -> Result<()> {
    let path = &file.path().to_path_buf();
    let mut on_disk: Vec<usize> = (0..tensors.len()).collect();
    on_disk.sort_by_key(|&i| std::cmp::Reverse(tensors[i].1.dtype.size()));
    let mut spans = vec![(0u64, 0u64); tensors.len()];
    let mut end = 0u64;
    for &i in &on_disk {
        spans[i] = (end, end + tensors[i].1.bytes.len() as u64);
        end = spans[i].1;
    }

    let mut json = serde_json::Map::new();
    if !metadata.is_empty() {
        json.insert(METADATA.into(), serde_json::json!(metadata));
    }
    for ((name, tensor), span) in tensors.iter().zip(&spans) {
        let entry = serde_json::json!({
            "dtype": code_of(tensor.dtype), "shape": tensor.shape.dims(), "data_offsets": [span.0, span.1],
        });
        if json.insert(name.clone(), entry).is_some() {
            return Err(Error::malformed(path, place(name), "is given twice; names must be unique"));
        }
    }
    let mut header = serde_json::to_vec(&json).map_err(|e| Error::malformed(path, "header", e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    // The file must be readable: names, counts and sizes pass the reader's check.
    check_header(path, &header, end)?;

    file::write_whole(file, |out| {
        let mut put = |bytes: &[u8]| {
            observe(bytes);
            out.write_all(bytes).map_err(|e| Error::io(path, "write", e))
        };
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        on_disk.iter().try_for_each(|&i| put(&tensors[i].1.bytes))
    })
}

/// Returns the rule that a tensor's name breaks, so that no file can hold it.
pub fn check_name(name: &str) -> std::result::Result<(), String> {
    if name == METADATA {
        return Err(format!("name {} is that of the metadata", quote(name)));
    }
    file::check_path_name(name)
}

/// Refuses bytes other than 0 and 1 in a bool tensor.
pub(crate) fn check_bools(path: &Path, place: &str, bytes: &[u8]) -> Result<()> {
    match bytes.iter().position(|&b| b > 1) {
        None => Ok(()),
        Some(i) => {
            let rule = format!("element {i} of this bool tensor is the byte {}; it must be 0 or 1", bytes[i]);
            Err(Error::malformed(path, place, rule))
        }
    }
}

fn place(name: &str) -> String {
    format!("tensor {}", quote(name))
}

fn read_header(path: &Path, file: &mut dyn Read, len: u64) -> Result<Header> {
    if len < 8 {
        let rule = format!("a safetensors file starts with 8 bytes of header length, and this file has {len}");
        return Err(Error::malformed(path, "header length", rule));
    }
    let mut word = [0; 8];
    file.read_exact(&mut word).map_err(|e| Error::io(path, "read", e))?;
    let n = u64::from_le_bytes(word);
    if n > len - 8 {
        let rule = format!("says {n} bytes, but only {} follow", len - 8);
        return Err(
            Error::malformed(path, "header length", rule).hint("check that this is a complete safetensors file")
        );
    }
    if n > MAX_HEADER {
        return Err(Error::too_large(path, "the header, in bytes,", n, MAX_HEADER));
    }
    let mut json = vec![0; n as usize];
    file.read_exact(&mut json).map_err(|e| Error::io(path, "read", e))?;
    check_header(path, &json, len - 8 - n)
}

/// Validates a header that is followed by `data_len` bytes.
fn check_header(path: &Path, json: &[u8], data_len: u64) -> Result<Header> {
    if json.first() != Some(&b'{') {
        return Err(Error::malformed(path, "header", "must be a JSON object that starts with '{'"));
    }
    let raw: RawHeader = serde_json::from_slice(json).map_err(|e| Error::malformed(path, "header", e.to_string()))?;
    let mut entries = Vec::with_capacity(raw.tensors.len());
    let mut infos = Vec::with_capacity(raw.tensors.len());
    for (name, raw) in raw.tensors {
        file::check_path_name(&name).map_err(|rule| Error::malformed(path, "header", rule))?;
        let Some((dtype, their_dtype)) = dtype_of(&raw.dtype) else {
            let rule = format!("has dtype {}; read are F64 F32 BF16 F16 I64 I32 U8 BOOL", quote(&raw.dtype));
            return Err(Error::unsupported(path, place(&name), rule).hint("convert it with the tool that wrote it"));
        };
        let dims = raw.shape.0.iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect::<Vec<_>>();
        let shape = Shape::new(&dims).map_err(|e| Error::malformed(path, place(&name), e.message))?;
        let (start, end) = raw.data_offsets;
        if start > end || end > data_len {
            let rule = format!("data_offsets [{start}, {end}] must ascend and end within the {data_len} bytes of data");
            return Err(Error::malformed(path, place(&name), rule));
        }
        let needed = shape.numel() as u64 * dtype.size() as u64;
        if end - start != needed {
            let rule = format!("{dtype} {shape} takes {needed} bytes, but data_offsets span {}", end - start);
            return Err(Error::malformed(path, place(&name), rule));
        }
        let data_offsets = (start as usize, end as usize);
        infos.push((name.clone(), safetensors::tensor::TensorInfo { dtype: their_dtype, shape: dims, data_offsets }));
        entries.push(Entry { name, dtype, shape, span: (start, end) });
    }

    infos.sort_by_key(|(_, info)| info.data_offsets);
    let mut at = 0u64;
    for (name, info) in &infos {
        let start = info.data_offsets.0 as u64;
        if start != at {
            let what = if start < at { "overlaps the tensor before it" } else { "leaves a hole before it" };
            let rule = format!("starts at byte {start} of the data, not {at}: it {what}");
            return Err(Error::malformed(path, place(name), rule));
        }
        at = info.data_offsets.1 as u64;
    }
    if at != data_len {
        let rule = format!("{} bytes follow the last tensor; nothing may", data_len - at);
        return Err(Error::malformed(path, "end of file", rule));
    }
    // Also run the crate's own check.
    safetensors::tensor::Metadata::new(None, infos).map_err(|e| Error::malformed(path, "header", e.to_string()))?;
    Ok(Header { entries, metadata: raw.metadata })
}

fn dtype_of(code: &str) -> Option<(DType, safetensors::Dtype)> {
    use safetensors::Dtype as Theirs;
    Some(match code {
        "F64" => (DType::F64, Theirs::F64),
        "F32" => (DType::F32, Theirs::F32),
        "BF16" => (DType::BF16, Theirs::BF16),
        "F16" => (DType::F16, Theirs::F16),
        "I64" => (DType::I64, Theirs::I64),
        "I32" => (DType::I32, Theirs::I32),
        "U8" => (DType::U8, Theirs::U8),
        "BOOL" => (DType::Bool, Theirs::BOOL),
        _ => return None,
    })
}

fn code_of(dtype: DType) -> String {
    dtype.name().to_ascii_uppercase()
}

// The header as JSON: every duplicate, unknown field and over-long list is an error while it is being read.

struct RawHeader {
    tensors: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: RawDims,
    data_offsets: (u64, u64),
}

struct RawDims(Vec<u64>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut out = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("the name {} appears twice", quote(&name))));
                    }
                    if name == METADATA {
                        out.metadata = map.next_value::<RawMetadata>()?.0;
                    } else if out.tensors.len() == MAX_TENSORS {
                        return Err(de::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    } else {
                        out.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(out)
            }
        }
        d.deserialize_map(V)
    }
}

struct RawMetadata(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for RawMetadata {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawMetadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("__metadata__ as an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawMetadata, A::Error> {
                let mut out = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if let Some(key) = out.insert(key.clone(), value).map(|_| key) {
                        return Err(de::Error::custom(format!("the metadata key {} appears twice", quote(&key))));
                    }
                }
                Ok(RawMetadata(out))
            }
        }
        d.deserialize_map(V)
    }
}

impl<'de> Deserialize<'de> for RawDims {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawDims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape as a list of whole numbers")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<RawDims, A::Error> {
                let mut dims = Vec::new();
                while let Some(d) = seq.next_element()? {
                    if dims.len() == MAX_DIMS_READ {
                        return Err(de::Error::custom(format!("a shape of more than {MAX_DIMS_READ} dims")));
                    }
                    dims.push(d);
                }
                Ok(RawDims(dims))
            }
        }
        d.deserialize_seq(V)
    }
}

#[cfg(test)]
#[path = "safetensors_tests.rs"]
mod tests;
