//! Finds the file of a module that a recipe requires, and encodes what was found for other processes of a job.

use crate::host::Host;
use crate::runtime::Place;
use perilune_policy::Opener;
use std::path::PathBuf;

/// More than any source file has.
pub const MAX_TEXT: u64 = 64 << 20;

/// The result of a search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// Its file and text.
    Module(PathBuf, String),
    Nothing,
    /// A file that cannot be loaded: the message, and the cure if there is one.
    Wrong(String, Option<String>),
}

/// Opens the first file of `tries` that exists.
pub fn find(host: &Host, place: &Place, tries: &[PathBuf]) -> Found {
    for file in tries {
        if let Some(text) = place.texts.get(file) {
            return Found::Module(file.clone(), text.clone());
        }
        match host.policy.open(file) {
            Ok(opened) => {
                return match opened.text(MAX_TEXT) {
                    Ok(text) => Found::Module(file.clone(), text),
                    Err(e) => Found::Wrong(format!("cannot read {}: {e}", file.display()), None),
                };
            }
            // What is not in a root that may be read is not there for `require`, which looks in several places.
            Err(e) if e.is_not_found() || matches!(e, perilune_policy::Error::Denied { left: false, .. }) => {}
            Err(e) => return Found::Wrong(format!("{} {}", file.display(), e.rule()), e.cure()),
        }
    }
    Found::Nothing
}

/// Encodes a result: its kind, the length of the first text, both texts.
pub fn encode(found: &Found) -> String {
    let (kind, first, second) = match found {
        Found::Module(file, text) => ('m', file.display().to_string(), text.as_str()),
        Found::Nothing => ('n', String::new(), ""),
        Found::Wrong(message, None) => ('w', message.clone(), ""),
        Found::Wrong(message, Some(hint)) => ('h', message.clone(), hint.as_str()),
    };
    format!("{kind}{}:{first}{second}", first.len())
}

/// Decodes what [`encode`] has written.
pub fn decode(text: &str) -> Found {
    let parts = || {
        let (head, rest) = text.split_once(':')?;
        let (kind, length) = head.split_at_checked(1)?;
        let (first, second) = rest.split_at_checked(length.parse().ok()?)?;
        Some((kind, first.to_string(), second.to_string()))
    };
    match parts() {
        Some(("m", file, text)) => Found::Module(file.into(), text),
        Some(("n", ..)) => Found::Nothing,
        Some(("w", message, _)) => Found::Wrong(message, None),
        Some(("h", message, hint)) => Found::Wrong(message, Some(hint)),
        _ => Found::Wrong("this is a bug: rank 0 has sent what cannot be read".into(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_round_trips() {
        for found in [
            Found::Module("parts/a:b.lua".into(), "return 1 -- 3:ñ\n".into()),
            Found::Nothing,
            Found::Wrong("parts.lua is a link".into(), None),
            Found::Wrong("parts.lua is a link".into(), Some("copy it".into())),
        ] {
            assert_eq!(decode(&encode(&found)), found);
        }
        assert!(matches!(decode("m9:abc"), Found::Wrong(..)) && matches!(decode(""), Found::Wrong(..)));
    }
}
