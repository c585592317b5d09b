//! Formats the figures of cases as rows of a table.

use serde_json::{Map, Value};

/// Formats the head of the table.
pub fn header(memory: bool) -> String {
    let line = format!("{:<24}{:>12}{:>12}{:>12}{:>8}{:>7}", "case", "ours", "eager", "compile", "ratio", "goal");
    if memory { format!("{line}{:>11}{:>8}{:>9}", "GiB: ours", "eager", "compile") } else { line }
}

/// Formats a case as a line under [`header`].
pub fn row(name: &str, out: &Map<String, Value>, memory: bool) -> String {
    let cell = |key: &str, digits: usize| match out.get(key).and_then(Value::as_f64) {
        Some(v) => format!("{v:.digits$}"),
        None => String::new(),
    };
    let mut line = format!(
        "{name:<24}{:>12}{:>12}{:>12}{:>8}{:>7}",
        cell("ours", 1),
        cell("eager", 1),
        cell("compile", 1),
        cell("ratio", 2),
        cell("goal", 2),
    );
    if memory {
        let gib = |key: &str| match out.get(key).and_then(Value::as_u64).map(|b| b as f64 / (1u64 << 30) as f64) {
            Some(v) => format!("{v:.*}", if v < 1.0 { 3 } else { 2 }),
            None => String::new(),
        };
        line.push_str(&format!("{:>11}{:>8}{:>9}", gib("ours_bytes"), gib("eager_bytes"), gib("compile_bytes")));
    }
    for key in ["error", "rival_error"] {
        if let Some(text) = out.get(key).and_then(Value::as_str) {
            line.push_str(&format!("   {text}"));
        }
    }
    line.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::{header, row};
    use serde_json::{Map, Value, json};

    fn result(v: Value) -> Map<String, Value> {
        v.as_object().unwrap().clone()
    }

    #[test]
    fn table_columns_align_with_their_headers() {
        let out = result(json!({
            "ours": 59855.04, "eager": 86633.0, "compile": 63673.0, "ratio": 1.0638, "goal": 1.0,
            "ours_bytes": 17072495001u64, "eager_bytes": 48103633715u64, "compile_bytes": 536870912,
        }));
        assert_eq!(header(true).trim_end().len(), 103);
        let expected = "\
case                            ours       eager     compile   ratio   goal  GiB: ours   eager  compile
attention_d128_16k_grad      59855.0     86633.0     63673.0    1.06   1.00      15.90   44.80    0.500";
        assert_eq!(format!("{}\n{}", header(true), row("attention_d128_16k_grad", &out, true)), expected);
        let expected = "\
case                            ours       eager     compile   ratio   goal
attention_d128_16k_grad      59855.0     86633.0     63673.0    1.06   1.00";
        assert_eq!(format!("{}\n{}", header(false), row("attention_d128_16k_grad", &out, false)), expected);
    }

    #[test]
    fn a_row_without_a_rival_ends_early_and_one_with_an_error_says_it() {
        let out = result(json!({ "ours": 2.0, "ours_bytes": 1u64 << 30 }));
        let expected = format!("{:<24}{:>12}{:>50}", "sum", "2.0", "1.00");
        assert_eq!(row("sum", &out, true), expected);
        let out = result(json!({ "ours": 2.0, "ours_bytes": 1u64 << 30, "rival_error": "eager: no room" }));
        assert_eq!(row("sum", &out, true), format!("{expected}{:17}   eager: no room", ""));
        assert_eq!(row("sum", &result(json!({ "error": "ours: no" })), false), format!("{:<75}   ours: no", "sum"));
    }
}
