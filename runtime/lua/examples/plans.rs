//! Prints the plans of a recipe's first steps, planned on the null device.
//!
//!     cargo run --release -p perilune-lua --example plans recipes/digits.lua [--bf16] [key=value]…
//!
//! With `--bf16`, plans as a GPU does in that precision.

use perilune_core::graph::Node;
use perilune_core::ops::conv::OVER_IMAGES;
use perilune_core::ops::pool::POOLS;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::{Backend, Null, NullWith};
use perilune_policy::Policy;
use std::rc::Rc;
use std::sync::Arc;

const ATTENTION: &str = "scaled_dot_product_attention";
const ATTENTION_BACKWARD: &str = "scaled_dot_product_attention_backward";

/// The ops that a GPU keeps in 16 bits: linear layers, attention, which writes all outputs except its saved sums through
/// strides, and convolutions and pools, channels last.
const GPU: NullWith = NullWith {
    has_kernel: |n| {
        [ATTENTION, ATTENTION_BACKWARD, "linear"].contains(&n.op.name)
            || (over_images(n) && (n.inputs.len() == 2 || POOLS.contains(&n.op)))
    },
    can_store_layout: |n, output, _| {
        n.op.name == ATTENTION_BACKWARD || (n.op.name == ATTENTION && output == 0) || over_images(n)
    },
};

fn over_images(n: &Node) -> bool {
    OVER_IMAGES.contains(&n.op) || POOLS.contains(&n.op)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or_else(|| "recipes/digits.lua".into());
    let (flags, args): (Vec<_>, Vec<_>) = args.partition(|a| a == "--bf16");
    let precision = flags.first().map(|_| "bf16");
    let params = args.iter().filter_map(|a| a.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()))).collect();
    let backend: Arc<dyn Backend> = match precision {
        Some(_) => Arc::new(GPU),
        None => Arc::new(Null),
    };
    let options = RuntimeOptions {
        backend,
        params,
        policy: Policy::builder().recipe(std::path::Path::new("recipes/_.lua")).build(),
        strict: true,
        print: Rc::new(|s| println!("{s}")),
    };
    let run = || -> Result<(), perilune_lua::Failed> {
        let runtime = Runtime::new(options)?;
        runtime.host().engine.borrow_mut().switches.print_plan = perilune_engine::PrintPlan::Kernels;
        if let perilune_lua::Loaded::Recipe(recipe) = runtime.load(std::path::Path::new(&file))? {
            let run = recipe.start(None, precision, None)?;
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
