//! Shows the progress of a run: on a terminal by one line rewritten in place, elsewhere by about twenty plain lines.

use crate::console_out::ConsoleOut;
use crate::format::{clock, rate, short};
use crate::table;
use crate::terminal::one_line;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use perilune_plan::Readings;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time between two updates of the live line.
const REFRESH: Duration = Duration::from_millis(80);
/// Plain lines are at least this far apart, and about twenty in all.
const PLAIN: Duration = Duration::from_secs(2);
const LINES: f64 = 18.0;

/// The number of first steps, also of a new version, that are excluded from the speed because they compile.
const WARM: u32 = 5;
/// Half-life of a step in the speed of the live line, in seconds.
const HALF: f64 = 10.0;

/// Width of the bar, where the terminal has room for it.
const BAR: usize = 20;
const LEAST_BAR: usize = 4;

/// Metrics that the training loop adds, and the most metrics of the recipe that are shown.
const OF_THE_LOOP: [&str; 3] = ["grad_norm", "loss_scale", "expert_load"];
const METRICS: usize = 3;

/// A part of the line. Where there is no room for all, the ones with the highest number are left out first.
type Part = (u8, String);

/// Joins the parts that fit in `room` columns.
fn fitted(mut parts: Vec<Part>, room: Option<usize>) -> String {
    let join = |parts: &[Part]| parts.iter().map(|p| p.1.as_str()).collect::<Vec<_>>().join(" · ");
    while let Some(room) = room
        && parts.len() > 1
        && join(&parts).chars().count() > room
    {
        let last = parts.iter().enumerate().max_by_key(|(k, part)| (part.0, *k)).map(|(k, _)| k);
        parts.remove(last.unwrap_or(0));
    }
    join(&parts)
}

/// Sums over steps: seconds, those of them spent on data, samples, FLOP of matrix products.
#[derive(Clone, Copy, Default)]
struct Pace {
    steps: f64,
    seconds: f64,
    data: f64,
    samples: f64,
    work: f64,
}

impl Pace {
    fn add(&mut self, seconds: f64, data: f64, work: f64) {
        self.steps += 1.0;
        self.seconds += seconds;
        self.data += data;
        self.work += work;
    }

    /// Scales all sums, so that older steps count less.
    fn fade(&mut self, by: f64) {
        for sum in [&mut self.steps, &mut self.seconds, &mut self.data, &mut self.samples, &mut self.work] {
            *sum *= by;
        }
    }
}

/// The progress display of one run.
pub struct Progress {
    screen: Rc<ConsoleOut>,
    total: u64,
    bar: Option<ProgressBar>,
    bar_width: usize,
    /// All steps; those after the first few; the last ones of the running version.
    all: Pace,
    warm: Pace,
    recent: Pace,
    /// Steps taken in this process, and by the running version.
    taken: u32,
    fresh: u32,
    shown: Instant,
    step: u64,
    loss: Option<f64>,
    /// The last metrics of the recipe, without those of the training loop.
    metrics: Vec<(String, f64)>,
    /// The learning rate of the next step.
    rate: Option<f64>,
    /// The steps of an epoch, where there are several in the run.
    epoch: Option<f64>,
    /// Tokens in a sample, where samples have some.
    tokens: Option<u64>,
    /// The peak of the device, in FLOP/s.
    peak: Option<f64>,
    /// The last sensor readings, formatted.
    readings: Option<String>,
}

impl Progress {
    /// Creates the display of a run of `total` steps.
    pub fn new(screen: Rc<ConsoleOut>, total: u64) -> Progress {
        let bar_width = table::width().map_or(BAR, |columns| (columns / 4).clamp(LEAST_BAR, BAR));
        let bar = screen.live.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout_with_hz(20));
            let width = total.to_string().len() + 1;
            let style = if screen.color { ".cyan" } else { "" };
            let template = format!("step {{pos:>{width}}}/{{len}} {{bar:{bar_width}{style}}} {{msg}}");
            let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            bar
        });
        screen.set_bar(bar.clone());
        Progress {
            screen,
            total,
            bar,
            bar_width,
            all: Pace::default(),
            warm: Pace::default(),
            recent: Pace::default(),
            taken: 0,
            fresh: 0,
            shown: Instant::now(),
            step: 0,
            loss: None,
            metrics: Vec::new(),
            rate: None,
            epoch: None,
            tokens: None,
            peak: None,
            readings: None,
        }
    }

    /// Restarts the speed for another version of the recipe, with the steps of its epochs, its tokens per sample and the peak FLOP/s of
    /// the device.
    pub fn begin(&mut self, epoch: Option<f64>, tokens: Option<u64>, peak: Option<f64>) {
        self.epoch = epoch.filter(|steps| *steps > 0.0 && *steps < self.total as f64);
        (self.tokens, self.peak) = (tokens, peak);
        (self.recent, self.fresh) = (Pace::default(), 0);
    }

    /// Changes the number of steps.
    pub fn set_total(&mut self, total: u64) {
        self.total = total;
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// Counts a step: its seconds, those of them spent on data, and the FLOP of its matrix products.
    pub fn took(&mut self, seconds: f64, data: f64, work: f64) {
        (self.taken, self.fresh) = (self.taken + 1, self.fresh + 1);
        self.all.add(seconds, data, work);
        if self.taken > WARM {
            self.warm.add(seconds, data, work);
        }
        if self.fresh == WARM {
            self.recent = Pace::default();
        }
        self.recent.fade(0.5f64.powf(seconds / HALF));
        self.recent.add(seconds, data, work);
    }

    /// Sets the learning rate to show.
    pub fn set_rate(&mut self, rate: f64) {
        self.rate = Some(rate);
    }

    /// Sets the metrics to show.
    pub fn set_metrics(&mut self, metrics: &[(String, f64)]) {
        let own = |name: &str| !OF_THE_LOOP.contains(&name);
        self.metrics.clear();
        self.metrics.extend(metrics.iter().filter(|(name, _)| own(name)).take(METRICS).cloned());
    }

    /// Counts a step of a script that has no loss to show.
    pub fn reached(&mut self, step: u64) {
        if self.loss.is_none() && step > 1 {
            self.show_step(step);
        }
    }

    /// Sets the sensor readings to show.
    pub fn set_readings(&mut self, readings: &Readings) {
        self.readings = Some(sensors(readings));
    }

    /// Shows a step whose metrics have been read, if the last update is old enough.
    pub fn update(&mut self, step: u64, loss: f64, samples: u64) {
        self.loss = Some(loss);
        for pace in [&mut self.all, &mut self.recent] {
            pace.samples += samples as f64;
        }
        self.show_step(step);
    }

    /// Shows the display for a step, if the last update is old enough.
    fn show_step(&mut self, step: u64) {
        self.step = step;
        let wait = match &self.bar {
            Some(_) => REFRESH,
            None => PLAIN.max(Duration::from_secs_f64((self.a_step() * self.total as f64 / LINES).min(3600.0))),
        };
        if step >= self.total || self.shown.elapsed() < wait {
            return;
        }
        self.shown = Instant::now();
        let left = self.a_step() * (self.total - step) as f64;
        self.show(&format!("{} left", clock(left)));
    }

    /// Returns the seconds of a recent step.
    fn a_step(&self) -> f64 {
        self.recent.seconds / self.recent.steps.max(1e-9)
    }

    /// Formats `loss 0.011 · accuracy 0.98 · lr 1.0e-3 · epoch 2.4 · 5.1k samples/s · data 0.4 % · 00:03` in at most `room` columns.
    fn message(&self, time: &str, of: &Pace, products: &Pace, room: Option<usize>) -> String {
        let mut parts: Vec<Part> = self.loss.map(|loss| (0, format!("loss {}", short(loss)))).into_iter().collect();
        parts.extend(self.metrics.iter().map(|(name, v)| (3, format!("{} {}", one_line(name), short(*v)))));
        parts.extend(self.rate.map(|rate| (5, format!("lr {}", short(rate)))));
        parts.extend(self.epoch.map(|steps| (4, format!("epoch {:.1}", self.step as f64 / steps))));
        if of.seconds > 0.0 {
            let speed = match self.tokens {
                Some(n) => format!("{} tokens/s", rate(of.samples * n as f64 / of.seconds)),
                None if of.samples > 0.0 => format!("{} samples/s", rate(of.samples / of.seconds)),
                // A script says nothing of its samples.
                None => format!("{} steps/s", rate(of.steps / of.seconds)),
            };
            parts.push((2, speed));
            if let Some(peak) = self.peak.filter(|_| products.seconds > 0.0) {
                parts.push((6, format!("MFU {:.1} %", 100.0 * products.work / products.seconds / peak)));
            }
            if of.samples > 0.0 {
                parts.push((7, format!("data {:.1} %", 100.0 * of.data / of.seconds)));
            }
        }
        parts.extend(self.readings.clone().map(|text| (8, text)));
        parts.push((1, time.to_string()));
        fitted(parts, room)
    }

    /// Formats the recent steps.
    fn present(&self, time: &str) -> String {
        let products = if self.fresh >= WARM { self.recent } else { Pace::default() };
        self.message(time, &self.recent, &products, self.room())
    }

    /// Returns the columns beside the bar; none without a terminal.
    fn room(&self) -> Option<usize> {
        let digits = self.total.to_string().len();
        let taken = "step ".len() + (digits + 1) + 1 + digits + 1 + self.bar_width + 1;
        table::width().filter(|_| self.bar.is_some()).map(|columns| columns.saturating_sub(taken + 1))
    }

    fn show(&self, time: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.step);
                bar.set_message(self.present(time));
            }
            None => self.plain(" ·", &self.present(time)),
        }
    }

    fn plain(&self, between: &str, message: &str) {
        let width = self.total.to_string().len() + 1;
        self.screen.line(&format!("step {:>width$}/{}{between} {message}", self.step, self.total));
    }

    /// Prints the last line as text, since a bar leaves the cursor at its end.
    pub fn finish(&mut self) {
        let room = self.room();
        self.screen.set_bar(None);
        let between = match self.bar.take() {
            Some(bar) => {
                bar.finish_and_clear();
                let width = self.bar_width;
                let full = (self.step * width as u64 / self.total.max(1)).min(width as u64) as usize;
                format!(" {}{}", "█".repeat(full), " ".repeat(width - full))
            }
            None => " ·".to_string(),
        };
        if self.loss.is_some() {
            self.plain(&between, &self.message(&clock(self.all.seconds), &self.all, &self.warm, room));
        }
    }
}

/// Formats sensor readings: `GPU 98 % 512 W 61 °C`, and what throttles the device.
fn sensors(r: &Readings) -> String {
    let mut parts = vec!["GPU".to_string()];
    parts.extend(r.utilization.map(|v| format!("{v:.0} %")));
    parts.extend(r.power.map(|v| format!("{v:.0} W")));
    parts.extend(r.temperature.map(|v| format!("{v:.0} °C")));
    if !r.throttled.is_empty() {
        parts.push(format!("slowed by {}", r.throttled.join(", ")));
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_short() {
        let (utilization, power) = (Some(98.0), Some(512.4));
        let r = Readings { utilization, power, throttled: vec!["power limit"], ..Readings::default() };
        assert_eq!(sensors(&r), "GPU 98 % 512 W slowed by power limit");
    }

    #[test]
    fn a_narrow_line_keeps_the_loss_and_the_time() {
        let parts: Vec<Part> =
            vec![(0, "loss 0.5".into()), (3, "accuracy 0.9".into()), (2, "5 steps/s".into()), (1, "00:03".into())];
        let at = |room| fitted(parts.clone(), room);
        assert_eq!(at(None), "loss 0.5 · accuracy 0.9 · 5 steps/s · 00:03");
        assert_eq!(at(Some(43)), at(None));
        assert_eq!(at(Some(42)), "loss 0.5 · 5 steps/s · 00:03");
        assert_eq!(at(Some(20)), "loss 0.5 · 00:03");
        assert_eq!(at(Some(3)), "loss 0.5");
    }

    #[test]
    fn the_line_has_metrics_rate_and_epoch() {
        let mut p = Progress::new(Rc::new(ConsoleOut::new(Mode::Quiet)), 100);
        p.begin(Some(40.0), None, None);
        let metric = |name: &str, v: f64| (name.to_string(), v);
        p.set_metrics(&[metric("accuracy", 0.5), metric("grad_norm", 7.0)]);
        p.set_rate(1e-3);
        p.took(1.0, 0.0, 0.0);
        p.update(60, 0.25, 10);
        assert_eq!(
            p.present("t"),
            "loss 0.250 · accuracy 0.500 · lr 0.00100 · epoch 1.5 · 10 samples/s · data 0.0 % · t"
        );
        // One epoch is the run itself.
        p.begin(Some(100.0), None, None);
        assert!(!p.present("t").contains("epoch"));
    }

    use crate::console_out::Mode;

    /// A new version of the recipe is slower, and spends more of its time on data.
    #[test]
    fn the_line_says_the_speed_of_the_running_version() {
        let mut p = Progress::new(Rc::new(ConsoleOut::new(Mode::Quiet)), 1000);
        let steps = |p: &mut Progress, n: u32, seconds: f64, data: f64, samples: u64| {
            for _ in 0..n {
                p.took(seconds, data, 8e9);
                p.update(1, 0.5, samples);
            }
        };
        p.begin(None, None, Some(1e12));
        steps(&mut p, 1, 5.0, 0.0, 10);
        assert_eq!(p.present("t"), "loss 0.500 · 2.0 samples/s · data 0.0 % · t");
        steps(&mut p, 99, 0.01, 0.001, 10);
        assert_eq!(p.present("t"), "loss 0.500 · 1.0k samples/s · MFU 80.0 % · data 10.0 % · t");
        p.begin(None, None, Some(1e12));
        steps(&mut p, 1, 0.5, 0.25, 20);
        assert_eq!(p.present("t"), "loss 0.500 · 40 samples/s · data 50.0 % · t");
        steps(&mut p, 20, 0.1, 0.05, 20);
        assert_eq!(p.present("t"), "loss 0.500 · 200 samples/s · MFU 8.0 % · data 50.0 % · t");
        assert!((p.a_step() - 0.1).abs() < 1e-12, "{}", p.a_step());
        // The last line is about all of it.
        assert_eq!((p.all.steps, p.all.samples), (121.0, 1420.0));
    }
}
