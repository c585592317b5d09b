//! Follows the book as a new user does: writes the recipes of its chapters into a folder, and checks, trains and samples them.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use support::{Place, Ran, place};

fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide").join(name)).unwrap()
}

/// Returns the fenced blocks of a page that begin with ```INFO and return a recipe.
fn recipes(page: &str, info: &str) -> Vec<String> {
    let fence = format!("\n```{info}\n");
    let blocks = page.split(&fence).skip(1).filter_map(|rest| rest.split("\n```").next());
    blocks.filter(|text| text.ends_with("return recipe")).map(|text| format!("{text}\n")).collect()
}

/// Returns the indented lines of a page from `first` to the first line `end`.
fn indented(page: &str, first: &str) -> String {
    let lines = page.lines().skip_while(|line| line.trim() != first);
    let mut out = String::new();
    for line in lines {
        out.push_str(line.strip_prefix("    ").unwrap_or(line));
        out.push('\n');
        if line == "    end" {
            break;
        }
    }
    out
}

/// A folder with the data of the repository's recipes.
fn started() -> Place {
    let p = place();
    std::fs::create_dir_all(p.path("recipes/data")).unwrap();
    for file in ["digits.csv.gz", "alice.txt"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes/data").join(file);
        std::fs::copy(from, p.path("recipes/data").join(file)).unwrap();
    }
    p
}

fn ok(r: Ran) -> String {
    assert_eq!(r.status, Some(0), "{}{}", r.out, r.err);
    r.out
}

#[test]
fn the_first_recipe_is_adapted_and_distilled() {
    let p = started();
    p.file("recipes/mine.lua", &recipes(&page("first-recipe.md"), "lua")[0]);
    ok(p.run(&["check", "recipes/mine.lua"]));
    let base = ["run", "recipes/mine.lua", "--steps", "40", "--checkpoint-every", "40", "--run-dir", "runs/base"];
    ok(p.run(&base));
    let later = recipes(&page("fine-tuning.md"), "lua base");
    assert_eq!(later.len(), 2, "LoRA and a distillation");
    for (k, text) in later.iter().enumerate() {
        let (file, dir) = (format!("recipes/later{k}.lua"), format!("runs/later{k}"));
        p.file(&file, text);
        ok(p.run(&["check", &file]));
        ok(p.run(&["run", &file, "--steps", "4", "--run-dir", &dir]));
        let read = p.run_json(&dir)["data"].clone();
        let teacher = "runs/base/checkpoints/step-40/run.json";
        assert!(read.as_array().unwrap().iter().any(|entry| entry["path"] == teacher), "{read}");
    }
}

#[test]
fn the_language_model_writes_text_with_the_function_of_the_next_chapter() {
    let p = started();
    let model = &recipes(&page("text.md"), "lua")[0];
    let sample = indented(&page("sampling.md"), "function recipe.sample(run, prompt)");
    p.file("recipes/letters.lua", model.replace("\nreturn recipe\n", &format!("\n{sample}\nreturn recipe\n")));
    let small = ["--set", "layers=1", "--set", "width=16", "--set", "sample_length=6"];
    let mut run = vec!["run", "recipes/letters.lua", "--steps", "2", "--checkpoint-every", "2", "--run-dir", "runs/a"];
    run.extend(small);
    ok(p.run(&run));
    let text = ok(p.run(&["sample", "runs/a", "Alice"]));
    assert!(text.starts_with("Alice") && text.trim_end_matches('\n').chars().count() >= 10, "{text:?}");
}

#[test]
fn the_gan_draws_a_picture() {
    let p = started();
    p.file("recipes/gan.lua", &recipes(&page("two-optimizers.md"), "lua")[0]);
    ok(p.run(&["run", "recipes/gan.lua", "--steps", "3", "--set", "picture=digits.png", "--run-dir", "runs/gan"]));
    assert!(std::fs::read(p.path("digits.png")).unwrap().starts_with(b"\x89PNG"));
}
