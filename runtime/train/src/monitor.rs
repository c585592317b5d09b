//! Samples the device's sensors every few seconds on a separate thread, so that no step waits for them.

use perilune_plan::{Probe, Readings};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Delay of the first reading: the run has warmed up by then.
const FIRST: Duration = Duration::from_secs(2);
const EVERY: Duration = Duration::from_secs(10);

/// A running sampler; dropping it ends its thread.
pub struct Monitor {
    readings: Receiver<Readings>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts the thread; `None` if it cannot be created, which a run can do without.
    pub fn start(probe: Probe) -> Option<Monitor> {
        Monitor::every(probe, FIRST, EVERY)
    }

    fn every(mut probe: Probe, first: Duration, every: Duration) -> Option<Monitor> {
        let ((send, readings), (stop, stopped)) = (channel(), channel::<()>());
        let work = move || {
            let mut wait = first;
            while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = every;
                if let Some(r) = probe()
                    && send.send(r).is_err()
                {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("sensors".into()).spawn(work).ok()?;
        Some(Monitor { readings, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the newest reading since the last call.
    pub fn take(&self) -> Option<Readings> {
        self.readings.try_iter().last()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop = None;
        // A probe returns within milliseconds.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the readings as named metrics.
pub fn metrics(r: &Readings) -> Vec<(String, f64)> {
    let gib = |bytes: Option<f64>| bytes.map(|b| b / (1u64 << 30) as f64);
    let all = [
        ("system/utilization_percent", r.utilization),
        ("system/memory_gib", gib(r.memory_used)),
        ("system/power_watts", r.power),
        ("system/temperature_celsius", r.temperature),
        ("system/clock_mhz", r.clock_mhz),
    ];
    all.into_iter().filter_map(|(name, v)| Some((name.to_string(), v?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn reading(n: f64) -> Readings {
        Readings { utilization: Some(n), power: Some(512.4), throttled: vec!["power limit"], ..Readings::default() }
    }

    #[test]
    fn readings_come_from_the_thread_until_it_is_dropped() {
        let mut n = 0.0;
        let probe: Probe = Box::new(move || {
            n += 1.0;
            Some(reading(n))
        });
        let ms = Duration::from_millis;
        let monitor = Monitor::every(probe, ms(1), ms(1)).expect("a thread");
        let (start, mut last) = (Instant::now(), 0.0);
        while last < 3.0 && start.elapsed() < Duration::from_secs(20) {
            last = monitor.take().and_then(|r| r.utilization).unwrap_or(last);
        }
        assert!(last >= 3.0, "{last}");
        drop(monitor);
        // A long wait between samples does not delay the end of the thread.
        let monitor = Monitor::every(Box::new(|| None), Duration::from_secs(600), EVERY).expect("a thread");
        assert!(monitor.take().is_none());
        let start = Instant::now();
        drop(monitor);
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn readings_are_logged_by_name() {
        let names: Vec<String> = metrics(&reading(98.0)).into_iter().map(|m| m.0).collect();
        assert_eq!(names, ["system/utilization_percent", "system/power_watts"]);
    }
}
