//! Products whose rows are no multiple of 16 bytes: on a device that wants them so they are done over grown operands, and say the
//! same.
#![allow(clippy::unwrap_used)]

use perilune_core::Layout;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_cpu::Cpu;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, Executable};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The CPU, as if its products wanted rows of 16 bytes.
struct Aligned(Cpu);

impl Backend for Aligned {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn keeps(&self, node: &Node) -> bool {
        self.0.keeps(node)
    }

    fn writes(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        self.0.writes(node, output, layout)
    }

    fn row_bytes(&self) -> Option<usize> {
        Some(16)
    }

    fn alloc(&self, nbytes: usize) -> Result<Buffer> {
        self.0.alloc(nbytes)
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.0.upload(bytes)
    }

    fn download(&self, buffer: &Buffer, nbytes: usize) -> Result<Vec<u8>> {
        self.0.download(buffer, nbytes)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.0.write(buffer, bytes)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        self.0.compile(program)
    }
}

/// Numbers of each product, and how many products were padded.
fn run(backend: Rc<dyn Backend>, call: &str) -> (Vec<f64>, usize) {
    let text = format!(
        r#"
local pl = require "perilune"
local function rand(seed, shape) pl.seed(seed) return pl.randn(shape) end
local function show(y)
  local plan = tostring(pl.plan(y))
  local _, n = plan:gsub("place", "")
  print(n)
  for _, part in ipairs {{ y:to("f32"):sum(0), y:to("f32"):sum(-1) }} do print(table.concat(part:flatten():tolist(), " ")) end
end
{call}
"#
    );
    let printed: Rc<RefCell<String>> = Rc::default();
    let sink = printed.clone();
    let print = Rc::new(move |line: &str| sink.borrow_mut().push_str(&format!("{line}\n")));
    let runtime = Runtime::new(RuntimeOptions { backend, params: Vec::new(), strict: true, print }).unwrap();
    runtime.load_text(&text, "@align.lua").unwrap_or_else(|e| panic!("{call}: {e}"));
    let out = printed.borrow().clone();
    let (count, rest) = out.split_once('\n').unwrap();
    (rest.split_whitespace().map(|x| x.parse().unwrap()).collect(), count.parse().unwrap())
}

#[test]
fn odd_products_are_done_over_whole_rows_and_say_the_same() {
    let of = |shape: &str, seed: u32| format!("rand({seed}, {shape}):to('bf16')");
    let (x, w) = (of("{801, 803}", 1), of("{803, 805}", 2));
    let wt = of("{805, 803}", 3);
    let cases = [
        // All three dims; the weight as a linear layer keeps it; a left side that is turned; a batch.
        (format!("show({x}:matmul({w}))"), true),
        (format!("show({x}:matmul({wt}:t()))"), true),
        (format!("show({x}:t():matmul({}))", of("{801, 805}", 4)), true),
        (format!("show(pl.linear({x}, {wt}, {}))", of("{805}", 5)), true),
        (format!("show({}:matmul({}))", of("{2, 641, 643}", 6), of("{2, 643, 645}", 7)), true),
        ("show(rand(8, {801, 804}):to('f16'):matmul(rand(9, {804, 807}):to('f16')))".to_string(), true),
        // Rows are whole already; products are too small, or too narrow for the copy to pay; f32 has no such kernels.
        (format!("show({}:matmul({}))", of("{801, 808}", 1), of("{808, 800}", 2)), false),
        (format!("show({}:matmul({}))", of("{65, 67}", 1), of("{67, 71}", 2)), false),
        (format!("show({}:matmul({}))", of("{100001, 67}", 1), of("{67, 80}", 2)), false),
        ("show(rand(1, {801, 803}):matmul(rand(2, {803, 805})))".to_string(), false),
    ];
    for (call, pads) in cases {
        let (plain, none) = run(Rc::new(Cpu::new(Some(2))), &call);
        let device: Rc<dyn Backend> = if perilune_tests::harness::on_gpu() {
            perilune_tests::harness::device(2)
        } else {
            Rc::new(Aligned(Cpu::new(Some(2))))
        };
        let (grown, some) = run(device, &call);
        assert_eq!((none, some > 0), (0, pads), "{call}");
        let scale = plain.iter().fold(0f64, |m, x| m.max(x.abs()));
        let off = plain.iter().zip(&grown).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(plain.len() == grown.len() && off <= 4e-3 * scale, "{call}: {off} of {scale}");
    }
}
