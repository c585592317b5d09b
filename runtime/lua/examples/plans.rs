//! Prints the plans of a recipe's first steps, planned on the null device.
//!
//!     cargo run --release -p perilune-lua --example plans recipes/digits.lua [key=value]…

use perilune_lua::{Runtime, RuntimeOptions};
use std::rc::Rc;

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or_else(|| "recipes/digits.lua".into());
    let params = args.filter_map(|a| a.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()))).collect();
    let backend = Rc::new(perilune_plan::Null);
    let options = RuntimeOptions { backend, params, strict: true, print: Rc::new(|s| println!("{s}")) };
    let run = || -> Result<(), perilune_lua::Failed> {
        let runtime = Runtime::new(options)?;
        runtime.host().engine.borrow_mut().switches.print_plan = true;
        if let perilune_lua::Loaded::Recipe(recipe) = runtime.load(std::path::Path::new(&file))? {
            let run = recipe.start(None, None, None)?;
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
