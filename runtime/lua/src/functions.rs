//! The `perilune` module: registry functions, and the primitives that are not ops.

use crate::args::{self, Operand, RefGuard, Signature};
use crate::errors;
use crate::host::Host;
use crate::tensor::{Ref, Tensor, many};
use crate::{grads, options, table};
use mlua::{Function, IntoLua, Lua, MultiValue, Table, Value};
use perilune_core::ops::{self, Op};
use perilune_core::{DType, Error};
use std::rc::Rc;

/// The host a call belongs to: every tensor carries it; creation functions find it in the app data.
pub fn host(lua: &Lua) -> mlua::Result<Rc<Host>> {
    lua.app_data_ref::<Rc<Host>>()
        .map(|h| h.clone())
        .ok_or_else(|| mlua::Error::runtime("this is a bug: no engine behind this Lua state"))
}

/// Runs a registry op with Lua arguments.
pub fn call(
    lua: &Lua,
    op: &'static Op,
    sig: &'static Signature,
    args: MultiValue,
    method: bool,
) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let parsed = args::parse(&host, lua, op, sig, args.as_slices().0, method)?;
    let ids = host.record(lua, |engine| {
        let args = parsed.resolve(engine)?;
        engine.call(op, &args)
    })?;
    many(&host, lua, &ids)
}

/// All tensors among values, one level of tables deep.
fn tensors_of(values: &MultiValue) -> Vec<RefGuard> {
    let mut out = Vec::new();
    let mut add = |v: &Value| {
        if let Some(u) = v.as_userdata()
            && let Ok(t) = u.borrow::<Tensor>()
        {
            out.push(RefGuard(t.what));
        }
    };
    for v in values {
        match v {
            Value::Table(t) => t.pairs::<Value, Value>().flatten().for_each(|(_, v)| add(&v)),
            other => add(other),
        }
    }
    out
}

/// `pl.step(fn, ...)`: a step scope around `fn`; its results come back evaluated. An error leaves all States as before.
fn step(lua: &Lua, (f, args): (Function, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    if host.engine.borrow().in_step() {
        let hint = Some("the inner one can be a plain function call".into());
        return Err(errors::argument(&host, lua, "step", "a step cannot be opened inside a step", hint));
    }
    host.settle();
    if host.engine.borrow().is_dirty() {
        host.flush(lua)?;
    }
    let site = host.site(lua);
    let fail = |e| errors::raise(&host, errors::Raise::Fault(e, site));
    host.engine.borrow_mut().begin_step().map_err(fail)?;
    let result = f.call::<MultiValue>(args);
    let out = match result {
        Ok(out) => out,
        Err(e) => {
            host.settle();
            let aborted = host.engine.borrow_mut().abort_step();
            host.customs.borrow_mut().clear();
            aborted.map_err(fail)?;
            return Err(e);
        }
    };
    let refs = tensors_of(&out);
    host.settle();
    let ended = {
        let mut engine = host.engine.borrow_mut();
        let nodes: Result<Vec<_>, Error> =
            refs.iter().filter(|r| matches!(r.0, Ref::Node(_))).map(|r| r.node(&mut engine)).collect();
        match nodes {
            Ok(nodes) => engine.end_step(&nodes),
            Err(e) => engine.abort_step().and(Err(e.into())),
        }
    };
    host.customs.borrow_mut().clear();
    ended.map_err(fail)?;
    host.collect_if_due(lua)?;
    Ok(out)
}

/// `pl.no_grad(fn, ...)`: what `fn` records is a constant to autograd.
fn no_grad(lua: &Lua, (f, args): (Function, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let before = std::mem::replace(&mut host.engine.borrow_mut().graph.no_grad, true);
    let out = f.call::<MultiValue>(args);
    host.engine.borrow_mut().graph.no_grad = before;
    out
}

/// `pl.autocast(dtype, fn, ...)`: matmul-like ops of `fn` compute in that 16-bit dtype, f32 islands in f32.
fn autocast(lua: &Lua, (dtype, f, args): (Value, Function, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let name = dtype.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
    let low = match name.as_str() {
        "f32" => None,
        other => match DType::parse(other).filter(|d| d.is_half()) {
            Some(d) => Some(d),
            None => {
                let message = format!("dtype is {}; it must be \"bf16\", \"f16\" or \"f32\"", args::show(&dtype));
                return Err(errors::argument(&host, lua, "autocast", message, None));
            }
        },
    };
    let before = std::mem::replace(&mut host.engine.borrow_mut().graph.autocast, low);
    let out = f.call::<MultiValue>(args);
    host.engine.borrow_mut().graph.autocast = before;
    out
}

/// `pl.eval(...)`: evaluates tensors now and returns them.
fn eval(lua: &Lua, values: MultiValue) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let refs = tensors_of(&values);
    host.record(lua, |engine| {
        let nodes: Vec<_> =
            refs.iter().filter(|r| matches!(r.0, Ref::Node(_))).map(|r| r.node(engine)).collect::<Result<_, _>>()?;
        engine.evaluate(&nodes)
    })?;
    Ok(values)
}

/// `pl.keep(x)`: x is evaluated when the open step ends, and can be read afterwards.
fn keep(lua: &Lua, values: MultiValue) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    for r in tensors_of(&values) {
        if matches!(r.0, Ref::Node(_)) {
            host.record(lua, |engine| {
                let id = r.node(engine)?;
                engine.keep(id);
                Ok(())
            })?;
        }
    }
    Ok(values)
}

/// `pl.state(tensor, {trainable = true})`.
fn state(lua: &Lua, (x, opts): (Value, Option<Table>)) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let defaults = lua.create_table()?;
    defaults.set("trainable", true)?;
    let given = opts.is_some();
    let opts = options::fill(lua, "state", opts.map(Value::Table).unwrap_or(Value::Nil), &defaults)?;
    let tensor = match &x {
        Value::UserData(u) => u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)),
        _ => None,
    };
    let Some(r) = tensor else {
        let message = format!("argument 1 is {}; it must be a tensor", args::show(&x));
        return Err(errors::argument(&host, lua, "state", message, Some("pl.state(pl.zeros({2, 3}))".into())));
    };
    let trainable: bool = opts.get("trainable")?;
    let id = host.record(lua, |engine| {
        let node = r.node(engine)?;
        let float = engine.graph.dtype(node).is_float();
        // Without a word about it, floats train and the rest does not.
        Ok(engine.new_state(node, if given { trainable } else { float })?)
    })?;
    Ok(Tensor::new(&host, Ref::State(id)))
}

fn is_tensor(v: &Value) -> bool {
    v.as_userdata().is_some_and(|u| u.is::<Tensor>())
}

/// `pl.plan(x, ...)`: the plan that evaluating the tensors (and writing pending assignments) would run, as text.
fn plan(lua: &Lua, values: MultiValue) -> mlua::Result<String> {
    let host = host(lua)?;
    let refs = tensors_of(&values);
    host.record(lua, |engine| {
        let nodes: Vec<_> = refs.iter().map(|r| r.node(engine)).collect::<Result<_, _>>()?;
        engine.show_plan(&nodes)
    })
}

/// `pl.stats()`: counters of the engine.
fn stats(lua: &Lua, (): ()) -> mlua::Result<Table> {
    let host = host(lua)?;
    host.settle();
    let s = host.engine.borrow().stats();
    let t = lua.create_table()?;
    t.set("nodes", s.nodes)?;
    t.set("plans", s.plans)?;
    t.set("hits", s.hits)?;
    t.set("misses", s.misses)?;
    t.set("evictions", s.evictions)?;
    t.set("runs", s.runs)?;
    t.set("splits", s.splits)?;
    t.set("compile_ms", s.compile_ms)?;
    t.set("run_ms", s.run_ms)?;
    t.set("held_bytes", s.held_bytes)?;
    t.set("arena_bytes", s.arena_bytes)?;
    t.set("live_bytes", s.live_bytes)?;
    Ok(t)
}

/// `pl.switches({fusion = false, ...}, fn, ...)`: runs `fn` with debug switches set, and restores them.
fn switches(lua: &Lua, (given, f, args): (Value, Option<Function>, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let before = host.engine.borrow().switches;
    let defaults = lua.create_table()?;
    defaults.set("fusion", before.fusion)?;
    defaults.set("print_plan", before.print_plan)?;
    defaults.set("check_nan", before.check_nan)?;
    defaults.set("report_misses", before.report_misses)?;
    let t = options::fill(lua, "switches", given, &defaults)?;
    let now = perilune_engine::Switches {
        fusion: t.get("fusion")?,
        print_plan: t.get("print_plan")?,
        check_nan: t.get("check_nan")?,
        report_misses: t.get("report_misses")?,
    };
    host.engine.borrow_mut().switches = now;
    let Some(f) = f else { return Ok(MultiValue::new()) };
    let out = f.call::<MultiValue>(args);
    host.engine.borrow_mut().switches = before;
    out
}

/// Fills the module table with all functions.
pub fn install(lua: &Lua, pl: &Table) -> mlua::Result<()> {
    for op in ops::all() {
        if op.sig.is_empty() {
            continue;
        }
        let sig = args::signature(op);
        pl.set(op.name, lua.create_function(move |lua, args: MultiValue| call(lua, op, sig, args, false))?)?;
    }
    pl.set("tensor", lua.create_function(table::tensor)?)?;
    pl.set("state", lua.create_function(state)?)?;
    pl.set("is_tensor", lua.create_function(|_, v: Value| Ok(is_tensor(&v)))?)?;
    pl.set(
        "is_state",
        lua.create_function(|_, v: Value| {
            Ok(v.as_userdata()
                .and_then(|u| u.borrow::<Tensor>().ok().map(|t| matches!(t.what, Ref::State(_))))
                .unwrap_or(false))
        })?,
    )?;
    pl.set("step", lua.create_function(step)?)?;
    pl.set("in_step", lua.create_function(|lua, ()| Ok(host(lua)?.engine.borrow().in_step()))?)?;
    pl.set(
        "end_step",
        lua.create_function(|lua, ()| {
            let host = host(lua)?;
            if host.engine.borrow().in_step() {
                return Ok(());
            }
            host.collect(lua)?;
            let site = host.site(lua);
            let ended = host.engine.borrow_mut().end_implicit_step();
            host.customs.borrow_mut().clear();
            ended.map_err(|e| errors::raise(&host, errors::Raise::Fault(e, site)))
        })?,
    )?;
    pl.set("eval", lua.create_function(eval)?)?;
    pl.set("keep", lua.create_function(keep)?)?;
    pl.set("no_grad", lua.create_function(no_grad)?)?;
    pl.set("autocast", lua.create_function(autocast)?)?;
    pl.set(
        "seed",
        lua.create_function(|lua, n: Value| {
            let host = host(lua)?;
            match args::as_int(&n) {
                Some(n) => {
                    host.engine.borrow_mut().seed(n as u64);
                    Ok(())
                }
                None => Err(errors::argument(
                    &host,
                    lua,
                    "seed",
                    format!("the seed is {}; it must be an integer", args::show(&n)),
                    None,
                )),
            }
        })?,
    )?;
    pl.set("grad", lua.create_function(grads::grad)?)?;
    pl.set("custom", lua.create_function(grads::custom)?)?;
    pl.set("plan", lua.create_function(plan)?)?;
    pl.set("stats", lua.create_function(stats)?)?;
    pl.set("switches", lua.create_function(switches)?)?;
    pl.set("options", lua.create_function(options::options)?)?;
    pl.set("error", lua.create_function(options::error)?)?;
    pl.set("recipe", lua.create_function(options::recipe)?)?;
    pl.set("params", lua.create_function(options::params)?)?;
    let start = std::time::Instant::now();
    pl.set("clock", lua.create_function(move |_, ()| Ok(start.elapsed().as_secs_f64()))?)?;
    pl.set("help", lua.create_function(crate::reference::help)?)?;
    pl.set("newaxis", crate::indexing::newaxis(lua)?)?;
    pl.set("version", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}

/// A tensor or number argument of a hand-written function, as a node.
pub fn operand(lua: &Lua, v: Value) -> mlua::Result<Operand> {
    mlua::FromLua::from_lua(v, lua)
}

/// For functions that return one tensor.
pub fn into_lua(lua: &Lua, t: Tensor) -> mlua::Result<Value> {
    t.into_lua(lua)
}
