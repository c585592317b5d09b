//! Runs Lua files on the CPU (or the device named by `PERILUNE_DEVICE`), and compares golden texts.
//!
//! Tests run in the folder `tests/`; paths in messages are relative to the folder of the file that is run, so golden texts
//! contain no path of a machine. `PERILUNE_BLESS=1` rewrites golden files instead of comparing.

use perilune_lua::{Failed, Loaded, Recipe, Runtime, RuntimeOptions};
use perilune_plan::Backend;
use perilune_policy::Policy;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// A runtime that collects printed output.
pub struct Script {
    pub runtime: Runtime,
    pub printed: Rc<RefCell<Vec<String>>>,
}

/// What scripts of the tests may open: reads in the repository, writes in `tests/` and temporary directories, and the params.
pub fn policy(params: &[(String, String)]) -> Arc<Policy> {
    let mut policy = Policy::builder();
    for dir in [Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), std::env::temp_dir()] {
        policy = policy.allow_read(&dir).unwrap();
    }
    for dir in [PathBuf::from(env!("CARGO_MANIFEST_DIR")), std::env::temp_dir()] {
        policy = policy.allow_write(&dir).unwrap();
    }
    params.iter().fold(policy, |policy, (_, value)| policy.argument(value)).build()
}

/// Creates a runtime; `params` are those of `--set`.
pub fn script(threads: usize, params: &[(&str, &str)]) -> Result<Script, Failed> {
    script_on(crate::harness::device(threads), params)
}

/// Creates a runtime on a device.
pub fn script_on(backend: Arc<dyn Backend>, params: &[(&str, &str)]) -> Result<Script, Failed> {
    let printed: Rc<RefCell<Vec<String>>> = Rc::default();
    let sink = printed.clone();
    let params: Vec<_> = params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let policy = policy(&params);
    let runtime = Runtime::new(RuntimeOptions {
        backend,
        params,
        policy,
        strict: true,
        print: Rc::new(move |line| sink.borrow_mut().push(line.to_string())),
    })?;
    Ok(Script { runtime, printed })
}

impl Script {
    /// Returns the output so far.
    pub fn output(&self) -> String {
        self.printed.borrow().iter().map(|line| format!("{line}\n")).collect()
    }

    /// Loads the recipe in a file; fails if it is a script.
    pub fn recipe(&self, path: &Path) -> Result<Recipe, Failed> {
        match self.runtime.load(path)? {
            Loaded::Recipe(recipe) => Ok(recipe),
            Loaded::Script => Err(Failed::Usage(format!("{} is no recipe", path.display()))),
        }
    }
}

/// Trains a few steps, evaluates and finishes, as `perilune run` would.
pub fn train(recipe: &Recipe, steps: u64) -> Result<(), Failed> {
    let run = recipe.start(None, None, None)?;
    while !run.finished()? && run.count() < steps {
        run.read(&run.step()?)?;
    }
    for split in run.splits() {
        if split != "train" {
            run.evaluate(&split)?;
        }
    }
    run.finish()
}

/// Returns whether golden files are to be rewritten.
pub fn blessing() -> bool {
    std::env::var_os("PERILUNE_BLESS").is_some_and(|v| v == "1")
}

/// Compares with a golden file, or rewrites it. The error shows both texts.
pub fn golden(path: &Path, text: &str) -> Result<(), String> {
    if blessing() {
        return std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()));
    }
    let want =
        std::fs::read_to_string(path).map_err(|e| format!("{}: {e} (PERILUNE_BLESS=1 writes it)", path.display()))?;
    if want == text {
        return Ok(());
    }
    Err(format!("{} differs (PERILUNE_BLESS=1 rewrites it)\n--- golden\n{want}\n--- now\n{text}", path.display()))
}

/// Lists the files of a folder with that extension, sorted.
pub fn files(dir: &Path, extension: &str) -> Vec<std::path::PathBuf> {
    let mut out: Vec<_> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == extension))
        .collect();
    out.sort();
    out
}
