//! Opens a Lua state with an engine, and loads recipes and scripts into it.

use crate::errors::RecipeError;
use crate::host::Host;
use crate::options::BadParam;
use crate::run::Recipe;
use crate::{library_env, loader, no_tail_calls, source_text};
use mlua::{Function, Lua, Table, Value};
use perilune_core::source_loc::SourceLoc;
use perilune_engine::Engine;
use perilune_engine::profile::Ceiling;
use perilune_plan::Backend;
use perilune_policy::Policy;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// The recipe's folder, and the files that it has required.
#[derive(Clone, Debug)]
pub struct Place {
    pub dir: PathBuf,
    /// The required files with their loaded texts.
    pub required: Vec<(PathBuf, String)>,
    /// Required files that do not exist.
    pub missing: Vec<PathBuf>,
    /// Files whose texts replace those on the disk.
    pub texts: BTreeMap<PathBuf, String>,
}

impl Place {
    /// Formats a path relative to the recipe's folder if possible.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        if self.dir == Path::new(".") { path.as_ref().to_path_buf() } else { self.dir.join(path) }
    }
}

impl Default for Place {
    fn default() -> Place {
        Place { dir: PathBuf::from("."), required: Vec::new(), missing: Vec::new(), texts: BTreeMap::new() }
    }
}

/// `--set key=value`, and whether it was used.
#[derive(Clone, Debug, Default)]
pub struct Params {
    pub given: Vec<(String, String)>,
    /// `--steps`, `--seed`: override a param of that name; without such a param they are not an error.
    pub offered: Vec<(String, String)>,
    /// Values of a resumed run: each applies until an edit changes its default.
    pub kept: Vec<(String, String)>,
    /// The defaults that `kept` belongs to, as text.
    pub baseline: BTreeMap<String, String>,
    /// The defaults of the loaded file, as text.
    pub defaults: BTreeMap<String, String>,
    /// The line of the call of `pl.recipe`.
    pub recipe: Option<SourceLoc>,
    /// Whether the recipe has params.
    pub used: bool,
    pub names: Vec<String>,
}

/// The options of a runtime.
pub struct RuntimeOptions {
    pub backend: Arc<dyn Backend>,
    pub params: Vec<(String, String)>,
    /// What the recipe may open; [`Policy::closed`] for nothing.
    pub policy: Arc<Policy>,
    /// Whether undefined globals are errors (recipes) or allowed (the prompt).
    pub strict: bool,
    /// The sink of `print`.
    pub print: Rc<dyn Fn(&str)>,
}

/// The result of loading a file.
pub enum Loaded {
    /// A table made by `pl.recipe`.
    Recipe(Recipe),
    /// A script, which has already run.
    Script,
}

/// A failure caused by the recipe or by the command line.
#[derive(Debug)]
pub enum Failed {
    Recipe(Box<RecipeError>),
    /// A wrong `--set` or `--strict-shards`.
    Usage(String),
}

impl From<mlua::Error> for Failed {
    fn from(e: mlua::Error) -> Failed {
        let mut at = &e;
        loop {
            match at {
                mlua::Error::CallbackError { cause, .. } | mlua::Error::WithContext { cause, .. } => at = cause,
                mlua::Error::ExternalError(x) => {
                    if let Some(bad) = x.downcast_ref::<BadParam>() {
                        return Failed::Usage(bad.0.clone());
                    }
                    break;
                }
                _ => break,
            }
        }
        Failed::Recipe(Box::new(RecipeError::new(&e)))
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failed::Recipe(e) => e.fmt(f),
            Failed::Usage(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Failed {}

/// The loaded state of a runtime: modules of the recipe, params, sources of files, contents of the library's tables.
pub struct Memory {
    own: Vec<(String, Value)>,
    library: Vec<(Table, Table)>,
    params: Params,
    place: Place,
    texts: source_text::Texts,
}

pub struct Runtime {
    lua: Lua,
    host: Rc<Host>,
}

impl Runtime {
    pub fn new(options: RuntimeOptions) -> Result<Runtime, Failed> {
        crate::boundary::panics::install_hook();
        let host = Host::new(Engine::new(options.backend), options.policy);
        host.engine.borrow_mut().diagnostics.source_line = Some(source_text::line);
        let lua = loader::new_lua()?;
        lua.set_app_data(host.clone());
        lua.set_app_data(Place::default());
        lua.set_app_data(Params { given: options.params, ..Params::default() });
        let print = options.print;
        let tostring: Function = lua.globals().get("tostring")?;
        lua.globals().set(
            "print",
            crate::boundary::Guarded(&lua).create_function(move |_, args: mlua::MultiValue| {
                let mut parts = Vec::new();
                for v in args {
                    parts.push(tostring.call::<mlua::LuaString>(v)?.to_string_lossy());
                }
                print(&parts.join("\t"));
                Ok(())
            })?,
        )?;
        loader::install(&lua, options.strict)?;
        Ok(Runtime { lua, host })
    }

    /// Limits the memory of Lua values. The default is a quarter of the machine's memory, from 256 MiB to 8 GiB.
    pub fn limit_lua_memory(&self, bytes: usize) -> Result<(), Failed> {
        Ok(crate::boundary::memory_limit::set(&self.lua, bytes)?)
    }

    pub fn lua(&self) -> &Lua {
        &self.lua
    }

    pub fn host(&self) -> &Rc<Host> {
        &self.host
    }

    /// What the recipe may open.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.host.policy
    }

    /// Sets values of optional params (`--steps`, `--seed`), before loading.
    pub fn offer_params(&self, offered: Vec<(String, String)>) {
        if let Some(mut params) = self.lua.app_data_mut::<Params>() {
            params.offered = offered;
        }
    }

    /// Sets values that params keep unless the file's default differs from `baseline`, before loading.
    pub fn keep_params(&self, kept: Vec<(String, String)>, baseline: BTreeMap<String, String>) {
        if let Some(mut params) = self.lua.app_data_mut::<Params>() {
            (params.kept, params.baseline) = (kept, baseline);
        }
    }

    /// Returns the params of the loaded file.
    pub fn params(&self) -> Params {
        self.lua.app_data_ref::<Params>().map(|p| p.clone()).unwrap_or_default()
    }

    /// Returns the files that the recipe has required, with their loaded texts.
    pub fn required(&self) -> Vec<(PathBuf, String)> {
        self.lua.app_data_ref::<Place>().map(|p| p.required.clone()).unwrap_or_default()
    }

    /// Returns required files that do not exist.
    pub fn missing(&self) -> Vec<PathBuf> {
        self.lua.app_data_ref::<Place>().map(|p| p.missing.clone()).unwrap_or_default()
    }

    /// Sets the directory that paths and `require` start from.
    pub fn set_place(&self, dir: &Path) {
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir.to_path_buf() };
        let texts = self.lua.app_data_ref::<Place>().map(|p| p.texts.clone()).unwrap_or_default();
        self.lua.set_app_data(Place { dir, texts, ..Place::default() });
    }

    /// Replaces the texts of these required files, instead of reading them from the disk.
    pub fn set_texts(&self, files: &[(PathBuf, String)]) {
        let place = self.lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
        self.lua.set_app_data(Place { texts: files.iter().cloned().collect(), ..place });
    }

    /// Loads and runs a file. Paths in messages are as given.
    pub fn load(&self, path: &Path) -> Result<Loaded, Failed> {
        let text = loader::text_of(path)?;
        self.set_place(path.parent().unwrap_or(Path::new(".")));
        self.load_text(&text, &loader::chunk_name(path))
    }

    /// Loads a file without running a training loop in it: the first step that a file takes before it calls `pl.recipe` ends it, with
    /// [`crate::Cause::FirstStep`]. A recipe takes none.
    pub fn until_first_step<T>(&self, f: impl FnOnce() -> T) -> T {
        self.host.first_step_only.set(true);
        let out = f();
        self.host.first_step_only.set(false);
        out
    }

    /// Saves the loaded state, to be restored later.
    pub fn remember(&self) -> Result<Memory, Failed> {
        let place = self.lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
        let (own, library) = (loader::own(&self.lua)?, loader::library(&self.lua)?);
        Ok(Memory { own, library, params: self.params(), place, texts: source_text::all() })
    }

    /// Restores a saved state.
    pub fn recall(&self, memory: Memory) -> Result<(), Failed> {
        loader::forget_own(&self.lua)?;
        loader::recall(&self.lua, memory.own)?;
        loader::restore(&self.lua, memory.library)?;
        self.lua.set_app_data(memory.params);
        self.lua.set_app_data(memory.place);
        source_text::restore(memory.texts);
        Ok(())
    }

    /// Loads a changed recipe: its files are loaded again, the library's tables are reset, and the engine with its
    /// plans and States stays. After an error the caller restores the previous state.
    pub fn reload(&self, text: &str, name: &str) -> Result<Recipe, Failed> {
        let place = self.lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
        let params = self.params();
        loader::forget_own(&self.lua)?;
        loader::renew(&self.lua)?;
        let Params { given, offered, kept, baseline, .. } = params;
        self.lua.set_app_data(Params { given, offered, kept, baseline, ..Params::default() });
        self.lua.set_app_data(Place { required: Vec::new(), missing: Vec::new(), ..place });
        match self.load_text(text, name)? {
            Loaded::Recipe(recipe) => Ok(recipe),
            Loaded::Script => {
                let file = name.trim_start_matches(['@', '=']);
                let hint = Some("end it with `return recipe`".into());
                let message = format!("{file} returns no recipe any more");
                Err(Failed::Recipe(Box::new(RecipeError::at(file, None, message, hint))))
            }
        }
    }

    /// Runs `f` with interrupts enabled, also in Lua code. By default Lua does not check them, which costs time.
    pub fn interruptible<T>(&self, f: impl FnOnce() -> T) -> Result<T, Failed> {
        crate::console::interrupt::listen(&self.lua)?;
        let out = f();
        // A prompt keeps interrupts enabled.
        if self.host.scratch.borrow().is_none() {
            self.lua.remove_global_hook();
        }
        Ok(out)
    }

    /// Runs source text under a chunk name (`@file` or `=name`).
    pub fn load_text(&self, text: &str, name: &str) -> Result<Loaded, Failed> {
        let name = &loader::own_name(name);
        source_text::keep(name, text);
        let text = if text.starts_with("#!") { format!("--{text}") } else { text.to_string() };
        let compiled = match no_tail_calls::compile(&self.lua, &format!("return {text}"), name, None) {
            Ok(expression) if !name.starts_with('@') => expression,
            _ => no_tail_calls::compile(&self.lua, &text, name, None)?,
        };
        let value: Value = compiled.call(())?;
        match value {
            Value::Table(t) if is_recipe(&t) => {
                Ok(Loaded::Recipe(Recipe { table: t, lua: self.lua.clone(), host: self.host.clone() }))
            }
            other => {
                let params = self.params();
                self.refuse_lost_recipe(&other, &params, name)?;
                if !params.used
                    && let Some((key, _)) = params.given.first()
                {
                    return Err(Failed::Usage(format!(
                        "--set {key}: the script has no params (it calls neither pl.params nor pl.recipe)"
                    )));
                }
                Ok(Loaded::Script)
            }
        }
    }
}

impl Runtime {
    /// Checks the result of a file: one that does not return its recipe, or returns a table not made by `pl.recipe`, would seem
    /// to run and do nothing.
    fn refuse_lost_recipe(&self, value: &Value, params: &Params, chunk: &str) -> Result<(), Failed> {
        let part = |t: &Table, name: &str| t.raw_get::<Value>(name).is_ok_and(|v| v.is_function());
        let (message, hint) = match value {
            Value::Table(t) if ["data", "model", "loss", "step"].iter().any(|name| part(t, name)) => (
                "returns a plain table, not a recipe",
                "begin with `local recipe = pl.recipe { name = \"…\", params = { … } }` and return that",
            ),
            _ if params.recipe.is_some() && self.host.engine.borrow().stats().runs == 0 => {
                ("makes a recipe but does not return it", "end it with `return recipe`")
            }
            _ => return Ok(()),
        };
        let file = chunk.trim_start_matches(['@', '=']);
        Err(Failed::Recipe(Box::new(RecipeError::at(file, None, format!("{file} {message}"), Some(hint.into())))))
    }
}

pub(crate) fn is_recipe(t: &Table) -> bool {
    t.metatable().and_then(|m| m.raw_get::<String>("__name").ok()).is_some_and(|n| n == "perilune.recipe")
}

impl Runtime {
    /// Measures the roofline of the device, with products in a run's precision: `stdlib/roofline.lua`.
    pub fn ceiling(&self, precision: &str) -> Result<Ceiling, Failed> {
        let dtype = match precision {
            // With fp8 only products of some layers are fp8; the rest is bf16.
            "bf16" | "fp8" => "bf16",
            "fp16" => "f16",
            "tf32" => "tf32",
            _ => "f32",
        };
        let require = library_env::function(&self.lua, "require")?;
        let measure: Function = require.call("perilune.roofline")?;
        let found: Table = measure.call(dtype)?;
        Ok(Ceiling { bytes: found.get("bytes")?, flops: found.get("flops")? })
    }
}
