//! Asks the person for what a bundle asks for and no flag grants, and remembers the answer.
//!
//! A grant is remembered for the hash of the bundle and the key that signed it (`confined/remembered.rs`). Where there is nobody to
//! ask, nothing is granted: the recipe is refused when it comes to the act, with the name of the flag.

use crate::confined::Terms;
use crate::confined::remembered::{Grant, Remembered};
use crate::failure::Failure;
use crate::terminal::one_line;
use perilune_bundle::manifest::Asks;
use std::io::{BufRead, IsTerminal, Write};

/// Adds to the terms what was remembered, and what the person grants now. `remember`: what the terms have is remembered too.
pub fn add(terms: &mut Terms, asks: &Asks, hash: &str, key: Option<&str>, mut remember: bool) -> Result<(), Failure> {
    // Without a configuration folder nothing was remembered.
    let mut known = Remembered::load().ok();
    if let Some(grant) = known.as_ref().and_then(|known| known.get(hash, key)) {
        terms.kernels |= grant.kernels;
        terms.reads.extend(grant.reads.iter().cloned());
        terms.writes.extend(grant.writes.iter().cloned());
        grant.hosts.iter().for_each(|host| terms.net.allow(host));
        terms.memory = terms.memory.or(grant.memory);
        terms.time = terms.time.or(grant.time);
    }
    let hosts: Vec<&String> = asks.net.iter().filter(|host| !terms.net.allows(host)).collect();
    let kernels = asks.kernels && !terms.kernels;
    let mut wanted: Vec<String> = Vec::new();
    if kernels {
        wanted.push("to compile and launch kernels of its own (--allow-kernels)".into());
    }
    wanted.extend(hosts.iter().map(|host| format!("downloads from {} (--allow-net)", one_line(host))));
    if !wanted.is_empty() && std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
        let answer = ask(&format!("The bundle asks for {}.\nGrant it? [y/N/always] ", wanted.join(", ")));
        if ["y", "yes", "a", "always"].contains(&answer.as_str()) {
            terms.kernels |= kernels;
            hosts.iter().for_each(|host| terms.net.allow(host));
            remember |= answer.starts_with('a');
        }
    }
    if remember {
        let known = match known.as_mut() {
            Some(known) => known,
            None => &mut Remembered::load()?,
        };
        let here = std::env::current_dir().unwrap_or_default();
        let absolute = |paths: &[std::path::PathBuf]| paths.iter().map(|path| here.join(path)).collect();
        let grant = Grant {
            key: key.map(String::from),
            reads: absolute(&terms.reads),
            writes: absolute(&terms.writes),
            hosts: asks.net.iter().filter(|host| terms.net.allows(host)).cloned().collect(),
            kernels: terms.kernels,
            memory: terms.memory,
            time: terms.time,
        };
        known.store(hash, grant)?;
    }
    Ok(())
}

/// Asks at the terminal; no answer is an empty one.
fn ask(text: &str) -> String {
    let mut err = std::io::stderr().lock();
    if err.write_all(text.as_bytes()).and_then(|()| err.flush()).is_err() {
        return String::new();
    }
    let mut answer = String::new();
    let _ = std::io::stdin().lock().read_line(&mut answer);
    answer.trim().to_ascii_lowercase()
}
