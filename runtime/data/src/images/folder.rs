//! Lists the images of a folder: `FOLDER/CLASS/**/*.{jpg,jpeg,png,webp}`.
//!
//! Classes are sorted by name, which defines their ids from 0. Files have the order of torchvision's ImageFolder, folder by folder.
//! So the list does not depend on the file system. Hidden files and folders (a name that begins with a dot) are skipped, as
//! are files outside the class folders and files of other kinds. But an image of an unsupported format is an error:
//! skipping it silently would train on a part of the folder.

use super::files::ImageFiles;
use super::labels::Labels;
use crate::error::{Error, Result, quote};
use perilune_core::error::did_you_mean;
use perilune_policy::{Kind, Opener};
use std::path::Path;
use std::sync::Arc;

const READ: [&str; 4] = ["jpg", "jpeg", "png", "webp"];
const NOT_READ: [&str; 12] = ["jpe", "jfif", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2", "heic", "heif", "avif"];
/// The endings that are read, for messages.
const NAMES: &str = ".jpg, .jpeg, .png or .webp";
/// The maximum depth of folders, since a link to a parent folder would never end.
const MAX_DEPTH: usize = 32;

impl ImageFiles {
    /// Lists `root`. `classes` fixes the classes and their ids: others in the folder are an error, missing ones are
    /// not, so that a small validation folder need not contain all classes.
    ///
    /// # Errors
    /// The folder may not be read, has no folders of classes, a class without images, or an image of a format that is not read.
    pub fn of_folder(opener: Arc<dyn Opener>, root: &Path, classes: Option<&[String]>) -> Result<ImageFiles> {
        let found = class_folders(&*opener, root)?;
        let classes = classes.map_or_else(|| found.clone(), <[String]>::to_vec);
        let (mut folders, mut files, mut ids) = (Vec::with_capacity(found.len()), Vec::new(), Vec::new());
        for name in &found {
            let Some(class) = classes.iter().position(|c| c == name) else {
                let rule = format!("is none of the {} classes asked for", classes.len());
                let near = did_you_mean(name, classes.iter().map(String::as_str));
                let cure = near
                    .map_or("give the folders the same classes".to_string(), |c| format!("did you mean {}?", quote(c)));
                return Err(Error::malformed(root, format!("class {}", quote(name)), rule).hint(cure));
            };
            let number = folders.len() as u32;
            files.extend(images(&*opener, root, name)?.into_iter().map(|path| (number, path)));
            ids.resize(files.len(), class as u32);
            folders.push(root.join(name));
        }
        let labels = vec![Labels::of_classes("y", &ids, classes)];
        Ok(ImageFiles { opener, root: root.to_path_buf(), folders, files, labels })
    }
}

/// The names of the class folders, sorted.
fn class_folders(opener: &dyn Opener, root: &Path) -> Result<Vec<String>> {
    let (mut found, mut images) = (Vec::new(), 0);
    for entry in entries(opener, root)? {
        match entry.name.into_string() {
            _ if entry.hidden => {}
            Ok(name) if entry.is_dir => found.push(name),
            Err(name) if entry.is_dir => {
                let place = format!("class {}", quote(&name.to_string_lossy()));
                return Err(Error::malformed(root, place, "its name is not UTF-8").hint("rename the folder"));
            }
            Ok(name) => images += usize::from(has_extension(Path::new(&name), &READ)),
            Err(_) => {}
        }
    }
    if found.is_empty() {
        let rule = match images {
            0 => "has no class folders".to_string(),
            n => format!("has no class folders, and {n} images outside of them"),
        };
        return Err(Error::malformed(root, "folder", rule).hint(LAYOUT));
    }
    found.sort();
    Ok(found)
}

/// The images of a class, by folder and then by name, like os.walk and sorted; the order of paths would mix folders and files.
fn images(opener: &dyn Opener, root: &Path, class: &str) -> Result<Vec<Box<Path>>> {
    let mut found = Vec::new();
    walk(opener, &root.join(class), Path::new(""), 0, &mut found)?;
    if found.is_empty() {
        let rule = format!("holds no {NAMES}");
        let error = Error::malformed(root, format!("class {}", quote(class)), rule);
        return Err(error.hint("put its images there, or remove the folder"));
    }
    found.sort();
    Ok(found.into_iter().map(|(dir, name)| Path::new(&dir).join(name).into_boxed_path()).collect())
}

const LAYOUT: &str = "images lie as FOLDER/CLASS/NAME.jpg (or .jpeg, .png, .webp), a folder a class";

struct Entry {
    name: std::ffi::OsString,
    is_dir: bool,
    hidden: bool,
}

/// What a folder holds, links followed. A link to what may not be read is an error: the folder would seem to hold less.
fn entries(files: &dyn Opener, dir: &Path) -> Result<impl Iterator<Item = Entry>> {
    let listed = files.list(dir).map_err(|e| match e {
        perilune_policy::Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotADirectory => {
            Error::unsupported(dir, "path", "is a file; a folder is needed").hint(LAYOUT)
        }
        e => e.into(),
    })?;
    let mut out = Vec::new();
    for entry in listed {
        let hidden = entry.name.as_encoded_bytes().first() == Some(&b'.');
        if entry.kind == Kind::Outside && !hidden {
            // The error of opening it names the cure.
            files.list(&dir.join(&entry.name))?;
        }
        // A link that leads nowhere counts as a file, and is an error once it is read.
        out.push(Entry { name: entry.name, is_dir: entry.kind == Kind::Directory, hidden });
    }
    Ok(out.into_iter())
}

const CONVERT: &str = "convert it (ImageMagick: magick mogrify -format png FILE)";

/// The error for a file whose name has the ending of another format.
fn unread(path: &Path) -> Error {
    Error::unsupported(path, "image", format!("of this format; {NAMES} are read"))
}

/// Refuses the name of an image of another format.
pub(super) fn check_name(path: &Path) -> Result<()> {
    match has_extension(path, &NOT_READ) {
        true => Err(unread(path).hint(format!("{CONVERT}, or leave out its record"))),
        false => Ok(()),
    }
}

fn has_extension(name: &Path, list: &[&str]) -> bool {
    name.extension().and_then(|e| e.to_str()).is_some_and(|e| list.iter().any(|known| e.eq_ignore_ascii_case(known)))
}

/// Appends (folder within the class, name) of every image below `base/dir`.
fn walk(
    files: &dyn Opener,
    base: &Path,
    dir: &Path,
    depth: usize,
    out: &mut Vec<(std::ffi::OsString, std::ffi::OsString)>,
) -> Result<()> {
    let full = base.join(dir);
    if depth > MAX_DEPTH {
        let error = Error::malformed(&full, "folder", format!("is nested more than {MAX_DEPTH} folders deep"));
        return Err(error.hint("is there a link to a folder above it?"));
    }
    for entry in entries(files, &full)?.filter(|e| !e.hidden) {
        if entry.is_dir {
            walk(files, base, &dir.join(&entry.name), depth + 1, out)?;
        } else if has_extension(Path::new(&entry.name), &READ) {
            out.push((dir.as_os_str().to_os_string(), entry.name));
        } else if has_extension(Path::new(&entry.name), &NOT_READ) {
            return Err(unread(&full.join(&entry.name)).hint(format!("{CONVERT}, or move it out of the folder")));
        }
    }
    Ok(())
}
