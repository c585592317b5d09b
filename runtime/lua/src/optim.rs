//! Binds what optimizers need of the runtime. `native.gradients` and `native.adamw` process all parameters of an optimizer in one
//! call: a step of a small model is bound by the host, and most of the host's time was spent on one call per parameter.

use crate::args::{Operand, RefGuard, show};
use crate::boundary::memory_limit;
use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::tensor::{HANDLE_BYTES, Ref, Tensor};
use mlua::{FromLua, IntoLua, Lua, Table, Value};
use perilune_core::DType;
use perilune_core::ops::optim::{ADAMW_UPDATE, AdamW};
use perilune_core::ops::{Args, Value as Arg};
use perilune_core::source_loc::SourceLoc;
use perilune_engine::StateId;
use smallvec::SmallVec;
use std::rc::Rc;

fn tensor(host: &Rc<Host>, lua: &Lua, op: &str, v: &Value) -> mlua::Result<RefGuard> {
    v.as_userdata()
        .and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)))
        .ok_or_else(|| errors::argument(host, lua, op, format!("it needs a tensor, not {}", show(v)), None))
}

fn state(host: &Rc<Host>, lua: &Lua, op: &str, v: &Value) -> mlua::Result<StateId> {
    match tensor(host, lua, op, v)?.0 {
        Ref::State(s) => Ok(s),
        Ref::Node(_) => Err(errors::argument(host, lua, op, "it needs a State, not a tensor", None)),
    }
}

/// `native.gradients(states)`: the gradient of each State, 16-bit ones in f32, or false if it has none.
fn gradients(lua: &Lua, states: Table) -> mlua::Result<Table> {
    let host = host(lua)?;
    let mut ids = Vec::with_capacity(states.raw_len());
    for v in states.sequence_values::<Value>() {
        ids.push(state(&host, lua, "gradients", &v?)?);
    }
    let found = host.record(lua, |engine| {
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            found.push(match engine.state_grad(id)? {
                Some(g) if engine.recorder.graph.dtype(g).is_half() => Some(engine.recorder.graph.cast(g, DType::F32)?),
                other => other,
            });
        }
        Ok(found)
    })?;
    memory_limit::with_room(lua, found.len() * HANDLE_BYTES, || {
        let out = lua.create_table_with_capacity(found.len(), 0)?;
        for g in found {
            out.raw_push(match g {
                Some(id) => host.tensor(id).into_lua(lua)?,
                None => Value::Boolean(false),
            })?;
        }
        Ok(out)
    })
}

/// `native.adamw(weights, grads, slots, options)`: `pl.adamw_update` of each weight with its gradient and the States m and v of
/// its slots, all with the same options, and the three assignments.
fn adamw(lua: &Lua, (weights, grads, slots, options): (Table, Table, Table, Table)) -> mlua::Result<()> {
    let (host, op) = (host(lua)?, ADAMW_UPDATE.name);
    let mut all = Vec::with_capacity(weights.raw_len());
    // One Lua string for each key, not one for each parameter.
    let (key_m, key_v) = (lua.create_string("m")?, lua.create_string("v")?);
    for k in 1..=weights.raw_len() {
        let own: Table = slots.raw_get(k)?;
        let w = state(&host, lua, op, &weights.raw_get(k)?)?;
        let g = tensor(&host, lua, op, &grads.raw_get(k)?)?;
        let (m, v) = (state(&host, lua, op, &own.raw_get(&key_m)?)?, state(&host, lua, op, &own.raw_get(&key_v)?)?);
        all.push((w, g, m, v));
    }
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
        for (w, g, m, v) in all {
            let tensors = [engine.state_node(w)?, g.node(engine)?, engine.state_node(m)?, engine.state_node(v)?];
            let before = engine.recorder.graph.len();
            let new = update
                .update(&mut engine.recorder.graph, tensors)
                .inspect_err(|_| engine.recorder.graph.truncate(before))?;
            for (state, value) in [w, m, v].into_iter().zip(new) {
                engine.assign(state, value)?;
            }
        }
        Ok(())
    })
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("gradients", lua.create_function(gradients)?)?;
    native.set("adamw", lua.create_function(adamw)?)?;
    // The file and line of a number that `native.place` returned.
    let show = |lua: &Lua, place: u32| Ok(host(lua)?.engine.borrow().recorder.source_map.show(SourceLoc(place)));
    native.set("show_place", lua.create_function(show)?)
}
