//! Interns the recipe lines at which nodes are recorded, as (file, line) pairs.
//!
//! Source locations are stored beside the arena, not in it: plan keys do not contain them, so moving a line recompiles
//! nothing.

use rustc_hash::FxHashMap;
use std::collections::HashMap;
use std::sync::Arc;

/// An interned recipe line. `SourceLoc::NONE` means no line (Rust tests, internal work).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SourceLoc(pub u32);

impl SourceLoc {
    pub const NONE: SourceLoc = SourceLoc(0);
}

/// The table of source locations of one engine.
#[derive(Debug)]
pub struct SourceMap {
    files: Vec<Arc<str>>,
    places: Vec<(u32, u32)>,
    by_place: FxHashMap<(u32, u32), SourceLoc>,
    by_file: HashMap<Arc<str>, u32>,
}

impl Default for SourceMap {
    fn default() -> Self {
        SourceMap {
            files: vec!["".into()],
            places: vec![(0, 0)],
            by_place: FxHashMap::default(),
            by_file: HashMap::new(),
        }
    }
}

impl SourceMap {
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

    pub fn intern(&mut self, file: u32, line: u32) -> SourceLoc {
        let next = SourceLoc(self.places.len() as u32);
        let places = &mut self.places;
        *self.by_place.entry((file, line)).or_insert_with(|| {
            places.push((file, line));
            next
        })
    }

    /// File and line of a location; `None` for `SourceLoc::NONE`.
    pub fn get(&self, loc: SourceLoc) -> Option<(&str, u32)> {
        let &(file, line) = self.places.get(loc.0 as usize)?;
        (file != 0).then(|| (&*self.files[file as usize], line))
    }

    /// Formats as `file:line`, or `?` if there is no line.
    pub fn show(&self, loc: SourceLoc) -> String {
        self.get(loc).map_or_else(|| "?".into(), |(file, line)| format!("{file}:{line}"))
    }
}
