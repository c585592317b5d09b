//! Writes the pages of the reference: operations by subject, functions and classes of the standard library, the fields of a recipe.

use super::annotations::{self, Class, Doc, Named, Place, classes, fields_of};
use super::library::{self, Public};
use super::{FILES, own, public as public_ops};
use crate::args::{self, signature};
use crate::{Failed, Runtime};
use perilune_core::ops::Op;
use std::fmt::Write;

/// A page: the name of its file, and its text.
pub struct Page {
    pub file: &'static str,
    pub title: &'static str,
    pub text: String,
}

/// Pages of operations: file, title, subject, and the first operation of the page in the order of the registry.
const OPERATIONS: &[(&str, &str, &str, &str)] = &[
    ("creation.md", "Making tensors", "Constants, ranges and random numbers.", "zeros"),
    ("elementwise.md", "Elementwise operations", "Arithmetic, comparisons, logic, activations.", "to"),
    ("reductions.md", "Reductions", "Sums, means, extrema, norms, running sums.", "sum"),
    ("shapes.md", "Shapes and indices", "Views, joining and splitting, gathering, sorting.", "reshape"),
    ("products.md", "Products", "Matrix products, grouped and in 8 bits.", "matmul"),
    ("layers.md", "Operations of layers", "Convolution, pooling, softmax, norms, attention.", "conv1d"),
    ("losses.md", "Losses", "Losses and the update of an optimizer.", "cross_entropy"),
    ("devices.md", "Placement and collectives", "Placing tensors on a mesh, and exchanging blocks.", "shard"),
];

/// Pages of the standard library: file, title, subject, parts of `pl`, and classes.
type LibraryPage = (&'static str, &'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const LIBRARY: &[LibraryPage] = &[
    (
        "nn.md",
        "nn: layers",
        "Layers, adapters, and files of weights. A layer is a module: `m(x)` calls its `forward`.",
        &["nn"],
        &["Module"],
    ),
    ("init.md", "init: initial values", "Functions that make the initial value of a weight.", &["init"], &[]),
    (
        "optim.md",
        "optim: optimizers and schedules",
        "Optimizers, learning rates, gradient clipping, averages of weights, loss scaling.",
        &["optim"],
        &["Optimizer", "Schedule", "EMA", "LossScaler"],
    ),
    (
        "data.md",
        "data: datasets",
        "Functions that open data. A hash is `\"sha256:…\"` or `\"blake3:…\"`, or for several addresses a table of them by address.",
        &["data"],
        &[],
    ),
    (
        "datasets.md",
        "Datasets and loaders",
        "The methods of what the functions of `data` return.",
        &[],
        &["Set", "Loader", "Rows", "Records", "Columns", "Text", "Tokenizer", "ChatOptions", "ChatSample", "Candidate"],
    ),
    (
        "augment.md",
        "augment: augmentation",
        "Random changes of images (`set:map`) and of texts (`records:augment`).",
        &["augment"],
        &["Draws"],
    ),
    ("audio.md", "audio: sounds", "Spectrograms on the device.", &["audio"], &[]),
    (
        "metrics.md",
        "metrics",
        "Scalar tensors to return from `recipe.loss` and `recipe.evaluate`.",
        &["metrics"],
        &["Mean"],
    ),
    (
        "train.md",
        "train: runs",
        "Training runs in scripts and at the prompt.",
        &["train"],
        &["Run", "StepResult", "StepEvent", "EvalEvent", "ScriptRun", "Sample", "PseudoLabel"],
    ),
    (
        "kernel.md",
        "Kernels and checks",
        "Kernels of a recipe, and numerical checks.",
        &["kernel", "kernel_check", "gradcheck"],
        &["KernelOptions", "SourceKernelOptions"],
    ),
    ("tree.md", "tree: nested tables", "Functions on tables that hold States.", &["tree"], &["Entry"]),
];

/// Members of classes that only the runtime uses, or that stay its own choice.
const INTERNAL: &[(&str, &[&str])] = &[
    (
        "Run",
        &[
            "place",
            "segments",
            "looked",
            "unfinished",
            "placements",
            "log",
            "unread",
            "loss_limit",
            "optimizers",
            "dry_run",
            "diagnose",
            "fault_of_packing",
            "settle_sample_log",
            "cursor",
            "counters",
            "updates_of_states",
            "seek",
        ],
    ),
    (
        "Optimizer",
        &[
            "place",
            "scope",
            "on_device",
            "measured",
            "norm",
            "states_list",
            "batches",
            "absences",
            "counts",
            "set_counts",
        ],
    ),
    ("Set", &["source", "index", "maps", "parts"]),
    ("Records", &["pads", "parts", "checked", "live", "pseudo"]),
    ("Text", &["corpus", "low", "high", "parts"]),
    (
        "Loader",
        &[
            "make", "prefetch", "ids", "what", "records", "live", "packed", "pseudo", "checked", "images", "place",
            "span", "ids_at",
        ],
    ),
];

/// Returns all pages of the reference, the index first.
pub fn pages() -> Result<Vec<Page>, Failed> {
    let runtime = library::runtime()?;
    let classes = classes();
    let mut out = vec![recipe_page(&classes)];
    let ops: Vec<&'static Op> = public_ops().collect();
    for (k, (file, title, subject, first)) in OPERATIONS.iter().enumerate() {
        let at = |name: &str| ops.iter().position(|o| o.name == name).unwrap_or(ops.len());
        let end = OPERATIONS.get(k + 1).map_or(ops.len(), |next| at(next.3));
        let mut text = head(title, subject);
        text.push_str("\nMade from the op registry. Coordinates count from 0, dims may be negative, and options are a trailing table.\n");
        for op in ops.get(at(first)..end).unwrap_or_default() {
            operation(&mut text, op);
        }
        out.push(Page { file, title, text });
    }
    out.push(Page { file: "tensors.md", title: TENSORS, text: functions_page() });
    for (file, title, subject, parts, shown) in LIBRARY {
        let text =
            library_page(&runtime, &classes, title, subject, parts, shown).map_err(|e| Failed::Usage(e.to_string()))?;
        out.push(Page { file, title, text });
    }
    let index = index(&out);
    out.insert(0, Page { file: "README.md", title: "Reference", text: index });
    Ok(out)
}

const TENSORS: &str = "Tensors, States, steps, gradients";

fn head(title: &str, subject: &str) -> String {
    format!("# {title}\n\n{subject}\n")
}

/// Returns the anchor of a heading: lower case, without punctuation.
fn anchor(heading: &str) -> String {
    heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-')).collect()
}

/// Lists the pages with the names on each.
fn index(pages: &[Page]) -> String {
    let mut out = String::from(
        "# Reference\n\nMade from the op registry and the annotations of the standard library by `perilune reference`; edit those, not these pages. \
         `?name` at the prompt shows the same.\n\n| page | what it has |\n|---|---|\n",
    );
    for page in pages {
        let sections = page.text.lines().filter_map(|l| l.strip_prefix("## "));
        let mut names: Vec<String> = sections.map(|n| format!("[{n}]({}#{})", page.file, anchor(n))).collect();
        if names.is_empty() {
            let rows = page.text.lines().filter_map(|l| l.strip_prefix("| `"));
            names = rows.filter_map(|l| l.split('`').next()).map(|name| format!("`{name}`")).collect();
        }
        let _ = writeln!(out, "| [{}]({}) | {} |", page.title, page.file, names.join(" "));
    }
    out
}

fn operation(out: &mut String, op: &'static Op) {
    let sig = signature(op);
    let _ = write!(out, "\n## {}\n\n    {}", op.name, args::usage(op));
    if sig.is_method {
        let rest: Vec<String> = sig.params[1..sig.positional]
            .iter()
            .map(|p| if p.optional { format!("[{}]", p.name) } else { p.name.to_string() })
            .collect();
        let _ = write!(out, "\n    {}:{}({})", sig.params[0].name, op.name, rest.join(", "));
    }
    let _ = writeln!(out, "\n\n{}", prose(&op.doc.lines().map(str::to_string).collect::<Vec<_>>()));
    let options = &sig.params[sig.positional..];
    for (k, p) in options.iter().enumerate() {
        let default = p.default_text.map(|d| format!(", default {d}")).unwrap_or_default();
        let _ = writeln!(out, "{}- `{}`: {}{default}", if k == 0 { "\n" } else { "" }, p.name, args::want(&p.ty));
    }
    if let Some(example) = crate::console::example(op) {
        let _ = writeln!(out, "\nExample: `{example}`");
    }
}

/// Functions that are not ops: `pl.tensor`, `Tensor:item`.
fn functions_page() -> String {
    let mut out = head(
        TENSORS,
        "Functions of `pl` and methods of tensors that are not operations. A `?` marks an optional parameter.",
    );
    for f in own().filter(|f| !FILES.contains(&format!("\n## {}\n", f.name))) {
        let _ = writeln!(out, "\n## {}\n\n    {}", f.name, f.call);
        if !f.doc.is_empty() {
            let doc: Vec<String> = f.doc.iter().map(|line| line.to_string()).collect();
            let _ = writeln!(out, "\n{}", prose(&doc));
        }
        for (i, (name, ty)) in f.params.iter().enumerate() {
            let gap = if i == 0 { "\n" } else { "" };
            let _ = writeln!(out, "{gap}- `{name}`: {}", ty.replace("perilune.", ""));
        }
        if let Some(example) = crate::console::library_example(f.name) {
            let _ = writeln!(out, "\nExample: `{example}`");
        }
    }
    out.push_str(FILES);
    out
}

fn library_page(
    runtime: &Runtime,
    classes: &[Class],
    title: &str,
    subject: &str,
    parts: &[&str],
    shown: &[&str],
) -> mlua::Result<String> {
    let mut out = head(title, subject);
    for part in parts {
        for f in library::functions(runtime, part)? {
            if !f.doc.text.is_empty() {
                function(&mut out, classes, &f);
            }
        }
    }
    for name in shown {
        let Some(class) = classes.iter().find(|c| c.name == format!("perilune.{name}")) else { continue };
        class_section(&mut out, classes, name, class);
    }
    Ok(out)
}

fn function(out: &mut String, classes: &[Class], f: &Public) {
    let _ = writeln!(out, "\n## {}\n\n    {}", f.name, call(&f.name, &f.arguments, &f.doc));
    documented(out, classes, &f.doc, f.place);
    if let Some(example) = crate::console::library_example(&f.name) {
        let _ = writeln!(out, "\nExample: `{}`", example.replace('\n', " "));
    }
}

fn class_section(out: &mut String, classes: &[Class], name: &str, class: &Class) {
    let _ = writeln!(out, "\n## {name}");
    let hidden = INTERNAL.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, members)| members);
    let shown = |f: &Named| !f.text.is_empty() && !hidden.contains(&f.name.as_str());
    let fields: Vec<Named> = fields_of(classes, &class.name).into_iter().filter(shown).collect();
    if !fields.is_empty() {
        option_table(out, "field", &fields, &[]);
    }
    let receiver = name.to_lowercase();
    let documented_methods = class.methods.iter().filter(|m| !m.doc.text.is_empty());
    for method in documented_methods.filter(|m| !hidden.contains(&m.name.as_str())) {
        let full = format!("{receiver}:{}", method.name);
        let _ = writeln!(out, "\n### {full}\n\n    {}", call(&full, &method.arguments, &method.doc));
        documented(out, classes, &method.doc, method.place);
    }
}

/// Formats `nn.Linear(in_dim, out_dim, [opts])`.
fn call(name: &str, arguments: &[String], doc: &Doc) -> String {
    let optional = |a: &String| doc.params.iter().any(|p| p.name == *a && p.ty.ends_with('?'));
    let list: Vec<String> = arguments.iter().map(|a| if optional(a) { format!("[{a}]") } else { a.clone() }).collect();
    format!("{name}({})", list.join(", "))
}

/// Writes the text of a function, its parameters, their options and its results.
fn documented(out: &mut String, classes: &[Class], doc: &Doc, place: Place) {
    let _ = writeln!(out, "\n{}", prose(&doc.text));
    let mut gap = "\n";
    let mut tables: Vec<Vec<Named>> = Vec::new();
    for param in doc.params.iter().filter(|p| p.name != "self") {
        let options = annotations::options(classes, param);
        let text = if annotations::lists_options(param, &options) { "" } else { param.text.as_str() };
        let ty = if options.is_empty() { type_text(&param.ty) } else { "a table of options".into() };
        let optional = if param.ty.ends_with('?') { ", optional" } else { "" };
        let text = if text.is_empty() { String::new() } else { format!(": {text}") };
        let _ = writeln!(out, "{gap}- `{}`, {ty}{optional}{text}", param.name);
        gap = "";
        tables.push(options);
    }
    let results: Vec<String> = doc
        .returns
        .iter()
        .filter(|r| r.ty != "self")
        .map(|r| if r.text.is_empty() { type_text(&r.ty) } else { format!("{}: {}", type_text(&r.ty), r.text) })
        .collect();
    if !results.is_empty() {
        let _ = writeln!(out, "{gap}- returns {}", results.join("; "));
    }
    let defaults = annotations::defaults(place);
    for options in tables.iter().filter(|t| !t.is_empty()) {
        option_table(out, "option", options, &defaults);
    }
}

fn option_table(out: &mut String, what: &str, rows: &[Named], defaults: &[(String, String)]) {
    let with_default = what == "option";
    let (head, line) = if with_default { ("type | default", "|---|---|---|---|") } else { ("type", "|---|---|---|") };
    let _ = writeln!(out, "\n| {what} | {head} | |\n{line}");
    for row in rows {
        let (stated, text) = annotations::stated_default(&row.text);
        let required = !row.ty.ends_with('?');
        let default = match (defaults.iter().find(|(name, _)| *name == row.name), stated) {
            (_, Some(stated)) => format!("`{stated}`"),
            (Some((_, code)), None) => format!("`{code}`"),
            (None, None) if required => "required".into(),
            (None, None) => String::new(),
        };
        let text = cell(if with_default { &text } else { &row.text });
        let middle = if with_default { format!("{} | {default}", type_text(&row.ty)) } else { type_text(&row.ty) };
        let _ = writeln!(out, "| `{}` | {middle} | {text} |", row.name);
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Formats a type for prose: `integer or integer[]`, without the prefix of the library's classes.
fn type_text(ty: &str) -> String {
    let ty = ty.trim_end_matches('?').replace("perilune.", "").replace("Whole", "integer");
    let ty = ty.strip_prefix('(').and_then(|t| t.strip_suffix(')')).map_or(ty.clone(), str::to_string);
    // A function type keeps its bars within one code span.
    if ty.contains("fun(") || ty.contains('{') {
        return format!("`{}`", ty.replace('|', " or "));
    }
    let plain = |word: &str| word.chars().all(|c| c.is_alphanumeric());
    let words =
        ty.split('|').map(str::trim).map(|word| if plain(word) { word.to_string() } else { format!("`{word}`") });
    words.collect::<Vec<_>>().join(" or ")
}

/// Formats a doc as Markdown: lines that begin with two spaces are code.
fn prose(lines: &[String]) -> String {
    let mut out = String::new();
    let mut in_code = false;
    for line in lines {
        let is_code = line.starts_with("  ");
        if is_code != in_code && !out.is_empty() {
            out.push('\n');
        }
        in_code = is_code;
        if is_code {
            let _ = writeln!(out, "    {}", line.trim_start());
        } else {
            // A formula that a line begins with is no list and no table.
            let mark = if line.starts_with("- ") || line.starts_with('|') { "\\" } else { "" };
            let _ = writeln!(out, "{mark}{}", line.replace(" * ", " \\* ").replace('<', "\\<"));
        }
    }
    out.trim_end().to_string()
}

/// The fields of a recipe, and the params that the training loop reads.
fn recipe_page(classes: &[Class]) -> Page {
    let mut text = head("The recipe", "The fields of the table that `pl.recipe` returns.");
    option_table(&mut text, "field", &fields_of(classes, "perilune.Recipe"), &[]);
    text.push_str(
        "\nParams that the training loop reads, and that need not be declared otherwise: `steps`, `epochs`, `seed`, `accumulate`, `eval_every`, \
         `memory_budget`, `mesh`, `strict_shards`, `pipeline`, `on_nan`, `on_spike`. A param overrides the field of the same name.\n",
    );
    Page { file: "recipe.md", title: "The recipe", text }
}
