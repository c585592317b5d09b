//! Implements `x[i]` and `x[{ {lo, hi}, j, pl.newaxis }]`: coordinates from 0, ranges half-open, negative from the end.
//!
//! An entry of the list is an integer (the dim is removed), a range `{lo, hi}` or `{lo, hi, step}` with nil or absent ends
//! allowed by `{}` (all), `pl.newaxis`, or an integer tensor, whose dims replace the indexed one. Adjacent index
//! tensors are paired, as in PyTorch: `x[{rows, columns}]` is one element per pair. Dims beyond the list
//! are unchanged.

use crate::args::{as_int, show};
use crate::errors;
use crate::tensor::Tensor;
use mlua::{Lua, Table, Value};
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::{index as op_index, movement, slicing};

const NEWAXIS: &str = "perilune.newaxis";

/// The marker for a new dim: a unique table.
pub fn newaxis(lua: &Lua) -> mlua::Result<Table> {
    let t = lua.create_table()?;
    let meta = lua.create_table()?;
    meta.set("__name", NEWAXIS)?;
    t.set_metatable(Some(meta))?;
    Ok(t)
}

fn is_newaxis(t: &Table) -> bool {
    t.metatable().and_then(|m| m.raw_get::<String>("__name").ok()).is_some_and(|n| n == NEWAXIS)
}

enum Entry {
    At(i64),
    Range(Option<i64>, Option<i64>, i64),
    New,
    Rows(crate::args::RefGuard),
}

pub fn index(lua: &Lua, this: &Tensor, key: Value) -> mlua::Result<Value> {
    let host = this.host().clone();
    let bad = |message: String, hint: &str| Err(errors::argument(&host, lua, "x[…]", message, Some(hint.to_string())));
    let entries = match &key {
        Value::Table(t) if is_newaxis(t) => vec![Entry::New],
        Value::Table(t) => {
            let mut out = Vec::new();
            for v in t.sequence_values::<Value>() {
                match entry(&v?) {
                    Ok(e) => out.push(e),
                    Err(what) => {
                        return bad(
                            format!("an index is {what}"),
                            "an index is an integer, a range {lo, hi}, {} for all, pl.newaxis or an integer tensor",
                        );
                    }
                }
            }
            out
        }
        Value::String(s) => {
            let name = s.to_string_lossy();
            let names: Vec<&str> = perilune_core::ops::all()
                .iter()
                .filter(|o| !o.sig.is_empty())
                .map(|o| o.name)
                .chain([
                    "shape", "dtype", "device", "grad", "size", "item", "tolist", "backward", "assign", "numel", "dim",
                ])
                .collect();
            let near = perilune_core::error::did_you_mean(&name, names);
            let hint =
                near.map(|n| format!("did you mean '{n}'?")).unwrap_or_else(|| "pl.help() lists what there is".into());
            return Err(errors::argument(
                &host,
                lua,
                "tensor",
                format!("it has no field or method '{name}'"),
                Some(hint),
            ));
        }
        v => match entry(v) {
            Ok(e) => vec![e],
            Err(what) => {
                return bad(format!("the index is {what}"), "x[i] takes an integer, x[{ {lo, hi}, j }] a list");
            }
        },
    };
    let id = host.record(lua, |engine| {
        let x = this.node(engine)?;
        let mut rows = Vec::new();
        for e in &entries {
            if let Entry::Rows(r) = e {
                rows.push(r.node(engine)?);
            }
        }
        Ok(apply(&mut engine.recorder.graph, x, &entries, &rows)?)
    })?;
    crate::functions::into_lua(lua, host.tensor(id))
}

fn entry(v: &Value) -> std::result::Result<Entry, String> {
    match v {
        Value::Table(t) if is_newaxis(t) => Ok(Entry::New),
        Value::Table(t) => {
            // {lo, hi, step} by position; nil leaves an end open.
            let part = |k: i64| t.raw_get::<Value>(k).map_err(|e| e.to_string());
            let int = |v: &Value| {
                if v.is_nil() {
                    Ok(None)
                } else {
                    as_int(v).map(Some).ok_or_else(|| format!("a range with {}", show(v)))
                }
            };
            let (lo, hi, step) = (int(&part(1)?)?, int(&part(2)?)?, int(&part(3)?)?);
            if lo.is_some() && hi.is_none() && t.raw_len() == 1 {
                // {lo} alone could be misread as one element.
                return Err(format!(
                    "the range {{{}}}: write {{lo, hi}}, or an integer for one element",
                    lo.unwrap_or(0)
                ));
            }
            Ok(Entry::Range(lo, hi, step.unwrap_or(1)))
        }
        Value::UserData(u) => match u.borrow::<Tensor>() {
            Ok(t) => Ok(Entry::Rows(crate::args::RefGuard(t.what))),
            Err(_) => Err(show(v)),
        },
        v => as_int(v).map(Entry::At).ok_or_else(|| show(v)),
    }
}

fn apply(g: &mut Graph, x: NodeId, entries: &[Entry], rows: &[NodeId]) -> Result<NodeId> {
    let rank = g.shape(x).rank();
    let used = entries.iter().filter(|e| !matches!(e, Entry::New)).count();
    if used > rank {
        return Err(Error::argument(
            "x[…]",
            format!("{used} indices for a tensor of shape {}, which has {rank} dims", g.shape(x)),
        ));
    }
    let (mut y, mut at) = (x, 0);
    let groups: Vec<&[Entry]> = entries.chunk_by(|a, b| matches!((a, b), (Entry::Rows(_), Entry::Rows(_)))).collect();
    if groups.iter().filter(|group| matches!(group[0], Entry::Rows(_))).count() > 1 {
        return Err(Error::argument("x[…]", "index tensors apart from each other have no one meaning")
            .hint("index one dim after the other, or bring the dims side by side with x:transpose"));
    }
    for group in groups {
        match &group[0] {
            Entry::New => {
                y = g.unsqueeze(y, at)?;
                at += 1;
            }
            Entry::At(i) => y = slicing::select(g, y, at, *i, "x[…]")?,
            Entry::Range(lo, hi, step) => {
                if *step < 1 {
                    return Err(Error::argument("x[…]", format!("a range with step {step}; steps are 1 or more"))
                        .hint("x:flip(dim) reverses"));
                }
                let (lo, hi) = slicing::range(g.shape(y).dims()[at], *lo, *hi);
                y = g.slice(y, at, lo, hi, *step as usize)?;
                at += 1;
            }
            Entry::Rows(_) => {
                y = pick(g, y, at, rows)?;
                at += g.shape(rows[0]).rank();
            }
        }
    }
    Ok(y)
}

/// Gathers elements by paired index tensors of one shape for the dims from `at`; that shape replaces the dims.
fn pick(g: &mut Graph, x: NodeId, at: usize, rows: &[NodeId]) -> Result<NodeId> {
    let shape = g.shape(rows[0]);
    let mut y = x;
    for (k, &ids) in rows.iter().enumerate() {
        if g.dtype(ids) == perilune_core::DType::Bool {
            return Err(Error::dtype("x[…]", "a bool tensor cannot be an index")
                .hint("x:masked_select(mask) picks elements, x:where chooses"));
        }
        let ids = op_index::as_index(g, "x[…]", ids)?;
        if g.shape(ids) != shape {
            let message = format!("index tensors side by side are of shapes {shape} and {}", g.shape(ids));
            return Err(Error::shape("x[…]", format!("{message}; they must be equal")));
        }
        let flat = g.reshape(ids, &[shape.numel()])?;
        if k == 0 {
            y = op_index::index_select(g, y, at, flat)?;
            continue;
        }
        // For each selected slice, select one slice of the next dim.
        let rest = g.shape(y).with(at + 1, 1);
        let mut along = vec![1; rest.rank()];
        along[at] = shape.numel();
        let flat = g.reshape(flat, &along)?;
        let flat = g.expand(flat, rest)?;
        y = op_index::gather(g, y, at + 1, flat)?;
        y = movement::reshape(g, y, rest.remove(at + 1))?;
    }
    let own = g.shape(y);
    g.reshape(y, &[&own.dims()[..at], shape.dims(), &own.dims()[at + 1..]].concat())
}
