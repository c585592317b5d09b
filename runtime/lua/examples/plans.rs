//! Prints the plans of a recipe's first steps, planned on the null device.
//!
//!     cargo run --release -p perilune-lua --example plans recipes/digits.lua [--bf16] [key=value]…
//!
//! With `--bf16`, as a GPU plans it in that precision: attention without a mask stays one kernel.

use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::ir::Program;
use perilune_plan::{Backend, Buffer, Executable, Null};
use std::rc::Rc;
use std::sync::Arc;

/// The null device with a GPU's attention.
struct Gpu(Null);

impl Backend for Gpu {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn keeps(&self, node: &Node) -> bool {
        let name = node.op.name;
        name == "linear" || (name.starts_with("scaled_dot_product_attention") && node.dtype.size() == 2)
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
        if std::env::var_os("PERILUNE_BODIES").is_some() {
            for k in &program.kernels {
                println!("{k:#?}");
            }
        }
        self.0.compile(program)
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or_else(|| "recipes/digits.lua".into());
    let (flags, args): (Vec<_>, Vec<_>) = args.partition(|a| a == "--bf16");
    let precision = flags.first().map(|_| "bf16");
    let params = args.iter().filter_map(|a| a.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()))).collect();
    let backend: Rc<dyn Backend> = match precision {
        Some(_) => Rc::new(Gpu(Null)),
        None => Rc::new(Null),
    };
    let options = RuntimeOptions { backend, params, strict: true, print: Rc::new(|s| println!("{s}")) };
    let run = || -> std::result::Result<(), perilune_lua::Failed> {
        let runtime = Runtime::new(options)?;
        runtime.host().engine.borrow_mut().switches.print_plan = true;
        if let perilune_lua::Loaded::Recipe(recipe) = runtime.load(std::path::Path::new(&file))? {
            let run = recipe.start(None, precision)?;
            for _ in 0..2 {
                run.step()?;
            }
        }
        for text in runtime.host().take_notices() {
            println!("{text}");
        }
        println!("{:?}", runtime.host().engine.borrow().stats());
        Ok(())
    };
    if let Err(e) = run() {
        println!("{e}");
    }
}
