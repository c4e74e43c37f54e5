//! What file tables take: memory for the tables, storage for stored ones, and the page tables of a
//! process that has a file mapped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Result;
use vellum_dax::{
    Access, Backend, BackendChoice, DaxFile, Durability, Options, forget_table, store_table,
};

use super::kernel::extents;
use super::large::{Interface, Large, Layout, UNIT};
use super::read_method::{heap_for, table_and_heap};
use super::source_tree::SourceTree;
use crate::{Context, Experiment};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::worker::Weight;

/// The experiment.
pub const DAX_SPACE: Experiment = Experiment {
    name: "dax-space",
    shows: "what file tables take: memory of tables and of processes, storage of stored tables",
    source: "MICRO'22, sections IV.A and V.B, storage overheads",
    run,
};

/// Files of fewer bytes have no stored table: the module would not look for it.
const STORED_FROM: u64 = 32 << 10;

/// What tables of some files take, in bytes.
#[derive(Default)]
struct Space {
    data: u64,
    tables: u64,
    stored_data: u64,
    stored: u64,
    stored_files: usize,
}

impl Space {
    /// Opens the table of each file, and stores and forgets those of files that are long enough.
    fn of(paths: &[PathBuf]) -> Result<Self> {
        let mut space = Self::default();
        for path in paths {
            let backend = BackendChoice::Only(Backend::Table);
            let file = DaxFile::open(path, &Options { backend, ..Options::default() })?;
            let length = file.length()?;
            space.data += length;
            space.tables += file.stat()?.map_or(0, |stat| stat.table_bytes);
            if length >= STORED_FROM {
                space.stored_files += 1;
                space.stored_data += length;
                space.stored += store_table(file.file())?.bytes;
                forget_table(file.file())?;
            }
        }
        Ok(space)
    }

    fn rows(&self, what: &str, outcome: &mut Outcome) {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mut row = |name: &str, value, unit| {
            outcome.rows.push(Row::count(format!("{name}, {what}"), value, unit));
        };
        row("data", mib(self.data), "MiB");
        row("memory of tables", mib(self.tables), "MiB");
        row("memory of tables", share(self.tables, self.data), "% of data");
        row("files with a stored table", self.stored_files as f64, "files");
        row("stored tables", mib(self.stored), "MiB");
        row("stored tables", share(self.stored, self.stored_data), "% of their files' data");
    }
}

fn share(part: u64, of: u64) -> f64 {
    part as f64 * 100.0 / of.max(1) as f64
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let folder = context.make_directory("dax-space")?;
    let mut outcome = Outcome::default();
    if table_and_heap(&folder, &mut outcome)?.is_none() {
        return Ok(outcome);
    }
    let files = context.pick(3_000, 10_000);
    let tree = SourceTree::make(&folder.join("tree"), files, 18, &context.progress)?;
    Space::of(&tree.files()?)?.rows("source tree", &mut outcome);
    let length = context.pick(64 << 20, 256 << 20);
    for layout in [Layout::Row, Layout::Pieces] {
        let path = folder.join("large");
        layout.make(&path, length)?;
        let what = format!("{} MiB {}", length >> 20, layout.name());
        let pieces = f64::from(extents(&File::open(&path)?)?);
        outcome.rows.push(Row::count(format!("pieces, {what}"), pieces, "extents"));
        Space::of(std::slice::from_ref(&path))?.rows(&what, &mut outcome);
        // A new one, which has no tables for its slots.
        let heap = heap_for(Access::ReadWrite, Backend::Table, None)?;
        let interfaces = [
            ("mmap", Interface::Mapped(Backend::Mmap)),
            ("file table", Interface::Mapped(Backend::Table)),
            ("ephemeral", Interface::Heap(&heap)),
        ];
        for (name, interface) in interfaces {
            let own = own_tables(&path, interface)? as f64 / 1024.0;
            let name = format!("own page tables, {name}, {what}");
            outcome.rows.push(Row::count(name, own, "KiB"));
        }
        fs::remove_file(path)?;
    }
    outcome.notes.push(format!(
        "A tree of {files} files as in dax-search, and a large file. The page tables of a process \
         are those by which its own grow, when it has mapped the file and used each page. Files of \
         32 KiB and more have stored tables."
    ));
    Ok(outcome)
}

/// Bytes by which the page tables of this process grow, as it maps a file and uses each page.
fn own_tables(path: &Path, interface: Interface<'_>) -> Result<u64> {
    let large = Large::open(path, interface, Durability::Synced)?;
    let before = Weight::now().tables;
    let view = large.view(Access::Read)?;
    let mut bytes = [0; 8];
    for at in (0..large.file().length()?).step_by(4 * UNIT as usize) {
        view.copy_out(at, &mut bytes)?;
    }
    Ok(Weight::now().tables.saturating_sub(before))
}
