//! Collects what the engine reports about itself: compiled plans, cache misses, kernel times, stalls of the host.
//!
//! Messages are queued until they are taken, or passed to a listener immediately, so that a script that never ends, or a plan that
//! cannot run, is reported too. A listener is called in the middle of an evaluation and must not call the engine.

use crate::profile::{HostStalls, Profile};
use crate::show_plan::RecordedStep;
use perilune_core::error::Result;
use std::rc::Rc;

/// The reports of one engine, and their listener.
#[derive(Default)]
pub struct Diagnostics {
    /// Plan cache misses of a warmed-up loop: recipe line and first difference.
    pub notices: Messages,
    /// The text of every compiled plan, if the switch is set.
    pub plans_shown: Messages,
    /// Kernel times, while profiling.
    pub profile: Option<Profile>,
    /// Time that the host waits, while profiling.
    pub host_stalls: Option<HostStalls>,
    /// Shows a step with the text of its kernels, where the engine's device has no texts.
    pub source_display: Option<SourceDisplay>,
    /// Returns a line of a loaded file, by its name and the number from 1: plans show the recipe's lines.
    pub source_line: SourceLine,
}

/// Finds a line of a loaded file.
pub type SourceLine = Option<fn(&str, u32) -> Option<String>>;

/// Called in the middle of an evaluation: it must not call the engine.
pub type SourceDisplay = Rc<dyn Fn(&RecordedStep<'_>) -> Result<String>>;

pub type Listener = Rc<dyn Fn(&str)>;

/// A queue of messages with an optional listener.
#[derive(Default)]
pub struct Messages {
    gathered: Vec<String>,
    listener: Option<Listener>,
}

impl Messages {
    pub fn say(&mut self, text: String) {
        match &self.listener {
            Some(listener) => listener(&text),
            None => self.gathered.push(text),
        }
    }

    /// Takes the messages since the last call, unless a listener received them.
    pub fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.gathered)
    }

    /// Sets the listener of all later messages; without one they are queued again.
    pub fn listen(&mut self, listener: Option<Listener>) {
        self.listener = listener;
    }
}
