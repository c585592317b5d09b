//! Maxima and minima of staged 16-bit floats, two at a time.

use super::emit::Emit;
use super::expr;
use super::pass::Place;
use perilune_core::DType;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::Code;

impl Emit<'_> {
    /// For a maximum or minimum of 16-bit floats: which of the staged loads has them.
    pub fn pairs(&self, i: usize) -> Option<usize> {
        let mut x = self.body.operand(i);
        loop {
            x = match self.body.code(x) {
                Code::Cast(a) if self.dtype(*a as usize).is_half() && self.dtype(x) == DType::F32 => *a as usize,
                Code::Map(MapFn::Copy, args) => args[0] as usize,
                _ => break,
            };
        }
        let fits = self.dtype(x).is_half() && self.staged.contains(&x) && self.v.is_multiple_of(2);
        fits.then_some(x)
    }

    fn of_pairs(&self, i: usize) -> (&'static str, usize) {
        (expr::functor(self.reduction(i)), self.pairs(i).unwrap_or(i))
    }

    /// Declares the partial results of reduction `i`.
    pub fn start_pairs(&mut self, i: usize) {
        let (f, x) = self.of_pairs(i);
        self.text.line(format!("u32 h{i}[4];"));
        self.text.line(format!("start_pairs<{f}>(h{i}, stage{x});"));
    }

    /// Joins the packs of a place.
    pub fn join_pairs(&mut self, i: usize, packs: usize, place: &Place) {
        let ((f, x), v) = (self.of_pairs(i), self.v);
        self.text.unrolled("k", packs);
        for line in &place.decl {
            self.text.line(line);
        }
        let left = if place.partial { ", left" } else { "" };
        let call = match self.words(x) {
            Some(words) => format!("join_words<{f}, {v}>(h{i}, {words}, k{left});"),
            None => format!("join_pairs<{f}, {v}>(h{i}, stage{x} + at, k{left});"),
        };
        self.text.line(format!("if ({}) {call}", place.guard));
        self.text.close();
    }

    /// Declares the partial results as other strategies have them.
    pub fn end_pairs(&mut self, i: usize) {
        let (_, x) = self.of_pairs(i);
        self.text.line(format!("f32 a{i}[8];"));
        self.text.line(format!("end_pairs(a{i}, h{i}, stage{x});"));
    }
}
