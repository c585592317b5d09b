//! Reads what the loaders of a recipe have, for checks of the data: parts of token corpora, and rows of tensors in memory.

use crate::data_bindings::VocabularyData;
use crate::run::Run;
use crate::runtime::Failed;
use crate::table;
use crate::tensor::Tensor;
use crate::tokens::TokensData;
use mlua::{AnyUserData, Function, Lua, ObjectLike, Table};
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::text::Vocabulary;
use perilune_data::tokens::Tokens;
use std::ops::Range;
use std::sync::Arc;

/// The part of a token corpus behind a loader.
#[derive(Clone, Debug)]
pub struct CheckedCorpus {
    pub tokens: Arc<Tokens>,
    pub part: Range<u64>,
    /// The number in the text of the first of `tokens`: not 0 for a copy of a part.
    pub first: u64,
    /// Tokens of a window.
    pub context: u64,
    /// Ids are below it, where the recipe states it.
    pub vocabulary: Option<u64>,
    /// What decodes ids, if they are characters.
    pub characters: Option<Vocabulary>,
}

/// The rows of tensors in memory behind a loader, before its maps.
pub struct CheckedRows {
    /// The names of the tensors.
    pub names: Vec<String>,
    /// Rows of the view.
    pub len: u64,
    /// The rows of the view, as rows of the tensors; all when absent.
    pub index: Option<Vec<u64>>,
    /// Numbers in a row of all tensors.
    pub numbers: u64,
    lua: Lua,
    read: Function,
}

/// What the loader of a split has for checks of the data.
pub enum Checked<T> {
    Some(T),
    /// It has such data, which cannot be checked.
    Not(String),
    None,
}

impl CheckedRows {
    /// Copies rows of the tensors to the host: a tensor of each name, whose first dim counts the rows.
    ///
    /// # Errors
    /// The device fails, or an interrupt.
    pub fn read(&self, rows: &[u64]) -> Result<Vec<HostTensor>, Failed> {
        let list = self.lua.create_sequence_from(rows.iter().map(|row| *row as i64))?;
        let tensors: Vec<AnyUserData> = self.read.call(list)?;
        tensors.iter().map(|t| copied(&self.lua, t)).collect()
    }
}

/// Copies a tensor to the host, and releases it.
fn copied(lua: &Lua, tensor: &AnyUserData) -> Result<HostTensor, Failed> {
    let out = table::read(lua, &*tensor.borrow::<Tensor>()?)?;
    tensor.call_method::<()>("free", ())?;
    Ok(out)
}

impl Run {
    /// Returns the part of a corpus behind the loader of a split. Ids on a device are copied to the host, at most `most` tokens.
    ///
    /// # Errors
    /// The device fails, or an interrupt.
    pub fn corpus(&self, split: &str, most: u64) -> Result<Checked<CheckedCorpus>, Failed> {
        let Some(loader) = self.loader(split) else { return Ok(Checked::None) };
        let Some(corpus) = loader.get::<Option<Table>>("corpus")? else { return Ok(Checked::None) };
        let part = corpus.get::<u64>("low")?..corpus.get::<u64>("high")?;
        let context = loader.get::<Option<u64>>("context")?.unwrap_or(1);
        let vocabulary = corpus.get::<Option<u64>>("vocabulary")?;
        let characters = match corpus.get::<Option<AnyUserData>>("vocab")? {
            Some(vocab) => vocab.borrow::<VocabularyData>().ok().map(|vocab| vocab.0.clone()),
            None => None,
        };
        if let Some(tokens) = corpus.get::<Option<AnyUserData>>("tokens")? {
            let tokens = tokens.borrow::<TokensData>()?.0.clone();
            return Ok(Checked::Some(CheckedCorpus { tokens, part, first: 0, context, vocabulary, characters }));
        }
        if self.shares_devices() {
            return Ok(Checked::Not("its token ids are on a mesh of several processes".into()));
        }
        let len = part.end.saturating_sub(part.start);
        if len > most {
            return Ok(Checked::Not(format!("its {len} token ids are on the device, and at most {most} are copied")));
        }
        let tokens = Arc::new(self.copied_ids(&corpus, len)?);
        let first = part.start;
        Ok(Checked::Some(CheckedCorpus { tokens, part: 0..len, first, context, vocabulary, characters }))
    }

    /// Whether other processes have parts of the tensors. All would have to copy the same, and a check may end at a time limit.
    fn shares_devices(&self) -> bool {
        self.host.engine.borrow().backend().processes() > 1
    }

    /// Copies the ids of a part from the device, in pieces.
    fn copied_ids(&self, corpus: &Table, len: u64) -> Result<Tokens, Failed> {
        let (copy, piece): (Function, u64) = (corpus.get("copy")?, corpus.get("piece")?);
        let mut bytes: Vec<u8> = Vec::with_capacity(4 * len as usize);
        let mut at = 0;
        while at < len {
            // All pieces have one size: the last one overlaps the one before it.
            let start = at.min(len.saturating_sub(piece));
            let ids = copied(&self.lua, &copy.call::<AnyUserData>(start as i64)?)?;
            let new = ids.to_i64().into_iter().skip((at - start) as usize);
            // An id that is none stays none.
            new.for_each(|id| bytes.extend(i32::try_from(id).unwrap_or(-1).to_le_bytes()));
            at = start + piece.max(1);
        }
        let ids = HostTensor::new(DType::I32, Shape::of(&[bytes.len() / 4]), bytes);
        Tokens::in_memory(ids).map_err(|e| Failed::from(mlua::Error::external(e)))
    }

    /// Returns the rows of tensors in memory behind the loader of a split.
    ///
    /// # Errors
    /// A loader whose fields a recipe has replaced.
    pub fn rows(&self, split: &str) -> Result<Checked<CheckedRows>, Failed> {
        let Some(loader) = self.loader(split) else { return Ok(Checked::None) };
        let Some(rows) = loader.get::<Option<Table>>("rows")? else { return Ok(Checked::None) };
        if self.shares_devices() {
            return Ok(Checked::Not("its tensors are on a mesh of several processes".into()));
        }
        Ok(Checked::Some(CheckedRows {
            names: rows.get("names")?,
            len: rows.get("n")?,
            index: rows.get("index")?,
            numbers: rows.get("numbers")?,
            lua: self.lua.clone(),
            read: rows.get("read")?,
        }))
    }
}
