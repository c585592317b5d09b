//! Lists the images of a folder: `FOLDER/CLASS/**/*.{jpg,jpeg,png}`.
//!
//! Classes are sorted by name, which defines their ids from 0. Files have the order of torchvision's ImageFolder, folder by folder.
//! So the list does not depend on the file system. Hidden files and folders (a name that begins with a dot) are skipped, as
//! are files outside the class folders and files of other kinds. But an image of an unsupported format is an error:
//! skipping it silently would train on a part of the folder.

use crate::error::{Error, Result, quote};
use perilune_core::error::did_you_mean;
use perilune_policy::{FileList, Kind, Opened, Opener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const READ: [&str; 3] = ["jpg", "jpeg", "png"];
const NOT_READ: [&str; 13] =
    ["jpe", "jfif", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2", "heic", "heif", "avif"];
/// The maximum depth of folders, since a link to a parent folder would never end.
const MAX_DEPTH: usize = 32;

/// The images of a folder at the time it was opened.
#[derive(Debug)]
pub struct Folder {
    /// By which the images are opened when they are needed, on any thread.
    opener: Arc<dyn Opener>,
    root: PathBuf,
    classes: Vec<String>,
    /// The class, and the path within its folder.
    files: Vec<(u32, Box<Path>)>,
}

impl Folder {
    /// Lists `root`. `classes` fixes the classes and their ids: others in the folder are an error, missing ones are
    /// not, so that a small validation folder need not contain all classes.
    pub fn open(files: Arc<dyn Opener>, root: &Path, classes: Option<&[String]>) -> Result<Folder> {
        let mut found = Vec::new();
        let mut images = 0;
        for entry in entries(&*files, root)? {
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
        let mut folder = Folder { opener: files, root: root.to_path_buf(), classes: Vec::new(), files: Vec::new() };
        folder.classes = classes.map_or_else(|| found.clone(), <[String]>::to_vec);
        for name in &found {
            let Some(class) = folder.classes.iter().position(|c| c == name) else {
                let rule = format!("is none of the {} classes asked for", folder.classes.len());
                let near = did_you_mean(name, folder.classes.iter().map(String::as_str));
                let cure = near
                    .map_or("give the folders the same classes".to_string(), |c| format!("did you mean {}?", quote(c)));
                return Err(Error::malformed(root, format!("class {}", quote(name)), rule).hint(cure));
            };
            folder.add(class as u32, name)?;
        }
        Ok(folder)
    }

    fn add(&mut self, class: u32, name: &str) -> Result<()> {
        let base = self.root.join(name);
        let mut found = Vec::new();
        walk(&*self.opener, &base, Path::new(""), 0, &mut found)?;
        if found.is_empty() {
            let error = Error::malformed(&self.root, format!("class {}", quote(name)), "holds no .jpg, .jpeg or .png");
            return Err(error.hint("put its images there, or remove the folder"));
        }
        // By folder and then by name, like os.walk and sorted; the order of paths would mix folders and files.
        found.sort();
        self.files.extend(found.into_iter().map(|(dir, name)| (class, Path::new(&dir).join(name).into_boxed_path())));
        Ok(())
    }

    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns the names of the classes, in the order of their ids.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the class of image `i`.
    pub fn class(&self, i: usize) -> u32 {
        self.files[i].0
    }

    /// Returns the file of image `i`.
    pub fn path(&self, i: usize) -> PathBuf {
        let (class, path) = &self.files[i];
        self.root.join(&self.classes[*class as usize]).join(path)
    }

    /// Opens the file of image `i`.
    pub fn open_image(&self, i: usize) -> Result<Opened> {
        Ok(self.opener.open(&self.path(i))?)
    }
}

impl FileList for Folder {
    fn count(&self) -> usize {
        self.len()
    }

    fn file(&self, i: usize) -> (PathBuf, PathBuf) {
        let (class, path) = &self.files[i];
        let name = Path::new(&self.classes[*class as usize]).join(path);
        let at = self.root.join(&name);
        (name, at)
    }
}

const LAYOUT: &str = "images lie as FOLDER/CLASS/NAME.jpg (or .jpeg, .png), a folder a class";

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
            let error =
                Error::unsupported(&full.join(&entry.name), "image", "of this format; .jpg, .jpeg and .png are read");
            return Err(
                error.hint("convert it (ImageMagick: magick mogrify -format png FILE), or move it out of the folder")
            );
        }
    }
    Ok(())
}
