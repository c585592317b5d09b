//! Attacks the boundary of a recipe from Lua: what it may read, write, list, require and show.
//!
//! The resolution of paths itself, by `openat2` and by the walk, is attacked in `runtime/policy/tests/paths.rs`; the flags of
//! the command line in `repl/tests/policy.rs`.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Loaded, Policy, Runtime, RuntimeOptions};
use perilune_policy::Resolution;
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

const BOTH: [Resolution; 2] = [Resolution::Auto, Resolution::Walk];
const SECRET: &str = "the secret line";

/// A recipe's folder and another one, with a line that no output may show.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Tree {
        let t = Tree(tempfile::tempdir().unwrap());
        for dir in ["recipe/parts", "outside/folder/cat"] {
            std::fs::create_dir_all(t.path(dir)).unwrap();
        }
        let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden");
        std::fs::copy(golden.join("images/folder/boat/plain.jpg"), t.path("outside/folder/cat/a.jpg")).unwrap();
        for name in ["secret.csv", "secret.txt", "secret.lua", "weights.npy", "secret.bin", "secret.png"] {
            t.file(&format!("outside/{name}"), SECRET);
        }
        t.file("recipe/own.csv", "1,2\n3,4\n");
        t
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    #[cfg(unix)]
    fn link(&self, target: &str, name: &str) {
        std::os::unix::fs::symlink(target, self.path(name)).unwrap();
    }

    /// Runs text as the recipe `recipe/r.lua` and returns what it printed and its error, as the terminal shows them.
    fn run(&self, text: &str, how: Resolution) -> String {
        let text = text.replace("OUT", &self.path("outside").display().to_string());
        let (runtime, printed) = self.runtime(how);
        self.file("recipe/r.lua", &format!("local pl = require 'perilune' {text}"));
        let end = match runtime.load(&self.path("recipe/r.lua")) {
            Ok(_) => String::new(),
            Err(e) => e.to_string(),
        };
        let out = format!("{}{end}", printed.borrow());
        assert!(!out.contains(SECRET), "{text}: {out}");
        out
    }

    fn runtime(&self, how: Resolution) -> (Runtime, Rc<RefCell<String>>) {
        let policy = Policy::builder().resolution(how).recipe(&self.path("recipe/r.lua")).build();
        self.runtime_with(policy)
    }

    fn runtime_with(&self, policy: std::sync::Arc<Policy>) -> (Runtime, Rc<RefCell<String>>) {
        let printed: Rc<RefCell<String>> = Rc::default();
        let sink = printed.clone();
        let runtime = Runtime::new(RuntimeOptions {
            backend: perilune_tests::harness::device(1),
            params: Vec::new(),
            policy,
            strict: true,
            print: Rc::new(move |line| sink.borrow_mut().push_str(&format!("{line}\n"))),
        });
        (runtime.unwrap(), printed)
    }
}

#[test]
fn every_reader_stays_in_its_roots() {
    let t = Tree::new();
    for name in ["secret.csv", "secret.txt", "secret.png", "secret.bin", "weights.npy"] {
        t.link(&format!("../outside/{name}"), &format!("recipe/link_{name}"));
    }
    t.link("../outside/folder", "recipe/link_folder");
    for how in BOTH {
        assert_eq!(t.run("print(pl.data.csv('own.csv').native:size())", how), "2\t2\n");
        for (call, file) in [
            ("pl.data.csv", "secret.csv"),
            ("pl.data.text", "secret.txt"),
            ("pl.data.png", "secret.png"),
            ("pl.data.tokens", "secret.bin"),
            ("pl.load", "weights.npy"),
            ("pl.nn.load_weights(pl.nn.Linear(2, 2), ", "weights.npy"),
        ] {
            let call = if call.contains('(') { call.to_string() } else { format!("{call}(") };
            for path in [
                format!("OUT/{file}"),
                format!("../outside/{file}"),
                format!("link_{file}"),
                format!("parts/../../outside/{file}"),
            ] {
                let said = t.run(&format!("{call}'{path}')"), how);
                let denied =
                    said.contains("may be read") && said.contains("hint: allow it on the command line: --allow-read=");
                assert!(denied, "{call}{path} {how:?}: {said}");
            }
        }
        for path in ["OUT/folder", "link_folder"] {
            let said = t.run(&format!("pl.data.images('{path}', {{ pixels = 8 }})"), how);
            assert!(said.contains("--allow-read="), "{said}");
        }
        for path in ["/proc/self/environ", "/proc/self/cwd/Cargo.toml", "/dev/stdin", "/etc/hostname"] {
            let said = t.run(&format!("pl.data.text('{path}')"), how);
            assert!(said.contains("is not in a directory that may be read"), "{said}");
        }
    }
}

/// A class that is a link to another place is an error, not a class less.
#[test]
fn a_folder_of_images_with_a_link_outside_is_refused_whole() {
    let t = Tree::new();
    std::fs::create_dir_all(t.path("recipe/set/dog")).unwrap();
    std::fs::copy(t.path("outside/folder/cat/a.jpg"), t.path("recipe/set/dog/a.jpg")).unwrap();
    let size = "print(pl.data.images('set', { pixels = 8 }):batch(1):batch_at(0).x:size(0))";
    assert_eq!(t.run(size, Resolution::Auto), "1\n");
    t.link("../../outside/folder/cat", "recipe/set/cat");
    let said = t.run(size, Resolution::Auto);
    assert!(said.contains("set/cat") && said.contains("leads out") && said.contains("--allow-read="), "{said}");
    let policy = Policy::builder().recipe(&t.path("recipe/r.lua")).allow_read(&t.path("outside")).unwrap().build();
    let (runtime, printed) = t.runtime_with(policy);
    let text = "local pl = require 'perilune' local s = pl.data.images('set', { pixels = 8 }) print(#s.classes, s:batch(2):batch_at(0).x:size(0))";
    t.file("recipe/r.lua", text);
    runtime.load(&t.path("recipe/r.lua")).unwrap();
    assert_eq!(printed.borrow().as_str(), "2\t2\n");
}

#[test]
fn suggestions_list_no_foreign_folder() {
    let t = Tree::new();
    t.link("../outside", "recipe/link");
    assert!(t.run("pl.data.csv('owm.csv')", Resolution::Auto).contains("did you mean \"own.csv\"?"));
    for path in ["OUT/weight.npy", "../outside/weight.npy", "link/weight.npy"] {
        let said = t.run(&format!("pl.load('{path}')"), Resolution::Auto);
        assert!(!said.contains("weights"), "{said}");
        let there = t.run(&format!("pl.load('{}')", path.replace("weight.", "weights.")), Resolution::Auto);
        assert_eq!(said.replace("weight.npy", ""), there.replace("weights.npy", ""), "whether it exists is not told");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn special_files_are_refused_at_once() {
    let t = Tree::new();
    for name in ["recipe/pipe.csv", "recipe/pipe.lua", "recipe/pipe.npy"] {
        let made = std::process::Command::new("mkfifo").arg(t.path(name)).status();
        assert!(made.unwrap().success());
    }
    let begun = std::time::Instant::now();
    for how in BOTH {
        for text in ["pl.data.csv('pipe.csv')", "pl.data.text('pipe.csv')", "pl.load('pipe.npy')", "require 'pipe'"] {
            let said = t.run(text, how);
            assert!(said.contains("is a FIFO; a regular file is needed"), "{text}: {said}");
        }
        assert!(t.run("pl.data.text('parts')", how).contains("is a directory"));
    }
    assert!(begun.elapsed().as_secs() < 5);
}

#[test]
fn modules_come_from_the_recipe_folder_only() {
    let t = Tree::new();
    t.file("recipe/parts/block.lua", "return 7");
    t.link("../../outside/secret.lua", "recipe/parts/evil.lua");
    t.link("/etc/hostname", "recipe/host.lua");
    for how in BOTH {
        assert_eq!(t.run("print(require 'parts.block')", how), "7\n");
        for name in ["parts.evil", "host"] {
            let said = t.run(&format!("require '{name}'"), how);
            assert!(said.contains("leads out of the directories that may be read"), "{said}");
        }
        for name in ["..outside.secret", "../outside/secret", "/etc/hostname"] {
            assert!(t.run(&format!("require '{name}'"), how).contains("is not a module name"));
        }
    }
}

#[test]
fn a_recipe_writes_nothing_that_is_not_granted() {
    let t = Tree::new();
    t.link("../outside/victim.npy", "recipe/link.npy");
    for path in ["w.npy", "OUT/w.npy", "link.npy", "../w.npy", "/tmp/perilune-w.npy"] {
        let said = t.run(&format!("pl.save('{path}', pl.ones {{ 2 }})"), Resolution::Auto);
        assert!(
            said.contains("may be written") && said.contains("--allow-write=") && said.contains("--set out=FILE"),
            "{said}"
        );
        let png = path.replace("npy", "png");
        let said = t.run(&format!("pl.data.save_png('{png}', pl.ones {{ 2, 2 }})"), Resolution::Auto);
        assert!(said.contains("may be written"), "{said}");
    }
    let policy =
        Policy::builder().allow_write(&t.path("recipe")).unwrap().allow_read(&t.path("recipe")).unwrap().build();
    let (runtime, _) = t.runtime_with(policy);
    let said = |text: &str| {
        let at = t.path("recipe").display().to_string();
        let text = format!("local pl = require 'perilune' {}", text.replace("AT", &at));
        runtime.load_text(&text, "@r.lua").map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(said("pl.save('AT/w.npy', pl.ones { 2 }) print(pl.load('AT/w.npy'):size(0))"), Ok(()));
    for (text, rule) in [
        ("pl.save('AT/link.npy', pl.ones { 2 })", "is a link"),
        ("pl.save('AT/r.lua', pl.ones { 2 })", "is none of"),
        ("pl.data.save_png('AT/.profile', pl.ones { 2, 2 })", "is none of .png"),
        ("pl.data.save_png('AT/w.npy', pl.ones { 2, 2 })", "is none of .png"),
        ("pl.save('AT/../w.npy', pl.ones { 2 })", "may be written"),
    ] {
        let e = said(text).unwrap_err();
        assert!(e.contains(rule), "{text}: {e}");
    }
    assert!(!t.path("outside/victim.npy").exists() && !t.path("w.npy").exists());
}

/// Carets, stacks, help and plans show loaded texts only, whatever a chunk is called.
#[test]
fn names_of_chunks_open_no_file_and_pass_for_nothing() {
    let t = Tree::new();
    for name in
        ["@OUT/secret.lua", "OUT/secret.lua", "=OUT/secret.lua", "@../outside/secret.lua", "@perilune/nn/init.lua"]
    {
        for text in [
            format!("load('error(1 + nil)', '{name}')()"),
            format!(
                "load('local pl = require [[perilune]] pl.ones {{ 2 }}:matmul(pl.ones {{ 3 }})', '{name}', 't', {{ require = require }})()"
            ),
            "error('OUT/secret.lua:1: made up', 0)".to_string(),
            format!("print(pl.help(load('return function() end', '{name}')()))"),
            format!(
                "local x = load('local pl = ... return pl.ones {{ 2 }} + 1', '{name}')(pl) print(pl.plan(x, {{ source = true }}))"
            ),
        ] {
            t.run(&text, Resolution::Auto);
        }
    }
    let said = t.run("load('\\nlocal x = nil + 1', '@perilune/nn/init.lua')()", Resolution::Auto);
    assert!(said.contains("load perilune/nn/init.lua:2:"), "it is the recipe's own: {said}");
    // A file of the recipe's own in a folder of that name is the recipe's, too.
    let (runtime, _) = t.runtime(Resolution::Auto);
    let e = runtime.load_text("local y = 1\nlocal x = nil + y", "@perilune/own.lua").map(drop).unwrap_err().to_string();
    assert!(e.contains("./perilune/own.lua:2: ") && e.contains("2 | local x = nil + y"), "{e}");
    // What was loaded is shown, also after the file has changed.
    t.file("recipe/r.lua", "local a = 1\nlocal b = nil + a");
    let e = runtime.load(&t.path("recipe/r.lua")).map(drop).unwrap_err().to_string();
    assert!(e.contains("2 | local b = nil + a"), "{e}");
}

/// The library's own functions are in no table, no module and no argument that a recipe can reach.
#[test]
fn native_is_out_of_reach() {
    let t = Tree::new();
    let said = t.run(
        r#"
        print(pcall(function() return pl.native end))
        print(rawget(pl, "native"))
        for _, call in ipairs {
          function() return require "perilune.data.native" end,
          function() return coroutine.wrap(require)("perilune.data.native") end,
          function() return select(2, pcall(require, "perilune.data.native")) end,
          function() return require "perilune.native" end,
        } do
          local ok, found = pcall(call)
          print(ok and type(found) == "table")
        end
        "#,
        Resolution::Auto,
    );
    assert!(said.contains("perilune has no 'native'") && said.matches("false\n").count() == 4, "{said}");
    // Functions that the library calls are replaced before its parts are loaded: none of them sees the table.
    let said = t.run(
        r#"
        local seen, type, rawget, pack = {}, type, rawget, table.pack
        local function watch(name, f, into)
          into[name] = function(...)
            for k = 1, 4 do
              local v = pack(...)[k]
              if type(v) == "table" and (rawget(v, "save_png") and rawget(v, "check_save")) then seen[#seen + 1] = name end
            end
            return f(...)
          end
        end
        local ipairs, pairs = ipairs, pairs
        for _, name in ipairs { "select", "setmetatable", "getmetatable", "rawget", "pairs", "ipairs", "next", "type", "tostring", "pcall", "assert" } do
          watch(name, _G[name], _G)
        end
        for _, lib in ipairs { table, string, math } do
          for name, f in pairs(lib) do if type(f) == "function" then watch(name, f, lib) end end
        end
        for _, part in ipairs { "nn", "optim", "data", "metrics", "train", "summary", "kernel", "tree" } do local _ = pl[part] end
        pl.data.csv "own.csv"
        local model = pl.nn.Linear(2, 2)
        local opt = pl.optim.AdamW(model, { lr = 0.1 })
        model(pl.ones { 1, 2 }):sum():backward()
        opt:step()
        print("seen", #seen)
        "#,
        Resolution::Auto,
    );
    assert_eq!(said, "seen\t0\n");
}

/// What a step saves is checked in a rehearsal and written by the step.
#[test]
fn a_rehearsal_writes_nothing() {
    let t = Tree::new();
    t.file(
        "recipe/r.lua",
        r#"local pl = require "perilune"
        local recipe = pl.recipe { name = "saves", params = { steps = 3 } }
        local value = pl.ones { 2 }
        function recipe.data() return { train = pl.data.tensors { x = pl.ones { 8, 2 } }:batch(4) } end
        function recipe.model() return pl.nn.Linear(2, 1) end
        function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 0.1 }) end
        function recipe.loss(model, batch)
          pl.save(PATH .. "/w.npy", value)
          return model(batch.x):mean()
        end
        return recipe"#
            .replace("PATH", &format!("{:?}", t.path("recipe").display().to_string()))
            .as_str(),
    );
    let policy = Policy::builder().allow_write(&t.path("recipe")).unwrap().build();
    let (runtime, _) = t.runtime_with(policy);
    let Ok(Loaded::Recipe(recipe)) = runtime.load(&t.path("recipe/r.lua")) else { panic!("a recipe") };
    let run = recipe.start(None, None, None).unwrap();
    run.dry_run().unwrap();
    assert!(!t.path("recipe/w.npy").exists());
    run.read(&run.step().unwrap()).unwrap();
    assert!(t.path("recipe/w.npy").exists());
    std::fs::remove_file(t.path("recipe/w.npy")).unwrap();
    run.dry_run().unwrap();
    assert!(!t.path("recipe/w.npy").exists());
}
