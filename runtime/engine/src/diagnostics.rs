//! Collects what the engine reports about itself: compiled plans, cache misses, kernel times, stalls of the host.
//!
//! Messages are queued until they are taken, or passed to a listener immediately, so that a script that never ends, or a plan that
//! cannot run, is reported too. A listener is called in the middle of an evaluation and must not call the engine.

use crate::profile::{HostStalls, Profile};
use perilune_plan::Backend;
use std::rc::Rc;
use std::sync::Arc;

/// The reports of one engine, and their listener.
#[derive(Default)]
pub struct Diagnostics {
    /// Plan cache misses of a warmed-up loop: recipe line and first difference.
    pub notices: Messages,
    /// The text of every plan compiled, if the switch asks for it.
    pub plans_shown: Messages,
    /// Kernel times, while profiling.
    pub profile: Option<Profile>,
    /// Time that the host waits, while profiling.
    pub host_stalls: Option<HostStalls>,
    /// A device that has kernel texts, to show them where the computing device has none.
    pub paper: Option<Arc<dyn Backend>>,
}

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
