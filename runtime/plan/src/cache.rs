//! Caches compiled plans by key, with a byte limit and LRU eviction, and reports the cause of a miss.

use crate::backend::{Backend, Executable};
use crate::fingerprint::Fingerprint;
use crate::ir::{Origin, Program};
use crate::key::{Tracer, digest};
use crate::pipeline::{Options, try_plan};
use crate::request::Request;
use perilune_core::error::Error;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::source_loc::SourceLoc;
use rustc_hash::FxHashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A planned program and where it was recorded.
#[derive(Clone, Debug)]
pub struct PlannedStep {
    pub program: Arc<Program>,
    /// Recipe lines of the traced nodes when the step was planned.
    pub source_map: Rc<[SourceLoc]>,
    /// Which of the traced nodes a backward pass recorded.
    pub backward: Rc<[bool]>,
}

impl PlannedStep {
    fn new(g: &Graph, order: &[NodeId], program: Program) -> PlannedStep {
        let source_map = order.iter().map(|id| g.loc_of(*id)).collect();
        let backward = order.iter().map(|id| g.remat.back_of(*id).is_some()).collect();
        PlannedStep { program: Arc::new(program), source_map, backward }
    }
}

/// Why there is no plan.
#[derive(Debug)]
pub struct NoPlan {
    pub error: Error,
    /// The recipe line of the node at fault, if one is.
    pub loc: Option<SourceLoc>,
    /// The step, if it has been planned.
    pub step: Option<Box<PlannedStep>>,
}

impl From<Error> for NoPlan {
    fn from(error: Error) -> NoPlan {
        NoPlan { error, loc: None, step: None }
    }
}

/// A step ready to run.
pub struct Plan {
    pub step: PlannedStep,
    pub exec: Box<dyn Executable>,
    key: Vec<u64>,
    options: Options,
    /// FLOP of its products, as recorded (see [`crate::show::products`]).
    pub products: f64,
    last_use: std::cell::Cell<u64>,
    signature: std::cell::OnceCell<u64>,
}

impl Plan {
    /// The canonical words of its recording.
    pub(crate) fn key(&self) -> &[u64] {
        &self.key
    }

    /// A number for its kernels in their order, the same in every process.
    pub(crate) fn signature(&self) -> u64 {
        *self.signature.get_or_init(|| Fingerprint::of(&self.step.program).digest())
    }

    /// The first node that differs between the trace and this plan: its recipe line and description.
    pub fn first_difference(&self, g: &Graph, tracer: &Tracer) -> Option<(SourceLoc, String)> {
        let k = tracer.trace.first_difference(g, &self.key)?;
        let id = tracer.trace.order[k];
        let node = g.node(id);
        let what = format!("{} {} {}", node.op.name, node.dtype, node.shape);
        let before = self.step.source_map.get(k).copied().unwrap_or(SourceLoc::NONE);
        Some((if g.loc_of(id) == SourceLoc::NONE { before } else { g.loc_of(id) }, what))
    }
}

#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    pub compile_ms: f64,
}

/// The cache of one device.
pub struct Cache {
    plans: FxHashMap<u128, Vec<Rc<Plan>>>,
    bytes: usize,
    limit: usize,
    clock: u64,
    pub counts: Counts,
    /// The last plan looked up, and the version of its trace.
    last: Option<(Rc<Plan>, u64)>,
}

impl Default for Cache {
    fn default() -> Self {
        Cache::new(256 << 20)
    }
}

impl Cache {
    /// A cache that holds about `limit` bytes of plans.
    pub fn new(limit: usize) -> Cache {
        Cache { plans: FxHashMap::default(), bytes: 0, limit, clock: 0, counts: Counts::default(), last: None }
    }

    pub fn len(&self) -> usize {
        self.plans.values().map(Vec::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Whether there is a plan for what `tracer` traced.
    pub fn has(&self, tracer: &Tracer, options: Options) -> bool {
        let key = &tracer.trace.key;
        let same = |p: &Rc<Plan>| p.key == *key && p.options == options;
        self.plans.get(&hash(key, options)).is_some_and(|list| list.iter().any(same))
    }

    /// Looks up the plan for what `tracer` traced; plans and compiles it on a miss. If planning completed before the
    /// error, the error has the planned step.
    pub fn get(
        &mut self,
        g: &Graph,
        tracer: &Tracer,
        request: &Request,
        options: Options,
        backend: &dyn Backend,
    ) -> std::result::Result<(Rc<Plan>, bool), NoPlan> {
        let trace = &tracer.trace;
        let same = |p: &&Rc<Plan>| p.key == trace.key && p.options == options;
        self.clock += 1;
        // Nearly every step repeats the previous one, so one comparison usually suffices.
        if let Some((found, version)) = &mut self.last
            && (*version == tracer.version() && found.options == options || same(&&*found))
        {
            *version = tracer.version();
            found.last_use.set(self.clock);
            self.counts.hits += 1;
            return Ok((found.clone(), true));
        }
        let hash = hash(&trace.key, options);
        if let Some(found) = self.plans.get(&hash).and_then(|list| list.iter().find(same)) {
            found.last_use.set(self.clock);
            self.counts.hits += 1;
            self.last = Some((found.clone(), tracer.version()));
            return Ok((found.clone(), true));
        }
        self.counts.misses += 1;
        let start = std::time::Instant::now();
        let step = |program| PlannedStep::new(g, &trace.order, program);
        let step = match try_plan(g, tracer, request, options, backend) {
            Ok(program) => step(program),
            Err(failed) => {
                let node = failed.origin.position().and_then(|p| trace.order.get(p));
                let loc = node.map(|id| g.loc_of(*id)).filter(|loc| *loc != SourceLoc::NONE);
                return Err(NoPlan { error: failed.error, loc, step: failed.least.map(|p| Box::new(step(*p))) });
            }
        };
        if cfg!(debug_assertions)
            && let Err(e) = crate::check::check(&step.program)
        {
            return Err(Error::system("plan", format!("this is a bug: {e}")).into());
        }
        let exec = match backend.compile(step.program.clone()) {
            Ok(exec) => exec,
            Err(error) => return Err(NoPlan { step: Some(Box::new(step)), ..error.into() }),
        };
        self.counts.compile_ms += start.elapsed().as_secs_f64() * 1e3;
        let last_use = std::cell::Cell::new(self.clock);
        let products = trace.order.iter().filter_map(|id| crate::show::products(g, *id)).sum();
        let key = trace.key.clone();
        let signature = std::cell::OnceCell::new();
        let plan = Rc::new(Plan { step, exec, key, options, products, last_use, signature });
        self.bytes += weight(&plan);
        self.plans.entry(hash).or_default().push(plan.clone());
        self.evict();
        self.last = Some((plan.clone(), tracer.version()));
        Ok((plan, false))
    }

    /// Returns the recipe line of an origin of a cached program.
    pub fn line_of(&self, program: &Arc<Program>, origin: Origin) -> Option<SourceLoc> {
        let plan = self.plans.values().flatten().find(|p| is_part(&p.step.program, program))?;
        plan.step.source_map.get(origin.position()?).copied()
    }

    /// Evicts the least recently used plans until the rest fits.
    fn evict(&mut self) {
        if self.bytes <= self.limit {
            return;
        }
        let plans = self.plans.values().flatten();
        let first_kept = first_kept(plans.map(|p| (p.last_use.get(), weight(p))).collect(), self.limit);
        let (bytes, evictions) = (&mut self.bytes, &mut self.counts.evictions);
        self.plans.retain(|_, list| {
            list.retain(|plan| {
                let stays = plan.last_use.get() >= first_kept;
                if !stays {
                    *bytes -= weight(plan);
                    *evictions += 1;
                }
                stays
            });
            !list.is_empty()
        });
    }

    /// The plan that was used last.
    pub fn last(&self) -> Option<Rc<Plan>> {
        self.last.as_ref().map(|last| last.0.clone())
    }
}

/// Whether a program is `part`, or has it as a stage.
fn is_part(whole: &Arc<Program>, part: &Arc<Program>) -> bool {
    Arc::ptr_eq(whole, part) || whole.stages.iter().any(|stage| Arc::ptr_eq(&stage.program, part))
}

fn hash(key: &[u64], options: Options) -> u128 {
    digest(key) ^ u128::from(options.fusion)
}

/// The least time of use of the plans that stay, given the times and the bytes of all. The plan used last stays whatever its bytes.
/// At least an eighth of the plans goes, since each eviction reads the times of all.
fn first_kept(mut plans: Vec<(u64, usize)>, limit: usize) -> u64 {
    plans.sort_unstable();
    let (mut bytes, most) = (plans.iter().map(|p| p.1).sum::<usize>(), plans.len() - 1);
    let mut going = 0;
    while going < most && (bytes > limit || going < plans.len() / 8) {
        bytes -= plans[going].1;
        going += 1;
    }
    plans[going].0
}

fn weight(p: &Plan) -> usize {
    let PlannedStep { program, source_map, .. } = &p.step;
    p.key.len() * 8 + source_map.len() * 4 + program.values.len() * 160 + program.kernels.len() * 2048
}

#[cfg(test)]
mod tests {
    use super::first_kept;

    #[test]
    fn plans_used_least_recently_go_and_the_last_stays() {
        assert_eq!(first_kept(vec![(3, 10), (1, 10), (2, 10)], 20), 2);
        assert_eq!(first_kept(vec![(3, 10), (1, 10), (2, 10)], 19), 3);
        assert_eq!(first_kept(vec![(7, 100)], 20), 7);
        assert_eq!(first_kept(vec![(1, 1), (2, 100)], 20), 2);
        let many = (0..80).map(|k| (k, 1)).collect();
        assert_eq!(first_kept(many, 79), 10);
    }
}
