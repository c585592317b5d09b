//! Tests valid and invalid tables, and those of `recipes/data`.

use super::*;
use std::io::Write;

fn table(text: &[u8], options: &Options) -> Result<Rows> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("t.csv");
    std::fs::write(&path, text).expect("write");
    Rows::read(crate::file::named::open(&path)?, options)
}

fn plain(text: &str) -> Rows {
    table(text.as_bytes(), &Options::default()).expect(text)
}

fn error(result: Result<impl std::fmt::Debug>) -> String {
    result.expect_err("an error").to_string()
}

#[test]
fn header_delimiter_and_numbers_are_found() -> Result<()> {
    for text in [
        "a,b\n1,2.5\n3,4\n",
        "a;b\r\n1;2.5\r\n3;4",
        "a\tb\n\n1\t2.5\n\n3\t4\n\n",
        "\u{feff}\"a\" , b\n 1 , \"2.5\" \n3,4",
    ] {
        let rows = plain(text);
        assert_eq!((rows.len(), rows.num_columns()), (2, 2), "{text:?}");
        assert_eq!(rows.names(), Some(&["a".to_string(), "b".to_string()][..]));
        let b = rows.numbers(&Columns::Name("b".into()), DType::F32, 2.0, None)?;
        assert_eq!((b.shape.dims(), b.to_f64()), (&[2usize][..], vec![5.0, 8.0]));
        let both = rows.numbers(&Columns::Range(0, 2), DType::F64, 1.0, None)?;
        assert_eq!((both.shape.dims(), both.to_f64()), (&[2usize, 2][..], vec![1.0, 2.5, 3.0, 4.0]));
        let one = rows.numbers(&Columns::Range(1, 2), DType::F64, 1.0, None)?;
        assert_eq!(one.shape.dims(), &[2, 1]);
    }
    assert_eq!(plain("1,2\n3,4\n").names(), None);
    assert_eq!(plain("a,b\nc,d\n").names(), None);
    assert_eq!(plain("a\n1\n2").numbers(&Columns::Index(0), DType::I64, 1.0, None)?.to_i64(), [1, 2]);
    let yes = Options { header: Header::Yes, ..Options::default() };
    assert_eq!(
        table(b"2019,2020\n1,2\n", &yes)?.numbers(&Columns::Name("2020".into()), DType::U8, 1.0, None)?.bytes,
        [2]
    );
    Ok(())
}

#[test]
fn lines_are_those_of_an_editor() {
    let options = Options { comment: Some('#'), ..Options::default() };
    let text = "# made by hand\n\na,b\n# more\n\n1,\"x\ny\"\n\n3,\"he said \"\"no\"\"\"\n5,z\n";
    let rows = table(text.as_bytes(), &options).expect("table");
    assert_eq!((0..3).map(|r| rows.line(r)).collect::<Vec<_>>(), [6, 9, 10]);
    assert_eq!((rows.cell(0, 1), rows.cell(1, 1)), ("x\ny", "he said \"no\""));
    let message = error(rows.numbers(&Columns::Name("b".into()), DType::F32, 1.0, None));
    assert!(message.contains("t.csv:6: column 1 ('b'): 'x\\ny' is not a number"), "{message}");
}

#[test]
fn numbers_must_fit_their_dtype() -> Result<()> {
    let rows = plain("9007199254740993\n-1\n");
    assert_eq!(rows.numbers(&Columns::Index(0), DType::I64, 1.0, None)?.to_i64(), [9_007_199_254_740_993, -1]);
    for (text, dtype, needle) in [
        ("1.5\n", DType::I64, "not a whole number"),
        ("inf\n", DType::I32, "not a whole number"),
        ("256\n", DType::U8, "range of u8, 0 to 255"),
        ("-1\n", DType::U8, "range of u8"),
        ("2\n", DType::Bool, "range of bool"),
        ("1e6\n", DType::F16, "range of f16"),
        ("1e39\n", DType::F32, "range of f32"),
        ("9223372036854775808\n", DType::I64, "range of i64"),
        ("1,5;2\n", DType::F32, "decimal point"),
        ("1\nx\n", DType::F32, "t.csv:2: column 0: 'x' is not a number"),
        ("0x10\n", DType::F32, "not a number"),
    ] {
        let message = error(plain(text).numbers(&Columns::Index(0), dtype, 1.0, None));
        assert!(message.contains(needle), "{message} should say {needle}");
    }
    assert_eq!(plain("True\nfalse\n1\n").numbers(&Columns::Index(0), DType::Bool, 1.0, None)?.bytes, [1, 0, 1]);
    assert_eq!(plain("3.0\n4e0\n").numbers(&Columns::Index(0), DType::I32, 1.0, None)?.to_i64(), [3, 4]);
    Ok(())
}

#[test]
fn missing_cells_are_named_or_filled() -> Result<()> {
    let text = "a,b\n1,2\n,?\nNA,nan\n";
    let message = error(plain(text).numbers(&Columns::Name("a".into()), DType::F32, 1.0, None));
    assert!(message.contains(":3: column 0 ('a'): the cell is empty") && message.contains("missing ="), "{message}");
    let message = error(plain(text).numbers(&Columns::Index(1), DType::F32, 1.0, None));
    assert!(message.contains(":3: column 1 ('b'): '?' means missing"), "{message}");
    let filled = table(text.as_bytes(), &Options { missing: Some(-1.0), ..Options::default() })?;
    let all = Columns::Names(vec!["b".into(), "a".into()]);
    assert_eq!(filled.numbers(&all, DType::F32, 2.0, None)?.to_f64(), [4., 2., -2., -2., -2., -2.]);
    assert_eq!(filled.numbers(&Columns::Index(0), DType::I64, 1.0, Some(9.0))?.to_i64(), [1, 9, 9]);
    assert!(filled.numbers(&Columns::Index(0), DType::I64, 1.0, Some(0.5)).is_err());
    assert!(filled.is_numeric(0) && !plain("x,1\ny,2\n").is_numeric(0));
    Ok(())
}

#[test]
fn words_become_codes() -> Result<()> {
    let rows = plain("kind,n\ncat,1\nant,2\nbee,3\ncat,4\n");
    let kind = Columns::Name("kind".into());
    let (codes, words) = rows.codes(&kind, DType::I64, None)?;
    assert_eq!((codes.to_i64(), words.join(" ")), (vec![2, 0, 1, 2], "ant bee cat".into()));
    let given = ["cat".to_string(), "ant".into(), "bee".into(), "dog".into()];
    assert_eq!(rows.codes(&kind, DType::U8, Some(&given))?.0.to_i64(), [0, 1, 2, 0]);
    let message = error(rows.codes(&kind, DType::I64, Some(&given[1..])));
    assert!(message.contains(":2: column 0 ('kind'): 'cat' is not among the 3"), "{message}");
    assert!(error(rows.codes(&kind, DType::F32, None)).contains("not f32"));
    assert!(error(plain("a,1\n,2\n").codes(&Columns::Index(0), DType::I64, None)).contains(":2:"));
    Ok(())
}

#[test]
fn columns_that_are_not_there() {
    let rows = plain("mpg,weight,mpg\n1,2,3\n");
    for (columns, needle) in [
        (Columns::Index(3), "0 to 2"),
        (Columns::Range(0, 4), "half-open"),
        (Columns::Range(2, 2), "must ascend"),
        (Columns::Range(usize::MAX, 0), "must ascend"),
        (Columns::Name("wieght".into()), "did you mean 'weight'"),
        (Columns::Name("mpg".into()), "both column 0 and column 2"),
    ] {
        let message = error(rows.numbers(&columns, DType::F32, 1.0, None));
        assert!(message.contains(needle), "{message} should say {needle}");
    }
    assert!(error(plain("1,2\n").numbers(&Columns::Name("a".into()), DType::F32, 1.0, None)).contains("header = true"));
}

#[test]
fn broken_tables_are_refused() {
    for (text, needle) in [
        (&b""[..], "no rows"),
        (b"\n\n \n", "no rows"),
        (b"1,2\n3\n", ":2: this row has 1 cells, and the one on line 1 has 2"),
        (b"1,2\n3,4,5\n", ":2: this row has 3"),
        (b"a\n\n\"1\n2\n3", ":3: a quote is opened and never closed"),
        (b"\"a\"b,2\n", ":1: column 0: 'b' follows a closing quote"),
        (b"a,b\n1,\xff\n", ":2: byte 2 (0xff) is not UTF-8"),
        (b"\x1f\x8b\x08 not gzip", "damaged"),
        (b"\0\0\0", "not a number"),
    ] {
        let got = table(text, &Options::default()).and_then(|r| r.numbers(&Columns::Index(0), DType::F32, 1.0, None));
        let message = error(got);
        assert!(message.contains(needle) && message.contains("t.csv"), "{message} should say {needle}");
    }
    let yes = Options { header: Header::Yes, ..Options::default() };
    assert!(error(table(b"a,b\n", &yes)).contains("a header and no rows"));
    let bad = Options { delimiter: Some('"'), ..Options::default() };
    assert!(error(table(b"a\n", &bad)).contains("delimiter"));
}

fn pack(pieces: usize, piece: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    (0..pieces).for_each(|_| packer.write_all(piece).expect("pack"));
    packer.finish().expect("pack")
}

#[test]
fn a_gzip_bomb_stops_at_the_limit() {
    let bomb = pack(64, &[b'1'; 1 << 20]);
    assert!(bomb.len() < 100_000);
    let options = Options { max_bytes: Some(1 << 20), ..Options::default() };
    let message = error(table(&bomb, &options));
    assert!(message.contains("more than 1048576 bytes") && message.contains("max_bytes"), "{message}");
    assert!(error(table(&bomb[..bomb.len() / 2], &Options::default())).contains("shorter"));
    let plain = Options { max_bytes: Some(1000), ..options };
    assert!(error(table(&[b'1'; 2000], &plain)).contains("more than 1000 bytes"));
}

/// Cells of one character take 5 bytes in memory and 2 as text: the limit counts the table, not only the text.
#[test]
fn the_memory_of_a_gzipped_table_is_limited() -> Result<()> {
    let bomb = pack(7, &b"1\n".repeat(1 << 20));
    assert!(bomb.len() < 100_000);
    let message = error(table(&bomb, &Options::default()));
    assert!(message.contains("t.csv: the table") && message.contains("100 times the packed file"), "{message}");
    assert!(message.contains("the limit is 33554432") && message.contains("option max_bytes"), "{message}");
    let ample = Options { max_bytes: Some(128 << 20), ..Options::default() };
    let rows = table(&bomb, &ample)?;
    assert_eq!((rows.len(), rows.line(0), rows.line(rows.len() - 1)), (7 << 20, 1, 7 << 20));
    // 1 byte of text and 4 of its end for each cell; the numbers of the lines take nothing.
    assert!(rows.nbytes() < 5 * (7 << 20) + 64 && rows.ends.capacity() == rows.ends.len());
    Ok(())
}

#[test]
fn many_lines_in_one_quote_take_linear_time() {
    let mut text = String::from("\"");
    text.push_str(&"a\n".repeat(500_000));
    text.push_str("\",1\n");
    let start = std::time::Instant::now();
    assert_eq!(plain(&text).cell(0, 0).len(), 1_000_000);
    assert!(start.elapsed().as_secs() < 5);
}

#[test]
fn the_data_of_the_recipes() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/data");
    let rows = Rows::read(crate::file::named::open(&folder.join("digits.csv.gz"))?, &Options::default())?;
    assert_eq!((rows.len(), rows.num_columns(), rows.names()), (1797, 65, None));
    let x = rows.numbers(&Columns::Range(0, 64), DType::F32, 1.0 / 16.0, None)?;
    let y = rows.numbers(&Columns::Index(64), DType::I64, 1.0, None)?;
    assert_eq!((x.shape.dims(), y.shape.dims()), (&[1797usize, 64][..], &[1797usize][..]));
    // sklearn.datasets.load_digits(): data.sum() is 561718 and target.sum() is 8070.
    assert_eq!(x.to_f64().iter().sum::<f64>() * 16.0, 561_718.0);
    assert_eq!(y.to_i64().iter().sum::<i64>(), 8070);

    let rows = Rows::read(crate::file::named::open(&folder.join("auto_mpg.csv"))?, &Options::default())?;
    assert_eq!((rows.len(), rows.num_columns()), (392, 9));
    let x = rows.numbers(&Columns::Range(0, 6), DType::F32, 1.0, None)?;
    assert_eq!(x.shape.dims(), &[392, 6]);
    assert_eq!(rows.numbers(&Columns::Name("mpg".into()), DType::F32, 1.0, None)?.get_f64(0), 18.0);
    let (_, origins) = rows.codes(&Columns::Name("origin".into()), DType::I64, None)?;
    assert_eq!(origins, ["europe", "japan", "usa"]);
    Ok(())
}
