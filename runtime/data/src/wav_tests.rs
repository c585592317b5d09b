//! Tests WAV files: every encoding against values by hand, folders, wrong rates, and random mutations.

use super::*;
use hound::{WavSpec, WavWriter};
use perilune_policy::Directory;

fn spec(channels: u16, rate: u32, bits: u16, sample_format: SampleFormat) -> WavSpec {
    WavSpec { channels, sample_rate: rate, bits_per_sample: bits, sample_format }
}

fn written(path: &Path, spec: WavSpec, samples: &[i32]) {
    let mut out = WavWriter::create(path, spec).expect("made");
    samples.iter().for_each(|s| out.write_sample(*s).expect("written"));
    out.finalize().expect("written");
}

fn load_named(path: &Path, rate: u32) -> Result<HostTensor> {
    load(crate::file::named::open(path)?, rate)
}

#[test]
fn integers_are_scaled_and_channels_averaged() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("a.wav");
    for (bits, full) in [(8, 128), (16, 1 << 15), (24, 1 << 23)] {
        written(&path, spec(1, 8000, bits, SampleFormat::Int), &[0, full / 2, -full, full - 1]);
        let t = load_named(&path, 8000).expect("read");
        assert_eq!(t.to_f64(), [0.0, 0.5, -1.0, f64::from((1.0 - 1.0 / f64::from(full)) as f32)], "{bits} bits");
    }
    written(&path, spec(2, 44100, 16, SampleFormat::Int), &[1 << 14, 0, -(1 << 14), -(1 << 14)]);
    assert_eq!(load_named(&path, 44100).expect("read").to_f64(), [0.25, -0.5]);
    written(&path, spec(1, 8000, 16, SampleFormat::Int), &[]);
    assert_eq!(load_named(&path, 8000).expect("no samples").shape, Shape::of(&[0]));
    let mut out = WavWriter::create(&path, spec(1, 8000, 32, SampleFormat::Float)).expect("made");
    [0.5f32, -0.125, f32::NAN].iter().for_each(|x| out.write_sample(*x).expect("written"));
    out.finalize().expect("written");
    let e = load_named(&path, 8000).expect_err("NaN").to_string();
    assert!(e.contains("sample 2: is not finite"), "{e}");
}

#[test]
fn another_rate_is_an_error_with_a_cure() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("a.wav");
    written(&path, spec(1, 44100, 16, SampleFormat::Int), &[1, 2, 3]);
    let e = load_named(&path, 16000).expect_err("another rate").to_string();
    assert!(e.contains("a.wav") && e.contains("44100 Hz, not 16000 Hz") && e.contains("rate = 44100"), "{e}");
    std::fs::write(&path, b"RIFFxxxx").expect("written");
    let e = load_named(&path, 16000).expect_err("no WAV file").to_string();
    assert!(e.contains("WAV file"), "{e}");
}

#[test]
fn a_folder_becomes_a_tensor_of_equal_lengths() {
    let dir = tempfile::tempdir().expect("a directory");
    for (class, name, samples) in
        [("one", "b.wav", &[1 << 14; 2][..]), ("one", "a.WAV", &[-(1 << 14); 5]), ("zero", "x.wav", &[8192; 3])]
    {
        std::fs::create_dir_all(dir.path().join(class)).expect("made");
        written(&dir.path().join(class).join(name), spec(1, 8000, 16, SampleFormat::Int), samples);
    }
    std::fs::write(dir.path().join("one/notes.txt"), "x").expect("written");
    let files = Directory::open(dir.path()).expect("a directory");
    let s = folder(&files, Path::new(""), None, 8000, 3).expect("read");
    assert_eq!(s.classes, ["one", "zero"]);
    assert_eq!(s.x.to_f64(), [-0.5, -0.5, -0.5, 0.5, 0.5, 0.0, 0.25, 0.25, 0.25]);
    assert_eq!(s.y.to_f64(), [0.0, 0.0, 1.0]);
    let e = folder(&files, Path::new(""), Some(&["one".into()]), 8000, 3).err().expect("an error").to_string();
    assert!(e.contains("class 'zero'") && e.contains("none of the 1 classes"), "{e}");
    let e = folder(&files, Path::new("one"), None, 8000, 3).err().expect("an error").to_string();
    assert!(e.contains("no class folders"), "{e}");
    let e = folder(&files, Path::new(""), None, 8000, 1 << 40).err().expect("an error").to_string();
    assert!(e.contains("the limit is"), "{e}");
}

/// Every mutated file is read or refused with its name, and nothing panics.
#[test]
fn mutated_files_are_read_or_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("m.wav");
    let mut kinds = Vec::new();
    for (channels, bits) in [(1, 16), (2, 24), (1, 8)] {
        written(&path, spec(channels, 8000, bits, SampleFormat::Int), &[5; 24]);
        kinds.push(std::fs::read(&path).expect("read"));
    }
    // xorshift64
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut draw = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let mut refused = 0;
    for trial in 0..4000 {
        let mut bytes = kinds[trial % kinds.len()].clone();
        for _ in 0..=draw(3) {
            match draw(4) {
                0 => bytes.truncate(draw(bytes.len() + 1)),
                1 => bytes.insert(draw(bytes.len() + 1), draw(256) as u8),
                _ if !bytes.is_empty() => {
                    // Mostly in the header.
                    let at = draw(bytes.len().min(48));
                    bytes[at] = [0, 0xff, draw(256) as u8][draw(3)];
                }
                _ => {}
            }
        }
        std::fs::write(&path, &bytes).expect("written");
        if let Err(e) = load_named(&path, 8000) {
            refused += 1;
            assert!(e.to_string().contains("m.wav"), "{e}");
        }
    }
    assert!(refused > 1000, "only {refused} of 4000 were refused");
}
