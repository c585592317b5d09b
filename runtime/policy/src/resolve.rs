//! Resolves a path beneath a directory handle, by `openat2` or component by component.
//!
//! `openat2` with RESOLVE_BENEATH lets the kernel refuse `..`, absolute links and renames that lead out of the directory.
//! Where it is missing (Linux before 5.6, a seccomp filter, other systems) a walk does the same: it opens each directory by its
//! handle without following links, reads links itself, and keeps the handles of the directories above, so that `..` never asks
//! the file system. Both report an escape as EXDEV.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path};

/// How paths are resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Resolution {
    /// By `openat2` where the system has it, else by the walk.
    #[default]
    Auto,
    /// Component by component.
    Walk,
}

/// Whether links beneath the directory are followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Links {
    Follow,
    /// A link anywhere in the path is ELOOP.
    Refuse,
}

/// As many links as Linux follows in one path.
const MAX_LINKS: usize = 40;
/// An open that races with renames is tried again so many times before the walk does it.
#[cfg(target_os = "linux")]
const MAX_RACES: usize = 16;

/// A handle that only names a file, where the system has such.
#[cfg(target_os = "linux")]
pub(crate) const NAME_ONLY: OFlags = OFlags::PATH;
#[cfg(not(target_os = "linux"))]
pub(crate) const NAME_ONLY: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK);

/// Opens `path`, which is relative, beneath `root`.
pub(crate) fn open_beneath(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    links: Links,
    how: Resolution,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC;
    if path.is_absolute() {
        return Err(Errno::XDEV);
    }
    #[cfg(target_os = "linux")]
    if how == Resolution::Auto
        && let Some(found) = by_openat2(root, path, flags, links)
    {
        return found;
    }
    let _ = how;
    walk(root, path, flags, links)
}

/// `None` where the system has no `openat2` or a race goes on.
#[cfg(target_os = "linux")]
fn by_openat2(root: BorrowedFd<'_>, path: &Path, flags: OFlags, links: Links) -> Option<Result<OwnedFd, Errno>> {
    use rustix::fs::ResolveFlags;
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    if links == Links::Refuse {
        resolve |= ResolveFlags::NO_SYMLINKS;
    }
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    for _ in 0..MAX_RACES {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A seccomp filter may answer EPERM for a call that it does not know.
            Err(Errno::NOSYS | Errno::PERM) => return None,
            found => return Some(found),
        }
    }
    None
}

fn walk(root: BorrowedFd<'_>, path: &Path, flags: OFlags, links: Links) -> Result<OwnedFd, Errno> {
    let directory = NAME_ONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut left = parts(path)?;
    let mut followed = 0;
    while let Some(name) = left.pop() {
        if name == ".." {
            // The handle from before the step down: the directory's parent may be another one by now.
            open.pop().ok_or(Errno::XDEV)?;
            continue;
        }
        let at = open.last().map_or(root, |fd| fd.as_fd());
        match rustix::fs::readlinkat(at, &name, Vec::new()) {
            Ok(_) if links == Links::Refuse => return Err(Errno::LOOP),
            Ok(target) => {
                followed += 1;
                if followed > MAX_LINKS {
                    return Err(Errno::LOOP);
                }
                left.extend(parts(Path::new(&OsString::from_vec(target.into_bytes())))?);
                continue;
            }
            // No link.
            Err(Errno::INVAL) => {}
            Err(e) => return Err(e),
        }
        if left.is_empty() {
            return rustix::fs::openat(at, &name, flags | OFlags::NOFOLLOW, Mode::empty());
        }
        let next = rustix::fs::openat(at, &name, directory, Mode::empty())?;
        open.push(next);
    }
    let at = open.last().map_or(root, |fd| fd.as_fd());
    rustix::fs::openat(at, ".", flags | OFlags::NOFOLLOW, Mode::empty())
}

/// The names of a relative path, the first last.
fn parts(path: &Path) -> Result<Vec<OsString>, Errno> {
    let mut out = Vec::new();
    for part in path.components() {
        match part {
            Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV),
            Component::CurDir => {}
            Component::ParentDir => out.push("..".into()),
            Component::Normal(name) => out.push(name.to_os_string()),
        }
    }
    out.reverse();
    Ok(out)
}
