//! Serializes a compiled region: see `crate::fingerprint`.

use super::load::{Constant, Load};
use super::*;
use crate::fingerprint::Words;
use crate::loops::chain::{self, Act};

fn form(f: Form) -> usize {
    match f {
        Form::Flat => 0,
        Form::Rows => 1,
        Form::Row => 2,
        Form::Reduce => 3,
    }
}

fn opcode(act: Act) -> usize {
    match act {
        Act::Near => 0,
        Act::Next => 1,
        Act::Load => 2,
        Act::Store => 3,
        Act::Stream => 4,
        Act::Sum => 5,
        Act::Add => 6,
        Act::AddStill => 7,
        Act::Sub => 8,
        Act::SubStill => 9,
        Act::From => 10,
        Act::FromStill => 11,
        Act::Mul => 12,
        Act::MulStill => 13,
        Act::Div => 14,
        Act::DivStill => 15,
        Act::Into => 16,
        Act::IntoStill => 17,
        Act::Square => 18,
        Act::Neg => 19,
        Act::Abs => 20,
        Act::Relu => 21,
        Act::Sqrt => 22,
        Act::Rsqrt => 23,
        Act::Reciprocal => 24,
        Act::Exp => 25,
        Act::Tanh => 26,
        Act::Sigmoid => 27,
        Act::Sigmoid2 => 28,
        Act::Sigmoid2Rest => 29,
        Act::Erf => 30,
    }
}

fn links(list: &[Link], w: &mut Words) {
    w.put(list.len());
    for l in list {
        w.put(opcode(l.act));
        match l.place {
            chain::Place::None => w.put(0),
            chain::Place::View(v) => w.list.extend([1, u64::from(v)]),
            chain::Place::Still(v) => w.list.extend([2, u64::from(v)]),
            chain::Place::Local(k) => w.list.extend([3, u64::from(k)]),
            chain::Place::Sum(k, v) => w.list.extend([4, u64::from(k), u64::from(v)]),
        }
    }
}

fn place(p: Place, w: &mut Words) {
    match p {
        Place::Dense => w.put(0),
        Place::Col => w.put(1),
        Place::Rows(stride) => {
            w.put(2);
            w.signed(stride);
        }
    }
}

fn linked(link: &Option<Linked>, w: &mut Words) {
    match link {
        None => w.put(0),
        Some(Linked::Map(f, still)) => {
            w.put(1);
            w.put(*f as usize);
            w.put(usize::from(still.x) + 2 * usize::from(still.y));
        }
        Some(Linked::Sum) => w.put(2),
        Some(Linked::Max) => w.put(3),
    }
}

fn constant(c: &Constant, w: &mut Words) {
    w.source(&c.source);
    w.signed(c.at);
    w.dtype(c.dtype);
}

fn load(l: &Load, w: &mut Words) {
    w.source(&l.source);
    w.layout(&l.layout);
    w.dtype(l.dtype);
    w.put(usize::from(l.panel.is_some()));
}

fn step(s: &Step, w: &mut Words) {
    match s {
        Step::Bind { view, value, offset, size, place: at } => {
            w.list.extend([0, u64::from(*view)]);
            w.value(*value);
            w.signed(*offset);
            w.put(usize::from(*size));
            place(*at, w);
        }
        Step::Fetch { view, load, row } => w.list.extend([1, u64::from(*view), u64::from(*load), u64::from(*row)]),
        Step::Kept { view, slot, size } => w.list.extend([2, u64::from(*view), u64::from(*slot), u64::from(*size)]),
        Step::Out { view, value, size } => {
            w.list.extend([3, u64::from(*view)]);
            w.value(*value);
            w.put(usize::from(*size));
        }
        Step::Run { kernel: _, out, args, form: f, round, link } => {
            w.list.extend([4, u64::from(*out)]);
            w.list.extend(args.iter().map(|a| u64::from(*a)));
            w.put(form(*f));
            w.put(usize::from(round.is_some()));
            linked(link, w);
        }
        Step::Chain { kernel: _, links: list, form: f } => {
            w.put(5);
            links(list, w);
            w.put(form(*f));
        }
        Step::Lanes { view, reduction } => w.list.extend([6, u64::from(*view), u64::from(*reduction)]),
        Step::Columns { view, reduction } => w.list.extend([7, u64::from(*view), u64::from(*reduction)]),
        Step::Store { view, value, size, kernel: _, row } => {
            w.list.extend([8, u64::from(*view)]);
            w.value(*value);
            w.list.extend([u64::from(*size), u64::from(*row)]);
        }
    }
}

fn steps(list: &[Step], w: &mut Words) {
    w.put(list.len());
    list.iter().for_each(|s| step(s, w));
}

fn pairs(list: &[(View, usize)], w: &mut Words) {
    w.put(list.len());
    for (view, at) in list {
        w.put(usize::from(*view));
        w.put(*at);
    }
}

impl Region {
    pub fn fingerprint(&self, w: &mut Words) {
        w.put(usize::from(self.guard.is_some()));
        self.guard.iter().for_each(|g| constant(g, w));
        for n in [self.grid.batch, self.grid.rows, self.grid.cols, usize::from(self.segmented)] {
            w.put(n);
        }
        for n in [self.block_rows, self.tile, self.views, self.scratch, self.kept] {
            w.put(n);
        }
        w.put(self.constants.len());
        for (view, c) in &self.constants {
            w.put(usize::from(*view));
            constant(c, w);
        }
        w.put(self.loads.len());
        self.loads.iter().for_each(|l| load(l, w));
        w.put(self.hoisted.len());
        for h in &self.hoisted {
            w.put(usize::from(h.view));
            w.put(h.at);
            match h.what {
                HoistedKind::Fill(from, _) => w.list.extend([0, u64::from(from)]),
                HoistedKind::Load(load, copies) => w.list.extend([1, u64::from(load), copies as u64]),
            }
        }
        w.put(self.row_views.len());
        for (view, size, at) in &self.row_views {
            w.list.extend([u64::from(*view), *size as u64, *at as u64]);
        }
        steps(&self.before, w);
        w.put(self.phases.len());
        for p in &self.phases {
            steps(&p.steps, w);
            pairs(&p.tiles, w);
            w.put(p.reductions.len());
            w.list.extend(p.reductions.iter().map(|r| u64::from(*r)));
            steps(&p.row_steps, w);
        }
        w.put(self.row_reductions.len());
        for r in &self.row_reductions {
            let round = usize::from(r.round.is_some());
            [usize::from(r.out), r.size, round, r.lanes, r.total].into_iter().for_each(|n| w.put(n));
        }
        w.put(self.col_reductions.len());
        for r in &self.col_reductions {
            [r.size, usize::from(r.round.is_some()), r.stores.len()].into_iter().for_each(|n| w.put(n));
            for (value, size, _) in &r.stores {
                w.value(*value);
                w.put(*size);
            }
        }
        w.put(usize::from(self.relay.is_some()));
        if let Some(r) = &self.relay {
            w.put(r.from);
            r.at.iter().for_each(|at| w.put(*at));
            r.links.iter().for_each(|l| links(l, w));
            w.put(r.asks.len());
            w.list.extend(r.asks.iter().map(|v| u64::from(*v)));
        }
    }
}
