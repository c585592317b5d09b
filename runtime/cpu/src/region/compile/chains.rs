//! Chains: neighbouring f32 steps of a list become one step whose values stay in registers (`loops::chain`).
//!
//! Steps that only point views at memory, and steps that read nothing of what the chain makes, move before it; the order
//! of everything else stays. A value that only the chain reads needs no tile, and a result that a store would copy to
//! its output is written there at once if nothing read after it lies there: an update in place becomes one pass.

use super::scratch::touched;
use super::*;
use crate::loops::chain::{self, Act, Link, MAX_LINKS, MAX_LOCALS, MAX_SUMS, Place};
use crate::loops::spelled;
use crate::region;
use smallvec::SmallVec;
use std::collections::HashSet;

/// Functions of a chain at most: each takes up to four links. The rest of `MAX_LINKS` is for reading ahead.
const FUNCTIONS: usize = 22;
const _: () = assert!(4 * FUNCTIONS + MAX_AHEAD <= MAX_LINKS);
/// Operands that a chain reads ahead at most.
const MAX_AHEAD: usize = 8;

/// A step that a chain may take in.
#[derive(Clone, Copy)]
enum Item {
    Run {
        f: MapFn,
        still: Still,
        out: View,
        args: [View; 3],
        form: Form,
        kernel: Kernel,
    },
    /// The sum of each row of what the chain makes.
    Sum {
        view: View,
        out: View,
        kernel: Kernel,
    },
    /// A tile to its output.
    Store {
        view: View,
        value: u32,
        kernel: Kernel,
    },
}

impl Item {
    fn reads(&self) -> Vec<View> {
        match *self {
            Item::Run { f, args, .. } => args[..f.arity()].to_vec(),
            Item::Store { view, .. } | Item::Sum { view, .. } => vec![view],
        }
    }

    fn step(self) -> Step {
        match self {
            Item::Run { f, still, out, args, form, kernel } => {
                Step::Run { kernel, out, args, form, round: None, link: Some(Linked::Map(f, still)) }
            }
            Item::Sum { view, out, kernel } => {
                let link = Some(Linked::Sum);
                Step::Run { kernel, out, args: [view; 3], form: Form::Reduce, round: None, link }
            }
            Item::Store { view, value, kernel } => Step::Store { view, value, size: 4, kernel, row: false },
        }
    }
}

/// What holds of the views of a list.
struct Known {
    /// The value that a view was pointed at.
    memory: HashMap<View, u32>,
    tiles: HashSet<View>,
    /// How many steps touch a view.
    uses: HashMap<View, usize>,
}

/// What becomes of a step of a list.
#[derive(Clone, Copy)]
enum Move {
    /// The chain at hand ends before the step.
    End,
    /// The step joins the chain.
    Join(Item),
    /// It stays a step of its own.
    Stay,
}

impl Known {
    fn of(list: &List) -> Known {
        let mut known =
            Known { memory: HashMap::new(), tiles: list.tiles.iter().map(|t| t.0).collect(), uses: HashMap::new() };
        for s in &list.steps {
            let mut views = touched(s);
            views.sort_unstable();
            views.dedup();
            views.into_iter().for_each(|v| *known.uses.entry(v).or_default() += 1);
            match s {
                Step::Bind { view, value, .. } | Step::Out { view, value, .. } => {
                    known.memory.insert(*view, *value);
                }
                Step::Kept { view, .. } => {
                    known.memory.insert(*view, u32::MAX);
                }
                _ => {}
            }
        }
        known
    }
}

impl Compiler<'_> {
    pub(super) fn chains(&mut self, list: &mut List) {
        if chain::chain(self.isa).is_none() {
            return;
        }
        self.make_again(list);
        let mut known = Known::of(list);
        let moves = self.moves(&list.steps, &known);
        let mut group: Vec<Item> = Vec::new();
        for (s, moves) in std::mem::take(&mut list.steps).into_iter().zip(moves) {
            for m in &moves {
                match *m {
                    Move::End => self.flush(&mut group, list, &mut known),
                    Move::Join(item) => group.push(item),
                    Move::Stay => {}
                }
            }
            if !matches!(moves.last(), Some(Move::Join(_))) {
                list.steps.push(s);
            }
        }
        self.flush(&mut group, list, &mut known);
        self.read_ahead(list);
        for s in &mut list.steps {
            if let Step::Chain { kernel, links, .. } = s
                && let Some(loops) = spelled::find(self.isa, links)
            {
                *kernel = loops;
            }
        }
    }

    /// For each step, what becomes of it: at most an end and then one of the others.
    fn moves(&self, steps: &[Step], known: &Known) -> Vec<SmallVec<[Move; 2]>> {
        let mut made: HashSet<View> = HashSet::new();
        // Row registers that the chain's sums write: there once the chain is done.
        let mut sums: HashSet<View> = HashSet::new();
        let mut all = Vec::with_capacity(steps.len());
        for s in steps {
            let mut moves: SmallVec<[Move; 2]> = SmallVec::new();
            if touched(s).iter().any(|v| sums.contains(v)) {
                moves.push(Move::End);
                made.clear();
                sums.clear();
            }
            let item = match *s {
                Step::Run { kernel, out, args, form, link: Some(Linked::Map(f, still)), .. } if takes(f, still) => {
                    made.insert(out);
                    Some(Item::Run { f, still, out, args, form, kernel })
                }
                Step::Run { kernel, out, args: [view, ..], link: Some(Linked::Sum), .. }
                    if made.contains(&view) && sums.len() < MAX_SUMS =>
                {
                    sums.insert(out);
                    Some(Item::Sum { view, out, kernel })
                }
                Step::Store { view, value, kernel, row: false, .. } if self.is_plain(view, value, known) => {
                    Some(Item::Store { view, value, kernel })
                }
                _ => None,
            };
            // Whatever reads nothing of the chain may run before it: only stores in place overwrite what others read, and
            // only stores follow them.
            let reads_chain = || touched(s).iter().any(|v| made.contains(v));
            let ends = matches!(s, Step::Store { .. })
                || !matches!(s, Step::Out { .. } | Step::Kept { .. } | Step::Bind { .. }) && reads_chain();
            match item {
                Some(item) => moves.push(Move::Join(item)),
                None => {
                    if ends {
                        moves.push(Move::End);
                        made.clear();
                        sums.clear();
                    }
                    moves.push(Move::Stay);
                }
            }
            all.push(moves);
        }
        all
    }

    /// Has a chain make again what an earlier one made of memory and a number of the row by one sum, difference or product:
    /// that costs less than a tile that is written and read, and leaves room in the first cache.
    fn make_again(&mut self, list: &mut List) {
        let known = Known::of(list);
        let mut chain = 0;
        // The chain of each step that joins one.
        let of: Vec<Option<usize>> = self
            .moves(&list.steps, &known)
            .iter()
            .map(|moves| {
                chain += moves.iter().filter(|m| matches!(m, Move::End)).count();
                matches!(moves.last(), Some(Move::Join(_))).then_some(chain)
            })
            .collect();
        let mut steps: Vec<Option<Step>> = std::mem::take(&mut list.steps).into_iter().map(Some).collect();
        // What is to run before a step.
        let mut before: Vec<Vec<Step>> = steps.iter().map(|_| Vec::new()).collect();
        for m in 0..steps.len() {
            let Some(Step::Run { kernel, out, args, form, round: None, link: Some(Linked::Map(f, still)) }) = steps[m]
            else {
                continue;
            };
            let cheap = matches!(f, MapFn::Add | MapFn::Sub | MapFn::Mul) && (still.x != still.y);
            if !cheap || of[m].is_none() || known.memory.contains_key(&out) || !known.tiles.contains(&out) {
                continue;
            }
            let from = if still.x { args[1] } else { args[0] };
            let value = known.memory.get(&from).copied().filter(|m| *m != u32::MAX);
            if value.is_none_or(|value| self.is_overwritten(from, value, &steps)) {
                continue;
            }
            let uses = |s: &Option<Step>| s.as_ref().is_some_and(|s| touched(s).contains(&out));
            let later: Vec<usize> = (m + 1..steps.len()).filter(|k| of[*k] != of[m] && uses(&steps[*k])).collect();
            let maps = |k: &usize| matches!(steps[*k], Some(Step::Run { link: Some(Linked::Map(..)), .. }));
            if !later.iter().all(|k| of[*k].is_some() && maps(k)) {
                continue;
            }
            let mut again: HashMap<usize, View> = HashMap::new();
            for k in later {
                let Some(chain) = of[k] else { continue };
                let view = *again.entry(chain).or_insert_with(|| {
                    let view = self.new_view();
                    list.tiles.push((view, 4));
                    let link = Some(Linked::Map(f, still));
                    before[k].push(Step::Run { kernel, out: view, args, form, round: None, link });
                    view
                });
                if let Some(Step::Run { args, .. }) = &mut steps[k] {
                    args.iter_mut().filter(|a| **a == out).for_each(|a| *a = view);
                }
            }
        }
        list.steps = before.into_iter().zip(steps).flat_map(|(b, s)| b.into_iter().chain(s)).collect();
    }

    /// Whether some other result may be written to the memory of a view of a value.
    fn is_overwritten(&self, view: View, from: u32, steps: &[Option<Step>]) -> bool {
        steps.iter().flatten().any(|s| match *s {
            Step::Out { view: to, value, .. } => to != view && overlap(self.program, ValueId(from), ValueId(value)),
            Step::Store { value, .. } => overlap(self.program, ValueId(from), ValueId(value)),
            _ => false,
        })
    }

    /// Lets the longest chain ask for memory that will be needed soon, while it computes: what processors fetch by
    /// themselves ends at a page, and waits until a tile's first loop has come to it. Where rows are reduced, that is a
    /// loop before the chain, so the chain asks for the next tile.
    fn read_ahead(&self, list: &mut List) {
        let cost = |s: &Step| match s {
            Step::Chain { links, .. } => links.iter().map(|l| l.act.cost()).sum(),
            _ => 0,
        };
        let Some(longest) = (0..list.steps.len()).max_by_key(|k| cost(&list.steps[*k])) else { return };
        // What is pointed at memory later in the list points nowhere yet.
        let dense = list.steps[..longest].iter().filter_map(|s| match s {
            Step::Bind { view, value, place: region::Place::Dense, .. } => Some((*view, *value)),
            _ => None,
        });
        let mut views: Vec<(View, u32)> = dense.collect();
        views.sort_unstable_by_key(|v| v.1);
        views.dedup_by_key(|v| v.1);
        let bytes: usize = views.iter().map(|v| self.program.values[v.1 as usize].nbytes()).sum();
        if bytes < READ_AHEAD_BYTES {
            return;
        }
        if let Step::Chain { links, .. } = &mut list.steps[longest] {
            let reduced = self.body.iter().any(|i| matches!(i.code, Code::ReduceRow(..)));
            let act = if reduced { Act::Next } else { Act::Near };
            let ahead = views.iter().take(MAX_AHEAD).map(|v| Link { act, place: Place::View(v.0) });
            *links = ahead.chain(links.iter().copied()).collect();
        }
    }

    /// Whether a store moves a tile of f32 as it is.
    fn is_plain(&self, view: View, value: u32, known: &Known) -> bool {
        self.program.values[value as usize].dtype == DType::F32 && known.tiles.contains(&view)
    }

    fn flush(&mut self, group: &mut Vec<Item>, list: &mut List, known: &mut Known) {
        let mut rest = &group[..];
        while !rest.is_empty() {
            let n = rest.len().min(FUNCTIONS);
            let (now, later) = rest.split_at(n);
            self.chain(now, list, known);
            rest = later;
        }
        group.clear();
    }

    fn chain(&mut self, items: &[Item], list: &mut List, known: &mut Known) {
        let Some(kernel) = chain::chain(self.isa) else { return };
        let runs = items.iter().filter(|i| matches!(i, Item::Run { .. })).count();
        let alone = items.len() == 1 && !matches!(items[0], Item::Run { out, .. } if self.streams(out, known));
        if runs == 0 || alone {
            return list.steps.extend(items.iter().map(|i| i.step()));
        }
        let items = self.store_at_once(items, list, known);
        let mut inside: HashMap<View, usize> = HashMap::new();
        for item in &items {
            let mut views = item.reads();
            if let Item::Run { out, .. } = item {
                views.push(*out);
            }
            views.sort_unstable();
            views.dedup();
            views.into_iter().for_each(|v| *inside.entry(v).or_default() += 1);
        }
        let escapes = |v: View| known.memory.contains_key(&v) || inside[&v] < known.uses[&v];

        // First what must be read from memory, then the links, with a store for each of those.
        let mut draft: Vec<Draft> = Vec::new();
        let mut read: HashSet<View> = HashSet::new();
        let mut running: Option<View> = None;
        for item in &items {
            match *item {
                Item::Run { f, still, out, args, .. } => {
                    self.links(f, still, args, &mut running, &mut draft, &mut read);
                    running = Some(out);
                    draft.push(Draft::Made(out));
                    self.cost -= 0.045;
                }
                Item::Sum { view, out, .. } => {
                    start(view, &mut running, &mut draft, &mut read);
                    draft.push(Draft::Sum(out));
                    self.cost -= 0.045;
                }
                Item::Store { view, value, .. } => {
                    start(view, &mut running, &mut draft, &mut read);
                    let to = self.new_view();
                    list.steps.push(Step::Out { view: to, value, size: 4 });
                    draft.push(Draft::Link(Act::Store, Some((to, false))));
                }
            }
        }
        let mut locals = Locals::new(&draft);
        let mut links = Vec::new();
        let mut sums = 0;
        for (k, d) in draft.iter().enumerate() {
            match *d {
                Draft::Link(act, operand) => {
                    let place = match operand {
                        None => Place::None,
                        Some((v, true)) => Place::Still(v),
                        Some((v, false)) => locals.of.get(&v).map_or(Place::View(v), |&l| Place::Local(l)),
                    };
                    links.push(Link { act, place });
                }
                Draft::Sum(v) => {
                    links.push(Link { act: Act::Sum, place: Place::Sum(sums, v) });
                    sums += 1;
                }
                Draft::Made(v) => {
                    let place = if escapes(v) {
                        if self.streams(v, known) {
                            links.push(Link { act: Act::Stream, place: Place::View(v) });
                            locals.done(k);
                            continue;
                        }
                        Some(Place::View(v))
                    } else if read.contains(&v) {
                        Some(locals.take(v, k).map_or(Place::View(v), Place::Local))
                    } else {
                        None
                    };
                    if let Some(place) = place {
                        links.push(Link { act: Act::Store, place });
                    }
                }
            }
            locals.done(k);
        }
        debug_assert!(links.len() <= MAX_LINKS);
        let flat = items.iter().all(|i| !matches!(i, Item::Run { form: Form::Rows, .. } | Item::Sum { .. }));
        let form = if flat { Form::Flat } else { Form::Rows };
        list.steps.push(Step::Chain { kernel, links: links.into(), form });
    }

    /// Whether a register is a result too large to be found in a cache by whoever reads it next. Writing such a one past
    /// the caches saves reading its lines first. What is updated in place has its lines at hand.
    fn streams(&self, v: View, known: &Known) -> bool {
        let Some(value) = known.memory.get(&v).filter(|m| **m != u32::MAX) else { return false };
        let loaded = self.body.iter().any(|i| {
            matches!(i.code, Code::Load { source: Source::Value(from), .. } if overlap(self.program, from, ValueId(*value)))
        });
        !loaded && self.program.values[*value as usize].nbytes() >= STREAM_BYTES
    }

    /// The links of one function, given what is running.
    fn links(
        &self,
        f: MapFn,
        still: Still,
        args: [View; 3],
        running: &mut Option<View>,
        draft: &mut Vec<Draft>,
        read: &mut HashSet<View>,
    ) {
        if let Some(act) = chain::unary(f) {
            start(args[0], running, draft, read);
            draft.push(Draft::Link(act, None));
            return;
        }
        let Some([first, second]) = chain::binary(f) else { unreachable!("this is a bug: {f:?} is no link") };
        let [x, y, _] = args;
        if still.y {
            start(x, running, draft, read);
            draft.push(Draft::Link(first.1, Some((y, true))));
        } else if still.x {
            start(y, running, draft, read);
            draft.push(Draft::Link(second.1, Some((x, true))));
        } else if x == y && f == MapFn::Mul {
            start(x, running, draft, read);
            draft.push(Draft::Link(Act::Square, None));
        } else if *running == Some(y) && x != y {
            draft.push(Draft::Link(second.0, Some((x, false))));
            read.insert(x);
        } else {
            start(x, running, draft, read);
            draft.push(Draft::Link(first.0, Some((y, false))));
            read.insert(y);
        }
    }

    /// Lets results be written where a later store of the chain would copy them, if nothing read in between lies there.
    fn store_at_once(&mut self, items: &[Item], list: &mut List, known: &mut Known) -> Vec<Item> {
        let mut items = items.to_vec();
        let mut at = 0;
        while at < items.len() {
            let Item::Store { view, value, .. } = items[at] else {
                at += 1;
                continue;
            };
            let made = items[..at].iter().position(|i| matches!(i, Item::Run { out, .. } if *out == view));
            let free = made.is_some_and(|m| {
                let later = items[m + 1..].iter().flat_map(Item::reads);
                let mut others = later.filter_map(|v| known.memory.get(&v)).filter(|v| **v != u32::MAX);
                !known.memory.contains_key(&view) && !others.any(|v| overlap(self.program, ValueId(*v), ValueId(value)))
            });
            if free {
                list.steps.push(Step::Out { view, value, size: 4 });
                list.tiles.retain(|t| t.0 != view);
                known.memory.insert(view, value);
                known.tiles.remove(&view);
                items.remove(at);
            } else {
                at += 1;
            }
        }
        items
    }
}

/// Makes a register the running value.
fn start(view: View, running: &mut Option<View>, draft: &mut Vec<Draft>, read: &mut HashSet<View>) {
    if *running != Some(view) {
        draft.push(Draft::Link(Act::Load, Some((view, false))));
        read.insert(view);
        *running = Some(view);
    }
}

/// Links before places are known.
enum Draft {
    /// With an operand, held still or not.
    Link(Act, Option<(View, bool)>),
    /// The running value is now this register.
    Made(View),
    /// The running value is summed row by row, to this register.
    Sum(View),
}

/// The chain's own buffers, given out in order of use.
struct Locals {
    last: HashMap<View, usize>,
    of: HashMap<View, u8>,
    free: Vec<u8>,
}

impl Locals {
    fn new(draft: &[Draft]) -> Locals {
        let mut last = HashMap::new();
        for (k, d) in draft.iter().enumerate() {
            if let Draft::Link(_, Some((v, false))) = d {
                last.insert(*v, k);
            }
        }
        Locals { last, of: HashMap::new(), free: (0..MAX_LOCALS as u8).rev().collect() }
    }

    fn take(&mut self, v: View, _: usize) -> Option<u8> {
        let l = self.free.pop()?;
        self.of.insert(v, l);
        Some(l)
    }

    /// Takes back the buffers whose last reader is link `k`.
    fn done(&mut self, k: usize) {
        let Locals { last, of, free } = self;
        of.retain(|v, l| {
            let keep = last.get(v) != Some(&k);
            if !keep {
                free.push(*l);
            }
            keep
        });
    }
}

fn takes(f: MapFn, still: Still) -> bool {
    match f.arity() {
        1 => chain::unary(f).is_some(),
        2 => chain::binary(f).is_some() && !(still.x && still.y),
        _ => false,
    }
}
