//! Reads WAV files as mono samples in [-1, 1]: PCM of 8 to 32 bits and 32-bit floats, by the crate hound.
//!
//! Channels are averaged. The rate of a file must be the one asked for: resampling is left to a tool made for it. A folder
//! `FOLDER/CLASS/*.wav` is read into memory as one tensor, each file cut or padded with zeros to the same length.

use crate::error::{Error, Result, quote};
use hound::{SampleFormat, WavReader};
use perilune_core::{HostTensor, Shape};
use perilune_policy::{Kind, Opened, Opener};
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// The largest file read, and the limit of the samples of a folder in bytes.
pub const MAX_BYTES: u64 = 4 << 30;

/// Reads a file of `rate` samples a second: (N) f32.
pub fn load(file: Opened, rate: u32) -> Result<HostTensor> {
    let samples = read(file, rate)?;
    Ok(HostTensor::from_f32(Shape::of(&[samples.len()]), &samples))
}

fn read(file: Opened, rate: u32) -> Result<Vec<f32>> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    if len > MAX_BYTES {
        return Err(Error::too_large(&path, "the file, in bytes,", len, MAX_BYTES).hint("cut it into shorter files"));
    }
    let failed = |e: hound::Error| match e {
        // hound reports a file that ends early as an error of this kind.
        hound::Error::IoError(e) if e.kind() != std::io::ErrorKind::Other => Error::io(&path, "read", e),
        hound::Error::Unsupported => {
            let rule = "has an encoding other than PCM of 8, 16, 24 or 32 bits and 32-bit floats";
            Error::unsupported(&path, "format", rule).hint("convert it: ffmpeg -i in.wav -c:a pcm_s16le out.wav")
        }
        e => Error::malformed(&path, "WAV file", e.to_string()).hint("copy or convert the file again"),
    };
    let mut reader = WavReader::new(BufReader::with_capacity(1 << 16, file)).map_err(failed)?;
    let spec = reader.spec();
    if spec.sample_rate != rate {
        let rule = format!("is {} Hz, not {rate} Hz", spec.sample_rate);
        let cure =
            format!("resample it first: ffmpeg -i in.wav -ar {rate} out.wav; or ask for rate = {}", spec.sample_rate);
        return Err(Error::unsupported(&path, "sample rate", rule).hint(cure));
    }
    let channels = usize::from(spec.channels);
    if channels == 0 || !(1..=32).contains(&spec.bits_per_sample) {
        let rule = format!("has {channels} channels of {} bits", spec.bits_per_sample);
        return Err(Error::malformed(&path, "header", rule));
    }
    // A header may claim more samples than the file has: the list grows with those that are read.
    let mut out = Vec::with_capacity((len / channels as u64).min(1 << 20) as usize);
    let (mut sum, mut have) = (0.0f64, 0);
    let mut add = |x: f64| {
        (sum, have) = (sum + x, have + 1);
        if have == channels {
            out.push((sum / channels as f64) as f32);
            (sum, have) = (0.0, 0);
        }
    };
    match spec.sample_format {
        SampleFormat::Float => {
            reader.samples::<f32>().try_for_each(|x| x.map(|x| add(f64::from(x)))).map_err(failed)?
        }
        SampleFormat::Int => {
            let scale = f64::from(spec.bits_per_sample - 1).exp2();
            reader.samples::<i32>().try_for_each(|x| x.map(|x| add(f64::from(x) / scale))).map_err(failed)?;
        }
    }
    match out.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(Error::malformed(&path, format!("sample {at}"), "is not finite")),
        None => Ok(out),
    }
}

/// The sounds of a folder: x (N, samples) f32, y (N) i64, and the names of the classes in the order of their ids.
pub struct Sounds {
    pub x: HostTensor,
    pub y: HostTensor,
    pub classes: Vec<String>,
}

/// Reads `root/CLASS/*.wav`, classes and files sorted by name. `classes` fixes the classes and their ids.
pub fn folder(
    files: &dyn Opener,
    root: &Path,
    classes: Option<&[String]>,
    rate: u32,
    samples: usize,
) -> Result<Sounds> {
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    let mut names: Vec<String> = list(files, root, Kind::Directory)?;
    names.sort();
    if names.is_empty() {
        let error = Error::malformed(root, "folder", "has no class folders");
        return Err(error.hint("the layout is FOLDER/CLASS/*.wav, with one folder for each class"));
    }
    for class in &names {
        let dir = root.join(class);
        let mut inside = list(files, &dir, Kind::File)?;
        inside.retain(|name| Path::new(name).extension().is_some_and(|e| e.eq_ignore_ascii_case("wav")));
        if inside.is_empty() {
            return Err(Error::malformed(root, format!("class {}", quote(class)), "holds no .wav"));
        }
        inside.sort();
        found.extend(inside.into_iter().map(|name| (class.clone(), dir.join(name))));
    }
    let classes = classes.map_or(names, <[String]>::to_vec);
    let bytes = (found.len() as u64).saturating_mul(samples as u64).saturating_mul(4);
    if bytes > MAX_BYTES {
        let cure = "use fewer files, or shorter ones by `seconds`";
        return Err(Error::too_large(root, "the sounds, in bytes,", bytes, MAX_BYTES).hint(cure));
    }
    let (mut x, mut y) = (Vec::with_capacity(found.len().saturating_mul(samples)), Vec::with_capacity(found.len()));
    for (class, path) in &found {
        let Some(id) = classes.iter().position(|c| c == class) else {
            let rule = format!("is none of the {} classes asked for", classes.len());
            return Err(Error::malformed(root, format!("class {}", quote(class)), rule));
        };
        let mut sound = read(files.open(path)?, rate)?;
        sound.resize(samples, 0.0);
        x.extend(sound);
        y.push(id as i64);
    }
    let x =
        HostTensor::from_f32(Shape::new(&[y.len(), samples]).map_err(|e| Error::argument("sounds", e.message))?, &x);
    Ok(Sounds { x, y: HostTensor::from_i64(Shape::of(&[y.len()]), &y), classes })
}

/// The names of the visible entries of one kind.
fn list(files: &dyn Opener, dir: &Path, kind: Kind) -> Result<Vec<String>> {
    let entries = files.list(dir)?.into_iter().filter(|e| e.kind == kind);
    let names = entries.filter_map(|e| e.name.into_string().ok()).filter(|name| !name.starts_with('.'));
    Ok(names.collect())
}

#[cfg(test)]
#[path = "wav_tests.rs"]
mod tests;
