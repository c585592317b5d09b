//! Downloads into a cache of the test, with grants, limits and an environment of its own.
#![allow(dead_code)] // each test binary uses a part of it

use perilune_fetch::{
    Address, Algorithm, Cache, Cached, ContentHash, Download, Error, Event, Grants, Limits, download,
};
use sha2::Digest;
use std::time::Duration;

pub fn limits() -> Limits {
    Limits {
        pause: Duration::from_millis(1),
        stall: Duration::from_secs(5),
        attempts: 3,
        reserve: 0,
        ..Limits::default()
    }
}

pub fn sha256(content: &[u8]) -> ContentHash {
    let hex: String = sha2::Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect();
    ContentHash::parse(&format!("sha256:{hex}")).expect("a hash")
}

pub struct Place {
    pub dir: tempfile::TempDir,
    pub limits: Limits,
    pub grants: &'static str,
    pub env: Vec<(&'static str, String)>,
}

pub fn place() -> Place {
    Place { dir: tempfile::tempdir().expect("a folder"), limits: limits(), grants: "127.0.0.1", env: Vec::new() }
}

impl Place {
    pub fn cache(&self) -> Cache {
        Cache::at(self.dir.path())
    }

    pub fn get(&self, address: &str, hash: Option<&ContentHash>) -> Result<Cached, Error> {
        self.watched(address, hash, &mut |_| Ok(()))
    }

    pub fn watched(
        &self,
        address: &str,
        hash: Option<&ContentHash>,
        report: &mut dyn FnMut(Event) -> Result<(), Error>,
    ) -> Result<Cached, Error> {
        let job = Download {
            address: &Address::parse(address)?,
            hash,
            algorithm: Algorithm::Sha256,
            cache: &self.cache(),
            grants: &Grants::parse(self.grants)?,
            limits: &self.limits,
            env: &|name| self.env.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone()),
        };
        download(&job, report)
    }

    /// The names in the folder of one algorithm.
    pub fn names(&self) -> Vec<String> {
        let entries = self.dir.path().join("data/sha256").read_dir().expect("a folder").flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}
