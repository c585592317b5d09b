//! Saves and restores recording modes: settings that a graph applies to, or stores on, each node that it records.
//!
//! Modes nest: [`Graph::scope`] saves all of them and restores them when the guard is dropped, so that code changes a
//! mode only for its own recording, even if it returns early.

use crate::graph::{Graph, NodeId};
use crate::source_loc::SourceLoc;
use crate::{DType, Result};
use std::ops::{Deref, DerefMut};

/// The modes that apply to the next node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Modes {
    /// The recipe line that the node is attributed to.
    pub loc: SourceLoc,
    /// Records constants: autograd stops at nodes recorded in this mode.
    pub no_grad: bool,
    /// The 16-bit dtype that ops of class [`Amp::Low`](crate::amp::Amp::Low) compute in.
    pub autocast: Option<DType>,
    /// Permits f32 products, and those of their backward pass, to round operands to TF32 (8 bits of exponent, 10 of
    /// mantissa) with sums in f32. A device without such products computes in f32.
    pub tf32: bool,
    /// The node whose backward pass is being recorded.
    pub backward_of: Option<NodeId>,
}

/// A graph whose previous modes are restored when the guard is dropped.
#[derive(Debug)]
pub struct ModeGuard<'a> {
    graph: &'a mut Graph,
    before: Modes,
}

impl Deref for ModeGuard<'_> {
    type Target = Graph;

    fn deref(&self) -> &Graph {
        self.graph
    }
}

impl DerefMut for ModeGuard<'_> {
    fn deref_mut(&mut self) -> &mut Graph {
        self.graph
    }
}

impl Drop for ModeGuard<'_> {
    fn drop(&mut self) {
        self.graph.modes = self.before;
    }
}

impl Graph {
    /// Opens a scope: the graph itself, with its modes restored when the guard is dropped.
    pub fn scope(&mut self) -> ModeGuard<'_> {
        let before = self.modes;
        ModeGuard { graph: self, before }
    }

    /// Records with `no_grad` set to `on`.
    pub fn with_no_grad<T>(&mut self, on: bool, f: impl FnOnce(&mut Graph) -> Result<T>) -> Result<T> {
        let mut g = self.scope();
        g.modes.no_grad = on;
        f(&mut g)
    }

    /// Records with autocast off, since composite ops define their own arithmetic.
    pub fn without_autocast<T>(&mut self, f: impl FnOnce(&mut Graph) -> Result<T>) -> Result<T> {
        let mut g = self.scope();
        g.modes.autocast = None;
        f(&mut g)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn modes_return_after_an_error_too() {
        let mut g = Graph::new();
        g.modes.autocast = Some(DType::BF16);
        let before = g.modes;
        let failed: Result<()> = g.with_no_grad(true, |g| {
            g.without_autocast(|g| {
                g.modes.tf32 = true;
                assert_eq!((g.modes.no_grad, g.modes.autocast), (true, None));
                Err(Error::argument("", "no"))
            })
        });
        assert!(failed.is_err());
        assert_eq!(g.modes, before);
    }
}
