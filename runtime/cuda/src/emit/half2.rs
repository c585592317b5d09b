//! Emits maxima and minima of staged 16-bit floats with packed instructions, two elements at a time.

use super::emitter::Emitter;
use super::expr;
use super::loop_nest::Indexing;
use perilune_core::DType;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::Code;

impl Emitter<'_> {
    /// For a maximum or minimum of 16-bit floats, the staged load that holds them.
    pub fn half2_source(&self, i: usize) -> Option<usize> {
        let mut x = self.analysis.operand(i);
        loop {
            x = match self.analysis.code(x) {
                Code::Cast(a) if self.dtype(*a as usize).is_half() && self.dtype(x) == DType::F32 => *a as usize,
                Code::Map(MapFn::Copy, args) => args[0] as usize,
                _ => break,
            };
        }
        let fits = self.dtype(x).is_half() && self.staged.contains(&x) && self.v.is_multiple_of(2);
        fits.then_some(x)
    }

    fn half2_operand(&self, i: usize) -> (String, usize) {
        (expr::functor(self.reduction(i)), self.half2_source(i).unwrap_or(i))
    }

    /// Declares the partial results of reduction `i`.
    pub fn half2_init(&mut self, i: usize) {
        let (f, x) = self.half2_operand(i);
        self.text.line(format!("u32 h{i}[4];"));
        self.text.line(format!("half2_init<{f}>(h{i}, stage{x});"));
    }

    /// Combines the packs of `indexing`.
    pub fn half2_combine(&mut self, i: usize, packs: usize, indexing: &Indexing) {
        let ((f, x), v) = (self.half2_operand(i), self.v);
        self.text.unrolled("k", packs);
        for line in &indexing.decl {
            self.text.line(line);
        }
        let left = if indexing.partial { ", left" } else { "" };
        let call = match self.words(x) {
            Some(words) => format!("half2_combine_words<{f}, {v}>(h{i}, {words}, k{left});"),
            None => format!("half2_combine<{f}, {v}>(h{i}, stage{x} + at, k{left});"),
        };
        self.text.line(format!("if ({}) {call}", indexing.guard));
        self.text.close();
    }

    /// Declares the partial results in the form that the other strategies use.
    pub fn half2_finish(&mut self, i: usize) {
        let (_, x) = self.half2_operand(i);
        self.text.line(format!("f32 a{i}[8];"));
        self.text.line(format!("half2_finish(a{i}, h{i}, stage{x});"));
    }
}
