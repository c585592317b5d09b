//! Formats what `perilune check` says of a mesh: the placement of States, and the collectives of a step.

use crate::format::bytes;
use perilune_core::Mesh;
use perilune_core::mesh::Axis;
use perilune_core::source_loc::SourceLoc;
use perilune_lua::StateInfo;
use perilune_plan::pipelining::{Action, Cell, Schedule, StageCost};
use perilune_plan::show::scaled;
use perilune_plan::{BufferDesc, Transfer};
use std::collections::BTreeSet;

/// Lines of a table at most; the rest is summed up.
const MOST_LINES: usize = 24;

/// Aligns the columns of a table: the first ones to the left, the last `right` ones to the right.
pub fn aligned(rows: &[Vec<String>], right: usize) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|row| row.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let cell = |(c, text): (usize, &String)| match c + right >= columns {
        true => format!("{text:>w$}", w = widths[c]),
        false => format!("{text:<w$}", w = widths[c]),
    };
    rows.iter()
        .map(|row| row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_string())
        .collect()
}

/// Replaces the numbers of blocks, so that like States share a line: `model.blocks.3.attn.wq` -> `model.blocks.*.attn.wq`.
fn pattern(path: &str) -> String {
    let part = |p: &str| if p.bytes().all(|b| b.is_ascii_digit()) { "*".to_string() } else { p.to_string() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The placement of States, one line for those of like path, shape and placement; those with the most bytes first.
pub fn states(mesh: &Mesh, all: &[(String, StateInfo)]) -> Vec<String> {
    struct Group {
        path: String,
        desc: BufferDesc,
        count: usize,
        local: usize,
    }
    let mut groups: Vec<Group> = Vec::new();
    for (path, info) in all {
        let desc = BufferDesc { shape: info.shape, dtype: info.dtype, placement: info.placement };
        let local = desc.local(mesh).map_or(desc.nbytes(), |part| part.nbytes());
        let path = pattern(path);
        match groups.iter_mut().find(|g| g.path == path && g.desc == desc) {
            Some(g) => (g.count, g.local) = (g.count + 1, g.local + local),
            None => groups.push(Group { path, desc, count: 1, local }),
        }
    }
    groups.sort_by_key(|g| std::cmp::Reverse(g.local));
    let mut rows = vec![["path", "shape", "placement", "number", "a device"].map(String::from).to_vec()];
    for g in groups.iter().take(MOST_LINES) {
        let shape = format!("{} {}", g.desc.shape, g.desc.dtype);
        rows.push(vec![g.path.clone(), shape, g.desc.placement.to_string(), g.count.to_string(), bytes(g.local)]);
    }
    let mut lines = aligned(&rows, 2);
    if let Some(rest) = groups.get(MOST_LINES..).filter(|rest| !rest.is_empty()) {
        lines.push(format!("and {} more kinds: {}", rest.len(), bytes(rest.iter().map(|g| g.local).sum())));
    }
    lines
}

/// The pipeline stages with their work in a micro-batch, the bytes of their States, what they receive, and the schedule. Nothing without
/// an axis `pp`.
pub fn stages(
    mesh: &Mesh,
    costs: &[StageCost],
    schedule: &Schedule,
    micros: usize,
    all: &[(String, StateInfo)],
) -> Vec<String> {
    let devices = schedule.devices(mesh.size(Axis::Pp));
    if mesh.size(Axis::Pp) == 1 || costs.len() != devices.len() {
        return Vec::new();
    }
    let total: u64 = costs.iter().map(|c| c.flops).sum();
    let heads = ["stage", "device", "forward", "share", "States", "received a micro-batch"];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for (k, cost) in costs.iter().enumerate() {
        let desc = |info: &StateInfo| BufferDesc { shape: info.shape, dtype: info.dtype, placement: info.placement };
        let of_stage = |info: &StateInfo| info.placement.stage().is_none_or(|stage| stage == k);
        let of_device = |info: &StateInfo| desc(info).bytes_along_pp(mesh, devices[k]);
        let states: usize = all.iter().filter(|(_, info)| of_stage(info)).map(|(_, info)| of_device(info)).sum();
        let share = format!("{:.0} %", 100.0 * cost.flops as f64 / total.max(1) as f64);
        rows.push(vec![
            k.to_string(),
            devices[k].to_string(),
            scaled(cost.flops as usize, "FLOP"),
            share,
            bytes(states),
            bytes(cost.received as usize),
        ]);
    }
    let mut lines = aligned(&rows, 4);
    // A backward pass is two products for each one of the forward pass.
    let cost = |cell: &Cell| {
        let forward = costs.get(cell.stage).map_or(0, |c| c.flops);
        if cell.action == Action::Backward { 2 * forward } else { forward }
    };
    let waits = schedule
        .table(mesh.size(Axis::Pp), micros)
        .and_then(|table| table.simulate(&|entry| entry.iter().map(cost).sum()));
    if let Ok(time) = waits {
        let idle: u64 = time.idle.iter().sum();
        let waits = 100.0 * idle as f64 / (time.end * mesh.size(Axis::Pp) as u64).max(1) as f64;
        lines.push(format!(
            "schedule {}, {micros} micro-batches: devices wait {waits:.0} % of a step, transfers not counted",
            schedule.name()
        ));
    }
    lines
}

/// The collectives of a step by op, axis and recipe line; those with the most bytes first. `show` formats a line.
pub fn transfers(mesh: &Mesh, all: &[Transfer], show: impl Fn(SourceLoc) -> String) -> Vec<String> {
    if all.is_empty() {
        return vec!["nothing".to_string()];
    }
    let mut groups: Vec<(Transfer, usize)> = Vec::new();
    for t in all {
        let same =
            |g: &&mut (Transfer, usize)| (g.0.op, g.0.axis, g.0.loc, g.0.backward) == (t.op, t.axis, t.loc, t.backward);
        match groups.iter_mut().find(same) {
            Some((sum, count)) => (sum.bytes, *count) = (sum.bytes + t.bytes, *count + 1),
            None => groups.push((*t, 1)),
        }
    }
    groups.sort_by_key(|g| std::cmp::Reverse(g.0.bytes));
    let mut rows = vec![["op", "axis", "line", "", "number", "bytes"].map(String::from).to_vec()];
    for (t, count) in groups.iter().take(MOST_LINES) {
        let pass = if t.backward { "backward" } else { "" };
        let line = if t.loc == SourceLoc::NONE { String::new() } else { show(t.loc) };
        rows.push(vec![t.op.into(), t.axis.name().into(), line, pass.into(), count.to_string(), bytes(t.bytes)]);
    }
    let mut lines = aligned(&rows, 2);
    if let Some(rest) = groups.get(MOST_LINES..).filter(|rest| !rest.is_empty()) {
        lines.push(format!("and {} more: {}", rest.len(), bytes(rest.iter().map(|g| g.0.bytes).sum())));
    }
    let sum: usize = all.iter().map(|t| t.bytes).sum();
    let sent: usize = all.iter().map(|t| t.sent(mesh)).sum();
    let calls: BTreeSet<usize> = all.iter().map(|t| t.call).collect();
    let (sum, sent, calls) = (bytes(sum), bytes(sent), calls.len());
    lines.push(format!("{} collectives, {sum} in all, in {calls} calls; a device sends {sent}", all.len()));
    lines
}

/// How attention whose queries are split gets the keys of other devices, a line for each form and recipe line. `show` formats a line.
pub fn keys(all: &[(&'static str, Axis, SourceLoc)], show: impl Fn(SourceLoc) -> String) -> Vec<String> {
    let mut groups: Vec<((&'static str, Axis, SourceLoc), usize)> = Vec::new();
    for one in all {
        match groups.iter_mut().find(|g| g.0 == *one) {
            Some((_, count)) => *count += 1,
            None => groups.push((*one, 1)),
        }
    }
    if groups.is_empty() {
        return Vec::new();
    }
    let mut rows = vec![["form", "axis", "line", "number"].map(String::from).to_vec()];
    for ((form, axis, loc), count) in groups.iter().take(MOST_LINES) {
        let line = if *loc == SourceLoc::NONE { String::new() } else { show(*loc) };
        rows.push(vec![(*form).into(), axis.name().into(), line, count.to_string()]);
    }
    let mut lines = aligned(&rows, 1);
    if let Some(rest) = groups.get(MOST_LINES..).filter(|rest| !rest.is_empty()) {
        lines.push(format!("and {} more lines", rest.len()));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::mesh::Along;
    use perilune_core::{DType, Placement, Shape};

    #[test]
    fn like_states_share_a_line_and_the_largest_comes_first() {
        let mesh = Mesh::parse("dp=4").unwrap();
        let info = |dims: &[usize], placement| StateInfo {
            shape: Shape::of(dims),
            dtype: DType::F32,
            placement,
            trainable: true,
            frozen: false,
        };
        let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
        let all = [
            ("model.blocks.0.w".to_string(), info(&[8, 4], Placement::REPLICATED)),
            ("model.blocks.1.w".to_string(), info(&[8, 4], Placement::REPLICATED)),
            ("optim.adamw.m.blocks.0.w".to_string(), info(&[800, 4], split)),
        ];
        let lines = states(&mesh, &all);
        assert_eq!(
            lines,
            [
                "path                      shape         placement    number  a device",
                "optim.adamw.m.blocks.*.w  {800, 4} f32  dp: split 0       1    3.2 kB",
                "model.blocks.*.w          {8, 4} f32    replicated        2     256 B",
            ]
        );
    }

    #[test]
    fn collectives_of_a_line_are_summed() {
        let t = |op, call, bytes| Transfer { op, axis: Axis::Dp, call, bytes, loc: SourceLoc::NONE, backward: true };
        let mesh = Mesh::parse("dp=2").unwrap();
        let all = [t("all_reduce", 0, 1000), t("all_gather", 1, 50), t("all_reduce", 0, 2000)];
        let lines = transfers(&mesh, &all, |_| "x".into());
        assert_eq!(lines.last().unwrap(), "3 collectives, 3.0 kB in all, in 2 calls; a device sends 3.0 kB");
        assert!(lines[1].starts_with("all_reduce") && lines[1].ends_with("2  3.0 kB"), "{lines:?}");
    }
}
