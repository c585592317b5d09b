//! Turns profiles into findings.

use crate::duplicates::{Exact, Id};
use crate::field::{FieldProfile, Rows, TYPES};
use crate::near::Near;
use crate::profile::{excerpt_of, first_text};
use crate::report::{Example, Finding, Plot, Report, Severity, SplitReport};
use crate::roles::{Role, Roles};
use crate::scan::{Options, Scanned, Split};
use crate::tokens::TokenFaults;

/// Examples of a finding.
const EXAMPLES: usize = 5;
/// The share of records below which repetition and broken texts are notes, as in crawled corpora.
const FEW: f64 = 0.001;
/// The share of training records that may resemble others.
const FEW_NEAR: f64 = 0.005;

/// Collects the findings.
pub struct Maker<'a> {
    pub(crate) options: &'a Options,
    report: Report,
}

/// A finding without its examples.
pub(crate) struct Draft<'a> {
    pub severity: Severity,
    pub rule: &'static str,
    pub field: Option<&'a str>,
    pub what: String,
    pub cure: &'static str,
}

fn share(count: u64, of: u64) -> f64 {
    count as f64 / of.max(1) as f64
}

/// A warning from a share on, else a note.
fn from(limit: f64, count: u64, of: u64) -> Severity {
    if share(count, of) >= limit { Severity::Warning } else { Severity::Note }
}

impl<'a> Maker<'a> {
    pub fn new(options: &'a Options) -> Maker<'a> {
        Maker { options, report: Report::default() }
    }

    pub fn finish(mut self) -> Report {
        self.report.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
        self.report
    }

    pub fn roles(&mut self, roles: &Roles) {
        if !roles.guessed.is_empty() {
            let names = roles.guessed.join(", ");
            self.report.remarks.push(format!("guessed as labels: {names} (--label NAME says otherwise)"));
        }
    }

    pub(crate) fn add(&mut self, scanned: &Scanned<'_>, draft: Draft<'_>, rows: &Rows) {
        let excerpt = |place: u64| {
            let record = scanned.read(place).unwrap_or_default();
            match draft.field.map(|f| record.get(f)) {
                Some(Some(value)) => excerpt_of(value),
                Some(None) => "the field is missing".to_string(),
                None => first_text(&record),
            }
        };
        let examples = rows.rows.iter().take(EXAMPLES);
        let examples =
            examples.map(|p| Example { place: scanned.place(*p), other: None, excerpt: excerpt(*p) }).collect();
        self.push(scanned, draft, rows.count, rows.rows.iter().map(|p| scanned.number(*p)).collect(), examples);
    }

    pub(crate) fn push(
        &mut self,
        scanned: &Scanned<'_>,
        draft: Draft<'_>,
        count: u64,
        rows: Vec<u64>,
        examples: Vec<Example>,
    ) {
        self.report.findings.push(Finding {
            severity: draft.severity,
            rule: draft.rule,
            split: scanned.split.name.clone(),
            field: draft.field.map(str::to_string),
            what: format!("{}: {count} of {} {}", draft.what, scanned.keys.len(), scanned.split.unit),
            count,
            of: scanned.keys.len() as u64,
            rows,
            examples,
            cure: draft.cure,
        });
    }

    fn pairs(&mut self, scanned: &[Scanned<'_>], at: usize, draft: Draft<'_>, pairs: &[(Id, Id)]) {
        let own: Vec<&(Id, Id)> = pairs.iter().filter(|p| p.0.0 as usize == at).collect();
        let Some(split) = scanned.get(at).filter(|_| !own.is_empty()) else { return };
        let place = |id: Id| scanned.get(id.0 as usize).map(|s| s.place(u64::from(id.1)));
        let examples = own.iter().take(EXAMPLES).map(|(id, other)| Example {
            place: place(*id).unwrap_or_default(),
            other: place(*other),
            excerpt: first_text(&split.read(u64::from(id.1)).unwrap_or_default()),
        });
        let rows = own.iter().take(65_536).map(|p| split.number(u64::from(p.0.1))).collect();
        let examples = examples.collect();
        self.push(split, draft, own.len() as u64, rows, examples);
    }

    /// Findings of one split: fields, encodings, conversations, records that cannot be read.
    pub fn profile(&mut self, scanned: &Scanned<'_>, roles: &Roles) {
        let profile = &scanned.profile;
        let checked = scanned.keys.len() as u64;
        let records = scanned.split.records.len();
        let (name, unit) = (scanned.split.name.clone(), scanned.split.unit);
        let mut split = SplitReport { name, unit, records, checked, ..Default::default() };
        if checked < records {
            self.report.remarks.push(format!("{}: {checked} of {records} {unit} were checked", split.name));
        }
        if profile.unreadable.count > 0 {
            let what =
                format!("cannot be read ({})", profile.errors.first().map_or("", |e| e.lines().next().unwrap_or("")));
            let cure = "mend these lines, or leave them out: { on_error = \"skip\" }";
            let draft = Draft { severity: Severity::Error, rule: "unreadable", field: None, what, cure };
            self.add(scanned, draft, &profile.unreadable);
        }
        for field in &profile.fields {
            let role = roles.of(&field.name);
            split.fields.push([field.name.to_string(), role.name().into(), field.summary()]);
            if field.lengths.total > 0 && matches!(role, Role::Text | Role::Conversation | Role::Other) {
                let title = format!("{}: length of '{}' (from a power of two to the next)", split.name, field.name);
                split.plots.push(Plot { title, bars: field.lengths.bars() });
            }
            if !field.categories.is_empty() {
                let bars = field.categories.iter().map(|(c, rows)| (c.show(), rows.count)).collect();
                split.plots.push(Plot { title: format!("{}: values of '{}'", split.name, field.name), bars });
            }
            self.field(scanned, field, role);
        }
        for (rows, rule, severity, what, cure) in [
            (
                &profile.chat.order,
                "roles",
                Severity::Warning,
                "conversations whose roles do not alternate",
                "order the turns: system, then user and assistant in turn",
            ),
            (
                &profile.chat.empty,
                "empty-turns",
                Severity::Warning,
                "conversations with an empty turn",
                "filter them, or drop the turn",
            ),
            (
                &profile.chat.unanswered,
                "no-answer",
                Severity::Warning,
                "conversations without an answer: they train nothing",
                "filter them",
            ),
        ] {
            if rows.count > 0 {
                let name =
                    profile.fields.iter().find(|f| roles.of(&f.name) == Role::Conversation).map(|f| f.name.clone());
                let draft = Draft { severity, rule, field: name.as_deref(), what: what.into(), cure };
                self.add(scanned, draft, rows);
            }
        }
        self.report.splits.push(split);
    }

    fn field(&mut self, scanned: &Scanned<'_>, field: &FieldProfile, role: Role) {
        let checked = scanned.keys.len() as u64;
        let name = Some(&*field.name);
        let most = field.types.iter().skip(1).map(|t| t.count).max().unwrap_or(0);
        for (k, kind) in field.types.iter().enumerate().skip(1) {
            if kind.count > 0 && kind.count < most {
                let main = field.types.iter().position(|t| t.count == most).and_then(|k| TYPES.get(k)).unwrap_or(&"");
                let what = format!("is a {}, and a {main} in most records", TYPES[k]);
                let cure = "make all alike in a map";
                self.add(
                    scanned,
                    Draft { severity: Severity::Warning, rule: "mixed-types", field: name, what, cure },
                    kind,
                );
            }
        }
        let missing = checked.saturating_sub(field.present() + scanned.profile.unreadable.count);
        if missing > 0 {
            // A field that many records lack is optional.
            let severity = if share(missing, checked) < 0.05 { Severity::Warning } else { Severity::Note };
            let draft = Draft {
                severity,
                rule: "missing",
                field: name,
                what: "is missing or null".into(),
                cure: "set it in a map, or filter such records",
            };
            self.push(scanned, draft, missing, Vec::new(), Vec::new());
        }
        if field.constant && field.present() >= 20 && role != Role::Conversation {
            let draft = Draft {
                severity: Severity::Note,
                rule: "constant",
                field: name,
                what: "has one value".into(),
                cure: "leave it out",
            };
            self.push(scanned, draft, field.present(), Vec::new(), Vec::new());
        }
        let few = |rows: &Rows| from(FEW, rows.count, checked);
        let empty = if role == Role::Text && share(field.empty.count, checked) < 0.05 {
            few(&field.empty)
        } else {
            Severity::Note
        };
        for (rows, rule, severity, what, cure) in [
            (&field.empty, "empty", empty, "is empty", "filter such records"),
            (
                &field.replacement,
                "encoding",
                few(&field.replacement),
                "has U+FFFD, where bytes were no text",
                "decode the source with its encoding again",
            ),
            (
                &field.control,
                "control-characters",
                few(&field.control),
                "has control characters",
                "remove them in a map",
            ),
            (
                &field.mojibake,
                "mojibake",
                few(&field.mojibake),
                "has UTF-8 that was read as Latin-1, like 'Ã©'",
                "decode the source as UTF-8",
            ),
            (
                &field.not_finite,
                "not-finite",
                Severity::Error,
                "has NaN or infinity",
                "filter such records, or set the values",
            ),
        ] {
            if rows.count > 0 {
                self.add(scanned, Draft { severity, rule, field: name, what: what.into(), cure }, rows);
            }
        }
        let (median, high) = (field.lengths.quantile(0.5), field.lengths.quantile(0.99));
        let limit = (20 * median.max(1)).max(4 * high);
        let mut rows = Rows::default();
        field.lengths.longest.iter().filter(|l| l.0 > limit && field.lengths.total >= 100).for_each(|l| rows.add(l.1));
        if rows.count > 0 {
            let what = format!("is longer than 20 times the median, which is {median}");
            let cure = "look at them: they may be several records in one";
            self.add(scanned, Draft { severity: Severity::Note, rule: "length", field: name, what, cure }, &rows);
        }
    }

    pub fn exact(&mut self, scanned: &[Scanned<'_>], exact: &Exact) {
        for (at, split) in scanned.iter().enumerate() {
            let count = exact.repeated.iter().filter(|p| p.0.0 as usize == at).count() as u64;
            let is_rows = split.split.unit == "rows";
            let word = |rows: &'static str, records: &'static str| if is_rows { rows } else { records };
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: from(FEW, count, split.keys.len() as u64),
                    rule: "exact-duplicates",
                    field: None,
                    what: word("repeat an earlier row", "repeat an earlier record (case and white space do not count)")
                        .into(),
                    cure: word("drop them where the tensors are made", "drop them: records:unique { ... }"),
                },
                &exact.repeated,
            );
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: Severity::Error,
                    rule: "leakage",
                    field: None,
                    what: format!("are training {} too", split.split.unit),
                    cure: word(
                        "drop repeated rows before the split, or split by what makes rows equal",
                        "remove them from training; records:split and records:holdout keep equal records together",
                    ),
                },
                &exact.leaked,
            );
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: Severity::Warning,
                    rule: "label-conflicts",
                    field: None,
                    what: word("repeat a row with another label", "repeat a text with another label").into(),
                    cure: "decide for one label, or filter them",
                },
                &exact.conflicts,
            );
        }
    }

    pub fn near(&mut self, scanned: &[Scanned<'_>], near: &Near) {
        if near.bounded {
            self.report
                .remarks
                .push("near duplicates: not all candidates of large groups of alike records were compared".into());
        }
        let similarity = self.options.similarity;
        for (at, split) in scanned.iter().enumerate() {
            let count = near.repeated.iter().filter(|p| p.0.0 as usize == at).count() as u64;
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: from(FEW_NEAR, count, split.keys.len() as u64),
                    rule: "near-duplicates",
                    field: None,
                    what: format!("resemble an earlier record (similarity of character 5-grams from {similarity})"),
                    cure: "keep one of each, or accept them",
                },
                &near.repeated,
            );
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: Severity::Warning,
                    rule: "near-leakage",
                    field: None,
                    what: format!("resemble a training record (similarity from {similarity})"),
                    cure: "remove those from training",
                },
                &near.leaked,
            );
        }
    }

    pub fn overlap(&mut self, scanned: &[Scanned<'_>], leaks: &[(Id, Id)]) {
        for at in 0..scanned.len() {
            self.pairs(
                scanned,
                at,
                Draft {
                    severity: Severity::Warning,
                    rule: "overlap",
                    field: None,
                    what: "share half of the runs of 13 words of a text with training records".into(),
                    cure: "remove those from training",
                },
                leaks,
            );
        }
    }

    pub fn tokens(&mut self, split: &Split, faults: &TokenFaults) {
        let [outside, untrained, empty] = &faults.places;
        for (rows, places, rule, severity, what, cure) in [
            (
                &faults.outside,
                outside,
                "token-range",
                Severity::Error,
                "have ids outside of the vocabulary",
                "encode with the tokenizer of the model",
            ),
            (
                &faults.untrained,
                untrained,
                "mask",
                Severity::Warning,
                "have a mask that trains nothing",
                "filter them, or look at train_on and max_length",
            ),
            (&faults.empty, empty, "no-tokens", Severity::Warning, "have no tokens", "filter them"),
        ] {
            if rows.count == 0 {
                continue;
            }
            let example = |place: &String| Example { place: place.clone(), other: None, excerpt: String::new() };
            self.report.findings.push(Finding {
                severity,
                rule,
                split: split.name.clone(),
                field: None,
                what: format!("{what}: {} of {} records", rows.count, faults.checked),
                count: rows.count,
                of: faults.checked,
                rows: rows.rows.clone(),
                examples: places.iter().map(example).collect(),
                cure,
            });
        }
    }
}
