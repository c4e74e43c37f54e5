//! The files of a directory in a store, as `import` and `demo` keep them.
//!
//! Two trees: `meta` holds a record for each path, `content` the bytes in chunks.

pub mod compare;
pub mod file_store;
pub mod importer;
pub mod listing;
pub mod record;
pub mod workers;
