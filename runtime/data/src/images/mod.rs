//! Reads folders of images for training: `FOLDER/CLASS/**/*.{jpg,jpeg,png}` as batches x (N, 3, P, P) u8, y (N) i64.
//!
//! What a user of torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop expects, in that order of files and with
//! PIL's arithmetic: [`folder`] lists the files, [`read`] makes RGB of one, [`crop`] says which part of it, [`resize`] scales
//! that, [`prefetch`] does so for whole batches on several threads before they are asked for.
//!
//! Only the list of files is held. A sample is a function of its file, its number in the stream and the seed, so neither the
//! number of threads nor a stop and a resume changes one. Not here: flips and colours, which are a map over the batch on the
//! device.

pub mod crop;
pub mod folder;
pub mod prefetch;
pub mod read;
pub mod resize;

pub use crop::Crop;
pub use folder::Folder;
pub use prefetch::{Item, Reader};

#[cfg(test)]
mod tests;
