//! `perilune launch`: runs a command in several processes on this host.

use crate::console_out;
use crate::failure::Failure;
use perilune_dist::launch::{Launch, launch as start};
use perilune_dist::rendezvous::{self, Address, Explicit, Place, Source, process_env};
use std::ffi::OsString;

#[derive(clap::Args, Debug)]
pub struct LaunchArgs {
    /// The number of processes on this host [default: PET_NPROC_PER_NODE]
    #[arg(short = 'n', long, value_name = "N")]
    processes: Option<usize>,
    /// When a process fails, start all again from the last checkpoint, at most K times
    #[arg(long, value_name = "K", default_value_t = 0)]
    max_restarts: usize,
    /// The number of hosts, each with a launcher [default: PET_NNODES, those of a Slurm step, or 1]
    #[arg(long, value_name = "N", requires = "node_rank")]
    nodes: Option<usize>,
    /// Which of the hosts this is, from 0 [default: PET_NODE_RANK, or that of a Slurm step]
    #[arg(long, value_name = "N", requires = "nodes")]
    node_rank: Option<usize>,
    /// Where the first host's process 0 listens
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// The command of each process, such as: run recipe.lua --mesh dp=2
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The hosts of the job: their number, which of them this is, the address of the first, and the processes of each.
type Hosts = (usize, usize, Option<Address>, Option<usize>);

fn hosts(args: &LaunchArgs) -> Result<Hosts, Failure> {
    let usage = |e: perilune_core::Error| Failure::Usage(e.to_string());
    let nodes = rendezvous::nodes(&process_env).map_err(usage)?;
    let processes = nodes.as_ref().and_then(|nodes| nodes.processes);
    let (count, rank, mut address) = match (args.nodes, args.node_rank, nodes) {
        (Some(count), Some(rank), _) => (count, rank, None),
        (_, _, Some(nodes)) => (nodes.count, nodes.rank, nodes.address.filter(|_| nodes.count > 1)),
        _ => {
            let place = rendezvous::find(&Explicit::default(), &process_env).map_err(usage)?;
            let Place { rank, processes, local_processes, source, .. } = place;
            if source == Source::Torchrun || local_processes > 1 {
                let message = format!("this process has been started by a launcher itself, as {place}");
                return Err(Failure::Usage(format!("{message}; run the command without `perilune launch`")));
            }
            (processes, rank, place.address)
        }
    };
    if let Some(text) = &args.master {
        let message = || Failure::Usage(format!("--master {text}: write it as HOST:PORT, such as node1:29500"));
        address = Some(Address::parse(text).ok_or_else(message)?);
    }
    Ok((count, rank, address, processes))
}

/// Starts the processes and waits for them. The exit status is that of the first one that failed.
pub fn launch(args: LaunchArgs) -> Result<(), Failure> {
    let (nodes, node_rank, address, known) = hosts(&args)?;
    let Some(processes) = args.processes.or(known) else {
        return Err(Failure::Usage(
            "launch needs the number of processes: perilune launch -n 2 -- run recipe.lua".into(),
        ));
    };
    let program = std::env::current_exe().map_err(|e| Failure::System(format!("cannot find this program: {e}")))?;
    let max_restarts = args.max_restarts;
    let spec = Launch { program, args: args.command, processes, max_restarts, nodes, node_rank, address };
    let outcome = start(&spec, |text| console_out::complain("warning", text)).map_err(|e| match e.kind {
        perilune_core::error::Kind::Argument => Failure::Usage(e.message),
        _ => Failure::System(e.message),
    })?;
    if !outcome.message.is_empty() {
        console_out::complain("error", &outcome.message);
    }
    if outcome.status == 0 { Ok(()) } else { Err(Failure::Said(outcome.status)) }
}
