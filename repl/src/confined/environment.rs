//! Chooses the environment variables of the confined process: what the terminal, the language and the GPU need, and no secrets.

use std::ffi::{OsStr, OsString};

/// Variables by their whole names.
const NAMES: &[&str] = &[
    "TERM",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "LANG",
    "LANGUAGE",
    "TZ",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
];

/// Beginnings of names.
const BEGINNINGS: &[&str] = &["LC_", "PERILUNE_"];

/// Variables of the program that name places outside the walls, or that the supervisor sets itself.
const OWN: &[&str] = &[
    "PERILUNE_CACHE",
    "PERILUNE_SHARED_CACHE",
    "PERILUNE_LIBRARIES",
    "PERILUNE_LAUNCHER",
    "PERILUNE_DUMP",
    "PERILUNE_HISTORY",
    super::protocol::PIPES,
];

/// Words that names of secrets have.
const SECRET: &[&str] = &["TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "KEY"];

fn passes(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let known = NAMES.contains(&name) || BEGINNINGS.iter().any(|start| name.starts_with(start));
    known && !OWN.contains(&name) && !SECRET.iter().any(|word| name.contains(word))
}

/// The variables of this process that the child gets too.
pub fn passed() -> Vec<(OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| passes(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_places_stay_outside() {
        for name in ["TERM", "LC_ALL", "PERILUNE_MEMORY_LIMIT", "CUDA_VISIBLE_DEVICES", "NO_COLOR"] {
            assert!(passes(OsStr::new(name)), "{name}");
        }
        for name in [
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_PROFILE",
            "HOME",
            "PATH",
            "USER",
            "SSH_AUTH_SOCK",
            "LD_PRELOAD",
            "CUDA_CACHE_PATH",
            "CUDA_INJECTION64_PATH",
            "PERILUNE_CACHE",
            "PERILUNE_TOKEN",
            "PERILUNE_API_KEY",
            "PERILUNE_CONFINED",
        ] {
            assert!(!passes(OsStr::new(name)), "{name}");
        }
    }
}
