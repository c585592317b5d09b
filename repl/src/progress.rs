//! How far a run has come: one line rewritten in place on a terminal, elsewhere a plain line now and then.

use crate::format::{clock, rate, short};
use crate::screen::Screen;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use perilune_plan::Readings;
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Between two looks of the live line.
const REFRESH: Duration = Duration::from_millis(80);
/// Plain lines are at least this far apart, and about twenty in all.
const PLAIN: Duration = Duration::from_secs(2);
const LINES: f64 = 18.0;

/// Steps that say nothing about the speed of the others.
const WARM: u32 = 5;

/// Width of the bar.
const BAR: usize = 20;

pub struct Progress {
    screen: Rc<Screen>,
    total: u64,
    bar: Option<ProgressBar>,
    /// Seconds that making batches took, out of those below.
    data: Rc<Cell<f64>>,
    pub seconds: f64,
    samples: u64,
    shown: Instant,
    step: u64,
    loss: Option<f64>,
    /// Tokens in a sample, where samples have some.
    tokens: Option<u64>,
    /// What the device could do, and what was asked of it, in FLOP of products.
    peak: Option<f64>,
    work: f64,
    /// Steps taken here, and seconds and work when the first of them, which compile, were over.
    taken: u32,
    warm: (f64, f64),
    /// What its sensors said last.
    readings: Option<String>,
}

impl Progress {
    pub fn new(screen: Rc<Screen>, total: u64, data: Rc<Cell<f64>>) -> Progress {
        let bar = screen.live.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout_with_hz(20));
            let width = total.to_string().len() + 1;
            let style = if screen.color { ".cyan" } else { "" };
            let template = format!("step {{pos:>{width}}}/{{len}} {{bar:{BAR}{style}}} {{msg}}");
            let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            bar
        });
        screen.set_bar(bar.clone());
        Progress {
            screen,
            total,
            bar,
            data,
            seconds: 0.0,
            samples: 0,
            shown: Instant::now(),
            step: 0,
            loss: None,
            tokens: None,
            peak: None,
            work: 0.0,
            taken: 0,
            warm: (0.0, 0.0),
            readings: None,
        }
    }

    /// The run became longer or shorter.
    pub fn set_total(&mut self, total: u64) {
        self.total = total;
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// A step was taken, in that time, with so much work.
    pub fn took(&mut self, seconds: f64, work: f64) {
        self.seconds += seconds;
        self.work += work;
        self.taken += 1;
        if self.taken == WARM {
            self.warm = (self.seconds, self.work);
        }
    }

    /// Tokens in a sample, and FLOP/s that the device reaches at most.
    pub fn set_device(&mut self, tokens: Option<u64>, peak: Option<f64>) {
        (self.tokens, self.peak) = (tokens, peak);
    }

    pub fn set_readings(&mut self, readings: &Readings) {
        self.readings = Some(crate::monitor::short(readings));
    }

    /// The numbers of a step have arrived.
    pub fn update(&mut self, step: u64, loss: f64, samples: u64) {
        self.step = step;
        self.loss = Some(loss);
        self.samples += samples;
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

    /// Seconds a step takes, of those taken in this process.
    fn a_step(&self) -> f64 {
        self.seconds / f64::from(self.taken.max(1))
    }

    /// `loss 0.011 · 5.1k samples/s · data 0.4 % · 00:03`.
    fn message(&self, time: &str) -> String {
        let mut parts = vec![format!("loss {}", self.loss.map_or("?".into(), short))];
        if self.seconds > 0.0 {
            let (unit, per) = self.tokens.map_or(("samples", 1), |n| ("tokens", n));
            parts.push(format!("{} {unit}/s", rate((self.samples * per) as f64 / self.seconds)));
            if let Some(peak) = self.peak.filter(|_| self.taken > WARM) {
                let (seconds, work) = (self.seconds - self.warm.0, self.work - self.warm.1);
                parts.push(format!("MFU {:.1} %", 100.0 * work / seconds / peak));
            }
            parts.push(format!("data {:.1} %", 100.0 * self.data.get() / self.seconds));
        }
        parts.extend(self.readings.clone());
        parts.push(time.to_string());
        parts.join(" · ")
    }

    fn show(&self, time: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.step);
                bar.set_message(self.message(time));
            }
            None => self.plain(" ·", time),
        }
    }

    fn plain(&self, between: &str, time: &str) {
        let width = self.total.to_string().len() + 1;
        self.screen.line(&format!("step {:>width$}/{}{between} {}", self.step, self.total, self.message(time)));
    }

    /// The last line, which stays: printed as text, since a bar leaves the cursor at its end.
    pub fn finish(&mut self) {
        self.screen.set_bar(None);
        let between = match self.bar.take() {
            Some(bar) => {
                bar.finish_and_clear();
                let full = (self.step * BAR as u64 / self.total.max(1)).min(BAR as u64) as usize;
                format!(" {}{}", "█".repeat(full), " ".repeat(BAR - full))
            }
            None => " ·".to_string(),
        };
        if self.loss.is_some() {
            self.plain(&between, &clock(self.seconds));
        }
    }
}
