//! Writes files atomically through a buffer, validates tensor and member names read from files, and bounds the size of inflated data.
//!
//! A [`Staged`] file replaces its target atomically. Not included: opening files (`perilune_policy`), locking, and memory maps.

use crate::error::{Error, Result, quote};
use perilune_policy::Staged;
use std::io::{BufWriter, Write};

/// Names of tensors and members longer than this are refused.
pub(crate) const MAX_NAME: usize = 512;

/// Writes a file and puts it in place. `write` gets a buffered writer over the new file.
pub fn write_whole(mut file: Staged, write: impl FnOnce(&mut BufWriter<&mut Staged>) -> Result<()>) -> Result<()> {
    let path = file.path().to_path_buf();
    let mut out = BufWriter::with_capacity(1 << 18, &mut file);
    write(&mut out)?;
    out.flush().map_err(|e| Error::io(&path, "write", e))?;
    drop(out);
    Ok(file.commit()?)
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

/// Opens and creates files as tests name them.
#[cfg(test)]
pub(crate) mod named {
    use super::{Result, Staged};
    use perilune_policy::{Directory, Opened};
    use std::path::Path;

    pub fn open(path: &Path) -> Result<Opened> {
        Ok(perilune_policy::open_named(path)?)
    }

    pub fn create(path: &Path) -> Result<Staged> {
        let (dir, name) = path.parent().zip(path.file_name()).expect("a file in a directory");
        Ok(Directory::open(dir)?.create(&name.to_string_lossy())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_litter() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("a.bin");
        let put = |text: &'static [u8], fail: bool| {
            write_whole(named::create(&path)?, |w| {
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
        Ok(())
    }

    #[test]
    fn path_names_are_checked() {
        for good in ["a", "blocks.3.attn.wq", "m/0:weight-1"] {
            assert_eq!(check_path_name(good), Ok(()));
        }
        for bad in ["", "../a", "a b", "/a", "ä", "a\n"] {
            assert!(check_path_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_path_name(&"n".repeat(513)).is_err());
    }
}
