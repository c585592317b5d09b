//! Compares WebP images with Pillow's (tests/golden/images/make.py), and damages them.

use super::*;
use crate::images::read::decode as decode_any;
use crate::npz;
use std::path::PathBuf;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/images")
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(golden().join("webp").join(name)).expect(name)
}

fn error(bytes: &[u8]) -> String {
    decode_any(Path::new("t.webp"), bytes, &mut Vec::new()).map_err(|e| e.to_string()).expect_err("refused")
}

#[test]
fn webp_files_decode_as_in_pillow() {
    let all = npz::load(crate::file::named::open(&golden().join("webp.npz")).expect("open")).expect("references");
    assert_eq!(all.len(), 10);
    for (name, want) in all {
        let mut rgb = Vec::new();
        let (width, height) = decode_any(Path::new(&name), &file(&name), &mut rgb).expect(&name);
        assert_eq!(want.shape.dims(), &[height, width, 3], "{name}");
        let far = want.bytes.iter().zip(&rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
        assert!(rgb.len() == want.bytes.len() && far == 0, "{name} is {far} levels off");
    }
}

#[test]
fn animations_are_refused_with_the_cure() {
    let text = error(&file("animated.webp"));
    assert!(text.contains("an animation") && text.contains("hint: extract a frame"), "{text}");
}

#[test]
fn sides_are_checked_before_pixels_are_made() {
    let lossy = file("lossy.webp");
    let at = lossy.windows(3).position(|w| w == [0x9d, 1, 0x2a]).expect("a frame") + 3;
    let sides = |width: u16, height: u16| {
        let mut bytes = lossy.clone();
        bytes[at..at + 2].copy_from_slice(&width.to_le_bytes());
        bytes[at + 2..at + 4].copy_from_slice(&height.to_le_bytes());
        error(&bytes)
    };
    assert!(sides(16_383, 16_383).contains("the limit is 134217728"));
    assert!(sides(4000, 4000).contains("pixels take 7812 bytes or more, and the image has"));
    assert!(sides(0, 40).contains("a side of its image is 0"));
    let mut canvas = file("exif.webp");
    canvas[24] = 0;
    assert!(error(&canvas).contains("its canvas is 1 x 40, and its image 52 x 40"));
    let mut lossless = file("lossless.webp");
    lossless[21..25].copy_from_slice(&0x0fff_ffffu32.to_le_bytes());
    assert!(error(&lossless).contains("the limit is 134217728"));
    // 4,097 by 2,048 pixels: the low 14 bits are the width less 1, the next 14 the height less 1.
    lossless[21..25].copy_from_slice(&(4096u32 | 2047 << 14).to_le_bytes());
    let text = error(&lossless);
    assert!(text.contains("4097 x 2048 pixels in 1351 bytes, which may hold 8388608 at most"), "{text}");
}

/// A changed byte or a truncated end gives an error or an image, but no panic, no endless loop and no size other than the file's.
#[test]
fn damaged_webp_files_are_errors_not_panics() {
    let (path, mut rgb) = (Path::new("t.webp"), Vec::new());
    for name in ["lossy_alpha.webp", "lossless_alpha.webp", "exif.webp", "colours.webp", "animated.webp"] {
        let whole = file(name);
        let mut failures = 0;
        for i in 0..whole.len() {
            assert!(decode_any(path, &whole[..i], &mut rgb).is_err(), "{name}: {i} of {} bytes", whole.len());
            for flip in [1 << (i % 8), 0xff] {
                let mut bad = whole.clone();
                bad[i] ^= flip;
                match decode_any(path, &bad, &mut rgb) {
                    Ok((w, h)) => assert_eq!(rgb.len(), 3 * w * h),
                    Err(e) if e.to_string().contains("broke down") => panic!("{name}: byte {i} ^ {flip}: {e}"),
                    Err(_) => failures += 1,
                }
            }
        }
        assert!(failures > 0, "{name}");
    }
}
