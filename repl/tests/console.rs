//! Tests the prompt without a terminal: parsing of lines, release of memory between lines, completion and help.
#![allow(clippy::unwrap_used)]

mod support;

use perilune_core::ops;
use perilune_cpu::Cpu;
use perilune_lua::{Console, Runtime, RuntimeOptions, console};
use perilune_policy::Policy;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

struct Prompt {
    runtime: Runtime,
    console: Console,
}

/// Reads in the repository, writes in temporary directories.
fn policy() -> Arc<Policy> {
    let policy = Policy::builder().allow_read(Path::new("..")).unwrap().allow_read(&std::env::temp_dir()).unwrap();
    policy.allow_write(&std::env::temp_dir()).unwrap().build()
}

fn prompt() -> Prompt {
    let print = Rc::new(|_: &str| ());
    let options = RuntimeOptions {
        backend: Arc::new(Cpu::new(Some(2))),
        params: Vec::new(),
        policy: policy(),
        strict: true,
        print,
    };
    let runtime = Runtime::new(options).unwrap();
    let console = Console::new(&runtime, "prompt").unwrap();
    Prompt { runtime, console }
}

impl Prompt {
    /// Returns the output of a line, or its error.
    fn line(&self, text: &str) -> String {
        match self.console.eval(text) {
            Ok(answer) => answer.shown.join("\n"),
            Err(e) => format!("error: {e}"),
        }
    }

    fn lines<const N: usize>(&self, list: [(&str, &str); N]) {
        for (text, want) in list {
            assert_eq!(self.line(text), want, "> {text}");
        }
    }

    /// Returns the completions at the `|` of a line.
    fn words(&self, text: &str) -> Vec<String> {
        let at = text.find('|').unwrap();
        let found = self.console.complete(&text.replace('|', ""), at);
        found.words
    }

    fn offers(&self, text: &str, want: &str) {
        let words = self.words(text);
        assert!(words.iter().any(|w| w == want), "{text}: {words:?}");
    }
}

#[test]
fn differentiable_values_survive_between_prompt_lines() {
    let p = prompt();
    p.lines([
        ("w = pl.state(pl.ones({2}))", ""),
        ("loss = (w * 3):sum()", ""),
        ("loss:item()", "6.0"), // evaluated, and still differentiable
    ]);
    assert!(p.line("w.nothing.more").starts_with("error: prompt:4: "), "{}", p.line("w.nothing.more"));
    p.lines([
        ("loss:backward()", ""),
        ("w.grad:tolist()[1]", "3.0"),
        ("w:assign(w - w.grad)", ""),
        ("w:tolist()[2]", "-2.0"),
        ("x = pl.tensor { 2.0 }", ""),
        ("y = x ^ 3", ""),
        ("y:item()", "8.0"),
        ("pl.grad(y, { x }):item()", "12.0"),
        ("x = x * 0.5", ""),
        ("x:item(), y:item()", "1.0\n8.0"),
        ("a = pl.ones({3}); b = a + 1", ""),
        ("a = nil", ""),
        ("b:tolist()[3]", "2.0"),
        ("s = pl.state(pl.zeros({2})); t = s + 1; s = nil", ""),
        ("t:tolist()[1]", "1.0"),
    ]);
}

#[test]
fn a_chain_of_lines_holds_no_more_than_its_end() {
    let p = prompt();
    p.line("x = pl.eval(pl.ones({256, 256}))");
    let held = || p.runtime.host().engine.borrow().stats();
    let before = held().held_bytes;
    for _ in 0..50 {
        assert_eq!(p.line("x = pl.eval(x * 1.01); x:dim()"), "2");
    }
    let after = held();
    assert_eq!((after.held_bytes, after.handles), (before, 1));
}

#[test]
fn prompt_lines_print_their_values() {
    let p = prompt();
    p.lines([
        ("local a, b = 1", ""),
        ("a, b", "1\nnil"),
        ("local function twice(x) return 2 * x end", ""),
        ("twice(4); twice(5)", "10"),
        ("f = function(x)\n  return x + 1\nend\nf(1)", "2"),
        ("t = { 1, 2, n = { deep = { deeper = {} } } }; t", "{ 1, 2, n = { deep = { deeper = {…} } } }"),
        ("-- nothing", ""),
        ("(\"text\"):upper()", "TEXT"),
        ("pl.relu", "function (native)"),
        ("_ == pl.relu", "true"),
    ]);
    assert!(
        p.console.is_unfinished("for i = 1, 3 do")
            && p.console.is_unfinished("f(1,")
            && p.console.is_unfinished("x = [[")
    );
    assert!(
        !p.console.is_unfinished("x = 1; x") && !p.console.is_unfinished("x = = 1") && !p.console.is_unfinished("f()")
    );
    assert!(prompt().line("\n\nerror('third')").contains("prompt:3: third"));
    assert!(p.line("pl.zeros({2}):nothing()").contains("prompt:"));
    // Recipes stay strict and see none of the prompt's globals.
    assert!(p.runtime.load_text("return a", "@file.lua").is_err());
}

#[test]
fn completions_fit_the_context() {
    let p = prompt();
    p.line("x = pl.ones({2}); model = pl.nn.Sequential { pl.nn.Linear(2, 3) }; box = { left = { deep = 1 } }");
    p.offers("mod|", "model");
    p.offers("whi|", "while");
    p.offers("pl.cross_en|", "cross_entropy");
    p.offers("pl.|", "summary");
    p.offers("pl.optim.Ad|", "AdamW");
    p.offers("box.left.|", "deep");
    p.offers("y = x:soft|", "softmax");
    p.offers("x.sh|", "shape");
    p.offers("x:sum():sq|", "sqrt");
    p.offers("model:num|", "num_parameters");
    p.offers("model[1].|", "weight");
    p.offers("t = box['left'].|", "deep");
    p.offers("x[0].|", "shape"); // an index counts as a tensor
    p.offers("pl.tensor({1}, { |", "dtype = ");
    p.offers("(\"a\"):|", "abs"); // and so does a call
    p.offers("pl.cross_entropy(x, x, { red|", "reduction = ");
    p.offers("pl.cross_entropy(x, x, { reduction = 'sum', label_|", "label_smoothing = ");
    p.offers("x:sum(0, { kee|", "keepdim = ");
    p.offers("pl.nn.Linear(2, 3, { |", "bias = ");
    p.offers("pl.optim.SGD(model, { mom|", "momentum = ");
    p.offers("pl.zeros({2}, { dtype = \"b|", "bf16");
    p.offers("require \"perilune.nn.lin|", "perilune.nn.linear");
    for nothing in ["|", "x = |", "pl.zeros({ |", "nothing.|", "3.|", "-- x.|", "\"done\"|", "x:shape|"] {
        assert_eq!(p.words(nothing), Vec::<String>::new(), "{nothing}");
    }
    assert!(p.console.complete("pl.load('wei", 12).file);
    // Completion calls no function.
    p.line("spy = setmetatable({}, { __index = function() error('called') end })");
    assert_eq!(p.words("spy.x|"), Vec::<String>::new());
    // Any text, truncated anywhere.
    let odd = "f({ x = [[größe]], '\\'', 1e-3 }):y(\"a";
    for at in (0..=odd.len()).filter(|at| odd.is_char_boundary(*at)) {
        p.console.complete(odd, at);
    }
}

#[test]
fn every_example_runs() {
    let p = prompt();
    let (mut shown, mut wrong) = (0, Vec::new());
    let public: Vec<_> = ops::all().iter().filter(|o| !o.sig.is_empty()).collect();
    for op in &public {
        let Some(example) = console::example(op) else { continue };
        shown += 1;
        let said = p.line(&example);
        if said.starts_with("error") {
            wrong.push(format!("{example}\n  {said}"));
        }
        assert!(p.console.describe(&format!("pl.{}", op.name)).contains(&example));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(shown * 10 >= public.len() * 9, "only {shown} of {} ops have an example", public.len());
}

/// Help of every function of a recipe has a signature, a doc text and an example.
#[test]
fn every_function_of_the_library_is_explained() {
    let p = prompt();
    let dir = tempfile::tempdir().unwrap();
    let files = |line: &str| {
        let line = line.replace("\"data/photos\"", "\"../tests/golden/images/folder\"");
        let files = ["words.arrow", "rows.parquet", "tasks.json"];
        let line =
            files.iter().fold(line, |line, f| line.replace(&format!("data/{f}"), &format!("../tests/lua/files/{f}")));
        let line = line.replace("\"data/tokenizer.json\"", "\"../runtime/tokenizer/tests/chat/tokenizer.json\"");
        let line = line.replace("\"data/images-idx3", "\"../tests/golden/augment/images-idx3");
        let line = line.replace("\"data/sounds", "\"../tests/golden/augment/sounds");
        let line = line.replace("\"data/", "\"../recipes/data/").replace("\"runs/", "\"out/");
        line.replace("\"out/", &format!("\"{}/", dir.path().display()))
    };
    std::fs::write(dir.path().join("tiny.lua"), support::TINY).unwrap();
    let mut trains = std::process::Command::new(env!("CARGO_BIN_EXE_perilune"));
    trains.args(["run", "tiny.lua", "--run-dir", "digits", "--quiet"]).current_dir(dir.path());
    assert!(trains.status().unwrap().success());
    perilune_train::enable_load_run(&p.runtime);
    p.line(&files("loss = pl.ones({}); pl.save(\"out/tokens.npy\", pl.randint(0, 9, {50}))"));
    p.line(&files("pl.nn.save_weights(pl.nn.Linear(3, 2), \"out/linear.safetensors\")"));
    p.line(&files("pl.save(\"out/w.safetensors\", { weight = pl.ones({2}) }); pl.data.save_png(\"out/grey.png\", pl.rand({8, 8}))"));
    let list = "local out = {} for _, m in ipairs {'', 'nn.', 'optim.', 'data.', 'metrics.', 'augment.', 'augment.text.', 'audio.', 'train.'} do \
                local t = pl for part in m:gmatch '%a+' do t = t[part] end \
                for k, v in pairs(t) do if type(v) == 'function' then out[#out + 1] = m .. k end end end \
                table.sort(out) return table.concat(out, ' ')";
    let names = p.line(list);
    assert!(names.split_whitespace().count() > 200, "{names}");
    // These examples need a GPU, a recipe or a terminal, or are meant to fail.
    let idle = ["kernel_check", "breakpoint", "error", "train.memorise", "train.new", "params", "memory_budget"];
    let mut wrong = Vec::new();
    for name in names.split_whitespace().filter(|n| perilune_core::ops::by_name(n).is_none_or(|o| o.sig.is_empty())) {
        let said = p.console.describe(&format!("pl.{name}"));
        let short = name.rsplit('.').next().unwrap();
        let Some(example) = console::library_example(name) else {
            wrong.push(format!("{name} has no example"));
            continue;
        };
        if !said.contains(&format!("{short}(")) || !said.ends_with(&format!("\n  example: {example}")) {
            wrong.push(format!("?pl.{name} says\n{said}"));
        }
        let answer = if idle.contains(&name) { String::new() } else { p.line(&files(example)) };
        if answer.starts_with("error") {
            wrong.push(format!("{example}\n  {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn help_finds_what_has_comments() {
    let p = prompt();
    p.line("model = pl.nn.Sequential { pl.nn.Linear(2, 3) }");
    for (what, want) in [
        ("pl.nn.Linear", "perilune/nn/linear.lua:"),
        ("pl.optim.AdamW", "target, opts"),
        ("pl.state", "role is used only by pl.memory()"),
        ("x:assign", "assign(value)"),
        ("pl.optim", "AdamW"),
        ("model", "Sequential"),
        ("model.num_parameters", "The number of trained values."),
        ("sofmax", "Did you mean softmax?"),
    ] {
        let said = p.console.describe(what);
        assert!(said.contains(want), "?{what}\n{said}");
    }
    assert!(p.line("help(pl.relu)").contains("relu(x)") && p.line("help('softmax')").contains("softmax("));
    assert!(p.line("help()").contains("?x"));
}

#[test]
fn a_summary_counts_what_layers_do() {
    let p = prompt();
    p.line("nn = pl.nn; model = nn.Sequential { nn.Conv2d(3, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10) }");
    p.line("before = pl.stats().runs; x = pl.randn({4, 3, 4, 4}); s = pl.summary(model, x)");
    p.lines([
        ("pl.stats().runs - before", "0"),
        ("s.parameters", "1530"),
        ("#s.rows", "6"),
        ("table.concat(s.rows[2].shape, ' ')", "4 8 4 4"),
        // 2 * outputs * (3 * 3 * 3), and adding the bias.
        ("s.rows[2].flops >= 2 * 4 * 8 * 16 * 27 and s.rows[2].flops <= 2 * 4 * 8 * 16 * 28", "true"),
        ("s.rows[6].flops >= 2 * 4 * 10 * 128 and s.rows[6].flops <= 2 * 4 * 10 * 129", "true"),
        ("s.rows[6].bytes, s.rows[6].calls", "160\n1"),
        ("model.training, model[2].training", "true\ntrue"),
    ]);
    let text = p.line("s");
    assert!(text.contains("Conv2d") && text.contains("{4, 8, 4, 4}") && text.contains("1,530"), "{text}");
    assert!(p.line("pl.summary(3, x)").contains("give a module"));
    assert!(p.line("pl.summary(model)").contains("there is no input"));
    // Random numbers drawn later are unchanged.
    let draw = "pl.seed(3); model = nn.Sequential { nn.Dropout(0.5) }";
    let (a, b) = (
        p.line(&format!("{draw}; pl.randn({{2}}):tolist()[1]")),
        p.line(&format!("{draw}; s = pl.summary(model, x); pl.randn({{2}}):tolist()[1]")),
    );
    assert_eq!(a, b);
}
