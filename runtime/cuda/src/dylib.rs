//! Opens NVIDIA's libraries at run time from the loader's paths, a CUDA toolkit, or the `nvidia-*` wheels of a virtual
//! environment or of the Python on the path.
//!
//! A library opened here by its full path is also the one that cudarc opens by name, since the loader matches the
//! SONAME of loaded libraries.

use perilune_core::error::{Error, Result};
use std::path::{Path, PathBuf};

pub struct Wanted {
    pub name: &'static str,
    /// File names, newest first.
    files: &'static [&'static str],
    pub what_for: &'static str,
    pub cure: &'static str,
    pub needed: bool,
}

pub const WANTED: [Wanted; 6] = [
    Wanted {
        name: "CUDA driver",
        files: &["libcuda.so.1", "libcuda.so"],
        what_for: "to reach a GPU at all",
        cure: "install NVIDIA's driver (in a container: start it with --gpus all)",
        needed: true,
    },
    Wanted {
        name: "NVRTC",
        files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        what_for: "to compile fused kernels",
        cure: "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit",
        needed: true,
    },
    Wanted {
        name: "cuBLASLt",
        files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        what_for: "for matrix products",
        cure: "pip install nvidia-cublas, or install the CUDA toolkit",
        needed: true,
    },
    Wanted {
        name: "NVML",
        files: &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        what_for: "for memory and temperature readings",
        cure: "it comes with NVIDIA's driver",
        needed: false,
    },
    Wanted {
        name: "cuDNN",
        files: &["libcudnn.so.9", "libcudnn.so"],
        what_for: "for fast convolutions in 16 bits",
        cure: "pip install nvidia-cudnn-cu13",
        needed: false,
    },
    Wanted {
        name: "NCCL",
        files: &["libnccl.so.2", "libnccl.so"],
        what_for: "for several GPUs",
        cure: "pip install nvidia-nccl-cu13",
        needed: false,
    },
];

/// Directories besides the loader's own: a toolkit's, and those of wheels.
fn extra_dirs() -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        out.extend(std::env::var_os(name).map(|d| PathBuf::from(d).join("lib64")));
    }
    out.push("/usr/local/cuda/lib64".into());
    // Those that the supervisor of a confined process found by its own variables.
    let given = std::env::var_os("PERILUNE_LIBRARIES").unwrap_or_default();
    out.extend(std::env::split_paths(&given).filter(|dir| dir.is_absolute()));
    let mut roots: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|d| d.join("python3")).find(|p| p.is_file());
    // <root>/bin/python3
    roots.extend(python.and_then(|p| Some(p.parent()?.parent()?.to_path_buf())));
    for root in roots {
        for python in entries(&root.join("lib")) {
            let packages = entries(&python.join("site-packages/nvidia"));
            out.extend(packages.into_iter().map(|d| d.join("lib")));
        }
    }
    out.retain(|d| d.is_dir());
    out
}

/// The folders in which libraries, and CUDA's headers beside them, are looked for besides the loader's own.
pub fn library_folders() -> Vec<PathBuf> {
    let mut out = extra_dirs();
    out.extend(include_dirs());
    out
}

/// Declares `Api`: a library of [`WANTED`] with functions of it. Their signatures must be those of the library's headers.
macro_rules! functions {
    ($library:literal, $cure:literal, $($name:ident: fn($($arg:ty),*) -> $out:ty = $symbol:literal),* $(,)?) => {
        /// The library and its functions.
        struct Api {
            $($name: unsafe extern "C" fn($($arg),*) -> $out,)*
            _library: libloading::os::unix::Library,
        }

        impl Api {
            fn load() -> perilune_core::error::Result<Api> {
                let library = $crate::dylib::open_found($library)?;
                let lacks = |e| {
                    let message = format!(concat!($library, " lacks a function: {}"), e);
                    perilune_core::error::Error::system("cuda", message).hint($cure)
                };
                // SAFETY: the signatures are those of the library's headers.
                unsafe {
                    Ok(Api {
                        $($name: *library.get($symbol).map_err(lacks)?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}
pub(crate) use functions;

/// Folders with CUDA's headers, from a toolkit or from wheels.
pub fn include_dirs() -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = extra_dirs().iter().filter_map(|d| Some(d.parent()?.join("include"))).collect();
    out.retain(|d| d.join("cuda_fp16.h").is_file());
    out.dedup();
    out
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> =
        std::fs::read_dir(dir).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    out.sort();
    out
}

/// Opens the library with that name in [`WANTED`]; the error of a missing one states how to install it.
pub fn load(name: &str) -> Result<()> {
    let Some(wanted) = WANTED.iter().find(|w| w.name == name) else {
        return Err(Error::system("cuda", format!("this is a bug: no library is called {name}")));
    };
    match find(wanted) {
        Some(_) => Ok(()),
        None => {
            let message = format!("{name} was not found; it is needed {}", wanted.what_for);
            Err(Error::system("cuda", message).hint(wanted.cure))
        }
    }
}

/// Returns the path of a library, which stays open.
pub fn find(wanted: &Wanted) -> Option<String> {
    for file in wanted.files {
        if opens(Path::new(file)) {
            return Some(mapped(file).unwrap_or_else(|| (*file).to_string()));
        }
    }
    let dirs = extra_dirs();
    let paths = dirs.iter().flat_map(|d| wanted.files.iter().map(|f| d.join(f)));
    paths.into_iter().find(|p| p.is_file() && opens(p)).map(|p| p.display().to_string())
}

/// Opens the library with that name again, for its symbols.
pub fn open_found(name: &str) -> Result<libloading::os::unix::Library> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    load(name)?;
    let files = WANTED.iter().filter(|w| w.name == name).flat_map(|w| w.files);
    // SAFETY: the library is already open, and the loader matches its SONAME.
    let mut open = files.filter_map(|f| unsafe { Library::open(Some(*f), RTLD_NOW | RTLD_GLOBAL) }.ok());
    open.next().ok_or_else(|| Error::system("cuda", format!("{name} was found, but cannot be opened by its name")))
}

fn opens(file: &Path) -> bool {
    // NVRTC opens its builtins by name, from a folder that may not be on the loader's path.
    if let (Some(dir), Some(name)) = (file.parent(), file.file_name().and_then(|n| n.to_str()))
        && name.starts_with("libnvrtc.so")
        && dir != Path::new("")
    {
        for other in entries(dir) {
            let builtins =
                other.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("libnvrtc-builtins.so"));
            if builtins {
                open(&other);
            }
        }
    }
    open(file)
}

fn open(file: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: loading runs the library's initialisers. NVIDIA's are designed for loading at run time. The handle is
    // leaked, because unloading a driver from a running process is known to cause crashes.
    match unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// The path that the loader used, from the process's memory map.
fn mapped(file: &str) -> Option<String> {
    let stem = file.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let found = maps
        .lines()
        .filter_map(|l| l.split_whitespace().nth(5))
        .find(|p| p.rsplit('/').next().is_some_and(|n| n.starts_with(&format!("{stem}.so"))));
    found.map(str::to_string)
}
