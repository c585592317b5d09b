//! Binds folders of images for Lua: a thin wrapper of `perilune_data::images`. `stdlib/data/images.lua` builds datasets on it.

use crate::errors;
use crate::functions::host;
use crate::recipe_files::{fail, folder, input, text_arg};
use mlua::{Lua, Table, UserData, UserDataMethods, Value};
use perilune_data::images::{Crop, Folder, Images};
use perilune_data::source::{Prefetcher, Samples};
use std::sync::Arc;

const OP: &str = "data.images";

struct FolderData(Arc<Folder>);

impl UserData for FolderData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        methods.add_method("classes", |_, this, ()| Ok(this.0.classes().to_vec()));
        methods.add_method("path", |lua, this, i: usize| {
            check_rows(lua, &this.0, &[i])?;
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
            let made = made.and_then(|images| Prefetcher::new(images, threads));
            let made = made.map(|reader| reader.interrupted_by(host.interrupt.clone()));
            made.map(|reader| ReaderData(reader, this.0.clone())).map_err(|e| fail(&host, lua, OP, e))
        });
    }
}

/// Raises for an image number beyond the folder.
fn check_rows(lua: &Lua, folder: &Folder, rows: &[usize]) -> mlua::Result<()> {
    let Some(beyond) = rows.iter().find(|i| **i >= folder.len()) else { return Ok(()) };
    let message =
        format!("image {beyond} of {}: images count from 0 to {}", folder.len(), folder.len().saturating_sub(1));
    Err(errors::argument(&host(lua)?, lua, OP, message, None))
}

struct ReaderData(Prefetcher<Images>, Arc<Folder>);

impl UserData for ReaderData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method_mut("batch", |lua, this, (rows, first): (Vec<usize>, u64)| {
            let host = host(lua)?;
            check_rows(lua, &this.1, &rows)?;
            let batch = this.0.take(&Samples { first, rows }).map_err(|e| fail(&host, lua, OP, e))?;
            let columns = batch.columns.into_iter().map(|column| input(&host, lua, column));
            columns.collect::<mlua::Result<mlua::Variadic<_>>>()
        });
        methods.add_method_mut("prefetch", |lua, this, (rows, first): (Vec<usize>, u64)| {
            check_rows(lua, &this.1, &rows)?;
            this.0.announce(&Samples { first, rows });
            Ok(())
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
