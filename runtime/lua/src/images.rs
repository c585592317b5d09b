//! Binds folders and lists of images for Lua: a thin wrapper of `perilune_data::images`. `stdlib/data/images.lua` builds datasets on it.

use crate::functions::host;
use crate::reader::{Reader, check_rows};
use crate::recipe_files::{fail, folder, text_arg};
use crate::records::{RecordSet, or_fail, scan};
use crate::runtime::Place;
use mlua::{AnyUserData, Lua, Table, UserData, UserDataMethods, Value};
use perilune_data::images::{Crop, ImageFiles, Images, ListOptions};
use perilune_data::records::Dataset;
use std::sync::Arc;

const OP: &str = "data.images";

pub(crate) struct ImageData(pub(crate) Arc<ImageFiles>);

impl UserData for ImageData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.len()));
        // The columns of labels, and the classes of each; nothing where labels are numbers.
        methods.add_method("labels", |_, this, ()| {
            Ok(this.0.labels().iter().map(|labels| labels.name().to_string()).collect::<Vec<_>>())
        });
        methods.add_method("classes", |_, this, name: String| {
            let labels = this.0.labels().iter().find(|labels| labels.name() == name);
            Ok(labels.map(|l| l.classes().to_vec()).filter(|classes| !classes.is_empty()))
        });
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
pub fn images(lua: &Lua, (path, classes): (Value, Option<Vec<String>>)) -> mlua::Result<AnyUserData> {
    let host = host(lua)?;
    let path = text_arg(&host, lua, OP, "the path", &path)?;
    let at = folder(&host, lua, OP, &path)?;
    let found = ImageFiles::of_folder(host.policy.clone(), &at, classes.as_deref());
    let found = Arc::new(found.map_err(|e| fail(&host, lua, OP, e))?);
    host.policy.record_folder(&path, &at, found.clone());
    lua.create_userdata(ImageData(found))
}

/// `native.image_list(records, options)`: opens the images that records name. Options: path, labels as a list of { column, field, classes },
/// folder, threads.
pub fn list(lua: &Lua, (records, o): (AnyUserData, Table)) -> mlua::Result<AnyUserData> {
    let host = host(lua)?;
    let records = records.borrow::<RecordSet>()?.0.clone();
    let mut labels = Vec::new();
    for label in o.get::<Table>("labels")?.sequence_values::<Table>() {
        let label = label?;
        labels.push((label.get("column")?, label.get("field")?, label.get("classes")?));
    }
    let within = match o.get::<Value>("folder")? {
        Value::Nil => None,
        path => Some(folder(&host, lua, OP, &text_arg(&host, lua, OP, "the folder", &path)?)?),
    };
    let recipe = lua.app_data_ref::<Place>().map(|place| place.at("")).unwrap_or_default();
    let options = ListOptions { path: o.get("path")?, labels, folder: within, recipe };
    let scan = scan(lua, OP, o.get("threads")?)?;
    let found = ImageFiles::of_records(host.policy.clone(), records.clone(), &options, &scan);
    let found = Arc::new(or_fail(lua, OP, found)?);
    host.policy.record_folder(&recorded_name(&*records), found.root(), found.clone());
    lua.create_userdata(ImageData(found))
}

/// The name of a list's images in the record of a run. Two lists, or two parts of one, have different names.
fn recorded_name(records: &dyn Dataset) -> String {
    let first = records.origins(0).ok().and_then(|origins| origins.into_iter().next());
    let file = first.and_then(|origin| Some(origin.file.file_name()?.to_string_lossy().into_owned()));
    let hash: String = records.fingerprint().iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("images of {} {hash}", file.unwrap_or_default())
}
