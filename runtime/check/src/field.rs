//! Collects what is known of a field: types, encodings, numbers, lengths and categories.

use crate::roles::Role;
use perilune_core::{DType, HostTensor};
use perilune_data::records::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers of records that are kept of each fault.
const KEPT: usize = 65_536;
/// Distinct categories that are counted.
const CATEGORIES: usize = 1_000;
/// Buckets of a histogram of lengths in each power of two.
const FINE: u64 = 16;

/// Records with a property: their count, and the first of them.
#[derive(Clone, Default, Debug)]
pub struct Rows {
    pub count: u64,
    pub rows: Vec<u64>,
}

impl Rows {
    pub fn add(&mut self, row: u64) {
        self.count += 1;
        if self.rows.len() < KEPT {
            self.rows.push(row);
        }
    }

    pub fn merge(&mut self, other: Rows) {
        self.count += other.count;
        let room = KEPT - self.rows.len().min(KEPT);
        self.rows.extend(other.rows.into_iter().take(room));
    }
}

/// Counts of lengths in buckets of at most 1/16 of their size.
#[derive(Clone, Default, Debug)]
pub struct Lengths {
    counts: Vec<u64>,
    pub total: u64,
    /// The longest values and their records, in falling order.
    pub longest: Vec<(u64, u64)>,
}

impl Lengths {
    /// Lengths below 2 * FINE have buckets of their own.
    fn bucket(length: u64) -> usize {
        if length < FINE {
            return length as usize;
        }
        let power = u64::from(length.ilog2());
        ((power - 4) * FINE + (length >> (power - 4))) as usize
    }

    /// The least length of a bucket.
    fn least(bucket: usize) -> u64 {
        let bucket = bucket as u64;
        if bucket < 2 * FINE { bucket } else { (FINE + bucket % FINE) << (bucket / FINE - 1).min(59) }
    }

    pub fn add(&mut self, length: u64, row: u64) {
        let at = Self::bucket(length);
        if self.counts.len() <= at {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += 1;
        self.total += 1;
        self.keep((length, row));
    }

    fn keep(&mut self, entry: (u64, u64)) {
        if self.longest.len() < 8 || self.longest.last().is_some_and(|l| l.0 < entry.0) {
            let at = self.longest.partition_point(|l| l.0 >= entry.0);
            self.longest.insert(at, entry);
            self.longest.truncate(8);
        }
    }

    pub fn merge(&mut self, other: Lengths) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.total += other.total;
        other.longest.into_iter().for_each(|entry| self.keep(entry));
    }

    /// The length that a share of the values does not exceed, to 1/16.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Self::least(bucket);
            }
        }
        0
    }

    /// Counts by powers of two, for a plot.
    pub fn bars(&self) -> Vec<(String, u64)> {
        let mut out: Vec<(String, u64)> = Vec::new();
        for (bucket, count) in self.counts.iter().enumerate() {
            let least = Self::least(bucket);
            let label = if least == 0 { "0".to_string() } else { (1u64 << least.ilog2()).to_string() };
            match out.last_mut() {
                Some(last) if last.0 == label => last.1 += count,
                _ => out.push((label, *count)),
            }
        }
        out
    }
}

/// A value of a category.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Category {
    Bool(bool),
    Int(i64),
    Text(Arc<str>),
}

impl Category {
    pub fn of(value: &Value) -> Option<Category> {
        match value {
            Value::Bool(b) => Some(Category::Bool(*b)),
            Value::Int(i) => Some(Category::Int(*i)),
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(Category::Int(*x as i64)),
            Value::Text(t) if t.len() <= 64 => Some(Category::Text(t.clone())),
            _ => None,
        }
    }

    pub fn show(&self) -> String {
        match self {
            Category::Bool(b) => b.to_string(),
            Category::Int(i) => i.to_string(),
            Category::Text(t) => perilune_data::error::quote(t),
        }
    }
}

/// The type of a value as schemas state it.
pub const TYPES: [&str; 8] = ["null", "boolean", "number", "string", "bytes", "list", "map", "array"];

fn type_of(value: &Value) -> usize {
    match value {
        Value::Null => 0,
        Value::Bool(_) => 1,
        Value::Int(_) | Value::Float(_) => 2,
        Value::Text(_) => 3,
        Value::Bytes(_) => 4,
        Value::List(_) => 5,
        Value::Map(_) => 6,
        Value::Array(_) => 7,
    }
}

/// What is known of a field.
#[derive(Clone, Debug)]
pub struct FieldProfile {
    pub name: Arc<str>,
    pub types: [Rows; 8],
    pub empty: Rows,
    pub replacement: Rows,
    pub control: Rows,
    pub mojibake: Rows,
    pub not_finite: Rows,
    pub range: Option<(f64, f64)>,
    pub lengths: Lengths,
    pub first: Option<Value>,
    pub constant: bool,
    pub categories: BTreeMap<Category, Rows>,
}

impl FieldProfile {
    pub fn new(name: Arc<str>) -> FieldProfile {
        FieldProfile {
            name,
            types: Default::default(),
            empty: Rows::default(),
            replacement: Rows::default(),
            control: Rows::default(),
            mojibake: Rows::default(),
            not_finite: Rows::default(),
            range: None,
            lengths: Lengths::default(),
            first: None,
            constant: true,
            categories: BTreeMap::new(),
        }
    }

    /// Rows that have the field.
    pub fn present(&self) -> u64 {
        self.types.iter().skip(1).map(|t| t.count).sum()
    }

    pub fn add(&mut self, value: &Value, role: Role, row: u64) {
        self.types[type_of(value)].add(row);
        if let Value::Null = value {
            return;
        }
        match &self.first {
            None => self.first = Some(value.clone()),
            Some(first) => self.constant = self.constant && first == value,
        }
        if let Some(length) = length(value) {
            self.lengths.add(length, row);
        }
        let mut seen = Seen::default();
        seen.look(value);
        for (found, rows) in [
            (seen.replacement, &mut self.replacement),
            (seen.control, &mut self.control),
            (seen.mojibake, &mut self.mojibake),
            (seen.not_finite, &mut self.not_finite),
            (matches!(value, Value::Text(t) if t.trim().is_empty()), &mut self.empty),
        ] {
            if found {
                rows.add(row);
            }
        }
        if let Value::Int(_) | Value::Float(_) = value
            && let Some((low, high)) = seen.range
        {
            self.range = Some(self.range.map_or((low, high), |(l, h)| (l.min(low), h.max(high))));
        }
        if matches!(role, Role::Label | Role::Category)
            && let Some(category) = Category::of(value)
            && (self.categories.len() < CATEGORIES || self.categories.contains_key(&category))
        {
            self.categories.entry(category).or_default().add(row);
        }
    }

    /// Types, range and lengths in a line.
    pub fn summary(&self) -> String {
        let kinds = self.types.iter().zip(TYPES).filter(|t| t.0.count > 0).map(|t| format!("{} {}", t.0.count, t.1));
        let mut out = kinds.collect::<Vec<_>>().join(", ");
        if let Some((low, high)) = self.range {
            out.push_str(&format!("; {low} to {high}"));
        }
        if self.lengths.total > 0 {
            let [a, b, c] = [0.01, 0.5, 0.99].map(|q| self.lengths.quantile(q));
            let longest = self.lengths.longest.first().map_or(0, |l| l.0);
            out.push_str(&format!("; length {a} (1 %), {b} (50 %), {c} (99 %), {longest} at most"));
        }
        if !self.categories.is_empty() {
            out.push_str(&format!("; {} values", self.categories.len()));
        }
        out
    }

    pub fn merge(&mut self, other: FieldProfile) {
        self.types.iter_mut().zip(other.types).for_each(|(a, b)| a.merge(b));
        self.empty.merge(other.empty);
        self.replacement.merge(other.replacement);
        self.control.merge(other.control);
        self.mojibake.merge(other.mojibake);
        self.not_finite.merge(other.not_finite);
        self.lengths.merge(other.lengths);
        self.range = match (self.range, other.range) {
            (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
            (a, b) => a.or(b),
        };
        self.constant = self.constant
            && other.constant
            && (self.first.is_none() || other.first.is_none() || self.first == other.first);
        self.first = self.first.take().or(other.first);
        for (category, rows) in other.categories {
            if self.categories.len() < CATEGORIES || self.categories.contains_key(&category) {
                self.categories.entry(category).or_default().merge(rows);
            }
        }
    }
}

/// The length of a value: characters of a text, elements of a list.
fn length(value: &Value) -> Option<u64> {
    match value {
        Value::Text(t) => Some(t.chars().count() as u64),
        Value::Bytes(b) => Some(b.len() as u64),
        Value::List(l) => Some(l.len() as u64),
        Value::Array(a) => Some(a.numel() as u64),
        _ => None,
    }
}

/// Whether an array has neither NaN nor infinity: numbers whose exponent has all bits set.
fn is_finite(array: &HostTensor) -> bool {
    match array.dtype {
        DType::F32 => !array.bytes.chunks_exact(4).any(|b| b[3] & 0x7f == 0x7f && b[2] & 0x80 != 0),
        dtype => !dtype.is_float() || (0..array.numel()).all(|i| array.get_f64(i).is_finite()),
    }
}

/// What a value contains, at any depth.
#[derive(Default)]
struct Seen {
    replacement: bool,
    control: bool,
    mojibake: bool,
    not_finite: bool,
    range: Option<(f64, f64)>,
}

impl Seen {
    fn number(&mut self, x: f64) {
        if !x.is_finite() {
            self.not_finite = true;
            return;
        }
        self.range = Some(self.range.map_or((x, x), |(l, h)| (l.min(x), h.max(x))));
    }

    fn look(&mut self, value: &Value) {
        match value {
            Value::Int(i) => self.number(*i as f64),
            Value::Float(x) => self.number(*x),
            Value::Text(t) => self.text(t),
            Value::List(list) => list.iter().for_each(|v| self.look(v)),
            Value::Map(map) => map.fields.iter().for_each(|(_, v)| self.look(v)),
            Value::Array(array) => self.not_finite |= !is_finite(array),
            _ => {}
        }
    }

    /// Mojibake is UTF-8 that was read as Latin-1 or Windows-1252: 'é' becomes 'Ã©', a quotation mark 'â€™'. Only sequences that no language
    /// writes count.
    fn text(&mut self, text: &str) {
        if text.bytes().all(|b| (0x20..0x7F).contains(&b) || matches!(b, b'\n' | b'\t' | b'\r')) {
            return;
        }
        let mut before = ['\0'; 2];
        for c in text.chars() {
            self.replacement |= c == '\u{fffd}';
            self.control |= c.is_control() && !matches!(c, '\n' | '\t' | '\r' | '\u{c}' | '\u{85}');
            self.mojibake |= before[1] == 'Ã' && matches!(c, '\u{a0}'..='\u{bf}')
                || before == ['â', '€'] && matches!(c, '™' | 'œ' | '\u{9d}' | '“' | '”' | '¦' | '˜');
            before = [before[1], c];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_sixteenth() {
        for bucket in 0..900 {
            assert_eq!(Lengths::bucket(Lengths::least(bucket)), bucket);
        }
        let mut lengths = Lengths::default();
        assert_eq!(lengths.quantile(0.5), 0);
        (0..10_000u64).for_each(|n| lengths.add(n * 7 % 10_000, n));
        for share in [0.01, 0.5, 0.9, 0.99] {
            let (got, exact) = (lengths.quantile(share) as f64, share * 1e4);
            assert!(got <= exact && got >= exact * 15.0 / 16.0 - 1.0, "{share}: {got}");
        }
        assert_eq!(lengths.longest[0].0, 9_999);
        assert_eq!(Lengths::bucket(u64::MAX), 975);
    }

    #[test]
    fn broken_encodings_are_seen_and_languages_are_not() {
        let seen = |text: &str| {
            let mut seen = Seen::default();
            seen.text(text);
            [seen.replacement, seen.control, seen.mojibake]
        };
        assert_eq!(seen("a\u{fffd}b"), [true, false, false]);
        assert_eq!(seen("a\u{1b}[0m"), [false, true, false]);
        assert_eq!(seen("caf\u{c3}\u{a9}"), [false, false, true]);
        assert_eq!(seen("it\u{e2}\u{20ac}\u{2122}s"), [false, false, true]);
        for text in ["São Tomé, NÃO", "«voilà»… “café”…", "5 € — â", "日本語\tТекст\r\n", "\u{feff}x \u{200d}", "Ãrea"]
        {
            assert_eq!(seen(text), [false; 3], "{text}");
        }
    }
}
