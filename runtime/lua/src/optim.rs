//! Binds what optimizers need of the runtime. Parameters and gradients stay on this side as lists, and one call processes all of
//! them: a step of a small model is bound by the host, and most of the host's time was spent on calls and handles of single
//! parameters.

use crate::args::{Operand, show};
use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::tensor::{Ref, Tensor};
use mlua::{FromLua, Lua, MetaMethod, Table, UserData, UserDataMethods, UserDataRef, Value};
use perilune_core::DType;
use perilune_core::graph::{NodeId, Number};
use perilune_core::ops::elementwise::{CLAMP, MUL};
use perilune_core::ops::join::STACK;
use perilune_core::ops::optim::{ADAMW_UPDATE, AdamW};
use perilune_core::ops::reduce::SUM;
use perilune_core::ops::{Args, Value as Arg};
use perilune_core::source_loc::SourceLoc;
use perilune_engine::{Engine, Fault, Handle, StateId};
use smallvec::SmallVec;
use std::rc::Rc;

/// States that an optimizer passes to the runtime at every step. A step that read them from Lua would touch two tables and several
/// handles for each parameter, which for a deep model are no longer in the cache.
pub struct StateList {
    host: Rc<Host>,
    ids: Vec<StateId>,
}

impl Drop for StateList {
    fn drop(&mut self) {
        self.ids.iter().for_each(|id| self.host.drop_ref(Ref::State(*id)));
    }
}

impl UserData for StateList {}

/// The gradients of one step, in order of the parameters that have one, as counted handles.
pub struct GradientList {
    host: Rc<Host>,
    handles: Vec<Handle>,
}

impl Drop for GradientList {
    fn drop(&mut self) {
        self.handles.iter().for_each(|h| self.host.drop_ref(Ref::Node(*h)));
    }
}

impl GradientList {
    /// Replaces each gradient by what `f` records of it.
    fn map(&mut self, lua: &Lua, mut f: impl FnMut(&mut Engine, NodeId) -> Result<NodeId, Fault>) -> mlua::Result<()> {
        let handles = &mut self.handles;
        self.host.record(lua, |engine| {
            for h in handles {
                let g = engine.recorder.node(*h)?;
                let new = f(engine, g)?;
                let before = std::mem::replace(h, engine.recorder.handle(new));
                engine.recorder.release(before);
            }
            Ok(())
        })
    }

    /// Returns the place of gradient `k`, counted from 1.
    fn at(&self, k: usize) -> mlua::Result<usize> {
        let at = k.checked_sub(1).filter(|at| *at < self.handles.len());
        at.ok_or_else(|| mlua::Error::runtime("this is a bug: no such gradient"))
    }
}

impl UserData for GradientList {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_meta_method(MetaMethod::Len, |_, this, ()| Ok(this.handles.len()));
        methods.add_method("get", |_, this, k: usize| {
            let h = this.handles[this.at(k)?];
            this.host.engine.borrow_mut().recorder.retain(h);
            Ok(Tensor::new(&this.host, Ref::Node(h)))
        });
        methods.add_method_mut("set", |lua, this, (k, g): (usize, Operand)| {
            let at = this.at(k)?;
            let host = this.host.clone();
            host.record(lua, |engine| {
                let g = g.node(engine, DType::F32)?;
                let before = std::mem::replace(&mut this.handles[at], engine.recorder.handle(g));
                engine.recorder.release(before);
                Ok(())
            })
        });
        methods.add_method("copy", |_, this, ()| {
            let mut engine = this.host.engine.borrow_mut();
            this.handles.iter().for_each(|h| engine.recorder.retain(*h));
            Ok(GradientList { host: this.host.clone(), handles: this.handles.clone() })
        });
        // `g * factor` for each.
        methods.add_method_mut("scale", |lua, this, factor: Operand| {
            this.map(lua, |engine, g| {
                let args = Args::new(&MUL, [Arg::Tensor(g), factor.value(engine)?]);
                Ok(engine.call(&MUL, &args)?[0])
            })
        });
        // `g:clamp(-most, most)` for each.
        methods.add_method_mut("clamp", |lua, this, most: f64| {
            let bound = |n| Arg::Number(Number::Float(n));
            this.map(lua, |engine, g| {
                let args = Args::new(&CLAMP, [Arg::Tensor(g), bound(-most), bound(most)]);
                Ok(engine.call(&CLAMP, &args)?[0])
            })
        });
        // The sum of squares of each, stacked.
        methods.add_method("squares", |lua, this, ()| {
            let id = this.host.record(lua, |engine| {
                let mut parts = Vec::with_capacity(this.handles.len());
                for h in &this.handles {
                    let g = Arg::Tensor(engine.recorder.node(*h)?);
                    let square = engine.call(&MUL, &Args::new(&MUL, [g.clone(), g]))?[0];
                    let sum = Args::new(&SUM, [Arg::Tensor(square), Arg::None, Arg::Bool(false)]);
                    parts.push(engine.call(&SUM, &sum)?[0]);
                }
                let all = Args::new(&STACK, [Arg::Tensors(parts), Arg::Number(Number::Int(0))]);
                Ok(engine.call(&STACK, &all)?[0])
            })?;
            Ok(this.host.tensor(id))
        });
        // Drops the handles now, not when the list is collected.
        methods.add_method_mut("free", |_, this, ()| {
            let mut engine = this.host.engine.borrow_mut();
            this.handles.drain(..).for_each(|h| engine.recorder.release(h));
            Ok(())
        });
    }
}

fn state(host: &Rc<Host>, lua: &Lua, op: &str, v: &Value) -> mlua::Result<StateId> {
    match v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| t.what)) {
        Some(Ref::State(s)) => Ok(s),
        _ => Err(errors::argument(host, lua, op, format!("it needs a State, not {}", show(v)), None)),
    }
}

/// `native.state_list(states)`: the States as one value.
fn state_list(lua: &Lua, states: Table) -> mlua::Result<StateList> {
    let host = host(lua)?;
    let mut ids = Vec::with_capacity(states.raw_len());
    for v in states.sequence_values::<Value>() {
        ids.push(state(&host, lua, "state_list", &v?)?);
    }
    ids.iter().for_each(|id| host.engine.borrow_mut().retain_state(*id));
    Ok(StateList { host, ids })
}

/// `native.gradients(states)`: the gradients of a list of States, 16-bit ones in f32, and the positions of States without one, if
/// there are any.
fn gradients(lua: &Lua, states: UserDataRef<StateList>) -> mlua::Result<(GradientList, Option<Vec<usize>>)> {
    let host = host(lua)?;
    let mut missing = Vec::new();
    let handles = host.record(lua, |engine| {
        let mut handles = Vec::with_capacity(states.ids.len());
        for (k, id) in states.ids.iter().enumerate() {
            let Some(mut g) = engine.state_grad(*id)? else {
                missing.push(k + 1);
                continue;
            };
            if engine.recorder.graph.dtype(g).is_half() {
                g = engine.recorder.graph.cast(g, DType::F32)?;
            }
            handles.push(engine.recorder.handle(g));
        }
        Ok(handles)
    })?;
    Ok((GradientList { host, handles }, (!missing.is_empty()).then_some(missing)))
}

/// `native.adamw(weights, m, v, grads, first, options)`: `pl.adamw_update` of each weight, with its moments and the gradients from
/// position `first` on, all with the same options, and the three assignments.
fn adamw(
    lua: &Lua,
    (weights, m, v, grads, first, options): (
        UserDataRef<StateList>,
        UserDataRef<StateList>,
        UserDataRef<StateList>,
        UserDataRef<GradientList>,
        usize,
        Table,
    ),
) -> mlua::Result<()> {
    let host = host(lua)?;
    let first = grads.at(first)?;
    let mut numbers: SmallVec<[Operand; 6]> = SmallVec::new();
    for name in ["lr", "beta1", "beta2", "eps", "weight_decay", "step"] {
        numbers.push(Operand::from_lua(options.raw_get(name)?, lua)?);
    }
    host.record(lua, |engine| {
        let mut values: SmallVec<[Arg; 6]> = SmallVec::from_elem(Arg::None, 4);
        for n in &numbers {
            values.push(n.value(engine)?);
        }
        let args = Args { op: &ADAMW_UPDATE, values };
        let mut update = AdamW { a: &args, numbers: SmallVec::new() };
        let moments = m.ids.iter().zip(&v.ids);
        for ((w, (m, v)), g) in weights.ids.iter().zip(moments).zip(&grads.handles[first..]) {
            let tensors =
                [engine.state_node(*w)?, engine.recorder.node(*g)?, engine.state_node(*m)?, engine.state_node(*v)?];
            let before = engine.recorder.graph.len();
            let new = update
                .update(&mut engine.recorder.graph, tensors)
                .inspect_err(|_| engine.recorder.graph.truncate(before))?;
            for (state, value) in [w, m, v].into_iter().zip(new) {
                engine.assign(*state, value)?;
            }
        }
        Ok(())
    })
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("state_list", lua.create_function(state_list)?)?;
    native.set("gradients", lua.create_function(gradients)?)?;
    native.set("adamw", lua.create_function(adamw)?)?;
    // The file and line of a number that `native.place` returned.
    let show = |lua: &Lua, place: u32| Ok(host(lua)?.engine.borrow().recorder.source_map.show(SourceLoc(place)));
    native.set("show_place", lua.create_function(show)?)
}
