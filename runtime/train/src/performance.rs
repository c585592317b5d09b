//! Measures a run for `run.json`: speed, share of the time that data takes, utilization, peak memory, energy, and hours of devices.
//!
//! The speed is that of this process: the median of its last steps, and means over all steps but the first few, which compile. Energy
//! and hours add up over all processes that a run has had, with the steps that were taken again.

use perilune_plan::Readings;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// The field of `run.json`.
pub(crate) const PERFORMANCE: &str = "performance";

/// First steps that do not count.
const COLD: u64 = 5;
/// Steps of which the median is taken.
const LAST: usize = 1024;

/// What a run has taken so far.
pub(crate) struct Performance {
    begun: Instant,
    /// Devices of all processes.
    devices: usize,
    steps: u64,
    /// The durations of the last steps in seconds, in a ring.
    durations: Vec<f32>,
    /// Sums over the steps that count.
    seconds: f64,
    data: f64,
    flops: f64,
    counted: f64,
    /// Samples, and the steps that they are of.
    samples: (f64, f64),
    /// Sums of readings, and their number: utilization, power.
    utilization: (f64, f64),
    power: (f64, f64),
    /// Joules and device hours of earlier processes.
    before: (f64, f64),
}

impl Performance {
    /// Begins to measure a run on so many devices. `record` is its `run.json`.
    pub fn new(record: Option<&Map<String, Value>>, devices: usize) -> Performance {
        let known = |key: &str| record.and_then(|r| r.get(PERFORMANCE)?.get(key)?.as_f64()).unwrap_or(0.0);
        Performance {
            begun: Instant::now(),
            devices,
            steps: 0,
            durations: Vec::new(),
            seconds: 0.0,
            data: 0.0,
            flops: 0.0,
            counted: 0.0,
            samples: (0.0, 0.0),
            utilization: (0.0, 0.0),
            power: (0.0, 0.0),
            before: (known("energy_joules"), known("device_hours")),
        }
    }

    /// Adds a step: its seconds, those of them spent on batches, and the FLOP of its matrix products.
    pub fn step(&mut self, seconds: f64, data: f64, flops: f64) {
        self.steps += 1;
        if self.steps <= COLD {
            return;
        }
        self.seconds += seconds;
        self.data += data;
        self.flops += flops;
        self.counted += 1.0;
        let at = (self.steps as usize) % LAST;
        match self.durations.get_mut(at).filter(|_| self.counted > LAST as f64) {
            Some(slot) => *slot = seconds as f32,
            None => self.durations.push(seconds as f32),
        }
    }

    /// Adds the samples of a step.
    pub fn samples(&mut self, n: u64) {
        self.samples.0 += n as f64;
        self.samples.1 += 1.0;
    }

    /// Adds sensor readings.
    pub fn readings(&mut self, r: &Readings) {
        for (sum, value) in [(&mut self.utilization, r.utilization), (&mut self.power, r.power)] {
            if let Some(value) = value {
                sum.0 += value;
                sum.1 += 1.0;
            }
        }
    }

    /// Returns the field of `run.json`. `peak_flops`: the limit of the device; `memory`: the most bytes in use.
    pub fn json(&self, tokens_per_sample: Option<u64>, peak_flops: Option<f64>, memory: usize) -> Value {
        let mean = |(sum, n): (f64, f64)| (n > 0.0).then(|| sum / n);
        let speed = mean(self.samples).filter(|_| self.seconds > 0.0).map(|n| n * self.counted / self.seconds);
        let elapsed = self.begun.elapsed().as_secs_f64();
        let power = mean(self.power);
        let energy = power.map(|watts| watts * elapsed * self.devices as f64 + self.before.0);
        let mfu = peak_flops.filter(|_| self.seconds > 0.0).map(|peak| 100.0 * self.flops / self.seconds / peak);
        let values = [
            ("step_ms", self.median().map(|s| s * 1e3)),
            ("samples_per_second", speed),
            ("tokens_per_second", tokens_per_sample.and_then(|n| Some(n as f64 * speed?))),
            ("mfu_percent", mfu),
            ("data_percent", (self.seconds > 0.0).then(|| 100.0 * self.data / self.seconds)),
            ("utilization_percent", mean(self.utilization)),
            ("power_watts", power),
            ("peak_memory_bytes", Some(memory as f64)),
            ("energy_joules", energy.or((self.before.0 > 0.0).then_some(self.before.0))),
            ("device_hours", Some(self.before.1 + elapsed * self.devices as f64 / 3600.0)),
        ];
        let digits = |v: f64| format!("{v:.4e}").parse::<f64>().unwrap_or(v);
        let known = values.into_iter().filter_map(|(name, v)| Some((name.to_string(), json!(digits(v?)))));
        Value::Object(known.collect())
    }

    fn median(&self) -> Option<f64> {
        let mut sorted = self.durations.clone();
        sorted.sort_by(f32::total_cmp);
        sorted.get(sorted.len() / 2).map(|s| f64::from(*s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_steps_do_not_count_and_energy_adds_up() {
        let before = json!({ "performance": { "energy_joules": 100.0, "device_hours": 2.0 } });
        let mut p = Performance::new(before.as_object(), 2);
        for k in 0..2000 {
            p.step(if k < 5 { 9.0 } else { 0.01 }, 0.001, 1e9);
            p.samples(32);
        }
        p.step(0.02, 0.0, 1e9);
        p.readings(&Readings { utilization: Some(90.0), power: Some(500.0), ..Readings::default() });
        p.readings(&Readings { utilization: Some(80.0), ..Readings::default() });
        let found = p.json(Some(10), Some(1e12), 1 << 30);
        let value = |key: &str| found[key].as_f64().unwrap_or(f64::NAN);
        let near = |key: &str, v: f64| assert!((value(key) - v).abs() <= 2e-3 * v, "{key}: {} is not {v}", value(key));
        near("step_ms", 10.0);
        near("samples_per_second", 3200.0);
        near("tokens_per_second", 32000.0);
        near("mfu_percent", 10.0);
        near("data_percent", 10.0);
        near("utilization_percent", 85.0);
        assert!(value("energy_joules") >= 100.0 && value("device_hours") >= 2.0);
        assert_eq!(p.durations.len(), LAST);
    }

    #[test]
    fn a_run_without_sensors_has_no_energy() {
        let found = Performance::new(None, 1).json(None, None, 0);
        assert_eq!((found.get("energy_joules"), found.get("step_ms")), (None, None));
    }
}
