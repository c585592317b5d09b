//! Prints the events of a run as lines and a progress bar, or as objects with `--json`.

use crate::console_out::{ConsoleOut, Mode};
use crate::format::{self, grouped, metrics};
use crate::progress::Progress;
use crate::signals::{self, Signals};
use crate::terminal::one_line;
use perilune_train::{Event, Listener};
use serde_json::Map;
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

/// The listener of `perilune run`.
pub struct RunPrinter {
    out: Rc<ConsoleOut>,
    signals: Signals,
    /// The command line of a run that can be continued.
    command: Option<Vec<String>>,
    /// Created by the first version that trains.
    progress: RefCell<Option<Progress>>,
}

impl RunPrinter {
    /// Creates a printer, which switches `signals` to training when training begins. `command` is the command line of a run
    /// that can be continued.
    pub fn new(out: Rc<ConsoleOut>, signals: Signals, command: Option<Vec<String>>) -> RunPrinter {
        RunPrinter { out, signals, command, progress: RefCell::new(None) }
    }

    /// Reports where a run has stopped, its checkpoint, and the command that continues it.
    fn stopped(&self, message: String, run_dir: &Path, checkpoint: Option<&Path>) {
        let (mut message, mut details) = (message, Map::new());
        if let Some(path) = checkpoint {
            message += &format!("; its checkpoint is {}", path.display());
            details.insert("checkpoint".into(), path.display().to_string().into());
            if let Some(words) = &self.command {
                let command = continuing(words, run_dir);
                message += &format!("\n  hint: to continue: {command}");
                details.insert("continue".into(), command.into());
            }
        }
        tracing::warn!("{message}");
        self.event(&Event::Warning { step: None, message: &message, details: &details });
    }

    /// Reports a warning that belongs to no step.
    pub fn warning(&self, message: &str) {
        tracing::warn!("{message}");
        self.event(&Event::Warning { step: None, message, details: &Map::new() });
    }

    fn with_progress(&self, f: impl FnOnce(&mut Progress)) {
        if let Some(progress) = self.progress.borrow_mut().as_mut() {
            f(progress);
        }
    }

    fn lines(&self, event: &Event<'_>) {
        let out = &self.out;
        match event {
            Event::Recipe { name, device, parameters, frozen, samples, seed } => {
                let size = format::parameters(*parameters, *frozen);
                out.line(&header(&out.bold(&one_line(name)), device, size, samples, *seed));
            }
            Event::Resumed { step, dir, changed, states } => {
                out.line(&format!("continuing from step {} of {}", grouped(*step), dir.display()));
                if !changed.is_empty() {
                    out.line(&format!("changed since: {}", changed.join(", ")));
                }
                if let Some(text) = states {
                    out.line(text);
                }
            }
            Event::Branched { step, from, dir } => {
                out.line(&format!(
                    "branching from step {} of {} into {}",
                    grouped(*step),
                    from.display(),
                    dir.display()
                ));
            }
            Event::Restarted { dir, reason } => {
                out.line(&format!("starting from the beginning in {}: {}", dir.display(), one_line(reason)));
            }
            Event::PeriodicEvaluation { step, split, metrics: values } => {
                out.line(&format!("step {step:>5} · {split} {}", metrics(values)));
            }
            Event::Logged { step, fields, .. } => {
                // Figures are curves; texts are to be read.
                for (name, text) in fields.get("texts").and_then(|t| t.as_object()).into_iter().flatten() {
                    let text = text.as_str().unwrap_or_default();
                    out.line(&format!("step {step:>5} · {}: {}", one_line(name), one_line(text)));
                }
            }
            Event::ReloadWaits { step } => {
                out.line(&format!("step {step} · compiling the kernels of an edit"));
            }
            Event::Applied { step, changed, plans, ms, states } => {
                let what = if changed.is_empty() { "no change of the text".into() } else { changed.join(", ") };
                let next = step + 1;
                out.line(&format!(
                    "step {step} · {what} · applied at step {next} · {plans} plans compiled · {ms:.0} ms"
                ));
                if let Some(text) = states {
                    out.line(&format!("step {step} · {text}"));
                }
            }
            Event::Refused { step, back_to, error } => {
                let what = match step - back_to.unwrap_or(*step) {
                    0 => "the previous version continues".to_string(),
                    1 => format!("the previous version continues from step {}: 1 step is repeated", step - 1),
                    n => format!("the previous version continues from step {}: {n} steps are repeated", step - n),
                };
                out.warn(&format!("step {step} · {} · {what}", error.lines().next().unwrap_or_default()));
            }
            Event::Warning { message, details, .. } => {
                // The recipe's line comes first, unless the message has it.
                let file = details.get("file").and_then(|f| f.as_str());
                let place = file.zip(details.get("line").and_then(|l| l.as_u64())).map(|(f, l)| format!("{f}:{l}"));
                let place = place.filter(|p| !message.contains(p.as_str())).map(|p| format!("{p}: "));
                out.warn(&format!("{}{message}", place.unwrap_or_default()));
            }
            Event::StoppedEarly { step, reason } => {
                out.line(&format!("step {step} · stopped early: {}", one_line(reason)));
            }
            Event::Finished { steps, evaluations, run_dir } => {
                let mut lines: Vec<String> =
                    evaluations.iter().map(|(split, values)| format!("{split} {}", metrics(values))).collect();
                if lines.is_empty() {
                    lines.push(format!("trained {} step{}", grouped(*steps), if *steps == 1 { "" } else { "s" }));
                }
                if let Some(last) = lines.last_mut() {
                    *last = beside(last, run_dir, out);
                }
                lines.iter().for_each(|line| out.result(line));
            }
            Event::Paused { step, steps, evaluations, run_dir } => {
                for (split, values) in *evaluations {
                    out.line(&format!("{split} {}", metrics(values)));
                }
                let text = format!("stopped at step {} of {} (--until)", grouped(*step), grouped(*steps));
                out.result(&beside(&text, run_dir, out));
            }
            Event::Failed { run_dir: Some(dir), .. } => {
                out.line(&out.dim(&format!("the record of the failed run is in {}", dir.display())));
            }
            Event::ComparesData { path, bytes } => {
                out.line(&format!("comparing {path:?} with the data of the run ({})", format::bytes(*bytes as usize)));
            }
            Event::HashesData => out.line("hashing the data files for run.json; Ctrl-C leaves their hashes out"),
            Event::Reproduced => out.line("the weights equal those of the run"),
            _ => {}
        }
    }

    fn progress(&self, event: &Event<'_>) {
        match event {
            Event::Version { steps, epoch, tokens_per_sample, peak } => {
                let mut progress = self.progress.borrow_mut();
                let progress = progress.get_or_insert_with(|| Progress::new(self.out.clone(), *steps));
                progress.set_total(*steps);
                progress.begin(*epoch, *tokens_per_sample, *peak);
            }
            Event::Issued { step, seconds, data_seconds, flops, rate } => {
                self.with_progress(|p| {
                    if let Some(rate) = rate {
                        p.set_rate(*rate);
                    }
                    p.took(*seconds, *data_seconds, *flops);
                    p.reached(*step);
                });
            }
            Event::Step { step, loss, samples, metrics, .. } => self.with_progress(|p| {
                p.set_metrics(metrics);
                p.update(*step, *loss, *samples);
            }),
            Event::System { readings, .. } => self.with_progress(|p| p.set_readings(readings)),
            Event::LoopEnded => self.with_progress(Progress::finish),
            _ => {}
        }
    }
}

impl Listener for RunPrinter {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Training => {
                self.out.training.set(true);
                if let Err(failure) = self.signals.begin_training(self.out.notifier()) {
                    self.warning(&failure.message());
                }
            }
            Event::HashesData | Event::Paused { .. } => self.signals.stopped(),
            Event::Stopped { code, step, steps, run_dir, checkpoint } => {
                self.signals.stopped();
                let name = signals::name(*code);
                self.stopped(format!("{name}: stopped after step {step} of {steps}"), run_dir, *checkpoint);
            }
            _ => {}
        }
        if self.out.mode == Mode::Json
            && let Some(json) = event.json()
        {
            self.out.event(&json);
        }
        self.lines(event);
        self.progress(event);
    }
}

/// Returns the command that continues a run: its own with `--resume` and the run directory.
fn continuing(words: &[String], run_dir: &Path) -> String {
    let once = ["--edited", "--overwrite", "--changed-data", "--branch", "--discard-later"];
    let is_recipe = |w: &String| w.ends_with(".lua") && !w.contains('=');
    let mut given = words.iter().peekable();
    let mut words: Vec<String> = Vec::new();
    while let Some(word) = given.next() {
        match word.as_str() {
            // Its value, the run, is another one if this run is a branch.
            "--resume" => drop(given.next_if(|next| !next.starts_with('-') && !is_recipe(next))),
            "--at" => drop(given.next()),
            "--until" => drop(given.next()),
            word if once.contains(&word) || ["--resume=", "--at=", "--until="].iter().any(|o| word.starts_with(o)) => {}
            _ => words.push(word.clone()),
        }
    }
    let end = words.iter().position(|w| w == "--").unwrap_or(words.len());
    let named = words[..end].iter().any(|w| w == "--run-dir" || w.starts_with("--run-dir="));
    let mut more = vec!["--resume".to_string()];
    if !words.iter().any(is_recipe) {
        // The recipe is that of the run.
        more.push(run_dir.display().to_string());
    } else if !named {
        more.splice(0..0, ["--run-dir".to_string(), run_dir.display().to_string()]);
    }
    words.splice(end..end, more);
    words.iter().map(|w| quoted(w)).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a shell, where it needs that.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Formats the first line: `digits · cpu (2 threads, AVX-512) · 26,122 parameters · 1,438 train / 359 valid · seed 1`.
fn header(name: &str, device: &str, size: String, samples: &[(String, u64)], seed: i64) -> String {
    let sizes: Vec<String> = samples.iter().map(|(split, n)| format!("{} {split}", grouped(*n))).collect();
    let mut parts = vec![name.to_string(), device.to_string(), size];
    if !sizes.is_empty() {
        parts.push(sizes.join(" / "));
    }
    parts.push(format!("seed {seed}"));
    parts.join(" · ")
}

/// Appends the run directory to a result, right-aligned and dimmed.
fn beside(text: &str, dir: &Path, out: &ConsoleOut) -> String {
    let pad = 79usize.saturating_sub(text.chars().count()).max(4);
    format!("{text}{}{}", " ".repeat(pad), out.dim(&dir.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_continues_a_run() {
        let of = |line: &str| {
            let words: Vec<String> = line.split('|').map(String::from).collect();
            continuing(&words, Path::new("runs/it's"))
        };
        assert_eq!(of("perilune|run|a.lua|--overwrite|--run-dir|r"), "perilune run a.lua --run-dir r --resume");
        assert_eq!(of("perilune|a.lua|--resume|--edited|--run-dir=r"), "perilune a.lua --run-dir=r --resume");
        assert_eq!(of("perilune|run|--resume|a.lua|--run-dir|r"), "perilune run a.lua --run-dir r --resume");
        assert_eq!(
            of("perilune|run|--resume|old|--at|5|--branch|--steps|9"),
            r"perilune run --steps 9 --resume 'runs/it'\''s'"
        );
        assert_eq!(
            of("perilune|run|a.lua|--resume=old|--at=5|--branch"),
            r"perilune run a.lua --run-dir 'runs/it'\''s' --resume"
        );
        assert_eq!(
            of("perilune|run|--set|text=two words|--|a.lua"),
            r"perilune run --set 'text=two words' --run-dir 'runs/it'\''s' --resume -- a.lua"
        );
    }
}
