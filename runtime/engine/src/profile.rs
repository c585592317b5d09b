//! Where the time goes: seconds by kernel, over all runs since profiling was switched on.

use perilune_core::site::Sites;
use perilune_plan::{Plan, show};
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
    runs: u64,
    seconds: Vec<f64>,
}

impl Profile {
    /// The time slots of a plan that is about to run.
    pub(crate) fn entry(&mut self, plan: &Rc<Plan>) -> &mut [f64] {
        let new = || Entry { plan: plan.clone(), runs: 0, seconds: vec![0.0; plan.program.kernels.len()] };
        let entry = self.plans.entry(Rc::as_ptr(plan)).or_insert_with(new);
        entry.runs += 1;
        &mut entry.seconds
    }

    /// A table, slowest plan first and slowest kernel first: share, microseconds a run, GB/s, GFLOP/s, kernel, recipe line.
    pub fn report(&self, sites: &Sites) -> String {
        let mut out = String::new();
        let mut plans: Vec<&Entry> = self.plans.values().collect();
        let total = |e: &Entry| e.seconds.iter().sum::<f64>();
        plans.sort_by(|a, b| total(b).total_cmp(&total(a)));
        for e in plans {
            let sum = total(e);
            let runs = e.runs as f64;
            let _ = writeln!(out, "{} runs · {:.0} us a run · {} kernels", e.runs, sum / runs * 1e6, e.seconds.len());
            let mut order: Vec<usize> = (0..e.seconds.len()).collect();
            order.sort_by(|a, b| e.seconds[*b].total_cmp(&e.seconds[*a]));
            for k in order {
                let kernel = &e.plan.program.kernels[k];
                let cost = show::cost(&e.plan.program, kernel);
                let each = e.seconds[k] / runs;
                let _ = writeln!(
                    out,
                    "{:>5.1} % {:>9.1} us {:>7.1} GB/s {:>7.1} GFLOP/s  {:<40} {:<22} {}",
                    e.seconds[k] / sum * 100.0,
                    each * 1e6,
                    (cost.read + cost.written) as f64 / each / 1e9,
                    cost.flops as f64 / each / 1e9,
                    show::name(kernel),
                    show::space(kernel),
                    sites.show(show::place(kernel.origin(), &e.plan.sites)),
                );
            }
        }
        out
    }
}
