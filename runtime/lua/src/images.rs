//! Binds folders of images for Lua: a thin wrapper of `perilune_data::images`. `stdlib/data/images.lua` builds datasets on it.

use crate::functions::host;
use crate::reader::{Reader, check_rows};
use crate::recipe_files::{fail, folder, text_arg};
use mlua::{Lua, Table, UserData, UserDataMethods, Value};
use perilune_data::images::{Crop, Folder, Images};
use std::sync::Arc;

const OP: &str = "data.images";

pub(crate) struct FolderData(pub(crate) Arc<Folder>);

impl UserData for FolderData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        methods.add_method("classes", |_, this, ()| Ok(this.0.classes().to_vec()));
        methods.add_method("path", |lua, this, i: usize| {
            check_rows(lua, &[i], this.0.len(), OP, "image")?;
            Ok(this.0.path(i).to_string_lossy().into_owned())
        });
        // The batches of one loader: `seed` for random crops, `resize` for center crops.
        methods.add_method("reader", |lua, this, o: Table| {
            let host = host(lua)?;
            let crop = match o.get::<Option<i64>>("seed")? {
                Some(seed) => Crop::Random {
                    seed: seed as u64,
                    scale: (o.get("scale_low")?, o.get("scale_high")?),
                    ratio: (o.get("ratio_low")?, o.get("ratio_high")?),
                },
                None => Crop::Center { resize: o.get("resize")? },
            };
            let made = Images::new(this.0.clone(), o.get("pixels")?, crop);
            let threads = o.get("threads")?;
            Reader::new(lua, made.map_err(|e| fail(&host, lua, OP, e))?, threads, OP, "image")
        });
    }
}

/// `native.images(path, classes)`: lists the folder's images; `classes` fixes the names in the order of their ids.
pub fn images(lua: &Lua, (path, classes): (Value, Option<Vec<String>>)) -> mlua::Result<mlua::AnyUserData> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, OP, "the path", &path)?;
    let at = folder(&host, lua, OP, &path)?;
    let found = Folder::open(host.policy.clone(), &at, classes.as_deref());
    let found = Arc::new(found.map_err(|e| fail(&host, lua, OP, e))?);
    host.policy.record_folder(&path, &at, found.clone());
    lua.create_userdata(FolderData(found))
}
