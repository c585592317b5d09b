//! Tests products whose rows are not multiples of 16 bytes: a device that requires this computes them over padded operands, with
//! equal results.
#![allow(clippy::unwrap_used)]

use perilune_core::Layout;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_cpu::Cpu;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, BufferDesc, Executable};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The CPU with products that require rows of 16 bytes.
struct Aligned(Cpu);

impl Backend for Aligned {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.0.has_kernel(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        self.0.can_store_layout(node, output, layout)
    }

    fn row_bytes(&self) -> Option<usize> {
        Some(16)
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        self.0.alloc(desc)
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        self.0.upload(desc, bytes)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.0.download(buffer)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.0.compile(program)
    }
}

/// Numbers of each product, and how many products were padded.
fn run(backend: Arc<dyn Backend>, call: &str) -> (Vec<f64>, usize) {
    let text = format!(
        r#"
local pl = require "perilune"
local function rand(seed, shape) pl.seed(seed) return pl.randn(shape) end
local function show(y)
  local plan = tostring(pl.plan(y))
  local _, n = plan:gsub("strided_pad", "")
  print(n)
  for _, part in ipairs {{ y:to("f32"):sum(0), y:to("f32"):sum(-1) }} do print(table.concat(part:flatten():tolist(), " ")) end
end
-- Weighted sums (plain ones of a loss's gradients are 0 but for rounding) of `y` and of the gradients of one, all from one plan.
local function all(y, xs)
  local c = pl.randn(y.shape):to(y.dtype)
  local out = {{ y, pl.grad((y * c):sum(), xs) }}
  pl.eval(table.unpack(out))
  print(0)
  for _, x in ipairs(out) do
    x = x:to("f32") * pl.randn(x.shape)
    for _, part in ipairs(x:dim() > 1 and {{ x:sum(-1), x:sum(0) }} or {{ x }}) do
      -- A separate scale for each, so that small values are compared too.
      print(table.concat((part / part:abs():max()):flatten():tolist(), " "))
    end
  end
end
-- Two products with `f` between them, whose width is odd.
local function between(rows, width, dtype, f)
  local x, up = rand(1, {{ rows, 704 }}), rand(2, {{ 704, width }}) * 0.04
  local down, w, b = rand(3, {{ width, 704 }}) * 0.04, rand(4, {{ width }}), rand(5, {{ width }})
  x, up, down = x:to(dtype), up:to(dtype), down:to(dtype)
  local y = f(x:matmul(up), w, b)
  all(y:to(dtype):matmul(down), {{ x, up, down }})
end
-- The head of a language model.
local function head(rows, classes, options, biased)
  local x, w = rand(1, {{ rows, 704 }}):to("bf16"), (rand(2, {{ classes, 704 }}) * 0.04):to("bf16")
  local b, target = rand(3, {{ classes }}):to("bf16"), pl.randint(0, classes, {{ rows }})
  local y = biased and pl.linear(x, w, b) or x:matmul(w:t())
  all(y:cross_entropy(target, options), biased and {{ x, w, b }} or {{ x, w }})
end
{call}
"#
    );
    let printed: Rc<RefCell<String>> = Rc::default();
    let sink = printed.clone();
    let print = Rc::new(move |line: &str| sink.borrow_mut().push_str(&format!("{line}\n")));
    let runtime = Runtime::new(RuntimeOptions {
        backend,
        params: Vec::new(),
        policy: perilune_tests::scripts::policy(&[]),
        strict: true,
        print,
    })
    .unwrap();
    runtime.load_text(&text, "@align.lua").unwrap_or_else(|e| panic!("{call}: {e}"));
    let out = printed.borrow().clone();
    let (count, rest) = out.split_once('\n').unwrap();
    (rest.split_whitespace().map(|x| x.parse().unwrap()).collect(), count.parse().unwrap())
}

#[test]
fn padded_products_give_the_same_results() {
    let of = |shape: &str, seed: u32| format!("rand({seed}, {shape}):to('bf16')");
    let (x, w) = (of("{801, 803}", 1), of("{803, 805}", 2));
    let wt = of("{805, 803}", 3);
    let cases = [
        // All three dims; the transposed weight of a linear layer; a transposed left side; a batch.
        (format!("show({x}:matmul({w}))"), true),
        (format!("show({x}:matmul({wt}:t()))"), true),
        (format!("show({x}:t():matmul({}))", of("{801, 805}", 4)), true),
        (format!("show(pl.linear({x}, {wt}, {}))", of("{805}", 5)), true),
        (format!("show({}:matmul({}))", of("{2, 641, 643}", 6), of("{2, 643, 645}", 7)), true),
        ("show(rand(8, {801, 804}):to('f16'):matmul(rand(9, {804, 807}):to('f16')))".to_string(), true),
        // Not padded: aligned rows; products too small or too narrow to amortize the copy; f32, which has no such kernels.
        (format!("show({}:matmul({}))", of("{801, 808}", 1), of("{808, 800}", 2)), false),
        (format!("show({}:matmul({}))", of("{65, 67}", 1), of("{67, 71}", 2)), false),
        (format!("show(pl.eval({}):matmul({}))", of("{100001, 67}", 1), of("{67, 80}", 2)), false),
        ("show(rand(1, {801, 803}):matmul(rand(2, {803, 805})))".to_string(), false),
    ];
    for (call, pads) in cases {
        let (plain, none) = run(Arc::new(Cpu::new(Some(2))), &call);
        let device: Arc<dyn Backend> = if perilune_tests::harness::on_gpu() {
            perilune_tests::harness::device(2)
        } else {
            Arc::new(Aligned(Cpu::new(Some(2))))
        };
        let (grown, some) = run(device, &call);
        assert_eq!((none, some > 0), (0, pads), "{call}");
        let scale = plain.iter().fold(0f64, |m, x| m.max(x.abs()));
        let off = plain.iter().zip(&grown).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(plain.len() == grown.len() && off <= 4e-3 * scale, "{call}: {off} of {scale}");
    }
}

/// Values between two such products are computed in padded rows, on a device that supports it: the padding and its old contents
/// must not affect results, and repeated runs must be equal.
#[test]
fn values_between_padded_products_are_the_same() {
    let cases = [
        // Rows in registers of a warp and of a block; in shared memory; `exp` in shared memory; over several launches.
        "head(1024, 1003)",
        "head(1024, 5001)",
        "head(1024, 20001)",
        "head(512, 50257)",
        "head(512, 20001, { label_smoothing = 0.1 })",
        "head(512, 9001, { reduction = 'none' })",
        "head(1024, 1003, {}, true)",
        "head(1024, 20001, {}, true)",
        "between(2048, 1003, 'bf16', function(y) return y:gelu() end)",
        "between(1024, 20001, 'bf16', function(y) return y:gelu() end)",
        "between(2048, 1003, 'f16', function(y) return y:softmax(-1) end)",
        "between(1024, 5001, 'bf16', function(y) return y:softmax(-1) end)",
        "between(512, 20001, 'bf16', function(y) return (y - 9):softmax(-1) end)",
        "between(2048, 301, 'bf16', function(y, w, b) return y:layer_norm(w, b) end)",
        "between(2048, 1003, 'bf16', function(y, w, b) return y:layer_norm(w, b) end)",
        "between(1024, 5001, 'bf16', function(y, w, b) return y:layer_norm(w, b) end)",
        // A column sum with rows; values that are not padded.
        "between(2048, 1003, 'bf16', function(y, w, b) return (y + b:to('bf16')):relu() end)",
        "between(1024, 5001, 'bf16', function(y, w) local z = (y * w:to('bf16')):softmax(-1); return z + z:sum(0):to('bf16') end)",
        "between(2, 64, 'bf16', function(y) return y end)",
    ];
    // A CPU pads no rows, and is slow for these sizes.
    let (few, threads) = if perilune_tests::harness::on_gpu() { (cases.len(), None) } else { (1, Some(2)) };
    for call in cases.into_iter().take(few) {
        let (plain, _) = run(Arc::new(Cpu::new(threads)), call);
        let device = || -> Arc<dyn Backend> {
            if perilune_tests::harness::on_gpu() {
                perilune_tests::harness::device(2)
            } else {
                Arc::new(Aligned(Cpu::new(Some(2))))
            }
        };
        let (grown, _) = run(device(), call);
        let off = plain.iter().zip(&grown).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        println!("{call}: {} numbers, at most {off:.1e} apart", plain.len());
        assert!(plain.len() == grown.len() && off <= 2e-2, "{call}: {off}");
        assert_eq!(run(device(), call).0, grown, "{call}: not the same again");
    }
}
