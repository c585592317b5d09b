//! Compares images with Pillow's (tests/golden/images/make.py), and tests order and errors.

use super::crop::Crop;
use super::files::ImageFiles;
use super::read::{Scratch, decode, read};
use super::resize::{Picture, Side, Span, resize};
use super::samples::Images;
use crate::error::{Error, Result};
use crate::file::named::open;
use crate::npz;
use crate::source::{HostBatch, Prefetcher, Samples};
use perilune_core::HostTensor;
use perilune_policy::Policy;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn open_folder(root: &Path, classes: Option<&[String]>) -> Result<ImageFiles> {
    // The class folders may be links to the golden ones.
    let above = root.parent().unwrap_or(root);
    let both = Policy::builder().allow_read(above)?.allow_read(&golden())?.build();
    ImageFiles::of_folder(both, root, classes)
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/images")
}

fn reference(name: &str) -> BTreeMap<String, HostTensor> {
    npz::load(open(&golden().join(name)).expect(name)).expect(name).into_iter().collect()
}

fn folder() -> Arc<ImageFiles> {
    Arc::new(open_folder(&golden().join("folder"), None).expect("folder"))
}

const RANDOM: Crop = Crop::Random { seed: 7, scale: (0.08, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) };

#[test]
fn files_decode_as_in_pillow() {
    let mut scratch = Scratch::default();
    let all = reference("decoded.npz");
    assert!(all.len() >= 19);
    for (name, want) in all {
        let (width, height) =
            read(open(&golden().join("folder").join(&name)).expect("open"), &mut scratch).expect(&name);
        assert_eq!(want.shape.dims(), &[height, width, 3], "{name}");
        let far = want.bytes.iter().zip(&scratch.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
        // JPEG decoders may differ in the cosine transform and colour conversion; PNG decoders may not.
        let jpeg = std::fs::read(golden().join("folder").join(&name)).expect("read")[0] == 0xff;
        assert!(far <= if jpeg { 4 } else { 0 }, "{name} is {far} levels off");
    }
}

/// Decoded JPEGs must not depend on the processor's vector instructions.
#[test]
fn vector_code_gives_the_bits_of_plain_code() {
    use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};
    let decoded = |bytes: &[u8], vectors: bool| {
        let options = DecoderOptions::default().set_use_unsafe(vectors).jpeg_set_out_colorspace(ColorSpace::RGB);
        zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(bytes), options).decode().expect("decode")
    };
    let f = folder();
    let mut jpegs = 0;
    for i in 0..f.len() {
        let bytes = std::fs::read(f.path(i)).expect("read");
        if bytes[0] == 0xff {
            assert!(decoded(&bytes, true) == decoded(&bytes, false), "{}", f.path(i).display());
            jpegs += 1;
        }
    }
    assert_eq!(jpegs, 10);
}

fn numbers(text: &str) -> Vec<usize> {
    text.split('-').filter_map(|part| part.parse().ok()).collect()
}

/// Converts (3, H, W) to (H, W, 3).
fn last(planes: &[u8], pixels: usize) -> Vec<u8> {
    let at = |i: usize, c: usize| planes[c * pixels * pixels + i];
    (0..pixels * pixels).flat_map(|i| [at(i, 0), at(i, 1), at(i, 2)]).collect()
}

#[test]
fn scaling_gives_the_bits_of_pillow() {
    let mut scratch = Scratch::default();
    let (width, height) =
        read(open(&golden().join("folder/dog/noise.png")).expect("open"), &mut scratch).expect("noise");
    let rgb = std::mem::take(&mut scratch.rgb);
    let turned: Vec<u8> = (0..width)
        .flat_map(|x| (0..height).map(move |y| (x, y)))
        .flat_map(|(x, y)| rgb[3 * (y * width + x)..][..3].to_vec())
        .collect();
    let all = reference("scaled.npz");
    assert!(all.len() >= 35);
    for (name, want) in all {
        let n = numbers(&name);
        let (picture, across, down, pixels) = if name.starts_with("crop") {
            let side =
                |start, len| Side { source: Span { start, len }, size: n[4], wanted: Span { start: 0, len: n[4] } };
            (Picture { width, height, rgb: &rgb }, side(n[0], n[2]), side(n[1], n[3]), n[4])
        } else {
            let picture = match name.contains("tall") {
                true => Picture { width: height, height: width, rgb: &turned },
                false => Picture { width, height, rgb: &rgb },
            };
            let (across, down) = Crop::Center { resize: n[0] }.sides(picture.width, picture.height, n[1], 0);
            (picture, across, down, n[1])
        };
        let mut out = vec![0; 3 * pixels * pixels];
        resize(picture, &across, &down, &mut scratch.rows, &mut out);
        assert!(last(&out, pixels) == want.bytes, "{name}");
    }
}

#[test]
fn random_crops_lie_within_and_are_spread_as_asked() {
    let (mut areas, mut lefts) = (0.0, 0.0);
    for (width, height) in [(500, 375), (33, 500), (1, 1), (3, 2), (1, 4000)] {
        for sample in 0..20_000u64 {
            let (across, down) = RANDOM.sides(width, height, 224, sample);
            let (x, y) = (across.source, down.source);
            assert!(x.len > 0 && y.len > 0 && x.start + x.len <= width && y.start + y.len <= height);
            assert_eq!((across.size, down.size, across.wanted), (224, 224, Span { start: 0, len: 224 }));
            if width == 500 {
                let (ratio, area) = (x.len as f64 / y.len as f64, (x.len * y.len) as f64 / (500.0 * 375.0));
                assert!((0.74..1.35).contains(&ratio) && (0.079..=1.0).contains(&area), "{ratio} {area}");
                areas += area / 20_000.0;
                lefts += x.start as f64 / (500 - x.len).max(1) as f64 / 20_000.0;
            }
        }
    }
    // 200,000 draws of torchvision's get_params with Python's random: an area of 0.433 in the mean, and the middle.
    assert!((areas - 0.433).abs() < 0.006 && (lefts - 0.5).abs() < 0.008, "{areas} {lefts}");
    let far = Crop::Random { seed: 7, scale: (1.0, 1.0), ratio: (1.0, 1.0) }.sides(100, 40, 8, 3);
    assert_eq!((far.0.source, far.1.source), (Span { start: 30, len: 40 }, Span { start: 0, len: 40 }));
    let other = Crop::Random { seed: 8, scale: (0.08, 1.0), ratio: (0.75, 1.33) };
    assert_ne!(RANDOM.sides(500, 375, 224, 0), other.sides(500, 375, 224, 0));
    assert_ne!(RANDOM.sides(500, 375, 224, 0), RANDOM.sides(500, 375, 224, 1));
    assert_ne!(RANDOM.sides(500, 375, 224, 0), RANDOM.sides(500, 375, 224, 1 << 32));
}

#[test]
fn impossible_crops_are_refused() {
    let random = |scale, ratio| Crop::Random { seed: 0, scale, ratio };
    for (crop, pixels) in [
        (random((0.0, 1.0), (0.5, 2.0)), 8),
        (random((0.5, 0.2), (0.5, 2.0)), 8),
        (random((0.5, 1.5), (0.5, 2.0)), 8),
        (random((0.5, f64::NAN), (0.5, 2.0)), 8),
        (random((0.5, 1.0), (2.0, 0.5)), 8),
        (random((0.5, 1.0), (0.5, f64::INFINITY)), 8),
        (Crop::Center { resize: 7 }, 8),
        (Crop::Center { resize: 8 }, 0),
        (Crop::Center { resize: 1 << 20 }, 8),
    ] {
        assert!(crop.check(pixels).is_err(), "{crop:?}");
    }
    assert!(RANDOM.check(224).is_ok() && Crop::Center { resize: 224 }.check(224).is_ok());
}

#[test]
fn the_list_is_sorted_by_class_folder_and_name() {
    let f = folder();
    assert_eq!(f.labels()[0].classes(), ["boat", "car", "dog"]);
    let names: Vec<String> = (0..f.len())
        .map(|i| f.path(i).strip_prefix(golden().join("folder")).expect("inside").to_string_lossy().replace('\\', "/"))
        .collect();
    assert_eq!(
        names[..6],
        [
            "boat/full.JPG",
            "boat/half.jpeg",
            "boat/plain.jpg",
            "boat/near/narrow.jpg",
            "boat/near/progressive.jpg",
            "car/cmyk.jpg"
        ]
    );
    assert_eq!(
        (f.len(), f.labels()[0].ids(0)[0], f.labels()[0].ids(5)[0], f.labels()[0].ids(f.len() - 1)[0]),
        (19, 0, 1, 2)
    );
}

/// A prefetcher over a folder.
fn reader(folder: Arc<ImageFiles>, pixels: usize, crop: Crop, threads: usize) -> Result<Prefetcher<Images>> {
    Prefetcher::new(Images::new(folder, pixels, crop)?, Some(threads))
}

fn batches(threads: usize, expect: bool, crop: Crop) -> Vec<HostBatch> {
    let f = folder();
    let mut reader = reader(f.clone(), 24, crop, threads).expect("reader");
    let items = |k: u64| -> Samples {
        Samples { first: k * 7, rows: (k * 7..k * 7 + 7).map(|s| (s * 5) as usize % f.len()).collect() }
    };
    (0..6)
        .map(|k| {
            if expect {
                reader.announce(&items(k));
                reader.announce(&items(k + 1));
            }
            reader.take(&items(k)).expect("batch")
        })
        .collect()
}

#[test]
fn a_batch_that_no_memory_holds_is_an_error() {
    let mut reader = reader(folder(), 16384, RANDOM, 1).expect("reader");
    let items = Samples { first: 0, rows: vec![0; 1 << 20] };
    reader.announce(&items);
    let e = reader.take(&items).map(drop).map_err(|e| e.to_string()).expect_err("842 TB");
    assert!(e.contains("of 1048576 images of 16384 x 16384 does not fit") && e.contains("a smaller batch"), "{e}");
}

#[test]
fn batches_do_not_depend_on_threads_nor_on_what_was_expected() {
    for crop in [RANDOM, Crop::Center { resize: 28 }] {
        let one = batches(1, false, crop);
        assert_eq!(
            (one[0].columns[0].shape.dims(), one[0].columns[1].to_i64()),
            (&[7, 3, 24, 24][..], vec![0, 1, 1, 2, 0, 1, 2])
        );
        for (threads, expect) in [(4, false), (1, true), (4, true)] {
            assert!(batches(threads, expect, crop) == one, "{threads} threads, expected: {expect}");
        }
    }
}

#[test]
fn a_batch_out_of_turn_is_the_same() -> Result<()> {
    let all = batches(1, false, RANDOM);
    let mut reader = reader(folder(), 24, RANDOM, 2)?;
    let items = |k: u64| -> Samples {
        Samples { first: k * 7, rows: (k * 7..k * 7 + 7).map(|s| (s * 5) as usize % 19).collect() }
    };
    for k in [1, 2, 3, 4] {
        reader.announce(&items(k)); // the first two are dropped for the last
    }
    for k in [5, 4, 0, 3] {
        assert!(reader.take(&items(k))? == all[k as usize], "batch {k}");
    }
    Ok(())
}

struct Made(tempfile::TempDir);

impl Made {
    fn new(files: &[(&str, &[u8])]) -> Made {
        let made = Made(tempfile::tempdir().expect("tempdir"));
        for (path, bytes) in files {
            let path = made.0.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("create");
            std::fs::write(path, bytes).expect("write");
        }
        made
    }

    fn open(&self) -> Result<ImageFiles> {
        open_folder(self.0.path(), None)
    }

    /// Returns the error of reading its first image.
    fn fault(&self) -> String {
        let mut reader = reader(Arc::new(self.open().expect("open")), 8, RANDOM, 1).expect("reader");
        reader.take(&Samples { first: 0, rows: vec![0] }).map_err(|e| e.to_string()).expect_err("a broken file")
    }
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(golden().join("folder").join(name)).expect(name)
}

#[test]
fn other_files_are_left_out_and_other_images_refused() -> Result<()> {
    let jpeg = file("boat/plain.jpg");
    let made = Made::new(&[
        ("b/x.JPEG", &jpeg),
        ("b/notes.txt", b"x"),
        ("b/._x.jpg", b"junk of another system"),
        ("a/c/y.Png", b""),
        (".hidden/z.jpg", &jpeg),
        ("beside.jpg", &jpeg),
    ]);
    let f = made.open()?;
    assert_eq!((f.len(), f.labels()[0].classes(), f.is_empty()), (2, &["a".to_string(), "b".to_string()][..], false));
    assert!(f.path(0).ends_with("a/c/y.Png") && f.path(1).ends_with("b/x.JPEG"));

    let message = |m: &Made| m.open().map_err(|e| e.to_string()).expect_err("refused");
    for (files, needles) in [
        (&[][..], ["no class folders", "FOLDER/CLASS/NAME.jpg"]),
        (&[("x.jpg", &jpeg[..])], ["1 images outside", "a folder a class"]),
        (&[("a/x.jpg", &jpeg), ("b/x.txt", b"")], ["class 'b'", "no .jpg, .jpeg, .png or .webp"]),
        (&[("a/x.jpg", &jpeg), ("a/y.avif", b"")], ["y.avif", "convert"]),
    ] {
        let text = message(&Made::new(files));
        assert!(needles.iter().all(|n| text.contains(n)), "{text}");
    }
    assert!(matches!(open_folder(&made.0.path().join("beside.jpg"), None), Err(Error::Unsupported { .. })));
    assert!(matches!(open_folder(&made.0.path().join("none"), None), Err(Error::Io { .. })));
    Ok(())
}

#[test]
fn classes_may_be_given() -> Result<()> {
    let names = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    let root = golden().join("folder");
    let f = open_folder(&root, Some(&names(&["zebra", "dog", "car", "boat"])))?;
    assert_eq!((f.labels()[0].ids(0)[0], f.labels()[0].ids(18)[0], f.labels()[0].classes().len()), (3, 1, 4));
    assert_eq!((0..f.len()).map(|i| f.labels()[0].ids(i)[0]).max(), Some(3));
    assert!(f.path(0).is_file());
    let text = open_folder(&root, Some(&names(&["boat", "cart", "dog"]))).map_err(|e| e.to_string()).expect_err("car");
    assert!(text.contains("class 'car'") && text.contains("did you mean 'cart'?"), "{text}");
    Ok(())
}

#[cfg(unix)]
#[test]
fn links_are_followed_but_not_for_ever() -> Result<()> {
    let made = Made::new(&[("a/x.jpg", &file("boat/plain.jpg"))]);
    std::os::unix::fs::symlink(golden().join("folder/dog"), made.0.path().join("b")).expect("link");
    assert_eq!(made.open()?.labels()[0].classes(), ["a", "b"]);
    std::os::unix::fs::symlink("..", made.0.path().join("a/up")).expect("link");
    let text = made.open().map_err(|e| e.to_string()).expect_err("a loop");
    assert!(text.contains("32 folders deep") && text.contains("link"), "{text}");
    Ok(())
}

#[test]
fn broken_files_are_named_with_rule_and_cure() {
    let (jpeg, progressive, png) = (file("boat/plain.jpg"), file("boat/near/progressive.jpg"), file("dog/noise.png"));
    for (bytes, needle) in [
        (&jpeg[..jpeg.len() - 2], "the file is truncated"),
        (&jpeg[..jpeg.len() / 2], "the file is truncated"),
        (&jpeg[..3], "JPEG"),
        (&progressive[..progressive.len() - 1], "the file is truncated"),
        (&png[..png.len() / 2], "x.jpg"),
        (&png[..20], "x.jpg"),
        (b"", "it is empty"),
        (b"GIF89a", "it is a GIF"),
        (b"<html>", "web page"),
        (b"hello there", "begins like none"),
    ] {
        let text = Made::new(&[("a/x.jpg", bytes)]).fault();
        assert!(text.contains(needle) && text.contains("x.jpg") && text.contains("hint: "), "{needle}: {text}");
    }
    let made = Made::new(&[("a/x.jpg", &jpeg)]);
    let mut reader = reader(Arc::new(made.open().expect("open")), 8, RANDOM, 1).expect("reader");
    std::fs::remove_file(made.0.path().join("a/x.jpg")).expect("remove");
    let gone = reader.take(&Samples { first: 0, rows: vec![0] }).map_err(|e| e.to_string()).expect_err("gone");
    assert!(gone.contains("x.jpg: cannot open"), "{gone}");
}

/// An error is returned with its batch; of several errors the first image's, independent of timing.
#[test]
fn errors_belong_to_their_batch() -> Result<()> {
    let jpeg = file("boat/plain.jpg");
    let made = Made::new(&[("a/1.jpg", &jpeg), ("a/2.jpg", b"x"), ("a/3.jpg", &jpeg[..99]), ("a/4.jpg", &jpeg)]);
    let mut reader = reader(Arc::new(made.open()?), 8, RANDOM, 4)?;
    let items = |images: &[usize]| Samples { first: 0, rows: images.to_vec() };
    for _ in 0..20 {
        reader.announce(&items(&[0, 2, 1]));
        reader.announce(&items(&[3, 0]));
        let text = reader.take(&items(&[0, 2, 1])).map_err(|e| e.to_string()).expect_err("two broken files");
        assert!(text.contains("3.jpg"), "{text}");
        assert_eq!(reader.take(&items(&[3, 0]))?.columns[0].shape.dims(), &[2, 3, 8, 8]);
        reader.announce(&items(&[1]));
    }
    Ok(())
}

/// Makes a JPEG whose frame header claims other sides.
fn claimed(width: u16, height: u16) -> Vec<u8> {
    let mut jpeg = file("boat/plain.jpg");
    let at = jpeg.windows(2).position(|w| w == [0xff, 0xc0]).expect("a frame header");
    jpeg[at + 5..at + 7].copy_from_slice(&height.to_be_bytes());
    jpeg[at + 7..at + 9].copy_from_slice(&width.to_be_bytes());
    jpeg
}

#[test]
fn bombs_are_refused() {
    let text = Made::new(&[("a/x.jpg", &claimed(20_000, 20_000))]).fault();
    assert!(text.contains("20000 x 20000") && text.contains("400000000") && text.contains("limit"), "{text}");
    for (width, height) in [(65_535, 1), (0, 40), (52, 0), (10_000, 10_000), (900, 900)] {
        let text = Made::new(&[("a/x.jpg", &claimed(width, height))]).fault();
        assert!(text.contains("x.jpg") && text.contains("hint: "), "{width} x {height}: {text}");
    }
}

/// A changed byte or a truncated end gives an error or an image, but no panic, no endless loop and no size other than the file's.
#[test]
fn damaged_files_are_errors_not_panics() {
    let (path, mut rgb) = (Path::new("t.jpg"), Vec::new());
    for name in
        ["boat/plain.jpg", "boat/near/progressive.jpg", "car/restarts.jpg", "car/cmyk.jpg", "dog/palette_clear.png"]
    {
        let whole = file(name);
        let mut failures = 0;
        for i in 0..whole.len() {
            assert!(decode(path, &whole[..i], &mut rgb).is_err(), "{name}: {i} of {} bytes", whole.len());
            for flip in [1 << (i % 8), 0xff] {
                let mut bad = whole.clone();
                bad[i] ^= flip;
                match decode(path, &bad, &mut rgb) {
                    Ok((w, h)) => assert_eq!(rgb.len(), 3 * w * h),
                    Err(_) => failures += 1,
                }
            }
        }
        assert!(failures > 0, "{name}");
    }
}
