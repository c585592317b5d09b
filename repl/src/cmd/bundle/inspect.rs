//! `perilune bundle inspect`: lists what a bundle has, needs and asks for, without running anything of it.

use super::opened::{Opened, open, signed};
use super::pack::describe;
use crate::console_out::say;
use crate::failure::Failure;
use crate::format::{bytes, clock, grouped, short};
use crate::table::{Cell, Table, width};
use crate::terminal::{json as json_text, one_line};
use perilune_bundle::Manifest;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Data files, and entries, that are listed one by one.
const LISTED: usize = 40;
/// Letters of a row: a bundle may have long names, and many params.
const ROW: usize = 4000;

pub fn inspect(path: &Path, json: bool) -> Result<(), Failure> {
    let Opened { bundle, signer } = open(path)?;
    let manifest = bundle.manifest();
    if json {
        return say(&json_text(&manifest.text()));
    }
    let size = bytes(usize::try_from(bundle.bytes()).unwrap_or(usize::MAX));
    let mut out = format!("{} · {size} · {}\n", one_line(&path.display().to_string()), describe(manifest).join(", "));
    let mut row = |name: &str, text: &str| {
        let _ = writeln!(out, "  {name:<11}{}", one_line(&cut(text)));
    };
    row("identity", &format!("blake3:{}", bundle.hash()));
    row("author", &signed(signer.as_ref()));
    row("made with", &format!("perilune {}", manifest.perilune));
    if let Some(license) = &manifest.license {
        row("licence", license);
    }
    row("recipe", &format!("{} · {}", manifest.name, manifest.recipe));
    if !manifest.params.is_empty() {
        let list: Vec<String> = manifest.params.iter().map(|(name, v)| format!("{name} {v}")).collect();
        row("params", &list.join(", "));
    }
    if let Some(run) = &manifest.run {
        let mesh = run.mesh.as_ref().map(|mesh| format!(", mesh {mesh}")).unwrap_or_default();
        let text = format!(
            "{} steps in {} from {}, {}{mesh}",
            grouped(run.steps),
            clock(run.seconds),
            run.started,
            run.precision
        );
        row("run", &text);
        row("device", &run.device_description);
        let metrics: Vec<String> = run.metrics.iter().map(|(name, v)| format!("{name} {}", number(v))).collect();
        row("results", &metrics.join(", "));
        row("weights", &run.weights);
        if !run.checkpoints.is_empty() {
            let steps: Vec<String> = run.checkpoints.iter().map(u64::to_string).collect();
            row("checkpoints", &format!(" of steps {}", steps.join(", ")));
        }
    }
    row("command", &manifest.command.join(" "));
    row("asks for", &asks(manifest));
    out += &files(manifest);
    say(&out)
}

/// Cuts a long row.
fn cut(text: &str) -> String {
    let Some((end, _)) = text.char_indices().nth(ROW) else { return text.into() };
    format!("{}… and {} bytes more; --json prints all", &text[..end], grouped((text.len() - end) as u64))
}

/// Formats a metric in a few digits.
fn number(value: &Value) -> String {
    value.as_f64().map_or_else(|| value.to_string(), short)
}

/// Describes what the recipe reads and what else it asks for.
fn asks(manifest: &Manifest) -> String {
    let place = |inside: bool| if inside { "included" } else { "by hash" };
    let single = manifest.data.iter().filter(|file| file.folder.is_none());
    let mut reads: Vec<String> = single
        .map(|file| match &file.address {
            Some(address) => format!("{address} (downloaded)"),
            None => format!("{} ({})", file.path, place(file.inside)),
        })
        .collect();
    // Files of each folder, and whether all of them are inside.
    let mut folders: BTreeMap<&str, (u64, bool)> = BTreeMap::new();
    for file in &manifest.data {
        if let Some(folder) = &file.folder {
            let (count, inside) = folders.entry(folder).or_insert((0, true));
            *count += 1;
            *inside &= file.inside;
        }
    }
    reads.extend(
        folders.iter().map(|(folder, (n, inside))| format!("{folder}, {} files ({})", grouped(*n), place(*inside))),
    );
    let more = reads.len().saturating_sub(LISTED);
    reads.truncate(LISTED);
    let mut parts = Vec::new();
    if !reads.is_empty() {
        let rest = if more > 0 { format!(" and {} more", grouped(more as u64)) } else { String::new() };
        parts.push(format!("reading {}{rest}", reads.join(", ")));
    }
    if !manifest.asks.net.is_empty() {
        parts.push(format!("downloads from {} (--allow-net)", manifest.asks.net.join(", ")));
    }
    if manifest.asks.kernels {
        parts.push("kernels of its own (--allow-kernels)".into());
    }
    parts.push(if parts.is_empty() { "nothing".into() } else { "nothing else".into() });
    parts.join(" · ")
}

fn files(manifest: &Manifest) -> String {
    let mut table = Table::default();
    table.text_column("file");
    table.number_column("bytes");
    table.text_column("BLAKE3");
    for file in manifest.files.iter().take(LISTED) {
        table.row(vec![
            Cell::from(one_line(&file.path)),
            Cell::from(grouped(file.bytes)),
            Cell::from(file.blake3[..16].to_string()),
        ]);
    }
    let more = manifest.files.len().saturating_sub(LISTED);
    let rest =
        if more > 0 { format!("{} more files; --json lists all\n", grouped(more as u64)) } else { String::new() };
    format!("\n{}{rest}", table.text(width(), false))
}
