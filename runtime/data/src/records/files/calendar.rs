//! Writes dates and times as ISO 8601 text, by the proleptic Gregorian calendar.
//!
//! The text does not depend on the unit in which a file counts: the fraction has 0, 3, 6 or 9 digits, the fewest that are exact.
//! Years beyond four digits have a sign and at least six digits.

use std::fmt::Write;

const DAY: i128 = 86_400;

/// Units of a second that a count has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    Second,
    Millisecond,
    Microsecond,
    Nanosecond,
}

impl Unit {
    fn nanoseconds(self) -> i128 {
        match self {
            Unit::Second => 1_000_000_000,
            Unit::Millisecond => 1_000_000,
            Unit::Microsecond => 1_000,
            Unit::Nanosecond => 1,
        }
    }
}

/// The date of a number of days after 1970-01-01: "2024-01-31".
pub(crate) fn date(days: i64) -> String {
    let mut out = String::new();
    write_date(&mut out, i128::from(days));
    out
}

/// The time of a count after midnight: "12:30:00.5" has a fraction of milliseconds, "12:30:00.500".
pub(crate) fn time(count: i64, unit: Unit) -> String {
    let mut out = String::new();
    write_time(&mut out, i128::from(count) * unit.nanoseconds());
    out
}

/// The date and time of a count after 1970-01-01T00:00:00; `utc` appends "Z".
pub(crate) fn timestamp(count: i64, unit: Unit, utc: bool) -> String {
    let nanoseconds = i128::from(count) * unit.nanoseconds();
    let day = DAY * 1_000_000_000;
    let mut out = String::new();
    write_date(&mut out, nanoseconds.div_euclid(day));
    out.push('T');
    write_time(&mut out, nanoseconds.rem_euclid(day));
    if utc {
        out.push('Z');
    }
    out
}

/// Hinnant's `civil_from_days`: eras of 400 years that begin on 1 March.
fn write_date(out: &mut String, days: i128) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i128::from(month <= 2);
    let written = match (0..=9_999).contains(&year) {
        true => write!(out, "{year:04}-{month:02}-{day:02}"),
        false => write!(out, "{year:+07}-{month:02}-{day:02}"),
    };
    debug_assert!(written.is_ok(), "a String accepts all text");
}

fn write_time(out: &mut String, nanoseconds: i128) {
    let (seconds, rest) = (nanoseconds.div_euclid(1_000_000_000), nanoseconds.rem_euclid(1_000_000_000));
    let (hour, minute, second) = (seconds.div_euclid(3_600), seconds.rem_euclid(3_600) / 60, seconds.rem_euclid(60));
    let written = write!(out, "{hour:02}:{minute:02}:{second:02}").and_then(|()| match rest {
        0 => Ok(()),
        rest if rest % 1_000_000 == 0 => write!(out, ".{:03}", rest / 1_000_000),
        rest if rest % 1_000 == 0 => write!(out, ".{:06}", rest / 1_000),
        rest => write!(out, ".{rest:09}"),
    });
    debug_assert!(written.is_ok(), "a String accepts all text");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_a_count_of_days() {
        // Counts every day from 1600 to 2500 by the rule of leap years, without the formula.
        let (mut year, mut month, mut day) = (1600, 1, 1);
        for days in -135_140..193_000 {
            assert_eq!(date(days), format!("{year:04}-{month:02}-{day:02}"));
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let last = match month {
                2 => 28 + i64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            (year, month, day) = match (month, day) {
                (12, 31) => (year + 1, 1, 1),
                (month, day) if day == last => (year, month + 1, 1),
                (month, day) => (year, month, day + 1),
            };
        }
    }

    #[test]
    fn fractions_have_the_fewest_exact_digits() {
        assert_eq!(timestamp(0, Unit::Second, true), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(-1, Unit::Millisecond, false), "1969-12-31T23:59:59.999");
        assert_eq!(timestamp(1_500, Unit::Microsecond, false), "1970-01-01T00:00:00.001500");
        assert_eq!(timestamp(1, Unit::Nanosecond, false), "1970-01-01T00:00:00.000000001");
        assert_eq!(time(45_000_500, Unit::Millisecond), "12:30:00.500");
        assert_eq!(date(-719_528), "0000-01-01");
        assert_eq!(date(-719_529), "-000001-12-31");
        for count in [i64::MIN, i64::MAX] {
            assert!(timestamp(count, Unit::Second, true).ends_with('Z'));
            assert!(!date(count).is_empty() && !time(count, Unit::Second).is_empty());
        }
    }
}
