//! `perilune fetch`: downloads data into the cache, prints its hash, and lists and removes what the cache has.

use crate::console_out::say;
use crate::failure::Failure;
use crate::fetching::{NetArgs, failure, line};
use crate::format::grouped;
use perilune_fetch::{Address, Algorithm, Cache, ContentHash};
use std::sync::PoisonError;

#[derive(clap::Args, Debug)]
pub struct FetchArgs {
    /// https://HOST/PATH, hf://datasets/OWNER/NAME@REVISION/PATH, hf://models/… or s3://BUCKET/KEY; with #sha256:… at its end the
    /// content has to have that hash. The host of an address is granted; hosts that it leads to are not
    #[arg(value_name = "ADDRESS", required_unless_present_any = ["list", "remove"], conflicts_with_all = ["list", "remove"])]
    addresses: Vec<String>,
    /// The hash to print: sha256 or blake3
    #[arg(long, value_name = "sha256|blake3", value_parser = ["sha256", "blake3"], hide_possible_values = true, default_value = "sha256")]
    algorithm: String,
    /// List what the cache has: hash, bytes, address
    #[arg(long, conflicts_with = "remove")]
    list: bool,
    /// Remove the content of a hash from the cache; may be given several times
    #[arg(long, value_name = "HASH")]
    remove: Vec<String>,
    #[command(flatten)]
    net: NetArgs,
}

fn wrong(e: perilune_fetch::Error) -> Failure {
    Failure::Usage(e.to_string())
}

/// Runs the command.
pub fn fetch(args: &FetchArgs) -> Result<(), Failure> {
    if args.list {
        for (cached, address) in Cache::of_user().and_then(|cache| cache.list()).map_err(failure)? {
            line(&format!("{}  {:>15}  {}", cached.hash, grouped(cached.bytes), address.unwrap_or_default()))?;
        }
        return Ok(());
    }
    let hashes: Vec<ContentHash> =
        args.remove.iter().map(|text| ContentHash::parse(text)).collect::<Result<_, _>>().map_err(wrong)?;
    if !hashes.is_empty() {
        let cache = Cache::of_user().map_err(failure)?;
        return hashes.iter().try_for_each(|hash| cache.remove(hash).map_err(failure));
    }
    let parsed = args.addresses.iter().map(|text| Address::with_hash(text));
    let parsed: Vec<(Address, Option<ContentHash>)> = parsed.collect::<Result<_, _>>().map_err(wrong)?;
    let algorithm = if args.algorithm == "blake3" { Algorithm::Blake3 } else { Algorithm::Sha256 };
    let fetcher = args.net.fetcher()?;
    for (address, hash) in &parsed {
        fetcher
            .grants
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add(&address.host().map_err(wrong)?)
            .map_err(wrong)?;
        let found = fetcher.get(address, hash.as_ref(), algorithm, &|| false).map_err(failure)?;
        line(&address.to_string())?;
        say(&format!("  {} bytes\n  hash = \"{}\"", grouped(found.bytes), found.hash))?;
    }
    Ok(())
}

/// Downloads one file for the process that has started this one.
pub fn serve() -> Result<(), Failure> {
    perilune_fetch::serve(std::io::stdin().lock(), std::io::stdout().lock()).map_err(failure)
}
