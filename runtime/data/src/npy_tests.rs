//! Tests round trips, files of NumPy, and hostile headers.

use super::*;

fn load(path: &Path) -> Result<HostTensor> {
    super::load(crate::file::named::open(path)?)
}

fn save(path: &Path, tensor: &HostTensor) -> Result<()> {
    super::save(crate::file::named::create(path)?, tensor)
}

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/data").join(name)
}

fn file_with(dir: &tempfile::TempDir, version: u8, header: &str, data: &[u8]) -> std::path::PathBuf {
    let mut bytes = [MAGIC, &[version, 0]].concat();
    match version {
        1 => bytes.extend((header.len() as u16).to_le_bytes()),
        _ => bytes.extend((header.len() as u32).to_le_bytes()),
    }
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    let path = dir.path().join("t.npy");
    std::fs::write(&path, bytes).expect("write");
    path
}

#[test]
fn round_trip_of_every_dtype_and_rank() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.npy");
    for dtype in DType::ALL.into_iter().filter(|&d| d != DType::BF16) {
        for dims in [&[][..], &[0], &[3], &[2, 3], &[1, 0, 2], &[1, 2, 1, 2, 1, 2, 1, 2]] {
            let shape = Shape::of(dims);
            let values: Vec<f64> = (0..shape.numel()).map(|i| i as f64).collect();
            let t = HostTensor::from_f64(dtype, shape, &values);
            save(&path, &t)?;
            assert_eq!(load(&path)?, t);
            // The data starts on a multiple of 64, so that it can be mapped.
            assert_eq!((std::fs::metadata(&path).expect("meta").len() - t.bytes.len() as u64) % 64, 0);
        }
    }
    let bf16 = save(&path, &HostTensor::from_f64(DType::BF16, Shape::of(&[1]), &[1.0])).map_err(|e| e.to_string());
    assert!(bf16.is_err_and(|m| m.contains("bf16") && m.contains("hint")));
    Ok(())
}

#[test]
fn golden_files_of_numpy() -> Result<()> {
    // (file, dtype it becomes); each holds [[0, 1, 2], [3, 4, 5]] or, for signed ones, [[-2, -1, 0], [1, 2, 3]].
    let cases = [
        ("le_f8.npy", DType::F64, -2.0),
        ("le_f4.npy", DType::F32, -2.0),
        ("le_f2.npy", DType::F16, -2.0),
        ("le_i8.npy", DType::I64, -2.0),
        ("le_i4.npy", DType::I32, -2.0),
        ("le_i2.npy", DType::I32, -2.0),
        ("le_i1.npy", DType::I32, -2.0),
        ("le_u1.npy", DType::U8, 0.0),
        ("le_u2.npy", DType::I32, 0.0),
        ("le_u4.npy", DType::I64, 0.0),
        ("be_f8.npy", DType::F64, -2.0),
        ("be_f4.npy", DType::F32, -2.0),
        ("be_i2.npy", DType::I32, -2.0),
        ("be_u4.npy", DType::I64, 0.0),
        ("fortran_f4.npy", DType::F32, -2.0),
        ("fortran_be_i8.npy", DType::I64, -2.0),
        ("version2_f4.npy", DType::F32, -2.0),
        ("version3_f4.npy", DType::F32, -2.0),
    ];
    for (name, dtype, first) in cases {
        let t = load(&golden(name))?;
        let want: Vec<f64> = (0..6).map(|i| first + i as f64).collect();
        assert_eq!((t.dtype, t.shape.dims(), t.to_f64()), (dtype, &[2usize, 3][..], want), "{name}");
    }
    assert_eq!(load(&golden("bool.npy"))?, HostTensor::new(DType::Bool, Shape::of(&[2, 2]), vec![1, 0, 0, 1]));
    let wide = load(&golden("wide_u4.npy"))?;
    assert_eq!((wide.dtype, wide.to_i64()), (DType::I64, vec![0, u32::MAX as i64]));
    let f3 = load(&golden("fortran_3d_u2.npy"))?;
    assert_eq!((f3.shape.dims(), f3.to_i64()), (&[2usize, 3, 4][..], (65_500..65_524).collect::<Vec<i64>>()));
    assert!(load(&golden("scalar.npy"))?.shape.is_scalar());
    for (name, needle) in
        [("object.npy", "'|O'"), ("u8.npy", "'<u8'"), ("text.npy", "'<U2'"), ("record.npy", "records")]
    {
        let message = load(&golden(name)).map_err(|e| e.to_string()).expect_err(name);
        assert!(message.contains(needle) && message.contains(name), "{message}");
    }
    Ok(())
}

#[test]
fn python_spellings_of_the_header() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    for header in [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{\"shape\":(2L,),\"fortran_order\":True,\"descr\":\"=f4\",}\n",
        "  { 'descr' : 'f4' , 'fortran_order' : False , 'shape' : ( 2 ) } \n",
    ] {
        for version in [1, 2, 3] {
            let t = load(&file_with(&dir, version, header, &[0; 8]))?;
            assert_eq!((t.dtype, t.shape.dims()), (DType::F32, &[2usize][..]));
        }
    }
    Ok(())
}

#[test]
fn hostile_headers_are_refused_with_a_reason() {
    let dir = tempfile::tempdir().expect("tempdir");
    let head = |d: &str, f: &str, s: &str| format!("{{'descr': {d}, 'fortran_order': {f}, 'shape': {s}, }}\n");
    let cases = [
        (head("'<f4'", "False", "(1152921504606846976,)"), 8, "2^48"),
        (head("'<f4'", "False", "(4294967296, 4294967296)"), 8, "2^48"),
        (head("'<f4'", "False", "(99999999999999999999999,)"), 8, "a dim"),
        (head("'<f4'", "False", "(0, 1152921504606846976)"), 0, "2^48"),
        (head("'<f4'", "False", "(1099511627776,)"), 8, "takes 4398046511104 bytes"),
        (head("'<f4'", "False", "(-1,)"), 8, "a dim"),
        (head("'<f4'", "False", "(1,1,1,1,1,1,1,1,2)"), 8, "9 dims"),
        (head("'<f4'", "False", "(2,)"), 9, "9 follow"),
        (head("'<f4'", "False", "(2,)"), 7, "7 follow"),
        (head("'<f4'", "False", "[2]"), 8, "'('"),
        (head("'<f4'", "Maybe", "(2,)"), 8, "True or False"),
        (head("'<c8'", "False", "(1,)"), 8, "'<c8'"),
        (head("'é'", "False", "(1,)"), 8, "'é'"),
        (head("''", "False", "(1,)"), 8, "''"),
        (head("'<f4", "False", "(1,)"), 8, "header"),
        ("{'descr': '<f4', 'shape': (2,)}".into(), 8, "lacks the key 'fortran_order'"),
        ("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}".into(), 8, "twice"),
        ("{'evil': '<f4'}".into(), 8, "unknown key 'evil'"),
        ("{} __import__('os')".into(), 0, "goes on"),
        ("{".into(), 0, "a quoted word"),
        ("(".repeat(5000), 0, "'{'"),
        (String::new(), 0, "'{'"),
        ("\u{feff}{".into(), 0, "'{'"),
    ];
    for (header, data, needle) in cases {
        let message = load(&file_with(&dir, 1, &header, &vec![0; data])).map_err(|e| e.to_string()).expect_err(&header);
        assert!(message.contains(needle) && message.contains("t.npy"), "{message} should say {needle}");
    }
    let path = file_with(&dir, 2, "{}", &[]);
    let mut bytes = std::fs::read(&path).expect("read");
    bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    std::fs::write(&path, &bytes).expect("write");
    assert!(matches!(load(&path), Err(Error::TooLarge { .. })));
    bytes[6] = 9;
    std::fs::write(&path, &bytes).expect("write");
    assert!(matches!(load(&path), Err(Error::Unsupported { .. })));
    let bools = file_with(&dir, 1, &head("'|b1'", "False", "(2,)"), &[1, 2]);
    assert!(load(&bools).map_err(|e| e.to_string()).is_err_and(|m| m.contains("byte 2")));
}

#[test]
fn truncation_anywhere_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.npy");
    save(&path, &HostTensor::from_f32(Shape::of(&[4]), &[1., 2., 3., 4.]))?;
    let bytes = std::fs::read(&path).expect("read");
    for n in 0..bytes.len() {
        std::fs::write(&path, &bytes[..n]).expect("write");
        assert!(load(&path).is_err(), "{n} of {} bytes", bytes.len());
    }
    Ok(())
}
