//! Defines the walls, what is known of each, and the files that a confined process may open.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The files that a confined process may open. A path that is not there is skipped and reported, and the others hold.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Files {
    /// Files, and directories with everything beneath them, to read.
    pub read: Vec<PathBuf>,
    /// Directories whose names may be listed, with those of the directories beneath them. Their files stay closed.
    pub list: Vec<PathBuf>,
    /// Files to write and directories in which files may be created, written, renamed and removed. They are read too.
    pub write: Vec<PathBuf>,
    /// Device files to read, write and control.
    pub devices: Vec<PathBuf>,
    /// A file that exists and that no path above contains. Opening it is the forbidden act of the probe.
    pub probe: Option<PathBuf>,
    /// Walls that are left out, for tests of the others.
    #[serde(default)]
    pub without: Vec<Wall>,
}

/// A wall of the system.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Wall {
    /// Files outside the granted ones cannot be opened, created or removed (Landlock).
    Files,
    /// No TCP port can be bound or connected to (Landlock, from Linux 6.7).
    Ports,
    /// Signals to other processes and abstract sockets are refused (Landlock, from Linux 6.12).
    Scopes,
    /// No program can be started (seccomp).
    Programs,
    /// No socket can be made (seccomp).
    Sockets,
    /// Calls that change or observe the system or other processes are refused (seccomp).
    Calls,
    /// No program gains privileges, and those of root are given up.
    Privileges,
    /// No core dump, and a bounded number of open files (rlimits).
    Limits,
}

impl Wall {
    /// All walls, in the order in which they are entered.
    pub const ALL: [Wall; 8] = [
        Wall::Privileges,
        Wall::Limits,
        Wall::Files,
        Wall::Ports,
        Wall::Scopes,
        Wall::Programs,
        Wall::Sockets,
        Wall::Calls,
    ];

    /// What the wall keeps from the recipe, for messages.
    pub fn keeps(self) -> &'static str {
        match self {
            Wall::Files => "files outside the granted ones",
            Wall::Ports => "TCP ports",
            Wall::Scopes => "signals to other processes",
            Wall::Programs => "starting programs",
            Wall::Sockets => "sockets",
            Wall::Calls => "system calls that a recipe does not need",
            Wall::Privileges => "new privileges",
            Wall::Limits => "core dumps and open files without end",
        }
    }
}

/// What is known of a wall.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Stand {
    /// The forbidden act was attempted and refused.
    Stands,
    /// It was not refused, or the kernel has no such wall: the reason.
    Missing(String),
}

/// Every wall that was entered, with what its probe found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Walls {
    found: Vec<(Wall, Stand)>,
    /// Granted paths that are not there or cannot be named to the kernel, with the reason.
    pub skipped: Vec<(PathBuf, String)>,
}

impl Walls {
    pub(crate) fn add(&mut self, wall: Wall, stand: Stand) {
        self.found.push((wall, stand));
    }

    /// Adds the walls of another part.
    pub fn extend(&mut self, other: Walls) {
        self.found.extend(other.found);
        self.skipped.extend(other.skipped);
    }

    /// What is known of a wall; a wall that was not entered is missing.
    pub fn of(&self, wall: Wall) -> Stand {
        let found = self.found.iter().find(|(known, _)| *known == wall);
        found.map_or(Stand::Missing("not entered".into()), |(_, stand)| stand.clone())
    }

    pub fn stands(&self, wall: Wall) -> bool {
        self.of(wall) == Stand::Stands
    }

    /// The walls without which something is open that should be closed, with the reason. Landlock's rules for ports and signals are
    /// second walls: seccomp refuses every socket, and signals to other processes.
    pub fn missing(&self) -> Vec<(Wall, String)> {
        let second = |wall: Wall| match wall {
            Wall::Ports => self.stands(Wall::Sockets),
            Wall::Scopes => self.stands(Wall::Calls),
            _ => false,
        };
        let all = Wall::ALL.into_iter().filter(|wall| !second(*wall));
        all.filter_map(|wall| match self.of(wall) {
            Stand::Stands => None,
            Stand::Missing(why) => Some((wall, why)),
        })
        .collect()
    }
}

impl fmt::Display for Walls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, wall) in Wall::ALL.into_iter().enumerate() {
            let text = match self.of(wall) {
                Stand::Stands => "stands".to_string(),
                Stand::Missing(why) => format!("missing: {why}"),
            };
            write!(f, "{}{}: {text}", if k > 0 { "\n" } else { "" }, wall.keeps())?;
        }
        Ok(())
    }
}

/// A wall that could not be built. A kernel without a wall is no error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot confine this process: {0}")]
    Built(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_walls_are_missed_only_with_the_first() {
        let mut walls = Walls::default();
        for wall in Wall::ALL.into_iter().filter(|wall| !matches!(wall, Wall::Ports | Wall::Scopes)) {
            walls.add(wall, Stand::Stands);
        }
        assert!(walls.missing().is_empty(), "{walls}");
        let mut open = Walls::default();
        for wall in Wall::ALL.into_iter().filter(|wall| !matches!(wall, Wall::Ports | Wall::Sockets)) {
            open.add(wall, Stand::Stands);
        }
        let missing: Vec<Wall> = open.missing().into_iter().map(|(wall, _)| wall).collect();
        assert_eq!(missing, [Wall::Ports, Wall::Sockets]);
    }
}
