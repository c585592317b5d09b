//! Finds the place of this process among those that a launcher started: its rank, their number, and the address of rank 0.
//!
//! Launchers describe a process by environment variables. The first kind found decides: values given explicitly (flags), the
//! variables of torchrun, PET variables (Kubeflow), a Slurm step, OpenMPI, MPICH and Intel MPI, an indexed job of Kubernetes.
//! Without any the process is alone. [`find`] reads variables only through a function, so every rule is tested as such.

use crate::host_list;
use perilune_core::error::{Error, Result};
use std::fmt;

/// Reads an environment variable.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the variables of this process. A variable that is not UTF-8 counts as malformed text, not as absent.
pub fn process_env(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// What described the place of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    Flags,
    Torchrun,
    Pet,
    Slurm,
    OpenMpi,
    Pmi,
    Kubernetes,
    Alone,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Flags => "flags",
            Source::Torchrun => "torchrun variables (RANK, WORLD_SIZE)",
            Source::Pet => "PET variables (PET_NODE_RANK, PET_NNODES)",
            Source::Slurm => "a Slurm step (SLURM_PROCID, SLURM_NTASKS)",
            Source::OpenMpi => "OpenMPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
            Source::Pmi => "MPICH or Intel MPI (PMI_RANK, PMI_SIZE)",
            Source::Kubernetes => "an indexed job of Kubernetes (JOB_COMPLETION_INDEX, WORLD_SIZE)",
            Source::Alone => "no launcher",
        })
    }
}

/// Where the process of rank 0 listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address {
    pub host: String,
    pub port: u16,
}

impl Address {
    /// Parses `HOST:PORT`, or `[IPv6]:PORT`.
    pub fn parse(text: &str) -> Option<Address> {
        let (host, port) = text.trim().rsplit_once(':')?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        let port = port.parse().ok().filter(|p| *p > 0)?;
        (is_host(bare) && bare.contains(':') == (bare != host)).then(|| Address { host: bare.into(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// A process among those of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    pub rank: usize,
    pub processes: usize,
    /// The rank among the processes of this host.
    pub local_rank: usize,
    pub local_processes: usize,
    /// Where rank 0 listens; `None` for a single process.
    pub address: Option<Address>,
    pub source: Source,
    /// How often the launcher has restarted the job.
    pub attempt: usize,
    /// The launcher's name for the job; empty if it has none. Processes of different jobs do not connect.
    pub job: String,
}

impl Place {
    /// A process without others.
    pub fn alone() -> Place {
        Place {
            rank: 0,
            processes: 1,
            local_rank: 0,
            local_processes: 1,
            address: None,
            source: Source::Alone,
            attempt: 0,
            job: String::new(),
        }
    }

    /// Whether all processes are on this host.
    pub fn one_host(&self) -> bool {
        self.local_processes == self.processes
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { rank, processes, local_rank, local_processes, source, .. } = self;
        if *source == Source::Alone {
            return f.write_str("alone: no launcher");
        }
        write!(f, "rank {rank} of {processes}, {local_rank} of {local_processes} on this host, from {source}")?;
        if let Some(address) = &self.address {
            write!(f, "; rank 0 listens on {address}")?;
        }
        if self.attempt > 0 { write!(f, "; restart {}", self.attempt) } else { Ok(()) }
    }
}

/// What the command line says about the place: `--rank`, `--world-size`, `--local-rank`, `--local-world-size`, `--master`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Explicit {
    pub rank: Option<usize>,
    pub processes: Option<usize>,
    pub local_rank: Option<usize>,
    pub local_processes: Option<usize>,
    /// `HOST:PORT` of rank 0.
    pub address: Option<String>,
}

/// The nodes of a job as the PET variables describe them. `perilune launch` starts the processes of one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nodes {
    pub count: usize,
    pub rank: usize,
    /// Processes of each node; `None` if the variable says that the devices decide.
    pub processes: Option<usize>,
    pub address: Option<Address>,
}

/// The port of rank 0 where neither a variable nor a job's name decides.
const DEFAULT_PORT: u16 = 29500;

/// The variables that name the values of a place, for messages.
struct Names {
    rank: &'static str,
    processes: &'static str,
    local_rank: &'static str,
    local_processes: &'static str,
}

fn wrong(name: &str, value: &str, rule: impl fmt::Display, cure: impl Into<String>) -> Error {
    Error::argument("rendezvous", format!("{name}={value}: {rule}")).hint(cure)
}

/// Whether the text can be the name or address of a host.
fn is_host(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    !text.is_empty() && text.len() <= 255 && text.chars().all(allowed)
}

struct Vars<'a>(Env<'a>);

impl Vars<'_> {
    /// The value of a variable; an empty one counts as absent.
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let digits = text.chars().all(|c| c.is_ascii_digit());
        match text.parse().ok().filter(|n: &usize| digits && *n <= 1 << 20) {
            Some(n) => Ok(Some(n)),
            None => {
                let rule = "not a whole number from 0 to 1048576";
                Err(wrong(name, &text, rule, format!("set {name} to such a number, or unset the launcher's variables")))
            }
        }
    }

    /// A number that has to be set where `because` is.
    fn needed(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| self.missing(name, because))
    }

    fn missing(&self, name: &str, because: &str) -> Error {
        let value = self.text(because).unwrap_or_default();
        let cure = format!("set {name} as well, or unset {because} to run one process");
        wrong(because, &value, format!("{name} is not set; a process needs both"), cure)
    }

    fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let port = text.parse().ok().filter(|p| *p > 0);
        let wrong =
            || wrong(name, &text, "not a port (1 to 65535)", format!("set {name} to a free port of rank 0's host"));
        port.map(Some).ok_or_else(wrong)
    }

    fn host(&self, name: &str) -> Result<Option<String>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        if is_host(&text) {
            return Ok(Some(text));
        }
        Err(wrong(name, &text, "not the name or address of a host", format!("set {name} to the host of rank 0")))
    }

    /// The address in `MASTER_ADDR` and `MASTER_PORT`, or what `host` and `job` say where they are not set.
    fn address(&self, processes: usize, host: impl FnOnce() -> Result<String>, job: &str) -> Result<Option<Address>> {
        let (given, port) = (self.host("MASTER_ADDR")?, self.port("MASTER_PORT")?);
        if processes <= 1 {
            return Ok(None);
        }
        let host = given.map_or_else(host, Ok)?;
        Ok(Some(Address { host, port: port.unwrap_or_else(|| job_port(job)) }))
    }

    /// Where processes of several hosts find rank 0 if nothing says it.
    fn no_address(&self, name: &str, cure: &str) -> Error {
        let value = self.text(name).unwrap_or_default();
        wrong(name, &value, "several processes need MASTER_ADDR, the host of rank 0, which is not set", cure)
    }
}

/// A port for a job: the same in all its processes, and most likely another one for another job.
fn job_port(job: &str) -> u16 {
    if job.is_empty() {
        return DEFAULT_PORT;
    }
    let hash = job.bytes().fold(0x811c_9dc5u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    20000 + (hash % 10000) as u16
}

/// Checks the numbers of a place against each other.
fn checked(place: Place, names: &Names) -> Result<Place> {
    let Place { rank, processes, local_rank, local_processes, .. } = place;
    let less = |name: &str, value: usize, of: &str, limit: usize| {
        let rule = format!("not less than {of}={limit}; ranks count from 0");
        Err(wrong(
            name,
            &value.to_string(),
            rule,
            format!("set {name} to a number from 0 to {}", limit.saturating_sub(1)),
        ))
    };
    for (name, value) in [(names.processes, processes), (names.local_processes, local_processes)] {
        if value == 0 {
            return Err(wrong(
                name,
                "0",
                "there is at least 1 process",
                format!("set {name} to the number of processes"),
            ));
        }
    }
    if rank >= processes {
        return less(names.rank, rank, names.processes, processes);
    }
    if local_rank >= local_processes {
        return less(names.local_rank, local_rank, names.local_processes, local_processes);
    }
    if local_processes > processes {
        let rule = format!("more processes on this host than {}={processes} in all", names.processes);
        let cure = format!("set {} to the number of processes of one host", names.local_processes);
        return Err(wrong(names.local_processes, &local_processes.to_string(), rule, cure));
    }
    Ok(place)
}

/// Finds the place of this process.
pub fn find(explicit: &Explicit, env: Env) -> Result<Place> {
    let vars = Vars(env);
    let mut place = match (explicit.rank, explicit.processes) {
        (Some(rank), Some(processes)) => return flags(explicit, &vars, rank, processes),
        (Some(rank), None) => {
            return Err(wrong("--rank", &rank.to_string(), "--world-size is not given", "give both, or neither"));
        }
        (None, Some(n)) => {
            return Err(wrong("--world-size", &n.to_string(), "--rank is not given", "give both, or neither"));
        }
        (None, None) => from_env(&vars)?,
    };
    if let Some(text) = &explicit.address {
        let address = explicit_address(text)?;
        place.address = (place.processes > 1).then_some(address);
    }
    if explicit.local_rank.is_some() || explicit.local_processes.is_some() {
        (place.local_rank, place.local_processes) = explicit_local(explicit)?;
        place = checked(place, &FLAG_NAMES)?;
    }
    Ok(place)
}

const FLAG_NAMES: Names = Names {
    rank: "--rank",
    processes: "--world-size",
    local_rank: "--local-rank",
    local_processes: "--local-world-size",
};

fn explicit_address(text: &str) -> Result<Address> {
    Address::parse(text).ok_or_else(|| {
        wrong("--master", text, "not an address HOST:PORT", "write it as node1:29500, or [fd00::1]:29500 for IPv6")
    })
}

fn explicit_local(explicit: &Explicit) -> Result<(usize, usize)> {
    match (explicit.local_rank, explicit.local_processes) {
        (Some(rank), Some(processes)) => Ok((rank, processes)),
        (None, None) => Ok((0, 1)),
        (Some(rank), None) => {
            Err(wrong("--local-rank", &rank.to_string(), "--local-world-size is not given", "give both, or neither"))
        }
        (None, Some(n)) => {
            Err(wrong("--local-world-size", &n.to_string(), "--local-rank is not given", "give both, or neither"))
        }
    }
}

/// A place given by flags. Without local ones the process is the only one of its host.
fn flags(explicit: &Explicit, vars: &Vars, rank: usize, processes: usize) -> Result<Place> {
    let (local_rank, local_processes) = explicit_local(explicit)?;
    let address = match &explicit.address {
        Some(text) => Some(explicit_address(text)?).filter(|_| processes > 1),
        None => {
            let none = || {
                let rule = "several processes need the address of rank 0";
                Err(wrong("--world-size", &processes.to_string(), rule, "add --master HOST:PORT, or set MASTER_ADDR"))
            };
            vars.address(processes, none, "")?
        }
    };
    let (source, job) = (Source::Flags, String::new());
    checked(Place { rank, processes, local_rank, local_processes, address, source, attempt: 0, job }, &FLAG_NAMES)
}

fn from_env(vars: &Vars) -> Result<Place> {
    type Finder = fn(&Vars) -> Result<Option<Place>>;
    let finders: [Finder; 6] = [torchrun, pet, slurm, open_mpi, pmi, kubernetes];
    for finder in finders {
        if let Some(place) = finder(vars)? {
            return Ok(place);
        }
    }
    match vars.number("WORLD_SIZE")? {
        None | Some(1) => Ok(Place::alone()),
        Some(_) => Err(vars.missing("RANK", "WORLD_SIZE")),
    }
}

/// Variables of torchrun, which many other launchers set too, some of them without those for a host.
fn torchrun(vars: &Vars) -> Result<Option<Place>> {
    if !vars.has("RANK") {
        return Ok(None);
    }
    let rank = vars.needed("RANK", "RANK")?;
    let processes = vars.needed("WORLD_SIZE", "RANK")?;
    let local = (vars.number("LOCAL_RANK")?, vars.number("LOCAL_WORLD_SIZE")?);
    let (local_rank, local_processes) = match local {
        (Some(rank), Some(processes)) => (rank, processes),
        (None, None) => (0, 1),
        (Some(0), None) if processes == 1 => (0, 1),
        (Some(_), None) => return Err(vars.missing("LOCAL_WORLD_SIZE", "LOCAL_RANK")),
        (None, Some(1)) => (0, 1),
        (None, Some(_)) => return Err(vars.missing("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    };
    let job = vars.text("TORCHELASTIC_RUN_ID").filter(|id| id != "none").unwrap_or_default();
    let no_host =
        || Err(vars.no_address("WORLD_SIZE", "set MASTER_ADDR and MASTER_PORT, or start the processes with torchrun"));
    let mut address = vars.address(processes, no_host, "")?;
    // The agent of torchrun listens on MASTER_PORT itself.
    let agent = vars.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "1" || v.eq_ignore_ascii_case("true"));
    if let Some(address) = address.as_mut().filter(|_| agent) {
        address.port = address.port.checked_add(1).ok_or_else(|| {
            let rule = "torchrun's agent listens on this port, and there is no port after it";
            wrong("MASTER_PORT", "65535", rule, "give torchrun another --master-port")
        })?;
    }
    let attempt = vars.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    let place = Place { rank, processes, local_rank, local_processes, address, source: Source::Torchrun, attempt, job };
    let names =
        Names { rank: "RANK", processes: "WORLD_SIZE", local_rank: "LOCAL_RANK", local_processes: "LOCAL_WORLD_SIZE" };
    checked(place, &names).map(Some)
}

/// The nodes that PET variables describe; `None` without them.
pub fn nodes(env: Env) -> Result<Option<Nodes>> {
    let vars = Vars(env);
    let Some(text) = vars.text("PET_NNODES") else { return Ok(None) };
    if text.contains(':') {
        let rule = "a range of node counts, which elastic jobs have";
        return Err(wrong("PET_NNODES", &text, rule, "set it to one number; a job is restarted with another one"));
    }
    let count = vars.needed("PET_NNODES", "PET_NNODES")?;
    if count == 0 {
        return Err(wrong("PET_NNODES", "0", "there is at least 1 node", "set PET_NNODES to the number of nodes"));
    }
    let rank = match vars.number("PET_NODE_RANK")? {
        Some(rank) => rank,
        None if count == 1 => 0,
        None => return Err(vars.missing("PET_NODE_RANK", "PET_NNODES")),
    };
    if rank >= count {
        let rule = format!("not less than PET_NNODES={count}; ranks count from 0");
        let cure = format!("set PET_NODE_RANK to a number from 0 to {}", count - 1);
        return Err(wrong("PET_NODE_RANK", &rank.to_string(), rule, cure));
    }
    let processes = match vars.text("PET_NPROC_PER_NODE").as_deref() {
        None | Some("auto" | "gpu") => None,
        Some("0") => {
            let rule = "there is at least 1 process on a node";
            return Err(wrong("PET_NPROC_PER_NODE", "0", rule, "set it to a number, or to gpu"));
        }
        Some(_) => vars.number("PET_NPROC_PER_NODE")?,
    };
    let address = match vars.host("PET_MASTER_ADDR")? {
        Some(host) => Some(Address { host, port: vars.port("PET_MASTER_PORT")?.unwrap_or(DEFAULT_PORT) }),
        None if count == 1 => None,
        None => return Err(vars.missing("PET_MASTER_ADDR", "PET_NNODES")),
    };
    Ok(Some(Nodes { count, rank, processes, address }))
}

/// A process for each node, which drives all devices of it. `perilune launch` starts several on a node.
fn pet(vars: &Vars) -> Result<Option<Place>> {
    let Some(nodes) = nodes(vars.0)? else { return Ok(None) };
    let address = nodes.address.filter(|_| nodes.count > 1);
    let attempt = vars.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    let place =
        Place { rank: nodes.rank, processes: nodes.count, address, source: Source::Pet, attempt, ..Place::alone() };
    Ok(Some(place))
}

/// A task of a Slurm step. The script of `sbatch` has some of the variables without being a task, and an interactive shell is
/// one, but not of a training job.
fn slurm(vars: &Vars) -> Result<Option<Place>> {
    let interactive = matches!(vars.text("SLURM_JOB_NAME").as_deref(), Some("bash" | "interactive"));
    let Some(hosts) = vars.text("SLURM_STEP_NODELIST").filter(|_| vars.has("SLURM_PROCID") && !interactive) else {
        return Ok(None);
    };
    let processes_name = if vars.has("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let rank = vars.needed("SLURM_PROCID", "SLURM_PROCID")?;
    let processes = vars.needed(processes_name, "SLURM_PROCID")?;
    // Under mpirun, the step's tasks are its daemons, and each process inherits the variables of one.
    for (rank_name, size_name) in [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")] {
        let inner = (vars.number(rank_name)?, vars.number(size_name)?);
        if matches!(inner, (Some(r), Some(n)) if (r, n) != (rank, processes)) {
            return Ok(None);
        }
    }
    let malformed = |name: &'static str, text: &str, rule: String| {
        wrong(name, text, rule, "start the processes with srun, or give --rank, --world-size and --master")
    };
    let first = host_list::first(&hosts).map_err(|rule| malformed("SLURM_STEP_NODELIST", &hosts, rule))?;
    let local_rank = vars.needed("SLURM_LOCALID", "SLURM_PROCID")?;
    let tasks_name = "SLURM_STEP_TASKS_PER_NODE";
    let local_processes = match vars.text(tasks_name).or_else(|| vars.text("SLURM_TASKS_PER_NODE")) {
        Some(text) => {
            let node = vars.needed("SLURM_NODEID", "SLURM_PROCID")?;
            host_list::tasks(&text, node).map_err(|rule| malformed(tasks_name, &text, rule))?
        }
        None if vars.number("SLURM_STEP_NUM_NODES")? == Some(1) => processes,
        None => return Err(vars.missing(tasks_name, "SLURM_PROCID")),
    };
    let step = vars.text("SLURM_STEP_ID").unwrap_or_default();
    let job = vars.text("SLURM_JOB_ID").map(|id| format!("slurm {id}.{step}")).unwrap_or_default();
    let host = if local_processes == processes { "127.0.0.1".to_string() } else { first };
    let address = vars.address(processes, || Ok(host), &job)?;
    let attempt = vars.number("SLURM_RESTART_COUNT")?.unwrap_or(0);
    let place = Place { rank, processes, local_rank, local_processes, address, source: Source::Slurm, attempt, job };
    let names = Names {
        rank: "SLURM_PROCID",
        processes: processes_name,
        local_rank: "SLURM_LOCALID",
        local_processes: tasks_name,
    };
    checked(place, &names).map(Some)
}

/// A process that an MPI launcher started; `names` are those of its variables.
fn mpi(vars: &Vars, source: Source, names: &Names, job: String, cure: &str) -> Result<Option<Place>> {
    if !vars.has(names.rank) {
        return Ok(None);
    }
    let rank = vars.needed(names.rank, names.rank)?;
    let processes = vars.needed(names.processes, names.rank)?;
    let (local_rank, local_processes) = match (vars.number(names.local_rank)?, vars.number(names.local_processes)?) {
        (None, None) if processes == 1 => (0, 1),
        (None, _) => return Err(vars.missing(names.local_rank, names.rank)),
        (_, None) => return Err(vars.missing(names.local_processes, names.rank)),
        (Some(rank), Some(processes)) => (rank, processes),
    };
    let host = || match local_processes == processes {
        true => Ok("127.0.0.1".to_string()),
        false => Err(vars.no_address(names.processes, cure)),
    };
    let address = vars.address(processes, host, &job)?;
    checked(Place { rank, processes, local_rank, local_processes, address, source, attempt: 0, job }, names).map(Some)
}

fn open_mpi(vars: &Vars) -> Result<Option<Place>> {
    let names = Names {
        rank: "OMPI_COMM_WORLD_RANK",
        processes: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_processes: "OMPI_COMM_WORLD_LOCAL_SIZE",
    };
    let job = vars.text("PMIX_NAMESPACE").or_else(|| vars.text("OMPI_MCA_ess_base_jobid")).unwrap_or_default();
    mpi(vars, Source::OpenMpi, &names, job, "start it with mpirun -x MASTER_ADDR=HOST …")
}

fn pmi(vars: &Vars) -> Result<Option<Place>> {
    let names = Names {
        rank: "PMI_RANK",
        processes: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_processes: "MPI_LOCALNRANKS",
    };
    mpi(vars, Source::Pmi, &names, String::new(), "start it with mpiexec -genv MASTER_ADDR HOST …")
}

/// A pod of an indexed job, if it says how many there are: other indexed jobs run independent tasks.
fn kubernetes(vars: &Vars) -> Result<Option<Place>> {
    let index = "JOB_COMPLETION_INDEX";
    if !vars.has(index) || !(vars.has("WORLD_SIZE") || vars.has("MASTER_ADDR")) {
        return Ok(None);
    }
    let rank = vars.needed(index, index)?;
    let processes = vars.needed("WORLD_SIZE", index)?;
    let no_host = || {
        let cure = "set MASTER_ADDR to the name of pod 0 in the headless service: JOB-0.SERVICE";
        Err(vars.no_address("WORLD_SIZE", cure))
    };
    let address = vars.address(processes, no_host, "")?;
    let place = Place { rank, processes, address, source: Source::Kubernetes, ..Place::alone() };
    let names = Names { rank: index, processes: "WORLD_SIZE", local_rank: index, local_processes: "WORLD_SIZE" };
    checked(place, &names).map(Some)
}

#[cfg(test)]
mod tests;
