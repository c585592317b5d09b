//! `perilune find lr`: the learning-rate range test (Smith 2015, "Cyclical Learning Rates for Training Neural Networks").
//!
//! The rate rises geometrically from step to step in place of the recipe's schedule, and the loss is smoothed. Two suggestions
//! follow: the rate at which the smoothed loss falls fastest in the logarithm of the rate, and a tenth of that at which it diverges.

use super::load;
use crate::console_out::{ConsoleOut, Mode, say};
use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::format::{grouped, short};
use crate::plot::{Figure, Series};
use crate::policy_args::PolicyArgs;
use crate::table::width;
use crate::terminal::drawn;
use perilune_lua::ParamValue;
use perilune_train::numbers;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct LrArgs {
    /// The recipe, a .lua file
    recipe: PathBuf,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// The first rate
    #[arg(long, value_name = "RATE", default_value_t = 1e-7, value_parser = rate)]
    from: f64,
    /// The last rate; the test ends earlier where the loss diverges
    #[arg(long, value_name = "RATE", default_value_t = 10.0, value_parser = rate)]
    to: f64,
    /// Steps from the first rate to the last
    #[arg(long, value_name = "N", default_value_t = 150, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    steps: u32,
    /// The seed of all random numbers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
    /// Print one JSON object for each step, and a last one with the suggestions
    #[arg(long)]
    json: bool,
}

/// How much of the smoothed loss each step keeps.
const KEEP: f64 = 0.9;
/// The smoothed loss has diverged above its lowest value by this share of the fall so far, or of its size if it is larger.
const DIVERGED: f64 = 4.0;
/// Steps before the smoothed loss means something.
const BEGIN: usize = 5;

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|v| *v > 0.0 && v.is_finite());
    rate.ok_or_else(|| "a rate is a finite number above 0, such as 1e-4".into())
}

/// A step of the test.
#[derive(Clone, Copy, Debug)]
struct Point {
    rate: f64,
    loss: f64,
    /// The debiased exponential average.
    smoothed: f64,
}

/// What the test suggests.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Suggestions {
    /// The rate at which the loss falls fastest.
    steepest: Option<f64>,
    /// The first rate whose loss has diverged.
    diverged: Option<f64>,
}

/// Whether the loss of the last point has diverged.
fn diverges(points: &[Point]) -> bool {
    let Some(last) = points.last() else { return false };
    if !last.loss.is_finite() {
        return true;
    }
    let low = points.iter().skip(BEGIN.min(points.len() - 1)).map(|p| p.smoothed).fold(f64::INFINITY, f64::min);
    let first = points[0].smoothed;
    // A loss may be negative, so the distance is measured by the fall, and by the size of the first loss where it has not fallen.
    points.len() > BEGIN && last.smoothed - low > DIVERGED * (first - low).abs().max(0.25 * first.abs())
}

/// Finds the steepest fall of the smoothed loss before its lowest value; the rates are spaced geometrically.
fn suggest(points: &[Point], diverged: Option<f64>) -> Suggestions {
    let sound: Vec<&Point> = points.iter().filter(|p| p.smoothed.is_finite()).collect();
    let low = (0..sound.len()).min_by(|a, b| sound[*a].smoothed.total_cmp(&sound[*b].smoothed)).unwrap_or(0);
    // Slopes over several steps, so that noise of one step decides nothing.
    let span = (sound.len() / 20).max(2);
    let slope = |k: &usize| sound[k + span].smoothed - sound[k - span].smoothed;
    let inner = (BEGIN + span)..(low + 1).min(sound.len().saturating_sub(span));
    let steepest = inner.min_by(|a, b| slope(a).total_cmp(&slope(b))).filter(|k| slope(k) < 0.0);
    Suggestions { steepest: steepest.map(|k| sound[k].rate), diverged }
}

/// Runs the test and prints the suggestions.
pub fn lr(args: &LrArgs) -> Result<(), Failure> {
    if args.from >= args.to {
        let (from, to) = (args.from, args.to);
        return Err(Failure::Usage(format!("--from {from} --to {to}: the last rate must be above the first")));
    }
    let out = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let opened = load(&args.recipe, &args.set, &args.device, &args.files, args.device.open()?)?;
    if let Some(seed) = args.seed {
        opened.runtime.host().engine.borrow_mut().recorder.seed(seed as u64);
    }
    let run = opened.recipe.start(args.seed, args.device.precision.as_deref(), args.device.memory_budget)?;
    run.set_policies(Some("warn"), Some("off"))?;
    let ramp = run.ramp_rates(args.from, args.to, args.steps)?;
    out.line(&format!(
        "{} · {} steps from {} to {} · {}",
        crate::terminal::one_line(&opened.recipe.name()),
        grouped(u64::from(args.steps)),
        scientific(args.from),
        scientific(args.to),
        opened.runtime.host().engine.borrow().backend().describe()
    ));
    let mut points: Vec<Point> = Vec::new();
    let (mut sum, mut weight, mut diverged) = (0.0, 0.0, None);
    for step in 0..args.steps {
        let rate = ramp.rate(step)?;
        let loss = run.read(&run.step()?)?.loss;
        sum = KEEP * sum + (1.0 - KEEP) * loss;
        weight = KEEP * weight + (1.0 - KEEP);
        let point = Point { rate, loss, smoothed: sum / weight };
        points.push(point);
        out.event(&json!({
            "event": "rate", "step": step + 1, "rate": rate, "loss": numbers::json(loss),
            "smoothed": numbers::json(point.smoothed),
        }));
        if diverges(&points) {
            diverged = Some(rate);
            break;
        }
    }
    if !ramp.stands()? {
        let name = args.recipe.display();
        return Err(Failure::Usage(format!(
            "{name}: its step sets the learning rate of the optimizer itself, so the rates of the test had no effect\n  \
             hint: give the optimizer a schedule, as in optim.AdamW(model, {{ lr = function(step) ... end }})"
        )));
    }
    let found = suggest(&points, diverged);
    report(args, &opened.recipe.params()?, ramp.peak, &points, found, &out)
}

/// Formats a rate with two digits: `3.2e-3`.
fn scientific(rate: f64) -> String {
    let text = format!("{rate:.1e}");
    text.replace(".0e", "e")
}

fn report(
    args: &LrArgs,
    params: &[(String, ParamValue)],
    peak: f64,
    points: &[Point],
    found: Suggestions,
    out: &ConsoleOut,
) -> Result<(), Failure> {
    let param = params.iter().find(|(name, _)| name == "lr").and_then(|(_, value)| match value {
        ParamValue::Float(v) => Some(*v),
        ParamValue::Int(v) => Some(*v as f64),
        _ => None,
    });
    let param = param.filter(|v| *v > 0.0 && peak > 0.0);
    // The value of the param that makes the largest rate of the schedule `rate`.
    let set = |rate: f64| param.map(|param| rate * (param / peak));
    let tenth = found.diverged.map(|rate| rate / 10.0);
    out.event(&json!({
        "event": "rates", "steepest": found.steepest, "diverged": found.diverged, "tenth": tenth, "recipe": peak,
        "set_lr": found.steepest.or(tenth).and_then(set), "steps": points.len(),
    }));
    if out.mode == Mode::Json {
        return Ok(());
    }
    let curve: Vec<(f64, f64)> =
        points.iter().filter(|p| p.smoothed.is_finite()).map(|p| (p.rate.log10(), p.smoothed)).collect();
    // The end of a divergence would leave no height for the rest.
    let top = curve.iter().take(BEGIN).map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    let low = curve.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let seen = curve.iter().copied().filter(|p| p.1 <= top + (top - low).abs().max(0.1 * top.abs())).collect();
    let figure = Figure::lines("loss, smoothed", "log10 of the learning rate", vec![Series::new("loss", seen)]);
    let columns = width().unwrap_or(80).clamp(30, 120);
    say(&drawn(&figure.text(columns, 14, out.color)))?;
    let line = |name: &str, rate: f64, note: &str| {
        let set = set(rate).map(|v| format!("   --set lr={}", scientific(v))).unwrap_or_default();
        out.result(&format!("{name:<26}{}{set}{note}", out.bold(&scientific(rate))));
    };
    match found.steepest {
        Some(rate) => line("the loss falls fastest at", rate, ""),
        None => out.result("the loss never falls; raise --to, or give more --steps"),
    }
    match (found.diverged, tenth) {
        (Some(rate), Some(tenth)) => {
            line("a tenth of the divergence", tenth, &format!("   (diverges at {})", scientific(rate)))
        }
        _ => out.result(&format!("no divergence up to {}; raise --to to find it", scientific(args.to))),
    }
    out.result(&format!("{:<26}{}", "the recipe's largest rate", short(peak)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Smoothed losses at rates from 1e-6 to 1.
    fn points(loss: impl Fn(f64) -> f64) -> Vec<Point> {
        let rates = (0..121).map(|k| 10f64.powf(-6.0 + f64::from(k) * 0.05));
        rates.map(|rate| Point { rate, loss: loss(rate), smoothed: loss(rate) }).collect()
    }

    #[test]
    fn the_steepest_fall_is_found() {
        // A logistic fall in log10 of the rate around 1e-3.
        let found = suggest(&points(|rate| 1.0 / (1.0 + (4.0 * (rate.log10() + 3.0)).exp())), None);
        let rate = found.steepest.expect("a rate");
        assert!((rate.log10() + 3.0).abs() < 0.11, "{rate}");
        assert_eq!(suggest(&points(|rate| rate), None).steepest, None, "a loss that rises only");
        assert_eq!(suggest(&[], None), Suggestions::default());
    }

    #[test]
    fn divergence_is_far_above_the_lowest_loss_or_no_number() {
        let all = points(|rate| if rate < 0.1 { 2.0 - rate } else { 1e3 * rate });
        let at = (1..=all.len()).find(|n| diverges(&all[..*n])).map(|n| all[n - 1].rate).expect("diverges");
        assert!((at - 0.1).abs() < 0.02, "{at}");
        let nan = [Point { rate: 1.0, loss: f64::NAN, smoothed: f64::NAN }];
        assert!(diverges(&nan) && !diverges(&points(|_| 2.0)) && !diverges(&[]));
    }

    #[test]
    fn rates_have_two_digits() {
        assert_eq!([1e-7, 0.00321, 10.0].map(scientific), ["1e-7", "3.2e-3", "1e1"]);
    }
}
