//! Parses and formats byte sizes.

/// Parses `20GiB`, `1.5 GB`, `512M` (binary, as in most tools' options) or a plain number of bytes.
pub fn parse(text: &str) -> Option<usize> {
    let text = text.trim();
    let at = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = (text[..at].parse::<f64>().ok()?, text[at..].trim());
    let power = match unit.chars().next().map(|c| c.to_ascii_lowercase()) {
        None | Some('b') => 0,
        Some('k') => 1,
        Some('m') => 2,
        Some('g') => 3,
        Some('t') => 4,
        Some(_) => return None,
    };
    let base: f64 = match unit.get(usize::from(power > 0)..)?.to_ascii_lowercase().as_str() {
        "" | "ib" => 1024.0,
        "b" if power > 0 => 1000.0,
        _ if power == 0 && unit.len() == 1 => 1.0,
        _ => return None,
    };
    let n = number * base.powi(power);
    (n.is_finite() && n < 2f64.powi(62)).then_some(n as usize)
}

/// Like [`parse`], for options and environment variables: zero and malformed sizes are errors that list the accepted
/// forms.
pub fn amount(text: &str) -> Result<usize, String> {
    let hint = "write it as 20GiB, 512M or 5GB";
    parse(text).filter(|n| *n > 0).ok_or_else(|| format!("\"{text}\" is not an amount of memory; {hint}"))
}

/// Formats as `1.50 GiB`, `12.3 MiB`, `640 B`.
pub fn show(n: usize) -> String {
    let x = n as f64;
    for (power, unit) in [(4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")] {
        let scaled = x / 1024f64.powi(power);
        if scaled >= 1.0 {
            let digits = if scaled >= 100.0 { 0 } else { 1 };
            return format!("{scaled:.digits$} {unit}");
        }
    }
    format!("{n} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_shown() {
        let read = ["20GiB", "1.5 GB", "512M", "100", "7 b", "2kib", "3k", "0.5g"].map(parse);
        let want = [20 << 30, 1_500_000_000, 512 << 20, 100, 7, 2048, 3072, 1 << 29].map(Some);
        assert_eq!(read, want);
        for bad in ["", "GiB", "12 parsecs", "1.2.3G", "-5", "5 bytes", "3GiBs", "1e9"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(["512M", "512MiB", "512mib", "536870912"].map(amount), [const { Ok(512 << 20) }; 4]);
        for bad in ["0", "0GiB", "much"] {
            let e =
                amount(bad).map(drop).map_err(|e| e.contains(&format!("\"{bad}\" is not an amount of memory; write")));
            assert_eq!(e, Err(true), "{bad}");
        }
        assert_eq!([0, 640, 1536, 200 << 20, 3 << 30].map(show), ["0 B", "640 B", "1.5 KiB", "200 MiB", "3.0 GiB"]);
    }
}
