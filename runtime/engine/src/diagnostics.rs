//! What the engine has to say on its own: plans that a switch asks for, and why a warmed-up loop needed a new one.
//!
//! It gathers until somebody takes it, or goes at once to whoever listens: a script that never ends, or a plan that cannot be
//! run, is heard of too. A listener is called in the middle of an evaluation and must not ask the engine anything.

use std::rc::Rc;

pub type Listener = Rc<dyn Fn(&str)>;

#[derive(Default)]
pub struct Diagnostics {
    gathered: Vec<String>,
    listener: Option<Listener>,
}

impl Diagnostics {
    pub fn say(&mut self, text: String) {
        match &self.listener {
            Some(listener) => listener(&text),
            None => self.gathered.push(text),
        }
    }

    /// What was said since the last time, unless a listener heard it.
    pub fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.gathered)
    }

    /// Who hears of everything from now on; without one it gathers again.
    pub fn listen(&mut self, listener: Option<Listener>) {
        self.listener = listener;
    }
}
