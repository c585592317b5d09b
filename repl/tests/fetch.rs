//! Tests data by address through the commands: grants, offline mode, hashes, `perilune fetch`, several processes at once.
#![allow(clippy::unwrap_used)]

#[path = "../../runtime/fetch/tests/support/server.rs"]
mod server;
mod support;

use server::{Server, reply, send};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Place, Ran, place};

/// SHA-256 of the lines, computed with Python's hashlib.
const LINES: &[u8] = b"alpha\nbeta\ngamma\n";
const HASH: &str = "sha256:4fdbc441ea7b546100e086ac1e4fc5ae6749b7314311c99db05be450eca12996";

fn command(p: &Place, args: &[&str]) -> Command {
    let mut command = p.command(args);
    command.env("PERILUNE_CACHE", p.path("cache")).env_remove("HF_HUB_OFFLINE").stdin(Stdio::null());
    command
}

fn run(p: &Place, args: &[&str]) -> Ran {
    command(p, args).output().unwrap().into()
}

/// A script that prints the number of lines and the first of them.
fn script(p: &Place, call: &str) {
    let text = format!("local pl = require \"perilune\"\nlocal set = {call}\nprint(set:size(), set:get(0).text)\n");
    p.file("s.lua", text);
}

fn lines(url: &str, options: &str) -> String {
    format!("pl.data.lines(\"{url}\", {options})")
}

#[test]
fn a_recipe_reads_what_is_granted_and_connects_nowhere_else() {
    let (p, server) = (place(), Server::of(LINES));
    let url = server.url("/lines.txt");
    script(&p, &lines(&url, &format!("{{ hash = \"{HASH}\" }}")));
    for args in [
        &["run", "s.lua"][..],
        &["check", "s.lua"],
        &["run", "s.lua", "--allow-net=localhost"],
        &["run", "s.lua", "--offline"],
    ] {
        let ran = run(&p, args);
        assert_eq!(ran.status, Some(3), "{args:?} {}", ran.err);
        let hint = if args.contains(&"--offline") { "forbids connections" } else { "--allow-net=127.0.0.1" };
        assert!(ran.err.contains(hint) && ran.err.starts_with("s.lua:2: "), "{}", ran.err);
    }
    assert!(server.asked().is_empty());
    let ran = run(&p, &["run", "s.lua", "--allow-net=127.0.0.1"]);
    assert_eq!((ran.status, ran.out.trim()), (Some(0), "3\talpha"), "{}", ran.err);
    // From now on it is in the cache.
    for args in [&["run", "s.lua"][..], &["run", "s.lua", "--offline"], &["check", "s.lua"]] {
        let ran = run(&p, args);
        assert_eq!(ran.status, Some(0), "{}", ran.err);
    }
    let hub = command(&p, &["run", "s.lua"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(hub.status.success());
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn hashes_are_required_and_checked() {
    let (p, server) = (place(), Server::of(LINES));
    let url = server.url("/lines.txt");
    let zero = format!("sha256:{}", "0".repeat(64));
    for (options, why) in [
        ("{}".to_string(), "has no hash"),
        (format!("{{ hash = \"{zero}\" }}"), "another hash"),
        ("{ hash = \"md5:00\" }".to_string(), "unknown algorithm"),
        ("{ hash = 5 }".to_string(), "hash"),
        (format!("{{ hash = {{ [\"{url}x\"] = \"{zero}\" }} }}"), "none of the addresses"),
        (format!("{{ hsah = \"{zero}\" }}"), "Did you mean 'hash'"),
    ] {
        script(&p, &lines(&url, &options));
        let ran = run(&p, &["run", "s.lua", "--allow-net=127.0.0.1"]);
        assert!(ran.status == Some(3) && ran.err.contains(why), "{options}: {}", ran.err);
    }
    // Only the wrong hash could be found out by asking.
    assert_eq!(server.asked().len(), 1);
    let ran = run(&p, &["run", "s.lua", "--allow-net=https://a"]);
    assert!(ran.status == Some(2) && ran.err.contains("is no host"), "{}", ran.err);
    script(&p, "pl.data.lines(\"gs://bucket/x\")");
    assert!(run(&p, &["run", "s.lua"]).err.contains("unknown scheme"));
    script(&p, &format!("pl.data.lines(\"s.lua\", {{ hash = \"{HASH}\" }})"));
    assert!(run(&p, &["run", "s.lua"]).err.contains("no path is an address"));
}

#[test]
fn other_content_of_the_cache_stays_closed() {
    let (p, server) = (place(), Server::of(LINES));
    let ran = run(&p, &["fetch", &server.url("/a")]);
    assert!(ran.status == Some(0) && ran.out.contains(&format!("hash = \"{HASH}\"")), "{}{}", ran.out, ran.err);
    let path = p.path("cache/data/sha256").join(HASH.trim_start_matches("sha256:"));
    assert!(path.is_file());
    std::fs::create_dir(p.path("work")).unwrap();
    p.file("work/s.lua", format!("local pl = require \"perilune\"\npl.data.lines({:?})\n", path.display().to_string()));
    let ran: Ran = command(&p, &["run", "s.lua"]).current_dir(p.path("work")).output().unwrap().into();
    assert!(ran.status == Some(3) && ran.err.contains("--allow-read"), "{}", ran.err);
}

#[test]
fn fetch_prints_lists_and_removes() {
    let (p, server) = (place(), Server::of(LINES));
    let url = server.url("/a.txt");
    let ran = run(&p, &["fetch", &url, &format!("{url}#{HASH}")]);
    assert_eq!((ran.status, ran.out.matches(HASH).count()), (Some(0), 2), "{}", ran.err);
    // The second address had its hash and was there.
    assert_eq!(server.asked().len(), 1);
    let ran = run(&p, &["fetch", "--list"]);
    assert!(ran.out.contains(HASH) && ran.out.contains(&url), "{}", ran.out);
    assert_eq!(run(&p, &["fetch", "--remove", HASH]).status, Some(0));
    assert_eq!(run(&p, &["fetch", "--list"]).out, "");
    assert!(run(&p, &["fetch", "--remove", HASH]).err.contains("nothing of"));
    assert_eq!(run(&p, &["fetch"]).status, Some(2));
    let ran = run(&p, &["fetch", "hf://datasets/x"]);
    assert!(ran.status == Some(2) && ran.err.contains("hf://datasets/OWNER/NAME"), "{}", ran.err);
    let ran = run(&p, &["fetch", &url, "--algorithm", "blake3"]);
    assert!(ran.out.contains("hash = \"blake3:"), "{}{}", ran.out, ran.err);
}

#[test]
fn a_redirect_to_another_host_names_the_flag() {
    let store = Server::of(LINES);
    let to = format!("http://localhost:{}/b", store.port);
    let p = place();
    let server =
        Server::start(move |_, _, out| reply(out, "302 Found", &[("Location", &to), ("Content-Length", "0")], b""));
    let ran = run(&p, &["fetch", &server.url("/a")]);
    assert!(ran.status == Some(1) && ran.err.contains("--allow-net=localhost"), "{}", ran.err);
    assert!(store.asked().is_empty());
    assert_eq!(run(&p, &["fetch", &server.url("/a"), "--allow-net=localhost"]).status, Some(0));
}

#[test]
fn processes_share_a_download() {
    let p = place();
    let server = Server::start(|_, asked, out| {
        std::thread::sleep(Duration::from_millis(500));
        send(out, asked, LINES, "\"e\"", usize::MAX);
    });
    let address = format!("{}#{HASH}", server.url("/a"));
    let start = || command(&p, &["fetch", &address]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let both = [start(), start()];
    for child in both {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    assert_eq!(server.asked().len(), 1);
}

/// Trains on a table by address, a param of the recipe.
const TABLE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "table", params = { csv = "", lr = 0.1, steps = 4 } }
function recipe.data(p)
  return { train = pl.data.csv(p.csv):tensors { x = { columns = { 0, 2 } }, y = { column = 2 } }:batch(2) }
end
function recipe.model() return pl.nn.Linear(2, 1) end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

#[test]
fn a_run_on_an_address_is_recorded_and_resumed() {
    let (p, server) = (place(), Server::of(b"1,2,3\n4,5,6\n7,8,9\n0,1,2\n"));
    p.file("r.lua", TABLE);
    let url = server.url("/set.csv?version=2");
    let printed = run(&p, &["fetch", &url]).out;
    let hash = printed.split('"').nth(1).unwrap();
    let set = format!("csv={url}#{hash}");
    let ran = run(&p, &["run", "r.lua", "--set", &set, "--run-dir", "a", "--offline", "--checkpoint-every", "2"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let record: serde_json::Value = serde_json::from_str(&p.read("a/run.json")).unwrap();
    assert!(record["data"].to_string().contains(hash), "{}", record["data"]);
    let again = run(
        &p,
        &["run", "r.lua", "--set", &set, "--run-dir", "a", "--offline", "--resume", "--steps", "6", "--verify-data"],
    );
    assert_eq!(again.status, Some(0), "{}", again.err);
    let replay = run(&p, &["replay", "a", "--offline"]);
    assert_eq!(replay.status, Some(0), "{}", replay.err);
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn every_reader_takes_an_address() {
    let p = place();
    let file = |path: &str| std::fs::read(format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let files = [
        ("/alice.txt", file("recipes/data/alice.txt")),
        ("/digits.csv.gz", file("recipes/data/digits.csv.gz")),
        ("/sums.jsonl", file("recipes/data/sums.jsonl")),
        ("/ids.bin", file("tests/golden/tokens/part-1.bin")),
        ("/gpt2.safetensors", file("tests/golden/models/gpt2.safetensors")),
    ];
    let names = files.each_ref().map(|(name, _)| *name);
    let server = Server::start(move |_, asked, out| match files.iter().find(|(name, _)| *name == asked.target) {
        Some((_, content)) => send(out, asked, content, "\"e\"", usize::MAX),
        None => reply(out, "404 Not Found", &[("Content-Length", "0")], b""),
    });
    let hashes = names.map(|name| {
        let ran = run(&p, &["fetch", &server.url(name)]);
        ran.out.split('"').nth(1).unwrap_or_else(|| panic!("{}", ran.err)).to_string()
    });
    let at = |k: usize| format!("\"{}\", {{ hash = \"{}\" }}", server.url(names[k]), hashes[k]);
    let text = format!(
        "local pl = require \"perilune\"\nlocal data = pl.data\nlocal t = data.text({})\nlocal c = data.csv({})\n\
         local j = data.jsonl({})\nlocal f = data.token_files({})\nlocal i = data.tokens({})\n\
         local w = pl.load \"{}#{}\"\nassert(t.high > 1000 and c:size() > 1000 and j:size() > 10 and f.high == i:size(0))\n\
         assert(next(w) ~= nil)\nprint(pcall(data.images, \"{}\", {{ pixels = 8 }}))\nprint(pcall(data.tokenizer, \"{}#{}\"))\nprint \"read\"\n",
        at(0),
        at(1),
        at(2),
        at(3),
        at(3),
        server.url(names[4]),
        hashes[4],
        server.url("/folder"),
        server.url(names[2]),
        hashes[2],
    );
    p.file("all.lua", text);
    let ran = run(&p, &["run", "all.lua", "--offline"]);
    assert!(ran.status == Some(0) && ran.out.contains("read"), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("is an address of one file"), "{}", ran.out);
}

/// Types an answer at the question of a terminal and returns what was printed.
fn at_terminal(p: &Place, answer: &str) -> String {
    let (pty, pts) = pty_process::blocking::open().unwrap();
    pty.resize(pty_process::Size::new(40, 200)).unwrap();
    let command = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"));
    let command = command.args(["run", "s.lua"]).current_dir(p.dir.path()).env("PERILUNE_CACHE", p.path("cache"));
    let mut child = command.env("NO_COLOR", "1").env_remove("HF_HUB_OFFLINE").spawn(pts).unwrap();
    let mut terminal = std::fs::File::from(std::os::fd::OwnedFd::from(pty));
    let (mut all, mut buffer, mut answered) = (String::new(), [0; 4096], false);
    // On Linux the end of the output is an error.
    while let Ok(n) = terminal.read(&mut buffer) {
        if n == 0 {
            break;
        }
        all.push_str(&String::from_utf8_lossy(&buffer[..n]));
        if !answered && all.contains("[y/N]") {
            answered = true;
            terminal.write_all(answer.as_bytes()).unwrap();
        }
    }
    child.wait().unwrap();
    all
}

#[test]
fn a_person_at_a_terminal_is_asked() {
    let (p, server) = (place(), Server::of(LINES));
    script(&p, &lines(&server.url("/lines.txt"), &format!("{{ hash = \"{HASH}\" }}")));
    let all = at_terminal(&p, "\n");
    assert!(all.contains("Connect to 127.0.0.1? [y/N]") && all.contains("--allow-net=127.0.0.1"), "{all}");
    assert!(server.asked().is_empty());
    let all = at_terminal(&p, "y\n");
    assert!(all.contains("3\talpha") || all.contains("3       alpha"), "{all}");
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn a_signal_ends_a_download() {
    let p = place();
    let server = Server::start(|_, _, out| {
        reply(out, "200 OK", &[("Content-Length", "1000"), ("ETag", "\"e\"")], b"begin");
        std::thread::sleep(Duration::from_secs(60));
    });
    script(&p, &lines(&server.url("/a"), &format!("{{ hash = \"{HASH}\" }}")));
    let mut child = command(&p, &["run", "s.lua", "--allow-net=127.0.0.1"]).stderr(Stdio::piped()).spawn().unwrap();
    let part = p.path("cache/data/sha256").join(format!("{}.part", HASH.trim_start_matches("sha256:")));
    let begun = Instant::now();
    while part.metadata().map_or(0, |meta| meta.len()) == 0 && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    // To this process alone; a terminal sends it to both.
    let signalled = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    let sent = Instant::now();
    while child.try_wait().unwrap().is_none() && sent.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = child.try_wait().unwrap().is_some();
    let _ = child.kill();
    assert!(ended, "it waits for the server");
    assert_eq!(std::fs::read(part).unwrap(), b"begin");
}

#[test]
fn the_fetching_process_refuses_what_is_no_request() {
    let p = place();
    for text in ["", "{}\n", "\u{0}\n"] {
        let mut child = command(&p, &["fetch-process"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), text.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.code() == Some(1) && String::from_utf8_lossy(&out.stderr).contains("no request"));
    }
}
