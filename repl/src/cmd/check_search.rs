//! `perilune check --search`: predicts a step of a recipe on every mesh of a number of devices, and ranks them.
//!
//! Each mesh is a dry run of its own: the recipe is built, a step is recorded and planned, and nothing runs. Meshes that a check
//! refuses are listed with the reason, those that do not fit with what they need, and slower ones with what takes longer. Experts are divided
//! (`ep`) if the model has some, and meshes with stages are tried with several schedules if they are not refused.

use super::check_mesh::aligned;
use super::check_predict::time;
use crate::console_out::ConsoleOut;
use crate::failure::Failure;
use crate::target::{OVERHEAD, Target};
use perilune_core::byte_size::show;
use perilune_core::mesh::Axis;
use perilune_dist::MeshOptions;
use perilune_lua::{Loaded, Runtime, RuntimeOptions, set_mesh_options};
use perilune_plan::predict::{KernelClass, Machine, Prediction};
use perilune_policy::Policy;
use perilune_train::Source;
use std::rc::Rc;
use std::sync::Arc;

/// What a search needs to dry-run a recipe.
pub struct Search<'a> {
    pub source: &'a Source,
    pub target: &'a Target,
    pub params: Vec<(String, String)>,
    pub policy: Arc<Policy>,
    pub devices: usize,
    pub hosts: Option<usize>,
    pub precision: Option<&'a str>,
    pub budget: Option<usize>,
}

/// The outcome of one mesh.
struct Candidate {
    mesh: String,
    outcome: Result<Fits, String>,
}

struct Fits {
    peak: usize,
    prediction: Prediction,
}

/// Schedules that are tried beside the recipe's.
const SCHEDULES: [&str; 3] = ["zb-h1", "interleaved", "zbv"];

/// The axis of a mesh as a search names it.
fn size(mesh: &str, axis: Axis) -> usize {
    MeshOptions::parse(mesh).map_or(1, |options| options.mesh.size(axis))
}

/// The meshes of a number of devices, as `--mesh` names them, each with the stages of ZeRO that differ. `has_experts`: also along `ep`.
pub fn meshes(devices: usize, has_experts: bool) -> Vec<String> {
    let divides = |n: usize| (1..=n).filter(move |k| n.is_multiple_of(*k));
    // `shard` is tried with `dp`.
    let tried = |axis: &Axis| *axis != Axis::Shard && (has_experts || *axis != Axis::Ep);
    let axes: Vec<Axis> = Axis::ALL.into_iter().filter(tried).collect();
    let mut sizes: Vec<Vec<(Axis, usize)>> = vec![vec![]];
    for axis in &axes {
        let next = sizes.iter().flat_map(|one| {
            let left = devices / one.iter().map(|(_, n)| n).product::<usize>();
            divides(left).map(move |n| one.iter().copied().chain([(*axis, n)]).collect())
        });
        sizes = next.collect();
    }
    sizes.retain(|one| one.iter().map(|(_, n)| n).product::<usize>() == devices);
    let text = |one: &[(Axis, usize)]| {
        let named = one.iter().filter(|(_, n)| *n > 1).map(|(axis, n)| format!("{}={n}", axis.name()));
        named.collect::<Vec<_>>().join(",")
    };
    let mut out = Vec::new();
    for one in &sizes {
        let along = |wanted: Axis| one.iter().find(|(axis, _)| *axis == wanted).map_or(1, |(_, n)| *n);
        let dp = along(Axis::Dp);
        out.push(text(one));
        if dp * along(Axis::Ep) > 1 {
            // Stages 1 and 2 are the same program.
            out.extend([1, 3].map(|zero| format!("{},zero={zero}", text(one))));
        }
        if dp > 8 && dp.is_multiple_of(8) {
            // States split inside a host, and copied on all hosts.
            let hybrid: Vec<(Axis, usize)> =
                one.iter()
                    .flat_map(|(axis, n)| {
                        if *axis == Axis::Dp { vec![(*axis, n / 8), (Axis::Shard, 8)] } else { vec![(*axis, *n)] }
                    })
                    .collect();
            out.push(format!("{},zero=3", text(&hybrid)));
        }
    }
    out
}

impl Search<'_> {
    /// Dry-runs a step on one mesh. The error is one line.
    fn dry_run(&self, text: &str) -> Result<Fits, String> {
        let line = |e: &dyn std::fmt::Display| {
            let text = e.to_string();
            let reason = text.lines().next().unwrap_or_default().trim();
            reason.strip_prefix("error: ").unwrap_or(reason).to_string()
        };
        let mesh_options = MeshOptions::parse(text).map_err(|e| e.message)?;
        let machine: Machine =
            super::check_predict::machine(self.target.gpu, mesh_options.mesh, self.hosts).map_err(|e| e.message)?;
        let options = RuntimeOptions {
            backend: self.target.open(mesh_options.mesh),
            params: self.params.clone(),
            policy: self.policy.clone(),
            strict: true,
            print: Rc::new(|_: &str| {}),
        };
        let runtime = Runtime::new(options).map_err(|e| line(&e))?;
        set_mesh_options(&mut runtime.host().engine.borrow_mut(), mesh_options);
        let loaded = runtime.until_first_step(|| self.source.load(&runtime)).map_err(|e| line(&e))?;
        let Loaded::Recipe(recipe) = loaded else {
            return Err("a plain script has no mesh: it returns no recipe".to_string());
        };
        let run = recipe.start(None, self.precision, self.budget).map_err(|e| line(&e))?;
        run.step().and_then(|step| run.read(&step)).map_err(|e| line(&e))?;
        let engine = runtime.host().engine.borrow();
        let prediction = engine.predict(&machine).ok_or("nothing was planned")?;
        Ok(Fits { peak: engine.memory().device.peak.saturating_add(OVERHEAD), prediction })
    }

    /// Dry-runs the meshes along `ep`; none if the model has no experts, which the first one tells.
    fn with_experts(&self) -> Vec<Candidate> {
        let mut out = Vec::new();
        for mesh in meshes(self.devices, true).into_iter().filter(|mesh| size(mesh, Axis::Ep) > 1) {
            let outcome = self.dry_run(&mesh);
            if outcome.as_ref().is_err_and(|reason| reason.contains("it has no experts")) {
                return Vec::new();
            }
            out.push(Candidate { mesh, outcome });
        }
        out
    }

    /// Dry-runs every mesh and prints the ranking.
    pub fn run(&self, screen: &ConsoleOut) -> Result<(), Failure> {
        let outcome = |mesh: String| Candidate { outcome: self.dry_run(&mesh), mesh };
        let mut candidates: Vec<Candidate> = meshes(self.devices, false).into_iter().map(outcome).collect();
        candidates.extend(self.with_experts());
        let stages = candidates.iter().filter(|c| size(&c.mesh, Axis::Pp) > 1 && c.outcome.is_ok());
        let scheduled = stages.flat_map(|c| SCHEDULES.map(|name| format!("{},schedule={name}", c.mesh)));
        let scheduled: Vec<String> = scheduled.collect();
        candidates.extend(scheduled.into_iter().map(outcome));
        screen.line(&format!(
            "{} · {} meshes of {} devices, {} each; times are predictions",
            self.source.path.display(),
            candidates.len(),
            self.devices,
            self.target.name
        ));
        for line in ranking(candidates, self.target.bytes) {
            screen.line(&format!("  {line}"));
        }
        Ok(())
    }
}

/// Seconds of a step, of which kernels, waiting for other stages and the collectives along each axis are parts.
fn parts(p: &Prediction) -> Vec<(String, f64)> {
    // What is sent is listed for all devices along pp.
    let devices = p.devices.len().max(1) as f64;
    let kernels = p.classes.iter().filter(|(class, _)| *class != KernelClass::Collective).map(|(_, s)| s).sum();
    let along = |axis: Axis| -> f64 {
        p.sent.iter().filter(|s| s.transfer.axis == axis).map(|s| s.seconds).sum::<f64>() / devices
    };
    let sent = Axis::ALL.into_iter().map(|axis| (format!("sending along {}", axis.name()), along(axis)));
    let waiting = p.bubble().unwrap_or(0.0) * p.serial;
    [("kernels".to_string(), kernels), ("waiting for other stages".to_string(), waiting)]
        .into_iter()
        .chain(sent)
        .collect()
}

/// What takes most of the time that a mesh needs more than the best one.
fn why(best: &Prediction, p: &Prediction) -> String {
    let more = parts(p).into_iter().zip(parts(best)).map(|((name, own), (_, least))| (name, own - least));
    match more.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, seconds)| *seconds > 0.0) {
        Some((name, seconds)) => format!("{name}: {} more", time(seconds)),
        None => String::new(),
    }
}

/// The table: meshes that fit, the fastest first; those that do not; those that are refused.
fn ranking(candidates: Vec<Candidate>, memory: usize) -> Vec<String> {
    let (mut fits, mut large, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for Candidate { mesh, outcome } in candidates {
        match outcome {
            Ok(found) if found.peak <= memory => fits.push((mesh, found)),
            Ok(found) => large.push((mesh, found)),
            Err(reason) => refused.push((mesh, reason)),
        }
    }
    fits.sort_by(|a, b| a.1.prediction.serial.total_cmp(&b.1.prediction.serial));
    large.sort_by_key(|(_, found)| found.peak);
    let name = |mesh: &str| if mesh.is_empty() { "one device".to_string() } else { mesh.to_string() };
    let mut rows = vec![["mesh", "memory", "a step", "overlapped", "why"].map(String::from).to_vec()];
    let best = fits.first().map(|(_, found)| found.prediction.clone());
    for (k, (mesh, found)) in fits.iter().enumerate() {
        let p = &found.prediction;
        let why = best.as_ref().filter(|_| k > 0).map_or_else(|| "the fastest".to_string(), |best| why(best, p));
        rows.push(vec![name(mesh), show(found.peak), time(p.serial), time(p.overlapped), why]);
    }
    for (mesh, found) in &large {
        let p = &found.prediction;
        let why = format!("does not fit: {} of {}", show(found.peak), show(memory));
        rows.push(vec![name(mesh), show(found.peak), time(p.serial), time(p.overlapped), why]);
    }
    for (mesh, reason) in refused {
        rows.push(vec![name(&mesh), "-".into(), "-".into(), "-".into(), reason]);
    }
    aligned(&rows, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_meshes_of_a_number_of_devices() {
        let all = meshes(8, false);
        for mesh in ["dp=8", "dp=8,zero=1", "dp=8,zero=3", "dp=4,tp=2", "dp=2,tp=4,zero=3", "tp=8"] {
            assert_eq!(all.iter().filter(|m| *m == mesh).count(), 1, "{mesh}: {all:?}");
        }
        for mesh in &all {
            assert_eq!(MeshOptions::parse(mesh).unwrap().mesh.devices(), 8, "{mesh}");
        }
        assert!(meshes(32, false).contains(&"dp=4,shard=8,zero=3".to_string()));
        assert_eq!(meshes(1, true), [""]);
        let experts = meshes(8, true);
        for mesh in ["ep=8", "ep=8,zero=1", "dp=4,ep=2,zero=3", "ep=2,tp=4"] {
            assert_eq!(experts.iter().filter(|m| *m == mesh).count(), 1, "{mesh}: {experts:?}");
        }
        assert!(all.iter().all(|mesh| experts.contains(mesh)) && all.iter().all(|mesh| !mesh.contains("ep")));
    }

    #[test]
    fn the_fastest_that_fits_comes_first() {
        let of = |mesh: &str, peak: usize, kernels: f64| {
            let classes = vec![(KernelClass::Product, kernels)];
            let prediction = Prediction { classes, serial: kernels, overlapped: kernels, ..Prediction::default() };
            Candidate { mesh: mesh.into(), outcome: Ok(Fits { peak, prediction }) }
        };
        let refused = Candidate { mesh: "tp=3".into(), outcome: Err("r.lua:3: mesh: tp=3 does not divide".into()) };
        let lines = ranking(
            vec![refused, of("dp=8", 90 << 30, 0.01), of("tp=8", 40 << 30, 0.03), of("dp=4,tp=2", 60 << 30, 0.02)],
            80 << 30,
        );
        assert_eq!(
            lines,
            [
                "mesh       memory    a step   overlapped  why",
                "dp=4,tp=2  60.0 GiB  20.0 ms  20.0 ms     the fastest",
                "tp=8       40.0 GiB  30.0 ms  30.0 ms     kernels: 10.0 ms more",
                "dp=8       90.0 GiB  10.0 ms  10.0 ms     does not fit: 90.0 GiB of 80.0 GiB",
                "tp=3       -         -        -           r.lua:3: mesh: tp=3 does not divide",
            ]
        );
    }
}
