//! `perilune cache`: shows, bounds and clears what the program keeps in its cache folder to be faster at the next start.

use crate::console_out::{ConsoleOut, Mode};
use crate::failure::Failure;
use crate::format::{bytes, grouped};
use perilune_core::byte_size;
use perilune_core::cache_folder::cache_folder;
use perilune_data::cache::{Entry, PARTS, Removed, VARIABLE, limit, list, shrink};
use perilune_fetch::Cache;
use serde_json::json;
use std::path::Path;
use std::time::SystemTime;

#[derive(clap::Args, Debug)]
#[command(after_help = format!("The cache has indexes of text files, the text of compressed files of records, trained tokenizers and compiled kernels. What was used \
least recently is removed\nbeyond the bound: {VARIABLE} (\"50GiB\", or \"none\"), by default a tenth of the disk and at least 10 GiB. Downloads are not bounded: see \
`perilune fetch --list`."))]
pub struct CacheArgs {
    /// List the files, those used least recently first
    #[arg(long)]
    list: bool,
    /// Remove all files, or those of a part; files that a process uses stay
    #[arg(long, value_name = "PART", num_args = 0..=1, default_missing_value = "all", conflicts_with_all = ["list", "prune"], value_parser = ["all", "index", "kernels", "records", "tokenizers"])]
    clear: Option<String>,
    /// Remove the files used least recently until SIZE is left, by default the bound
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "", conflicts_with = "list")]
    prune: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn failed(e: perilune_data::Error) -> Failure {
    match e {
        perilune_data::Error::Argument { .. } => Failure::Usage(e.to_string()),
        e => Failure::System(e.to_string()),
    }
}

/// Runs the command.
pub fn cache(args: &CacheArgs) -> Result<(), Failure> {
    let console = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let none = || Failure::Usage("there is no cache folder\n  hint: set PERILUNE_CACHE to a folder".into());
    let folder = cache_folder().ok_or_else(none)?;
    let bound = limit(&folder).map_err(failed)?;
    if let Some(part) = &args.clear {
        let part = Some(part.as_str()).filter(|part| *part != "all");
        return removed(&console, shrink(&folder, 0, part).map_err(failed)?);
    }
    if let Some(size) = &args.prune {
        let wanted = match size.as_str() {
            "" => bound,
            size => byte_size::parse(size).ok_or_else(|| {
                Failure::Usage(format!("--prune {size}: no size\n  hint: write it as 20GiB, 512M or 5GB"))
            })? as u64,
        };
        return removed(&console, shrink(&folder, wanted, None).map_err(failed)?);
    }
    let entries = list(&folder).map_err(failed)?;
    if args.list {
        entries.iter().for_each(|entry| show(&console, entry));
        return Ok(());
    }
    usage(&console, &folder, &entries, bound)
}

fn size(n: u64) -> String {
    bytes(usize::try_from(n).unwrap_or(usize::MAX))
}

fn removed(console: &ConsoleOut, done: Removed) -> Result<(), Failure> {
    let Removed { files, bytes, left, in_use } = done;
    console.event(&json!({ "event": "removed", "files": files, "bytes": bytes, "left": left, "in_use": in_use }));
    let used = if in_use > 0 { format!(", of which processes use {}", size(in_use)) } else { String::new() };
    console.result(&format!("{} files of {} removed, {} left{used}", grouped(files), size(bytes), size(left)));
    Ok(())
}

fn show(console: &ConsoleOut, entry: &Entry) {
    let age = SystemTime::now().duration_since(entry.used).unwrap_or_default().as_secs();
    console.event(&json!({ "part": entry.part, "name": entry.name, "bytes": entry.bytes, "unused_s": age }));
    let age = match age {
        0..3600 => format!("{} min", age / 60),
        3600..172_800 => format!("{} h", age / 3600),
        _ => format!("{} d", age / 86_400),
    };
    console.result(&format!("{:<10} {:>10} {age:>8}  {}", entry.part, size(entry.bytes), entry.name));
}

fn usage(console: &ConsoleOut, folder: &Path, entries: &[Entry], bound: u64) -> Result<(), Failure> {
    let parts: Vec<(&str, u64, u64)> = PARTS
        .iter()
        .map(|part| {
            let of = || entries.iter().filter(|entry| entry.part == *part);
            (*part, of().count() as u64, of().map(|entry| entry.bytes).sum())
        })
        .collect();
    let total: u64 = parts.iter().map(|part| part.2).sum();
    let downloads: u64 =
        Cache::at(folder).list().map_err(crate::fetching::failure)?.iter().map(|(cached, _)| cached.bytes).sum();
    let bounded = (bound != u64::MAX).then_some(bound);
    console.event(&json!({
        "event": "cache", "folder": folder, "bytes": total, "limit": bounded, "downloads": downloads,
        "parts": parts.iter().map(|(part, files, bytes)| json!({ "part": part, "files": files, "bytes": bytes })).collect::<Vec<_>>(),
    }));
    console.result(&folder.display().to_string());
    for (part, files, bytes) in parts {
        console.result(&format!("  {part:<10} {:>8} files {:>10}", grouped(files), size(bytes)));
    }
    let shown = bounded.map_or("no bound".to_string(), size);
    console.result(&format!("  {:<10} {:>14} {:>10} of {shown}", "in all", "", size(total)));
    console.result(&format!("  {:<10} {:>14} {:>10}, not bounded", "downloads", "", size(downloads)));
    Ok(())
}
