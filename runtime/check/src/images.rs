//! Decodes the images of a folder or list, to find those that cannot be read.

use crate::report::{Example, Finding, Plot, Report, Severity, SplitReport};
use crate::scan::spread;
use perilune_core::Interrupt;
use perilune_data::images::read::{Scratch, read};
use perilune_data::images::{ImageFiles, Labels};
use perilune_data::{Error, Result};
use rayon::prelude::*;

/// Images of a sample.
pub const SAMPLE: u64 = 1000;

/// Decodes an even sample of the images of a split, or all of them.
pub fn check(name: &str, files: &ImageFiles, all: bool, interrupt: &Interrupt) -> Result<Report> {
    let len = files.len() as u64;
    let wanted = if all { len } else { len.min(SAMPLE) };
    let decode = |scratch: &mut Scratch, place: u64| -> Result<Option<(u64, String)>> {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let i = spread(place, wanted, len) as usize;
        match files.open_image(i).and_then(|file| read(file, scratch)) {
            Ok(_) => Ok(None),
            Err(e) => Ok(Some((i as u64, e.to_string()))),
        }
    };
    let bad: Vec<Result<Option<(u64, String)>>> =
        (0..wanted).into_par_iter().map_init(Scratch::default, decode).collect();
    let bad: Vec<(u64, String)> = bad.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let mut report = Report::default();
    if wanted < len {
        report.remarks.push(format!("{name}: {wanted} of {len} images were decoded; --all decodes all"));
    }
    if !bad.is_empty() {
        let examples = bad.iter().take(5).map(|(i, text)| Example {
            place: files.path(*i as usize).display().to_string(),
            other: None,
            excerpt: text.lines().next().unwrap_or_default().to_string(),
        });
        report.findings.push(Finding {
            severity: Severity::Error,
            rule: "image",
            split: name.into(),
            field: None,
            what: format!("cannot be decoded: {} of {wanted} images", bad.len()),
            count: bad.len() as u64,
            of: wanted,
            examples: examples.collect(),
            rows: bad.into_iter().map(|b| b.0).collect(),
            cure: "remove these files, or copy them again",
        });
    }
    let named = files.labels().iter().filter(|labels| !labels.classes().is_empty());
    let plots = named.map(|labels| class_counts(name, files, labels)).collect();
    let (name, unit) = (name.into(), "images");
    report.splits.push(SplitReport { name, unit, records: len, checked: wanted, fields: Vec::new(), plots });
    Ok(report)
}

/// Counts the images of each class.
fn class_counts(split: &str, files: &ImageFiles, labels: &Labels) -> Plot {
    let mut bars: Vec<(String, u64)> = labels.classes().iter().map(|class| (class.clone(), 0)).collect();
    for i in 0..files.len() {
        for id in labels.ids(i) {
            if let Some(bar) = bars.get_mut(id as usize) {
                bar.1 += 1;
            }
        }
    }
    let of = if files.labels().len() > 1 { format!(" by {}", labels.name()) } else { String::new() };
    Plot { title: format!("{split}: images of each class{of}"), bars }
}
