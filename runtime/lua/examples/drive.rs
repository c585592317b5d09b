//! Runs a recipe on the CPU and prints losses: scratch.
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use std::rc::Rc;
fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().unwrap_or_else(|| "recipes/digits.lua".into());
    let params = args.filter_map(|a| a.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()))).collect();
    let backend = Rc::new(perilune_cpu::Cpu::new(None));
    let options = RuntimeOptions { backend, params, strict: true, print: Rc::new(|s| println!("{s}")) };
    let run = || -> Result<(), perilune_lua::Failed> {
        let runtime = Runtime::new(options)?;
        if std::env::var("PROFILE").is_ok() {
            runtime.host().engine.borrow_mut().profile = Some(Default::default());
        }
        if let Loaded::Recipe(recipe) = runtime.load(std::path::Path::new(&file))? {
            let run = recipe.start(None)?;
            let t = std::time::Instant::now();
            while !run.finished()? {
                let r = run.step()?;
                if run.count() % 100 == 0 || run.count() < 4 {
                    println!("{} {:?} {:.2}s", run.count(), run.read(&r)?, t.elapsed().as_secs_f64());
                }
            }
            println!("valid {:?}", run.evaluate("valid")?);
            run.finish()?;
        }
        {
            let e = runtime.host().engine.borrow();
            if let Some(p) = &e.profile {
                println!("{}", p.report(&e.sites));
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
