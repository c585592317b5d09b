//! Reads what runs have taken (`performance` in `run.json`), and compares the speed, memory and utilization of two.

use crate::performance::PERFORMANCE;
use serde_json::{Map, Value, json};

/// A measurement of two runs, in a unit; `None` where a run lacks it.
#[derive(Clone, PartialEq, Debug)]
pub struct Measurement {
    pub name: &'static str,
    pub unit: &'static str,
    pub values: [Option<f64>; 2],
    /// By how many per cent the second run is worse than the first; below 0 where it is better. `None` for what is neither.
    pub loss_percent: Option<f64>,
}

/// Whether more of a measurement is better, or less, or neither.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    More,
    Less,
    Neither,
}

/// Measurements by their name in `run.json`: how they are called, their unit, and the factor into it.
const ALL: [(&str, &str, &str, f64, Better); 10] = [
    ("step_ms", "step", "ms", 1.0, Better::Less),
    ("samples_per_second", "samples", "1/s", 1.0, Better::More),
    ("tokens_per_second", "tokens", "1/s", 1.0, Better::More),
    ("mfu_percent", "MFU", "%", 1.0, Better::More),
    ("data_percent", "data", "%", 1.0, Better::Neither),
    ("utilization_percent", "utilization", "%", 1.0, Better::More),
    ("peak_memory_bytes", "peak memory", "MiB", 1.0 / (1 << 20) as f64, Better::Less),
    ("power_watts", "power", "W", 1.0, Better::Neither),
    ("energy_joules", "energy", "Wh", 1.0 / 3600.0, Better::Neither),
    ("device_hours", "devices", "h", 1.0, Better::Neither),
];

fn number(record: &Map<String, Value>, key: &str) -> Option<f64> {
    record.get(PERFORMANCE)?.get(key)?.as_f64()
}

/// Returns the hours of devices that a run has taken.
pub fn device_hours(record: &Map<String, Value>) -> Option<f64> {
    number(record, "device_hours")
}

/// Returns the energy of a run in watt hours; none where no device reports its power.
pub fn watt_hours(record: &Map<String, Value>) -> Option<f64> {
    number(record, "energy_joules").map(|joules| joules / 3600.0)
}

/// Compares what two runs have taken; lists what at least one of them has.
pub(crate) fn compare(a: &Map<String, Value>, b: &Map<String, Value>) -> Vec<Measurement> {
    let of = |(key, name, unit, factor, better): (&str, &'static str, &'static str, f64, Better)| {
        let values = [a, b].map(|record| number(record, key).map(|v| v * factor));
        let change = match values {
            [Some(a), Some(b)] if a > 0.0 && b > 0.0 => Some((a, b)),
            _ => None,
        };
        // A speed that halves and a time that doubles are the same loss.
        let loss_percent = change.and_then(|(a, b)| match better {
            Better::More => Some(100.0 * (1.0 - b / a)),
            Better::Less => Some(100.0 * (b / a - 1.0)),
            Better::Neither => None,
        });
        Measurement { name, unit, values, loss_percent }
    };
    ALL.into_iter().map(of).filter(|m| m.values.iter().any(Option::is_some)).collect()
}

impl Measurement {
    /// Whether the second run is worse by more than so many per cent.
    pub fn is_alarm(&self, percent: f64) -> bool {
        self.loss_percent.is_some_and(|loss| loss > percent)
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "name": self.name, "unit": self.unit, "a": self.values[0], "b": self.values[1], "loss_percent": self.loss_percent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: f64, memory: f64) -> Map<String, Value> {
        let v = json!({ "performance": { "step_ms": step, "peak_memory_bytes": memory, "mfu_percent": 4000.0 / step, "power_watts": step } });
        v.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn losses_have_a_direction() {
        let found = compare(&record(100.0, 1e9), &record(110.0, 0.9e9));
        let loss = |name: &str| found.iter().find(|m| m.name == name).map(|m| m.loss_percent.map(|l| l.round()));
        assert_eq!(loss("step"), Some(Some(10.0)));
        assert_eq!(loss("MFU"), Some(Some(9.0)));
        assert_eq!(loss("peak memory"), Some(Some(-10.0)));
        assert_eq!(loss("power"), Some(None));
        assert_eq!(loss("energy"), None);
        let alarms: Vec<&str> = found.iter().filter(|m| m.is_alarm(9.5)).map(|m| m.name).collect();
        assert_eq!(alarms, ["step"]);
    }

    #[test]
    fn a_run_of_an_earlier_release_has_no_measurements() {
        let found = compare(&Map::new(), &record(1.0, 1.0));
        assert!(found.iter().all(|m| m.loss_percent.is_none() && m.values[0].is_none()));
        assert!(compare(&Map::new(), &Map::new()).is_empty());
    }
}
