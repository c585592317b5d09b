//! `perilune reference`: prints the reference as Markdown, or writes it as a folder of pages.

use crate::console_out;
use crate::failure::Failure;
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct ReferenceArgs {
    /// Write a page for each subject into DIR, and remove other .md files there, instead of printing all of them
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn reference(args: &ReferenceArgs) -> Result<(), Failure> {
    let pages = perilune_lua::reference_pages()?;
    let Some(dir) = &args.out else {
        let texts: Vec<&str> = pages.iter().skip(1).map(|page| page.text.trim_end()).collect();
        return console_out::say(&format!("{}\n", texts.join("\n\n")));
    };
    write(dir, &pages).map_err(|e| Failure::System(format!("{}: {e}", dir.display())))
}

fn write(dir: &Path, pages: &[perilune_lua::ReferencePage]) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let is_page = path.extension().is_some_and(|e| e == "md");
        if is_page && !pages.iter().any(|p| path.file_name().is_some_and(|name| name == p.file)) {
            std::fs::remove_file(path)?;
        }
    }
    pages.iter().try_for_each(|page| std::fs::write(dir.join(page.file), &page.text))
}
