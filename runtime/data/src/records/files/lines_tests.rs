#![allow(clippy::unwrap_used)]

use super::*;
use crate::records::files::line_index::PIECE;
use perilune_core::philox::philox4x32;
use perilune_policy::Policy;

fn open(texts: &[&[u8]], format: LineFormat) -> (tempfile::TempDir, Result<Lines>) {
    let dir = tempfile::tempdir().unwrap();
    let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
    let write = |(k, text): (usize, &&[u8])| {
        let path = dir.path().join(format!("{k}.jsonl"));
        std::fs::write(&path, text).unwrap();
        path
    };
    let paths: Vec<PathBuf> = texts.iter().enumerate().map(write).collect();
    let interrupt = Interrupt::default();
    let opening = Opening { opener: policy, cache: None, interrupt: &interrupt, observe: &mut |_| {} };
    let lines = Lines::open(&paths, format, opening);
    (dir, lines)
}

fn one(text: &str) -> Record {
    let (_dir, lines) = open(&[text.as_bytes()], LineFormat::Json);
    lines.unwrap().get(0).unwrap()
}

#[test]
fn values_are_those_of_json() {
    let r = one(r#"{"a": 1, "b": -2.5e3, "c": null, "d": [true, {"e": "é\n😀"}], "f": 18446744073709551615, "a": 2}"#);
    assert_eq!(r.names().collect::<Vec<_>>(), ["a", "b", "c", "d", "f"]);
    assert_eq!(r.get("a"), Some(&Value::Int(2)), "the last of two counts");
    assert_eq!(r.get("b"), Some(&Value::Float(-2500.0)));
    assert_eq!(r.get("c"), Some(&Value::Null));
    assert_eq!(r.get("f"), Some(&Value::Float(18_446_744_073_709_551_615.0)));
    let Some(Value::List(d)) = r.get("d") else { panic!("{r:?}") };
    assert_eq!(d[1], Value::Map(Record { fields: vec![("e".into(), Value::Text("é\n😀".into()))] }));
    let wide: String = (0..100).map(|k| format!("\"k{}\": {k}, ", k % 50)).collect();
    let wide = one(&format!("{{{}\"end\": 1}}", wide));
    assert_eq!(wide.fields.len(), 51);
    assert_eq!(wide.get("k49"), Some(&Value::Int(99)));
}

#[test]
fn lines_are_found_across_pieces_blanks_and_files() {
    let mut text = b"\xEF\xBB\xBF\n \n".to_vec();
    let mut long = Vec::new();
    for k in 0..300_000 {
        let end: &[u8] = [b"\n" as &[u8], b"\r\n", b"\n\n\t\n"][k % 3];
        long.extend_from_slice(format!("{{\"k\": {k}}}").as_bytes());
        long.extend_from_slice(end);
    }
    text.extend_from_slice(&long);
    text.extend_from_slice(b"{\"k\": 300000}");
    assert!(text.len() > PIECE);
    let (_dir, lines) = open(&[b"", &text, b"\n", b"{\"k\": 300001}\n"], LineFormat::Json);
    let lines = lines.unwrap();
    assert_eq!(lines.len(), 300_002);
    for k in [0, 1, 2, 3, 150_000, 299_999, 300_000, 300_001] {
        assert_eq!(lines.get(k).unwrap().get("k"), Some(&Value::Int(k as i64)));
    }
    assert_eq!(lines.origins(0).unwrap()[0].line, Some(3));
    // Two blank lines before the first record, and two behind every third.
    assert_eq!(lines.origins(3).unwrap()[0].line, Some(8));
    assert_eq!(lines.origins(300_001).unwrap()[0].line, Some(1));
    assert!(lines.origins(300_001).unwrap()[0].file.ends_with("3.jsonl"));
    let few = lines.project(&["x".into()]).unwrap();
    assert!(few.get(5).unwrap().fields.is_empty());
}

#[test]
fn a_malformed_line_is_named_or_left_out() {
    let text = b"{\"a\": 1}\n{\"a\": }\n[1]\n{\"a\": 2} x\n{\"a\": \"\xFF\"}\n{\"a\": 1e999}\n\n{\"a\": 3}\n";
    let (_dir, lines) = open(&[text], LineFormat::Json);
    let mut lines = lines.unwrap();
    for (row, part) in [
        (1, "0.jsonl:2: column 7: expected value, near '{\"a\": }'"),
        (2, "0.jsonl:3: "),
        (3, "0.jsonl:4: column 10: trailing characters"),
        (4, "0.jsonl:5: "),
        (5, "0.jsonl:6: "),
    ] {
        let error = lines.get(row).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("on_error"), "{error}");
    }
    assert_eq!(lines.skip_malformed(&Interrupt::default()).unwrap(), 5);
    assert_eq!(lines.len(), 2);
    assert_eq!(lines.get(1).unwrap().get("a"), Some(&Value::Int(3)));
    assert_eq!(lines.origins(1).unwrap()[0].line, Some(8));
    let deep = format!("{{\"a\": {}1{}}}", "[".repeat(200), "]".repeat(200));
    let (_dir, lines) = open(&[deep.as_bytes()], LineFormat::Json);
    assert!(lines.unwrap().get(0).unwrap_err().to_string().contains("recursion limit"));
}

#[test]
fn text_is_a_record_a_line() {
    let (_dir, lines) = open(&[b"one\ntwo\r\n\n \nlast"], LineFormat::Text);
    let lines = lines.unwrap();
    let texts: Vec<_> = (0..lines.len()).map(|k| lines.get(k).unwrap().get("text").cloned()).collect();
    assert_eq!(texts, ["one", "two", "last"].map(|t| Some(Value::Text(t.into()))));
    let (_dir, lines) = open(&[b"\x1F\x8B\x08\x00"], LineFormat::Text);
    let e = lines.err().unwrap().to_string();
    assert!(e.contains("0.jsonl: gzip stream, before byte 4 of 4: ends early, after 0 bytes of text"), "{e}");
    let (dir, lines) = open(&[b"{}\n"], LineFormat::Json);
    std::fs::remove_file(dir.path().join("0.jsonl")).unwrap();
    assert!(lines.unwrap().get(0).is_ok(), "an open file may be removed");
}

/// `PERILUNE_FUZZ_COUNT` sets the number of files.
#[test]
fn damaged_files_are_read_or_refused() {
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(300u32);
    let good =
        b"{\"a\": [1, 2.5, \"x\\u00e9\"], \"b\": {\"c\": null}}\n\n{\"a\": true}\r\n{\"b\": \"\xF0\x9F\x98\x80\"}\n";
    let (mut read, mut refused) = (0, 0);
    for seed in 0..count {
        let mut bytes = good.to_vec();
        for k in 0..=seed % 6 {
            let [at, what, byte, _] = philox4x32([seed, k, 0, 0], [5, 0]);
            let at = at as usize % bytes.len().max(1);
            match what % 4 {
                0 if at < bytes.len() => bytes[at] = byte as u8,
                1 => bytes.truncate(at),
                2 => bytes.insert(at.min(bytes.len()), b"\n\"{}[]\\,:\0\xFF"[byte as usize % 11]),
                _ => bytes.extend_from_within(..at.min(bytes.len())),
            }
        }
        let (_dir, lines) = open(&[&bytes], LineFormat::Json);
        let Ok(lines) = lines else { continue };
        for row in 0..lines.len() {
            match lines.get(row) {
                Ok(_) => read += 1,
                Err(Error::Line { .. }) => refused += 1,
                Err(e) => panic!("file {seed}: {e}"),
            }
        }
    }
    assert!(read > count / 4 && refused > count / 4, "{read} read, {refused} refused");
}

#[test]
fn records_read_together_are_those_read_alone() {
    let long = format!("{{\"k\": \"{}\"}}\n", "x".repeat(700_000));
    let text = |n: u32| {
        (0..n).map(|k| format!("{{\"k\": {k}}}{}", ["\n", "\r\n", "\n\n"][k as usize % 3])).collect::<String>()
    };
    let files = [text(40), String::new(), format!("{}{long}{long}bad\n{long}", text(3)), text(50)];
    let (_dir, lines) = open(&files.each_ref().map(|text| text.as_bytes()), LineFormat::Json);
    let mut lines = lines.unwrap();
    assert!(lines.get_many(&[45, 46]).unwrap_err().to_string().contains("2.jsonl:"), "the bad line");
    assert_eq!(lines.skip_malformed(&Interrupt::default()).unwrap(), 1);
    let len = lines.len();
    let all: Vec<u64> = (0..2 * len).collect();
    let mut orders = vec![all.clone(), all.iter().rev().copied().collect(), vec![], vec![5, 5, 6, 6, 7]];
    for seed in 0..20 {
        let draw = |k| u64::from(philox4x32([seed, k, 0, 0], [8, 8])[0]);
        orders.push((0..30).flat_map(|k| (0..draw(k) % 4).map(move |j| draw(k + 100) % len + j)).collect());
    }
    for order in orders {
        let alone: Vec<Record> = order.iter().map(|k| lines.get(*k).unwrap()).collect();
        assert_eq!(lines.get_many(&order).unwrap(), alone);
    }
}
