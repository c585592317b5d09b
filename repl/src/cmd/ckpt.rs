//! `perilune ckpt`: lists, inspects, compares, verifies and exports checkpoints. Every command but `list` reads them whole and
//! checks their hashes.

use crate::console_out::say;
use crate::failure::Failure;
use crate::format::{bytes, grouped, short};
use perilune_checkpoint::{Found, RECORD, SHARD_LIMIT, Snapshot, about, list, read};
use perilune_core::{DType, HostTensor};
use perilune_data::shards;
use perilune_train::history::dir_of;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(clap::Subcommand, Debug)]
pub enum CkptArgs {
    /// List the checkpoints of a run: step, size, metrics
    List {
        /// The run directory
        run_dir: PathBuf,
    },
    /// Show every tensor with dtype, shape and norm, and the contents of run.json
    Inspect {
        /// A checkpoint (…/step-N), or a run directory for its last checkpoint
        checkpoint: PathBuf,
    },
    /// Show the tensors that differ between two checkpoints, with the norm of the change
    Diff {
        /// A checkpoint (…/step-N), or a run directory for its last checkpoint
        first: PathBuf,
        /// The other checkpoint
        second: PathBuf,
    },
    /// Read checkpoints and verify every hash and rule
    Verify {
        /// Checkpoints (…/step-N); a run directory stands for all of its checkpoints
        #[arg(required = true)]
        checkpoints: Vec<PathBuf>,
    },
    /// Write the weights as a safetensors file
    Export {
        /// A checkpoint (…/step-N), or a run directory for its last checkpoint
        checkpoint: PathBuf,
        /// The output file; its name must end in .safetensors
        out: PathBuf,
        /// f32, bf16, f16 or f64 for all float tensors [default: unchanged]
        #[arg(long)]
        dtype: Option<String>,
        /// Split larger files into shards with an index (5GB, 500MB, …)
        #[arg(long, value_name = "SIZE", value_parser = crate::retention::size, default_value_t = SHARD_LIMIT, hide_default_value = true)]
        shard_size: u64,
    },
}

/// Runs one of the commands.
pub fn ckpt(args: &CkptArgs) -> Result<(), Failure> {
    match args {
        CkptArgs::List { run_dir } => say(&listing(run_dir)?),
        CkptArgs::Inspect { checkpoint } => say(&inspect(&find(checkpoint)?)?),
        CkptArgs::Diff { first, second } => say(&diff(&read(&find(first)?)?, &read(&find(second)?)?)),
        CkptArgs::Verify { checkpoints } => verify(checkpoints),
        CkptArgs::Export { checkpoint, out, dtype, shard_size } => {
            export(&find(checkpoint)?, out, dtype.as_deref(), *shard_size)
        }
    }
}

fn all_of(run_dir: &Path) -> Result<Vec<Found>, Failure> {
    let found = list(&run_dir.join("checkpoints"))?;
    if found.is_empty() {
        return Err(Failure::Usage(format!("there is no checkpoint in {}", run_dir.join("checkpoints").display())));
    }
    Ok(found)
}

/// Returns a checkpoint, or the last one of a run.
fn find(path: &Path) -> Result<PathBuf, Failure> {
    let is_checkpoint = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("step-"));
    if is_checkpoint && path.join(RECORD).exists() {
        return Ok(path.to_path_buf());
    }
    if path.join("checkpoints").is_dir() {
        return Ok(all_of(path)?.pop().map(|f| f.path).unwrap_or_default());
    }
    Err(Failure::Usage(format!("{} is neither a checkpoint (…/step-N) nor a run directory", path.display())))
}

/// Verifies all of them. The error of the last broken one is returned; those of the others are printed.
fn verify(paths: &[PathBuf]) -> Result<(), Failure> {
    let mut broken: Option<Failure> = None;
    for path in paths {
        let found = find(path)?;
        let all = if found.starts_with(path.join("checkpoints")) {
            all_of(path)?.into_iter().map(|f| f.path).collect()
        } else {
            vec![found]
        };
        for path in all {
            match read(&path) {
                Ok(s) => say(&format!("{}: valid, {} tensors\n", path.display(), s.model.len() + s.optimizer.len()))?,
                Err(e) => {
                    if let Some(before) = broken.replace(e.into()) {
                        before.show();
                    }
                }
            }
        }
    }
    broken.map_or(Ok(()), Err)
}

fn size_of(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|e| Some(e.metadata().ok()?.len())).sum()
}

fn listing(run_dir: &Path) -> Result<String, Failure> {
    let mut out = String::new();
    for f in all_of(run_dir)? {
        let said = match about(&f.path) {
            Ok(record) => {
                let metrics = record.get("metrics").and_then(Value::as_object).into_iter().flatten();
                let one = |(k, v): (&String, &Value)| Some(format!("{k} {}", short(v.as_f64()?)));
                metrics.filter_map(one).collect::<Vec<_>>().join(" · ")
            }
            Err(e) => format!("broken: {e}"),
        };
        let size = bytes(size_of(&f.path) as usize);
        let _ = writeln!(out, "step {:>8}  {size:>10}  {}  {said}", grouped(f.step), f.path.display());
    }
    Ok(out)
}

fn norm(t: &HostTensor) -> f64 {
    (0..t.numel()).map(|i| t.get_f64(i).powi(2)).sum::<f64>().sqrt()
}

fn inspect(path: &Path) -> Result<String, Failure> {
    let s = read(path)?;
    let mut out = format!("{}: step {}\n", path.display(), grouped(s.step));
    for (key, value) in &s.record {
        let _ = writeln!(out, "  {key} {value}");
    }
    for (title, tensors) in [("weights", &s.model), ("other States", &s.optimizer)] {
        let numbers: usize = tensors.iter().map(|t| t.1.numel()).sum();
        let size: usize = tensors.iter().map(|t| t.1.bytes.len()).sum();
        let _ =
            writeln!(out, "{title}: {} tensors, {} numbers, {}", tensors.len(), grouped(numbers as u64), bytes(size));
        for (path, t) in tensors {
            let _ =
                writeln!(out, "  {path:<40} {:<5} {:<20} norm {}", t.dtype.name(), t.shape.to_string(), short(norm(t)));
        }
    }
    Ok(out)
}

fn by_path(s: &Snapshot) -> BTreeMap<&str, &HostTensor> {
    s.model.iter().chain(&s.optimizer).map(|(path, t)| (path.as_str(), t)).collect()
}

/// Returns the sum of squared differences and the largest difference of tensors of one shape.
fn change(a: &HostTensor, b: &HostTensor) -> (f64, f64) {
    let each = (0..a.numel()).map(|i| (b.get_f64(i) - a.get_f64(i)).abs());
    each.fold((0.0, 0.0), |(sum, most), d| (sum + d * d, if d > most || d.is_nan() { d } else { most }))
}

fn diff(a: &Snapshot, b: &Snapshot) -> String {
    let (x, y) = (by_path(a), by_path(b));
    let mut out = format!("step {} and step {}\n", grouped(a.step), grouped(b.step));
    let mut same = 0;
    for (path, s) in &x {
        let _ = match y.get(path) {
            None => writeln!(out, "  {path:<40} only in the first: {} {}", s.dtype, s.shape),
            Some(t) if s.shape != t.shape || s.dtype != t.dtype => {
                writeln!(out, "  {path:<40} {} {} became {} {}", s.dtype, s.shape, t.dtype, t.shape)
            }
            Some(t) if s.bytes == t.bytes => {
                same += 1;
                Ok(())
            }
            Some(t) => {
                let (sum, most) = change(s, t);
                let of = norm(s);
                writeln!(
                    out,
                    "  {path:<40} norm {}, changed by {} (largest {})",
                    short(of),
                    short(sum.sqrt()),
                    short(most)
                )
            }
        };
    }
    for (path, t) in y.iter().filter(|(path, _)| !x.contains_key(*path)) {
        let _ = writeln!(out, "  {path:<40} only in the second: {} {}", t.dtype, t.shape);
    }
    let _ = writeln!(out, "{same} of {} tensors are equal", x.len());
    out
}

fn export(checkpoint: &Path, out: &Path, dtype: Option<&str>, shard_size: u64) -> Result<(), Failure> {
    let to = match dtype.map(|d| (d, DType::parse(d))) {
        None => None,
        Some((_, Some(d))) if d.is_float() => Some(d),
        Some((d, _)) => {
            return Err(Failure::Usage(format!("--dtype {d}: it must be one of f32, bf16, f16, f64")));
        }
    };
    let mut tensors = read(checkpoint)?.model;
    for (_, t) in &mut tensors {
        if let Some(to) = to.filter(|d| *d != t.dtype && t.dtype.is_float()) {
            *t = HostTensor::from_f64(to, t.shape, &t.to_f64());
        }
    }
    let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let name = out.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(stem) = name.strip_suffix(".safetensors") else {
        return Err(Failure::Usage(format!("{}: the name must end in .safetensors", out.display())));
    };
    let dir = dir_of(out);
    let names = shards::save(&dir, stem, &tensors, &format, shard_size).map_err(perilune_checkpoint::Error::from)?;
    let last = names.last().map(|n| out.with_file_name(n)).unwrap_or_default();
    let files = if names.len() > 1 { format!(" in {} files", names.len() - 1) } else { String::new() };
    say(&format!(
        "{}: {} tensors{files}, {}\n",
        last.display(),
        tensors.len(),
        bytes(tensors.iter().map(|t| t.1.bytes.len()).sum())
    ))
}
