//! `perilune find batch`: the largest batch whose training step fits in the memory of the device.
//!
//! The memory of a step is predicted by planning it without running it, as `check --for` does; bisection finds the largest batch
//! whose prediction fits, and one step on the device confirms it.

use super::load;
use crate::console_out::{ConsoleOut, Mode};
use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::format::grouped;
use crate::policy_args::PolicyArgs;
use perilune_core::byte_size::{amount, show};
use perilune_core::error::did_you_mean;
use perilune_core::host_memory;
use perilune_lua::ParamValue;
use perilune_plan::Backend;
use perilune_plan::estimate::Estimate;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(clap::Args, Debug)]
pub struct BatchArgs {
    /// The recipe, a .lua file
    recipe: PathBuf,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// The param that is the number of samples of a batch
    #[arg(long, value_name = "NAME", default_value = "batch")]
    param: String,
    /// The largest batch to consider [default: the samples of the training split]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    most: Option<u64>,
    /// The memory that a step may take, such as 4GiB [default: what the device has free, on a CPU 90 % of it]
    #[arg(long, value_name = "BYTES", value_parser = amount)]
    memory: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
    /// Print one JSON object for each batch that is tried, and a last one with the result
    #[arg(long)]
    json: bool,
}

/// Predicts the device memory of a step: States, data and intermediate values at their peak, in bytes.
///
/// # Errors
/// The recipe cannot be built, or its devices form a mesh.
pub fn predicted_memory(
    path: &Path,
    set: &[(String, String)],
    device: &DeviceArgs,
    files: &PolicyArgs,
) -> Result<usize, Failure> {
    Ok(predict(path, set, device, files, &device.open()?)?.0)
}

/// Returns the predicted bytes of a step, and the samples of the training split.
fn predict(
    path: &Path,
    set: &[(String, String)],
    device: &DeviceArgs,
    files: &PolicyArgs,
    target: &Arc<dyn Backend>,
) -> Result<(usize, Option<u64>), Failure> {
    let backend = Arc::new(Estimate::new(target.clone(), usize::MAX / 4));
    let opened = load(path, set, device, files, backend)?;
    let run = opened.recipe.start(None, device.precision.as_deref(), device.memory_budget)?;
    let engine = || opened.runtime.host().engine.borrow();
    if engine().mesh().devices() > 1 {
        let cure = "perilune check --for GPU --mesh … reports what a device of a mesh needs";
        return Err(Failure::Usage(format!("the recipe runs on a mesh\n  hint: {cure}")));
    }
    run.step()?;
    let bytes = engine().memory().device.peak;
    Ok((bytes, run.samples("train")))
}

/// Finds the largest batch and prints it.
pub fn batch(args: &BatchArgs) -> Result<(), Failure> {
    if args.device.place.has_mesh() {
        let cure = "perilune check --for GPU --mesh … reports what a device of a mesh needs";
        return Err(Failure::Usage(format!("find batch takes one device, not --mesh\n  hint: {cure}")));
    }
    let out = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let start = default_of(args)?;
    let device = args.device.open()?;
    let limit = memory(args, &device)?;
    let set_to = |batch: u64| {
        let mut set: Vec<_> = args.set.iter().filter(|(name, _)| *name != args.param).cloned().collect();
        set.push((args.param.clone(), batch.to_string()));
        set
    };
    let first_samples = std::cell::Cell::new(None);
    let predicted = |batch: u64| -> Result<usize, Failure> {
        let (bytes, samples) = predict(&args.recipe, &set_to(batch), &args.device, &args.files, &device)?;
        first_samples.set(first_samples.get().or(samples));
        let fits = bytes <= limit;
        out.event(&json!({ "event": "try", "batch": batch, "predicted": bytes, "fits": fits }));
        let word = if fits { "fits" } else { "does not fit" };
        out.line(&format!("  {} {:<12} {:>11}  {word}", args.param, grouped(batch), show(bytes)));
        Ok(bytes)
    };
    out.line(&format!("{} · {} of memory", device.describe(), show(limit)));
    // Doubling from the recipe's own batch, or halving where that is too large; then bisection between the two.
    let begin = args.most.map_or(start, |most| start.min(most));
    let first = predicted(begin)?;
    let (mut low, mut high) = (0, u64::MAX);
    let mut bytes_of_low = 0;
    let most = args.most.or(first_samples.get()).unwrap_or(1 << 24).max(1);
    let mut next = begin.min(most);
    let mut known = (next == begin).then_some(first);
    loop {
        let bytes = match known.take() {
            Some(bytes) => bytes,
            None => predicted(next)?,
        };
        if bytes <= limit {
            (low, bytes_of_low) = (next, bytes)
        } else {
            high = next
        }
        if low == most || high == 1 || high.saturating_sub(low) <= granularity(low) {
            break;
        }
        next = match (low, high) {
            (0, high) => high / 2,
            (low, u64::MAX) => low.saturating_mul(2).min(most),
            (low, high) => low + (high - low) / 2,
        };
    }
    if low == 0 {
        return Err(Failure::System(format!(
            "a batch of 1 does not fit in {}\n  hint: a smaller model, --memory-budget, or --precision bf16",
            show(limit)
        )));
    }
    let confirmed = confirm(args, low, &set_to)?;
    let power = if confirmed.is_power_of_two() { confirmed } else { confirmed.next_power_of_two() / 2 };
    out.event(&json!({
        "event": "batch", "param": args.param, "batch": confirmed, "power_of_two": power, "predicted": bytes_of_low,
        "limit": limit, "most": most, "confirmed": true,
    }));
    if out.mode == Mode::Human {
        let end = if confirmed == most { ", the most that was considered" } else { "" };
        out.result(&format!(
            "largest batch: {}{end}   --set {}={confirmed}   (power of two: {})",
            out.bold(&grouped(confirmed)),
            args.param,
            grouped(power)
        ));
        out.result("one step of that batch has run on the device");
    }
    Ok(())
}

/// The difference between a batch that fits and one that does not at which the search ends: 1 % of it.
fn granularity(batch: u64) -> u64 {
    (batch / 100).max(1)
}

/// Returns the recipe's own batch.
fn default_of(args: &BatchArgs) -> Result<u64, Failure> {
    let opened = load(&args.recipe, &args.set, &args.device, &args.files, super::silent_backend())?;
    let params = opened.recipe.params()?;
    let name = &args.param;
    match params.iter().find(|(known, _)| known == name) {
        Some((_, ParamValue::Int(n))) if *n > 0 => Ok(*n as u64),
        Some((_, value)) => {
            let shown = perilune_train::params::literal(value);
            Err(Failure::Usage(format!("--param {name}: its value {shown} is not a number of samples")))
        }
        None => {
            let near = did_you_mean(name, params.iter().map(|p| p.0.as_str()));
            let near = near.map(|n| format!(". Did you mean '{n}'?")).unwrap_or_default();
            let list = params.iter().map(|p| p.0.as_str()).collect::<Vec<_>>().join(", ");
            Err(Failure::Usage(format!(
                "--param {name}: the recipe has no param '{name}' (there are {list}){near}\n  \
                 hint: --param NAME names the param that is the number of samples of a batch"
            )))
        }
    }
}

/// Returns the bytes that a step may take.
fn memory(args: &BatchArgs, device: &Arc<dyn Backend>) -> Result<usize, Failure> {
    if let Some(bytes) = args.memory {
        return Ok(bytes);
    }
    if let Some(bytes) = device.memory().limit {
        let own = if device.name() == "cpu" { 0 } else { crate::target::OVERHEAD };
        return Ok(bytes.saturating_sub(own));
    }
    let free = host_memory::available().map(|bytes| bytes / 100 * host_memory::SHARE);
    free.ok_or_else(|| Failure::Usage("the free memory of this machine is unknown; give --memory BYTES".into()))
}

/// Takes one step on the device; a batch that does not fit after all is reduced by an eighth until one does.
fn confirm(args: &BatchArgs, found: u64, set_to: &impl Fn(u64) -> Vec<(String, String)>) -> Result<u64, Failure> {
    let mut batch = found;
    loop {
        let step = || -> Result<(), Failure> {
            let opened = load(&args.recipe, &set_to(batch), &args.device, &args.files, args.device.open()?)?;
            let run = opened.recipe.start(None, args.device.precision.as_deref(), args.device.memory_budget)?;
            run.read(&run.step()?)?;
            Ok(())
        };
        match step() {
            Ok(()) => return Ok(batch),
            // Memory: the only failure of a device that a smaller batch mends.
            Err(failure) if failure.status() == 1 && batch > 1 => batch -= (batch / 8).max(1),
            Err(failure) => return Err(failure),
        }
    }
}
