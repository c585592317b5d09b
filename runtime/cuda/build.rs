//! Embeds the headers of `kernels/`: every `kernels/**/*.cuh` as (path under `kernels/`, text), sorted by path.

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn headers(dir: &Path, out: &mut Vec<PathBuf>) {
    // For a directory, Cargo compares the times of everything in it, so new files are detected too.
    println!("cargo::rerun-if-changed={}", dir.display());
    let entries = std::fs::read_dir(dir).expect("kernels/ is readable");
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            headers(&path, out);
        } else if path.extension().is_some_and(|e| e == "cuh") {
            out.push(path);
        }
    }
}

fn main() {
    // Read at run time: another checkout's build script, compiled into the same target folder, would embed its own
    // headers.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let root = Path::new(&here).join("../../kernels");
    let root = root.canonicalize().expect("kernels/ is next to runtime/");
    let mut files = Vec::new();
    headers(&root, &mut files);
    files.sort();
    let mut text = String::from("pub const HEADERS: &[(&str, &str)] = &[\n");
    for file in files {
        let Ok(inside) = file.strip_prefix(&root) else { continue };
        let inside = inside.to_string_lossy().replace('\\', "/");
        let _ = writeln!(text, "    ({inside:?}, include_str!({:?})),", file.display().to_string());
    }
    text.push_str("];\n");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("headers.rs");
    std::fs::write(out, text).expect("OUT_DIR is writable");
}
