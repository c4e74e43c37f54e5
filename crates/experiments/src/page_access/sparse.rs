//! Page tables of pages that lie far apart.

#![allow(unsafe_code)]

use anyhow::Result;
use vellum_pool::BackendChoice;
use vellum_pool::device::{PageRange, Surface};
use vellum_vm::Entry;

use super::memory::Memory;

/// Bytes of page tables, per page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageTables {
    /// While the pages are in memory.
    pub full: f64,
    /// After all of them were released.
    pub empty: f64,
}

/// Populates every `every`-th page of a range and releases them again.
///
/// # Errors
/// No memory.
pub fn page_tables(range: u64, every: u64) -> Result<PageTables> {
    let before = Memory::now()?;
    let surface = Surface::reserve(range, BackendChoice::Auto)?;
    let starts = (0..range).step_by(every as usize);
    let mut entries: Vec<Entry> =
        starts.map(|start| Entry::new(PageRange { start, count: 1 })).collect();
    let failed = surface.populate(&mut entries);
    anyhow::ensure!(failed == 0, "{failed} of {} pages could not be populated", entries.len());
    let full = Memory::now()?.since(before).tables;
    // SAFETY: no code reads the surface, before or after.
    unsafe { surface.release(&mut entries) };
    let empty = Memory::now()?.since(before).tables;
    let each = |bytes: u64| bytes as f64 / entries.len() as f64;
    Ok(PageTables { full: each(full), empty: each(empty) })
}
