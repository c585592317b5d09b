//! Tests round trips, files of the reference implementation, and hostile headers.

use super::*;

fn load(path: &Path) -> Result<Contents> {
    super::load(crate::file::named::open(path)?)
}

fn save(path: &Path, tensors: &[(String, HostTensor)], metadata: &BTreeMap<String, String>) -> Result<()> {
    super::save(crate::file::named::create(path)?, tensors, metadata)
}

fn header(path: &Path) -> Result<Header> {
    super::header(crate::file::named::open(path)?)
}

fn write(dir: &tempfile::TempDir, header: &str, data: &[u8]) -> std::path::PathBuf {
    let path = dir.path().join("t.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(&path, bytes).expect("write");
    path
}

fn sample() -> Vec<(String, HostTensor)> {
    DType::ALL
        .iter()
        .rev()
        .map(|&d| (format!("x.{d}"), HostTensor::from_f64(d, Shape::of(&[3]), &[0.0, 1.0, 1.0])))
        .chain([("empty".into(), HostTensor::from_f64(DType::F16, Shape::of(&[0, 4]), &[]))])
        .chain([("scalar".into(), HostTensor::from_f64(DType::F64, Shape::SCALAR, &[2.5]))])
        .collect()
}

#[test]
fn round_trip_keeps_order_bits_and_metadata() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.safetensors");
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string()), ("z\"\n".into(), "ü".into())]);
    save(&path, &sample(), &metadata)?;
    assert_eq!(load(&path)?, Contents { tensors: sample(), metadata });
    // The crate accepts the file, and every tensor is aligned.
    let bytes = std::fs::read(&path).expect("read");
    let theirs = safetensors::SafeTensors::deserialize(&bytes).expect("theirs");
    for (name, t) in sample() {
        assert_eq!(theirs.tensor(&name).expect("tensor").data(), &t.bytes[..]);
    }
    for e in header(&path)?.entries {
        assert_eq!(e.span.0 % e.dtype.size() as u64, 0, "{}", e.name);
    }
    save(&path, &sample(), &BTreeMap::new())?;
    let first = std::fs::read(&path).expect("read");
    save(&path, &sample(), &BTreeMap::new())?;
    assert_eq!(first, std::fs::read(&path).expect("read"));
    Ok(())
}

#[test]
fn a_file_with_no_tensors() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.safetensors");
    save(&path, &[], &BTreeMap::new())?;
    assert_eq!(load(&path)?, Contents::default());
    Ok(())
}

#[test]
fn golden_file_of_the_python_library() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/data/mixed.safetensors");
    let got = load(&path)?;
    assert_eq!(got.metadata.get("made_by").map(String::as_str), Some("make.py"));
    let find = |name: &str| got.tensors.iter().find(|(n, _)| n == name).map(|(_, t)| t.clone());
    for d in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8] {
        let t = find(&format!("m.{d}")).expect("tensor");
        assert_eq!((t.dtype, t.shape.dims(), t.to_f64()), (d, &[2usize, 3][..], vec![0., 1., 2., 3., 4., 5.]));
    }
    assert_eq!(find("m.bool").expect("tensor").bytes, [0, 1, 1]);
    assert_eq!(find("m.empty").expect("tensor").shape.dims(), &[0, 4]);
    assert!(find("m.scalar").expect("tensor").shape.is_scalar());
    Ok(())
}

#[test]
fn hostile_headers_are_refused_with_a_reason() {
    let dir = tempfile::tempdir().expect("tempdir");
    let f32x2 = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let cases: Vec<(String, usize, &str)> = vec![
        (format!(r#"{{"a":{f32x2},"a":{f32x2}}}"#), 8, "'a' appears twice"),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#.into(), 0, "'k' appears twice"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "appears twice"),
        (r#"{"__metadata__":{"k":1}}"#.into(), 0, "string"),
        (format!(r#"{{"../a":{f32x2}}}"#), 8, "'..'"),
        (format!(r#"{{"a b":{f32x2}}}"#), 8, "character ' '"),
        (format!(r#"{{"":{f32x2}}}"#), 8, "1 to 512"),
        (format!(r#"{{"{}":{f32x2}}}"#, "n".repeat(600)), 8, "600"),
        (format!(r#" {{"a":{f32x2}}}"#), 8, "starts with '{'"),
        (format!(r#"{{"a":{f32x2}}}x"#), 8, "trailing"),
        (one("F8_E4M3", "[2]", "[0,2]"), 2, "dtype 'F8_E4M3'"),
        (one("U16", "[2]", "[0,4]"), 4, "tensor 'a'"),
        (one("F32", "[1152921504606846976]", "[0,8]"), 8, "2^48"),
        (one("F32", "[4294967296,4294967296]", "[0,8]"), 8, "2^48"),
        (one("F32", "[18446744073709551615,2]", "[0,8]"), 8, "2^48"),
        (one("F32", "[-1]", "[0,8]"), 8, "-1"),
        (one("F32", "[2.0]", "[0,8]"), 8, "2.0"),
        (one("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, "9 dims"),
        (one("F32", &format!("[{}1]", "1,".repeat(100)), "[0,4]"), 4, "more than 64"),
        (one("F32", "[2]", "[0,12]"), 12, "takes 8 bytes"),
        (one("F32", "[2]", "[8,0]"), 8, "must ascend"),
        (one("F32", "[2]", "[0,8]"), 4, "within the 4 bytes"),
        (one("F32", "[2]", "[4,12]"), 12, "hole"),
        (one("F32", "[2]", "[0,8]"), 9, "1 bytes follow"),
        (one("F32", "[2]", "[0,8,8]"), 8, "header"),
        (one("F32", r#"[2],"extra":1"#, "[0,8]"), 8, "unknown field"),
        (one("F32", r#"[2],"shape":[2]"#, "[0,8]"), 8, "duplicate field"),
        (format!(r#"{{"a":{f32x2},"b":{f32x2}}}"#), 8, "overlaps"),
        (r#"{"a":{"dtype":"F32","shape":[2]}}"#.into(), 8, "data_offsets"),
        ("{".repeat(100_000), 0, "header"),
        (format!(r#"{{"a":{}"#, "[".repeat(100_000)), 0, "header"),
        ("[]".into(), 0, "starts with '{'"),
        (String::new(), 0, "starts with '{'"),
        (one("BOOL", "[2]", "[0,2]"), 0, "within the 0 bytes"),
    ];
    for (header, data, needle) in cases {
        let path = write(&dir, &header, &vec![0; data]);
        let message = load(&path).map_err(|e| e.to_string()).expect_err(&header.chars().take(99).collect::<String>());
        assert!(message.contains(needle) && message.contains("t.safetensors"), "{message} should say {needle}");
        assert!(message.len() < 500, "{message}");
    }
}

#[test]
fn hostile_lengths_and_bytes_are_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("t.safetensors");
    for bytes in [&b""[..], b"1234567", &u64::MAX.to_le_bytes(), &(1u64 << 60).to_le_bytes(), &[3, 0, 0, 0, 0, 0, 0, 0]]
    {
        std::fs::write(&path, bytes).expect("write");
        assert!(matches!(load(&path), Err(Error::Malformed { .. })));
    }
    let path = write(&dir, r#"{"a":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}"#, &[0, 1, 7]);
    assert!(load(&path).map_err(|e| e.to_string()).is_err_and(|m| m.contains("byte 7") && m.contains("element 2")));
    let mut many = String::from("{");
    for i in 0..=MAX_TENSORS {
        many.push_str(&format!(
            r#"{}"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
            if i > 0 { "," } else { "" }
        ));
    }
    let path = write(&dir, &(many + "}"), &[]);
    assert!(load(&path).map_err(|e| e.to_string()).is_err_and(|m| m.contains("more than 100000")));
}

#[test]
fn truncation_anywhere_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.safetensors");
    save(&path, &sample(), &BTreeMap::new())?;
    let bytes = std::fs::read(&path).expect("read");
    for n in 0..bytes.len() {
        std::fs::write(&path, &bytes[..n]).expect("write");
        assert!(load(&path).is_err(), "{n} of {} bytes", bytes.len());
    }
    Ok(())
}

#[test]
fn save_refuses_what_load_would() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.safetensors");
    let t = HostTensor::from_f32(Shape::of(&[1]), &[1.0]);
    for names in [vec!["a", "a"], vec!["a b"], vec!["__metadata__"]] {
        let tensors: Vec<_> = names.iter().map(|n| (n.to_string(), t.clone())).collect();
        assert!(save(&path, &tensors, &BTreeMap::new()).is_err(), "{names:?}");
    }
    assert!(!path.exists());
}
