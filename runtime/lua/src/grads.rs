//! Binds gradients for Lua: `backward`, `pl.grad`, `.grad`, and custom functions with their own backward.

use crate::args::{Operand, RefGuard, show};
use crate::errors::{self, Raise};
use crate::functions::host;
use crate::host::Host;
use crate::options;
use crate::tensor::{Ref, Tensor};
use mlua::{AnyUserData, Function, Lua, MultiValue, Table, Value};
use perilune_core::Error;
use perilune_core::grad::Backward;
use perilune_core::graph::{Node, NodeId};
use perilune_core::modes::Modes;
use perilune_core::ops::create;
use smallvec::SmallVec;
use std::rc::Rc;

/// A custom function's backward and its arguments.
pub struct Custom {
    name: String,
    backward: Function,
    args: MultiValue,
    /// Whether each argument is a tensor.
    tensors: Vec<usize>,
}

/// Runs a pass to its end, calling Lua for custom functions.
fn drive(host: &Rc<Host>, lua: &Lua, pass: &mut Backward) -> mlua::Result<()> {
    loop {
        let loc = host.loc(lua);
        let call = {
            let mut engine = host.engine.borrow_mut();
            pass.advance(&mut engine.recorder.graph)
        };
        let call = call.map_err(|e| errors::raise(host, Raise::Fault(e.into(), loc)))?;
        let Some(call) = call else { return Ok(()) };
        let payload = host.engine.borrow().recorder.graph.node(call.node).payload;
        let (name, backward, args, tensors) = match host.customs.borrow().get(&payload) {
            Some(c) => (c.name.clone(), c.backward.clone(), c.args.clone(), c.tensors.clone()),
            None => return Err(mlua::Error::runtime("this is a bug: a custom function lost its backward")),
        };
        let mut values = MultiValue::new();
        values.push_back(crate::functions::into_lua(lua, host.tensor(call.grad))?);
        values.extend(args);
        let recorded_at = host.engine.borrow().recorder.graph.loc_of(call.node);
        let at = host.called_at.replace(recorded_at);
        let set = |m: &mut Modes| (m.backward_of, m.no_grad) = (Some(call.node), !pass.create_graph());
        let out = host.with_modes(set, || backward.call::<MultiValue>(values));
        host.called_at.set(at);
        let out = out?;
        if out.len() > tensors.len().max(1) {
            let message = format!(
                "its backward gave {} gradients, its forward has {} tensor arguments",
                out.len(),
                tensors.len()
            );
            let hint = Some("return one gradient (or nil) for each tensor argument, in order".into());
            return Err(errors::argument(host, lua, &name, message, hint));
        }
        let mut refs: Vec<Option<RefGuard>> = Vec::new();
        for v in out.iter() {
            refs.push(match v {
                Value::Nil => None,
                Value::UserData(u) => u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)),
                other => {
                    let message = format!("its backward gave {}; gradients are tensors or nil", show(other));
                    return Err(errors::argument(host, lua, &name, message, None));
                }
            });
        }
        host.record(lua, |engine| {
            let mut nodes: Vec<Option<NodeId>> = Vec::new();
            for r in refs {
                nodes.push(r.map(|r| r.node(engine)).transpose()?);
            }
            Ok(pass.supply(&mut engine.recorder.graph, &call, &nodes).map_err(|e| Error { op: name, ..e })?)
        })?;
        drop(out);
    }
}

fn create_graph(lua: &Lua, op: &str, opts: Value) -> mlua::Result<(bool, bool)> {
    let defaults = lua.create_table()?;
    defaults.set("create_graph", false)?;
    defaults.set("allow_unused", false)?;
    let t = options::fill(lua, op, opts, &defaults)?;
    Ok((t.get("create_graph")?, t.get("allow_unused")?))
}

/// `y:backward([seed], [{create_graph}])`: adds gradients to `.grad` of every trainable State that y depends on.
pub fn backward(lua: &Lua, this: &Tensor, (seed, opts): (Value, Value)) -> mlua::Result<()> {
    let host = this.host().clone();
    let (seed, opts) = match seed {
        Value::Table(_) => (Value::Nil, seed),
        other => (other, opts),
    };
    let (create, _) = create_graph(lua, "backward", opts)?;
    let seed = match seed {
        Value::Nil => None,
        v => Some(crate::functions::operand(lua, v)?),
    };
    let (mut pass, states) = host.record(lua, |engine| {
        let y = this.node(engine)?;
        let dtype = engine.recorder.graph.dtype(y);
        let seed = seed.map(|s: Operand| s.node(engine, dtype)).transpose()?;
        Ok(engine.begin_backward(y, seed, create)?)
    })?;
    drive(&host, lua, &mut pass)?;
    host.record(lua, |engine| Ok(engine.end_backward(pass, states)?))?;
    Ok(())
}

/// `pl.grad(y, {xs}, [{create_graph, allow_unused}])` -> gradients, in order.
pub fn grad(lua: &Lua, (y, xs, opts): (Value, Value, Value)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let (create, allow_unused) = create_graph(lua, "grad", opts)?;
    let tensor = |v: &Value| v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)));
    let Some(y) = tensor(&y) else {
        return Err(errors::argument(
            &host,
            lua,
            "grad",
            format!("argument 1 is {}; it must be a tensor", show(&y)),
            Some("pl.grad(y, {x, w})".into()),
        ));
    };
    let mut refs = Vec::new();
    match &xs {
        Value::Table(t) => {
            for v in t.sequence_values::<Value>() {
                let v = v?;
                match tensor(&v) {
                    Some(r) => refs.push(r),
                    None => {
                        let message = format!("argument 2 holds {}; it must be a list of tensors", show(&v));
                        return Err(errors::argument(&host, lua, "grad", message, Some("pl.grad(y, {x, w})".into())));
                    }
                }
            }
        }
        v => match tensor(v) {
            Some(r) => refs.push(r),
            None => {
                let message = format!("argument 2 is {}; it must be a list of tensors", show(v));
                return Err(errors::argument(&host, lua, "grad", message, Some("pl.grad(y, {x, w})".into())));
            }
        },
    }
    let mut pass = host.record(lua, |engine| {
        let y = y.node(engine)?;
        let wrt: Vec<NodeId> = refs.iter().map(|r| r.node(engine)).collect::<Result<_, _>>()?;
        Ok(engine.begin_grad(y, None, &wrt, create)?)
    })?;
    drive(&host, lua, &mut pass)?;
    let found = host.record(lua, |engine| {
        let found = pass.finish(&mut engine.recorder.graph)?;
        if !allow_unused && let Some(k) = found.iter().position(Option::is_none) {
            let message = format!("the tensor does not depend on input {}", k + 1);
            return Err(Error::gradient("grad", message).hint("pass {allow_unused = true} to get nil for it").into());
        }
        Ok(found)
    })?;
    let mut out = MultiValue::new();
    for d in found {
        out.push_back(match d {
            Some(id) => crate::functions::into_lua(lua, host.tensor(id))?,
            None => Value::Nil,
        });
    }
    Ok(out)
}

/// `w.grad`.
pub fn get_grad(lua: &Lua, this: &Tensor) -> mlua::Result<Value> {
    let Ref::State(s) = this.what else { return Ok(Value::Nil) };
    let found = this.host().record(lua, |engine| Ok(engine.state_grad(s)?))?;
    match found {
        Some(id) => crate::functions::into_lua(lua, this.host().tensor(id)),
        None => Ok(Value::Nil),
    }
}

/// `w.grad = g` or `w.grad = nil`.
pub fn set_grad(lua: &Lua, this: AnyUserData, value: Value) -> mlua::Result<()> {
    let (host, what) = {
        let this = this.borrow::<Tensor>()?;
        (this.host().clone(), this.what)
    };
    let Ref::State(s) = what else {
        let hint = Some("pl.grad(y, {x}) gives gradients of any tensor".into());
        return Err(errors::argument(&host, lua, "grad", "only a State has a gradient", hint));
    };
    let value = match value {
        Value::Nil => None,
        v => Some(crate::functions::operand(lua, v)?),
    };
    host.record(lua, |engine| {
        let dtype = engine.state_info(s)?.dtype;
        let node = value.map(|v: Operand| v.node(engine, dtype)).transpose()?;
        Ok(engine.set_state_grad(s, node)?)
    })
}

/// `native.mode()`: the current recording mode: whether gradients are recorded, the 16-bit dtype of autocast (nil without it), and
/// the step.
pub fn mode(lua: &Lua, (): ()) -> mlua::Result<Table> {
    let host = host(lua)?;
    let engine = host.engine.borrow();
    let t = lua.create_table()?;
    t.set("grad", !engine.recorder.graph.modes.no_grad)?;
    t.set("autocast", engine.recorder.graph.modes.autocast.map(perilune_core::DType::name))?;
    t.set("step", engine.recorder.graph.rng.step)?;
    Ok(t)
}

/// `pl.custom { forward = fn, backward = fn }` -> a function.
///
/// forward(...) takes tensors and other values and returns one tensor; it is recorded under no_grad. backward(grad, ...)
/// takes the gradient of the result and the same arguments, and returns a gradient (or nil) for each tensor argument.
pub fn custom(lua: &Lua, given: Table) -> mlua::Result<Function> {
    let host = host(lua)?;
    for pair in given.pairs::<Value, Value>() {
        let (k, _) = pair?;
        let name = k.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
        if !["forward", "backward", "name"].contains(&name.as_str()) {
            return Err(errors::argument(
                &host,
                lua,
                "custom",
                format!("unknown option '{name}' (options: backward, forward, name)."),
                None,
            ));
        }
    }
    let get = |key: &str| -> mlua::Result<Function> {
        match given.get::<Value>(key)? {
            Value::Function(f) => Ok(f),
            other => {
                let hint = "pl.custom { forward = function(x) … end, backward = function(g, x) … end }";
                Err(errors::argument(
                    &host,
                    lua,
                    "custom",
                    format!("{key} is {}; it must be a function", show(&other)),
                    Some(hint.into()),
                ))
            }
        }
    };
    let (forward, backward) = (get("forward")?, get("backward")?);
    let name = given.get::<Option<String>>("name")?.unwrap_or_else(|| "custom".into());
    let host = host.clone();
    crate::boundary::Guarded(lua).create_function(move |lua, args: MultiValue| {
        let mut out = host.with_modes(|m| m.no_grad = true, || forward.call::<MultiValue>(args.clone()))?;
        if out.len() > 1 {
            let message = format!("its forward returned {} values; it must return one tensor", out.len());
            let hint = "pl.cat or pl.stack joins several into one, which can be parted behind the call";
            return Err(errors::argument(&host, lua, &name, message, Some(hint.into())));
        }
        let out = out.pop_front().unwrap_or(Value::Nil);
        let y = match &out {
            Value::UserData(u) => u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)),
            _ => None,
        };
        let Some(y) = y else {
            let message = format!("its forward returned {}; it must return one tensor", show(&out));
            let hint = (out.is_nil()).then(|| "does it lack a `return`?".to_string());
            return Err(errors::argument(&host, lua, &name, message, hint));
        };
        let mut tensors = Vec::new();
        let mut refs = Vec::new();
        for (k, v) in args.iter().enumerate() {
            if let Some(u) = v.as_userdata()
                && let Ok(t) = u.borrow::<Tensor>()
            {
                tensors.push(k);
                refs.push(RefGuard(t.what));
            }
        }
        let payload = host.next_custom.get();
        host.next_custom.set(payload + 1);
        host.customs
            .borrow_mut()
            .insert(payload, Custom { name: name.clone(), backward: backward.clone(), args: args.clone(), tensors });
        let id = host.record(lua, |engine| {
            let y = y.node(engine)?;
            let mut inputs: SmallVec<[NodeId; 4]> = SmallVec::from_slice(&[y]);
            for r in refs {
                inputs.push(r.node(engine)?);
            }
            let (shape, dtype) = (engine.recorder.graph.shape(y), engine.recorder.graph.dtype(y));
            let detached = engine.recorder.graph.modes.no_grad;
            let node = Node {
                op: &create::CUSTOM,
                dtype,
                detached,
                tf32: false,
                shape,
                inputs,
                attrs: SmallVec::new(),
                payload,
            };
            Ok(engine.recorder.graph.add(node))
        })?;
        Ok(host.tensor(id))
    })
}
