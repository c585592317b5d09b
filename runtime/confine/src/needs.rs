//! Lists the files that the program itself opens when it is confined: terminals, clocks, what it asks of the kernel, and what CUDA
//! needs.
//!
//! Nothing here belongs to a person: other processes in `/proc`, home folders and `/etc` beyond the named files stay closed.

use crate::walls::Files;
use std::path::{Path, PathBuf};

/// What every command reads: time zones, the numbers of processors and memory, the name of the host.
const READ: &[&str] = &[
    "/etc/localtime",
    "/etc/timezone",
    "/etc/hostname",
    "/usr/share/zoneinfo",
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    "/proc/version",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/vm",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
];

/// Devices of every command. `/proc/self` is that of the process that asks; the names of threads are written there.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/tty", "/proc/self"];

/// What NVIDIA's driver and libraries read. Libraries open parts of themselves when these are first used.
const CUDA: &[&str] = &[
    "/sys",
    "/proc/driver/nvidia",
    "/proc/devices",
    "/proc/modules",
    "/proc/filesystems",
    "/proc/sys/kernel",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/nvidia",
    "/etc/nvidia-container-runtime",
    "/usr/share/nvidia",
    "/run/nvidia-persistenced",
    "/run/opengl-driver",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/cuda",
    "/usr/local/nvidia",
];

fn there(paths: &[&str]) -> impl Iterator<Item = PathBuf> {
    paths.iter().map(PathBuf::from).filter(|path| path.exists())
}

/// Devices of NVIDIA's driver, and that of the Windows subsystem.
fn cuda_devices() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/dev").map(|entries| entries.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let ours = |name: &str| name.starts_with("nvidia") || name == "dxg";
    let mut found: Vec<PathBuf> =
        entries.iter().filter(|entry| entry.file_name().to_str().is_some_and(ours)).map(|e| e.path()).collect();
    found.sort();
    found
}

/// The folders of `LD_LIBRARY_PATH` in which there are libraries. A relative one is left out: it names another folder elsewhere.
fn loader_directories() -> Vec<PathBuf> {
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let holds = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.take(10_000).any(|entry| entry.file_name().to_string_lossy().contains(".so"))
    };
    std::env::split_paths(&variable).filter(|dir| dir.is_absolute() && holds(dir)).collect()
}

/// Adds what the program opens. With `cuda` also devices, the driver's files, the system's library folders and those given.
pub fn add(files: &mut Files, cuda: bool, libraries: &[PathBuf]) {
    files.read.extend(there(READ));
    files.devices.extend(there(DEVICES));
    if !cuda {
        return;
    }
    files.read.extend(there(CUDA));
    files.read.extend(loader_directories());
    files.read.extend(libraries.iter().cloned());
    // The driver looks for its devices by their names.
    files.list.push(PathBuf::from("/dev"));
    files.devices.extend(cuda_devices());
}
