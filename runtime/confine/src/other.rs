//! Reports every wall as missing on systems that have none of them.

use crate::walls::{Error, Files, Stand, Wall, Walls};

/// A group of limits; there are none.
#[derive(Debug)]
pub enum Group {}

impl Group {
    /// Always none.
    pub fn create(_name: &str, _bytes: Option<u64>, _tasks: Option<u64>) -> Option<Group> {
        None
    }

    /// Adds a process.
    pub fn add(&self, _process: u32) -> std::io::Result<()> {
        match *self {}
    }
}

/// Does nothing: the system does not end a process with its parent.
pub fn die_with_parent() -> bool {
    true
}

/// Enters nothing.
///
/// # Errors
/// None.
pub fn enter_files(_files: &Files) -> Result<Walls, Error> {
    let mut walls = Walls::default();
    for wall in [Wall::Privileges, Wall::Limits, Wall::Files, Wall::Ports, Wall::Scopes] {
        walls.add(wall, Stand::Missing(format!("{} has no such wall", std::env::consts::OS)));
    }
    Ok(walls)
}

/// Enters nothing.
///
/// # Errors
/// None.
pub fn enter_calls() -> Result<Walls, Error> {
    let mut walls = Walls::default();
    for wall in [Wall::Programs, Wall::Sockets, Wall::Calls] {
        walls.add(wall, Stand::Missing(format!("{} has no such wall", std::env::consts::OS)));
    }
    Ok(walls)
}
