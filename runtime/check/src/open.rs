//! Opens files of records by their extension.

use perilune_core::Interrupt;
use perilune_data::records::{Dataset, LineFormat, Lines};
use perilune_data::{Error, Result};
use perilune_policy::Opener;
use std::path::PathBuf;
use std::sync::Arc;

/// Opens files of one format as one dataset: the one place that knows the extensions.
///
/// # Errors
/// An unknown extension, files of several formats, or a file that cannot be read.
pub fn files(opener: Arc<dyn Opener>, paths: &[PathBuf], interrupt: &Interrupt) -> Result<Arc<dyn Dataset>> {
    let extension = |p: &PathBuf| p.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let first = paths.first().map(extension).unwrap_or_default();
    if let Some(other) = paths.iter().find(|p| extension(p) != first) {
        let rule = format!("its extension is not '.{first}', which the first file has");
        return Err(Error::argument(other.display().to_string(), rule).hint("check files of one format at a time"));
    }
    let format = match first.as_str() {
        "jsonl" | "ndjson" => LineFormat::Json,
        "txt" => LineFormat::Text,
        other => {
            let name = paths.first().map(|p| p.display().to_string()).unwrap_or_default();
            let rule = format!("files of records with the extension '.{other}' are not supported");
            return Err(Error::argument(name, rule)
                .hint("give .jsonl, .ndjson or .txt files, a folder of images, or a recipe (.lua)"));
        }
    };
    Ok(Arc::new(Lines::open(opener, paths, format, interrupt, &mut |_| ())?))
}
