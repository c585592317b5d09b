//! Finds the commit of a recipe by reading `.git`, without running git. It does not detect whether files were
//! changed since, because the run directory has its own copy of the recipe.

use std::path::{Path, PathBuf};

/// Returns the commit of HEAD in the repository that contains `dir`.
pub fn commit(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let git = dir.ancestors().map(|d| d.join(".git")).find(|g| g.exists())?;
    let git = git_dir(&git)?;
    let head = read(&git.join("HEAD"))?;
    let Some(name) = head.strip_prefix("ref: ") else { return hash(&head) };
    // The branches of a worktree are in the main repository.
    let common = read(&git.join("commondir")).map_or_else(|| git.clone(), |c| git.join(c));
    [&git, &common].iter().find_map(|g| hash(&read(&g.join(name))?)).or_else(|| packed(&common, name))
}

/// Resolves `.git`, which is a directory or a file with its path.
fn git_dir(git: &Path) -> Option<PathBuf> {
    if git.is_dir() {
        return Some(git.to_path_buf());
    }
    let text = read(git)?;
    Some(git.parent()?.join(text.strip_prefix("gitdir: ")?))
}

/// Looks a branch up in `packed-refs`.
fn packed(git: &Path, name: &str) -> Option<String> {
    let refs = read(&git.join("packed-refs"))?;
    refs.lines().find_map(|l| l.split_once(' ').filter(|(_, n)| *n == name).and_then(|(h, _)| hash(h)))
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|t| t.trim_end().to_string())
}

fn hash(text: &str) -> Option<String> {
    (text.len() >= 40 && text.chars().all(|c| c.is_ascii_hexdigit())).then(|| text.to_string())
}
