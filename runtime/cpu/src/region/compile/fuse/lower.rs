//! Lowers a group of candidates to ops of the fused interpreter: selects opcodes, allocates local buffers and places
//! stores.

use super::*;

impl Compiler<'_> {
    /// Appends the fused op of a group to the list. A single candidate stays a loop unless non-temporal stores make
    /// fusion profitable.
    pub(super) fn emit_fused(&mut self, candidates: &[Candidate], list: &mut List, facts: &mut ViewFacts) {
        let Some(kernel) = fused_interpreter::interpreter(self.isa) else { return };
        let runs = candidates.iter().filter(|i| matches!(i, Candidate::Map { .. })).count();
        let alone = candidates.len() == 1
            && !matches!(candidates[0], Candidate::Map { out, .. } if self.prefers_nt_store(out, facts));
        if runs == 0 || alone {
            return list.ops.extend(candidates.iter().map(|i| i.tile_op()));
        }
        let candidates = self.forward_stores(candidates, list, facts);
        let mut inside: HashMap<View, usize> = HashMap::new();
        for candidate in &candidates {
            let mut views = candidate.reads();
            if let Candidate::Map { out, .. } = candidate {
                views.push(*out);
            }
            views.sort_unstable();
            views.dedup();
            views.into_iter().for_each(|v| *inside.entry(v).or_default() += 1);
        }
        let escapes = |v: View| facts.memory.contains_key(&v) || inside[&v] < facts.uses[&v];

        // The first pass selects ops without placing operands. The second pass gives each result that is read again a
        // local buffer or a store.
        let mut pending: Vec<PendingOp> = Vec::new();
        let mut read: HashSet<View> = HashSet::new();
        let mut accumulator: Option<View> = None;
        for candidate in &candidates {
            match *candidate {
                Candidate::Map { f, broadcast, out, args, .. } => {
                    select(f, broadcast, args, &mut accumulator, &mut pending, &mut read);
                    accumulator = Some(out);
                    pending.push(PendingOp::Result(out));
                    self.cost -= 0.045;
                }
                Candidate::Sum { view, out, .. } => {
                    load_accumulator(view, &mut accumulator, &mut pending, &mut read);
                    pending.push(PendingOp::Sum(out));
                    self.cost -= 0.045;
                }
                Candidate::Store { view, value, .. } => {
                    load_accumulator(view, &mut accumulator, &mut pending, &mut read);
                    let to = self.new_view();
                    list.ops.push(TileOp::BindOutput { view: to, value, size: 4 });
                    pending.push(PendingOp::Op(Opcode::Store, Some((to, false))));
                }
            }
        }
        let mut locals = LocalSlots::new(&pending);
        let mut ops = Vec::new();
        let mut sums = 0;
        for (k, d) in pending.iter().enumerate() {
            match *d {
                PendingOp::Op(opcode, operand) => {
                    let operand = match operand {
                        None => Operand::None,
                        Some((v, true)) => Operand::RowBroadcast(v),
                        Some((v, false)) => locals.of.get(&v).map_or(Operand::View(v), |&l| Operand::Local(l)),
                    };
                    ops.push(FusedOp { opcode, operand });
                }
                PendingOp::Sum(v) => {
                    ops.push(FusedOp { opcode: Opcode::Sum, operand: Operand::Sum(sums, v) });
                    sums += 1;
                }
                PendingOp::Result(v) => {
                    let operand = if escapes(v) {
                        if self.prefers_nt_store(v, facts) {
                            ops.push(FusedOp { opcode: Opcode::StoreNt, operand: Operand::View(v) });
                            locals.release(k);
                            continue;
                        }
                        Some(Operand::View(v))
                    } else if read.contains(&v) {
                        Some(locals.allocate(v).map_or(Operand::View(v), Operand::Local))
                    } else {
                        None
                    };
                    if let Some(operand) = operand {
                        ops.push(FusedOp { opcode: Opcode::Store, operand });
                    }
                }
            }
            locals.release(k);
        }
        debug_assert!(ops.len() <= MAX_OPS);
        let flat = candidates
            .iter()
            .all(|i| !matches!(i, Candidate::Map { shape: LoopShape::Rows, .. } | Candidate::Sum { .. }));
        let shape = if flat { LoopShape::Flat } else { LoopShape::Rows };
        list.ops.push(TileOp::Fused { kernel, ops: ops.into(), shape });
    }

    /// Whether a register is a result too large to stay in the caches until it is read. A non-temporal store avoids
    /// reading its lines first. A value that is updated in place already has its lines in the cache.
    fn prefers_nt_store(&self, v: View, facts: &ViewFacts) -> bool {
        let Some(value) = facts.memory.get(&v).filter(|m| **m != u32::MAX) else { return false };
        let loaded = self.body.iter().any(|i| {
            matches!(i.code, Code::Load { source: Source::Value(from), .. } if overlap(self.program, from, ValueId(*value)))
        });
        !loaded && self.program.values[*value as usize].nbytes() >= NT_STORE_BYTES
    }

    /// Stores results directly to the output that a later store of the group copies them to, if no operand read in
    /// between shares that memory.
    fn forward_stores(&mut self, candidates: &[Candidate], list: &mut List, facts: &mut ViewFacts) -> Vec<Candidate> {
        let mut candidates = candidates.to_vec();
        let mut at = 0;
        while at < candidates.len() {
            let Candidate::Store { view, value, .. } = candidates[at] else {
                at += 1;
                continue;
            };
            let made = candidates[..at].iter().position(|i| matches!(i, Candidate::Map { out, .. } if *out == view));
            let free = made.is_some_and(|m| {
                let later = candidates[m + 1..].iter().flat_map(Candidate::reads);
                let mut others = later.filter_map(|v| facts.memory.get(&v)).filter(|v| **v != u32::MAX);
                !facts.memory.contains_key(&view) && !others.any(|v| overlap(self.program, ValueId(*v), ValueId(value)))
            });
            if free {
                list.ops.push(TileOp::BindOutput { view, value, size: 4 });
                list.tiles.retain(|t| t.0 != view);
                facts.memory.insert(view, value);
                facts.tiles.remove(&view);
                candidates.remove(at);
            } else {
                at += 1;
            }
        }
        candidates
    }
}

/// Selects the ops of one function, given the register that the accumulator holds.
fn select(
    f: MapFn,
    broadcast: RowBroadcast,
    args: [View; 3],
    accumulator: &mut Option<View>,
    pending: &mut Vec<PendingOp>,
    read: &mut HashSet<View>,
) {
    if let Some(opcode) = fused_interpreter::unary_opcode(f) {
        load_accumulator(args[0], accumulator, pending, read);
        pending.push(PendingOp::Op(opcode, None));
        return;
    }
    let Some([first, second]) = fused_interpreter::binary_opcode(f) else {
        unreachable!("this is a bug: {f:?} has no opcode")
    };
    let [x, y, _] = args;
    if broadcast.y {
        load_accumulator(x, accumulator, pending, read);
        pending.push(PendingOp::Op(first.1, Some((y, true))));
    } else if broadcast.x {
        load_accumulator(y, accumulator, pending, read);
        pending.push(PendingOp::Op(second.1, Some((x, true))));
    } else if x == y && f == MapFn::Mul {
        load_accumulator(x, accumulator, pending, read);
        pending.push(PendingOp::Op(Opcode::Square, None));
    } else if *accumulator == Some(y) && x != y {
        pending.push(PendingOp::Op(second.0, Some((x, false))));
        read.insert(x);
    } else {
        load_accumulator(x, accumulator, pending, read);
        pending.push(PendingOp::Op(first.0, Some((y, false))));
        read.insert(y);
    }
}

/// Loads a register into the accumulator unless it is there.
fn load_accumulator(
    view: View,
    accumulator: &mut Option<View>,
    pending: &mut Vec<PendingOp>,
    read: &mut HashSet<View>,
) {
    if *accumulator != Some(view) {
        pending.push(PendingOp::Op(Opcode::Load, Some((view, false))));
        read.insert(view);
        *accumulator = Some(view);
    }
}

/// An op whose operand has not been placed.
enum PendingOp {
    /// An opcode with an operand, and whether the operand is a row broadcast.
    Op(Opcode, Option<(View, bool)>),
    /// The accumulator now holds this register.
    Result(View),
    /// Sums the accumulator row by row into this register.
    Sum(View),
}

/// Allocates the local buffers of a group of ops by linear scan.
struct LocalSlots {
    /// The last pending op that reads a register.
    last: HashMap<View, usize>,
    of: HashMap<View, u8>,
    free: Vec<u8>,
}

impl LocalSlots {
    fn new(pending: &[PendingOp]) -> LocalSlots {
        let mut last = HashMap::new();
        for (k, d) in pending.iter().enumerate() {
            if let PendingOp::Op(_, Some((v, false))) = d {
                last.insert(*v, k);
            }
        }
        LocalSlots { last, of: HashMap::new(), free: (0..MAX_LOCALS as u8).rev().collect() }
    }

    fn allocate(&mut self, v: View) -> Option<u8> {
        let l = self.free.pop()?;
        self.of.insert(v, l);
        Some(l)
    }

    /// Frees the buffer whose last reader is pending op `k`.
    fn release(&mut self, k: usize) {
        let LocalSlots { last, of, free } = self;
        of.retain(|v, l| {
            let keep = last.get(v) != Some(&k);
            if !keep {
                free.push(*l);
            }
            keep
        });
    }
}
