//! Which CUDA libraries the loader finds: the loader's own paths, a toolkit, the `nvidia-*` wheels of a virtual environment.

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
        cure: "pip install nvidia-cuda-nvrtc-cu12, or install the CUDA toolkit",
        needed: true,
    },
    Wanted {
        name: "cuBLASLt",
        files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        what_for: "for matrix products",
        cure: "pip install nvidia-cublas-cu12, or install the CUDA toolkit",
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
        what_for: "for convolutions",
        cure: "pip install nvidia-cudnn-cu12",
        needed: false,
    },
    Wanted {
        name: "NCCL",
        files: &["libnccl.so.2", "libnccl.so"],
        what_for: "for several GPUs",
        cure: "pip install nvidia-nccl-cu12",
        needed: false,
    },
];

/// Directories beside the loader's own: a toolkit, and wheels.
fn extra_dirs() -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        out.extend(std::env::var_os(name).map(|d| PathBuf::from(d).join("lib64")));
    }
    out.push("/usr/local/cuda/lib64".into());
    if let Some(venv) = std::env::var_os("VIRTUAL_ENV") {
        for python in entries(&PathBuf::from(venv).join("lib")) {
            let packages = entries(&python.join("site-packages/nvidia"));
            out.extend(packages.into_iter().map(|d| d.join("lib")));
        }
    }
    out.retain(|d| d.is_dir());
    out
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> =
        std::fs::read_dir(dir).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    out.sort();
    out
}

/// Where a library was found.
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

#[allow(unsafe_code)]
fn opens(file: &Path) -> bool {
    // SAFETY: loading runs the library's initialisers. These are NVIDIA's own, made to be loaded at run time, and no symbol
    // is used. The handle is leaked: unloading a driver in mid-process is what is known to go wrong.
    match unsafe { libloading::Library::new(file) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// The path the loader took, from the process's own map.
fn mapped(file: &str) -> Option<String> {
    let stem = file.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let found = maps
        .lines()
        .filter_map(|l| l.split_whitespace().nth(5))
        .find(|p| p.rsplit('/').next().is_some_and(|n| n.starts_with(stem)));
    found.map(str::to_string)
}
