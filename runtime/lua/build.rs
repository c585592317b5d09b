//! Embeds the standard library: every `stdlib/**/*.lua` as (module name, path, text).

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, out);
        } else if path.extension().is_some_and(|e| e == "lua") {
            out.push(path);
        }
    }
}

fn main() {
    // Read at run time: a build script that another checkout compiled into the same target folder would embed its own files.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let root = Path::new(&here).join("../../stdlib");
    let root = root.canonicalize().expect("stdlib/ lies beside runtime/");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    walk(&root, &mut files);
    files.sort();
    let mut text = String::from("pub const STDLIB: &[(&str, &str, &str)] = &[\n");
    for file in files {
        println!("cargo::rerun-if-changed={}", file.display());
        let Ok(inside) = file.strip_prefix(&root) else { continue };
        let inside = inside.to_string_lossy().replace('\\', "/");
        let stem = inside.trim_end_matches(".lua");
        // `nn/init.lua` is the module `perilune.nn`.
        let stem = stem.strip_suffix("/init").unwrap_or(stem);
        let module = format!("perilune.{}", stem.replace('/', "."));
        let _ = writeln!(text, "    ({module:?}, {inside:?}, include_str!({:?})),", file.display().to_string());
    }
    text.push_str("];\n");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("stdlib.rs");
    std::fs::write(out, text).expect("OUT_DIR is writable");
}
