//! Builds a folder that attack scripts run in: a recipe's folder full of traps, beside a victim's home that must not change.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// What no output may contain: it stands in every file of the victim.
pub const SECRET: &str = "TOP-SECRET-4711";

/// A recipe that attacks change one part of.
const BASE: &str = r#"
local pl = require "perilune"
return function(part)
  local recipe = pl.recipe { name = part.name or "base", params = part.params or { steps = 3 } }
  recipe.data = part.data or function()
    local x = pl.randn { 16, 4 }
    local set = pl.data.tensors { x = x, y = x:sum(1) }
    return { train = set:batch(8), valid = set:batch(8) }
  end
  recipe.model = part.model or function() return pl.nn.Linear(4, 1) end
  recipe.optimizer = part.optimizer or function(p, model) return pl.optim.SGD(model, { lr = 0.01 }) end
  recipe.loss = part.loss or function(model, batch)
    local error = model(batch.x):squeeze(-1) - batch.y
    return (error * error):mean()
  end
  recipe.evaluate = part.evaluate
  return recipe
end
"#;

/// The folder; it is removed when this is dropped.
pub struct Sandbox {
    root: tempfile::TempDir,
    socket: std::os::unix::net::UnixListener,
    user: User,
}

/// Who runs the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum User {
    /// The user of the test.
    Own,
    /// A user without privileges, to whom the sandbox belongs; only root may choose it.
    Nobody,
}

/// The user and group id of `nobody`.
const NOBODY: u32 = 65534;

impl User {
    /// The users that the test can run programs as.
    pub fn all() -> &'static [User] {
        // A new file belongs to the user of the process.
        let root = tempfile::NamedTempFile::new().unwrap().as_file().metadata().unwrap().uid() == 0;
        if root { &[User::Own, User::Nobody] } else { &[User::Own] }
    }

    /// Returns the path of the program, or of a copy where `nobody` may not execute the original.
    fn program(self) -> &'static Path {
        static REACHED: OnceLock<(PathBuf, Option<tempfile::TempDir>)> = OnceLock::new();
        let own = Path::new(env!("CARGO_BIN_EXE_perilune"));
        if self == User::Own {
            return own;
        }
        let reached = REACHED.get_or_init(|| {
            let tried = Command::new(own).arg("--version").uid(NOBODY).gid(NOBODY).stdout(Stdio::null()).status();
            if tried.is_ok_and(|status| status.success()) {
                return (own.to_path_buf(), None);
            }
            let folder = tempfile::tempdir().unwrap();
            let copy = folder.path().join("perilune");
            std::fs::copy(own, &copy).unwrap();
            for path in [folder.path(), &copy] {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
            }
            (copy, Some(folder))
        });
        &reached.0
    }
}

/// The device that programs run on: that of `PERILUNE_DEVICE`, else the CPU, as processes that open a GPU wait for one another.
pub fn device() -> String {
    std::env::var("PERILUNE_DEVICE").unwrap_or_else(|_| "cpu".into())
}

impl Sandbox {
    pub fn new() -> Sandbox {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for folder in ["victim", "work", "work/inside", "work/folder.npy", "work/bombs/a", "temp", "cache"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        let put = |name: &str, bytes: &[u8]| std::fs::write(at(name), bytes).unwrap();
        let secret = format!("{SECRET},1\n{SECRET},2\n");
        for name in ["victim/secret.txt", "victim/secret.csv", "victim/.profile"] {
            put(name, secret.as_bytes());
        }
        put("victim/secret.lua", format!("print('{SECRET}')").as_bytes());
        put("victim/secret.npy", &npy("(1,)", &4711f32.to_le_bytes()));
        put("work/base.lua", BASE.as_bytes());
        put("work/ok.npy", &npy("(1,)", &1f32.to_le_bytes()));
        put("work/table.csv", b"a,b\n1,2\n");
        put("work/text.txt", b"hello\n");
        put("work/huge.npy", &npy("(1099511627776,)", &[]));
        put("work/huge.safetensors", &(1u64 << 40).to_le_bytes());
        static BOMBS: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
        let [gzip, npz] = BOMBS.get_or_init(|| [gzip_bomb(), npz_bomb()]);
        put("work/bomb.csv.gz", gzip);
        put("work/bomb.npz", npz);
        put("work/bombs/a/x.png", &png_header(60_000, 60_000));
        let index = r#"{"metadata":{"total_size":4},"weight_map":{"w":"../victim/secret.safetensors"}}"#;
        put("work/evil.safetensors.index.json", index.as_bytes());
        symlink(at("victim/secret.npy"), at("work/link.npy")).unwrap();
        symlink("link.npy", at("work/twice.npy")).unwrap();
        symlink(at("victim"), at("work/outside")).unwrap();
        for name in ["zero.txt", "zero.npy"] {
            symlink("/dev/zero", at(&format!("work/{name}"))).unwrap();
        }
        for name in ["pipe.npy", "pipe.csv", "pipe.txt", "pipe.lua"] {
            assert!(Command::new("mkfifo").arg(at(&format!("work/{name}"))).status().unwrap().success());
        }
        let socket = std::os::unix::net::UnixListener::bind(at("work/socket.txt")).unwrap();
        Sandbox { root, socket, user: User::Own }
    }

    /// Gives everything in the sandbox to a user, who runs the program from now on. What a script may not touch belongs to it
    /// too: the boundary contains the script, not the permissions of files.
    pub fn give_to(&mut self, user: User) {
        self.user = user;
        if user == User::Nobody {
            let owner = format!("{NOBODY}:{NOBODY}");
            let given = Command::new("chown").args(["-R", "-h", &owner]).arg(self.root.path()).status();
            assert!(given.unwrap().success());
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Everything that no script may change: names, kinds and contents, but for the run directories and the cache.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut out = BTreeMap::new();
        walk(self.root.path(), self.root.path(), &mut out);
        out
    }

    /// The program, as the person who owns the victim's home would start it in the recipe's folder.
    pub fn command(&self, args: &[&str]) -> Command {
        // A shell starts jobs in the background with interrupts ignored.
        let mut c = Command::new("/usr/bin/env");
        if self.user == User::Nobody {
            c.uid(NOBODY).gid(NOBODY);
        }
        c.arg("--default-signal=INT")
            .arg(self.user.program())
            .args(args)
            .current_dir(self.path("work"))
            .stdin(Stdio::null());
        c.env_clear()
            .env("PERILUNE_MEMORY_LIMIT", "512M")
            .env("HOME", self.path("victim"))
            .env("TMPDIR", self.path("temp"));
        c.env("XDG_CACHE_HOME", self.path("cache")).env("PATH", "/usr/bin:/bin");
        if device() == "cpu" {
            // What a bundle runs on, where no option says it.
            c.env("CUDA_VISIBLE_DEVICES", "-1");
        }
        // Where the driver's and NVRTC's libraries lie on a machine with a GPU.
        c.envs(std::env::var_os("LD_LIBRARY_PATH").map(|folders| ("LD_LIBRARY_PATH", folders)));
        c
    }
}

/// The peak of the memory of a process and of its children so far, in bytes.
pub fn peak_with_children(process: u32) -> u64 {
    let peak = |process: &str| {
        let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    let own = process.to_string();
    let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
    std::iter::once(own.as_str()).chain(children.split_whitespace()).map(peak).sum()
}

fn walk(root: &Path, at: &Path, out: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(at).unwrap().flatten() {
        let path = entry.path();
        let inside = path.strip_prefix(root).unwrap().to_path_buf();
        // What the program itself writes.
        if inside == Path::new("work/runs") || inside == Path::new("cache") {
            continue;
        }
        let meta = path.symlink_metadata().unwrap();
        let text = match () {
            () if meta.is_symlink() => format!("link {}", std::fs::read_link(&path).unwrap().display()),
            () if meta.is_dir() => "folder".to_string(),
            () if meta.is_file() => format!("file {}", blake3::hash(&std::fs::read(&path).unwrap()).to_hex()),
            () => "other".to_string(),
        };
        out.insert(inside, text);
        if meta.is_dir() {
            walk(root, &path, out);
        }
    }
}

/// An npy file of f32 with this shape and these bytes.
fn npy(shape: &str, data: &[u8]) -> Vec<u8> {
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((header.len() as u16).to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// Four gigabytes of a table in some 900 kB: one member of a gzip file, repeated.
fn gzip_bomb() -> Vec<u8> {
    let text = b"1,2\n".repeat(4 << 20);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gz.write_all(&text).unwrap();
    gz.finish().unwrap().repeat(256)
}

/// An archive whose one array has 256 MiB of zeros.
fn npz_bomb() -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default().large_file(true);
    zip.start_file("x.npy", options).unwrap();
    zip.write_all(&npy("(67108864,)", &[])).unwrap();
    let zeros = vec![0; 1 << 20];
    for _ in 0..256 {
        zip.write_all(&zeros).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// A PNG that says it has so many pixels.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    let mut chunk = b"IHDR".to_vec();
    chunk.extend(width.to_be_bytes());
    chunk.extend(height.to_be_bytes());
    chunk.extend([8, 2, 0, 0, 0]);
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    out.extend(13u32.to_be_bytes());
    out.extend(&chunk);
    let mut sum = flate2::Crc::new();
    sum.update(&chunk);
    out.extend(sum.sum().to_be_bytes());
    out
}
