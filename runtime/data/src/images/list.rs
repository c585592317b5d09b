//! Lists the images that records name: one field is the path of a file, others are labels.
//!
//! Records are read once, when the list is opened, and the folders of the images are listed, so that a missing file is found before the
//! first step. A relative path starts in the folder of the record's file, or in one that the recipe names.

use super::files::ImageFiles;
use super::folder::check_name;
use super::labels::Builder;
use crate::error::{Error, Result, quote};
use crate::records::stages::{Fields, Scan, located};
use crate::records::{Dataset, Value};
use perilune_core::error::did_you_mean;
use perilune_policy::{Kind, Opener, is_address};
use rustc_hash::FxHashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the fields of a list mean.
#[derive(Clone, Default, Debug)]
pub struct ListOptions {
    /// The field with the path of an image.
    pub path: String,
    /// The columns of a batch, the fields of their labels, and the classes that these have.
    pub labels: Vec<(String, String, Option<Vec<String>>)>,
    /// Where relative paths start; in the folder of each record's file without it.
    pub folder: Option<PathBuf>,
    /// Where those of records in memory start.
    pub recipe: PathBuf,
}

/// A record of the list.
struct Item {
    folder: PathBuf,
    file: OsString,
    labels: Vec<Value>,
}

impl ImageFiles {
    /// Reads a list, whose epochs must be equal.
    ///
    /// # Errors
    /// The records differ between epochs, a path is none or names no file that may be read, or a label is of another kind than the first.
    pub fn of_records(
        opener: Arc<dyn Opener>,
        records: Arc<dyn Dataset>,
        options: &ListOptions,
        scan: &Scan,
    ) -> Result<ImageFiles> {
        if records.varies() {
            let error = Error::argument("the list", "has another order in each epoch");
            return Err(error.hint("shuffle the images: data.images(list, { ... }):shuffle(1)"));
        }
        if records.is_empty() {
            return Err(Error::argument("the list", "has no records").hint("look at the filters before it"));
        }
        let mut needed = vec![options.path.clone()];
        for (_, field, _) in &options.labels {
            if !needed.contains(field) {
                needed.push(field.clone());
            }
        }
        known(&*records, &needed)?;
        let records: Arc<dyn Dataset> = Arc::new(Fields::select(records, &needed));
        let items = scan.each(&*records, |index, record| {
            let text = match record.get(&options.path) {
                Some(Value::Text(text)) => text.clone(),
                other => return Err(no_path(&options.path, other)),
            };
            let (folder, file) = split(&text, || base(&*records, index, options))?;
            let label = |(_, field, _): &(_, String, _)| record.get(field).cloned().unwrap_or(Value::Null);
            Ok(Item { folder, file, labels: options.labels.iter().map(label).collect() })
        })?;
        let root = options.folder.clone().or_else(|| common(items.iter().map(|item| &item.folder))).unwrap_or_default();
        let mut builders = Vec::with_capacity(options.labels.len());
        for (column, field, classes) in &options.labels {
            builders.push(Builder::new(column, field, classes.as_deref())?);
        }
        let (mut folders, mut numbers, mut files) = (Vec::new(), FxHashMap::default(), Vec::with_capacity(items.len()));
        for (index, item) in (0..).zip(items) {
            for (builder, value) in builders.iter_mut().zip(&item.labels) {
                builder.push(value).map_err(|e| located(&*records, index, e))?;
            }
            let next = folders.len() as u32;
            let number = *numbers.entry(item.folder).or_insert_with_key(|folder| {
                folders.push(folder.clone());
                next
            });
            files.push((number, PathBuf::from(item.file).into_boxed_path()));
        }
        let labels = builders.into_iter().map(Builder::finish).collect::<Result<_>>()?;
        let images = ImageFiles { opener, root, folders, files, labels };
        images.check_files(&*records)?;
        Ok(images)
    }

    /// Looks for the files in their folders. The error is that of the first image that is not there.
    fn check_files(&self, records: &dyn Dataset) -> Result<()> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|i| self.files[*i].0);
        let mut first: Option<(usize, Error)> = None;
        for group in order.chunk_by(|a, b| self.files[*a].0 == self.files[*b].0) {
            let Some(i) = group.first() else { continue };
            if let Err((i, error)) = self.check_folder(&self.folders[self.files[*i].0 as usize], group)
                && first.as_ref().is_none_or(|(before, _)| i < *before)
            {
                first = Some((i, error));
            }
        }
        first.map_or(Ok(()), |(i, error)| Err(located(records, i as u64, error)))
    }

    /// Looks for these images, in their order, in one folder.
    fn check_folder(&self, folder: &Path, group: &[usize]) -> std::result::Result<(), (usize, Error)> {
        let missing = |i: usize, name: &Path, near: Option<String>| {
            let rule = format!("there is no image {} in {}", quote(&name.to_string_lossy()), folder.display());
            let cure = "paths start in the folder of the list; name another one: folder = \"images\"".to_string();
            (i, Error::function(rule).hint(near.map_or(cure, |near| format!("did you mean {}?", quote(&near)))))
        };
        let place = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let listed = match self.opener.list(place) {
            Ok(listed) => listed,
            Err(e) if e.is_not_found() => return Err(missing(group[0], &self.files[group[0]].1, None)),
            Err(e) => return Err((group[0], e.into())),
        };
        let kinds: FxHashMap<OsString, Kind> = listed.into_iter().map(|entry| (entry.name, entry.kind)).collect();
        for i in group.iter().copied() {
            let name = &self.files[i].1;
            match kinds.get(name.as_os_str()) {
                Some(Kind::File) => check_name(&folder.join(name)).map_err(|e| (i, e))?,
                // The error of opening it names the cure.
                Some(_) => drop(self.open_image(i).map_err(|e| (i, e))?),
                None => {
                    let mut names: Vec<&str> = kinds.keys().filter_map(|n| n.to_str()).take(1000).collect();
                    names.sort_unstable();
                    let near = did_you_mean(&name.to_string_lossy(), names).map(String::from);
                    return Err(missing(i, name, near));
                }
            }
        }
        Ok(())
    }
}

/// Looks for fields in the first record, which still has all of them.
fn known(records: &dyn Dataset, needed: &[String]) -> Result<()> {
    let first = records.get(0)?;
    let Some(lost) = needed.iter().find(|name| first.get(name).is_none()) else { return Ok(()) };
    let near = did_you_mean(lost, first.names()).map(|near| format!("did you mean '{near}'?"));
    let names = || format!("the fields are {}", first.names().collect::<Vec<_>>().join(", "));
    let error = Error::function(format!("the record has no field '{lost}'")).hint(near.unwrap_or_else(names));
    Err(located(records, 0, error))
}

fn no_path(field: &str, found: Option<&Value>) -> Error {
    let found = found.map_or("absent", Value::type_name);
    let hint = match found {
        "bytes" | "a map" => "images inside of a table are not read: write them to files and name these",
        _ => "name the field that has the paths of the images: { path = \"file\" }",
    };
    Error::function(format!("the path of the image, '{field}', is {found}")).hint(hint)
}

/// Where the relative path of a record starts.
fn base(records: &dyn Dataset, index: u64, options: &ListOptions) -> Result<PathBuf> {
    if let Some(folder) = &options.folder {
        return Ok(folder.clone());
    }
    let origin = records.origins(index)?.into_iter().next().filter(|origin| !origin.is_in_memory());
    let Some(origin) = origin else { return Ok(options.recipe.clone()) };
    if is_address(&origin.file.to_string_lossy()) {
        let rule = format!("the list {} is an address, and its images are none", origin.file.display());
        return Err(Error::function(rule).hint("name the folder in which they are: folder = \"images\""));
    }
    Ok(origin.file.parent().unwrap_or(Path::new("")).to_path_buf())
}

/// The folder and the name of an image.
fn split(text: &str, base: impl FnOnce() -> Result<PathBuf>) -> Result<(PathBuf, OsString)> {
    let refuse = |rule: &str| Err(Error::function(format!("the path {} {rule}", quote(text))));
    if is_address(text) {
        return refuse("is an address").map_err(|e| e.hint("download the images, and name their files"));
    }
    let path = Path::new(text);
    let (Some(name), false) = (path.file_name(), text.ends_with('/') || text.contains('\0')) else {
        return refuse("names no file").map_err(|e| e.hint("as in \"cats/17.jpg\""));
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let folder = if folder.is_absolute() { folder.to_path_buf() } else { base()?.join(folder) };
    Ok((folder, name.to_os_string()))
}

/// The longest folder that contains all of these.
fn common<'a>(folders: impl Iterator<Item = &'a PathBuf>) -> Option<PathBuf> {
    folders
        .cloned()
        .reduce(|a, b| a.components().zip(b.components()).take_while(|(x, y)| x == y).map(|(x, _)| x).collect())
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
