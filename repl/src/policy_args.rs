//! Parses `--allow-read`, `--allow-write` and the options of `fetching.rs`, and makes the policy of a command from its arguments.

use crate::confined;
use crate::console_out;
use crate::failure::Failure;
use crate::fetching::NetArgs;
use perilune_fetch::ProcessFetcher;
use perilune_policy::{Error, Policy, PolicyBuilder};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of which files a recipe may open.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct PolicyArgs {
    /// Let the recipe read DIR, or one file, too; may be given several times. It reads its own folder, the current directory
    /// if that contains the folder, and what a --set names
    #[arg(long, value_name = "DIR")]
    allow_read: Vec<PathBuf>,
    /// Let the recipe write .safetensors, .npy, .npz and .png files in DIR; may be given several times. It writes in the run
    /// directory, and files that a --set names
    #[arg(long, value_name = "DIR")]
    allow_write: Vec<PathBuf>,
    #[command(flatten)]
    net: NetArgs,
}

impl PolicyArgs {
    /// Writes what these options grant to a confined recipe.
    pub fn add_grants(&self, terms: &mut confined::Terms) {
        terms.reads.extend(self.allow_read.iter().cloned());
        terms.writes.extend(self.allow_write.iter().cloned());
        terms.net = self.net.clone();
    }

    /// The policy for a prompt without a recipe.
    pub fn prompt(&self, params: &[(String, String)]) -> Result<PolicyBuilder, Failure> {
        match confined::grants() {
            Some(grants) => confined::child::policy(grants, None),
            None => self.add_to(Policy::builder().current_directory(), params),
        }
    }

    /// Adds to the roots of a command what its params and these options name.
    fn add_to(&self, mut policy: PolicyBuilder, params: &[(String, String)]) -> Result<PolicyBuilder, Failure> {
        let wrong = |flag: &str, e: Error| Failure::Usage(format!("{flag}: {e}"));
        for (_, value) in params {
            policy = policy.argument(value);
        }
        for path in &self.allow_read {
            policy = policy.allow_read(path).map_err(|e| wrong("--allow-read", e))?;
        }
        for path in &self.allow_write {
            policy = policy.allow_write(path).map_err(|e| wrong("--allow-write", e))?;
        }
        Ok(policy.fetcher(self.net.fetcher()?))
    }

    /// The policy for the recipe that the record of a run names. The record opens nothing, and relative paths of the recipe start where
    /// the run was started.
    pub fn recorded(
        &self,
        path: &Path,
        start: Option<&Path>,
        params: &[(String, String)],
    ) -> Result<PolicyBuilder, Failure> {
        if let Some(grants) = confined::grants() {
            return confined::child::policy(grants, None);
        }
        let mut policy = Policy::builder();
        if let Some(start) = start {
            policy = policy.relative_to(start);
        }
        self.add_to(policy.recorded_recipe(path), params)
    }

    /// Returns the fetcher of the command.
    pub fn fetcher(&self) -> Result<Arc<ProcessFetcher>, Failure> {
        self.net.fetcher()
    }

    /// The policy for a recipe that the command names.
    pub fn recipe(&self, path: &Path, params: &[(String, String)]) -> Result<PolicyBuilder, Failure> {
        match confined::grants() {
            Some(grants) => confined::child::policy(grants, Some(path)),
            None => self.add_to(Policy::builder().recipe(path), params),
        }
    }
}

/// Returns the directory where a run was started, unless it is the current one. One that is not there is a warning.
pub fn start_directory(record: &Map<String, Value>) -> Option<PathBuf> {
    let here = std::env::current_dir().unwrap_or_default();
    let was = PathBuf::from(record.get("directory").and_then(Value::as_str)?);
    if was.canonicalize().ok() == here.canonicalize().ok() && was.exists() {
        return None;
    }
    if was.is_dir() {
        return Some(was);
    }
    let (was, here) = (was.display(), here.display());
    let text = format!("the run was started in {was}, which is not there; relative paths now start at {here}");
    console_out::complain("warning", &text);
    None
}
