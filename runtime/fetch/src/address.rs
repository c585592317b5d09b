//! Parses the addresses of data: `https://`, `hf://` and `s3://`.
//!
//! `#sha256:HEX` at the end of an address names its content; it is no part of what a server is asked for.

use crate::error::{Error, Result};
use crate::hash::ContentHash;
use crate::origin;
use crate::url::Url;
use std::fmt;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Http(Url),
    Hub { kind: &'static str, repository: String, revision: String, path: String },
    Bucket { bucket: String, key: String },
}

/// The address of one file of data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address {
    text: String,
    pub(crate) place: Place,
}

const SCHEMES: &str = "addresses are https://HOST/PATH, hf://datasets/OWNER/NAME@REVISION/PATH and s3://BUCKET/KEY";

impl Address {
    /// Parses an address without a hash.
    ///
    /// # Errors
    /// An unknown scheme, or what the scheme does not allow; the error has the rule.
    pub fn parse(text: &str) -> Result<Address> {
        let wrong = |why: &str| Error::new(format!("the address {text:?} {why}"));
        if text.contains('#') {
            return Err(
                wrong("has a #").hint("write %23 for a # of a name; a hash is #sha256: and 64 digits at the end")
            );
        }
        let place = match text.split_once("://") {
            Some(("https" | "http", _)) => {
                let url = Url::parse(text)?;
                if url.target.split('?').next().is_some_and(|path| path.ends_with('/')) {
                    return Err(wrong("names no file").hint("write the path of one file: https://HOST/PATH"));
                }
                Place::Http(url)
            }
            Some(("hf", rest)) => hub(rest).map_err(|why| {
                wrong(why).hint("write hf://datasets/OWNER/NAME@REVISION/PATH or hf://models/OWNER/NAME@REVISION/PATH")
            })?,
            Some(("s3", rest)) => bucket(rest).map_err(|why| wrong(why).hint("write s3://BUCKET/KEY"))?,
            Some((scheme, _)) => return Err(wrong(&format!("has the unknown scheme {scheme:?}")).hint(SCHEMES)),
            None => return Err(wrong("has no scheme").hint(SCHEMES)),
        };
        Ok(Address { text: text.to_string(), place })
    }

    /// Splits the hash off an address: `https://HOST/PATH#sha256:HEX`.
    ///
    /// # Errors
    /// As of [`Address::parse`], and a malformed hash.
    pub fn with_hash(text: &str) -> Result<(Address, Option<ContentHash>)> {
        match text.split_once('#') {
            Some((address, hash)) => Ok((Address::parse(address)?, Some(ContentHash::parse(hash)?))),
            None => Ok((Address::parse(text)?, None)),
        }
    }

    /// The first host that is connected to. The environment decides it for `hf://` (`HF_ENDPOINT`) and `s3://`
    /// (`AWS_ENDPOINT_URL`, `AWS_REGION`).
    ///
    /// # Errors
    /// The environment has a malformed endpoint.
    pub fn host(&self) -> Result<String> {
        origin::host(self)
    }

    /// The address without its query: its name where files are named.
    pub fn name(&self) -> &str {
        self.text.split('?').next().unwrap_or("")
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn is_plain(path: &str) -> bool {
    !path.is_empty()
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
        && !path.chars().any(char::is_control)
}

fn hub(rest: &str) -> std::result::Result<Place, &'static str> {
    let mut parts = rest.splitn(4, '/');
    let kind = match parts.next() {
        Some("datasets") => "datasets",
        Some("models") => "models",
        _ => return Err("names neither datasets nor models"),
    };
    let (Some(owner), Some(name), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Err("lacks an owner, a name or a path");
    };
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    let word = |text: &str| {
        !text.is_empty()
            && !text.starts_with('.')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
    };
    if !word(owner) || !word(name) || !word(revision) {
        return Err("has an owner, name or revision with other characters than letters, digits, -, . and _");
    }
    if !is_plain(path) {
        return Err("has a path with an empty part, a . or a ..");
    }
    Ok(Place::Hub { kind, repository: format!("{owner}/{name}"), revision: revision.into(), path: path.into() })
}

fn bucket(rest: &str) -> std::result::Result<Place, &'static str> {
    let Some((bucket, key)) = rest.split_once('/') else { return Err("lacks a key") };
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if !(3..=63).contains(&bucket.len())
        || !bucket.chars().all(fits)
        || bucket.starts_with(['-', '.'])
        || bucket.ends_with(['-', '.'])
    {
        return Err("has a bucket that is not 3 to 63 lower-case letters, digits, - and .");
    }
    if !is_plain(key) || key.len() > 1024 {
        return Err("has a key that is empty or too long, or has an empty part, a . or a ..");
    }
    Ok(Place::Bucket { bucket: bucket.into(), key: key.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_their_parts() {
        let hub = |text: &str| match Address::parse(text).expect("an address").place {
            Place::Hub { kind, repository, revision, path } => (kind, repository, revision, path),
            other => panic!("{other:?}"),
        };
        let own = |kind, repository: &str, revision: &str, path: &str| {
            (kind, repository.to_string(), revision.to_string(), path.to_string())
        };
        assert_eq!(hub("hf://datasets/o/n@v1.0/a/b.jsonl"), own("datasets", "o/n", "v1.0", "a/b.jsonl"));
        assert_eq!(hub("hf://models/o/n/t.json"), own("models", "o/n", "main", "t.json"));
        let s3 = Address::parse("s3://my-bucket/a b/ü.bin").expect("an address").place;
        assert_eq!(s3, Place::Bucket { bucket: "my-bucket".into(), key: "a b/ü.bin".into() });
        assert_eq!(
            Address::parse("https://h.example/a/x.csv?d=1").expect("an address").name(),
            "https://h.example/a/x.csv"
        );
    }

    #[test]
    fn malformed_addresses_have_the_rule() {
        for text in [
            "x",
            "ftp://a/b",
            "hf://o/n/x",
            "hf://datasets/o",
            "hf://datasets/o/n/../x",
            "hf://datasets/o/n@/x",
            "hf://datasets/o/n@a b/x",
            "s3://b/x",
            "s3://Bucket/x",
            "s3://bucket",
            "s3://bucket/",
            "s3://bucket/a//b",
            "https://h.example/",
            "https://h.example/a#b",
            "gs://bucket/x",
        ] {
            let e = Address::parse(text).expect_err(text);
            assert!(e.hint.is_some(), "{e}");
        }
        assert!(Address::with_hash("https://h.example/a#b").is_err_and(|e| e.message.contains("names no algorithm")));
    }
}
