//! Formats numbers, durations and metrics for the terminal.

pub use perilune_train::numbers::short;

use crate::terminal::one_line;

/// Groups digits by thousands: 26122 -> `26,122`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Formats the size of a model: `26,122 parameters`, and with frozen weights `1,016,960 parameters, 15,360 of them trained`.
pub fn parameters(trained: u64, frozen: u64) -> String {
    match frozen {
        0 => format!("{} parameters", grouped(trained)),
        _ => format!("{} parameters, {} of them trained", grouped(trained + frozen), grouped(trained)),
    }
}

/// Formats a rate: 5123.4 -> `5.1k`, 999.7 -> `1.0k`.
pub fn rate(v: f64) -> String {
    match v {
        v if v >= 999_950.0 => format!("{:.1}M", v / 1e6),
        v if v >= 999.5 => format!("{:.1}k", v / 1e3),
        v if v >= 10.0 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

/// Formats a duration: `00:03`, `1:02:03`.
pub fn clock(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.round().max(0.0) as u64 } else { 0 };
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{:02}:{:02}", s / 60, s % 60)
    }
}

/// Formats a number of bytes: `1.5 MB`.
pub fn bytes(n: usize) -> String {
    perilune_plan::show::scaled(n, "B")
}

/// Formats metrics, the loss first: `loss 0.071 · accuracy 0.981`.
pub fn metrics(values: &[(String, f64)]) -> String {
    let mut sorted: Vec<&(String, f64)> = values.iter().collect();
    sorted.sort_by_key(|(name, _)| name != "loss");
    sorted.iter().map(|(name, v)| format!("{} {}", one_line(name), short(*v))).collect::<Vec<_>>().join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(grouped(26122), "26,122");
        assert_eq!(grouped(999), "999");
        assert_eq!(rate(5123.4), "5.1k");
        assert_eq!([999.4, 999.7, 999_949.0, 999_950.0].map(rate), ["999", "1.0k", "999.9k", "1.0M"]);
        assert_eq!(clock(3.2), "00:03");
        assert_eq!(clock(3723.0), "1:02:03");
    }
}
