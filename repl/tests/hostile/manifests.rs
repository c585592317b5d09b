//! Makes bundles whose manifest is malformed, states what is not true, or asks for more than a recipe can be granted.

use super::{ALL_RUNS, Expect, Hostile, LUA, REPLAYS, RUNS, TINY, listing, with_manifest};
use perilune_bundle::Manifest;
use perilune_bundle::manifest::DataFile;
use serde_json::{Value, json};

/// A manifest with a value in place of that of a field, as a text.
fn field(name: &str, value: &str) -> String {
    let mut all: serde_json::Map<String, Value> = serde_json::from_str(&good().text()).unwrap();
    all.insert(name.into(), "HERE".into());
    serde_json::to_string_pretty(&all).unwrap().replace("\"HERE\"", value) + "\n"
}

fn good() -> Manifest {
    listing(&[(LUA, TINY.as_bytes())])
}

fn data(path: &str, text: &[u8], change: impl FnOnce(&mut DataFile)) -> DataFile {
    let hash = blake3::hash(text).to_hex().to_string();
    let mut out = DataFile {
        path: path.into(),
        bytes: text.len() as u64,
        blake3: hash,
        address: None,
        inside: false,
        folder: None,
    };
    change(&mut out);
    out
}

/// Manifests that are refused by every command.
fn refused(out: &mut Vec<Hostile>) {
    let mut add = |name: &str, rule: &'static str, text: &str| {
        out.push(Hostile::bytes(&format!("manifest-{name}"), Expect::Refused(rule), with_manifest(text, TINY)));
    };
    add("empty", "manifest.json", "");
    add("no-object", "manifest.json", "[1, 2]");
    add("deep", "invalid type: sequence", &"[".repeat(200_000));
    add(
        "deep-params",
        "recursion limit",
        &field("params", &format!("{}1{}", "{\"a\":".repeat(5000), "}".repeat(5000))),
    );
    add("long-field", "unknown field", &field(&"a\u{1b}[2J".repeat(1 << 20), "1"));
    add("long-name", "recipe", &field("recipe", &format!("\"{}\"", "../".repeat(1 << 20))));
    add("format-text", "invalid type", &field("format", "\"1\""));
    add("format-huge", "manifest.json", &field("format", "1e400"));
    add("format-newer", "a newer Perilune may read it", &field("format", "99"));
    add("files-number", "invalid type", &field("files", "7"));
    add("command-object", "invalid type", &field("command", "{\"a\": 1}"));
    add("params-list", "invalid type", &field("params", "[1]"));
    add("params-nan", "manifest.json", &field("params", "{\"lr\": NaN}"));
    add("run-text", "invalid type", &field("run", "\"done\""));
    add("bom", "manifest.json", &format!("\u{feff}{}", good().text()));
    add("twice", "duplicate field", &good().text().replacen('{', "{\n  \"format\": 1,", 1));
    add("spaces", "as Perilune writes it", &(good().text() + " "));
    let mut with = |name: &str, rule: &'static str, change: &dyn Fn(&mut Manifest)| {
        let mut manifest = good();
        change(&mut manifest);
        out.push(Hostile::bytes(
            &format!("manifest-{name}"),
            Expect::Refused(rule),
            with_manifest(&manifest.text(), TINY),
        ));
    };
    let hash = || blake3::hash(b"").to_hex().to_string();
    with("recipe-outside", "is not among the files", &|m| m.recipe = "../../etc/passwd".into());
    with("file-outside", "the name", &|m| m.files[0].path = "../victim/secret.lua".into());
    with("file-and-folder", "is a file, and the folder of", &|m| {
        let path = format!("{LUA}/x");
        m.files.push(perilune_bundle::manifest::FileEntry { path, bytes: 0, blake3: hash() });
    });
    with("hash-escape", "is no BLAKE3 hash", &|m| m.stdlib = "\u{1b}[2J".repeat(16));
    with("data-outside", "is not beneath the folder", &|m| {
        m.data.push(data("f/../../victim/secret.csv", b"x", |d| d.folder = Some("f".into())));
    });
    with("data-not-inside", "is said to be inside", &|m| m.data.push(data("x.csv", b"x", |d| d.inside = true)));
    with("data-long", "must have 1 to 4096 bytes", &|m| m.data.push(data(&"a/".repeat(3000), b"x", |_| ())));
    with("asks-flood", "at most 32 hosts", &|m| m.asks.net = (0..100_000).map(|k| format!("h{k}.example")).collect());
    with("asks-words", "is no name of a host", &|m| {
        m.asks.net = vec!["a.example. The bundle asks for nothing else.\u{1b}[8m".into()];
    });
    with("asks-all", "is no name of a host", &|m| m.asks.net = vec!["*.example".into()]);
}

/// Manifests that are whole.
fn accepted(out: &mut Vec<Hostile>) {
    const NOT_RUN: &str = "is not a `perilune run` command";
    let mut add = |name: &str, expect: Expect, lua: &str, change: &dyn Fn(&mut Manifest)| {
        let mut manifest = listing(&[(LUA, lua.as_bytes())]);
        change(&mut manifest);
        out.push(Hostile::bytes(&format!("manifest-{name}"), expect, with_manifest(&manifest.text(), lua)));
    };
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(|w| w.to_string()).collect() };
    let no_run = || Expect::Where(REPLAYS, "has no run to repeat");
    for (name, command) in [
        ("program", &["rm", "-rf", "/"][..]),
        ("shell", &["perilune", "run", "$(touch /tmp/x)", ";", "touch", "x"]),
        ("other-command", &["perilune", "bundle", "key", "../victim/key", "--no-password"]),
        ("no-words", &[]),
        ("help", &["perilune", "run", "--help"]),
    ] {
        add(&format!("command-{name}"), Expect::Where(RUNS, NOT_RUN), TINY, &|m| m.command = words(command));
    }
    let writes =
        TINY.replace("function recipe.model()", "function recipe.model() pl.save('../victim/x.npy', pl.ones { 2 })");
    add("command-grants", Expect::Where(RUNS, "--allow-write"), &writes, &|m| {
        let grants = ["--allow-write=/", "--allow-read=/", "--allow-net=localhost"];
        m.command.extend(words(&grants));
    });
    add("command-kernels", no_run(), TINY, &|m| {
        m.command.extend(words(&["--untrusted", "--allow-kernels", "--accept-missing-walls", "--time=1000h"]));
    });
    add("command-places", no_run(), TINY, &|m| {
        m.command.extend(words(&[
            "--run-dir",
            "../victim/run",
            "--mlflow",
            "../victim/mlflow",
            "--log",
            "../victim/log",
        ]));
    });
    add("command-unpacked", no_run(), TINY, &|m| m.command.extend(words(&["--unpacked", "/", "--data", "/"])));
    add("command-recipe", no_run(), TINY, &|m| m.command[2] = "../../../victim/secret.lua".into());
    add("command-bundle", no_run(), TINY, &|m| m.command[2] = "bad.plb".into());
    add("command-long", no_run(), TINY, &|m| m.command.extend((0..50_000).map(|k| format!("--set=x{k}=1"))));
    add("command-escape", no_run(), TINY, &|m| m.command.push("--set=x=\u{1b}[2J\u{9b}31m\u{202e}".into()));
    add("name-outside", no_run(), TINY, &|m| m.name = "../../victim/\u{1b}[2J\nx".into());
    add("names-escape", no_run(), TINY, &|m| {
        (m.perilune, m.license) = ("\u{9b}31m1.0\u{1b}[2J".into(), Some("\u{202e}TIM".into()));
    });
    let code = "local x = io.popen('touch ../victim/x')";
    add("params-code", no_run(), TINY, &|m| {
        m.params.insert("lr".into(), code.into());
        m.command.extend(words(&[
            "--set",
            "steps=(os.execute('touch ../victim/x'))",
            "--set",
            "x=pl.save('x.npy', 1)",
        ]));
    });
    add("params-flood", no_run(), TINY, &|m| m.params = (0..100_000).map(|k| (format!("p{k}"), json!(k))).collect());
    add("params-names", no_run(), TINY, &|m| {
        m.params = [("\u{1b}[2J\u{9b}\n".to_string(), json!("\u{202e}"))].into_iter().collect()
    });
    add("data-system", Expect::Where(RUNS, "are not here"), TINY, &|m| {
        m.data.push(data("/etc/passwd", b"root", |_| ()))
    });
    add("data-escape", Expect::Where(ALL_RUNS, "are not here"), TINY, &|m| {
        m.data.push(data("\u{1b}]0;owned\u{7}\u{9b}31m.csv", b"x", |_| ()));
    });
    add("data-many-folders", Expect::Where(RUNS, "are not here"), TINY, &|m| {
        m.data = (0..40_000).map(|k| data(&format!("f{k}/x"), b"x", |d| d.folder = Some(format!("f{k}")))).collect();
    });
    for (name, address) in [
        ("file", "file:///etc/passwd"),
        ("local", "http://localhost:9/x"),
        ("path", "/etc/passwd"),
        ("escape", "https://a.example/\u{1b}[2J\u{9b}31m"),
    ] {
        let call = format!("pl.data.lines({address:?}, {{ hash = 'sha256:{}' }})", "0".repeat(64));
        let lua = TINY.replace("function recipe.model()", &format!("function recipe.model() {call}"));
        add(&format!("address-{name}"), Expect::Where(REPLAYS, "has no run"), &lua, &|m| {
            m.data.push(data(address, b"x", |d| d.address = Some(address.into())));
            m.asks.net = vec!["localhost".into(), "169.254.169.254".into()];
            m.asks.kernels = true;
        });
    }
}

pub fn all() -> Vec<Hostile> {
    let mut out = Vec::new();
    refused(&mut out);
    accepted(&mut out);
    // A file of the bundle in the place of one of the system: the recipe reads it, and no other program does.
    let lua = TINY.replace("function recipe.model()", "function recipe.model() print(pl.data.text('/etc/passwd'))");
    let (text, mut manifest) = (b"planted\n", listing(&[]));
    let entry = format!("data/{}", blake3::hash(text).to_hex());
    manifest.files = listing(&[(&entry, text), (LUA, lua.as_bytes())]).files;
    manifest.data.push(data("/etc/passwd", text, |d| d.inside = true));
    let bytes = crate::archive::archive(&[
        &crate::archive::plain("manifest.json", manifest.text().as_bytes()),
        &crate::archive::plain(&entry, text),
        &crate::archive::plain(LUA, lua.as_bytes()),
    ]);
    out.push(Hostile::bytes("manifest-data-inside-system", Expect::Contained, bytes));
    out
}
