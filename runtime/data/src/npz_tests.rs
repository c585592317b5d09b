//! Tests round trips, archives of NumPy, and hostile archives.

use super::*;
use perilune_core::{DType, Shape};
use std::io::Write;

fn sample() -> Vec<(String, HostTensor)> {
    vec![
        ("x".into(), HostTensor::from_f64(DType::F32, Shape::of(&[2, 3]), &[0., 1., 2., 3., 4., 5.])),
        ("a long name/with ü".into(), HostTensor::from_i64(Shape::SCALAR, &[7])),
        ("empty".into(), HostTensor::from_f64(DType::U8, Shape::of(&[0]), &[])),
    ]
}

fn archive(dir: &tempfile::TempDir, members: &[(&str, &[u8])]) -> std::path::PathBuf {
    let path = dir.path().join("t.npz");
    let mut zip = ZipWriter::new(std::fs::File::create(&path).expect("create"));
    for (name, bytes) in members {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file(*name, options).expect("start");
        zip.write_all(bytes).expect("write");
    }
    zip.finish().expect("finish");
    path
}

#[test]
fn round_trip_stored_and_deflated() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.npz");
    for compress in [false, true] {
        save(&path, &sample(), compress)?;
        let first = std::fs::read(&path).expect("read");
        assert_eq!(load(&path)?, sample());
        save(&path, &sample(), compress)?;
        assert_eq!(std::fs::read(&path).expect("read"), first);
    }
    let twice = [sample()[0].clone(), sample()[0].clone()];
    assert!(save(&path, &twice, false).is_err());
    Ok(())
}

#[test]
fn golden_archives_of_numpy() -> Result<()> {
    for name in ["stored.npz", "deflated.npz"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/data").join(name);
        let got = load(&path)?;
        let names: Vec<&str> = got.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["x", "y", "zeros"], "{name}");
        assert_eq!(got[0].1, sample()[0].1);
        assert_eq!((got[1].1.dtype, got[1].1.to_i64()), (DType::I64, vec![3, 1, 2]));
        assert_eq!(got[2].1.shape.dims(), &[64, 64]);
    }
    Ok(())
}

#[test]
fn hostile_archives_are_refused() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut good = Vec::new();
    npy::write(&mut good, &sample()[0].1, &At { path: Path::new(""), member: "" })?;
    let mut huge = good.clone();
    let at = huge.windows(6).position(|w| w == b"(2, 3)").expect("shape");
    huge.splice(at..at + 6 + 14, b"(1099511627776, 1), ".iter().copied());
    for (members, needle) in [
        (vec![("x.txt", &good[..])], "NAME.npy"),
        (vec![("x.npy", b"not an array")], "NUMPY"),
        (vec![("x.npy", &good[..good.len() - 1])], "takes 24 bytes, but 23"),
        (vec![("x.npy", &[&good[..], b"!"].concat())], "but 25"),
        (vec![("x.npy", &huge)], "member 'x'"),
        (vec![(".npy", &good)], "array name"),
        (vec![("a\n.npy", &good)], "control"),
    ] {
        let path = archive(&dir, &members);
        let message = load(&path).map_err(|e| e.to_string()).expect_err(needle);
        assert!(message.contains(needle) && message.contains("t.npz"), "{message} should say {needle}");
    }

    // A member whose central record claims 4 GB: refused before anything is unpacked.
    let path = archive(&dir, &[("x.npy", &good)]);
    let mut bytes = std::fs::read(&path).expect("read");
    let central = bytes.windows(4).rposition(|w| w == b"PK\x01\x02").expect("central directory");
    bytes[central + 24..central + 28].copy_from_slice(&0xffff_fff0u32.to_le_bytes());
    std::fs::write(&path, &bytes).expect("write");
    let message = load(&path).map_err(|e| e.to_string()).expect_err("huge");
    assert!(message.contains("4294967280"), "{message}");

    // A flipped bit in the packed data, and every truncation.
    let path = dir.path().join("a.npz");
    save(&path, &sample(), false)?;
    let bytes = std::fs::read(&path).expect("read");
    let mut flipped = bytes.clone();
    let at = flipped.windows(4).position(|w| w == 5f32.to_le_bytes()).expect("value");
    flipped[at] ^= 1;
    std::fs::write(&path, &flipped).expect("write");
    assert!(load(&path).map_err(|e| e.to_string()).is_err_and(|m| m.contains("damaged")));
    for n in 0..bytes.len() {
        std::fs::write(&path, &bytes[..n]).expect("write");
        assert!(load(&path).is_err(), "{n} of {} bytes", bytes.len());
    }
    Ok(())
}
