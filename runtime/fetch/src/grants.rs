//! Holds the hosts that a command may connect to.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Granted hosts: names, or `*.example.org` for all hosts below a domain.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Grants(Vec<String>);

impl Grants {
    /// Parses a list of hosts with commas between them.
    ///
    /// # Errors
    /// A host that is empty, or is an address or a pattern instead of a name.
    pub fn parse(text: &str) -> Result<Grants> {
        let mut grants = Grants::default();
        for host in text.split(',') {
            grants.add(host.trim())?;
        }
        Ok(grants)
    }

    /// Adds a host.
    ///
    /// # Errors
    /// As of [`Grants::parse`].
    pub fn add(&mut self, host: &str) -> Result<()> {
        let host = host.to_ascii_lowercase();
        let name = host.strip_prefix("*.").unwrap_or(&host);
        let fits = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
        // `*.org` would grant half of the web.
        let broad = host.starts_with("*.") && !name.contains('.');
        if name.is_empty()
            || broad
            || !name.chars().all(fits)
            || (name.contains(':') && name.parse::<std::net::Ipv6Addr>().is_err())
        {
            let rule =
                "name a host without scheme, port and path, as in huggingface.co, or all below a domain: *.hf.co";
            return Err(Error::new(format!("{host:?} is no host")).hint(rule));
        }
        self.0.push(host);
        Ok(())
    }

    /// Adds all hosts of another list.
    pub fn extend(&mut self, other: &Grants) {
        self.0.extend(other.0.iter().cloned());
    }

    /// Whether a host may be connected to.
    pub fn allows(&self, host: &str) -> bool {
        self.0.iter().any(|granted| match granted.strip_prefix("*.") {
            Some(domain) => host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.')),
            None => granted == host,
        })
    }

    pub(crate) fn check(&self, host: &str, why: &str) -> Result<()> {
        if self.allows(host) {
            return Ok(());
        }
        let error = Error::new(format!("{why}the host {host} is not granted"));
        Err(Error {
            host: Some(host.to_string()),
            ..error.hint(format!("allow it on the command line: --allow-net={host}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_granted_by_name_or_domain() {
        let grants = Grants::parse("example.org, *.hf.co,::1").expect("hosts");
        for (host, granted) in [
            ("example.org", true),
            ("a.example.org", false),
            ("hf.co", false),
            ("cdn.hf.co", true),
            ("evilhf.co", false),
            ("::1", true),
        ] {
            assert_eq!(grants.allows(host), granted, "{host}");
        }
        for text in ["", "a,", "https://a", "*", "*.org", "a:80", "a/b"] {
            assert!(Grants::parse(text).is_err(), "{text}");
        }
    }
}
