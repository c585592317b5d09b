//! Opens downloaded files under their addresses.
//!
//! A policy with a [`Fetcher`] resolves an address to a file of the cache. The file is granted alone, under the address as its
//! path: readers see the name and ending that the recipe wrote, and other content of the cache stays closed.

use crate::builder::root;
use crate::error::{Error, Result};
use crate::policy::{Policy, Root, Which};
use std::collections::HashMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The file behind an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetched {
    /// The path under which it is opened: the address without query and hash.
    pub name: PathBuf,
    /// The file of the cache.
    pub file: PathBuf,
    /// The hash of its content.
    pub content: String,
}

/// Why an address has no file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unfetched {
    pub message: String,
    pub hint: Option<String>,
    /// Whether a grant is missing, and nothing else.
    pub refused: bool,
}

/// Resolves addresses to verified files.
pub trait Fetcher: Debug + Send + Sync {
    /// Returns the file of an address with its hash: `https://HOST/PATH#sha256:HEX`. A download ends when `stop` returns true.
    ///
    /// # Errors
    /// The address is malformed or has no hash, or the content is neither cached nor allowed to be downloaded.
    fn fetch(&self, address: &str, stop: &dyn Fn() -> bool) -> std::result::Result<Fetched, Unfetched>;
}

/// Whether a path of a recipe is an address: a scheme with `://`.
pub fn is_address(path: &str) -> bool {
    path.split_once("://").is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    })
}

/// A file of the cache: the handle of its folder, its name and its hash.
#[derive(Debug)]
pub(crate) struct Granted {
    pub root: Root,
    pub rest: PathBuf,
    pub content: String,
}

/// The files that addresses have been resolved to, and files that were placed, by absolute name.
#[derive(Debug, Default)]
pub(crate) struct Downloads {
    pub fetcher: Option<Arc<dyn Fetcher>>,
    files: RwLock<HashMap<PathBuf, Arc<Granted>>>,
}

impl Downloads {
    pub fn new(fetcher: Option<Arc<dyn Fetcher>>, placed: Vec<(PathBuf, Granted)>) -> Downloads {
        let files = placed.into_iter().map(|(name, file)| (name, Arc::new(file))).collect();
        Downloads { fetcher, files: RwLock::new(files) }
    }

    /// The file of an absolute name, if it is the name of an address or of a placed file.
    pub fn find(&self, name: &Path) -> Option<Arc<Granted>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

impl Policy {
    /// Resolves an address and returns the path by which its file is opened. A download ends when `stop` returns true.
    ///
    /// # Errors
    /// The fetcher has no file for it, or the same address had other content before.
    pub fn fetch(&self, address: &str, stop: &dyn Fn() -> bool) -> Result<PathBuf> {
        let of = |message: String, hint: Option<String>, refused| {
            let address = address.into();
            Error::Fetch { address, message, hint, refused }
        };
        let failed = |message, hint| of(message, hint, false);
        let Some(fetcher) = &self.downloads.fetcher else {
            return Err(failed(format!("{address} is an address, and this command downloads nothing"), None));
        };
        let Fetched { name, file, content } =
            fetcher.fetch(address, stop).map_err(|e| of(e.message, e.hint, e.refused))?;
        let key = self.absolute(&name);
        if let Some(known) = self.downloads.find(&key) {
            return match known.content == content {
                true => Ok(name),
                false => Err(failed(
                    format!("{} is used with two hashes: {} and {content}", name.display(), known.content),
                    Some("one address has one content in a run; start again to use the other".into()),
                )),
            };
        }
        let (Some(folder), Some(rest)) = (file.parent(), file.file_name()) else {
            return Err(failed(format!("{} is no file", file.display()), None));
        };
        let root = root(&self.current, folder, Which::Only(rest.to_os_string()), Default::default())?;
        let granted = Granted { root, rest: PathBuf::from(rest), content };
        self.downloads.files.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::new(granted));
        Ok(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, Opener};

    #[derive(Debug)]
    struct One(PathBuf);

    impl Fetcher for One {
        fn fetch(&self, address: &str, _: &dyn Fn() -> bool) -> std::result::Result<Fetched, Unfetched> {
            let (name, content) =
                address.split_once('#').ok_or(Unfetched { message: "no hash".into(), hint: None, refused: false })?;
            Ok(Fetched { name: name.into(), file: self.0.clone(), content: content.into() })
        }
    }

    #[test]
    fn what_is_placed_opens_under_its_name_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("images")).expect("created");
        std::fs::write(dir.path().join("images/a.png"), "image").expect("written");
        std::fs::write(dir.path().join("aa"), "content").expect("written");
        let policy = Policy::builder()
            .relative_to(Path::new("/nowhere"))
            .place(Path::new("data/x.csv"), &dir.path().join("aa"))
            .and_then(|b| b.place(Path::new("/home/author/images"), &dir.path().join("images")))
            .expect("there")
            .build();
        assert_eq!(policy.open(Path::new("data/x.csv")).expect("opened").len(), 7);
        assert_eq!(policy.open(Path::new("/home/author/images/a.png")).expect("opened").len(), 5);
        assert_eq!(policy.list(Path::new("/home/author/images")).expect("listed").len(), 1);
        let other = ["data/y.csv", "/home/author/images/../x", "/home/author/x", "/nowhere/aa"].map(PathBuf::from);
        for denied in other.iter().chain([&dir.path().join("aa"), &dir.path().join("images/a.png")]) {
            assert!(policy.open(denied).is_err(), "{}", denied.display());
        }
        assert!(Policy::builder().place(Path::new("x"), &dir.path().join("none")).is_err());
    }

    #[test]
    fn an_address_opens_its_file_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("aa"), "content").expect("written");
        std::fs::write(dir.path().join("bb"), "other").expect("written");
        let policy = Policy::builder().fetcher(Arc::new(One(dir.path().join("aa")))).build();
        let address = "https://h.example/x.jsonl";
        assert!(policy.open(Path::new(address)).is_err());
        assert!(policy.fetch(address, &|| false).is_err_and(|e| e.to_string() == "no hash"));
        let name = policy.fetch(&format!("{address}#a"), &|| false).expect("fetched");
        let file = policy.open(&name).expect("opened");
        assert_eq!((file.path(), file.len()), (Path::new(address), 7));
        assert_eq!(policy.size(&name).expect("a size"), 7);
        assert_eq!(policy.kind(&name).expect("a kind"), Kind::File);
        // Neither the file by its own path nor its neighbour is granted.
        assert!(policy.open(&dir.path().join("aa")).is_err());
        assert!(policy.open(&dir.path().join("bb")).is_err());
        assert!(policy.fetch(&format!("{address}#b"), &|| false).is_err_and(|e| e.to_string().contains("two hashes")));
    }

    #[test]
    fn addresses_have_a_scheme() {
        for (text, is) in [
            ("https://a/b", true),
            ("hf://a", true),
            ("ftp://a", true),
            ("a/b", false),
            ("://a", false),
            ("/x://y", false),
            ("1://a", false),
        ] {
            assert_eq!(is_address(text), is, "{text}");
        }
    }
}
