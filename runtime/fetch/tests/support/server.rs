//! Serves HTTP on a port of this computer, each answer by a function of the test.
#![allow(dead_code)] // each test binary uses a part of it

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A request: its target, and its headers by lower-case name.
#[derive(Clone, Debug)]
pub struct Asked {
    pub target: String,
    pub headers: BTreeMap<String, String>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The first byte of a range.
    pub fn from(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// A server that lives as long as the test.
pub struct Server {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    /// Answers request `n` with what `answer` writes; then the connection ends.
    pub fn start(answer: impl Fn(usize, &Asked, &mut TcpStream) + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (asked, answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(answer));
        let log: Arc<Mutex<Vec<Asked>>> = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let mut lines = BufReader::new(stream.try_clone().expect("a handle")).lines();
                    let first = lines.next().and_then(Result::ok).unwrap_or_default();
                    let target = first.split(' ').nth(1).unwrap_or_default().to_string();
                    let headers = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
                    let headers = headers.filter_map(|line| {
                        let (name, value) = line.split_once(':')?;
                        Some((name.to_ascii_lowercase(), value.trim().to_string()))
                    });
                    let request = Asked { target, headers: headers.collect() };
                    let n = {
                        let mut log = log.lock().expect("a lock");
                        log.push(request.clone());
                        log.len() - 1
                    };
                    answer(n, &request, &mut stream);
                });
            }
        });
        Server { port, asked }
    }

    /// Serves the same content for every path, with an ETag and ranges.
    pub fn of(content: &'static [u8]) -> Server {
        Server::start(move |_, asked, out| send(out, asked, content, "\"v1\"", content.len()))
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// All requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("a lock").clone()
    }
}

/// Sends status, headers and body; a client that has gone is no error.
pub fn reply(out: &mut TcpStream, status: &str, headers: &[(&str, &str)], body: &[u8]) {
    let mut text = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let _ =
        out.write_all(format!("{text}\r\n").as_bytes()).and_then(|()| out.write_all(body)).and_then(|()| out.flush());
}

/// Sends the content, or its range if the validator of the request is `etag`; at most `most` bytes, then the connection is cut.
pub fn send(out: &mut TcpStream, asked: &Asked, content: &[u8], etag: &str, most: usize) {
    let from = asked.from().filter(|from| *from < content.len() && asked.header("if-range") == Some(etag));
    let rest = &content[from.unwrap_or(0)..];
    let length = rest.len().to_string();
    let part = &rest[..rest.len().min(most)];
    match from {
        None => reply(out, "200 OK", &[("Content-Length", &length), ("ETag", etag)], part),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
            reply(
                out,
                "206 Partial Content",
                &[("Content-Length", &length), ("Content-Range", &range), ("ETag", etag)],
                part,
            );
        }
    }
}
