#![allow(clippy::unwrap_used)]

use super::*;
use crate::records::Value;
use perilune_core::Interrupt;
use perilune_core::philox::philox4x32;
use perilune_policy::Policy;

fn open(texts: &[&[u8]], field: Option<&str>) -> (tempfile::TempDir, Result<JsonArray>) {
    let dir = tempfile::tempdir().unwrap();
    let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
    let write = |(k, text): (usize, &&[u8])| {
        let path = dir.path().join(format!("{k}.json"));
        std::fs::write(&path, text).unwrap();
        path
    };
    let paths: Vec<PathBuf> = texts.iter().enumerate().map(write).collect();
    let interrupt = Interrupt::default();
    let opening = Opening { opener: policy, cache: None, interrupt: &interrupt, observe: &mut |_| {} };
    let array = JsonArray::open(&paths, field, opening);
    (dir, array)
}

fn all(text: &[u8], field: Option<&str>) -> Vec<Record> {
    let array = open(&[text], field).1.unwrap();
    (0..array.len()).map(|k| array.get(k).unwrap()).collect()
}

#[test]
fn elements_are_records() {
    let text = b"\xEF\xBB\xBF [ {\"a\": \"]},\\\"{[\"} ,\n{\"a\": [[], {}, -1e3, null]}\t,{}\n] \n";
    let records = all(text, None);
    assert_eq!(records.len(), 3);
    assert_eq!(records[0].get("a"), Some(&Value::Text("]},\"{[".into())));
    let list = vec![Value::List(vec![]), Value::Map(Record::default()), Value::Float(-1e3), Value::Null];
    assert_eq!(records[1].get("a"), Some(&Value::List(list)));
    assert_eq!(records[2], Record::default());
    assert!(all(b"[]", None).is_empty());
    let (_dir, set) = open(&[b"[{\"k\": 0}]", b"[]", b"[{\"k\": 1},\n\n{\"k\": 2}]"], None);
    let set = set.unwrap();
    assert_eq!(
        (0..4).map(|k| set.get(k).unwrap().get("k").cloned()).collect::<Vec<_>>(),
        [0, 1, 2, 0].map(|k| Some(Value::Int(k)))
    );
    let origin = set.origins(2).unwrap().remove(0);
    assert!(origin.file.ends_with("2.json") && origin.row == 1 && origin.line == Some(3));
}

#[test]
fn a_field_has_the_array() {
    let text = b"{\"v\": 1, \"meta\": {\"data\": [1]}, \"w\": [true], \"d\\u0061ta\": [{\"a\": 1}, {\"a\": 2}], \"x\": \"\\\\\", \"n\": null}";
    assert_eq!(all(text, Some("data")).len(), 2);
    assert_eq!(all(text, Some("data"))[1].get("a"), Some(&Value::Int(2)));
    for (text, field, part) in [
        (&text[..], None, "0.json: file: is an object, not an array\n  hint: its arrays are "),
        (text, Some("dat"), "did you mean 'data'?"),
        (text, Some("zzzzz"), "has no field 'zzzzz'"),
        (text, Some("v"), "the field 'v' is no array"),
        (b"{\"d\": [], \"d\": []}", Some("d"), "is in the file twice"),
        (b"[{}]", Some("d"), "the file is an array, without a field 'd'"),
        (b"{\"a\": 1}\n{\"a\": 2}\n", None, "0.json:2: '{' follows the end of the value"),
        (b"{\"a\" 1}", Some("a"), "where a colon is expected"),
        (b"{\"a\": 1 \"b\": 2}", Some("b"), "where a comma or the end of the object is expected"),
        (b"{1: 2}", Some("b"), "where a name in quotes is expected"),
    ] {
        let e = open(&[text], field).1.err().unwrap().to_string();
        assert!(e.contains(part), "{part}: {e}");
    }
}

#[test]
fn malformed_files_are_named() {
    for (text, part) in [
        (&b""[..], "0.json: file: is empty"),
        (b" \n ", "is empty"),
        (b"text", "0.json:1: the file is no array of objects"),
        (b"[\n{},\n3]", "0.json:3: element 1 is no object: it begins with '3'"),
        (b"[{} {}]", "where a comma or the end of the array is expected"),
        (b"[{},]", "element 1 is no object"),
        (b"[{}", "ends in the middle of a value, after 3 bytes"),
        (b"[{\"a\": \"x", "ends in the middle"),
        (b"[{\"a\": [}]", "there is '}' where ']' is expected"),
        (b"[]\n[]", "0.json:2: '[' follows the end of the value"),
    ] {
        let e = open(&[text], None).1.err().unwrap().to_string();
        assert!(e.contains(part), "{part}: {e}");
    }
    let deep = format!("[{{\"a\": {}", "[".repeat(100_000));
    assert!(open(&[deep.as_bytes()], None).1.err().unwrap().to_string().contains("nested deeper"));
    // What is inside an element is found when it is read.
    let (_dir, set) = open(&[b"[\n{\"a\": 1},\n{\"b\": 2,\n \"a\": 1 2}]"], None);
    let e = set.unwrap().get(1).unwrap_err().to_string();
    assert!(e.contains("0.json:4: record 1, column 9: expected `,` or `}`, near "), "{e}");
}

/// Compares files of random values, in random layouts, with `serde_json`.
#[test]
fn random_files_are_those_of_the_parser() {
    fn value(seed: u32, at: &mut u32, depth: u32) -> serde_json::Value {
        *at += 1;
        let [kind, n, c, _] = philox4x32([seed, *at, 0, 0], [2, 0]);
        match kind % if depth > 3 { 4 } else { 6 } {
            0 => serde_json::json!(n as i32),
            1 => serde_json::json!(null),
            2 => serde_json::json!(
                "[]{},:\"\\\né😀".chars().cycle().skip(c as usize % 11).take(n as usize % 14).collect::<String>()
            ),
            3 => serde_json::json!(n % 2 == 0),
            4 => (0..n % 4).map(|_| value(seed, at, depth + 1)).collect(),
            _ => (0..n % 4)
                .map(|k| (format!("k{k}\"]"), value(seed, at, depth + 1)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }
    for seed in 0..200 {
        let mut at = 0;
        let count = philox4x32([seed, 0, 0, 0], [4, 0])[0] % 60;
        let list: Vec<serde_json::Value> =
            (0..count).map(|k| serde_json::json!({ "k": k, "v": value(seed, &mut at, 0) })).collect();
        let whole = match seed % 3 {
            0 => serde_json::json!(list),
            _ => serde_json::json!({ "a": value(seed, &mut at, 0), "list": list, "z": value(seed, &mut at, 0) }),
        };
        let text =
            if seed % 2 == 0 { serde_json::to_string(&whole) } else { serde_json::to_string_pretty(&whole) }.unwrap();
        let field = (seed % 3 != 0).then_some("list");
        let records = all(text.as_bytes(), field);
        assert_eq!(records.len(), list.len(), "{seed}");
        for (record, wanted) in records.iter().zip(&list) {
            assert_eq!(*record, json::object(wanted.to_string().as_bytes(), None).unwrap(), "{seed}");
        }
    }
}

#[test]
fn elements_over_pieces_are_read_by_position() {
    let mut text = String::from("[");
    for k in 0..150_000 {
        text += &format!("{}{{\"k\": {k}, \"t\": \"{}\"}}", if k == 0 { "" } else { ",\n" }, "]\\\"é".repeat(k % 17));
    }
    text += "]";
    assert!(text.len() > 5 << 20);
    let set = open(&[text.as_bytes()], None).1.unwrap();
    assert_eq!(set.len(), 150_000);
    let few = set.project(&["k".into()]).unwrap();
    for k in (0..150_000).step_by(997) {
        assert_eq!(set.get(k).unwrap().get("t"), Some(&Value::Text("]\"é".repeat(k as usize % 17).into())));
        assert_eq!(few.get(k).unwrap().fields, [("k".into(), Value::Int(k as i64))]);
        assert_eq!(set.origins(k).unwrap()[0].line, Some(k + 1));
    }
}

#[test]
fn damaged_files_are_read_or_refused() {
    let good =
        b"{\"m\": {\"x\": [1]}, \"d\": [{\"a\": \"\\\"]\"}, {\"b\": [1, {}]},\n{\"c\": \"\xC3\xA9\"}], \"z\": 1}"
            .to_vec();
    let (mut read, mut refused) = (0, 0);
    for seed in 0..3_000u32 {
        let mut bytes = good.clone();
        for k in 0..=seed % 3 {
            let [at, what, byte, _] = philox4x32([seed, k, 0, 0], [8, 0]);
            let at = at as usize % bytes.len().max(1);
            match what % 4 {
                0 if at < bytes.len() => bytes[at] = byte as u8,
                1 if what % 3 == 0 => bytes.truncate(at),
                2 => bytes.insert(at.min(bytes.len()), b"\n\"{}[]\\,:\0\xFF"[byte as usize % 11]),
                _ if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
                _ => {}
            }
        }
        match open(&[&bytes], Some("d")).1 {
            Ok(set) => (0..set.len()).for_each(|k| match set.get(k) {
                Ok(_) => read += 1,
                Err(e) => assert!(e.to_string().contains("0.json"), "{e}"),
            }),
            Err(e) => {
                assert!(e.to_string().contains("0.json"), "{e}");
                refused += 1;
            }
        }
    }
    assert!(read > 500 && refused > 500, "{read} read, {refused} refused");
}

#[test]
fn malformed_elements_are_left_out_and_counted() {
    let text = b"[{\"k\": 0}, {\"k\": nul}, {\"k\" 1},\n{\"k\": \"\\q\"}, {\"k\": 2}]";
    let (_dir, set) = open(&[text, b"[{\"k\": 3}]"], None);
    let mut set = set.unwrap();
    assert!(set.get(1).unwrap_err().to_string().contains("on_error = \"skip\""));
    let whole = set.fingerprint();
    assert_eq!(set.skip_malformed(&Interrupt::default()).unwrap(), 3);
    assert_ne!(set.fingerprint(), whole);
    let kept = |set: &dyn Dataset, k| (set.get(k).unwrap().get("k").cloned(), set.origins(k).unwrap()[0].line);
    for k in [0, 3] {
        assert_eq!(kept(&set, k), (Some(Value::Int(0)), Some(1)));
    }
    assert_eq!(kept(&set, 1), (Some(Value::Int(2)), Some(2)));
    assert_eq!(kept(&*set.project(&["k".into()]).unwrap(), 2), (Some(Value::Int(3)), Some(1)));
    assert_eq!(set.len(), 3);
}
