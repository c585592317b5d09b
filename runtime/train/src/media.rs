//! Stores the images that `run:log` was given in the run directory, and describes logged values as an event.

use crate::error::{Result, disk};
use crate::numbers;
use crate::rundir::RunDir;
use perilune_lua::{Histogram, Logged, LoggedImage, LoggedValue};
use serde_json::{Map, Value, json};
use std::io::Write;

/// The directory of images.
pub(crate) const MEDIA: &str = "media";

/// Returns the file of an image: `recon-0000100.png`. Characters that file systems treat apart become `_`.
fn file_name(name: &str, step: u64) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
    format!("{}-{step:07}.png", name.chars().map(plain).collect::<String>())
}

/// Whether a file has the name of an image of a run.
pub(crate) fn is_file_name(name: &str) -> bool {
    let stem = name.strip_suffix(".png").and_then(|stem| stem.rsplit_once('-'));
    stem.is_some_and(|(_, step)| step.len() >= 7 && step.bytes().all(|b| b.is_ascii_digit()))
}

/// Writes an image beneath the run directory. A run that repeats the step after a resume replaces it.
fn store(dir: &RunDir, file: &str, image: &LoggedImage) -> Result<()> {
    let media = dir.handle().make_directory(MEDIA)?;
    let written = media.create_over(file)?.write_all(&image.png);
    written.map_err(disk("write", &media.path().join(file)))
}

fn histogram(h: &Histogram) -> Value {
    let edges: Vec<Value> = h.edges.iter().map(|edge| numbers::json(*edge)).collect();
    json!({
        "edges": edges, "counts": h.counts, "sum": numbers::json(h.sum), "sum_squares": numbers::json(h.sum_squares),
        "not_finite": h.not_finite,
    })
}

/// Returns the fields of the event of values that were logged at one step, and stores their images.
pub(crate) fn describe(dir: Option<&RunDir>, values: &[Logged]) -> Result<Map<String, Value>> {
    let mut kinds = [Map::new(), Map::new(), Map::new(), Map::new()];
    let [figures, texts, images, histograms] = &mut kinds;
    for Logged { step, name, value } in values {
        let name = name.clone();
        match value {
            LoggedValue::Figure(v) => figures.insert(name, numbers::json(*v)),
            LoggedValue::Text(text) => texts.insert(name, text.as_str().into()),
            LoggedValue::Histogram(h) => histograms.insert(name, histogram(h)),
            LoggedValue::Image(image) => {
                let file = file_name(&name, *step);
                if let Some(dir) = dir {
                    store(dir, &file, image)?;
                }
                let described = json!({
                    "file": format!("{MEDIA}/{file}"), "width": image.width, "height": image.height,
                    "blake3": blake3::hash(&image.png).to_hex().as_str(),
                });
                images.insert(name, described)
            }
        };
    }
    let names = ["metrics", "texts", "images", "histograms"];
    let filled = names.into_iter().zip(kinds).filter(|(_, values)| !values.is_empty());
    Ok(filled.map(|(name, values)| (name.to_string(), Value::Object(values))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_inside_the_folder() {
        assert_eq!(file_name("valid/recon", 100), "valid_recon-0000100.png");
        assert_eq!(file_name("a b", 12_345_678), "a_b-12345678.png");
        assert!(!file_name("../../x", 1).contains('/'));
        assert!(is_file_name(&file_name("a b", 12_345_678)) && is_file_name(&file_name("x-1", 1)));
        assert!(!is_file_name("mine.png") && !is_file_name("mine-1.png"));
    }
}
