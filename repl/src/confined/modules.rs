//! Finds the Lua files of a recipe's folder, which alone are open to a confined recipe without a grant.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// Entries that are looked at, nearest first. A recipe that lies among much else still finds its modules beside it.
const MOST_ENTRIES: usize = 20_000;
const MOST_FILES: usize = 4_096;
const DEEPEST: usize = 8;

/// The `.lua` files beneath a folder. Links are not followed, and folders whose name begins with a dot are left out.
pub fn beneath(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), 0);
    let mut waiting = VecDeque::from([(folder.to_path_buf(), 0)]);
    while let Some((at, depth)) = waiting.pop_front() {
        let Ok(entries) = std::fs::read_dir(&at) else { continue };
        for entry in entries.flatten() {
            seen += 1;
            if seen > MOST_ENTRIES || found.len() >= MOST_FILES {
                return found;
            }
            let (Ok(kind), name) = (entry.file_type(), entry.file_name()) else { continue };
            let name = name.to_string_lossy();
            if kind.is_file() && name.ends_with(".lua") {
                found.push(entry.path());
            } else if kind.is_dir() && depth < DEEPEST && !name.starts_with('.') {
                waiting.push_back((entry.path(), depth + 1));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lua_files_beneath_the_folder_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("r/parts")).unwrap();
        std::fs::create_dir_all(at("r/.git")).unwrap();
        for name in ["r/a.lua", "r/parts/b.lua", "r/.git/c.lua", "r/data.csv", "outside.lua"] {
            std::fs::write(at(name), "").unwrap();
        }
        std::os::unix::fs::symlink(at("outside.lua"), at("r/link.lua")).unwrap();
        std::os::unix::fs::symlink("..", at("r/up")).unwrap();
        let mut found = beneath(&at("r"));
        found.sort();
        assert_eq!(found, [at("r/a.lua"), at("r/parts/b.lua")]);
    }
}
