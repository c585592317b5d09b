//! Fuses adjacent f32 loops of a list into one op whose values stay in registers (`loops::fused_interpreter`).
//!
//! Ops that only bind views to memory, and ops that read no result of the group, move before it; all others keep their
//! order. A value that only the group reads needs no tile. A result that a store copies to its output is stored there
//! directly if no later operand shares that memory, so an in-place update is one pass (`lower`).

mod lower;
mod rematerialize;

use super::scratch::touched;
use super::*;
use crate::loops::fused_interpreter::{self, FusedOp, MAX_LOCALS, MAX_OPS, MAX_SUMS, Opcode, Operand};
use crate::loops::superinstructions;
use smallvec::SmallVec;
use std::collections::HashSet;

/// Maximum candidates of a group: each lowers to up to four ops. The rest of `MAX_OPS` is for prefetches.
const MAX_CANDIDATES: usize = 22;
const _: () = assert!(4 * MAX_CANDIDATES + MAX_PREFETCHES <= MAX_OPS);
/// Maximum operands that a group prefetches.
const MAX_PREFETCHES: usize = 8;

/// A tile op that a group may include.
#[derive(Clone, Copy)]
enum Candidate {
    Map {
        f: MapFn,
        broadcast: RowBroadcast,
        out: View,
        args: [View; 3],
        shape: LoopShape,
        kernel: Kernel,
    },
    /// Sums each row of a result of the group.
    Sum {
        view: View,
        out: View,
        kernel: Kernel,
    },
    /// Stores a tile to its output.
    Store {
        view: View,
        value: u32,
        kernel: Kernel,
    },
}

impl Candidate {
    fn reads(&self) -> Vec<View> {
        match *self {
            Candidate::Map { f, args, .. } => args[..f.arity()].to_vec(),
            Candidate::Store { view, .. } | Candidate::Sum { view, .. } => vec![view],
        }
    }

    fn tile_op(self) -> TileOp {
        match self {
            Candidate::Map { f, broadcast, out, args, shape, kernel } => {
                TileOp::Loop { kernel, out, args, shape, round: None, fusable: Some(Fusable::Map(f, broadcast)) }
            }
            Candidate::Sum { view, out, kernel } => {
                let fusable = Some(Fusable::Sum);
                TileOp::Loop { kernel, out, args: [view; 3], shape: LoopShape::Reduce, round: None, fusable }
            }
            Candidate::Store { view, value, kernel } => TileOp::Store { view, value, size: 4, kernel, row: false },
        }
    }
}

/// Facts about the views of a list.
struct ViewFacts {
    /// The value that a view is bound to; `u32::MAX` for saved registers.
    memory: HashMap<View, u32>,
    tiles: HashSet<View>,
    /// The number of ops that use a view.
    uses: HashMap<View, usize>,
}

/// The grouping decision for one op of a list.
#[derive(Clone, Copy)]
enum Action {
    /// The current group ends before the op.
    End,
    /// The op joins the group.
    Join(Candidate),
    /// The op stays outside the group.
    Stay,
}

impl ViewFacts {
    fn of(list: &List) -> ViewFacts {
        let mut facts =
            ViewFacts { memory: HashMap::new(), tiles: list.tiles.iter().map(|t| t.0).collect(), uses: HashMap::new() };
        for s in &list.ops {
            let mut views = touched(s);
            views.sort_unstable();
            views.dedup();
            views.into_iter().for_each(|v| *facts.uses.entry(v).or_default() += 1);
            match s {
                TileOp::Bind { view, value, .. } | TileOp::BindOutput { view, value, .. } => {
                    facts.memory.insert(*view, *value);
                }
                TileOp::BindSaved { view, .. } => {
                    facts.memory.insert(*view, u32::MAX);
                }
                _ => {}
            }
        }
        facts
    }
}

impl Compiler<'_> {
    /// Replaces loops of the list by fused ops.
    pub(super) fn fuse(&mut self, list: &mut List) {
        if fused_interpreter::interpreter(self.isa).is_none() {
            return;
        }
        self.rematerialize(list);
        let mut facts = ViewFacts::of(list);
        let actions = self.actions(&list.ops, &facts);
        let mut group: Vec<Candidate> = Vec::new();
        for (s, actions) in std::mem::take(&mut list.ops).into_iter().zip(actions) {
            for m in &actions {
                match *m {
                    Action::End => self.emit_group(&mut group, list, &mut facts),
                    Action::Join(candidate) => group.push(candidate),
                    Action::Stay => {}
                }
            }
            if !matches!(actions.last(), Some(Action::Join(_))) {
                list.ops.push(s);
            }
        }
        self.emit_group(&mut group, list, &mut facts);
        self.insert_prefetches(list);
        for s in &mut list.ops {
            if let TileOp::Fused { kernel, ops, .. } = s
                && let Some(loops) = superinstructions::find(self.isa, ops)
            {
                *kernel = loops;
            }
        }
    }

    /// Decides for each op: at most one `End`, then one of the others.
    fn actions(&self, ops: &[TileOp], facts: &ViewFacts) -> Vec<SmallVec<[Action; 2]>> {
        let mut made: HashSet<View> = HashSet::new();
        // Row registers that the sums of the group write: valid once the group has run.
        let mut sums: HashSet<View> = HashSet::new();
        let mut all = Vec::with_capacity(ops.len());
        for s in ops {
            let mut actions: SmallVec<[Action; 2]> = SmallVec::new();
            if touched(s).iter().any(|v| sums.contains(v)) {
                actions.push(Action::End);
                made.clear();
                sums.clear();
            }
            let candidate = match *s {
                TileOp::Loop { kernel, out, args, shape, fusable: Some(Fusable::Map(f, broadcast)), .. }
                    if is_fusable(f, broadcast) =>
                {
                    made.insert(out);
                    Some(Candidate::Map { f, broadcast, out, args, shape, kernel })
                }
                TileOp::Loop { kernel, out, args: [view, ..], fusable: Some(Fusable::Sum), .. }
                    if made.contains(&view) && sums.len() < MAX_SUMS =>
                {
                    sums.insert(out);
                    Some(Candidate::Sum { view, out, kernel })
                }
                TileOp::Store { view, value, kernel, row: false, .. } if self.is_plain(view, value, facts) => {
                    Some(Candidate::Store { view, value, kernel })
                }
                _ => None,
            };
            // An op that reads no result of the group may run before it: only in-place stores overwrite operands of
            // others, and only stores follow them.
            let reads_group = || touched(s).iter().any(|v| made.contains(v));
            let ends = matches!(s, TileOp::Store { .. })
                || !matches!(s, TileOp::BindOutput { .. } | TileOp::BindSaved { .. } | TileOp::Bind { .. })
                    && reads_group();
            match candidate {
                Some(candidate) => actions.push(Action::Join(candidate)),
                None => {
                    if ends {
                        actions.push(Action::End);
                        made.clear();
                        sums.clear();
                    }
                    actions.push(Action::Stay);
                }
            }
            all.push(actions);
        }
        all
    }

    /// Adds prefetches to the longest group. Hardware prefetchers stop at a page boundary and start only with a tile's
    /// first loop. If rows are reduced, that loop runs before the group, so the group prefetches the next tile.
    fn insert_prefetches(&self, list: &mut List) {
        let cost = |s: &TileOp| match s {
            TileOp::Fused { ops, .. } => ops.iter().map(|l| l.opcode.cost()).sum(),
            _ => 0,
        };
        let Some(longest) = (0..list.ops.len()).max_by_key(|k| cost(&list.ops[*k])) else { return };
        // Views that are bound later in the list are not bound yet.
        let dense = list.ops[..longest].iter().filter_map(|s| match s {
            TileOp::Bind { view, value, stride: RowStride::Dense, .. } => Some((*view, *value)),
            _ => None,
        });
        let mut views: Vec<(View, u32)> = dense.collect();
        views.sort_unstable_by_key(|v| v.1);
        views.dedup_by_key(|v| v.1);
        let bytes: usize = views.iter().map(|v| self.program.values[v.1 as usize].nbytes()).sum();
        if bytes < PREFETCH_BYTES {
            return;
        }
        if let TileOp::Fused { ops, .. } = &mut list.ops[longest] {
            let reduced = self.body.iter().any(|i| matches!(i.code, Code::ReduceRow(..)));
            let opcode = if reduced { Opcode::PrefetchNext } else { Opcode::PrefetchNear };
            let ahead = views.iter().take(MAX_PREFETCHES).map(|v| FusedOp { opcode, operand: Operand::View(v.0) });
            *ops = ahead.chain(ops.iter().copied()).collect();
        }
    }

    /// Whether a store copies a tile of f32 unchanged.
    fn is_plain(&self, view: View, value: u32, facts: &ViewFacts) -> bool {
        self.program.values[value as usize].dtype == DType::F32 && facts.tiles.contains(&view)
    }

    /// Lowers the group in pieces of at most [`MAX_CANDIDATES`].
    fn emit_group(&mut self, group: &mut Vec<Candidate>, list: &mut List, facts: &mut ViewFacts) {
        let mut rest = &group[..];
        while !rest.is_empty() {
            let n = rest.len().min(MAX_CANDIDATES);
            let (now, later) = rest.split_at(n);
            self.emit_fused(now, list, facts);
            rest = later;
        }
        group.clear();
    }
}

/// Whether the interpreter has an opcode for a function with these operands.
fn is_fusable(f: MapFn, broadcast: RowBroadcast) -> bool {
    match f.arity() {
        1 => fused_interpreter::unary_opcode(f).is_some(),
        2 => fused_interpreter::binary_opcode(f).is_some() && !(broadcast.x && broadcast.y),
        _ => false,
    }
}
