//! Reads text files of a run directory, which may come from elsewhere: a link, a pipe or a device is refused and never waited
//! for. `policy::Directory` opens, creates and renames them by the handle of the directory.

use crate::error::{Error, Result, disk};
use perilune_policy::Directory;
use std::path::Path;

/// The size limit of `run.json` in bytes.
pub(crate) const MAX_RECORD: u64 = 64 << 20;

/// Reads a text file of at most `most` bytes beneath `dir`; a part of its name that is a link is refused.
pub(crate) fn text_in(dir: &Directory, name: &Path, most: u64) -> Result<String> {
    let file = dir.open_unlinked(name)?;
    let (path, size) = (file.path().to_path_buf(), file.len());
    if size > most {
        return Err(Error::Refused(format!(
            "{}: size: is {size} bytes; such a file has at most {most}",
            path.display()
        )));
    }
    file.text(most).map_err(disk("read", &path))
}

/// Replaces characters that a file name should not have.
pub(crate) fn file_name(text: &str) -> String {
    text.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

/// Returns seconds since 1970.
pub fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Returns the host name, in characters that a file name may have.
pub fn hostname() -> String {
    use std::fs;
    let name = fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    let name = file_name(name.unwrap_or_default().trim());
    if name.is_empty() { "localhost".into() } else { name }
}
