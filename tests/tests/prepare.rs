//! A step that was only recorded: what is prepared for it are the programs that running it compiles.
#![allow(clippy::unwrap_used)]

use perilune_cpu::Cpu;
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_plan::{Fingerprint, ir::Program};
use perilune_policy::Policy;
use perilune_tests::recording::Recording;
use std::borrow::Borrow;
use std::path::Path;
use std::rc::Rc;

fn fingerprints<P: Borrow<Program>>(programs: &[P]) -> Vec<Fingerprint> {
    programs.iter().map(|p| Fingerprint::of(p.borrow())).collect()
}

/// In mixed precision the first step is two programs: one that makes the 16-bit copies of weights, and the step itself.
#[test]
fn all_programs_of_a_step_are_prepared() {
    for (precision, programs) in [("f32", 1), ("bf16", 2)] {
        let backend = Recording::new(Box::new(Cpu::new(Some(1))));
        let options = RuntimeOptions {
            backend: backend.clone(),
            params: Vec::new(),
            policy: Policy::builder().recipe(Path::new("../recipes/digits.lua")).build(),
            strict: true,
            print: Rc::new(|_| ()),
        };
        let runtime = Runtime::new(options).unwrap();
        let Loaded::Recipe(recipe) = runtime.load(Path::new("../recipes/digits.lua")).unwrap() else {
            panic!("a recipe")
        };
        let run = recipe.start(None, Some(precision), None).unwrap();
        assert!(run.prepare().unwrap().is_none(), "the device starts no thread");
        let prepared = fingerprints(&backend.take_prepared());
        assert_eq!(prepared.len(), programs, "{precision}");
        backend.take();
        run.step().unwrap();
        let compiled = backend.take();
        assert!(fingerprints(&compiled) == prepared, "{precision}: {} programs are compiled", compiled.len());
        // Known now: nothing is prepared.
        run.step().unwrap();
        backend.take();
        assert!(run.prepare().unwrap().is_none());
        assert_eq!(backend.take_prepared().len(), 0, "{precision}");
    }
}
