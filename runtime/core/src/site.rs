//! Where in a recipe a node was recorded: interned (file, line) pairs.
//!
//! Sites live beside the arena, not in it: plan keys never see them, so moving a line recompiles nothing.

use rustc_hash::FxHashMap;
use std::collections::HashMap;
use std::sync::Arc;

/// An interned place in a recipe. `Site::NONE` is "no recipe line" (Rust tests, internal work).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Site(pub u32);

impl Site {
    pub const NONE: Site = Site(0);
}

/// The table of sites of one engine.
#[derive(Debug)]
pub struct Sites {
    files: Vec<Arc<str>>,
    places: Vec<(u32, u32)>,
    by_place: FxHashMap<(u32, u32), Site>,
    by_file: HashMap<Arc<str>, u32>,
}

impl Default for Sites {
    fn default() -> Self {
        Sites { files: vec!["".into()], places: vec![(0, 0)], by_place: FxHashMap::default(), by_file: HashMap::new() }
    }
}

impl Sites {
    /// The number of a file name, for `intern`.
    pub fn file(&mut self, name: &str) -> u32 {
        if let Some(&id) = self.by_file.get(name) {
            return id;
        }
        let id = self.files.len() as u32;
        let name: Arc<str> = name.into();
        self.files.push(name.clone());
        self.by_file.insert(name, id);
        id
    }

    pub fn intern(&mut self, file: u32, line: u32) -> Site {
        let next = Site(self.places.len() as u32);
        let places = &mut self.places;
        *self.by_place.entry((file, line)).or_insert_with(|| {
            places.push((file, line));
            next
        })
    }

    /// File and line of a site; `None` for `Site::NONE`.
    pub fn get(&self, site: Site) -> Option<(&str, u32)> {
        let &(file, line) = self.places.get(site.0 as usize)?;
        (file != 0).then(|| (&*self.files[file as usize], line))
    }

    /// `file:line`, or `?` where there is none.
    pub fn show(&self, site: Site) -> String {
        self.get(site).map_or_else(|| "?".into(), |(file, line)| format!("{file}:{line}"))
    }
}
