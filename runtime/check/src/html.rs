//! Writes a report as one HTML page with inline SVG plots, without scripts. All text is escaped.

use crate::report::{Plot, Report};
use std::fmt::Write;

/// Bytes of a page beyond which plots and further findings are left out.
const MOST: usize = 1_500_000;
/// Bars of a plot.
const BARS: usize = 60;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse}td,th{text-align:left;padding:.2em .8em .2em 0;vertical-align:top;border-bottom:1px solid #ddd}\
code{font-size:.9em;overflow-wrap:anywhere}.error{color:#b00020}.warning{color:#9a5b00}.note{color:#446}svg text{font:11px sans-serif}";

/// Escapes a text for HTML. Control characters and marks of text direction become visible escapes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                out.extend(c.escape_unicode());
            }
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

/// Shortens a text to so many characters.
fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", text.get(..at).unwrap_or_default()),
        None => text.to_string(),
    }
}

fn plot(plot: &Plot, out: &mut String) {
    let bars: Vec<_> = plot.bars.iter().take(BARS).collect();
    let most = bars.iter().map(|b| b.1).max().unwrap_or(0).max(1);
    let (width, high) = (12 * bars.len().max(1), 120.0);
    let _ = write!(
        out,
        "<figure><figcaption>{}</figcaption><svg role=\"img\" width=\"{}\" height=\"150\">",
        escape(&short(&plot.title, 200)),
        width + 60
    );
    for (k, (label, count)) in bars.iter().enumerate() {
        let tall = *count as f64 / most as f64 * high;
        let label = escape(&short(label, 60));
        let _ = write!(
            out,
            "<rect x=\"{}\" y=\"{:.1}\" width=\"10\" height=\"{tall:.1}\" fill=\"#4472a8\"><title>{label}: {count}</title></rect>",
            k * 12,
            high - tall
        );
        // Labels of all bars would overlap.
        if k % 10 == 0 {
            let _ = write!(out, "<text x=\"{}\" y=\"138\">{}</text>", k * 12, escape(&short(&plot.bars[k].0, 12)));
        }
    }
    out.push_str("</svg></figure>");
}

/// Writes the page.
pub fn page(report: &Report) -> String {
    let mut out =
        String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Data check</title>");
    let _ = write!(out, "<style>{STYLE}</style></head><body><h1>Data check</h1>");
    let faults = report.faults().count();
    let _ = write!(out, "<p>{faults} findings, {} notes.</p><h2>Findings</h2>", report.findings.len() - faults);
    for (k, f) in report.findings.iter().enumerate() {
        if out.len() > MOST / 2 {
            let _ = write!(out, "<p>{} further findings are left out.</p>", report.findings.len() - k);
            break;
        }
        let name = f.severity.name();
        let _ = write!(
            out,
            "<section><h3 class=\"{name}\">{name}: {}</h3><p>{}</p><ul>",
            escape(f.rule),
            escape(&short(&f.line(), 500))
        );
        for e in &f.examples {
            let other = e.other.as_ref().map(|o| format!(" and {}", escape(&short(o, 300)))).unwrap_or_default();
            let place = escape(&short(&e.place, 300));
            let _ = write!(out, "<li>{place}{other}: <code>{}</code></li>", escape(&short(&e.excerpt, 300)));
        }
        let _ = write!(out, "</ul><p>Cure: {}</p></section>", escape(f.cure));
    }
    for split in &report.splits {
        let _ = write!(
            out,
            "<h2>{}</h2><p>{} of {} {} checked.</p><table><tr><th>field</th><th>read as</th><th>values</th></tr>",
            escape(&short(&split.name, 200)),
            split.checked,
            split.records,
            split.unit()
        );
        for [name, role, summary] in split.fields.iter().take(300) {
            let cells = [name, role, summary].map(|t| format!("<td>{}</td>", escape(&short(t, 300))));
            let _ = write!(out, "<tr>{}</tr>", cells.concat());
        }
        out.push_str("</table>");
        for p in split.plots.iter().filter(|p| !p.bars.is_empty()) {
            if out.len() > MOST {
                break;
            }
            plot(p, &mut out);
        }
    }
    out.push_str("<h2>How it was read</h2><ul>");
    for remark in report.remarks.iter().take(100) {
        let _ = write!(out, "<li>{}</li>", escape(&short(remark, 500)));
    }
    out.push_str("</ul></body></html>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Example, Finding, Severity, SplitReport};

    #[test]
    fn hostile_text_is_escaped_and_the_page_is_bounded() {
        let evil = "<script>alert(1)</script>\u{1b}[2J\u{202e}\"'&";
        let finding = Finding {
            severity: Severity::Error,
            rule: "encoding",
            split: evil.into(),
            field: Some(evil.into()),
            what: evil.repeat(100),
            count: 1,
            of: 2,
            rows: vec![0],
            examples: vec![Example { place: evil.into(), other: Some(evil.into()), excerpt: evil.repeat(100) }; 5],
            cure: "clean it",
        };
        let bars = vec![(evil.to_string(), 3); 1000];
        let plots = vec![Plot { title: evil.into(), bars }; 2000];
        let split = SplitReport {
            name: evil.into(),
            unit: "",
            records: 1,
            checked: 1,
            fields: vec![[(); 3].map(|()| evil.into())],
            plots,
        };
        let report = Report { splits: vec![split; 3], findings: vec![finding; 5000], remarks: vec![evil.into()] };
        let page = report.html();
        assert!(page.len() < 2_000_000, "{}", page.len());
        assert!(!page.contains("<script") && !page.contains('\u{1b}') && !page.contains('\u{202e}'));
        assert!(page.contains("&lt;script&gt;") && page.contains("further findings are left out"));
    }
}
