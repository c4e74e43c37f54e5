//! The file that a command is about.

use std::path::Path;

use vellum_dax::{DaxFile, Options};

use crate::error::Failure;

/// Opens a file, with a table if it can have one.
pub fn open(path: &Path) -> Result<DaxFile, Failure> {
    DaxFile::open(path, &Options::default())
        .map_err(|error| Failure::message(format!("{}: {error}", path.display())))
}
