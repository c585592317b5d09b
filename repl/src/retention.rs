//! Parses the options of checkpoint retention.

use perilune_checkpoint::SHARD_LIMIT;
use perilune_train::Retention;

#[derive(clap::Args, Clone, Debug)]
pub struct RetentionArgs {
    /// Keep the last N checkpoints, 3 by default; 0 keeps all
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    /// Also keep every checkpoint whose step is a multiple of N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Also keep the best checkpoint by an evaluation metric, written when it improves: valid/loss, valid/accuracy:max
    #[arg(long, value_name = "METRIC[:max]")]
    keep_best: Option<String>,
    /// Split larger checkpoint files into shards with an index (5GB, 512M, …)
    #[arg(long, value_name = "SIZE", value_parser = size, default_value_t = SHARD_LIMIT, hide_default_value = true)]
    shard_size: u64,
}

impl RetentionArgs {
    /// Returns the options as a policy.
    pub fn policy(&self) -> Retention {
        let (last, every, best) = (self.keep, self.keep_every, self.keep_best.clone());
        Retention { last, every, best, shard_size: self.shard_size }
    }
}

/// Parses a number of bytes, with the grammar of all memory sizes.
pub fn size(text: &str) -> Result<u64, String> {
    perilune_core::byte_size::amount(text).map(|n| n as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let of = |text| size(text).ok();
        assert_eq!((of("5GB"), of("1GiB"), of("12")), (Some(5_000_000_000), Some(1 << 30), Some(12)));
        assert_eq!((of("0.5KB"), of("0"), of("x"), of("-1MB")), (Some(500), None, None, None));
        assert_eq!((of("512M"), of("512MiB"), of("2gib")), (Some(512 << 20), Some(512 << 20), Some(2 << 30)));
    }
}
