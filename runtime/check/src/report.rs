//! Defines the report of a check, and writes it as text and as JSON.

use serde_json::{Value, json};

/// How serious a finding is. Notes are no faults.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    Note,
    Warning,
    Error,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// A record that a finding is about.
#[derive(Clone, PartialEq, Debug)]
pub struct Example {
    /// The file and line.
    pub place: String,
    /// The record that it equals or resembles.
    pub other: Option<String>,
    /// A quoted piece of the value.
    pub excerpt: String,
}

/// Something that a check has found.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    pub severity: Severity,
    /// The name of the check, such as `exact-duplicates`.
    pub rule: &'static str,
    pub split: String,
    pub field: Option<String>,
    pub what: String,
    /// Records that it applies to, of so many.
    pub count: u64,
    pub of: u64,
    /// The first of these records, at most 65,536, by their numbers in the dataset.
    pub rows: Vec<u64>,
    pub examples: Vec<Example>,
    pub cure: &'static str,
}

/// Counts of a field's values or lengths, for plots.
#[derive(Clone, PartialEq, Debug)]
pub struct Plot {
    pub title: String,
    pub bars: Vec<(String, u64)>,
}

/// What is known of a split.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct SplitReport {
    pub name: String,
    /// What is counted, "records" where it is empty.
    pub unit: &'static str,
    pub records: u64,
    pub checked: u64,
    /// Name, role and summary of each field.
    pub fields: Vec<[String; 3]>,
    pub plots: Vec<Plot>,
}

/// The result of a check.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Report {
    pub splits: Vec<SplitReport>,
    pub findings: Vec<Finding>,
    /// What was guessed, sampled or left out.
    pub remarks: Vec<String>,
}

impl Finding {
    /// The finding in one line.
    pub fn line(&self) -> String {
        let field = self.field.as_ref().map(|f| format!(" field '{f}'")).unwrap_or_default();
        format!("{}:{field} {}", self.split, self.what)
    }

    fn json(&self) -> Value {
        let examples: Vec<Value> =
            self.examples.iter().map(|e| json!({ "place": e.place, "other": e.other, "excerpt": e.excerpt })).collect();
        json!({
            "severity": self.severity.name(), "rule": self.rule, "split": self.split, "field": self.field, "what": self.what,
            "count": self.count, "of": self.of, "rows": self.rows.iter().take(1000).collect::<Vec<_>>(), "examples": examples,
            "cure": self.cure,
        })
    }
}

impl SplitReport {
    /// What is counted.
    pub fn unit(&self) -> &'static str {
        if self.unit.is_empty() { "records" } else { self.unit }
    }
}

impl Report {
    /// Adds the report of other splits.
    pub fn append(&mut self, other: Report) {
        self.splits.extend(other.splits);
        self.findings.extend(other.findings);
        self.remarks.extend(other.remarks);
    }

    /// The findings that are faults.
    pub fn faults(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|f| f.severity > Severity::Note)
    }

    /// Writes the report as text. It holds texts of files: the caller escapes control characters.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for split in &self.splits {
            let of = if split.checked < split.records { format!(" of {}", split.records) } else { String::new() };
            out.push_str(&format!("{}: {}{of} {}\n", split.name, split.checked, split.unit()));
            for [name, role, summary] in &split.fields {
                out.push_str(&format!("  {name:<16} {role:<14} {summary}\n"));
            }
        }
        for finding in &self.findings {
            out.push_str(&format!("{} [{}] {}\n", finding.severity.name(), finding.rule, finding.line()));
            for e in &finding.examples {
                let other = e.other.as_ref().map(|o| format!(" and {o}")).unwrap_or_default();
                out.push_str(&format!("  {}{other}: {}\n", e.place, e.excerpt));
            }
            out.push_str(&format!("  hint: {}\n", finding.cure));
        }
        self.remarks.iter().for_each(|remark| out.push_str(&format!("{remark}\n")));
        let (faults, notes) = (self.faults().count(), self.findings.len() - self.faults().count());
        out.push_str(&match (faults, notes) {
            (0, 0) => "no faults found".to_string(),
            (0, n) => format!("no faults found, {n} note{}", if n == 1 { "" } else { "s" }),
            (n, _) => format!("{n} finding{}", if n == 1 { "" } else { "s" }),
        });
        out
    }

    pub fn json(&self) -> Value {
        let split = |s: &SplitReport| {
            let fields: Vec<Value> = s
                .fields
                .iter()
                .map(|[name, role, summary]| json!({ "name": name, "role": role, "summary": summary }))
                .collect();
            json!({ "name": s.name, "unit": s.unit(), "records": s.records, "checked": s.checked, "fields": fields })
        };
        json!({
            "event": "data_check", "splits": self.splits.iter().map(split).collect::<Vec<_>>(),
            "findings": self.findings.iter().map(Finding::json).collect::<Vec<_>>(), "remarks": self.remarks,
        })
    }

    /// Writes the report as one HTML page.
    pub fn html(&self) -> String {
        crate::html::page(self)
    }
}
