//! Reads a recipe file once: the text that runs is the text that is hashed and stored in the run directory.

use crate::error::{Error, Result, plain};
use perilune_core::error::did_you_mean;
use perilune_lua::{Loaded, Runtime};
use perilune_policy::open_named;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The size limit of a recipe file in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Reads a regular file that the command names. Any other kind is an error, and is not opened, since opening a pipe would wait.
fn read_regular(path: &Path) -> perilune_policy::Result<Vec<u8>> {
    let mut file = open_named(path)?;
    let mut bytes = Vec::new();
    let read = file.by_ref().take(MAX_BYTES + 1).read_to_end(&mut bytes);
    let failed = |source| perilune_policy::Error::Io { path: path.to_path_buf(), action: "read", source };
    read.map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        let text = format!("it has more than {MAX_BYTES} bytes, the limit for a recipe");
        return Err(failed(std::io::Error::new(ErrorKind::FileTooLarge, text)));
    }
    Ok(bytes)
}

/// A recipe or script: its path and text.
#[derive(Clone, Debug)]
pub struct Source {
    pub path: PathBuf,
    pub text: String,
}

impl Source {
    /// Reads a recipe. A file that cannot be a recipe is refused with the reason.
    pub fn read(path: &Path) -> Result<Source> {
        let shown = path.display();
        let no = |text: String| Err(Error::Usage(text));
        if path.is_dir() {
            let inside = lua_files(path);
            let hint =
                if inside.is_empty() { String::new() } else { format!("; recipes in it: {}", inside.join(", ")) };
            return no(format!("{shown} is a directory, not a recipe{hint}"));
        }
        if path.extension().is_some_and(|e| e != "lua") && path.exists() {
            return no(format!("{shown} is not a Lua file: a recipe's name ends in .lua"));
        }
        let bytes = match read_regular(path) {
            Ok(bytes) => bytes,
            Err(e) if e.is_not_found() => return no(format!("there is no file {shown}{}", near(path))),
            Err(perilune_policy::Error::Io { source, .. }) => {
                return no(format!("cannot read {shown}: {}", plain(&source)));
            }
            Err(e) => return no(format!("{shown} {}", e.rule())),
        };
        if bytes.starts_with(b"\x1bLua") {
            return no(format!("{shown} is compiled Lua bytecode; recipes are loaded as text only"));
        }
        match String::from_utf8(bytes) {
            Ok(text) if text.contains('\0') => no(format!("{shown} contains zero bytes: it is not a text file")),
            Ok(text) => {
                let text = text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text);
                Ok(Source { path: path.to_path_buf(), text })
            }
            Err(e) => {
                let good = e.utf8_error().valid_up_to();
                let line = e.as_bytes()[..good].iter().filter(|b| **b == b'\n').count() + 1;
                no(format!(
                    "{shown} is not UTF-8 text: line {line} contains the byte 0x{:02x}; save it as UTF-8",
                    e.as_bytes()[good]
                ))
            }
        }
    }

    /// Returns the directory of the file.
    pub fn dir(&self) -> &Path {
        self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Runs the text in a runtime: a recipe is defined, a plain script has run when this returns.
    pub fn load(&self, runtime: &Runtime) -> Result<Loaded> {
        runtime.set_place(self.dir());
        Ok(runtime.load_text(&self.text, &format!("@{}", self.path.display()))?)
    }
}

fn lua_files(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut out: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    out.retain(|name| name.ends_with(".lua"));
    out.sort();
    out.truncate(10);
    out
}

/// Suggests a file of the same directory: `. Did you mean recipes/digits.lua?`
fn near(path: &Path) -> String {
    let Some(name) = path.file_name().map(|n| n.to_string_lossy().into_owned()) else { return String::new() };
    let dir = path.parent().unwrap_or(Path::new(""));
    let names = lua_files(if dir.as_os_str().is_empty() { Path::new(".") } else { dir });
    let with_suffix = format!("{name}.lua");
    let found = names
        .iter()
        .find(|n| **n == with_suffix)
        .map(String::as_str)
        .or_else(|| did_you_mean(&name, names.iter().map(String::as_str)));
    found.map(|n| format!(". Did you mean {}?", dir.join(n).display())).unwrap_or_default()
}

/// Whether the text has `.name`: the field may be read in a branch that a dry step does not take.
pub fn mentions(text: &str, name: &str) -> bool {
    let needle = format!(".{name}");
    let word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(&needle).any(|(at, _)| !text[at + needle.len()..].starts_with(word))
}

#[cfg(test)]
mod tests {
    use super::mentions;

    #[test]
    fn a_mention_is_a_whole_word() {
        assert!(mentions("f(p.lr)", "lr"));
        assert!(!mentions("f(p.lrate)", "lr"));
    }
}
