//! Lets several tokenizers of the `tokenizers` crate share one model.
//!
//! Whether special tokens in a text are parsed is a setting of the crate's tokenizer, not of a call. So there is a tokenizer for
//! each setting; vocabulary and merges are stored once, in the tokenizer that was read.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::models::TrainerWrapper;
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result, Token, TokenizerImpl,
};

#[derive(Clone, Debug)]
pub(crate) struct SharedModel(pub Arc<tokenizers::Tokenizer>);

/// A tokenizer of the crate over a shared model.
pub(crate) type Shared =
    TokenizerImpl<SharedModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> Result<Vec<Token>> {
        self.0.get_model().tokenize(text)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.get_model().token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.get_model().id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_model().get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_model().get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.get_model().save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.0.get_model().get_trainer()
    }
}
