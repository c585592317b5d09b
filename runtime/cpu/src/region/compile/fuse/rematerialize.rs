//! Recomputes cheap intermediate results in every group of fused ops that reads them.

use super::*;

impl Compiler<'_> {
    /// Recomputes a cheap result in each later group that reads it: the sum, difference or product of an operand in
    /// memory and a row value. This costs less than storing and loading a tile, and leaves room in the L1 cache.
    pub(super) fn rematerialize(&mut self, list: &mut List) {
        let facts = ViewFacts::of(list);
        let mut group = 0;
        // The group of each op that joins one.
        let of: Vec<Option<usize>> = self
            .actions(&list.ops, &facts)
            .iter()
            .map(|actions| {
                group += actions.iter().filter(|m| matches!(m, Action::End)).count();
                matches!(actions.last(), Some(Action::Join(_))).then_some(group)
            })
            .collect();
        let mut ops: Vec<Option<TileOp>> = std::mem::take(&mut list.ops).into_iter().map(Some).collect();
        // The ops to insert before each op.
        let mut before: Vec<Vec<TileOp>> = ops.iter().map(|_| Vec::new()).collect();
        for m in 0..ops.len() {
            let Some(TileOp::Loop { kernel, out, args, shape, round: None, fusable: Some(Fusable::Map(f, broadcast)) }) =
                ops[m]
            else {
                continue;
            };
            let cheap = matches!(f, MapFn::Add | MapFn::Sub | MapFn::Mul) && (broadcast.x != broadcast.y);
            if !cheap || of[m].is_none() || facts.memory.contains_key(&out) || !facts.tiles.contains(&out) {
                continue;
            }
            let from = if broadcast.x { args[1] } else { args[0] };
            let value = facts.memory.get(&from).copied().filter(|m| *m != u32::MAX);
            if value.is_none_or(|value| self.is_overwritten(from, value, &ops)) {
                continue;
            }
            let uses = |s: &Option<TileOp>| s.as_ref().is_some_and(|s| touched(s).contains(&out));
            let later: Vec<usize> = (m + 1..ops.len()).filter(|k| of[*k] != of[m] && uses(&ops[*k])).collect();
            let maps = |k: &usize| matches!(ops[*k], Some(TileOp::Loop { fusable: Some(Fusable::Map(..)), .. }));
            if !later.iter().all(|k| of[*k].is_some() && maps(k)) {
                continue;
            }
            let mut copies: HashMap<usize, View> = HashMap::new();
            for k in later {
                let Some(group) = of[k] else { continue };
                let view = *copies.entry(group).or_insert_with(|| {
                    let view = self.new_view();
                    list.tiles.push((view, 4));
                    let fusable = Some(Fusable::Map(f, broadcast));
                    before[k].push(TileOp::Loop { kernel, out: view, args, shape, round: None, fusable });
                    view
                });
                if let Some(TileOp::Loop { args, .. }) = &mut ops[k] {
                    args.iter_mut().filter(|a| **a == out).for_each(|a| *a = view);
                }
            }
        }
        list.ops = before.into_iter().zip(ops).flat_map(|(b, s)| b.into_iter().chain(s)).collect();
    }

    /// Whether another result may be stored to the memory that a view of value `from` reads.
    fn is_overwritten(&self, view: View, from: u32, ops: &[Option<TileOp>]) -> bool {
        ops.iter().flatten().any(|s| match *s {
            TileOp::BindOutput { view: to, value, .. } => {
                to != view && overlap(self.program, ValueId(from), ValueId(value))
            }
            TileOp::Store { value, .. } => overlap(self.program, ValueId(from), ValueId(value)),
            _ => false,
        })
    }
}
