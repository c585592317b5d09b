//! Tests redirects, Hubs and buckets: which host gets a request, and which gets a secret.

#[path = "support/server.rs"]
mod server;
#[path = "support/place.rs"]
mod support;

use server::{Server, reply, send};
use support::{place, sha256};

#[test]
fn a_redirect_needs_a_grant_of_its_host() {
    let target = Server::of(b"content");
    let to = format!("http://localhost:{}/b", target.port);
    let server = Server::start(move |_, asked, out| match asked.target.as_str() {
        "/loop" => reply(out, "302 Found", &[("Location", "/loop"), ("Content-Length", "0")], b""),
        "/web" => reply(out, "302 Found", &[("Location", "http://example.org/"), ("Content-Length", "0")], b""),
        _ => reply(out, "307 Temporary Redirect", &[("Location", &to), ("Content-Length", "0")], b""),
    });
    let (mut p, hash) = (place(), sha256(b"content"));
    let e = p.get(&server.url("/a"), Some(&hash)).expect_err("not granted");
    assert_eq!(e.host.as_deref(), Some("localhost"));
    assert!(e.hint.is_some_and(|hint| hint.contains("--allow-net=localhost")));
    assert!(target.asked().is_empty());
    p.grants = "127.0.0.1,localhost";
    p.get(&server.url("/a"), Some(&hash)).expect("downloaded");
    assert_eq!(target.asked().len(), 1);
    assert!(p.get(&server.url("/loop"), Some(&sha256(b"l"))).is_err_and(|e| e.message.contains("redirects")));
    assert!(p.get(&server.url("/web"), Some(&sha256(b"l"))).is_err_and(|e| e.message.contains("is http")));
    // A host that is not granted is not asked.
    p.grants = "example.org";
    let before = server.asked().len();
    assert!(p.get(&server.url("/c"), Some(&sha256(b"c"))).is_err_and(|e| e.host.as_deref() == Some("127.0.0.1")));
    assert_eq!(server.asked().len(), before);
}

#[test]
fn the_hub_gets_the_token_and_its_redirect_does_not() {
    let content: &[u8] = b"a record";
    let store = Server::of(content);
    let to = format!("http://localhost:{}/blob", store.port);
    let hash = sha256(content);
    let stated = format!("\"{}\"", hash.hex());
    let hub = Server::start(move |_, _, out| {
        let headers =
            [("Location", to.as_str()), ("X-Linked-Etag", &stated), ("X-Linked-Size", "8"), ("Content-Length", "0")];
        reply(out, "302 Found", &headers, b"");
    });
    let mut p = place();
    p.grants = "127.0.0.1,localhost";
    p.env = vec![("HF_ENDPOINT", hub.url("")), ("HF_TOKEN", "hf_secret".into())];
    let address = "hf://datasets/owner/name@v1/train set.jsonl";
    // The Hub states the hash: another one is refused before anything is downloaded.
    let e = p.get(address, Some(&sha256(b"other"))).expect_err("another hash");
    assert!(e.message.contains(&hash.to_string()) && store.asked().is_empty(), "{e}");
    p.get(address, Some(&hash)).expect("downloaded");
    let first = &hub.asked()[0];
    assert_eq!(first.target, "/datasets/owner/name/resolve/v1/train%20set.jsonl");
    assert_eq!(first.header("authorization"), Some("Bearer hf_secret"));
    assert!(store.asked().iter().all(|asked| asked.header("authorization").is_none()));
    // Nor does it go to another address.
    let other = Server::of(b"x");
    p.get(&other.url("/x"), None).expect("downloaded");
    assert_eq!(other.asked()[0].header("authorization"), None);
    // A token of several lines is refused.
    p.env[1].1 = "a\r\nHost: b".into();
    assert!(p.get(address, Some(&sha256(b"z"))).is_err_and(|e| e.message.contains("token")));
}

#[test]
fn buckets_get_signed_requests() {
    let server = Server::start(|_, asked, out| match asked.target.as_str() {
        "/bucket/denied" => {
            let page = b"<Error><Code>SignatureDoesNotMatch</Code></Error>";
            reply(out, "403 Forbidden", &[("Content-Length", "49")], page);
        }
        _ => send(out, asked, b"content", "\"e\"", usize::MAX),
    });
    let mut p = place();
    p.env = vec![("AWS_ENDPOINT_URL", server.url(""))];
    p.get("s3://bucket/a b/c.bin", None).expect("downloaded");
    let asked = &server.asked()[0];
    assert_eq!((asked.target.as_str(), asked.header("authorization")), ("/bucket/a%20b/c.bin", None));
    let keys = [
        ("AWS_ACCESS_KEY_ID", "KEY"),
        ("AWS_SECRET_ACCESS_KEY", "SECRET"),
        ("AWS_SESSION_TOKEN", "TOKEN"),
        ("AWS_REGION", "eu-west-1"),
    ];
    p.env.extend(keys.map(|(name, value)| (name, value.to_string())));
    p.get("s3://bucket/a b/c.bin", None).expect("downloaded");
    let asked = &server.asked()[1];
    let header = asked.header("authorization").expect("a signature");
    let day = &asked.header("x-amz-date").expect("a date")[..8];
    assert!(
        header.starts_with(&format!("AWS4-HMAC-SHA256 Credential=KEY/{day}/eu-west-1/s3/aws4_request, ")),
        "{header}"
    );
    assert!(header.contains("SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token, "), "{header}");
    assert_eq!(asked.header("x-amz-security-token"), Some("TOKEN"));
    assert!(!format!("{asked:?}").contains("SECRET"));
    assert!(p.get("s3://bucket/denied", None).is_err_and(|e| e.message.contains("403 (SignatureDoesNotMatch)")));
}
