#![allow(clippy::unwrap_used)]

use super::*;
use crate::records::json_text::is_special;
use perilune_core::philox::philox4x32;

/// Random numbers below a bound, by a seed.
struct Random(u32, u32);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.1 += 1;
        philox4x32([self.0, self.1, 0, 0], [19, 2])[0] % bound
    }

    fn of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len() as u32) as usize]
    }
}

const TEXTS: [&str; 16] = [
    "",
    "a",
    "text",
    "k1",
    "a longer text with more than thirty-two bytes of plain characters",
    "é",
    "😀 and Ünïcode",
    "\\n",
    "tab\\tand \\\"quotes\\\" \\\\ \\/ \\b\\f\\r",
    "\\u00e9",
    "\\u0041\\u4e2d",
    "\\ud83d\\ude00",
    "\\u0000",
    "\\ud800",
    "x\\uD83Dy",
    "\\u12",
];
const NUMBERS: [&str; 24] = [
    "0",
    "-0",
    "1",
    "-17",
    "123456789012345678",
    "-123456789012345678",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775809",
    "0.1",
    "-0.0",
    "1e3",
    "1E+400",
    "2.5e-3",
    "1e-400",
    "3.141592653589793238462643",
    "0.1e1",
    "01",
    "1.",
    "-",
    "1e",
];
const NAMES: [&str; 8] = ["a", "text", "b", "name", "text", "é", "k\\u0031", "k1"];

fn value(random: &mut Random, depth: u32, to: &mut String) {
    match random.below(if depth > 4 { 6 } else { 8 }) {
        0 => to.push_str(random.of(&["null", "true", "false"])),
        1 | 2 => to.push_str(random.of(&NUMBERS[..if random.0.is_multiple_of(3) { 24 } else { 14 }])),
        3..6 => {
            let text = random.of(&TEXTS[..if random.0.is_multiple_of(3) { 16 } else { 13 }]);
            to.push_str(&format!("\"{text}\""));
        }
        6 => {
            to.push('[');
            for k in 0..random.below(5) {
                to.push_str(if k > 0 { "," } else { "" });
                space(random, to);
                value(random, depth + 1, to);
            }
            to.push(']');
        }
        _ => object(random, depth + 1, to),
    }
}

fn object(random: &mut Random, depth: u32, to: &mut String) {
    to.push('{');
    for k in 0..random.below(7) {
        to.push_str(if k > 0 { "," } else { "" });
        space(random, to);
        to.push_str(&format!("\"{}\"", random.of(&NAMES)));
        space(random, to);
        to.push(':');
        space(random, to);
        value(random, depth, to);
        space(random, to);
    }
    to.push('}');
}

fn space(random: &mut Random, to: &mut String) {
    if random.below(4) == 0 {
        to.push_str(random.of(&[" ", "\t", "\r\n", "  "]));
    }
}

/// Values with their bits: NaN does not occur, but -0.0 does.
fn bits(record: &Record) -> String {
    format!("{record:?}")
}

/// Compares with `serde_json`. Returns whether the fast path has read it, and whether it is an object.
fn compare(text: &[u8], fields: Option<&[Arc<str>]>) -> (bool, bool) {
    let (fast, slow) = (read(text, fields), json::parse(text, fields));
    let shown = String::from_utf8_lossy(text);
    if let Some(fast) = &fast {
        let slow = slow.as_ref().unwrap_or_else(|fault| panic!("{shown}: read, but {}", fault.rule));
        assert_eq!(bits(fast), bits(slow), "{shown}");
    }
    (fast.is_some(), slow.is_ok())
}

/// `PERILUNE_FUZZ_COUNT` sets the number of objects.
#[test]
fn objects_are_those_of_serde_json() {
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000u32);
    let some: [Arc<str>; 3] = ["text".into(), "é".into(), "k1".into()];
    let (mut fast, mut good, mut bad) = (0, 0, 0);
    let mut see = |(is_fast, is_good): (bool, bool)| {
        fast += u32::from(is_fast);
        good += u32::from(is_good);
        bad += u32::from(!is_good);
    };
    for seed in 0..count {
        let (mut random, mut text) = (Random(seed, 0), String::new());
        object(&mut random, 0, &mut text);
        for fields in [None, Some(&some[..]), Some(&[])] {
            see(compare(text.as_bytes(), fields));
        }
        let mut bytes = text.into_bytes();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u32 + 1) as usize;
            let byte = b"\"\\{}[]:,0-.eE+ux \n\t\0\x1F\x7F\x80\xC3\xA9\xED\xFFtn"[random.below(29) as usize];
            match random.below(4) {
                0 if at < bytes.len() => bytes[at] = byte,
                1 => bytes.truncate(at),
                2 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.insert(at, byte),
            }
        }
        for fields in [None, Some(&some[..]), Some(&[])] {
            see(compare(&bytes, fields));
        }
    }
    assert!(fast > count && good > count && bad > count, "{fast} fast, {good} good, {bad} bad of {count}");
}

#[test]
fn every_byte_in_every_place_is_judged_alike() {
    let good = "{\"a\": [1, -2.5e3, \"x\\u00e9\\n\", true], \"text\": \"é plain\", \"n\": {\"b\": null, \"text\": 07}}"
        .replace("07", "7");
    let fields: [Arc<str>; 1] = ["text".into()];
    assert_eq!(compare(good.as_bytes(), None), (true, true));
    for at in 0..=good.len() {
        for byte in 0..=255 {
            let mut bytes = good.clone().into_bytes();
            bytes.insert(at, byte);
            compare(&bytes, None);
            compare(&bytes, Some(&fields));
            if at < good.len() {
                bytes.remove(at + 1);
                compare(&bytes, None);
                compare(&bytes, Some(&fields));
            }
        }
    }
}

#[test]
fn what_ends_plain_text_is_found_in_every_lane() {
    for len in 0..100 {
        for at in 0..=len {
            for byte in [b'"', b'\\', 0, 0x1F, b' ', b'!', b'#', b'[', b']', 0x7F, 0x80, 0xA2, 0xDC, 0xFF] {
                let mut text = vec![b'x'; len];
                text.insert(at, byte);
                let mut scan = Scan { text: &text, at: 0 };
                scan.seek_special();
                let expected = text.iter().position(|b| is_special(*b)).unwrap_or(text.len());
                assert_eq!(scan.at, expected, "{byte} at {at} of {len}");
            }
        }
    }
}

#[test]
fn limits_are_those_of_the_full_parser() {
    for depth in [1, 62, 63, 64, 65, 126, 127, 128, 129, 10_000] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let text = format!("{{\"text\": {}1{}}}", open.repeat(depth), close.repeat(depth));
            let fields: [Arc<str>; 2] = ["text".into(), "other".into()];
            let (fast, _) = compare(text.as_bytes(), None);
            assert_eq!(fast, depth < MAX_DEPTH as usize, "{depth}");
            compare(text.as_bytes(), Some(&fields));
            compare(text.as_bytes(), Some(&fields[1..]));
        }
    }
    let wide = |count: usize| (0..count).map(|k| format!("\"k{k}\": {k}")).collect::<Vec<_>>().join(",");
    for count in [MAX_FIELDS, MAX_FIELDS + 1, 3 * MAX_NAMES] {
        let text = format!("{{{}}}", wide(count));
        assert_eq!(compare(text.as_bytes(), None), (count <= MAX_FIELDS, true));
        assert_eq!(json::object(text.as_bytes(), None).unwrap().fields.len(), count);
        assert_eq!(compare(text.as_bytes(), Some(&["k20".into()])), (true, true));
    }
}

#[test]
fn names_are_shared_by_records() {
    let first = read(b"{\"a\": 1, \"b\": {\"c\": 2}}", None).unwrap();
    let second = read(b"{\"b\": 1, \"a\": 2}", None).unwrap();
    assert!(Arc::ptr_eq(&first.fields[0].0, &second.fields[1].0));
}
