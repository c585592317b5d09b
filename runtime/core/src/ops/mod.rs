//! Registers the ops: one block per op, in the file of its family.
//!
//! A block states everything about its op (see [`Op`]). The Lua bindings, `help`, the editor stubs, the reference page,
//! the op tests, the gradient tests and the fuzzers all iterate over [`all`]. A new op that is
//! composed of others needs changes in one file of this folder only.

mod args;
mod build;

pub mod activation;
pub mod affine;
pub mod attention;
pub mod attention_block;
pub mod cast;
pub mod collective;
pub mod conv;
pub mod conv_transpose;
pub mod create;
pub mod distribute;
pub mod einsum;
pub mod elementwise;
pub mod experts;
pub mod fp8;
pub mod grouped;
pub mod index;
pub mod join;
pub mod loss;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod optim;
pub mod pool;
pub mod random;
pub mod reduce;
pub mod resample;
pub mod scan;
pub mod slicing;
pub mod sort;
pub mod source;
mod spatial;

pub use crate::op::*;
pub use args::{Args, Param, Ty, Value, parse_signature};
pub use build::{Out, bits, one, out_of, real};
pub use cast::cast;

use crate::error::{Error, Result};
use crate::graph::Graph;
use std::collections::HashMap;
use std::sync::OnceLock;

/// All ops and their Lua modules, in documentation order.
pub fn all() -> &'static [&'static Op] {
    static ALL: OnceLock<Vec<&'static Op>> = OnceLock::new();
    ALL.get_or_init(|| {
        [
            create::OPS,
            random::OPS,
            cast::OPS,
            elementwise::OPS,
            activation::OPS,
            reduce::OPS,
            scan::OPS,
            movement::OPS,
            slicing::OPS,
            join::OPS,
            index::OPS,
            sort::OPS,
            matmul::OPS,
            grouped::OPS,
            experts::OPS,
            fp8::OPS,
            conv::OPS,
            conv_transpose::OPS,
            pool::OPS,
            resample::OPS,
            affine::OPS,
            norm::OPS,
            attention::OPS,
            loss::OPS,
            optim::OPS,
            distribute::OPS,
            source::OPS,
        ]
        .concat()
    })
}

/// Finds an op by name.
pub fn by_name(name: &str) -> Option<&'static Op> {
    static NAMES: OnceLock<HashMap<&'static str, &'static Op>> = OnceLock::new();
    NAMES.get_or_init(|| all().iter().map(|op| (op.name, *op)).collect()).get(name).copied()
}

/// Records a call of `op` as Lua does: through its `call`, or as a `Map` of all operands.
pub fn call(g: &mut Graph, op: &'static Op, args: &Args) -> Result<Out> {
    let out = match op.call {
        Some(f) => f(g, args),
        None => args.operands(g).and_then(|xs| g.map(op, &xs)).map(one),
    };
    // Parts of a composition have names that recipes do not know.
    let unknown = |name: &str| name.is_empty() || by_name(name).is_some_and(|part| part.sig.is_empty());
    out.map_err(|e| if unknown(&e.op) { Error { op: op.name.into(), ..e } } else { e })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_signatures_are_sound() {
        let mut codes = HashMap::new();
        for op in all() {
            assert!(codes.insert(op.code(), op.name).is_none(), "{} is twice in the registry or collides", op.name);
            if !op.sig.is_empty() {
                let params = parse_signature(op.sig).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                assert!(!params.is_empty() || op.sig == "-", "{}: empty signature", op.name);
                assert!(!op.doc.is_empty(), "{} has no doc", op.name);
                assert!(!op.samples.is_empty(), "{} has no samples", op.name);
                assert!(op.call.is_some() || matches!(op.class, Class::Map(_)), "{} cannot be called", op.name);
            }
        }
    }
}
