//! Keeps the text of every file that was loaded, by the name that its chunk has in messages.
//!
//! Errors, plans, help and breakpoints show source lines. They take them from here and open no file: a chunk's name comes from
//! the recipe, and what it names on the disk may be another file by now. The texts belong to the thread that runs Lua, since an
//! mlua error that surfaces carries no runtime; of two runtimes on it, the one that loaded a name last has it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Texts by name, shared by clones.
pub type Texts = HashMap<String, Rc<str>>;

thread_local!(static TEXTS: RefCell<Texts> = RefCell::default());

/// Keeps the text of a chunk named `@file`. Chunks of other names have no file.
pub fn keep(chunk: &str, text: &str) {
    if let Some(file) = chunk.strip_prefix('@') {
        TEXTS.with_borrow_mut(|texts| texts.insert(file.to_string(), text.into()));
    }
}

/// The text of a file that was loaded.
pub fn text(file: &str) -> Option<Rc<str>> {
    TEXTS.with_borrow(|texts| texts.get(file).cloned())
}

/// A line, from 1, of a file that was loaded.
pub fn line(file: &str, line: u32) -> Option<String> {
    let text = text(file)?;
    text.lines().nth(line.checked_sub(1)? as usize).map(|l| l.trim_end().to_string())
}

/// All texts, to come back to.
pub fn all() -> Texts {
    TEXTS.with_borrow(Texts::clone)
}

/// Makes these the texts again.
pub fn restore(texts: Texts) {
    TEXTS.set(texts);
}
