//! Numbers as people read them, and as JSON carries them.

use serde_json::Value;

/// 26122 -> `26,122`.
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

/// A loss or metric in few digits: `0.011`, `12.346`, `1.2e-5`.
pub fn short(v: f64) -> String {
    let a = v.abs();
    match a {
        _ if v.is_nan() => "nan".into(),
        _ if v.is_infinite() => if v > 0.0 { "inf" } else { "-inf" }.into(),
        0.0 => "0".into(),
        a if !(1e-4..1e6).contains(&a) => format!("{v:.1e}"),
        a if a >= 1000.0 => format!("{v:.0}"),
        a if a >= 100.0 => format!("{v:.1}"),
        a if a >= 0.01 => format!("{v:.3}"),
        _ => format!("{v:.5}"),
    }
}

/// 5123.4 -> `5.1k`, 999.7 -> `1.0k`.
pub fn rate(v: f64) -> String {
    match v {
        v if v >= 999_950.0 => format!("{:.1}M", v / 1e6),
        v if v >= 999.5 => format!("{:.1}k", v / 1e3),
        v if v >= 10.0 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

/// `00:03`, `1:02:03`.
pub fn clock(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.round().max(0.0) as u64 } else { 0 };
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{:02}:{:02}", s / 60, s % 60)
    }
}

/// `1.5 MB`.
pub fn bytes(n: usize) -> String {
    perilune_plan::show::scaled(n, "B")
}

/// `loss 0.071 · accuracy 0.981`, the loss first.
pub fn metrics(values: &[(String, f64)]) -> String {
    let mut sorted: Vec<&(String, f64)> = values.iter().collect();
    sorted.sort_by_key(|(name, _)| name != "loss");
    sorted.iter().map(|(name, v)| format!("{name} {}", short(*v))).collect::<Vec<_>>().join(" · ")
}

/// A number for JSON: the shortest text that gives the same f32, where it is one; NaN and infinities are null.
pub fn number(v: f64) -> Value {
    let single = v as f32;
    let v = if f64::from(single) == v { single.to_string().parse().unwrap_or(v) } else { v };
    serde_json::Number::from_f64(v).map_or(Value::Null, Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(grouped(26122), "26,122");
        assert_eq!(grouped(999), "999");
        assert_eq!(short(0.0712), "0.071");
        assert_eq!(short(0.00123), "0.00123");
        assert_eq!(short(f64::NAN), "nan");
        assert_eq!(rate(5123.4), "5.1k");
        assert_eq!([999.4, 999.7, 999_949.0, 999_950.0].map(rate), ["999", "1.0k", "999.9k", "1.0M"]);
        assert_eq!(clock(3.2), "00:03");
        assert_eq!(clock(3723.0), "1:02:03");
        assert_eq!(number(f64::from(0.1f32)).to_string(), "0.1");
        assert_eq!(number(f64::NAN), Value::Null);
    }
}
