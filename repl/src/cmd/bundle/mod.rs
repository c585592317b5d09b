//! `perilune bundle`: packs, signs, verifies, lists, compares and unpacks bundles.
//!
//! A bundle is run by `perilune run NAME.plb` (`repeat.rs`).

mod bisect;
mod compare;
mod diff;
mod grants;
mod inspect;
mod opened;
mod pack;
pub mod repeat;

use crate::console_out::say;
use crate::failure::Failure;
use perilune_bundle::{Bundle, sign};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

#[derive(clap::Subcommand, Debug)]
pub enum BundleArgs {
    /// Pack a run that has ended, or a recipe, into one file that a stranger can verify, inspect and run
    Pack(Box<pack::PackArgs>),
    /// Verify every byte of a bundle, and its signature
    Verify {
        bundle: PathBuf,
        /// The public key of its author: RW…, or a file with it. Without it any key will do, and is named
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
    },
    /// List what a bundle has, needs and asks for; nothing of it is run
    Inspect {
        bundle: PathBuf,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
    },
    /// Compare two bundles: recipe, params, data, versions, results, and the first step that differs
    Diff(Box<diff::DiffArgs>),
    /// Unpack a bundle into a new folder, which then has a run directory or a recipe
    Extract {
        bundle: PathBuf,
        /// The folder, which must not exist
        to: PathBuf,
    },
    /// Make a pair of keys: FILE has the secret one, and FILE with the ending .pub the one to give away
    Key {
        file: PathBuf,
        /// Do not ask for a password to encrypt the secret key with
        #[arg(long)]
        no_password: bool,
    },
}

/// Runs one of the commands.
pub fn bundle(args: BundleArgs) -> Result<(), Failure> {
    match args {
        BundleArgs::Pack(args) => pack::pack(*args),
        BundleArgs::Verify { bundle, key } => verify(&bundle, key.as_deref()),
        BundleArgs::Inspect { bundle, json } => inspect::inspect(&bundle, json),
        BundleArgs::Diff(args) => diff::diff(&args),
        BundleArgs::Extract { bundle, to } => extract(&bundle, &to),
        BundleArgs::Key { file, no_password } => {
            if !no_password && !std::io::stdin().is_terminal() {
                let cure = "--no-password makes a key without one";
                return Err(Failure::Usage(format!("there is no terminal to ask for a password\n  hint: {cure}")));
            }
            let key = sign::generate(&file, !no_password)?;
            say(&format!("{} · the public key is {key}\n", file.display()))
        }
    }
}

fn verify(path: &Path, key: Option<&str>) -> Result<(), Failure> {
    let key = key.map(sign::public_key).transpose()?;
    let bundle = Bundle::open(path)?;
    let signer = sign::verify(path, key.as_ref(), &opened::trusted_keys())?;
    let text =
        format!("{}: verified · blake3:{} · {}\n", path.display(), bundle.hash(), opened::signed(signer.as_ref()));
    say(&text)
}

fn extract(path: &Path, to: &Path) -> Result<(), Failure> {
    let bundle = opened::open(path)?.bundle;
    std::fs::create_dir(to).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Failure::Usage(format!("{} exists; a bundle is unpacked into a new folder", to.display()))
        }
        _ => Failure::System(format!("cannot create {}: {}", to.display(), crate::failure::plain(&e))),
    })?;
    bundle.extract(to, &|_| true)?;
    std::fs::write(to.join(perilune_bundle::manifest::MANIFEST), bundle.manifest().text())
        .map_err(|e| Failure::System(format!("cannot write in {}: {}", to.display(), crate::failure::plain(&e))))?;
    let recipe = to.join(&bundle.manifest().recipe);
    let next = match &bundle.manifest().run {
        Some(_) => format!("perilune eval {}", to.join(perilune_train::bundled::RUN).display()),
        None => format!("perilune check {}", recipe.display()),
    };
    say(&format!(
        "{}: {} files; the recipe is {}\n  next: {next}\n",
        to.display(),
        bundle.manifest().files.len() + 1,
        recipe.display()
    ))
}
