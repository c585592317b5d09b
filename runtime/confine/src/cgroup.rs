//! Bounds the memory and the tasks of a process by a control group, where this user may make one.
//!
//! With version 2 the group is made beneath that of this process, or beside it, wherever the controllers are passed on; with version 1
//! it is made beneath this process's group of each controller. A machine where neither is possible has no group, and the limits of the
//! program itself remain.

use std::io;
use std::path::{Path, PathBuf};

/// A control group, which is removed when it is dropped and its processes have ended.
#[derive(Debug)]
pub struct Group {
    /// One directory, or one for each controller.
    directories: Vec<PathBuf>,
}

const ROOT: &str = "/sys/fs/cgroup";

/// The path of this process's group by the line of a controller: `memory` of version 1, or the empty name of version 2.
fn own(groups: &str, controller: &str) -> Option<PathBuf> {
    let line = groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(path)
    })?;
    Some(PathBuf::from(line.trim_start_matches('/')))
}

fn set(directory: &Path, file: &str, value: Option<u64>) -> io::Result<()> {
    value.map_or(Ok(()), |value| std::fs::write(directory.join(file), value.to_string()))
}

impl Group {
    /// Makes a group whose processes have at most so many bytes of memory and so many threads. `None` where that is not possible.
    pub fn create(name: &str, bytes: Option<u64>, tasks: Option<u64>) -> Option<Group> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let root = Path::new(ROOT);
        let made = match root.join("cgroup.controllers").exists() {
            true => Group::second(&root.join(own(&groups, "")?), name, bytes, tasks),
            false => Group::first(root, &groups, name, bytes, tasks),
        };
        made.ok()
    }

    fn second(own: &Path, name: &str, bytes: Option<u64>, tasks: Option<u64>) -> io::Result<Group> {
        let passes = |at: &Path| {
            let controllers = std::fs::read_to_string(at.join("cgroup.subtree_control")).unwrap_or_default();
            controllers.split_whitespace().any(|name| name == "memory")
        };
        let places = [Some(own), own.parent().filter(|parent| parent.starts_with(ROOT))];
        let place = places.into_iter().flatten().find(|at| passes(at));
        let directory = place.ok_or(io::ErrorKind::Unsupported)?.join(name);
        std::fs::create_dir(&directory)?;
        let group = Group { directories: vec![directory.clone()] };
        set(&directory, "memory.max", bytes)?;
        let _ = set(&directory, "memory.swap.max", bytes.map(|_| 0));
        let _ = set(&directory, "pids.max", tasks);
        Ok(group)
    }

    fn first(root: &Path, groups: &str, name: &str, bytes: Option<u64>, tasks: Option<u64>) -> io::Result<Group> {
        let mut group = Group { directories: Vec::new() };
        for (controller, file, value) in [("memory", "memory.limit_in_bytes", bytes), ("pids", "pids.max", tasks)] {
            let Some(own) = own(groups, controller).filter(|_| value.is_some()) else { continue };
            let directory = root.join(controller).join(own).join(name);
            if std::fs::create_dir(&directory).is_ok() {
                group.directories.push(directory.clone());
                set(&directory, file, value)?;
            }
        }
        if group.directories.is_empty() { Err(io::ErrorKind::Unsupported.into()) } else { Ok(group) }
    }

    /// Adds a process with all its threads.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn add(&self, process: u32) -> io::Result<()> {
        self.directories.iter().try_for_each(|at| std::fs::write(at.join("cgroup.procs"), process.to_string()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for directory in &self.directories {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_groups_are_found_by_controller() {
        let first = "9:name=systemd:/\n8:pids:/\n4:memory,hugetlb:/api/b7\n0::/\n";
        assert_eq!(own(first, "memory"), Some("api/b7".into()));
        assert_eq!(own(first, "pids"), Some("".into()));
        assert_eq!(own("0::/user.slice/a:b.scope\n", ""), Some("user.slice/a:b.scope".into()));
        assert_eq!(own("", "memory"), None);
    }
}
