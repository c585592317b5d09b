//! Checks that the host has memory before a large amount of it is allocated.
//!
//! Linux grants more memory than there is, and ends the process that then touches it. So large requests are compared with what is left:
//! `MemAvailable` of `/proc/meminfo`, and what the control groups of the process may still take. On other systems, and for small
//! requests, the allocator alone decides. Memory of a GPU is not counted here.

use crate::byte_size;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of requests after which the memory is looked at again.
const LOOK_BYTES: usize = 32 << 20;
/// The share of the available memory that requests may take, in per cent. The rest is for other processes and for what is
/// allocated between two looks.
pub const SHARE: usize = 90;

/// Bytes requested since the last look.
static SINCE: AtomicUsize = AtomicUsize::new(0);

/// Bytes that the machine and the control groups of this process have left; `None` where the system does not tell.
pub fn available() -> Option<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let of_machine = field(&info, "MemAvailable:")?.checked_mul(1024)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let of_groups = group_dirs(&groups).into_iter().filter_map(|dir| left_in_group(&dir));
    Some(of_groups.fold(of_machine, usize::min))
}

/// The number behind a name in a text of lines `name number unit`.
fn field(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The folders of the control groups that limit this process, innermost first. Inside a container the root is its own group.
fn group_dirs(groups: &str) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            c if c.split(',').any(|c| c == "memory") => "/sys/fs/cgroup/memory",
            _ => continue,
        };
        let relative = Path::new(path.trim_start_matches('/'));
        out.extend(relative.ancestors().map(|a| Path::new(root).join(a)));
    }
    out
}

/// Bytes that a control group may still take; page cache that can be dropped counts as free.
fn left_in_group(dir: &Path) -> Option<usize> {
    let number = |name: &str| std::fs::read_to_string(dir.join(name)).ok()?.trim().parse::<usize>().ok();
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = field(&stat, "inactive_file ").unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cache)))
}

/// An error unless `nbytes` more can be allocated.
pub fn check(op: &str, nbytes: usize) -> Result<()> {
    let since = SINCE.fetch_add(nbytes.min(LOOK_BYTES), Ordering::Relaxed).saturating_add(nbytes);
    if since < LOOK_BYTES {
        return Ok(());
    }
    SINCE.store(0, Ordering::Relaxed);
    let Some(left) = available() else { return Ok(()) };
    if nbytes <= left / 100 * SHARE {
        return Ok(());
    }
    let message = format!(
        "out of memory: {} more were requested, {} of the machine's memory are available ({SHARE} % of that may be taken)",
        byte_size::show(nbytes),
        byte_size::show(left)
    );
    Err(Error::memory(op, message))
}

/// The error of an allocator that has no `nbytes`.
pub fn refused(op: &str, nbytes: usize) -> Error {
    Error::memory(op, format!("out of memory: the system has no {} more to give", byte_size::show(nbytes)))
}

/// An empty list with room for `n` elements.
pub fn reserve<T>(op: &str, n: usize) -> Result<Vec<T>> {
    let nbytes = n.saturating_mul(size_of::<T>());
    check(op, nbytes)?;
    let mut out = Vec::new();
    out.try_reserve_exact(n).map_err(|_| refused(op, nbytes))?;
    Ok(out)
}

/// `n` times the default element.
pub fn filled<T: Copy + Default>(op: &str, n: usize) -> Result<Vec<T>> {
    let mut out = reserve(op, n)?;
    out.resize(n, T::default());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_available_memory_are_refused() {
        assert_eq!(filled::<u32>("f", 1000).map(|v| v.len()), Ok(1000));
        for n in [1 << 48, usize::MAX / 2, usize::MAX] {
            let e = reserve::<u64>("f", n).unwrap_err();
            assert_eq!(e.kind, crate::Kind::Memory);
            assert!(e.message.starts_with("out of memory: "), "{e}");
        }
        if cfg!(target_os = "linux") {
            let left = available().unwrap();
            assert!(left > 1 << 20 && left < 1 << 48, "{left} bytes are available");
            let e = check("f", left).unwrap_err();
            assert!(e.message.contains("more were requested"), "{e}");
        }
    }

    #[test]
    fn groups_are_read_in_both_versions() {
        let dirs = group_dirs("0::/a/b\n");
        let want = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"];
        assert_eq!(dirs, want.map(PathBuf::from));
        assert_eq!(group_dirs("7:cpu,memory:/\n3:pids:/x\n"), [PathBuf::from("/sys/fs/cgroup/memory/")]);
        assert_eq!(field("MemFree: 5 kB\nMemAvailable:   70 kB\n", "MemAvailable:"), Some(70));
    }

    #[test]
    fn a_group_that_is_nearly_full_leaves_what_it_may_take() {
        let dir = std::env::temp_dir().join(format!("perilune-group-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for (name, text) in
            [("memory.max", "1000\n"), ("memory.current", "900\n"), ("memory.stat", "anon 1\ninactive_file 150\n")]
        {
            std::fs::write(dir.join(name), text).unwrap();
        }
        assert_eq!(left_in_group(&dir), Some(250));
        std::fs::write(dir.join("memory.max"), "max\n").unwrap();
        assert_eq!(left_in_group(&dir), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
