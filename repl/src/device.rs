//! `--device`, `--precision`, `--threads`: from words to a backend.

use crate::failure::Failure;
use perilune_cpu::Cpu;
use std::rc::Rc;

#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    /// Where to compute: cpu, cuda, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// f32; tf32, bf16 and fp16 need a GPU
    #[arg(long, value_name = "PRECISION", default_value = "f32")]
    pub precision: String,
    /// CPU threads; as many as there are cores by default. Results do not depend on it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// More threads than any machine has; a slip of the finger is more likely.
const MOST_THREADS: usize = 1024;

impl DeviceArgs {
    pub fn open(&self) -> Result<Rc<Cpu>, Failure> {
        let no = |text: String| Err(Failure::Usage(text));
        match self.device.as_str() {
            "cpu" | "auto" => {}
            d if d == "cuda" || d.strip_prefix("cuda:").is_some_and(is_list) => {
                return no(format!(
                    "--device {d}: this version runs on the CPU only; CUDA comes in a later one (use --device cpu)"
                ));
            }
            d => return no(format!("--device {d}: there is no such device; it is one of cpu, cuda, cuda:N, auto")),
        }
        match self.precision.as_str() {
            "f32" => {}
            p @ ("tf32" | "bf16" | "fp16") => {
                return no(format!(
                    "--precision {p}: this version trains in f32 only; mixed precision comes in a later one"
                ));
            }
            p => return no(format!("--precision {p}: there is no such precision; it is one of f32, tf32, bf16, fp16")),
        }
        match self.threads {
            Some(n) if n == 0 || n > MOST_THREADS => no(format!("--threads {n}: it must be from 1 to {MOST_THREADS}")),
            n => Ok(Rc::new(Cpu::new(n))),
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
