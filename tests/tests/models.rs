//! Compares the recipes of known models with transformers and torchvision: logits, loss and gradients of tiny models with weights
//! that these saved, and files written again by the recipes. `golden/models/make.py` makes the references.
#![allow(clippy::unwrap_used)]

use perilune_tests::scripts::script;
use std::path::Path;

const FOLDER: &str = "golden/models";

/// Runs `text` in the folder of the recipes and returns its output.
fn run(text: &str, params: &[(&str, &str)]) -> Result<String, String> {
    let s = script(2, params).map_err(|e| e.to_string())?;
    s.runtime.set_place(Path::new("../recipes"));
    s.runtime.load_text(text, "=test").map_err(|e| e.to_string())?;
    Ok(s.output())
}

fn agrees(name: &str, params: &[(&str, &str)], least: usize) {
    let compare = std::fs::read_to_string(format!("{FOLDER}/compare.lua")).unwrap();
    let text = format!("local name = '{name}'\n{compare}");
    let weights = format!("{FOLDER}/{name}.safetensors");
    let exported = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.safetensors"));
    std::fs::create_dir_all(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let export = exported.to_str().unwrap().to_string();
    // The second round reads the file that the recipe wrote in the first.
    for from in [weights.as_str(), export.as_str()] {
        let mut all = vec![("size", "tiny"), ("weights", from)];
        all.extend(params);
        let out = run(&text, &all).unwrap_or_else(|e| panic!("{name} from {from}: {e}"));
        let compared: usize = out.trim().rsplit('\t').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        assert!(compared >= least, "only {compared} things were compared:\n{out}");
        all.push(("export", &export));
        let write = format!("local r = require '{name}'\nr.finish {{ params = r.params, model = r.model(r.params) }}");
        run(&write, &all).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn gpt2_is_that_of_transformers() {
    agrees("gpt2", &[("vocab", "192"), ("context", "24")], 30);
}

#[test]
fn llama_is_that_of_transformers() {
    agrees("llama", &[("vocab", "192"), ("context", "24")], 19);
}

#[test]
fn resnet50_is_that_of_torchvision() {
    agrees("resnet50", &[("classes", "10"), ("pixels", "40")], 66);
    let count = "local r = require 'resnet50'\nprint(r.model(r.params):num_parameters())\nreturn r";
    assert_eq!(run(count, &[]).unwrap().trim(), "25557032");
}

#[test]
fn a_file_of_another_size_is_refused() {
    let weights = format!("{FOLDER}/llama.safetensors");
    let load = "local r = require 'llama'\nr.model(r.params)";
    let error = |params: &[(&str, &str)]| run(load, params).unwrap_err();
    let e = error(&[("size", "tiny"), ("vocab", "256"), ("weights", &weights)]);
    assert!(e.contains("has shape {192, 64}, but 'embed.weight' of the model has {256, 64}"), "{e}");
    let gpt2 = format!("{FOLDER}/gpt2.safetensors");
    let e = error(&[("size", "tiny"), ("vocab", "192"), ("weights", &gpt2)]);
    assert!(e.contains("has no 'model.layers.0."), "{e}");
}
