//! Defines weight updates (AdamW): one fused node per parameter, with the new moments as further outputs.
//!
//! Hyper-parameters are run-time numbers. Values derived from them (bias corrections, the complements of the betas) are
//! computed on the host in f64: 1 - 0.999 in f32 would be off by 1.3e-5.

use super::{Args, Class, Grad, Op, Out, Value, out_of};
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId, Number};
use crate::{DType, Shape};
use smallvec::SmallVec;

pub static OPS: &[&Op] = &[&ADAMW_UPDATE];

/// A hyper-parameter: a number, or a scalar node if a tensor is involved.
#[derive(Clone, Copy)]
enum Hyper {
    Number(f64),
    Node(NodeId),
}

impl Hyper {
    fn of(g: &mut Graph, a: &Args, i: usize, what: &str, dtype: DType) -> Result<Hyper> {
        match a.values.get(i) {
            Some(Value::Number(n)) => Ok(Hyper::Number(n.as_f64())),
            Some(Value::Tensor(id)) if g.shape(*id).is_scalar() => g.cast(*id, dtype).map(Hyper::Node),
            Some(Value::Tensor(id)) => Err(Error::shape(
                a.op.name,
                format!("{what} must be a number or a scalar tensor, not shape {}", g.shape(*id)),
            )),
            _ => Err(Error::argument(a.op.name, format!("needs {what}"))),
        }
    }

    fn node(self, g: &mut Graph, dtype: DType) -> NodeId {
        match self {
            Hyper::Number(n) => g.scalar(Number::Float(n), dtype),
            Hyper::Node(id) => id,
        }
    }

    /// Computes `host(self, other)`, or `device` if either is a node.
    fn with(
        self,
        g: &mut Graph,
        other: Hyper,
        dtype: DType,
        host: fn(f64, f64) -> f64,
        device: fn(&mut Graph, NodeId, NodeId) -> Result<NodeId>,
    ) -> Result<Hyper> {
        if let (Hyper::Number(a), Hyper::Number(b)) = (self, other) {
            return Ok(Hyper::Number(host(a, b)));
        }
        let (a, b) = (self.node(g, dtype), other.node(g, dtype));
        device(g, a, b).map(Hyper::Node)
    }
}

fn one_minus_product(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId> {
    let p = g.mul(a, b)?;
    g.rsub_c(1.0, p)
}

fn one_minus_power(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId> {
    let p = g.pow(a, b)?;
    g.rsub_c(1.0, p)
}

/// Updates several weights with the same numbers, which are recorded once per dtype.
pub struct AdamW<'a> {
    /// The arguments of an `adamw_update` call; its tensors are ignored.
    pub a: &'a Args,
    pub numbers: SmallVec<[(DType, [NodeId; 6]); 1]>,
}

impl AdamW<'_> {
    /// Records the update of [w, g, m, v]: the new w, m, v.
    pub fn update(&mut self, g: &mut Graph, tensors: [NodeId; 4]) -> Result<Out> {
        let dtype = g.dtype(tensors[0]).to_float().compute();
        let known = self.numbers.iter().find(|n| n.0 == dtype).map(|n| n.1);
        let numbers = match known {
            Some(nodes) => nodes,
            None => {
                let nodes = adamw_numbers(g, self.a, dtype)?;
                self.numbers.push((dtype, nodes));
                nodes
            }
        };
        let mut inputs: SmallVec<[NodeId; 12]> = SmallVec::from_slice(&tensors);
        inputs.extend_from_slice(&numbers);
        let main = g.push(&ADAMW_UPDATE, &inputs, &[])?;
        let parts: [(Shape, DType); 2] = [inputs[2], inputs[3]].map(|x| (g.shape(x), g.dtype(x)));
        Ok(out_of(g, main, &parts))
    }
}

/// The scalar inputs of `adamw_update`, from its options.
fn adamw_numbers(g: &mut Graph, a: &Args, dtype: DType) -> Result<[NodeId; 6]> {
    let mut hyper: SmallVec<[Hyper; 6]> = SmallVec::new();
    for (i, what) in ["lr", "beta1", "beta2", "eps", "weight_decay", "step"].into_iter().enumerate() {
        hyper.push(Hyper::of(g, a, i + 4, what, dtype)?);
    }
    let [lr, beta1, beta2, eps, decay, step] = [hyper[0], hyper[1], hyper[2], hyper[3], hyper[4], hyper[5]];
    if let Hyper::Number(n) = step
        && n.is_nan() | (n < 1.0)
    {
        return Err(Error::argument("adamw_update", format!("step is {n}; it counts from 1")));
    }
    let one = Hyper::Number(1.0);
    let keep = lr.with(g, decay, dtype, |a, b| 1.0 - a * b, one_minus_product)?;
    let first = beta1.with(g, step, dtype, |b, t| 1.0 - b.powf(t), one_minus_power)?;
    let second = beta2.with(g, step, dtype, |b, t| 1.0 - b.powf(t), one_minus_power)?;
    let rate = lr.with(g, first, dtype, |a, b| a / b, |g, a, b| g.div(a, b))?;
    let new1 = one.with(g, beta1, dtype, |a, b| a - b, |g, a, b| g.sub(a, b))?;
    let new2 = one.with(g, beta2, dtype, |a, b| a - b, |g, a, b| g.sub(a, b))?;
    let root = match second {
        Hyper::Number(n) => Hyper::Number(1.0 / n.sqrt()),
        Hyper::Node(id) => Hyper::Node(g.rsqrt(id)?),
    };
    Ok([keep, rate, new1, new2, root, eps].map(|h| h.node(g, dtype)))
}

/// Inputs: w, g, m, v, then scalars: keep = 1 - lr weight_decay, rate = lr / (1 - beta1^step), new1 = 1 - beta1,
/// new2 = 1 - beta2, root = 1 / sqrt(1 - beta2^step) (a product is cheaper than a quotient), eps. Outputs: w, m, v.
pub static ADAMW_UPDATE: Op = Op {
    name: "adamw_update",
    sig: "w: tensor, g: tensor, m: tensor, v: tensor, *, lr: operand, beta1: operand = 0.9, beta2: operand = 0.999, eps: operand = 1e-8, weight_decay: operand = 0.0, step: operand",
    doc: "w, g, m, v, all (...) -> new w, m, v: one step of AdamW for weights w with gradient g and moments m, v; `step`\n\
          counts from 1. m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w (1 - lr weight_decay)\n\
          - lr mhat / (sqrt(vhat) + eps), with mhat = m / (1 - beta1^step), vhat = v / (1 - beta2^step).\n\
          Computed in f32 (f64 for f64); each result has the dtype of its old value. Options are run-time numbers or scalar\n\
          tensors. Loshchilov and Hutter, arXiv:1711.05101.",
    results: crate::ops::Results::Named(&["w", "m", "v"]),
    shard: Some(crate::sharding::elementwise),
    class: Class::Fused(|g, x, _| {
        let [w, d, m, v] = [x[0], x[1], x[2], x[3]];
        let [keep, rate, new1, new2, root, eps] = [x[4], x[5], x[6], x[7], x[8], x[9]];
        let dtypes = [g.dtype(w), g.dtype(m), g.dtype(v)];
        let (w, d, m, v) = (g.widen(w)?, g.widen(d)?, g.widen(m)?, g.widen(v)?);
        // Both moments move a step towards the new value: m + (1 - beta) (g - m).
        let dm = g.sub(d, m)?;
        let dm = g.mul(dm, new1)?;
        let m = g.add_(m, dm)?;
        let square = g.square(d)?;
        let dv = g.sub(square, v)?;
        let dv = g.mul(dv, new2)?;
        let v = g.add_(v, dv)?;
        let low = g.sqrt(v)?;
        let low = g.mul(low, root)?;
        let low = g.add_(low, eps)?;
        let step = g.mul(m, rate)?;
        let step = g.div(step, low)?;
        let w = g.mul(w, keep)?;
        let w = g.sub(w, step)?;
        let mut out = Out::new();
        for (x, dtype) in [w, m, v].into_iter().zip(dtypes) {
            out.push(g.cast(x, dtype)?);
        }
        Ok(out)
    }),
    infer: |i| {
        for (k, what) in ["w", "g", "m", "v"].into_iter().enumerate() {
            i.float(k)?;
            if i.shape(k) != i.shape(0) {
                return Err(Error::shape(
                    i.op,
                    format!("{what} is {}, but w is {}; all four must have one shape", i.shape(k), i.shape(0)),
                ));
            }
        }
        Ok(Meta { shape: i.shape(0), dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let tensors = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?, a.tensor(3)?];
        AdamW { a, numbers: SmallVec::new() }.update(g, tensors)
    }),
    grad: Grad::Missing("a weight update has no gradient; record it under no_grad"),
    samples: &[
        "f(2,3), f(2,3), f(2,3), p(2,3), lr=0.01, step=1",
        "f(4), f(4), f(4), p(4), lr=0.1, weight_decay=0.1, step=7",
        "f(0), f(0), f(0), p(0), lr=0.1, step=2",
        "f(3), f(3), f(3), p(3), lr=0.1, beta1=0.8, beta2=0.9, eps=1e-6, step=3",
    ],
    ..Op::BASE
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{call, create};

    #[test]
    fn a_step_is_one_node_two_parts_and_six_numbers() {
        let g = &mut Graph::new();
        let mut leaf = |dtype| Value::Tensor(g.leaf(&create::LEAF, Shape::of(&[3]), dtype, &[], 0));
        let tensors = [leaf(DType::BF16), leaf(DType::BF16), leaf(DType::F32), leaf(DType::F32)];
        let numbers = || [0.5, 0.9, 0.999, 1e-8, 0.1, 2.0].map(|n| Value::Number(Number::Float(n)));
        let out = call(g, &ADAMW_UPDATE, &Args::new(&ADAMW_UPDATE, tensors.into_iter().chain(numbers()))).unwrap();
        assert_eq!(g.len(), 4 + 6 + 3);
        assert_eq!(out.iter().map(|&o| g.dtype(o)).collect::<Vec<_>>(), [DType::BF16, DType::F32, DType::F32]);
        let slots: Vec<f64> = g.nodes()[4..10].iter().map(|n| f64::from_bits(n.payload)).collect();
        let want = [
            1.0 - 0.5 * 0.1,
            0.5 / (1.0 - 0.9f64.powf(2.0)),
            1.0 - 0.9,
            1.0 - 0.999,
            1.0 / (1.0 - 0.999f64.powf(2.0)).sqrt(),
            1e-8,
        ];
        assert_eq!(slots, want);
        // A second weight with the same numbers records no new ones.
        let a = Args::new(&ADAMW_UPDATE, [(); 4].map(|()| Value::None).into_iter().chain(numbers()));
        let mut all = AdamW { a: &a, numbers: SmallVec::new() };
        let before = g.len();
        for _ in 0..2 {
            all.update(g, [NodeId(0), NodeId(1), NodeId(2), NodeId(3)]).unwrap();
        }
        assert_eq!(g.len(), before + 6 + 2 * 3);
    }
}
