//! Binds folders of images for Lua: a thin wrapper of `perilune_data::images`. `stdlib/data/images.lua` makes a dataset of it.

use crate::data_bindings::{fail, folder, text_arg, upload};
use crate::functions::host;
use mlua::{Lua, Table, UserData, UserDataMethods, Value};
use perilune_data::images::{Crop, Folder, Item, Reader};
use std::sync::Arc;

const OP: &str = "data.images";

struct FolderData(Arc<Folder>);

impl UserData for FolderData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        methods.add_method("classes", |_, this, ()| Ok(this.0.classes().to_vec()));
        methods.add_method("path", |_, this, i: usize| Ok(this.0.path(i).to_string_lossy().into_owned()));
        // The batches of one loader: `seed` for random crops, `resize` for those of the middle.
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
            let made = Reader::new(this.0.clone(), o.get("pixels")?, crop, o.get("threads")?);
            made.map(ReaderData).map_err(|e| fail(&host, lua, OP, e))
        });
    }
}

struct ReaderData(Reader);

fn items(rows: &[usize], first: u64) -> Vec<Item> {
    (first..).zip(rows).map(|(sample, &image)| Item { image, sample }).collect()
}

impl UserData for ReaderData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method_mut("batch", |lua, this, (rows, first): (Vec<usize>, u64)| {
            let host = host(lua)?;
            let (x, y) = this.0.batch(&items(&rows, first)).map_err(|e| fail(&host, lua, OP, e))?;
            Ok((upload(&host, lua, &x)?, upload(&host, lua, &y)?))
        });
        methods.add_method_mut("prefetch", |_, this, (rows, first): (Vec<usize>, u64)| {
            this.0.expect(&items(&rows, first));
            Ok(())
        });
    }
}

/// `native.images(path, classes)`: the folder's images, listed; with `classes` these are the names and their ids.
pub fn images(lua: &Lua, (path, classes): (Value, Option<Vec<String>>)) -> mlua::Result<mlua::AnyUserData> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, OP, "the path", &path)?;
    let found = Folder::open(host.policy.clone(), &folder(&host, lua, OP, &path)?, classes.as_deref());
    lua.create_userdata(FolderData(Arc::new(found.map_err(|e| fail(&host, lua, OP, e))?)))
}
