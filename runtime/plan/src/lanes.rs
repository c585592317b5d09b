//! Schedules collectives beside compute: when each starts, which of them share a bucket, and where a result is waited for.
//!
//! A collective starts as soon as its operands are computed, and is waited for before the first kernel that reads a result
//! ([`InFlight`]). Combinations (all-reduce, reduce-scatter) are merged into buckets in the order in which their operands are
//! completed, since a small message costs mostly latency: the first bucket is small, so that sending begins early, later ones have
//! up to a given number of bytes (PyTorch DDP, Li et al., arXiv:2006.15704). So are exchanges of terms ([`term_exchanges`]). Others
//! (gatherings) are merged only if they start together, since each starts one layer ahead of its use. A call that moves several
//! tensors combines each element as a call of its own would: in the order of the devices' coordinates.
//!
//! All of it is a function of the program alone, so all devices and processes decide alike.

use crate::ir::*;
use crate::kernel_order::{ControlDeps, Sorted};
use perilune_core::DType;
use perilune_core::id_map::IdMap;
use perilune_core::mesh::Axis;
use perilune_core::ops::collective::{self, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER};
use perilune_core::ops::slicing::STRIDED_PAD;
use rustc_hash::FxHashSet;

/// The default of the most bytes that are combined in one bucket, where it has several tensors.
pub const BUCKET_BYTES: usize = 25 << 20;

/// The most bytes of the first bucket of a kind.
pub const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// Reduce-scatters in flight along an axis: their operands are whole gradients, which live until they are waited for.
const MOST_SCATTERED: usize = 2;

/// The collective that a kernel is.
pub fn collective(kernel: &Kernel) -> Option<&Library> {
    match kernel {
        Kernel::Library(l) if collective::is_collective(l.op) => Some(l),
        _ => None,
    }
}

/// The axis of a collective.
pub fn axis(l: &Library) -> Axis {
    collective::axis(&l.attrs)
}

/// The stored values that a call reads.
fn operands(l: &Library) -> impl Iterator<Item = ValueId> + '_ {
    l.inputs.iter().filter_map(|o| if let Operand::View(v, _) = o { Some(*v) } else { None })
}

/// Which kernels exchange terms of sums that their readers add (`passes/shard/terms.rs`): regions that read the other device's term read
/// this one's too. `users`: for each kernel, those that follow it.
pub(crate) fn term_exchanges(kernels: &[(u32, Kernel)], users: &[impl AsRef<[usize]>]) -> Vec<bool> {
    let adds = |u: &usize, l: &Library| {
        let (kernel, reads) = (&kernels[*u].1, kernels[*u].1.reads());
        matches!(kernel, Kernel::Region(_)) && operands(l).all(|x| reads.contains(&x))
    };
    let exchanges = |k: usize| {
        let l = collective(&kernels[k].1).filter(|l| l.op == &COLLECTIVE_PERMUTE);
        l.is_some_and(|l| !users[k].as_ref().is_empty() && users[k].as_ref().iter().all(|u| adds(u, l)))
    };
    (0..kernels.len()).map(exchanges).collect()
}

/// Moves the anchors of collectives right behind their producers, and so those of the paddings that only collectives read.
/// `producers`: for each kernel, those that it follows. A kernel that follows a collective stays where it was recorded: before it can
/// start, the collective has to be waited for.
pub(crate) fn advance(kernels: &mut [(u32, Kernel)], producers: &[Vec<usize>], users: &[impl AsRef<[usize]>]) {
    let is_collective: Vec<bool> = kernels.iter().map(|(_, k)| collective(k).is_some()).collect();
    let feeds = |k: usize| users[k].as_ref().iter().all(|u| is_collective[*u]);
    let is_padding = |k: usize| matches!(&kernels[k].1, Kernel::Library(l) if l.op == &STRIDED_PAD) && feeds(k);
    let paddings: Vec<usize> = (0..kernels.len()).filter(|k| is_padding(*k)).collect();
    let collectives = (0..kernels.len()).filter(|k| is_collective[*k]);
    for k in paddings.into_iter().chain(collectives) {
        if producers[k].iter().any(|p| is_collective[*p]) {
            continue;
        }
        if let Some(last) = producers[k].iter().map(|p| kernels[*p].0).max() {
            kernels[k].0 = kernels[k].0.min(last);
        }
    }
}

/// What calls of one bucket have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    op: &'static str,
    axis: Axis,
    dtype: DType,
    /// The attribute that stands for the combination.
    combine: Option<i64>,
    /// Whether it combines or exchanges terms, so that others may join it until a result is read.
    of_terms: bool,
    /// Whether its operands can lie one behind the other (see [`flat`]).
    is_flat: bool,
}

/// Collectives that become one call.
struct Bucket {
    kind: Kind,
    members: Vec<usize>,
    bytes: usize,
    is_open: bool,
    /// Whether the next member had no room.
    is_full: bool,
}

/// Merges ordered collectives into buckets of at most `most` bytes, each at the place of its last member. `kept`: values that are
/// stored in a buffer of their own, as results and new values of States.
pub(crate) fn merge(
    sorted: Sorted,
    values: &[Value],
    deps: &ControlDeps,
    kept: &FxHashSet<ValueId>,
    most: usize,
) -> Vec<Kernel> {
    let Sorted { kernels, last, exchanged, hidden, route: _ } = sorted;
    if !kernels.iter().any(|k| collective(k).is_some()) {
        return kernels;
    }
    let mut buckets: Vec<Bucket> = Vec::new();
    // The bucket that will compute a value.
    let mut pending: IdMap<ValueId, usize> = IdMap::default();
    // Whether the last large combination has started.
    let mut ends = false;
    for (at, kernel) in kernels.iter().enumerate() {
        let follows = kernel.writes().into_iter().filter_map(|v| deps.get(&v)).flatten().copied();
        for v in kernel.reads().into_iter().chain(follows) {
            if let Some(b) = pending.get(&v) {
                buckets[*b].is_open = false;
            }
        }
        let Some(l) = collective(kernel) else {
            // What moves tensors as they are is not held back: a gathering is not for one of the next layer.
            buckets.iter_mut().filter(|b| !b.kind.of_terms).for_each(|b| b.is_open = false);
            continue;
        };
        let nbytes = |v: ValueId| values[v.0 as usize].nbytes();
        let operand = |(o, dtype): (&Operand, &DType)| o.shape().numel() * dtype.size();
        let sent: usize = l.inputs.iter().zip(&l.dtypes).map(operand).sum();
        let bytes = sent.max(l.outputs.iter().map(|v| nbytes(*v)).sum());
        let combine = collective::code_of(l.op, &l.attrs);
        let computed = |o: &Operand| {
            matches!(o, Operand::View(v, layout) if layout.is_contiguous()
            && values[v.0 as usize].storage == Storage::UNPLACED
            && layout.numel() == values[v.0 as usize].shape.numel())
        };
        let is_flat =
            l.op == &ALL_REDUCE && l.inputs.iter().all(computed) && !l.outputs.iter().any(|v| kept.contains(v));
        let dtype = values[l.outputs[0].0 as usize].dtype;
        let of_terms = combine.is_some() || l.outputs.iter().all(|v| exchanged.contains(v));
        let kind = Kind { op: l.op.name, axis: axis(l), dtype, combine, of_terms, is_flat };
        let begins = of_terms && !buckets.iter().any(|b| b.kind == kind && b.is_full);
        let limit = match of_terms {
            // The products behind it hide twice as much.
            true if ends => most.min((hidden[at] / 2).max(FIRST_BUCKET_BYTES)),
            _ if begins => most.min(FIRST_BUCKET_BYTES),
            _ => most,
        };
        let open = buckets.iter().rposition(|b| b.kind == kind && b.is_open);
        let b = match open.filter(|b| buckets[*b].bytes + bytes <= limit) {
            Some(b) => b,
            None => {
                open.into_iter().for_each(|b| (buckets[b].is_open, buckets[b].is_full) = (false, true));
                buckets.push(Bucket { kind, members: Vec::new(), bytes: 0, is_open: true, is_full: false });
                buckets.len() - 1
            }
        };
        buckets[b].members.push(at);
        buckets[b].bytes += bytes;
        if last.is_some_and(|last| l.outputs.contains(&last)) {
            // What starts behind it is waited for soon.
            ends = true;
            buckets.iter_mut().filter(|b| b.is_open).for_each(|b| (b.is_open, b.is_full) = (false, true));
        }
        pending.extend(l.outputs.iter().map(|v| (*v, b)));
    }
    join(kernels, &buckets)
}

/// Replaces the members of each bucket by one call.
fn join(kernels: Vec<Kernel>, buckets: &[Bucket]) -> Vec<Kernel> {
    let mut kernels: Vec<Option<Kernel>> = kernels.into_iter().map(Some).collect();
    for bucket in buckets.iter().filter(|b| b.members.len() > 1) {
        let mut whole: Option<Library> = None;
        for at in &bucket.members {
            let Some(Kernel::Library(l)) = kernels[*at].take() else { continue };
            match &mut whole {
                None => whole = Some(l),
                Some(all) => {
                    all.attrs.extend(l.attrs);
                    all.inputs.extend(l.inputs);
                    all.dtypes.extend(l.dtypes);
                    all.outputs.extend(l.outputs);
                    all.layouts.extend(l.layouts);
                }
            }
        }
        if let (Some(all), Some(last)) = (whole, bucket.members.last()) {
            kernels[*last] = Some(Kernel::Library(all));
        }
    }
    kernels.into_iter().flatten().collect()
}

/// Finds where the result of each collective is waited for.
pub(crate) fn in_flight(kernels: &[Kernel]) -> Vec<InFlight> {
    let mut all: Vec<InFlight> = Vec::new();
    // The entry that computes a value and is not waited for yet.
    let mut open: IdMap<ValueId, usize> = IdMap::default();
    let mut scattered: Vec<(Axis, usize)> = Vec::new();
    for (at, kernel) in kernels.iter().enumerate() {
        for v in kernel.reads() {
            if let Some(k) = open.get(&v) {
                all[*k].wait = all[*k].wait.min(at);
            }
        }
        let Some(l) = collective(kernel) else { continue };
        if l.op == &REDUCE_SCATTER {
            let own = axis(l);
            if let Some((_, k)) = scattered.iter().rev().filter(|s| s.0 == own).nth(MOST_SCATTERED - 1) {
                all[*k].wait = all[*k].wait.min(at);
            }
            scattered.push((own, all.len()));
        }
        open.extend(l.outputs.iter().map(|v| (*v, all.len())));
        all.push(InFlight { start: at, wait: kernels.len() });
    }
    all
}

/// The first and the last kernel that uses each value, those during which a collective uses it included.
pub fn lifetimes(p: &Program) -> IdMap<ValueId, (usize, usize)> {
    let mut out: IdMap<ValueId, (usize, usize)> = IdMap::default();
    for (k, kernel) in p.kernels.iter().enumerate() {
        for v in kernel.reads().into_iter().chain(kernel.writes()) {
            out.entry(v).or_insert((k, k)).1 = k;
        }
    }
    for (v, until) in in_use(p) {
        if let Some(life) = out.get_mut(&v) {
            life.1 = life.1.max(until);
        }
    }
    out
}

/// For each operand and result of a collective in flight, the last kernel beside which it is.
pub(crate) fn in_use(p: &Program) -> IdMap<ValueId, usize> {
    let mut out: IdMap<ValueId, usize> = IdMap::default();
    for f in &p.in_flight {
        for v in p.kernels[f.start].reads().into_iter().chain(p.kernels[f.start].writes()) {
            let until = out.entry(v).or_insert(f.start);
            *until = (*until).max(f.wait - 1);
        }
    }
    out
}

/// Checks that the memory of a collective in flight is left alone.
pub(crate) fn check(p: &Program) -> Result<(), String> {
    let mut last = None;
    for f in &p.in_flight {
        if f.start >= f.wait || f.wait > p.kernels.len() {
            return Err(format!("kernel {} is waited for before kernel {}", f.start, f.wait));
        }
        if collective(&p.kernels[f.start]).is_none() || last.is_some_and(|last| last >= f.start) {
            return Err(format!("kernel {} is in flight, but no collective, or out of order", f.start));
        }
        last = Some(f.start);
    }
    if !p.kernels.iter().any(|k| collective(k).is_some()) {
        return Ok(());
    }
    let mut starts = p.in_flight.iter().peekable();
    let mut open: Vec<(InFlight, Vec<Place>, Vec<Place>)> = Vec::new();
    for (k, kernel) in p.kernels.iter().enumerate() {
        open.retain(|(f, ..)| f.wait > k);
        let places = |ids: Vec<ValueId>| ids.into_iter().map(|v| Place::of(p, v)).collect::<Vec<_>>();
        let (reads, writes) = (places(kernel.reads()), places(kernel.writes()));
        for (f, operands, results) in &open {
            let meets = |own: &[Place], other: &[Place]| {
                own.iter().find(|x| other.iter().any(|y| x.overlaps(y))).map(|place| place.value)
            };
            if let Some(v) = meets(&reads, results) {
                return Err(format!("kernel {k} reads value {v}, which kernel {} still computes", f.start));
            }
            if let Some(v) = meets(&writes, results).or_else(|| meets(&writes, operands)) {
                return Err(format!("kernel {k} writes value {v} to memory that kernel {} still uses", f.start));
            }
        }
        if let Some(l) = collective(kernel) {
            overwritten(p, l).map_err(|e| format!("kernel {k}: {e}"))?;
        }
        if let Some(f) = starts.next_if(|f| f.start == k) {
            open.push((*f, reads, writes));
        }
    }
    Ok(())
}

/// Checks that a collective overwrites at most an operand of an all-reduce, with its own result.
fn overwritten(p: &Program, l: &Library) -> Result<(), String> {
    if l.inputs.len() != l.outputs.len() || l.attrs.len() != l.inputs.len() * collective::num_attrs(l.op, &l.attrs) {
        return Err(format!("{} operands, {} results, {} attributes", l.inputs.len(), l.outputs.len(), l.attrs.len()));
    }
    for (k, y) in l.outputs.iter().enumerate() {
        let result = Place::of(p, *y);
        for (i, o) in l.inputs.iter().enumerate() {
            let Operand::View(x, _) = o else { continue };
            let operand = Place::of(p, *x);
            let in_place = i == k && l.op == &ALL_REDUCE && operand.range == result.range;
            if operand.overlaps(&result) && !in_place {
                return Err(format!("value {} overlaps its operand, value {}", y.0, x.0));
            }
        }
    }
    Ok(())
}

/// The memory of a value.
#[derive(Clone, Debug)]
struct Place {
    value: u32,
    /// Which buffer: the arena, or an input or an output.
    buffer: (u8, u32),
    range: std::ops::Range<usize>,
}

impl Place {
    fn of(p: &Program, v: ValueId) -> Place {
        let value = &p.values[v.0 as usize];
        let (buffer, at) = match value.storage {
            Storage::Arena(at) => ((0, 0), at),
            Storage::Input(k) => ((1, k), 0),
            Storage::Output(k) => ((2, k), 0),
        };
        Place { value: v.0, buffer, range: at..at + value.nbytes() }
    }

    fn overlaps(&self, other: &Place) -> bool {
        let meets = self.range.start < other.range.end && other.range.start < self.range.end;
        self.buffer == other.buffer && meets && !self.range.is_empty() && !other.range.is_empty()
    }
}

/// The operands of an all-reduce that can lie one behind the other, with their results, in order: whole values in the arena that
/// nothing reads behind it. Results of the same dtype can overwrite them.
pub(crate) fn flat(p: &Program, k: usize, last: impl Fn(ValueId) -> usize) -> Vec<(ValueId, ValueId)> {
    let Some(l) = collective(&p.kernels[k]).filter(|l| l.op == &ALL_REDUCE) else { return Vec::new() };
    let value = |v: ValueId| &p.values[v.0 as usize];
    let mut seen: FxHashSet<ValueId> = FxHashSet::default();
    let pair = |(o, y): (&Operand, &ValueId)| {
        let Operand::View(x, layout) = o else { return None };
        let (numel, of_result) = (value(*x).shape.numel(), value(*y).shape.numel());
        let whole = layout.is_contiguous() && layout.offset == 0 && layout.numel() == numel;
        let unplaced = [*x, *y].iter().all(|v| value(*v).storage == Storage::UNPLACED);
        (whole && unplaced && last(*x) == k && numel == of_result && seen.insert(*x)).then_some((*x, *y))
    };
    let repeated = |x: ValueId| operands(l).filter(|v| *v == x).count() > 1;
    l.inputs.iter().zip(&l.outputs).filter_map(pair).filter(|(x, _)| !repeated(*x)).collect()
}
