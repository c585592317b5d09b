//! Decodes the images of a folder, to find those that cannot be read.

use crate::report::{Example, Finding, Plot, Report, Severity, SplitReport};
use crate::scan::spread;
use perilune_core::Interrupt;
use perilune_data::images::Folder;
use perilune_data::images::read::{Scratch, read};
use perilune_data::{Error, Result};
use rayon::prelude::*;

/// Images of a sample.
pub const SAMPLE: u64 = 1000;

/// Decodes an even sample of the images of a split, or all of them.
pub fn check(name: &str, folder: &Folder, all: bool, interrupt: &Interrupt) -> Result<Report> {
    let len = folder.len() as u64;
    let wanted = if all { len } else { len.min(SAMPLE) };
    let decode = |scratch: &mut Scratch, place: u64| -> Result<Option<(u64, String)>> {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let i = spread(place, wanted, len) as usize;
        match folder.open_image(i).and_then(|file| read(file, scratch)) {
            Ok(_) => Ok(None),
            Err(e) => Ok(Some((i as u64, e.to_string()))),
        }
    };
    let bad: Vec<Result<Option<(u64, String)>>> =
        (0..wanted).into_par_iter().map_init(Scratch::default, decode).collect();
    let bad: Vec<(u64, String)> = bad.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let mut classes: Vec<(String, u64)> = folder.classes().iter().map(|c| (c.clone(), 0)).collect();
    for i in 0..folder.len() {
        if let Some(class) = classes.get_mut(folder.class(i) as usize) {
            class.1 += 1;
        }
    }
    let mut report = Report::default();
    if wanted < len {
        report.remarks.push(format!("{name}: {wanted} of {len} images were decoded; --all decodes all"));
    }
    if !bad.is_empty() {
        let examples = bad.iter().take(5).map(|(i, text)| Example {
            place: folder.path(*i as usize).display().to_string(),
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
    let plots = vec![Plot { title: format!("{name}: images of each class"), bars: classes }];
    report.splits.push(SplitReport { name: name.into(), records: len, checked: wanted, fields: Vec::new(), plots });
    Ok(report)
}
