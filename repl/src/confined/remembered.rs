//! Remembers what a person has granted for good, by the hash of a bundle and the key that signed it.
//!
//! The file `grants.json` in the user's configuration folder holds it. Nothing in a bundle names or changes this file, and no confined
//! process reads it.

use crate::config_folder::config_folder;
use crate::failure::{Failure, disk};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was granted.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// The key that had signed the bundle, as text; a grant holds for this key alone.
    pub key: Option<String>,
    pub reads: Vec<PathBuf>,
    pub writes: Vec<PathBuf>,
    pub hosts: Vec<String>,
    pub kernels: bool,
    pub memory: Option<u64>,
    pub time: Option<Duration>,
}

/// All grants of a person.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Remembered {
    grants: BTreeMap<String, Grant>,
    file: PathBuf,
}

impl Remembered {
    /// Reads the grants of the user. No file is no grants; a damaged one is an error, and grants nothing.
    ///
    /// # Errors
    /// There is no configuration folder, or the file cannot be read.
    pub fn load() -> Result<Remembered, Failure> {
        let none = || Failure::System("there is no folder for remembered grants\n  hint: set XDG_CONFIG_HOME".into());
        Remembered::of(&config_folder().ok_or_else(none)?.join("grants.json"))
    }

    fn of(file: &Path) -> Result<Remembered, Failure> {
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => "{}".into(),
            Err(e) => return Err(disk("read", file)(e).into()),
        };
        let grants = serde_json::from_str(&text).map_err(|e| {
            let shown = file.display();
            Failure::Refused(format!("{shown}: {e}\n  hint: remove the file, and grant again what you trust"))
        })?;
        Ok(Remembered { grants, file: file.to_path_buf() })
    }

    /// What was granted to the bundle of a hash, if the same key has signed it.
    pub fn get(&self, hash: &str, key: Option<&str>) -> Option<&Grant> {
        self.grants.get(hash).filter(|grant| grant.key.as_deref() == key)
    }

    /// Grants for good, in place of what was granted before to this hash.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn store(&mut self, hash: &str, grant: Grant) -> Result<(), Failure> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(disk("create", folder))?;
        // Another process may have stored one meanwhile.
        let mut now = Remembered::of(&self.file)?;
        now.grants.insert(hash.to_string(), grant);
        let text = serde_json::to_string_pretty(&now.grants).map_err(|e| Failure::System(e.to_string()))?;
        let part = self.file.with_extension(format!("{}.part", std::process::id()));
        let write = || {
            let mut file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&part, &self.file)
        };
        write().map_err(disk("write", &self.file))?;
        *self = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_holds_for_its_hash_and_key_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("perilune/grants.json");
        let mut all = Remembered::of(&file).unwrap();
        assert_eq!(all.get("aa", None), None);
        let grant =
            Grant { key: Some("RWQ1".into()), kernels: true, time: Some(Duration::from_secs(60)), ..Grant::default() };
        all.store("aa", grant.clone()).unwrap();
        let mut other = Remembered::of(&file).unwrap();
        other.store("bb", Grant { hosts: vec!["a.example".into()], ..Grant::default() }).unwrap();
        let all = Remembered::of(&file).unwrap();
        assert_eq!(all.get("aa", Some("RWQ1")), Some(&grant));
        assert_eq!((all.get("aa", None), all.get("aa", Some("RWQ2")), all.get("ab", None)), (None, None, None));
        assert!(all.get("bb", None).is_some());
        std::fs::write(&file, "{\"aa\": {\"kernels\": tr").unwrap();
        assert!(matches!(Remembered::of(&file), Err(Failure::Refused(text)) if text.contains("grants.json")));
    }
}
