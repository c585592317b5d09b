//! Registers kernels from CUDA source, which `stdlib/kernel/source.lua` has checked.

use crate::args::RefGuard;
use crate::errors;
use crate::functions::host;
use crate::tensor::Tensor;
use mlua::{Lua, MultiValue, Table, Value};
use perilune_core::graph::{Meta, NodeId};
use perilune_core::ops::source::{self, Body, Launch};
use perilune_core::{DType, Shape};

/// `native.source_place(text)`: the file of the current line, and the line in it on which `text` begins, or 0 if the file
/// does not contain the exact text.
pub fn place(lua: &Lua, text: String) -> mlua::Result<(String, u32)> {
    let host = host(lua)?;
    granted(&host, lua, "kernel")?;
    without_files(&host, lua, "kernel", &text)?;
    let loc = host.loc(lua);
    let Some((file, at)) = host.engine.borrow().recorder.source_map.get(loc).map(|(f, l)| (f.to_string(), l)) else {
        return Ok((String::new(), 0));
    };
    let whole = crate::source_text::text(&file).unwrap_or_default().replace("\r\n", "\n");
    // Search after the line first, then everywhere, because the text may be above the call.
    let start: usize = whole.split_inclusive('\n').take(at.saturating_sub(1) as usize).map(str::len).sum();
    let found = whole[start..].find(&text).map(|n| start + n).or_else(|| whole.find(&text));
    let line = found.filter(|_| !text.is_empty()).map_or(0, |n| whole[..n].matches('\n').count() as u32 + 1);
    Ok((file, line))
}

/// Refuses source that makes the compiler open a file, whatever the recipe may read: the compiler knows no grants.
fn without_files(host: &std::rc::Rc<crate::host::Host>, lua: &Lua, op: &str, text: &str) -> mlua::Result<()> {
    let Some(found) = crate::kernel_includes::opens_file(text) else { return Ok(()) };
    let hint = "write it into the source; headers of CUDA are included as <cuda_fp16.h>";
    let message = format!("its source has `{found}`, and the compiler may open no file of this computer");
    Err(errors::refused(host, lua, op, &message, Some(hint.into())))
}

/// Refuses kernels that are not granted.
fn granted(host: &std::rc::Rc<crate::host::Host>, lua: &Lua, op: &str) -> mlua::Result<()> {
    if host.policy.allows_kernels() {
        return Ok(());
    }
    let hint = "allow it on the command line: --allow-kernels";
    Err(errors::refused(
        host,
        lua,
        op,
        "a recipe that is not trusted may not launch kernels of its own source",
        Some(hint.into()),
    ))
}

/// `native.source_kernel { … }`: records a call and returns its outputs.
pub fn record(lua: &Lua, t: Table) -> mlua::Result<MultiValue> {
    let host = host(lua)?;
    let out = call(lua, t)?;
    out.into_iter().map(|id| crate::functions::into_lua(lua, host.tensor(id))).collect()
}

/// Records a call of a kernel and returns its outputs.
pub(crate) fn call(lua: &Lua, t: Table) -> mlua::Result<Vec<NodeId>> {
    let host = host(lua)?;
    let name: String = t.get("name")?;
    granted(&host, lua, &name)?;
    let three = |key: &str| -> mlua::Result<[i64; 3]> {
        let list: Table = t.get(key)?;
        Ok([list.get(1)?, list.get(2)?, list.get(3)?])
    };
    let mut outputs = Vec::new();
    for o in t.get::<Table>("outputs")?.sequence_values::<Table>() {
        let o = o?;
        let dims = o.sequence_values::<usize>().collect::<mlua::Result<Vec<_>>>()?;
        let dtype = DType::parse(&o.get::<String>("dtype")?).unwrap_or(DType::F32);
        let shape = Shape::new(&dims).map_err(|e| errors::argument(&host, lua, &name, e.message, e.hint))?;
        outputs.push(Meta { shape, dtype });
    }
    let mut refs = Vec::new();
    for v in t.get::<Table>("inputs")?.sequence_values::<Value>() {
        let v = v?;
        let tensor = v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)));
        refs.extend(tensor);
    }
    let names = t.get::<Option<Table>>("names")?;
    let names = names.map_or(Ok(Vec::new()), |list| list.sequence_values().collect::<mlua::Result<_>>())?;
    let text: String = t.get("text")?;
    without_files(&host, lua, &name, &text)?;
    let body = Body { name, text, file: t.get("file")?, line: t.get("line")?, names };
    let launch = Launch {
        body: source::intern(body),
        grid: three("grid")?,
        block: three("block")?,
        shared: t.get("shared")?,
        scalars: t.get("scalars")?,
        numbers: t.get::<Table>("args")?.sequence_values::<i64>().collect::<mlua::Result<_>>()?,
        outputs,
    };
    host.record(lua, |engine| {
        let inputs = refs.iter().map(|r| r.node(engine)).collect::<Result<Vec<_>, _>>()?;
        Ok(source::call(&mut engine.recorder.graph, &inputs, &launch)?.into_iter().collect())
    })
}
