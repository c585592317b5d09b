//! Defines kernels with CUDA source from a recipe: one op, whose nodes refer to the source by a hash of its text.
//!
//! Equal texts share one body in every process, and a plan key contains a body's hash instead of its text. The bodies
//! are stored in a process-wide table that only grows: an edit adds a few kilobytes.

use super::{Class, Grad, Op, Out, Results, out_of};
use crate::error::{Error, Result};
use crate::graph::{Attrs, Graph, Infer, Meta, NodeId};
use crate::{DType, Shape};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

pub static OPS: &[&Op] = &[&KERNEL];

/// Dense inputs of any shapes and dtypes; the attributes contain the shapes and dtypes of the outputs. Only a GPU runs
/// it.
pub static KERNEL: Op = Op {
    name: "source_kernel",
    doc: "A CUDA function of a recipe: see pl.kernel.",
    results: Results::Several,
    class: Class::Library,
    infer: |i: &Infer| {
        let outputs = Launch::read(i.attrs).map(|l| l.outputs).unwrap_or_default();
        outputs.first().copied().ok_or_else(|| Error::argument(i.op, "this is a bug: a kernel without outputs"))
    },
    grad: Grad::Missing("a kernel from CUDA source has a gradient only with `backward`, which this one lacks"),
    ..Op::BASE
};

/// CUDA text and its location.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    /// The name of its `__global__` function, used in errors and plans.
    pub name: String,
    pub text: String,
    /// The recipe, and the line on which the text begins; 0 if it is not known.
    pub file: String,
    pub line: u32,
    /// The names of its inputs, scalars and outputs, for messages; those that are missing have none.
    pub names: Vec<String>,
}

/// The identity of a body: a hash of its name and text.
pub type Key = [i64; 2];

/// How a body is called, decoded from a node's attributes.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    pub body: Key,
    pub grid: [i64; 3],
    pub block: [i64; 3],
    /// Dynamic shared memory, in bytes.
    pub shared: i64,
    /// Number of trailing inputs that are single numbers, passed by value.
    pub scalars: usize,
    /// Integers, passed between the outputs and the scalars.
    pub numbers: Vec<i64>,
    pub outputs: Vec<Meta>,
}

/// Maximum numbers and outputs of a call, limited by the plan key.
pub const MOST_NUMBERS: usize = 32;
pub const MOST_OUTPUTS: usize = 8;

impl Launch {
    pub fn attrs(&self) -> Attrs {
        let mut out = Attrs::new();
        out.extend(self.body);
        out.extend(self.grid);
        out.extend(self.block);
        out.extend([self.shared, self.scalars as i64, self.numbers.len() as i64]);
        out.extend(self.numbers.iter().copied());
        for m in &self.outputs {
            out.extend([m.dtype as i64, m.shape.rank() as i64]);
            out.extend(m.shape.dims().iter().map(|&d| d as i64));
        }
        out
    }

    /// Decodes the attributes of a node.
    pub fn read(attrs: &[i64]) -> Option<Launch> {
        let three = |at: usize| attrs.get(at..at + 3).and_then(|s| <[i64; 3]>::try_from(s).ok());
        let (grid, block) = (three(2)?, three(5)?);
        let (shared, scalars, count) = (*attrs.get(8)?, *attrs.get(9)?, *attrs.get(10)? as usize);
        let numbers = attrs.get(11..11 + count)?.to_vec();
        let (mut at, mut outputs) = (11 + count, Vec::new());
        while at < attrs.len() {
            let (code, rank) = (attrs[at], *attrs.get(at + 1)? as usize);
            let dims: Vec<usize> = attrs.get(at + 2..at + 2 + rank)?.iter().map(|&d| d as usize).collect();
            let dtype = DType::ALL.into_iter().find(|d| *d as i64 == code)?;
            outputs.push(Meta { shape: Shape::new(&dims).ok()?, dtype });
            at += 2 + rank;
        }
        Some(Launch { body: [attrs[0], attrs[1]], grid, block, shared, scalars: scalars as usize, numbers, outputs })
    }
}

type Bodies = HashMap<Key, Arc<Body>>;

fn bodies() -> MutexGuard<'static, Bodies> {
    static BODIES: LazyLock<Mutex<Bodies>> = LazyLock::new(Mutex::default);
    // A panic leaves the map consistent, since each change is one insertion.
    BODIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a body to the table.
pub fn intern(body: Body) -> Key {
    let lane = |mut h: u64| {
        for byte in body.name.bytes().chain([0]).chain(body.text.bytes()) {
            h = (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        h as i64
    };
    let mut key = [lane(0xcbf2_9ce4_8422_2325), lane(0x9e37_79b9_7f4a_7c15)];
    let mut all = bodies();
    // Hash collisions are unlikely, but must not confuse two texts.
    while all.get(&key).is_some_and(|b| (&b.name, &b.text) != (&body.name, &body.text)) {
        key[1] = key[1].wrapping_add(1);
    }
    all.insert(key, Arc::new(body));
    key
}

/// Returns the body with that identity, at its latest location.
pub fn body(key: Key) -> Option<Arc<Body>> {
    bodies().get(&key).cloned()
}

/// The body of a node or library call of [`KERNEL`].
pub fn body_of(op: &Op, attrs: &[i64]) -> Option<Arc<Body>> {
    if op == &KERNEL { body([*attrs.first()?, *attrs.get(1)?]) } else { None }
}

/// Records a call and returns its outputs.
pub fn call(g: &mut Graph, inputs: &[NodeId], launch: &Launch) -> Result<Out> {
    let rest: Vec<(Shape, DType)> = launch.outputs.iter().skip(1).map(|m| (m.shape, m.dtype)).collect();
    let main = g.push(&KERNEL, inputs, &launch.attrs())?;
    Ok(out_of(g, main, &rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_survives_its_attributes() {
        let meta = |dims: &[usize], dtype| Meta { shape: Shape::of(dims), dtype };
        let outputs = vec![meta(&[2, 3], DType::BF16), meta(&[], DType::I64)];
        let (grid, block, numbers) = ([4, 1, 1], [256, 1, 1], vec![7, -1]);
        let l = Launch { body: [1, -2], grid, block, shared: 64, scalars: 1, numbers, outputs };
        assert_eq!(Launch::read(&l.attrs()), Some(l.clone()));
        let most = Launch {
            numbers: vec![0; MOST_NUMBERS],
            outputs: vec![meta(&[1; crate::MAX_RANK], DType::F32); MOST_OUTPUTS],
            ..l
        };
        assert!(most.attrs().len() < 256, "the plan key writes their number in a byte");
    }

    #[test]
    fn equal_texts_are_one_body() {
        let body = |text: &str, line| Body {
            name: "f".into(),
            text: text.into(),
            file: "a.lua".into(),
            line,
            names: Vec::new(),
        };
        let (a, b) = (intern(body("one", 3)), intern(body("two", 3)));
        assert_ne!(a, b);
        assert_eq!(intern(body("one", 9)), a);
        assert_eq!(super::body(a).map(|b| b.line), Some(9), "the latest line");
    }
}
