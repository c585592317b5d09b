//! Tests IDX files: every type, gzip, truncated and hostile headers, and random mutations.

use super::*;
use std::io::Write;

fn file(code: u8, dims: &[u32], data: &[u8]) -> Vec<u8> {
    let mut out = vec![0, 0, code, dims.len() as u8];
    dims.iter().for_each(|d| out.extend(d.to_be_bytes()));
    out.extend(data);
    out
}

fn load_bytes(bytes: &[u8], max_bytes: Option<u64>) -> Result<HostTensor> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("t-idx-ubyte");
    std::fs::write(&path, bytes).expect("written");
    load(crate::file::named::open(&path)?, max_bytes)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    out.write_all(bytes).expect("packed");
    out.finish().expect("packed")
}

#[test]
fn every_type_is_read_plain_and_packed() {
    let i32s = |v: &[i32]| v.iter().flat_map(|x| x.to_be_bytes()).collect::<Vec<u8>>();
    let cases = [
        (0x08, vec![0, 7, 255], DType::U8, [0.0, 7.0, 255.0]),
        (0x09, vec![0x80, 0xff, 3], DType::I32, [-128.0, -1.0, 3.0]),
        (0x0b, vec![0x80, 0, 0xff, 0xfe, 1, 2], DType::I32, [-32768.0, -2.0, 258.0]),
        (0x0c, i32s(&[-5, i32::MAX, 6]), DType::I32, [-5.0, f64::from(i32::MAX), 6.0]),
        (0x0d, [1.5f32, -2.0, 0.25].iter().flat_map(|x| x.to_be_bytes()).collect(), DType::F32, [1.5, -2.0, 0.25]),
        (0x0e, [1.1f64, -2.2, 0.3].iter().flat_map(|x| x.to_be_bytes()).collect(), DType::F64, [1.1, -2.2, 0.3]),
    ];
    for (code, data, dtype, want) in cases {
        let plain = file(code, &[3, 1], &data);
        for bytes in [plain.clone(), gzip(&plain)] {
            let t = load_bytes(&bytes, None).expect("read");
            assert_eq!((t.dtype, t.shape), (dtype, Shape::of(&[3, 1])));
            assert_eq!(t.to_f64(), want);
        }
    }
    assert_eq!(load_bytes(&file(8, &[], &[9]), None).expect("a scalar").to_f64(), [9.0]);
    assert_eq!(load_bytes(&file(8, &[0, 28, 28], &[]), None).expect("no images").shape, Shape::of(&[0, 28, 28]));
}

#[test]
fn malformed_files_are_errors_with_a_rule() {
    let images = file(8, &[2, 2, 2], &[1; 8]);
    for (bytes, want) in [
        (vec![], "header: is cut off"),
        (images[..9].to_vec(), "header: is cut off"),
        (images[..18].to_vec(), "takes 8 bytes, but 2 follow the header"),
        ([images.clone(), vec![0]].concat(), "takes 8 bytes, but 9 follow"),
        (b"PK\x03\x04 a zip".to_vec(), "not with two zero bytes"),
        (file(0x0a, &[1], &[1]), "type code 0x0a"),
        (file(8, &[1; 9], &[1]), "the number of dims is 9, and the limit is 8"),
        (file(8, &[u32::MAX, u32::MAX], &[1]), "2^48"),
        (file(8, &[u32::MAX, 28, 28], &[1]), "takes 3367254359280 bytes, but 1 follow"),
        (gzip(&file(8, &[u32::MAX, 28, 28], &[1])), "ends after 1 of the 3367254359280 bytes"),
        (gzip(&file(8, &[1], &[1, 2])), "goes on after the 1 bytes"),
        (gzip(&images)[..20].to_vec(), "hint: "),
    ] {
        let e = load_bytes(&bytes, None).expect_err(want).to_string();
        assert!(e.contains(want) && e.contains("t-idx-ubyte"), "{want}: {e}");
    }
    let e = load_bytes(&images, Some(10)).expect_err("a limit").to_string();
    assert!(e.contains("max_bytes"), "{e}");
}

/// Every mutated file is read or refused with its name: nothing panics, and no header allocates what the file lacks.
#[test]
fn mutated_files_are_read_or_refused() {
    let plain = file(0x0b, &[3, 2, 2], &[1; 24]);
    let packed = gzip(&plain);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("t-idx");
    // xorshift64
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let mut refused = 0;
    for trial in 0..4000 {
        let mut bytes = if trial % 2 == 0 { plain.clone() } else { packed.clone() };
        for _ in 0..=draw(3) {
            match draw(4) {
                0 => bytes.truncate(draw(bytes.len() + 1)),
                1 => bytes.insert(draw(bytes.len() + 1), draw(256) as u8),
                _ if !bytes.is_empty() => {
                    let at = draw(bytes.len());
                    bytes[at] = [0, 0xff, draw(256) as u8][draw(3)];
                }
                _ => {}
            }
        }
        std::fs::write(&path, &bytes).expect("written");
        match crate::file::named::open(&path).and_then(|f| load(f, Some(1 << 20))) {
            Ok(t) => assert_eq!(t.bytes.len(), t.shape.numel() * t.dtype.size()),
            Err(e) => {
                refused += 1;
                assert!(e.to_string().contains("t-idx"), "{e}");
            }
        }
    }
    assert!(refused > 2000, "only {refused} of 4000 were refused");
}
