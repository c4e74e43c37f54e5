//! `libvellum`: stores, Morsels, file tables and Aquila's caches for C. `include/vellum.h`,
//! `include/vellum_morsel.h`, `include/vellum_dax.h` and `include/vellum_aquila.h` document the
//! functions.
//!
//! Handles are references or boxes, which C sees as pointers: NULL is `None`, and the header states
//! the caller's contract for all other values. Only `raw` takes raw pointers. Every function goes
//! through `call`, which stops panics.

mod aquila;
mod call;
mod commit;
mod create;
mod cursor;
mod daemon;
mod dax;
mod descriptors;
mod load;
mod maintenance;
mod mapping;
mod morsel;
mod range;
mod raw;
mod snapshot;
mod store;
mod transaction;
mod types;
mod values;
mod view;
