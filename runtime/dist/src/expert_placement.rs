//! Places the experts of a mixture on devices by their measured loads: replicates the heaviest ones, then packs copies evenly.
//!
//! Every expert has one primary row, with its weights, and some have replicas, which the step copies from the primary. All devices
//! have as many primaries, and as many replicas. Replication is that of EPLB (github.com/deepseek-ai/EPLB): a replica goes to the
//! expert with the highest load a copy, as often as there are replicas. Packing is longest-processing-time-first (Graham, 1969) with
//! a fixed number of rows a device, as EPLB's, followed by swaps between the busiest device and others. After them the loads of two
//! devices differ by at most that of one expert if there are no replicas.
//!
//! Loads are integers and ties go to the lower number, so all processes of a job find the same placement.

use perilune_core::error::{Error, Result};
use std::cmp::Reverse;

/// Fractional bits of the load of a copy.
const FRACTION: u32 = 16;
/// The kinds of rows of a device.
const PRIMARY: usize = 0;
const REPLICA: usize = 1;
/// The most exchanges that a search compares, which bounds its time.
const MOST_COMPARED: u64 = 1 << 27;

/// The expert of each row. Rows are in equal blocks by device, those of primaries and those of replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertPlacement {
    pub primaries: Vec<usize>,
    pub replicas: Vec<usize>,
}

impl ExpertPlacement {
    /// Checks that every expert has one primary row, and that devices have equal numbers of rows.
    fn check(&self, loads: &[u64], devices: usize) -> Result<()> {
        let (experts, replicas) = (self.primaries.len(), self.replicas.len());
        let mut seen = vec![false; experts];
        for expert in &self.primaries {
            match seen.get_mut(*expert) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let message = format!("the rows of {experts} experts name expert {expert} twice, or it is none");
                    return Err(Error::argument("experts", message)
                        .hint("the States of the layer were changed; take an older checkpoint"));
                }
            }
        }
        if let Some(expert) = self.replicas.iter().find(|e| **e >= experts) {
            return Err(Error::argument("experts", format!("a replica is of expert {expert} of {experts}"))
                .hint("the States of the layer were changed; take an older checkpoint"));
        }
        if loads.len() != experts {
            return Err(Error::argument("experts", format!("there are {} loads of {experts} experts", loads.len())));
        }
        if devices == 0 || experts % devices != 0 || replicas % devices != 0 {
            let message = format!("{devices} devices do not divide {experts} experts and {replicas} replicas");
            return Err(Error::argument("experts", message).hint("choose numbers that ep divides"));
        }
        Ok(())
    }

    /// How many rows each expert has.
    pub fn copies(&self) -> Vec<usize> {
        let mut copies = vec![1; self.primaries.len()];
        for expert in &self.replicas {
            if let Some(count) = copies.get_mut(*expert) {
                *count += 1;
            }
        }
        copies
    }

    /// The load of each device, if the copies of an expert share its load.
    fn packed(&self, loads: &[u64], devices: usize) -> Packing {
        let mut packing = Packing::new(loads, &self.copies(), devices);
        for (kind, rows) in [(PRIMARY, &self.primaries), (REPLICA, &self.replicas)] {
            let each = (rows.len() / devices).max(1);
            rows.iter().enumerate().for_each(|(row, expert)| packing.put(row / each, kind, *expert));
        }
        packing
    }

    /// The load of the busiest device, relative to the mean; 1 without any load.
    pub fn imbalance(&self, loads: &[u64], devices: usize) -> Result<f64> {
        self.check(loads, devices)?;
        let total: u128 = loads.iter().map(|load| u128::from(*load) << FRACTION).sum();
        let busiest = self.packed(loads, devices).busiest();
        Ok(if total == 0 { 1.0 } else { busiest as f64 * devices as f64 / total as f64 })
    }

    /// Finds a placement whose busiest device has less load than now; none if this one is as good. As many experts stay on their
    /// devices as the groups that were found allow.
    pub fn improved(&self, loads: &[u64], devices: usize) -> Result<Option<ExpertPlacement>> {
        self.check(loads, devices)?;
        let (experts, replicas) = (self.primaries.len(), self.replicas.len());
        let copies = replicate(loads, replicas, devices);
        let mut packing = Packing::new(loads, &copies, devices);
        packing.fill(&copies, [experts / devices, replicas / devices]);
        packing.separate_copies();
        packing.balance();
        if packing.busiest() >= self.packed(loads, devices).busiest() {
            return Ok(None);
        }
        Ok(Some(self.moved_to(packing)))
    }

    /// Gives each group of rows the device that has most of its experts now, and experts that stay their rows.
    fn moved_to(&self, packing: Packing) -> ExpertPlacement {
        let (devices, each) = (packing.devices.len(), self.primaries.len() / packing.devices.len());
        let mut row_of = vec![0; self.primaries.len()];
        self.primaries.iter().enumerate().for_each(|(row, expert)| row_of[*expert] = row);
        let mut pairs = Vec::with_capacity(devices * devices);
        for (group, of_group) in packing.devices.iter().enumerate() {
            let mut stay = vec![0usize; devices];
            of_group.rows[PRIMARY].iter().for_each(|expert| stay[row_of[*expert] / each] += 1);
            pairs.extend(stay.into_iter().enumerate().map(|(device, n)| (Reverse(n), group, device)));
        }
        pairs.sort_unstable();
        let (mut group_of, mut taken) = (vec![None; devices], vec![false; devices]);
        for (_, group, device) in pairs {
            if group_of[device].is_none() && !taken[group] {
                (group_of[device], taken[group]) = (Some(group), true);
            }
        }
        let mut out = ExpertPlacement { primaries: Vec::new(), replicas: Vec::new() };
        for (device, group) in group_of.into_iter().enumerate() {
            let Some(group) = group.and_then(|g| packing.devices.get(g)) else { continue };
            let (stay, mut come): (Vec<usize>, Vec<usize>) =
                group.rows[PRIMARY].iter().partition(|expert| row_of[**expert] / each == device);
            come.sort_unstable_by_key(|expert| Reverse(*expert));
            for row in device * each..(device + 1) * each {
                let kept = stay.iter().find(|expert| row_of[**expert] == row).copied();
                out.primaries.extend(kept.or_else(|| come.pop()));
            }
            let mut replicas = group.rows[REPLICA].clone();
            replicas.sort_unstable();
            out.replicas.extend(replicas);
        }
        out
    }
}

/// Counts the copies of each expert: every replica goes to the expert with the highest load a copy. One that has a copy for each device
/// gets no more, as long as others have fewer.
pub fn replicate(loads: &[u64], replicas: usize, devices: usize) -> Vec<usize> {
    let mut copies = vec![1usize; loads.len()];
    for _ in 0..replicas {
        let below = |e: &usize| copies[*e] < devices;
        let some_are_below = (0..loads.len()).any(|e| below(&e));
        // Fractions are compared by cross products.
        let more =
            |a: usize, b: usize| u128::from(loads[a]) * copies[b] as u128 > u128::from(loads[b]) * copies[a] as u128;
        let candidates = (0..loads.len()).filter(|e| !some_are_below || below(e));
        let Some(heaviest) = candidates.reduce(|best, e| if more(e, best) { e } else { best }) else { break };
        copies[heaviest] += 1;
    }
    copies
}

struct Device {
    load: u128,
    /// The experts of its rows, by kind.
    rows: [Vec<usize>; 2],
    /// How many copies of each expert it has.
    copies: Vec<usize>,
}

/// Experts packed on devices.
struct Packing {
    /// The load of one copy of each expert.
    weights: Vec<u128>,
    devices: Vec<Device>,
}

/// An exchange of two experts of one kind between two devices.
#[derive(Clone, Copy)]
struct Swap {
    devices: [usize; 2],
    kind: usize,
    at: [usize; 2],
    /// The load of the busier of the two afterwards.
    load: u128,
    /// By how many it changes the rows that are a second copy on their device.
    doubles: i8,
}

impl Packing {
    fn new(loads: &[u64], copies: &[usize], devices: usize) -> Packing {
        let weights = loads.iter().zip(copies).map(|(load, n)| (u128::from(*load) << FRACTION) / *n as u128).collect();
        let device = || Device { load: 0, rows: [Vec::new(), Vec::new()], copies: vec![0; loads.len()] };
        Packing { weights, devices: (0..devices).map(|_| device()).collect() }
    }

    fn put(&mut self, device: usize, kind: usize, expert: usize) {
        let to = &mut self.devices[device];
        to.load += self.weights[expert];
        to.rows[kind].push(expert);
        to.copies[expert] += 1;
    }

    fn busiest(&self) -> u128 {
        self.devices.iter().map(|d| d.load).max().unwrap_or(0)
    }

    /// Puts all copies, each on the device with the least load that has a free row, and no copy if that can be. Experts with many copies come
    /// first, as few devices are left for the last of them; then the heaviest. The primary of an expert with replicas goes where the fewest
    /// rows for replicas are free.
    fn fill(&mut self, copies: &[usize], rows: [usize; 2]) {
        let mut experts: Vec<usize> = (0..copies.len()).collect();
        experts.sort_by_key(|e| Reverse((copies[*e], self.weights[*e])));
        for expert in experts {
            for copy in 0..copies[expert] {
                let kind = if copy == 0 { PRIMARY } else { REPLICA };
                let free = (0..self.devices.len()).filter(|d| self.devices[*d].rows[kind].len() < rows[kind]);
                let best = free.min_by_key(|d| {
                    let device = &self.devices[*d];
                    let apart = kind == PRIMARY && copies[expert] > 1;
                    let replicas = if apart { rows[REPLICA] - device.rows[REPLICA].len() } else { 0 };
                    (device.copies[expert], replicas, device.load, *d)
                });
                if let Some(device) = best {
                    self.put(device, kind, expert);
                }
            }
        }
    }

    /// All exchanges of rows of device `a` with rows of others.
    fn swaps(&self, a: usize) -> impl Iterator<Item = Swap> + '_ {
        let pairs = (0..self.devices.len()).filter(move |b| *b != a).flat_map(|b| [(b, PRIMARY), (b, REPLICA)]);
        pairs.flat_map(move |(b, kind)| {
            let (of_a, of_b) = (&self.devices[a], &self.devices[b]);
            of_a.rows[kind].iter().enumerate().flat_map(move |(i, x)| {
                of_b.rows[kind].iter().enumerate().filter(move |(_, y)| *y != x).map(move |(j, y)| {
                    let (wx, wy) = (self.weights[*x], self.weights[*y]);
                    let load = (of_a.load - wx + wy).max(of_b.load - wy + wx);
                    let made = i8::from(of_b.copies[*x] > 0) + i8::from(of_a.copies[*y] > 0);
                    let ended = i8::from(of_a.copies[*x] > 1) + i8::from(of_b.copies[*y] > 1);
                    Swap { devices: [a, b], kind, at: [i, j], load, doubles: made - ended }
                })
            })
        })
    }

    fn swap(&mut self, s: Swap) {
        let experts = [0, 1].map(|k| self.devices[s.devices[k]].rows[s.kind][s.at[k]]);
        for k in [0, 1] {
            let (device, gone, come) = (&mut self.devices[s.devices[k]], experts[k], experts[1 - k]);
            device.load = device.load - self.weights[gone] + self.weights[come];
            device.copies[gone] -= 1;
            device.copies[come] += 1;
            device.rows[s.kind][s.at[k]] = come;
        }
    }

    /// The number of exchanges that `swaps` compares for a device.
    fn compared(&self, a: usize) -> u64 {
        let pairs = |kind: usize| {
            let all: usize = self.devices.iter().map(|d| d.rows[kind].len()).sum();
            let own = self.devices[a].rows[kind].len();
            own as u64 * (all - own) as u64
        };
        pairs(PRIMARY) + pairs(REPLICA)
    }

    /// Ends by exchanges that a device has two copies of an expert, which share no load.
    fn separate_copies(&mut self) {
        let mut left = MOST_COMPARED;
        for device in 0..self.devices.len() {
            while self.devices[device].copies.iter().any(|n| *n > 1) {
                let Some(rest) = left.checked_sub(self.compared(device)) else { return };
                left = rest;
                let ends = self.swaps(device).filter(|s| s.doubles < 0);
                let Some(best) = ends.min_by_key(|s| (s.doubles, s.load)) else { break };
                self.swap(best);
            }
        }
    }

    /// Exchanges rows of the busiest device as long as that lowers its load. Each exchange lowers the sorted list of loads, so it ends.
    fn balance(&mut self) {
        let mut left = MOST_COMPARED;
        loop {
            let busiest = (0..self.devices.len()).max_by_key(|d| (self.devices[*d].load, Reverse(*d)));
            let Some(busiest) = busiest else { return };
            let Some(rest) = left.checked_sub(self.compared(busiest)) else { return };
            left = rest;
            let most = self.devices[busiest].load;
            let lower = self.swaps(busiest).filter(|s| s.load < most && s.doubles <= 0);
            let Some(best) = lower.min_by_key(|s| (s.load, s.devices[1])) else { return };
            self.swap(best);
        }
    }
}
