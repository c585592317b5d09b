//! Parses absolute URLs of HTTP and resolves the references of redirects.

use crate::error::{Error, Result};
use std::fmt;

/// An absolute `http` or `https` URL without fragment and user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Url {
    pub secure: bool,
    pub host: String,
    pub port: Option<u16>,
    /// Path and query; begins with a slash.
    pub target: String,
}

impl Url {
    /// Parses a URL. Plain HTTP is for this computer only.
    pub fn parse(text: &str) -> Result<Url> {
        let wrong = |why: &str| Error::new(format!("the address {text:?} {why}"));
        let (secure, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err(wrong("is no http or https address")),
        };
        if let Some(c) =
            text.chars().find(|c| c.is_control() || c.is_whitespace() || !c.is_ascii() || "\"<>\\^`{|}".contains(*c))
        {
            return Err(
                wrong(&format!("has the character {c:?}")).hint("escape it with % and its hexadecimal code, as in %20")
            );
        }
        let rest = rest.split('#').next().unwrap_or("");
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err(
                wrong("has a user or password").hint("take secrets from the environment: HF_TOKEN, AWS_ACCESS_KEY_ID")
            );
        }
        let bracketed = authority.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (host, port) = match bracketed {
            Some((host, after)) => (host, after.strip_prefix(':').or((!after.is_empty()).then_some("?"))),
            None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        let port = port.map(|p| {
            p.parse::<u16>()
                .ok()
                .filter(|p| *p > 0)
                .ok_or_else(|| wrong("has a port that is no number from 1 to 65535"))
        });
        let port = port.transpose()?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.' || c == '_';
        let v6 = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
        let valid = if bracketed.is_some() { host.chars().all(v6) } else { host.chars().all(plain) };
        if host.is_empty() || !valid {
            return Err(wrong("has no host, or one with other characters than letters, digits, - and ."));
        }
        let target = if target.starts_with('/') { target.to_string() } else { format!("/{target}") };
        let url = Url { secure, host: host.to_ascii_lowercase(), port, target };
        if !secure && !url.is_local() {
            return Err(wrong("is http").hint("use https; http is allowed for localhost only"));
        }
        Ok(url)
    }

    /// Whether the host is this computer.
    pub fn is_local(&self) -> bool {
        matches!(self.host.as_str(), "localhost" | "127.0.0.1" | "::1")
    }

    /// Host and port as the header `Host` has them.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match self.port {
            Some(port) => format!("{host}:{port}"),
            None => host,
        }
    }

    /// Whether another URL has the same scheme, host and port.
    pub fn same_origin(&self, other: &Url) -> bool {
        let port = |u: &Url| u.port.unwrap_or(if u.secure { 443 } else { 80 });
        (self.secure, &self.host, port(self)) == (other.secure, &other.host, port(other))
    }

    /// Resolves the reference of a redirect.
    pub fn join(&self, reference: &str) -> Result<Url> {
        let scheme = if self.secure { "https" } else { "http" };
        let reference = reference.trim();
        let text = if reference.contains("://") && reference.starts_with("http") {
            reference.to_string()
        } else if let Some(rest) = reference.strip_prefix("//") {
            format!("{scheme}://{rest}")
        } else if reference.starts_with('/') {
            format!("{scheme}://{}{reference}", self.authority())
        } else {
            let path = self.target.split('?').next().unwrap_or("/");
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{}{folder}/{reference}", self.authority())
        };
        Url::parse(&text)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.secure { "https" } else { "http" }, self.authority(), self.target)
    }
}

/// Escapes a path for a URL as RFC 3986 (and Signature V4) has it; slashes stay.
pub(crate) fn escape_path(path: &str) -> String {
    let mut out = String::new();
    for b in path.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => out.push(b as char),
            b => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_resolved_as_rfc_3986_does() {
        let base = Url::parse("https://A.example:8443/b/c?q#f").expect("a url");
        assert_eq!(base.to_string(), "https://a.example:8443/b/c?q");
        for (reference, whole) in [
            ("/d", "https://a.example:8443/d"),
            ("d?x=/y", "https://a.example:8443/b/d?x=/y"),
            ("//o.example/d", "https://o.example/d"),
            ("https://o.example", "https://o.example/"),
        ] {
            assert_eq!(base.join(reference).map(|u| u.to_string()), Ok(whole.into()));
        }
        assert!(base.join("http://o.example/").is_err_and(|e| e.message.contains("is http")));
        assert!(base.join("http://localhost/").is_ok_and(|u| !u.same_origin(&base)));
    }

    #[test]
    fn malformed_urls_are_refused() {
        for text in [
            "https://",
            "https:///x",
            "https://a b/",
            "https://a/\n",
            "https://u:p@a/",
            "https://a:0/",
            "https://a:70000/",
            "https://[::1/",
            "https://[::1]x/",
            "ftp://a/",
            "http://example.org/",
            "https://ä.example/",
        ] {
            assert!(Url::parse(text).is_err(), "{text}");
        }
        assert_eq!(Url::parse("http://[::1]:8000").map(|u| u.to_string()), Ok("http://[::1]:8000/".into()));
    }
}
