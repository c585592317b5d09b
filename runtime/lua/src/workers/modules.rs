//! Finds the files that a recipe has required, for `require` in workers, which open no files.

use crate::runtime::Place;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The texts of the files that a recipe had required when a function was copied.
#[derive(Clone, Default)]
pub struct Modules(Arc<Place>);

impl Modules {
    pub fn of(lua: &mlua::Lua) -> Modules {
        Modules(Arc::new(lua.app_data_ref::<Place>().map(|place| place.clone()).unwrap_or_default()))
    }

    /// Files and texts, in the order in which they were required.
    pub fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.0.required.iter().map(|(file, text)| (file.as_path(), text.as_str()))
    }

    /// Returns the file and the text of a module.
    pub fn find(&self, name: &str) -> Option<(&Path, &str)> {
        let tail: PathBuf = name.split('.').collect();
        let (file, folder) = (tail.with_extension("lua"), tail.join("init.lua"));
        let tries = [self.0.at(&file), self.0.at(&folder), file, folder];
        tries.iter().find_map(|path| self.texts().find(|(file, _)| *file == path))
    }
}
