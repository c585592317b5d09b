//! Reads the calibration table: rates of GPUs and links, each measured, published or estimated (`calibration.csv` names the source).

use perilune_core::error::{Error, Result, did_you_mean};
use std::sync::OnceLock;

const TABLE: &str = include_str!("calibration.csv");

/// A value at a point.
#[derive(Clone, PartialEq, Debug)]
struct Row {
    gpu: &'static str,
    quantity: &'static str,
    at: f64,
    value: f64,
    unit: &'static str,
    source: &'static str,
}

fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| TABLE.lines().filter(|line| !line.starts_with('#')).skip(1).filter_map(parse).collect())
}

/// Parses a row; the source may contain commas.
fn parse(line: &'static str) -> Option<Row> {
    let mut cells = line.splitn(6, ',');
    let mut next = || cells.next();
    let (gpu, quantity) = (next()?, next()?);
    let (at, value) = (next()?.parse().ok()?, next()?.parse().ok()?);
    Some(Row { gpu, quantity, at, value, unit: next()?, source: next()? })
}

/// The rates of one kind of GPU and its links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Calibration {
    gpu: &'static str,
}

impl Calibration {
    /// The rates of a GPU by its name; an error names those that there are.
    pub fn of(gpu: &str) -> Result<Calibration> {
        let found = rows().iter().find(|row| row.gpu == gpu);
        found.map(|row| Calibration { gpu: row.gpu }).ok_or_else(|| {
            let mut known: Vec<&str> = rows().iter().map(|row| row.gpu).filter(|gpu| *gpu != "cpu").collect();
            known.dedup();
            let near =
                did_you_mean(gpu, known.iter().copied()).map(|n| format!("; did you mean {n}?")).unwrap_or_default();
            let message = format!("there are no rates of {gpu:?} to predict times with");
            Error::argument("predict", message).hint(format!("--for takes {} for times{near}", known.join(" or ")))
        })
    }

    pub fn gpu(&self) -> &'static str {
        self.gpu
    }

    /// A quantity at a point: between two points it follows a power of the point, beyond them it is constant.
    pub fn at(&self, quantity: &str, at: f64) -> Option<f64> {
        let mut below: Option<&Row> = None;
        for row in self.points(quantity)? {
            if row.at < at {
                below = Some(row);
                continue;
            }
            let Some(low) = below else { return Some(row.value) };
            let share = (at / low.at).ln() / (row.at / low.at).ln();
            return Some(low.value * (row.value / low.value).powf(share));
        }
        below.map(|row| row.value)
    }

    /// The smallest point of a quantity.
    pub fn first(&self, quantity: &str) -> Option<f64> {
        Some(self.points(quantity)?.next()?.at)
    }

    fn points(&self, quantity: &str) -> Option<impl Iterator<Item = &'static Row>> {
        let of = |gpu: &'static str| {
            let quantity = quantity.to_string();
            rows().iter().filter(move |row| row.gpu == gpu && row.quantity == quantity)
        };
        if of(self.gpu).next().is_some() {
            return Some(of(self.gpu));
        }
        let like = of_like(self.gpu)?;
        of(like).next().is_some().then(|| of(like))
    }
}

/// The GPU whose rates stand for those that a GPU has no rows of.
fn of_like(gpu: &str) -> Option<&'static str> {
    rows().iter().find(|row| row.gpu == gpu && row.quantity == "like").map(|row| row.unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_read_has_a_source_and_is_in_order() {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#')).count() - 1;
        assert_eq!(rows().len(), lines, "a row does not parse");
        for row in rows() {
            let known = ["measured", "published", "estimated", "the chip"];
            assert!(known.iter().any(|word| row.source.starts_with(word)), "{row:?}");
            assert!(row.value > 0.0 && row.at > 0.0, "{row:?}");
        }
        for pair in rows().windows(2) {
            let same = (pair[0].gpu, pair[0].quantity) == (pair[1].gpu, pair[1].quantity);
            assert!(!same || pair[0].at < pair[1].at && pair[0].unit == pair[1].unit, "{pair:?}");
        }
    }

    #[test]
    fn points_are_met_and_values_between_them_lie_between() {
        let h200 = Calibration::of("h200").unwrap();
        assert_eq!(h200.at("bus_all_reduce", 16.0), Some(212.0));
        let between = h200.at("bus_all_reduce", 4.0).unwrap();
        assert!((31.0 * (212.0f64 / 31.0).sqrt() - between).abs() < 1e-9, "{between}");
        assert_eq!((h200.at("bus_all_reduce", 0.5), h200.at("bus_all_reduce", 1e6)), (Some(31.0), Some(327.0)));
        assert_eq!(h200.at("no such thing", 1.0), None);
        let h100 = Calibration::of("h100").unwrap();
        assert_eq!(h100.at("product_bf16", 8192.0), h200.at("product_bf16", 8192.0));
        assert!(h100.at("copy", 1.0) < h200.at("copy", 1.0));
        let e = Calibration::of("h20").unwrap_err();
        assert_eq!(e.hint.unwrap(), "--for takes h200 or h100 for times; did you mean h200?");
    }
}
