//! Binds token corpora for Lua: a thin wrapper of `perilune_data::tokens`. `stdlib/data/text.lua` builds windows on it.

use crate::functions::host;
use crate::reader::Reader;
use crate::recipe_files::{fail, input, matching, text_arg};
use crate::tensor::Tensor;
use mlua::{AnyUserData, Lua, Table, UserData, UserDataMethods, Value};
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::tokens::{TokenWindows, Tokens};
use perilune_policy::FileList;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const OP: &str = "data.token_files";

pub(crate) struct TokensData(pub(crate) Arc<Tokens>);

/// The files of a corpus, for the record of a run: names and sizes.
#[derive(Debug)]
pub(crate) struct Files(pub(crate) Vec<PathBuf>);

impl FileList for Files {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn file(&self, i: usize) -> (PathBuf, PathBuf) {
        let path = self.0[i].clone();
        (path.file_name().map_or_else(|| path.clone(), PathBuf::from), path)
    }
}

impl UserData for TokensData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        // The ids first .. first + count - 1, as a tensor (count) i32.
        methods.add_method("ids", |lua, this, (first, count): (u64, u64)| -> mlua::Result<Tensor> {
            let (host, mut bytes) = (host(lua)?, Vec::new());
            let read = this.0.read(first..first.saturating_add(count), &mut bytes);
            read.map_err(|e| fail(&host, lua, "text:ids", e))?;
            input(&host, lua, HostTensor::new(DType::I32, Shape::of(&[count as usize]), bytes))
        });
        // The batches of one loader: windows of `span` tokens of the part [low, high).
        methods.add_method("reader", |lua, this, (low, high, span): (u64, u64, usize)| {
            let host = host(lua)?;
            let windows = TokenWindows::new(this.0.clone(), low..high, span);
            let windows = windows.map_err(|e| fail(&host, lua, "text:windows", e))?;
            Reader::new(lua, windows, None, "text:windows", "window")
        });
    }
}

/// `native.token_files(paths)`: opens a corpus of files; a path may be a pattern.
pub fn files(lua: &Lua, paths: Table) -> mlua::Result<AnyUserData> {
    let host = host(lua)?;
    let mut all = Vec::new();
    let mut names = Vec::new();
    for path in paths.sequence_values::<Value>() {
        let name = text_arg(&host, lua, OP, "a path", &path?)?;
        all.extend(matching(&host, lua, OP, &name)?);
        names.push(name);
    }
    let tokens = Tokens::open(host.policy.clone(), &all, &mut |file| {
        if all.len() == 1 {
            host.policy.record_file(&names[0], file);
        }
    });
    let tokens = tokens.map_err(|e| fail(&host, lua, OP, e))?;
    if all.len() > 1 {
        let folder = all[0].parent().unwrap_or(Path::new(".")).to_path_buf();
        host.policy.record_folder(&names.join(", "), &folder, Arc::new(Files(all)));
    }
    lua.create_userdata(TokensData(Arc::new(tokens)))
}

/// Makes a corpus in host memory of the ids that `data.text` has encoded.
pub fn list(lua: &Lua, ids: HostTensor) -> mlua::Result<AnyUserData> {
    let host = host(lua)?;
    let tokens = Tokens::in_memory(ids).map_err(|e| fail(&host, lua, "data.text", e))?;
    lua.create_userdata(TokensData(Arc::new(tokens)))
}
