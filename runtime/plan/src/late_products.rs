//! Delays products behind the start of the last large combination of a step, so that they hide it.
//!
//! The gradient of the first layers is computed last, and nothing but the optimizer follows it. In a language model that is the
//! gradient of the embedding, often the largest of all: its sum over the devices would be waited for. Only collectives, and what
//! follows them, read the products that compute gradients of weights. So some of these products run beside the sum: as many as take as
//! long. (Zero-bubble schedules delay them to fill a pipeline, Qi et al., arXiv:2401.10241.)
//!
//! It is a function of the program alone, so all devices decide alike.

use crate::ir::{Kernel, Library, Value, ValueId};
use crate::kernel_order::one_by_one;
use crate::lanes::{FIRST_BUCKET_BYTES, collective};
use crate::route::Route;
use perilune_core::ops::collective::{ALL_REDUCE, REDUCE_SCATTER};

/// Moves the anchors of products. `producers` and `users`: for each kernel, those that it follows and those that follow it. `exchanges`:
/// which kernels exchange terms ([`crate::lanes::term_exchanges`]). `work`: the operations of each kernel. Returns the result of the
/// combination behind whose start they are, if there are any.
pub(crate) fn delay(
    kernels: &mut [(u32, Kernel)],
    values: &[Value],
    producers: &[Vec<usize>],
    users: &[impl AsRef<[usize]>],
    exchanges: &[bool],
    work: &[usize],
    route: Route,
) -> Option<ValueId> {
    let sending = |bytes: usize| bytes.saturating_mul(route.flops_a_byte());
    let bytes = |v: ValueId| values[v.0 as usize].nbytes();
    let combined = |k: usize| {
        let combines = |l: &&Library| l.op == &ALL_REDUCE || l.op == &REDUCE_SCATTER || exchanges[k];
        let l = collective(&kernels[k].1).filter(combines)?;
        Some(l.outputs.iter().map(|v| bytes(*v)).sum::<usize>())
    };
    let combined: Vec<Option<usize>> = (0..kernels.len()).map(combined).collect();
    let order = one_by_one(kernels, producers, users);
    let is_large = |k: &usize| combined[*k].is_some_and(|bytes| bytes >= FIRST_BUCKET_BYTES);
    let last = order.iter().rposition(is_large)?;
    let before = ancestors(order[last], producers);
    // What is combined from some point on is hidden by the work from there on. `missing`: where most is not.
    let (mut sent, mut done, mut missing) = (0usize, 0usize, 0usize);
    for k in order.iter().rev() {
        sent = sent.saturating_add(combined[*k].unwrap_or(0));
        done = done.saturating_add(work[*k]);
        missing = missing.max(sending(sent).saturating_sub(done));
    }
    let late = read_late(&combined, &order, users);
    // Behind all that the combination follows.
    let first = order[..=last].iter().filter(|k| before[**k] || **k == order[last]).map(|k| kernels[*k].0 + 1).max();
    let first = first.unwrap_or(0);
    let mut from = last;
    for (at, k) in order[..last].iter().enumerate().rev() {
        if missing == 0 {
            break;
        }
        let result: usize = kernels[*k].1.writes().into_iter().map(bytes).sum();
        // Its own result has to be combined too, behind it.
        let gains = work[*k].saturating_sub(sending(result));
        if late[*k] && !before[*k] && gains > work[*k] / 4 {
            (kernels[*k].0, from) = (first, at);
            missing = missing.saturating_sub(gains);
        }
    }
    // What reads a sum that is complete by then waits for it, so it comes behind them.
    for k in order[from..last].iter().filter(|k| !before[**k] && combined[**k].is_none()) {
        if producers[*k].iter().any(|p| combined[*p].is_some()) {
            kernels[*k].0 = first + 1;
        }
    }
    kernels[order[last]].1.writes().first().copied().filter(|_| from < last)
}

/// Which kernels `k` follows.
fn ancestors(k: usize, producers: &[Vec<usize>]) -> Vec<bool> {
    let (mut out, mut next) = (vec![false; producers.len()], vec![k]);
    while let Some(k) = next.pop() {
        for p in &producers[k] {
            if !std::mem::replace(&mut out[*p], true) {
                next.push(*p);
            }
        }
    }
    out
}

/// Which kernels are followed by combinations alone, or by what follows these, or by kernels that are.
fn read_late(combined: &[Option<usize>], order: &[usize], users: &[impl AsRef<[usize]>]) -> Vec<bool> {
    let mut out = vec![false; combined.len()];
    for k in order.iter().rev().filter(|k| combined[**k].is_none()) {
        let all = users[*k].as_ref();
        // What adds exchanged terms.
        let follows = |u: &usize| all.iter().any(|c| combined[*c].is_some() && users[*c].as_ref().contains(u));
        out[*k] = !all.is_empty() && all.iter().all(|u| combined[*u].is_some() || out[*u] || follows(u));
    }
    out
}
