//! Simulates the programs of devices that wait for each other: kernels in program order, collectives on a lane for each axis, and
//! transfers from stage to stage.
//!
//! Without an axis `pp` one program stands for all devices. With it there is one for each coordinate along `pp`; the devices that run
//! one program are in step. Memory is not simulated, and a message waits for nothing but its sender and the messages before it.

use crate::ir::ValueId;
use perilune_core::mesh::Axis;
use rustc_hash::FxHashMap;

/// What a kernel of a program does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Event {
    Compute,
    Collective(Axis),
    /// Sends a message to the device with that coordinate along `pp`.
    Send {
        to: usize,
        number: i64,
    },
    Receive {
        from: usize,
        number: i64,
    },
}

/// A kernel of a program, and how long it takes. Values of different programs have different numbers.
#[derive(Clone, Debug)]
pub struct Task {
    pub event: Event,
    pub seconds: f64,
    pub reads: Vec<ValueId>,
    pub writes: Vec<ValueId>,
}

/// When programs end, and how long each works.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    pub end: f64,
    /// For each program, the seconds of its tasks.
    pub busy: Vec<f64>,
    /// For how long kernels wait for each task that sends something, by program and task.
    pub waited: FxHashMap<(usize, usize), f64>,
}

/// The task that made a value or a message: its program and number.
type Cause = Option<(usize, usize)>;

/// How far a program has come.
#[derive(Clone, Default)]
struct Clock {
    next: usize,
    compute: f64,
    lanes: [(f64, Cause); Axis::ALL.len()],
}

/// Runs the programs. With `overlap` what is sent runs on lanes beside kernels, else in the order of the program.
pub fn run(programs: &[Vec<Task>], overlap: bool) -> Timeline {
    let seconds = |tasks: &Vec<Task>| tasks.iter().map(|task| task.seconds).sum();
    let mut out = Timeline { busy: programs.iter().map(seconds).collect(), ..Timeline::default() };
    let mut clocks = vec![Clock::default(); programs.len()];
    // For each value, when it is complete and what has sent it; for each message, when it arrives.
    let mut ready: FxHashMap<ValueId, (f64, Cause)> = FxHashMap::default();
    let mut mail: FxHashMap<(usize, usize, i64), (f64, Cause)> = FxHashMap::default();
    loop {
        let mut advances = false;
        for (k, (clock, tasks)) in clocks.iter_mut().zip(programs).enumerate() {
            while let Some(task) = tasks.get(clock.next) {
                let made = task.reads.iter().filter_map(|v| ready.get(v)).max_by(|a, b| a.0.total_cmp(&b.0)).copied();
                let (complete, cause) = made.unwrap_or((0.0, None));
                let own = (k, clock.next);
                let done = match task.event {
                    Event::Receive { from, number } => {
                        let Some(arrival) = mail.get(&(from, k, number)) else { break };
                        if !overlap {
                            clock.compute = clock.compute.max(arrival.0);
                        }
                        *arrival
                    }
                    Event::Collective(axis) if overlap => on_lane(clock, axis, complete, task.seconds, own),
                    Event::Send { .. } if overlap => on_lane(clock, Axis::Pp, complete, task.seconds, own),
                    event => {
                        if let Some(by) = cause.filter(|_| complete > clock.compute) {
                            *out.waited.entry(by).or_default() += complete - clock.compute;
                        }
                        clock.compute = clock.compute.max(complete) + task.seconds;
                        (clock.compute, (event != Event::Compute).then_some(own))
                    }
                };
                if let Event::Send { to, number } = task.event {
                    mail.insert((k, to, number), done);
                }
                ready.extend(task.writes.iter().map(|v| (*v, done)));
                clock.next += 1;
                advances = true;
            }
        }
        if !advances {
            break;
        }
    }
    debug_assert!(clocks.iter().zip(programs).all(|(clock, tasks)| clock.next == tasks.len()), "a message is missing");
    for clock in &clocks {
        let last = clock.lanes.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, None));
        if let Some(by) = last.1.filter(|_| last.0 > clock.compute) {
            *out.waited.entry(by).or_default() += last.0 - clock.compute;
        }
        out.end = out.end.max(clock.compute).max(last.0);
    }
    out
}

/// Runs a task on the lane of an axis behind those before it. Returns when it ends.
fn on_lane(clock: &mut Clock, axis: Axis, complete: f64, seconds: f64, own: (usize, usize)) -> (f64, Cause) {
    let lane = &mut clock.lanes[axis as usize];
    *lane = (lane.0.max(complete) + seconds, Some(own));
    *lane
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipelining::{Action, Cell, Schedule, Table};

    /// The programs of equal stages: seconds of F, I, W and of a transfer.
    fn programs(table: &Table, [f, i, w, t]: [f64; 4]) -> Vec<Vec<Task>> {
        let home = table.devices();
        let value = |cell: &Cell, kind: u32| ValueId(((cell.stage * 64 + cell.micro) as u32) * 8 + kind);
        let number = |stage: usize, micro: usize, back: bool| (stage * 64 + micro) as i64 * 2 + i64::from(back);
        let line = |line: &Vec<Cell>| {
            let mut out = Vec::new();
            for cell in line {
                let Cell { stage, action, micro } = *cell;
                let is_back = action != Action::Forward;
                let from = if is_back { Some(stage + 1).filter(|s| *s < home.len()) } else { stage.checked_sub(1) };
                let to = if is_back { stage.checked_sub(1) } else { Some(stage + 1).filter(|s| *s < home.len()) };
                let seconds = match action {
                    Action::Forward => f,
                    Action::Backward => i + w,
                    Action::Input => i,
                    Action::Weight => w,
                };
                let mut reads = Vec::new();
                let own = home[stage];
                if let Some(from) = from.filter(|_| action != Action::Weight) {
                    // What the neighbour has made: the value itself on this device, else a received one.
                    let neighbour = Cell::new(from, action, micro);
                    let kind = u32::from(is_back) * 2;
                    match home[from] == own {
                        true => reads.push(value(&neighbour, kind)),
                        false => {
                            let event = Event::Receive { from: home[from], number: number(from, micro, is_back) };
                            let writes = vec![value(&neighbour, kind + 1)];
                            reads.extend(&writes);
                            out.push(Task { event, seconds: 0.0, reads: Vec::new(), writes });
                        }
                    }
                }
                let writes = match action {
                    Action::Weight => Vec::new(),
                    _ => vec![value(cell, u32::from(is_back) * 2)],
                };
                out.push(Task { event: Event::Compute, seconds, reads, writes: writes.clone() });
                if let Some(to) = to.filter(|to| action != Action::Weight && home[*to] != own) {
                    let event = Event::Send { to: home[to], number: number(stage, micro, is_back) };
                    out.push(Task { event, seconds: t, reads: writes, writes: Vec::new() });
                }
            }
            out
        };
        table.lines.iter().map(line).collect()
    }

    #[test]
    fn equal_stages_take_the_time_of_the_formulas() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        for p in [2usize, 4, 8] {
            for m in [2 * p, 4 * p] {
                let end = |s: Schedule, times| run(&programs(&s.table(p, m).unwrap(), times), true);
                let (f, i, w, t) = (1.0, 1.0, 1.0, 0.25);
                let (n, all) = ((m + p - 1) as f64, f + i + w);
                let plain = end(Schedule::OneForwardOneBackward, [f, i, w, 0.0]);
                assert!(near(plain.end, n * all), "{} of {}", plain.end, n * all);
                assert!(plain.busy.iter().all(|busy| near(*busy, m as f64 * all)));
                let h1 = end(Schedule::ZeroBubble, [f, i, w, 0.0]).end;
                assert!(near(h1, m as f64 * all + (p - 1) as f64 * (f + i - w)), "{h1}");
                // Chunks of half a stage.
                let v = end(Schedule::ZeroBubbleV, [f / 2.0, i / 2.0, w / 2.0, 0.0]).end;
                assert!(near(v, m as f64 * all + (p - 1) as f64 * f / 2.0), "{v}");
                // A transfer delays the filling and the draining of the pipeline, and runs beside kernels in between.
                let sent = end(Schedule::FillDrain, [f, i, w, t]).end;
                assert!(near(sent, n * all + 2.0 * (p - 1) as f64 * t), "{sent}");
                // One after the other, a device in the middle sends as often as it computes.
                let serial = run(&programs(&Schedule::FillDrain.table(p, m).unwrap(), [f, i, w, t]), false);
                assert!(serial.end > sent && near(serial.busy[0], m as f64 * (all + t)), "{serial:?}");
            }
        }
    }

    #[test]
    fn every_schedule_takes_the_time_of_its_table() {
        for text in ["fill-drain", "1f1b", "zb-h1", "interleaved", "zbv", "dualpipev"] {
            let table = Schedule::parse(text).unwrap().table(4, 12).unwrap();
            let cost = |cell: &Cell| match cell.action {
                Action::Forward => 5,
                Action::Backward => 11,
                Action::Input => 7,
                Action::Weight => 4,
            };
            let want = table.simulate(&|entry| entry.iter().map(cost).sum()).unwrap();
            let got = run(&programs(&table, [5.0, 7.0, 4.0, 0.0]), true);
            assert_eq!(got.end, want.end as f64, "{text}");
            let idle: Vec<f64> = got.busy.iter().map(|busy| got.end - busy).collect();
            assert_eq!(idle, want.idle.iter().map(|idle| *idle as f64).collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn kernels_wait_for_what_they_read_of_a_lane() {
        let task = |event, seconds, reads: &[u32], writes: &[u32]| Task {
            event,
            seconds,
            reads: reads.iter().map(|v| ValueId(*v)).collect(),
            writes: writes.iter().map(|v| ValueId(*v)).collect(),
        };
        let program = vec![
            task(Event::Compute, 1.0, &[], &[1]),
            task(Event::Collective(Axis::Dp), 3.0, &[1], &[2]),
            task(Event::Compute, 1.0, &[1], &[3]),
            task(Event::Compute, 1.0, &[2, 3], &[4]),
        ];
        let beside = run(std::slice::from_ref(&program), true);
        assert_eq!((beside.end, beside.waited.get(&(0, 1))), (5.0, Some(&2.0)));
        assert_eq!(run(&[program], false).end, 6.0);
    }
}
