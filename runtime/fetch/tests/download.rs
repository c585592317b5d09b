//! Tests downloads against servers of this computer: resume, retries, limits, hashes.

#[path = "support/server.rs"]
mod server;
#[path = "support/place.rs"]
mod support;

use perilune_fetch::{Error, Event};
use server::{Server, reply, send};
use std::io::Write;
use std::time::{Duration, Instant};
use support::{place, sha256};

#[test]
fn content_is_stored_by_its_hash() {
    let p = place();
    for content in [&b""[..], b"x", &[7; 700_000]] {
        let server = Server::of(Vec::leak(content.to_vec()));
        let (address, hash) = (server.url("/a.bin"), sha256(content));
        let first = p.get(&address, Some(&hash)).expect("downloaded");
        assert_eq!(std::fs::read(&first.path).expect("read"), content);
        assert_eq!(first.path, p.dir.path().join("data/sha256").join(hash.hex()));
        assert!(first.path.metadata().expect("a file").permissions().readonly());
        assert_eq!(p.get(&address, Some(&hash)), Ok(first));
        assert_eq!(server.asked().len(), 1);
        // Without a hash the content is downloaded and its hash is computed.
        assert_eq!(p.get(&address, None).map(|found| found.hash), Ok(hash));
    }
    assert_eq!(p.cache().list().expect("a list").len(), 3);
    let hash = sha256(b"x");
    p.cache().remove(&hash).expect("removed");
    assert!(p.cache().find(&hash).is_none() && p.cache().remove(&hash).is_err());
}

#[test]
fn a_cut_download_continues_where_it_stopped() {
    let content: &[u8] = Vec::leak((0..100_000_u32).flat_map(u32::to_le_bytes).collect());
    let server = Server::start(move |_, asked, out| send(out, asked, content, "\"e\"", 150_000));
    let (p, hash) = (place(), sha256(content));
    let found = p.get(&server.url("/a"), Some(&hash)).expect("downloaded");
    assert_eq!(std::fs::read(found.path).expect("read"), content);
    let from: Vec<_> = server.asked().iter().map(|a| (a.from(), a.header("if-range").map(str::to_string))).collect();
    let tag = || Some("\"e\"".to_string());
    assert_eq!(from, [(None, None), (Some(150_000), tag()), (Some(300_000), tag())]);
    assert!(p.names().iter().all(|name| !name.ends_with(".part") && !name.ends_with(".etag")), "{:?}", p.names());
}

#[test]
fn another_process_continues_a_download() {
    let content: &[u8] = Vec::leak(vec![3; 50_000]);
    let server = Server::start(move |n, asked, out| {
        send(out, asked, content, "\"e\"", if n == 0 { 20_000 } else { usize::MAX })
    });
    let (mut p, hash) = (place(), sha256(content));
    p.limits.attempts = 1;
    // The first attempt brings bytes; it ends with an error of the report, as a killed process does.
    let e = p.watched(&server.url("/a"), Some(&hash), &mut |event| match event {
        Event::Size { done: 20_000, .. } => Err(Error::new("ended")),
        _ => Ok(()),
    });
    assert!(e.is_err(), "{e:?}");
    assert!(p.names().contains(&format!("{}.part", hash.hex())));
    let mut sizes = Vec::new();
    p.watched(&server.url("/a"), Some(&hash), &mut |event| {
        sizes.push(event);
        Ok(())
    })
    .expect("downloaded");
    assert_eq!(sizes.first(), Some(&Event::Size { total: Some(50_000), done: 20_000 }));
}

#[test]
fn a_changed_file_starts_anew() {
    let (old, new): (&[u8], &[u8]) = (Vec::leak(vec![1; 9000]), Vec::leak(vec![2; 9000]));
    let server = Server::start(move |n, asked, out| match n {
        0 => send(out, asked, old, "\"old\"", 4000),
        _ => send(out, asked, new, "\"new\"", usize::MAX),
    });
    let found = place().get(&server.url("/a"), Some(&sha256(new))).expect("downloaded");
    assert_eq!(found.bytes, 9000);
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn random_cuts_give_the_same_bytes() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..25 {
        let content: &[u8] = Vec::leak((0..next() % 60_000 + 1).map(|_| next() as u8).collect());
        let cuts: Vec<usize> = (0..64).map(|_| (next() % 20_000 + 1) as usize).collect();
        // A server without a strong ETag cannot be continued: the download starts anew.
        let tags: Vec<bool> = (0..64).map(|_| next() % 4 > 0).collect();
        let server = Server::start(move |n, asked, out| {
            let most = if n < 8 { cuts[n] } else { usize::MAX };
            send(out, asked, content, if tags[n % 64] { "\"e\"" } else { "W/\"e\"" }, most);
        });
        let mut p = place();
        p.limits.attempts = 20;
        let found = p.get(&server.url("/a"), Some(&sha256(content))).expect("downloaded");
        assert_eq!(std::fs::read(found.path).expect("read"), content);
    }
}

#[test]
fn a_wrong_hash_is_an_error_with_both() {
    let (server, p) = (Server::of(b"content"), place());
    let (wanted, got) = (sha256(b"other"), sha256(b"content"));
    let e = p.get(&server.url("/a"), Some(&wanted)).expect_err("another hash");
    assert!(e.message.contains(&wanted.to_string()) && e.message.contains(&got.to_string()), "{e}");
    assert_eq!(server.asked().len(), 1);
    assert_eq!(p.names(), [format!("{}.lock", wanted.hex())]);
}

#[test]
fn sizes_are_limited() {
    let server = Server::start(|_, asked, out| match asked.target.as_str() {
        "/stated" => reply(out, "200 OK", &[("Content-Length", "1000000000000000000")], b""),
        _ => {
            reply(out, "200 OK", &[], b"");
            // It ends with the client.
            while out.write_all(&[0; 4096]).is_ok() {}
        }
    });
    let mut p = place();
    let e = p.get(&server.url("/stated"), None).expect_err("no space");
    assert!(e.message.contains("are free"), "{e}");
    p.limits.max_bytes = Some(100_000);
    for path in ["/stated", "/endless"] {
        let e = p.get(&server.url(path), None).expect_err("too large");
        assert!(e.message.contains("limit of 100000"), "{e}");
    }
    assert_eq!(server.asked().len(), 3);
}

#[test]
fn a_stalled_server_is_given_up() {
    let server = Server::start(|_, asked, out| {
        if asked.target != "/silent" {
            reply(out, "200 OK", &[("Content-Length", "1000")], b"begin");
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(50));
            if asked.target == "/drip" && out.write_all(b".").is_err() {
                break;
            }
        }
    });
    let mut p = place();
    (p.limits.stall, p.limits.attempts) = (Duration::from_millis(400), 1);
    for (path, why) in
        [("/silent", "does not answer"), ("/stall", "has sent nothing"), ("/drip", "less than 100 bytes a second")]
    {
        let e = p.get(&server.url(path), None);
        // An attempt that brings bytes is followed by another.
        let e = e.expect_err("given up");
        assert!(e.message.contains(why), "{path}: {e}");
    }
}

#[test]
fn encodings_of_transfer_are_stored_as_sent() {
    // The bytes of a gzip member are the content, whatever the server calls them.
    let bytes: &[u8] = &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let server = Server::start(move |_, _, out| {
        reply(
            out,
            "200 OK",
            &[("Content-Length", "20"), ("Content-Encoding", "gzip"), ("Content-Type", "application/gzip")],
            bytes,
        );
    });
    let p = place();
    let found = p.get(&server.url("/a.gz"), Some(&sha256(bytes))).expect("downloaded");
    assert_eq!(std::fs::read(found.path).expect("read"), bytes);
    assert_eq!(server.asked()[0].header("accept-encoding"), Some("identity"));
}

#[test]
fn chunked_bodies_are_joined() {
    let server = Server::start(|_, _, out| {
        reply(out, "200 OK", &[("Transfer-Encoding", "chunked")], b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
    });
    assert_eq!(place().get(&server.url("/a"), Some(&sha256(b"abcde"))).map(|f| f.bytes), Ok(5));
}

#[test]
fn failures_of_a_server_are_retried_within_bounds() {
    let server = Server::start(|n, asked, out| match asked.target.as_str() {
        "/busy" if n < 2 => reply(out, "429 Too Many Requests", &[("Retry-After", "0"), ("Content-Length", "0")], b""),
        "/busy" => send(out, asked, b"content", "\"e\"", usize::MAX),
        "/always" => reply(out, "503 Service Unavailable", &[("Content-Length", "0")], b""),
        "/denied" => reply(out, "403 Forbidden", &[("Content-Length", "0")], b""),
        _ => reply(out, "404 Not Found", &[("Content-Length", "0")], b""),
    });
    let p = place();
    p.get(&server.url("/busy"), Some(&sha256(b"content"))).expect("downloaded");
    for (path, status, attempts) in [("/always", "503", 3), ("/denied", "403", 1), ("/none", "404", 1)] {
        let before = server.asked().len();
        let e = p.get(&server.url(path), None).expect_err("refused");
        assert!(e.message.contains(status), "{e}");
        assert_eq!(server.asked().len() - before, attempts, "{path}");
    }
}

#[test]
fn malformed_answers_are_errors() {
    let content: &[u8] = b"0123456789";
    let server = Server::start(move |n, asked, out| match asked.target.as_str() {
        "/garbage" => drop(out.write_all(b"\x00\xff\xfe garbage\r\n\r\n")),
        "/range" if n % 2 == 0 => send(out, asked, content, "\"e\"", 4),
        "/range" => {
            reply(out, "206 Partial Content", &[("Content-Range", "bytes 9-9/10"), ("Content-Length", "1")], b"9")
        }
        "/unasked" => {
            reply(out, "206 Partial Content", &[("Content-Range", "bytes 5-9/10"), ("Content-Length", "5")], b"56789")
        }
        "/location" => reply(out, "302 Found", &[("Location", "ftp://a b"), ("Content-Length", "0")], b""),
        _ => {}
    });
    let p = place();
    for path in ["/range", "/garbage", "/unasked", "/location", "/closed"] {
        let e = p.get(&server.url(path), Some(&sha256(content))).expect_err(path);
        assert!(e.message.contains("127.0.0.1"), "{e}");
    }
    assert!(p.cache().list().expect("a list").is_empty());
}

#[test]
fn one_of_several_downloads() {
    let server = Server::start(|_, asked, out| {
        std::thread::sleep(Duration::from_millis(100));
        send(out, asked, b"content", "\"e\"", usize::MAX);
    });
    let (p, hash, address) = (place(), sha256(b"content"), server.url("/a"));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            // Each takes a lock by a handle of its own, as a process does.
            scope.spawn(|| p.get(&address, Some(&hash)).expect("found"));
        }
    });
    assert_eq!(server.asked().len(), 1);
}
