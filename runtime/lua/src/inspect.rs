//! Implements queries for `pl.summary` and the prompt: the cost of a recording that is not run, the States that a tensor
//! depends on.

use crate::args::show;
use crate::errors;
use crate::functions::{host, into_lua, tensors_of};
use crate::tensor::{Ref, Tensor};
use mlua::{Function, Lua, MultiValue, Table, Value};
use perilune_core::NodeId;

/// `native.aside(fn)`: runs `fn` without an effect on later random numbers.
fn aside(lua: &Lua, f: Function) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let before = host.engine.borrow().recorder.graph.rng;
    let out = f.call::<MultiValue>(());
    host.engine.borrow_mut().recorder.graph.rng = before;
    out
}

/// `native.mark()`: the current position in the recording.
fn mark(lua: &Lua, (): ()) -> mlua::Result<usize> {
    Ok(host(lua)?.engine.borrow().recorder.graph.len())
}

/// `native.cost(mark, tensors)`: the cost of the tensors if everything recorded before the mark is available.
fn cost(lua: &Lua, (from, list): (u32, Table)) -> mlua::Result<Table> {
    let host = host(lua)?;
    let refs = tensors_of(&MultiValue::from_vec(vec![Value::Table(list)]));
    let (kernels, cost) = host.record(lua, |engine| {
        let ids: Vec<NodeId> = refs.iter().map(|r| r.node(engine)).collect::<Result<_, _>>()?;
        engine.cost_since(NodeId(from), &ids)
    })?;
    let t = lua.create_table()?;
    t.set("kernels", kernels)?;
    t.set("flops", cost.flops)?;
    t.set("read", cost.read)?;
    t.set("written", cost.written)?;
    Ok(t)
}

/// `native.states_of(x)`: the trainable States that x depends on.
fn states_of(lua: &Lua, x: Value) -> mlua::Result<Table> {
    let host = host(lua)?;
    let refs = tensors_of(&MultiValue::from_vec(vec![x.clone()]));
    let Some(r) = refs.first() else {
        return Err(errors::argument(&host, lua, "states_of", format!("it is {}", show(&x)), None));
    };
    let found = host.record(lua, |engine| {
        let id = r.node(engine)?;
        let found = engine.states_below(id);
        found.iter().for_each(|s| engine.retain_state(*s));
        Ok(found)
    })?;
    let out = lua.create_table()?;
    for id in found {
        out.push(into_lua(lua, Tensor::new(&host, Ref::State(id)))?)?;
    }
    Ok(out)
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("aside", lua.create_function(aside)?)?;
    native.set("mark", lua.create_function(mark)?)?;
    native.set("cost", lua.create_function(cost)?)?;
    native.set("states_of", lua.create_function(states_of)?)?;
    Ok(())
}
