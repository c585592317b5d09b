//! Compares labels with their range, and their distribution in evaluation with that in training.

use crate::chi_square;
use crate::field::{Category, FieldProfile, Rows};
use crate::findings::{Draft, Maker};
use crate::report::Severity;
use crate::roles::{Role, Roles};
use crate::scan::Scanned;
use std::collections::BTreeSet;

/// Records of a label that a sample of training should have, so that having none is no chance: below one in a million.
const EXPECTED: f64 = 14.0;

/// Training records of a label, on average, from which a label that training lacks is news.
const RECORDS_OF_A_LABEL: u64 = 10;

impl Maker<'_> {
    /// Compares labels with their range and training with evaluation.
    pub fn labels(&mut self, scanned: &[Scanned<'_>], roles: &Roles) {
        let train = scanned.iter().find(|s| !s.split.evaluation);
        for split in scanned {
            for field in split.profile.fields.iter().filter(|f| !f.categories.is_empty()) {
                let own = train.filter(|_| split.split.evaluation).and_then(|t| {
                    let own = t.profile.fields.iter().find(|f| f.name == field.name);
                    own.map(|own| (own, t.is_whole()))
                });
                self.label(split, field, own, roles.of(&field.name) == Role::Label);
            }
        }
    }

    /// `train` is the field in training, and whether all records of training were checked.
    fn label(
        &mut self,
        split: &Scanned<'_>,
        field: &FieldProfile,
        train: Option<(&FieldProfile, bool)>,
        is_label: bool,
    ) {
        let name = Some(&*field.name);
        let counted: u64 = field.categories.values().map(|r| r.count).sum();
        if is_label {
            let mut bad = Rows::default();
            let stray = stray(field, counted);
            for (category, rows) in &field.categories {
                let outside = match (category, self.options.classes) {
                    (Category::Int(i), Some(n)) => u64::try_from(*i).is_ok_and(|i| i >= n) || (*i < 0 && *i != -100),
                    (_, None) => stray.contains(category),
                    _ => false,
                };
                if outside {
                    bad.merge(rows.clone());
                }
            }
            bad.rows.sort_unstable();
            if bad.count > 0 {
                let what = match self.options.classes {
                    Some(n) => format!("is outside of 0 to {}", n.saturating_sub(1)),
                    None => "is outside of the range of nearly all labels".into(),
                };
                let cure = "mend or filter these records; --classes N states the range";
                self.add(
                    split,
                    Draft { severity: Severity::Error, rule: "label-range", field: name, what, cure },
                    &bad,
                );
            }
        }
        let Some((train, is_whole)) = train.filter(|t| !t.0.categories.is_empty()) else { return };
        if is_label {
            let mut unseen = Rows::default();
            let trained: u64 = train.categories.values().map(|r| r.count).sum();
            // A sample of training may lack a rare label by chance.
            let is_expected = |rows: &Rows| rows.count as f64 / counted.max(1) as f64 * trained as f64 >= EXPECTED;
            field
                .categories
                .iter()
                .filter(|c| !train.categories.contains_key(c.0) && (is_whole || is_expected(c.1)))
                .for_each(|c| unseen.merge(c.1.clone()));
            unseen.rows.sort_unstable();
            if unseen.count as f64 > by_chance(train, trained, counted) {
                let what = "has a label that training lacks".into();
                let cure = "train such records too, or leave them out";
                self.add(
                    split,
                    Draft { severity: Severity::Warning, rule: "unseen-label", field: name, what, cure },
                    &unseen,
                );
            }
        }
        let all: BTreeSet<&Category> = field.categories.keys().chain(train.categories.keys()).collect();
        let count = |f: &FieldProfile, c: &Category| f.categories.get(c).map_or(0, |r| r.count);
        let pairs: Vec<(u64, u64)> = all.iter().map(|c| (count(train, c), count(field, c))).collect();
        if let Some(test) = chi_square::compare(&pairs).filter(|t| t.p < 1e-6 && t.effect > 0.1) {
            let what = format!(
                "is distributed otherwise than in training (chi-square {:.0}, {} degrees of freedom, p {:.0e}, Cramér's V {:.2})",
                test.statistic, test.freedom, test.p, test.effect
            );
            let draft = Draft {
                severity: if is_label { Severity::Warning } else { Severity::Note },
                rule: "label-distribution",
                field: name,
                what,
                cure: "split at random, or by records:holdout",
            };
            self.push(split, draft, counted, Vec::new(), Vec::new());
        }
    }
}

/// The most of `counted` records that lack their label in training by chance: about the share of training records whose label occurs
/// once (Good, Biometrika 40, 1953), and three deviations more. Training with few records of a label says nothing.
fn by_chance(train: &FieldProfile, trained: u64, counted: u64) -> f64 {
    if trained < RECORDS_OF_A_LABEL * train.categories.len() as u64 {
        return counted as f64;
    }
    let single = train.categories.values().filter(|rows| rows.count == 1).count();
    let expected = single as f64 / trained.max(1) as f64 * counted as f64;
    expected + 3.0 * expected.sqrt()
}

/// Labels apart from the others: integers that are not in the run of consecutive ones with at least 95 % of the records. -100 is ignored by losses.
fn stray(field: &FieldProfile, counted: u64) -> BTreeSet<Category> {
    let ints: Vec<(i64, u64)> = field
        .categories
        .iter()
        .filter_map(|(c, r)| if let Category::Int(i) = c { Some((*i, r.count)) } else { None })
        .collect();
    let runs = ints.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0));
    // A run that counts from 0 ends before -1.
    let main = runs
        .map(|run| {
            if run.iter().any(|r| r.0 == 0) {
                run.get(run.iter().position(|r| r.0 == 0).unwrap_or(0)..).unwrap_or(run)
            } else {
                run
            }
        })
        .find(|run| run.iter().map(|r| r.1).sum::<u64>() as f64 >= 0.95 * counted as f64);
    let Some(main) = main.filter(|run| run.len() >= 2) else { return BTreeSet::new() };
    ints.iter().filter(|i| i.0 != -100 && !main.contains(i)).map(|i| Category::Int(i.0)).collect()
}
