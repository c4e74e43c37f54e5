//! The everyday commands, one file each.

pub mod aquila;
pub mod backup;
pub mod bench;
pub mod check;
pub mod compact;
pub mod dax;
pub mod dump;
mod dump_format;
pub mod export;
pub mod get;
pub mod import;
pub mod load;
pub mod log;
pub mod manuals;
pub mod morsel;
pub mod morseld;
pub mod probe;
pub mod put;
pub mod rename;
pub mod resize_pool;
pub mod restore;
pub mod rm;
pub mod salvage;
pub mod scan;
pub mod sim;
pub mod stat;
pub mod trees;
