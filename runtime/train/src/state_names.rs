//! Checks the names of a run's States before it trains: a checkpoint holds them by name.

use crate::checkpoints::stored_name;
use crate::error::{Error, Result};
use perilune_lua::{RecipeError, Run};

/// Refuses a run with a State that no checkpoint can hold; the error names its path and line.
pub fn check_state_names(run: &Run) -> Result<()> {
    for (path, place) in run.state_places()? {
        let Err(rule) = perilune_checkpoint::check_name(stored_name(&path)) else { continue };
        let message = format!("a checkpoint cannot hold the State {path:?}: {rule}");
        let hint = "rename it: a State is named by the fields of its module, or by its key in recipe.states";
        let (file, line) = place.map_or((String::new(), None), |(file, line)| (file, Some(line)));
        let mut error = RecipeError::at(&file, line, message, Some(hint.into()));
        error.file = error.file.filter(|file| !file.is_empty());
        return Err(Error::Recipe(Box::new(error)));
    }
    Ok(())
}
