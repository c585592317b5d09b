//! Opens the files of a run directory, which may come from elsewhere: a link, a pipe or a device is refused and never waited for.

use crate::error::{Error, Result, disk};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file of a run directory that may come from elsewhere. A link is an error: it could lead anywhere.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> Result<File> {
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
    let file = options.custom_flags(flags as i32).open(path).map_err(|e| {
        if path.is_symlink() { refused(path, "is not a regular file but a link") } else { disk("open", path)(e) }
    })?;
    if !file.metadata().map_err(disk("open", path))?.is_file() {
        return Err(refused(path, "is not a regular file"));
    }
    Ok(file)
}

/// Creates a file in place of whatever has its name.
pub(crate) fn create(path: &Path) -> Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(disk("replace", path)(e)),
        _ => {}
    }
    File::create_new(path).map_err(disk("create", path))
}

fn refused(path: &Path, rule: &str) -> Error {
    Error::Refused(format!("{}: file: {rule}", path.display()))
}

/// Reads a small text file of a run directory, which may come from an untrusted source.
pub fn text_of(path: &Path) -> Result<String> {
    text_within(path, 64 << 20)
}

/// Reads a text file of at most `most` bytes. Anything but a regular file is refused, and never waited for.
pub(crate) fn text_within(path: &Path, most: u64) -> Result<String> {
    let file = open(path, OpenOptions::new().read(true))?;
    let size = file.metadata().map_err(disk("read", path))?.len();
    if size > most {
        return Err(Error::Refused(format!(
            "{}: size: is {size} bytes; such a file has at most {most}",
            path.display()
        )));
    }
    let mut text = String::new();
    file.take(most).read_to_string(&mut text).map_err(disk("read", path))?;
    Ok(text)
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
    let name = fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    let name = file_name(name.unwrap_or_default().trim());
    if name.is_empty() { "localhost".into() } else { name }
}
