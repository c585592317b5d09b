//! Where the time goes: runs a recipe or script on the CPU and prints a table of kernels, slowest first.
//!
//!     cargo run --release -p perilune-lua --example profile recipes/chargpt.lua steps=100
//!
//! `perilune profile` will grow out of this; until then it is a tool for whoever works on the planner or a backend.

use perilune_lua::{Failed, Loaded, Runtime, RuntimeOptions};
use std::path::Path;
use std::rc::Rc;

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or_else(|| "recipes/digits.lua".into());
    let params = args.filter_map(|a| a.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()))).collect();
    let backend = Rc::new(perilune_cpu::Cpu::new(None));
    let options = RuntimeOptions { backend, params, strict: true, print: Rc::new(|s| println!("{s}")) };
    if let Err(e) = profile(options, Path::new(&file)) {
        println!("{e}");
    }
}

fn profile(options: RuntimeOptions, file: &Path) -> Result<(), Failed> {
    let runtime = Runtime::new(options)?;
    runtime.host().engine.borrow_mut().profile = Some(Default::default());
    if let Loaded::Recipe(recipe) = runtime.load(file)? {
        let run = recipe.start(None, None)?;
        while !run.finished()? {
            run.step()?;
        }
    }
    let engine = runtime.host().engine.borrow();
    if let Some(p) = &engine.profile {
        println!("{}", p.report(&engine.sites));
    }
    println!("{:?}", engine.stats());
    Ok(())
}
