//! `--device`, `--precision`, `--threads`: from words to a backend.

use crate::failure::Failure;
use perilune_core::byte_size::amount;
use perilune_cpu::Cpu;
use perilune_cuda::Cuda;
use perilune_plan::Backend;
use std::rc::Rc;

/// Where to compute, and nothing about what.
#[derive(clap::Args, Clone, Debug)]
pub struct PlaceArgs {
    /// Where to compute: cpu, cuda, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// CPU threads; as many as there are cores by default. Results do not depend on it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    /// f32, tf32, bf16, fp16 or fp8: what matmuls, convolutions and attention compute in [default: what the recipe says, else f32]
    #[arg(long, value_name = "PRECISION")]
    pub precision: Option<String>,
    /// What a training step may take, as in 20GiB: more is recomputed, or an error [default: what the recipe says]
    #[arg(long, value_name = "BYTES", value_parser = amount)]
    pub memory_budget: Option<usize>,
}

/// More threads than any machine has; a slip of the finger is more likely.
const MOST_THREADS: usize = 1024;

impl DeviceArgs {
    pub fn threads(&self) -> usize {
        self.place.threads()
    }

    pub fn open(&self) -> Result<Rc<dyn Backend>, Failure> {
        match self.precision.as_deref().unwrap_or("f32") {
            "f32" | "tf32" | "bf16" | "fp16" | "fp8" => self.place.open(),
            p => Err(Failure::Usage(format!(
                "--precision {p}: there is no such precision; it is one of f32, tf32, bf16, fp16, fp8"
            ))),
        }
    }
}

impl PlaceArgs {
    /// CPU threads that were asked for, or all there are.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// `auto` is the first GPU if its libraries are there, else the CPU. What the environment says is looked at too: a word
    /// that a switch does not take is an error here, before anything reads it.
    pub fn open(&self) -> Result<Rc<dyn Backend>, Failure> {
        let no = |text: String| Err(Failure::Usage(text));
        if let Err(e) = perilune_core::env_flags::check() {
            return no(e.to_string());
        }
        if let Some(n) = self.threads.filter(|n| *n == 0 || *n > MOST_THREADS) {
            return no(format!("--threads {n}: it must be from 1 to {MOST_THREADS}"));
        }
        let limit = match std::env::var("PERILUNE_MEMORY_LIMIT") {
            Ok(text) => match amount(&text) {
                Ok(n) => Some(n),
                Err(e) => return no(format!("PERILUNE_MEMORY_LIMIT: {e}")),
            },
            Err(_) => None,
        };
        let cpu = || Rc::new(Cpu::limited(self.threads, limit));
        match self.device.as_str() {
            "cpu" => Ok(cpu()),
            "auto" => Ok(Cuda::new(0).map_or_else(|_| cpu() as Rc<dyn Backend>, |gpu| Rc::new(gpu))),
            d if d.contains(',') && d.strip_prefix("cuda:").is_some_and(is_list) => {
                no(format!("--device {d}: this version computes on one GPU; several come in a later one"))
            }
            d if d == "cuda" || d.strip_prefix("cuda:").is_some_and(is_list) => match Cuda::named(d) {
                Ok(gpu) => Ok(Rc::new(gpu)),
                // The message without the op, which is the device's name once more.
                Err(e) => {
                    Err(Failure::System(format!("--device {d}: {}", perilune_core::Error { op: String::new(), ..e })))
                }
            },
            d => no(format!("--device {d}: there is no such device; it is one of cpu, cuda, cuda:N, auto")),
        }
    }
}

/// `0` or `0,1`.
fn is_list(text: &str) -> bool {
    !text.is_empty() && text.split(',').all(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()))
}

/// A `key=value` of the command line.
pub fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_string(), value.to_string())),
        _ => Err(format!("write it as {}=VALUE", if text.is_empty() { "KEY" } else { text.trim_matches('=') })),
    }
}
