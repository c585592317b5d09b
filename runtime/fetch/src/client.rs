//! Sends GET requests and follows their redirects, to granted hosts only.

use crate::address::{Address, Place};
use crate::download::{Limits, mismatch};
use crate::error::{Error, Result};
use crate::grants::Grants;
use crate::hash::{Algorithm, ContentHash};
use crate::origin::{self, Environment};
use crate::url::Url;
use std::io::Read;
use std::time::Duration;

/// Redirects that are followed.
const HOPS: usize = 10;
/// The part of an error page that is read.
const PAGE: u64 = 16 << 10;
/// The longest time that a server may ask to wait.
const LONGEST_WAIT: u64 = 120;

/// The answer with the content.
pub(crate) struct Reply {
    pub status: u16,
    /// The first byte of the body in the content.
    pub first: u64,
    /// The size of the whole content, if the server says it.
    pub total: Option<u64>,
    /// A strong validator.
    pub etag: Option<String>,
    pub body: Box<dyn Read + Send>,
}

/// What is asked for again.
pub(crate) struct Resume<'a> {
    pub from: u64,
    pub etag: &'a str,
}

fn agent(url: &Url, limits: &Limits) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .timeout_connect(Some(limits.stall.min(Duration::from_secs(30))))
        .timeout_recv_response(Some(limits.stall))
        .user_agent(concat!("perilune/", env!("CARGO_PKG_VERSION")));
    // A proxy does not reach this computer.
    let config = if url.is_local() { config.proxy(None) } else { config };
    config.build().into()
}

/// Asks for the content of an address. `wait` is set where a server says when to ask again.
pub(crate) fn get(
    address: &Address,
    wanted: Option<&ContentHash>,
    resume: Option<Resume<'_>>,
    grants: &Grants,
    env: &Environment<'_>,
    limits: &Limits,
    wait: &mut Option<Duration>,
) -> Result<Reply> {
    let first = origin::url(address, env)?;
    let mut url = first.clone();
    for hop in 0..=HOPS {
        let why = if hop == 0 { format!("{address}: ") } else { format!("{address} leads to another host: ") };
        grants.check(&url.host, &why)?;
        let mut request = agent(&url, limits).get(url.to_string()).header("accept-encoding", "identity");
        if url.same_origin(&first) {
            for (name, value) in origin::headers(address, &url, env)? {
                request = request.header(name, value);
            }
        }
        if let Some(resume) = &resume {
            request = request.header("range", format!("bytes={}-", resume.from)).header("if-range", resume.etag);
        }
        let reply = request.call().map_err(|e| failed(address, &url, &e, limits))?;
        let status = reply.status().as_u16();
        let header = |name: &str| reply.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_string);
        let digits = |text: &String| text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit());
        // A Hub states the SHA-256 of the content before it redirects to it.
        let stated = header("x-linked-etag").map(|text| text.trim_matches('"').to_ascii_lowercase()).filter(digits);
        if let (Some(stated), Some(hash)) = (stated, wanted.filter(|hash| hash.algorithm() == Algorithm::Sha256))
            && stated != hash.hex()
        {
            return Err(mismatch(address, hash, &format!("sha256:{stated}")));
        }
        match status {
            301 | 302 | 303 | 307 | 308 if header("location").is_some() => {
                let to = url.join(&header("location").unwrap_or_default());
                let to = to.map_err(|e| Error::new(format!("{address}: {} redirects: {}", url.host, e.message)))?;
                if url.secure && !to.secure {
                    return Err(Error::new(format!("{address}: {} redirects from https to http", url.host)));
                }
                url = to;
            }
            200 | 206 => {
                let (first, total) = span(&header, status, resume.as_ref().map_or(0, |r| r.from)).ok_or_else(|| {
                    Error::new(format!("{address}: {} answers with a malformed Content-Range", url.host))
                })?;
                let etag = header("etag").filter(|tag| tag.starts_with('"') && tag.ends_with('"') && tag.len() > 2);
                let body = reply.into_body().into_with_config().limit(u64::MAX).reader();
                return Ok(Reply { status, first, total, etag, body: Box::new(body) });
            }
            416 if resume.is_some() => {
                return Ok(Reply { status, first: 0, total: None, etag: None, body: Box::new(std::io::empty()) });
            }
            _ => {
                *wait = header("retry-after").map(|text| Duration::from_secs(seconds(&text).min(LONGEST_WAIT)));
                let region = header("x-amz-bucket-region");
                let mut page = Vec::new();
                let _ = reply.into_body().into_reader().take(PAGE).read_to_end(&mut page);
                return Err(refused(address, &url, status, region, &String::from_utf8_lossy(&page)));
            }
        }
    }
    Err(Error::new(format!("{address}: more than {HOPS} redirects")))
}

/// The first byte and the total size that headers state.
fn span(header: &dyn Fn(&str) -> Option<String>, status: u16, from: u64) -> Option<(u64, Option<u64>)> {
    if status == 200 {
        return Some((0, header("content-length").and_then(|text| text.parse().ok())));
    }
    let range = header("content-range")?;
    let (bytes, total) = range.strip_prefix("bytes ")?.split_once('/')?;
    let first: u64 = bytes.split_once('-')?.0.trim().parse().ok()?;
    (first == from).then_some((first, total.parse().ok()))
}

/// Seconds of `Retry-After`, which may be a date.
fn seconds(text: &str) -> u64 {
    let date = || {
        let then = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text.trim()).ok()?;
        u64::try_from(then.as_second().checked_sub(jiff::Timestamp::now().as_second())?).ok()
    };
    text.trim().parse().ok().or_else(date).unwrap_or(1)
}

fn failed(address: &Address, url: &Url, e: &ureq::Error, limits: &Limits) -> Error {
    match e {
        ureq::Error::Timeout(_) => {
            Error::transient(format!("{address}: {} does not answer within {} s", url.host, limits.stall.as_secs_f64()))
        }
        ureq::Error::HostNotFound => Error::transient(format!("{address}: there is no host {}", url.host))
            .hint("check the address and the network; --offline uses cached files only"),
        // What TLS refuses, such as a certificate.
        ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            Error::new(format!("{address}: no secure connection to {}: {e}", url.host)).hint(
                "certificates are checked against Mozilla's list; those of a company's own authority are not supported",
            )
        }
        e => Error::transient(format!("{address}: cannot reach {}: {e}", url.host)),
    }
}

fn refused(address: &Address, url: &Url, status: u16, region: Option<String>, page: &str) -> Error {
    let code = page.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    let code = code.filter(|code| code.len() < 64 && code.chars().all(|c| c.is_ascii_alphanumeric()));
    let code = code.map(|code| format!(" ({code})")).unwrap_or_default();
    let message = |text: &str| format!("{address}: {} answers {status}{code}: {text}", url.host);
    let secrets = match &address.place {
        Place::Hub { .. } => {
            "set HF_TOKEN to a token that may read it, and accept the terms of the dataset on its page"
        }
        Place::Bucket { .. } => "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may read it",
        Place::Http(_) => "it is for users with a password; download it by hand and name the file",
    };
    if let (Some(region), 301 | 307 | 400) = (&region, status) {
        return Error::new(message("the bucket is in another region")).hint(format!("set AWS_REGION={region}"));
    }
    match status {
        401 | 403 => Error::new(message("access is denied")).hint(secrets),
        404 | 410 => Error::new(message("there is no such file")).hint(match &address.place {
            Place::Http(_) => "check the path of the address",
            Place::Hub { .. } => "check the owner, name, revision and path of the address",
            Place::Bucket { .. } => "check the bucket and the key of the address",
        }),
        429 => Error::transient(message("too many requests")).hint("wait, and start again"),
        408 | 500 | 502 | 503 | 504 => Error::transient(message("the server has a failure")),
        _ => Error::new(message("an answer that a download does not expect")),
    }
}
