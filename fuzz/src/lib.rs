//! The entry functions of the fuzz targets.
#![allow(clippy::unwrap_used)]

pub mod backups;
pub mod entry;
pub mod log;
pub mod source;
