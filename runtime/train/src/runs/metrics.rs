//! Reads the metrics of a run from `metrics.jsonl`: the last, lowest and highest value of each.
//!
//! The log may still be written, so an incomplete last line, and lines of other programs, are skipped. It is read as a stream: that of
//! a long run has gigabytes, of which evaluations are few. Seals are not checked here; a resume and a replay do that.

use crate::error::Result;
use crate::log_lines::{check_names, for_each_line, values};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A value and the step that it belongs to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct At {
    pub step: u64,
    /// NaN stands for NaN and infinities, which the log stores as null.
    pub value: f64,
}

/// The last, lowest and highest value of a metric. A metric that was never a finite number has neither lowest nor highest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Extent {
    pub last: At,
    pub low: Option<At>,
    pub high: Option<At>,
}

impl Extent {
    fn of(at: At) -> Extent {
        let finite = Some(at).filter(|at| at.value.is_finite());
        Extent { last: at, low: finite, high: finite }
    }

    fn add(&mut self, at: At) {
        self.last = at;
        if at.value.is_finite() {
            // The first of equal values stays.
            self.low = Some(self.low.filter(|low| low.value <= at.value).unwrap_or(at));
            self.high = Some(self.high.filter(|high| high.value >= at.value).unwrap_or(at));
        }
    }

    /// Returns the best value in the direction of a goal.
    pub fn best(&self, goal: &Goal) -> Option<At> {
        if goal.max { self.high } else { self.low }
    }
}

/// A metric and the direction in which it improves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Goal {
    pub metric: String,
    /// Whether a higher value is better.
    pub max: bool,
}

/// Words in the name of a metric of which more is better. Other metrics are losses and errors.
const HIGHER: [&str; 14] = [
    "accuracy",
    "acc",
    "f1",
    "r2",
    "auc",
    "auroc",
    "iou",
    "map",
    "precision",
    "recall",
    "bleu",
    "top",
    "score",
    "throughput",
];

impl Goal {
    /// Parses `valid/loss`, `valid/accuracy:max` or `valid/off:min`. Without a direction the name decides, as in Keras' `auto`.
    pub fn parse(text: &str) -> Goal {
        let (metric, max) = match text.rsplit_once(':') {
            Some((metric, "max")) => (metric, true),
            Some((metric, "min")) => (metric, false),
            _ => (text, Goal::is_higher_better(text)),
        };
        Goal { metric: metric.into(), max }
    }

    /// Returns the goal of a metric of a run: that of its best checkpoint, or else by the name.
    pub fn of(metric: &str, record: &Map<String, Value>) -> Goal {
        Goal::of_record(record).filter(|goal| goal.metric == metric).unwrap_or_else(|| Goal::parse(metric))
    }

    /// Returns the metric of the best checkpoint of a run, if it has one (`--keep-best`).
    pub fn of_record(record: &Map<String, Value>) -> Option<Goal> {
        let best = record.get("best")?;
        Some(Goal { metric: best["metric"].as_str()?.into(), max: best["max"].as_bool()? })
    }

    fn is_higher_better(metric: &str) -> bool {
        let name = metric.rsplit('/').next().unwrap_or(metric).to_lowercase();
        let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
        words.any(|word| HIGHER.contains(&word) || word.strip_prefix("top").is_some_and(|n| n.parse::<u32>().is_ok()))
    }
}

/// What a log says of a run.
#[derive(Clone, Default, Debug)]
pub struct Metrics {
    /// The last step that was logged, and the seconds of training until then.
    pub step: u64,
    pub seconds: Option<f64>,
    /// Metrics by name: those of evaluations (`valid/loss`), and those of steps where they were asked for.
    pub by_name: BTreeMap<String, Extent>,
}

/// Which events are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Events {
    /// Evaluations, and the last step.
    Evaluations,
    All,
}

impl Metrics {
    /// Reads the log of the run in `dir`; a run without one has no metrics.
    pub(crate) fn read(dir: &Directory, events: Events) -> Result<Metrics> {
        Metrics::scan(dir, events, u64::MAX)
    }

    /// Reads the log of the run in `path` up to a step: the last values are those that the run had there.
    ///
    /// # Errors
    /// The log cannot be read, or has more than 10,000 metrics.
    pub fn read_up_to(path: &Path, step: u64) -> Result<Metrics> {
        Metrics::scan(&Directory::open(path)?, Events::All, step)
    }

    fn scan(dir: &Directory, events: Events, most: u64) -> Result<Metrics> {
        let (mut out, mut last) = (Metrics::default(), Vec::new());
        for_each_line(dir, |line| {
            let is_step = line.starts_with(br#"{"event":"step""#);
            match events {
                Events::Evaluations if is_step => std::mem::swap(line, &mut last),
                _ => out.add(line, most)?,
            }
            Ok(())
        })?;
        // Of the last step the number counts, not its metrics.
        if let Ok(event) = serde_json::from_slice::<Value>(&last) {
            out.reach(&event);
        }
        Ok(out)
    }

    fn reach(&mut self, event: &Value) {
        if let Some(step) = event["step"].as_u64().filter(|step| *step >= self.step) {
            self.step = step;
            self.seconds = event["seconds"].as_f64().or(self.seconds);
        }
    }

    fn add(&mut self, line: &[u8], most: u64) -> Result<()> {
        let Ok(event) = serde_json::from_slice::<Value>(line) else { return Ok(()) };
        let (Some(step), Some(kind)) = (event["step"].as_u64(), event["event"].as_str()) else { return Ok(()) };
        if !matches!(kind, "step" | "eval" | "log") || step > most {
            return Ok(());
        }
        self.reach(&event);
        for (name, value) in values(&event) {
            let at = At { step, value };
            match self.by_name.get_mut(name) {
                Some(extent) => extent.add(at),
                None => {
                    check_names(self.by_name.len())?;
                    self.by_name.insert(name.into(), Extent::of(at));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_log::METRICS;

    #[test]
    fn a_log_is_summarized_up_to_its_last_complete_line() {
        let dir = tempfile::tempdir().expect("a directory");
        let handle = Directory::open(dir.path()).expect("opened");
        assert!(Metrics::read(&handle, Events::All).expect("none").by_name.is_empty());
        let text = concat!(
            r#"{"event":"step","step":1,"seconds":0.5,"loss":3.0,"metrics":{"grad_norm":1}}"#,
            "\n",
            r#"{"event":"eval","step":1,"seconds":0.6,"metrics":{"valid/loss":2.0}}"#,
            "\n",
            "no JSON\n[1]\n",
            r#"{"event":"step","step":2,"seconds":1.5,"loss":null,"metrics":{}}"#,
            "\n",
            r#"{"event":"eval","step":2,"seconds":1.6,"metrics":{"valid/loss":1.0}}"#,
            "\n",
            r#"{"event":"eval","step":3,"seconds":1.7,"metrics":{"valid/loss":null}}"#,
            "\n",
            r#"{"event":"eval","step":4,"seconds":1.8,"metrics":{"valid/loss":1.0}}"#,
            "\n",
            r#"{"event":"step","step":5,"seconds":2.5,"loss":4.0,"metrics":{}}"#,
            "\n",
            r#"{"event":"step","step":6,"seconds":3.5,"lo"#,
        );
        std::fs::write(dir.path().join(METRICS), text).expect("written");
        let some = Metrics::read(&handle, Events::Evaluations).expect("read");
        assert_eq!((some.step, some.seconds, some.by_name.len()), (5, Some(2.5), 1));
        let loss = some.by_name["valid/loss"];
        assert_eq!(
            (loss.last, loss.low.map(|l| l.step), loss.high.map(|h| h.value)),
            (At { step: 4, value: 1.0 }, Some(2), Some(2.0))
        );
        let all = Metrics::read(&handle, Events::All).expect("read");
        assert_eq!(all.by_name.keys().collect::<Vec<_>>(), ["grad_norm", "loss", "valid/loss"]);
        assert_eq!(all.by_name["loss"].best(&Goal::parse("loss")), Some(At { step: 1, value: 3.0 }));
        assert_eq!(all.by_name["loss"].best(&Goal::parse("loss:max")), Some(At { step: 5, value: 4.0 }));
    }

    #[test]
    fn names_decide_the_direction_of_a_metric() {
        let max = ["valid/accuracy", "test/top_5", "valid/top1", "f1", "valid/macro_f1", "valid/loss:max"];
        let min = ["valid/loss", "valid/perplexity", "valid/stop", "off", "valid/accuracy:min", "valid/mapped"];
        assert!(max.iter().all(|name| Goal::parse(name).max), "{max:?}");
        assert!(!min.iter().any(|name| Goal::parse(name).max), "{min:?}");
        assert_eq!(Goal::parse("valid/a:b:max").metric, "valid/a:b");
        let record = serde_json::json!({ "best": { "metric": "valid/x", "max": true } });
        let record = record.as_object().expect("an object");
        assert!(Goal::of("valid/x", record).max && !Goal::of("valid/y", record).max);
    }
}
