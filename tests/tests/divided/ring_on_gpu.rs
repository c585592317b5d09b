//! Plans attention to split sequences for a GPU, without one: which kernels a device launches, and that its memory is linear in the
//! number of positions.

use crate::step::Step;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::attention_block::MOST_POSITIONS;
use perilune_core::ops::{Value, create};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape, grad};
use perilune_cuda::attention;
use perilune_cuda::launch::Props;
use perilune_cuda::library::routine;
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::request::InputBuffer;
use perilune_plan::{Backend, KeyExchange, Null, NullWith, Options};
use perilune_tests::harness::{int, t};
use perilune_tests::virtual_devices::{Spread, plan_on};
use std::sync::Arc;

#[derive(Clone, Copy, Debug)]
struct Attention {
    dtype: DType,
    keys: KeyExchange,
    devices: usize,
    length: usize,
    window: Option<i64>,
    causal: bool,
    documents: bool,
}

const ZIGZAG: Attention = Attention {
    dtype: DType::BF16,
    keys: KeyExchange::Ring,
    devices: 2,
    length: 4096,
    window: None,
    causal: true,
    documents: false,
};

/// Query and key heads, and the size of a head.
const HEADS: usize = 4;
const GROUPS: usize = 2;
const SIZE: usize = 64;

impl Attention {
    /// The program of a device for the gradients of queries, keys and values.
    fn plan(&self, device: &dyn Backend) -> Arc<Program> {
        let mut s = Step::new(self.dtype);
        let dims = |heads: usize| [1, heads, self.length, SIZE];
        let mut leaf = |heads: usize| {
            let shape = Shape::of(&dims(heads));
            s.batch(HostTensor::new(self.dtype, shape, vec![0; shape.numel() * self.dtype.size()]))
        };
        let [q, k, v, d] = [leaf(HEADS), leaf(GROUPS), leaf(GROUPS), leaf(HEADS)];
        let mut options = vec![("is_causal", Value::Bool(self.causal)), ("enable_gqa", Value::Bool(true))];
        options.extend(self.window.map(|w| ("window", int(w))));
        if self.documents {
            let ids: Vec<i64> = (0..self.length as i64).map(|i| i / 100).collect();
            options.push(("documents", t(s.leaf(HostTensor::from_i64(Shape::of(&[1, self.length]), &ids)))));
        }
        let y = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &options);
        let g = &mut s.e.recorder.graph;
        s.request.roots = grad::grad(g, y, d, &[q, k, v], false).unwrap().into_iter().map(Option::unwrap).collect();
        s.request.roots.push(y);
        let mesh = Mesh::new(&[(Axis::Cp, self.devices)]).unwrap();
        let cut = Placement::REPLICATED.with(Axis::Cp, Along::Split(2));
        let spread = Spread { mesh, placements: s.batch.iter().map(|b| (*b, cut)).collect(), ..Spread::default() };
        let planned = plan_on(&s.e.recorder.graph, &s.request, &spread, Options::default(), self.keys, device);
        planned.unwrap_or_else(|e| panic!("{self:?}: {e}")).0
    }

    fn on_gpu(&self) -> Arc<Program> {
        self.plan(&NullWith { has_kernel: attention::has_kernel, can_store_layout: attention::can_store_layout })
    }
}

/// Elements of the largest tensor.
fn largest(program: &Program) -> usize {
    program.values.iter().map(|v| v.shape.numel()).max().unwrap_or(0)
}

/// The kernels that attention launches on a GPU, by name, and how often.
fn launches(program: &Program, props: &Props) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for kernel in &program.kernels {
        let Kernel::Library(l) = kernel else { continue };
        if !l.op.name.contains("attention") {
            continue;
        }
        for launch in routine(program, l, props).unwrap_or_else(|e| panic!("{e}")).launches {
            let label = launch.function.label.replace("attention_", "");
            match found.iter_mut().find(|x| x.0 == label) {
                Some(x) => x.1 += 1,
                None => found.push((label, 1)),
            }
        }
    }
    found.sort();
    found
}

fn expect(want: &[(&str, usize)]) -> Vec<(String, usize)> {
    let mut want: Vec<_> = want.iter().map(|(label, n)| ((*label).to_string(), *n)).collect();
    want.sort();
    want
}

/// Two products of p devices have the causal mask, the others none, forward and backward: no operand is copied.
#[test]
fn a_zigzag_ring_takes_kernels_without_masks() {
    for p in [2, 4] {
        let program = Attention { devices: p, ..ZIGZAG }.on_gpu();
        let all = |form: &str, n| {
            ["forward", "backward_q", "backward_kv"].map(|pass| (format!("{pass}_sm90_d64_bf16{form}_block"), n))
        };
        let mut want = [all("_causal", 2), all("", 2 * p - 1)].concat();
        want.sort();
        assert_eq!(launches(&program, &Props::H200), want);
    }
    let f32 = Attention { dtype: DType::F32, ..ZIGZAG }.on_gpu();
    let passes = ["forward", "backward_q", "backward_kv"];
    let want: Vec<_> = passes
        .iter()
        .flat_map(|x| [(format!("{x}_d64_f32_block"), 3), (format!("{x}_d64_f32_causal_block"), 2)])
        .collect();
    assert_eq!(launches(&f32, &Props::H200), expect(&want.iter().map(|x| (x.0.as_str(), x.1)).collect::<Vec<_>>()));
}

/// Twice the positions take twice the memory. Elementary ops would take four times as much, for scores of two chunks.
#[test]
fn memory_is_linear_in_positions() {
    let long = Attention { length: 1 << 15, ..ZIGZAG };
    let odd = Attention { length: 32770, ..long };
    let gathered = Attention { keys: KeyExchange::Gather, ..long };
    let window = Some(300);
    for one in [
        long,
        Attention { devices: 4, ..long },
        Attention { window, ..long },
        Attention { causal: false, ..long },
        odd,
        Attention { window, ..odd },
        gathered,
        Attention { window, ..gathered },
        Attention { causal: false, ..gathered },
        Attention { dtype: DType::F32, ..long },
        Attention { documents: true, ..long },
        Attention { documents: true, causal: false, ..gathered },
    ] {
        let length = 2 * one.length - one.length % 4;
        let (small, large) = (one.on_gpu(), Attention { length, ..one }.on_gpu());
        // A mask of two chunks, or the scores of a head.
        let chunk = one.length / one.devices / 2;
        assert!(largest(&small) < chunk * chunk, "{one:?}: {}", largest(&small));
        let (a, b) = (small.arena_bytes, large.arena_bytes);
        assert!(b < a * 21 / 10 + (64 << 10), "{one:?}: {a} and {b} bytes");
        println!("{one:?}: {} and {} KiB", a >> 10, b >> 10);
    }
    assert!(largest(&ZIGZAG.plan(&Null)) >= HEADS * 1024 * 1024, "elementary ops make scores");
}

/// A position, a shift and a window are added in 32 bits.
#[test]
fn sequences_beyond_the_positions_of_kernels_are_refused() {
    for keys in [KeyExchange::Ring, KeyExchange::Gather] {
        let mut s = Step::new(DType::BF16);
        let shape = Shape::of(&[1, 1, MOST_POSITIONS + 4, 8]);
        let g = &mut s.e.recorder.graph;
        let [q, k, v] = [1, 2, 3].map(|id| g.leaf(&create::LEAF, shape, DType::BF16, &[], id));
        let causal = [("is_causal", Value::Bool(true))];
        s.request.roots = vec![s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &causal)];
        let cut = Placement::REPLICATED.with(Axis::Cp, Along::Split(2));
        let placements = [1, 2, 3].map(|id| (InputBuffer::Leaf(id), cut)).into_iter().collect();
        let spread = Spread { mesh: Mesh::parse("cp=2").unwrap(), placements, ..Spread::default() };
        let e = plan_on(&s.e.recorder.graph, &s.request, &spread, Options::default(), keys, &Null).unwrap_err();
        assert!(e.contains("536870916 positions along cp; split sequences have at most 2^29"), "{e}");
    }
}

/// Each product computes the labels of its queries and of its keys, and has no mask of both.
#[test]
fn documents_are_operands_of_blocks() {
    let with = |one: Attention| launches(&Attention { documents: true, ..one }.on_gpu(), &Props::H200);
    let passes = ["forward", "backward_q", "backward_kv"];
    let kernels =
        |form: &str, n| passes.map(|pass| (format!("{pass}_sm90_d64_bf16{form}_documents_block"), n)).to_vec();
    let labels = |products: usize| vec![("segment_bounds".to_string(), 4 * products)];
    let sorted = |all: Vec<Vec<(String, usize)>>| {
        let mut all = all.concat();
        all.sort();
        all
    };
    assert_eq!(with(ZIGZAG), sorted(vec![kernels("_causal", 2), kernels("", 3), labels(5)]));
    let gathered = Attention { keys: KeyExchange::Gather, ..ZIGZAG };
    assert_eq!(with(gathered), sorted(vec![kernels("_causal", 1), labels(1)]));
    assert_eq!(with(Attention { causal: false, ..gathered }), sorted(vec![kernels("", 1), labels(1)]));
    assert_eq!(with(Attention { causal: false, ..ZIGZAG }), sorted(vec![kernels("", 2), labels(2)]));
}

/// A window shifts positions, as blocks that cannot be halved and gathered keys do.
#[test]
fn positions_are_shifted_without_a_mask() {
    let window = Attention { window: Some(300), ..ZIGZAG }.on_gpu();
    let counts = |program: &Program| -> Vec<(String, usize)> {
        launches(program, &Props::H200).into_iter().filter(|x| x.0.starts_with("forward")).collect()
    };
    assert_eq!(counts(&window), expect(&[("forward_sm90_d64_bf16_window_block", 5)]));
    let odd = Attention { length: 4098, ..ZIGZAG }.on_gpu();
    assert_eq!(counts(&odd), expect(&[("forward_sm90_d64_bf16_causal_block", 2)]));
    let gathered = Attention { keys: KeyExchange::Gather, ..ZIGZAG }.on_gpu();
    assert_eq!(counts(&gathered), expect(&[("forward_sm90_d64_bf16_causal_block", 1)]));
    let all = Attention { causal: false, ..ZIGZAG }.on_gpu();
    assert_eq!(counts(&all), expect(&[("forward_sm90_d64_bf16_block", 2)]));
}
