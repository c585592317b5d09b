//! Parses the options of `--untrusted`.

use super::child;
use crate::failure::Failure;
use perilune_core::byte_size::{amount, show};
use std::time::Duration;

/// Options for a recipe that is not one's own.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Recipes of others")]
pub struct UntrustedArgs {
    /// Confine the recipe: it reads the .lua files of its folder and writes its run directory, and everything else needs a flag
    /// (--allow-read, --allow-write, --allow-net, --allow-kernels). It runs in a process of its own, behind the walls of Linux
    #[arg(long)]
    untrusted: bool,
    /// With --untrusted: let the recipe launch kernels of its own source on the GPU
    #[arg(long)]
    allow_kernels: bool,
    /// Check every access of the recipe's own kernels: one outside of their inputs and outputs has no effect and is an error
    #[arg(long)]
    check_kernels: bool,
    /// End a launch of the recipe's own kernels after this time, such as 500ms or 10s; if the GPU cannot end it, the process ends with
    /// exit status 123 [default: 10s with --untrusted, else none]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    kernel_time: Option<Duration>,
    /// With --untrusted: end the process after this time, such as 90s, 10m or 2h; the exit status is 124
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    time: Option<Duration>,
    /// With --untrusted: end the process above this memory, tensors on the CPU included [default: three quarters of the machine's]
    #[arg(long, value_name = "BYTES", value_parser = process_memory)]
    process_memory: Option<usize>,
    /// With --untrusted: go on where this system lacks a wall, without asking
    #[arg(long)]
    accept_missing_walls: bool,
}

impl UntrustedArgs {
    /// Whether this process has to start a confined one. Otherwise the limits of kernels are set for this one, unless its grants have
    /// set them.
    ///
    /// # Errors
    /// An option of `--untrusted` is given without it.
    pub fn supervises(&self) -> Result<bool, Failure> {
        let without = [
            (self.allow_kernels, "--allow-kernels"),
            (self.time.is_some(), "--time"),
            (self.process_memory.is_some(), "--process-memory"),
            (self.accept_missing_walls, "--accept-missing-walls"),
        ];
        match without.into_iter().find(|(given, _)| *given && !self.untrusted) {
            Some((_, flag)) => Err(Failure::Usage(format!(
                "{flag} goes with --untrusted\n  hint: a recipe that is not confined needs no grant for kernels and has no limit of time"
            ))),
            None if self.untrusted && !child::is_confined() => Ok(true),
            None => {
                super::limit_kernels(self.check_kernels, self.kernel_time);
                Ok(false)
            }
        }
    }

    /// Writes what these options grant.
    pub fn add_to(&self, terms: &mut super::Terms) {
        terms.kernels |= self.allow_kernels;
        terms.check_kernels |= self.check_kernels;
        terms.kernel_time = self.kernel_time.or(terms.kernel_time);
        terms.time = self.time.or(terms.time);
        terms.memory = self.process_memory.map(|bytes| bytes as u64).or(terms.memory);
        terms.accept_missing_walls |= self.accept_missing_walls;
    }
}

/// The minimum of `--process-memory`: the program with its libraries and threads.
const LEAST_MEMORY: usize = 256 << 20;

fn process_memory(text: &str) -> Result<usize, String> {
    let bytes = amount(text)?;
    if bytes < LEAST_MEMORY {
        return Err(format!("the program itself needs at least {}", show(LEAST_MEMORY)));
    }
    Ok(bytes)
}

/// Parses a time: a number with a unit, or several (`1h30m`). A number alone is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let rule = "write a time such as 90s, 10m, 1h30m or 2d";
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)];
    let mut left = text.trim();
    let mut total = Duration::ZERO;
    while !left.is_empty() {
        let end = left.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(left.len());
        let (number, rest) = left.split_at(end);
        let value: f64 = number.parse().map_err(|_| rule.to_string())?;
        let (unit, rest) = match rest.is_empty() {
            true => (1.0, rest),
            false => units.iter().find_map(|(name, unit)| Some((*unit, rest.strip_prefix(name)?))).ok_or(rule)?,
        };
        let part = Duration::try_from_secs_f64(value * unit).map_err(|_| rule.to_string())?;
        total = total.checked_add(part).ok_or(rule)?;
        left = rest;
    }
    if total.is_zero() { Err(rule.into()) } else { Ok(total) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("90", 90.0),
            ("90s", 90.0),
            ("10m", 600.0),
            ("1h30m", 5400.0),
            ("0.5s", 0.5),
            ("1s500ms", 1.5),
            ("2d", 172_800.0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in ["", "0", "-1s", "1w", "s", "1..2s", "1e9d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
