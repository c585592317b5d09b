//! Plans the memory of temporaries: one arena per program, with offsets fixed at planning time.
//!
//! A walk over the kernels allocates the best-fitting free block when a value is first written and frees it after the
//! last reader. A large elementwise result reuses the block of an input whose last reader is the same kernel. The walk
//! is linear in the number of kernels, up to the logarithm of the free list's length. If it leaves holes and the
//! program is not too large, blocks are packed again with all lifetimes known, and the smallest arena is kept.
//!
//! What a collective in flight uses stays as it is until it is waited for. The operands of a large all-reduce lie one behind the other:
//! their producers write into one flat buffer, which is sent as one. Results of the same dtype overwrite them, results of another one
//! have a flat buffer of their own.

use crate::ir::*;
use crate::lanes;
use perilune_core::id_map::IdMap;
use rustc_hash::FxHashSet;
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Alignment of every value: at least a cache line on the CPU, and enough for TMA and vector loads on a GPU.
const ALIGN: usize = 256;
/// Minimum bytes of a result for reusing an input's block.
const IN_PLACE_BYTES: usize = 1 << 20;
/// Minimum bytes of a flat buffer. (An all-reduce that overwrites its operands takes a step more on a GPU.)
const FLAT_BYTES: usize = 4 << 10;
/// Maximum blocks for packing, which compares every pair of blocks. Programs with more keep the result of the walk.
const MAX_PACKED: usize = 4096;

/// Memory of one value, or of values that reuse it in place one after the other.
struct Block {
    nbytes: usize,
    at: usize,
    /// The first and last kernel that needs it.
    first: usize,
    last: usize,
    /// The values, and where they begin in it.
    values: Vec<(ValueId, usize)>,
}

/// Values that lie one behind the other: operands of an all-reduce, each overwritten with its result if that has the same dtype, or
/// results of another dtype, each as many elements from the first as its operand.
struct Flat {
    nbytes: usize,
    slots: Vec<Slot>,
}

struct Slot {
    at: usize,
    nbytes: usize,
    /// The value, and the result that overwrites it.
    values: SmallVec<[ValueId; 2]>,
}

#[derive(Default)]
struct Flats {
    all: Vec<Flat>,
    /// The buffer of a value, which is allocated when the first of them is written.
    of: IdMap<ValueId, usize>,
    /// Operands whose memory becomes that of a result.
    overwritten: FxHashSet<ValueId>,
}

impl Flats {
    /// Finds the flat buffers of a program. `last`: the last kernel that reads or writes a value, and `in_use`: the last one beside which
    /// a collective uses it.
    fn new(p: &Program, last: &IdMap<ValueId, usize>, in_use: &IdMap<ValueId, usize>) -> Flats {
        let mut out = Flats::default();
        let mut results: FxHashSet<ValueId> = FxHashSet::default();
        let size = |v: ValueId| p.values[v.0 as usize].dtype.size();
        for f in &p.in_flight {
            // Not what another collective uses too, or has overwritten.
            let is_own = |v: &ValueId| in_use.get(v).is_none_or(|until| *until == f.wait - 1) && !results.contains(v);
            let pairs = lanes::flat(p, f.start, |v| last[&v]).into_iter().filter(|(x, _)| is_own(x));
            let pairs: Vec<(ValueId, ValueId)> = pairs.collect();
            let bytes_of = |x: ValueId| round(p.values[x.0 as usize].nbytes());
            let nbytes: usize = pairs.iter().map(|(x, _)| bytes_of(*x)).sum();
            let Some((x, y)) = pairs.first().copied().filter(|_| nbytes >= FLAT_BYTES) else { continue };
            results.extend(pairs.iter().map(|(_, y)| *y));
            let growth = size(y) / size(x);
            if growth == 1 {
                out.overwritten.extend(pairs.iter().map(|(x, _)| *x));
                out.add(pairs.iter().map(|(x, y)| (bytes_of(*x), smallvec![*x, *y])));
            } else {
                out.add(pairs.iter().map(|(x, _)| (bytes_of(*x), smallvec![*x])));
                out.add(pairs.iter().map(|(x, y)| (growth * bytes_of(*x), smallvec![*y])));
            }
        }
        out
    }

    fn add(&mut self, slots: impl Iterator<Item = (usize, SmallVec<[ValueId; 2]>)>) {
        let mut flat = Flat { nbytes: 0, slots: Vec::new() };
        for (nbytes, values) in slots {
            self.of.extend([(values[0], self.all.len())]);
            flat.slots.push(Slot { at: flat.nbytes, nbytes, values });
            flat.nbytes += nbytes;
        }
        self.all.push(flat);
    }
}

/// Assigns storage to all values that have none.
pub fn assign(p: &mut Program) {
    let mut last: IdMap<ValueId, usize> = IdMap::default();
    last.reserve(p.values.len());
    for (k, kernel) in p.kernels.iter().enumerate() {
        for v in kernel.reads().into_iter().chain(kernel.writes()) {
            last.insert(v, k);
        }
    }
    products(p);
    let in_use = lanes::in_use(p);
    let flats = Flats::new(p, &last, &in_use);
    for (v, until) in &in_use {
        last.entry(*v).and_modify(|k| *k = (*k).max(*until));
    }
    let mut dying: Vec<Vec<ValueId>> = vec![Vec::new(); p.kernels.len()];
    for (&v, &k) in &last {
        // The memory of an operand that is overwritten is that of the result.
        if !flats.overwritten.contains(&v) {
            dying[k].push(v);
        }
    }
    let mut arena = Offsets::default();
    let mut live = 0usize;
    let mut blocks: Vec<Block> = Vec::new();
    let mut block_of: IdMap<ValueId, usize> = IdMap::default();
    // Of values in flat buffers, whose places may be larger than they are.
    let mut taken_bytes: IdMap<ValueId, usize> = IdMap::default();
    for k in 0..p.kernels.len() {
        dying[k].sort_unstable();
        let mut taken: Vec<ValueId> = Vec::new();
        for v in p.kernels[k].writes() {
            if p.values[v.0 as usize].storage != Storage::UNPLACED {
                continue;
            }
            if let Some(flat) = flats.of.get(&v).map(|f| &flats.all[*f]) {
                let at = arena.take(flat.nbytes);
                live += flat.nbytes;
                let until = flat.slots.iter().flat_map(|s| &s.values).map(|v| last[v]).max().unwrap_or(k);
                let mut block = Block { nbytes: flat.nbytes, at, first: k, last: until, values: Vec::new() };
                for slot in &flat.slots {
                    for v in &slot.values {
                        p.values[v.0 as usize].storage = Storage::Arena(at + slot.at);
                        block.values.push((*v, slot.at));
                        block_of.insert(*v, blocks.len());
                        taken_bytes.insert(*v, slot.nbytes);
                    }
                }
                blocks.push(block);
                continue;
            }
            let nbytes = round(p.values[v.0 as usize].nbytes());
            live += nbytes;
            // Many regions mostly write States in place; their other results are small.
            let many = matches!(p.kernels[k], Kernel::Multi(_));
            let heirs = if many { &[][..] } else { &dying[k][..] };
            let is_free = |d: &ValueId| !taken.contains(d) && in_use.get(d).is_none_or(|until| *until < k);
            let heir = heirs.iter().copied().find(|d| is_free(d) && inherits(p, k, v, *d));
            let at = match heir {
                Some(d) => {
                    taken.push(d);
                    live -= nbytes;
                    if let Some(nbytes) = taken_bytes.get(&d).copied() {
                        taken_bytes.insert(v, nbytes);
                    }
                    match p.values[d.0 as usize].storage {
                        Storage::Arena(at) => at,
                        _ => arena.take(nbytes),
                    }
                }
                None => arena.take(nbytes),
            };
            p.values[v.0 as usize].storage = Storage::Arena(at);
            let until = last[&v];
            match heir.and_then(|d| block_of.get(&d).copied()) {
                Some(b) => {
                    let offset = at - blocks[b].at;
                    blocks[b].last = blocks[b].last.max(until);
                    blocks[b].values.push((v, offset));
                    block_of.insert(v, b);
                }
                None => {
                    block_of.insert(v, blocks.len());
                    blocks.push(Block { nbytes, at, first: k, last: until, values: vec![(v, 0)] });
                }
            }
        }
        p.live_bytes = p.live_bytes.max(live);
        for &v in &dying[k] {
            if let Storage::Arena(at) = p.values[v.0 as usize].storage
                && at != usize::MAX
                && !taken.contains(&v)
            {
                let own = || round(p.values[v.0 as usize].nbytes());
                let nbytes = taken_bytes.get(&v).copied().unwrap_or_else(own);
                arena.give(at, nbytes);
                live -= nbytes;
            }
        }
    }
    p.arena_bytes = arena.end;
    if p.arena_bytes > p.live_bytes && blocks.len() <= MAX_PACKED {
        pack(p, &mut blocks);
    }
}

/// Stores a product in the buffer of its epilogue's result, if that is an output.
fn products(p: &mut Program) {
    let mut places = Vec::new();
    for k in &p.kernels {
        let Kernel::Library(Library { outputs, epilogue: Some(r), .. }) = k else { continue };
        let value = |v: ValueId| &p.values[v.0 as usize];
        let fits =
            |v: &ValueId| matches!(value(*v).storage, Storage::Output(_)) && value(*v).dtype == value(outputs[0]).dtype;
        if let Some(v) = r.writes().find(fits) {
            places.push((outputs[0], value(v).storage));
        }
    }
    for (v, storage) in places {
        p.values[v.0 as usize].storage = storage;
    }
}

/// Places blocks in several orders (largest first, longest-lived first …), each at the lowest offset that is free for
/// its whole lifetime, and keeps the best result if the arena shrinks. An order that cannot improve on the best so far
/// is abandoned.
fn pack(p: &mut Program, blocks: &mut [Block]) {
    let size = |b: &Block| b.nbytes;
    let area = |b: &Block| b.nbytes.saturating_mul(b.last - b.first + 1);
    let early = |b: &Block| usize::MAX - b.first;
    let late = |b: &Block| b.last;
    let long = |b: &Block| b.last - b.first;
    let mut best: Option<(usize, Vec<usize>)> = None;
    for key in [&size as &dyn Fn(&Block) -> usize, &area, &early, &late, &long] {
        let most = best.as_ref().map_or(p.arena_bytes, |b| b.0);
        if most <= p.live_bytes {
            break;
        }
        let mut order: Vec<usize> = (0..blocks.len()).filter(|b| blocks[*b].nbytes > 0).collect();
        order.sort_by_key(|b| (Reverse(key(&blocks[*b])), *b));
        let mut placed: Vec<usize> = Vec::new();
        let mut end = 0;
        for &b in &order {
            let (nbytes, first, last) = (blocks[b].nbytes, blocks[b].first, blocks[b].last);
            // `placed` is sorted by offset: take the first gap among the blocks alive at the same time.
            let mut at = 0;
            for &o in &placed {
                let o = &blocks[o];
                if o.first <= last && first <= o.last {
                    if at + nbytes <= o.at {
                        break;
                    }
                    at = at.max(o.at + o.nbytes);
                }
            }
            blocks[b].at = at;
            end = end.max(at + nbytes);
            if end >= most {
                // No smaller than the best so far.
                break;
            }
            let rank = placed.partition_point(|o| blocks[*o].at <= at);
            placed.insert(rank, b);
        }
        if end < most {
            best = Some((end, blocks.iter().map(|b| b.at).collect()));
        }
    }
    let Some((end, places)) = best else { return };
    p.arena_bytes = end;
    for (block, at) in blocks.iter().zip(places) {
        for (v, offset) in &block.values {
            p.values[v.0 as usize].storage = Storage::Arena(at + offset);
        }
    }
}

/// The values in the arena at its peak use, one for each block.
pub fn fullest(p: &Program) -> Vec<ValueId> {
    let mut alive = lanes::lifetimes(p);
    alive.retain(|v, _| matches!(p.values[v.0 as usize].storage, Storage::Arena(_)));
    let mut change = vec![0isize; p.kernels.len() + 1];
    for (v, (first, last)) in &alive {
        let nbytes = p.values[v.0 as usize].nbytes() as isize;
        change[*first] += nbytes;
        change[*last + 1] -= nbytes;
    }
    let (mut now, mut most, mut at) = (0, 0, 0);
    for (k, c) in change.iter().enumerate() {
        now += c;
        if now > most {
            (most, at) = (now, k);
        }
    }
    // A value and the one that reuses its block are both alive in one kernel; the larger one represents the block.
    let mut places: BTreeMap<usize, ValueId> = BTreeMap::new();
    for (v, (first, last)) in alive {
        let value = &p.values[v.0 as usize];
        let Storage::Arena(offset) = value.storage else { continue };
        if first <= at && at <= last && value.nbytes() > 0 {
            let held = places.entry(offset).or_insert(v);
            let old = &p.values[held.0 as usize];
            if (value.nbytes(), Reverse(v)) > (old.nbytes(), Reverse(*held)) {
                *held = v;
            }
        }
    }
    places.into_values().collect()
}

fn round(nbytes: usize) -> usize {
    nbytes.next_multiple_of(ALIGN)
}

/// Whether `v`, written by kernel `k`, may reuse the block of `dead`, whose last reader is `k`.
fn inherits(p: &Program, k: usize, v: ValueId, dead: ValueId) -> bool {
    let (new, old) = (&p.values[v.0 as usize], &p.values[dead.0 as usize]);
    let (r, product) = match &p.kernels[k] {
        Kernel::Region(r) => (r, false),
        // Excludes what the product itself still reads.
        Kernel::Library(Library { inputs, outputs, epilogue: Some(r), .. }) => {
            if inputs.iter().any(|o| matches!(o, Operand::View(x, _) if *x == dead)) {
                return false;
            }
            (r, outputs[0] == dead)
        }
        _ => return false,
    };
    if !r.writes().any(|s| s == v) || (new.nbytes() < IN_PLACE_BYTES && !product) {
        return false;
    }
    if new.nbytes() != old.nbytes() || new.dtype != old.dtype {
        return false;
    }
    if !matches!(old.storage, Storage::Arena(at) if at != usize::MAX) || v == dead {
        return false;
    }
    let read_in_order = r.body.iter().all(|i| match &i.code {
        Code::Load { source: Source::Value(x), layout } if *x == dead => {
            i.level == Level::Full && r.loads_in_place(layout, new)
        }
        _ => true,
    });
    let reads = r.body.iter().any(|i| matches!(i.code, Code::Load { source: Source::Value(x), .. } if x == dead));
    reads && read_in_order && r.stores.iter().all(|(reg, s)| *s != v || r.body[*reg as usize].level == Level::Full)
}

/// Allocates offsets by best fit; it owns no memory.
#[derive(Default, Debug)]
pub struct Offsets {
    /// One past the last byte ever allocated.
    pub end: usize,
    /// Free blocks by offset, and by (size, offset).
    by_offset: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
}

impl Offsets {
    /// Allocates `nbytes`; allocations of 0 bytes may share any offset.
    pub fn take(&mut self, nbytes: usize) -> usize {
        if nbytes == 0 {
            return 0;
        }
        if let Some(&(size, at)) = self.by_size.range((nbytes, 0)..).next() {
            self.remove(at, size);
            if size > nbytes {
                self.insert(at + nbytes, size - nbytes);
            }
            return at;
        }
        // Grow the arena, starting at the last free block if it touches the end.
        if let Some((&at, &size)) = self.by_offset.iter().next_back()
            && at + size == self.end
        {
            self.remove(at, size);
            self.end = at + nbytes;
            return at;
        }
        let at = self.end;
        self.end += nbytes;
        at
    }

    /// Frees a block.
    pub fn give(&mut self, mut at: usize, mut size: usize) {
        if size == 0 {
            return;
        }
        if let Some((&before, &n)) = self.by_offset.range(..at).next_back()
            && before + n == at
        {
            self.remove(before, n);
            at = before;
            size += n;
        }
        if let Some(&n) = self.by_offset.get(&(at + size)) {
            self.remove(at + size, n);
            size += n;
        }
        self.insert(at, size);
    }

    /// Drops the free block that touches the end, if one does.
    pub fn trim(&mut self) {
        if let Some((&at, &size)) = self.by_offset.iter().next_back()
            && at + size == self.end
        {
            self.remove(at, size);
            self.end = at;
        }
    }

    fn insert(&mut self, at: usize, size: usize) {
        self.by_offset.insert(at, size);
        self.by_size.insert((size, at));
    }

    fn remove(&mut self, at: usize, size: usize) {
        self.by_offset.remove(&at);
        self.by_size.remove(&(size, at));
    }
}
