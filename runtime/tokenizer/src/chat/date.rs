//! Formats the date of `strftime_now` as Python's `strftime` does, in English.
//!
//! The date is an argument, so that a template that prints it renders the same text in every run.

/// A date; the time of the day is midnight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The days of a month.
fn days(year: u32, month: u32) -> u32 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 => 28 + u32::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

impl Default for Date {
    /// The day that Llama 3.1's template assumes without a date.
    fn default() -> Date {
        Date { year: 2024, month: 7, day: 26 }
    }
}

impl Date {
    /// Reads YYYY-MM-DD.
    pub fn parse(text: &str) -> Option<Date> {
        let mut parts =
            text.split('-').map(|p| p.parse::<u32>().ok().filter(|_| p.bytes().all(|b| b.is_ascii_digit())));
        let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
        let known = parts.next().is_none()
            && (1..=9999).contains(&year)
            && (1..=12).contains(&month)
            && (1..=days(year, month)).contains(&day);
        known.then_some(Date { year, month, day })
    }

    /// The day of the week from Monday, 0 (Zeller).
    fn weekday(self) -> usize {
        let (y, m) = if self.month < 3 { (self.year - 1, self.month + 12) } else { (self.year, self.month) };
        ((self.day + 13 * (m + 1) / 5 + y + y / 4 - y / 100 + y / 400 + 5) % 7) as usize
    }

    fn day_of_year(self) -> u32 {
        (1..self.month).map(|month| days(self.year, month)).sum::<u32>() + self.day
    }

    /// Formats by the directives of `strftime`; `Err` has one that is not known.
    pub fn format(self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next().ok_or("%")?;
            let padded = directive != '-';
            if !padded {
                directive = chars.next().ok_or("%-")?;
            }
            let two = |n: u32| if padded { format!("{n:02}") } else { n.to_string() };
            let month = MONTHS[self.month as usize - 1];
            let text = match directive {
                'Y' => format!("{:04}", self.year),
                'y' => two(self.year % 100),
                'm' => two(self.month),
                'd' => two(self.day),
                'e' => format!("{:>2}", self.day),
                'B' => month.to_string(),
                'b' | 'h' => month[..3].to_string(),
                'A' => DAYS[self.weekday()].to_string(),
                'a' => DAYS[self.weekday()][..3].to_string(),
                'j' if padded => format!("{:03}", self.day_of_year()),
                'j' => self.day_of_year().to_string(),
                'H' | 'M' | 'S' => two(0),
                'I' => two(12),
                'p' => "AM".to_string(),
                'F' => format!("{:04}-{:02}-{:02}", self.year, self.month, self.day),
                'T' => "00:00:00".to_string(),
                '%' => "%".to_string(),
                other => return Err(format!("%{other}")),
            };
            out.push_str(&text);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted_as_in_python() {
        let date = Date::parse("2024-03-09").expect("a date");
        let text = date.format("%A %a %d %-d %e %B %b %m %Y %y %j %H:%M %I %p %%");
        assert_eq!(text.as_deref(), Ok("Saturday Sat 09 9  9 March Mar 03 2024 24 069 00:00 12 AM %"));
        assert_eq!(Date::parse("2023-01-01").map(|d| d.format("%A %j")), Some(Ok("Sunday 001".into())));
        assert_eq!(Date::parse("2024-12-31").map(|d| d.format("%a %j")), Some(Ok("Tue 366".into())));
        assert_eq!(date.format("%Q"), Err("%Q".into()));
        for bad in ["", "2024-02-30", "2023-02-29", "2024-13-01", "24-1-1-1", "+024-01-01", "2024-1"] {
            assert_eq!(Date::parse(bad), None, "{bad}");
        }
    }
}
