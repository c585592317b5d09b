//! Finds the place of this process in a job of several, joins the job, and ends with it.

use crate::console_out;
use crate::failure::Failure;
use perilune_dist::launch::{RESTART, end_with_launcher, record_failure};
use perilune_dist::links::{Links, Options};
use perilune_dist::rendezvous::{self, Explicit, Place, process_env};
use std::sync::Arc;

/// The place of this process, where no launcher's variables say it.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Several processes (by default a launcher's variables decide)")]
pub struct JobArgs {
    /// The rank of this process among all
    #[arg(long, value_name = "N", requires = "world_size")]
    rank: Option<usize>,
    /// The number of processes
    #[arg(long, value_name = "N", requires = "rank")]
    world_size: Option<usize>,
    /// The rank of this process among those of its host
    #[arg(long, value_name = "N", requires = "local_world_size")]
    local_rank: Option<usize>,
    /// The number of processes of its host
    #[arg(long, value_name = "N", requires = "local_rank")]
    local_world_size: Option<usize>,
    /// Where the process of rank 0 listens
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
}

fn usage(e: perilune_core::Error) -> Failure {
    Failure::Usage(perilune_core::Error { op: String::new(), ..e }.to_string())
}

impl JobArgs {
    /// Finds the place of this process.
    pub fn place(&self) -> Result<Place, Failure> {
        let explicit = Explicit {
            rank: self.rank,
            processes: self.world_size,
            local_rank: self.local_rank,
            local_processes: self.local_world_size,
            address: self.master.clone(),
        };
        rendezvous::find(&explicit, &process_env).map_err(usage)
    }
}

/// A process among those of its job, connected to all others.
#[derive(Clone, Debug)]
pub struct Job {
    pub place: Place,
    pub links: Arc<Links>,
}

impl Job {
    /// A process without others.
    pub fn alone() -> Result<Job, Failure> {
        Job::join(Place::alone(), &[])
    }

    /// Connects to the other processes, and waits until all are there. `terms` have to be the same in all of them.
    pub fn join(place: Place, terms: &[(&str, String)]) -> Result<Job, Failure> {
        if place.processes > 1 && !end_with_launcher(&process_env) {
            return Err(Failure::System("the launcher of this process has ended".into()));
        }
        let joined = Links::join(&place, terms, options()?);
        let links = joined.map_err(|e| {
            let failure = Failure::System(e.to_string());
            record_failure(&process_env, &failure.message());
            failure
        })?;
        Ok(Job { place, links: Arc::new(links) })
    }

    /// Whether this process prints, and writes the run directory.
    pub fn is_first(&self) -> bool {
        self.place.rank == 0
    }

    pub fn has_several(&self) -> bool {
        self.place.processes > 1
    }

    /// Ends the connections with the result of this process. If another process failed first, its error is the result.
    pub fn end(&self, result: Result<(), Failure>) -> Result<(), Failure> {
        if !self.has_several() {
            return result;
        }
        let failure = match result {
            Ok(()) | Err(Failure::Signal(_)) => {
                // A failure in the last moment is one all the same.
                let finished = self.links.finish();
                return finished.map_err(|_| self.failed_elsewhere()).and(result);
            }
            Err(failure) => failure,
        };
        let text = failure.message();
        let cause = self.links.abort(failure.status(), &text);
        if cause.rank == self.place.rank && cause.raised {
            record_failure(&process_env, &text);
            return Err(failure);
        }
        Err(self.failed_elsewhere())
    }

    /// The failure of another process: its error and exit status. A process that has disappeared may be started again: the others ask
    /// for it by their exit status.
    fn failed_elsewhere(&self) -> Failure {
        let Some(cause) = self.links.cause() else { return Failure::System("the job has failed".into()) };
        let status = if cause.raised { cause.status } else { RESTART };
        let text = self.links.message(&cause);
        if !cause.raised {
            // No other process knows why the job ends.
            record_failure(&process_env, &text);
        }
        console_out::complain("error", &text);
        Failure::Said(status)
    }
}

/// The times of the connections. Tests shorten the time after which a silent process counts as lost.
fn options() -> Result<Options, Failure> {
    let mut options = Options::default();
    if let Some(text) = process_env("PERILUNE_SILENCE") {
        let seconds = text.parse::<f64>().ok().filter(|s| (1.0..=3600.0).contains(s));
        let rule = || Failure::Usage(format!("PERILUNE_SILENCE={text}: it must be from 1 to 3600 seconds"));
        options.silence = std::time::Duration::from_secs_f64(seconds.ok_or_else(rule)?);
    }
    Ok(options)
}
