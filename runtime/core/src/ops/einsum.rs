//! Defines `einsum`: sums of products over dims named by letters.
//!
//! Every dim gets a letter; those of `...`, counted from the right, get letters outside the alphabet of equations. Each
//! operand is then reduced to a plain product (diagonals, broadcast dims of size 1), and pairs become one batched
//! matmul.

use super::matmul::matmul;
use super::{Op, movement, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use std::collections::HashMap;

pub static EINSUM: Op = Op {
    name: "einsum",
    sig: "equation: string, xs: tensors",
    doc: "einsum(\"bij,bjk->bik\", {x, y}): sum of products over the letters absent from the right side, as in NumPy.\n\
          Letters are a-z and A-Z; one that occurs twice in an operand takes its diagonal. `...` matches any dims, which\n\
          broadcast, as do dims of size 1. Without `->` the result has the dims of `...` and the letters that occur once,\n\
          in alphabetical order. Pairs are contracted from left to right by matmul.",
    call: Some(|g, a| {
        let xs = a.tensors(1)?.to_vec();
        einsum(g, a.str(0), &xs).map(one)
    }),
    samples: &[
        "'ij,jk->ik', [f(2,3), f(3,4)]",
        "'bij,bjk->bik', [f(2,3,4), f(2,4,2)]",
        "'ij->ji', [f(2,3)]",
        "'ij->', [f(2,3)]",
        "'i,j->ij', [f(2), f(3)]",
        "'bhtd,bhsd->bhts', [f(2,2,3,4), f(2,2,5,4)]",
        "'ij,jk,kl->il', [f(2,3), f(3,4), f(4,2)]",
        "'ij,ij->i', [f(2,3), f(2,3)]",
        "'...ij,...jk->...ik', [f(5,2,3), f(3,4)]",
        "'i...,...->...', [f(2,3,1), f(1,4)]",
        "'b...,b...', [f(2,3), f(2,3)]",
        "'ii', [f(3,3)]",
        "'bii->ib', [f(2,3,3)]",
        "'iji,j->ij', [f(3,2,3), f(2)]",
        "'bij,bjk->bik', [f(1,2,3), f(4,3,1)]",
        "'ij,ij->', [f(1,3), f(2,3)]",
    ],
    smooth: true,
    ..Op::BASE
};

/// An operand with one letter per dim.
struct Term {
    letters: Vec<char>,
    x: NodeId,
}

impl Term {
    /// The operand with its dims in the order of `letters`, absent ones as size 1.
    fn arrange(&self, g: &mut Graph, letters: &[char]) -> Result<NodeId> {
        let axes: Vec<usize> = letters.iter().filter_map(|l| self.letters.iter().position(|m| m == l)).collect();
        let mut y = g.permute(self.x, &axes)?;
        for (i, l) in letters.iter().enumerate() {
            if !self.letters.contains(l) {
                y = g.unsqueeze(y, i)?;
            }
        }
        Ok(y)
    }

    /// Takes the diagonal of the dims at `i` and `j`, which becomes the last dim.
    fn diagonal(&mut self, g: &mut Graph, i: usize, j: usize) -> Result<()> {
        let rest = (0..self.letters.len()).filter(|k| *k != i && *k != j);
        let axes: Vec<usize> = rest.chain([i, j]).collect();
        let turned = g.permute(self.x, &axes)?;
        self.x = movement::diagonal(g, turned)?;
        self.letters = axes[..axes.len() - 1].iter().map(|a| self.letters[*a]).collect();
        Ok(())
    }

    /// Drops a dim of size 1.
    fn drop(&mut self, g: &mut Graph, i: usize) -> Result<()> {
        let shape = g.shape(self.x).remove(i);
        self.x = movement::reshape(g, self.x, shape)?;
        self.letters.remove(i);
        Ok(())
    }
}

/// The letters of `...` if it matches n dims.
fn dotted(n: usize) -> Vec<char> {
    (0..n as u32).rev().filter_map(|k| char::from_u32(0xe000 + k)).collect()
}

/// Parses the letters of an operand or of the result, in which `...` matches n dims.
fn spell(text: &str, n: usize) -> std::result::Result<Vec<char>, String> {
    let dots: String = dotted(n).into_iter().collect();
    match text.replacen("...", "", 1).chars().find(|c| !c.is_ascii_alphabetic()) {
        Some(c) => Err(format!("'{c}' is not a letter")),
        None => Ok(text.replacen("...", &dots, 1).chars().collect()),
    }
}

/// Formats a letter for messages.
fn name(l: char) -> String {
    if l.is_ascii() { format!("'{l}'") } else { "a dim of '...'".into() }
}

/// The beginning of a long text.
fn clipped(text: &str) -> String {
    const MOST: usize = 60;
    if text.chars().count() <= MOST { text.to_string() } else { text.chars().take(MOST).chain(['…']).collect() }
}

fn einsum(g: &mut Graph, equation: &str, xs: &[NodeId]) -> Result<NodeId> {
    let bad = |why: String| Error::argument("einsum", format!("\"{}\": {why}", clipped(equation)));
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match text.split_once("->") {
        Some((l, r)) => (l, Some(r)),
        None => (text.as_str(), None),
    };
    let texts: Vec<&str> = left.split(',').collect();
    if texts.len() != xs.len() {
        return Err(bad(format!("names {} operands, {} are given", texts.len(), xs.len())));
    }
    // The number of dims that `...` matches in each operand; on the right side, the largest of them.
    let mut dots = Vec::new();
    for (t, &x) in texts.iter().zip(xs) {
        let (shape, letters) = (g.shape(x), t.replacen("...", "", 1).chars().count());
        if letters > shape.rank() || (letters < shape.rank() && !t.contains("...")) {
            return Err(bad(format!("'{}' names {letters} dims of shape {shape}", clipped(t))));
        }
        dots.push(shape.rank() - letters);
    }
    let most = dots.iter().copied().max().unwrap_or(0);
    let mut sizes: Vec<(char, usize)> = Vec::new();
    let mut terms = Vec::new();
    for ((t, &x), &n) in texts.iter().zip(xs).zip(&dots) {
        let letters = spell(t, n).map_err(&bad)?;
        let shape = g.shape(x);
        for (k, (&l, &d)) in letters.iter().zip(shape.dims()).enumerate() {
            if let Some(&n) = letters[..k].iter().position(|m| *m == l).and_then(|i| shape.dims().get(i))
                && n != d
            {
                return Err(bad(format!("{} is {n} and {d} in one operand", name(l))));
            }
            match sizes.iter_mut().find(|(m, _)| *m == l) {
                Some((_, n)) if *n == 1 => *n = d,
                Some((_, n)) if *n != d && d != 1 => {
                    return Err(bad(format!("{} is {n} in one operand and {d} in another", name(l))));
                }
                Some(_) => {}
                None => sizes.push((l, d)),
            }
        }
        terms.push(Term { letters, x });
    }
    let size = |l: char| sizes.iter().find(|(m, _)| *m == l).map_or(1, |(_, n)| *n);
    let out: Vec<char> = match right {
        Some(r) => spell(r, most).map_err(&bad)?,
        None => {
            let times = |l: char| terms.iter().flat_map(|t| &t.letters).filter(|m| **m == l).count();
            let mut once: Vec<char> = sizes.iter().map(|s| s.0).filter(|&l| l.is_ascii() && times(l) == 1).collect();
            once.sort_unstable();
            [dotted(most), once].concat()
        }
    };
    for (k, l) in out.iter().enumerate() {
        if out[..k].contains(l) || !sizes.iter().any(|(m, _)| m == l) {
            return Err(bad(format!("{} on the right must occur there once and on the left at least once", name(*l))));
        }
    }
    for t in &mut terms {
        let repeated = |t: &Term| {
            let l = &t.letters;
            (0..l.len()).find_map(|i| (i + 1..l.len()).find(|&j| l[i] == l[j]).map(|j| (i, j)))
        };
        while let Some((i, j)) = repeated(t) {
            t.diagonal(g, i, j)?;
        }
        while let Some(i) = (0..t.letters.len()).find(|&i| g.shape(t.x).dims()[i] != size(t.letters[i])) {
            t.drop(g, i)?;
        }
    }
    // The last operand that has each letter.
    let last: HashMap<char, usize> =
        terms.iter().enumerate().flat_map(|(k, t)| t.letters.iter().map(move |l| (*l, k))).collect();
    let mut terms = terms.into_iter();
    let Some(mut acc) = terms.next() else { return Err(bad("names no operand".into())) };
    for (k, next) in terms.enumerate() {
        let needed = |l: &char| out.contains(l) || last.get(l).is_some_and(|last| *last > k + 1);
        let both: Vec<char> = acc.letters.iter().filter(|l| next.letters.contains(l)).copied().collect();
        let (batch, contract): (Vec<char>, Vec<char>) = both.iter().partition(|l| needed(l));
        let rows: Vec<char> = acc.letters.iter().filter(|l| !both.contains(l)).copied().collect();
        let cols: Vec<char> = next.letters.iter().filter(|l| !both.contains(l)).copied().collect();
        let dims = |ls: &[char]| ls.iter().map(|&l| size(l)).collect::<Vec<usize>>();
        let prod = |ls: &[char]| ls.iter().map(|&l| size(l)).product::<usize>();
        let p = acc.arrange(g, &[&batch[..], &rows, &contract].concat())?;
        let q = next.arrange(g, &[&batch[..], &contract, &cols].concat())?;
        let (b, m, kk, n) = (prod(&batch), prod(&rows), prod(&contract), prod(&cols));
        let p = g.reshape(p, &[b, m, kk])?;
        let q = g.reshape(q, &[b, kk, n])?;
        let y = matmul(g, p, q)?;
        let letters: Vec<char> = [&batch[..], &rows, &cols].concat();
        let y = g.reshape(y, &dims(&letters))?;
        acc = Term { letters, x: y };
    }
    let drop: Vec<usize> = acc.letters.iter().enumerate().filter(|(_, l)| !out.contains(l)).map(|(i, _)| i).collect();
    if !drop.is_empty() {
        let dtype = g.dtype(acc.x).sum();
        let x = g.cast(acc.x, dtype)?;
        let x = g.sum(x, &drop, false)?;
        acc = Term { letters: acc.letters.iter().filter(|l| out.contains(l)).copied().collect(), x };
    }
    acc.arrange(g, &out)
}
