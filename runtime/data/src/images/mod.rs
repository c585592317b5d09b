//! Reads folders of images for training: `FOLDER/CLASS/**/*.{jpg,jpeg,png}` as batches x (N, 3, P, P) u8, y (N) i64.
//!
//! Behaves like torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop, with the same order of files and
//! PIL's arithmetic: [`folder`] lists the files, [`read`] decodes one to RGB, [`crop`] computes the crop, [`resize`] scales
//! it, and [`samples`] is the source of batches, which `crate::source` makes on several threads in advance.
//!
//! Only the list of files is kept in memory. A sample is a function of its file, its number in the stream and the seed, so
//! neither the number of threads nor a resume changes it. Not included: flips and colours, which are maps over the batch on the
//! device.

pub mod crop;
pub mod folder;
pub mod read;
pub mod resize;
pub mod samples;

pub use crop::Crop;
pub use folder::Folder;
pub use samples::Images;

#[cfg(test)]
mod tests;
