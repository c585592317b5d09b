//! Opens files of records by their extension.

use perilune_core::Interrupt;
use perilune_core::cache_folder::cache_folder;
use perilune_data::records::{Arrow, Dataset, JsonArray, LineFormat, Lines, Opening, Parquet, Table, TableFormat};
use perilune_data::{Error, Result};
use perilune_policy::Opener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the extension that names the format, without that of a compression.
fn extension(path: &Path) -> String {
    let lower = |p: &Path| p.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    match (lower(path).as_str(), path.file_stem()) {
        ("gz" | "zst", Some(stem)) => lower(Path::new(stem)),
        (own, _) => own.to_string(),
    }
}

/// Opens files of one format as one dataset.
///
/// # Errors
/// An unknown extension, files of several formats, or a file that cannot be read.
pub fn files(opener: Arc<dyn Opener>, paths: &[PathBuf], interrupt: &Interrupt) -> Result<Arc<dyn Dataset>> {
    let first = paths.first().map(|p| extension(p)).unwrap_or_default();
    if let Some(other) = paths.iter().find(|p| extension(p) != first) {
        let rule = format!("its extension is not '.{first}', which the first file has");
        return Err(Error::argument(other.display().to_string(), rule).hint("check files of one format at a time"));
    }
    let opening = Opening { opener, cache: cache_folder(), interrupt, observe: &mut |_| () };
    let table = |delimiter| TableFormat { delimiter, columns: None, types: Vec::new(), skip_malformed: false };
    Ok(match first.as_str() {
        "jsonl" | "ndjson" => Arc::new(Lines::open(paths, LineFormat::Json, opening)?),
        "txt" => Arc::new(Lines::open(paths, LineFormat::Text, opening)?),
        "json" => Arc::new(JsonArray::open(paths, None, opening)?),
        "csv" => Arc::new(Table::open(paths, table(b','), opening)?),
        "tsv" => Arc::new(Table::open(paths, table(b'\t'), opening)?),
        "parquet" => Arc::new(Parquet::open(paths, None, opening)?),
        "arrow" => Arc::new(Arrow::open(paths, None, opening)?),
        other => {
            let name = paths.first().map(|p| p.display().to_string()).unwrap_or_default();
            let rule = format!("files of records with the extension '.{other}' are not supported");
            return Err(Error::argument(name, rule).hint(
                "give .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow or .txt files, a folder of images, or a recipe (.lua)",
            ));
        }
    })
}
