//! Reads and writes sharded safetensors in the layout of Hugging Face: `model-00001-of-00003.safetensors` …, and
//! `model.safetensors.index.json`, whose `weight_map` maps tensors to files.
//!
//! Tensors are written in order, and a file is closed before it would exceed the limit; a larger tensor has a file
//! of its own. Tensors that fit into one file have the plain name and no index. Reading trusts no file: a file of the
//! index must be in the same folder, and contain exactly the tensors that the index lists for it.

use crate::error::{Error, Result, quote};
use crate::file;
use crate::safetensors::{self, Contents};
use perilune_core::HostTensor;
use perilune_policy::{Directory, Opened, Opener};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The default of transformers: "5GB".
pub const LIMIT: u64 = 5_000_000_000;
/// The suffix of an index.
pub const INDEX: &str = ".safetensors.index.json";
const MAX_INDEX: u64 = 64 << 20;
const MAX_SHARDS: usize = 100_000;

/// An index, checked as far as possible without the files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Index {
    /// The file names, in order.
    pub files: Vec<String>,
    /// The file of each tensor.
    pub map: BTreeMap<String, String>,
}

/// Assigns tensors to files.
fn plan(tensors: &[(String, HostTensor)], limit: u64) -> Vec<Range<usize>> {
    let (mut out, mut start, mut bytes) = (Vec::new(), 0, 0u64);
    for (i, (_, t)) in tensors.iter().enumerate() {
        let size = t.bytes.len() as u64;
        if i > start && bytes + size > limit {
            out.push(start..i);
            (start, bytes) = (i, 0);
        }
        bytes += size;
    }
    out.push(start..tensors.len());
    out
}

/// Writes `STEM.safetensors`, or shards and their index, into `dir`. Returns the names of the files, the index last.
pub fn save(
    dir: &Directory,
    stem: &str,
    tensors: &[(String, HostTensor)],
    metadata: &BTreeMap<String, String>,
    limit: u64,
) -> Result<Vec<String>> {
    save_with(dir, stem, tensors, metadata, limit, &mut |_, _| {})
}

/// [`save`] that passes the name of each file and every byte of it to `observe`, in order.
pub fn save_with(
    dir: &Directory,
    stem: &str,
    tensors: &[(String, HostTensor)],
    metadata: &BTreeMap<String, String>,
    limit: u64,
    observe: &mut dyn FnMut(&str, &[u8]),
) -> Result<Vec<String>> {
    let ranges = plan(tensors, limit);
    if ranges.len() == 1 {
        let name = format!("{stem}.safetensors");
        safetensors::save_with(dir.create(&name)?, tensors, metadata, &mut |bytes| observe(&name, bytes))?;
        return Ok(vec![name]);
    }
    let name_of_index = format!("{stem}{INDEX}");
    let index = dir.path().join(&name_of_index);
    let (mut names, mut map) = (Vec::new(), Map::new());
    for (k, range) in ranges.iter().enumerate() {
        let name = format!("{stem}-{:05}-of-{:05}.safetensors", k + 1, ranges.len());
        let inside = &tensors[range.clone()];
        safetensors::save_with(dir.create(&name)?, inside, metadata, &mut |bytes| observe(&name, bytes))?;
        for (tensor, _) in inside {
            if map.insert(tensor.clone(), name.clone().into()).is_some() {
                return Err(Error::malformed(&index, quote(tensor), "is given twice; names must be unique"));
            }
        }
        names.push(name);
    }
    let total: usize = tensors.iter().map(|t| t.1.bytes.len()).sum();
    let text = format!("{:#}\n", json!({ "metadata": { "total_size": total }, "weight_map": map }));
    // Written last, so that an index never lists missing files.
    let whole = |out: &mut dyn Write| out.write_all(text.as_bytes()).map_err(|e| Error::io(&index, "write", e));
    file::write_whole(dir.create(&name_of_index)?, |out| whole(out))?;
    observe(&name_of_index, text.as_bytes());
    names.push(name_of_index);
    Ok(names)
}

/// Returns whether a path names an index.
pub fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n.to_string_lossy().ends_with(INDEX))
}

/// Reads an index.
pub fn index(mut file: Opened) -> Result<Index> {
    let path = file.path().to_path_buf();
    read_index(&path, &mut file)
}

/// Reads the index at `path` from `from`, each byte once.
pub fn read_index(path: &Path, from: &mut dyn Read) -> Result<Index> {
    let mut text = Vec::new();
    from.take(MAX_INDEX + 1).read_to_end(&mut text).map_err(|e| Error::io(path, "read", e))?;
    if text.len() as u64 > MAX_INDEX {
        return Err(Error::too_large(path, "the index, in bytes,", text.len() as u64, MAX_INDEX));
    }
    let json: Value = serde_json::from_slice(&text).map_err(|e| Error::malformed(path, "index", e.to_string()))?;
    let Some(listed) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(Error::malformed(path, "weight_map", "must be an object from tensor to file"));
    };
    let (mut files, mut map) = (BTreeSet::new(), BTreeMap::new());
    for (tensor, file) in listed {
        file::check_path_name(tensor).map_err(|rule| Error::malformed(path, "weight_map", rule))?;
        let Some(name) = file.as_str() else {
            return Err(Error::malformed(path, quote(tensor), "must be in a file, named by a string"));
        };
        let plain = name.len() <= file::MAX_NAME
            && name.ends_with(".safetensors")
            && !name.starts_with('.')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
        if !plain {
            let rule = format!("is in {}; it must be a .safetensors file beside the index", quote(name));
            return Err(Error::malformed(path, quote(tensor), rule));
        }
        files.insert(name.to_string());
        map.insert(tensor.clone(), name.to_string());
    }
    if files.is_empty() || files.len() > MAX_SHARDS {
        let rule = format!("names {} files; there must be 1 to {MAX_SHARDS}", files.len());
        return Err(Error::malformed(path, "weight_map", rule));
    }
    Ok(Index { files: files.into_iter().collect(), map })
}

/// Returns the path of a file of an index.
pub fn beside(index: &Path, name: &str) -> PathBuf {
    index.with_file_name(name)
}

/// Checks the tensors `names` of the file `name` against the index at `path`.
pub fn check(path: &Path, index: &Index, name: &str, names: &[&str]) -> Result<()> {
    let of_this = |tensor: &str| index.map.get(tensor).is_some_and(|file| file == name);
    if let Some(other) = names.iter().find(|t| !of_this(t)) {
        return Err(Error::malformed(path, quote(other), format!("is in {name}, but not by the index")));
    }
    let here: BTreeSet<&str> = names.iter().copied().collect();
    match index.map.iter().find(|(t, file)| *file == name && !here.contains(t.as_str())) {
        Some((tensor, _)) => {
            Err(Error::malformed(path, quote(tensor), format!("is in {name} by the index, but not there")))
        }
        None => Ok(()),
    }
}

/// Reads every tensor of the index at `path`, file by file.
pub fn load(files: &dyn Opener, path: &Path) -> Result<Contents> {
    let index = index(files.open(path)?)?;
    let mut out = Contents::default();
    for name in &index.files {
        // Check the header first, so that no tensor of mismatched files is read.
        let header = safetensors::header(files.open(&beside(path, name))?)?;
        let names: Vec<&str> = header.entries.iter().map(|e| e.name.as_str()).collect();
        check(path, &index, name, &names)?;
    }
    for name in &index.files {
        let contents = safetensors::load(files.open(&beside(path, name))?)?;
        out.tensors.extend(contents.tensors);
        out.metadata.extend(contents.metadata);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::{DType, Shape};

    fn load_at(path: &Path) -> Result<Contents> {
        let dir = Directory::open(path.parent().expect("a directory"))?;
        load(&dir, Path::new(path.file_name().expect("a name")))
    }

    fn tensors() -> Vec<(String, HostTensor)> {
        let make = |name: &str, n: usize| {
            let values: Vec<f64> = (0..n).map(|i| i as f64).collect();
            (name.to_string(), HostTensor::from_f64(DType::F32, Shape::of(&[n]), &values))
        };
        vec![make("a", 4), make("b", 2), make("c", 100), make("d", 1), make("e", 0)]
    }

    #[test]
    fn shards_hold_what_the_limit_allows_and_come_back_in_order() -> Result<()> {
        let dir = tempfile::tempdir().expect("a directory");
        let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        assert_eq!(save(&Directory::open(dir.path())?, "one", &tensors(), &metadata, LIMIT)?, ["one.safetensors"]);
        let names = save(&Directory::open(dir.path())?, "m", &tensors(), &metadata, 24)?;
        let expected = ["m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors", "m-00003-of-00003.safetensors"];
        assert_eq!(names[..3], expected);
        assert_eq!(names[3..], ["m.safetensors.index.json"]);
        let at = dir.path().join(&names[3]);
        assert!(is_index(&at) && !is_index(&dir.path().join("one.safetensors")));
        let text: Value = serde_json::from_str(&std::fs::read_to_string(&at).expect("text")).expect("JSON");
        assert_eq!(text["metadata"]["total_size"], 428);
        assert_eq!(text["weight_map"]["c"], expected[1]);
        let back = load_at(&at)?;
        assert_eq!((back.tensors, back.metadata), (tensors(), metadata));
        Ok(())
    }

    #[test]
    fn inconsistent_shards_are_rejected() -> Result<()> {
        let dir = tempfile::tempdir().expect("a directory");
        save(&Directory::open(dir.path())?, "m", &tensors(), &BTreeMap::new(), 24)?;
        let at = dir.path().join("m.safetensors.index.json");
        let whole = std::fs::read_to_string(&at).expect("text");
        let says = |text: &str, rule: &str| {
            std::fs::write(&at, text).expect("written");
            let e = load_at(&at).expect_err("refused").to_string();
            assert!(e.contains(rule), "{rule}: {e}");
        };
        says("[", "index: ");
        says("{}", "weight_map: must be an object");
        says(r#"{"weight_map": {}}"#, "names 0 files");
        says(r#"{"weight_map": {"a": 3}}"#, "named by a string");
        for bad in ["../x.safetensors", "/etc/passwd", "sub/m.safetensors", ".m.safetensors", "m.bin", ""] {
            says(&format!(r#"{{"weight_map": {{"a": "{bad}"}}}}"#), "must be a .safetensors file beside the index");
        }
        says(r#"{"weight_map": {"../a": "m.safetensors"}}"#, "must not contain '..'");
        says(&whole.replace("\"d\"", "\"f\""), "'d': is in m-00003-of-00003.safetensors, but not by the index");
        says(&whole.replace("\"a\"", "\"z\": \"m-00001-of-00003.safetensors\", \"a\""), "'z': is in m-00001");
        std::fs::remove_file(dir.path().join("m-00002-of-00003.safetensors")).expect("removed");
        says(&whole, "m-00002-of-00003.safetensors: cannot open");
        Ok(())
    }
}
