//! Tests every kind of PNG, round trips, and hostile files.

use super::*;

fn load(path: &Path) -> Result<HostTensor> {
    super::load(crate::file::named::open(path)?)
}

fn save(path: &Path, image: &HostTensor) -> Result<()> {
    super::save(crate::file::named::create(path)?, image)
}

fn golden(name: &str) -> HostTensor {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/data").join(name)).expect(name)
}

/// Makes a PNG with a chosen header and image data, and correct checksums.
fn png_with(width: u32, height: u32, depth: u8, color: u8, data: &[u8]) -> Vec<u8> {
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], body: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(kind);
        crc.update(body);
        out.extend((body.len() as u32).to_be_bytes());
        out.extend(kind);
        out.extend(body);
        out.extend(crc.sum().to_be_bytes());
    };
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[depth, color, 0, 0, 0]].concat();
    chunk(b"IHDR", &header);
    chunk(b"IDAT", data);
    chunk(b"IEND", b"");
    out
}

#[test]
fn golden_images() {
    for (name, dims, pixels) in [
        ("grey8.png", [2, 3, 1], &[0, 1, 2, 253, 254, 255][..]),
        ("grey16.png", [1, 2, 1], &[0x12, 0xff]),
        ("grey1.png", [1, 3, 1], &[255, 0, 255]),
        ("grey_alpha8.png", [1, 2, 2], &[10, 20, 30, 40]),
        ("rgb8.png", [1, 2, 3], &[1, 2, 3, 4, 5, 6]),
        ("rgb16.png", [1, 1, 3], &[1, 3, 5]),
        ("rgba8.png", [2, 1, 4], &[1, 2, 3, 4, 5, 6, 7, 8]),
        ("palette2.png", [1, 3, 3], &[9, 8, 7, 1, 2, 3, 255, 0, 0]),
        ("palette_alpha8.png", [1, 2, 4], &[1, 2, 3, 7, 255, 0, 0, 255]),
    ] {
        let t = golden(name);
        assert_eq!((t.dtype, t.shape.dims(), &t.bytes[..]), (DType::U8, &dims[..], pixels), "{name}");
    }
}

#[test]
fn round_trip_and_clamping() -> Result<()> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.png");
    for c in 1..=4 {
        let bytes: Vec<u8> = (0..5 * 7 * c).map(|i| (i * 37 % 256) as u8).collect();
        let t = HostTensor::new(DType::U8, Shape::of(&[5, 7, c]), bytes);
        save(&path, &t)?;
        assert_eq!(load(&path)?, t);
    }
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        save(&path, &HostTensor::from_f64(dtype, Shape::of(&[1, 4]), &[-1.0, 0.5, 1.0, f64::INFINITY]))?;
        assert_eq!(load(&path)?.bytes, [0, 128, 255, 255], "{dtype}");
    }
    save(&path, &HostTensor::new(DType::Bool, Shape::of(&[1, 2]), vec![0, 1]))?;
    assert_eq!(load(&path)?.bytes, [0, 255]);
    Ok(())
}

#[test]
fn tensors_that_are_not_images_are_rejected() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a.png");
    let zeros = |dtype, dims: &[usize]| HostTensor::from_f64(dtype, Shape::of(dims), &vec![0.0; dims.iter().product()]);
    for (t, needle) in [
        (zeros(DType::F32, &[3, 8, 8]), "permute"),
        (zeros(DType::F32, &[8]), "{8}"),
        (zeros(DType::F32, &[0, 8]), "from 1"),
        (zeros(DType::U8, &[1, 40_000]), "32768"),
        (zeros(DType::I64, &[8, 8]), "i64"),
        (HostTensor::from_f64(DType::F32, Shape::of(&[1, 2, 1]), &[0.0, f64::NAN]), "row 0, column 1"),
    ] {
        let message = save(&path, &t).map_err(|e| e.to_string()).expect_err(needle);
        assert!(message.contains(needle) && message.contains("a.png"), "{message} should say {needle}");
    }
    assert!(!path.exists());
}

#[test]
fn hostile_images_are_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("t.png");
    for (bytes, needle) in [
        (Vec::new(), "t.png"),
        (b"GIF89a".to_vec(), "t.png"),
        (png_with(1 << 30, 1 << 30, 8, 6, b""), "width is 1073741824"),
        (png_with(1, 40_000, 8, 0, b""), "height is 40000"),
        (png_with(32_768, 32_768, 16, 6, b"xx"), "hold at most"),
        (png_with(0, 1, 8, 0, b""), "t.png"),
        (png_with(1, 1, 3, 0, b""), "t.png"),
        (png_with(1, 1, 8, 3, b""), "t.png"),
        (png_with(2, 2, 8, 0, b"not deflate"), "t.png"),
    ] {
        std::fs::write(&path, &bytes).expect("write");
        let message = load(&path).map_err(|e| e.to_string()).expect_err(needle);
        assert!(message.contains(needle), "{message} should say {needle}");
    }
    let t = HostTensor::new(DType::U8, Shape::of(&[9, 9]), (0..81).collect());
    save(&path, &t).expect("save");
    let bytes = std::fs::read(&path).expect("read");
    for n in 0..bytes.len() {
        std::fs::write(&path, &bytes[..n]).expect("write");
        assert!(load(&path).is_err(), "{n} of {} bytes", bytes.len());
    }
    for i in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[i] ^= 0x10;
        std::fs::write(&path, &bad).expect("write");
        let _ = load(&path);
    }
}
