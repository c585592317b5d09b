//! Turns updates of the form `old = where(ok, new, old)` into a predicate of the region (see `Engine::guard`).
//!
//! If every result of a region has that form with the same `ok`, one test of the bool replaces a select per element. If
//! it is false, the region is skipped; otherwise the results are `new`.

use super::*;

/// Finds the predicate of such a region and replaces its results by their new values.
pub(super) fn take_predicate(program: &Program, region: &ir::Region, root: &mut [usize]) -> Option<Constant> {
    let body = &region.body[..];
    let mut ok = None;
    let mut new = Vec::new();
    for &(reg, value) in &region.stores {
        let at = root[reg as usize];
        let Code::Map(MapFn::Where, args) = &body[at].code else { return None };
        let [bit, then, old] = [args[0], args[1], args[2]].map(|a| a as usize);
        if body[at].level != Level::Full
            || body[then].dtype != body[at].dtype
            || !is_stored(program, &body[root[old]], value)
        {
            return None;
        }
        if *ok.get_or_insert(root[bit]) != root[bit] {
            return None;
        }
        new.push((at, root[then]));
    }
    let mut bit = ok?;
    if let Code::Broadcast(a) = body[bit].code {
        bit = root[a as usize];
    }
    let Code::Load { source: source @ Source::Value(_), layout } = &body[bit].code else { return None };
    let layout = layout.collapse();
    if body[bit].dtype != DType::Bool || layout.strides().iter().any(|s| *s != 0) {
        return None;
    }
    // A new value may itself be one of the results.
    for r in root.iter_mut() {
        while let Some((_, then)) = new.iter().find(|(at, _)| at == r) {
            *r = *then;
        }
    }
    Some(Constant::new(*source, &layout, DType::Bool))
}

/// Whether a load reads the memory that `value` is stored to, element for element.
fn is_stored(program: &Program, load: &Instr, value: ValueId) -> bool {
    let Code::Load { source: Source::Value(v), layout } = &load.code else { return false };
    let [from, to] = [*v, value].map(|v| &program.values[v.0 as usize]);
    load.level == Level::Full
        && layout.is_contiguous()
        && from.storage == to.storage
        && from.dtype == to.dtype
        && layout.numel() == to.shape.numel()
}
