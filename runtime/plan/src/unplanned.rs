//! Defines the reason why a step has no plan.

use crate::ir::{Origin, Program};
use perilune_core::error::Error;

/// An error of the planner, with what it was found at.
pub(crate) struct Unplanned {
    pub error: Error,
    /// The recorded node at fault, if one is.
    pub origin: Origin,
    /// If even the plan that needs the least memory exceeds the budget: that plan.
    pub least: Option<Box<Program>>,
}

impl From<Error> for Unplanned {
    fn from(error: Error) -> Unplanned {
        Unplanned { error, origin: Origin::NONE, least: None }
    }
}
