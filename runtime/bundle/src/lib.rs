//! Packs a run or a recipe into one file.
