//! Finds the URL of an address and the headers that its server needs: the token of a Hub, the signature of a bucket.
//!
//! Secrets come from the environment and go to the origin of the first URL only, never to the host of a redirect.

use crate::address::{Address, Place};
use crate::error::{Error, Result};
use crate::sigv4::{self, Credentials, EMPTY};
use crate::url::{Url, escape_path};
use std::path::PathBuf;

/// Looks up environment variables; tests have one of their own.
pub(crate) type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The environment of the process; an empty variable is none.
pub(crate) fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The host that an address begins at.
pub(crate) fn host(address: &Address) -> Result<String> {
    Ok(url(address, &process_environment)?.host)
}

fn endpoint(variable: &str, value: &str) -> Result<Url> {
    let mut url = Url::parse(value)
        .map_err(|e| Error::new(format!("{variable}: {}", e.message)).hint("it is like https://HOST"))?;
    url.target = url.target.trim_end_matches('/').to_string();
    Ok(url)
}

fn region(env: &Environment<'_>) -> String {
    env("AWS_REGION").or_else(|| env("AWS_DEFAULT_REGION")).unwrap_or_else(|| "us-east-1".into())
}

/// The URL that is asked first.
pub(crate) fn url(address: &Address, env: &Environment<'_>) -> Result<Url> {
    match &address.place {
        Place::Http(url) => Ok(url.clone()),
        Place::Hub { kind, repository, revision, path } => {
            let base = endpoint("HF_ENDPOINT", &env("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()))?;
            let kind = if *kind == "datasets" { "/datasets" } else { "" };
            let target = format!("{}{kind}/{repository}/resolve/{revision}/{}", base.target, escape_path(path));
            Ok(Url { target, ..base })
        }
        Place::Bucket { bucket, key } => {
            let key = escape_path(key);
            let named =
                ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].into_iter().find_map(|name| Some((name, env(name)?)));
            if let Some((name, value)) = named {
                let base = endpoint(name, &value)?;
                return Ok(Url { target: format!("{}/{bucket}/{key}", base.target), ..base });
            }
            let region = region(env);
            // The certificate of S3 has one level of names only.
            match bucket.contains('.') {
                true => Url::parse(&format!("https://s3.{region}.amazonaws.com/{bucket}/{key}")),
                false => Url::parse(&format!("https://{bucket}.s3.{region}.amazonaws.com/{key}")),
            }
        }
    }
}

/// The headers of a request to the origin of `url`, secrets included.
pub(crate) fn headers(address: &Address, url: &Url, env: &Environment<'_>) -> Result<Vec<(&'static str, String)>> {
    match &address.place {
        Place::Http(_) => Ok(Vec::new()),
        Place::Hub { .. } => {
            Ok(token(env)?.map(|token| ("authorization", format!("Bearer {token}"))).into_iter().collect())
        }
        Place::Bucket { .. } => {
            let (Some(key), Some(secret)) = (env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY")) else {
                return Ok(Vec::new());
            };
            let keys = Credentials { key, secret, token: env("AWS_SESSION_TOKEN") };
            let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
            let mut signed = vec![
                ("host", url.authority()),
                ("x-amz-content-sha256", EMPTY.to_string()),
                ("x-amz-date", time.clone()),
            ];
            if let Some(token) = &keys.token {
                signed.push(("x-amz-security-token", token.clone()));
            }
            let authorization = sigv4::authorization(&keys, "s3", &region(env), &time, &url.target, "", &signed, EMPTY);
            // The client writes `host` itself.
            signed.remove(0);
            signed.push(("authorization", authorization));
            Ok(signed)
        }
    }
}

/// The token of the Hub: `HF_TOKEN`, or the file that its own tools write.
fn token(env: &Environment<'_>) -> Result<Option<String>> {
    let home = || env("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(env("HOME")?).join(".cache")));
    let folder = || env("HF_HOME").map(PathBuf::from).or_else(|| Some(home()?.join("huggingface")));
    let file = || env("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(folder()?.join("token")));
    let found = env("HF_TOKEN").or_else(|| std::fs::read_to_string(file()?).ok());
    let token = found.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
    match token {
        Some(token) if !token.chars().all(|c| c.is_ascii_graphic()) => {
            Err(Error::new("the token of the Hub has a space or a control character")
                .hint("set HF_TOKEN to the token alone"))
        }
        token => Ok(token),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(address: &str, variables: &[(&str, &str)]) -> String {
        let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        match url(&Address::parse(address).expect("an address"), &env) {
            Ok(url) => url.to_string(),
            Err(e) => e.message,
        }
    }

    #[test]
    fn addresses_begin_at_their_servers() {
        let hub = "hf://datasets/o/n@v1/a b.jsonl";
        assert_eq!(first(hub, &[]), "https://huggingface.co/datasets/o/n/resolve/v1/a%20b.jsonl");
        assert_eq!(
            first("hf://models/o/n/x.json", &[("HF_ENDPOINT", "http://localhost:9/hub/")]),
            "http://localhost:9/hub/o/n/resolve/main/x.json"
        );
        assert!(first(hub, &[("HF_ENDPOINT", "http://hub.example")]).contains("HF_ENDPOINT"));
        assert_eq!(
            first("s3://bucket/k/ü", &[("AWS_REGION", "eu-west-1")]),
            "https://bucket.s3.eu-west-1.amazonaws.com/k/%C3%BC"
        );
        assert_eq!(first("s3://my.bucket/k", &[]), "https://s3.us-east-1.amazonaws.com/my.bucket/k");
        assert_eq!(
            first("s3://bucket/k", &[("AWS_ENDPOINT_URL", "http://127.0.0.1:9")]),
            "http://127.0.0.1:9/bucket/k"
        );
    }
}
