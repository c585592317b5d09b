//! Reads and writes `.npz`, the NumPy zip of named arrays: members `NAME.npy`, stored or deflated.
//!
//! A member may claim any size, so its claim is first compared with the maximum expansion of its packed bytes, then
//! with its own header, and no more than that is unpacked. Encrypted members, other compressions, duplicate
//! names and members that are not arrays are refused. Dates are not written: the same arrays give the same bytes.

use crate::error::{Error, Result, quote};
use crate::expansion;
use crate::file;
use crate::npy::{self, At};
use perilune_core::HostTensor;
use perilune_policy::{Opened, Staged};
use std::collections::HashSet;
use std::io::BufReader;
use std::path::Path;
use zip::{CompressionMethod, ZipArchive, ZipWriter, result::ZipError, write::SimpleFileOptions};

const MAX_MEMBERS: u64 = 100_000;

/// Reads every array, in the archive's order, named without the `.npy`.
pub fn load(file: Opened) -> Result<Vec<(String, HostTensor)>> {
    let path = &file.path().to_path_buf();
    let damaged = |e: ZipError| match e {
        ZipError::Io(e) if e.kind() != std::io::ErrorKind::UnexpectedEof => Error::io(path, "read", e),
        ZipError::CompressionMethodNotSupported(m) => {
            Error::unsupported(path, "zip archive", format!("has a member packed by method {m}"))
                .hint("np.savez stores and np.savez_compressed deflates; both are read")
        }
        e => Error::malformed(path, "zip archive", e.to_string()).hint("check that this is a complete .npz file"),
    };
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(damaged)?;
    if archive.len() as u64 > MAX_MEMBERS {
        return Err(Error::too_large(path, "the number of arrays", archive.len() as u64, MAX_MEMBERS));
    }
    if archive.has_duplicate_names() {
        return Err(Error::malformed(path, "zip archive", "has two members of the same name"));
    }
    let mut seen = HashSet::new();
    let mut out = Vec::new();
    for i in 0..archive.len() {
        let place = format!("member {i}");
        if archive.by_index_raw(i).map_err(damaged)?.encrypted() {
            return Err(Error::unsupported(path, place, "is encrypted")
                .hint("decrypt it and save the arrays without encryption"));
        }
        let mut member = archive.by_index(i).map_err(damaged)?;
        let full = String::from_utf8(member.name_raw().to_vec())
            .map_err(|_| Error::malformed(path, place.as_str(), "has a name that is not UTF-8"))?;
        let Some(name) = full.strip_suffix(".npy") else {
            let rule = format!("is {}; every member must be an array NAME.npy", quote(&full));
            return Err(Error::unsupported(path, place, rule));
        };
        check_name(path, name)?;
        if !seen.insert(name.to_string()) {
            return Err(Error::malformed(path, format!("array {}", quote(name)), "appears twice"));
        }
        let (packed, size) = (member.compressed_size(), member.size());
        let most = match member.compression() {
            CompressionMethod::Stored => packed,
            _ => expansion::deflate(packed),
        };
        if size > most {
            let rule = format!("says {size} bytes, but its {packed} packed bytes hold at most {most}");
            return Err(Error::malformed(path, format!("array {}", quote(name)), rule));
        }
        let tensor = npy::read(&mut member, size, &At { path, member: name })?;
        out.push((name.to_string(), tensor));
    }
    Ok(out)
}

/// Writes arrays, deflated if `compress`.
pub fn save(file: Staged, tensors: &[(String, HostTensor)], compress: bool) -> Result<()> {
    let path = &file.path().to_path_buf();
    let method = if compress { CompressionMethod::Deflated } else { CompressionMethod::Stored };
    let mut seen = HashSet::new();
    for (name, _) in tensors {
        check_name(path, name)?;
        if !seen.insert(name) {
            return Err(Error::malformed(path, format!("array {}", quote(name)), "is given twice"));
        }
    }
    file::write_whole(file, |out| {
        let failed = |e: ZipError| Error::io(path, "write", std::io::Error::other(e));
        let mut zip = ZipWriter::new(out);
        for (name, tensor) in tensors {
            let options = SimpleFileOptions::default()
                .compression_method(method)
                .last_modified_time(zip::DateTime::default())
                .large_file(tensor.bytes.len() as u64 >= (1 << 32) - (1 << 20));
            zip.start_file(format!("{name}.npy"), options).map_err(failed)?;
            npy::write(&mut zip, tensor, &At { path, member: name })?;
        }
        zip.finish().map_err(failed)?;
        Ok(())
    })
}

/// A name is only a table key here, so any printable text is allowed.
fn check_name(path: &Path, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > file::MAX_NAME || name.chars().any(char::is_control) {
        let rule = format!("must have 1 to {} bytes and no control characters", file::MAX_NAME);
        return Err(Error::malformed(path, format!("array name {}", quote(name)), rule));
    }
    Ok(())
}

#[cfg(test)]
#[path = "npz_tests.rs"]
mod tests;
