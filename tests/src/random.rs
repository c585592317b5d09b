//! Generates random graphs with every kind of op that the planner treats differently, in shapes around its thresholds.
//!
//! A graph is a function of its seed and its number of ops, so a failing graph can be reduced by lowering that number.

use crate::harness::{call, call_all, float, int, ints, randn, t};
use crate::rng::Pcg;
use perilune_core::graph::{NodeId, Number};
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Shape, grad};
use perilune_engine::{Engine, Handle, StateId};
use perilune_plan::Request;
use perilune_plan::request::InputBuffer;
use std::collections::HashMap;

/// The seed of the graph.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub seed: u64,
    /// Ops after the leaves.
    pub ops: usize,
    /// Evaluates only this root.
    pub root: Option<usize>,
    /// Whether shapes are large enough for several threads.
    pub big: bool,
}

/// The way in which the roots are evaluated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// In one plan, with the assignments.
    Together,
    /// One after the other, each in a separate plan.
    Apart,
    /// In one plan whose backward pass recomputes random spans of the recording.
    Recomputed,
    /// Recorded only, with floats in f64.
    Wide,
}

const BASES: &[&[usize]] = &[
    &[],
    &[1],
    &[2],
    &[5],
    &[17],
    &[0],
    &[513],
    &[2, 3],
    &[3, 1],
    &[1, 7],
    &[4, 4],
    &[0, 3],
    &[17, 33],
    &[5, 130],
    &[260, 3],
    &[2, 3, 4],
    &[3, 1, 5],
    &[2, 2, 3, 2],
    &[6, 20, 9],
    &[600, 7],
];
/// Larger than the chunks of reductions and the longest row of a tile.
const LONG: &[&[usize]] = &[&[4100], &[9001], &[2, 8200], &[16500], &[3, 4097], &[300, 70], &[1030, 5], &[4, 300, 6]];
const BIG: &[&[usize]] = &[&[300, 1031], &[40, 9000], &[150_001], &[7, 300, 64], &[3, 70_000], &[5000, 40]];

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

struct Maker<'a> {
    e: &'a mut Engine,
    rng: Pcg,
    pool: Vec<NodeId>,
    leaves: Vec<NodeId>,
    states: Vec<StateId>,
    limit: usize,
    assigned: Vec<(StateId, NodeId)>,
    /// Whether floats are f64.
    wide: bool,
    /// The values of leaves.
    values: HashMap<InputBuffer, HostTensor>,
}

/// A recorded graph that has not been evaluated.
pub struct Recorded {
    pub request: Request,
    pub values: HashMap<InputBuffer, HostTensor>,
}

/// Runs the graph of `recipe` and returns its roots, then the final values of its States.
pub fn run(e: &mut Engine, recipe: Recipe, mode: Mode) -> Vec<HostTensor> {
    let (handles, states) = build(e, recipe, mode, &mut String::new());
    let mut out: Vec<HostTensor> =
        handles.iter().map(|h| e.read(*h).unwrap_or_else(|f| panic!("{}", f.error))).collect();
    for h in handles {
        e.recorder.release(h);
    }
    for s in states {
        out.push(e.read_state(s).unwrap_or_else(|f| panic!("{}", f.error)));
        e.release_state(s);
    }
    e.flush().unwrap_or_else(|f| panic!("{}", f.error));
    out
}

/// Records the graph of `recipe` in f64 and leaves its step open. With `spans`, its backward pass recomputes.
pub fn record(e: &mut Engine, recipe: Recipe, recomputed: bool) -> Recorded {
    let (m, roots) = make(e, recipe, Mode::Wide, recomputed);
    let mut state_writes: Vec<(u64, NodeId)> = Vec::new();
    for (state, read) in m.assigned {
        // A read of an assigned State is a boundary behind its value.
        let value = m.e.recorder.graph.node(read).inputs[0];
        state_writes.retain(|w| w.0 != state.0);
        state_writes.push((state.0, value));
    }
    Recorded { request: Request { roots, state_writes, ..Request::default() }, values: m.values }
}

fn build(e: &mut Engine, recipe: Recipe, mode: Mode, text: &mut String) -> (Vec<Handle>, Vec<StateId>) {
    let (m, roots) = make(e, recipe, mode, mode == Mode::Recomputed);
    let (states, assigned) = (m.states, m.assigned);
    text.push_str(&describe(e, &roots, &assigned));
    let handles: Vec<Handle> = roots.iter().map(|r| e.recorder.handle(*r)).collect();
    if mode == Mode::Apart {
        for r in &roots {
            e.evaluate(&[*r]).unwrap_or_else(|f| panic!("{}", f.error));
        }
    }
    e.end_step(&roots).unwrap_or_else(|f| panic!("{}", f.error));
    (handles, states)
}

/// Records a graph and picks its roots.
fn make(e: &mut Engine, recipe: Recipe, mode: Mode, recomputed: bool) -> (Maker<'_>, Vec<NodeId>) {
    let wide = mode == Mode::Wide;
    let mut values = HashMap::new();
    let mut rng = Pcg::new(recipe.seed);
    let base = match () {
        () if recipe.big => *rng.pick(BIG),
        () if rng.one_in(6) => *rng.pick(LONG),
        () => *rng.pick(BASES),
    };
    let numel: usize = base.iter().product();
    e.recorder.seed(recipe.seed);
    let mut states = Vec::new();
    for _ in 0..rng.below(3) {
        let dtype = if rng.one_in(3) { *rng.pick(&FLOATS) } else { DType::F32 };
        let value = randn(&mut rng, if wide { DType::F64 } else { dtype }, base);
        let init = e.from_host(value.clone());
        let state = e.new_state(init, true).unwrap();
        values.insert(InputBuffer::State(state.0), value);
        states.push(state);
    }
    e.flush().unwrap_or_else(|f| panic!("{}", f.error));
    e.recorder.seed(recipe.seed);
    e.begin_step().unwrap_or_else(|f| panic!("{}", f.error));
    let limit = (numel * 2).max(64);
    let mut m =
        Maker { e, rng, pool: Vec::new(), leaves: Vec::new(), states, limit, assigned: Vec::new(), wide, values };
    m.leaf(base);
    for _ in 0..1 + m.rng.below(3) {
        let dims = m.broadcastable(base);
        m.leaf(&dims);
    }
    for s in m.states.clone() {
        let x = m.e.state_node(s).unwrap();
        m.pool.push(x);
    }
    for _ in 0..recipe.ops {
        m.step();
    }
    if recomputed {
        let end = m.e.recorder.graph.len() as u32;
        spans(&mut m.e.recorder.graph.remat.spans, &mut Pcg::new(recipe.seed ^ 0xca11), 0, end, 3);
    }
    if m.rng.one_in(3) {
        m.gradients();
    }
    let mut roots: Vec<NodeId> = Vec::new();
    let mut rng = Pcg::new(recipe.seed ^ 0x5eed);
    for &x in &m.pool {
        if rng.one_in(4) {
            roots.push(x);
        }
    }
    roots.push(m.pool[m.pool.len() - 1]);
    if let Some(k) = recipe.root {
        roots = vec![roots[k % roots.len()]];
    }
    (m, roots)
}

/// Marks random spans, side by side and nested, within the nodes `from..to`.
fn spans(out: &mut Vec<(NodeId, NodeId)>, rng: &mut Pcg, from: u32, to: u32, depth: u32) {
    let mut at = from;
    while at < to && depth > 0 {
        let start = at + rng.below((to - at) as usize / 2 + 1) as u32;
        let end = (start + 1 + rng.below((to - start) as usize) as u32).min(to);
        if start < end {
            let deeper = (depth - 1).saturating_sub(u32::from(rng.one_in(2)));
            spans(out, rng, start, end, deeper);
            out.push((NodeId(start), NodeId(end)));
        }
        at = end.max(at + 1);
    }
}

/// Formats the nodes that the roots and assignments need, to be printed for a failing seed.
pub fn show(recipe: Recipe) -> String {
    // Recording is cheap: do it again on a device that runs nothing.
    let mut e = Engine::new(std::sync::Arc::new(perilune_plan::Null));
    let mut text = String::new();
    let made =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| build(&mut e, recipe, Mode::Together, &mut text)));
    if made.is_err() {
        text.push_str("(recording it panics)\n");
    }
    text
}

/// As [`show`], for what [`record`] records.
pub fn show_wide(recipe: Recipe) -> String {
    let mut e = Engine::new(std::sync::Arc::new(perilune_plan::Null));
    let made = record(&mut e, recipe, recipe.seed % 4 == 3);
    let writes: Vec<(StateId, NodeId)> = made.request.state_writes.iter().map(|w| (StateId(w.0), w.1)).collect();
    describe(&e, &made.request.roots, &writes)
}

fn describe(e: &Engine, roots: &[NodeId], pending: &[(StateId, NodeId)]) -> String {
    let mut wanted = vec![false; e.recorder.graph.len()];
    for id in roots.iter().chain(pending.iter().map(|p| &p.1)) {
        wanted[id.index()] = true;
    }
    let mut lines = Vec::new();
    for id in e.recorder.graph.ids().rev() {
        let n = e.recorder.graph.node(id);
        if !wanted[id.index()] {
            continue;
        }
        for x in &n.inputs {
            wanted[x.index()] = true;
        }
        let inputs: Vec<String> = n.inputs.iter().map(|x| format!("%{}", x.0)).collect();
        let payload = if n.inputs.is_empty() { format!(" #{}", n.payload) } else { String::new() };
        lines.push(format!(
            "  %{} = {}({}) {:?}{payload}: {} {}",
            id.0,
            n.op.name,
            inputs.join(", "),
            n.attrs,
            n.dtype,
            n.shape
        ));
    }
    lines.reverse();
    lines.push(format!("  roots {roots:?}, assignments {pending:?}"));
    lines.join("\n") + "\n"
}

impl Maker<'_> {
    fn shape(&self, x: NodeId) -> Shape {
        self.e.recorder.graph.shape(x)
    }

    fn dtype(&self, x: NodeId) -> DType {
        self.e.recorder.graph.dtype(x)
    }

    fn rank(&self, x: NodeId) -> usize {
        self.shape(x).rank()
    }

    /// Picks a shape that broadcasts with `dims`.
    fn broadcastable(&mut self, dims: &[usize]) -> Vec<usize> {
        let skip = if self.rng.one_in(2) { 0 } else { self.rng.below(dims.len() + 1) };
        dims[skip..].iter().map(|d| if self.rng.one_in(3) { 1 } else { *d }).collect()
    }

    fn leaf(&mut self, dims: &[usize]) -> NodeId {
        let dtype = match self.rng.below(10) {
            0 => DType::F64,
            1 => DType::BF16,
            2 => DType::F16,
            3 => DType::I64,
            4 => *self.rng.pick(&[DType::I32, DType::U8, DType::Bool]),
            _ => DType::F32,
        };
        let dtype = if self.wide && dtype.is_float() { DType::F64 } else { dtype };
        let x = self.data(dtype, dims);
        if dtype.is_float() {
            self.leaves.push(x);
        }
        self.pool.push(x);
        x
    }

    fn data(&mut self, dtype: DType, dims: &[usize]) -> NodeId {
        let host = if dtype.is_float() {
            randn(&mut self.rng, dtype, dims)
        } else {
            let n: usize = dims.iter().product();
            let values: Vec<f64> =
                (0..n).map(|_| self.rng.range(0, 5) as f64 - f64::from(u8::from(dtype != DType::U8)) * 2.0).collect();
            HostTensor::from_f64(dtype, Shape::of(dims), &values)
        };
        self.input(host)
    }

    fn input(&mut self, host: HostTensor) -> NodeId {
        let x = self.e.from_host(host.clone());
        self.values.insert(InputBuffer::Leaf(self.e.recorder.graph.node(x).payload), host);
        x
    }

    /// Picks a node, mostly a recent one.
    fn any(&mut self) -> NodeId {
        let n = self.pool.len();
        let back = if self.rng.one_in(3) { self.rng.below(n) } else { self.rng.below(n.min(4)) };
        self.pool[n - 1 - back]
    }

    /// Picks a float node.
    fn real(&mut self) -> NodeId {
        for _ in 0..8 {
            let x = self.any();
            if self.dtype(x).is_float() {
                return x;
            }
        }
        let x = self.any();
        {
            let to = if self.wide { DType::F64 } else { DType::F32 };
            self.e.recorder.graph.cast(x, to).unwrap()
        }
    }

    /// Picks a node that broadcasts with `x` to a shape of limited size.
    fn partner(&mut self, x: NodeId) -> NodeId {
        for _ in 0..6 {
            let y = self.any();
            if let Some(s) = Shape::broadcast(&self.shape(x), &self.shape(y))
                && s.numel() <= self.limit
            {
                return y;
            }
        }
        let dims = self.broadcastable(self.shape(x).dims().to_vec().as_slice());
        self.leaf(&dims)
    }

    fn dim(&mut self, x: NodeId) -> Option<usize> {
        let r = self.rank(x);
        (r > 0).then(|| self.rng.below(r))
    }

    fn push(&mut self, made: Result<NodeId, String>) {
        if let Ok(x) = made
            && self.shape(x).numel() <= self.limit
        {
            self.pool.push(x);
        }
    }

    /// Keeps values near 1, so that infinities do not dominate.
    fn tame(&mut self, x: NodeId) -> NodeId {
        if self.rng.one_in(2) { call(self.e, "tanh", &[t(x)], &[]).unwrap_or(x) } else { x }
    }

    fn step(&mut self) {
        let kind = self.rng.below(100);
        let made = match kind {
            0..24 => self.unary(),
            24..46 => self.binary(),
            46..52 => self.choose(),
            52..58 => self.cast(),
            58..68 => self.reduce(),
            68..74 => self.rows(),
            74..88 => self.movement(),
            88..92 => self.library(),
            92..95 => self.product(),
            95..97 => self.generator(),
            _ => {
                self.assign();
                return;
            }
        };
        self.push(made);
    }

    fn unary(&mut self) -> Result<NodeId, String> {
        let x = if self.rng.one_in(6) { self.any() } else { self.real() };
        let name = *self.rng.pick(&[
            "neg",
            "abs",
            "sign",
            "tanh",
            "sigmoid",
            "sin",
            "cos",
            "erf",
            "floor",
            "ceil",
            "round",
            "relu",
            "gelu",
            "silu",
            "softplus",
            "elu",
            "relu6",
            "hardswish",
            "logical_not",
            "isnan",
            "contiguous",
            "reciprocal",
            "exp",
            "log1p",
            "sqrt",
            "rsqrt",
            "expm1",
            "detach",
        ]);
        match name {
            "exp" | "expm1" => {
                let a = call(self.e, "abs", &[t(x)], &[])?;
                let n = call(self.e, "neg", &[t(a)], &[])?;
                call(self.e, name, &[t(n)], &[])
            }
            "log1p" | "sqrt" => {
                let a = call(self.e, "abs", &[t(x)], &[])?;
                call(self.e, name, &[t(a)], &[])
            }
            "rsqrt" | "reciprocal" => {
                let a = call(self.e, "abs", &[t(x)], &[])?;
                let a = call(self.e, "add", &[t(a), float(0.5)], &[])?;
                call(self.e, name, &[t(a)], &[])
            }
            _ => call(self.e, name, &[t(x)], &[]),
        }
    }

    fn binary(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let name = *self.rng.pick(&[
            "add",
            "add",
            "sub",
            "mul",
            "mul",
            "maximum",
            "minimum",
            "div",
            "floor_div",
            "remainder",
            "eq",
            "lt",
            "ge",
            "ne",
            "logical_and",
            "logical_xor",
            "pow",
        ]);
        if self.rng.one_in(4) {
            let n =
                if self.rng.one_in(2) { int(self.rng.range(1, 4)) } else { float(self.rng.range(1, 9) as f64 / 4.0) };
            return match name {
                "pow" => call(self.e, name, &[t(x), int(2)], &[]),
                _ if self.rng.one_in(2) => call(self.e, name, &[n, t(x)], &[]),
                _ => call(self.e, name, &[t(x), n], &[]),
            };
        }
        let y = self.partner(x);
        let y = if matches!(name, "mul" | "pow") { self.tame(y) } else { y };
        if name == "pow" {
            let a = call(self.e, "abs", &[t(x)], &[])?;
            return call(self.e, name, &[t(a), t(y)], &[]);
        }
        call(self.e, name, &[t(x), t(y)], &[])
    }

    fn choose(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let y = self.partner(x);
        if self.rng.one_in(3) {
            return call(self.e, "clamp", &[t(x), float(-0.5), float(0.75)], &[]);
        }
        let c = self.partner(x);
        let c = call(self.e, "gt", &[t(c), int(0)], &[])?;
        if self.rng.one_in(3) {
            return call(self.e, "masked_fill", &[t(x), t(c), float(-1.5)], &[]);
        }
        call(self.e, "where", &[t(c), t(x), t(y)], &[])
    }

    fn cast(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let to = if self.rng.one_in(3) { *self.rng.pick(&DType::ALL) } else { *self.rng.pick(&FLOATS) };
        let to = if self.wide && to.is_float() { DType::F64 } else { to };
        call(self.e, "to", &[t(x), Value::DType(to)], &[])
    }

    fn reduce(&mut self) -> Result<NodeId, String> {
        let x = if self.rng.one_in(5) { self.any() } else { self.real() };
        let r = self.rank(x);
        let keep = [("keepdim", Value::Bool(self.rng.one_in(2)))];
        let dims: Vec<i64> = match self.rng.below(4) {
            0 => (0..r as i64).collect(),
            1 if r > 1 => (r as i64 - 2..r as i64).collect(),
            2 if r > 0 => vec![r as i64 - 1],
            _ if r > 0 => vec![self.rng.below(r) as i64],
            _ => vec![],
        };
        let name = *self.rng.pick(&[
            "sum",
            "sum",
            "sum",
            "amax",
            "amin",
            "mean",
            "mean",
            "logsumexp",
            "var",
            "norm",
            "prod",
            "any",
            "all",
        ]);
        if name == "prod" && self.shape(x).numel() > 40 {
            return Err("would be 0 or infinite".into());
        }
        call(self.e, name, &[t(x), ints(&dims)], &keep)
    }

    /// Adds softmax, norms or losses: regions with a reduction between maps.
    fn rows(&mut self) -> Result<NodeId, String> {
        let x = self.real();
        let Some(d) = self.dim(x) else { return Err("a scalar".into()) };
        let last = self.shape(x).dims()[self.rank(x) - 1];
        match self.rng.below(6) {
            0 | 1 => call(self.e, "softmax", &[t(x), int(d as i64)], &[]),
            2 => call(self.e, "log_softmax", &[t(x), int(-1)], &[]),
            3 => {
                let dtype = self.dtype(x);
                let (w, b) = (self.data(dtype, &[last]), self.data(dtype, &[last]));
                call(self.e, "layer_norm", &[t(x), t(w), t(b)], &[])
            }
            4 => call(self.e, "rms_norm", &[t(x)], &[]),
            _ => {
                let m = call(self.e, "amax", &[t(x), ints(&[d as i64])], &[("keepdim", Value::Bool(true))])?;
                call(self.e, "sub", &[t(x), t(m)], &[])
            }
        }
    }

    fn movement(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let shape = self.shape(x);
        let (r, dims) = (shape.rank(), shape.dims().to_vec());
        let d = self.dim(x).unwrap_or(0);
        let n = dims.get(d).copied().unwrap_or(1) as i64;
        match self.rng.below(16) {
            0..3 => {
                let mut axes: Vec<i64> = (0..r as i64).collect();
                for i in (1..r).rev() {
                    axes.swap(i, self.rng.below(i + 1));
                }
                call(self.e, "permute", &[t(x), ints(&axes)], &[])
            }
            3 if n > 1 => {
                let lo = self.rng.range(0, n);
                let step = self.rng.range(1, 4);
                call(self.e, "slice", &[t(x), int(d as i64), int(lo), int(n), int(step)], &[])
            }
            4 => call(self.e, "flip", &[t(x), ints(&[d as i64])], &[]),
            5 => call(self.e, "reshape", &[t(x), ints(&[-1])], &[]),
            6 if r > 1 => call(self.e, "flatten", &[t(x), int(0), int(1)], &[]),
            7 => call(self.e, "unsqueeze", &[t(x), int(self.rng.range(0, r as i64 + 1))], &[]),
            8 => call(self.e, "squeeze", &[t(x)], &[]),
            9 => {
                let mut to: Vec<i64> = dims.iter().map(|d| *d as i64).collect();
                for v in to.iter_mut().filter(|v| **v == 1) {
                    *v = self.rng.range(1, 4);
                }
                if self.rng.one_in(2) {
                    to.insert(0, self.rng.range(1, 3));
                }
                call(self.e, "expand", &[t(x), ints(&to)], &[])
            }
            10 => call(self.e, "roll", &[t(x), ints(&[self.rng.range(-3, 4)]), ints(&[d as i64])], &[]),
            11 if r > 0 => {
                let y = if self.rng.one_in(2) { x } else { self.any() };
                call(self.e, "cat", &[Value::Tensors(vec![x, y]), int(d as i64)], &[])
            }
            12 => call(
                self.e,
                "pad",
                &[t(x), ints(&[self.rng.range(0, 3), self.rng.range(-1, 2)])],
                &[("value", float(0.5))],
            ),
            13 if r > 1 => call(self.e, "tril", &[t(x), int(self.rng.range(-1, 2))], &[]),
            14 if n > 2 => call(self.e, "unfold", &[t(x), int(d as i64), int(2), int(self.rng.range(1, 3))], &[]),
            15 if n > 1 => {
                let parts = call_all(self.e, "chunk", &[t(x), int(2), int(d as i64)], &[])?;
                self.push(Ok(parts[0]));
                Ok(parts[parts.len() - 1])
            }
            _ if r > 1 => call(self.e, "t", &[t(x)], &[]),
            _ => Err("does not fit".into()),
        }
    }

    fn library(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let Some(d) = self.dim(x) else { return Err("a scalar".into()) };
        let n = self.shape(x).dims()[d];
        let at = int(d as i64);
        match self.rng.below(7) {
            0 => call(self.e, "cumsum", &[t(x), at], &[]),
            1 if n > 0 => {
                let values: Vec<i64> = (0..3).map(|_| self.rng.range(0, n as i64)).collect();
                let index = self.input(HostTensor::from_i64(Shape::of(&[3]), &values));
                call(self.e, "index_select", &[t(x), at, t(index)], &[])
            }
            2 if n > 0 && n <= 600 => {
                let s = call_all(self.e, "sort", &[t(x), at], &[])?;
                self.push(Ok(s[1]));
                Ok(s[0])
            }
            3 if n > 0 => call(self.e, "argmax", &[t(x), at], &[]),
            4 if n > 0 && n <= 600 => {
                let i = call(self.e, "argsort", &[t(x), at.clone()], &[])?;
                let i = call(self.e, "slice", &[t(i), at.clone(), int(0), int((n as i64 + 1) / 2)], &[])?;
                call(self.e, "gather", &[t(x), at, t(i)], &[])
            }
            5 if n > 0 => {
                let values: Vec<i64> = (0..n).map(|_| self.rng.range(0, n as i64)).collect();
                let index = self.input(HostTensor::from_i64(Shape::of(&[n]), &values));
                call(self.e, "index_add", &[t(x), at, t(index), t(x)], &[])
            }
            _ => call_all(self.e, "max", &[t(x), at], &[]).map(|o| o[0]),
        }
    }

    fn product(&mut self) -> Result<NodeId, String> {
        let x = self.real();
        let x = self.tame(x);
        let (r, dims, dtype) = (self.rank(x), self.shape(x).dims().to_vec(), self.dtype(x));
        if r == 0 || dims[r - 1] > 600 {
            return Err("does not fit".into());
        }
        let k = dims[r - 1];
        if r == 2 && self.rng.one_in(4) {
            return self.grouped(x, dims[0], k);
        }
        let y = match self.rng.below(3) {
            0 if r > 1 && dims[r - 2] * dims[r - 2] <= self.limit => call(self.e, "t", &[t(x)], &[])?,
            1 => self.data(dtype, &[k]),
            _ => {
                let n = 1 + self.rng.below(5);
                self.data(dtype, &[k, n])
            }
        };
        let y = call(self.e, "matmul", &[t(x), t(y)], &[])?;
        Ok(self.tame(y))
    }

    /// Adds a grouped product: random groups of rows, each times its matrix, or products of the rows of both sides by group.
    fn grouped(&mut self, x: NodeId, rows: usize, k: usize) -> Result<NodeId, String> {
        let (groups, n, dtype) = (1 + self.rng.below(3), 1 + self.rng.below(5), self.dtype(x));
        let mut ends: Vec<i64> = (0..groups).map(|_| self.rng.range(0, rows as i64 + 1)).collect();
        ends.sort_unstable();
        let ends = self.input(HostTensor::from_i64(Shape::of(&[groups]), &ends));
        let y = if self.rng.one_in(2) {
            let w = self.data(dtype, &[groups, k, n]);
            call(self.e, "grouped_matmul", &[t(x), t(w), t(ends)], &[])?
        } else {
            let (xt, w) = (call(self.e, "t", &[t(x)], &[])?, self.data(dtype, &[rows, n]));
            call(self.e, "grouped_matmul", &[t(xt), t(w), t(ends)], &[])?
        };
        Ok(self.tame(y))
    }

    fn generator(&mut self) -> Result<NodeId, String> {
        let x = self.any();
        let dims: Vec<i64> = self.shape(x).dims().iter().map(|d| *d as i64).collect();
        match self.rng.below(5) {
            0 => call(self.e, "rand", &[ints(&dims)], &[]),
            1 => call(self.e, "randn", &[ints(&dims)], &[]),
            2 => {
                let x = self.real();
                call(self.e, "dropout", &[t(x), float(0.3)], &[])
            }
            3 => call(self.e, "full", &[ints(&dims), Value::Number(Number::Float(0.75))], &[]),
            _ => {
                let n = dims.last().copied().unwrap_or(1);
                call(self.e, "arange", &[int(n)], &[])
            }
        }
    }

    fn assign(&mut self) {
        if self.states.is_empty() {
            return;
        }
        let s = *self.rng.pick(&self.states.clone());
        let want = self.e.state_info(s).unwrap().shape;
        for _ in 0..8 {
            let x = self.any();
            if Shape::broadcast(&self.shape(x), &want) == Some(want) {
                self.e.assign(s, x).unwrap();
                self.assigned.push((s, x));
                let now = self.e.state_node(s).unwrap();
                if self.wide {
                    self.assigned.pop();
                    self.assigned.push((s, now));
                }
                self.pool.push(now);
                return;
            }
        }
    }

    /// Adds gradients of the sum of a node by all float leaves.
    fn gradients(&mut self) {
        let y = self.real();
        let Ok(total) = call(self.e, "sum", &[t(y)], &[]) else { return };
        let dtype = self.dtype(total);
        let one = self.e.recorder.graph.constant(1.0, dtype);
        let leaves = self.leaves.clone();
        if let Ok(found) = grad::grad(&mut self.e.recorder.graph, total, one, &leaves, false) {
            self.pool.extend(found.into_iter().flatten());
        }
    }
}
