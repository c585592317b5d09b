//! Placement of experts: rules that hold for any loads, the optimum of small cases, and the example of EPLB.
#![allow(clippy::unwrap_used)]

use perilune_dist::{ExpertPlacement, replicate};

/// Numbers of xorshift64 (Marsaglia, 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    /// Loads that differ by up to a factor of 2^10, some of them 0.
    fn loads(&mut self, n: usize) -> Vec<u64> {
        (0..n).map(|_| self.below(1 << 10) >> self.below(11)).collect()
    }
}

fn initial(experts: usize, replicas: usize) -> ExpertPlacement {
    ExpertPlacement { primaries: (0..experts).collect(), replicas: (0..replicas).map(|q| q % experts).collect() }
}

fn placed(loads: &[u64], replicas: usize, devices: usize) -> ExpertPlacement {
    let now = initial(loads.len(), replicas);
    now.improved(loads, devices).unwrap().unwrap_or(now)
}

/// Loads of devices by the definition: the copies of an expert have equal parts.
fn device_loads(p: &ExpertPlacement, loads: &[u64], devices: usize) -> Vec<f64> {
    let mut out = vec![0.0; devices];
    let copies = |e: usize| 1 + p.replicas.iter().filter(|r| **r == e).count();
    for rows in [&p.primaries, &p.replicas] {
        for (k, e) in rows.iter().enumerate() {
            out[k * devices / rows.len()] += loads[*e] as f64 / copies(*e) as f64;
        }
    }
    out
}

fn most(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m, v| m.max(*v))
}

/// Sizes that devices divide.
fn sizes(random: &mut Random) -> (usize, usize, usize) {
    let devices = [1, 2, 3, 4, 8][random.below(5) as usize];
    let experts = devices * (1 + random.below(6) as usize);
    let replicas = devices * random.below(4) as usize;
    (experts, replicas.min(experts * (devices - 1)), devices)
}

#[test]
fn every_expert_has_one_row_and_devices_have_equal_numbers() {
    let mut random = Random(1);
    for _ in 0..400 {
        let (experts, replicas, devices) = sizes(&mut random);
        let loads = random.loads(experts);
        let p = placed(&loads, replicas, devices);
        let mut sorted = p.primaries.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..experts).collect::<Vec<_>>(), "{loads:?} on {devices}");
        assert_eq!(p.replicas.len(), replicas);
        assert!(p.replicas.iter().all(|e| *e < experts));
        let by_definition = most(&device_loads(&p, &loads, devices)) * devices as f64;
        let total = loads.iter().sum::<u64>() as f64;
        let imbalance = p.imbalance(&loads, devices).unwrap();
        let expected = if total == 0.0 { 1.0 } else { by_definition / total };
        assert!((imbalance - expected).abs() < 1e-3 * expected, "{imbalance} {expected}");
    }
}

#[test]
fn a_device_has_no_second_copy_of_an_expert() {
    let mut random = Random(2);
    for _ in 0..400 {
        let (experts, replicas, devices) = sizes(&mut random);
        let loads: Vec<u64> = random.loads(experts).iter().map(|load| load + 1).collect();
        let now = initial(experts, replicas);
        let Some(p) = now.improved(&loads, devices).unwrap() else { continue };
        for d in 0..devices {
            let part = |rows: &[usize]| rows[d * rows.len() / devices..(d + 1) * rows.len() / devices].to_vec();
            let mut own = [part(&p.primaries), part(&p.replicas)].concat();
            own.sort_unstable();
            assert!(own.windows(2).all(|w| w[0] != w[1]), "{loads:?} on {devices}: {own:?}");
        }
    }
}

/// Without replicas an exchange could be found if two devices differed by more than the load of an expert.
#[test]
fn loads_of_devices_differ_by_one_expert_at_most() {
    let mut random = Random(3);
    for _ in 0..400 {
        let (experts, _, devices) = sizes(&mut random);
        let loads = random.loads(experts);
        let p = placed(&loads, 0, devices);
        let own = device_loads(&p, &loads, devices);
        let least = own.iter().fold(f64::INFINITY, |m, v| m.min(*v));
        assert!(most(&own) - least <= *loads.iter().max().unwrap() as f64 + 1e-3, "{loads:?} on {devices}: {own:?}");
    }
}

#[test]
fn a_placement_is_never_worse_and_then_stays() {
    let mut random = Random(4);
    let mut now = initial(16, 4);
    for _ in 0..100 {
        let loads = random.loads(16);
        let before = most(&device_loads(&now, &loads, 4));
        let Some(new) = now.improved(&loads, 4).unwrap() else { continue };
        assert!(most(&device_loads(&new, &loads, 4)) <= before);
        assert_eq!(new.improved(&loads, 4).unwrap(), None, "the same loads improve it again");
        now = new;
    }
}

/// Every way to give devices equal numbers of rows.
fn optimum(loads: &[u64], replicas: usize, devices: usize) -> f64 {
    fn assign(rows: &[f64], free: &mut [usize], load: &mut [f64], next: &mut dyn FnMut(&[f64])) {
        let Some((first, rest)) = rows.split_first() else { return next(load) };
        for d in 0..free.len() {
            if free[d] > 0 {
                free[d] -= 1;
                load[d] += first;
                assign(rest, free, load, next);
                load[d] -= first;
                free[d] += 1;
            }
        }
    }
    fn choose(loads: &[u64], left: usize, from: usize, copies: &mut [usize], next: &mut dyn FnMut(&[usize])) {
        if left == 0 {
            return next(copies);
        }
        for e in from..loads.len() {
            copies[e] += 1;
            choose(loads, left - 1, e, copies, next);
            copies[e] -= 1;
        }
    }
    let mut best = f64::INFINITY;
    choose(loads, replicas, 0, &mut vec![1; loads.len()], &mut |copies| {
        let share = |e: usize| loads[e] as f64 / copies[e] as f64;
        let primaries: Vec<f64> = (0..loads.len()).map(share).collect();
        let more: Vec<f64> = (0..loads.len()).flat_map(|e| vec![share(e); copies[e] - 1]).collect();
        let mut load = vec![0.0; devices];
        assign(&primaries, &mut vec![loads.len() / devices; devices], &mut load, &mut |load| {
            let mut load = load.to_vec();
            assign(&more, &mut vec![replicas / devices; devices], &mut load, &mut |load| best = best.min(most(load)));
        });
    });
    best
}

#[test]
fn small_cases_are_close_to_the_optimum() {
    let mut random = Random(5);
    for (experts, replicas, devices, factor) in
        [(4, 0, 2, 1.1), (6, 0, 2, 1.15), (6, 0, 3, 1.15), (4, 2, 2, 1.2), (6, 3, 3, 1.25)]
    {
        let mut worst = 1.0f64;
        for _ in 0..40 {
            let loads = random.loads(experts);
            let (best, found) = (
                optimum(&loads, replicas, devices),
                most(&device_loads(&placed(&loads, replicas, devices), &loads, devices)),
            );
            assert!(found >= best - 1e-9, "{loads:?}: {found} is below the optimum {best}");
            if best > 0.0 {
                worst = worst.max(found / best);
            }
        }
        assert!(worst <= factor, "{experts} experts, {replicas} replicas, {devices} devices: {worst}");
    }
}

/// The layers of the example of deepseek-ai/EPLB, replicated by its `replicate_experts` (make_eplb.py).
#[test]
fn replicas_are_those_of_eplb() {
    let layers =
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]];
    for (loads, (copies, busiest)) in layers.iter().zip(EPLB) {
        assert_eq!(replicate(loads, 4, 8), copies);
        let own = most(&device_loads(&placed(loads, 4, 4), loads, 4));
        assert!(own <= busiest + 1e-9, "{own} is above that of EPLB, {busiest}");
    }
}

/// Copies of each expert for 16 slots, and the load of the busiest of 4 devices.
const EPLB: [([usize; 12], f64); 2] =
    [([1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], 275.5), ([1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1], 292.0)];

#[test]
fn experts_that_stay_keep_their_rows() {
    // Devices have 10 + 1 and 2 + 1: the light ones change places only if that helps.
    let now = initial(4, 0);
    assert_eq!(now.improved(&[10, 1, 2, 1], 2).unwrap(), None);
    let p = now.improved(&[10, 8, 1, 2], 2).unwrap().unwrap();
    let stay = (0..4).filter(|row| p.primaries[*row] == *row).count();
    assert_eq!(stay, 2, "{p:?}");
    assert_eq!(now.improved(&[0; 4], 2).unwrap(), None);
    assert_eq!(initial(1, 0).improved(&[5], 1).unwrap(), None);
}

#[test]
fn malformed_placements_are_refused() {
    let refused = |p: ExpertPlacement, loads: &[u64], devices: usize, part: &str| {
        let message = p.improved(loads, devices).unwrap_err().message;
        assert!(message.contains(part), "{message}");
        assert!(p.imbalance(loads, devices).is_err());
    };
    let rows = |primaries: &[usize], replicas: &[usize]| ExpertPlacement {
        primaries: primaries.to_vec(),
        replicas: replicas.to_vec(),
    };
    refused(rows(&[0, 0], &[]), &[1, 1], 1, "name expert 0 twice");
    refused(rows(&[0, 7], &[]), &[1, 1], 1, "name expert 7 twice, or it is none");
    refused(rows(&[0, 1], &[2]), &[1, 1], 1, "a replica is of expert 2 of 2");
    refused(rows(&[0, 1], &[]), &[1], 1, "1 loads of 2 experts");
    refused(rows(&[0, 1, 2], &[]), &[1, 1, 1], 2, "2 devices do not divide 3 experts");
    refused(rows(&[0, 1], &[0]), &[1, 1], 2, "2 devices do not divide 2 experts and 1 replicas");
    refused(rows(&[0, 1], &[]), &[1, 1], 0, "0 devices do not divide");
}

/// The search is cut off where it would take long; what it has found is no worse than before.
#[test]
fn many_experts_take_bounded_time() {
    let mut random = Random(6);
    let loads = random.loads(6000);
    let now = initial(6000, 600);
    let p = now.improved(&loads, 2).unwrap().unwrap();
    assert!(p.imbalance(&loads, 2).unwrap() <= now.imbalance(&loads, 2).unwrap());
    let loads = random.loads(512);
    assert!(initial(512, 64).improved(&loads, 64).unwrap().unwrap().imbalance(&loads, 64).unwrap() < 1.6);
}

#[test]
fn large_loads_do_not_overflow() {
    let loads = [u64::MAX; 8];
    assert_eq!(initial(8, 0).improved(&loads, 4).unwrap(), None);
    assert!((initial(8, 0).imbalance(&loads, 4).unwrap() - 1.0).abs() < 1e-9);
}
