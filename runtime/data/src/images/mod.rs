//! Reads images for training, of a folder of classes or of a list, as batches x (N, 3, P, P) u8 and labels.
//!
//! Behaves like torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop, with the same order of files and
//! PIL's arithmetic: `folder` and `list` find the files, `labels` makes columns of their labels, [`read`] decodes one to
//! RGB, [`crop`] computes the crop, [`resize`] scales it, and [`samples`] is the source of batches, which `crate::source` makes on
//! several threads in advance.
//!
//! Only paths and labels are kept in memory. A sample is a function of its file, its number in the stream and the seed, so
//! neither the number of threads nor a resume changes it. Not included: flips and colours, which are maps over the batch on the
//! device.

pub mod crop;
mod files;
mod folder;
mod labels;
mod list;
pub mod read;
pub mod resize;
pub mod samples;
mod webp;

pub use crop::Crop;
pub use files::ImageFiles;
pub use labels::Labels;
pub use list::ListOptions;
pub use samples::Images;

#[cfg(test)]
mod tests;
