//! Formats predictions of `perilune check --for`: the time of a step, what devices send, and memory by role.
//!
//! All numbers are predictions from a table of rates (`plan/src/predict`); the text says so.

use super::check_mesh::aligned;
use crate::format::bytes;
use perilune_core::Mesh;
use perilune_core::error::Result;
use perilune_core::mesh::Axis;
use perilune_core::source_loc::SourceLoc;
use perilune_lua::StateInfo;
use perilune_plan::BufferDesc;
use perilune_plan::pipelining::Schedule;
use perilune_plan::predict::{Calibration, KernelClass, Machine, Prediction, Sent};

/// Lines of a table at most; the rest is summed up.
const MOST_LINES: usize = 24;

/// Formats seconds: `64.1 ms`, `830 us`.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 0.9995 => format!("{s:.2} s"),
        s if s >= 0.000_999_5 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// The machine whose times are predicted.
pub fn machine(gpu: &str, mesh: Mesh, hosts: Option<usize>) -> Result<Machine> {
    Machine::new(Calibration::of(gpu)?, mesh, hosts)
}

/// The time of a step, and its kernels by class, the longest first.
pub fn step(p: &Prediction) -> Vec<String> {
    let mut head = format!("predicted {} a step", time(p.serial));
    if !p.sent.is_empty() {
        head = format!(
            "predicted {} a step if nothing overlaps, {} if collectives run beside kernels",
            time(p.serial),
            time(p.overlapped)
        );
    }
    let mut classes: Vec<&(KernelClass, f64)> = p.classes.iter().collect();
    classes.sort_by(|a, b| b.1.total_cmp(&a.1));
    let share = |(class, seconds): &&(KernelClass, f64)| {
        format!("{} {} ({})", class.name(), time(*seconds), percent(seconds / p.serial))
    };
    let mut lines = vec![head, classes.iter().map(share).collect::<Vec<_>>().join(", ")];
    if let Some(bubble) = p.bubble() {
        lines.push(format!(
            "mean of the {} devices along pp; they wait {} for other stages",
            p.devices.len(),
            percent(bubble)
        ));
    }
    lines
}

/// The devices along `pp`: their stages, for how long they work and wait, and their memory. Nothing without stages.
pub fn devices(
    p: &Prediction,
    mesh: &Mesh,
    schedule: &Schedule,
    micros: usize,
    all: &[(String, StateInfo)],
    slots: &[usize],
) -> Vec<String> {
    let (home, table) = (schedule.devices(p.devices.len()), schedule.table(p.devices.len(), micros));
    let (Ok(table), false) = (table, p.devices.is_empty()) else { return Vec::new() };
    let heads = ["device", "stages", "works", "waits", "sends", "passes kept", "States", "intermediate", "messages"];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for ((k, device), kept) in p.devices.iter().enumerate().zip(table.kept()) {
        let stages = home.iter().enumerate().filter(|(_, d)| **d == k).map(|(stage, _)| stage.to_string());
        let desc = |info: &StateInfo| BufferDesc { shape: info.shape, dtype: info.dtype, placement: info.placement };
        let states: usize = all.iter().map(|(_, info)| desc(info).bytes_along_pp(mesh, k)).sum();
        rows.push(vec![
            k.to_string(),
            stages.collect::<Vec<_>>().join(" "),
            time(device.busy),
            percent((1.0 - device.busy / p.serial).max(0.0)),
            bytes(device.sent),
            kept.to_string(),
            bytes(states),
            bytes(device.arena),
            bytes(slots.get(k).copied().unwrap_or(0)),
        ]);
    }
    aligned(&rows, 7)
}

/// The collectives of a step by op, axis and recipe line; those that take longest first. `show` formats a line.
pub fn sent(all: &[Sent], show: impl Fn(SourceLoc) -> String) -> Vec<String> {
    if all.is_empty() {
        return vec!["nothing".to_string()];
    }
    let mut groups: Vec<(Sent, usize)> = Vec::new();
    for s in all {
        let t = s.transfer;
        let same = |g: &&mut (Sent, usize)| {
            let own = g.0.transfer;
            (own.op, own.axis, own.loc, own.backward) == (t.op, t.axis, t.loc, t.backward)
        };
        match groups.iter_mut().find(same) {
            Some((sum, count)) => {
                *count += 1;
                sum.transfer.bytes += t.bytes;
                sum.seconds += s.seconds;
                sum.waited += s.waited;
            }
            None => groups.push((*s, 1)),
        }
    }
    groups.sort_by(|a, b| b.0.seconds.total_cmp(&a.0.seconds));
    let heads = ["op", "axis", "link", "line", "", "number", "bytes", "time", "hidden"];
    let mut rows = vec![heads.map(String::from).to_vec()];
    let hidden =
        |s: &Sent| if s.seconds > 0.0 { percent((1.0 - s.waited / s.seconds).clamp(0.0, 1.0)) } else { String::new() };
    for (s, count) in groups.iter().take(MOST_LINES) {
        let t = s.transfer;
        let pass = if t.backward { "backward" } else { "" };
        let line = if t.loc == SourceLoc::NONE { String::new() } else { show(t.loc) };
        let cells = [
            t.op,
            t.axis.name(),
            s.link.name(),
            &line,
            pass,
            &count.to_string(),
            &bytes(t.bytes),
            &time(s.seconds),
            &hidden(s),
        ];
        rows.push(cells.map(String::from).to_vec());
    }
    let mut lines = aligned(&rows, 4);
    if let Some(rest) = groups.get(MOST_LINES..).filter(|rest| !rest.is_empty()) {
        let seconds = rest.iter().map(|g| g.0.seconds).sum();
        lines.push(format!("and {} more: {}", rest.len(), time(seconds)));
    }
    for axis in Axis::ALL {
        let along: Vec<&Sent> = all.iter().filter(|s| s.transfer.axis == axis).collect();
        if along.is_empty() {
            continue;
        }
        let (total, seconds): (usize, f64) =
            (along.iter().map(|s| s.transfer.bytes).sum(), along.iter().map(|s| s.seconds).sum());
        let (name, link) = (axis.name(), along[0].link.name());
        lines.push(format!(
            "{name}: {} collectives of {} through {link}, {}",
            along.len(),
            bytes(total),
            time(seconds)
        ));
    }
    lines
}

/// Bytes on a device by role. `slots`: of messages from stage to stage.
pub fn memory(roles: Vec<(&'static str, usize)>, slots: usize, overhead: usize) -> String {
    let parts = roles
        .into_iter()
        .chain((slots > 0).then_some(("messages", slots)))
        .chain([("driver", overhead)])
        .map(|(name, n)| format!("{} {}", name.replace('_', " "), bytes(n)));
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::mesh::Along;
    use perilune_core::{DType, Placement, Shape};
    use perilune_plan::Transfer;
    use perilune_plan::predict::{DeviceTime, Link};

    #[test]
    fn devices_along_pp_have_their_stages_times_and_memory() {
        let device = |busy, arena| DeviceTime { busy, sent: 2000, arena };
        let devices = vec![device(0.006, 8000), device(0.009, 4000)];
        let p = Prediction { serial: 0.01, overlapped: 0.01, devices, ..Prediction::default() };
        let mesh = Mesh::parse("pp=2").unwrap();
        let placement = Placement::REPLICATED.with(Axis::Pp, Along::Stage { device: 1, stage: 2 });
        let (shape, dtype) = (Shape::of(&[250]), DType::F32);
        let info = StateInfo { shape, dtype, placement, trainable: true, frozen: false };
        let schedule = Schedule::parse("zbv").unwrap();
        assert_eq!(
            super::devices(&p, &mesh, &schedule, 4, &[("model.w".into(), info)], &[500, 600]),
            [
                "device  stages   works  waits   sends  passes kept  States  intermediate  messages",
                "0       0 3     6.0 ms   40 %  2.0 kB            4     0 B        8.0 kB     500 B",
                "1       1 2     9.0 ms   10 %  2.0 kB            4  1.0 kB        4.0 kB     600 B",
            ]
        );
        let lines = step(&p);
        assert_eq!(lines[2], "mean of the 2 devices along pp; they wait 25 % for other stages");
        assert!(super::devices(&Prediction::default(), &mesh, &schedule, 4, &[], &[]).is_empty());
    }

    #[test]
    fn times_have_three_digits_and_a_unit() {
        assert_eq!([1.5, 0.0641, 0.00083, 2e-7].map(time), ["1.50 s", "64.1 ms", "830 us", "0 us"]);
    }

    #[test]
    fn collectives_have_their_link_their_time_and_what_is_hidden() {
        let m = machine("h200", Mesh::parse("dp=2,tp=8").unwrap(), None).unwrap();
        let sent_ = |op, axis, bytes, seconds, waited| Sent {
            transfer: Transfer { op, axis, call: 0, bytes, loc: SourceLoc::NONE, backward: axis == Axis::Dp },
            link: m.link(axis),
            seconds,
            waited,
        };
        assert_eq!(m.link(Axis::Dp), Link::Network { of_a_host: 1 });
        let all = [
            sent_("all_reduce", Axis::Tp, 67_000_000, 0.0005, 0.0005),
            sent_("all_reduce", Axis::Tp, 67_000_000, 0.0005, 0.0),
            sent_("reduce_scatter", Axis::Dp, 250_000_000, 0.006, 0.0),
        ];
        assert_eq!(
            sent(&all, |_| "x".into()),
            [
                "op              axis  link     line            number     bytes    time  hidden",
                "reduce_scatter  dp    network        backward       1  250.0 MB  6.0 ms   100 %",
                "all_reduce      tp    NVLink                        2  134.0 MB  1.0 ms    50 %",
                "dp: 1 collectives of 250.0 MB through network, 6.0 ms",
                "tp: 2 collectives of 134.0 MB through NVLink, 1.0 ms",
            ]
        );
    }
}
