//! Encodes text as token ids: tokenizers, chat templates with loss masks, token files.
//!
//! A [`Tokenizer`] reads Hugging Face's `tokenizer.json`, or numbers bytes or characters. [`chat`] renders conversations by the
//! template of a model and marks the tokens that a loss trains. [`train`] makes a vocabulary of texts,
//! and [`token_files`] encodes a corpus to files that `perilune_data::tokens` reads.
//!
//! Files are untrusted: sizes are limited, unknown parts are named, and no file makes the program panic. Files are opened by
//! handles of `perilune_policy`. Not included: Lua, tensors, and the graph.
#![forbid(unsafe_code)]

mod byte_level;
pub mod chat;
mod components;
mod encoding;
pub mod inputs;
mod shared_model;
mod special;
pub mod token_files;
mod tokenizer;
pub mod train;

pub use encoding::{Encode, Encoding};
pub use special::Config;
pub use tokenizer::Tokenizer;
