//! Lists the ways in which a node can be divided: each factor of its op, with the blocks that its operands have.

use super::part::Part;
use perilune_core::graph::Attrs;
use perilune_core::mesh::ONE_SECTION;
use perilune_core::ops::Op;
use perilune_core::ops::experts::UP;
use perilune_core::sharding::{self, Cut, Factor, Meeting, Piece, Positions, Signature};
use smallvec::SmallVec;

/// One way to divide a node.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub operands: SmallVec<[Part; 4]>,
    pub results: SmallVec<[Part; 2]>,
    /// The attributes of the divided node, if they differ.
    pub attrs: Option<Attrs>,
    pub positions: Option<Positions>,
    pub meets: Option<Meeting>,
}

/// A cut in the units of a factor, which may be several elements of a dim.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Form {
    segments: usize,
    sections: [u8; 3],
    block: usize,
}

impl Form {
    /// The form of a cut of a dim of `size` elements, of which a factor has `units`.
    fn of(cut: Cut, size: usize, units: usize) -> Option<Form> {
        let scale = size.checked_div(units).filter(|scale| *scale > 0 && scale * units == size)?;
        let fits = units.is_multiple_of(cut.parts()) && cut.block.is_multiple_of(scale);
        fits.then(|| Form { segments: cut.segments, sections: cut.sections, block: cut.block / scale })
    }

    fn cut(self, dim: usize, size: usize, units: usize) -> Option<Cut> {
        let scale = size / units;
        let Form { segments, sections, block } = self;
        (scale * units == size).then(|| Cut { dim, segments, sections, block: block * scale })
    }
}

/// Lists the ways to divide a node: with one of the cuts that `operand(k)` lists for operand k, or that `wanted(k)` lists for result
/// k. The order is that of the factors.
pub(super) fn all(
    op: &Op,
    s: &Signature,
    operand: &dyn Fn(usize) -> SmallVec<[Cut; 2]>,
    wanted: &dyn Fn(usize) -> Option<Cut>,
) -> SmallVec<[Candidate; 4]> {
    let mut out: SmallVec<[Candidate; 4]> = SmallVec::new();
    if let Some(rule) = op.regroups {
        let mut found: SmallVec<[(SmallVec<[Cut; 2]>, Cut); 2]> = SmallVec::new();
        let known: SmallVec<[SmallVec<[Cut; 2]>; 2]> = (0..s.operands.len()).map(operand).collect();
        for cut in &known[0] {
            // The other operands have the first of their own cuts.
            let others = known[1..].iter().map(|cuts| cuts.first().copied());
            let from: Option<SmallVec<[Cut; 2]>> = std::iter::once(Some(*cut)).chain(others).collect();
            found.extend(from.and_then(|from| Some(((rule.forward)(s, &from)?, from))).map(|(to, from)| (from, to)));
        }
        if let Some(to) = wanted(0)
            && let Some(from) = (rule.back)(s, to)
            && !found.iter().any(|known| *known == (from.clone(), to))
        {
            found.push((from, to));
        }
        out.extend(found.into_iter().map(|(from, to)| Candidate {
            attrs: Some((rule.attrs)(s, from[0], to)),
            operands: from.into_iter().map(Part::Block).collect(),
            results: SmallVec::from_elem(Part::Block(to), 1),
            positions: None,
            meets: None,
        }));
    }
    // Of a reshape, the rule above has all blocks.
    let reshapes = op.regroups.is_some_and(|rule| std::ptr::eq(rule, &sharding::RESHAPING));
    for factor in sharding::factors(op, s) {
        if factor.meets == Some(Meeting::Experts) {
            out.extend(with_experts(&factor, s, operand));
        } else if factor.units == 0 {
            out.extend(instance(&factor, s, None));
        } else if !reshapes {
            for form in forms(&factor, s, operand, wanted) {
                out.extend(instance(&factor, s, Some(form)));
            }
        }
    }
    out
}

fn forms(
    factor: &Factor,
    s: &Signature,
    operand: &dyn Fn(usize) -> SmallVec<[Cut; 2]>,
    wanted: &dyn Fn(usize) -> Option<Cut>,
) -> SmallVec<[Form; 2]> {
    let mut out: SmallVec<[Form; 2]> = SmallVec::new();
    let mut add = |piece: &Piece, cut: Cut, sizes: &[usize]| {
        if *piece == Piece::Block(cut.dim as u8)
            && let Some(form) = Form::of(cut, sizes[cut.dim], factor.units)
            && !out.contains(&form)
        {
            out.push(form);
        }
    };
    for (k, piece) in factor.operands.iter().enumerate().filter(|(_, p)| matches!(p, Piece::Block(_))) {
        for cut in operand(k) {
            add(piece, cut, s.shape(k).dims());
        }
    }
    for (k, piece) in factor.results.iter().enumerate().filter(|(_, p)| matches!(p, Piece::Block(_))) {
        if let Some(cut) = wanted(k) {
            add(piece, cut, s.results[k].0.dims());
        }
    }
    out
}

/// A factor of tokens, with the blocks of experts that devices have.
fn with_experts(
    factor: &Factor,
    s: &Signature,
    operand: &dyn Fn(usize) -> SmallVec<[Cut; 2]>,
) -> SmallVec<[Candidate; 2]> {
    let plain = |cut: &Cut| cut.dim == 0 && cut.segments == 1 && !cut.has_sections();
    let Some(experts) = operand(UP).into_iter().find(plain) else { return SmallVec::new() };
    let of_experts = |part: &mut Part| {
        if *part == Part::Whole {
            *part = Part::Block(experts);
        }
    };
    let forms = forms(factor, s, operand, &|_| None);
    let tokens = forms.into_iter().filter_map(|form| instance(factor, s, Some(form)));
    tokens
        .map(|mut c| {
            c.operands.iter_mut().chain(&mut c.results).for_each(of_experts);
            c
        })
        .collect()
}

/// A factor with blocks of one form.
fn instance(factor: &Factor, s: &Signature, form: Option<Form>) -> Option<Candidate> {
    let part = |piece: &Piece, sizes: &[usize]| {
        Some(match *piece {
            Piece::Whole => Part::Whole,
            Piece::Term(combine) => Part::Term(combine),
            Piece::Block(d) => Part::Block(form?.cut(d.into(), sizes[usize::from(d)], factor.units)?),
        })
    };
    let operands: Option<_> = factor.operands.iter().zip(s.operands).map(|(p, x)| part(p, x.0.dims())).collect();
    let results: Option<SmallVec<[Part; 2]>> =
        factor.results.iter().zip(s.results).map(|(p, y)| part(p, y.0.dims())).collect();
    let results = results?;
    if factor.positions.is_some() && form.is_some_and(|form| form.sections != ONE_SECTION) {
        return None;
    }
    if factor.meets == Some(Meeting::Keys) && form.is_some_and(|form| form.segments > 1 || form.sections != ONE_SECTION)
    {
        return None;
    }
    let attrs = factor.size_attr.zip(results[0].cut()).map(|(k, cut)| {
        let mut attrs: Attrs = s.attrs.into();
        attrs[usize::from(k)] = cut.size() as i64;
        attrs
    });
    Some(Candidate { operands: operands?, results, attrs, positions: factor.positions, meets: factor.meets })
}
