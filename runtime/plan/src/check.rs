//! Verifies that a program follows the grammar of `ir`. Runs in debug builds and on the null device.
//!
//! Every rule that `ir.rs` states is checked here, so that an incorrect pass fails at once and by name.

use crate::ir::*;
use crate::reading::{Reading, reading};
use perilune_core::Layout;
use perilune_core::id_map::IdSet;
use perilune_core::ops::elementwise::MapFn;
use rustc_hash::{FxHashMap, FxHashSet};

/// The first broken rule, if any. Every device compiles only programs without one.
pub fn check(p: &Program) -> Result<(), String> {
    if !p.stages.is_empty() {
        let stage = |(k, stage): (usize, &Stage)| check(&stage.program).map_err(|e| format!("stage {k}: {e}"));
        return p.stages.iter().enumerate().try_for_each(stage);
    }
    let mut written: IdSet<ValueId> = IdSet::default();
    for (k, v) in p.values.iter().enumerate() {
        match v.storage {
            Storage::Input(i) => {
                let (shape, dtype) = *p.inputs.get(i as usize).ok_or_else(|| format!("value {k}: no input {i}"))?;
                if shape.numel() != v.shape.numel() || dtype != v.dtype {
                    return Err(format!("value {k} disagrees with input {i}"));
                }
            }
            Storage::Output(o) if p.outputs.get(o as usize).is_none_or(|desc| desc.nbytes() < v.nbytes()) => {
                return Err(format!("value {k} does not fit output {o}"));
            }
            Storage::Arena(at) if at + v.nbytes() > p.arena_bytes => {
                return Err(format!("value {k} does not fit the arena"));
            }
            _ => {}
        }
    }
    for (k, kernel) in p.kernels.iter().enumerate() {
        for v in kernel.reads() {
            let value = p.values.get(v.0 as usize).ok_or_else(|| format!("kernel {k} reads no value {}", v.0))?;
            if !matches!(value.storage, Storage::Input(_)) && !written.contains(&v) {
                return Err(format!("kernel {k} reads value {} before it is written", v.0));
            }
        }
        for v in kernel.writes() {
            if p.values.get(v.0 as usize).is_none() {
                return Err(format!("kernel {k} writes no value {}", v.0));
            }
            written.insert(v);
        }
        match kernel {
            Kernel::Region(r) => region(p, r).map_err(|e| format!("kernel {k}: {e}"))?,
            Kernel::Multi(list) => many(p, list).map_err(|e| format!("kernel {k}: {e}"))?,
            Kernel::Library(l) => {
                if let Some(r) = &l.epilogue {
                    epilogue(p, l, r).map_err(|e| format!("kernel {k} ({}), epilogue: {e}", l.op.name))?;
                }
                outputs(p, l).map_err(|e| format!("kernel {k} ({}): {e}", l.op.name))?;
                for o in &l.inputs {
                    if let Operand::View(v, layout) = o {
                        reach(p, *v, layout).map_err(|e| format!("kernel {k} ({}): {e}", l.op.name))?;
                    }
                }
            }
        }
    }
    crate::lanes::check(p)
}

fn reach(p: &Program, v: ValueId, layout: &Layout) -> Result<(), String> {
    if let Some((low, high)) = layout.extent()
        && (low < 0 || high as usize >= p.values[v.0 as usize].shape.numel())
    {
        return Err(format!("a view of value {} reaches elements {low} to {high}", v.0));
    }
    Ok(())
}

/// Values up to this size are checked element by element where an output is not dense.
const SMALL: usize = 1 << 16;

/// Checks that the outputs of a library call fill their values, each element once.
fn outputs(p: &Program, l: &Library) -> Result<(), String> {
    if l.outputs.len() != l.layouts.len() {
        return Err(format!("{} outputs and {} layouts", l.outputs.len(), l.layouts.len()));
    }
    let mut filled: FxHashMap<ValueId, Vec<&Layout>> = FxHashMap::default();
    for (v, layout) in l.outputs.iter().zip(&l.layouts).filter(|o| *o.0 != ValueId::NONE) {
        reach(p, *v, layout)?;
        filled.entry(*v).or_default().push(layout);
    }
    for (v, layouts) in filled {
        let size = p.values[v.0 as usize].shape.numel();
        if layouts.iter().map(|l| l.numel()).sum::<usize>() != size {
            return Err(format!("its outputs do not fill value {}", v.0));
        }
        let overlap = if layouts.iter().all(|l| l.is_dense()) {
            let mut ranges: Vec<(isize, usize)> =
                layouts.iter().map(|l| (l.offset, l.numel())).filter(|r| r.1 > 0).collect();
            ranges.sort_unstable();
            ranges.windows(2).any(|w| w[0].0 + w[0].1 as isize > w[1].0)
        } else if size <= SMALL {
            let mut seen = vec![false; size];
            layouts.iter().flat_map(|l| positions(l)).any(|at| std::mem::replace(&mut seen[at], true))
        } else {
            false
        };
        if overlap {
            return Err(format!("its outputs overlap in value {}", v.0));
        }
    }
    Ok(())
}

/// The position of each element of a layout.
fn positions(l: &Layout) -> impl Iterator<Item = usize> + '_ {
    (0..l.numel()).map(|k| {
        let (mut rest, mut at) = (k, l.offset);
        for (d, s) in l.shape.dims().iter().zip(l.strides()).rev() {
            at += (rest % d) as isize * s;
            rest /= d;
        }
        at as usize
    })
}

/// Checks that the regions of one launch are of one kind, and that none reads or overwrites what another one writes.
fn many(p: &Program, list: &[Region]) -> Result<(), String> {
    let Some(first) = list.first() else { return Err("no regions".into()) };
    let mut written = FxHashSet::default();
    for r in list {
        region(p, r)?;
        if !crate::horizontal_fusion::same(first, r) {
            return Err("regions of different kinds".into());
        }
        for v in r.writes().filter(|v| p.values[v.0 as usize].nbytes() > 0) {
            if !written.insert(place(p, v)) {
                return Err(format!("value {} is written twice", v.0));
            }
        }
    }
    for r in list {
        let own: FxHashSet<Storage> = r.writes().map(|v| place(p, v)).collect();
        if let Some(v) = r.reads().find(|v| written.contains(&place(p, *v)) && !own.contains(&place(p, *v))) {
            return Err(format!("value {} is read by another region of its launch", v.0));
        }
    }
    Ok(())
}

fn place(p: &Program, v: ValueId) -> Storage {
    p.values[v.0 as usize].storage
}

fn epilogue(p: &Program, l: &Library, r: &Region) -> Result<(), String> {
    region(p, r)?;
    let result = l.outputs[0];
    if r.batch != 1 || r.rows != 1 || r.cols != p.values[result.0 as usize].shape.numel() {
        return Err("not over the elements of the result".into());
    }
    let mut loads = 0;
    for i in &r.body {
        match &i.code {
            Code::Load { source: Source::Value(v), layout } if *v == result => {
                loads += 1;
                if reading(layout, r.cols, r.cols) != Reading::Same {
                    return Err("the result is not read in order".into());
                }
            }
            Code::ReduceRow(..) | Code::ReduceCol(..) | Code::Broadcast(_) => return Err("not a map".into()),
            _ => {}
        }
    }
    if loads != 1 { Err(format!("{loads} loads of the result")) } else { Ok(()) }
}

fn region(p: &Program, r: &Region) -> Result<(), String> {
    for (k, i) in r.body.iter().enumerate() {
        let reg = |x: Reg| -> Result<&Instr, String> {
            if x as usize >= k {
                Err(format!("instruction {k} reads register {x} before it is written"))
            } else {
                Ok(&r.body[x as usize])
            }
        };
        let fault = |why: &str| Err(format!("instruction {k}: {why}"));
        match &i.code {
            Code::Load { source, layout } => {
                if layout.numel() != r.count(i.level) {
                    return fault("load does not cover its level");
                }
                if let Some(v) = source.value() {
                    reach(p, v, layout)?;
                    if p.values[v.0 as usize].dtype != i.dtype {
                        return fault("load changes dtype");
                    }
                }
                if let Source::Block { input, start } = source {
                    if !matches!(p.values[input.0 as usize].storage, Storage::Input(_)) {
                        return fault("load of a block of a value that is no input");
                    }
                    let first = p.slots.len() - p.starts.len();
                    let start = (*start as usize).checked_sub(first).and_then(|k| p.starts.get(k));
                    if !start.is_some_and(|start| start.is_multiple_of(BLOCK_ALIGN / i.dtype.size())) {
                        return fault("load of a block that begins within a pack of elements");
                    }
                }
            }
            Code::Map(f, args) => {
                if args.len() != f.arity() {
                    return fault("wrong number of operands");
                }
                for &a in args {
                    if reg(a)?.level != i.level {
                        return fault("operands of another level");
                    }
                }
                let first = usize::from(*f == MapFn::Where);
                if args[first..].iter().any(|a| r.body[*a as usize].dtype != r.body[args[first] as usize].dtype) {
                    return fault("operands of different dtypes");
                }
            }
            Code::Cast(a) => {
                if reg(*a)?.level != i.level {
                    return fault("operand of another level");
                }
            }
            Code::Broadcast(a) => {
                if reg(*a)?.level != Level::Row || i.level != Level::Full {
                    return fault("spread is from row to full");
                }
            }
            Code::ReduceRow(_, a) => {
                if reg(*a)?.level != Level::Full || i.level != Level::Row {
                    return fault("row reduction is from full to row");
                }
            }
            Code::ReduceCol(_, a) => {
                if reg(*a)?.level != Level::Full || i.level != Level::Col {
                    return fault("column reduction is from full to col");
                }
            }
        }
    }
    for (reg, v) in &r.stores {
        let i = r.body.get(*reg as usize).ok_or("store of no register")?;
        let value = &p.values[v.0 as usize];
        let wide = r.pitch(value).filter(|_| i.level == Level::Full);
        let numel = wide.map_or(r.count(i.level), |pitch| pitch * r.batch * r.rows);
        if value.shape.numel() != numel || value.dtype != i.dtype {
            return Err(format!("store of register {reg} does not fit value {}", v.0));
        }
    }
    Ok(())
}
