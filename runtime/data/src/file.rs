//! Opens regular files only, and writes files atomically.
//!
//! A write goes to a temporary file in the same directory, is flushed to the disk, renamed over the target, and the
//! directory is flushed too: after a crash there is the old file or the new one, never a part. Not supported: locking,
//! creation of directories (a misspelt path should fail), memory maps.

use crate::error::{Error, Result, quote};
use perilune_core::error::did_you_mean;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Names of tensors and members longer than this are refused.
pub(crate) const MAX_NAME: usize = 512;

/// Opens a regular file and returns its length. A directory, pipe or device is refused, since its length is not known.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    let meta = std::fs::metadata(path).map_err(|e| match (e.kind(), neighbour(path)) {
        (std::io::ErrorKind::NotFound, Some(name)) => {
            Error::io(path, "open", e).hint(format!("did you mean {}?", quote(&name)))
        }
        _ => Error::io(path, "open", e),
    })?;
    if !meta.is_file() {
        let kind = if meta.is_dir() { "a directory" } else { "not a regular file" };
        return Err(Error::unsupported(path, "path", format!("is {kind}; a regular file is needed")));
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    Ok((file, meta.len()))
}

/// Finds a file in the same directory with a name similar to that of `path`.
fn neighbour(path: &Path) -> Option<String> {
    let wanted = path.file_name()?.to_str()?;
    let entries = std::fs::read_dir(parent_of(path)).ok()?.take(1000);
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    did_you_mean(wanted, names.iter().map(String::as_str)).map(String::from)
}

fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

/// Writes a file atomically. `write` gets a buffered writer over the temporary file.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut BufWriter<&mut File>) -> Result<()>) -> Result<()> {
    let parent = parent_of(path);
    if path.is_dir() || path.file_name().is_none() {
        return Err(Error::argument(path.display().to_string(), "is a directory; a file name is needed"));
    }
    if !parent.is_dir() {
        return Err(Error::argument(path.display().to_string(), format!("there is no directory {}", parent.display()))
            .hint("create the directory first"));
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".perilune-").suffix(".tmp");
    // tempfile's default is 0600; saved files should have the default permissions of the user.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temp = builder.tempfile_in(parent).map_err(|e| Error::io(path, "create a temporary file beside", e))?;
    let mut out = BufWriter::with_capacity(1 << 18, temp.as_file_mut());
    write(&mut out)?;
    out.flush().map_err(|e| Error::io(path, "write", e))?;
    drop(out);
    temp.as_file().sync_all().map_err(|e| Error::io(path, "flush to the disk", e))?;
    temp.persist(path).map_err(|e| Error::io(path, "put in place", e.error))?;
    #[cfg(unix)]
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| Error::io(path, "flush the directory of", e))?;
    Ok(())
}

/// The rule for names that may become paths, State names or table keys: `[A-Za-z0-9_.:/-]`, no `..`, no empty part,
/// at most `MAX_NAME` bytes. `Err` has the violated rule.
pub(crate) fn check_path_name(name: &str) -> std::result::Result<(), String> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(format!("name {} must have 1 to {MAX_NAME} bytes, not {}", quote(name), name.len()));
    }
    if let Some(c) = name.chars().find(|&c| !(c.is_ascii_alphanumeric() || "_.:/-".contains(c))) {
        return Err(format!(
            "name {} has the character {}; allowed are A-Z a-z 0-9 _ . : / -",
            quote(name),
            quote(&c.to_string())
        ));
    }
    if name.contains("..") || name.starts_with('/') {
        return Err(format!("name {} must not contain '..' or start with '/'", quote(name)));
    }
    Ok(())
}

/// Returns the maximum expansion of `compressed` bytes of deflate, with room for the framing: 1032 bytes for one.
pub(crate) fn max_inflated(compressed: u64) -> u64 {
    compressed.saturating_mul(1032).saturating_add(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_litter() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("a.bin");
        let put = |text: &'static [u8], fail: bool| {
            write_atomic(&path, |w| {
                w.write_all(text).map_err(|e| Error::io(&path, "write", e))?;
                if fail { Err(Error::argument("test", "stop here")) } else { Ok(()) }
            })
        };
        put(b"old", false)?;
        assert!(put(b"half", true).is_err());
        assert_eq!(std::fs::read(&path).ok().as_deref(), Some(&b"old"[..]));
        put(b"new", false)?;
        assert_eq!(std::fs::read(&path).ok().as_deref(), Some(&b"new"[..]));
        assert_eq!(std::fs::read_dir(dir.path()).map(|d| d.count()).ok(), Some(1));
        assert!(write_atomic(&dir.path().join("no/such/a"), |_| Ok(())).is_err());
        assert!(write_atomic(dir.path(), |_| Ok(())).is_err());
        Ok(())
    }

    #[test]
    fn only_regular_files_open() {
        assert!(matches!(open(Path::new("/")), Err(Error::Unsupported { .. })));
        let missing = open(Path::new("Cargo.tmol")).map(|_| ()).map_err(|e| e.to_string());
        assert!(
            missing.is_err_and(|m| m.contains("Cargo.tmol: cannot open") && m.contains("did you mean 'Cargo.toml'"))
        );
        #[cfg(target_os = "linux")]
        assert!(open(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn names() {
        for good in ["a", "blocks.3.attn.wq", "m/0:weight-1"] {
            assert_eq!(check_path_name(good), Ok(()));
        }
        for bad in ["", "../a", "a b", "/a", "ä", "a\n"] {
            assert!(check_path_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_path_name(&"n".repeat(513)).is_err());
    }
}
