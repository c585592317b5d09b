//! Gives up privileges and sets the limits of the process: no new privileges, no capabilities but those that read files, no core
//! dump, a bounded number of open files.

use crate::walls::{Error, Stand, Wall, Walls};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// Open files at most. CUDA opens a few hundred; a data set of many shards some thousands.
const FILES: u64 = 65_536;

fn built(what: &str) -> impl Fn(rustix::io::Errno) -> Error + '_ {
    move |e| Error::Built(format!("{what}: {e}"))
}

/// Makes the kernel end this process with its parent; whether the parent is still there.
pub fn die_with_parent() -> bool {
    let parent = rustix::process::getppid();
    let asked = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    // The parent may have ended before the call.
    asked && parent.is_some() && rustix::process::getppid() == parent
}

/// Enters the walls of privileges and limits. The process has one thread: capabilities belong to threads.
pub(crate) fn enter(walls: &mut Walls) -> Result<(), Error> {
    rustix::thread::set_no_new_privs(true).map_err(built("no_new_privs"))?;
    // Root reads the files of others, which Landlock bounds; every other power is given up.
    let kept = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    let mut now = capabilities(None).map_err(built("capabilities"))?;
    now.effective &= kept;
    now.permitted &= kept;
    now.inheritable = CapabilitySet::empty();
    set_capabilities(None, now).map_err(built("capabilities"))?;
    let confirmed = rustix::thread::no_new_privs().unwrap_or(false);
    let left = capabilities(None).map_or(CapabilitySet::all(), |sets| sets.permitted | sets.effective);
    let stand = match (confirmed, (left - kept).is_empty()) {
        (true, true) => Stand::Stands,
        (false, _) => Stand::Missing("the kernel did not set no_new_privs".into()),
        (_, false) => Stand::Missing("capabilities could not be given up".into()),
    };
    walls.add(Wall::Privileges, stand);

    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Core, none).map_err(built("RLIMIT_CORE"))?;
    let files = getrlimit(Resource::Nofile).maximum.map_or(FILES, |most| most.min(FILES));
    let files = Rlimit { current: Some(files), maximum: Some(files) };
    setrlimit(Resource::Nofile, files).map_err(built("RLIMIT_NOFILE"))?;
    // The forbidden act: to take a limit back.
    let back = setrlimit(Resource::Core, Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) });
    let stand = match (back, getrlimit(Resource::Core).current) {
        (Err(_), Some(0)) => Stand::Stands,
        _ => Stand::Missing("a limit could be raised again".into()),
    };
    walls.add(Wall::Limits, stand);
    Ok(())
}
