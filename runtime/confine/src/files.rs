//! Restricts which files the process may open, with Landlock.
//!
//! Each granted path is opened and added as a rule of its own: a path that is not there is skipped and reported, and never weakens
//! the rules of the others. The kernel's version decides which rights are handled; opening, creating, removing and listing are in
//! all of them.
//!
//! Landlock does not restrict looking at the status of a file, changing the directory, or changing modes, owners and times:
//! `calls.rs` refuses the last three.

use crate::limits;
use crate::probes;
use crate::walls::{Error, Files, Stand, Wall, Walls};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::path::Path;

/// The newest rights that were tested.
const NEWEST: ABI = ABI::V7;

fn read() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Everything that files in a directory need, without devices, sockets and programs.
fn write() -> BitFlags<AccessFs> {
    read()
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer
}

fn device() -> BitFlags<AccessFs> {
    read() | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev
}

/// Enters the walls of privileges, limits and files. It must be called while the process has one thread.
///
/// # Errors
/// The process has several threads, or a limit or a rule cannot be set. A kernel without Landlock is no error.
pub fn enter_files(files: &Files) -> Result<Walls, Error> {
    let mut walls = Walls::default();
    // Without /proc the count is not known, and the caller's promise stands alone.
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    if threads > 1 {
        return Err(Error::Built(format!("the process has {threads} threads, and Landlock would bind one of them")));
    }
    limits::enter(&mut walls)?;
    if files.without.contains(&Wall::Files) {
        for wall in [Wall::Files, Wall::Ports, Wall::Scopes] {
            walls.add(wall, Stand::Missing("left out".into()));
        }
        return Ok(walls);
    }
    let failed = |e: RulesetError| Error::Built(format!("Landlock: {e}"));
    let set = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|set| set.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|set| set.scope(Scope::from_all(NEWEST)))
        .and_then(Ruleset::create);
    let mut set = set.map_err(failed)?;
    for (paths, access) in [
        (&files.read, read()),
        (&files.list, AccessFs::ReadDir.into()),
        (&files.write, write()),
        (&files.devices, device()),
    ] {
        for path in paths {
            match granted(set, path, access) {
                Ok(now) => set = now,
                Err((now, why)) => {
                    set = now.ok_or_else(|| Error::Built(format!("Landlock: {}: {why}", path.display())))?;
                    walls.skipped.push((path.clone(), why));
                }
            }
        }
    }
    keep_own_process();
    let status = set.restrict_self().map_err(failed)?;
    report(files, &status, &mut walls);
    Ok(walls)
}

/// Adds the rule of one path. The rule set comes back where the path alone is at fault.
fn granted(
    set: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, (Option<RulesetCreated>, String)> {
    let fd = match PathFd::new(path) {
        Ok(fd) => fd,
        Err(e) => return Err((Some(set), e.to_string())),
    };
    // The rights of directories do not fit a file.
    let access = match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => access,
        Ok(_) => access & AccessFs::from_file(NEWEST),
        Err(e) => return Err((Some(set), e.to_string())),
    };
    if access.is_empty() {
        return Err((Some(set), "it is no directory".into()));
    }
    // A rule that the kernel refuses takes the set with it; only a kernel fault leads here.
    set.add_rule(PathBeneath::new(fd, access)).map_err(|e| (None, e.to_string()))
}

/// Keeps `/proc/self` open for good: a rule holds a directory of `/proc` only as long as it is the same object.
fn keep_own_process() {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let Ok(open) = rustix::fs::open("/proc/self", flags, Mode::empty()) {
        std::mem::forget(open);
    }
}

fn report(files: &Files, status: &RestrictionStatus, walls: &mut Walls) {
    let abi = match status.landlock {
        LandlockStatus::NotEnabled => "the kernel has Landlock, but does not enable it".to_string(),
        LandlockStatus::NotImplemented => "the kernel has no Landlock".to_string(),
        LandlockStatus::Available { effective_abi, .. } => {
            format!("Landlock here is of version {}", effective_abi as i32)
        }
    };
    let stand = match (&status.ruleset, files.probe.as_deref().map(probes::file)) {
        (RulesetStatus::NotEnforced, _) => Stand::Missing(abi.clone()),
        (_, Some(Err(why))) => Stand::Missing(why),
        _ => Stand::Stands,
    };
    let enforced = stand == Stand::Stands;
    walls.add(Wall::Files, stand);
    let second = |refused: bool| match enforced && refused {
        true => Stand::Stands,
        false => Stand::Missing(abi.clone()),
    };
    walls.add(Wall::Ports, second(probes::port()));
    walls.add(Wall::Scopes, second(probes::signal()));
}
