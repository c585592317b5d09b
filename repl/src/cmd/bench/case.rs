//! Measures one case on both sides, in alternating rounds.

use super::ours::{Figure, Ours};
use super::rival::Rival;
use super::{BenchArgs, FIRST};
use serde_json::{Map, Value};
use std::path::Path;

/// How a case is measured.
pub struct Case<'a> {
    pub args: &'a BenchArgs,
    pub ours: &'a Ours<'a>,
    pub rounds: u32,
    pub folder: &'a Path,
}

impl Case<'_> {
    /// Measures a case. Returns the figures by name, in microseconds or bytes; `error` is an error of this side, `rival_error`
    /// of the other.
    pub fn run(&self, name: &str, rival: Option<&mut Rival>) -> Map<String, Value> {
        let mut out = Map::new();
        let result = match FIRST.iter().find(|f| f.0 == name) {
            Some(&(_, case, cold)) => self.first(case, cold, rival, &mut out),
            None => self.steady(name, rival, &mut out),
        };
        if let Err(e) = result {
            out.insert("error".into(), e.into());
        }
        let rivals = ["eager", "compile"].into_iter().filter_map(|k| out.get(k).and_then(Value::as_f64));
        let best = rivals.fold(f64::INFINITY, f64::min);
        if let (Some(ours), true) = (out.get("ours").and_then(Value::as_f64), best.is_finite()) {
            out.insert("ratio".into(), (best / ours).into());
        }
        out
    }

    fn steady(&self, name: &str, mut rival: Option<&mut Rival>, out: &mut Map<String, Value>) -> Result<(), String> {
        let (mut ours, mut firsts) = (Vec::new(), Vec::new());
        let (mut eager, mut compile) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let figure = self.ours.measure(name, self.args.seconds, None)?;
            ours.push(figure.micros);
            firsts.push(figure.first);
            self.ours_peak(&figure, out);
            let Some(rival) = rival.as_mut() else { continue };
            match rival.ask(name, self.args.seconds, !self.args.no_compile) {
                Ok(answer) => {
                    eager.extend(answer["eager"].as_f64());
                    compile.extend(answer["compile"].as_f64());
                    for key in ["goal", "compile_first"] {
                        answer[key].as_f64().map(|v| out.insert(key.into(), v.into()));
                    }
                    rival_peaks(&answer, out);
                    for (from, to) in [("compile_mode", "compile_mode"), ("error", "rival_error")] {
                        answer[from].as_str().map(|text| out.insert(to.into(), text.into()));
                    }
                }
                Err(e) => {
                    out.insert("rival_error".into(), e.into());
                }
            }
        }
        let figures = [("ours", &mut ours), ("first", &mut firsts), ("eager", &mut eager), ("compile", &mut compile)];
        for (key, values) in figures {
            median(values).map(|v| out.insert(key.into(), v.into()));
        }
        Ok(())
    }

    fn ours_peak(&self, figure: &Figure, out: &mut Map<String, Value>) {
        if self.ours.counts_memory() {
            peak(out, "ours_bytes", figure.bytes);
        }
    }

    /// Measures the time to the end of the first step, with an empty or full kernel cache (of inductor on the other side).
    fn first(
        &self,
        case: &str,
        cold: bool,
        rival: Option<&mut Rival>,
        out: &mut Map<String, Value>,
    ) -> Result<(), String> {
        let cache = self.folder.join("kernels");
        if cold {
            let _ = std::fs::remove_dir_all(&cache);
            let _ = std::fs::remove_dir_all(self.folder.join("inductor"));
        } else {
            self.ours.measure(case, 0.01, Some(&cache))?;
        }
        let figure = self.ours.measure(case, 0.01, Some(&cache))?;
        out.insert("ours".into(), (figure.first * 1e6).into());
        self.ours_peak(&figure, out);
        let Some(rival) = rival else { return Ok(()) };
        let mut ask = || rival.ask(case, 0.01, !self.args.no_compile);
        let answer = if cold { ask() } else { ask().and_then(|_| ask()) };
        match answer {
            Ok(a) => {
                for (from, to) in [("first", "eager"), ("compile_first", "compile")] {
                    a[from].as_f64().map(|s| out.insert(to.into(), (s * 1e6).into()));
                }
                rival_peaks(&a, out);
                a["error"].as_str().map(|e| out.insert("rival_error".into(), e.into()));
            }
            Err(e) => {
                out.insert("rival_error".into(), e.into());
            }
        }
        Ok(())
    }
}

/// Stores the larger of the peak so far and this one.
fn peak(out: &mut Map<String, Value>, key: &str, bytes: u64) {
    let so_far = out.get(key).and_then(Value::as_u64).unwrap_or(0);
    out.insert(key.into(), bytes.max(so_far).into());
}

fn rival_peaks(answer: &Value, out: &mut Map<String, Value>) {
    for key in ["eager_bytes", "compile_bytes"] {
        if let Some(bytes) = answer[key].as_u64() {
            peak(out, key, bytes);
        }
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::{median, peak, rival_peaks};
    use serde_json::{Map, Value, json};

    #[test]
    fn peak_memory_is_the_maximum_over_rounds() {
        let mut out = Map::new();
        for (ours, answer) in [(5, json!({ "eager_bytes": 7, "compile_bytes": 2 })), (4, json!({ "eager_bytes": 9 }))] {
            peak(&mut out, "ours_bytes", ours);
            rival_peaks(&answer, &mut out);
        }
        assert_eq!(Value::from(out), json!({ "ours_bytes": 5, "eager_bytes": 9, "compile_bytes": 2 }));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0]), Some(2.5));
    }
}
