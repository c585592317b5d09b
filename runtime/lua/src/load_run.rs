//! `pl.load_run`: opens a run at one of its checkpoints, beside the recipe or script that runs.
//!
//! The recipe is the text that the run directory stores. It is loaded in the same Lua state, with the params of the checkpoint, its own
//! modules and its own folder; those of the caller are restored afterwards, and so are its random numbers. The policy of the command
//! decides whether the directory may be read.

use crate::boundary::recipe_line;
use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::options::fill;
use crate::recipe_files::{First, found, text_arg};
use crate::run::{ParamValue, Recipe, Run};
use crate::runtime::{Failed, Params, Place, is_recipe};
use crate::state_migration::{DroppedStates, Source, Taking};
use crate::{library_env, loader, no_tail_calls, source_text};
use mlua::{Function, Lua, Table, Value};
use perilune_core::HostTensor;
use perilune_policy::{Directory, Opener};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A run at one of its checkpoints, as plain data.
pub struct StoredRun {
    /// The recipe, as the run was given it.
    pub path: PathBuf,
    /// Its text, and those of the files that it requires.
    pub files: Vec<(PathBuf, String)>,
    /// Params as `--set` would give them.
    pub params: Vec<(String, String)>,
    pub seed: Option<i64>,
    pub precision: Option<String>,
    /// The length of the run, if the recipe has no param of that name.
    pub steps: Option<i64>,
    pub step: u64,
    /// Every State by its path in a run.
    pub states: Vec<(String, HostTensor)>,
    pub cursor: Vec<(String, ParamValue)>,
    /// Seed and step of its random numbers.
    pub rng: (u64, u32),
    /// The path of the checkpoint's record in the run directory; it has the hashes of all its files.
    pub record: PathBuf,
}

/// Reads a run in an open directory, at the checkpoint of a step or the last one. The error is a message.
pub type ReadRun = Rc<dyn Fn(&Directory, Option<u64>) -> Result<StoredRun, String>>;

/// Runs that are loaded inside each other at most: a recipe may load another run, and that one's recipe a third.
const MAX_DEPTH: usize = 8;

const OP: &str = "load_run";

/// `pl.load_run(dir, { at = step })`.
pub(crate) fn load_run(lua: &Lua, (dir, opts): (Value, Value)) -> mlua::Result<Table> {
    let host = host(lua)?;
    let fail = |message: String, hint: &str| errors::argument(&host, lua, OP, message, Some(hint.into()));
    let dir = text_arg(&host, lua, OP, "the run directory", &dir)?;
    let at = step_of(lua, opts)?;
    if host.engine.borrow().in_step() {
        return Err(fail(
            "a step is open, and the run's weights would be written in it".into(),
            "load the run before: at the top of the file, or in recipe.data or recipe.model",
        ));
    }
    let Some(read) = host.read_run.borrow().clone() else {
        return Err(fail("this program reads no runs".into(), "use it under perilune run or perilune repl"));
    };
    if host.loading.get() >= MAX_DEPTH {
        let message = format!("{dir} is loaded by a run that is loaded by another one, {MAX_DEPTH} deep");
        return Err(fail(message, "a run whose recipe loads itself never ends"));
    }
    let directory = found(&host, lua, OP, "run directory", &dir, First::Here, |policy, path| policy.directory(path))?;
    let stored = read(&directory, at).map_err(|text| {
        let (message, hint) = text.split_once("\n  hint: ").map_or((text.as_str(), None), |(m, h)| (m, Some(h)));
        errors::argument(&host, lua, OP, message.to_string(), hint.map(String::from))
    })?;
    if let Ok(file) = directory.open(&stored.record) {
        host.policy.record_file(&Path::new(&dir).join(&stored.record).to_string_lossy(), &file);
    }
    host.loading.set(host.loading.get() + 1);
    let made = apart(lua, &host, &stored, || build(lua, &host, directory.path(), &stored));
    host.loading.set(host.loading.get() - 1);
    Ok(made?.table)
}

/// Parses the option `at`.
fn step_of(lua: &Lua, opts: Value) -> mlua::Result<Option<u64>> {
    const NONE: i64 = -1;
    let defaults = lua.create_table()?;
    defaults.raw_set("at", NONE)?;
    let at: Value = fill(lua, OP, opts.clone(), &defaults)?.raw_get("at")?;
    let given = matches!(&opts, Value::Table(t) if !t.raw_get::<Value>("at")?.is_nil());
    match crate::args::as_int(&at) {
        _ if !given => Ok(None),
        Some(step) if step >= 0 => Ok(u64::try_from(step).ok()),
        _ => {
            let message = format!("at is {}; it must be the step of a checkpoint", crate::args::show(&at));
            Err(errors::argument(&host(lua)?, lua, OP, message, Some("perilune ckpt list RUN lists them".into())))
        }
    }
}

/// Calls `f` with the modules, the params and the folder of a stored run, and restores those of the caller, and its random numbers.
fn apart<T>(lua: &Lua, host: &Rc<Host>, stored: &StoredRun, f: impl FnOnce() -> mlua::Result<T>) -> mlua::Result<T> {
    let rng = host.engine.borrow().recorder.graph.rng;
    let own = loader::own(lua)?;
    let params = lua.app_data_ref::<Params>().map(|p| p.clone()).unwrap_or_default();
    let place = lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
    let folder = stored.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    loader::forget_own(lua)?;
    lua.set_app_data(Params { kept: stored.params.clone(), ..Params::default() });
    lua.set_app_data(Place {
        dir: folder.to_path_buf(),
        texts: stored.files.iter().cloned().collect(),
        ..Place::default()
    });
    let made = f();
    loader::forget_own(lua)?;
    loader::recall(lua, own)?;
    lua.set_app_data(params);
    lua.set_app_data(place);
    host.engine.borrow_mut().recorder.graph.rng = rng;
    made
}

/// Builds the run, and loads its States.
fn build(lua: &Lua, host: &Rc<Host>, dir: &Path, stored: &StoredRun) -> mlua::Result<Run> {
    let refuse = |message: String, hint: Option<String>| errors::argument(host, lua, OP, message, hint);
    let Some((file, text)) = stored.files.first() else {
        return Err(refuse(format!("{}: run.json: files: is empty", dir.display()), None));
    };
    // The text is that of the run directory, whatever the file says now.
    let shown = dir.join("recipe").join(file.file_name().unwrap_or_default());
    let name = loader::chunk_name(&shown);
    source_text::keep(&name, text);
    let text = if text.starts_with("#!") { format!("--{text}") } else { text.clone() };
    let table = match no_tail_calls::compile(lua, &text, &name, None)?.call::<Value>(())? {
        Value::Table(table) if is_recipe(&table) => table,
        _ => return Err(refuse(format!("{} returns no recipe", shown.display()), None)),
    };
    let recipe = Recipe { table: table.clone(), lua: lua.clone(), host: host.clone() };
    let has_steps = lua.app_data_ref::<Params>().is_some_and(|p| p.names.iter().any(|n| n == "steps"));
    let failed = |e: Failed| match e {
        Failed::Usage(text) => refuse(text, None),
        Failed::Recipe(e) => recipe_line::raised(lua, format!("{OP}: {}", e.message), e.hint, e.cause),
    };
    if let Some(steps) = stored.steps.filter(|_| !has_steps) {
        recipe.set_steps(steps).map_err(failed)?;
    }
    let build: Function = library_env::function(lua, "require")?.call("perilune.train.build")?;
    let (params, options) = (table.get::<Table>("params")?, lua.create_table()?);
    options.raw_set("seed", stored.seed)?;
    options.raw_set("precision", stored.precision.clone())?;
    options.raw_set("beside", true)?;
    let run =
        Run { table: build.call((&table, params, options))?, recipe: table, lua: lua.clone(), host: host.clone() };
    run.list_states().map_err(failed)?;
    let mut states = stored.states.clone();
    run.add_counts(&mut states).map_err(failed)?;
    let source = Source::Values { states: &states, cursor: &stored.cursor };
    let taken = run.take_over(source, &DroppedStates::default(), Taking::Exact).map_err(failed)?;
    if !taken.exact() {
        let message = format!(
            "the checkpoint of step {} in {} does not fit its recipe: {}",
            stored.step,
            dir.display(),
            taken.misfit()
        );
        return Err(refuse(message, None));
    }
    Ok(run)
}
