//! Parses `--device`, `--mesh`, `--precision` and `--threads`, and opens the backend.

use crate::job::Job;
use perilune_core::Mesh;
use perilune_core::byte_size::{amount, show};
use perilune_cpu::Cpu;
use perilune_cuda::Cuda;
use perilune_dist::rendezvous::Place;
use perilune_dist::{MeshBackend, MeshOptions};
use perilune_lua::{Failed, OpenMesh, OpenedMesh, Runtime, RuntimeOptions, StrictShards, set_mesh_options};
use perilune_plan::Backend;
use perilune_train::{Error, Result, enable_load_run};
use serde_json::{Map, Value};
use std::rc::Rc;
use std::sync::Arc;

/// Options for the device.
#[derive(clap::Args, Clone, Debug)]
pub struct PlaceArgs {
    /// Device: cpu, cuda, cuda:N, several as cuda:0,1, or auto
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// Divide the work among devices, such as dp=2 or dp=4,zero=1 or dp=2,tp=2, or pp=2,schedule=zb-h1 with --set accumulate=8 (bucket=25M: bytes of gradients sent at once). Without GPUs the devices are virtual ones that
    /// share the threads of the CPU
    #[arg(long, value_name = "AXIS=N,...", value_parser = mesh_options, env = "PERILUNE_MESH", hide_env = true)]
    mesh: Option<MeshOptions>,
    /// Cut every batch into N shards whose sums are added in a fixed tree: the weights have the same bits on any number of devices
    /// that divides N, with dp, shard, zero and pp. N is a power of two that divides the batch
    #[arg(long, value_name = "N")]
    pub strict_shards: Option<usize>,
    /// CPU threads [default: one per core]; results do not depend on it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// Options for the device and for the precision and memory of a recipe.
#[derive(clap::Args, Clone, Debug)]
pub struct DeviceArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Precision of matmuls, convolutions and attention: f32, tf32, bf16, fp16 or fp8 [default: the recipe's, else f32]
    #[arg(long, value_name = "PRECISION")]
    pub precision: Option<String>,
    /// Device memory of a training step, such as 20GiB; values that exceed it are recomputed [default: the recipe's]
    #[arg(long, value_name = "BYTES", value_parser = amount)]
    pub memory_budget: Option<usize>,
    /// Memory limit of the recipe's Lua values (not its tensors), such as 2GiB [default: a quarter of the machine's memory, from
    /// 256 MiB to 8 GiB]
    #[arg(long, value_name = "BYTES", value_parser = lua_memory)]
    lua_memory: Option<usize>,
}

/// The minimum of `--lua-memory`: the standard library and its data need a few MiB.
const LEAST_LUA_MEMORY: usize = 16 << 20;

/// Parses `--lua-memory`.
fn lua_memory(text: &str) -> std::result::Result<usize, String> {
    let bytes = amount(text)?;
    if bytes < LEAST_LUA_MEMORY {
        return Err(format!("the standard library needs at least {}", show(LEAST_LUA_MEMORY)));
    }
    Ok(bytes)
}

/// The upper limit of `--threads`, which detects typing errors.
const MOST_THREADS: usize = 1024;

impl DeviceArgs {
    /// Returns the number of CPU threads.
    pub fn threads(&self) -> usize {
        self.place.threads()
    }

    /// Creates the runtime of a command, with its limits.
    pub fn runtime(&self, options: RuntimeOptions) -> std::result::Result<Runtime, Failed> {
        self.runtime_of(None, options)
    }

    /// Creates the runtime of a process of a job.
    pub fn runtime_in(&self, job: &Job, options: RuntimeOptions) -> std::result::Result<Runtime, Failed> {
        self.runtime_of(Some(job.clone()), options)
    }

    /// The backend is open, and no line of the recipe has run: the last walls of a confined process are entered here.
    fn runtime_of(&self, job: Option<Job>, options: RuntimeOptions) -> std::result::Result<Runtime, Failed> {
        if let Err(failure) = crate::confined::child::seal() {
            failure.show();
            std::process::exit(i32::from(failure.status()));
        }
        let runtime = Runtime::new(options)?;
        enable_load_run(&runtime);
        match &self.place.mesh {
            Some(options) => set_mesh_options(&mut runtime.host().engine.borrow_mut(), options.clone()),
            None => *runtime.host().open_mesh.borrow_mut() = Some(self.place.clone().opener(job)),
        }
        if let Some(shards) = self.place.strict_shards {
            let host = runtime.host();
            host.engine.borrow_mut().set_strict_shards(Some(shards)).map_err(|e| match &e.hint {
                Some(hint) => Failed::Usage(format!("--strict-shards {shards}: {} ({hint})", e.message)),
                None => Failed::Usage(format!("--strict-shards {shards}: {}", e.message)),
            })?;
            host.strict_shards.set(StrictShards::CommandLine);
        }
        if let Some(bytes) = self.lua_memory {
            runtime.limit_lua_memory(bytes)?;
        }
        Ok(runtime)
    }

    /// Checks the precision and opens the backend.
    pub fn open(&self) -> Result<Arc<dyn Backend>> {
        self.check_precision()?;
        self.place.open()
    }

    /// Opens the backend of a process of a job.
    pub fn open_in(&self, job: &Job) -> Result<Arc<dyn Backend>> {
        self.check_precision()?;
        self.place.open_in(Some(job))
    }

    /// Checks that there is such a precision.
    pub fn check_precision(&self) -> Result<()> {
        match self.precision.as_deref().unwrap_or("f32") {
            "f32" | "tf32" | "bf16" | "fp16" | "fp8" => Ok(()),
            p => Err(Error::Usage(format!(
                "--precision {p}: there is no such precision; use f32, tf32, bf16, fp16 or fp8"
            ))),
        }
    }
}

impl PlaceArgs {
    /// Returns the number of CPU threads: as given, else all cores.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Whether the device is the CPU.
    pub fn is_cpu(&self) -> bool {
        self.device == "cpu" || (self.device == "auto" && Cuda::count().map_or(true, |n| n == 0))
    }

    /// Takes the place of a recorded run: its kind of device where that is the CPU or `given` names none, and what `given` names
    /// otherwise.
    pub fn instead_of(&mut self, given: &PlaceArgs, recorded: Option<&str>) {
        self.device = match (given.device.as_str(), recorded) {
            ("auto", Some("cpu")) => "cpu".into(),
            (device, _) => device.into(),
        };
        self.threads = given.threads;
        if given.mesh.is_some() {
            self.mesh.clone_from(&given.mesh);
        }
        self.strict_shards = given.strict_shards.or(self.strict_shards);
    }

    /// Adds in the order of a recorded run, unless the command line gives another one, so that bits are those of the run.
    pub fn sum_as(&mut self, record: &Map<String, Value>) {
        let recorded = record.get("strict_shards").and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        self.strict_shards = self.strict_shards.or(recorded);
    }

    /// The mesh that `--mesh` names, or one device.
    pub fn mesh(&self) -> Mesh {
        self.mesh.as_ref().map_or(Mesh::ONE, |options| options.mesh)
    }

    /// Whether `--mesh` is given.
    pub fn has_mesh(&self) -> bool {
        self.mesh.is_some()
    }

    /// Opens the backend. `auto` is the first GPU if its libraries are found, else the CPU. Environment flags are checked too:
    /// a value that a flag does not take is an error here, before anything reads it.
    pub fn open(&self) -> Result<Arc<dyn Backend>> {
        self.open_in(None)
    }

    fn open_in(&self, job: Option<&Job>) -> Result<Arc<dyn Backend>> {
        let no = |text: String| Err(Error::Usage(text));
        if let Err(e) = perilune_core::env_flags::check() {
            return no(e.to_string());
        }
        if let Err(e) = perilune_cpu::Isa::chosen() {
            return no(e.to_string());
        }
        if let Some(n) = self.threads.filter(|n| *n == 0 || *n > MOST_THREADS) {
            return no(format!("--threads {n}: it must be from 1 to {MOST_THREADS}"));
        }
        self.open_on(self.mesh(), job)
    }

    /// The mesh as the command line gives it, with its strict shards.
    pub fn mesh_text(&self) -> String {
        let strict = self.strict_shards.map(|n| format!(" with {n} strict shards")).unwrap_or_default();
        self.mesh.as_ref().map(ToString::to_string).unwrap_or_default() + &strict
    }

    /// The kind of device of a process in a job of several, which all have to have.
    pub fn kind_in_job(&self, place: &Place) -> Result<String> {
        let isa = || perilune_cpu::Isa::chosen().map_err(|e| Error::Usage(e.to_string()));
        if self.device == "cpu" || (self.device == "auto" && Cuda::new(0).is_err()) {
            return Ok(format!("cpu with {:?}", isa()?));
        }
        let first = *self.gpus_of(1, place)?.first().unwrap_or(&0);
        match Cuda::new(first) {
            Ok(gpu) => Ok(gpu.kind()),
            Err(e) => Err(Error::System(format!("--device {}: {}", self.device, e.message))),
        }
    }

    /// The GPUs of a process that drives `n` devices, among those that it may open. Processes of a host take theirs in the order of their
    /// local ranks, from all GPUs or from those that `--device` lists, unless a launcher shows each process its own only.
    fn gpus_of(&self, n: usize, place: &Place) -> Result<Vec<usize>> {
        let listed = self.device.strip_prefix("cuda:").and_then(numbers);
        let all = match listed {
            Some(list) => list,
            None => (0..Cuda::count().map_err(|e| Error::System(e.message))?).collect(),
        };
        own_gpus(&all, n, place).ok_or_else(|| {
            let processes = place.local_processes;
            Error::Usage(format!(
                "--device {}: {processes} processes of this host with {n} devices each need {} GPUs, not {}\n  \
                 hint: start one process for each GPU, or one process without a launcher, which drives all of them",
                self.device,
                processes * n,
                all.len()
            ))
        })
    }

    /// Opens the devices of a mesh; in a job, those of this process.
    fn open_on(&self, mesh: Mesh, job: Option<&Job>) -> Result<Arc<dyn Backend>> {
        let no = |text: String| Err(Error::Usage(text));
        let limit = match std::env::var("PERILUNE_MEMORY_LIMIT") {
            Ok(text) => match amount(&text) {
                Ok(n) => Some(n),
                Err(e) => return no(format!("PERILUNE_MEMORY_LIMIT: {e}")),
            },
            Err(_) => None,
        };
        if mesh.devices() > 1 {
            return match self.device.as_str() {
                "cpu" => self.virtual_cpus(mesh, limit, job),
                "auto" if Cuda::new(0).is_err() => self.virtual_cpus(mesh, limit, job),
                _ if job.is_some_and(Job::has_several) => self.gpus_in_job(mesh, job),
                "auto" | "cuda" => self.gpus(mesh, &(0..mesh.devices()).collect::<Vec<_>>()),
                d => match d.strip_prefix("cuda:").and_then(numbers) {
                    Some(list) => self.gpus(mesh, &list),
                    None => {
                        no(format!("--device {d}: there is no such device; use cpu, cuda, cuda:N, cuda:0,1 or auto"))
                    }
                },
            };
        }
        let cpu = || Arc::new(Cpu::limited(self.threads, limit));
        match self.device.as_str() {
            "cpu" => Ok(cpu()),
            "auto" => Ok(Cuda::new(0).map_or_else(|_| cpu() as Arc<dyn Backend>, |gpu| Arc::new(gpu))),
            d if d.strip_prefix("cuda:").and_then(numbers).is_some_and(|list| list.len() > 1) => {
                no(format!("--device {d}: several GPUs need a mesh, such as --mesh dp=2"))
            }
            d if d == "cuda" || d.strip_prefix("cuda:").and_then(numbers).is_some() => match Cuda::named(d) {
                Ok(gpu) => Ok(Arc::new(gpu)),
                // The message without the op, which is the device's name once more.
                Err(e) => {
                    Err(Error::System(format!("--device {d}: {}", perilune_core::Error { op: String::new(), ..e })))
                }
            },
            d => no(format!("--device {d}: there is no such device; use cpu, cuda, cuda:N or auto")),
        }
    }

    /// Opens the virtual CPU devices of a mesh; each has its share of the threads and of the memory. The processes of a host share
    /// its threads.
    fn virtual_cpus(&self, mesh: Mesh, limit: Option<usize>, job: Option<&Job>) -> Result<Arc<dyn Backend>> {
        let job = job.filter(|job| job.has_several());
        let n = (mesh.devices() / job.map_or(1, |job| job.place.processes)).max(1);
        if n > MOST_THREADS {
            return Err(Error::Usage(format!(
                "mesh {mesh}: a machine has at most {MOST_THREADS} virtual devices, not {n}"
            )));
        }
        let beside = if self.threads.is_none() { job.map_or(1, |job| job.place.local_processes) } else { 1 };
        let threads = (self.threads() / n / beside).max(1);
        let device = || Arc::new(Cpu::limited(Some(threads), limit.map(|bytes| bytes / n))) as Arc<dyn Backend>;
        let backend = match job {
            Some(job) => MeshBackend::among(mesh, &job.links, |_| Ok(device())),
            None => MeshBackend::new(mesh, (0..n).map(|_| device()).collect()),
        };
        backend.map(|b| Arc::new(b) as Arc<dyn Backend>).map_err(|e| match e.kind {
            perilune_core::error::Kind::Argument => {
                Error::Usage(perilune_core::Error { op: String::new(), ..e }.to_string())
            }
            _ => Error::System(e.to_string()),
        })
    }

    /// Opens the GPUs of a mesh. If it has more devices than GPUs are named, neighbours share one.
    fn gpus(&self, mesh: Mesh, ordinals: &[usize]) -> Result<Arc<dyn Backend>> {
        let n = mesh.devices();
        if ordinals.len() > n || !n.is_multiple_of(ordinals.len()) {
            return Err(Error::Usage(format!(
                "--device {}: the {n} devices of mesh {mesh} cannot be spread evenly over {} GPUs",
                self.device,
                ordinals.len()
            )));
        }
        let open = |rank: usize| match Cuda::new(ordinals[rank * ordinals.len() / n]) {
            Ok(gpu) => Ok(Arc::new(gpu) as Arc<dyn Backend>),
            Err(e) => Err(Error::System(format!(
                "mesh {mesh} needs {} GPUs: {}\n  hint: --device cuda:0 puts all its devices on one GPU, which tests it",
                ordinals.len(),
                e.message
            ))),
        };
        let backend = MeshBackend::new(mesh, (0..n).map(open).collect::<Result<_>>()?);
        backend.map(|b| Arc::new(b) as Arc<dyn Backend>).map_err(|e| Error::System(e.to_string()))
    }

    /// Opens the GPUs of this process for a mesh of several processes.
    fn gpus_in_job(&self, mesh: Mesh, job: Option<&Job>) -> Result<Arc<dyn Backend>> {
        let Some(job) = job else { return Err(Error::System("this is a bug: no job".into())) };
        let n = (mesh.devices() / job.place.processes).max(1);
        let mut ordinals = self.gpus_of(n, &job.place)?.into_iter();
        let open = |_| {
            let ordinal = ordinals.next().unwrap_or_default();
            Cuda::new(ordinal).map(|gpu| Arc::new(gpu) as Arc<dyn Backend>)
        };
        match MeshBackend::among(mesh, &job.links, open) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(e) if e.kind == perilune_core::error::Kind::Argument => {
                Err(Error::Usage(perilune_core::Error { op: String::new(), ..e }.to_string()))
            }
            Err(e) => Err(Error::System(e.to_string())),
        }
    }

    /// Returns what opens the mesh that a recipe asks for.
    fn opener(self, job: Option<Job>) -> OpenMesh {
        Rc::new(move |text, now| {
            let options = MeshOptions::parse(text)?;
            let open = || {
                self.open_on(options.mesh, job.as_ref())
                    .map_err(|e| perilune_core::Error::argument("recipe.mesh", e.to_string()))
            };
            let backend = if options.mesh == now { None } else { Some(open()?) };
            Ok(OpenedMesh { backend, options })
        })
    }
}

/// The GPUs of a process with `n` devices, among those that it can open.
fn own_gpus(all: &[usize], n: usize, place: &Place) -> Option<Vec<usize>> {
    let first = place.local_rank * n;
    match all.len() {
        shown if shown >= place.local_processes * n => all.get(first..first + n),
        shown if shown == n => Some(all),
        _ => None,
    }
    .map(<[usize]>::to_vec)
}

/// Parses `--mesh`.
fn mesh_options(text: &str) -> std::result::Result<MeshOptions, String> {
    MeshOptions::parse(text).map_err(|e| match &e.hint {
        Some(hint) => format!("{} ({hint})", e.message),
        None => e.message,
    })
}

/// Reads a list of device numbers: `0` or `0,1`.
fn numbers(text: &str) -> Option<Vec<usize>> {
    text.split(',').map(|n| n.parse().ok().filter(|_| n.chars().all(|c| c.is_ascii_digit()))).collect()
}

/// Parses `key=value`.
pub fn key_value(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_string(), value.to_string())),
        _ => Err(format!("write it as {}=VALUE", if text.is_empty() { "KEY" } else { text.trim_matches('=') })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_a_host_take_gpus_in_the_order_of_their_ranks() {
        let place = |rank, n| Place { local_rank: rank, local_processes: n, ..Place::alone() };
        let all = [0, 1, 2, 3];
        assert_eq!(own_gpus(&all, 4, &place(0, 1)), Some(vec![0, 1, 2, 3]));
        assert_eq!(own_gpus(&all, 1, &place(2, 4)), Some(vec![2]));
        assert_eq!(own_gpus(&all, 2, &place(1, 2)), Some(vec![2, 3]));
        assert_eq!(own_gpus(&[5, 7], 1, &place(1, 2)), Some(vec![7]));
        assert_eq!(own_gpus(&[0], 1, &place(3, 4)), Some(vec![0]), "a launcher shows each process its own");
        assert_eq!(own_gpus(&[0, 1, 2], 2, &place(0, 2)), None);
        assert_eq!(own_gpus(&[], 1, &place(0, 1)), None);
    }
}
