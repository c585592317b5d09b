//! Defines the `perilune` module: registry functions, and the primitives that are not ops.

use crate::args::{self, Operand, RefGuard, Signature};
use crate::errors;
use crate::host::Host;
use crate::tensor::{Ref, Tensor, many};
use crate::{grads, options, table};
use mlua::{Function, IntoLua, Lua, MultiValue, ObjectLike, Table, Value};
use perilune_core::ops::{self, Op};
use perilune_core::{DType, Error};
use perilune_engine::memory::Role;
use perilune_engine::{PrintPlan, Switches};
use std::rc::Rc;

/// Returns the host of a call: tensors carry it, and creation functions take it from the app data.
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

/// Collects the tensors among values, including one level of tables.
pub fn tensors_of(values: &MultiValue) -> Vec<RefGuard> {
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

/// `pl.step(fn, ...)`: runs `fn` in a step scope and evaluates its results. An error leaves all States unchanged.
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
    let loc = host.loc(lua);
    let fail = |e| errors::raise(&host, errors::Raise::Fault(e, loc));
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
    host.collect_if_tight(lua)?;
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
    if let Err(fault) = ended {
        // Free the memory of this step, so that a script may catch the error and try a smaller step.
        drop((out, refs));
        host.collect(lua)?;
        return Err(fail(fault));
    }
    host.collect_if_due(lua)?;
    errors::end_of_step(&host, lua)?;
    Ok(out)
}

/// `pl.no_grad(fn, ...)`: autograd treats the ops of `fn` as constants.
fn no_grad(lua: &Lua, (f, args): (Function, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    host.with_modes(|m| m.no_grad = true, || f.call::<MultiValue>(args))
}

/// `pl.checkpoint(fn, ...)`: runs `fn`; a backward pass recomputes its ops instead of storing their values.
/// `fn` may be a module. Results of `fn`, and other values used outside of it, are stored.
fn checkpoint(lua: &Lua, (f, args): (Value, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let callable = match &f {
        Value::Function(_) => true,
        Value::Table(t) => t.metatable().is_some_and(|m| m.raw_get::<Function>("__call").is_ok()),
        _ => false,
    };
    if !callable {
        let message = format!("argument 1 is {}; it must be a function or a module", args::show(&f));
        let hint = match &f {
            Value::UserData(_) => Some("the function comes first: pl.checkpoint(block, x)".into()),
            _ => None,
        };
        return Err(errors::argument(&host, lua, "checkpoint", message, hint));
    }
    let from = host.engine.borrow().recorder.open_span();
    let out = match f {
        Value::Table(t) => t.call::<MultiValue>(args)?,
        Value::Function(f) => f.call::<MultiValue>(args)?,
        _ => MultiValue::new(),
    };
    host.engine.borrow_mut().recorder.close_span(from);
    Ok(out)
}

/// `pl.autocast(dtype, fn, ...)`: matmul-like ops of `fn` compute in that 16-bit dtype, other ops in f32; or all stay f32 and
/// operands of products may be rounded to TF32.
fn autocast(lua: &Lua, (dtype, f, args): (Value, Function, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let name = dtype.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
    let low = match name.as_str() {
        "f32" | "tf32" => None,
        other => match DType::parse(other).filter(|d| d.is_half()) {
            Some(d) => Some(d),
            None => {
                let message = format!(
                    "dtype is {}; it must be \"bf16\", \"f16\" (or \"fp16\"), \"tf32\" or \"f32\"",
                    args::show(&dtype)
                );
                let fp8 = "fp8 is a matter of layers: nn.Linear(i, o, { fp8 = true }), or nn.use_fp8(model)";
                let hint = (other == "fp8").then(|| fp8.to_string());
                return Err(errors::argument(&host, lua, "autocast", message, hint));
            }
        },
    };
    host.with_modes(|m| (m.autocast, m.tf32) = (low, name == "tf32"), || f.call::<MultiValue>(args))
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

/// `pl.keep(x)`: evaluates x when the open step ends, so that it can be read afterwards.
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
    defaults.set("role", "")?;
    let given = opts.as_ref().is_some_and(|t| t.contains_key("trainable").unwrap_or(false));
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
    let role = match opts.get::<String>("role")?.as_str() {
        "" => None,
        name => match [Role::Weights, Role::Optimizer, Role::Buffers].iter().find(|r| r.name() == name) {
            Some(role) => Some(*role),
            None => {
                let message = format!("role is \"{name}\"; it must be \"weights\", \"optimizer\" or \"buffers\"");
                return Err(errors::argument(&host, lua, "state", message, None));
            }
        },
    };
    let id = host.record(lua, |engine| {
        let node = r.node(engine)?;
        let float = engine.recorder.graph.dtype(node).is_float();
        // By default floats are trainable and other dtypes are not.
        let id = engine.new_state(node, if given { trainable } else { float })?;
        if let Some(role) = role {
            engine.set_role(id, role)?;
        }
        Ok(id)
    })?;
    Ok(Tensor::new(&host, Ref::State(id)))
}

fn is_tensor(v: &Value) -> bool {
    v.as_userdata().is_some_and(|u| u.is::<Tensor>())
}

/// `pl.plan(x, ..., {source = false})`: the plan for evaluating the tensors (and writing pending assignments), as
/// text; with `source` also the recipe lines and the CUDA text of each kernel.
fn plan(lua: &Lua, mut values: MultiValue) -> mlua::Result<String> {
    let host = host(lua)?;
    let is_options = |v: &Value| v.as_table().is_some_and(|t| t.raw_len() == 0);
    let given = if values.back().is_some_and(is_options) { values.pop_back() } else { None };
    let defaults = lua.create_table()?;
    defaults.set("source", false)?;
    let source: bool = options::fill(lua, "plan", given.unwrap_or(Value::Nil), &defaults)?.get("source")?;
    for (k, v) in values.iter().enumerate() {
        let holds = v.as_table().is_some_and(|t| t.pairs::<Value, Value>().flatten().any(|(_, v)| is_tensor(&v)));
        if !is_tensor(v) && !holds {
            let message = format!("argument {} is {}; it must be a tensor or a table of tensors", k + 1, args::show(v));
            let hint = "pl.plan(x, y, { source = true }); without tensors, the plan of pending assignments";
            return Err(errors::argument(&host, lua, "plan", message, Some(hint.into())));
        }
    }
    let refs = tensors_of(&values);
    host.record(lua, |engine| {
        let nodes: Vec<_> = refs.iter().map(|r| r.node(engine)).collect::<Result<_, _>>()?;
        engine.show_plan(&nodes, source)
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
    t.set("handles", s.handles)?;
    Ok(t)
}

/// `pl.memory()`: device memory by role and by recipe line.
fn memory(lua: &Lua, (): ()) -> mlua::Result<Table> {
    let host = host(lua)?;
    host.settle();
    let engine = host.engine.borrow();
    let report = engine.memory();
    let t = lua.create_table()?;
    t.set("allocated", report.device.allocated)?;
    t.set("reserved", report.device.reserved)?;
    t.set("peak", report.device.peak)?;
    t.set("limit", report.device.limit)?;
    let roles = lua.create_table()?;
    for role in Role::ALL {
        roles.set(role.name(), report.of(role))?;
    }
    t.set("by_role", roles)?;
    let owners = lua.create_table()?;
    for o in &report.owners {
        let owner = lua.create_table()?;
        owner.set("role", o.role.name())?;
        owner.set("bytes", o.nbytes)?;
        owner.set("count", o.count)?;
        owner.set("dtype", o.dtype.name())?;
        owner.set("shape", o.shape.dims().to_vec())?;
        owner.set("line", engine.recorder.source_map.show(o.loc))?;
        owners.push(owner)?;
    }
    t.set("owners", owners)?;
    Ok(t)
}

/// `pl.memory_budget("20GiB")`: limits the memory of later steps, which recompute values or raise. nil lifts it. Returns the
/// previous budget in bytes.
fn memory_budget(lua: &Lua, given: Value) -> mlua::Result<Option<usize>> {
    let host = host(lua)?;
    let budget = match &given {
        Value::Nil => None,
        Value::Integer(n) if *n > 0 => Some(*n as usize),
        Value::String(s) => Some(
            perilune_engine::memory::parse_budget(&s.to_string_lossy())
                .map_err(|e| errors::argument(&host, lua, &e.op, e.message, e.hint))?,
        ),
        other => {
            let message = format!("the budget is {}; it must be an amount of memory", args::show(other));
            return Err(errors::argument(
                &host,
                lua,
                "memory_budget",
                message,
                Some("as in \"20GiB\" or \"512M\", or bytes".into()),
            ));
        }
    };
    Ok(std::mem::replace(&mut host.engine.borrow_mut().executor.memory_budget, budget))
}

/// `pl.switches({fusion = false, ...}, fn, ...)`: runs `fn` with debug switches set, and restores them.
fn switches(lua: &Lua, (given, f, args): (Value, Option<Function>, MultiValue)) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let before = host.engine.borrow().switches;
    // `print_plan` may be a word; it is removed, and the other switches are parsed as bools.
    let mut print_plan = before.print_plan;
    let given = match given {
        Value::Table(t) => {
            let plain = lua.create_table()?;
            for pair in t.pairs::<Value, Value>() {
                let (k, v) = pair?;
                if k.as_string().is_some_and(|k| k == "print_plan") {
                    print_plan = plan_shown(&host, lua, &v)?;
                } else {
                    plain.set(k, v)?;
                }
            }
            Value::Table(plain)
        }
        other => other,
    };
    let defaults = lua.create_table()?;
    defaults.set("fusion", before.fusion)?;
    defaults.set("print_plan", false)?;
    defaults.set("check_nan", before.check_nan)?;
    defaults.set("report_misses", before.report_misses)?;
    let t = options::fill(lua, "switches", given, &defaults)?;
    let now = Switches {
        fusion: t.get("fusion")?,
        print_plan,
        check_nan: t.get("check_nan")?,
        report_misses: t.get("report_misses")?,
    };
    host.engine.borrow_mut().switches = now;
    let Some(f) = f else { return Ok(MultiValue::new()) };
    let out = f.call::<MultiValue>(args);
    host.engine.borrow_mut().switches = before;
    out
}

/// Parses `print_plan` of `pl.switches`.
fn plan_shown(host: &Rc<Host>, lua: &Lua, v: &Value) -> mlua::Result<PrintPlan> {
    match v {
        Value::Boolean(false) => Ok(PrintPlan::Off),
        Value::Boolean(true) => Ok(PrintPlan::Kernels),
        Value::String(s) if *s == "source" => Ok(PrintPlan::Source),
        other => {
            let message = format!("option 'print_plan' is {}; it must be true, false or \"source\"", args::show(other));
            Err(errors::argument(host, lua, "switches", message, None))
        }
    }
}

/// Fills the module table with all functions.
pub fn install(lua: &Lua, pl: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
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
            let loc = host.loc(lua);
            let ended = host.engine.borrow_mut().end_implicit_step();
            host.customs.borrow_mut().clear();
            ended.map_err(|e| errors::raise(&host, errors::Raise::Fault(e, loc)))?;
            errors::end_of_step(&host, lua)
        })?,
    )?;
    pl.set("mesh", lua.create_function(crate::mesh::sizes)?)?;
    pl.set("eval", lua.create_function(eval)?)?;
    pl.set("keep", lua.create_function(keep)?)?;
    pl.set("load_run", lua.create_function(crate::load_run::load_run)?)?;
    pl.set("no_grad", lua.create_function(no_grad)?)?;
    pl.set("checkpoint", lua.create_function(checkpoint)?)?;
    pl.set("autocast", lua.create_function(autocast)?)?;
    pl.set(
        "seed",
        lua.create_function(|lua, n: Value| {
            let host = host(lua)?;
            match args::as_int(&n) {
                Some(n) => {
                    host.engine.borrow_mut().recorder.seed(n as u64);
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
    pl.set("memory", lua.create_function(memory)?)?;
    pl.set("memory_budget", lua.create_function(memory_budget)?)?;
    pl.set("switches", lua.create_function(switches)?)?;
    pl.set("options", lua.create_function(options::options)?)?;
    pl.set("error", lua.create_function(options::error)?)?;
    pl.set("recipe", lua.create_function(options::recipe)?)?;
    pl.set("params", lua.create_function(options::params)?)?;
    let start = std::time::Instant::now();
    pl.set("clock", lua.create_function(move |_, ()| Ok(start.elapsed().as_secs_f64()))?)?;
    pl.set("help", lua.create_function(crate::reference::help)?)?;
    pl.set("breakpoint", lua.create_function(crate::console::breakpoint)?)?;
    pl.set("newaxis", crate::indexing::newaxis(lua)?)?;
    pl.set("version", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}

/// Converts a tensor or number argument of a hand-written function to a node.
pub fn operand(lua: &Lua, v: Value) -> mlua::Result<Operand> {
    mlua::FromLua::from_lua(v, lua)
}

/// For functions that return one tensor.
pub fn into_lua(lua: &Lua, t: Tensor) -> mlua::Result<Value> {
    t.into_lua(lua)
}
