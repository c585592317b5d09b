//! Parses the values of a param in a sweep: lists, ranges of whole numbers, and ranges of numbers to draw from.
//!
//! `1e-3,3e-3` lists values, `1..5` has both ends, and `log:1e-4..1e-2` is drawn uniformly in the logarithm. A comma within a value
//! is written `\,`. Values stay the text that was given: a run gets it as `--set` would.

use crate::error::{Error, Result};

/// The values of one axis.
#[derive(Clone, PartialEq, Debug)]
pub enum Values {
    /// Values in the order given.
    List(Vec<String>),
    /// Whole numbers from the first to the second, both included; with `log` draws are uniform in the logarithm.
    Whole { low: i64, high: i64, log: bool },
    /// Numbers between two bounds, for draws only.
    Real { low: f64, high: f64, log: bool },
}

/// A param and its values.
#[derive(Clone, PartialEq, Debug)]
pub struct Axis {
    pub name: String,
    pub values: Values,
}

/// The most values that one axis lists.
const MOST: u64 = 1_000_000;

/// Splits at commas that no backslash precedes. Returns the parts, and whether one has an escaped comma.
fn split(text: &str) -> (Vec<String>, bool) {
    let (mut parts, mut part, mut escaped) = (Vec::new(), String::new(), false);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.next_if_eq(&',').is_some() => {
                escaped = true;
                part.push(',');
            }
            ',' => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    (parts, escaped)
}

/// Parses `LOW..HIGH`; `None` if the text is not a range of numbers, such as a path with `..`.
fn range(text: &str, log: bool) -> std::result::Result<Option<Values>, String> {
    let Some((low, high)) = text.split_once("..") else { return Ok(None) };
    let number = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite());
    let (low, high) = (low.trim(), high.trim());
    let (Some(from), Some(to)) = (number(low), number(high)) else {
        if number(low).is_some() || number(high).is_some() || log {
            return Err(format!("{text} is not a range: both ends must be finite numbers, as in 1..5"));
        }
        return Ok(None);
    };
    if from > to {
        return Err(format!("the range {text} is empty: its first number is above its last"));
    }
    if log && from <= 0.0 {
        return Err(format!("the range log:{text} must be above 0"));
    }
    Ok(Some(match (low.parse(), high.parse()) {
        (Ok(low), Ok(high)) => Values::Whole { low, high, log },
        _ => Values::Real { low: from, high: to, log },
    }))
}

impl Axis {
    /// Parses the values of a param, as `--set NAME=TEXT` gives them.
    ///
    /// # Errors
    /// A value or a range is empty, or a list has a range of numbers that are not whole.
    pub fn parse(name: &str, text: &str) -> Result<Axis> {
        let wrong = |rule: String| Error::Usage(format!("--set {name}={text}: {rule}"));
        let (parts, _) = split(text);
        let axis = |values| Ok(Axis { name: name.into(), values });
        if let [part] = &parts[..] {
            let (body, log) = part.strip_prefix("log:").map_or((part.as_str(), false), |body| (body, true));
            if log && !body.contains("..") {
                return Err(wrong(format!("log: needs a range, as in --set {name}=log:1e-4..1e-2")));
            }
            return match range(body, log).map_err(wrong)? {
                Some(values) => axis(values),
                None => axis(Values::List(vec![part.clone()])),
            };
        }
        let mut list = Vec::new();
        for part in &parts {
            match range(part, false).map_err(wrong)? {
                Some(Values::Whole { low, high, .. }) if high.abs_diff(low) < MOST => {
                    list.extend((low..=high).map(|v| v.to_string()));
                }
                Some(Values::Whole { .. }) => {
                    return Err(wrong(format!("the range {part} has more than {MOST} values")));
                }
                Some(_) => {
                    return Err(wrong(format!(
                        "{part} is a range of numbers that are not whole, which a list cannot have"
                    )));
                }
                None if part.is_empty() => {
                    let cure = r"a comma that belongs to a value is written \,";
                    return Err(wrong(format!("a value of the list is empty\n  hint: {cure}")));
                }
                None => list.push(part.clone()),
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        if let Some(twice) = list.iter().find(|value| !seen.insert(value.as_str())) {
            return Err(wrong(format!("the value {twice} is listed twice")));
        }
        axis(Values::List(list))
    }

    /// Whether the text has a comma that separates values, and none that belongs to one.
    pub fn has_plain_comma(text: &str) -> bool {
        let (parts, escaped) = split(text);
        parts.len() > 1 && !escaped
    }

    /// Returns the number of values; none for a range of numbers that are not whole.
    pub fn len(&self) -> Option<u64> {
        match &self.values {
            Values::List(list) => Some(list.len() as u64),
            Values::Whole { low, high, .. } => Some(high.abs_diff(*low).saturating_add(1)),
            Values::Real { .. } => None,
        }
    }

    /// Whether it has no values; an axis never is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// Lists the values of a list or of a range of whole numbers.
    ///
    /// # Errors
    /// The range has numbers that are not whole.
    pub fn list(&self) -> Result<Vec<String>> {
        match &self.values {
            Values::List(list) => Ok(list.clone()),
            Values::Whole { low, high, .. } => Ok((*low..=*high).map(|v| v.to_string()).collect()),
            Values::Real { low, high, .. } => {
                let name = &self.name;
                Err(Error::Usage(format!(
                    "--set {name}={low}..{high}: a grid cannot list the numbers of a range that are not whole\n  \
                     hint: list values, as in --set {name}=1e-3,3e-3, or draw some with --random N"
                )))
            }
        }
    }

    /// Draws a value; `unit` is uniform in [0, 1).
    pub(crate) fn draw(&self, unit: f64) -> String {
        let between = |low: f64, high: f64, log: bool| match log {
            true => (low.ln() + unit * (high.ln() - low.ln())).exp().clamp(low, high),
            false => low + unit * (high - low),
        };
        match &self.values {
            Values::List(list) => list[((unit * list.len() as f64) as usize).min(list.len() - 1)].clone(),
            Values::Whole { low, high, log: true } => {
                (between(*low as f64, *high as f64, true).round() as i64).clamp(*low, *high).to_string()
            }
            Values::Whole { low, high, log: false } => {
                let offset = (unit * (high.abs_diff(*low) as f64 + 1.0)) as u64;
                low.saturating_add_unsigned(offset.min(high.abs_diff(*low))).to_string()
            }
            Values::Real { low, high, log } => plain(between(*low, *high, *log)),
        }
    }
}

/// Formats a drawn number with four significant digits, which is the value that the run gets.
fn plain(v: f64) -> String {
    let text = format!("{v:.3e}");
    match text.parse::<f64>() {
        Ok(rounded) if (1e-3..1e6).contains(&rounded.abs()) || rounded == 0.0 => rounded.to_string(),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<String> {
        Axis::parse("x", text).and_then(|axis| axis.list()).expect("values")
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(list("1e-3,3e-3"), ["1e-3", "3e-3"]);
        assert_eq!(list("1..5"), ["1", "2", "3", "4", "5"]);
        assert_eq!(list("-1..1,7"), ["-1", "0", "1", "7"]);
        assert_eq!(list(r"a\,b,c"), ["a,b", "c"]);
        assert_eq!(list("../data/x.csv"), ["../data/x.csv"]);
        assert_eq!(list("true,false"), ["true", "false"]);
        assert_eq!(list("3..3"), ["3"]);
        assert_eq!(list(""), [""]);
        assert!(Axis::has_plain_comma("a,b") && !Axis::has_plain_comma(r"a\,b,c"));
        let real = Axis::parse("lr", "log:1e-4..1e-2").expect("a range");
        assert_eq!(real.values, Values::Real { low: 1e-4, high: 1e-2, log: true });
    }

    #[test]
    fn wrong_values_are_refused() {
        let rule = |text: &str| Axis::parse("x", text).and_then(|a| a.list()).expect_err("refused").to_string();
        assert!(rule("5..1").contains("is empty"));
        assert!(rule("1..x").contains("not a range"));
        assert!(rule("1,,2").contains(r"\,"));
        assert!(rule("log:0..1").contains("above 0"));
        assert!(rule("log:3").contains("needs a range"));
        assert!(rule("0.1..0.5").contains("--random"));
        assert!(rule("1,1").contains("twice"));
        assert!(rule("1,2..3.5").contains("not whole"));
        assert!(rule("1..9000000000,4").contains("more than"));
    }

    #[test]
    fn draws_stay_within_their_range() {
        let axis = |text: &str| Axis::parse("x", text).expect("an axis");
        assert_eq!(axis("1..3").draw(0.0), "1");
        assert_eq!(axis("1..3").draw(0.999), "3");
        assert_eq!(axis("log:1e-4..1e-2").draw(0.5), "0.001");
        assert_eq!(axis("log:16..256").draw(0.5), "64");
        assert_eq!(axis("0.0..1.0").draw(0.25), "0.25");
        assert_eq!(axis("a,b").draw(0.6), "b");
        assert_eq!(axis("log:1e-9..1e-7").draw(0.5), "1.000e-8");
    }
}
