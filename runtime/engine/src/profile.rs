//! Profiles kernels and host stalls: seconds by kernel (medians over all runs since profiling was enabled), by recipe line, and
//! as a timeline; and the waits of the host for data, and for the device in the middle of a step.

use crate::step_parts::{RULE, median, outliers};
use perilune_core::source_loc::{SourceLoc, SourceMap};
use perilune_plan::ir::Kernel;
use perilune_plan::{Plan, lanes, show};
use std::collections::HashMap;
use std::fmt::Write;
use std::rc::Rc;

/// Kernel times of every plan run.
#[derive(Default)]
pub struct Profile {
    plans: HashMap<*const Plan, Entry>,
}

struct Entry {
    plan: Rc<Plan>,
    /// Seconds of each kernel, run by run.
    runs: Vec<Vec<f64>>,
    /// Seconds for which each kernel, a collective, runs beside others; the sum of all runs.
    hidden: Vec<f64>,
}

impl Entry {
    fn total(&self) -> f64 {
        self.runs.iter().flatten().sum()
    }
}

/// The measured peaks of the device per second: bytes through memory, operations in matrix products.
#[derive(Clone, Copy, Debug)]
pub struct Ceiling {
    pub bytes: f64,
    pub flops: f64,
}

/// The limit of a kernel's or recipe line's speed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Bound {
    Compute,
    /// The device's memory.
    Memory,
    /// The operands are in caches: more bytes per second move than memory supplies. The speed of caches is not measured.
    Cache,
    /// The launch: the kernel is too short for its work to matter.
    Launch,
    /// The host makes a batch.
    Data,
    /// The host reads a value in the middle of a step, and waits for the device to make it.
    Sync,
}

impl Bound {
    pub const ALL: [Bound; 6] = [Bound::Compute, Bound::Memory, Bound::Cache, Bound::Launch, Bound::Data, Bound::Sync];

    pub fn name(self) -> &'static str {
        ["compute", "memory", "cache", "launch", "data", "sync"][self as usize]
    }
}

/// Waits of the host since profiling was enabled, by recipe line and step.
#[derive(Default)]
pub struct HostStalls {
    by: HashMap<(Bound, SourceLoc), (Vec<f64>, u64)>,
    steps: usize,
}

impl HostStalls {
    pub fn add(&mut self, bound: Bound, loc: SourceLoc, seconds: f64) {
        let (steps, count) = self.by.entry((bound, loc)).or_default();
        steps.resize(self.steps + 1, 0.0);
        steps[self.steps] += seconds;
        *count += 1;
    }

    /// Starts another step.
    pub fn end_step(&mut self) {
        self.steps += 1;
        self.by.values_mut().for_each(|(steps, _)| steps.resize(self.steps, 0.0));
    }

    /// The seconds of each completed step.
    pub fn by_step(&self, bound: Bound) -> Vec<f64> {
        let mut out = vec![0.0; self.steps];
        for (_, (steps, _)) in self.by.iter().filter(|((b, _), _)| *b == bound) {
            out.iter_mut().zip(steps).for_each(|(sum, s)| *sum += s);
        }
        out
    }

    /// Longest first.
    pub fn list(&self, source_map: &SourceMap) -> Vec<Wait> {
        let place =
            |b: Bound, s: SourceLoc| if b == Bound::Data { "recipe.data".to_string() } else { source_map.show(s) };
        let wait = |((bound, loc), (steps, count)): (&(Bound, SourceLoc), &(Vec<f64>, u64))| Wait {
            bound: *bound,
            place: place(*bound, *loc),
            seconds: median(&[&steps[..], &vec![0.0; self.steps.saturating_sub(steps.len())]].concat()),
            count: *count,
        };
        let mut out: Vec<Wait> = self.by.iter().map(wait).collect();
        out.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.place.cmp(&b.place)));
        out
    }
}

/// The waits of one kind at one recipe line.
#[derive(Clone, Debug)]
pub struct Wait {
    pub bound: Bound,
    pub place: String,
    /// The median per step.
    pub seconds: f64,
    /// The sum over all steps.
    pub count: u64,
}

/// Kernels shorter than this, in seconds, cost their launch.
const LAUNCH: f64 = 10e-6;

/// The share of the measured memory bandwidth that a kernel bound by memory may reach; the roofline is accurate to a few percent.
const THROUGH_MEMORY: f64 = 1.05;
/// A product that reaches this share of the peak of products is bound by it, whatever it reads.
const PRODUCT: f64 = 0.9;

/// One kernel of a plan.
#[derive(Clone, Debug)]
pub struct Timing {
    /// The plan of the kernel: 0 is the one that took most time.
    pub plan: usize,
    /// The number of runs of the plan.
    pub runs: u64,
    pub name: String,
    pub space: String,
    /// Recipe line.
    pub place: String,
    /// Whether it is a routine (a product, attention, a sort) rather than generated from elementwise ops and reductions.
    routine: bool,
    /// Seconds of one run, the median.
    pub seconds: f64,
    /// Runs far from the median.
    pub outliers: usize,
    pub cost: show::Cost,
    /// Of a collective: seconds of one run during which other kernels run, which are no part of `seconds`; the mean.
    pub hidden: Option<f64>,
}

impl Timing {
    /// Returns the bound, and the time at that peak as a share of the measured time, if the peak is
    /// measured.
    ///
    /// Operations are compared with the peak of products only for routines: no other kernel could reach it.
    pub fn bound(&self, c: &Ceiling) -> (Option<f64>, Bound) {
        let memory = (self.cost.read + self.cost.written) as f64 / c.bytes / self.seconds;
        let compute = if self.routine { self.cost.flops as f64 / c.flops / self.seconds } else { 0.0 };
        let cached = memory > THROUGH_MEMORY;
        if self.seconds < LAUNCH && memory.max(compute) < 0.5 {
            (None, Bound::Launch)
        } else if compute >= PRODUCT || (compute > memory) || (cached && compute >= 0.5) {
            (Some(compute), Bound::Compute)
        } else if cached {
            (None, Bound::Cache)
        } else if self.routine || memory >= 0.4 {
            (Some(memory), Bound::Memory)
        } else {
            (None, Bound::Compute)
        }
    }
}

impl Profile {
    /// The time slots of a plan that is about to run: of its kernels, and of collectives beside others.
    pub(crate) fn entry(&mut self, plan: &Rc<Plan>) -> [&mut [f64]; 2] {
        let kernels = plan.step.program.kernels.len();
        let new = || Entry { plan: plan.clone(), runs: Vec::new(), hidden: vec![0.0; kernels] };
        let entry = self.plans.entry(Rc::as_ptr(plan)).or_insert_with(new);
        entry.runs.push(vec![0.0; kernels]);
        let at = entry.runs.len() - 1;
        [&mut entry.runs[at], &mut entry.hidden]
    }

    /// All kernels: slowest plan first, each in the order it runs them.
    pub fn timings(&self, source_map: &SourceMap) -> Vec<Timing> {
        let mut plans: Vec<&Entry> = self.plans.values().collect();
        let kernels = |e: &Entry| e.plan.step.program.kernels.len();
        // Without times the larger plan comes first.
        plans.sort_by(|a, b| b.total().total_cmp(&a.total()).then(kernels(b).cmp(&kernels(a))));
        let mut out = Vec::new();
        for (at, e) in plans.into_iter().enumerate() {
            for (k, kernel) in e.plan.step.program.kernels.iter().enumerate() {
                let samples: Vec<f64> = e.runs.iter().filter_map(|run| run.get(k).copied()).collect();
                out.push(Timing {
                    plan: at,
                    runs: samples.len() as u64,
                    name: show::name(kernel),
                    space: show::space(kernel),
                    place: source_map.show(show::place(kernel.origin(), &e.plan.step.source_map)),
                    routine: matches!(kernel, Kernel::Library(_)),
                    seconds: median(&samples),
                    outliers: outliers(&samples).len(),
                    cost: show::cost(&e.plan.step.program, kernel),
                    hidden: lanes::collective(kernel).map(|_| e.hidden[k] / samples.len().max(1) as f64),
                });
            }
        }
        out
    }
}

/// The totals of kernels with the same bound.
#[derive(Clone, Copy, Default)]
struct Part {
    seconds: f64,
    /// The seconds of kernels whose peak is measured, and the seconds that these would take at it.
    measured: f64,
    ideal: f64,
}

/// Total seconds, bytes and operations of some kernels.
#[derive(Default)]
struct Sum {
    seconds: f64,
    bytes: f64,
    flops: f64,
    kernels: u64,
    outliers: usize,
    /// Totals by bound.
    by: [Part; Bound::ALL.len()],
}

impl Sum {
    fn add(&mut self, t: &Timing, c: &Ceiling) {
        let all = t.seconds * t.runs as f64;
        let (share, bound) = t.bound(c);
        self.seconds += all;
        self.bytes += (t.cost.read + t.cost.written) as f64 * t.runs as f64;
        self.flops += t.cost.flops as f64 * t.runs as f64;
        self.kernels += t.runs;
        self.outliers += t.outliers;
        let part = &mut self.by[bound as usize];
        part.seconds += all;
        if let Some(share) = share {
            part.measured += all;
            part.ideal += share * all;
        }
    }

    /// Returns the bound of most of the time, and the share of that peak that these kernels reach.
    fn bound(&self) -> (Option<f64>, &'static str) {
        let seconds = |b: &Bound| self.by[*b as usize].seconds;
        let Some(most) = Bound::ALL.into_iter().max_by(|a, b| seconds(a).total_cmp(&seconds(b))) else {
            return (None, "");
        };
        let part = self.by[most as usize];
        ((part.measured > 0.0).then(|| part.ideal / part.measured), most.name())
    }
}

/// Formats a share of a peak in `width` characters, or a dash if the peak is unknown.
fn percent(share: Option<f64>, width: usize) -> String {
    match share {
        Some(share) => format!("{:>width$.0} %", share * 100.0),
        None => format!("{:>width$}  ", "-"),
    }
}

/// Formats a table by recipe line, over `steps` steps: share, microseconds a step, kernels a step, GB/s, GFLOP/s, the bound of
/// most of its time and before it the percent of that peak. Stalls of the host, of one step each, have separate lines: they
/// have no kernels, and may overlap kernels of other lines.
pub fn by_line(timings: &[Timing], waits: &[Wait], c: &Ceiling, steps: u32) -> String {
    let mut lines: Vec<(&str, Sum)> = Vec::new();
    for t in timings {
        let at = lines.iter().position(|l| l.0 == t.place).unwrap_or_else(|| {
            lines.push((&t.place, Sum::default()));
            lines.len() - 1
        });
        lines[at].1.add(t, c);
    }
    lines.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let total: f64 = lines.iter().map(|l| l.1.seconds).chain(waits.iter().map(|w| w.seconds * f64::from(steps))).sum();
    let mut out = String::from(
        "  share   us a step  kernels       rate of bytes and operations   of ceiling  bound by  recipe line\n",
    );
    for (place, s) in &lines {
        let (reached, bound) = s.bound();
        let _ = writeln!(
            out,
            "{:>5.1} % {:>11.1} {:>8} {:>9.1} GB/s {:>10.1} GFLOP/s {}  {bound:<8}  {place}",
            s.seconds / total * 100.0,
            s.seconds / f64::from(steps) * 1e6,
            s.kernels / u64::from(steps),
            s.bytes / s.seconds / 1e9,
            s.flops / s.seconds / 1e9,
            percent(reached, 10),
        );
    }
    for w in waits {
        let what = match w.bound {
            Bound::Data => "the host makes batches",
            _ => "the host waits for a value",
        };
        let _ = writeln!(
            out,
            "{:>5.1} % {:>11.1} {:>8} {what:<37} {:>12}  {:<8}  {}",
            w.seconds * f64::from(steps) / total * 100.0,
            w.seconds * 1e6,
            "",
            format!("{:.1} a step", w.count as f64 / f64::from(steps)),
            w.bound.name(),
            w.place,
        );
    }
    out
}

/// Says how much of the time of collectives is hidden behind other kernels, over `steps` steps; `None` without any.
pub fn overlap(timings: &[Timing], steps: u32) -> Option<String> {
    let (mut exposed, mut hidden, mut calls) = (0.0, 0.0, 0);
    for t in timings {
        if let Some(own) = t.hidden {
            hidden += own * t.runs as f64;
            exposed += t.seconds * t.runs as f64;
            calls += t.runs;
        }
    }
    if calls == 0 {
        return None;
    }
    let (steps, all) = (f64::from(steps), exposed + hidden);
    let share = if all > 0.0 { hidden / all * 100.0 } else { 0.0 };
    Some(format!(
        "collectives: {:.1} calls and {:.1} us a step; {share:.1} % of it is hidden behind other kernels, {:.1} us are waited for",
        calls as f64 / steps,
        all / steps * 1e6,
        exposed / steps * 1e6,
    ))
}

/// Formats a table by kernel, plan by plan, slowest first, equal kernels of a line together: share, microseconds a run, count,
/// GB/s, GFLOP/s, percent of the bound's peak, bound, kernel, recipe line. Times are medians over the runs; a star marks those
/// with outliers.
pub fn by_kernel(timings: &[Timing], c: &Ceiling) -> String {
    let mut out = String::new();
    for plan in timings.chunk_by(|a, b| a.plan == b.plan) {
        let sum: f64 = plan.iter().map(|t| t.seconds).sum();
        let _ = writeln!(out, "{} runs · {:.0} us a run · {} kernels", plan[0].runs, sum * 1e6, plan.len());
        let runs = plan[0].runs as f64;
        let mut kinds: Vec<(&Timing, Sum)> = Vec::new();
        let mut known: HashMap<(&str, &str, &str), usize> = HashMap::new();
        for t in plan {
            let at = *known.entry((&t.name, &t.space, &t.place)).or_insert_with(|| {
                kinds.push((t, Sum::default()));
                kinds.len() - 1
            });
            kinds[at].1.add(t, c);
        }
        kinds.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        for (t, s) in kinds {
            let (share, bound) = s.bound();
            let far = if s.outliers > 0 { '*' } else { ' ' };
            let _ = writeln!(
                out,
                "{:>5.1} % {:>9.1} us{far}{:>4} x {:>7.1} GB/s {:>8.1} GFLOP/s {} {bound:<7}  {:<40} {:<22} {}",
                s.seconds / runs / sum * 100.0,
                s.seconds / runs * 1e6,
                s.kernels / plan[0].runs,
                s.bytes / s.seconds / 1e9,
                s.flops / s.seconds / 1e9,
                percent(share, 4),
                t.name,
                t.space,
                t.place,
            );
        }
    }
    if timings.iter().any(|t| t.outliers > 0) {
        let _ = writeln!(out, "* some runs are outliers: {RULE}");
    }
    out
}

/// Writes the timeline of one average run of each plan, in the format of chrome://tracing and Perfetto: kernels one after
/// the other, as they were timed, a row a plan; and the host's waits of a step, likewise. Times are in microseconds.
pub fn trace(timings: &[Timing], waits: &[Wait], c: &Ceiling) -> String {
    let text = |s: &str| s.replace('\\', "\\\\").replace('"', "\\\"");
    let mut events = Vec::new();
    for plan in timings.chunk_by(|a, b| a.plan == b.plan) {
        let mut at = 0.0;
        for t in plan {
            let (share, bound) = t.bound(c);
            events.push(format!(
                r#"{{"name":"{}","cat":"kernel","ph":"X","pid":0,"tid":{},"ts":{:.3},"dur":{:.3},"args":{{"line":"{}","space":"{}","bytes_read":{},"bytes_written":{},"flops":{},"percent_of_ceiling":{},"bound":"{}"}}}}"#,
                text(&t.name),
                t.plan,
                at,
                t.seconds * 1e6,
                text(&t.place),
                text(&t.space),
                t.cost.read,
                t.cost.written,
                t.cost.flops,
                share.map_or("null".into(), |s| format!("{:.1}", s * 100.0)),
                bound.name(),
            ));
            at += t.seconds * 1e6;
        }
        events.push(format!(
            r#"{{"name":"thread_name","ph":"M","pid":0,"tid":{0},"args":{{"name":"plan {0}, {1} runs"}}}}"#,
            plan[0].plan, plan[0].runs
        ));
    }
    let mut at = 0.0;
    for w in waits {
        let each = w.seconds * 1e6;
        events.push(format!(
            r#"{{"name":"{0}","cat":"wait","ph":"X","pid":1,"tid":0,"ts":{at:.3},"dur":{each:.3},"args":{{"line":"{1}","bound":"{0}","times":{2}}}}}"#,
            w.bound.name(),
            text(&w.place),
            w.count,
        ));
        at += each;
    }
    if !waits.is_empty() {
        events.push(r#"{"name":"process_name","ph":"M","pid":1,"args":{"name":"waits of the host"}}"#.into());
    }
    format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(name: &str, routine: bool, seconds: f64, bytes: usize, flops: usize) -> Timing {
        let cost = show::Cost { read: bytes, written: 0, flops };
        let (name, place) = (name.to_string(), "a.lua:1".to_string());
        Timing {
            plan: 0,
            runs: 2,
            name,
            space: "\"8\"".into(),
            place,
            routine,
            seconds,
            outliers: 0,
            cost,
            hidden: None,
        }
    }

    #[test]
    fn the_overlap_of_collectives_is_summed() {
        let collective = |seconds, hidden| Timing { hidden: Some(hidden), ..timing("all_reduce", true, seconds, 8, 0) };
        let all = [timing("copy", false, 3e-3, 8, 0), collective(1e-3, 3e-3), collective(0.0, 1e-3)];
        let text = overlap(&all, 2).unwrap();
        let want = "collectives: 2.0 calls and 5000.0 us a step; 80.0 % of it is hidden behind other kernels, 1000.0 us are waited for";
        assert_eq!(text, want);
        assert_eq!(overlap(&all[..1], 2), None);
    }

    #[test]
    fn kernels_are_held_against_the_ceiling() {
        let c = Ceiling { bytes: 1e9, flops: 1e12 };
        assert_eq!(timing("copy", false, 1e-3, 800_000, 0).bound(&c), (Some(0.8), Bound::Memory));
        assert_eq!(timing("exp", false, 1e-3, 100_000, 1 << 20).bound(&c), (None, Bound::Compute));
        assert_eq!(timing("matmul", true, 1e-3, 100_000, 500_000_000).bound(&c), (Some(0.5), Bound::Compute));
        assert_eq!(timing("sum", false, 2e-6, 100, 0).bound(&c).1, Bound::Launch);
        let all = [timing("copy", false, 3e-3, 2_400_000, 0), timing("exp", false, 1e-3, 100_000, 0)];
        let table = by_line(&all, &[], &c, 2);
        assert!(table.contains("100.0 %      4000.0        2"), "{table}");
        assert!(table.contains("memory    a.lua:1"), "{table}");
        assert!(by_kernel(&all, &c).starts_with("2 runs · 4000 us a run · 2 kernels\n 75.0 %    3000.0 us    1 x"));
        let trace = trace(&all, &[], &c);
        assert!(
            trace.contains(r#""name":"exp","cat":"kernel","ph":"X","pid":0,"tid":0,"ts":3000.000,"dur":1000.000"#),
            "{trace}"
        );
        assert!(trace.contains(r#""space":"\"8\"""#), "{trace}");
    }

    #[test]
    fn what_lies_in_caches_is_not_held_against_memory() {
        let c = Ceiling { bytes: 1e9, flops: 1e12 };
        // Twice the memory bandwidth, so the data were in a cache.
        assert_eq!(timing("copy", false, 1e-3, 2_000_000, 0).bound(&c), (None, Bound::Cache));
        assert_eq!(timing("index_select", true, 1e-3, 5_000_000, 0).bound(&c), (None, Bound::Cache));
        // A product near the peak of products is bound by it, whether it reads from caches or from memory.
        assert_eq!(timing("matmul", true, 1e-3, 2_120_000, 920_000_000).bound(&c), (Some(0.92), Bound::Compute));
        assert_eq!(timing("matmul", true, 1e-3, 950_000, 920_000_000).bound(&c), (Some(0.92), Bound::Compute));
        assert_eq!(timing("matmul", true, 1e-3, 800_000, 300_000_000).bound(&c), (Some(0.8), Bound::Memory));
        // A line's percent is that of its main bound; kernels with another bound are excluded.
        let all = [timing("copy", false, 3e-3, 1_500_000, 0), timing("matmul", true, 1e-3, 9_000_000, 950_000_000)];
        let table = by_line(&all, &[], &c, 2);
        assert!(table.contains(" 50 %  memory    a.lua:1"), "{table}");
        let cached = [timing("copy", false, 1e-3, 9_000_000, 0)];
        assert!(by_line(&cached, &[], &c, 2).contains(" -    cache     a.lua:1"), "{}", by_line(&cached, &[], &c, 2));
        assert!(by_kernel(&cached, &c).contains("    -   cache "), "{}", by_kernel(&cached, &c));
        assert!(trace(&cached, &[], &c).contains(r#""percent_of_ceiling":null,"bound":"cache""#));
    }

    #[test]
    fn waits_of_the_host_have_lines_of_their_own() {
        let mut waits = HostStalls::default();
        waits.add(Bound::Data, SourceLoc::NONE, 1e-3);
        waits.add(Bound::Sync, SourceLoc::NONE, 2e-3);
        waits.end_step();
        waits.add(Bound::Data, SourceLoc::NONE, 2e-3);
        waits.end_step();
        assert_eq!((waits.by_step(Bound::Data), waits.by_step(Bound::Sync)), (vec![1e-3, 2e-3], vec![2e-3, 0.0]));
        let mut list = waits.list(&SourceMap::default());
        assert_eq!((list[0].bound, list[0].count, list[1].bound), (Bound::Data, 2, Bound::Sync));
        list[1].place = "a.lua:3".into();
        let c = Ceiling { bytes: 1e9, flops: 1e12 };
        let all = [timing("copy", false, 2.5e-3, 2_000_000, 0)];
        let table = by_line(&all, &list, &c, 2);
        let ends =
            |line: &str| table.lines().any(|l| l.split_whitespace().collect::<Vec<_>>().join(" ").ends_with(line));
        assert!(ends("30.0 % 1500.0 the host makes batches 1.0 a step data recipe.data"), "{table}");
        assert!(ends("20.0 % 1000.0 the host waits for a value 0.5 a step sync a.lua:3"), "{table}");
        let trace = trace(&all, &list, &c);
        assert!(
            trace.contains(r#""name":"sync","cat":"wait","ph":"X","pid":1,"tid":0,"ts":1500.000,"dur":1000.000"#),
            "{trace}"
        );
    }
}
