//! Formats the numbers of events: short decimal text for messages, shortest round-trip form for JSON.

use serde_json::Value;

/// Formats a loss or metric in few digits: `0.011`, `12.346`, `1.2e-5`.
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

/// Converts a number to JSON. An f32 gets the shortest decimal text that parses back to it; NaN and infinities become null.
pub fn json(v: f64) -> Value {
    let single = v as f32;
    let v = if f64::from(single) == v { single.to_string().parse().unwrap_or(v) } else { v };
    serde_json::Number::from_f64(v).map_or(Value::Null, Value::Number)
}

/// Returns named numbers as a JSON object.
pub fn object(values: &[(String, f64)]) -> Value {
    Value::Object(values.iter().map(|(k, v)| (k.clone(), json(*v))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(0.0712), "0.071");
        assert_eq!(short(0.00123), "0.00123");
        assert_eq!(short(f64::NAN), "nan");
        assert_eq!(json(f64::from(0.1f32)).to_string(), "0.1");
        assert_eq!(json(f64::NAN), Value::Null);
    }
}
