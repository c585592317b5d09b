//! Remembers what compilations came to, in a golden file with a line `key result` for each.
//!
//! A key is the hash of what determines the result: the text with its headers, the architecture, the compiler's version. The first line
//! of the file has the options, and a file of other options counts as empty. What a file has is not compiled again, so that CI
//! compiles the kernels that a commit changes. `PERILUNE_BLESS=1` adds lines; without the file it writes those that are in use.
//! `PERILUNE_COMPILE=1` compiles everything, whatever the files have.
//!
//! Tests of crates below the testkit include this file by its path.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

/// The results of a golden file.
pub struct Known {
    file: PathBuf,
    /// The first line.
    head: String,
    lines: Mutex<BTreeMap<String, String>>,
    /// Whether all texts are to be compiled.
    compiles_all: bool,
}

impl Known {
    /// Reads `tests/golden/compiled/NAME.txt`, whose results are of compilations with these options.
    pub fn open(name: &str, options: &str) -> Known {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        // From the folder of any package of the workspace.
        let golden = root.ancestors().map(|dir| dir.join("tests/golden")).find(|dir| dir.is_dir());
        let file = golden.expect("tests/golden").join("compiled").join(format!("{name}.txt"));
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let head = format!("# {options}\n");
        let lines = text.strip_prefix(&head).unwrap_or_default().lines().filter_map(|line| line.split_once(' '));
        let lines = Mutex::new(lines.map(|(key, result)| (key.into(), result.into())).collect());
        Known { file, head, lines, compiles_all: std::env::var_os("PERILUNE_COMPILE").is_some() }
    }

    /// Returns the key of what determines a result.
    pub fn key(parts: &[&[u8]]) -> String {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.finalize().to_hex()[..16].to_string()
    }

    /// Returns the known result of a key, or the one that `compile` computes.
    pub fn get(&self, key: &str, compile: impl FnOnce() -> String) -> String {
        self.find(key).unwrap_or_else(|| {
            let result = compile();
            self.add(key, &result);
            result
        })
    }

    /// Returns the known result of a key.
    pub fn find(&self, key: &str) -> Option<String> {
        if self.compiles_all { None } else { self.lines.lock().expect("a lock").get(key).cloned() }
    }

    /// Adds a result.
    pub fn add(&self, key: &str, result: &str) {
        let mut lines = self.lines.lock().expect("a lock");
        lines.insert(key.into(), result.into());
        if std::env::var_os("PERILUNE_BLESS").is_some_and(|v| v == "1") {
            let text: String = lines.iter().map(|(key, result)| format!("{key} {result}\n")).collect();
            std::fs::create_dir_all(self.file.parent().expect("a folder")).expect("a folder");
            std::fs::write(&self.file, format!("{}{text}", self.head)).expect("a file");
        }
    }
}

/// Returns a text and the headers that it includes, directly or indirectly.
pub fn with_headers(text: &str, headers: &[(&'static str, &'static str)]) -> String {
    let mut texts = vec![text];
    let mut at = 0;
    while let Some(text) = texts.get(at).copied() {
        for line in text.lines().filter(|l| l.trim_start().starts_with("#include")) {
            let found = headers.iter().find(|(path, _)| line.contains(&format!("\"{path}\"")));
            if let Some((_, header)) = found
                && !texts.contains(header)
            {
                texts.push(header);
            }
        }
        at += 1;
    }
    texts.join("\n")
}
