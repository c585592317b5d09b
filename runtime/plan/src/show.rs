//! Formats a plan as text: kernels, bytes read and written, work, recipe lines.

use crate::ir::*;
use perilune_core::Shape;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Count, Work, collective, source};
use perilune_core::source_loc::{SourceLoc, SourceMap};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Bytes and operations of one kernel, counted from the program.
#[derive(Clone, Copy, Default, Debug)]
pub struct Cost {
    pub read: usize,
    pub written: usize,
    pub flops: usize,
}

impl Cost {
    /// The sum; what has no room in 64 bits is the largest number.
    pub fn plus(self, other: Cost) -> Cost {
        Cost {
            read: self.read.saturating_add(other.read),
            written: self.written.saturating_add(other.written),
            flops: self.flops.saturating_add(other.flops),
        }
    }
}

/// Counts the cost of a kernel. Each value counts once, however often the kernel reads it.
pub fn cost(p: &Program, k: &Kernel) -> Cost {
    let nbytes = |v: ValueId| p.values[v.0 as usize].nbytes();
    let bytes = |vs: Vec<ValueId>| {
        let unique: BTreeSet<ValueId> = vs.into_iter().collect();
        unique.into_iter().map(nbytes).fold(0, usize::saturating_add)
    };
    let mut flops = k.regions().iter().map(work).fold(0, usize::saturating_add);
    let mut written = k.writes();
    let mut read = bytes(k.reads()).saturating_sub(beside_blocks(k, &nbytes));
    if let Kernel::Library(l) = k {
        let out = p.values[l.outputs[0].0 as usize].shape;
        flops = flops.saturating_add(routine(l, out));
        read = read.saturating_sub(unread(l, out, &nbytes));
        if l.epilogue.is_some() {
            // Only the mapped result leaves the kernel.
            written.retain(|v| *v != l.outputs[0]);
        }
    }
    Cost { read, written: bytes(written), flops }
}

/// Calls `f` with the shapes of a call, counting what it executes.
fn executed<T>(l: &Library, out: Shape, f: impl FnOnce(&Work) -> T) -> T {
    let inputs: SmallVec<[Shape; 8]> = l.inputs.iter().map(|x| x.shape()).collect();
    f(&Work { inputs: &inputs, out, attrs: &l.attrs, count: Count::Executed })
}

/// The bytes of the values of which a kernel reads blocks alone, without those blocks.
fn beside_blocks(k: &Kernel, nbytes: &impl Fn(ValueId) -> usize) -> usize {
    let mut blocks: BTreeMap<ValueId, usize> = BTreeMap::new();
    let loads = k.regions().iter().flat_map(|r| &r.body);
    for i in loads {
        match &i.code {
            Code::Load { source: Source::Block { input, .. }, layout } => {
                let rest = nbytes(*input).saturating_sub(layout.numel() * i.dtype.size());
                blocks.entry(*input).and_modify(|least| *least = rest.min(*least)).or_insert(rest);
            }
            Code::Load { source: Source::Value(v), .. } => {
                blocks.insert(*v, 0);
            }
            _ => {}
        }
    }
    blocks.into_values().sum()
}

/// The operations of a routine's products, as the routine executes them.
pub(crate) fn routine(l: &Library, out: Shape) -> usize {
    l.op.flops.map_or(0, |flops| executed(l, out, flops) as usize)
}

/// The bytes of a routine's inputs that it does not read (see [`perilune_core::ops::Op::reads`]).
fn unread(l: &Library, out: Shape, nbytes: &impl Fn(ValueId) -> usize) -> usize {
    let Some(reads) = l.op.reads else { return 0 };
    let values = || {
        l.inputs
            .iter()
            .enumerate()
            .filter_map(|(k, o)| Some((k, if let Operand::View(v, _) = o { *v } else { return None })))
    };
    let read = |k: usize| executed(l, out, |work| reads(work, k)) as usize;
    // A value that several operands read counts as a whole.
    let only = |v: ValueId| values().filter(|(_, other)| *other == v).count() == 1;
    values()
        .filter(|(_, v)| only(*v))
        .map(|(k, v)| nbytes(v).saturating_sub(read(k).saturating_mul(l.dtypes[k].size())))
        .fold(0, usize::saturating_add)
}

/// The work of a node's products (matrix products, convolutions, attention) as recorded; `None` if it has none.
pub fn products(g: &Graph, id: NodeId) -> Option<f64> {
    let node = g.node(id);
    let flops = node.op.flops?;
    let inputs: SmallVec<[Shape; 8]> = node.inputs.iter().map(|x| g.shape(*x)).collect();
    let work = Work { inputs: &inputs, out: node.shape, attrs: &node.attrs, count: Count::Meant };
    Some(flops(&work) as f64)
}

fn work(r: &Region) -> usize {
    let of = |i: &Instr| match &i.code {
        Code::Map(f, _) => f.flops().max(usize::from(*f != MapFn::Copy)) * r.count(i.level),
        Code::ReduceRow(..) | Code::ReduceCol(..) => r.numel(),
        _ => 0,
    };
    r.body.iter().map(of).sum()
}

/// Whether a call is a collective of several tensors.
fn is_bucket(l: &Library) -> bool {
    collective::is_collective(l.op) && l.inputs.len() > 1
}

/// The name of a kernel: the op of a library call, or the functions that a region fuses, the most informative first.
pub fn name(k: &Kernel) -> String {
    match k {
        Kernel::Library(l) if l.op == &source::KERNEL => {
            source::body_of(l.op, &l.attrs).map_or_else(|| l.op.name.to_string(), |b| b.name.clone())
        }
        Kernel::Library(l) if is_bucket(l) => format!("{} of {}", l.op.name, l.inputs.len()),
        Kernel::Library(l) => match &l.epilogue {
            Some(r) => format!("{} > {}", l.op.name, functions(r)),
            None => l.op.name.to_string(),
        },
        Kernel::Region(r) => functions(r),
        Kernel::Multi(list) => format!("{} x {}", list.len(), list.first().map(functions).unwrap_or_default()),
    }
}

fn functions(r: &Region) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut add = |w: String| {
        if !words.contains(&w) {
            words.push(w);
        }
    };
    for i in &r.body {
        match &i.code {
            Code::ReduceRow(f, _) => add(format!("row_{}", format!("{f:?}").to_lowercase())),
            Code::ReduceCol(f, _) => add(format!("col_{}", format!("{f:?}").to_lowercase())),
            Code::Map(f, _) => add(format!("{f:?}").to_lowercase()),
            Code::Cast(_) => add("cast".into()),
            _ => {}
        }
    }
    if words.is_empty() {
        return "copy".into();
    }
    let more = words.len().saturating_sub(5);
    words.truncate(5);
    let tail = if more > 0 { format!("+{more}") } else { String::new() };
    format!("{}{tail}", words.join("+"))
}

/// The iteration space of a region, the shapes of a library call, or the total number of elements of a `Multi` or a bucket.
pub fn space(k: &Kernel) -> String {
    match k {
        Kernel::Region(r) => format!("{}x{}x{}", r.batch, r.rows, r.cols),
        Kernel::Library(l) if is_bucket(l) => {
            format!("{} in all", l.inputs.iter().map(|o| o.shape().numel()).sum::<usize>())
        }
        Kernel::Library(l) => l.inputs.iter().map(|o| o.shape().to_string()).collect::<Vec<_>>().join(" "),
        Kernel::Multi(list) => format!("{} in all", list.iter().map(Region::numel).sum::<usize>()),
    }
}

pub fn scaled(n: usize, unit: &str) -> String {
    let n = n as f64;
    match n {
        n if n >= 1e9 => format!("{:.1} G{unit}", n / 1e9),
        n if n >= 1e6 => format!("{:.1} M{unit}", n / 1e6),
        n if n >= 1e3 => format!("{:.1} k{unit}", n / 1e3),
        _ => format!("{n} {unit}"),
    }
}

/// The recipe line of an origin.
pub fn place(origin: Origin, places: &[SourceLoc]) -> SourceLoc {
    origin.position().and_then(|p| places.get(p)).copied().unwrap_or(SourceLoc::NONE)
}

/// Formats the plan as text: a summary line, then one line per kernel.
/// `places` are the source_map of the trace that the program was planned for, or of one with the same key.
pub fn show(p: &Program, places: &[SourceLoc], source_map: &SourceMap) -> String {
    let total = p.kernels.iter().map(|k| cost(p, k)).fold(Cost::default(), Cost::plus);
    let mut out = format!(
        "{} kernels · {} read · {} written · {} · arena {}\n",
        p.kernels.len(),
        scaled(total.read, "B"),
        scaled(total.written, "B"),
        scaled(total.flops, "FLOP"),
        scaled(p.arena_bytes, "B"),
    );
    for k in 0..p.kernels.len() {
        line(&mut out, p, k, places, source_map);
    }
    out
}

/// Formats kernel `at`; of a collective also beside how many kernels it runs.
fn line(out: &mut String, p: &Program, at: usize, places: &[SourceLoc], source_map: &SourceMap) {
    let k = &p.kernels[at];
    let c = cost(p, k);
    let beside = p.in_flight.iter().find(|f| f.start == at && f.wait > at + 1);
    let beside = beside.map(|f| format!(" · beside {} kernels", f.wait - at - 1)).unwrap_or_default();
    let _ = writeln!(
        out,
        "  {:<44} {:<24} {:>9} {:>9} {:>11}  {}{beside}",
        name(k),
        space(k),
        scaled(c.read, "B"),
        scaled(c.written, "B"),
        scaled(c.flops, "FLOP"),
        source_map.show(place(k.origin(), places)),
    );
}

/// The recipe lines that a kernel computes, in file order.
fn lines(k: &Kernel, places: &[SourceLoc], source_map: &SourceMap) -> Vec<SourceLoc> {
    let inside = k.regions().iter().flat_map(|r| r.body.iter().map(|i| i.origin));
    let all: BTreeSet<SourceLoc> = inside.chain([k.origin()]).map(|o| place(o, places)).collect();
    let mut all: Vec<SourceLoc> = all.into_iter().filter(|s| source_map.get(*s).is_some()).collect();
    all.sort_by_key(|s| source_map.get(*s).map(|(file, line)| (file.to_string(), line)));
    all
}

/// Formats the plan with, under each kernel, the recipe lines that it computes and the text it is compiled from.
/// `written` returns a recipe's line, `source` the text of the k-th kernel. A kernel whose text was shown before only
/// refers to that kernel.
pub fn show_sources(
    p: &Program,
    places: &[SourceLoc],
    source_map: &SourceMap,
    mut written: impl FnMut(&str, u32) -> Option<String>,
    source: impl Fn(usize) -> Option<perilune_core::Result<String>>,
) -> String {
    let whole = show(p, places, source_map);
    let mut out = whole.lines().next().unwrap_or_default().to_string() + "\n";
    let mut seen: Vec<(usize, String)> = Vec::new();
    for (n, k) in p.kernels.iter().enumerate() {
        let _ = write!(out, "\n#{:<3}", n + 1);
        line(&mut out, p, n, places, source_map);
        for loc in lines(k, places, source_map) {
            let text = source_map.get(loc).and_then(|(file, line)| written(file, line)).unwrap_or_default();
            let _ = writeln!(out, "    {:<28} | {}", source_map.show(loc), text.trim());
        }
        match source(n) {
            Some(Ok(text)) => match seen.iter().find(|s| s.1 == text) {
                Some((first, _)) => {
                    let _ = writeln!(out, "    the text of #{first}");
                }
                None => {
                    for l in text.lines() {
                        let _ = writeln!(out, "    {l}");
                    }
                    seen.push((n + 1, text));
                }
            },
            Some(Err(e)) => {
                let _ = writeln!(out, "    no text: {e}");
            }
            None => {}
        }
    }
    out
}
