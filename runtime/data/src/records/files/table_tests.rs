#![allow(clippy::unwrap_used)]

use super::*;
use perilune_core::Interrupt;
use perilune_core::philox::philox4x32;
use perilune_policy::Policy;

fn format() -> TableFormat {
    TableFormat { delimiter: b',', columns: None, types: Vec::new(), skip_malformed: false }
}

fn open_as(texts: &[&[u8]], format: TableFormat) -> (tempfile::TempDir, Result<Table>) {
    let dir = tempfile::tempdir().unwrap();
    let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
    let write = |(k, text): (usize, &&[u8])| {
        let path = dir.path().join(format!("{k}.csv"));
        std::fs::write(&path, text).unwrap();
        path
    };
    let paths: Vec<PathBuf> = texts.iter().enumerate().map(write).collect();
    let interrupt = Interrupt::default();
    let opening = Opening { opener: policy, cache: None, interrupt: &interrupt, observe: &mut |_| {} };
    let table = Table::open(&paths, format, opening);
    (dir, table)
}

fn open(text: &[u8]) -> Table {
    open_as(&[text], format()).1.unwrap()
}

fn refused(text: &[u8]) -> String {
    open_as(&[text], format()).1.err().unwrap().to_string()
}

fn text(t: &str) -> Value {
    Value::Text(t.into())
}

fn values(table: &Table, row: u64) -> Vec<Value> {
    table.get(row).unwrap().fields.into_iter().map(|(_, value)| value).collect()
}

#[test]
fn cells_have_the_types_of_their_columns() {
    let table = open(b"\xEF\xBB\xBFid,score,text,zip\r\n1,2,a,007\r\n\r\n-5,,\"x, \"\"y\"\"\nz\",123\r\n,1e3,,");
    assert_eq!(table.names().collect::<Vec<_>>(), ["id", "score", "text", "zip"]);
    assert_eq!(values(&table, 0), [Value::Int(1), Value::Float(2.0), text("a"), text("007")]);
    assert_eq!(values(&table, 1), [Value::Int(-5), Value::Null, text("x, \"y\"\nz"), text("123")]);
    assert_eq!(values(&table, 2), [Value::Null, Value::Float(1e3), text(""), text("")]);
    assert_eq!(values(&table, 5), values(&table, 2), "the next epoch");
    let lines: Vec<_> = (0..3).map(|k| table.origins(k).unwrap()[0].line).collect();
    assert_eq!(lines, [Some(2), Some(4), Some(6)]);
    let few = table.project(&["zip".into(), "id".into()]).unwrap();
    assert_eq!(few.get(0).unwrap().names().collect::<Vec<_>>(), ["id", "zip"]);
}

#[test]
fn files_share_columns_and_types() {
    let (_dir, table) = open_as(&[b"a,b\n1,x\n", b"b,a\ny,2.5\n", b"a,b\n"], format());
    let table = table.unwrap();
    assert_eq!(values(&table, 0), [Value::Float(1.0), text("x")]);
    assert_eq!(values(&table, 1), [Value::Float(2.5), text("y")]);
    assert_eq!(table.len(), 2);
    let e = open_as(&[b"a,b\n1,x\n", b"a,c\n1,x\n"], format()).1.err().unwrap().to_string();
    assert!(e.contains("1.csv:1: the header has the column 'c'"), "{e}");
    let e = open_as(&[b"a,b\n1,x\n", b"a\n1\n"], format()).1.err().unwrap().to_string();
    assert!(e.contains("lacks the column 'b'"), "{e}");
    let types = vec![("a".to_string(), ColumnType::Text)];
    let chosen =
        TableFormat { delimiter: b';', columns: Some(vec!["b".into(), "a".into()]), types, skip_malformed: false };
    let table = open_as(&[b"a;b\n1;\"p;q\"\n"], chosen).1.unwrap();
    assert_eq!(values(&table, 0), [text("p;q"), text("1")]);
}

#[test]
fn malformed_tables_are_named() {
    for (bytes, part) in [
        (&b""[..], "0.csv: file: has no header"),
        (b"\n\r\n", "has no header"),
        (b"a,a\n", "has two columns 'a'"),
        (b"a,b\n1,2\n\n1,2,3\n", "0.csv:4: the row has 3 cells, and the header 2"),
        (b"a,b\n1,\"x\ny\"\n1\n", "0.csv:4: the row has 1 cells"),
        (b"a,b\n1,2\n3,\"x\ny\n", "0.csv:3: a quote is opened and never closed"),
        (b"a,b\n1,\xFF\n", "0.csv:2: cell 2: is no UTF-8 text"),
        (b"a,b\n\xC3,\xA9\n", "0.csv:2: cell "),
    ] {
        let e = refused(bytes);
        assert!(e.contains(part), "{part}: {e}");
    }
    let wrong = TableFormat { types: vec![("a".into(), ColumnType::Integer)], ..format() };
    let e = open_as(&[b"a\n1\nx\n"], wrong).1.err().unwrap().to_string();
    assert!(e.contains("0.csv:3: column 'a': 'x' is no integer"), "{e}");
    let wrong = TableFormat { columns: Some(vec!["labl".into()]), ..format() };
    assert!(open_as(&[b"label\n1\n"], wrong).1.err().unwrap().to_string().contains("did you mean 'label'"));
}

/// Writes random cells by the rule of RFC 4180 and reads them back, over pieces and line ends of all kinds.
#[test]
fn random_tables_are_read_back() {
    const PARTS: [&str; 12] = ["a", "\"", ",", "\n", "\r\n", "é", " ", "0", "😀", "x y", "''", "\t"];
    for seed in 0..150u32 {
        let word = |k: u32, n: u32| philox4x32([seed, k, n, 0], [9, 0]);
        let columns = 1 + word(0, 1)[0] as usize % 5;
        let rows = word(0, 2)[0] % 200;
        let end = ["\n", "\r\n"][seed as usize % 2];
        let mut out = (0..columns).map(|c| format!("c{c}")).collect::<Vec<_>>().join(",") + end;
        let mut wanted: Vec<Vec<String>> = Vec::new();
        for row in 0..rows {
            let cell = |c: usize| {
                let [n, a, b, d] = word(row + 1, c as u32);
                // A first cell that keeps the column text, and the row from being blank.
                let lead = if row == 0 || columns == 1 { "t" } else { "" };
                lead.to_string()
                    + &[a, b, d].iter().take(n as usize % 4).map(|k| PARTS[*k as usize % 12]).collect::<String>()
            };
            let cells: Vec<String> = (0..columns).map(cell).collect();
            let quoted = cells.iter().map(|c| match c.contains(['"', ',', '\n', '\r']) || word(row, 77)[0] % 3 == 0 {
                true => format!("\"{}\"", c.replace('"', "\"\"")),
                false => c.clone(),
            });
            out += &(quoted.collect::<Vec<_>>().join(",") + end);
            wanted.push(cells);
        }
        let table = open(out.as_bytes());
        assert_eq!(table.len(), wanted.len() as u64, "{seed}");
        for (row, cells) in wanted.iter().enumerate() {
            let cells: Vec<Value> = cells.iter().map(|c| text(c)).collect();
            assert_eq!(values(&table, row as u64), cells, "file {seed}, row {row}");
            let line = 1 + out[..table.inner.files[0].index.range(row as u64).0 as usize].matches('\n').count() as u64;
            assert_eq!(table.origins(row as u64).unwrap()[0].line, Some(line));
        }
    }
}

/// Rows over the borders of the pieces that are scanned.
#[test]
fn long_tables_are_read_by_position() {
    let mut out = String::from("id,text\n");
    for k in 0..200_000 {
        out += &format!("{k},\"row {k}\nof {}\"\n", "é".repeat(k % 23));
    }
    assert!(out.len() > 5 << 20);
    let table = open(out.as_bytes());
    assert_eq!(table.len(), 200_000);
    for k in (0..200_000).step_by(1237) {
        assert_eq!(
            values(&table, k),
            [Value::Int(k as i64), text(&format!("row {k}\nof {}", "é".repeat(k as usize % 23)))]
        );
        assert_eq!(table.origins(k).unwrap()[0].line, Some(2 + 2 * k));
    }
}

#[test]
fn damaged_tables_are_read_or_refused() {
    let good = b"a,b,c\n1,\"x, y\",2.5\r\n2,\"q\"\"r\",\n\n3,\xC3\xA9,1e3\n".to_vec();
    let (mut read, mut refused) = (0, 0);
    for seed in 0..3_000u32 {
        let mut bytes = good.clone();
        for k in 0..=seed % 4 {
            let [at, what, byte, _] = philox4x32([seed, k, 0, 0], [6, 0]);
            let at = at as usize % bytes.len().max(1);
            match what % 4 {
                0 if at < bytes.len() => bytes[at] = byte as u8,
                1 => bytes.truncate(at),
                2 => bytes.insert(at.min(bytes.len()), b"\n\",\r;a0\0\xFF"[byte as usize % 9]),
                _ => bytes.extend_from_within(..at.min(bytes.len())),
            }
        }
        match open_as(&[&bytes], format()).1 {
            Ok(table) => (0..table.len()).for_each(|k| {
                table.get(k).unwrap();
                read += 1;
            }),
            Err(e) => {
                assert!(e.to_string().contains("0.csv"), "{e}");
                refused += 1;
            }
        }
    }
    assert!(read > 500 && refused > 500, "{read} read, {refused} refused");
}

#[test]
fn rows_read_together_are_those_read_alone() {
    let long = "x".repeat(700_000);
    let first = std::format!("a,b\n1,\"p\nq\"\n\n2,\n3,{long}\n4,{long}\r\n5,{long}\n6,\"\"\"\"\n");
    let (_dir, table) = open_as(&[first.as_bytes(), b"b,a\ny,7\nz,8", b"a,b\n"], format());
    let table = table.unwrap();
    let len = table.len();
    assert_eq!(len, 8);
    let all: Vec<u64> = (0..2 * len).collect();
    for order in [all.clone(), all.iter().rev().copied().collect(), vec![], vec![3, 3, 4, 6, 7, 8]] {
        let alone: Vec<Record> = order.iter().map(|k| table.get(*k).unwrap()).collect();
        assert_eq!(table.get_many(&order).unwrap(), alone);
    }
    assert_eq!(values(&table, 7), [Value::Int(8), text("z")]);
}

#[test]
fn malformed_rows_are_left_out_and_counted() {
    let bytes: &[u8] = b"id,text\n1\n1,a\n2,b,c\n3,\xFF\nx,d\n4,\"e\n,f\"\n\n5\n";
    let skipping = TableFormat { skip_malformed: true, ..format() };
    let types = vec![("id".to_string(), ColumnType::Integer)];
    let (_dir, table) = open_as(&[bytes, b"text,id\ng,6\n"], TableFormat { types, ..skipping.clone() });
    let table = table.unwrap();
    assert_eq!((table.len(), table.skipped()), (3, Some(5)));
    let row = |k| (values(&table, k), table.origins(k).unwrap()[0].line);
    assert_eq!(row(0), (vec![Value::Int(1), text("a")], Some(3)));
    assert_eq!(row(1), (vec![Value::Int(4), text("e\n,f")], Some(7)));
    assert_eq!(row(2), (vec![Value::Int(6), text("g")], Some(2)));
    let together = table.get_many(&[0, 1, 2, 3]).unwrap();
    assert_eq!(together, [0, 1, 2, 0].map(|k| table.get(k).unwrap()));
    // Rows that are left out do not decide the types of columns, and a table without any has another fingerprint.
    let (_dir, free) = open_as(&[b"a,b\n1,2\nx\n"], skipping.clone());
    let free = free.unwrap();
    assert_eq!((values(&free, 0)[0].clone(), free.skipped()), (Value::Int(1), Some(1)));
    let (whole, skipping) = (open_as(&[b"a\n1\n"], format()), open_as(&[b"a\n1\n"], skipping));
    let (whole, skipping) = (whole.1.unwrap(), skipping.1.unwrap());
    assert_eq!((whole.skipped(), skipping.skipped()), (None, Some(0)));
    assert_ne!(whole.fingerprint(), skipping.fingerprint());
    // Where rows end is not known any more.
    let (_dir, open) = open_as(&[b"a,b\n1,\"x\n"], TableFormat { skip_malformed: true, ..format() });
    assert!(open.err().unwrap().to_string().contains("never closed"));
}
