//! `perilune submit`: writes the job file for a cluster engine, and nothing else.

use crate::console_out;
use crate::failure::{Failure, plain};
use perilune_dist::submit::Submission;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Engine {
    Slurm,
    K8s,
}

#[derive(clap::Args, Debug)]
pub struct SubmitArgs {
    /// What the file is for: sbatch (slurm) or kubectl apply (k8s)
    #[arg(long, value_name = "slurm|k8s", hide_possible_values = true)]
    engine: Engine,
    /// The name of the job [default: that of the recipe]
    #[arg(long)]
    name: Option<String>,
    /// The number of hosts
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: usize,
    /// GPUs of each host; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0)]
    gpus_per_node: usize,
    /// Processes of each host; one drives all its GPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    processes_per_node: usize,
    /// Slurm: the time limit, such as 24:00:00
    #[arg(long)]
    time: Option<String>,
    /// Slurm: the partition
    #[arg(long)]
    partition: Option<String>,
    /// Kubernetes: the container image, with perilune on its path
    #[arg(long)]
    image: Option<String>,
    /// Kubernetes: the claim of a volume that all pods share, for the recipe and its runs
    #[arg(long, value_name = "CLAIM")]
    volume: Option<String>,
    /// Kubernetes: how often pods may fail
    #[arg(long, value_name = "K", default_value_t = 6)]
    max_restarts: usize,
    /// Write a new file instead of printing
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The command of the job, such as: run recipe.lua --mesh dp=16
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The name of a job for these arguments: the recipe's, in lower case.
fn name_of(command: &[String]) -> String {
    let recipe = command.iter().find(|word| word.ends_with(".lua"));
    let stem = recipe.and_then(|path| Path::new(path).file_stem()).unwrap_or_default().to_string_lossy().to_lowercase();
    let name: String = stem.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    let name = name.trim_matches('-');
    if name.is_empty() { "perilune".into() } else { name.into() }
}

/// Prints or writes the file.
pub fn submit(args: SubmitArgs) -> Result<(), Failure> {
    let job = Submission {
        name: args.name.unwrap_or_else(|| name_of(&args.command)),
        nodes: args.nodes,
        processes_per_node: args.processes_per_node,
        gpus_per_node: args.gpus_per_node,
        time: args.time,
        partition: args.partition,
        image: args.image,
        volume: args.volume,
        max_restarts: args.max_restarts,
        args: args.command,
    };
    let text = match args.engine {
        Engine::Slurm => job.slurm(),
        Engine::K8s => job.kubernetes(),
    };
    let text = text.map_err(|e| Failure::Usage(perilune_core::Error { op: String::new(), ..e }.to_string()))?;
    let Some(path) = args.output else { return console_out::say(text.trim_end()) };
    let written = std::fs::File::create_new(&path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| Failure::System(format!("cannot write {}: {}", path.display(), plain(&e))))?;
    let start = if args.engine == Engine::Slurm { "sbatch" } else { "kubectl apply -f" };
    console_out::say(&format!("{} is ready. Next: {start} {}", path.display(), path.display()))
}
