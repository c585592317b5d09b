//! Converts between Lua tables and tensors.

use crate::args::{RefGuard, show};
use crate::boundary::memory_limit;
use crate::errors;
use crate::functions::host;
use crate::options;
use crate::tensor::{Ref, Tensor};
use mlua::{Lua, Table, Value};
use perilune_core::host_tensor::{push_f64, push_i64};
use perilune_core::{DType, HostTensor, MAX_RANK, Shape};

/// `pl.tensor(value, {dtype})`: from a number, a boolean, or nested lists of them.
///
/// Integers give i64, floats f32, booleans bool. A tensor is returned as it is, or converted.
pub fn tensor(lua: &Lua, (value, opts): (Value, Value)) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let bad = |message: String| errors::argument(&host, lua, "tensor", message, None);
    let defaults = lua.create_table()?;
    defaults.set("dtype", "")?;
    let opts = options::fill(lua, "tensor", opts, &defaults)?;
    let name: String = opts.get("dtype")?;
    let dtype = match name.as_str() {
        "" => None,
        n => Some(
            DType::parse(n)
                .ok_or_else(|| bad(format!("dtype \"{n}\" is none of {}", DType::ALL.map(DType::name).join(", "))))?,
        ),
    };
    if let Value::UserData(u) = &value
        && let Ok(t) = u.borrow::<Tensor>()
    {
        let r = RefGuard(t.what);
        let id = host.record(lua, |engine| {
            let id = r.node(engine)?;
            let dtype = dtype.unwrap_or(engine.recorder.graph.dtype(id));
            Ok(engine.recorder.graph.cast(id, dtype)?)
        })?;
        return Ok(host.tensor(id));
    }
    let mut dims = Vec::new();
    let mut leaves = Vec::new();
    // The numbers are gathered outside of Lua, where no limit counts them: one list may stand in another many times.
    let most = memory_limit::room(lua) / size_of::<Value>();
    flatten(&value, 0, most, &mut dims, &mut leaves)
        .map_err(|(message, hint)| errors::argument(&host, lua, "tensor", message, Some(hint.to_string())))?;
    let found = leaves.iter().fold(None, |seen: Option<DType>, v| {
        let d = match v {
            Value::Boolean(_) => DType::Bool,
            Value::Integer(_) => DType::I64,
            _ => DType::F32,
        };
        Some(seen.map_or(d, |s| DType::promote(s, d)))
    });
    let dtype = dtype.or(found).unwrap_or(DType::F32);
    let mut bytes = Vec::with_capacity(leaves.len() * dtype.size());
    for v in &leaves {
        match v {
            Value::Boolean(b) => push_i64(dtype, i64::from(*b), &mut bytes),
            Value::Integer(i) => push_i64(dtype, *i, &mut bytes),
            Value::Number(n) => push_f64(dtype, *n, &mut bytes),
            _ => {}
        }
    }
    let id = host.record(lua, |engine| {
        let t = HostTensor::new(dtype, Shape::new(&dims)?, bytes);
        Ok(engine.from_host(t))
    })?;
    Ok(host.tensor(id))
}

const RAGGED: &str = "lists of one depth have the same length: pad the short ones, or keep several tensors";

fn flatten(
    v: &Value,
    depth: usize,
    most: usize,
    dims: &mut Vec<usize>,
    leaves: &mut Vec<Value>,
) -> Result<(), (String, &'static str)> {
    let mixed = || Err(("a ragged list: numbers and lists side by side".to_string(), RAGGED));
    if leaves.len() >= most {
        let hint =
            "a list that occurs many times in another is copied each time; read large data with pl.load or pl.data";
        return Err((format!("its lists hold more than {most} numbers, which do not fit into Lua's memory"), hint));
    }
    match v {
        Value::Table(t) => {
            if depth >= MAX_RANK {
                return Err((
                    format!("lists are nested more than {MAX_RANK} deep"),
                    "merge dims, and reshape the tensor",
                ));
            }
            let n = t.raw_len();
            match dims.get(depth) {
                None if leaves.is_empty() => dims.push(n),
                Some(&d) if d == n => {}
                Some(&d) => {
                    return Err((
                        format!("a ragged list: at depth {} one part has {d} elements and another {n}", depth + 1),
                        RAGGED,
                    ));
                }
                None => return mixed(),
            }
            for k in 1..=n {
                let x = t.raw_get::<Value>(k).map_err(|e| (e.to_string(), RAGGED))?;
                if x.is_nil() {
                    let hole = format!("element {k} of a list of {n} is nil");
                    return Err((hole, "a list has no holes: give the missing number, 0 or 0/0 (NaN)"));
                }
                flatten(&x, depth + 1, most, dims, leaves)?;
            }
            Ok(())
        }
        Value::Boolean(_) | Value::Integer(_) | Value::Number(_) if depth == dims.len() => {
            leaves.push(v.clone());
            Ok(())
        }
        Value::Boolean(_) | Value::Integer(_) | Value::Number(_) => mixed(),
        Value::String(_) => Err((
            format!("it holds {}; it must hold numbers or booleans", show(v)),
            "tonumber(s) makes a number of a text",
        )),
        Value::UserData(_) => {
            Err(("it holds a tensor; it must hold numbers or booleans".into(), "pl.stack({x, y}) joins tensors"))
        }
        other => Err((format!("it holds {}; it must hold numbers or booleans", show(other)), "pl.tensor {1, 2, 3}")),
    }
}

/// Returns a tensor's value in host memory.
pub fn read(lua: &Lua, t: &Tensor) -> mlua::Result<HostTensor> {
    t.host().record(lua, |engine| match t.what {
        Ref::Node(h) => engine.read(h),
        Ref::State(s) => engine.read_state(s),
    })
}

pub fn number(_: &Lua, t: &HostTensor, i: usize) -> mlua::Result<Value> {
    Ok(match t.dtype {
        DType::Bool => Value::Boolean(t.get_i64(i) != 0),
        d if d.is_int() => Value::Integer(t.get_i64(i)),
        _ => Value::Number(t.get_f64(i)),
    })
}

/// Converts a tensor to nested lists; a scalar becomes a number.
pub fn nested(lua: &Lua, t: &HostTensor) -> mlua::Result<Value> {
    fn level(lua: &Lua, t: &HostTensor, dims: &[usize], at: usize) -> mlua::Result<Value> {
        let Some((&n, rest)) = dims.split_first() else { return number(lua, t, at) };
        let step: usize = rest.iter().product();
        let out: Table = lua.create_table_with_capacity(n, 0)?;
        for i in 0..n {
            out.raw_set(i + 1, level(lua, t, rest, at + i * step)?)?;
        }
        Ok(Value::Table(out))
    }
    level(lua, t, t.shape.dims(), 0)
}
