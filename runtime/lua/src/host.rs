//! Defines the state shared by all bindings: the engine, the queue of dropped handles, and the current recipe line.

use crate::errors::{self, Raise};
use crate::tensor::{Ref, Tensor};
use mlua::Lua;
use perilune_core::Interrupt;
use perilune_core::error::Error;
use perilune_core::graph::NodeId;
use perilune_core::modes::Modes;
use perilune_core::source_loc::SourceLoc;
use perilune_engine::{Engine, Fault};
use perilune_policy::Policy;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// The prefix of chunk names of the runtime. No file of a recipe and no text that it loads has such a name (`loader.rs`).
pub const INTERNAL: &str = "@perilune/";

/// Bytes of new values after which a collection is forced, since Lua's collector counts handles, not memory.
/// Small enough to reuse dropped buffers while they are still mapped.
const COLLECT_BYTES: usize = 32 << 20;
/// The number of calls between checks of allocated memory.
const LOOK_EVERY: u32 = 4096;

/// Returns in all processes of a job the text that a function makes in the first one. The first argument names it in messages.
pub type ShareText = Rc<dyn Fn(&str, &dyn Fn() -> String) -> perilune_core::error::Result<String>>;

/// Says that this process fails, before it cleans up; returns whether clean-up may compute anything.
pub type FailsHook = Rc<dyn Fn(&crate::runtime::Failed) -> bool>;

pub struct Host {
    pub engine: RefCell<Engine>,
    /// What the recipe may open.
    pub policy: Arc<Policy>,
    /// The engine's interrupt, which also stops Lua code.
    pub interrupt: Interrupt,
    /// Handles dropped by Lua's collector. It runs inside any Lua call, so they wait here until the engine is free.
    dropped: RefCell<Vec<Ref>>,
    /// A cache of the last source location, since most lines record several ops.
    last_site: Cell<(usize, u32, SourceLoc)>,
    files: RefCell<HashMap<usize, (String, u32)>>,
    calls: Cell<u32>,
    /// Backward functions of custom ops of this generation, by payload.
    pub customs: RefCell<HashMap<u64, crate::grads::Custom>>,
    pub next_custom: Cell<u64>,
    /// The call of the custom function whose backward runs: the line of ops that the standard library records in it.
    pub called_at: Cell<SourceLoc>,
    /// The handler of `pl.breakpoint()`; without one it does nothing.
    pub pause: RefCell<Option<crate::console::Pause>>,
    /// Shows plans with the source of a device that is not there.
    pub offline: RefCell<Option<Rc<crate::offline_source::OfflineSource>>>,
    /// Opens the mesh that a recipe asks for; `None` if the devices are chosen already.
    pub open_mesh: RefCell<Option<crate::mesh::OpenMesh>>,
    /// Shares texts of the first process of a job with the others; `None` with one process.
    pub share: RefCell<Option<ShareText>>,
    /// Tells the other processes of a job of an error; `None` with one process.
    pub fails: RefCell<Option<FailsHook>>,
    /// What decides the strict shards of a run.
    pub strict_shards: Cell<crate::mesh::StrictShards>,
    /// What `run:log` is given, and the run directory.
    pub observed: crate::observers::Observed,
    /// Keeps the run of a plain script; `None` where there is no command to keep it.
    pub script: RefCell<Option<Rc<dyn crate::script_run::ScriptDriver>>>,
    /// Whether the first step of a plain script ends it.
    pub first_step_only: Cell<bool>,
    /// Reads the runs of `pl.load_run`; `None` where no crate above this one does.
    pub read_run: RefCell<Option<crate::load_run::ReadRun>>,
    /// How many calls of `pl.load_run` are open.
    pub loading: Cell<usize>,
    /// The globals defined at breakpoints, shared by all of them.
    pub scratch: RefCell<Option<mlua::Table>>,
}

impl Host {
    /// Runs `f` under graph modes that `set` changes, and restores them, also after an error.
    pub fn with_modes<T>(&self, set: impl FnOnce(&mut Modes), f: impl FnOnce() -> T) -> T {
        let before = {
            let modes = &mut self.engine.borrow_mut().recorder.graph.modes;
            let before = *modes;
            set(modes);
            before
        };
        let out = f();
        let modes = &mut self.engine.borrow_mut().recorder.graph.modes;
        // The line is that of the last recorded call, in any scope.
        *modes = Modes { loc: modes.loc, ..before };
        out
    }

    pub fn new(engine: Engine, policy: Arc<Policy>) -> Rc<Host> {
        Rc::new(Host {
            interrupt: engine.interrupt.clone(),
            engine: RefCell::new(engine),
            policy,
            dropped: RefCell::default(),
            last_site: Cell::new((0, 0, SourceLoc::NONE)),
            files: RefCell::default(),
            calls: Cell::new(0),
            customs: RefCell::default(),
            next_custom: Cell::new(1),
            called_at: Cell::new(SourceLoc::NONE),
            pause: RefCell::default(),
            share: RefCell::default(),
            fails: RefCell::default(),
            offline: RefCell::default(),
            open_mesh: RefCell::default(),
            strict_shards: Cell::default(),
            observed: Default::default(),
            script: RefCell::default(),
            first_step_only: Cell::new(false),
            read_run: RefCell::default(),
            loading: Cell::default(),
            scratch: RefCell::default(),
        })
    }

    /// Keeps the mesh and the strict shards from now on: a version of the recipe that asks for others is refused. `zero` and `bucket` may
    /// change.
    pub fn fix_mesh(&self) {
        if self.strict_shards.get() == crate::mesh::StrictShards::Recipe {
            self.strict_shards.set(crate::mesh::StrictShards::Running);
        }
        if let Some(open) = &mut *self.open_mesh.borrow_mut() {
            let fixed = self.engine.borrow().mesh();
            let before = open.clone();
            *open = Rc::new(move |text, now| match perilune_dist::MeshOptions::parse(text)?.mesh == fixed {
                true => before(text, now),
                false => {
                    Err(Error::argument("recipe.mesh", format!("the mesh of a running job is {fixed}, not {text}"))
                        .hint("stop the run and continue it with --resume, which may use another mesh"))
                }
            });
        }
    }

    /// Queues a dropped handle.
    pub fn drop_ref(&self, r: Ref) {
        self.dropped.borrow_mut().push(r);
    }

    /// Passes dropped handles to the engine.
    pub fn settle(&self) {
        let mut dropped = self.dropped.borrow_mut();
        if dropped.is_empty() {
            return;
        }
        let mut engine = self.engine.borrow_mut();
        for r in dropped.drain(..) {
            match r {
                Ref::Node(h) => engine.recorder.release(h),
                Ref::State(s) => engine.release_state(s),
            }
        }
    }

    /// Returns the current recipe line: that of the innermost frame outside the runtime's own Lua.
    pub fn loc(&self, lua: &Lua) -> SourceLoc {
        let mut first = None;
        for level in 1..32 {
            let found = lua.inspect_stack(level, |d| {
                let source = d.source();
                let name = source.source.as_deref()?;
                if name.starts_with(INTERNAL) || name.starts_with("=__mlua") || !name.starts_with(['@', '=']) {
                    return None;
                }
                let line = d.current_line()? as u32;
                let key = name.as_ptr() as usize;
                let (last_key, last_line, last) = self.last_site.get();
                if key == last_key && line == last_line {
                    return Some(last);
                }
                let mut engine = self.engine.borrow_mut();
                let mut files = self.files.borrow_mut();
                let file = match files.get(&key) {
                    Some((known, file)) if known == name => *file,
                    _ => {
                        let file = engine.recorder.source_map.file(&name[1..]);
                        files.insert(key, (name.to_string(), file));
                        file
                    }
                };
                let loc = engine.recorder.source_map.intern(file, line);
                self.last_site.set((key, line, loc));
                Some(loc)
            });
            match found {
                None => break,
                Some(Some(loc)) => {
                    first = Some(loc);
                    break;
                }
                Some(None) => {}
            }
        }
        first.unwrap_or(self.called_at.get())
    }

    /// Runs `f` on the engine with the current recipe line set; an error becomes a Lua error that names it.
    pub fn record<T>(self: &Rc<Host>, lua: &Lua, f: impl FnOnce(&mut Engine) -> Result<T, Fault>) -> mlua::Result<T> {
        let loc = self.loc(lua);
        let calls = self.calls.get().wrapping_add(1);
        self.calls.set(calls);
        if calls.is_multiple_of(LOOK_EVERY) || self.engine.borrow().is_crowded() {
            self.look(lua)?;
        }
        let result = {
            let mut engine = self.engine.borrow_mut();
            engine.recorder.graph.modes.loc = loc;
            f(&mut engine)
        };
        result.map_err(|fault| errors::raise(self, Raise::Fault(fault, loc)))
    }

    /// Makes a Lua tensor for a node of the current generation.
    pub fn tensor(self: &Rc<Host>, id: NodeId) -> Tensor {
        let handle = self.engine.borrow_mut().recorder.handle(id);
        Tensor::new(self, Ref::Node(handle))
    }

    /// Collects garbage, because dropped tensors keep memory that Lua does not count.
    fn look(self: &Rc<Host>, lua: &Lua) -> mlua::Result<()> {
        self.settle();
        self.collect_if_due(lua)?;
        if self.engine.borrow().wants_flush() {
            self.flush(lua)?;
        } else if self.engine.borrow().is_crowded() {
            self.collect(lua)?;
            self.engine.borrow_mut().release_unreachable();
        }
        Ok(())
    }

    /// Collects once the script has made enough bytes of new values.
    pub fn collect_if_due(&self, lua: &Lua) -> mlua::Result<()> {
        if self.engine.borrow().recorder.fresh_bytes > COLLECT_BYTES {
            self.collect(lua)?;
        }
        Ok(())
    }

    /// Collects before a step that may run out of memory because of unreachable tensors.
    pub fn collect_if_tight(&self, lua: &Lua) -> mlua::Result<()> {
        let tight = {
            let engine = self.engine.borrow();
            let m = engine.backend().memory();
            m.limit.is_some_and(|l| m.allocated > l / 4 * 3 && engine.recorder.fresh_bytes > l / 64)
        };
        if tight { self.collect(lua) } else { Ok(()) }
    }

    /// Runs a full collection and passes the freed handles to the engine.
    pub fn collect(&self, lua: &Lua) -> mlua::Result<()> {
        lua.gc_collect()?;
        self.settle();
        self.engine.borrow_mut().recorder.fresh_bytes = 0;
        Ok(())
    }

    /// Evaluates the tensors that the script can still reach and starts a new generation.
    pub fn flush(self: &Rc<Host>, lua: &Lua) -> mlua::Result<()> {
        self.collect(lua)?;
        let loc = self.loc(lua);
        let result = self.engine.borrow_mut().flush();
        self.customs.borrow_mut().clear();
        result.map_err(|fault| errors::raise(self, Raise::Fault(fault, loc)))
    }

    /// Takes the engine's queued notices (plan misses, plans shown), for the caller to print.
    pub fn take_notices(&self) -> Vec<String> {
        let mut engine = self.engine.borrow_mut();
        let mut out = engine.diagnostics.plans_shown.take();
        out.extend(engine.diagnostics.notices.take());
        out
    }
}
